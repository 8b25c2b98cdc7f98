"""The files that are served, with their settings: stitched models share a file, whose name is their *body*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.planning.folder import ModelToServe
from weft.planning.plan import AS_GIVEN
from weft.planning.plan_request import RequestedModel
from weft.serving.config import ModelConfig, TaskConfig


def files_to_serve(
    models: Sequence[RequestedModel], chosen: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, ModelToServe]:
    """Name of a folder in a repository -> its file; *chosen*: model -> settings that replace the model's own."""
    files: dict[str, ModelToServe] = {}
    for model in models:
        settings = dict((chosen or {}).get(model.name, {}))
        if model.body:
            file_config = files[model.body].config if model.body in files else model.config
            config = _with_task(file_config, model, settings)
        else:
            config = model.config.model_copy(update=settings)
        files[model.home] = ModelToServe(model.path, config)
    return files


def stitched_from(models: Sequence[RequestedModel], home: str) -> str:
    """``PlannedModel.done`` of the file in the folder *home*: the names of stitched models, or ``AS_GIVEN``."""
    names = [model.name for model in models if model.body == home]
    return f"stitched from {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else AS_GIVEN


def _with_task(config: ModelConfig, model: RequestedModel, settings: dict[str, Any]) -> ModelConfig:
    """The settings *config* of a stitched file, with *settings* for one of its models; a deadline is for this task."""
    deadline = {"slo_ms": settings.pop("slo_ms")} if "slo_ms" in settings else {}
    task = config.tasks.get(model.name, TaskConfig()).model_copy(update=deadline)
    shapes = {**config.shapes, **model.config.shapes}
    updates = {"tasks": {**config.tasks, model.name: task}, **({"shapes": shapes} if shapes else {})}
    return config.model_copy(update={**settings, **updates})
