"""What drifted since a plan was made; a plan that holds has nothing to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning.plans import scaling, written
from weft.planning.machine import memory_here, processor_here, these_versions, this_machine
from weft.planning.plan import PlanBudget, PlanMachine, PlanSettings
from weft.planning.plan_check import drift
from weft.serving.config import ModelConfig

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "plan", {"camera": 2.0}, ModelConfig(max_batch=4))
    return tmp_path / "plan"


def test_a_plan_that_was_just_made_holds(folder: Path) -> None:
    assert drift(folder) == []


def test_changed_models_and_sources_are_named(folder: Path) -> None:
    given = scaling(folder.parent / "given/camera.onnx", 3.0)
    assert drift(folder) == [f"{given}, of which camera was made, has changed; plan again to serve it"]
    given.unlink()
    assert drift(folder) == []
    scaling(folder / "models/camera/1/model.onnx", 3.0)
    (folder / "models/lidar").mkdir()
    assert drift(folder) == [
        "models/camera/1/model.onnx has changed since the plan was written",
        "models/lidar is not of the plan",
    ]


def test_settings_that_were_changed_by_hand_are_named(folder: Path) -> None:
    text = (folder / "weft.toml").read_text()
    (folder / "weft.toml").write_text(text.replace("lanes = 1", "lanes = 2\nhttp_port = 9000"))
    (folder / "models/camera/weft.toml").write_text("max_batch = 8\n")
    assert drift(folder) == [
        "weft.toml: lanes = 2, the plan has 1",
        "models/camera/weft.toml: max_batch = 8, the plan has 4",
    ]


def test_a_workload_that_is_not_the_predicted_one_is_named(folder: Path) -> None:
    text = (folder / "workload.toml").read_text()
    (folder / "workload.toml").write_text(text.replace('"camera"', '"lidar"'))
    assert drift(folder) == ["the workload asks for lidar, the prediction is of camera"]
    (folder / "workload.toml").unlink()
    assert drift(folder) == [f"{folder}: the plan has no workload.toml; plan again"]


def test_another_machine_and_other_versions_are_named(tmp_path: Path) -> None:
    machine = PlanMachine(cores=4, memory_bytes=1000 * MIB, processor="abacus")
    versions = {"weft": "1.0", "python": "3.11"}
    written(tmp_path / "plan", {"camera": 2.0}, machine=machine, versions=versions)

    def seen(cores: int = 4, mib: int = 1000, processor: str = "abacus", **other: str) -> list[str]:
        here = PlanMachine(cores=cores, memory_bytes=mib * MIB, processor=processor)
        return drift(tmp_path / "plan", machine=here, versions=versions | other)

    assert seen() == seen(mib=1040) == seen(mib=0) == seen(numpy="2") == []
    assert seen(cores=8) == ["the number of cores is 8, the plan was made for 4"]
    assert seen(mib=500) == ["there are 500 MiB of memory, the plan was made for 1000"]
    assert seen(processor="loom") == ["the processor is loom, the plan was made on abacus"]
    assert seen(weft="1.1") == ["weft is 1.1, the plan was made with 1.0"]


def test_a_plan_for_a_gpu_names_another_one_and_one_that_is_gone(tmp_path: Path) -> None:
    machine = PlanMachine(cores=4, memory_bytes=1000 * MIB, processor="abacus", gpu="NVIDIA H200")
    written(tmp_path / "plan", {"camera": 2.0}, machine=machine, settings=PlanSettings(device="cuda:1"))

    def seen(gpu: str) -> list[str]:
        return drift(tmp_path / "plan", machine=machine.model_copy(update={"gpu": gpu}))

    assert seen("NVIDIA H200") == []
    assert seen("NVIDIA A100") == ["cuda:1 is NVIDIA A100, the plan was made for NVIDIA H200"]
    assert seen("") == ["cuda:1 is not here, the plan was made for NVIDIA H200"]
    text = (tmp_path / "plan/weft.toml").read_text()
    (tmp_path / "plan/weft.toml").write_text(text.replace("cuda:1", "cuda:0"))
    assert seen("NVIDIA H200") == ["weft.toml: device = cuda:0, the plan has cuda:1"]


def test_a_plan_for_the_cores_that_was_given_a_gpu_by_hand_is_told(folder: Path) -> None:
    file = folder / "weft.toml"
    file.write_text(f'device = "cuda:0"\n{file.read_text()}')
    assert drift(folder) == ["weft.toml: device = cuda:0, the plan has nothing"]


def test_a_budget_asks_for_no_more_than_it_names(tmp_path: Path) -> None:
    machine = PlanMachine(cores=4, memory_bytes=1000 * MIB, processor="abacus")
    budget = PlanBudget(cores=2, memory_bytes=300 * MIB)
    written(tmp_path / "plan", {"camera": 2.0}, machine=machine, budget=budget)

    def seen(cores: int, mib: int) -> list[str]:
        return drift(tmp_path / "plan", machine=machine.model_copy(update={"cores": cores, "memory_bytes": mib * MIB}))

    assert seen(2, 300) == seen(16, 9000) == []
    assert seen(1, 200) == [
        "the number of cores is 1, the plan was made for 2",
        "there are 200 MiB of memory, the plan was made for 300",
    ]


def test_what_is_no_plan_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": 2}')
    assert drift(tmp_path) == [f"{tmp_path / 'plan.json'}: not a plan of format 1; weft plan -o FOLDER writes one"]


def test_this_machine_says_what_a_plan_notes() -> None:
    here = this_machine()
    assert here.cores >= 1 and here.memory_bytes == memory_here() and here.processor == processor_here()
    assert set(these_versions()) == {"weft", "python", "onnxruntime"}
