"""A backend in another process: it has memory of its own, and tells by messages what has ended.

``backend`` is the server's side, ``worker`` the process, ``messages`` what goes between them. What a batch holds
between two segments stays in the worker; the server has a number for it.
"""

from tests.runtime.process_backend.backend import ProcessBackend
from weft.runtime.isolated.limits import WorkerLimits


def open_backend(limits: WorkerLimits) -> ProcessBackend:
    """What it is registered with."""
    return ProcessBackend()


__all__ = ["ProcessBackend", "open_backend"]
