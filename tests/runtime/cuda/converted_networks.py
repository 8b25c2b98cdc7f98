"""Networks as ONNX models with inputs: the zoo's with narrow layers, those in packages, and families of torch modules.

Conversion is tested with them; they are as deep as the published ones, or have all their parts, and are quick to make.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from torch import nn

from tests.runtime.cuda import image_families, table_families, token_families
from tests.runtime.cuda.converted import drawn_for
from weft.models import zoo
from weft.models.packaged import PACKAGED, packaged_models
from weft.models.zoo.graph import GraphBuilder, GraphValue
from weft.runtime.tensors import Array

Network = tuple[ModelProto, dict[str, Array]]


# The zoo


class NarrowBuilder(GraphBuilder):
    """Builds a network whose layers have a quarter of their channels, since most time goes into large weights."""

    def weight(self, name: str, dims: Sequence[int], recipe: str) -> GraphValue:
        narrow = [size if size % 4 else size // 4 for size in dims]
        kind, first, second = recipe.split()
        if kind == "normal":  # its deviation is for the sums of the full width
            second = str(float(second) * math.sqrt(math.prod(dims[1:]) / math.prod(narrow[1:])))
        return super().weight(name, narrow, f"{kind} {first} {second}")


def of_zoo(name: str, **options: int) -> Network:
    entry = zoo.ZOO[name]
    wide = "resolution" not in entry.parameters or name == "mobilenet-v2"  # depthwise, and small as it is
    graph = GraphBuilder(name) if wide else NarrowBuilder(name)
    entry.builder(graph, **{**entry.parameters, **options})
    model = zoo.materialise(graph.proto())
    return model, drawn_for(model, {})


def options_of(name: str) -> dict[str, int]:
    parameters = zoo.ZOO[name].parameters
    if "resolution" in parameters:
        return {"resolution": 75 if "inception" in name else 67 if name == "caffenet" else 64, "classes": 10}
    return {"layers": 3 if "large" in name else 2, "hidden": 32, "heads": 4} if "layers" in parameters else {
        "users": 99, "items": 98
    }  # fmt: skip


# Packages


def picture() -> Array:
    """Dark bars on light ground, as of a letter."""
    image = np.full((1, 3, 64, 96), 0.9, np.float32)
    image[:, :, 20:40, 10:14] = image[:, :, 20:24, 10:30] = image[:, :, 20:40, 34:38] = -0.9
    return image


SHAPES = {
    "pp-ocr-rec": {"x": (1, 3, 48, 64)},
    "mtcnn-pnet": {"input": (1, 3, 24, 32)},
    "mtcnn-rnet": {"input": (2, 3, 24, 24)},
    "mtcnn-onet": {"input": (2, 3, 48, 48)},
}
"""Smaller than those of ``PACKAGED``."""
FEEDS: dict[str, Callable[[], dict[str, Array]]] = {
    "pp-ocr-det": lambda: {"x": picture()},
    "magika": lambda: {"bytes": np.resize(np.frombuffer(b"def f(x):\n    return x + 1\n", np.uint8), (1, 2048))
                       .astype(np.int32)},
}  # fmt: skip
"""Inputs of networks whose answers to noise are rounding errors."""


def of_package(name: str) -> Network:
    if name not in packaged_models():
        pytest.skip(f"{PACKAGED[name].package} is not installed")
    model = onnx.load(packaged_models()[name])
    return model, FEEDS[name]() if name in FEEDS else drawn_for(
        model, {**PACKAGED[name].shapes, **SHAPES.get(name, {})}
    )


# Families

FAMILIES = image_families.FAMILIES | token_families.FAMILIES | table_families.FAMILIES


def of_family(name: str) -> Network:
    """The module with random weights, exported at three rows and fed with two."""
    make, inputs = FAMILIES[name]
    torch.manual_seed(0)
    module, names = make().eval(), [f"x{place}" for place in range(len(inputs))]
    with torch.no_grad(), warnings.catch_warnings():
        for parameter in module.parameters():
            parameter.copy_(
                nn.init.kaiming_normal_(parameter) if parameter.dim() > 1 else
                parameter + 0.1 * torch.randn_like(parameter)
            )  # fmt: skip
        for key, buffer in module.named_buffers():
            if "running" in key:
                buffer.add_(0.2 * torch.rand_like(buffer))
        warnings.simplefilter("ignore")  # that there is another exporter, and that sizes become constants
        file = io.BytesIO()
        torch.onnx.export(
            module, tuple(torch.from_numpy(each.draw(3, 0)) for each in inputs), file, input_names=names,
            dynamic_axes={each: {0: "n"} for each in names}, dynamo=False, opset_version=17,
        )  # fmt: skip
    feed = {name: each.draw(2, seed) for seed, (name, each) in enumerate(zip(names, inputs, strict=True))}
    return onnx.load_from_string(file.getvalue()), feed


NETWORKS: dict[str, Callable[[], Network]] = {
    **{name: partial(of_zoo, name, **options_of(name)) for name in zoo.ZOO},
    **{f"package-{name}": partial(of_package, name)
       for name in ("light-shufflenet", "light-squeezenet", "magika", "mtcnn-onet", "mtcnn-pnet", "mtcnn-rnet",
                    "pp-ocr-cls", "pp-ocr-det", "pp-ocr-rec")},
    **{f"family-{name}": partial(of_family, name) for name in FAMILIES},
}  # fmt: skip
"""Name -> what makes the model and its inputs."""
FLOAT32_ONLY = {
    "family-c3d": "torch has no pools of volumes in 16 bits on the CPU",
    "package-light-squeezenet": "its weights are all 1, and sums exceed float16",
    "package-magika": "its places of bytes exceed what 16 bits tell apart",
    "package-pp-ocr-det": "its last layers multiply differences",
    "package-pp-ocr-rec": "its last layers multiply differences",
    "resnet152": "with random weights its sums exceed float16",
}
"""Name -> why it is not compared in 16 bits."""
