"""The pieces of a model as sessions on a device, over weights that all of them share.

ONNX Runtime would copy the weights for every session. So those worth it are uploaded once and given to all sessions as
values that belong to somebody else; numbers that say sizes and axes stay in the files, for they are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

from weft.runtime.cuda.device import FLOATS, Device, Tensor, numpy_type
from weft.runtime.onnxruntime_cpu.model import SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import EXTERNAL_OVER_BYTES, WEIGHTS

SHARED_FROM_BYTES = 1024
"""Smaller weights lie in every session."""
_SHARED_TYPES = frozenset({*FLOATS, TensorProto.INT8, TensorProto.UINT8})


class SharedWeights:
    """The weights of one model on a device, by name; whatever the number of segments and batch sizes, once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}
        """The same as sessions have them; they must outlive the sessions."""
        self.bytes = 0

    def of(self, path: Path) -> dict[str, Any]:
        """Those that the model in a file needs, uploaded where they are not yet."""
        model = onnx.load(str(path))
        wanted = [each for each in model.graph.initializer if _is_shared(each)]
        for each in wanted:
            if each.name not in self._values:
                self._add(each.name, numpy_helper.to_array(each))
        return {each.name: self._values[each.name] for each in wanted}

    def _add(self, name: str, array: Any) -> None:
        self._tensors[name] = tensor = self._device.upload(array)
        self._device.finish()
        self._values[name] = self._device.shared(tensor)
        self.bytes += array.nbytes


def _is_shared(weight: TensorProto) -> bool:
    if weight.data_type not in _SHARED_TYPES:
        return False
    count = 1
    for each in weight.dims:
        count *= each
    return count * numpy_type(weight.data_type).itemsize >= SHARED_FROM_BYTES


def open_segments(
    device: Device, folder: Path, segments: Iterable[SegmentSpec], *, channels_last: bool
) -> tuple[list[SegmentSession], SharedWeights]:
    """Sessions over the files of segments, and the weights, which live as long."""
    weights = SharedWeights(device)
    opened = []
    for each in segments:
        assert each.file is not None
        path = folder / each.file
        session = open_on(device, path, optimise=False, channels_last=channels_last, weights=weights.of(path))
        opened.append(SegmentSession(device, session, each))
    return opened, weights


def open_on(
    device: Device,
    path: Path,
    *,
    optimise: bool,
    channels_last: bool,
    save: Path | None = None,
    profile: Path | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Any:
    """A session on a device; *save* is where the optimised graph goes, *profile* how its trace file begins."""
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised; the log would say it twice
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
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


class SegmentSession:
    """One segment, run on memory that is bound to it."""

    def __init__(self, device: Device, session: Any, spec: SegmentSpec) -> None:
        self._device, self._session, self.spec = device, session, spec
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def bound(self, tensors: Mapping[str, Tensor], types: Mapping[str, int]) -> Bound:
        """The segment on tensors of the device, by name, which it reads and writes wherever it is run."""
        device, binding = self._device, self._session.io_binding()
        for names, bind in ((self.spec.inputs, binding.bind_input), (self.spec.outputs, binding.bind_output)):
            for name in names:
                tensor = tensors[name]
                kind, shape = numpy_type(types[name]), list(tensor.shape)
                bind(name, device.kind, device.index, kind, shape, device.address(tensor))
        return Bound(self._session, binding, self._options)

    def run_loose(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run it on values of ONNX Runtime's own, of whatever shapes, and return such; they lie on the device."""
        device, binding = self._device, self._session.io_binding()
        for name in self.spec.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.spec.outputs:
            binding.bind_output(name, device.kind, device.index)
        self._session.run_with_iobinding(binding, self._options)
        return dict(zip(self.spec.outputs, binding.get_outputs(), strict=True))


class Bound:
    """A segment with its memory."""

    def __init__(self, session: Any, binding: Any, options: Any) -> None:
        self._session, self._binding, self._options = session, binding, options

    def run(self) -> None:
        """Compute it, in the order of the sessions' runs."""
        self._session.run_with_iobinding(self._binding, self._options)


def loose(device: Device, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as values of ONNX Runtime on the device."""
    return {name: ort.OrtValue.ortvalue_from_numpy(each, device.kind, device.index) for name, each in arrays.items()}


def shapes_of(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and element type of values of ONNX Runtime's own."""
    return {name: (tuple(values[name].shape()), int(values[name].element_type())) for name in names}
