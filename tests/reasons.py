"""Locks, retries and module constants, and whether the reason for each stands beside it: ``python -m tests.reasons``.

A reason is a comment on the line, a comment directly above it, or a string directly below it. A group of assignments on
consecutive lines may share the comment above the first one.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}


class Place(NamedTuple):
    """A statement that needs a reason."""

    kind: str
    path: Path
    line: int
    text: str
    explained: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def places_in(path: Path, root: Path = SOURCE) -> list[Place]:
    """Return the locks, retries and numeric module constants of a file, in order of their lines."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    strings = {statement.lineno for statement in ast.walk(tree) if _is_string(statement)}
    statements = sorted(_statements(tree), key=lambda statement: statement[1])
    return [
        Place(kind, path.relative_to(root), line, lines[line - 1].strip(), _explained(lines, strings, line, end))
        for kind, line, end in statements
    ]


def _statements(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first line and last line of what needs a reason."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_number(statement.value):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id.strip("_").isupper():
                yield "constant", statement.lineno, statement.end_lineno or statement.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in LOCKS:
                yield "lock", node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, ast.For | ast.While) and _tries_again(node):
            yield "retry", node.lineno, node.lineno


def _is_number(value: ast.expr | None) -> bool:
    """Tell whether an expression is built of numbers alone, as ``64 << 20`` is."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    return isinstance(value, ast.UnaryOp) and _is_number(value.operand)


def _tries_again(loop: ast.For | ast.While) -> bool:
    """Tell whether the loop's own body goes on after an exception, having left or returned after success."""
    attempts = [statement for statement in loop.body if isinstance(statement, ast.Try)]
    return any(
        _ends(attempt.body + attempt.orelse, ast.Return | ast.Break)
        and any(not _ends(handler.body, ast.Return | ast.Raise | ast.Break) for handler in attempt.handlers)
        for attempt in attempts
    )


def _ends(body: list[ast.stmt], kinds: object) -> bool:
    return bool(body) and isinstance(body[-1], kinds)  # type: ignore[arg-type]


def _is_string(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _explained(lines: list[str], strings: set[int], line: int, end: int) -> bool:
    if any("# " in text and "# noqa" not in text and "# type" not in text for text in lines[line - 1 : end]):
        return True
    if end + 1 in strings:
        return True
    above = line - 2
    # a group shares the comment above its first line
    while above >= 0 and lines[above].strip() and not lines[above].lstrip().startswith(("#", '"""', "def ", "class ")):
        above -= 1
    return above >= 0 and lines[above].lstrip().startswith("# ")


def all_places(root: Path = SOURCE) -> list[Place]:
    """Return those of all files below *root*."""
    return [place for path in sorted(root.rglob("*.py")) for place in places_in(path, root)]


def main() -> None:
    """Print how many have a reason, and those of a random draw that have none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="look at N of them, drawn at random, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="", help="only files whose path contains this")
    options = parser.parse_args()
    places = [place for place in all_places() if options.under in str(place.path)]
    if options.draw:
        places = random.Random(options.seed).sample(places, min(options.draw, len(places)))
    for place in places:
        if not place.explained:
            print(place)
    kinds = {place.kind for place in places}
    counts = ", ".join(
        f"{sum(place.explained for place in places if place.kind == kind)} of "
        f"{sum(place.kind == kind for place in places)} {kind}s"
        for kind in sorted(kinds)
    )
    print(f"explained: {counts}")


if __name__ == "__main__":
    main()
