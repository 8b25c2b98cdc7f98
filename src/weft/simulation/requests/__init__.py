"""Requests that arrive, on a simulated device: ``prepare`` a workload, then ``simulate_requests``.

``case`` lowers a workload to a device, ``run`` serves it under a policy. The plain engine (``plain``) and the compiled
loop (``compiled``) give the same answers; the memory of the compiled one does not grow with the run.
"""

from weft.simulation.requests.case import Case, Device, estimates, prepare, prepared
from weft.simulation.requests.compiled import ONLINE
from weft.simulation.requests.run import RequestRun, request_trace, serve_requests, simulate_requests
from weft.simulation.requests.tally import Tally

__all__ = [
    "ONLINE",
    "Case",
    "Device",
    "RequestRun",
    "Tally",
    "estimates",
    "prepare",
    "prepared",
    "request_trace",
    "serve_requests",
    "simulate_requests",
]
