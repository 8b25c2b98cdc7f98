"""ONNX Runtime sessions: how they are opened, what is said when a file cannot be, and how memory is given back.

All sessions of a process take their scratch memory from one arena. With one each, a model in 50 segments would
hold its scratch memory several times over.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state

from weft.base import errors
from weft.base.errors import ModelError
from weft.base.files import kind_at
from weft.runtime.external import embed_tensors, external_tensors, read_weights
from weft.runtime.onnxruntime_cpu.memory_limit import machine_memory_bytes
from weft.runtime.tensors import Array

RAISED = tuple(
    kind for kind in vars(onnxruntime_pybind11_state).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
"""All that ONNX Runtime raises: a dozen kinds that have no root of their own."""

WEIGHTS = "weights.bin"
"""The file beside an optimised model that holds its large initialisers."""

EXTERNAL_OVER_BYTES = 1 << 20
"""ONNX Runtime starts larger tensors at a page of their file, so that they can be mapped; smaller ones stay inside."""


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
    """A session over a model; *save* is where the optimised graph goes, *profile* how its trace file begins.

    weights: those that it takes from here instead of from files beside the model. thrifty: tensors take the memory of
    others that are not needed any more; to plan that takes minutes for thousands of tensors of open sizes.
    """
    _share_arena()
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_reuse = thrifty
    options.log_severity_level = 4  # what goes wrong is raised; the log would say it twice
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
    """A session over a user's file, optimised as a whole; what ONNX Runtime has against it is a ``ModelError``.

    thrifty: as of ``open_session``.
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
    """An array as ONNX Runtime holds it; types that numpy itself lacks, such as bfloat16, go over as their bits."""
    if array.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(array)
    kind, bits = helper.np_dtype_to_tensor_dtype(array.dtype), array.view(f"u{array.dtype.itemsize}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def first_line(error: BaseException) -> str:
    """What ONNX Runtime says, without its codes and what follows the first line."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", errors.first_line(error))


def release_memory(closed: Iterable[weakref.ref[Any]] | None = None) -> None:
    """Give memory of closed sessions back to the system, as far as it can be.

    closed: the sessions meant. All objects are looked through, which stops every thread, only if one of them is still
    referred to.
    """
    if closed is None or any(each() is not None for each in closed):
        gc.collect()
    shrink_arena()


def shrink_arena() -> None:
    """Give scratch memory back that no run uses now."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _idle_session().run(None, {"x": np.zeros(1, np.float32)}, options)
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _share_arena() -> None:
    """Once in a process; sessions ask for it by an option."""
    with _sharing:  # models are opened on several threads
        _shared_arena()


_sharing = threading.Lock()


@cache
def _shared_arena() -> None:
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # More than the machine has would be granted where the system overcommits, and the process be killed as it is used.
    ort.create_and_register_allocator(where, ort.OrtArenaCfg(machine_memory_bytes(), -1, -1, -1))


@cache
def _idle_session() -> Any:
    """A session over next to nothing: the arena shrinks only at the end of some run."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "idle", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return open_session(model.SerializeToString(), 1, optimise=False)
