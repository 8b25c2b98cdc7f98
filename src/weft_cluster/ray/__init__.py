"""weft on Ray: ``weft_cluster.ray:app`` is the application of ``serve run`` and of Serve's files.

Ray starts servers and gates as a placement says, watches and restarts them, and adds copies of overloaded machines.
Requests do not pass through Ray: clients talk to ``gates``, and gates to servers. Ray is imported only when ``app`` is
accessed.

Its modules: ``application.py``, ``weft_cluster.ray:app``; ``service_registry.py``, heartbeats of servers and gates, and
permission to shut down; ``settings.py``, and how many servers are needed; ``local.py``, a cluster on this machine.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weft_cluster.ray.application import app

    return app
