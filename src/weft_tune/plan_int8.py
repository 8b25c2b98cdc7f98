"""Models in 8 bits by calibration, for ``weft plan --int8``; off by default, because answers change.

The result of ``weft tune --target onnxruntime`` on the samples of a stream replaces the model in the plan if it is
faster on this machine and gives (nearly) the same answers. Results are cached.
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
from weft.planning.early_exits import exit_names
from weft.planning.folder import digest_of
from weft.planning.machine import processor_here, these_versions
from weft.planning.plan_request import PlanRequest, PreparedModelFile, RequestedModel
from weft.runtime.external import external_files
from weft.runtime.tensors import Array
from weft.workloads.requests import Stream

if TYPE_CHECKING:
    from weft_tune.runtime_target.fastest import RuntimeTuning

CACHE_FOLDER = "int8"
"""The folder of the cache with models in 8 bits."""
RESULT_FILE = "found.json"
"""The result of a search in the model's folder; written last, so that an interrupted search leaves no result."""
MARGIN = 0.01
"""The share of the samples whose answers may differ, the default margin of ``weft tune``."""

OnStage = Callable[[str], None]
"""Called with the name of a model and its stage, in words."""


class Int8Result(BaseModel, extra="forbid", frozen=True):
    """The result of a model in 8 bits, as the cache stores it."""

    file: str = ""
    """The model's file in the same folder; empty: nothing was faster, and the model stays as it is."""
    kind: str = "float32"
    speedup: Annotated[float, Field(gt=0)] = 1.0
    """Speed of a run of one sample, relative to the model before."""
    samples: Annotated[int, Field(ge=1)]
    alike: Annotated[float, Field(ge=0, le=1)] | None = None
    """The share of the samples that have the same largest output; None where outputs are no classes."""
    apart: Annotated[float, Field(ge=0)] = 0.0
    """The largest difference of an output from the one before."""

    @property
    def description(self) -> str:
        """The change of the model, in words."""
        same = "" if self.alike is None else f"{self.alike:.1%} of {self.samples} samples answered alike, "
        return f"{self.kind} by calibration: {same}outputs differ by {self.apart:.3g} at most"


def with_int8(request: PlanRequest, cache: Path, on_stage: OnStage) -> PlanRequest:
    """Replace models by their 8-bit versions where those are faster; on a GPU none is."""
    if request.device is not None:
        left_out = f"int8 is left out: {request.device} computes 8 bits in floating point, with conversions between."
        return replace(request, remarks=(*request.remarks, left_out))
    sampled = {stream.served_name: stream for stream in request.workload.stream if stream.samples}
    if not sampled:
        model = request.workload.stream[0].model
        raise WorkloadError(
            f"int8 is calibrated on what is sent, and no stream has samples; give them, as "
            f"-s {model}:...,samples=FILE.npz"
        )
    served = [_in_eight_bits(request, model, sampled.get(model.name), cache, on_stage) for model in request.models]
    remarks = (
        f"{model.name}: {remark}." if model.preparation else f"{model.name} stays as it is: {remark}."
        for model, remark in served
    )
    return replace(request, models=tuple(model for model, _ in served), remarks=(*request.remarks, *remarks))


def _in_eight_bits(
    request: PlanRequest, model: RequestedModel, stream: Stream | None, cache: Path, on_stage: OnStage
) -> tuple[RequestedModel, str]:
    """The 8-bit version of *model*, or *model* itself if that stays; and the reason as a remark.

    stream: the stream of the model with samples; None if there is none.
    """
    if stream is None:
        return model, "its stream has no samples"
    if model.body or len(exit_names(model.path, model.config)) > 1:
        return model, "stitched models and models with exits are not made int8"
    data = Path(request.workload.folder) / str(stream.samples)
    folder = cache / CACHE_FOLDER / _cache_key(model, data)
    try:
        result = _read_cached(folder) or _search(model, data, folder, on_stage)
    except (TuneError, ModelError) as error:
        return model, f"int8 cannot be had ({error})"
    if not result.file:
        return model, "nothing in 8 bits is faster here"
    prepared = PreparedModelFile(model.path, change=result.description, same_answers=result.alike)
    remark = f"{result.description}; {result.speedup:.2f} times as fast alone"
    return replace(model, path=folder / result.file, preparation=prepared), remark


def _cache_key(model: RequestedModel, data: Path) -> str:
    """A digest of everything that the search depends on: versions, processor, model files and samples."""
    files = (model.path, *external_files(model.path), data)
    parts = [these_versions(), processor_here(), model.path.stem, [digest_of(file) for file in files]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_cached(folder: Path) -> Int8Result | None:
    """The result of an earlier search; None if there is none, it cannot be read, or its model file is missing."""
    try:
        cached = Int8Result.model_validate(read_json(folder / RESULT_FILE, InputError))
    except (InputError, ValidationError):
        return None
    return cached if not cached.file or (folder / cached.file).is_file() else None


def _search(model: RequestedModel, data: Path, folder: Path, on_stage: OnStage) -> Int8Result:
    """Search for 8-bit layers that are faster, and compare the answers with those of the model before."""
    from weft_tune.quantised.data import read_samples
    from weft_tune.quantised.opened import open_for_tuning
    from weft_tune.quantised.scoring import answers

    opened = open_for_tuning(model.path)
    inputs = read_samples(data, opened.inputs, scale=1.0)
    before = answers(opened, model.path, inputs)
    classes = before.ndim > 1 and before.shape[-1] > 1
    tuning = _find_fastest(model, data, folder, "agreement" if classes else "closeness", on_stage)
    result = Int8Result(samples=len(before))
    if tuning.changed:
        for name in model.config.labels.values():  # files that the model's settings name
            shutil.copyfile(model.path.parent / name, folder / name)
        after = answers(opened, tuning.files["model"], inputs)
        result = result.model_copy(update=_compare(tuning, before, after, classes))
    write_json(folder / RESULT_FILE, result.model_dump(mode="json"))
    return result


def _find_fastest(model: RequestedModel, data: Path, folder: Path, metric: str, on_stage: OnStage) -> RuntimeTuning:
    """Write the fastest variant of a model into *folder*; samples are not scaled, as clients send them as stored."""
    from weft_tune.options import TuneOptions
    from weft_tune.runtime_target.fastest import find_fastest

    make_folder(folder)
    options = TuneOptions(
        model=model.path, data=data, scale=1.0, metric=metric, margin=MARGIN, target="onnxruntime", output=folder
    )
    return find_fastest(options, lambda *stage: on_stage(" ".join(filter(None, (model.name, *stage)))))


def _compare(tuning: RuntimeTuning, before: Array, after: Array, classes: bool) -> dict[str, Any]:
    """The fields of ``Int8Result`` for a changed model, from its outputs; classes: whether the outputs are classes."""
    return {
        "file": tuning.files["model"].name,
        "kind": tuning.kind,
        "speedup": tuning.speedup,
        "alike": float((after.argmax(-1) == before.argmax(-1)).mean()) if classes else None,
        "apart": float(np.abs(after.astype(np.float64) - before.astype(np.float64)).max(initial=0.0)),
    }
