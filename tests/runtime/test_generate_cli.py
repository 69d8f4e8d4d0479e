"""`runtime.generate` from the outside, on small models with known text: what it says, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_vocab
from tests.known_text import ENDLESS, RING
from tests.runtime.command import Outcome
from tests.runtime.conftest import Generate

JSON_KEYS = {"text", "tokens", "prompt_tokens", "finish_reason", "backend", "spec_type", "seed", "timings"}
TIMING_KEYS = {
    "cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second", "draft_n",
    "draft_n_accepted", "verify_steps", "acceptance_rate", "tokens_per_step",
}  # fmt: skip


def ids(tokens: tuple[int, ...] | list[int]) -> str:
    return ",".join(map(str, tokens))


# ---------------------------------------------------------------- text
@pytest.mark.parametrize("spec", ["auto", "draft-mtp", "none"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_greedy_text_is_the_known_one_at_every_depth(generate: Generate, spec: str, depth: int) -> None:
    result = generate(
        "bigram_ring", "--prompt-ids", "40,41,42", "-n", 200, "--spec-type", spec, "--spec-draft-n-max", depth, "--json"
    ).json
    assert result["tokens"] == ENDLESS.greedy(42, 200)
    assert result["text"] == bytes(result["tokens"]).decode()
    assert (result["finish_reason"], result["backend"]) == ("length", "onnxruntime")
    assert result["spec_type"] == ("none" if spec == "none" or depth == 0 else "draft-mtp")
    timings = result["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (3, 200)
    if spec == "draft-mtp" and depth:
        assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
        assert timings["verify_steps"] + timings["draft_n_accepted"] + 1 == 200
    if result["spec_type"] == "none":
        assert (timings["draft_n"], timings["verify_steps"]) == (0, 199)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_perfect_head_is_accepted_always(generate: Generate, depth: int) -> None:
    timings = generate(
        "draft_perfect", "--prompt-ids", ids(RING), "-n", 61, "--spec-type", "draft-mtp", "--spec-draft-n-max", depth,
        "--json",
    ).json["timings"]  # fmt: skip
    assert timings["acceptance_rate"] == 1.0
    assert timings["tokens_per_step"] == 1 + timings["draft_n"] / timings["verify_steps"]
    assert timings["verify_steps"] == 60 // (depth + 1)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 8])
def test_an_end_token_inside_a_block_ends_the_text(generate: Generate, depth: int) -> None:
    flags = ("--spec-type", "draft-mtp", "--spec-draft-n-max", depth, "--json")
    result = generate("ring_stop_inside", "--prompt-ids", RING[-1], *flags).json
    assert (result["tokens"], result["finish_reason"]) == (list(RING[:11]), "stop")
    result = generate("stops_at_once", "--prompt-ids", "40", *flags).json
    assert (result["tokens"], result["text"], result["finish_reason"]) == ([], "", "stop")


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 5])
def test_near_the_end_of_the_context(generate: Generate, room: int) -> None:
    prompt = RING * 3
    for flags in (("--spec-type", "draft-mtp"), ("--spec-type", "auto"), ("--spec-type", "none")):
        result = generate(
            "bigram_ring",
            "--prompt-ids",
            ids(prompt),
            "-c",
            len(prompt) + room,
            *flags,
            "--spec-draft-n-max",
            4,
            "--json",
        ).json
        assert (result["tokens"], result["finish_reason"]) == (ENDLESS.greedy(prompt[-1], room), "length")


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("filters", [(), ("--top-k", 20, "--top-p", 0.9, "--min-p", 0.02)])
def test_sampled_text_is_the_same_with_and_without_drafts(
    generate: Generate, temperature: float, filters: tuple[object, ...]
) -> None:
    for seed in (1, 2**64 - 1):
        flags = ("--prompt-ids", "40,41,42", "-n", 40, "--temp", temperature, "--seed", seed, *filters, "--json")
        plain = generate("bigram_for_sampling", *flags, "--spec-type", "none").json
        for depth in (1, 4):
            drafted = generate(
                "bigram_for_sampling", *flags, "--spec-type", "draft-mtp", "--spec-draft-n-max", depth
            ).json
            assert drafted["tokens"] == plain["tokens"]
            assert drafted["timings"]["draft_n_accepted"] > 0
        assert plain["seed"] == seed


def test_a_drawn_seed_is_reported_and_repeats_the_text(generate: Generate) -> None:
    flags = ("bigram_for_sampling", "--prompt-ids", "40", "-n", 30, "--temp", 1, "--json")
    first = generate(*flags).json
    assert generate(*flags, "--seed", first["seed"]).json["tokens"] == first["tokens"]
    assert generate(*flags).json["tokens"] != first["tokens"]


# ---------------------------------------------------------------- what is printed
def test_text_goes_to_stdout_and_statistics_to_stderr(generate: Generate) -> None:
    outcome = generate("bigram_ring", "--prompt-ids", RING[0], "-n", 10, "--spec-type", "draft-mtp")
    assert (outcome.code, outcome.out) == (0, bytes(ENDLESS.greedy(RING[0], 10)).decode())
    for word in ("prompt:", "text:", "10 tokens", "a second", "length", "drafts:", "accepted", "tokens per pass"):
        assert word in outcome.err


def test_json_is_one_object_with_the_documented_keys(generate: Generate) -> None:
    outcome = generate("bigram_ring", "-p", "the", "--raw", "-n", 5, "--json")
    assert outcome.out.count("\n") == 1
    assert set(outcome.json) == JSON_KEYS
    assert set(outcome.json["timings"]) == TIMING_KEYS


# ---------------------------------------------------------------- prompts
def test_every_way_to_give_a_prompt(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("w é\n".encode())
    flags = ("--raw", "-n", 3, "--json")
    wanted = list("w é".encode())
    ways: list[Outcome] = [
        generate("bigram_ring", *flags, "-p", "w é"),
        generate("bigram_ring", *flags, "-f", tmp_path / "prompt.txt"),
        generate("bigram_ring", *flags, stdin="w é\r\n".encode()),
        generate("bigram_ring", "--prompt-ids", ids(wanted), "-n", 3, "--json"),
    ]
    for outcome in ways:
        got = outcome.json
        assert bytes(token for token in got["prompt_tokens"] if token < 256)[-1:] == "é".encode()[-1:]
        assert got["tokens"] == ENDLESS.greedy(wanted[-1], 3)
    assert ways[0].json["prompt_tokens"] == ways[1].json["prompt_tokens"] == ways[2].json["prompt_tokens"]


def test_text_is_put_into_the_template_unless_raw(generate: Generate) -> None:
    def prompt(*flags: object) -> list[int]:
        tokens: list[int] = generate("bigram_ring", "-p", "hi", "-n", 1, "--json", *flags).json["prompt_tokens"]
        return tokens

    assert prompt("--raw") == list(b"hi")
    chat = prompt()
    assert chat == prompt("--chat")
    assert (chat[0], chat[-2]) == (tiny_vocab.IM_START, tiny_vocab.THINK)
    system = prompt("--system", "be kind")
    assert len(system) > len(chat) and system[-len(chat) :] == chat
    assert generate("no_template", "-p", "hi", "-n", 1, "--json").json["prompt_tokens"] == list(b"hi")


def test_the_first_token_is_put_in_front_only_where_the_file_asks(generate: Generate) -> None:
    result = generate("bos_is_comma", "--raw", "-p", "w", "-n", 1, "--json").json
    assert result["prompt_tokens"] == list(b"w")


@pytest.mark.parametrize("text", [" ", "\n\n", "\t"])
def test_white_space_is_a_prompt(generate: Generate, text: str) -> None:
    assert generate("bigram_ring", "-p", text, "-n", 2, "--json").json["timings"]["predicted_n"] == 2
    assert generate("bigram_ring", "-p", text, "--raw", "-n", 2, "--json").json["prompt_tokens"] == list(text.encode())


@pytest.mark.parametrize("given", ["40,41,42", " 40, 41 ,42 ", "40 41\t42", "040,41,42"])
def test_token_ids_as_they_are(generate: Generate, given: str) -> None:
    assert generate("bigram_ring", "--prompt-ids", given, "-n", 1, "--json").json["prompt_tokens"] == [40, 41, 42]


@pytest.mark.parametrize(
    ("given", "token", "says"),
    [
        *(
            (each, 0, f"{each!r}; wanted plain")
            for each in ("1_000", "+1", "-1", "1.0", "1e2", "0x10", "x", "\u0661", "\u00b2")
        ),
        *((each, 1, "''; wanted plain decimal digits") for each in ("1,,2", "1,", "1, ,2")),
        (",1", 0, "''; wanted plain decimal digits"),
        ("1,2,3_0", 2, "'3_0'; wanted plain decimal digits, as in 1,2,3"),
        ("1,320", 1, "320; this model has ids 0 to 319"),
        ("9" * 30, 0, "9; this model has ids 0 to 319"),
        ("9" * 6000, 0, "9'; wanted plain"),
    ],
)
def test_what_is_no_token_id(generate: Generate, given: str, token: int, says: str) -> None:
    generate("bigram_ring", f"--prompt-ids={given}").refused(2, f"token {token} of the prompt is", says)


@pytest.mark.parametrize("given", ["", " ", ",", " , "])
def test_no_token_ids(generate: Generate, given: str) -> None:
    generate("bigram_ring", "--prompt-ids", given).refused(2, "--prompt-ids: the prompt is empty")


def test_prompts_that_cannot_be_used(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    generate("bigram_ring", "-p", "").refused(2, "empty")
    generate("bigram_ring", "-p", "", "--raw").refused(2, "empty")
    generate("bigram_ring", stdin=b"").refused(2, "empty")
    generate("bigram_ring", stdin=b"\n").refused(2, "empty")
    generate("bigram_ring", "--prompt-ids", "1", "--chat").refused(2, "--chat")
    generate("bigram_ring", "-p", "a", "-f", "b").refused(2, "--file")
    generate("bigram_ring", "-f", tmp_path / "none.txt").refused(2, "none.txt")
    generate("bigram_ring", "-f", tmp_path / "latin1.txt").refused(2, "latin1.txt", "UTF-8")
    generate("bigram_ring", "-p", "a", "--raw", "--system", "b").refused(2, "--system")
    generate("no_template", "-p", "a", "--chat").refused(2, "template")
    generate("bigram_ring", "-p", "abcdef", "--raw", "-c", 5).refused(2, "6 tokens", "context holds 5")
    assert generate("bigram_ring", "-p", "w", "--raw", "-n", 2).code == 0  # the next request works


@pytest.mark.parametrize(
    "text",
    ["\0", "a\0b", "\x1b[2J", "\ufeff", "\ufeffa", "\u202e", "\n" * 50, "é" * 700, "\U0010ffff", "\ufffe\uffff",
     "a\r\nb\rc", "e" + "\u0301" * 300, "\u05e9\u05dc\u05d5\u05dd \u200f", "\u200b\u200d\u00a0", "\x85\u2028\u2029",
     "\u1100\u1161\u11a8"],
)  # fmt: skip
def test_odd_prompts(generate: Generate, text: str) -> None:
    """Every byte of them is there; nothing is trimmed, cut at a NUL or normalised."""
    result = generate("bigram_ring", "--raw", "-n", 2, "--json", stdin=text.encode() + b"\n").json
    assert b"".join(bytes([token]) for token in result["prompt_tokens"]) == text.encode()


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}{% raw %}{# c #}", "{{ x }}", "{% if %}"])
def test_words_of_templates_in_a_prompt(generate: Generate, text: str) -> None:
    """A message is a value to the chat template, never part of it."""
    tokens = generate("bigram_ring", "-p", text, "-n", 2, "--json").json["prompt_tokens"]
    assert text.encode() in b"".join(bytes([token]) for token in tokens if token < 256)


def test_a_line_of_a_megabyte(generate: Generate) -> None:
    generate("bigram_ring", "--raw", stdin=b"w" * (1 << 20)).refused(2, "1048576 tokens", "context holds 4096")


@pytest.mark.parametrize("content", [b"\xed\xa0\x80", b"a\xff", b"\xc3"])
def test_prompts_that_are_no_text(generate: Generate, content: bytes) -> None:
    generate("bigram_ring", stdin=content).refused(2, "stdin: cannot be read (byte", "is not UTF-8")


# ---------------------------------------------------------------- numbers at the edges
@pytest.mark.parametrize(
    ("flags", "n_tokens"),
    [
        (("-n", 0), 0),
        (("-n", -1, "-c", 21), 20),
        (("-n", 5, "--top-k", 0), 5),
        (("-n", 5, "--top-p", 0), 5),
        (("-n", 5, "--top-p", 1, "--seed", -1), 5),
        (("-n", 5, "--temp", 0, "--seed", 0), 5),
        (("-n", 5, "-c", 4096), 5),
    ],
)
def test_edges_that_mean_something(generate: Generate, flags: tuple[object, ...], n_tokens: int) -> None:
    result = generate("bigram_ring", "--prompt-ids", RING[0], *flags, "--json").json
    assert result["tokens"] == ENDLESS.greedy(RING[0], n_tokens)


@pytest.mark.parametrize("top", [("--top-k", 1), ("--top-p", 0), ("--min-p", 1)])
def test_filters_that_leave_one_token_give_the_greedy_text(generate: Generate, top: tuple[object, ...]) -> None:
    result = generate("bigram_for_sampling", "--prompt-ids", 40, "-n", 20, "--temp", 2.0, *top, "--json").json
    assert result["tokens"] == generate("bigram_for_sampling", "--prompt-ids", 40, "-n", 20, "--json").json["tokens"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-n", -2), "-2"),
        (("--spec-draft-n-max", -1), "-1"),
        (("--spec-draft-n-max", 10**6), "1000000"),
        (("--top-k", -1), "top-k"),
        (("--top-p", 1.1), "1.1"),
        (("--top-p", -0.1), "-0.1"),
        (("--temp", -1), "temperature"),
        (("--temp", "nan"), "nan"),
        (("--temp", "inf"), "inf"),
        (("--temp", "warm"), "warm"),
        (("--seed", -2), "-2"),
        (("--seed", 2**64), str(2**64)),
        (("--threads", -1), "-1"),
        (("--threads", 10**6), "1000000"),
        (("--threads", 2**40), "--threads"),
        (("-c", -1), "-1"),
        (("-c", 4097), "4096"),
        (("--spec-type", "medusa"), "medusa"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_edges_that_are_refused(generate: Generate, flags: tuple[object, ...], says: str) -> None:
    generate("bigram_ring", "--prompt-ids", 40, *flags).refused(2, says)
