"""Read ONNX files, torch modules and nets as nets: ``read_models``.

What a reader cannot express in a net becomes an *island*, an operation that keeps its source's form, where allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.base.errors import StitchError
from weft_stitch.net import Net


def read_models(
    models: Sequence[Any],
    *,
    example_inputs: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    batches: int | Sequence[int] | None = None,
    islands: bool = False,
    shapes: Sequence[Mapping[str, tuple[int, ...]] | None] | None = None,
    progress: Callable[[int], None] = lambda read_count: None,
) -> list[Net]:
    """Read every model as a net; ``StitchError`` for anything that is no model.

    *models*: ONNX files, ONNX models in memory, torch modules (with *example_inputs*) or nets. *names*, *batches*: see
    ``StitchOptions``. *islands*: keep operators that are not understood, to run model by model. *shapes*: for each
    model, its inputs' full shapes if the file leaves sizes open. *progress*: called with the number of models read.
    """
    if isinstance(models, str | os.PathLike):
        raise StitchError(f"{os.fspath(models)!r} is one model; give a list of them")
    count = len(models)
    model_names = _per_model("names", names, count) if names is not None else [""] * count
    rows = [batches] * count if batches is None or isinstance(batches, int) else _per_model("batches", batches, count)
    input_shapes = [None] * count if shapes is None else list(shapes)
    examples = _examples(example_inputs, count)
    nets: list[Net] = []
    for model, name, batch, example, sizes in zip(models, model_names, rows, examples, input_shapes, strict=True):
        progress(len(nets))
        nets.append(_read(model, name, batch, islands, example, sizes))
    return nets


def _read(model: Any, name: str, batch: int | None, islands: bool, example: Any, shapes: Any) -> Net:
    """Read one model with the ONNX or the torch reader; a net is only renamed. *example*: a torch module's inputs."""
    if isinstance(model, Net):
        return replace(model, name=name or model.name)
    if isinstance(model, str | os.PathLike) or hasattr(model, "SerializeToString"):
        from weft_stitch.reading.onnx_reader import read_net

        return read_net(model, batch=batch, islands=islands, name=name, shapes=shapes)
    title = name or type(model).__name__
    if not hasattr(model, "forward") and not hasattr(model, "graph_module"):
        raise StitchError(f"{title} is no model; give ONNX files, torch modules or nets")
    if example is None and hasattr(model, "forward"):  # an exported program has its own example
        raise StitchError(f"{title} is a torch module; give what it is called with as example_inputs")
    from weft_stitch.reading.torch_reader import read_module

    return read_module(model, example or (), islands=islands, name=name)


def _per_model(argument: str, entries: Sequence[Any], count: int) -> list[Any]:
    """*entries*, the value of *argument*, as a list; ``StitchError`` unless there is one for each of *count* models."""
    if len(entries) != count:
        raise StitchError(f"{len(entries)} {argument} for {count} models; give one for each")
    return list(entries)


def _examples(example_inputs: Sequence[Any] | None, count: int) -> list[Any]:
    """The example inputs of each of *count* models: *example_inputs* has a tuple for each, or is the inputs of all."""
    if example_inputs and isinstance(example_inputs[0], tuple | list):
        return _per_model("example_inputs", example_inputs, count)
    return [example_inputs] * count
