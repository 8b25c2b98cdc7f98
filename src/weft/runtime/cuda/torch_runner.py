"""Packages of torch's compiler, called through their C interface (``aoti_runtime/interface.h`` of torch).

torch's own binding holds Python's global lock during a run, and the first run, which builds cuDNN's plans and loads
kernels, takes up to a second, in which no other model could be started. ctypes releases the lock.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_bool, c_char_p, c_size_t, c_void_p, py_object
from pathlib import Path
from typing import Any

import torch

_PREFIX = "AOTInductorModelContainer"
# torch passes tensors to C as pointers in capsules without a name.
_pointer_in = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_of = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class _NamedTensor(ctypes.Structure):
    """The interface's ``AOTInductorConstantMapEntry``."""

    _fields_ = (("name", c_char_p), ("tensor", c_void_p))


class PackageRunner:
    """The code of a package; one thread runs it at a time."""

    def __init__(self, code: Path, device: str) -> None:
        """Load the library *code* for a device, as torch calls it; the kernels of a GPU are in files beside it.

        torch's loader of packages is not used: it unpacks files into ``/tmp``, where a worker may not write.
        """
        self._library, self._container, self._device = ctypes.CDLL(str(code)), c_void_p(), torch.device(device)
        self._weights: list[Any] = []
        """Pointers to the weights, which the package does not own."""
        one_at_a_time, folder = c_size_t(1), str(code.parent).encode()
        self._check("CreateWithDevice", byref(self._container), one_at_a_time, device.encode(), folder)
        weakref.finalize(self, _close, self._function("Delete"), self._container, self._weights).atexit = False
        outputs = c_size_t()
        self._check("GetNumOutputs", self._container, byref(outputs))
        self._outputs = outputs.value

    def weight_names(self) -> dict[str, str]:
        """The name of each weight in the compiled code -> its name in the exported program."""
        count = c_size_t()
        self._check("GetNumConstants", self._container, byref(count))
        return {
            self._text("GetConstantName", at): self._text("GetConstantOriginalFQN", at) for at in range(count.value)
        }

    def use_weights(self, weights: Mapping[str, Any]) -> None:
        """Run with these tensors, which are not copied, from now on; *weights*: name in the compiled code -> tensor."""
        self._weights += torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(weights.values()))
        pointers = [_pointer_in(capsule, None) for capsule in self._weights]
        entries = [_NamedTensor(name.encode(), pointer) for name, pointer in zip(weights, pointers, strict=True)]
        in_use, check_all = c_bool(False), c_bool(True)
        table = (_NamedTensor * len(entries))(*entries)
        self._check(
            "UpdateUserManagedConstantBufferPairs", self._container, table, c_size_t(len(entries)), in_use, check_all
        )

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Start a run on the calling thread's stream; returns the outputs.

        Runs are not synchronised between threads: the events for that would not survive a capture.
        """
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(inputs))  # the run frees these
        sources = (c_void_p * len(inputs))(*(_pointer_in(capsule, None) for capsule in capsules))
        targets = (c_void_p * self._outputs)()
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None
        self._check(
            "RunSingleThreaded", self._container, sources, c_size_t(len(inputs)), targets, c_size_t(self._outputs),
            c_void_p(stream), None,
        )  # fmt: skip
        outputs: Sequence[Any] = _take_over([_capsule_of(pointer, None, None) for pointer in targets])
        return outputs

    def _text(self, function: str, index: int) -> str:
        """The text that a function of the interface gives for a weight."""
        text = c_char_p()
        self._check(function, self._container, c_size_t(index), byref(text))
        return (text.value or b"").decode()

    def _check(self, function: str, *arguments: Any) -> None:
        """Call a function of the interface; ``RuntimeError`` if it fails, and torch writes why to standard error."""
        if failed := self._function(function)(*arguments):
            raise RuntimeError(f"{function} of its package failed (error {failed})")

    def _function(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, f"{_PREFIX}{name}")
        return function


def _take_over(capsules: list[Any]) -> list[Any]:
    """The tensors in capsules, which are freed."""
    tensors: list[Any] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return tensors


def _close(delete: Callable[[Any], int], container: Any, weights: list[Any]) -> None:
    delete(container)
    _take_over(weights)
