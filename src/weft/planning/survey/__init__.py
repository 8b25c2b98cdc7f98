"""This machine, measured as a device: ``survey`` starts a server, keeps its lanes busy, and evaluates its trace.

The measured program is ``weft serve`` itself, in a process of its own, with models cut as in production and clients on
this machine. ``measure`` runs the measurements; ``spans`` computes times, gaps and contention from the trace. The
result is a ``weft.devices.Host``.
"""

from weft.planning.survey.measure import Subject, survey, survey_lanes
from weft.planning.survey.spans import SeenSpan, losses

__all__ = ["SeenSpan", "Subject", "losses", "survey", "survey_lanes"]
