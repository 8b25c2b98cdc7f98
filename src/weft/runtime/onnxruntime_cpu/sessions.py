"""ONNX Runtime sessions: opening them, their inputs and outputs, causes of failed runs, freeing and limits of memory.

All sessions of a process allocate scratch memory in one arena. If each session had an arena, a model in 50 segments
would hold its scratch memory several times.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state

from weft.base import errors
from weft.base.errors import ModelError, UnfitInputs
from weft.base.files import kind_at
from weft.base.shapes import Dimension, Shapes, one_sample, settle, written
from weft.models.element_types import ElementType, element_type
from weft.models.onnx_graph import OnnxValue, declared, dimensions, make_model, make_node
from weft.runtime.external import embed_tensors, external_tensors, read_weights
from weft.runtime.tensors import DATATYPES, Array, TensorSpec

RAISED = tuple(
    kind for kind in vars(onnxruntime_pybind11_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
"""The exceptions of ONNX Runtime: a dozen classes without a common base class."""

WEIGHTS = "weights.bin"
"""The file beside an optimised model that holds its large initialisers."""

EXTERNAL_OVER_BYTES = 1 << 20
"""ONNX Runtime aligns larger tensors with pages of their file to map them; smaller tensors stay in the model."""


def open_session(
    source: Path | bytes,
    threads: int,
    *,
    optimise: bool,
    save: Path | None = None,
    profile: Path | None = None,
    weights: Mapping[str, Array] | None = None,
    thrifty: bool = True,
) -> Any:
    """Open a session; *save*: path for the optimised graph; *profile*: prefix of the trace file, if it is profiled.

    source: path or bytes of the model. threads: threads that compute one run. weights: external weights by name, passed
    as arrays, so that ONNX Runtime does not read their files. thrifty: tensors reuse the memory of others that are
    not needed any more. Planning this takes minutes for thousands of tensors of unknown sizes; set it to False then.
    """
    _share_arena()
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_reuse = thrifty
    options.log_severity_level = 4  # errors are raised; the log would repeat them
    entries = {"session.intra_op.allow_spinning": "0", "session.use_env_allocators": "1"}
    if save is not None:
        options.optimized_model_filepath = str(save)
        entries["session.optimized_model_external_initializers_file_name"] = WEIGHTS
        entries["session.optimized_model_external_initializers_min_size_in_bytes"] = str(EXTERNAL_OVER_BYTES + 1)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if weights:
        options.add_external_initializers(list(weights), [_ort_value(array) for array in weights.values()])
    model = source if isinstance(source, bytes) else str(source)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_model(path: Path, threads: int, save: Path | None = None, *, thrifty: bool = True) -> Any:
    """Open a session over a user's file, optimised as a whole; errors of ONNX Runtime become a ``ModelError``.

    save, thrifty: as for ``open_session``.
    """
    if (kind := kind_at(path)) != "a file":
        raise ModelError(f"{f'is {kind}' if kind else 'there is no such file'}; name an .onnx file")
    try:
        tensors = external_tensors(path)
        weights, embedded = read_weights(tensors), embed_tensors(path, tensors)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}") from error
    try:
        return open_session(embedded or path, threads, optimise=True, save=save, weights=weights, thrifty=thrifty)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds
        raise ModelError(f"cannot be loaded: {first_line(error)}") from error


def _ort_value(array: Array) -> Any:
    """An array as a value of ONNX Runtime; types that numpy lacks, such as bfloat16, are passed as their bits."""
    if array.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(array)
    kind, bits = element_type(array.dtype), array.view(f"u{array.dtype.itemsize}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def first_line(error: BaseException) -> str:
    """The first line of a message of ONNX Runtime, without its error codes."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", errors.first_line(error))


_DATATYPE_OF = {
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
    "tensor(float16)": "FP16",
    **{f"tensor({name.lower()})": name for name in DATATYPES if name not in ("FP16", "FP32", "FP64", "BYTES")},
}
"""ONNX Runtime's name of a type -> the protocol's name."""


def specs(arguments: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Name, type and shape of a session's inputs or outputs."""
    return tuple(
        TensorSpec(argument.name, _datatype(argument), tuple(map(_size, argument.shape))) for argument in arguments
    )


def check_ranks(inputs: Iterable[OnnxValue]) -> None:
    """Raise ``ModelError`` for inputs that declare no dimensions; a session would report them as scalars."""
    for value in inputs:
        if dimensions(value) is None:
            raise ModelError(f"input {value.name!r} states no dimensions; export it with them, free ones by a name")


def _datatype(argument: Any) -> str:
    if argument.type not in _DATATYPE_OF:
        raise ModelError(f"{argument.name!r} is a {argument.type}, which cannot be served; export it as a plain tensor")
    return _DATATYPE_OF[argument.type]


def _size(dimension: Dimension) -> int:
    """The size of a declared dimension; -1 if it is free."""
    return dimension if isinstance(dimension, int) else -1


def warm_shapes(arguments: Sequence[Any], given: Shapes) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The inputs' shapes at batch 1, and the names of inputs that still have a free dimension of unknown size.

    arguments: the inputs of a session. given: shapes that the user named. A free first dimension is 1 unless *given*
    has another size; axes of the same name have the same size in all inputs. ``ModelError`` if *given* does not fit.
    """
    declared: dict[str, tuple[Dimension, ...]] = {argument.name: tuple(argument.shape) for argument in arguments}
    given_shapes = settle(given, declared)  # and those that follow from them, by dimensions of the same name
    for name, shape in given_shapes.items():
        if 0 in shape:
            raise ModelError(f"shape {written(shape)} does not fit input {name!r}: a sample has sizes from 1")
    shapes = {name: given_shapes.get(name) or one_sample(dimensions, declared) for name, dimensions in declared.items()}
    return shapes, [name for name, shape in shapes.items() if -1 in shape]


_NODE = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_REQUESTED = re.compile(r"(?:requested buffer of size|requested bytes of) (\d+)")
"""Messages of the arena: the system has too little memory, or the arena's limit is reached."""
_OVERFLOWS = ("Integer overflow", "storage size overflowed")
"""Messages for a tensor whose size does not fit into 64 bits."""


def explain(error: Exception) -> Exception:
    """Classify a failed run: ``UnfitInputs`` if the request is at fault, ``MemoryError`` if the server is.

    The request is at fault if a free dimension has a size that the model cannot take, or if values ask for a tensor
    larger than the memory (``Expand``, ``ConstantOfShape``, ``Range``). The server is at fault if it has no memory for
    a tensor of an ordinary size. Errors that ONNX Runtime did not raise are returned unchanged.
    """
    if not isinstance(error, RAISED):
        return error
    text = str(error)
    if any(phrase in text for phrase in _OVERFLOWS):
        return UnfitInputs(f"{_failed_node(text)} asks for a tensor whose size does not fit into 64 bits")
    if (requested := _REQUESTED.search(text)) is None:
        return (MemoryError if "allocate" in text else UnfitInputs)(first_line(error))
    size, limit = int(requested[1]), memory_limit_bytes()
    # A tensor is held at least twice: as an output, and in the next operator's output or the bytes of the answer. So no
    # tensor of more than half the memory can ever be computed; a smaller one failed because of other requests.
    if 2 * size > limit:
        return UnfitInputs(f"{_failed_node(text)} asks for a tensor of {size} bytes, and the memory has {limit}")
    return MemoryError(f"{_failed_node(text)} found no memory for a tensor of {size} bytes")


def _failed_node(text: str) -> str:
    """The type and name of the operator that failed, from ONNX Runtime's message."""
    node = _NODE.search(text)
    if node is None:
        return "an operator"
    return f"{node[1]} {node[2]!r}" if node[2] else node[1]


def release_memory(closed: Iterable[weakref.ref[Any]] | None = None) -> None:
    """Return memory of closed sessions to the system, as far as possible.

    closed: these sessions. A full garbage collection, which stops all threads, runs only if one of these sessions is
    still referenced, or *closed* is None.
    """
    if closed is None or any(session() is not None for session in closed):
        gc.collect()
    shrink_arena()


def shrink_arena() -> None:
    """Return scratch memory that no run uses now to the system."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _idle_session().run(None, {"x": np.zeros(1, np.float32)}, options)  # it shrinks at the end of a run
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _share_arena() -> None:
    """Register the shared arena once in a process; sessions refer to it by an option."""
    with _sharing:
        _register_arena()


_sharing = threading.Lock()
"""Held while the arena is registered, so that it is registered once: ``cache`` lets two threads call the function."""


@cache
def _register_arena() -> None:
    """Register the arena; as its result is cached, only the first call does."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # The limit: a system that overcommits would grant more memory than it has, and kill the process when it is used.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(machine_memory_bytes(), -1, -1, -1))


@cache
def _idle_session() -> Any:
    """A session with a trivial model, for ``shrink_arena``."""
    x, y = (declared(name, ElementType.FLOAT, [1]) for name in "xy")
    model = make_model([make_node("Identity", "x", "y")], "idle", [x], [y], opset=13, ir_version=8)
    return open_session(model.SerializeToString(), 1, optimise=False)


UNKNOWN = 1 << 62
"""A limit that the system does not report: more than any machine has."""

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, in version 2 and 1 of Linux control groups."""


def memory_limit_bytes() -> int:
    """The memory of the machine or the container, or a limit of this process (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    return min(machine_memory_bytes(), *_process_limits())


def machine_memory_bytes() -> int:
    """The memory of the machine with its swap space, or the limit of its container."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN
    return min(physical + _swap_bytes(), *map(_read_limit, CONTAINER_LIMITS))


def _read_limit(file: Path) -> int:
    """The number in a file of a control group; ``UNKNOWN`` if there is no such file, or it says ``max``."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return UNKNOWN


def _swap_bytes() -> int:
    """The size of the swap space; 0 where the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:")), 0)
    except (OSError, ValueError):
        return 0


def _process_limits() -> list[int]:
    """The process's limits of memory in bytes; ``UNKNOWN`` for those that are not set."""
    if sys.platform == "win32":
        return [UNKNOWN]
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return [UNKNOWN if limit == resource.RLIM_INFINITY else limit for limit in limits]
