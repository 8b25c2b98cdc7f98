"""The loop, its sources of work and its executors; ``compiled`` gives the same orders from kernels.

Its modules: ``engine.py``, the loop; ``saturated.py`` and ``requests.py``, its sources of work, the latter with
``tickets.py`` (a request and its batch), ``queues.py`` (waiting requests and batches in flight) and ``batches.py``
(batch formation); ``for_requests.py`` builds the loop that serves requests, with ``admission.py``, ``lateness.py`` and
``steering.py``; ``simulated_npu.py`` and ``simulated_host.py``, the simulated executors; ``lane_queues.py``, the
segments that lanes take ahead; ``compiled.py``, the kernels' orders; ``trial.py``, the trial of contenders.
"""

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
