"""Write a torch Sequential as plain ONNX: one node per module, named after it, and any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET, IR = 17, 8


class Normalise(nn.Module):
    """Pixels less the mean of their channel, times one scale."""

    def __init__(self, mean: list[float], scale: float):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.scale


class _Graph:
    """The nodes and weights written so far; ``last`` is the tensor that the next node takes."""

    def __init__(self, first: str):
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.last = first

    def add(self, kind: str, name: str, *weights: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(kind, [self.last, *weights], [name], name, **attributes))
        self.last = name

    def weight(self, name: str, value: Tensor) -> str:
        self.weights.append(numpy_helper.from_array(value.detach().cpu().numpy(), name))
        return name

    def weights_of(self, name: str, layer: nn.Conv2d | nn.Linear) -> tuple[str, str]:
        return self.weight(f"{name}.weight", layer.weight), self.weight(f"{name}.bias", layer.bias)


def write(net: nn.Sequential, shape: tuple[int, ...], path: Path) -> None:
    """Write the network with the input ``image``, of *shape* behind the batch, and the output ``logits``."""
    graph, x = _Graph("image"), torch.zeros(1, *shape)
    for name, module in net.named_children():
        _add(graph, name, module, x)
        x = module(x)
    graph.nodes[-1].output[0] = "logits"
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *shape])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", *x.shape[1:]])
    whole = helper.make_graph(graph.nodes, path.stem, [image], [logits], graph.weights)
    model = helper.make_model(
        whole, producer_name="weft", ir_version=IR, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _add(graph: _Graph, name: str, module: nn.Module, x: Tensor) -> None:
    match module:
        case nn.Conv2d():
            pads = [*module.padding, *module.padding]
            kernel, strides = list(module.kernel_size), list(module.stride)
            weights = graph.weights_of(name, module)
            graph.add("Conv", name, *weights, kernel_shape=kernel, pads=pads, strides=strides)
        case nn.Linear():
            graph.add("Gemm", name, *graph.weights_of(name, module), transB=1)
        case nn.MaxPool2d():
            graph.add("MaxPool", name, **_window(module, x))
        case nn.AvgPool2d():
            graph.add("AveragePool", name, **_window(module, x))
        case nn.ReLU():
            graph.add("Relu", name)
        case nn.Flatten():
            graph.add("Flatten", name)
        case Normalise():
            graph.add("Sub", f"{name}.sub", graph.weight(f"{name}.mean", module.mean))
            graph.add("Mul", name, graph.weight(f"{name}.scale", module.scale))
        case _:
            raise TypeError(f"{name}: no ONNX for {type(module).__name__}")


def _window(pool: nn.MaxPool2d | nn.AvgPool2d, x: Tensor) -> dict[str, list[int]]:
    """The attributes of a square pool without padding; where a last window hangs over the edge, padding at the end."""
    kernel, stride = pool.kernel_size, pool.stride
    over = [
        max(0, (out - 1) * stride + kernel - size) for out, size in zip(pool(x).shape[2:], x.shape[2:], strict=True)
    ]
    return {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [0, 0, *over]}
