"""The package's face: what it exports, and that it imports no heavy extra."""

from __future__ import annotations

import subprocess
import sys

import weft


def test_all_names_exist_and_are_sorted() -> None:
    assert all(hasattr(weft, name) for name in weft.__all__)
    assert sorted(weft.__all__, key=str.casefold) == sorted(set(weft.__all__), key=str.casefold)


def test_importing_weft_leaves_extras_and_drawing_alone() -> None:
    heavy = "torch", "onnxruntime", "matplotlib", "typer", "ortools", "z3"
    code = f"import sys, weft; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mapping_shows_its_names() -> None:
    import weft.mapping

    assert all(hasattr(weft.mapping, name) for name in weft.mapping.__all__)
    assert sorted(weft.mapping.__all__, key=str.casefold) == sorted(set(weft.mapping.__all__), key=str.casefold)
