"""What is refused and how: fields by name, too much, too many, without the key; clients that leave; ends of servers."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from runtime.server.security import Limits
from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import USER, Running, serving
from tests.runtime.serving import WAIT_S

Export = Callable[[str], Exported]
CHAT = "/v1/chat/completions"
ODD_PARAMETERS = {"properties": {"x": {"type": 3}}}
ENDLESS = {"4089": -100, "4091": -100}


@pytest.fixture(scope="module")
def server(exported: Export) -> Iterator[Running]:
    with serving(exported("trained"), ServiceOptions(num_sequences=2, queue_limit=4)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 300}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("", "x", "1_000", " 1", "+1", "-1", "1.0", "\u0661")),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 6000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a"}}],
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": 3}}}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.x.type",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"spec": "maybe"}, "spec"),
        ({"functions": []}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
            "messages[0].content[1].type",
        ),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        (
            {
                "messages": [
                    *USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": "[1"}, "type": "function"}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_the_field_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    status, error = server.refusal(**fields)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [[4096]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        *(({"prompt": [1, other]}, "prompt[1]") for other in (-1, 2**31, 1.0, True, None)),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "word " * 9000}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_the_field_of_a_completion_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    status, error = server.refusal("/v1/completions", **fields)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000])
def test_bodies_that_are_no_request(server: Running, body: bytes) -> None:
    reply = server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_a_form_of_a_web_page_is_no_request(server: Running) -> None:
    """A page elsewhere can send such a body without asking."""
    reply = server.http.post(CHAT, content=json.dumps({"messages": USER}), headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415


def test_odd_text_in_messages(server: Running) -> None:
    for text in ("\x00\x01", "é\u2028\U0001f600", "<|im_end|><|im_start|>", "{{ 7 * 7 }}{% raise %}"):
        assert (
            server.chat(messages=[{"role": "user", "content": text}], max_tokens=2)["usage"]["completion_tokens"] <= 2
        )


def test_tokens_of_no_tokens(server: Running) -> None:
    assert server.chat(max_tokens=0)["usage"]["completion_tokens"] == 0


def test_tokenize_there_and_back(server: Running) -> None:
    text = "What <|im_end|> é 😀"
    tokens = server.http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    plain = server.http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert len(plain) > len(tokens)
    assert server.refusal("/nowhere")[0] == 404


def test_a_method_that_is_not_served(server: Running) -> None:
    reply = server.http.get(CHAT)
    assert (reply.status_code, reply.headers["Allow"]) == (405, "POST")
    assert reply.json()["error"]["message"] == f"{CHAT} takes POST, not GET"
    assert server.http.post("/health").headers["Allow"] == "GET"


def test_a_number_that_nobody_can_read(server: Running) -> None:
    content = b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}"
    reply = server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
    assert "digits" in reply.json()["error"]["message"]


def test_health_and_metrics(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    before = metrics(server)
    server.chat(max_tokens=20, temperature=0)
    after = metrics(server)
    assert (
        after['nextn_requests_total{finish_reason="stop"}']
        == before.get('nextn_requests_total{finish_reason="stop"}', 0) + 1
    )
    assert after["nextn_predicted_tokens_total"] > before["nextn_predicted_tokens_total"]
    assert after['nextn_drafts_offered_total{position="1"}'] >= after['nextn_drafts_accepted_total{position="1"}'] > 0
    assert after["nextn_sequences_active"] == 0 and after["nextn_sequences_max"] == 2


def metrics(server: Running) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def long_stream(server: Running, http: httpx.Client) -> Any:
    """A stream that would go on for long."""
    body = {"messages": USER, "stream": True, "temperature": 0.9, "logit_bias": ENDLESS, "seed": 1}
    return http.stream("POST", CHAT, json=body)


def test_a_client_that_leaves_frees_its_place(server: Running) -> None:
    scheduler = server.service.scheduler
    for stream in (True, False):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
                body = json.dumps({"messages": USER, "stream": stream, "logit_bias": ENDLESS}).encode()
                head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                if stream:
                    assert raw.recv(100).startswith(b"HTTP/1.1 200")
                wait_for(lambda: scheduler.num_active > 0)
            server.idle()
    cancelled = metrics(server)['nextn_requests_total{finish_reason="cancelled"}']
    assert cancelled >= 6


def wait_for(true: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if true():
            return
        done.wait(0.01)
    raise AssertionError("never")


def test_more_than_fit_are_told_to_come_back(exported: Export) -> None:
    with serving(exported("trained"), ServiceOptions(num_sequences=1, queue_limit=1)) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, long_stream(server, http) as first:
            first_lines = first.iter_lines()  # kept: dropped, it would close its connection
            next(first_lines)
            with long_stream(server, http):
                reply = http.post(CHAT, json={"messages": USER})
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
                assert int(reply.headers["Retry-After"]) >= 1
        server.idle()
        assert server.chat(max_tokens=3)["choices"]


def test_out_of_time(exported: Export) -> None:
    with serving(exported("trained"), ServiceOptions(num_sequences=1, timeout_s=0.3)) as server:
        status, error = server.refusal(logit_bias=ENDLESS)
        assert (status, error["code"]) == (504, "timeout")
        events = server.events(logit_bias=ENDLESS)
        assert events[-1]["error"]["code"] == "timeout"


def test_one_broken_request_among_others(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(exported("trained")) as server:
        want = server.chat(temperature=0, max_tokens=20)["choices"]
        whole = server.service.sampler

        def breaking(request: Any, prompt: Any, adjustments: Any) -> Any:
            if request.user == "breaks":
                return lambda logits, positions: 1 // 0
            return whole(request, prompt, adjustments)

        monkeypatch.setattr(server.service, "sampler", breaking)
        replies: list[Any] = []
        good = [
            threading.Thread(target=lambda: replies.append(server.chat(temperature=0, max_tokens=20))) for _ in range(4)
        ]
        for thread in good:
            thread.start()
        status, error = server.refusal(user="breaks")
        assert (status, error["code"], error["type"]) == (500, "internal_error", "server_error")
        assert "ZeroDivisionError" in error["message"]
        for thread in good:
            thread.join(WAIT_S)
        assert [reply["choices"] for reply in replies] == [want] * 4


def test_api_key(exported: Export) -> None:
    with serving(exported("trained"), limits=Limits(api_key="secret é")) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"X-Api-Key": "wrong"},
        ):
            reply = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert reply.json()["error"]["code"] == "invalid_api_key"
        key = "secret é".encode()
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": b"Bearer " + key}).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": key}).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_sizes(exported: Export) -> None:
    with serving(exported("trained"), limits=Limits(body_bytes=10_000)) as server:
        big = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        assert server.http.post(CHAT, json=big).status_code == 413

        def chunks() -> Iterator[bytes]:  # no length is told beforehand
            for _ in range(40):
                yield b" " * 1000

        reply = server.http.post(CHAT, content=chunks(), headers={"Content-Type": "application/json"})
        assert reply.status_code == 413
        assert server.http.get("/health", headers={"X-Long": "x" * 40_000}).status_code == 431
        assert server.chat(max_tokens=2)["choices"]


def test_host_names(exported: Export) -> None:
    with serving(exported("trained"), limits=Limits(hosts=("localhost", "127.0.0.1", "::1"))) as server:
        for host, status in (
            ("localhost:1", 200),
            ("127.0.0.1", 200),
            ("[::1]:80", 200),
            ("evil.example", 403),
            ("", 403),
        ):
            assert server.http.get("/health", headers={"Host": host}).status_code == status, host


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_logged_only_on_request(exported: Export, caplog: pytest.LogCaptureFixture, wanted: bool) -> None:
    secret = "zebra crossing"
    with caplog.at_level(logging.DEBUG), serving(exported("trained"), ServiceOptions(log_prompts=wanted)) as server:
        server.chat(messages=[{"role": "user", "content": secret}], max_tokens=3)
        server.refusal(messages=[{"role": "user", "content": secret}], tool_choice="required")
        server.refusal(messages=[{"role": "user", "content": secret}, {"role": "user"}])
    mine = [record.getMessage() for record in caplog.records if record.name.startswith(("runtime", "uvicorn"))]
    assert mine and any(secret in line for line in mine) == wanted


def test_the_end_of_a_server_waits_for_running_replies(exported: Export) -> None:
    texts: list[str] = []
    with serving(exported("trained"), grace_s=WAIT_S) as server:
        want = server.chat(temperature=0, max_tokens=25)["choices"][0]["message"]["content"]

        def ask() -> None:
            texts.append(server.chat(temperature=0, max_tokens=25)["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.service.scheduler.num_active == 3)
    for thread in threads:
        thread.join(WAIT_S)
    assert texts == [want] * 3
