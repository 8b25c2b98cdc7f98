"""Run many neural networks on one accelerator, well.

Models (``load_model``) become profiles on a device (``load_npu``, ``estimate``); ``simulate`` weaves
them under a policy and returns what happened (``Trace``) and what it came to (``Report``). ``map_models`` places
models on the units of a ``Soc``, ``place`` on the machines of a cluster, ``stitch`` makes one graph of models that
share weights, ``tune`` finds number formats for one; what is behind them is ``weft.mapping``, ``weft.placing``,
``weft.stitching``, ``weft.tuning``. The server is ``weft.serving``, its load generator ``weft.load``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.errors import (
    DeviceError,
    EvaluationError,
    InputError,
    InvalidStart,
    ModelError,
    NumberError,
    PlacingError,
    PolicyError,
    ProfileError,
    RequestError,
    StitchError,
    TuneError,
    WeftError,
    WorkloadError,
)
from weft.version import __version__

if TYPE_CHECKING:
    from weft.cluster.whole_run import place
    from weft.costs.layer_costs import LayerCost, Profile, estimate, read_profile, write_profile
    from weft.devices import Host, Npu, Soc, TiledNpu, load_device, load_npu, load_soc, read_host
    from weft.mapping import Solution, map_models
    from weft.models import Exit, Gemm, Layer, Model, import_onnx, with_exits
    from weft.models.sources import load_model
    from weft.placing.machines import Machines, parse_machines, read_machines
    from weft.placing.placement import Placement, read_placement
    from weft.planning.plan import Plan, read_plan
    from weft.planning.whole_run import MadePlan
    from weft.planning.whole_run import make_plan as plan
    from weft.policies import POLICIES, Policy, Setting, Start, View
    from weft.reports.report import Report, StreamReport
    from weft.reports.trace import Span, Trace, read_trace, write_trace
    from weft.serving.in_process import InProcessServer as Server
    from weft.simulation import Run, simulate
    from weft.simulation.comparison import Comparison, RequestComparison, compare, compare_requests
    from weft.simulation.loads import SustainedLoads, sustain
    from weft.stitching import Stitching, stitch
    from weft.survey.measuring import measure
    from weft.tuning import TuningResult, tune
    from weft.workloads import Saturated
    from weft.workloads.requests import Workload, parse_workload, read_workload

_HOMES = {
    name: home
    for home, names in {
        "cluster.whole_run": "place",
        "costs.layer_costs": "estimate LayerCost Profile read_profile write_profile",
        "devices": "Host load_device load_npu load_soc Npu read_host Soc TiledNpu",
        "mapping": "map_models Solution",
        "models": "Exit Gemm import_onnx Layer Model with_exits",
        "models.sources": "load_model",
        "placing.machines": "Machines parse_machines read_machines",
        "placing.placement": "Placement read_placement",
        "planning.plan": "Plan read_plan",
        "planning.whole_run": "MadePlan plan",
        "policies": "POLICIES Policy Setting Start View",
        "reports.report": "Report StreamReport",
        "reports.trace": "read_trace Span Trace write_trace",
        "serving.in_process": "Server",
        "simulation": "Run simulate",
        "simulation.comparison": "compare compare_requests Comparison RequestComparison",
        "simulation.loads": "sustain SustainedLoads",
        "stitching": "stitch Stitching",
        "survey.measuring": "measure",
        "tuning": "tune TuningResult",
        "workloads": "Saturated",
        "workloads.requests": "parse_workload read_workload Workload",
    }.items()
    for name in names.split()
}
"""Where a name is from; it is imported when it is asked for, so that a script that rounds numbers loads no solver."""

_THERE = {"plan": "make_plan", "Server": "InProcessServer"}
"""What a name is called where it is from, where that is another."""

__all__ = [
    "POLICIES", "Comparison", "DeviceError", "EvaluationError", "Exit", "Gemm", "Host", "InputError", "InvalidStart",
    "Layer", "LayerCost", "Machines", "MadePlan", "Model", "ModelError", "Npu", "NumberError", "Placement",
    "PlacingError", "Plan", "Policy", "PolicyError", "Profile", "ProfileError", "Report", "RequestComparison",
    "RequestError", "Run", "Saturated", "Server", "Setting", "Soc", "Solution", "Span", "Start", "StitchError",
    "Stitching", "StreamReport", "SustainedLoads", "TiledNpu", "Trace", "TuneError", "TuningResult", "View",
    "WeftError", "Workload", "WorkloadError", "__version__", "compare", "compare_requests", "estimate", "import_onnx",
    "load_device", "load_model", "load_npu", "load_soc", "map_models", "measure", "parse_machines", "parse_workload",
    "place", "plan", "read_host", "read_machines", "read_placement", "read_plan", "read_profile", "read_trace",
    "read_workload", "simulate", "stitch", "sustain", "tune", "with_exits", "write_profile", "write_trace",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), _THERE.get(name, name))
