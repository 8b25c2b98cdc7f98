"""Models by name: of the zoo, trained by the project, in an installed package, or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from shutil import copyfile

from weft.base.errors import ModelError, unknown_name
from weft.models.exits import with_exits
from weft.models.layer import Model
from weft.models.onnx_import import import_onnx
from weft.models.onnx_import.importer import read_onnx
from weft.models.packaged import PACKAGED, packaged_file
from weft.models.stitched_files import file_and_task, tasks_of
from weft.models.trained import TRAINED
from weft.models.zoo import ZOO, Parameter, export, load

Shape = tuple[int, ...]


def load_model(
    name_or_path: str,
    *,
    shapes: Mapping[str, Shape] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
    exits: int | Sequence[str] | None = None,
    exit_head: str = "fc",
) -> Model:
    """Import a model by name or path.

    shapes: input -> shape, for files and packaged models. parameters: for zoo models; a model ignores parameters that
    it does not have (such as the sequence length for a resnet). exits: the number of exits to add, with heads of kind
    *exit_head* (``weft.models.exits``); or the names of a file's outputs that are exits, from shallow to deep, the last
    being the end. By default, the exits in the file's metadata.
    """
    exit_count = exits if isinstance(exits, int) else None
    exit_names = tuple(exits) if exits is not None and not isinstance(exits, int) else None
    model = _import_named(name_or_path, shapes, parameters or {}, exit_names)
    return model if exit_count is None else _with_exits(model, exit_count, exit_head)


def load_models(
    name_or_path: str,
    *,
    shapes: Mapping[str, Shape] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> tuple[Model, ...]:
    """As ``load_model``; of a stitched file all models, each with the cost of a request for this model alone."""
    return tuple(load_model(name, shapes=shapes, parameters=parameters) for name in model_names_in(name_or_path))


def named_file(name: str, folder: Path) -> Path | None:
    """The ONNX file of a name in ``weft models list``; None for any other text.

    Files of packages are copied into *folder*, and zoo models are written there with seeded random weights.
    """
    if name in TRAINED:
        return TRAINED[name].path()
    path = folder / f"{name}.onnx"
    if name in PACKAGED:
        copyfile(packaged_file(name), path)
    elif name in ZOO:
        export(name, path)
    else:
        return None
    return path


def model_names_in(name_or_path: str) -> list[str]:
    """The names ``FILE/MODEL`` of all models in a stitched file; for anything else, only the name itself."""
    stored = name_or_path.endswith(".onnx") and Path(name_or_path).is_file()
    tasks = tasks_of(read_onnx(Path(name_or_path))) if stored else {}
    return [f"{name_or_path}/{task}" for task in tasks] or [name_or_path]


def _import_named(
    name_or_path: str,
    shapes: Mapping[str, Shape] | None,
    parameters: Mapping[str, Parameter],
    exits: tuple[str, ...] | None,
) -> Model:
    """Import a model by the table that has its name, else as a file; *exits*: names of outputs that are exits."""
    if name_or_path in ZOO:
        if exits is not None:
            raise ModelError(f"{name_or_path} has no outputs to name as exits; say how many to place: exits = 3")
        known = {key: value for key, value in parameters.items() if key in ZOO[name_or_path].parameters}
        return load(name_or_path, shapes=shapes, **known)
    if name_or_path in TRAINED:
        return import_onnx(
            TRAINED[name_or_path].path(), shapes=shapes or {"image": (1, *TRAINED[name_or_path].shape)}, exits=exits
        )
    if name_or_path in PACKAGED:
        return _import_packaged(name_or_path, shapes, exits)
    file, task = file_and_task(name_or_path)
    if task:
        return import_onnx(file, shapes=shapes, exits=exits, task=task)
    if not name_or_path.endswith(".onnx") and not Path(name_or_path).exists():
        known_names = (*ZOO, *TRAINED, *PACKAGED)
        raise ModelError(unknown_name("model", name_or_path, known_names) + " (a file ends in .onnx)")
    return import_onnx(name_or_path, shapes=shapes, exits=exits)


@lru_cache(maxsize=64)
def _with_exits(model: Model, count: int, head: str) -> Model:
    """``with_exits``, cached: equal arguments give the same object, so that caches of its profiles hit."""
    return with_exits(model, count, head=head)


def _import_packaged(name: str, shapes: Mapping[str, Shape] | None, exits: tuple[str, ...] | None) -> Model:
    return import_onnx(packaged_file(name), shapes={**PACKAGED[name].shapes, **(shapes or {})}, name=name, exits=exits)
