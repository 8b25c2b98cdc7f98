"""Real samples sent to a real server with exits: accuracy and exits are those of plain ONNX Runtime."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.load.documented import documented
from tests.serving.live import PATIENCE_S, Live, running
from tests.support.commands import exit_code
from weft.base.errors import WorkloadError
from weft.http.client import parse_url
from weft.load import run_load
from weft.load.payload import build_payload, read_samples
from weft.models.trained import TRAINED
from weft.runtime.exits import confidence
from weft.runtime.tensors import TensorSpec
from weft.simulation.prediction import predict
from weft.workloads.requests import Stream, parse_workload

NET = TRAINED["cifar-cnn"]
SOFT = ("--deadlines", "soft")


@dataclass(frozen=True)
class Reference:
    """What plain ONNX Runtime says of every sample at every exit, one sample at a time."""

    sure: np.ndarray
    """(samples, exits)."""
    found: np.ndarray
    label: np.ndarray

    def threshold(self, low: float, high: float) -> float:
        """One so far from every confidence that rounding does not decide."""
        inside = np.sort(self.sure[(self.sure > low) & (self.sure < high)]).tolist()
        return max((b - a, (a + b) / 2) for a, b in pairwise([low, *inside, high]))[1]

    def left(self, threshold: float) -> np.ndarray:
        """The exit of each sample, from 0."""
        sure = self.sure >= threshold
        sure[:, -1] = True
        return sure.argmax(axis=1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(NET.path()), options, providers=["CPUExecutionProvider"])
    samples = NET.samples()
    said = [np.concatenate(session.run(list(NET.exits), {"image": one[None]})) for one in samples.inputs()]
    sure = np.stack([confidence(each, "logits") for each in said])
    return Reference(sure, np.stack([each.argmax(axis=1) for each in said]), samples.label)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Samples and a workload beside a folder of models."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "models").mkdir()
    shutil.copy(NET.path(), folder / "models")
    np.savez(folder / "cifar.npz", image=NET.samples().inputs(), label=NET.samples().label)
    return folder


@pytest.fixture(scope="module", params=["fluid", "adaptive"])
def live(request, folder):
    with running(folder / "models", policy=request.param, grpc_port=None) as started:
        yield started


def sent(live: Live, folder: Path, **keys: Any):
    stream = {"model": NET.name, "rate": 150, "deadline_ms": 1000, "samples": "cifar.npz"} | keys
    raw = {"stream": [stream], "duration_s": 1.0, "warmup_s": 0.2, "seed": 4, "folder": str(folder)}
    return run_load(parse_workload(raw, "test"), live.url, deadlines="none", grace_s=PATIENCE_S)


def test_accuracy_and_exits_are_those_of_plain_onnxruntime(live, folder, reference):
    right = {}
    for low, high in ((0.4, 0.5), (0.8, 0.95)):
        threshold = reference.threshold(low, high)
        result = sent(live, folder, exit_threshold=threshold)
        (load,), left = result.streams, reference.left(threshold)
        rows = load.contents.sample
        assert load.figures.answered == load.figures.scheduled and result.requests == len(rows) > 100
        assert load.contents.exit.tolist() == (left[rows] + 1).tolist()
        assert load.contents.prediction.tolist() == reference.found[rows, left[rows]].tolist()
        counted = rows[load.scheduled_s >= 0.2]
        right[low] = (reference.found[counted, left[counted]] == reference.label[counted]).mean()
        assert load.figures.accuracy == pytest.approx(right[low], abs=1e-12)
        shares = np.bincount(left[counted], minlength=len(NET.exits)) / len(counted)
        assert load.figures.exit_shares == pytest.approx(tuple(shares), abs=1e-12)
        assert load.contents.unreadable == 0
    assert right[0.4] < right[0.8], "the thresholds make a difference that a test can see"


def test_without_a_threshold_the_servers_own_counts(live, folder, reference):
    (load,) = sent(live, folder).streams
    clear = (abs(reference.sure - 0.8) > 1e-4).all(axis=1)[load.contents.sample]
    assert (load.contents.exit == reference.left(0.8)[load.contents.sample] + 1)[clear].all()


def test_the_command_tells_it_and_the_simulator_takes_it_up(live, folder, tmp_path, capsys):
    out = tmp_path / "run.json"
    (folder / "w.toml").write_text(
        f'duration_s = 1\nwarmup_s = 0.1\n[[stream]]\nmodel = "{NET.name}.onnx"\nrate = 80\ndeadline_ms = 1000\n'
        'samples = "cifar.npz"\nexit_threshold = 0.9\n'
    )
    assert (
        exit_code("bench", str(folder / "w.toml"), "-u", live.url, *SOFT, "--json", str(out), "--save-latencies") == 0
    )
    found = json.loads(out.read_text())
    (stream,) = found["streams"]
    assert set(found) | set(stream) == documented("Load (`weft bench --json`)")
    assert stream["exit_threshold"] == 0.9 and len(stream["exit_shares"]) == len(NET.exits)
    assert len(stream["exit"]) == len(stream["sample"]) == len(stream["prediction"]) == len(stream["latency_s"])
    shown = capsys.readouterr().out
    assert f"{stream['accuracy']:.2%}".replace("%", " %") in shown and f"exit {len(NET.exits)}" in shown
    assert exit_code("simulate", "--bench", str(out)) == 0
    for policy in ("fluid", "top-up", "adaptive", "punctual"):
        (expected,) = predict(out, policy).streams
        assert expected.predicted.answered == stream["scheduled"]
    measured = found["profile"]["models"][NET.name]
    measured |= {"times_s": {size: [0.001] * len(measured["segments"]) for size in measured["times_s"]}, "seen_s": {}}
    out.write_text(json.dumps(found))
    (early,) = predict(out, policy).streams
    measured |= {"exits": [], "exit_rates": []}
    del stream["exit"]
    out.write_text(json.dumps(found))
    assert predict(out, policy).streams[0].predicted.mean_s > early.predicted.mean_s, "nobody leaves early"


def test_samples_may_be_named_on_the_command_line(live, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    asked = f"{NET.name}:arrival=closed,deadline=1000,samples=cifar.npz,exit_threshold=0.5"
    assert exit_code("bench", "-u", live.url, *SOFT, "--stream", asked, "--duration", "0.2", "--warmup", "0") == 0
    assert "right" in capsys.readouterr().out
    assert exit_code("bench", "-u", live.url, "--stream", f"{asked}9,samples=none.npz", "--warmup", "0") == 2
    assert "none.npz: cannot read the samples: No such file" in capsys.readouterr().err


# --- files ------------------------------------------------------------------------------------------------------------

X = TensorSpec("x", "FP32", (-1, 2, 3))
GOOD = np.zeros((4, 2, 3), np.float32)


def stored(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "s.npz", **arrays)
    return tmp_path / "s.npz"


@pytest.mark.parametrize(
    ("spec", "array", "shape"),
    [
        (X, GOOD, (4, 1, 2, 3)),
        (X, np.zeros((4, 2, 3), np.uint8), (4, 1, 2, 3)),
        (X._replace(shape=(1, 2, 3)), GOOD, (4, 1, 2, 3)),
        (X._replace(shape=(2, 3)), GOOD, (4, 2, 3)),
        (X._replace(shape=(-1, -1)), np.zeros((4, 9, 5), np.float16), (4, 9, 5)),
        (X._replace(shape=()), np.zeros(4, np.float32), (4,)),
        (TensorSpec("x", "INT64", (-1, 2)), np.zeros((4, 2), np.int32), (4, 1, 2)),
        (TensorSpec("x", "BYTES", (-1, 1)), np.array([["a"], ["öl"], [""], ["d"]]), (4, 1, 1)),
    ],
)
@pytest.mark.parametrize("binary", [True, False])
def test_a_row_is_a_batch_of_one_or_a_whole_tensor(tmp_path, spec, array, shape, binary):
    samples = read_samples(stored(tmp_path, x=array), [spec])
    assert samples.inputs["x"].shape == shape and len(samples) == 4 and samples.labels is None
    stream = Stream(model="net", deadline_ms=1, samples="s.npz")
    payload = build_payload(stream, [spec], parse_url("http://h"), folder=tmp_path, binary=binary)
    assert len(payload.requests) == 4 and payload.sampled and payload.labels is None
    for request in payload.requests:
        head, body = request.split(b"\r\n\r\n", 1)
        assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
        (entry,) = json.JSONDecoder().raw_decode(body.decode("latin-1"))[0]["inputs"]
        assert entry["shape"] == list(shape[1:]) and entry["datatype"] == spec.datatype


def test_values_arrive_as_they_are(tmp_path):
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    stream = Stream(model="net", deadline_ms=1, samples=str(stored(tmp_path, x=images, label=np.arange(4), more=1)))
    payload = build_payload(stream, [X], parse_url("http://h"))
    sent = [np.frombuffer(request[-24:], "<f4").tolist() for request in payload.requests]
    assert sent == images.reshape(4, 6).tolist() and payload.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y": GOOD}, "has no array for the input 'x' of the model; it holds y"),
        ({}, "has no array for the input 'x' of the model; it holds nothing"),
        ({"x": GOOD[0]}, "x has the shape 2x3, whose rows do not fit the input's ?x2x3"),
        ({"x": np.float32(1)}, "x has the shape (), whose rows do not fit"),
        ({"x": np.zeros((4, 3, 2), np.float32)}, "x has the shape 4x3x2, whose rows do not fit"),
        ({"x": GOOD[:0]}, "x holds no sample"),
        ({"x": GOOD.astype(np.float64)}, "x is of type float64, which does not fit into the input's FP32; save it as"),
        ({"x": GOOD.astype(np.int64)}, "x is of type int64, which does not fit"),
        ({"x": GOOD.astype("U3")}, "x is of type <U3, which does not fit"),
        ({"x": GOOD, "label": np.arange(3)}, "label has the shape 3, must be one for each of 4 samples"),
        ({"x": GOOD, "label": np.zeros((4, 2), int)}, "label has the shape 4x2, must be one"),
        ({"x": GOOD, "label": np.zeros(4)}, "label is of type float64, must be whole numbers"),
        ({"x": GOOD, "label": np.zeros(4, np.uint64)}, "label is of type uint64, must be whole numbers"),
        ({"x": np.array([[[None]]])}, "not a file of samples (Object arrays cannot be loaded when allow_pickle=False)"),
    ],
)
def test_arrays_that_do_not_fit_are_one_line(tmp_path, arrays, said):
    path = stored(tmp_path, **arrays)
    with pytest.raises(WorkloadError) as caught:
        read_samples(path, [X])
    assert str(caught.value).startswith(f"{path}: {said}") and "\n" not in str(caught.value)


def huge() -> bytes:
    """An archive whose array claims more than it holds."""
    content, whole = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (1 << 45, 2, 3)})
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("x.npy", content.getvalue())
    return whole.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read the samples: No such file"),
        (b"", "not a file of samples"),
        (b"PK\x05\x06 nonsense", "not a file of samples"),
        (b"x" * 1000, "not a file of samples (File is not a zip file); write it with numpy.savez"),
        (huge(), "not a file of samples"),
    ],
)
def test_files_that_are_none_are_one_line(tmp_path, content, said):
    path = tmp_path / "s.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkloadError) as caught:
        read_samples(path, [X])
    assert str(caught.value).startswith(f"{path}: {said}") and "\n" not in str(caught.value)


def test_every_input_has_as_many_samples_and_a_model_needs_some(tmp_path):
    path = stored(tmp_path, x=GOOD, label=np.zeros((3, 1), np.int64))
    with pytest.raises(WorkloadError, match="label holds 3 samples, x 4"):
        read_samples(path, [X, TensorSpec("label", "INT64", (-1, 1))])
    with pytest.raises(WorkloadError, match="takes no input"):
        read_samples(path, [])
    with pytest.raises(WorkloadError, match="z is of type int64, must be text, as the input is BYTES"):
        read_samples(stored(tmp_path, z=np.zeros((4, 1), np.int64)), [TensorSpec("z", "BYTES", (-1, 1))])


def test_samples_and_shapes_agree_and_json_has_no_nan(tmp_path):
    stored(tmp_path, x=np.where(np.arange(6).reshape(2, 3) == 5, np.nan, GOOD).astype(np.float32))
    target, stream = parse_url("http://h"), Stream(model="net", deadline_ms=1, samples="s.npz", shapes={"x": (1, 2, 3)})
    payload = build_payload(stream, [X], target, folder=tmp_path)
    assert np.isnan(np.frombuffer(payload.requests[0][-24:], "<f4")).tolist() == [False] * 5 + [True]
    with pytest.raises(WorkloadError, match=r"s\.npz: sample 0 holds what no JSON can"):
        build_payload(stream, [X], target, folder=tmp_path, binary=False)
    other = stream.model_copy(update={"shapes": {"x": (7, 2, 3)}})
    with pytest.raises(WorkloadError, match="shape 7x2x3 of its input 'x' is not that of its samples, 1x2x3"):
        build_payload(other, [X], target, folder=tmp_path)


def test_requests_that_cannot_all_be_kept_ready_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.load.payload.MAX_STREAM_BYTES", 800)
    stored(tmp_path, x=GOOD)
    with pytest.raises(WorkloadError, match="samples up to 2 make requests of over 800 bytes; keep fewer of 4"):
        stream = Stream(model="net", deadline_ms=1, samples="s.npz")
        build_payload(stream, [X], parse_url("http://h"), folder=tmp_path)


def test_inputs_that_must_hold_a_number_are_sent_it():
    stream = Stream(model="vad", rate=1.0, values={"sr": 16000})
    inputs = [TensorSpec("sr", "INT64", ()), TensorSpec("x", "FP32", (-1, 2))]
    (request,) = build_payload(stream, inputs, parse_url("http://h"), binary=False).requests
    sent = {each["name"]: each["data"] for each in json.loads(request.partition(b"\r\n\r\n")[2])["inputs"]}
    assert sent["sr"] == [16000] and len(sent["x"]) == 2
    with pytest.raises(WorkloadError, match="unknown input 'rs'"):
        build_payload(Stream(model="vad", rate=1.0, values={"rs": 1}), inputs, parse_url("http://h"))
