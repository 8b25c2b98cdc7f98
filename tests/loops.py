"""Compile the loops that many tests use, in a process beside the tests that use none: python -m tests.loops

In a fresh checkout they take minutes of a processor. If tests compiled them, the others would wait for them.
"""

from __future__ import annotations

import fcntl

import numpy as np

from tests.cluster.cases import one_machine
from tests.conftest import compile_once_among_processes
from weft.devices import load_device
from weft.kernels.compiling import cache_folder
from weft.kernels.request_loop import serve_until
from weft.simulation.requests import prepare, simulate_requests
from weft.simulation.requests.compiled import LOCK, compile_loop
from weft.workloads.requests import parse_workload
from weft_cluster.placing.demand import Need
from weft_cluster.routing.cluster import ClusterSetting
from weft_cluster.routing.simulate import simulate_cluster
from weft_cluster.routing.traffic import RequestBlock

REFILLED = {
    "stream": [{"model": "resnet50", "rate": 2, "deadline_ms": 400, "exits": 3, "exit_rates": [0.25, 0.25, 0.0, 0.5]}],
    "duration_s": 0.1,
    "warmup_s": 0,
}
NEED = Need(0.006, 0.003, 0.001, segment_s=0.0025, alone_s=0.01)


def main() -> None:
    """Compile the loop of requests, its variant that refills batches, and that of a cluster, in this order."""
    compile_once_among_processes()
    folder = cache_folder(serve_until)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:  # commands that the tests start leave the compiling to this process
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_loop()
    simulate_requests(prepare(parse_workload(REFILLED, "tests"), load_device("zc706-resnet50")), "fluid")
    request = RequestBlock(np.array([0.5]), np.zeros(1, np.int64))
    simulate_cluster(one_machine(NEED, 0.02), ClusterSetting(warmup_s=0.0, hop_s=0.001), requests=[request])


if __name__ == "__main__":
    main()
