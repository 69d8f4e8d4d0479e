"""Templates that would run for ever or fill the memory are refused, quickly; ones of real models are far from it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import UsageError
from runtime import template_limits
from runtime.chat_template import ChatTemplate
from tests.vocabulary_files import exported, vocabulary_file

Compile = Callable[[str], ChatTemplate]
MESSAGES = [{"role": "user", "content": "x" * 1000}]
DOUBLING = "{%- macro f(n) -%}{%- if n -%}{{ f(n - 1) }}{{ f(n - 1) }}{%- endif -%}{%- endmacro -%}{{ f(60) }}"


@pytest.fixture
def template(tmp_path: Path) -> Compile:
    tokenizer = exported(vocabulary_file(), tmp_path)

    def compiled(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_bytes(source.encode())
        return ChatTemplate(tmp_path, tokenizer)

    return compiled


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ 1" + "+1" * 1500 + " }}",
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
        "{{ x" + "|string" * 20000 + " }}",
        "{{ x" + ".a" * 20000 + " }}",
        "{{ " + "not " * 20000 + "x }}",
        "{{ lipsum(n=100000) }}",
    ],
    ids=lambda source: source[:12],
)
def test_templates_that_are_nested_too_deeply(template: Compile, source: str) -> None:
    with pytest.raises(UsageError):
        template(source).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% set s = 'x' * 99999 %}{% for i in s %}{% for j in s %}{% endfor %}{% endfor %}", "steps"),
        (DOUBLING, "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10 ** 12 }}", "repeats"),
        ("{{ 10 ** 12 * 'x' }}", "repeats"),
        ("{{ [0] * 10 ** 12 }}", "repeats"),
        ("{{ 9 ** 9 ** 9 }}", r"\*\*"),
        ("{{ 'x' | center(10 ** 12) }}", "spaces"),
        ("{{ 'x' | indent(width=10 ** 12) }}", "spaces"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_bounds(template: Compile, source: str, says: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=says) as caught:
        template(source).render(MESSAGES)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # in KiB


def test_a_template_of_many_megabytes(template: Compile) -> None:
    with pytest.raises(UsageError, match=r"chat_template\.jinja: the template has 1048577 characters"):
        template("x" * (template_limits.MAX_SOURCE_CHARS + 1))
    assert template("x" * template_limits.MAX_SOURCE_CHARS).render(MESSAGES)[:2] == "xx"


def test_every_text_has_the_bound_anew(template: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10)
    ten = template("{% for i in range(10) %}.{% endfor %}")
    assert [ten.render(MESSAGES) for _ in range(3)] == ["." * 10] * 3
    with pytest.raises(UsageError, match="more than 10 steps"):
        template("{% for i in range(11) %}.{% endfor %}").render(MESSAGES)


def test_steps_leave_loops_as_they_are(template: Compile) -> None:
    source = "{% for i in [1, 2] if i > 1 %}{{ loop.first }}{{ i * 3 }}{{ 2 ** 3 }}{% else %}none{% endfor %}"
    assert template(source).render(MESSAGES) == "True68"
