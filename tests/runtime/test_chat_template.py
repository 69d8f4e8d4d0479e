"""The chat template: rendered text to the byte, refusals, and thinking told apart from the answer."""

from __future__ import annotations

import datetime

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.errors import UsageError
from export.gguf_file import GGUFFile
from runtime.chat_template import ChatTemplate, prompt_ends_in_think, split_reasoning
from runtime.template_environment import environment
from runtime.tokenizer import Tokenizer
from tests.tiny_vocab import IM_END, TEMPLATE
from tests.vocabulary_files import TRAINED_MODEL, exported, vocabulary_file

HELLO = [{"role": "user", "content": " Hello "}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return exported(vocabulary_file(), tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture
def template(tokenizer, tmp_path):
    """Compiles a template given as text."""

    def compiled(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_bytes(source.encode())
        return ChatTemplate(tmp_path, tokenizer)

    return compiled


# ---------------------------------------------------------------- the trained model's template
@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[ChatTemplate, str]:
    folder = tmp_path_factory.mktemp("trained")
    file = GGUFFile.open(TRAINED_MODEL)
    return ChatTemplate(folder, exported(file, folder)), file.get("tokenizer.chat_template", str)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_trained_template_to_the_byte(trained, options, end):
    chat, source = trained
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    got = chat.render(messages, **options)
    assert got == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n{end}"
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert got == plain.render(messages=messages, **{"add_generation_prompt": True, **options})


def test_thinking_by_default(template):
    """The larger models' rule: think unless told not to."""
    chat = template(TEMPLATE)
    thinking, closed = chat.render(HELLO), chat.render(HELLO, enable_thinking=False)
    assert thinking.endswith("assistant\n<think>\n") and prompt_ends_in_think(thinking)
    assert closed.endswith("assistant\n<think>\n\n</think>\n\n") and not prompt_ends_in_think(closed)


# ---------------------------------------------------------------- what templates use
def test_blocks_are_trimmed_as_transformers_does(template):
    source = (
        "{% for m in messages %}\n  {% if m.role %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    )
    assert template(source).render([{"role": "a", "content": "b"}]) == "a: b\nend"


def test_loop_controls_namespaces_and_the_generation_tag(template):
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content == 'x' %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": "user", "content": c} for c in ("p", "q", "x", "r")]
    assert template(source).render(messages) == "p;q;2"


def test_tojson_escapes_nothing_for_html(template):
    tools = [{"name": "f<&>'", "description": "café", "a": 1}]
    assert template("{{ tools[0] | tojson }}").render([], tools=tools) == (
        '{"name": "f<&>\'", "description": "café", "a": 1}'
    )
    assert template("{{ [1] | tojson(indent=2) }}").render([]) == "[\n  1\n]"


def test_names_a_template_may_ask_for(template):
    assert template("{{ tools is none }} {{ documents is none }} {{ x is defined }}").render([]) == "True True False"
    assert template("{{ x }}").render([], x=3) == "3"
    assert template("[{{ bos_token }}] [{{ eos_token }}]").render([]) == "[] [<|im_end|>]"
    assert template("{{ strftime_now('%Y') }}").render([]) in {
        str(year) for year in (datetime.date.today().year - 1, datetime.date.today().year)
    }


def test_bos_token_is_named_when_the_file_asks_for_it(tmp_path):
    asks = exported(
        vocabulary_file(
            tokenizer__ggml__add_bos_token=True,
            tokenizer__ggml__bos_token_id=IM_END,
            tokenizer__chat_template="{{ bos_token }}hi",
        ),
        tmp_path,
    )
    prompt = ChatTemplate(tmp_path, asks).render([])
    assert prompt == "<|im_end|>hi"
    assert asks.encode(prompt) == asks.encode("hi") == [IM_END, ord("h"), ord("i")]


# ---------------------------------------------------------------- refusals
def test_any_name_may_be_an_option(template):
    source = "{{ template }}{{ tokenizer }}{{ options }}{{ values }}"
    text = template(source).render([], template=1, tokenizer=2, options=3, values=4, self=5)
    assert text == "1234"


def test_no_template_says_so(tmp_path):
    without = exported(vocabulary_file(tokenizer__chat_template=None), tmp_path)
    with pytest.raises(UsageError, match="has no chat template"):
        ChatTemplate(tmp_path, without)


def test_the_templates_own_refusal_is_passed_on(template):
    chat = template("{% if messages[0].role != 'user' %}{{ raise_exception('first must\nbe user') }}{% endif %}ok")
    assert chat.render(HELLO) == "ok"
    with pytest.raises(UsageError, match=r"messages: first must be user$"):
        chat.render([{"role": "system", "content": ""}])


@pytest.mark.parametrize("source", ["{{ messages[0].content.missing.more }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_a_failing_template_is_wrong_use(template, source):
    with pytest.raises(UsageError, match="chat template cannot render"):
        template(source).render(HELLO)


def test_a_broken_template_names_its_line(template):
    with pytest.raises(UsageError, match=r"chat_template\.jinja: line 3"):
        template("a\nb\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_a_template_reaches_nothing_outside(template, source):
    messages = [{"role": "user", "content": "c"}]
    with pytest.raises(UsageError):
        template(source).render(messages)
    assert messages == [{"role": "user", "content": "c"}]


def test_the_sandbox_is_the_immutable_one():
    assert isinstance(environment(), ImmutableSandboxedEnvironment)


# ---------------------------------------------------------------- reasoning and answer
@pytest.mark.parametrize(
    ("text", "open_block", "want"),
    [
        ("The user asks.\n</think>\n\nAn answer.", True, ("The user asks.", "An answer.")),
        ("\nline 1\n\nline 2\n</think>\nA", True, ("line 1\n\nline 2", "A")),
        ("cut while thinking", True, ("cut while thinking", "")),
        ("</think>\n\nAt once.", True, ("", "At once.")),
        ("An answer.", False, ("", "An answer.")),
        ("<think>\nwhy\n</think>\n\nAn answer.", False, ("why", "An answer.")),
        ("\n<think>never closed", False, ("never closed", "")),
        ("a <think> b </think> c", False, ("", "a <think> b </think> c")),
        ("r</think>a</think>b", True, ("r", "a</think>b")),
        ("", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_split_reasoning(text, open_block, want):
    assert split_reasoning(text, open_block) == want
