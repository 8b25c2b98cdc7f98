"""Seeded values for declared weights, in memory or streamed to a file.

A declared weight is an initializer without data that has its recipe in ``metadata_props``. Each weight has its own
random generator, seeded by the model's seed and the tensor's name, so that values depend on neither the order of
generation nor other tensors.

The recipes keep activations near unit scale through a fresh network (He et al. 2015 before rectifiers,
Glorot and Bengio 2010 elsewhere), so that an untrained model has finite outputs that follow its input.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from weft.base.errors import ModelError
from weft.base.files import replacing
from weft.models.onnx_graph import OnnxModel, copied, metadata, save, set_metadata

Progress = Callable[[int, int], None]
"""Called with the bytes of weights done and the bytes in all."""

SINGLE_FILE_BYTES = 1 << 30
"""A model with more weights than this keeps them in a second file, ``<file>.data``."""

RECIPE = "weft.init"
"""Tensor metadata: how a declared weight is drawn."""
SEED = "weft.seed"
"""Model metadata: the default seed."""
ALIGNMENT_BYTES = 4096
"""Tensors start at multiples of this in a data file, so that a runtime can map them into memory."""


def normal(mean: float, deviation: float) -> str:
    """The recipe of normally distributed values."""
    return f"normal {mean} {deviation}"


def uniform(low: float, high: float) -> str:
    """The recipe of uniformly distributed values."""
    return f"uniform {low} {high}"


def he(fan_in: int, *, rectified: bool) -> str:
    """The recipe of He et al.: *rectified* doubles the variance, since a rectifier after the layer halves it."""
    return normal(0.0, math.sqrt((2 if rectified else 1) / fan_in))


def xavier(fan_in: int, fan_out: int) -> str:
    """The recipe of Glorot and Bengio."""
    return normal(0.0, math.sqrt(2 / (fan_in + fan_out)))


BIAS = normal(0.0, 0.1)
SCALE = uniform(0.9, 1.1)
TABLE = normal(0.0, 1.0)
BATCH_NORM = {"scale": SCALE, "bias": BIAS, "mean": BIAS, "variance": uniform(0.8, 1.2)}
"""Recipes of a batch norm's parameters, in the order of the operator's inputs."""


def declare(name: str, dims: Sequence[int], recipe: str) -> TensorProto:
    """A float32 initializer with a recipe and without data."""
    tensor = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT)
    tensor.metadata_props.add(key=RECIPE, value=recipe)
    return tensor


def materialise(proto: OnnxModel, seed: int | None = None, progress: Progress | None = None) -> OnnxModel:
    """A copy of *proto* with every declared weight generated in memory."""
    model = _copy(proto, seed)
    for tensor, data in _draw_weights(model, progress):
        tensor.raw_data = data.tobytes()
    return model


def write(
    proto: OnnxModel,
    path: str | Path,
    *,
    progress: Progress | None = None,
    single_file_bytes: int = SINGLE_FILE_BYTES,
) -> None:
    """Generate the declared weights of *proto* and save the model.

    Above *single_file_bytes* the tensors go to ``<file>.data`` one at a time, never together in memory; the model
    itself is written last, so that a file left by an interrupted run has no model.
    """
    target = Path(path)
    if sum(map(_size, _declared_weights(proto))) > single_file_bytes:
        _write_with_data(proto, target, progress)
        return
    with replacing(target, ModelError) as draft:
        save(materialise(proto, progress=progress), draft)


def _write_with_data(proto: OnnxModel, target: Path, progress: Progress | None) -> None:
    """Write a model to *target*, and its weights to a second file."""
    model = _copy(proto)
    location = target.name + ".data"
    with replacing(target.with_name(location), ModelError) as draft, draft.open("wb") as file:
        for tensor, data in _draw_weights(model, progress):
            file.seek(-file.tell() % ALIGNMENT_BYTES, 1)  # forward to the next multiple
            entries = {"location": location, "offset": file.tell(), "length": data.nbytes}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
            tensor.data_location = TensorProto.EXTERNAL
            file.write(data.data)
    with replacing(target, ModelError) as draft:
        save(model, draft)


def _copy(proto: OnnxModel, seed: int | None = None) -> OnnxModel:
    """A copy of the graph; *seed* is stored in its metadata unless it is None."""
    model = copied(proto)
    if seed is not None:
        set_metadata(model, {**metadata(model), SEED: str(seed)})
    return model


def _draw_weights(model: OnnxModel, progress: Progress | None) -> Iterator[tuple[TensorProto, NDArray[np.float32]]]:
    """Yield each declared weight with its generated values; its recipe is removed from the tensor."""
    declared, seed = _declared_weights(model), _seed(model)
    total, done = sum(map(_size, declared)), 0
    for tensor in declared:
        recipe = next(entry.value for entry in tensor.metadata_props if entry.key == RECIPE)
        del tensor.metadata_props[:]
        yield tensor, _draw(recipe, tuple(tensor.dims), _generator(seed, tensor.name))
        done += _size(tensor)
        if progress:
            progress(done, total)


def _declared_weights(model: OnnxModel) -> list[TensorProto]:
    return [tensor for tensor in model.graph.initializer if any(entry.key == RECIPE for entry in tensor.metadata_props)]


def _size(tensor: TensorProto) -> int:
    """Bytes of a float32 tensor."""
    return 4 * math.prod(int(size) for size in tensor.dims)


def _seed(model: OnnxModel) -> int:
    seed = int(metadata(model).get(SEED, "0"))
    if seed < 0:
        raise ModelError(f"seed = {seed} must be at least 0")
    return seed


def _generator(seed: int, name: str) -> np.random.Generator:
    """The random generator of the tensor *name*."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def _draw(recipe: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Generate values by a recipe (``normal`` or ``uniform``), little-endian as ONNX stores them."""
    kind, first_text, second_text = recipe.split()
    first, second = np.float32(first_text), np.float32(second_text)
    if kind == "uniform":  # low, high
        values = rng.random(shape, dtype=np.float32) * (second - first) + first
    else:  # mean, deviation
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= second
        values += first
    return values.astype("<f4", copy=False)
