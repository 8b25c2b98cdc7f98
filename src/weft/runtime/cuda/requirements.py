"""What a GPU needs on this machine, and a one-line message about what is missing.

This module does not import torch: the server, which checks, works without it.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

from weft.base.errors import InputError

TWICE = (
    "onnxruntime and onnxruntime-gpu are both installed and write the same files; pip uninstall both, then pip install "
    "onnxruntime-gpu"
)
TWIN_CALLED = "the twin of a GPU"


def folder_of(package: str) -> str | None:
    """Folder of an installed package; None if it is not installed."""
    try:
        return str(distribution(package).locate_file(""))
    except PackageNotFoundError:
        return None


def gpus() -> int:
    """Number of GPUs of the driver; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def gpu_called(device: str) -> str:
    """The driver's name of a device such as ``cuda:0``; empty if there is none."""
    index = device.partition(":")[2]
    if not index.isdecimal():
        return TWIN_CALLED
    driver, number, name = _driver(), ctypes.c_int(0), ctypes.create_string_buffer(256)
    if driver is None or driver.cuDeviceGet(ctypes.byref(number), int(index)) != 0:
        return ""
    return name.value.decode("utf-8", "replace") if driver.cuDeviceGetName(name, len(name), number) == 0 else ""


def _driver() -> ctypes.CDLL | None:
    """CUDA's driver, initialised; None if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def installed_twice() -> bool:
    """Whether both packages of ONNX Runtime, which install the same folder, are present."""
    gpu_folder = folder_of("onnxruntime-gpu")
    return gpu_folder is not None and gpu_folder == folder_of("onnxruntime")


def check(device: str) -> str | None:
    """Return a warning about a device such as ``cuda:0``, or None; ``InputError`` if one of its needs is missing."""
    import onnxruntime as ort

    index, twice = int(device.partition(":")[2]), installed_twice()
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        if twice:
            raise InputError(f"{device}: {TWICE}")
    elif not hasattr(ort.InferenceSession, "get_input_memory_infos"):
        raise InputError(f"{device}: onnxruntime-gpu {ort.__version__} is too old; install 1.23 or later")
    if find_spec("torch") is None:
        raise InputError(f"{device}: torch is not installed; pip install 'weft[cuda]'")
    gpu_count = gpus()
    if not gpu_count:
        raise InputError(f"{device}: no NVIDIA driver with a GPU was found; see that nvidia-smi shows one")
    if index >= gpu_count:
        raise InputError(f"{device}: this machine has {gpu_count} GPU(s), the last is cuda:{gpu_count - 1}")
    return TWICE if twice else None
