"""Why an option won, what keeps it from carrying more, and what would help, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.devices.host import usable_cores
from weft.planning.asked import Asked
from weft.planning.bounds import blocking, bound_of, lane_shares, times_alone_s
from weft.planning.choice import Chosen
from weft.planning.plan import PlanReasons, Prediction
from weft.planning.sharing import SharedWeights
from weft.planning.trials import Trial
from weft.workloads.requests import Stream

FULL = 0.75
"""From this share of their time on, lanes are said to be what limits the load."""
TIGHT = 0.5
"""A deadline is tight where a request alone takes this part of it."""
NEAR_MEMORY = 0.9


def reasons(asked: Asked, chosen: Chosen, predicted: Prediction, sharing: Sequence[SharedWeights]) -> PlanReasons:
    """What there is to say of a choice."""
    return PlanReasons(
        won=tuple(_won(asked, chosen, predicted)),
        limits=tuple(_limits(asked, chosen, predicted)),
        next=tuple(_next(asked, chosen, predicted, sharing)),
    )


def _won(asked: Asked, chosen: Chosen, predicted: Prediction) -> Iterator[str]:
    yield f"{chosen.best.arrangement.label}: {_kept(asked, predicted)}{_carries(predicted)}."
    rival = chosen.others[0] if chosen.others else None
    if rival is not None and asked.has_rates:
        yield f"The next best, {rival.arrangement.label}, {_beside(rival, chosen.best)}."
    tried = 1 + len(chosen.others)
    yield (
        f"Of {tried + len(chosen.left_out)} options {tried} were simulated; {len(chosen.left_out)} were not, "
        "as bounds show that they cannot win."
    )


def _kept(asked: Asked, predicted: Prediction) -> str:
    if predicted.worst_missed <= asked.limit:
        return "keeps the deadlines at the asked load"
    worst = max(predicted.streams, key=lambda stream: stream.missed)
    return f"misses the fewest deadlines at the asked load ({worst.missed:.1%} of {worst.model}'s)"


def _carries(predicted: Prediction) -> str:
    if not predicted.sustainable_factor:
        return ""
    times, per_s = predicted.sustainable_factor, predicted.sustainable_per_s or 0.0
    return f", and carries up to {times:.2f} times that, {per_s:.0f} requests/s"


def _beside(rival: Trial, best: Trial) -> str:
    if rival.level() == best.level():
        return "carries as much" + (" with more memory" if rival.memory_bytes > best.memory_bytes else "")
    return f"carries {rival.factor:.2f} times the load" if rival.factor else "keeps the deadlines at no load"


def _limits(asked: Asked, chosen: Chosen, predicted: Prediction) -> Iterator[str]:
    arrangement = chosen.best.arrangement
    busy = predicted.load * (predicted.sustainable_factor or 1.0)
    if busy >= FULL:
        yield (
            f"Lane time: at the largest load the {_lanes(chosen.best)} compute {min(1.0, busy):.0%} of the time, "
            f"{_dearest(asked, chosen.best)}."
        )
    found = blocking(asked, arrangement)
    if found is not None and bound_of(asked, arrangement).factor <= (predicted.sustainable_factor or 0.0) * 2:
        yield (
            f"One long operator: {found.segment} of {found.runs} keeps the only lane for {found.length_s * 1e3:.1f} ms "
            f"at a stretch, and {found.waits} has {found.spare_s * 1e3:.1f} ms to spare."
        )
    for stream in asked.workload.stream:
        alone_s = _alone_s(chosen.best, stream)
        if alone_s > TIGHT * stream.deadline_s:
            yield (
                f"A deadline close to the time alone: {stream.served_name} takes {alone_s * 1e3:.1f} ms of its "
                f"{stream.deadline_s * 1e3:g} ms with nothing else running (p99)."
            )
    if asked.memory_bytes and chosen.best.memory_bytes > NEAR_MEMORY * asked.memory_bytes:
        yield f"Memory: {_mib(chosen.best.memory_bytes)} of the {_mib(asked.memory_bytes)} that are allowed."


def _next(asked: Asked, chosen: Chosen, predicted: Prediction, sharing: Sequence[SharedWeights]) -> Iterator[str]:
    arrangement = chosen.best.arrangement
    used = arrangement.settings.lanes * arrangement.settings.threads
    full = predicted.load * (predicted.sustainable_factor or 1.0) >= FULL
    if full and used == asked.cores < usable_cores():
        yield f"More cores: this machine has {usable_cores()}, and {asked.cores} may be used (cores)."
    elif full and used == asked.cores:
        yield f"A machine with more cores: all {asked.cores} of this one are in use."
    for pair in sharing:
        yield (
            f"{pair.one} and {pair.other} share {pair.share:.0%} of their weights: weft stitch {pair.one} {pair.other} "
            "-o both.onnx --dynamic says whether one file for both pays."
        )
    if full:
        dearest = max(lane_shares(asked, arrangement).items(), key=lambda entry: entry[1])[0]
        yield f"A faster {dearest}: weft tune --target onnxruntime looks for number formats that are."
    for stream in asked.workload.stream:
        alone_s = _alone_s(chosen.best, stream)
        if alone_s > TIGHT * stream.deadline_s:
            yield f"More time for {stream.served_name}: a deadline of {2.5e3 * alone_s:.0f} ms."


def _dearest(asked: Asked, best: Trial) -> str:
    shares = lane_shares(asked, best.arrangement)
    name, most = max(shares.items(), key=lambda entry: entry[1])
    whole = sum(shares.values())
    return f"{most / whole if whole else 0.0:.0%} of it for {name}" if len(shares) > 1 else f"all of it for {name}"


def _lanes(best: Trial) -> str:
    count = best.arrangement.settings.lanes
    return "lane" if count == 1 else f"{count} lanes"


def _alone_s(best: Trial, stream: Stream) -> float:
    """The p99 of a request with nothing else running."""
    times_s = sorted(times_alone_s(best.arrangement.host, stream.served_name).tolist())
    return float(times_s[min(len(times_s) - 1, int(0.99 * len(times_s)))])


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
