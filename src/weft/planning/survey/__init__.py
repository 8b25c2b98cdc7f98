"""This machine, measured as a device: ``survey`` starts the server, keeps its lanes busy, and reads off what they did.

What is measured is what will run: ``weft serve`` in a process of its own with the models cut as it cuts them, and
clients on this machine. ``measure`` drives it; ``spans`` works out what the lanes' spans say. The result is a
``weft.devices.Host``.
"""

from weft.planning.survey.measure import Subject, survey, survey_lanes
from weft.planning.survey.spans import SeenSpan, losses

__all__ = ["SeenSpan", "Subject", "losses", "survey", "survey_lanes"]
