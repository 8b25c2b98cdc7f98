"""Streams of requests: which models want to run, how often, in which proportion."""

from weft.workloads.saturated import Saturated

__all__ = ["Saturated"]
