"""Longer segments, merged from measured neighbours, so that there are fewer gaps between segments.

The time of merged segments is the sum of their times; exits stay cuts. So longer segments can be compared without
another measurement. Shorter segments need a measurement (``grain``), since further cuts of a model are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

import numpy as np

from weft.devices import Host, HostModel
from weft.planning.candidates import Arrangement
from weft.planning.choice import Chosen, LeftOut, choose
from weft.planning.plan_request import PlanRequest
from weft.runtime.cutting import device_length_s

LENGTHS: dict[str, float] = {"segments twice as long": 2.0, "models in one piece": inf}
"""Name of a variant -> factor of the longest segment's length."""
NO_BETTER = "does no better than another length of segments"
WHOLE = 2.0
"""Multiple of a model's time that is set as its segment length, so that the server does not cut the model at all."""


def with_longer_segments(request: PlanRequest, chosen: Chosen, memory_of: Callable[[Arrangement], int]) -> Chosen:
    """Return the choice between the best option and the same option with longer segments.

    Merged segments are not measured as they would be served, so they must be better by a step of the load. memory_of:
    returns the bytes that an option needs.
    """
    as_measured = chosen.best.arrangement
    longer = list(longer_segments(as_measured))
    if not longer:
        return chosen
    comparison = choose(request, [as_measured, *longer], memory_of)
    simulated = (trial.arrangement for trial in comparison.others if trial.arrangement is not as_measured)
    # Bounds may rule out the option with measured segments; it stays among the other options of the result.
    ruled_out = (option for option in comparison.left_out if option.arrangement is not as_measured)
    left_out = (*(LeftOut(option, NO_BETTER) for option in simulated), *ruled_out, *chosen.left_out)
    if comparison.best.arrangement is as_measured:
        return replace(chosen, left_out=left_out)
    return Chosen(comparison.best, (chosen.best, *chosen.others), left_out)


def longer_segments(arrangement: Arrangement) -> Iterator[Arrangement]:
    """Yield the arrangement with longer segments, once for each distinct number of segments."""
    seen = [_segment_counts(arrangement.host)]
    for variant, factor in LENGTHS.items():
        limits_ms = {name: factor * grain_ms for name, grain_ms in arrangement.grain_ms.items()}
        host = merged_host(arrangement.host, limits_ms, arrangement.batches)
        if _segment_counts(host) not in seen:
            seen.append(_segment_counts(host))
            grain_ms = {name: _grain_ms(arrangement, host, name, limit) for name, limit in limits_ms.items()}
            yield replace(arrangement, host=host, grain_ms=grain_ms, cut=variant)


def _segment_counts(host: Host) -> list[int]:
    """Return the number of segments of each model."""
    return [len(model.segments) for model in host.models.values()]


def _grain_ms(arrangement: Arrangement, host: Host, name: str, limit_ms: float) -> float:
    """Return the setting ``grain_ms`` with which a server cuts a model as in *host*; the old value if unchanged."""
    measured, merged_model = arrangement.host.model(name), host.model(name)
    if len(merged_model.segments) == len(measured.segments):
        return arrangement.grain_ms[name]
    model_s = sum(lengths_s(host, merged_model, arrangement.batches[name]))
    return limit_ms if limit_ms < inf else float(ceil(WHOLE * 1e3 * model_s))


def merged_host(host: Host, limits_ms: Mapping[str, float], batches: Mapping[str, int] | None = None) -> Host:
    """Return the host with neighbouring segments of each model merged up to its limit.

    limits_ms: model -> longest segment; other models stay unchanged. batches: model -> largest batch; by default the
    measured one.
    """
    largest = {name: model.max_batch for name, model in host.models.items()} | dict(batches or {})
    models = {
        name: merged(model, merged_bounds(model, lengths_s(host, model, largest[name]), limits_ms[name] / 1e3))
        if name in limits_ms
        else model
        for name, model in host.models.items()
    }
    return host.model_copy(update={"models": models})


def lengths_s(host: Host, model: HostModel, most: int) -> Sequence[float]:
    """Return the lengths of segments in seconds, as the server counts them when it cuts a model.

    On the CPU, the times at batch 1. On a lane that queues segments ahead, as a GPU's does, batches up to *most* count,
    too, since an arriving request waits for one more segment.
    """
    single_s = model.times_at(1)
    return [*map(device_length_s, single_s, model.times_at(most))] if host.ahead else single_s


def merged_bounds(model: HostModel, lengths_s: Sequence[float], limit_s: float) -> list[int]:
    """Merge neighbouring segments up to *limit_s*; return the first segment of each merged one, then the number of all.

    An exit always begins a new segment.
    """
    starts, length_s = [0], 0.0
    for segment, time_s in enumerate(lengths_s):
        # 1e-9: sums of times are exact only up to rounding
        if segment and (segment in model.exits or length_s + time_s > limit_s * (1 + 1e-9)):
            starts.append(segment)
            length_s = 0.0
        length_s += time_s
    return [*starts, len(model.segments)]


def merged(model: HostModel, bounds: Sequence[int]) -> HostModel:
    """Return the model with all segments between two *bounds* merged."""
    if len(bounds) == len(model.segments) + 1:
        return model
    parts = [slice(start, end) for start, end in pairwise(bounds)]  # the segments of each merged one
    times_s = {batch: tuple(round(sum(times[part]), 7) for part in parts) for batch, times in model.times_s.items()}
    return model.model_copy(
        update={
            "segments": tuple(_range_text(model.segments[part]) for part in parts),
            "times_s": times_s,
            "spread": _spread(model, parts),
            "exits": tuple(bounds.index(end) for end in model.exits),
        }
    )


def _range_text(names: Sequence[str]) -> str:
    """Name merged segments by the first and the last of them."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _spread(model: HostModel, parts: Sequence[slice]) -> tuple[tuple[float, ...], ...]:
    """Return ``HostModel.spread`` of the merged segments; *parts*: the slice of segments that makes each of them."""
    if not model.spread:
        return ()
    means_s = np.array(model.times_at(1))
    runs_s = np.array(model.spread) * means_s
    columns = [_factors(runs_s[:, part].sum(axis=1), float(means_s[part].sum())) for part in parts]
    return tuple(tuple(row) for row in zip(*columns, strict=True))


def _factors(times_s: np.ndarray[tuple[int], np.dtype[np.float64]], mean_s: float) -> list[float]:
    """Return times over their mean; ones if the mean is 0."""
    return [round(float(factor), 4) if mean_s else 1.0 for factor in times_s / (mean_s or 1.0)]
