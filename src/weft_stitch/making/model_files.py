"""Nets as ONNX files that keep what they share: ``save_nets``, ``unfolded``.

A normalisation folded into a convolution makes shared filters differ by its factors. So it stays an operator of its
own here (``BatchNormalization``, as exporters write it before folding); only a plain bias joins its convolution.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from weft.base.errors import InputError
from weft_stitch.emit import closed, convolve, emit, opened
from weft_stitch.graph import Builder, Graph
from weft_stitch.net import Array, Net, Op


def save_nets(nets: Iterable[Net], folder: Path, *, dynamic: bool = False) -> tuple[Path, ...]:
    """Write each net to a file of its name; *dynamic* leaves the number of rows open."""
    from weft_stitch.onnx_writer import write_onnx

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made a folder: {error.strerror or error}; name another") from error
    paths = []
    for net in nets:
        paths.append(folder / f"{net.name}.onnx")
        write_onnx(unfolded(net, dynamic=dynamic), paths[-1])
    return tuple(paths)


def unfolded(net: Net, *, dynamic: bool = False) -> Graph:
    """The net alone, each of its weights as it is."""
    builder, tensors = opened(net, dynamic=dynamic)
    biases = _biases(net)
    for op in net.ops:
        builder.layer = op.name
        inputs = [tensors[each] for each in op.inputs]
        if op.output in biases:
            bias = biases[op.output].shift
            assert op.weight is not None
            tensors[op.output] = convolve(builder, inputs[0], op.weight, bias, window=op.window, groups=op.groups)
        elif op.inputs[0] in biases and op is biases[op.inputs[0]]:
            tensors[op.output] = inputs[0]
        elif op.kind == "affine" and not _is_one(op.scale):
            tensors[op.output] = _normalise(builder, op, inputs[0])
        else:
            tensors[op.output] = emit(builder, op, inputs)
    return closed(net, builder, tensors)


def _biases(net: Net) -> dict[str, Op]:
    """The values of convolutions that only a bias reads, with that bias."""
    convolved = {op.output for op in net.ops if op.kind == "conv"} - {port.value for port in net.outputs}
    readers = {value: list(net.readers(value)) for value in convolved}
    alone = {value: found[0] for value, found in readers.items() if len(found) == 1}
    return {value: op for value, op in alone.items() if op.kind == "affine" and _is_one(op.scale)}


def _normalise(builder: Builder, op: Op, value: str) -> str:
    channels = builder.shape(value)[1]
    scale = np.ones(channels, np.float32) if op.scale is None else op.scale
    shift = np.zeros_like(scale) if op.shift is None else op.shift
    tables = [(scale, "scale"), (shift, "shift"), (np.zeros_like(scale), "mean"), (np.ones_like(scale), "variance")]
    names = [builder.constant(table, hint) for table, hint in tables]
    return builder.add("BatchNormalization", value, *names, shape=builder.shape(value), epsilon=0.0)


def _is_one(scale: Array | None) -> bool:
    return scale is None or bool((scale == 1).all())
