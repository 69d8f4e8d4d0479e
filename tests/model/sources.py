"""Documents and facts from a folder of unpacked documentation packages, wheels and the standard library."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

from clean_text import docstrings, first_sentence, plain_html, plain_rst, rst_facts

_SERVICE_CHARACTERS = 30_000  # a service of botocore
_PLAIN_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")

Documents = list[tuple[str, str]]
Facts = list[tuple[str, str]]


def collect(src: Path) -> tuple[Documents, Facts]:
    """(path, text) of every document, (name, first sentence) of every documented Python object below ``src``.

    One folder per package. *.rst, *.rst.txt and _sources/*.txt are read as reStructuredText, *.html only in packages
    without those, *.py for docstrings, service-2.json(.gz) for its "documentation" strings.
    """
    documents: Documents = []
    facts: Facts = []
    for package in sorted(path for path in src.iterdir() if path.is_dir()):
        n_before = len(documents)
        files = sorted(path for path in package.rglob("*") if path.is_file())
        rst = [path for path in files if re.search(r"\.rst(\.txt)?$|_sources/.*\.txt$", path.as_posix())]
        for path in rst:
            text = path.read_text(encoding="utf-8", errors="ignore")
            documents.append((str(path), plain_rst(text)))
            if "python3" in package.name and "/library/" in path.as_posix():
                facts += rst_facts(text)
        for path in [] if rst else files:
            if path.suffix == ".html" and not re.search(r"genindex|_modules|search", path.as_posix()):
                documents.append((str(path), plain_html(path.read_text(encoding="utf-8", errors="ignore"))))
        for path in files:
            if path.suffix == ".py" and not re.search(r"/tests?/|/test_|conftest", path.as_posix()):
                _add_docstrings(path, package, documents, facts)
            elif re.search(r"service-2\.json(\.gz)?$", path.name):
                documents.append((str(path), _service_text(path)))
        print(f"{package.name:28s} {sum(len(text) for _, text in documents[n_before:]) / 1e6:7.2f} MB")
    return documents, facts


def _add_docstrings(path: Path, package: Path, documents: Documents, facts: Facts) -> None:
    found = docstrings(path)
    if found:
        joined = "\n\n".join(f"{name}{signature}\n{text}".strip() for name, signature, text in found)
        documents.append((str(path), plain_rst(joined)))
    if package.name == "stdlib":
        module = re.sub(r"(/__init__)?\.py$", "", path.relative_to(package).as_posix()).replace("/", ".")
        for name, _, text in found:
            sentence = first_sentence(text)
            private = re.search(r"(^|\.)_|idlelib|lib2to3|distutils|ensurepip|test", f"{module}.{name}")
            if name and sentence and not private:
                facts.append((f"{module}.{name}", sentence))


def _service_text(path: Path) -> str:
    """The descriptions of one web service and its operations, each once."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        service = json.load(file)
    descriptions = [service.get("documentation", "")]
    descriptions += [operation.get("documentation", "") for operation in service["operations"].values()]
    texts = dict.fromkeys(plain_html(text) for text in descriptions)
    return "\n\n".join(text for text in texts if text)[:_SERVICE_CHARACTERS]


def without_repeats(documents: Documents) -> Documents:
    """Repeated paragraphs dropped, also mostly non-Latin text and tables of numbers; short documents go."""
    seen, kept_documents = set(), []
    for path, text in documents:
        kept = []
        for paragraph in text.translate(_PLAIN_QUOTES).split("\n\n"):
            if len(paragraph) > 60:
                digest = hashlib.md5(paragraph.encode()).digest()[:8]
                if digest in seen:
                    continue
                seen.add(digest)
                ascii_share = sum(c.isascii() for c in paragraph) / len(paragraph)
                prose_share = sum(c.isalpha() or c == " " for c in paragraph) / len(paragraph)
                if ascii_share < 0.97 or prose_share < 0.6:
                    continue
            kept.append(paragraph)
        text = re.sub(r"\n{3,}", "\n\n", "\n\n".join(kept)).strip()
        if len(text) > 300:
            kept_documents.append((path, text))
    return kept_documents


def is_held_out(text: str) -> bool:
    """Whether a document is kept out of training: 2 % by hash."""
    return int(hashlib.md5(text.encode()).hexdigest(), 16) % 50 == 0
