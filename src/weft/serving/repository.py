"""The models to serve: repositories on disk, single files, and models that weft knows by name.

A repository holds ``name/1/model.onnx`` with settings in ``name/weft.toml`` or ``name/1/weft.toml``, or
``name.onnx`` with settings in ``name.toml``. Programs of torch (``.pt2``) must be allowed, because loading one may run
code in it. A stitched file holds several models, under names of their own.
Models that cannot be used are listed in ``problems`` and do not affect others. The name in a request is looked up in
the results of the last scan and never becomes part of a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import InputError, ModelError, NotFound, unknown_name
from weft.base.files import kind_at, kind_of
from weft.base.shapes import Shape, parse_shapes
from weft.base.version import __version__
from weft.models import zoo
from weft.models.packaged import PACKAGED, packaged_file
from weft.models.trained import TRAINED
from weft.runtime.metadata import PROGRAM_SUFFIX, servable, suffixes
from weft.runtime.stitched import tasks_in
from weft.serving.config import ModelConfig, one_line, read_model_config

MODEL_FILE, SETTINGS_FILE, TRITON_FILE = "model.onnx", "weft.toml", "config.pbtxt"
"""Names of files in the folder of a model or version."""
MOST_NAMES_SHOWN = 64
"""Models up to which the error for an unknown name suggests similar ones; the comparison takes time for each name."""

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_NO_NAME = (
    "not a name for a model; it takes at most 128 letters, digits, '.', '_' and '-', begins with a letter or a digit "
    "and has no '..'"
)


class ModelEntry(NamedTuple):
    """One version of a model."""

    name: str
    version: str
    path: Path
    config: ModelConfig
    source: str
    """repository, file, packaged, trained or zoo."""
    body: str = ""
    """Name of the stitched file that holds the model; empty for a file with one model."""


Versions = dict[str, ModelEntry]
"""Version -> entry, the lowest version first."""


class _Unusable(Exception):
    """A model, or a version of it, cannot be used; *transient*: whether the next scan may succeed."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


@dataclass(slots=True)
class _Scan:
    """The result of one scan of one source."""

    models: dict[str, Versions] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    """Model -> its location, for messages about duplicate names."""
    problems: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    unread: set[tuple[str, str]] = field(default_factory=set)
    """Models and versions ("" for all) that could not be read; the results of the previous scan stay."""
    unreadable: bool = False
    """Whether the whole source could not be read."""

    def add(self, entry: ModelEntry, where: str) -> None:
        """Add a version of a model from the location *where*.

        If two locations have a model of the same name, the first one is used, and the other becomes a problem.
        """
        if self.where.setdefault(entry.name, where) == where:
            self.models.setdefault(entry.name, {})[entry.version] = entry
            return
        first, second = (
            f"{path.name}{'' if path.suffix else '/'}" for path in map(Path, (self.where[entry.name], where))
        )
        what = f"both hold a model {entry.name}" if entry.body else "have the same name"
        self.problem(entry.name, f"{first} and {second} {what}; rename one (the first one is used)")

    def problem(self, name: str, message: str) -> None:
        """Record why a model, or a version of it, cannot be used."""
        _add_note(self.problems, name, message)

    def note_unusable(self, name: str, version: str, trouble: _Unusable) -> None:
        """Record a model, or a version of it, that cannot be used; *version*: empty for the whole model."""
        self.problem(name, f"version {version}: {trouble}" if version else str(trouble))
        if trouble.transient:
            self.unread.add((name, version))

    def remark(self, name: str, message: str) -> None:
        """Record a file of a model or source that is ignored."""
        _add_note(self.remarks, name, message)


def _add_note(notes: dict[str, str], name: str, message: str) -> None:
    """Add a message to the notes on *name*; both may contain any text, and are written on one line."""
    key, text = one_line(name), one_line(message)
    notes[key] = f"{notes[key]}; {text}" if key in notes else text


class Repository:
    """The models of all sources. A scan, on any thread, replaces the results of the previous one atomically."""

    def __init__(
        self, sources: Sequence[str | Path], scratch: Path, *, programs: bool = False, shapes: Sequence[str] = ()
    ) -> None:
        """sources: directories, files and names of models. scratch: folder where zoo models are written.

        programs: whether programs of torch may be loaded. shapes: ``[MODEL:]NAME=1x3x640x640``, which override the
        shapes in the models' own settings. InputError for an unknown source or two models with the same name.
        """
        self._sources = [_open_source(source, scratch, programs) for source in sources]
        self._scanning = threading.Lock()  # serializes scans, which merge their results with those of the previous one
        self._merged = _Scan()
        self._by_source: list[_Scan] = [_Scan() for _ in self._sources]  # before merging
        self._shapes: dict[str, dict[str, Shape]] = {}  # model -> input or axis -> shape
        self._scan_sources(first=True)
        if shapes:
            # a shape may name a model by its file, as the user wrote it
            aliases = {str(source): Path(source).stem for source in sources if str(source).endswith(suffixes())}
            self._shapes = parse_shapes(shapes, self.names(), aliases)
            _refuse_stitched(self._shapes, self._merged.models)
            self._scan_sources(first=True)  # again: the names of models, which shapes refer to, had to be known first

    @property
    def problems(self) -> dict[str, str]:
        """Model -> why it, or one of its versions, cannot be used."""
        return self._merged.problems

    @property
    def remarks(self) -> dict[str, str]:
        """Model or source -> files that were ignored."""
        return self._merged.remarks

    def scan(self) -> None:
        """Scan all sources again; errors become problems, and nothing is raised."""
        self._scan_sources(first=False)

    def names(self) -> list[str]:
        return sorted(self._merged.models)

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, the lowest first; NotFound if there is no such model."""
        return list(self._versions(name))

    def entry(self, name: str, version: str = "") -> ModelEntry:
        """Return a version of a model, by default the highest; NotFound if there is no such model or version."""
        versions = self._versions(name)
        number = version or list(versions)[-1]
        if number not in versions:
            raise NotFound(f"model {name} has no version {_shorten(version)!r}; it has {', '.join(versions)}")
        return versions[number]

    def _versions(self, name: str) -> Versions:
        """Return all versions of a model; NotFound if there is no such model, or none of its versions can be used."""
        scan = self._merged
        if name in scan.models:
            return scan.models[name]
        if name in scan.problems:
            raise NotFound(f"model {name} cannot be used: {scan.problems[name]}")
        if not scan.models or len(scan.models) > MOST_NAMES_SHOWN:
            raise NotFound(f"unknown model {_shorten(name)!r}; there are {len(scan.models)}, see the repository index")
        raise NotFound(unknown_name("model", _shorten(name), scan.models))

    def _scan_sources(self, *, first: bool) -> None:
        """Scan all sources and publish the merged result; on the *first* scan a duplicate name is an InputError."""
        with self._scanning:
            scans = [source.scan() for source in self._sources]
            for previous, latest in zip(self._by_source, scans, strict=True):
                _keep_unread(previous, latest)
            merged = _merge_scans(scans, strict=first)
            for name in self._shapes.keys() & merged.models.keys():
                merged.models[name] = _set_shapes(merged.models[name], self._shapes[name])
            self._by_source, self._merged = scans, merged


def _refuse_stitched(shapes: Iterable[str], models: Mapping[str, Versions]) -> None:
    """Raise InputError if a model in *shapes* is in a stitched file.

    Its requests have other names for the inputs than the graph, to which shapes refer.
    """
    for name in shapes:
        for entry in models[name].values():
            if entry.body:
                raise InputError(f"{name} is in the stitched file {entry.body}; give shapes in {entry.body}.toml")


def _set_shapes(versions: Versions, shapes: Mapping[str, Shape]) -> Versions:
    """Return the versions of a model, with *shapes* in place of the same shapes in its settings."""
    shaped = {}
    for version, entry in versions.items():
        sizes = entry.config.shapes | {name: list(shape) for name, shape in shapes.items()}
        shaped[version] = entry._replace(config=entry.config.model_copy(update={"shapes": sizes}))
    return shaped


def _keep_unread(previous: _Scan, latest: _Scan) -> None:
    """Add models of the previous scan that could not be read now to the latest scan, if their files still exist."""
    for name, versions in previous.models.items():
        # ``unread`` has stitched models under the name of their file
        surviving = {
            version: entry
            for version, entry in versions.items()
            if (latest.unreadable or latest.unread & {(entry.body or name, version), (entry.body or name, "")})
            and _is_file(entry.path)
        }
        if surviving:
            versions = {**surviving, **latest.models.get(name, {})}
            latest.models[name] = dict(sorted(versions.items(), key=lambda item: int(item[0])))
            latest.where[name] = previous.where[name]


def _merge_scans(scans: Sequence[_Scan], *, strict: bool) -> _Scan:
    """Merge the scans of all sources. A duplicate name is an InputError, or if not *strict* the first one counts."""
    merged = _Scan()
    for scan in scans:
        for name, message in scan.problems.items():
            merged.problem(name, message)
        for name, message in scan.remarks.items():
            merged.remark(name, message)
        for name, versions in scan.models.items():
            if name not in merged.models:
                merged.models[name], merged.where[name] = versions, scan.where[name]
                continue
            clash = f"{merged.where[name]} and {scan.where[name]} are both called {name}; rename one"
            if strict:
                raise InputError(one_line(clash))
            merged.problem(name, f"{clash} (the first one is used)")
    return merged


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory with models."""

    path: Path
    programs: bool
    """Whether programs of torch may be loaded."""

    def scan(self) -> _Scan:
        """List the usable models in the directory, and why others cannot be used."""
        scan = _Scan()
        try:
            root = Path(os.path.realpath(self.path, strict=True))
            with os.scandir(root) as listing:
                names = sorted(file.name for file in listing if not file.name.startswith("."))
        except OSError as error:
            scan.unreadable = True
            scan.problem(str(self.path), f"cannot look into the repository: {error.strerror or error}")
            return scan
        present = set(names)
        for name in names:
            model = name.removesuffix(".toml")
            if model == name:
                self._scan_file(root, name, scan)
            elif not any(f"{model}{suffix}" in present for suffix in suffixes()):
                scan.remark(model, f"{name} is ignored: there is no {model}.onnx")
        if not scan.models and not scan.problems:
            scan.remark(str(self.path), "the repository is empty")
        return scan

    def _scan_file(self, root: Path, file: str, scan: _Scan) -> None:
        """Add the models of one file or folder of the repository to *scan*; other files are ignored."""
        name = next((file.removesuffix(suffix) for suffix in suffixes() if file.endswith(suffix)), file)
        try:
            mode = _checked_mode(root, root / file)
            if stat.S_ISDIR(mode):
                name = file
                entries = _scan_versions(root, _check_name(name), scan, self.programs)
            elif name == file:
                return
            elif not stat.S_ISREG(mode):  # opening a pipe would block for ever
                raise _Unusable(f"{file} is {kind_of(mode)}, not a file")
            else:
                entries = _models_in_file(root, _check_name(name), root / file, self.programs)
        except _Unusable as trouble:
            scan.note_unusable(name, "", trouble)
            return
        for entry in entries:
            scan.add(entry, str(self.path / file))


@dataclass(frozen=True, slots=True)
class _ModelFile:
    """A source that is one file: given by its path, packaged, trained, or of the zoo."""

    name: str
    path: Path
    source: str
    programs: bool = False
    config: ModelConfig | None = None
    """Its settings; None: those of a TOML file in the same folder."""

    def scan(self) -> _Scan:
        """List the models in the file: several if it is stitched; none, with the reason, if it cannot be used."""
        scan = _Scan()
        if not _is_file(self.path):
            kind = kind_at(self.path)
            what = f"is {kind} now, not a file" if kind else "is not there any more"
            scan.problem(self.name, f"{self.path.name} {what}")
            return scan
        try:
            config = self.config or _read_settings(None, self.path.with_suffix(".toml"))
            entries = _models_in(ModelEntry(self.name, "1", self.path, config, self.source), self.programs)
        except _Unusable as trouble:
            scan.problem(self.name, str(trouble))
            return scan
        for entry in entries:
            scan.add(entry, str(self.path) if self.source == "file" else f"the {self.source} model")
        return scan


def _models_in_file(root: Path, name: str, path: Path, programs: bool) -> list[ModelEntry]:
    """Return the models of the file ``NAME.onnx`` in the root of a repository, with the settings of ``NAME.toml``."""
    return _models_in(ModelEntry(name, "1", path, _read_settings(root, root / f"{name}.toml"), "repository"), programs)


def _scan_versions(root: Path, name: str, scan: _Scan, programs: bool) -> list[ModelEntry]:
    """Return the usable versions in a model's directory; the reasons against other versions are added to *scan*."""
    folder = root / name
    files = _list_folder(root, folder)
    if TRITON_FILE in files:
        scan.remark(name, f"{TRITON_FILE} is ignored; settings go in {SETTINGS_FILE}")
    config = _read_settings(root, folder / SETTINGS_FILE)
    numbers = sorted((file for file in files if _VERSION.fullmatch(file)), key=int)
    if not numbers:
        raise _Unusable(f"no version in it; a model lies in {name}/1/{MODEL_FILE}")
    entries: list[ModelEntry] = []
    for number in numbers:
        try:
            entries += _models_in(_version_entry(root, name, number, config), programs)
        except _Unusable as trouble:
            scan.note_unusable(name, number, trouble)
    return entries


def _version_entry(root: Path, name: str, number: str, config: ModelConfig) -> ModelEntry:
    """Return the version *number* of a model; *config*: those of all versions, which its own override."""
    folder = root / name / number
    files = _list_folder(root, folder)
    file = next((f"model{suffix}" for suffix in suffixes() if f"model{suffix}" in files), MODEL_FILE)
    if file not in files:
        raise _Unusable(f"no file {MODEL_FILE} in it")
    if not stat.S_ISREG(mode := _checked_mode(root, folder / file)):
        raise _Unusable(f"{file} is {kind_of(mode)}, not a file")
    version_config = _read_settings(root, folder / SETTINGS_FILE)
    return ModelEntry(name, number, folder / file, config.overridden_by(version_config), "repository")


def _models_in(entry: ModelEntry, programs: bool) -> list[ModelEntry]:
    """Return the models in a file: several if it is stitched, else one. _Unusable if it cannot be served.

    entry: the file as a single model. programs: whether programs of torch may be loaded.
    """
    if entry.path.suffix == PROGRAM_SUFFIX:
        if not programs:
            raise _Unusable(
                f"loading {entry.path.name}, a program of torch, may run code that lies in it; allow_programs = true "
                "(--allow-programs) where you trust it"
            )
        return [entry]
    try:
        tasks = [task.name for task in tasks_in(entry.path)]
    except OSError as error:
        raise _Unusable(f"cannot look into {entry.path.name}: {error.strerror or error}", transient=True) from error
    except ModelError as error:
        raise _Unusable(str(error)) from error
    for name in entry.config.tasks:
        if name not in tasks:
            raise _Unusable(f"tasks: {unknown_name('task', name, tasks)}" if tasks else "tasks: it is not stitched")
    for name in tasks:
        if not servable(name):
            raise _Unusable(f"its task {name!r} is {_NO_NAME}; stitch it from files with other names")
    return [entry._replace(name=name, config=entry.config.for_task(name), body=entry.name) for name in tasks] or [entry]


def _read_settings(root: Path | None, path: Path) -> ModelConfig:
    """Read settings from a TOML file, defaults if there is none. With *root* the file must be inside it."""
    if not os.path.lexists(path):
        return ModelConfig()
    where = str(path.relative_to(root)) if root else path.name
    if root:
        _checked_mode(root, path)
    try:
        return read_model_config(path, where=where)
    except InputError as error:
        raise _Unusable(str(error)) from error


def _list_folder(root: Path, folder: Path) -> list[str]:
    """List the names in a directory, which must be inside the repository."""
    if not stat.S_ISDIR(_checked_mode(root, folder)):
        raise _Unusable(f"{folder.relative_to(root)} is not a directory")
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:
        raise _Unusable(f"cannot look into it: {error.strerror or error}", transient=True) from error


def _checked_mode(root: Path, path: Path) -> int:
    """Return the mode of a file, after checking that it is inside the repository, links resolved."""
    shown = path.relative_to(root)
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        if not resolved.is_relative_to(root):
            raise _Unusable(f"{shown} is a link that leads out of the repository")
        return resolved.stat().st_mode
    except OSError as error:
        raise _Unusable(f"cannot look at {shown}: {error.strerror or error}", transient=True) from error


def _check_name(name: str) -> str:
    """Return a model's name; _Unusable if it is no valid name in a request."""
    if not servable(name):
        raise _Unusable(_NO_NAME)
    return name


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)


def _shorten(text: str) -> str:
    """Cut a client's text to 128 characters, for messages."""
    return text if len(text) <= 128 else text[:125] + "..."


def _open_source(source: str | Path, scratch: Path, programs: bool) -> _Directory | _ModelFile:
    """Return the source of models that the user named; names of models that weft knows come before directories.

    InputError if there is no such source.
    """
    if isinstance(source, str) and source in zoo.ZOO:
        return _ModelFile(source, _export_zoo_model(source, scratch), "zoo", config=ModelConfig())
    if isinstance(source, str) and source in PACKAGED:
        shapes = {key: list(shape) for key, shape in PACKAGED[source].shapes.items()}
        config = ModelConfig(shapes=shapes, values=dict(PACKAGED[source].values))
        return _ModelFile(source, packaged_file(source), "packaged", config=config)
    if isinstance(source, str) and source in TRAINED:
        return _ModelFile(source, TRAINED[source].path(), "trained", config=ModelConfig())
    path = Path(source)
    if os.path.isdir(path) and str(source):
        return _Directory(path.absolute(), programs)
    if str(source) and (kind := kind_at(path)) not in ("", "a file"):
        raise InputError(one_line(f"{path} is {kind}, not a file; a file ends in .onnx, a repository is a directory"))
    if not os.path.isfile(path):
        raise InputError(_missing_message(str(source), path))
    if path.suffix not in suffixes():
        raise InputError(one_line(f"{path} is not a model; a file ends in .onnx, a repository is a directory"))
    try:
        return _ModelFile(_check_name(path.stem), path.absolute(), "file", programs)
    except _Unusable as trouble:
        raise InputError(one_line(f"{path}: {path.stem!r} is {trouble}")) from trouble


def _missing_message(source: str, path: Path) -> str:
    """Return the message for a missing source, with similar names."""
    if "/" not in source and not source.endswith(suffixes()):
        hint = "(nor is there such a directory; a file ends in .onnx)"
        return f"{unknown_name('model', _shorten(source), (*zoo.ZOO, *TRAINED, *PACKAGED))} {hint}"
    similar = one_line(" or ".join(_similar_paths(path)))
    return f"{_shorten(source)!r} is not there; " + (
        f"did you mean {similar}?" if similar else "give a directory, an .onnx file or the name of a model"
    )


def _similar_paths(path: Path) -> Iterator[str]:
    """Yield up to three files in the same folder with similar names."""
    try:
        siblings = [name for name in os.listdir(path.parent) if not name.startswith(".")]
    except (OSError, ValueError):  # no such folder, or a null byte in the path: nothing is similar
        return
    for name in get_close_matches(path.name, siblings, n=3):
        yield str(path.parent / name)


def _export_zoo_model(name: str, scratch: Path) -> Path:
    """Return the file of a zoo model, written on first use; the folder's name has a hash of the model and version."""
    graph = zoo.build(name).SerializeToString(deterministic=True)
    digest = hashlib.sha256(__version__.encode() + graph).hexdigest()[:16]
    folder = scratch.absolute() / f"{name}-{digest}"
    if not _is_file(folder / MODEL_FILE):
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=scratch, prefix=".writing-") as draft:
                finished = Path(draft) / name
                finished.mkdir()
                zoo.export(name, finished / MODEL_FILE)
                _publish(finished, folder)
        except OSError as error:
            raise ModelError(one_line(f"cannot write {name} into {scratch}: {error.strerror or error}")) from error
    return folder / MODEL_FILE


def _publish(finished: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process was faster."""
    try:
        finished.rename(folder)
    except OSError:
        if not _is_file(folder / MODEL_FILE):
            raise
