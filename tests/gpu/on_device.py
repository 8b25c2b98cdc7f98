"""What only a GPU can show: captured graphs, copies beside computing, faults. ``make test-gpu`` runs it.

The name keeps it out of ``make test``; without a GPU, or what it needs, everything is skipped.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import weft.models
from tests.runtime.cuda.nets import chain, choosing, drawn, leaving, wanted
from tests.runtime.cuda.stitched import check_answers as check_mix
from tests.runtime.cuda.stitched import samples
from tests.runtime.special_models import SPECIAL, Special
from tests.support.stitched import stitched_file
from weft.base.errors import InputError
from weft.models.packaged import PACKAGED, packaged_models
from weft.runtime.backend import BatchPart, LoadOptions, OutputTarget, Step
from weft.runtime.client_memory import LendingTerms, LentPart, LentTensor
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.precision import WITHIN, difference
from weft.runtime.cuda.requirements import check
from weft.runtime.isolated.device import DeviceBackend, SeveralDevices
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.isolated.stop_table import StopTable, map_stops
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.samples import sample

try:
    check("cuda:0")
    MISSING = ""
except InputError as error:
    MISSING = str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
FINE = LoadOptions(grain_s=1e-9, max_batch=4)
FP16_WITHIN = 2e-3
"""As far as two orders of adding up float16 may be apart."""
TRAINED = {path.stem: path for path in sorted((Path(weft.models.__file__).parent / "trained").glob("*.onnx"))}
"""The early-exit networks that weft brings."""


@pytest.fixture(scope="module")
def gpu() -> Any:
    from weft.runtime.cuda.gpu import Gpu

    return Gpu(0)


def opened(gpu: Any, path: Path, options: LoadOptions = FINE) -> Any:
    from weft.runtime.cuda.preparing import prepare_on

    return prepare_on(gpu, path, options)


def through(gpu: Any, model: Any, feeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Batches in turns, segment by segment."""
    values: list[Any] = list(feeds)
    with gpu.lane_context():
        for segment in range(len(model.segments)):
            launched = [model.launch(Step(segment, [BatchPart(each)], len(feeds[0]["x"]))) for each in values]
            values = [each.outputs[0].values for each in launched]
        for each in launched:
            each.answered.wait()
    return [each.outputs[0].answers for each in launched]


def test_captured_segments_give_what_the_cpu_gives(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model = opened(gpu, path)
    assert len(model.segments) == 6 and not model.uncaptured()
    for rows in (1, 3, 4, 9):
        (found,) = through(gpu, model, [drawn(rows)])
        np.testing.assert_allclose(found["y"], wanted(path, drawn(rows)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["mts", "split"])
def test_stitched_models_are_captured_and_give_what_the_cpu_gives(gpu: Any, form: str, tmp_path: Path) -> None:
    path = stitched_file(tmp_path / "body.onnx", form=form)
    model, body = opened(gpu, path), prepare(path, LoadOptions(max_batch=2))
    assert len(model.segments) > 1 and not model.uncaptured()
    for mix in ((1, 1, 1), (0, 2, 0), (3, 0, 1), (0, 5, 2)):
        given = samples(model, mix)
        parts = [BatchPart(each) for each in given]
        with gpu.lane_context():
            for segment in range(len(model.segments)):
                launched = model.launch(Step(segment, parts, sum(mix)))
                parts = [BatchPart(launched.outputs[0].values)]
            launched.answered.wait()
        check_mix(launched.outputs[0].answers, body, given)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("fp16", 0.02)])
@pytest.mark.parametrize("architecture", ["tinynet", "tiny-dense", "tiny-mobile"])
def test_stitched_models_in_the_fused_form_are_captured_and_come_back(
    gpu: Any, architecture: str, precision: str, near: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.runtime.cuda.stitched import described_file, is_fused
    from weft.runtime.cuda.preparing import prepare_on
    from weft_stitch.on_device import StitchedFile

    monkeypatch.setattr(
        StitchedFile, "choose_preparation", lambda file, blueprint: file._fused_preparation()
    )  # whatever is quicker
    path, cache = described_file(tmp_path / "body.onnx", architecture), tmp_path / "cache"
    options = replace(FINE, max_batch=8, precision=precision)
    body = prepare(path, LoadOptions(max_batch=2))
    learned = prepare_on(gpu, path, options, cache)
    for model in (learned, prepare_on(gpu, path, options, cache, learn=False)):
        assert is_fused(model) and not model.uncaptured()
        assert (len(model.segments) > 1) == (architecture != "tiny-mobile")
        for mix in ((1, 1, 1), (0, 2, 0), (3, 0, 1), (0, 5, 2)):
            given = samples(model, mix)
            parts = [BatchPart(each) for each in given]
            with gpu.lane_context():
                for segment in range(len(model.segments)):
                    launched = model.launch(Step(segment, parts, sum(mix)))
                    parts = [BatchPart(launched.outputs[0].values)]
                launched.answered.wait()
                model.evict()
                model.restore()
            for name, right in body.run(body.gather(given)).items():
                found = launched.outputs[0].answers[name]
                assert found.shape == right.shape
                assert not right.size or np.abs(found - right).max() < near * np.abs(right).max()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models that differ by a low rank."""
    from tests.stitching.encoders import tiny_encoders

    return tiny_encoders(tmp_path_factory.mktemp("encoders"), 4, rank=2, classes=(2, 5, 3, 4))


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("fp16", 0.02)])
def test_encoders_with_one_body_answer_as_their_files_and_come_and_go(
    gpu: Any, encoders: list[Path], precision: str, near: float, tmp_path: Path
) -> None:
    from tests.runtime.cuda import bodies
    from tests.stitching.encoders import sentences

    cache, options = tmp_path / "cache", LoadOptions(precision=precision, max_batch=16)
    first, more = (bodies.stitched(encoders[:count], tmp_path / f"{count}.onnx") for count in (3, 4))
    mix = [(2, 1, 7), (0, 2, 33), (2, 3, 5), (1, 1, 64), (0, 1, 1), (1, 20, 40)]
    asked = [(encoders[task], sentences(rows, length, task)) for task, rows, length in mix]
    learned = bodies.opened(first, options, gpu, cache)
    with gpu.lane_context():
        bodies.check(learned, asked, near)
    learned.close()
    model = bodies.opened(first, options, gpu, cache, learn=False)
    taken = bodies.opened(more, options, gpu, cache, learn=False)
    assert taken._body is model._body, "in place"
    with gpu.lane_context():
        bodies.check(model, asked, near)
        bodies.check(taken, [*asked, (encoders[3], sentences(2, 50))], near)
    model.close()
    taken.close()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_body_from_python_answers_as_on_the_cpu(encoders: list[Path], precision: str) -> None:
    import torch

    from tests.stitching.encoders import TOKENS
    from weft_stitch.bodies.body_stitching import stitch_body
    from weft_stitch.running.body_serving import FusedEncoder

    made = stitch_body(encoders, tolerance=1e-6, check=False, measure=False)
    there, here = FusedEncoder(made, "cuda", getattr(torch, precision)), FusedEncoder(made, "cpu")
    rng, near = np.random.default_rng(0), 1e-4 if precision == "float32" else 0.02
    for lengths in ([16, 7, 33, 40], [5, 60, 12, 1, 30], [64] * 40):
        asked = [(made.names[at % 4], rng.integers(0, TOKENS, length)) for at, length in enumerate(lengths)]
        for found, right in zip(there(asked), here(asked), strict=True):
            assert np.abs(found - right).max() < near * np.abs(right).max()


def test_batches_in_turns_keep_what_is_theirs(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    feeds = [drawn(3, seed) for seed in range(4)]
    for feed, found in zip(feeds, through(gpu, opened(gpu, path), feeds), strict=True):
        np.testing.assert_allclose(found["y"], wanted(path, feed), rtol=1e-4, atol=1e-5)


def test_float32_means_float32(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    assert not any("differs" in each for each in opened(gpu, path).remarks)
    half = opened(gpu, path, LoadOptions(max_batch=2, precision="fp16"))
    assert any(each.startswith("fp16: differs from float32") for each in half.remarks)


def test_samples_leave_at_exits_on_the_device(gpu: Any, tmp_path: Path) -> None:
    path = leaving(tmp_path / "leaving.onnx")
    model = opened(gpu, path, LoadOptions(grain_s=1.0, max_batch=4, exits=("early", "late")))
    feed = drawn(3)
    with gpu.lane_context():
        first = model.launch(Step(0, [BatchPart(feed)], 3))
        first.answered.wait()
        np.testing.assert_allclose(first.outputs[0].answers["early"], wanted(path, feed, "early"), rtol=1e-4, atol=1e-5)
        last = model.launch(Step(1, [BatchPart(first.outputs[0].values, [1])], 1))
        last.answered.wait()
    np.testing.assert_allclose(last.outputs[0].answers["late"], wanted(path, feed, "late")[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shares", [False, True])
def test_batches_that_are_stopped_leave_at_gates_and_go_on_with_the_same_bits(shares: bool, tmp_path: Path) -> None:
    from tests.runtime.cuda.torch_nets import draw_images, images
    from weft.runtime.cuda.gpu import Gpu

    gpu, table = Gpu(0), StopTable()
    gpu.use_stops(map_stops(table.file))
    assert not gpu.ungated
    path, _ = images(tmp_path / "images.pt2")
    options = LoadOptions(grain_s=1e-9, max_batch=4, independent_rows=True, shares=shares)
    model = opened(gpu, path, options)
    assert model.timing.gated
    feeds, count, slots = [draw_images(rows) for rows in (3, 4)], len(model.segments), (table.take(), table.take())
    for lane in [0, *map(gpu.cuts.lane_of, range(1, 1 + shares * len(gpu.cuts.parts)))]:
        with gpu.lane_context(lane):
            expected = [model.run(feed)["output"] for feed in feeds]
            for stopped in range(2):  # the first, or the second, is stopped before it begins; both use one memory
                table.stop(slots[stopped])
                launches = [
                    model.launch(Step(0, [BatchPart(feed)], len(feed["image"]), count), slot)
                    for feed, slot in zip(feeds, slots, strict=True)
                ]
                ends = [launch.wait() for launch in launches]
                assert [computed for _, computed in ends] == ([0, 0] if not stopped else [None, 0])
                table.release(slots[stopped])
                assert table.take() == slots[stopped]
            for feed, right in zip(feeds, expected, strict=True):
                at, parts = 0, [BatchPart(feed)]
                while at < count:  # segment by segment, as if it were stopped at every gate
                    outputs, _ = model.launch(Step(at, parts, len(feed["image"])), slots[0]).wait()
                    at, parts = at + 1, [BatchPart(outputs[0].values)]
                np.testing.assert_array_equal(outputs[0].answers["output"], right)


def test_a_server_stops_a_batch_in_a_worker_by_a_store(backend: DeviceBackend, tmp_path: Path) -> None:
    from tests.runtime.cuda.torch_nets import draw_images, images

    path, _ = images(tmp_path / "images.pt2")
    options = LoadOptions(grain_s=1e-9, max_batch=4, independent_rows=True)
    model: Any = backend.open(path, options, tmp_path / "cache")
    lane, ends, count = backend.lane(0), SimpleQueue[Any](), len(model.segments)
    answers, early = set(), 0
    for turn in range(40):
        at, values = 0, draw_images(4)
        while at < count:
            run = model.start(Step(at, [BatchPart(values)], 4, count - at), lane, ends.put)
            if turn and not at:
                threading.Event().wait(turn * 2e-5)
                run.stop()
            end = ends.get(timeout=120.0)
            assert end.error is None
            early += end.computed is not None
            at = count if end.computed is None else at + end.computed
            values = end.outputs[0].values if end.outputs else values
        answers.add(end.outputs[0].answers["output"].tobytes())
    assert len(answers) == 1 and early
    assert lane.close(60.0)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("fp16", 0.02), ("bf16", 0.1)])
def test_programs_of_torch_are_captured_and_come_back(gpu: Any, tmp_path: Path, precision: str, near: float) -> None:
    from tests.runtime.cuda.torch_nets import draw_images as images_drawn
    from tests.runtime.cuda.torch_nets import images
    from tests.runtime.cuda.torch_nets import run_net as net_wanted

    path, net = images(tmp_path / "images.pt2")
    options = LoadOptions(grain_s=1e-9, max_batch=4, independent_rows=True, precision=precision)
    model = opened(gpu, path, options)
    assert len(model.segments) > 3 and not model.uncaptured()
    for rows in (1, 3, 4, 9):
        right = net_wanted(net, images_drawn(rows)).numpy()
        for _ in range(2):
            with gpu.lane_context():
                found = model.run(images_drawn(rows))["output"]
            assert np.abs(found - right).max() < near * np.abs(right).max()
            with gpu.lane_context():
                model.evict()
                model.restore()


def test_sizes_of_programs_are_told_by_what_crosses(gpu: Any, tmp_path: Path) -> None:
    from tests.runtime.cuda.torch_nets import TEXTS, draw_sentences, words
    from tests.runtime.cuda.torch_nets import run_net as net_wanted

    path, net = words(tmp_path / "words.pt2")
    options = LoadOptions(grain_s=1e-9, max_batch=4, independent_rows=True, shapes=TEXTS)
    model = opened(gpu, path, options)
    assert len(model.segments) > 8 and not model.uncaptured()
    for rows, count in ((1, 5), (3, 5), (2, 9)):
        with gpu.lane_context():
            found = model.run(draw_sentences(rows, count))
        for name, right in net_wanted(net, draw_sentences(rows, count)).items():
            np.testing.assert_allclose(found[name], right, rtol=1e-3, atol=1e-4)


def far_off(gpu: Any, path: Path, options: LoadOptions, rows: Callable[[Any], dict[str, Any]]) -> tuple[float, Any]:
    """How far the answers on the device are off the CPU's, and the model there."""
    cpu, model = prepare(path, replace(options, grain_s=0.005)), opened(gpu, path, options)
    feed = rows(cpu.inputs)
    with gpu.lane_context():
        found = model.run(feed)
    right = cpu.run(feed)
    return difference({name: right[name] for name in found}, found), model


@pytest.mark.parametrize("special", SPECIAL, ids=lambda each: each.name)
def test_special_models_answer_as_on_the_cpu(gpu: Any, special: Special, tmp_path: Path) -> None:
    options = LoadOptions(grain_s=1e-9, max_batch=None if special.batched else 1, shapes=special.shapes)
    far, model = far_off(
        gpu, special.save(tmp_path), options, lambda inputs: special.rows(inputs, 1, "plain", np.random.default_rng(7))
    )
    near = FP16_WITHIN if special.name == "fp16" else WITHIN
    assert far <= near or special.name == "dropout-in-training" or any("differs" in each for each in model.remarks)


@pytest.mark.parametrize("name", [*TRAINED, *packaged_models()])
def test_packaged_models_answer_as_on_the_cpu(gpu: Any, name: str) -> None:
    about = PACKAGED.get(name)
    path = packaged_models()[name] if about else TRAINED[name]
    shapes, values = (about.shapes, about.values) if about else ({}, {})
    options = LoadOptions(grain_s=0.00025, shapes=shapes, values=values)

    def drawn_rows(inputs: Any) -> dict[str, Any]:
        sizes = {each.name: shapes.get(each.name, tuple(max(1, size) for size in each.shape)) for each in inputs}
        feed = sample(inputs, sizes, 7, options.values)
        if name == "magika":  # of two values only its layer norms make what float32 cannot tell
            feed["bytes"] = np.random.default_rng(7).integers(0, 256, sizes["bytes"], np.int32)
        return feed

    far, model = far_off(gpu, path, options, drawn_rows)
    assert far <= max(WITHIN, 2 * own_spread(path, drawn_rows(model.inputs)))


def own_spread(path: Path, feed: dict[str, Any]) -> float:
    """How far the CPU is off itself, with and without what ONNX Runtime optimises: what float32 is good for there."""
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = (ort.InferenceSession(str(path), each, ["CPUExecutionProvider"]) for each in (None, plain))
    right, found = ({str(at): each for at, each in enumerate(session.run(None, feed))} for session in sessions)
    return difference(right, found)


def test_control_flow_runs_on_the_cpu(gpu: Any, tmp_path: Path) -> None:
    model = opened(gpu, choosing(tmp_path / "choosing.onnx"), LoadOptions())
    assert any("runs on the CPU" in each for each in model.remarks)


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    found = DeviceBackend("cuda:0", WorkerLimits(gates=True))
    yield found
    found.close()


def test_a_confined_worker_has_the_device_and_is_replaced(backend: DeviceBackend, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model: Any = backend.open(path, FINE, tmp_path / "cache", learn=False)
    lane = backend.lane(0)

    def once() -> Any:
        values: Any = drawn(2)
        for segment in range(len(model.segments)):
            ended, end = threading.Event(), []
            model.start(Step(segment, [BatchPart(values)], 2), lane, lambda e, k=end, d=ended: (k.append(e), d.set()))
            assert ended.wait(120.0)
            if end[0].error:
                return end[0]
            values = end[0].outputs[0].values
        return end[0]

    np.testing.assert_allclose(once().outputs[0].answers["y"], wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)
    worker = backend.groups()["cuda:0"].worker
    assert worker is not None
    worker.kill("a test")
    for _ in range(600):
        if (end := once()).error is None:
            break
        threading.Event().wait(0.1)
    np.testing.assert_allclose(end.outputs[0].answers["y"], wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)
    assert lane.close(60.0)


def test_a_model_leaves_the_memory_and_comes_back_to_what_was_captured(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.runtime.cuda.segments.SHARED_FROM_BYTES", 1)
    path = chain(tmp_path / "chain.onnx")
    engine = CudaEngine("cuda:0")
    engine._device = gpu
    model: Any = engine.open(path, LoadOptions(grain_s=1e-9, max_batch=4, rests=True), tmp_path / "cache", learn=True)
    with gpu.lane_context():
        for seed in range(3):
            away, feed = gpu.memory()[0], drawn(1 + seed, seed)
            model.restore()
            assert away - gpu.memory()[0] == model.residency.moving_bytes > 0
            np.testing.assert_allclose(model.run(feed)["y"], wanted(path, feed), rtol=1e-4, atol=1e-5)
            gpu.finish()
            model.evict()
            assert gpu.memory()[0] == away
    model.close()


def test_two_workers_have_one_device_between_them(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    both = SeveralDevices(["cuda:0", "cuda:0"], WorkerLimits())
    model: Any = both.open(path, FINE, tmp_path / "cache", learn=False)
    for index in range(2):
        lane, values = both.lane(index), drawn(2, index)
        assert lane.able
        for segment in range(len(model.segments)):
            ended: SimpleQueue[Any] = SimpleQueue()
            model.start(Step(segment, [BatchPart(values)], 2), lane, ended.put)
            end = ended.get(timeout=120)
            assert end.error is None, end.error
            values = end.outputs[0].values
        np.testing.assert_allclose(end.outputs[0].answers["y"], wanted(path, drawn(2, index)), rtol=1e-4, atol=1e-5)
        assert lane.close(60.0)
    assert set(both.groups()) == {"cuda:0", "cuda:0#2"}
    model.close()
    both.close()


@pytest.mark.parametrize("kind", ["memory", "cuda"])
def test_tensors_are_taken_from_regions_of_clients(backend: DeviceBackend, tmp_path: Path, kind: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu_asking import CudaMemory, SystemMemory

    path, sizes = chain(tmp_path / "wide.onnx", sizes=("n", 4096, 8)), (3, 4096, 8)
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    region: Any = (SystemMemory if kind == "memory" else CudaMemory)(b"\0" * 100 + x.tobytes())
    lender = Lending(region)
    model = backend.open(path, LoadOptions(max_batch=4))
    lane = backend.lane(0)
    for _ in range(2):
        ended: SimpleQueue[Any] = SimpleQueue()
        values: Any = {"x": LentTensor(lender, 100, sizes, x.dtype)}
        for segment in range(len(model.segments)):
            model.start(Step(segment, [BatchPart(values)], 3), lane, ended.put)
            end = ended.get(timeout=60)
            assert end.error is None, end.error
            values = end.outputs[0].values
        np.testing.assert_allclose(end.outputs[0].answers["y"], wanted(path, {"x": x}), rtol=1e-4, atol=1e-5)
    if kind == "memory":  # the GPU has the pages that were there when it was told of them
        os.truncate(f"/dev/shm/{region.name}", 10)
    else:
        backend.write_region(lender, 100, memoryview((x * 0).tobytes()))
    model.start(Step(0, [BatchPart({"x": LentTensor(lender, 100, sizes, x.dtype)})], 3), lane, ended.put)
    end = ended.get(timeout=60)
    assert end.error is None and backend.groups()["cuda:0"].counts.deaths <= 1
    model.close()
    lane.close()
    region.close()


@pytest.fixture(params=[False, True], ids=["segments", "gates"])
def either(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """A worker without gates, and one with."""
    found = DeviceBackend("cuda:0", WorkerLimits(gates=request.param))
    yield found
    found.close()


@pytest.mark.parametrize("kind", ["memory", "cuda"])
def test_outputs_are_written_into_regions_of_clients(either: DeviceBackend, tmp_path: Path, kind: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu_asking import CudaMemory, SystemMemory

    path, sizes = chain(tmp_path / "wide.onnx", sizes=("n", 4096, 8)), (3, 4096, 8)
    row_bytes, guard = 4 * 4096 * 8, b"\xab" * 100  # a row is as long as the shortest output for such a region
    region: Any = (SystemMemory if kind == "memory" else CudaMemory)(guard * (4 * row_bytes // 100))
    lender = Lending(region)
    model: Any = either.open(path, LoadOptions(grain_s=1e-9, max_batch=4), tmp_path / "cache")
    lane, count = either.lane(0), len(model.segments)
    places = [(0, 1, 100), (1, 3, 300 + row_bytes)]  # rows, and where they go: the fourth row is padding
    for seed, lent in enumerate([2, 2, 1]):  # of the last batch, one request has its output sent
        x = np.random.default_rng(seed).standard_normal(sizes).astype(np.float32)
        expected, values, at = wanted(path, {"x": x}), {"x": x}, 0
        before = content(region)
        targets = [
            OutputTarget({"y": LentPart(lender, offset, (stop - start) * row_bytes)}, (start, stop))
            for start, stop, offset in places[:lent]
        ]
        while at < count:
            ended: SimpleQueue[Any] = SimpleQueue()
            segments = count if model.timing.gated else 1
            model.start(Step(at, [BatchPart(values)], 3, segments, targets), lane, ended.put)
            end = ended.get(timeout=60)
            assert end.error is None, end.error
            at, values = at + segments, end.outputs[0].values
        output, after = end.outputs[0], content(region)
        assert output.written.requests == tuple(range(lent)) and (output.answers["y"].strides[0] == 0) == (lent == 2)
        for start, stop, offset in places[:lent]:
            rows = np.frombuffer(after, np.float32, (stop - start) * 4096 * 8, offset).reshape(-1, 4096, 8)
            np.testing.assert_allclose(rows, expected[start:stop], rtol=1e-4, atol=1e-5)
            before = before[:offset] + after[offset : offset + rows.nbytes] + before[offset + rows.nbytes :]
        assert after == before, "nothing else is written"
    np.testing.assert_allclose(output.answers["y"], expected, rtol=1e-4, atol=1e-5)
    model.close()
    lane.close()
    region.close()


def content(region: Any) -> bytes:
    """What is in the memory of a client."""
    if region.kind == "system":
        return Path(f"/dev/shm/{region.name}").read_bytes()
    data = ctypes.create_string_buffer(region.size)
    failed = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoH_v2(data, region._address, ctypes.c_size_t(region.size))
    assert not failed, f"the driver says {failed}"
    return data.raw


@pytest.mark.parametrize("gates", [False, True])
def test_a_server_answers_requests_whose_tensors_are_all_in_cuda_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gates: bool
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.serving import live
    from tests.support.inference import send
    from weft.serving.shared_memory import CudaRegion

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu_asking import CudaMemory, registered

    def write_from(region: Any, data: memoryview, offset: int) -> None:
        raise AssertionError("the server does not write it")

    monkeypatch.setattr(CudaRegion, "write_from", write_from)
    path = chain(tmp_path / "models" / "chain" / "1" / "model.onnx")
    (tmp_path / "models" / "chain" / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.001\n")
    feeds = [drawn(1 + seed % 2, seed)["x"] for seed in range(6)]  # short outputs go to memory of the GPU, too
    memories = [CudaMemory(feed.tobytes() + b"\xab" * (feed.nbytes + 8)) for feed in feeds]

    def asked(at: int) -> Any:
        shape, size, place = feeds[at].shape, feeds[at].nbytes, {"shared_memory_region": memories[at].name}
        tensor = {"name": "x", "datatype": "FP32", "shape": shape}
        body = {
            "inputs": [tensor | {"parameters": place | {"shared_memory_byte_size": size}}],
            "outputs": [
                {"name": "y", "parameters": place | {"shared_memory_offset": size, "shared_memory_byte_size": size + 8}}
            ],
        }
        return send(server, "POST", "/v2/models/chain/infer", body)

    options = {"gates": True, "policy": "edf"} if gates else {}
    with live.running(tmp_path / "models", device="cuda:0", cache=tmp_path / "cache", **options) as server:
        with ExitStack() as stack:
            for memory in memories:
                stack.enter_context(registered(server.server.http_port, memory))
            with ThreadPoolExecutor(6) as threads:
                answers = list(threads.map(asked, [*range(6)] * 20))
            assert {answer.status for answer in answers} == {200}, answers[0].body
            assert all("data" not in answer.json()["outputs"][0] for answer in answers)
            for feed, memory in zip(feeds, memories, strict=True):
                data = content(memory)
                found = np.frombuffer(data, np.float32, feed.size, feed.nbytes).reshape(feed.shape)
                np.testing.assert_allclose(found, wanted(path, {"x": feed}), rtol=1e-4, atol=1e-5)
                assert data[2 * feed.nbytes :] == b"\xab" * 8
        assert server.server.service.library.backend.counts().deaths == 0


class Lending:
    """A client's region as the server has it."""

    def __init__(self, region: Any) -> None:
        self.file, handle = None, ""
        if region.kind == "system":
            self.file = os.open(f"/dev/shm/{region.name}", os.O_RDWR)
        else:
            handle = b64decode(region.about["raw_handle"]["b64"]).hex()
        self.terms = LendingTerms(1 if self.file else 2, "file" if self.file else "cuda", 0, region.size, handle)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        raise AssertionError("the server does not read it")


FAULT = """
import torch, time
from weft.models.packaged import PACKAGED, packaged_models
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.precision import WITHIN, difference
from weft.runtime.cuda.lane import Launched
from weft.runtime.backend import Step
engine = CudaEngine("cuda:0")
class Bad:
    def launch(self, step):
        torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
        mark = engine.device.mark()
        return Launched([], mark, mark, False)
engine.lane(0).start(Bad(), Step(0, [], 1), print)
time.sleep(60)
"""


def test_the_driver_cuts_the_gpu_in_two_and_both_parts_compute(gpu: Any) -> None:
    import torch

    from weft.runtime.cuda.partitions import cut

    parts = cut(0, 48)
    assert sum(part.sms for part in parts) == torch.cuda.get_device_properties(0).multi_processor_count
    given = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    made = []
    for handle in [each for part in parts for each in part.streams]:
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            made.append(given * 2 + 1)
    torch.cuda.synchronize()
    assert all(torch.equal(each, given * 2 + 1) for each in made)


# Models that share the GPU

SHARED = replace(FINE, shares=True)


def on_lane(gpu: Any, model: Any, lane: int, feed: dict[str, Any]) -> Any:
    """What a model gives on a lane."""
    values: Any = feed
    with gpu.lane_context(lane):
        for segment in range(len(model.segments)):
            launched = model.launch(Step(segment, [BatchPart(values)], len(feed["x"])))
            values = launched.outputs[0].values
        launched.answered.wait()
    return launched.outputs[0].answers["y"]


@pytest.fixture
def parts(gpu: Any) -> list[int]:
    """The lanes that are parts of the GPU."""
    if gpu.uncut:
        pytest.skip(f"the GPU cannot be cut: {gpu.uncut}")
    return [gpu.cuts.lane_of(part) for part in range(1, len(gpu.cuts.parts) + 1)]


def test_a_model_is_captured_on_every_part_and_gives_the_same_on_all_lanes(
    gpu: Any, parts: list[int], tmp_path: Path
) -> None:
    path = chain(tmp_path / "chain.onnx")
    model = opened(gpu, path, SHARED)
    assert not model.uncaptured() and sorted(model.shares.like) == [1, 2, 3, 4], model.remarks
    assert all(each.parts == [1, 2, 3, 4] for each in model._rungs), model.remarks
    for rows in (1, 3, 4, 9):
        for lane in (*range(gpu.cuts.streams + 1), *parts):
            found = on_lane(gpu, model, lane, drawn(rows))
            np.testing.assert_allclose(found, wanted(path, drawn(rows)), rtol=1e-4, atol=1e-5)


def test_what_a_part_computes_is_waited_for_and_waits_itself(gpu: Any, parts: list[int]) -> None:
    import torch

    with gpu.lane_context():
        own, weight = gpu.model_view(), torch.eye(4096, device="cuda")
        given, made = torch.zeros(4096, 4096, device="cuda"), torch.zeros(4096, 4096, device="cuda")

        def long() -> None:
            found = given
            for _ in range(8):
                found = found @ weight
            made.copy_(found)

        replays = [own.model_view(part).capture(long) for part in range(1, len(parts) + 1)]
        gpu.finish()
    for at, (lane, replay) in enumerate(zip(parts, replays, strict=True), 1):
        with gpu.lane_context(lane):
            for _ in range(4):
                given.add_(1)  # before it, on the lane's own stream
            replay()
            found = made.clone()  # behind it
            gpu.finish()
        assert torch.equal(found, torch.full_like(found, 4 * at)), f"part {at} was not waited for"


def test_programs_of_torch_run_on_parts(gpu: Any, parts: list[int], tmp_path: Path) -> None:
    import torch

    from tests.runtime.cuda.torch_nets import images
    from weft.runtime.cuda.preparing import prepare_on

    path, net = images(tmp_path / "images.pt2")
    model: Any = prepare_on(gpu, path, replace(SHARED, independent_rows=True))
    assert all(each.parts == [1, 2, 3, 4] for each in model._rungs), model.remarks
    feed = {"image": np.random.default_rng(0).standard_normal((3, 3, 6, 6)).astype(np.float32)}
    with torch.no_grad():
        right = net(torch.from_numpy(feed["image"])).numpy()
    for lane in (0, *parts):
        values: Any = feed
        with gpu.lane_context(lane):
            for segment in range(len(model.segments)):
                launched = model.launch(Step(segment, [BatchPart(values)], 3))
                values = launched.outputs[0].values
            launched.answered.wait()
        np.testing.assert_allclose(launched.outputs[0].answers["output"], right, rtol=1e-3, atol=1e-4)


def test_what_is_captured_on_a_part_stays_on_it(
    gpu: Any, parts: list[int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    from tests.serving.live import heavy

    model = opened(
        gpu, heavy(tmp_path / "heavy.onnx", layers=4, width=4096, rows=4096), LoadOptions(max_batch=1, shares=True)
    )
    like, sms = model.shares.like[1], gpu.cuts.sms
    record_property("like", like.model_dump_json())
    for part in gpu.cuts.parts:
        assert like.speeds[part] < 0.6 + 0.5 * part / sms, f"not slower on less of the GPU: {like}"
    assert like.bound(sms) == "compute", like


def test_models_run_at_once_on_streams_and_on_the_sides_of_a_cut(gpu: Any, parts: list[int], tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx", layers=8)
    models = [opened(gpu, path, SHARED) for _ in range(2)]
    right = wanted(path, drawn(4))
    for lanes in ((0, 1), parts[:2], parts[2:4], (0, parts[0])):
        wrong: list[Any] = []

        def keep_busy(model: Any, lane: int, wrong: list[Any] = wrong) -> None:
            for _ in range(50):
                found = on_lane(gpu, model, lane, drawn(4))
                if not np.allclose(found, right, rtol=1e-4, atol=1e-5):
                    wrong.append((lane, found))

        pairs = zip(models, lanes, strict=True)
        threads = [threading.Thread(target=keep_busy, args=(model, lane)) for model, lane in pairs]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not wrong


def test_a_batch_goes_on_on_other_lanes_and_others_are_between(gpu: Any, parts: list[int], tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model, lanes = opened(gpu, path, SHARED), (0, parts[0], 1, parts[1], 2, parts[3])
    feeds = [drawn(3, seed) for seed in range(3)]
    values: list[Any] = list(feeds)
    for segment in range(len(model.segments)):
        for at, each in enumerate(values):
            with gpu.lane_context(lanes[(segment + at) % len(lanes)]):
                launched = model.launch(Step(segment, [BatchPart(each)], 3))
                launched.answered.wait()
            values[at] = launched.outputs[0].values
            if segment == len(model.segments) - 1:
                found = launched.outputs[0].answers["y"]
                np.testing.assert_allclose(found, wanted(path, feeds[at]), rtol=1e-4, atol=1e-5)


def test_a_model_that_has_left_comes_back_to_every_part(gpu: Any, parts: list[int], tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model = opened(gpu, path, SHARED)
    for lane in (0, *parts):
        with gpu.lane_context(lane):
            model.evict()
            model.restore()
        np.testing.assert_allclose(on_lane(gpu, model, lane, drawn(2)), wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["abreast", "streams", "split"])
def test_a_server_whose_models_share_says_the_same_as_one_whose_models_do_not(policy: str, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.serving import live
    from tests.support.inference import infer_json, send

    names, cache = ["one", "two", "three"], tmp_path / "cache"
    for layers, name in enumerate(names, 4):
        chain(tmp_path / "models" / name / "1" / "model.onnx", layers)
        (tmp_path / "models" / name / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.001\n")
    feeds = [drawn(1 + at % 3, at) for at in range(30)]
    with live.running(tmp_path / "models", device="cuda:0", cache=cache) as server:
        right = {name: [infer_json(server, name, feed) for feed in feeds] for name in names}
    with live.running(tmp_path / "models", device="cuda:0", policy=policy, cache=cache) as server:
        with ThreadPoolExecutor(3) as clients:
            outputs = clients.map(lambda name: [infer_json(server, name, feed) for feed in feeds], names)
            found = dict(zip(names, outputs, strict=True))
        shares = [
            line
            for line in send(server, "GET", "/metrics").body.decode().splitlines()
            if line.startswith("weft_share_seconds")
        ]
        assert all(any(f'model="{name}"' in line for line in shares) for name in names), shares
        assert server.server.service.library.backend.counts().deaths == 0
    assert found == right


def test_a_fault_of_the_device_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 70 and "weft: cuda:0 was lost: " in done.stderr
