"""The model zoo: well-known networks built as ONNX graphs, with weights generated only where they are run.

``build`` makes the graph of a network, ``load`` its layers, ``materialise`` and ``export`` generate weights. The
architectures are as published; the weights are random, so outputs mean nothing, but run times are realistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from weft.base.errors import ModelError, unknown_name
from weft.models.layer import Model
from weft.models.onnx_graph import OnnxModel
from weft.models.onnx_import import import_onnx
from weft.models.zoo import inception, language, vision
from weft.models.zoo import weights as _weights
from weft.models.zoo.graph import GraphBuilder

__all__ = ["ZOO", "ZooEntry", "build", "export", "load", "materialise"]

Parameter = int | str
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """A network of the zoo."""

    builder: Callable[..., None]
    """Called with an empty ``GraphBuilder`` and all parameters by keyword."""
    parameters: Mapping[str, Parameter]
    """All parameters with their defaults; integers must be at least 1."""
    description: str


def _image(resolution: int, **others: Parameter) -> dict[str, Parameter]:
    """The default parameters of an image classifier."""
    return {"resolution": resolution, "classes": 1000, **others}


def _encoder(layers: int, hidden: int) -> dict[str, Parameter]:
    """The default parameters of a text encoder."""
    return {"seq_len": 16, "layers": layers, "hidden": hidden, "heads": hidden // 64}


_RESNET, _RESNEXT = _image(224, groups=1, group_width=64), _image(224, groups=32, group_width=4)
_MOVIELENS: dict[str, Parameter] = {"users": 138493, "items": 26744, "tables": "stream"}

ZOO: dict[str, ZooEntry] = {
    "alexnet": ZooEntry(vision.alexnet, _image(224), "Image classifier, mostly fully connected weights."),
    "caffenet": ZooEntry(vision.caffenet, _image(227), "AlexNet of two columns, as Caffe has it."),
    "densenet121": ZooEntry(vision.densenet121, _image(224), "Image classifier, every layer reads all before."),
    "fcn-resnet18": ZooEntry(vision.fcn_resnet18, _image(224, classes=21), "Segmenter: a class for every pixel."),
    "googlenet": ZooEntry(inception.googlenet, _image(224), "The first Inception, without normalisation."),
    "inception-resnet-v2": ZooEntry(inception.inception_resnet_v2, _image(299), "Inception blocks with residuals."),
    "inception-v3": ZooEntry(inception.inception_v3, _image(299), "Image classifier of parallel branches."),
    "inception-v4": ZooEntry(inception.inception_v4, _image(299), "Inception-v3, deeper and more regular."),
    "mobilenet-v2": ZooEntry(vision.mobilenet_v2, _image(224), "Small image classifier, depthwise."),
    "resnet18": ZooEntry(vision.resnet18, _image(224), "Residual image classifier of basic blocks."),
    "resnet50": ZooEntry(partial(vision.resnet, depth=50), _RESNET, "Residual image classifier, version 1.5."),
    "resnet101": ZooEntry(partial(vision.resnet, depth=101), _image(224), "ResNet-50 with twice the blocks."),
    "resnet152": ZooEntry(partial(vision.resnet, depth=152), _image(224), "ResNet-50 with three times the blocks."),
    "resnext50-32x4d": ZooEntry(partial(vision.resnet, depth=50), _RESNEXT, "ResNet-50, 32 groups of 4 channels."),
    "vgg16": ZooEntry(partial(vision.vgg, depth=16), _image(224), "Image classifier of plain 3x3 convolutions."),
    "vgg19": ZooEntry(partial(vision.vgg, depth=19), _image(224), "VGG with three more convolutions."),
    "bert-base": ZooEntry(language.bert, _encoder(12, 768), "Text encoder with a two-class head."),
    "bert-large": ZooEntry(language.bert, _encoder(24, 1024), "BERT with twice the layers."),
    "xlnet-base": ZooEntry(language.xlnet, _encoder(12, 768), "Text encoder, relative positions."),
    "xlnet-large": ZooEntry(language.xlnet, _encoder(24, 1024), "XLNet with twice the layers."),
    "ncf": ZooEntry(language.ncf, _MOVIELENS, "Recommender for MovieLens-20M, mostly tables."),
}
"""Networks by the names that a user may write. To add a network, write its builder and add one line here."""


def build(name: str, *, seed: int = 0, **parameters: Parameter) -> OnnxModel:
    """Make the graph of a network with weights declared but not generated; *seed* is stored in its metadata."""
    entry = _entry(name)
    graph = GraphBuilder(name)
    graph.metadata[_weights.SEED] = str(seed)
    entry.builder(graph, **_check_parameters(name, entry, parameters))
    return graph.proto()


def materialise(proto: OnnxModel, seed: int | None = None) -> OnnxModel:
    """A copy of a built graph with generated weights in memory; *seed*: by default that in its metadata."""
    return _weights.materialise(proto, seed)


def export(
    name: str,
    path: str | Path,
    *,
    seed: int = 0,
    progress: _weights.Progress | None = None,
    **parameters: Parameter,
) -> None:
    """Write a runnable .onnx file; more than 1 GiB of weights go to a second file, ``<file>.data``."""
    _weights.write(build(name, seed=seed, **parameters), path, progress=progress)


def load(name: str, *, shapes: Shapes | None = None, **parameters: Parameter) -> Model:
    """The layers of a network, without generating weights; equal arguments return the same object."""
    checked = _check_parameters(name, _entry(name), parameters)
    hashable_shapes = tuple(sorted((key, tuple(dims)) for key, dims in (shapes or {}).items()))
    return _load(name, hashable_shapes, tuple(checked.items()))


@lru_cache(maxsize=64)
def _load(
    name: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], parameters: tuple[tuple[str, Parameter], ...]
) -> Model:
    return import_onnx(build(name, seed=0, **dict(parameters)), shapes=dict(shapes) or None, name=name)


def _entry(name: str) -> ZooEntry:
    """The entry of a network; raises ModelError for an unknown name."""
    if name not in ZOO:
        raise ModelError(unknown_name("model", name, ZOO))
    return ZOO[name]


def _check_parameters(name: str, entry: ZooEntry, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The defaults of a network, updated by *parameters*; raises ModelError for unknown names and wrong values."""
    for key, value in parameters.items():
        if key not in entry.parameters:
            raise ModelError(f"{name} has no parameter {key!r}; it takes {', '.join(entry.parameters)}")
        expected = type(entry.parameters[key])
        if type(value) is not expected:
            raise ModelError(f"{name}: {key} must be of type {expected.__name__}, got {value!r}")
        if isinstance(value, int) and value < 1:
            raise ModelError(f"{name}: {key} must be at least 1, got {value}")
    return {**entry.parameters, **parameters}
