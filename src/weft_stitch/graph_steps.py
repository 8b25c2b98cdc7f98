"""One model's operations as steps of a graph: ``emit``, and ``plain_graph`` for the whole model alone.

A convolution whose window covers the whole picture is written as a product of matrices (``Gemm``): onnxruntime's
convolution reads such a weight once per row, which took up to 12 times as long (1024 outputs, 32 rows). An *affine* is
a scale and a shift per channel, an *island* an operator that only its source can run. An island of an
ONNX file writes its own steps; one of torch becomes a step ``Island`` whose attribute ``payload`` has
``run(*tensors)``, and only torch runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft_stitch.graph import DYNAMIC, Builder, Graph, KernelOrigin
from weft_stitch.net import Array, Net, Op, Port, Value, Window, infer

Shape = tuple[int, ...]

_POOLS = {"max_pool": "MaxPool", "avg_pool": "AveragePool"}
_ELEMENTWISE = {"add": "Add", "mul": "Mul"}


def emit(builder: Builder, op: Op, inputs: Sequence[str]) -> str:
    """Add the steps that compute *op* from *inputs*, tensors [rows, C, H, W]; return the name of the result."""
    if op.kind == "conv":
        assert op.weight is not None
        return convolve(builder, inputs[0], op.weight, window=op.window, groups=op.groups, origin=KernelOrigin(op))
    if op.kind == "affine":
        return scale_and_shift(builder, inputs[0], op.scale, op.shift)
    if op.kind == "unary" and op.payload is None:
        return activate(builder, inputs[0], op.function, op.settings)
    if op.kind in _ELEMENTWISE:
        return combine(builder, _ELEMENTWISE[op.kind], inputs)
    shape = _output_shape(builder, op, inputs)
    if op.kind == "concat":
        return builder.add("Concat", *inputs, shape=shape, axis=1)
    if op.kind == "global_pool":
        return builder.add("GlobalAveragePool", inputs[0], shape=shape)
    if op.kind in _POOLS:
        return builder.add(_POOLS[op.kind], inputs[0], shape=shape, **_pool_attributes(op))
    if hasattr(op.payload, "steps"):  # an island of an ONNX file, or a rounding step
        name: str = op.payload.steps(builder, list(inputs))
        return name
    return builder.add("Island", *inputs, shape=shape, payload=op.payload)


def convolve(
    builder: Builder,
    value: str,
    weight: Array,
    bias: Array | None = None,
    *,
    window: Window | None = None,
    groups: int = 1,
    origin: KernelOrigin | None = None,
) -> str:
    """Add a convolution of *value* and return its output's name; a matrix product for a window over the whole picture.

    *weight*: [out, in / groups, height, width]. *window*: by default stride 1 without padding. *origin*: recorded
    in the builder, with the name of the constant that stores *weight*.
    """
    window = window or Window((weight.shape[2], weight.shape[3]))
    rows, channels, height, width = builder.shape(value)
    outs = weight.shape[0]
    bias_name = [] if bias is None else [builder.constant(bias, "bias", weight=True)]
    if groups == 1 and window.kernel == (height, width) and not any(window.pads):
        flat = builder.add("Flatten", value, shape=(rows, channels * height * width), axis=1)
        matrix = builder.constant(weight.reshape(outs, -1), "weight", weight=True)
        builder.origins += [] if origin is None else [origin._replace(constant=matrix)]
        product = builder.add("Gemm", flat, matrix, *bias_name, shape=(rows, outs), transB=1)
        return reshape(builder, product, (outs, 1, 1))
    kernel = builder.constant(weight, "weight", weight=True)
    builder.origins += [] if origin is None else [origin._replace(constant=kernel)]
    shape = (rows, outs, *window.output(height, width))
    attributes = {**_window_attributes(window), "dilations": list(window.dilations), "group": groups}
    return builder.add("Conv", value, kernel, *bias_name, shape=shape, **attributes)


def scale_and_shift(builder: Builder, value: str, scale: Array | None, shift: Array | None) -> str:
    """Multiply *value* by *scale* and add *shift*, both per channel; factors of one and terms of zero add no step."""
    shape = builder.shape(value)
    if scale is not None and not (scale == 1).all():
        factor = builder.constant(scale.reshape(1, -1, 1, 1), "scale", weight=True)
        value = builder.add("Mul", value, factor, shape=shape)
    if shift is not None and shift.any():
        term = builder.constant(shift.reshape(1, -1, 1, 1), "shift", weight=True)
        value = builder.add("Add", value, term, shape=shape)
    return value


def activate(builder: Builder, value: str, function: str, settings: Mapping[str, float]) -> str:
    """Apply an elementwise function, as named by ``Op.function``, with ``Op.settings``."""
    shape = builder.shape(value)
    if function == "Silu":
        gate = builder.add("Sigmoid", value, shape=shape)
        return builder.add("Mul", value, gate, shape=shape)
    if function == "Clip":
        bounds = [_scalar(builder, settings.get(bound)) for bound in ("min", "max")]
        return builder.add("Clip", value, *bounds, shape=shape)
    if function == "Gelu":
        return builder.add("Gelu", value, shape=shape, approximate="tanh" if settings.get("tanh") else "none")
    attributes: dict[str, Any] = {name: float(number) for name, number in settings.items()}
    return builder.add(function, value, shape=shape, **attributes)


def combine(builder: Builder, operator: str, values: Sequence[str]) -> str:
    """Add (*operator* "Add") or multiply ("Mul") *values*; values of one position are broadcast over the others."""
    name = values[0]
    for other in values[1:]:
        rows = builder.shape(name)[0]
        shape = np.broadcast_shapes(builder.shape(name)[1:], builder.shape(other)[1:])
        name = builder.add(operator, name, other, shape=(rows, *shape))
    return name


def reshape(builder: Builder, value: str, shape: Shape) -> str:
    """Give *value* the dimensions *shape* after its rows."""
    rows = builder.shape(value)[0]
    # a zero in the target of Reshape copies the number of rows, which may be dynamic or zero
    target = builder.constant(np.array([0, *shape], dtype=np.int64), "shape")
    return builder.add("Reshape", value, target, shape=(rows, *shape))


def read_port(builder: Builder, port: Port, value: Value, name: str, rows: int) -> str:
    """Add the input *name* for *port*, and return it as the tensor [rows, C, H, W] that operations read."""
    source = builder.input(name, (rows, *port.shape))
    inside = (value.channels, value.height, value.width)
    return source if port.shape == inside else reshape(builder, source, inside)


def write_port(builder: Builder, port: Port, tensor: str, name: str) -> None:
    """Make *tensor* the output *name*, in the shape of *port*."""
    if builder.shape(tensor)[1:] != port.shape:
        tensor = reshape(builder, tensor, port.shape)
    builder.output(tensor, name)


def begin_graph(net: Net, *, dynamic: bool = False) -> tuple[Builder, dict[str, str]]:
    """Start the graph of *net* alone; return its builder, and value -> tensor for the inputs."""
    builder = Builder(net.name)
    builder.reserve(port.name for port in (*net.inputs, *net.outputs))
    builder.tuned = net.tuned
    rows = DYNAMIC if dynamic else net.batch
    return builder, {
        port.value: read_port(builder, port, net.values[port.value], port.name, rows) for port in net.inputs
    }


def finish_graph(net: Net, builder: Builder, tensors: Mapping[str, str]) -> Graph:
    """Add the outputs of *net* to the graph that ``begin_graph`` started, and return the graph.

    *tensors*: value -> tensor.
    """
    builder.layer = ""
    for port in net.outputs:
        write_port(builder, port, tensors[port.value], port.name)
    return builder.finish()


def plain_graph(net: Net, *, dynamic: bool = False) -> Graph:
    """The graph of *net* alone, with affines folded into convolutions; *dynamic* leaves the number of rows open."""
    builder, tensors = begin_graph(net, dynamic=dynamic)
    folded = _folded_writers(net)
    for op in net.ops:
        builder.layer = op.name
        if op.output in folded:
            continue
        conv, scale, shift = _joint_affine(net, op, folded)
        if conv is None:
            tensors[op.output] = emit(builder, op, [tensors[value] for value in op.inputs])
        else:
            assert conv.weight is not None
            weight = (conv.weight * scale[:, None, None, None]).astype(conv.weight.dtype)
            tensors[op.output] = convolve(
                builder,
                tensors[conv.inputs[0]],
                weight,
                shift.astype(weight.dtype),
                window=conv.window,
                groups=conv.groups,
            )
    return finish_graph(net, builder, tensors)


def _folded_writers(net: Net) -> dict[str, Op]:
    """Value -> the convolution or affine that writes it, for values that are folded into the affine that reads them.

    The affine must be the only reader of the value. A tuned convolution only absorbs a shift: scaled weights would
    leave their number format.
    """
    readers = Counter(value for op in net.ops for value in op.inputs)
    readers.update(port.value for port in net.outputs)
    writers = {op.output: op for op in net.ops}
    folded: dict[str, Op] = {}
    for op in net.ops:
        if op.kind != "affine" or op.inputs[0] not in writers or readers[op.inputs[0]] != 1:
            continue
        writer = writers[op.inputs[0]]
        keeps_weights = writer.tuned and scales(op)
        if (writer.kind == "conv" and not keeps_weights) or (writer.kind == "affine" and writer.inputs[0] in folded):
            folded[writer.output] = writer
    return folded


def scales(op: Op) -> bool:
    """Whether the affine *op* multiplies; otherwise it only adds."""
    return op.scale is not None and not bool((op.scale == 1).all())


def _joint_affine(net: Net, op: Op, folded: Mapping[str, Op]) -> tuple[Op | None, Array, Array]:
    """The convolution in front of the chain of affines that ends in *op*, and their joint scale and shift.

    The convolution is None, and both arrays are empty, if *op* does not end such a chain.
    """
    if op.kind != "affine" or op.inputs[0] not in folded:
        return None, np.ones(0), np.zeros(0)
    channels = net.values[op.output].channels
    scale, shift = np.ones(channels), np.zeros(channels)
    while op.kind == "affine":
        if op.shift is not None:
            shift = shift + scale * op.shift
        if op.scale is not None:
            scale = scale * op.scale
        op = folded[op.inputs[0]]
    return op, scale, shift


def _output_shape(builder: Builder, op: Op, inputs: Sequence[str]) -> Shape:
    """The shape of the output of *op* when it reads the tensors *inputs*."""
    rows = builder.shape(inputs[0])[0]
    size = infer(op, tuple(Value(*builder.shape(tensor)[1:]) for tensor in inputs))
    return rows, size.channels, size.height, size.width


def _window_attributes(window: Window) -> dict[str, Any]:
    return {"kernel_shape": list(window.kernel), "strides": list(window.strides), "pads": list(window.pads)}


def _pool_attributes(op: Op) -> dict[str, Any]:
    """The ONNX attributes of a pool."""
    attributes = _window_attributes(op.window)
    if op.window.dilations != (1, 1):
        attributes["dilations"] = list(op.window.dilations)
    if op.kind == "avg_pool":
        attributes["count_include_pad"] = int(op.settings.get("count_include_pad", 0))
    return attributes


def _scalar(builder: Builder, number: float | None) -> str:
    return "" if number is None else builder.constant(np.array(number, dtype=np.float32), "bound")
