"""The package's face: what it exports, how results print themselves, and that it imports no heavy extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weft
import weft_map
from tests import ROOT
from weft.simulation.requests import prepare, simulate_requests
from weft.simulation.sustain import Question, sustain
from weft.workloads.requests import read_workload

LONGEST = 160


@pytest.mark.parametrize("module", [weft, weft_map])
def test_all_names_exist_and_are_sorted(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert all(hasattr(module, name) for name in names)
    assert sorted(names) == sorted(set(names))


def test_the_public_names_are_what_dir_shows() -> None:
    assert dir(weft) == sorted(weft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        weft.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("weft", ("torch", "onnxruntime", "matplotlib", "typer", "ortools", "z3", "numpy")),
        ("weft.serving.server", ("torch", "numba", "matplotlib", "typer", "ortools", "z3")),
    ],
)
def test_importing_weft_or_its_server_leaves_extras_and_drawing_alone(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_results_print_themselves_in_a_short_line(tmp_path: Path) -> None:
    model, npu = weft.load_model("resnet18"), weft.load_npu("tpuv3-like")
    profile = weft.estimate(model, npu)
    run = weft.simulate([profile, profile], npu, "fifo", weft.Saturated(3))
    workload = read_workload(ROOT / "examples/assistant.toml").model_copy(update={"duration_s": 1.0})
    case = prepare(workload, weft.load_device(workload.device))
    served = simulate_requests(case, "edf")
    found = weft.map_models("xavier", ["googlenet"], max_groups=3)
    told = sustain(Question(workload, "edf", seeds=1, tolerance=0.5))
    results = (
        model, profile, run, run.report, run.report.streams[0], run.trace, served, served.report,
        served.report.streams[0], found, found.outcome, found.outcome.problem, told,
    )  # fmt: skip
    for each in results:
        assert repr(each).startswith(f"{type(each).__name__}(") and repr(each).endswith(")")
        assert len(repr(each)) <= LONGEST and "\n" not in repr(each)
    assert repr(profile) == "Profile(resnet18 on tpuv3-like, batch 1: 21 layers)"
    assert "fifo on tpuv3-like: STP " in repr(run) and "resnet18 + resnet18: 126 layers in " in repr(run)
