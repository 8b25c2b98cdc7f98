"""Timelines of the multiprocessors that each of five models has under three rules, as a picture and a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.files import write_text
from weft.devices import Share
from weft.engine import SimulatedHost
from weft.engine.policies import Setting
from weft.reports.exhibits import Axis, Boxes, Curve, Panel, Swatches
from weft.reports.page import page_text
from weft.simulation.requests import serve_requests
from weft.simulation.requests.host import executor
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure
from weft_papers.gpu.lab import FIVE, OURS, at_random, case_of, h200

LOAD, SEED, SHOWN_S = 0.8, 1, 0.03
"""Total load of the models, seed of their arrivals, and length of the interval shown in seconds."""
DUE = {model: times if times == 2 else 500 for model, times in FIVE.items()}
"""Model -> deadline in multiples of its duration alone: two are tight, three so loose that they are hardly missed."""
RULES = ("edf", "streams", OURS)
PAGE = "shares.html"


class SegmentOnShare(NamedTuple):
    """A segment of a stream on a share of the GPU; begin and end in milliseconds of the interval shown."""

    stream: int
    begin: float
    end: float
    share: Share


class ShownRequest(NamedTuple):
    """A request: its arrival in milliseconds of the interval shown, and whether it missed its deadline."""

    stream: int
    arrival: float
    late: bool


class Timeline(NamedTuple):
    """Segments and requests of the interval shown, under one rule."""

    rule: str
    segments: list[SegmentOnShare]
    requests: list[ShownRequest]


class SharePiece(NamedTuple):
    """A rectangle of the picture: multiprocessors that a stream has from *begin* to *end* (ms)."""

    stream: int
    begin: float
    end: float
    first: float
    """The lowest multiprocessor."""
    sms: float
    """The number of multiprocessors."""
    share: str


def shares_over_time(out: Path) -> Exhibit:
    """Draw which model has which multiprocessors under three rules, as a picture and as a page."""
    timelines = [_simulate(rule) for rule in RULES]
    picture = _picture(out, timelines)
    data = {"models": list(FIVE), "sms": _sms(), "length": SHOWN_S * 1e3, "load": LOAD, "runs": _runs(timelines)}
    write_text(out / PAGE, page_text(PAGE, data, "weft_papers.gpu"))
    return Exhibit((), (), (picture,))


def _sms() -> int:
    gpu = h200().gpu
    assert gpu
    return gpu.sms


def _simulate(rule: str) -> Timeline:
    """Simulate five models under a rule and keep SHOWN_S seconds after the warm-up."""
    case = case_of([at_random(model, LOAD / len(DUE), times) for model, times in DUE.items()], SHOWN_S)
    executors: list[SimulatedHost] = []

    def device(setting: Setting) -> SimulatedHost:
        executors.append(executor(case, setting, SEED))
        return executors[0]

    tally = serve_requests(case, rule, device, seed=SEED).tally
    whole_gpu, shares = Share(0, _sms()), case.on_shares.shares if case.on_shares else None
    lanes = shares.lanes if shares else ()
    ms_per_tick, start_ms = case.clock.tick_s * 1e3, case.workload.warmup_s * 1e3
    segments = []
    for (head, times), lane in zip(executors[0].log, executors[0].lanes_used, strict=True):
        # Under edf, which uses no shares, the one lane is the whole GPU.
        share = lanes[lane] if rule != "edf" and 0 <= lane < len(lanes) else whole_gpu
        begin, end = times.compute_start * ms_per_tick - start_ms, times.compute_end * ms_per_tick - start_ms
        if end > 0 and begin < SHOWN_S * 1e3:
            segments.append(SegmentOnShare(head.stream, max(0.0, begin), min(SHOWN_S * 1e3, end), share))
    deadlines = [terms.deadline for terms in case.terms]
    requests = [
        ShownRequest(
            request.stream,
            request.arrival * ms_per_tick - start_ms,
            request.end < 0 or request.end > request.arrival + deadlines[request.stream],
        )
        for request in tally.answers
        if request.arrival * ms_per_tick >= start_ms
    ]
    return Timeline(rule, segments, requests)


def pieces(segments: Sequence[SegmentOnShare], sms: int) -> list[SharePiece]:
    """Rectangles for segments, cut at every begin and end; models on streams of the whole GPU get equal parts of it."""
    times = sorted({time for run in segments for time in (run.begin, run.end)})
    rectangles: list[SharePiece] = []
    for begin, end in pairwise(times):
        active = [run for run in segments if run.begin <= begin and run.end >= end]
        on_whole = sorted((run for run in active if run.share.sms == sms), key=lambda run: run.stream)
        for position, run in enumerate(on_whole):
            sms_each = sms / len(on_whole)
            rectangles.append(SharePiece(run.stream, begin, end, position * sms_each, sms_each, str(run.share)))
        for run in active:
            if run.share.sms < sms:
                rectangles.append(SharePiece(run.stream, begin, end, run.share.first, run.share.sms, str(run.share)))
    return rectangles


def _runs(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """The data of the page, a mapping per rule; rectangles and requests are rows of numbers."""
    return [
        {
            "rule": timeline.rule,
            "pieces": [
                [round(value, 4) if isinstance(value, float) else value for value in piece]
                for piece in pieces(timeline.segments, _sms())
            ],
            "requests": [[request.stream, round(request.arrival, 4), request.late] for request in timeline.requests],
        }
        for timeline in timelines
    ]


def _picture(out: Path, timelines: Sequence[Timeline]) -> Figure:
    title = f"Multiprocessors over time: five models at a load of {LOAD:g}, two due in twice their lengths"
    panels, size = [*map(_strip, timelines)], (12, 2.5 * len(timelines) + 1.2)
    return pictures.picture(out, "shares-over-time", title, panels, size=size, share_x=True)


def _strip(timeline: Timeline) -> Panel:
    """The panel of one rule: multiprocessors over time, requests marked above, late ones by a cross."""
    sms, colours = _sms(), pictures.MODELS
    streams, begins, ends, firsts, heights, _ = zip(*pieces(timeline.segments, sms), strict=True)
    widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    requests = [
        Curve([request.arrival], [sms * 1.07], None, colours[request.stream], "x" if request.late else "|", "", size=6)
        for request in timeline.requests
    ]
    late = sum(request.late for request in timeline.requests)
    counts = f"{late} of {len(timeline.requests)} requests late (x)"
    text = f"{timeline.rule}: {counts}; where several share the whole, its parts"
    return Panel(
        [
            Boxes(begins, firsts, widths, heights, [colours[stream] for stream in streams]), *requests,
            Swatches(dict(zip(FIVE, colours, strict=False))),
        ],
        text, Axis(label="milliseconds", low=0, high=SHOWN_S * 1e3),
        Axis(label="SMs", low=0, high=sms * 1.13, ticks=[0, 48, 84, sms]), grid="",
    )  # fmt: skip
