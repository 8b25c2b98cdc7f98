"""The reasons of a plan in sentences: why an option won, what limits its load, and what would raise that limit.

Models that share weights are searched for here, so that a plan can say where stitching may pay. *best*: the chosen
option; *predicted*: its result; *ranking*: the finalists; *chosen*: all options of the search.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.devices.host import usable_cores
from weft.models.onnx_graph import load, to_array
from weft.planning.bounds import Blocking, blocking, bound_of, lane_shares
from weft.planning.choice import Chosen
from weft.planning.deciding import Criterion
from weft.planning.finals import Finalist, Ranking
from weft.planning.plan import PlanReasons, Prediction
from weft.planning.plan_request import PlanRequest, RequestedModel, SentStream
from weft.planning.segment_length import NO_BETTER
from weft.planning.standalone_times import times_alone
from weft.planning.trials import OptionTrial
from weft.serving.isolation import THREADS

LEAST_SHARE = 0.2
"""Least share of common weights for which stitching is mentioned; models with less in common gain too little."""
LEAST_BYTES = 1024
"""Least size of a tensor that counts as shared; smaller tensors, such as scales, are often equal by chance."""
MOST_BYTES = 2 << 30
"""Largest total size of files that are searched for shared weights; reading more takes longer than it is worth."""


class SharedWeights(NamedTuple):
    """Two models with weights in common."""

    one: str
    other: str
    share: float
    """Shared bytes over the bytes of the smaller model's weights."""


def shared_weights(models: Sequence[RequestedModel]) -> list[SharedWeights]:
    """Return the pairs of models with at least ``LEAST_SHARE`` equal weights, the largest share first."""
    files = {model.path: model for model in models if not model.body}
    if len(files) < 2 or sum(model.bytes for model in files.values()) > MOST_BYTES:
        return []
    try:
        digests = [(model.source, _weight_digests(path)) for path, model in files.items()]
    except ModelError:  # no reason to fail: shared weights are only advice, and the model can be served
        return []
    pairs = [
        SharedWeights(first, second, _shared_share(first_digests, second_digests))
        for (first, first_digests), (second, second_digests) in combinations(digests, 2)
    ]
    return sorted((pair for pair in pairs if pair.share >= LEAST_SHARE), key=lambda pair: -pair.share)


def _weight_digests(path: Path) -> dict[str, int]:
    """Return digest -> bytes, for every weight tensor of at least ``LEAST_BYTES`` in a file."""
    try:
        graph = load(path, weights=True).graph
    except Exception as error:  # protobuf and the file system each raise their own kinds
        raise ModelError(f"{path}: cannot be read as an ONNX model; export or download it again") from error
    digests: dict[str, int] = {}
    for tensor in graph.initializer:
        data = tensor.raw_data or to_array(tensor).tobytes()
        if len(data) >= LEAST_BYTES:
            key = hashlib.sha256(f"{tensor.data_type}:{list(tensor.dims)}:".encode() + data).hexdigest()
            digests[key] = len(data)
    return digests


def _shared_share(first: dict[str, int], second: dict[str, int]) -> float:
    """Return the bytes of common tensors over those of the smaller file; arguments: digest -> bytes of a tensor."""
    smaller_bytes = min(sum(first.values()), sum(second.values()))
    return sum(first[key] for key in first.keys() & second.keys()) / smaller_bytes if smaller_bytes else 0.0


AMPLE = 1.5
"""Multiple of the asked load from which a plan gets no advice on how to carry more."""
TIGHT = 0.5
"""Share of a deadline that a request takes with nothing else running, above which the deadline is tight."""
NEAR_MEMORY = 0.9
"""Share of the allowed memory above which memory is named as a limit."""
FINE_GRAIN_MS = 2.0
"""Segment length that is suggested if segments are too long."""
HALF, LONG_TAIL = 0.5, 2.0
"""If lanes are busy for less than this share of the time, and p99 runs take this multiple of the mean, slow runs limit
the load rather than the lanes."""


def reasons(request: PlanRequest, chosen: Chosen, ranking: Ranking, sharing: Sequence[SharedWeights]) -> PlanReasons:
    """Return the sentences that explain a choice."""
    best, predicted = ranking.winner.trial, ranking.winner.prediction
    return PlanReasons(
        won=tuple(_winner_reasons(request, chosen, ranking)),
        limits=tuple(_limits(request, best, predicted)),
        next=tuple(_improvements(request, best, predicted, sharing)),
    )


def _winner_reasons(request: PlanRequest, chosen: Chosen, ranking: Ranking) -> Iterator[str]:
    """Yield why the winner was chosen, options with equal results, assumptions, and the number of options."""
    winner = ranking.winner
    yield f"{_label(winner)}: {_deadline_text(ranking)}{_load_text(winner.prediction)}."
    yield from decided(ranking)
    for finalist in ranking.finalists:
        if finalist.twins:
            twins = ", ".join(twin.arrangement.label for twin in finalist.twins)
            yield f"The same as {_label(finalist)}: {twins}."
    yield from request.remarks
    yield from _exit_assumptions(request)
    unsimulated = [option for option in chosen.left_out if option.why != NO_BETTER]
    options = 1 + len(chosen.others) + len(chosen.left_out)
    if unsimulated:
        yield (
            f"Of {options} options {options - len(unsimulated)} were simulated; {len(unsimulated)} were not, "
            "as bounds show that they cannot win."
        )
    else:
        yield f"All {options} options were simulated."


def decided(ranking: Ranking) -> Iterator[str]:
    """Yield why the winner was chosen: as the simplest of equal options, and by which criterion the next one lost."""
    equals = ranking.finalists[1 : 1 + ranking.equal]
    if equals:
        labels = "; ".join(map(_label, equals))
        same_times = all(equal.scores.division == ranking.winner.scores.division for equal in equals)
        yield (
            f"{labels}: equal to it within the error of the {'simulated runs' if same_times else 'measurements'}. "
            f"It is the simplest of these {1 + len(equals)} (docs/plan.md has the order)."
        )
    if ranking.losses:
        loser, loss = ranking.finalists[1 + len(equals)], ranking.losses[0]
        better = ranking.finalists[loss.to]
        than = "it" if loss.to == 0 else _label(better)
        yield f"The next best, {_label(loser)}, {_LOST[loss.by](loser, better, than)}."


def _more_misses_text(loser: Finalist, better: Finalist, than: str) -> str:
    if better.keeps_deadlines:
        return f"does not keep the deadlines at the asked load, as {than} does"
    return f"misses more deadlines at the asked load than {than}: {_missed_text(loser)}"


def _lower_load_text(loser: Finalist, better: Finalist, than: str) -> str:
    return f"carries less than {than}: {loser.prediction.sustainable_factor or 0.0:.2f} times the load"


def _more_memory_text(loser: Finalist, better: Finalist, than: str) -> str:
    return f"needs {_mib(loser.trial.memory_bytes - better.trial.memory_bytes)} more memory than {than}"


def _longer_wait_text(loser: Finalist, better: Finalist, than: str) -> str:
    times = " / ".join("-" if stream.p99_s is None else f"{stream.p99_s * 1e3:.1f}" for stream in loser.report.streams)
    return f"takes longer for its deadlines than {than}: a p99 of {times} ms"


_LOST: dict[Criterion, Callable[[Finalist, Finalist, str], str]] = {
    "missed": _more_misses_text,
    "load": _lower_load_text,
    "memory": _more_memory_text,
    "wait": _longer_wait_text,
}
"""Criterion -> function(loser, better, than) that describes why *loser* lost to *better*, which is called *than*."""


def _label(finalist: Finalist) -> str:
    return finalist.trial.arrangement.label


def _exit_assumptions(request: PlanRequest) -> Iterator[str]:
    """Yield the assumed share of requests per exit, for streams with ``exit_rates`` or an exit record."""
    for index, stream in enumerate(request.workload.stream):
        if rates := request.workload.exit_rates(index):
            shares = " / ".join(f"{rate:.0%}" for rate in rates)
            under_load = "" if stream.exit_floor is None else ", and more while requests press"
            name = stream.served_name
            yield f"Of {name}'s requests {shares} are taken to leave by its exits, the end last{under_load}."


def _deadline_text(ranking: Ranking) -> str:
    """Whether the winner keeps the deadlines, as the beginning of a sentence; if not, which share it misses."""
    winner, *others = ranking.finalists
    if winner.keeps_deadlines:
        return "keeps the deadlines at the asked load"
    fewest = all(winner.prediction.worst_missed <= other.prediction.worst_missed for other in others)
    remark = ", no option that was compared fewer" if others and fewest else ""
    return f"misses deadlines at the asked load ({_missed_text(winner)}{remark})"


def _missed_text(finalist: Finalist) -> str:
    """The largest share of missed deadlines, with its model: "3.1% of camera's"."""
    worst = max(finalist.prediction.streams, key=lambda stream: stream.missed)
    return f"{worst.missed:.1%} of {worst.model}'s"


def _load_text(predicted: Prediction) -> str:
    """The largest load that keeps the deadlines, as a part of a sentence; empty if it is unknown or 0."""
    if not predicted.sustainable_factor:
        return ""
    times, per_s = predicted.sustainable_factor, predicted.sustainable_per_s or 0.0
    return f", and carries up to {times:.2f} times that, {per_s:.0f} requests/s"


def _limits(request: PlanRequest, best: OptionTrial, predicted: Prediction) -> Iterator[str]:
    """Yield what limits the load of the chosen option."""
    busy_share = min(1.0, predicted.load * (predicted.sustainable_factor or 1.0))
    if block := _find_blocking(request, best, predicted):
        yield (
            f"One long operator: {block.segment} of {block.runs} keeps the only lane for {block.length_s * 1e3:.1f} ms "
            f"at a stretch, and {block.waits} has {block.spare_s * 1e3:.1f} ms to spare."
        )
    for sent in request.sent_streams:
        stream, alone_s = sent.stream, _alone_s(best, sent)
        if alone_s > TIGHT * stream.deadline_s:
            yield (
                f"A deadline close to the time alone: {stream.served_name} takes {alone_s * 1e3:.1f} ms of its "
                f"{stream.deadline_s * 1e3:g} ms with nothing else running (p99)."
            )
    if predicted.sustainable_factor:
        yield _lane_time_text(request, best, busy_share)
        if request.device is not None:
            yield (
                "The server's own work, reading and answering requests, is not in the largest load: where models take "
                "less than a millisecond it may carry less, which weft bench PLAN --load 2 shows."
            )
    if request.memory_bytes and best.memory_bytes > NEAR_MEMORY * request.memory_bytes:
        yield f"Memory: {_mib(best.memory_bytes)} of the {_mib(request.memory_bytes)} that are allowed."


def _find_blocking(request: PlanRequest, best: OptionTrial, predicted: Prediction) -> Blocking | None:
    """Return the segment that limits the load by delaying others, if there is one."""
    block = blocking(request, best.arrangement)
    # The bound on the load follows from the blocking; far above the predicted load, something else is the limit.
    is_limit = bound_of(request, best.arrangement).factor <= 2 * (predicted.sustainable_factor or 0.0)
    return block if is_limit else None


def _lane_time_text(request: PlanRequest, best: OptionTrial, busy_share: float) -> str:
    """Describe how far lane time limits the load; *busy_share*: share of lane time in use at the largest load."""
    # the model with the largest ratio of its p99 to its mean time
    name, model = max(best.arrangement.host.models.items(), key=lambda entry: entry[1].tail)
    if busy_share < HALF and model.tail > LONG_TAIL:
        return (
            f"Slow spells: one run in a hundred of {name} takes {model.tail:.1f} times its mean, so deadlines are "
            f"missed while {_lanes_compute(best)} only {busy_share:.0%} of the time; measure again with nothing else "
            "running."
        )
    return (
        f"Lane time: at the largest load {_lanes_compute(best)} {busy_share:.0%} of the time, "
        f"{_largest_user(request, best)}; the rest is no help to requests that come together."
    )


def _improvements(
    request: PlanRequest, best: OptionTrial, predicted: Prediction, sharing: Sequence[SharedWeights]
) -> Iterator[str]:
    """Yield the changes that would raise the load."""
    needs_more = (predicted.sustainable_factor or 0.0) < AMPLE
    yield from _uncounted_exits(request, best)
    if needs_more:
        yield from _more_hardware(request, best)
    for pair in sharing:
        yield (
            f"{pair.one} and {pair.other} share {pair.share:.0%} of their weights: weft stitch {pair.one} {pair.other} "
            "-o both.onnx --dynamic says whether one file for both pays."
        )
    if block := _find_blocking(request, best, predicted):
        yield _shorter_segments(request, best, block)
    if needs_more:
        shares = lane_shares(request, best.arrangement)
        yield _faster_format(request, max(shares, key=lambda name: shares[name]))
    for sent in request.sent_streams:
        alone_s = _alone_s(best, sent)
        if alone_s > TIGHT * sent.stream.deadline_s:
            # 2.5 times the time alone, so that it is no longer tight
            yield f"More time for {sent.name}: a deadline of {2.5e3 * alone_s:.0f} ms."
    if request.isolation == THREADS and request.device is None:
        yield (
            "Models that may crash, or that are not yours: they share the server's process; --isolation process "
            "measures and serves them in workers of their own."
        )


def _more_hardware(request: PlanRequest, best: OptionTrial) -> Iterator[str]:
    """Suggest additional cores or GPUs."""
    used = best.arrangement.settings.lanes * best.arrangement.settings.threads
    if request.device is not None:
        yield "A second GPU of that kind: weft serve loads every model on each GPU; a plan is made for one."
    elif request.cores < usable_cores():
        cores = request.cores
        yield f"More cores: this machine has {usable_cores()}, and {cores} may be used (cores = {cores})."
    elif used == request.cores:
        yield f"A machine with more cores: all {request.cores} of this one are in use."


def _faster_format(request: PlanRequest, name: str) -> str:
    """Suggest number formats that may make a model faster and change its answers."""
    if request.device is None:
        return f"A faster {name}: weft tune --target onnxruntime looks for faster number formats."
    return f'A faster {name}: with precision = "fp16" in its settings it is measured and served so; answers change.'


def _shorter_segments(request: PlanRequest, best: OptionTrial, block: Blocking) -> str:
    """Suggest the option that measures a model in shorter segments."""
    grain_ms = min(FINE_GRAIN_MS, best.arrangement.grain_ms[block.runs] / 2)
    source = next(sent.stream.model for sent in request.sent_streams if sent.name == block.runs)
    return (
        f"Shorter segments of {block.runs}: -s {source}:...,grain={grain_ms:g} measures it cut finer, which helps "
        f"unless {block.segment} is a single operator."
    )


def _uncounted_exits(request: PlanRequest, best: OptionTrial) -> Iterator[str]:
    """Yield the models whose exits no stream mentions, with the option that takes them into account."""
    without_rates = {sent.name: sent.stream for sent in request.sent_streams if not sent.exit_shares}
    for name, stream in without_rates.items():
        exits = len(best.arrangement.host.model(name).exits)
        if exits:
            # shares of 0.2 for up to 4 exits leave some requests for the end
            example = "+".join(["0.2"] * exits + [f"{1 - 0.2 * exits:g}"]) if exits < 5 else "SHARE+...+SHARE"
            yield (
                f"Early exits: {name} has {exits}, and all its requests are taken to go to the end; say "
                f"how many leave by each, as -s {stream.model}:...,exit_rates={example}, or give exit_record=FILE.npz."
            )


def _largest_user(request: PlanRequest, best: OptionTrial) -> str:
    """The model that uses most lane time, with its share."""
    shares = lane_shares(request, best.arrangement)
    name, most = max(shares.items(), key=lambda entry: entry[1])
    total = sum(shares.values())
    return f"{most / total if total else 0.0:.0%} of it for {name}" if len(shares) > 1 else f"all of it for {name}"


def _lanes_compute(best: OptionTrial) -> str:
    """Subject and verb of a sentence: "2 lanes compute"."""
    count, device = best.arrangement.settings.lanes, best.arrangement.settings.device
    if device is not None:
        return f"{device} computes"
    return "one lane computes" if count == 1 else f"{count} lanes compute"


def _alone_s(best: OptionTrial, sent: SentStream) -> float:
    """Return the p99 in seconds of a request with nothing else running."""
    return times_alone(best.arrangement.host, sent.name, sent.exit_shares).quantile_s(0.99)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
