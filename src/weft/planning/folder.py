"""The folder of a plan: written atomically, read back, and compared with the digests in ``plan.json``.

The folder has all files that ``weft serve`` and ``weft bench`` need, with relative paths, so that it can be moved.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.base.errors import PlanError, unknown_name
from weft.base.files import replacing_folder, write_text
from weft.base.tomlfile import as_toml
from weft.devices.host import Host, write_host
from weft.planning.plan import (
    DATA,
    HOST_FILE,
    MODELS,
    OF_A_PLAN,
    PLAN_FILE,
    REPORT_FILE,
    SETTINGS_FILE,
    WORKLOAD_FILE,
    Plan,
    PlannedModel,
    read_plan,
    write_plan_file,
)
from weft.runtime.external import external_files
from weft.serving.config import ModelConfig, ServerConfig, read_server_config, read_toml
from weft.serving.repository import MODEL_FILE, Repository
from weft.serving.repository import SETTINGS_FILE as MODEL_SETTINGS_FILE
from weft.workloads.requests import Workload, read_workload

AS_MEASURED = {"learn_first": True}
"""Settings with which a server becomes ready only when models run as they were measured; not part of ``Plan``."""
_BESIDE_THE_WORKLOAD = ("samples", "trace", "exit_record")
"""Keys of a stream that name a file."""


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model file at its present place, and the settings to serve it with."""

    path: Path
    config: ModelConfig = field(default_factory=ModelConfig)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a PlanError that names the file."""
    try:
        yield
    except OSError as problem:
        raise PlanError(f"{problem.filename or path}: cannot read it: {problem.strerror or problem}") from problem


def source_digests(path: str | Path) -> dict[str, str]:
    """Return the digests of a model file and its external weights, for ``PlannedModel.sources``."""
    file = Path(os.path.abspath(path))
    with _reading(file):
        return {str(part): digest_of(part) for part in (file, *external_files(file))}


def planned_model(name: str, model: ModelToServe, **more: Any) -> PlannedModel:
    """Describe a model to be served under *name*, with digests of its files; *more*: further fields of the result."""
    files = _model_files(name, model)
    first, *others = files
    with _reading(model.path):
        digests = {relative_path: digest_of(file) for relative_path, file in files.items()}
    settings: dict[str, Any] = {
        "batch_timeout_ms": model.config.batch_timeout_ms,
        "grain_ms": model.config.grain_ms,
        **({} if model.config.max_batch is None else {"max_batch": model.config.max_batch}),
    }
    return PlannedModel(
        name=name,
        file=first,
        sha256=digests[first],
        others={relative_path: digests[relative_path] for relative_path in others},
        bytes=sum(file.stat().st_size for file in files.values()),
        **settings | more,
    )


def _model_files(name: str, model: ModelToServe) -> dict[str, Path]:
    """Return path in the plan's folder -> file: the model first, then files that the model or its settings refer to."""
    home, path, config = f"{MODELS}/{name}/1", model.path, model.config
    file_names = [*config.labels.values(), *([config.exit_record] if config.exit_record else [])]
    with _reading(path):
        referenced = [*external_files(path), *(path.parent / file_name for file_name in file_names)]
    others = {f"{home}/{file.relative_to(path.parent).as_posix()}": file for file in referenced}
    return {f"{home}/{MODEL_FILE}": path, **others}


def write_plan(
    plan: Plan,
    folder: str | Path,
    *,
    models: Mapping[str, ModelToServe],
    workload: Workload,
    host: Host | None = None,
    report: str = "",
) -> None:
    """Write the folder of a plan, replacing an older plan; PlanError if the folder has anything else in it.

    models: the files of ``plan.models``, by name. workload: the planned requests; its models may be files.
    host: the measured machine on which the prediction is based. report: the text of an HTML page.
    Server settings that the user added to the older plan, such as the address, are kept.
    """
    ServerConfig(**plan.settings.model_dump())  # raises an error for settings that no server accepts
    target = Path(folder)
    user_settings = _settings_added(target)
    with replacing_folder(target, PlanError) as fresh:
        for model in plan.models:
            _write_model(model, models[model.name], fresh, target)
        planned = plan.settings.model_dump(mode="json", exclude_none=True)
        settings = {"models": [MODELS], **planned, **AS_MEASURED, **user_settings}
        write_text(fresh / SETTINGS_FILE, as_toml(settings))
        write_text(fresh / WORKLOAD_FILE, as_toml(_with_copied_files(workload, fresh)))
        if host is not None:
            write_host(host, fresh / HOST_FILE)
        if report:
            write_text(fresh / REPORT_FILE, report)
        write_plan_file(plan, fresh / PLAN_FILE)
        _check_served(fresh, workload)


def check_place(folder: str | Path) -> None:
    """Raise PlanError if no plan may be written to the folder."""
    _settings_added(Path(folder))


def _settings_added(folder: Path) -> dict[str, Any]:
    """Return the server settings that the user added to an older plan; PlanError if no plan may be written there."""
    if not os.path.lexists(folder):
        return {}
    if not folder.is_dir():
        raise PlanError(f"{folder} is not a folder; name another place for the plan")
    names = sorted(os.listdir(folder))
    if not names:
        return {}
    if PLAN_FILE not in names:
        raise PlanError(f"{folder} holds {names[0]} and no plan; name an empty folder or a new one")
    older_plan = read_plan(folder)
    if strange := strangers(folder, older_plan):
        raise PlanError(f"{folder} holds {strange[0]}, which is not of its plan; move it away, or name another folder")
    planned = {"models", *type(older_plan.settings).model_fields}
    settings = read_toml(folder / SETTINGS_FILE, str(folder / SETTINGS_FILE)) if SETTINGS_FILE in names else {}
    return {key: value for key, value in settings.items() if key not in planned}


def strangers(folder: Path, plan: Plan) -> list[str]:
    """Return the names of the files and models in a plan's folder that are not part of the plan."""
    known = {model.name for model in plan.models}
    models = sorted(os.listdir(folder / MODELS)) if (folder / MODELS).is_dir() else []
    return [
        *(name for name in sorted(os.listdir(folder)) if name not in OF_A_PLAN),
        *(f"{MODELS}/{name}" for name in models if name not in known and not name.startswith(".")),
    ]


def _write_model(model: PlannedModel, served: ModelToServe, fresh: Path, older: Path) -> None:
    """Write the file *served* and its settings into the folder *fresh*; *older*: the folder of the replaced plan."""
    for relative_path, file in _model_files(model.name, served).items():
        _link_or_copy(file, fresh / relative_path, older / relative_path, model.digests.get(relative_path, ""))
    settings = served.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    write_text(fresh / MODELS / model.name / MODEL_SETTINGS_FILE, as_toml(settings))


def _link_or_copy(file: Path, target: Path, older: Path, digest: str) -> None:
    """Copy *file* to *target*, or link *target* to the equal file *older* of an older plan.

    A running server does not load a linked file again. digest: expected SHA-256, not checked if empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if older.is_file() and digest_of(older) == digest:
        try:
            os.link(older, target)
            return
        except OSError:  # a file system without links
            pass
    if not file.is_file():
        raise PlanError(f"{file}: there is no such file")
    shutil.copyfile(file, target)
    if digest and digest_of(target) != digest:
        raise PlanError(f"{file} has changed since it was planned; plan again")


def _with_copied_files(workload: Workload, fresh: Path) -> dict[str, Any]:
    """Return the content of the workload's file, with models by served names; copy files that it names to *fresh*."""
    raw = workload.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"folder", "device"})
    for index, stream in enumerate(workload.stream):
        row = raw["stream"][index]
        row["model"] = stream.served_name
        row.pop("profiles", None)  # of simulated devices; the model replaces them
        for key in _BESIDE_THE_WORKLOAD:
            if file_name := getattr(stream, key):
                relative_path = f"{DATA}/{index}-{Path(file_name).name}"
                target = fresh / relative_path
                _link_or_copy(Path(workload.folder) / file_name, target, older=target, digest="")  # always a copy
                row[key] = relative_path
    return raw


def _check_served(folder: Path, workload: Workload) -> None:
    """Raise PlanError unless the written models can be served and every planned stream has its model."""
    repository = Repository([folder / MODELS], folder)
    for name, why in repository.problems.items():
        raise PlanError(f"model {name} cannot be served: {why}")
    names = repository.names()
    for stream in workload.stream:
        if stream.served_name not in names:
            raise PlanError(f"a planned stream has no model: {unknown_name('model', stream.served_name, names)}")
    read_workload(folder / WORKLOAD_FILE)  # raises an error if clients could not read it


def plan_settings(folder: str | Path, *, unchecked: bool = False) -> ServerConfig:
    """Return the settings to serve a plan with.

    PlanError if its models have changed since it was written, unless *unchecked*.
    """
    changes = changed_models(folder, read_plan(folder)) if not unchecked else []
    if changes:
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise PlanError(f"{folder}: {changes[0]}{more}; plan again, or serve it as it is with unchecked = True")
    return read_server_config(Path(folder) / SETTINGS_FILE)


def changed_models(folder: str | Path, plan: Plan) -> list[str]:
    """Return the changes of the models in a plan's folder since it was written, as sentences."""
    home, changes = Path(folder), []
    for model in plan.models:
        for relative_path, digest in model.digests.items():
            try:
                if digest_of(home / relative_path) != digest:
                    changes.append(f"{relative_path} has changed since the plan was written")
            except OSError as problem:
                changes.append(f"{relative_path} cannot be read: {problem.strerror or problem}")
    return [
        *changes,
        *(f"{name} is not of the plan" for name in strangers(home, plan) if name.startswith(f"{MODELS}/")),
    ]
