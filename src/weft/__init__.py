"""Run many neural networks on one accelerator, well.

Models (``load_model``) become profiles on a device (``load_npu``, ``estimate``); ``simulate`` weaves
them under a policy and returns what happened (``Trace``) and what it came to (``Report``). ``map_models`` places
models on the units of a ``Soc``; what is behind it is ``weft.mapping``. The server is ``weft.serving``, its load
generator ``weft.load``.
"""

from weft.devices import Npu, Soc, TiledNpu, load_device, load_npu, load_soc
from weft.errors import (
    DeviceError,
    InputError,
    InvalidStart,
    ModelError,
    PolicyError,
    ProfileError,
    RequestError,
    WeftError,
    WorkloadError,
)
from weft.mapping import Solution, map_models
from weft.models import Exit, Gemm, Layer, Model, import_onnx, with_exits
from weft.models.sources import load_model
from weft.policies import POLICIES, Policy, Setting, Start, View
from weft.profiles import LayerCost, Profile, estimate, read_profile, write_profile
from weft.reports.report import Report, StreamReport
from weft.simulation import Run, simulate
from weft.trace import Span, Trace, read_trace, write_trace
from weft.version import __version__
from weft.workloads import Saturated

__all__ = [
    "POLICIES",
    "DeviceError",
    "Exit",
    "Gemm",
    "InputError",
    "InvalidStart",
    "Layer",
    "LayerCost",
    "Model",
    "ModelError",
    "Npu",
    "Policy",
    "PolicyError",
    "Profile",
    "ProfileError",
    "Report",
    "RequestError",
    "Run",
    "Saturated",
    "Setting",
    "Soc",
    "Solution",
    "Span",
    "Start",
    "StreamReport",
    "TiledNpu",
    "Trace",
    "View",
    "WeftError",
    "WorkloadError",
    "__version__",
    "estimate",
    "import_onnx",
    "load_device",
    "load_model",
    "load_npu",
    "load_soc",
    "map_models",
    "read_profile",
    "read_trace",
    "simulate",
    "with_exits",
    "write_profile",
    "write_trace",
]
