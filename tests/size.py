"""The size of the source: packages, files and lines, for all of ``src`` and for the core (``src/weft``) alone.

- A *code line* holds something that Python runs: no comment, no blank line, no string that stands alone (docstrings of
  modules, classes, functions and attributes).
- A *small file* has fewer than 60 lines of any kind; ``__init__.py`` counts too.
- A *package* is a folder with an ``__init__.py``.

    python -m tests.size [--json FILE]

The file keeps the numbers that were first written to it as ``before``, so that it shows what has changed since.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.structure import CORE, MODULES, SOURCES, documentation, imported, parsed
from weft.base.errors import InputError
from weft.base.jsonfile import read_json, write_json

SMALL = 60
ONNX = {"onnx", "onnx_ir"}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str, tree: ast.Module | None = None) -> int:
    """Lines with a token of code. A line that a docstring shares with code, such as ``class A: "..."``, counts."""
    standing_alone = {(string.lineno, string.col_offset) for string in documentation(tree or ast.parse(text))}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and not (token.type == tokenize.STRING and _start(token) in standing_alone):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _start(token: tokenize.TokenInfo) -> tuple[int, int]:
    """Where a token begins, as ``ast`` counts columns: in bytes of UTF-8."""
    row, column = token.start
    return row, len(token.line[:column].encode())


def sizes(paths: Iterable[Path]) -> dict[str, int]:
    """What is counted, and how much of it these modules have."""
    modules = list(paths)
    texts = {path: path.read_text("utf-8") for path in modules}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    return {
        "packages": sum(path.name == "__init__.py" for path in modules),
        "code_lines": sum(code_lines(text, parsed(path)) for path, text in texts.items()),
        "lines": sum(lines.values()),
        "files": len(modules),
        "small_files": sum(count < SMALL for count in lines.values()),
        "onnx_files": sum(any(name.split(".")[0] in ONNX for name in imported(path)) for path in modules),
    }


def measure() -> dict[str, Any]:
    """The sizes, and the commit that the working tree was checked out from."""
    core = SOURCES / CORE
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=SOURCES, text=True).strip()
    return {
        "commit": commit,
        "src": sizes(MODULES),
        "core": sizes(path for path in MODULES if path.is_relative_to(core)),
    }


def _first_record(path: Path) -> Any:
    return read_json(path, InputError).get("before") if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file, too")
    target = parser.parse_args().json
    measured = measure()
    print(f"{'':>12} {'src':>8} {'core':>8}")
    for name, count in measured["src"].items():
        print(f"{name:>12} {count:8} {measured['core'][name]:8}")
    if target:
        write_json(target, {"format": 1, **measured, "before": _first_record(target) or measured})


if __name__ == "__main__":
    main()
