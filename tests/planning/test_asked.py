"""What is asked of a plan: checked before anything is measured, with the words to add."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.onnx_graphs import node, proto, tensor
from tests.planning.machines import host
from tests.planning.plans import scaling
from tests.support.stitched import NAMES, stitched_file
from weft.base.errors import InputError, ModelError, WorkloadError
from weft.cli.common import parse_stream
from weft.devices.host import usable_cores
from weft.planning.measured import make_repository
from weft.planning.plan_request import PlanRequest, ask
from weft.planning.planning_run import check_deadlines
from weft.planning.served_files import files_to_serve, stitched_from
from weft.serving.repository import Repository
from weft.workloads.requests import parse_workload


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where camera.onnx takes rows of two numbers and words.onnx rows of any length."""
    scaling(tmp_path / "camera.onnx", 2.0)
    free = proto([node("Identity", ["ids"], ["out"])], [tensor("ids", "n", "length")], [tensor("out", "n", "length")])
    (tmp_path / "words.onnx").write_bytes(free.SerializeToString())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked_for(*streams: str, **more) -> PlanRequest:
    workload = parse_workload({"stream": [parse_stream(text) for text in streams]}, "--stream")
    return ask(workload, Path("scratch"), **more)


def test_models_are_found_with_the_shapes_that_are_sent(folder):
    found = asked_for("camera.onnx:rate=5,deadline=20", "words.onnx:rate=1,deadline=50,shape=ids=1x128", cores=1)
    assert [(model.name, model.source) for model in found.models] == [
        ("camera", "camera.onnx"),
        ("words", "words.onnx"),
    ]
    assert found.models[1].config.shapes == {"ids": [1, 128]}
    assert found.workload.stream[1].shapes == {"ids": (1, 128)}
    assert (found.cores, found.per_s, found.objective) == (1, 6.0, "deadlines")


def test_samples_tell_the_shapes(folder):
    np.savez(folder / "some.npz", ids=np.zeros((3, 7), np.float32))
    found = asked_for("words.onnx:rate=1,deadline=50,samples=some.npz")
    assert found.models[0].config.shapes == {"ids": [1, 7]}


def test_models_in_a_stitched_file_are_streams_of_their_own_and_share_its_file(folder):
    stitched_file(folder / "pets.onnx", tasks=2)
    cats, dogs = NAMES[:2]
    with pytest.raises(ModelError, match=rf"-s pets.onnx/{cats}:rate=10,deadline=100"):
        asked_for("pets.onnx:rate=1,deadline=50")
    found = asked_for(f"pets.onnx/{cats}:rate=2,deadline=50", f"pets.onnx/{dogs}:rate=1,deadline=80")
    assert [(model.name, model.home) for model in found.models] == [(cats, "pets"), (dogs, "pets")]
    chosen = {cats: {"max_batch": 4, "slo_ms": 50.0}, dogs: {"max_batch": 4, "slo_ms": 80.0}}
    ((home, served),) = files_to_serve(found.models, chosen).items()
    assert (home, served.config.max_batch) == ("pets", 4)
    assert {name: task.slo_ms for name, task in served.config.tasks.items()} == {cats: 50.0, dogs: 80.0}
    assert stitched_from(found.models, "pets") == f"stitched from {cats} and {dogs}"
    make_repository({home: served}, folder / "staged")
    assert Repository([folder / "staged"], folder).entry(dogs).config.slo_ms == 80.0


def test_a_model_with_two_streams_is_planned_once(folder):
    found = asked_for("camera.onnx:rate=5,deadline=20", "camera.onnx:rate=1,deadline=200")
    assert [model.name for model in found.models] == ["camera"] and len(found.workload.stream) == 2


@pytest.mark.parametrize(
    ("streams", "more", "said"),
    [
        (["words.onnx:rate=1,deadline=50"], {}, "-s words.onnx:rate=1,deadline=50,shape=ids=1x128"),
        (["words.onnx:rate=1,deadline=50,shape=ids=128"], {}, "shape 128 does not fit input 'ids'"),
        (["words.onnx:rate=1,deadline=50,shape=idx=1x9"], {}, "unknown input 'idx'"),
        (["camera.onnx:rate=1"], {}, "-s camera.onnx:rate=1,deadline=100"),
        (["camera.onnx:rate=1,deadline=9,samples=wrong.npz"], {}, "x has the shape 3x5"),
        (["kamera.onnx:rate=1,deadline=9"], {}, "did you mean camera.onnx"),
        (["nothing:rate=1,deadline=9"], {}, "unknown model 'nothing'"),
        (["camera.onnx:rate=1,deadline=9"], {"objective": "lode"}, "did you mean load"),
        (["camera.onnx:rate=1,deadline=9"], {"deadlines": "none"}, "strict"),
        (["camera.onnx:rate=1,deadline=9"], {"cores": 1000}, f"ask for 1 to {usable_cores()}"),
        (["camera.onnx:rate=1,deadline=9"], {"limit": 2.0}, "between 0 and 1"),
        (["camera.onnx:rate=1,deadline=9"], {"memory_bytes": 10}, "leave out camera.onnx"),
        (["camera.onnx:rate=1,deadline=9", "sub/camera.onnx:rate=1,deadline=9"], {}, "both called camera"),
    ],
)
def test_what_cannot_be_planned_is_one_line_with_the_way_out(folder, streams, more, said):
    np.savez(folder / "wrong.npz", x=np.zeros((3, 5), np.float32))
    (folder / "sub").mkdir()
    scaling(folder / "sub/camera.onnx", 3.0)
    with pytest.raises(InputError) as error:
        asked_for(*streams, **more)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (":rate=10", "names no model; write MODEL:rate=10"),
        ("rate=5,deadline=5", "names no model; write MODEL:rate=5,deadline=5"),
        ("", "names no model; write MODEL:rate=10"),
        ("m.onnx:rate", "MODEL:rate=10,deadline=250"),
        ("m.onnx:rate=1,shape=1x3", "NAME=1x3x224x224"),
        ("m.onnx:rate=1,shape=x=1xa", "1xa"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        parse_stream(text)


def test_a_stream_has_shapes_and_values_of_several_inputs():
    found = parse_stream("vad.onnx:rate=3,deadline=9,shape=a=1x2,shape=b=1,value=sr=16000")
    assert found == {
        "model": "vad.onnx",
        "rate": 3,
        "deadline_ms": 9,
        "shapes": {"a": (1, 2), "b": (1,)},
        "values": {"sr": 16000},
    }


def test_a_deadline_that_nobody_can_keep_is_refused_with_one_that_can_be(folder):
    question = asked_for("camera.onnx:rate=5,deadline=3")
    with pytest.raises(WorkloadError, match=r"fastest possible, 4 ms .* plan with deadline=5 or more"):
        check_deadlines(question, [host(camera=[6.0]), host(1, 2, camera=[4.0])])
    check_deadlines(question, [host(camera=[6.0]), host(1, 2, camera=[2.5])])
