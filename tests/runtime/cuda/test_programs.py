"""Programs of torch on a device's twin: cut, batched, in fewer bits, from the cache, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.cuda.torch_nets import (
    TEXTS,
    TOKENS,
    Writing,
    draw_images,
    draw_sentences,
    images,
    run_net,
    saved,
    words,
)
from tests.serving import live
from tests.support.inference import infer_fp32
from weft.base.errors import ModelError, NotLearned
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.cuda.device import EVICTED_BYTE, TWIN_CUTS, HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.torch_program import TorchProgram, read_program

FINE = LoadOptions(grain_s=1e-9, max_batch=4, independent_rows=True)
"""Cut wherever it can be."""
Net = tuple[Path, nn.Module]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Net:
    return images(tmp_path_factory.mktemp("programs") / "images.pt2")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Net:
    return words(tmp_path_factory.mktemp("programs") / "words.pt2")


@pytest.fixture(scope="module")
def model(pictures: Net) -> DeviceModel:
    return opened(pictures[0])


def opened(path: Path, **changes: Any) -> DeviceModel:
    options = LoadOptions(**{"grain_s": 1e-9, "max_batch": 4, "independent_rows": True, **changes})
    found = prepare_on(HostDevice(), path, options)
    assert isinstance(found, DeviceModel)
    return found


def through(model: DeviceModel, feed: dict[str, Any]) -> dict[str, Any]:
    values, rows = feed, len(next(iter(feed.values())))
    for segment in range(len(model.segments)):
        made = model.launch(Step(segment, [BatchPart(values)], rows)).outputs[0]
        values = made.values
    return dict(made.answers)


def test_programs_run_on_parts_of_a_device_as_on_the_whole(pictures: Net) -> None:
    device = HostDevice()
    model = prepare_on(device, pictures[0], replace(FINE, shares=True))
    assert isinstance(model, DeviceModel) and sorted(model.shares.like) == [1, 2, 3, 4]
    assert all(each.parts == [1, 2, 3, 4] for each in model._rungs)
    for lane in (0, TWIN_CUTS.lane_of(1), TWIN_CUTS.lane_of(4)):
        with device.lane_context(lane):
            found = through(model, draw_images(3))["output"]
        np.testing.assert_allclose(found, run_net(pictures[1], draw_images(3)), rtol=1e-4, atol=1e-5)


def test_segments_give_what_the_module_gives(model: DeviceModel, pictures: Net) -> None:
    assert (
        len(model.segments) > 3
        and model.batching.mergeable
        and model.batching.batchable
        and model.batching.max_batch == 4
    )
    assert [(each.name, each.datatype, each.shape) for each in model.inputs] == [("image", "FP32", (-1, 3, 6, 6))]
    assert [(each.name, each.shape) for each in model.outputs] == [("output", (-1, 4))]
    for rows in (1, 3, 4, 9):  # the last is more than was captured
        found = through(model, draw_images(rows))["output"]
        np.testing.assert_allclose(found, run_net(pictures[1], draw_images(rows)), rtol=1e-4, atol=1e-5)


def test_rows_leave_and_batches_are_joined_between_segments(model: DeviceModel, pictures: Net) -> None:
    one, other = draw_images(3, 3), draw_images(2, 4)
    first, second = (
        model.launch(Step(0, [BatchPart(feed)], len(feed["image"]))).outputs[0].values for feed in (one, other)
    )
    made = model.launch(Step(1, [BatchPart(first, [2, 0]), BatchPart(second)], 4)).outputs[0]
    for segment in range(2, len(model.segments)):
        made = model.launch(Step(segment, [BatchPart(made.values)], 4)).outputs[0]
    both = {"image": np.concatenate([one["image"][[2, 0]], other["image"]])}
    np.testing.assert_allclose(made.answers["output"], run_net(pictures[1], both), rtol=1e-4, atol=1e-5)


def test_sizes_that_were_worked_out_earlier_are_told_by_what_crosses_a_cut(texts: Net) -> None:
    model = opened(texts[0], shapes=TEXTS)
    assert len(model.segments) > 8
    assert [each.name for each in model.outputs] == ["states", "pooled"]
    for rows, count in ((1, TOKENS), (3, TOKENS), (2, 9)):  # the last was not captured
        found, right = through(model, draw_sentences(rows, count)), run_net(texts[1], draw_sentences(rows, count))
        for name, each in right.items():
            np.testing.assert_allclose(found[name], each, rtol=1e-4, atol=1e-5)


def test_every_cut_that_is_allowed_works(texts: Net) -> None:
    program = TorchProgram(read_program(texts[0]), "cpu")
    program.hold(program.weights)
    feed = {name: torch.from_numpy(each) for name, each in draw_sentences(2).items()}
    right, cuts = run_net(texts[1], draw_sentences(2)), program.crossing({})
    allowed = [cut for cut, each in enumerate(cuts) if each is not None and 0 < cut < len(program.nodes)]
    assert 8 < len(allowed) < len(program.nodes) - 1  # not between the parts of one result
    for cut in allowed:
        first, second = program.piece(0, cut), program.piece(cut, len(program.nodes))
        found = program.run(second, {**feed, **program.run(first, feed)})
        torch.testing.assert_close(found["states"], right["states"])


def test_what_is_written_over_is_seen_by_all_that_look_at_it(tmp_path: Path) -> None:
    path, net = saved(Writing(), tmp_path / "writing.pt2", (torch.zeros(2, 3),), None)
    feed = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    model = opened(path, max_batch=1)
    assert len(model.segments) > 2
    np.testing.assert_allclose(through(model, feed)["output"], run_net(net, feed), rtol=1e-5)


def test_rows_are_computed_together_only_where_somebody_says_so(pictures: Net) -> None:
    model = opened(pictures[0], max_batch=None, independent_rows=False)
    assert model.batching.max_batch == 1 and 'say rows = "independent"' in model.remarks[0]
    with pytest.raises(ModelError, match="max_batch is 4, but the model cannot be batched: whether rows depend"):
        opened(pictures[0], independent_rows=False)


def test_batches_are_no_larger_than_a_program_was_exported_for(tmp_path: Path) -> None:
    path, _ = images(tmp_path / "few.pt2", most=3)
    assert opened(path, max_batch=None).batching.max_batch == 3
    with pytest.raises(ModelError, match="max_batch is 4, but it was exported for at most 3 rows"):
        opened(path)


@pytest.mark.parametrize(("precision", "near"), [("fp16", 0.02), ("bf16", 0.2)])
def test_fewer_bits_are_close_and_the_remark_says_how_close(precision: str, near: float, pictures: Net) -> None:
    model = opened(pictures[0], precision=precision)
    found, right = through(model, draw_images(3))["output"], run_net(pictures[1], draw_images(3)).numpy()
    assert found.dtype == np.float32 and 0 < np.abs(found - right).max() < near * np.abs(right).max()
    assert model.remarks[0].startswith(f"{precision}: differs from float32 by up to")
    assert model._weights.bytes < sum(each.numel() * 4 for each in pictures[1].state_dict().values())


def test_a_program_comes_from_the_cache_as_it_was_cut(
    pictures: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotLearned):
        prepare_on(HostDevice(), pictures[0], FINE, tmp_path, learn=False)
    made = prepare_on(HostDevice(), pictures[0], FINE, tmp_path)
    found = prepare_on(HostDevice(), pictures[0], FINE, tmp_path, learn=False)
    assert (
        isinstance(found, DeviceModel)
        and found.segments == made.segments
        and found.timing.times_s == made.timing.times_s
    )
    np.testing.assert_allclose(
        through(found, draw_images(2))["output"], run_net(pictures[1], draw_images(2)), rtol=1e-4, atol=1e-5
    )
    monkeypatch.setattr("weft.runtime.cuda.preparing.version", lambda package: "another")  # may number nodes otherwise
    with pytest.raises(NotLearned):
        prepare_on(HostDevice(), pictures[0], FINE, tmp_path, learn=False)


def test_weights_leave_and_come_back(pictures: Net) -> None:
    model = opened(pictures[0])
    model.evict()
    assert all(np.all(each._bytes == EVICTED_BYTE) for each in model._weights.memories)  # type: ignore[attr-defined]
    model.restore()
    np.testing.assert_allclose(
        through(model, draw_images(2))["output"], run_net(pictures[1], draw_images(2)), rtol=1e-4, atol=1e-5
    )


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return x + self.seen


class Naming(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1, 3


def test_what_is_no_program_or_cannot_be_served_is_refused(tmp_path: Path, pictures: Net, texts: Net) -> None:
    (tmp_path / "none.pt2").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"none\.pt2: cannot be read as a program of torch\.export"):
        opened(tmp_path / "none.pt2")
    path, _ = saved(Counting(), tmp_path / "counting.pt2", (torch.zeros(2, 3),), None)
    with pytest.raises(ModelError, match="it changes 'seen', which it keeps"):
        opened(path)
    path, _ = saved(Naming(), tmp_path / "naming.pt2", (torch.zeros(2, 3),), None)
    with pytest.raises(ModelError, match="its output 'output_1' is 3; export it so that it gives tensors"):
        opened(path)
    with pytest.raises(ModelError, match="give shapes for the free dimensions of tokens"):
        opened(texts[0])
    with pytest.raises(ModelError, match="exits are for ONNX files"):
        opened(pictures[0], exits=("a", "b"))


@pytest.mark.long  # programs on the twin are tested above, and serving by its worker in serving/test_serve_device.py
def test_a_program_is_served_on_a_device_where_that_is_allowed(tmp_path: Path, pictures: Net) -> None:
    """Here and not beside the server's other tests: to export a program takes seconds in every process that does."""
    path, net = pictures
    served = tmp_path / "images" / "1" / "model.pt2"
    served.parent.mkdir(parents=True)
    served.write_bytes(path.read_bytes())
    served.with_name("weft.toml").write_text('rows = "independent"\nmax_batch = 2\n')
    with live.running(tmp_path, device=TWIN, allow_programs=True) as server:
        for rows in (1, 2, 3):
            right = run_net(net, draw_images(rows))
            np.testing.assert_allclose(infer_fp32(server, "images", draw_images(rows)), right, rtol=1e-4, atol=1e-5)
