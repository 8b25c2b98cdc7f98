"""Old module paths go on working: those of 0.2 with a warning, the documented ones for good."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.base.moved import MOVED, new_name
from weft.engine import Arrivals
from weft.engine.tickets import Terms
from weft.workloads.exits import ExitRecord
from weft.workloads.requests import parse_workload


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_every_old_path_leads_to_a_module_that_is_there(old, new):
    assert new_name(old) == (new, False) and find_spec(new) is not None


def test_an_old_path_is_the_same_module_and_warns():
    with pytest.warns(DeprecationWarning, match="weft.jsonfile is weft.base.jsonfile now; the old name ends with 0.4"):
        sys.modules.pop("weft.jsonfile", None)
        old = import_module("weft.jsonfile")
    assert old is import_module("weft.base.jsonfile")


def test_what_is_inside_an_old_package_is_not_loaded_twice():
    code = "from weft.policies.edf import EarliestDeadline as old; from weft.engine.policies.edf import "
    code += "EarliestDeadline as new; print(old is new)"
    assert run(code, "-W", "ignore").stdout.strip() == "True"


def test_documented_submodules_stay_without_a_warning():
    names = ["mapping", "placing", "stitching", "tuning", "numbers", "cluster", "gates", "ray"]
    each = "first = weft.{0}; import weft.{0} as second; print(first is second, first.__name__)"
    done = run("\n".join(["import weft", *map(each.format, names)]), "-W", "error")
    assert [line.startswith("True weft_") for line in done.stdout.splitlines()] == [True] * len(names), done.stderr


def test_the_warning_names_the_line_that_imports():
    done = run("import weft.errors", "-W", "always")
    assert "<string>:1: DeprecationWarning: weft.errors is weft.base.errors now" in done.stderr


def test_other_names_are_unknown_as_ever():
    assert new_name("weft.base.errors") is None and new_name("os.path") is None and new_name("weft.nothing") is None
    with pytest.raises(ModuleNotFoundError):
        import_module("weft.nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        weft.nothing  # noqa: B018


def test_old_names_are_attributes_of_weft_too():
    code = "import weft; print(weft.errors.WeftError is weft.WeftError, weft.policies.POLICIES is weft.POLICIES)"
    assert run(code, "-W", "ignore").stdout.strip() == "True True"


def test_an_old_module_can_be_run():
    done = run("import runpy; print(runpy.run_module('weft.version')['__version__'])", "-W", "ignore")
    assert done.stdout.strip() == weft.__version__, done.stderr


def test_a_folder_that_an_update_left_behind_hides_no_tool(tmp_path):
    copied = tmp_path / "weft"
    shutil.copytree(Path(weft.__file__).parent, copied, ignore=shutil.ignore_patterns("*.onnx", "*.npz", "__pycache__"))
    for tool in ("weft_map", "weft_stitch"):
        shutil.copytree(Path(weft.__file__).parents[1] / tool, tmp_path / tool, ignore=shutil.ignore_patterns("*.onnx"))
    (copied / "mapping/__pycache__").mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = "import weft.mapping; print(weft.__file__, weft.mapping.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [str(copied / "__init__.py"), "weft_map"], done.stderr


def test_members_that_have_other_names_since_0_2_work_with_a_warning():
    exits = ExitRecord(np.array([[0.9, 0.9], [0.1, 0.9]]), np.ones((2, 2), bool))
    stream = {"model": "resnet50", "rate": 15, "deadline_ms": 400, "exits": 1, "exit_rates": [0.5, 0.5]}
    workload = parse_workload({"stream": [stream]}, "w.toml")
    with pytest.warns(DeprecationWarning, match="ExitRecord.fates is exits_taken now; the old name ends with 0.4"):
        assert exits.fates(0.5).tolist() == exits.exits_taken(0.5).tolist() == [0, 1]
    with pytest.warns(DeprecationWarning, match="Workload.fates is exits_taken now"):
        assert next(workload.fates(0)).tolist() == next(workload.exits_taken(0)).tolist()
    terms = [Terms(programs=0, deadline=10, max_batch=1, timeout=0, priority=1)]
    with pytest.warns(DeprecationWarning, match=r"Arrivals\(sure=\) is confidences= now"):
        feed = Arrivals(terms, [iter([3])], end=9, sure=[iter([{1: 0.7}])])
    assert [ticket.confidences for ticket in feed.take(5)] == [{1: 0.7}]
