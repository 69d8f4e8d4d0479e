"""Templates that would run for ever or fill the memory are refused, quickly; ones of real models are far from it."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.sandbox import SecurityError

from engines.errors import ResourceError, UsageError
from runtime import template_limits, template_renderer
from runtime.chat_template import ChatTemplate
from runtime.template_environment import environment
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


def test_every_text_has_the_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10)
    made = environment()
    ten = made.bounded("{% for i in range(10) %}.{% endfor %}")
    assert [made.text_of(ten, {}) for _ in range(3)] == ["." * 10] * 3
    with pytest.raises(SecurityError, match="more than 10 steps"):
        made.text_of(made.bounded("{% for i in range(11) %}.{% endfor %}"), {})


def test_steps_leave_loops_as_they_are(template: Compile) -> None:
    source = "{% for i in [1, 2] if i > 1 %}{{ loop.first }}{{ i * 3 }}{{ 2 ** 3 }}{% else %}none{% endfor %}"
    assert template(source).render(MESSAGES) == "True68"


# ---------------------------------------------------------------- what no bound inside a template foresees
GROWS = "{% set ns = namespace(x='aaaaaaaa', y=['a']) %}{% for i in range(40) %}"
GREEDY = {
    "~": GROWS + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "+": GROWS + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "set": GROWS + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROWS + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "replace": GROWS + "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "%": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "join": "{% set b = 'x' * 1000000 %}{{ b.join(b | list) | length }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list | length }}",
    "tojson": "{{ [1] | tojson(indent=10 ** 10) }}",
    "text of a list": GROWS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
}
ENDLESS = {
    "slice": "{{ [1] | slice(10 ** 10) | list | length }}",
    "numbers": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "search": "{% set r = range(99999) | list %}{{ r | select('in', r) | list | length }}",
}


@pytest.mark.parametrize("name", [*GREEDY, *ENDLESS])
def test_a_process_bounds_the_rest(template: Compile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By memory and processor time, whatever it is that takes them; the next text is rendered as ever."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    says = r"it takes more than (512 MiB of memory|3 s)$|writes more than|cannot fit|range|Overflow|too large|too long"
    with pytest.raises(UsageError, match=says):
        template({**GREEDY, **ENDLESS}[name]).render(MESSAGES)
    assert template("ok {{ messages[0].role }}").render(MESSAGES) == "ok user"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in KiB


def test_a_template_that_takes_long_to_compile(template: Compile) -> None:
    """A megabyte of it: refused, or done within the bounds."""
    with contextlib.suppress(UsageError):
        template("{% macro a() %}{% endmacro %}" * 36_000)
    assert template("ok").render([]) == "ok"


def test_a_process_that_was_killed_is_started_again(template: Compile) -> None:
    chat = template("ok")
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = template_renderer._process()._process
        assert process is not None
        process.send_signal(number)
        process.wait()
        assert chat.render([]) == "ok"


def test_a_process_that_is_killed_at_its_work(template: Compile) -> None:
    """By the system, for lack of memory: not a fault of the template's."""
    chat, slow = template("ok"), template(ENDLESS["search"])
    process = template_renderer._process()._process
    assert process is not None
    threading.Timer(0.3, process.kill).start()
    with pytest.raises(ResourceError, match=r"process for chat templates has ended \(signal 9\): killed, or out"):
        slow.render([])
    assert chat.render([]) == "ok"


LIMITED = """
import resource, sys
from runtime.template_renderer import rendered
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_AS)[1]))
print(rendered(sys.argv[2], {}))
"""


def test_less_memory_than_a_template_may_take() -> None:
    """As under `ulimit -v`: rendered, or refused for what it takes and not for the time."""

    def said(source: str) -> str:
        command = [sys.executable, "-c", LIMITED, str(400 << 20), source]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    assert said("ok") == "ok"
    found = re.search(r"UsageError: .* it takes more than (\d+) MiB of memory$", said(GREEDY["+"]))
    assert found and int(found[1]) < 400


def test_values_that_are_no_json(template: Compile) -> None:
    endless: list[object] = []
    endless.append(endless)
    for value in (object(), b"x", endless, {1, 2}):
        with pytest.raises(UsageError, match="they are no JSON"):
            template("ok").render([], strange=value)
    assert template("{{ strange }}").render([], strange="\ud800 \0 \u2028 é") == "\ud800 \0 \u2028 é"


def test_threads_share_it(template: Compile) -> None:
    chat, texts = template("{{ n }}" + "." * 1000), dict[int, str]()

    def many(first: int) -> None:
        for n in range(first, first + 50):
            texts[n] = chat.render([], n=n)

    threads = [threading.Thread(target=many, args=(50 * i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert texts == {n: f"{n}{'.' * 1000}" for n in range(200)}
