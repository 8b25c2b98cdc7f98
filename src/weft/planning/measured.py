"""Measure models on this machine for every number of lanes and threads that its cores allow, or on its GPU.

Measurements are cached on disk under the digest of everything that they depend on. Each is written as soon as it is
complete, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from weft.base.errors import DeviceError, InputError, PlanError
from weft.base.files import write_text
from weft.base.tomlfile import as_toml
from weft.devices import Host
from weft.devices.host import HOST, read_host, usable_cores, write_host
from weft.planning.folder import ModelToServe, digest_of
from weft.planning.machine import processor_here, these_versions
from weft.planning.plan_request import PlanRequest, RequestedModel
from weft.planning.served_files import files_to_serve
from weft.planning.survey import Subject, survey_lanes
from weft.runtime.device_kinds import device_called
from weft.runtime.external import external_files
from weft.serving.isolation import THREADS
from weft.serving.repository import MODEL_FILE, SETTINGS_FILE

SECONDS = 1.5
"""Duration of the measurement of all models together; a third of it for each model alone and batch size."""
MEASURED, CUT = "measured", "cut"
"""Folders of the cache: measured hosts by ``measurement_key``, and models as the server cut them."""
_FORMAT = 2
"""Part of the digest: to be raised whenever the measured quantities or the method change."""
_NOT_MEASURED = {"exit_threshold", "exit_floor", "exit_record"}
"""Settings of a model that do not affect its measurement: early exits are simulated."""

Progress = Callable[[str, int, int], None]
"""Called with the subject of the present measurement, the steps done, and the number of steps."""


class LaneShape(NamedTuple):
    """A division of the cores into lanes and threads per lane."""

    lanes: int
    threads: int


class LaneSurvey(Protocol):
    """The signature of ``weft.planning.survey.survey_lanes``, which measures models with several numbers of lanes."""

    def __call__(
        self,
        subjects: Sequence[Subject],
        *,
        lanes: Sequence[int],
        device: str,
        threads: int,
        seconds: float,
        cache: Path | None,
        repository: Path | None,
        isolation: str,
        progress: Progress | None,
    ) -> dict[int, Host]: ...


def default_cache() -> Path:
    """Return the default folder of the measurements."""
    return Path.home() / ".cache/weft/plan"


def lane_shapes(cores: int) -> list[LaneShape]:
    """Return the divisions that need at most *cores*: powers of two, and one lane for every core."""
    powers = [2**power for power in range(11) if 2**power <= cores]
    lanes = sorted({*powers, cores})
    return [LaneShape(count, threads) for threads in powers for count in lanes if count * threads <= cores]


def measured_hosts(
    asked: PlanRequest,
    cache: Path,
    *,
    seconds: float = SECONDS,
    fresh: bool = False,
    progress: Progress | None = None,
    survey: LaneSurvey = survey_lanes,
) -> list[Host]:
    """Return the machine with every division of its cores, or a GPU, measured unless the cache has it.

    fresh: measure again, and replace what the cache has.
    """
    shapes = lane_shapes(asked.cores) if asked.device is None else [LaneShape(1, 1)]
    keys = {shape: measurement_key(asked.models, shape, seconds, asked.isolation, asked.device) for shape in shapes}
    files = {shape: cache / MEASURED / f"{key}.json" for shape, key in keys.items()}
    hosts = {} if fresh else {shape: host for shape in shapes if (host := _cached_host(files[shape])) is not None}
    missing = [shape for shape in shapes if shape not in hosts]
    if not missing:
        return [hosts[shape] for shape in shapes]
    for folder in (cache / MEASURED, cache / CUT):
        _make_folder(folder)
    with TemporaryDirectory() as staged:
        stage(files_to_serve(asked.models), Path(staged))
        subjects = [Subject(_source(model), model.shapes, model.config.values) for model in asked.models]
        thread_counts = sorted({shape.threads for shape in missing})
        for number, threads in enumerate(thread_counts):
            by_lanes = survey(
                subjects,
                lanes=[shape.lanes for shape in missing if shape.threads == threads],
                device=asked.device or HOST,
                threads=threads,
                seconds=seconds,
                cache=cache / CUT,
                repository=Path(staged),
                isolation=asked.isolation,
                progress=_part_of_progress(progress, number, len(thread_counts), threads),
            )
            for lanes, host in by_lanes.items():
                hosts[LaneShape(lanes, threads)] = host
                write_host(host, files[LaneShape(lanes, threads)])
    return [hosts[shape] for shape in shapes]


def measurement_key(
    models: Sequence[RequestedModel],
    shape: LaneShape,
    seconds: float,
    isolation: str = THREADS,
    device: str | None = None,
) -> str:
    """Return the digest of everything that a measurement depends on."""
    parts: list[Any] = [_FORMAT, these_versions(), processor_here(), usable_cores(), *shape, seconds]
    parts += [] if isolation == THREADS else [isolation]
    parts += [] if device is None else [device, device_called(device)]
    for model in models:
        files = (model.path, *external_files(model.path))
        settings = model.config.model_dump(mode="json", exclude_unset=True, exclude=_NOT_MEASURED)
        parts.append([model.name, model.body, [digest_of(file) for file in files], settings])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _source(model: RequestedModel) -> str:
    """Return the name of a model's source in a survey; models in one stitched file are measured once."""
    return f"{model.body}.onnx/{model.name}" if model.body else model.name


def _cached_host(file: Path) -> Host | None:
    """Return a measurement in the cache, or None if it is absent or cannot be read."""
    try:
        return read_host(file)
    except DeviceError:
        return None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"cache = {folder.parent}: cannot write there: {problem.strerror or problem}") from problem


def _part_of_progress(progress: Progress | None, number: int, of: int, threads: int) -> Progress | None:
    """Return a callback for measurement *number* of *of* that reports the progress of all measurements."""
    if progress is None:
        return None
    words = f", {threads} threads" if threads > 1 else ""
    return lambda what, done, steps: progress(what + words, number * steps + min(done, steps), of * steps)


def stage(models: Mapping[str, ModelToServe], folder: Path) -> None:
    """Make *folder* a repository of these models, by name, with hard links to their files where possible."""
    for name, model in models.items():
        home = folder / name / "1"
        _link_or_copy(model.path, home / MODEL_FILE)
        for file in external_files(model.path):
            _link_or_copy(file, home / file.relative_to(model.path.parent))
        settings = model.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        settings = {key: value for key, value in settings.items() if key not in ("labels", "exit_record")}
        write_text(folder / name / SETTINGS_FILE, as_toml(settings))


def _link_or_copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(file), target)  # no symbolic link: repositories do not follow links to other folders
    except OSError:
        try:
            shutil.copyfile(file, target)
        except OSError as problem:
            raise PlanError(f"{file}: cannot read it: {problem.strerror or problem}") from problem
