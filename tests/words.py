"""Words that weft does not use, with what to write instead: ``python -m tests.words``, a part of ``make lint``.

Names are checked where they are bound in src, phrases in its docstrings and comments and in the pages.
docs/glossary.md has the words to use.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

NAMES = {
    "each": "a noun for the element: request, layer, worker",
    "found": "a noun for the result: match, model, addresses",
    "told": "a noun or verb of the field: message, on_progress, notify",
    "made": "a noun for the result: session, graph, plan",
}
"""Name of a variable, a parameter or a function -> what to write instead."""

CLASSES = {
    "Ear": "SocketReader",
    "Hands": "a named resource: clock, thread pool",
    "Watchman": "KillTimer",
    "Crew": "StepGroup",
    "Stint": "RunInterval",
    "Lesson": "LearningJob",
    "Workshop": "ModelPreparation",
    "Errand": "BackgroundTask",
    "Promise": "PendingResult or Future",
    "Likeness": "a measure of similarity",
    "Ways": "alternatives, options",
    "Listed": "RegistryEntry",
}
"""Name of a class -> what to write instead."""

PHRASES = {
    r"\bwho(ever|m)?\b": "name the client, thread, process or caller",
    r"\b(nobody|somebody|everybody)\b": "name the client, thread, process or caller",
    r"\bshall\b": "must, or the present tense",
    r"\bso (many|much)\b": "a number with its unit",
    r"\bcomes to\b": "is, results in",
    r"\bit is over\b": "what ended",
}
"""Regular expression -> what to write instead; case does not matter."""

ALLOWED = {
    ("weft/cli/printing.py", "told"): "a public name of before 0.3, for tools of other packages",
    ("weft/planning/plan.py", "made"): "a key of plan.json",
}
"""File below src, and a name in it -> the reason why it stays."""


class Finding(NamedTuple):
    """A word, where it stands, and what to write instead."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: write {self.instead}"


def in_source(text: str, path: Path) -> Iterator[Finding]:
    """Find banned names and classes where a Python file binds them, and banned phrases in its prose."""
    tree = ast.parse(text)
    allowed = {word for file, word in ALLOWED if path.as_posix().endswith(f"/{file}")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            yield Finding(path, node.lineno, node.name, CLASSES[node.name])
        for name in _bound(node):
            if name.strip("_") in NAMES and name not in allowed:
                yield Finding(path, getattr(node, "lineno", 0), name, NAMES[name.strip("_")])
        for line, words in _docstring(node):
            yield from in_prose(words, path, line)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from in_prose(token.string, path, token.start[0])


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name


def _docstring(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield strings that stand alone as statements: docstrings, and those below attributes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        yield node.lineno, node.value.value


def in_prose(text: str, path: Path, first_line: int = 1) -> Iterator[Finding]:
    """Find banned phrases; a code span between backticks is no prose."""
    prose = re.sub(r"`+[^`\n]+`+", lambda span: " " * len(span[0]), text)
    for phrase, instead in PHRASES.items():
        for match in re.finditer(phrase, prose, re.IGNORECASE):
            yield Finding(path, first_line + prose.count("\n", 0, match.start()), match[0], instead)


def in_repository(root: Path = ROOT) -> list[Finding]:
    """Return all findings in src, README.md and docs."""
    findings = [
        finding for path in sorted((root / "src").rglob("*.py")) for finding in in_source(path.read_text(), path)
    ]
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL)
        findings += in_prose(text, page)
    return findings


def main() -> int:
    """Print the findings; exit 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--under", default="", help="only files whose path contains this")
    options = parser.parse_args()
    findings = [finding for finding in in_repository() if options.under in str(finding.path)]
    for finding in findings:
        print(finding._replace(path=finding.path.relative_to(ROOT)))
    print(f"{len(findings)} words to replace")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
