"""``measure``: measure this machine as a device, for named models or for the models of a workload."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from weft.base.errors import InputError, ModelError, ShapeNeeded
from weft.base.shapes import Shapes, settle
from weft.devices import Host
from weft.devices.host import HOST, GpuCuts, example_devices, is_measured, usable_cores
from weft.devices.shares import GpuLikeness
from weft.models.packaged import PACKAGED, packaged_models
from weft.models.stitched_files import file_and_task
from weft.planning.survey.measure import TOGETHER_S, Progress, Subject, survey
from weft.runtime.device_kinds import device_kind
from weft.runtime.model_signature import read_dimensions
from weft.serving.gpu_sharing import UNMEASURED
from weft.serving.process import ServerProcess
from weft.workloads.requests import Workload


def measure(
    models: Workload | Sequence[str | os.PathLike[str] | Subject],
    *,
    device: str = HOST,
    lanes: int | None = None,
    threads: int = 1,
    seconds: float = TOGETHER_S,
    cache: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Host:
    """Measure this machine with these models, or with the models of a workload, as ``weft serve`` runs them.

    device: ``host``, its cores; or a device in it, such as a GPU, which has one lane.
    lanes: by default one less than the cores. threads: per lane. seconds: duration of the measurement of all models
    together. cache: folder that keeps cut models between runs.
    """
    subjects = subjects_of(models) if isinstance(models, Workload) else list(map(_subject, models))
    if not is_measured(device):
        raise InputError(f"{device} is not measured: name host, or a device such as {example_devices()}")
    if device != HOST and lanes not in (None, 1):
        raise InputError(f"{device} has one lane, not {lanes}; leave out lanes")
    default_lanes = 1 if device != HOST else max(1, usable_cores() - 1)
    cache_folder = Path(cache) if cache else None
    try:
        host = survey(
            subjects,
            device=device,
            lanes=default_lanes if lanes is None else lanes,
            threads=threads,
            seconds=seconds,
            cache=cache_folder,
            progress=on_progress,
        )
    except ShapeNeeded as error:
        raise _add_advice(models, error) from error
    return with_shares(host, subjects, cache_folder) if device != HOST and device_kind(device).shares else host


def subject(source: str, shapes: Shapes | None = None) -> Subject:
    """Return a model to measure, with the default shapes of a packaged model.

    shapes: name of an input or axis -> shape or size; ModelError if they do not fit the model.
    """
    defaults = PACKAGED[source].shapes if source in PACKAGED else {}
    return Subject(source, {**defaults, **_settle_shapes(source, shapes or {})})


def _settle_shapes(source: str, shapes: Shapes) -> Shapes:
    """Resolve shapes of inputs and axes to shapes of inputs.

    The shapes for a stitched file are returned unchanged, since its inputs have other names in the server.
    """
    file, task = file_and_task(source)
    path = packaged_models().get(source) if source in PACKAGED else Path(file)
    if not shapes or task or path is None or not path.is_file():
        return shapes
    try:
        return settle(shapes, read_dimensions(path))
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error


def subjects_of(workload: Workload) -> list[Subject]:
    """Return the models of a workload; relative file names are relative to its folder."""
    subjects: dict[str, Subject] = {}
    for stream in workload.stream:
        path = Path(stream.model)
        relative = file_and_task(stream.model)[0].endswith(".onnx") and not path.is_absolute()
        source = str(Path(workload.folder) / path) if relative else stream.model
        subjects.setdefault(stream.served_name, subject(source, stream.shapes))
    return list(subjects.values())


def _add_advice(models: Workload | Sequence[object], error: ShapeNeeded) -> ModelError:
    """Return the error with advice on where to write the shape: in the workload's file, or in an option."""
    if isinstance(models, Workload):
        stream = next(stream for stream in models.stream if stream.served_name == error.model)
        return models.advised(stream, error)
    return error if len(models) == 1 else error.among_several()


def _subject(model: str | os.PathLike[str] | Subject) -> Subject:
    return model if isinstance(model, Subject) else subject(os.fspath(model))


POLICY = "slices"
"""Policy of the server that measures shares of a GPU: a server measures models on shares if its policy uses them."""


def with_shares(host: Host, subjects: Sequence[Subject], cache: Path | None = None) -> Host:
    """Measure the shares of a GPU; return *host* (the GPU) with its shares and the times of the models on them.

    ``HostModel.like`` has these times, by batch size.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache_folder = str(folder if cache is None else cache)
        files = dict.fromkeys(subject.file for subject in subjects)
        arguments = ["--policy", POLICY, "--device", host.name, "--grpc-port=-1", "--cache", cache_folder]
        with (
            ServerProcess(*files, *arguments) as server,
            urllib.request.urlopen(f"{server.url}/weft/profile", timeout=30) as answer,
        ):
            profile = json.load(answer)
    if profile["gpu"] is None:  # no model runs on the GPU
        return host
    models = {}
    for name, model in host.models.items():
        by_rows = profile["models"][name]["like"].items()
        like = {int(rows): GpuLikeness.model_validate(likeness) for rows, likeness in by_rows}
        models[name] = model.model_copy(update={"like": like or {1: UNMEASURED}})
    return host.model_copy(update={"gpu": GpuCuts.model_validate(profile["gpu"]), "models": models})
