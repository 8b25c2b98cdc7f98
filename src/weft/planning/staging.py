"""Models laid out as the plan's folder will have them, so that what is measured is what will be served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from weft.base.errors import PlanError
from weft.base.files import write_text
from weft.planning.folder import ModelToServe
from weft.planning.toml_text import as_toml
from weft.runtime.external import external_files
from weft.serving.repository import MODEL_FILE, SETTINGS_FILE


def stage(models: Mapping[str, ModelToServe], folder: Path) -> None:
    """Make *folder* a repository of these models, by name; their files are linked where that can be."""
    for name, model in models.items():
        home = folder / name / "1"
        _put(model.path, home / MODEL_FILE)
        for file in external_files(model.path):
            _put(file, home / file.relative_to(model.path.parent))
        settings = model.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        settings = {key: value for key, value in settings.items() if key not in ("labels", "exit_record")}
        write_text(folder / name / SETTINGS_FILE, as_toml(settings))


def _put(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(file), target)  # not a symbolic one: repositories do not follow those out
    except OSError:
        try:
            shutil.copyfile(file, target)
        except OSError as problem:
            raise PlanError(f"{file}: cannot read it: {problem.strerror or problem}") from problem
