"""reStructuredText and HTML documentation, and Python docstrings, as plain English text."""

from __future__ import annotations

import ast
import html.parser
import re
from pathlib import Path

# Directives whose text is kept, with what is put in front of it.
_KEPT_DIRECTIVES = {
    "note": "Note:", "warning": "Warning:", "seealso": "See also:", "tip": "Tip:", "important": "Important:",
    "versionadded": "New in version", "versionchanged": "Changed in version", "deprecated": "Deprecated since version",
}  # fmt: skip
# Directives that describe an object: the signature is kept.
_OBJECT_DIRECTIVE = re.compile(
    r"(function|class|method|classmethod|staticmethod|exception|attribute|data|decorator|describe|opcode"
    r"|decoratormethod|coroutinefunction|coroutinemethod|option|setting|envvar|module)$"
)
_HEADING_LINE = re.compile(r"[-=~^\"'`#*+.:|_ ]{3,}")
_FACT_DIRECTIVE = re.compile(
    r"(\s*)\.\. (?:py:)?(module|currentmodule|function|class|method|classmethod|staticmethod|exception"
    r"|attribute|data|decorator|coroutinefunction|coroutinemethod)::\s*(\S.*)"
)


def plain_inline(text: str) -> str:
    """rst inline markup as plain text."""
    text = re.sub(r":[\w:+-]+:`!?~?([^`<]*?)\s*<[^`>]*>`", r"\1", text)
    text = re.sub(r":[\w:+-]+:`[!~]?([^`]*)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`([^`]+)`__?", r"\1", text)
    text = re.sub(r"\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\n]+)\*(?![\w*])", lambda m: m[1] or m[2], text)
    return text.replace("\\ ", "").replace("\\*", "*")


def plain_rst(text: str) -> str:
    lines = (_plain_rst_line(line) for line in text.expandtabs(4).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in lines if line is not None)).strip()


def _plain_rst_line(line: str) -> str | None:
    """The line as text; None for markup that leaves nothing: labels, options, underlines, table rules."""
    bare = line.strip()
    directive = re.match(r"(\s*)\.\.\s+(?:\w+:)?([\w-]+)::\s*(.*)", line)
    if directive:
        indent, name, argument = directive.groups()
        if name in _KEPT_DIRECTIVES:
            return indent + f"{_KEPT_DIRECTIVES[name]} {plain_inline(argument)}".strip()
        return indent + plain_inline(argument) if _OBJECT_DIRECTIVE.match(name) else None
    option = re.match(r":[\w -]+:(\s|$)", bare)
    if re.match(r"\.\.( |$)", bare) or (option and "`" not in bare.split(":", 2)[1]):
        return None
    if (bare and _HEADING_LINE.fullmatch(bare)) or bare.startswith("+--"):
        return None
    return plain_inline(re.sub(r"::\s*$", ":", line)).rstrip()


class _HtmlText(html.parser.HTMLParser):
    """Collects the text of a page without its navigation."""

    _SKIPPED = frozenset(("script", "style", "head", "nav", "footer"))
    _VOID = frozenset(("br", "img", "hr", "link", "meta", "input", "col"))
    _BREAKS = frozenset(
        ("p", "div", "li", "dt", "dd", "h1", "h2", "h3", "h4", "tr", "pre", "ul", "ol", "table", "section", "br")
    )
    _PARAGRAPHS = frozenset(("p", "pre", "h1", "h2", "h3", "dt", "dd"))
    _NAVIGATION = re.compile(r"sphinxsidebar|headerlink|related|navheader|navfooter|toc\b")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skip = self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        css_class = dict(attrs).get("class") or ""
        if self._skip or tag in self._SKIPPED or self._NAVIGATION.search(css_class):
            self._skip += tag not in self._VOID
        self._preformatted += tag == "pre"
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            self._skip -= 1
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        if tag in self._PARAGRAPHS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def plain_html(text: str) -> str:
    page = _HtmlText()
    page.feed(text)
    joined = "".join(page.parts).replace("\u00b6", "").replace("\xa0", " ")
    lines = (line.rstrip() for line in joined.split("\n"))
    lines = (line[1:] if line[:1] == " " and line[1:2] != " " else line for line in lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def docstrings(path: Path) -> list[tuple[str, str, str]]:
    """(qualified name, signature, docstring) of what one Python file documents; the module's own has no name."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
    except (SyntaxError, ValueError, RecursionError):  # templates and test data named .py
        return []
    found: list[tuple[str, str, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            text, is_class = ast.get_docstring(child), isinstance(child, ast.ClassDef)
            if text and len(text) > 40 and not child.name.startswith("_"):
                signature = "" if is_class else ast.unparse(child.args)
                found.append((prefix + child.name, f"({signature})" if len(signature) < 120 else "(...)", text))
            if is_class:
                visit(child, prefix + child.name + ".")

    visit(tree, "")
    own = ast.get_docstring(tree)
    return ([("", "", own)] if own else []) + found


def first_sentence(text: str) -> str | None:
    """The first sentence of a description as 20 to 220 characters of plain prose; None if it is not that."""
    text = " ".join(plain_inline(text.strip().split("\n\n")[0]).split())
    ended = re.match(r"(.{20,}?[.!?])(?=\s+[A-Z(`]|$)(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)", text)
    text = (ended[1] if ended else text.rstrip(":.") + ".").replace("..", ".")
    text = text[:1].upper() + text[1:]
    return text if 20 <= len(text) <= 220 and text[0].isalpha() and ">>>" not in text else None


def rst_facts(text: str) -> list[tuple[str, str]]:
    """(name, first sentence) of every object that a page of the Python library reference documents."""
    facts, module, class_name, lines = [], "", "", text.split("\n")
    for i, line in enumerate(lines):
        directive = _FACT_DIRECTIVE.match(line)
        if not directive:
            continue
        indent, kind, signature = directive.groups()
        if "module" in kind:
            module = signature.strip()
            continue
        named = re.match(r"[\w.]+", signature)
        if not named:
            continue
        name = named[0]
        if kind in ("class", "exception"):
            class_name = name
        elif indent and class_name and "." not in name and kind not in ("function", "data"):
            name = class_name + "." + name
        sentence = first_sentence("\n".join(_description(lines, i + 1, indent)))
        if sentence:
            whole = not module or module == "builtins" or name.startswith(module + ".")
            facts.append((name if whole else f"{module}.{name}", sentence))
    return facts


def _description(lines: list[str], start: int, indent: str) -> list[str]:
    """The first paragraph below a directive, past its options and the further lines of its signature."""
    further = re.compile(re.escape(indent) + r" {12,}\S")
    while start < len(lines):
        bare = lines[start].strip()
        if bare and not bare.startswith((":", ".. ")) and not further.match(lines[start]):
            break
        start += 1
    end = start
    while end < len(lines) and lines[end].strip() and lines[end].startswith(indent + " "):
        end += 1
    return [line.strip() for line in lines[start:end]]
