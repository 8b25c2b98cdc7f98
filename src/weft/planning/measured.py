"""Measure models on this machine for every number of lanes and threads that its cores allow, or on its GPU.

Every such division is measured shortly first (its *first numbers*), those with many threads per lane before others. It
is measured in full only if it may then still be better than the divisions measured so far (``divisions``).
Measurements are cached on disk under the digest of everything that they depend on. Each is written as soon as it is
complete, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.base.errors import DeviceError, InputError, PlanError
from weft.base.files import write_text
from weft.base.tomlfile import as_toml
from weft.devices import Host
from weft.devices.host import HOST, read_host, usable_cores, write_host
from weft.planning.divisions import why_left_out
from weft.planning.folder import ModelToServe, digest_of
from weft.planning.machine import processor_here, these_versions
from weft.planning.plan_request import PlanRequest, RequestedModel
from weft.planning.served_files import files_to_serve
from weft.planning.survey import Subject, survey_lanes
from weft.planning.survey.first_numbers import FirstNumbers, Surveyed, read_first_numbers, write_first_numbers
from weft.runtime.device_kinds import device_called
from weft.runtime.external import external_files
from weft.serving.isolation import THREADS
from weft.serving.repository import MODEL_FILE, SETTINGS_FILE

SECONDS = 1.5
"""Duration of the measurement of all models together; a third of it for each model alone and batch size."""
MEASURED, CUT = "measured", "cut"
"""Folders of the cache: measured hosts by ``measurement_key``, and models as cut by the server."""
_FORMAT = 3
"""Part of the digest: to be raised whenever the measured quantities or the method change."""
_NOT_MEASURED = {"exit_threshold", "exit_floor", "exit_record"}
"""Settings of a model that do not affect its measurement: early exits are simulated."""

Progress = Callable[[str, int, int], None]
"""Called with the subject of the present measurement, the steps done, and the number of steps."""


Cached = TypeVar("Cached")


class LaneShape(NamedTuple):
    """A division of the cores into lanes and threads per lane."""

    lanes: int
    threads: int


class LeftOutShape(NamedTuple):
    """A division that was not measured in full, with its name in messages and the reason."""

    shape: LaneShape
    label: str
    why: str


class MeasuredMachine(NamedTuple):
    """The machine with each division of its cores that may be part of the best option."""

    hosts: list[Host]
    left_out: tuple[LeftOutShape, ...] = ()


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
        left_out: Callable[[FirstNumbers], bool] | None,
    ) -> Iterator[Surveyed]: ...


def default_cache() -> Path:
    """Return the default folder of the measurements."""
    return Path.home() / ".cache/weft/plan"


def lane_shapes(cores: int) -> list[LaneShape]:
    """Return the divisions that need at most *cores*: powers of two, and one lane for every core."""
    powers = [2**power for power in range(11) if 2**power <= cores]
    lanes = sorted({*powers, cores})
    return [LaneShape(count, threads) for threads in powers for count in lanes if count * threads <= cores]


def measured_hosts(
    request: PlanRequest,
    cache: Path,
    *,
    seconds: float = SECONDS,
    fresh: bool = False,
    progress: Progress | None = None,
    survey: LaneSurvey = survey_lanes,
) -> MeasuredMachine:
    """Return the machine with its divisions of the cores, or a GPU; divisions that the cache lacks are measured.

    fresh: measure again, and replace what the cache has.
    """
    shapes = lane_shapes(request.cores) if request.device is None else [LaneShape(1, 1)]
    keys = {
        shape: measurement_key(request.models, shape, seconds, request.isolation, request.device) for shape in shapes
    }
    files = {shape: _CacheFiles(cache / MEASURED, key) for shape, key in keys.items()}
    cached = {} if fresh else {shape: file.read() for shape, file in files.items()}
    # Division -> its first numbers, if they are known.
    firsts = {shape: first for shape, (first, _) in cached.items() if first is not None}
    hosts = {shape: host for shape, (_, host) in cached.items() if host is not None}

    def why(first: FirstNumbers) -> str:
        """Return why a division with these first numbers is not measured in full; empty if it is."""
        return why_left_out(request, first, [(firsts[shape], host) for shape, host in hosts.items() if shape in firsts])

    missing = [shape for shape in shapes if shape not in hosts and not (shape in firsts and why(firsts[shape]))]
    if missing:
        for folder in (cache / MEASURED, cache / CUT):
            _make_folder(folder)
        with TemporaryDirectory() as repository:
            make_repository(files_to_serve(request.models), Path(repository))
            subjects = [Subject(_source(model), model.shapes, model.config.values) for model in request.models]
            # All numbers of lanes with one number of threads are measured in one survey; most threads first.
            groups = sorted({shape.threads for shape in missing}, reverse=True)
            for number, threads in enumerate(groups):
                for first, host in survey(
                    subjects,
                    lanes=[shape.lanes for shape in missing if shape.threads == threads],
                    device=request.device or HOST,
                    threads=threads,
                    seconds=seconds,
                    cache=cache / CUT,
                    repository=Path(repository),
                    isolation=request.isolation,
                    progress=_part_of_progress(progress, number, len(groups), threads),
                    left_out=lambda first: bool(why(first)),
                ):
                    shape = LaneShape(first.lanes, threads)
                    files[shape].write(first, host)
                    firsts[shape] = first
                    if host is not None:
                        hosts[shape] = host
    left_out = [shape for shape in shapes if shape not in hosts]
    return MeasuredMachine(
        [hosts[shape] for shape in shapes if shape in hosts],
        tuple(LeftOutShape(shape, firsts[shape].label, why(firsts[shape])) for shape in left_out),
    )


class _CacheFiles:
    """The cache files of one division: its first numbers, and the host if it was measured in full."""

    def __init__(self, folder: Path, key: str) -> None:
        self._first, self._host = folder / f"{key}.first.json", folder / f"{key}.json"

    def read(self) -> tuple[FirstNumbers | None, Host | None]:
        """Return the first numbers and the host; None for a file that is missing or damaged."""
        return _unless_damaged(read_first_numbers, self._first), _unless_damaged(read_host, self._host)

    def write(self, first: FirstNumbers, host: Host | None) -> None:
        """Write both files; *host*: None if, by the first numbers, the division was not measured in full."""
        write_first_numbers(first, self._first)
        if host is None:
            self._host.unlink(missing_ok=True)  # left by an earlier measurement
        else:
            write_host(host, self._host)


def _unless_damaged(read: Callable[[Path], Cached], file: Path) -> Cached | None:
    """Return the content of a cache file; None if it is missing or damaged."""
    try:
        return read(file)
    except DeviceError:
        return None


def measurement_key(
    models: Sequence[RequestedModel],
    shape: LaneShape,
    seconds: float,
    isolation: str = THREADS,
    device: str | None = None,
) -> str:
    """Return the digest of everything that a measurement depends on."""
    parts: list[Any] = [_FORMAT, these_versions(), processor_here(), usable_cores(), *shape, seconds]
    parts += [] if isolation == THREADS else [isolation]  # defaults are not part of the key
    parts += [] if device is None else [device, device_called(device)]
    for model in models:
        files = (model.path, *external_files(model.path))
        settings = model.config.model_dump(mode="json", exclude_unset=True, exclude=_NOT_MEASURED)
        parts.append([model.name, model.body, [digest_of(file) for file in files], settings])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _source(model: RequestedModel) -> str:
    """Return ``Subject.source`` of a model; models in one stitched file have the same file, which is measured once."""
    return f"{model.body}.onnx/{model.name}" if model.body else model.name


def _make_folder(folder: Path) -> None:
    """Make a folder of the cache; InputError that names the cache if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"cache = {folder.parent}: cannot write there: {problem.strerror or problem}") from problem


def _part_of_progress(progress: Progress | None, number: int, of: int, threads: int) -> Progress | None:
    """Return a callback for survey *number* of *of*, with *threads* per lane, that reports the progress of all."""
    if progress is None:
        return None
    suffix = f", {threads} threads" if threads > 1 else ""
    return lambda what, done, steps: progress(what + suffix, number * steps + min(done, steps), of * steps)


def make_repository(models: Mapping[str, ModelToServe], folder: Path) -> None:
    """Make *folder* a repository of these models, by name, with hard links to their files where possible."""
    for name, model in models.items():
        home = folder / name / "1"
        _link_or_copy(model.path, home / MODEL_FILE)
        for file in external_files(model.path):
            _link_or_copy(file, home / file.relative_to(model.path.parent))
        settings = model.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        # without the settings that name files which a measurement does not need
        settings = {key: value for key, value in settings.items() if key not in ("labels", "exit_record")}
        write_text(folder / name / SETTINGS_FILE, as_toml(settings))


def _link_or_copy(file: Path, target: Path) -> None:
    """Make *target* a hard link to *file*, or a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(file), target)  # no symbolic link: repositories do not follow links to other folders
    except OSError:
        try:
            shutil.copyfile(file, target)
        except OSError as problem:
            raise PlanError(f"{file}: cannot read it: {problem.strerror or problem}") from problem
