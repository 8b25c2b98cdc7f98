"""The loop, its sources of work and its executors; ``compiled`` gives the same orders from kernels."""

from weft.engine.engine import Engine, Executor, Offer, Source
from weft.engine.requests import Requests
from weft.engine.saturated import SaturatedStreams
from weft.engine.simulated_npu import SimulatedNpu

__all__ = ["Engine", "Executor", "Offer", "Requests", "SaturatedStreams", "SimulatedNpu", "Source"]
