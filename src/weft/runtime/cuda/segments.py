"""The segments of a model as sessions on a device, over weights that all of them share.

ONNX Runtime would copy the weights for every session. So large weights are uploaded once and given to all sessions as
values that they do not own; numbers that are sizes and axes stay in the files, because they are read on the host.

Segments are captured as graphs for fixed shapes. Other shapes, and segments that cannot be captured, run *uncaptured*.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import onnxruntime as ort

from weft.models.element_types import ElementType, numpy_dtype
from weft.models.onnx_graph import OnnxModel, OnnxTensor, declared, load, read_tensor
from weft.runtime.cuda.device import FLOATS, HOST_KIND, Device, Movable, Tensor, aligned_offsets
from weft.runtime.onnxruntime_cpu.model import SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import EXTERNAL_OVER_BYTES, WEIGHTS
from weft.runtime.tensors import Array

SHARED_FROM_BYTES = 1024
"""Weights of fewer bytes are copied into every session."""
COPIES = frozenset({"MemcpyToHost", "MemcpyFromHost"})
"""Nodes that ONNX Runtime inserts between host and device."""
_FUSIONS = ("MatMulAddFusion",)
"""Fusions that ONNX Runtime counts among the basic optimisations, with constant folding. This one would surround
products of three dimensions by reshapes, behind which no pattern of an attention is found."""
_COPIES_KEY = "weft.copies"
"""Metadata key of a segment's file that is set if the segment copies between host and device."""
_SHARED_TYPES = frozenset({*FLOATS, ElementType.INT8, ElementType.UINT8})  # weights of other types may be sizes


class DeviceWeights:
    """The weights of one model on a device, shared by all its segments and batch sizes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.memories: list[Movable] = []  # in which the weights are
        self._values: dict[str, Any] = {}
        """Name -> weight in the form that sessions take; the values must outlive the sessions."""
        self.bytes = 0  # of all weights, without alignment

    def upload(self, path: Path) -> dict[str, Any]:
        """Upload the large weights of a model file, if they are not on the device yet; return all of them by name."""
        model = load(path)
        shared = [weight for weight in model.graph.initializer if _is_shared(weight)]
        if missing := [weight for weight in shared if weight.name not in self._values]:
            self._add(missing, path.parent)
        return {weight.name: self._values[weight.name] for weight in shared}

    def _add(self, weights: Sequence[OnnxTensor], folder: Path) -> None:
        """Upload weights; *folder*: where the files of their external data are."""
        arrays = [read_tensor(weight, folder) for weight in weights]
        tensors = self.allocate([(a.shape, weight.data_type) for weight, a in zip(weights, arrays, strict=True)])
        for name, array, tensor in zip([weight.name for weight in weights], arrays, tensors, strict=True):
            self._device.fill(tensor, array)
            self._values[name] = self._device.as_ort_value(tensor)
        self._device.finish()

    def allocate(self, wanted: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """Allocate tensors in one memory; *wanted*: the shape and ONNX element type of each."""
        sizes = [prod(shape) * numpy_dtype(kind).itemsize for shape, kind in wanted]
        offsets, size = aligned_offsets(sizes)
        memory = self._device.movable(size, kept=True)
        self.memories.append(memory)
        self.bytes += sum(sizes)
        return [memory.tensor(offset, shape, kind) for offset, (shape, kind) in zip(offsets, wanted, strict=True)]


def _is_shared(weight: OnnxTensor) -> bool:
    """Whether a weight is uploaded once, and not copied into every session."""
    if weight.data_type not in _SHARED_TYPES:
        return False
    return bool(prod(weight.dims) * numpy_dtype(weight.data_type).itemsize >= SHARED_FROM_BYTES)


def open_segments(
    device: Device, folder: Path, segments: Iterable[SegmentSpec], *, channels_last: bool
) -> tuple[list[DeviceSegment], DeviceWeights]:
    """Segments over their files in *folder*, whose sessions open on first use, and their weights on the device."""
    weights = DeviceWeights(device)
    opened: list[DeviceSegment] = []
    for spec in segments:
        assert spec.file is not None
        path = folder / spec.file
        opened.append(SegmentSession(device, spec, SegmentFile(path, weights.upload(path), channels_last)))
    return opened, weights


class Runnable(Protocol):
    """A segment bound to the memory that it reads and writes."""

    def run(self) -> None:
        """Start the segment, after runs that were started before."""
        ...


UncapturedTensors = dict[str, Any]
"""Tensors of any shapes, by name, in the form that segments exchange when they run without a graph."""


class DeviceSegment(Protocol):
    """A segment on a device, of any kind of file."""

    spec: SegmentSpec

    @property
    def copies(self) -> bool:
        """Whether it copies between host and device, so that only the result of ``specialised`` can be captured."""
        ...

    def open(self) -> None:
        """Read the segment's file now, as it may be moved later; otherwise it is read on first use."""
        ...

    def new_instance(self, device: Device) -> DeviceSegment:
        """A second instance of the segment, for another batch size or another part of the device."""
        ...

    def specialised(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        """The segment for the shapes of *tensors* only; raises ``StillCopies`` if it still copies to or from the host.

        tensors: its inputs and outputs on the device, by name. types: their ONNX element types.
        """
        ...

    def bind(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        """Bind the segment to the memory of its inputs and outputs; tensors, types: as for ``specialised``."""
        ...

    def from_arrays(self, arrays: Mapping[str, Array]) -> UncapturedTensors:
        """Convert arrays to inputs of ``run_uncaptured``."""
        ...

    def run_uncaptured(self, values: Mapping[str, Any]) -> UncapturedTensors:
        """Run the segment without a graph; returns its outputs."""
        ...

    def layouts(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        """Shape and ONNX element type of each of *names* in *values*, inputs or outputs of ``run_uncaptured``."""
        ...

    def to_array(self, value: Any) -> Array:
        """Copy an output of ``run_uncaptured`` to the host."""
        ...


class SegmentFile(NamedTuple):
    """The file, weights and layout that a segment was opened with, to open it again."""

    path: Path
    weights: Mapping[str, Any]
    channels_last: bool


def copies_in(device: Device, path: Path, *, channels_last: bool, fold: bool = False) -> bool:
    """Whether a session over a file copies between host and device, as its saved graph shows.

    channels_last, fold: as for ``open_on``.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "seen.onnx"
        open_on(device, path, fold=fold, channels_last=channels_last, save=target)
        saved = load(target)
    return any(node.op_type in COPIES for node in saved.graph.node)


def mark_copies(model: OnnxModel) -> None:
    """Mark in the metadata of a segment's model that it copies between host and device."""
    entry = model.metadata_props.add()
    entry.key, entry.value = _COPIES_KEY, "1"


def open_on(
    device: Device,
    path: Path,
    *,
    channels_last: bool,
    optimise: bool = False,
    fold: bool = False,
    save: Path | None = None,
    profile: Path | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Any:
    """Open a session on a device; *save*: path for the optimised graph, *profile*: prefix of the trace file.

    channels_last: whether convolutions use that layout. optimise: with all optimisations of the graph; fold: only
    constant folding; by default none. weights: name -> value on the device, in the form that sessions take.
    """
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    lower_level = levels.ORT_ENABLE_BASIC if fold else levels.ORT_DISABLE_ALL
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else lower_level
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_mem_reuse = not optimise  # a session that only optimises a graph runs nothing
    options.log_severity_level = 4  # errors are raised; the log would repeat them
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy the shared weights
    if save is not None:
        options.optimized_model_filepath = str(save)
        key = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{key}file_name", WEIGHTS)
        options.add_session_config_entry(f"{key}min_size_in_bytes", str(EXTERNAL_OVER_BYTES + 1))
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    for name, value in (weights or {}).items():
        options.add_initializer(name, value)
    providers, disabled = device.providers(channels_last=channels_last), _FUSIONS if fold else ()
    with device.session_lock:
        return ort.InferenceSession(str(path), options, providers=providers, disabled_optimizers=disabled)


class StillCopies(Exception):
    """A segment cannot be captured: a replay would copy from host memory that is gone."""


class SegmentSession:
    """A segment as a session, which runs on bound memory; it is opened on first use, because a session takes memory."""

    def __init__(self, device: Device, spec: SegmentSpec, file: SegmentFile, session: Any = None) -> None:
        self._device, self.spec, self._file, self._opened = device, spec, file, session
        self._options = ort.RunOptions()
        # Runs return before the device has ended them; the lane waits for a mark instead.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @property
    def _session(self) -> Any:
        self.open()
        return self._opened

    def open(self) -> None:
        """Open the session, if it is not open."""
        if self._opened is None:
            path, weights, channels_last = self._file
            self._opened = open_on(self._device, path, channels_last=channels_last, weights=weights)

    @property
    def copies(self) -> bool:
        """Whether the segment copies between host and device, such as sizes that are computed on the host."""
        return _COPIES_KEY in self._session.get_modelmeta().custom_metadata_map or bool(self._read_on_host())

    def _read_on_host(self) -> list[str]:
        """Inputs that operators read on the host: as sizes, or because the device lacks the operator.

        ONNX Runtime copies these inputs to the host when they are bound, and not again when it runs.
        """
        if self._device.kind == HOST_KIND:
            return []
        placed = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        return [value.name for value, memory in placed if memory.name.lower() == HOST_KIND]

    def new_instance(self, device: Device) -> SegmentSession:
        """The segment in a session of its own, over the same weights.

        A capture of a session is valid as long as the session meets no other shapes. For other shapes cuDNN would make
        new plans and free the old plans, whose kernels are in the graph.
        """
        return SegmentSession(device, self.spec, self._file)

    def specialised(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> SegmentSession:
        """The segment for constant shapes, in which values that depend on the shapes alone are stored as constants.

        Then the host need not compute them; ``StillCopies`` if it still copies between host and device.
        """
        model = load(self._file.path)
        for value in model.graph.input:
            value.CopyFrom(declared(value.name, types[value.name], list(tensors[value.name].shape)))
        # Beside the segment's file, as the model names its external weights relative to its folder.
        with tempfile.NamedTemporaryFile(dir=self._file.path.parent, suffix=".onnx") as source:
            source.write(model.SerializeToString())
            source.flush()
            path, (_, weights, channels_last) = Path(source.name), self._file
            if copies_in(self._device, path, channels_last=channels_last, fold=True):
                raise StillCopies("it copies between host and device in its middle")
            session = open_on(self._device, path, fold=True, channels_last=channels_last, weights=weights)
        segment = SegmentSession(self._device, self.spec, self._file, session)
        if names := segment._read_on_host():
            raise StillCopies(f"it reads {', '.join(names)} on the host")
        return segment

    def bind(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        """Bind the segment to the memory of its inputs and outputs; tensors, types: as for ``specialised``."""
        device, binding = self._device, self._session.io_binding()

        def bind_names(names: Sequence[str], bind_tensor: Callable[..., None]) -> None:
            for name in names:
                tensor = tensors[name]
                # numpy has no bfloat16, so ONNX's number of the type is passed instead
                kind = types[name] if types[name] == ElementType.BFLOAT16 else numpy_dtype(types[name])
                bind_tensor(name, device.kind, device.index, kind, list(tensor.shape), device.address(tensor))

        bind_names(self.spec.inputs, binding.bind_input)
        bind_names(self.spec.outputs, binding.bind_output)
        read_on_host, bound = self._read_on_host(), BoundSegment(self._session, binding, self._options)
        if not read_on_host:
            return bound
        return ReboundSegment(device, bound, partial(bind_names, read_on_host, binding.bind_input))

    def run_uncaptured(self, values: Mapping[str, Any]) -> UncapturedTensors:
        """Run the segment on values of ONNX Runtime, of any shapes; the outputs are on the device."""
        device, binding = self._device, self._session.io_binding()
        if self._read_on_host():
            device.finish()  # binding copies these inputs at once, so the work that computes them must have ended
        for name in self.spec.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.spec.outputs:
            binding.bind_output(name, device.kind, device.index)
        self._session.run_with_iobinding(binding, self._options)
        return dict(zip(self.spec.outputs, binding.get_outputs(), strict=True))

    def from_arrays(self, arrays: Mapping[str, Array]) -> UncapturedTensors:
        """Convert arrays to values of ONNX Runtime on the device."""
        kind, index = self._device.kind, self._device.index
        return {name: ort.OrtValue.ortvalue_from_numpy(array, kind, index) for name, array in arrays.items()}

    def layouts(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        return {name: (tuple(values[name].shape()), int(values[name].element_type())) for name in names}

    def to_array(self, value: Any) -> Array:
        array: Array = value.numpy()
        return array


class BoundSegment:
    """A segment that is bound to the memory of its inputs and outputs."""

    def __init__(self, session: Any, binding: Any, options: Any) -> None:
        self._session, self._binding, self._options = session, binding, options

    def run(self) -> None:
        """Start the segment, after runs of sessions that were started before."""
        self._session.run_with_iobinding(self._binding, self._options)


class ReboundSegment:
    """A segment that reads inputs on the host; binding copies these inputs, so each run binds them first."""

    def __init__(self, device: Device, bound: BoundSegment, bind: Callable[[], None]) -> None:
        self._device, self._bound, self._bind = device, bound, bind

    def run(self) -> None:
        """Wait for all earlier work, bind the inputs, and start the segment."""
        self._device.finish()
        self._bind()
        self._bound.run()
