"""The notebook in examples/ and the page on Python: what they show runs, and what stands last in a cell is shown."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

NOTEBOOK = ROOT / "examples/weft.ipynb"
PAGE = ROOT / "docs/python.md"
BLOCK = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.M | re.S)
"""A block that is marked to be run."""


def cells() -> dict[str, str]:
    """The code of the notebook, by the names of its cells."""
    read = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in read if cell["cell_type"] == "code"}


async def run(name: str, code: str, space: dict[str, Any]) -> object:
    """What stands last in a cell, once all of it has run as a notebook runs it."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    await _awaited(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)
    if not isinstance(last, ast.Expr):
        return None
    return await _awaited(compile(ast.Expression(last.value), name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)


async def _awaited(code: Any, space: dict[str, Any]) -> object:
    found = eval(code, space)
    return await found if inspect.iscoroutine(found) else found


async def run_all(blocks: dict[str, str]) -> dict[str, Any]:
    space: dict[str, Any] = {}
    return {name: await run(name, code, space) for name, code in blocks.items()}


def shown(result: object) -> str:
    """How a notebook renders a result."""
    return str(result._repr_html_()) if hasattr(result, "_repr_html_") else repr(result)


def test_the_notebook_runs_and_shows_tables_and_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    results = asyncio.run(run_all(cells()))
    for name, heads in {
        "compare": ("mobilenet-v2 + ncf on tpuv3-like", "<td", "layerweaver", "no schedule can exceed STP"),
        "sustain": ("resnet50 : bert-base on weaver-plus", "4:1", "weft+", "requests/s"),
        "stitch": ("2 models", "one after another", "weights MB", "memory: weights"),
    }.items():
        html = shown(results[name])
        assert html.startswith("<div") and all(head in html for head in heads), name
    assert [len(results[name].axes) for name in ("compare-plot", "timeline")] == [1, 2]
    results["compare-plot"].savefig(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 5000
    assert re.fullmatch(r"'\d+% right, at http://127\.0\.0\.1:\d+'", shown(results["serve"]))
    assert results["late"].startswith("Expired: ")
    assert (results["async"], results["stop"]) == ((1, 10), 1)


def test_what_the_page_on_python_shows_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    assert blocks
    asyncio.run(run_all({f"block {place}": code for place, code in enumerate(blocks)}))


def test_the_notebook_is_stored_without_what_it_printed() -> None:
    read = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in read["cells"]}) == len(read["cells"])
