"""What the turns of a chat have in common."""

from __future__ import annotations

import json
from typing import Any

from runtime.replicas.exchange import Asked, session_key


def key(body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return session_key(Asked("POST", path, b"", given, raw))


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(roles * 9, texts, strict=False)],
        **fields,
    }


def test_later_turns_have_the_key_of_the_first() -> None:
    first = key(chat("Be brief.", "What does len do?"))
    assert first and key(chat("Be brief.", "What does len do?", "It counts.", "And map?", temperature=1)) == first
    others = [chat("Be brief.", "What does map do?"), chat("Be long.", "What does len do?"), chat("Be brief.")]
    assert len({first, *map(key, others)}) == 4


def test_a_name_goes_before_the_text() -> None:
    assert key(chat("a", "b", prompt_cache_key="k")) == key(chat("c", "d", prompt_cache_key="k")) != key(chat("a", "b"))
    by_header = key(chat("a", prompt_cache_key="k"), X_Session_Id="s")
    assert by_header == key(chat("b"), x_session_id="s") != key(chat("b"), x_session_id="t")


def test_prompts_of_text() -> None:
    path = "/v1/completions"
    assert key({"prompt": "x" * 300}, path) == key({"prompt": "x" * 300 + "y"}, path) != key({"prompt": "z"}, path)
    assert key({"prompt": [1, 2]}, path)


def test_what_has_no_turns_has_no_key() -> None:
    assert key(chat("a"), "/tokenize") == ""
    for body in (b"no JSON", b"[" * 100_000, b"\xff", [1], {"prompt": 3}, {}):
        assert key(body) == ""
    assert session_key(Asked("GET", "/v1/models", b"", [], b"")) == ""
    assert key({"messages": [1, None, {"role": "user"}]})
