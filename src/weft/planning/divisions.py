"""Divisions of the cores into lanes that need not be measured in full, since a measured one is better in every respect.

A division is a number of lanes and of threads per lane. Its *first numbers* are a short measurement of all models
(``survey.first_numbers``), by which it is compared here with the divisions that were measured in full.

If all times of a run are multiplied by a factor, it is the same run at a load that is lower by this factor, but with
tighter deadlines. So a division whose lanes take ``MARGIN`` longer for every model, alone and together, carries at
least 9 % less, which is more than the 5 % that a plan counts as equal. If this does not follow, nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from weft.devices import Host
from weft.planning.plan_request import PlanRequest
from weft.planning.standalone_times import times_alone
from weft.planning.survey.first_numbers import FirstNumbers

MARGIN = 0.1
"""Relative difference in time and throughput of every model from which a division is clearly worse than a better one.
"""
BY_LOAD = ("deadlines", "load")
"""Objectives by which the division with the lower load loses; by others, memory or waiting times decide."""


def why_left_out(request: PlanRequest, candidate: FirstNumbers, full: Iterable[tuple[FirstNumbers, Host]]) -> str:
    """Return why a division need not be measured further, in words; empty if it may be part of the best option.

    candidate: its first numbers. full: the divisions that were measured in full, with their first numbers.
    """
    if (
        request.objective not in BY_LOAD
        or not request.has_rates
        or any(exit_shares for _, _, exit_shares in request.sent_streams)
    ):
        # early exits save a share of a run that depends on its cuts, and each number of threads has other cuts
        return ""
    for better, host in full:
        fits = request.memory_bytes is None or (host.memory_bytes or inf) <= request.memory_bytes
        if fits and is_clearly_worse(candidate, better) and _needs_no_lane(request, candidate, better, host):
            return (
                f"{candidate.answered_per_s:.0f} requests/s where {better.label} has {better.answered_per_s:.0f}, "
                "and no model is faster; not measured further"
            )
    return ""


def is_clearly_worse(candidate: FirstNumbers, better: FirstNumbers) -> bool:
    """Return whether every model takes longer and is answered less often than with a *better* division.

    Times that may be too long, because other processes ran, are taken as short as they may be. A single request has the
    same time with any number of lanes of as many threads.
    """
    if better.lanes > candidate.lanes:
        return False  # models of the division with more lanes slow each other down, which single times do not show
    least_ratio = 1 - MARGIN if candidate.threads == better.threads else 1 + MARGIN
    return all(
        candidate.alone_s[name] / (1 + candidate.too_long) >= least_ratio * alone_s
        and candidate.per_s[name] * (1 + candidate.too_long) * (1 + MARGIN) <= better.per_s[name]
        for name, alone_s in better.alone_s.items()
    )


def _needs_no_lane(request: PlanRequest, candidate: FirstNumbers, better: FirstNumbers, host: Host) -> bool:
    """Return whether further lanes, or shorter segments, could not help requests that wait for a segment's end.

    Every request of the better division has time for the longest segment of any model before its own run. Of models
    that batch, the throughput of more lanes is known with full batches only, which deadlines may not allow.
    """
    if candidate.lanes > better.lanes and max(*candidate.max_batch.values(), *better.max_batch.values()) > 1:
        return False
    if candidate.lanes == better.lanes and all(
        candidate.longest_s[name] >= better.longest_s[name] for name in candidate.longest_s
    ):
        return True
    segment_s = max(max(model.times_at(1)) * model.tail for model in host.models.values())
    return all(
        times_alone(host, sent.name).quantile_s(0.99) + segment_s <= sent.stream.deadline_s
        for sent in request.sent_streams
    )
