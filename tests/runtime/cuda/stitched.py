"""Stitched models on the device's twin: files, opened models, requests and the check of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stitching.nets import tiny
from tests.support.stitched import pictures
from weft.base.registry import registered
from weft.runtime import metadata as file_metadata
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.rounds import StitchedDeviceModel
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft_stitch.family import Family, Sharing
from weft_stitch.file_description import family_metadata, metadata
from weft_stitch.lowering import lower
from weft_stitch.onnx_writer import write_onnx
from weft_stitch.reading.alignment import align

WITHIN = 1e-4
"""Of the largest output."""

CUT = LoadOptions(grain_s=1e-9, max_pieces=6, max_batch=4)


class Steady(HostDevice):
    """A twin on which everything takes as long, so that larger rounds always pay."""

    def timed(self, run: Callable[[], None]) -> float:
        run()
        return 1e-3


def opened(path: Path, options: LoadOptions = CUT, cache: Path | None = None, **how: Any) -> StitchedDeviceModel:
    found = prepare_on(Steady(), path, options, cache, **how)
    assert isinstance(found, StitchedDeviceModel), found.remarks
    return found


def without_tools(patch: pytest.MonkeyPatch) -> None:
    """Have only those kinds of models that the core registers."""
    own = {name: kind for name, kind in registered("model_kinds").items() if kind.tool.name == "weft"}
    patch.setattr(file_metadata, "registered", {"model_kinds": own}.__getitem__)


def samples(model: Any, mix: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """A request of so many rows for each task."""
    ports = [task.inputs["image"] for task in model.tasks.specs]
    return [{port: pictures(rows, seed + at)} for at, (port, rows) in enumerate(zip(ports, mix, strict=True)) if rows]


def begin(model: StitchedDeviceModel, given: Sequence[dict[str, Any]]) -> Any:
    (made,) = model.launch(Step(0, [BatchPart(each) for each in given], 0)).outputs
    return made


def through(model: StitchedDeviceModel, given: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a device gives for requests that run in one go."""
    made = begin(model, given)
    for segment in range(1, len(model.segments)):
        (made,) = model.launch(Step(segment, [BatchPart(made.values)], 0)).outputs
    return dict(made.answers)


def check_answers(found: dict[str, Any], body: CpuModel, given: list[dict[str, Any]]) -> None:
    """The answers are the CPU's, of all outputs, and those of absent tasks have no rows."""
    wanted = body.run(body.gather(given))
    assert list(found) == list(wanted)
    for name, each in wanted.items():
        assert (found[name].shape, found[name].dtype) == (each.shape, each.dtype)
        assert not each.size or np.abs(found[name] - each).max() <= WITHIN * np.abs(each).max()


def write_family(path: Path, family: Family, sharing: Sharing, form: str = "split") -> Path:
    graph = lower(family, sharing, form, dynamic=True)
    write_onnx(graph, path, metadata(family, family.batches) | family_metadata(family, sharing, graph))
    return path


def described_file(path: Path, architecture: str = "tinynet", form: str = "split", **settings: Any) -> Path:
    """A file of small models that says how they share weights."""
    made = tiny(architecture, **settings)
    return write_family(path, align(made.nets), made.planted, form)


def is_fused(model: Any) -> bool:
    return model.blueprint.segments[0].nodes is not None
