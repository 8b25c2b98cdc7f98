"""weft without the packages of its extras: what works, and the one line where something does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from tests import ROOT
from weft.base.errors import InputError
from weft.base.registry import registry
from weft.cli.app import app
from weft.reports.pictures import Shown
from weft.simulation import Run
from weft.simulation.comparison import Comparison, RequestComparison
from weft.simulation.loads import SustainedLoads

EXTRAS = ("llvmlite", "matplotlib", "numba", "ortools", "pandas", "torch")
"""Packages that the core does without; numba comes with it, for those who simulate and plan."""
NEEDED = re.escape("figures need matplotlib; pip install 'weft[figures]'")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
DRAWING = {
    f"{name} {below}".strip(): leaf
    for name, command in COMMANDS.items()
    for below, leaf in (getattr(command, "commands", {}) | {"": command}).items()
    if any("--figure" in param.opts for param in leaf.params)
}


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def run_without(packages: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process in which the packages cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({packages})); from weft.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def brought_by(extra: str) -> set[str]:
    """The packages of an extra, and of those that it names."""
    found = set[str]()
    for requirement in extras()[extra]:
        named = re.fullmatch(r"weft\[(.+)\]", requirement)
        found |= set().union(*map(brought_by, named[1].split(","))) if named else {re.split(r"\W", requirement)[0]}
    return found


# What pyproject.toml says


def test_the_extra_that_a_tool_names_brings_what_it_needs() -> None:
    for tool in registry().tools:
        if tool.own and tool.package != "weft":
            assert tool.extra == f"weft[{tool.name}]"
            assert set(tool.needs) <= brought_by(tool.name), tool.name


def test_all_brings_every_tool() -> None:
    tools = {tool.name for tool in registry().tools if tool.own and tool.package != "weft"}
    assert brought_by("all") >= set().union(*map(brought_by, tools)) and tools <= set(
        extras()["all"][0][5:-1].split(",")
    )


# Figures


def test_there_are_commands_that_draw() -> None:
    assert {"explore npu", "map", "simulate", "sustain", "timeline", "tune"} <= set(DRAWING)


@pytest.mark.parametrize("name", DRAWING)
def test_a_figure_without_matplotlib_is_refused_before_any_work(name: str, no_matplotlib: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{NEEDED}$"):
        DRAWING[name].make_context(name, ["--figure", str(tmp_path / "x.png")])


def test_the_page_of_tune_holds_a_figure(no_matplotlib: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{NEEDED}$"):
        COMMANDS["tune"].make_context("tune", ["--html", str(tmp_path / "x.html")])


@pytest.mark.parametrize(
    "result",
    [Run(None, None), Comparison("", ()), RequestComparison("", ()), SustainedLoads("", 0.01, (), (), (), ()), Shown()],
    ids=lambda result: type(result).__name__,
)
def test_a_result_that_cannot_be_drawn_says_what_is_missing(result: Any, no_matplotlib: None) -> None:
    with pytest.raises(InputError, match=f"^{NEEDED}$"):
        result.plot()


# Tools


def test_a_tool_that_lacks_a_package_says_so_in_a_line_however_it_is_called() -> None:
    done = run_without(EXTRAS, "map", "--models", "a,b", "--no-such-option")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "weft: map needs ortools, which is not installed; pip install 'weft[map]'\n"
    both = run_without(EXTRAS, "reproduce", "layerweaver").stderr
    assert both == "weft: papers needs matplotlib and ortools, which are not installed; pip install 'weft[papers]'\n"


def test_the_help_of_a_command_whose_tool_lacks_a_package_says_what_to_install() -> None:
    shown = " ".join(run_without(EXTRAS, "place", "--help").stdout.split())
    assert "Not usable: cluster needs ortools, which is not installed; pip install 'weft[cluster]'." in shown


def test_the_other_commands_work_and_tools_are_listed_with_what_they_lack() -> None:
    done = run_without(EXTRAS, "tools", "--json", "-")
    assert done.returncode == 0, done.stderr
    missing = {tool["name"]: tool["missing"] for tool in json.loads(done.stdout)["tools"]}
    assert (missing["weft"], missing["stitch"], missing["map"]) == ([], [], ["ortools"])


def test_only_what_places_models_needs_a_solver() -> None:
    assert run_without(EXTRAS, "cluster", "--help").returncode == 0
    refused = run_without(EXTRAS, "place", "workload.toml").stderr
    assert refused == "weft: cluster needs ortools, which is not installed; pip install 'weft[cluster]'\n"
