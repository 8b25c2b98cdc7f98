"""A graph that runs in torch: ``StitchedModule``, and ``Captured``, the same replayed as one CUDA graph.

``FusedConv`` is a layer of all tasks in one step; on CUDA it is one kernel (``kernel``), which reads weights as
``packing`` lays them out. There, each task's values have their channels in *columns*, in an order of the task's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.models.operators import Meaning, TorchNode, find
from weft_stitch.graph import DYNAMIC, Graph, GraphStep
from weft_stitch.net import Array
from weft_stitch.packing import LARGEST, Activation, PackedLayer, Tile
from weft_stitch.running.operators import Tensor, meaning, torch


def plain(
    packed: PackedLayer,
    rows: Sequence[int],
    activation: Activation,
    x: Array,
    weights: Array,
    scale: Array,
    shift: Array,
    residual: Array | None = None,
) -> Array:
    """The twin of the fused kernel in numpy: [rows, height, width, columns] in and out.

    *rows*: the number of rows of each task. *scale*, *shift*: [task, output column].
    """
    patches, (out_height, out_width) = _unfold(packed, x)
    taps = packed.window.kernel[0] * packed.window.kernel[1]
    y = np.zeros((len(patches), packed.outputs), np.float32)
    # one tile per task and output block, without a limit to its positions and channels, and without a rider
    for fields in packed.tiles([row_count * out_height * out_width for row_count in rows], 1 << 30, 1 << 30):
        tile = Tile(*(int(field) for field in fields[: len(Tile._fields)]))
        k, channel = np.arange(tile.depth), tile.skip + np.arange(tile.width)
        weight_start, tap_stride = _weight_places(packed, tile, k, taps)
        has_weights = weight_start >= 0
        # indices into *weights*: [input column, tap, output channel]
        tap_offset = tap_stride[has_weights][:, None] * np.arange(taps)
        weight_indices = (weight_start[has_weights][:, None] + tap_offset)[:, :, None] + channel
        positions = slice(tile.first_position, tile.end_position)
        total = np.einsum("pkt,ktn->pn", patches[positions][:, k[has_weights]], weights[weight_indices], optimize=True)
        out_column = tile.column + channel
        total = total * scale[tile.task, out_column] + shift[tile.task, out_column]
        total += 0.0 if residual is None else residual.reshape(y.shape)[positions][:, out_column]
        y[positions, tile.column + tile.skip : tile.column + tile.skip + tile.width] = activated(total, activation)
    return y.reshape(len(x), out_height, out_width, packed.outputs)


def _weight_places(packed: PackedLayer, tile: Tile, k: Array, taps: int) -> tuple[Array, Array]:
    """For each input column *k*, the index at which its weights begin (-1: none), and the distance from tap to tap."""
    if packed.by_table:  # the table has both divided by the alignment
        weight_start, tap_stride = packed.places.reshape(2, -1)[:, tile.table + k]
        return np.where(weight_start < 0, -1, weight_start * packed.align), tap_stride * packed.align
    in_second_run = k >= tile.second_column
    has_weights = (k < tile.first_end) | (in_second_run & (k < tile.second_end))
    weight_start = tile.first_place + k * taps * tile.line + in_second_run * tile.jump
    return np.where(has_weights, weight_start, -1), np.full_like(k, tile.line)


def _unfold(packed: PackedLayer, x: Array) -> tuple[Array, tuple[int, int]]:
    """The input of each output position, [output position, column, tap], and the output's height and width."""
    window = packed.window
    top, left, bottom, right = window.pads
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (top, bottom), (left, right), (0, 0)))
    out_height, out_width = window.output(x.shape[1], x.shape[2])
    patches = []
    for tap_row in range(window.kernel[0]):
        for tap_column in range(window.kernel[1]):
            row_offset, column_offset = tap_row * window.dilations[0], tap_column * window.dilations[1]
            tap_input = padded[:, row_offset :: window.strides[0], column_offset :: window.strides[1]]
            patches.append(tap_input[:, :out_height, :out_width].reshape(-1, padded.shape[-1]))
    return np.stack(patches, axis=-1), (out_height, out_width)


def activated(y: Array, activation: Activation) -> Array:
    """Apply an activation to *y*."""
    function, alpha, beta = activation
    if function in ("Sigmoid", "Silu"):
        with np.errstate(over="ignore"):
            gate = 1.0 / (1.0 + np.exp(-y))
        return gate if function == "Sigmoid" else y * gate
    if function == "HardSigmoid":
        return np.clip(alpha * y + beta, 0, 1)
    if function == "HardSwish":
        return y * np.clip(y / 6 + 0.5, 0, 1)
    if function == "LeakyRelu":
        return np.where(y < 0, alpha * y, y)
    if function == "Clip":
        return np.clip(y, alpha, beta)
    return np.maximum(y, 0) if function == "Relu" else y


class Shape(NamedTuple):
    """Tile of the fused kernel: how much one program computes, and how it is compiled."""

    tall: int
    """Output positions."""
    wide: int
    """Output channels."""
    deep: int
    """Input columns per step of the loop."""
    warps: int = 4
    stages: int = 3
    flat: bool = False
    """Whether the loop treats taps and columns as one dimension, which is better for few columns."""


class FusedConv(torch.nn.Module):
    """Convolve, scale, shift, add a residual and activate, for all tasks' rows; [rows, columns, height, width]."""

    def __init__(self, packed: PackedLayer, rows: Sequence[int], activation: Activation, *tables: Array) -> None:
        """*rows*: the number of rows of each task. *tables*: packed weights; scale and shift, [task, output column]."""
        super().__init__()
        self.packed, self.rows, self.activation = packed, tuple(rows), activation
        self.shape = Shape(64, 32, 32)
        self.overwrites_residual = False
        """Whether the output may be written over the residual, which no other step needs."""
        self._tables: dict[Any, tuple[Tensor, ...]] = {}
        """Number of positions and tile sizes -> tables of tiles, places and lines on the device."""
        for name, table in zip(("weights", "scale", "shift"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(np.array(table)))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, into: Tensor | None = None, keep: bool = False
    ) -> Tensor:
        """The layer's output: [rows, columns, height, width], as *x* and *residual*.

        *into*: memory for it, used if it is in channels-last order. *keep*: do not write over the residual.
        """
        x_last = x.permute(0, 2, 3, 1).contiguous()
        residual_last = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
        target = residual_last if self.overwrites_residual and not keep else None
        if into is not None and into.dtype == x.dtype and into.permute(0, 2, 3, 1).is_contiguous():
            target = into.permute(0, 2, 3, 1)
            if self.packed.ragged:  # no tile writes the columns behind a task's shorter rows
                target.zero_()
        y = self.launch(x_last, residual_last, target) if x.is_cuda else self.run_plain(x_last, residual_last)
        if target is not None and y is not target:  # the plain twin does not write into a target
            y = target.copy_(y)
        return y.permute(0, 3, 1, 2)

    def run_plain(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer by the numpy twin of the kernel: [rows, height, width, columns] in and out."""
        inputs, weights, scale, shift = (
            tensor.float().cpu().numpy() for tensor in (x, self.weights, self.scale, self.shift)
        )
        residual_array = None if residual is None else residual.float().cpu().numpy()
        y = plain(self.packed, self.rows, self.activation, inputs, weights, scale, shift, residual_array)
        return torch.from_numpy(y).to(x)

    def launch(self, x: Tensor, residual: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """The layer as one kernel: [rows, height, width, columns] in and out; *into* may be the residual."""
        from weft_stitch.running.kernel import fused_kernel

        height, width = self.packed.window.output(x.shape[1], x.shape[2])
        size = (x.shape[0], height, width, self.packed.outputs)
        if max(x.numel(), x.shape[0] * height * width * self.packed.outputs) >= LARGEST:
            raise StitchError(f"{list(size)} values are more than the fused form can count; use fewer rows")
        y = into
        if y is None:  # in ragged layouts, no tile writes the columns behind a task's shorter rows
            y = (torch.zeros if self.packed.ragged else torch.empty)(size, dtype=x.dtype, device=x.device)
        tiles, *_ = tables = self.tables(height * width, x.device)
        fused_kernel[(tiles.shape[0],)](*self.arguments(x, tables, residual, y), **self.settings(residual is not None))
        return y

    @property
    def rider_width(self) -> int:
        """Columns of a rider (``PackedLayer.tiles``): a power of two from 16; 0 if that is over half a tile's width."""
        width = max(16, 1 << (self.packed.widest_rider - 1).bit_length()) if self.packed.widest_rider else 0
        return width if 2 * width <= self.shape.wide else 0

    def tables(self, positions: int, device: Any) -> tuple[Tensor, ...]:
        """Tables of tiles, places and lines on *device*, for *positions* output positions per row."""
        tile_size = (self.shape.tall, self.shape.wide, self.rider_width)
        key = (positions, tile_size, device)
        if key not in self._tables:
            tiles = self.packed.tiles([rows * positions for rows in self.rows], *tile_size)
            # without places, the tiles stand in for them: the kernel needs a pointer, but does not read it
            arrays = (tiles, *(self.packed.places if self.packed.by_table else (tiles, tiles)))
            self._tables[key] = tuple(torch.from_numpy(array).to(device) for array in arrays)
        return self._tables[key]

    def forget_tables(self) -> None:
        """Free the cached tables; the next launch computes those that it needs."""
        self._tables.clear()

    def arguments(self, x: Tensor, tables: Sequence[Tensor], residual: Tensor | None, y: Tensor) -> tuple[Any, ...]:
        """The arguments of a launch; without a residual, the output *y* stands in for it, and is not read as such."""
        packed, (tiles, places, lines) = self.packed, tables
        return (
            x, self.weights, places, lines, tiles, self.scale, self.shift, y if residual is None else residual, y,
            x.shape[1], x.shape[2], y.shape[1], y.shape[2],
            packed.inputs // packed.input_align, packed.outputs // packed.align,
        )  # fmt: skip

    def settings(self, residual: bool) -> dict[str, Any]:
        """The compile-time constants of a launch; *residual*: whether there is one."""
        window, packed, shape = self.packed.window, self.packed, self.shape
        return dict(
            TAPS_HIGH=window.kernel[0], TAPS_WIDE=window.kernel[1],
            STRIDE_H=window.strides[0], STRIDE_W=window.strides[1], PAD_H=window.pads[0], PAD_W=window.pads[1],
            DILATION_H=window.dilations[0], DILATION_W=window.dilations[1],
            BY_TABLE=packed.by_table, RESIDUAL=residual,
            ACTIVATION=self.activation.function, ALPHA=self.activation.alpha, BETA=self.activation.beta,
            ALIGN=packed.align, INPUT_ALIGN=packed.input_align,
            FLAT=shape.flat, DEPTH=packed.depth if shape.flat else 0,
            PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
            TALL=shape.tall, WIDE=shape.wide, DEEP=shape.deep, NARROW=self.rider_width,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def fused_conv(step: GraphStep, constants: Mapping[str, Array]) -> FusedConv:
    """The module of a step ``FusedConv``."""
    attributes = step.attributes
    tables = [constants[name] for name in step.inputs[1:4]]  # weights, scale, shift
    return FusedConv(attributes["packed"], attributes["rows"], attributes["activation"], *tables)


MODULES = {"FusedConv": fused_conv}
"""Operators that become torch modules -> a function that makes the module from a step and the graph's constants."""
FRESH = frozenset(("FusedConv", "MaxPool"))
"""Operators whose output shares memory with no other tensor.

The last reader of such a tensor may write over it, unless another reader is one of ``ALIASES``.
"""
ALIASES = frozenset(
    ("Expand", "Flatten", "Identity", "Island", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
)
"""Operators whose output may share memory with their input."""
WARM_UPS = 3
"""Runs before a capture or a timing: cuDNN chooses its algorithms and Triton compiles in the first ones."""
_NO_BUFFERS: Mapping[str, Tensor] = MappingProxyType({})


class ReadyStep(NamedTuple):
    """One step with everything resolved that does not depend on inputs."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Names of tensors as ``Name``, all else as values."""
    outputs: tuple[str, ...]
    forget: tuple[str, ...]
    """Tensors to delete after the step, because no later step reads them."""


class Name(str):
    """The name of a tensor or a buffer among arguments."""

    __slots__ = ()


class StitchedModule(torch.nn.Module):
    """Runs the steps of *graph* in torch; inputs and outputs are those of the graph, in order."""

    def __init__(self, graph: Graph, *, device: Any = "cpu", dtype: Any = None, channels_last: bool = False) -> None:
        """*dtype*: to which weights are converted; None: they stay as they are."""
        super().__init__()
        self.graph = graph
        self.channels_last, self.dtype = channels_last, dtype
        self._buffer_names: dict[str, str] = {}
        """Constant of the graph -> name of the module's buffer."""
        self._unshared_tensors = _unshared_tensors(graph)
        self._calls = [
            self._ready_step(step, forget) for step, forget in zip(graph.steps, _last_uses(graph), strict=True)
        ]
        self.to(device=device, dtype=dtype)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs for its inputs; ``StitchError`` if their number or shapes are wrong."""
        if len(inputs) != len(self.graph.inputs):
            names = ", ".join(tensor.name for tensor in self.graph.inputs)
            raise StitchError(f"{self.graph.name} takes {len(self.graph.inputs)} tensors ({names}), not {len(inputs)}")
        tensors: dict[str, Any] = {}
        for tensor, value in zip(self.graph.inputs, inputs, strict=True):
            _require_shape(tensor.name, tensor.shape, tuple(value.shape))
            spatial = self.channels_last and value.dim() == 4
            tensors[tensor.name] = value.contiguous(memory_format=torch.channels_last) if spatial else value
        tensors = self.steps(tensors)
        return tuple(tensors[tensor.name] for tensor in self.graph.outputs)

    def steps(
        self,
        given: Mapping[str, Tensor],
        start: int = 0,
        end: int | None = None,
        into: Mapping[str, Tensor] = _NO_BUFFERS,
    ) -> dict[str, Any]:
        """Run steps *start* to *end* (exclusive); return by name all tensors that later steps or the caller need.

        *given*: the tensors that these steps read, which are kept. *into*: memory for some outputs, used by the steps
        that can write there.
        """
        tensors: dict[str, Any] = {name: getattr(self, buffer) for name, buffer in self._buffer_names.items()}
        tensors.update(given)
        for call in self._calls[start:end]:
            arguments = [tensors[argument] if isinstance(argument, Name) else argument for argument in call.arguments]
            if isinstance(call.function, torch.nn.Module):  # a FusedConv
                keep = any(argument in given for argument in call.arguments)
                result = call.function(*arguments, into=into.get(call.outputs[0]), keep=keep)
            else:
                result = call.function(*arguments)
            if len(call.outputs) == 1:
                tensors[call.outputs[0]] = result
            else:
                tensors.update(zip(call.outputs, result, strict=True))
            for name in call.forget:
                del tensors[name]
        return tensors

    @property
    def fused_layers(self) -> list[FusedConv]:
        """The layers in the form ``fused``, in order."""
        return [layer for layer in self.modules() if isinstance(layer, FusedConv)]

    def captured(self, *example: Tensor) -> Captured:
        """The module as one CUDA graph, for inputs shaped like *example*."""
        devices = {str(tensor.device) for tensor in (*example, *self.buffers())}
        if any(not name.startswith("cuda") for name in devices):
            where = ", ".join(sorted(devices))
            raise StitchError(f"a CUDA graph needs the module and its inputs on a CUDA device, not on {where}")
        return Captured(self, example)

    def _ready_step(self, step: GraphStep, forget: tuple[str, ...]) -> ReadyStep:
        """Resolve a step to a module, an island's function, or a function of torch; *forget*: see ``ReadyStep``."""
        if step.op in MODULES:
            module = MODULES[step.op](step, self.graph.constants)
            self.add_module(f"step_{len(self._modules)}", module)
            tensors = tuple(Name(name) for name in step.inputs if name and name not in self.graph.constants)
            module.overwrites_residual = self._may_overwrite_residual(tensors, forget)
            return ReadyStep(module, tensors, step.outputs, forget)
        if step.op == "Island":
            return ReadyStep(step.attributes["payload"].run, tuple(map(Name, step.inputs)), step.outputs, forget)
        function = meaning(step.op)
        if function is None:
            raise StitchError(
                f"{step.layer or step.outputs[0]}: the operator {step.op} does not run in torch; run it as ONNX"
            )
        arguments = [self._argument(step, index, name) for index, name in enumerate(step.inputs)]
        # StackRows converts to the module's type; from_zero: the indices of a stitched Gather are never negative
        settings: Mapping[str, Any] = {"StackRows": {"dtype": self.dtype}, "Gather": {"from_zero": 1}}.get(step.op, {})
        bound = _bind(function, {**step.attributes, **settings}, len(step.outputs))
        return ReadyStep(bound, tuple(arguments), step.outputs, forget)

    def _may_overwrite_residual(self, tensors: tuple[Name, ...], forget: tuple[str, ...]) -> bool:
        """Whether a step may write over its residual, the second of *tensors*: not if that is its input as well.

        *forget*: tensors that no later step reads.
        """
        source, *residual = tensors
        return (
            residual != [] and residual[0] != source and residual[0] in forget and residual[0] in self._unshared_tensors
        )

    def _argument(self, step: GraphStep, index: int, name: str) -> Any:
        """Input *index* of a step: a name, a tuple of numbers where torch needs one, or None if it is omitted."""
        if not name:
            return None
        if name not in self.graph.constants:
            return Name(name)
        array = self.graph.constants[name]
        if index in find(step.op).torch_numbers:
            return tuple(array.ravel().tolist())
        if name not in self._buffer_names:
            self._buffer_names[name] = f"constant_{len(self._buffer_names)}"
            self.register_buffer(self._buffer_names[name], self._tensor(array))
        return Name(name)

    def _tensor(self, array: Array) -> Tensor:
        """A constant as a tensor, in the module's memory order."""
        tensor = torch.from_numpy(np.array(array))
        spatial = self.channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if spatial else tensor


def warm_up(run: Callable[[], object]) -> None:
    """Call *run* a few times on a side stream, as CUDA requires before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)


class Captured:
    """A module replayed as one CUDA graph. Outputs are overwritten by the next call."""

    def __init__(self, module: StitchedModule, example: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in example)
        with torch.no_grad():
            warm_up(lambda: module(*self.inputs))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.outputs: tuple[Tensor, ...] = module(*self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy *inputs* to where the graph reads them, and replay it."""
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            if buffer.shape != tensor.shape:
                raise StitchError(
                    f"the CUDA graph was made for {list(buffer.shape)}, not {list(tensor.shape)}; capture anew"
                )
            buffer.copy_(tensor)
        self.replay()
        return self.outputs

    def replay(self) -> None:
        self.graph.replay()


def _require_shape(name: str, planned: tuple[int, ...], actual: tuple[int, ...]) -> None:
    """Raise ``StitchError`` unless the shape *actual* is the one that the graph was planned for."""
    if len(actual) == len(planned) and all(size in (DYNAMIC, got) for size, got in zip(planned, actual, strict=True)):
        return
    way_out = ""
    if len(actual) == len(planned) and actual[1:] == planned[1:]:
        way_out = "; stitch with batches= for other numbers of rows, or dynamic=True for any"
    raise StitchError(f"{name} was planned as {list(planned)}, not {list(actual)}{way_out}")


def _bind(function: Meaning, attributes: Mapping[str, Any], outputs: int) -> Callable[..., Any]:
    """Bind the attributes and the number of outputs of a step to *function*; the result takes tensors only."""
    settings = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    node = TorchNode(torch, settings, outputs)
    return lambda *arguments: function(node, *arguments)


def _unshared_tensors(graph: Graph) -> set[str]:
    """The tensors that share memory with no other tensor."""
    fresh = {name for step in graph.steps if step.op in FRESH for name in step.outputs}
    return fresh.difference(*(step.inputs for step in graph.steps if step.op in ALIASES))


def _last_uses(graph: Graph) -> list[tuple[str, ...]]:
    """For each step, the tensors whose last reader it is, and outputs of it that no step reads."""
    needed_later = {tensor.name for tensor in graph.outputs} | graph.constants.keys() | {""}
    last_uses: list[tuple[str, ...]] = []
    for step in reversed(graph.steps):
        names = {*step.inputs, *step.outputs} - needed_later
        needed_later |= names
        last_uses.append(tuple(sorted(names)))
    return last_uses[::-1]
