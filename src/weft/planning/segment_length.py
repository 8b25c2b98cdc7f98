"""Longer segments, made of measured ones: neighbours that run as one, so that less passes between them.

Two segments take together what they take one after the other; exits stay cuts. So several lengths can be compared
without another measurement. Shorter ones cannot: where a model could be cut is not known before it is (``grain``).
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
"""What longer segments are called -> how many times as long they may be."""
NO_BETTER = "does no better than another length of segments"
WHOLE = 2.0
"""How many times what a model takes its segments may take, so that the server surely leaves it in one piece."""


def with_longer_segments(asked: PlanRequest, chosen: Chosen, memory_of: Callable[[Arrangement], int]) -> Chosen:
    """The choice once more, between the best option and the same with longer segments.

    Those were not measured as they would be served, so they must be clearly better: by a step of the load.
    """
    as_cut = chosen.best.arrangement
    longer = list(longer_segments(as_cut))
    if not longer:
        return chosen
    found = choose(asked, [as_cut, *longer], memory_of)
    simulated = (trial.arrangement for trial in found.others if trial.arrangement is not as_cut)
    # Bounds may rule out the option as it was cut, which is told among the others.
    bounded = (option for option in found.left_out if option.arrangement is not as_cut)
    left_out = (*(LeftOut(option, NO_BETTER) for option in simulated), *bounded, *chosen.left_out)
    if found.best.arrangement is as_cut:
        return replace(chosen, left_out=left_out)
    return Chosen(found.best, (chosen.best, *chosen.others), left_out)


def longer_segments(arrangement: Arrangement) -> Iterator[Arrangement]:
    """A way to serve with longer segments; those that come to the same as another are left out."""
    seen = [_counts(arrangement.host)]
    for words, times in LENGTHS.items():
        limits_ms = {name: times * grain_ms for name, grain_ms in arrangement.grain_ms.items()}
        host = merged_host(arrangement.host, limits_ms, arrangement.batches)
        if _counts(host) not in seen:
            seen.append(_counts(host))
            grain_ms = {name: _grain_ms(arrangement, host, name, limit) for name, limit in limits_ms.items()}
            yield replace(arrangement, host=host, grain_ms=grain_ms, cut=words)


def _counts(host: Host) -> list[int]:
    return [len(model.segments) for model in host.models.values()]


def _grain_ms(arrangement: Arrangement, host: Host, name: str, limit_ms: float) -> float:
    """The setting with which a server cuts a model so; as it was where nothing changes."""
    before, now = arrangement.host.model(name), host.model(name)
    if len(now.segments) == len(before.segments):
        return arrangement.grain_ms[name]
    whole_s = sum(lengths_s(host, now, arrangement.batches[name]))
    return limit_ms if limit_ms < inf else float(ceil(WHOLE * 1e3 * whole_s))


def merged_host(host: Host, limits_ms: Mapping[str, float], batches: Mapping[str, int] | None = None) -> Host:
    """The host with neighbouring segments of each model as one, as far as that takes no longer than its limit.

    batches: model -> most requests together; as they were measured where left out.
    """
    most = {name: model.max_batch for name, model in host.models.items()} | dict(batches or {})
    models = {
        name: merged(model, joined(model, lengths_s(host, model, most[name]), limits_ms[name] / 1e3))
        if name in limits_ms
        else model
        for name, model in host.models.items()
    }
    return host.model_copy(update={"models": models})


def lengths_s(host: Host, model: HostModel, most: int) -> Sequence[float]:
    """How long segments are to the server that cuts them: alone, and also with the most requests together.

    The latter where a lane takes segments ahead, as that of a GPU: what comes waits for one of them more.
    """
    alone = model.times_at(1)
    return [*map(device_length_s, alone, model.times_at(most))] if host.ahead else alone


def joined(model: HostModel, lengths_s: Sequence[float], limit_s: float) -> list[int]:
    """Where the segments of a model begin that are put together up to a length, and where the last one ends."""
    starts, length_s = [0], 0.0
    for place, time_s in enumerate(lengths_s):
        if place and (place in model.exits or length_s + time_s > limit_s * (1 + 1e-9)):
            starts.append(place)
            length_s = 0.0
        length_s += time_s
    return [*starts, len(model.segments)]


def merged(model: HostModel, bounds: Sequence[int]) -> HostModel:
    """The model with all segments between two *bounds* as one."""
    if len(bounds) == len(model.segments) + 1:
        return model
    parts = [slice(*each) for each in pairwise(bounds)]
    times_s = {batch: tuple(round(sum(each[part]), 7) for part in parts) for batch, each in model.times_s.items()}
    return model.model_copy(
        update={
            "segments": tuple(_called(model.segments[part]) for part in parts),
            "times_s": times_s,
            "spread": _spread(model, parts),
            "exits": tuple(bounds.index(end) for end in model.exits),
        }
    )


def _called(names: Sequence[str]) -> str:
    """Several segments by the first and the last of them."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _spread(model: HostModel, parts: Sequence[slice]) -> tuple[tuple[float, ...], ...]:
    """The measured runs as factors of what the parts take together."""
    if not model.spread:
        return ()
    means_s = np.array(model.times_at(1))
    runs_s = np.array(model.spread) * means_s
    columns = [_factors(runs_s[:, part].sum(axis=1), float(means_s[part].sum())) for part in parts]
    return tuple(tuple(row) for row in zip(*columns, strict=True))


def _factors(took_s: np.ndarray[tuple[int], np.dtype[np.float64]], mean_s: float) -> list[float]:
    return [round(float(each), 4) if mean_s else 1.0 for each in took_s / (mean_s or 1.0)]
