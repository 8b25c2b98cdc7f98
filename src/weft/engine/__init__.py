"""The loop, its sources of work and its executors; ``compiled`` gives the same orders from kernels."""

from weft.engine.arrivals import Arrivals, Ending
from weft.engine.engine import Completion, Engine, Executor, Offer, Source
from weft.engine.for_requests import RequestEngine, request_engine
from weft.engine.requests import Requests
from weft.engine.saturated import SaturatedStreams
from weft.engine.simulated_host import SimulatedHost
from weft.engine.simulated_npu import SimulatedNpu

__all__ = [
    "Arrivals",
    "Completion",
    "Ending",
    "Engine",
    "Executor",
    "Offer",
    "RequestEngine",
    "Requests",
    "SaturatedStreams",
    "SimulatedHost",
    "SimulatedNpu",
    "Source",
    "request_engine",
]
