"""The package's face: what it exports, and that it imports no heavy extra."""

from __future__ import annotations

import subprocess
import sys

import weft


def test_all_names_exist_and_are_sorted() -> None:
    assert all(hasattr(weft, name) for name in weft.__all__)
    assert sorted(weft.__all__, key=str.casefold) == sorted(set(weft.__all__), key=str.casefold)


def test_importing_weft_leaves_extras_and_drawing_alone() -> None:
    code = "import sys, weft; print([m for m in ('torch', 'onnxruntime', 'matplotlib', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
