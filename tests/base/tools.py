"""Packages that plug into weft, written or installed into a folder, and weft run with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT


def write_tool(folder: Path, name: str, toml: str, **modules: str) -> None:
    """A package as ``pip install`` would lay it out: its files, and metadata that names its entry point."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(modules.pop("init", ""), encoding="utf-8")
    (package / "tool.toml").write_text(toml, encoding="utf-8")
    for module, code in modules.items():
        (package / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[weft.tools]\n{name} = {name}\n", encoding="utf-8")


def install(example: str, folder: Path) -> None:
    """Install one of ``examples/`` into a folder, without the network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder), str(ROOT / "examples" / example)], check=True)


def python(folder: Path, code: str, **variables: str) -> str:
    """Run code with the packages of a folder installed; what it printed. No module is imported before the code is."""
    done = run(folder, "-c", code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def weft(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``weft`` with the packages of a folder installed."""
    return run(folder, "-c", "from weft.cli.main import main; main()", *arguments, **variables)


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"} | variables
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
