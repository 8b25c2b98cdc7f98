"""Parameters of requests: checked numbers, and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.base.errors import BadRequest

MOST_WHOLE = 2**64 - 1
"""Limit on ``timeout`` and ``priority``, which Triton keeps in 64 bits without a sign."""
LONGEST_NS = 2**60
"""Limit on deadlines (36 years); later ones are set to it, so that sums stay within the 63 bits of every clock."""


class ModelTerms(NamedTuple):
    """Deadlines of requests that bring none, in milliseconds: soft and strict ones of a model, then the server's."""

    slo_ms: float | None = None
    timeout_ms: float | None = None
    default_slo_ms: float = 1000.0
    best_effort_ms: float = 60000.0


class RequestDue(NamedTuple):
    """The deadline of a request, on the clock of its arrival, and its kind."""

    deadline_ns: int
    strict: bool
    """A later answer is useless: the request is dropped."""
    best_effort: bool
    """The deadline only orders the request; it does not count as met or missed."""


def due_of(
    parameters: Mapping[str, object], arrival: int, terms: ModelTerms, deadline: int | None = None
) -> RequestDue:
    """Compute the deadline of a request: its own, else its model's, else the server's.

    arrival: in nanoseconds. deadline: that of the transport (gRPC), on the same clock.
    """
    timeout_us, slo_ms = 0, None
    if parameters:  # most requests have none
        timeout_us = whole_number(parameters, "timeout")
        slo_ms = positive_number(parameters, "weft_slo_ms", "a number of milliseconds above 0")
    if parameters and _boolean(parameters, "weft_best_effort"):
        return RequestDue(arrival + round(terms.best_effort_ms * 1e6), strict=False, best_effort=True)
    strict_deadlines = [arrival + timeout_us * 1000] if timeout_us else []
    if deadline is not None:
        strict_deadlines.append(deadline)
    if not strict_deadlines and slo_ms is None and terms.timeout_ms is not None:
        strict_deadlines.append(arrival + round(terms.timeout_ms * 1e6))
    if strict_deadlines:
        return RequestDue(min(*strict_deadlines, arrival + LONGEST_NS), strict=True, best_effort=False)
    soft_ms = slo_ms if slo_ms is not None else terms.slo_ms
    delay_ms = terms.default_slo_ms if soft_ms is None else soft_ms
    # neither the request nor its model has a deadline: the server's default only orders it
    return RequestDue(arrival + round(delay_ms * 1e6), strict=False, best_effort=soft_ms is None)


def whole_number(parameters: Mapping[str, object], key: str) -> int:
    """Return a parameter that is a whole number of at most 64 bits; 0 if it is not given."""
    value = parameters.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_WHOLE:
        raise BadRequest(f"parameter {key} = {value!r} must be a whole number from 0 to {MOST_WHOLE}")
    return value


def positive_number(parameters: Mapping[str, object], key: str, what: str) -> float | None:
    """Return a parameter that is a number above 0; None if it is not given. *what*: valid values, for the error."""
    value = parameters.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
        raise BadRequest(f"parameter {key} = {value!r} must be {what}")
    return float(value)


def _boolean(parameters: Mapping[str, object], key: str) -> bool:
    """Return a boolean parameter; False if it is not given."""
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise BadRequest(f"parameter {key} = {value!r} must be true or false")
    return value
