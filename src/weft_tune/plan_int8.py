"""Models in 8 bits by calibration: ``weft plan --int8``, and off otherwise, since answers change with it.

What ``weft tune --target onnxruntime`` finds on the samples of a stream is planned for in the model's place, where it
is faster on this machine and answers alike. What was found is kept, as measurements are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import InputError, ModelError, TuneError, WorkloadError
from weft.base.files import make_folder
from weft.base.jsonfile import read_json, write_json
from weft.planning.asked import Asked, AskedModel, MadeModel
from weft.planning.early_exits import exit_names
from weft.planning.folder import digest_of
from weft.planning.machine import processor_here, these_versions
from weft.runtime.external import external_files
from weft.runtime.tensors import Array
from weft.workloads.requests import Stream

if TYPE_CHECKING:
    from weft_tune.runtime_target.result import RuntimeTuning

KEPT = "int8"
"""The folder of the cache with models in 8 bits."""
FOUND = "found.json"
"""What came of a model, in its folder there; written last."""
MARGIN = 0.01
"""The share of the samples whose answers may be others."""

Told = Callable[[str], None]


class TriedInt8(BaseModel, extra="forbid", frozen=True):
    """What came of a model in 8 bits."""

    file: str = ""
    """In the same folder; empty: nothing was faster, and the model stays as it is."""
    kind: str = "float32"
    speedup: Annotated[float, Field(gt=0)] = 1.0
    """How many times as fast a run of one sample is."""
    samples: Annotated[int, Field(ge=1)]
    alike: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of the samples that have the same largest output; None where outputs are no classes."""
    apart: Annotated[float, Field(ge=0)] = 0.0
    """The largest difference of an output from what it was."""

    @property
    def done(self) -> str:
        """What was done to the model, in words."""
        same = "" if self.alike is None else f"{self.alike:.1%} of {self.samples} samples answered alike, "
        return f"{self.kind} by calibration: {same}outputs differ by {self.apart:.3g} at most"


def with_int8(asked: Asked, cache: Path, told: Told) -> Asked:
    """What is asked, with models in 8 bits in the place of those that are faster so; on a GPU none is."""
    if asked.device is not None:
        left_out = f"int8 is left out: {asked.device} computes 8 bits in floating point, with conversions between."
        return replace(asked, remarks=(*asked.remarks, left_out))
    samples = {stream.served_name: stream for stream in asked.workload.stream if stream.samples}
    if not samples:
        model = asked.workload.stream[0].model
        raise WorkloadError(
            f"int8 is calibrated on what is sent, and no stream has samples; give them, as "
            f"-s {model}:...,samples=FILE.npz"
        )
    found = [_in_eight_bits(asked, model, samples.get(model.name), cache, told) for model in asked.models]
    remarks = (
        f"{model.name}: {remark}." if each.made else f"{model.name} stays as it is: {remark}."
        for model, (each, remark) in zip(asked.models, found, strict=True)
    )
    return replace(asked, models=tuple(each for each, _ in found), remarks=(*asked.remarks, *remarks))


def _in_eight_bits(
    asked: Asked, model: AskedModel, stream: Stream | None, cache: Path, told: Told
) -> tuple[AskedModel, str]:
    """A model as it is served, and what is said of it; itself where it stays."""
    if stream is None:
        return model, "its stream has no samples"
    if model.body or len(exit_names(model.path, model.config)) > 1:
        return model, "stitched models and models with exits are not made int8"
    data = Path(asked.workload.folder) / str(stream.samples)
    folder = cache / KEPT / _key(model, data)
    try:
        tried = _kept(folder) or _tried(model, data, folder, told)
    except (TuneError, ModelError) as error:
        return model, f"int8 cannot be had ({error})"
    if not tried.file:
        return model, "nothing in 8 bits is faster here"
    made = MadeModel(model.path, tried.done, tried.alike)
    return replace(model, path=folder / tried.file, made=made), f"{tried.done}; {tried.speedup:.2f} times as fast alone"


def _key(model: AskedModel, data: Path) -> str:
    """The digest of all that the search depends on."""
    files = (model.path, *external_files(model.path), data)
    parts = [these_versions(), processor_here(), model.path.stem, [digest_of(file) for file in files]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _kept(folder: Path) -> TriedInt8 | None:
    """What was found before; what cannot be read is as good as nothing."""
    try:
        found = TriedInt8.model_validate(read_json(folder / FOUND, InputError))
    except (InputError, ValidationError):
        return None
    return found if not found.file or (folder / found.file).is_file() else None


def _tried(model: AskedModel, data: Path, folder: Path, told: Told) -> TriedInt8:
    """Look for 8-bit layers that are faster, and see how far the answers are from what they were."""
    from weft_tune.quantised.data import read_samples
    from weft_tune.quantised.opened import open_for_tuning
    from weft_tune.runtime_target.answers import answers

    opened = open_for_tuning(model.path)
    inputs = read_samples(data, opened.inputs, 1.0)
    before = answers(opened, model.path, inputs)
    classes = before.ndim > 1 and before.shape[-1] > 1
    result = _fastest(model, data, folder, "agreement" if classes else "closeness", told)
    found = TriedInt8(samples=len(before))
    if result.changed:
        _beside(model, folder)
        after = answers(opened, result.files["model"], inputs)
        found = found.model_copy(update=_beside_before(result, before, after, classes))
    write_json(folder / FOUND, found.model_dump(mode="json"))
    return found


def _fastest(model: AskedModel, data: Path, folder: Path, metric: str, told: Told) -> RuntimeTuning:
    """The fastest formats of a model, written into a folder; samples are sent as they are, so they are not scaled."""
    from weft_tune.options import TuneOptions
    from weft_tune.runtime_target.fastest import find_fastest

    make_folder(folder)
    options = TuneOptions(
        model=model.path, data=data, scale=1.0, metric=metric, margin=MARGIN, target="onnxruntime", output=folder
    )
    return find_fastest(options, lambda *said: told(" ".join(filter(None, (model.name, *said)))))


def _beside_before(result: RuntimeTuning, before: Array, after: Array, classes: bool) -> dict[str, Any]:
    """How a changed model compares with what it was."""
    return {
        "file": result.files["model"].name,
        "kind": result.kind,
        "speedup": result.speedup,
        "alike": float((after.argmax(-1) == before.argmax(-1)).mean()) if classes else None,
        "apart": float(np.abs(after.astype(np.float64) - before.astype(np.float64)).max(initial=0.0)),
    }


def _beside(model: AskedModel, folder: Path) -> None:
    """Put the files that the model's settings name beside the new one."""
    for name in model.config.labels.values():
        shutil.copyfile(model.path.parent / name, folder / name)
