"""Streams of requests: which models want to run, how often, in which proportion.

Its modules: ``requests.py``, workload files; ``arrivals.py``, one process each; ``exits.py``; ``traces.py`` and
``azure.py``, recorded arrivals of many callers; ``traffic.py``, generated ones; ``traffic_fit.py``, these fitted to
those.
"""

from weft.workloads.saturated import Saturated

__all__ = ["Saturated"]
