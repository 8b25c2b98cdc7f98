"""The pieces of a model as sessions on a device, over weights that all of them share.

ONNX Runtime would copy the weights for every session. So those worth it are uploaded once and given to all sessions as
values that belong to somebody else; numbers that say sizes and axes stay in the files, for they are read on the host.
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
from weft.runtime.cuda.device import FLOATS, HOST_KIND, Device, Movable, Tensor, places
from weft.runtime.onnxruntime_cpu.model import SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import EXTERNAL_OVER_BYTES, WEIGHTS
from weft.runtime.tensors import Array

SHARED_FROM_BYTES = 1024
"""Smaller weights lie in every session."""
COPIES = frozenset({"MemcpyToHost", "MemcpyFromHost"})
"""Nodes that ONNX Runtime puts where host and device meet."""
_COPIES_KEY = "weft.copies"
_SHARED_TYPES = frozenset({*FLOATS, ElementType.INT8, ElementType.UINT8})


class DeviceWeights:
    """The weights of one model on a device, by name; whatever the number of segments and batch sizes, once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.memories: list[Movable] = []
        self._values: dict[str, Any] = {}
        """The same as sessions have them; they must outlive the sessions."""
        self.bytes = 0

    def of(self, path: Path) -> dict[str, Any]:
        """Those that the model in a file needs, uploaded where they are not yet."""
        model = load(path)
        wanted = [each for each in model.graph.initializer if _is_shared(each)]
        if new := [each for each in wanted if each.name not in self._values]:
            self._add(new, path.parent)
        return {each.name: self._values[each.name] for each in wanted}

    def _add(self, weights: Sequence[OnnxTensor], folder: Path) -> None:
        """Put some in a memory of their own; *folder* is where those outside of the model lie."""
        arrays = [read_tensor(each, folder) for each in weights]
        rooms = self.room([(array.shape, each.data_type) for each, array in zip(weights, arrays, strict=True)])
        for each, array, tensor in zip(weights, arrays, rooms, strict=True):
            self._device.fill(tensor, array)
            self._values[each.name] = self._device.shared(tensor)
        self._device.finish()

    def room(self, wanted: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """Tensors of these shapes and element types, in a memory of their own."""
        sizes = [prod(shape) * numpy_dtype(kind).itemsize for shape, kind in wanted]
        offsets, size = places(sizes)
        memory = self._device.movable(size, kept=True)
        self.memories.append(memory)
        self.bytes += sum(sizes)
        return [memory.tensor(at, shape, kind) for at, (shape, kind) in zip(offsets, wanted, strict=True)]


def _is_shared(weight: OnnxTensor) -> bool:
    if weight.data_type not in _SHARED_TYPES:
        return False
    return bool(prod(weight.dims) * numpy_dtype(weight.data_type).itemsize >= SHARED_FROM_BYTES)


def open_segments(
    device: Device, folder: Path, segments: Iterable[SegmentSpec], *, channels_last: bool
) -> tuple[list[DeviceSegment], DeviceWeights]:
    """Sessions over the files of segments, and the weights, which live as long."""
    weights = DeviceWeights(device)
    opened: list[DeviceSegment] = []
    for each in segments:
        assert each.file is not None
        path = folder / each.file
        opened.append(SegmentSession(device, each, SegmentFile(path, weights.of(path), channels_last)))
    return opened, weights


class Runnable(Protocol):
    """A segment with the memory that it reads and writes."""

    def run(self) -> None:
        """Compute it, in the order in which such runs are started."""
        ...


Loose = dict[str, Any]
"""Tensors of any shapes, by name, in the form that the segments of a model hand on when they run by calls."""


class DeviceSegment(Protocol):
    """A segment on a device, of whatever kind of file."""

    spec: SegmentSpec

    @property
    def copies(self) -> bool:
        """Whether it copies between host and device, so that it must be ``fixed`` to be captured."""
        ...

    def open(self) -> None:
        """Have all that it needs of its file."""
        ...

    def again(self, device: Device) -> DeviceSegment:
        """The segment for another batch size, or another part of the device."""
        ...

    def fixed(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> DeviceSegment:
        """The segment for shapes that never change; raises ``StillCopies`` where that does not help."""
        ...

    def bound(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        """The segment on tensors of the device, by name."""
        ...

    def loose(self, arrays: Mapping[str, Array]) -> Loose:
        """Arrays as it takes them by calls."""
        ...

    def run_loose(self, values: Mapping[str, Any]) -> Loose:
        """Run it by a call."""
        ...

    def seen(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        """Shapes of such values, and their types as ONNX numbers them."""
        ...

    def array(self, value: Any) -> Array:
        """Such a value on the host."""
        ...


class SegmentFile(NamedTuple):
    """What a segment was opened from, to open it once more."""

    path: Path
    weights: Mapping[str, Any]
    channels_last: bool


def copies_in(device: Device, path: Path, *, channels_last: bool, fold: bool = False) -> bool:
    """Whether a session over a file copies between host and device: its graph as it is saved tells."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "seen.onnx"
        open_on(device, path, fold=fold, channels_last=channels_last, save=target)
        saved = load(target)
    return any(node.op_type in COPIES for node in saved.graph.node)


def mark_copies(model: OnnxModel) -> None:
    """Note in a segment that it copies between host and device."""
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
    """A session on a device; *save* is where the optimised graph goes, *profile* how its trace file begins.

    fold: only work out what is the same in every run.
    """
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    least = levels.ORT_ENABLE_BASIC if fold else levels.ORT_DISABLE_ALL
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else least
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_mem_reuse = not optimise  # who optimises a graph wants only that, and plans no memory
    options.log_severity_level = 4  # what goes wrong is raised; the log would say it twice
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.disable_prepacking", "1")  # weights are looked at where they lie
    if save is not None:
        options.optimized_model_filepath = str(save)
        key = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{key}file_name", WEIGHTS)
        options.add_session_config_entry(f"{key}min_size_in_bytes", str(EXTERNAL_OVER_BYTES + 1))
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    for name, value in (weights or {}).items():
        options.add_initializer(name, value)
    with device.building:
        return ort.InferenceSession(str(path), options, providers=device.providers(channels_last=channels_last))


class StillCopies(Exception):
    """A segment cannot be captured: what is copied from the host would be read again when it is long gone."""


class SegmentSession:
    """One segment, run on memory that is bound to it; a session takes memory, so it is opened when it is needed."""

    def __init__(self, device: Device, spec: SegmentSpec, file: SegmentFile, session: Any = None) -> None:
        self._device, self.spec, self._file, self._opened = device, spec, file, session
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @property
    def _session(self) -> Any:
        self.open()
        return self._opened

    def open(self) -> None:
        """Have a session, if there is none yet."""
        if self._opened is None:
            path, weights, last = self._file
            self._opened = open_on(self._device, path, channels_last=last, weights=weights)

    @property
    def copies(self) -> bool:
        """Whether it copies between host and device: sizes that it computes on the host, for instance."""
        return _COPIES_KEY in self._session.get_modelmeta().custom_metadata_map or bool(self._read_on_host())

    def _read_on_host(self) -> list[str]:
        """Inputs that operators read on the host: those that the device has not, or that take sizes from them.

        ONNX Runtime copies them there when they are bound, and not again when it runs.
        """
        if self._device.kind == HOST_KIND:
            return []
        where = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        return [each.name for each, memory in where if memory.name.lower() == HOST_KIND]

    def again(self, device: Device) -> SegmentSession:
        """The segment in a session of its own, over the same weights.

        What was captured of a session holds as long as it meets no other shapes: those would have cuDNN's plans made
        anew, and the old ones, whose kernels the graph has, would go.
        """
        return SegmentSession(device, self.spec, self._file)

    def fixed(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> SegmentSession:
        """The segment for shapes that never change: what only they decide is known, and not computed or copied.

        Raises ``StillCopies`` where something is copied all the same.
        """
        model = load(self._file.path)
        for each in model.graph.input:
            each.CopyFrom(declared(each.name, types[each.name], list(tensors[each.name].shape)))
        with tempfile.NamedTemporaryFile(dir=self._file.path.parent, suffix=".onnx") as source:
            source.write(model.SerializeToString())
            source.flush()
            path, weights, last = Path(source.name), self._file.weights, self._file.channels_last
            if copies_in(self._device, path, channels_last=last, fold=True):
                raise StillCopies("it copies between host and device in its middle")
            session = open_on(self._device, path, fold=True, channels_last=last, weights=weights)
        found = SegmentSession(self._device, self.spec, self._file, session)
        if names := found._read_on_host():
            raise StillCopies(f"it reads {', '.join(names)} on the host")
        return found

    def bound(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Runnable:
        """The segment on tensors of the device, by name, which it reads and writes wherever it is run."""
        device, binding = self._device, self._session.io_binding()

        def bind(names: Sequence[str], one: Callable[..., None]) -> None:
            for name in names:
                tensor = tensors[name]
                kind = types[name] if types[name] == ElementType.BFLOAT16 else numpy_dtype(types[name])
                one(name, device.kind, device.index, kind, list(tensor.shape), device.address(tensor))

        bind(self.spec.inputs, binding.bind_input)
        bind(self.spec.outputs, binding.bind_output)
        stale, bound = self._read_on_host(), BoundSegment(self._session, binding, self._options)
        return ReboundSegment(device, bound, partial(bind, stale, binding.bind_input)) if stale else bound

    def run_loose(self, values: Mapping[str, Any]) -> Loose:
        """Run it on values of ONNX Runtime's own, of whatever shapes, and return such; they lie on the device."""
        device, binding = self._device, self._session.io_binding()
        if self._read_on_host():
            device.finish()  # they are copied at once, whatever computes them
        for name in self.spec.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.spec.outputs:
            binding.bind_output(name, device.kind, device.index)
        self._session.run_with_iobinding(binding, self._options)
        return dict(zip(self.spec.outputs, binding.get_outputs(), strict=True))

    def loose(self, arrays: Mapping[str, Array]) -> Loose:
        """Arrays as values of ONNX Runtime on the device."""
        kind, index = self._device.kind, self._device.index
        return {name: ort.OrtValue.ortvalue_from_numpy(each, kind, index) for name, each in arrays.items()}

    def seen(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
        return {name: (tuple(values[name].shape()), int(values[name].element_type())) for name in names}

    def array(self, value: Any) -> Array:
        found: Array = value.numpy()
        return found


class BoundSegment:
    """A segment with its memory."""

    def __init__(self, session: Any, binding: Any, options: Any) -> None:
        self._session, self._binding, self._options = session, binding, options

    def run(self) -> None:
        """Compute it, in the order of the sessions' runs."""
        self._session.run_with_iobinding(self._binding, self._options)


class ReboundSegment:
    """A segment that reads inputs on the host: they are copied there when they are bound, so before each run."""

    def __init__(self, device: Device, bound: BoundSegment, bind: Callable[[], None]) -> None:
        self._device, self._bound, self._bind = device, bound, bind

    def run(self) -> None:
        """Compute it, when all before it has ended."""
        self._device.finish()
        self._bind()
        self._bound.run()
