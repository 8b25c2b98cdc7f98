"""The rules of routers, as functions of numbers: a router calls them, and the compiled cluster inlines the same ones.

Times are ticks. The work ahead of a request on a machine is two numbers, since a machine has two resources: ticks of
its array and ticks of its memory channel.
"""

from __future__ import annotations

GOLDEN = 0.6180339887498949
"""The golden ratio minus 1: the fractional parts of its multiples are spread evenly, however many there are."""


def aged(ahead: int, as_of: int, now: int) -> int:
    """Return the work left at *now* of *ahead* ticks at *as_of*, if the machine worked on it all the time."""
    return max(0, ahead - (now - as_of))


def carried(ahead: int, sent: int, passed: int) -> int:
    """Return the work left of *ahead* ticks after *passed* ticks, in which *sent* ticks of work arrived."""
    return max(0, ahead + sent - passed)


def finish(now: int, array: int, channel: int, compute: int, fetch: int, overhead: int) -> int:
    """Return the expected finish of a request.

    array, channel: the work ahead of it. compute, fetch: its own work there. overhead: its time in the network and
    outside both.
    """
    return now + overhead + max(array + compute, channel + fetch)


def place_of_turn(turn: int) -> float:
    """Map a turn to a number from 0 to 1; consecutive turns are spread evenly, so shares are kept from the first on."""
    return (turn * GOLDEN) % 1.0


def other_place(draw: float, places: int, excluded: int) -> int:
    """Return one of *places* indices other than *excluded*, all equally likely; *draw*: random, from 0 to 1."""
    place = min(int(draw * (places - 1)), places - 2)
    return place + 1 if place >= excluded else place
