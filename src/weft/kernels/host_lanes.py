"""Lanes that compute a segment at a time and may slow each other down: the host of the compiled loop over requests.

Twin of ``weft.engine.SimulatedHost`` without segments ahead; a tiled NPU is one lane whose segments take what is
expected. What a segment takes is drawn from measured runs, as ``simulation.requests.host`` draws.
"""

from __future__ import annotations

from math import ceil

from weft.kernels.compiling import called, inlined
from weft.kernels.request_state import (
    ABORTED,
    ARRAY,
    BATCH_DUE,
    CHANNEL,
    COMPUTE,
    COMPUTED,
    FIRST,
    HANDED_OVER,
    ISSUES,
    KIND,
    LOGGED,
    NONE,
    OLDEST,
    PROGRAM,
    QUERY,
    REST,
    RUN,
    RUNNING,
    RUNS_MEASURED,
    SEG_AT,
    SEG_BEGIN,
    SEG_CAME,
    SEG_DUE,
    SEG_END,
    SEG_JOB,
    SEG_OF,
    SEG_PROGRAM,
    SEG_QUERY,
    SEG_SIZE,
    SETTLED,
    SIZE,
    SPEED,
    SPREAD,
    STEPPED,
    UNSEEN,
)

AT_ONCE = 1e-6
"""Ticks of remaining work that count as none; ``simulated_host.AT_ONCE``."""


@called
def pass_time(models, rules, state, tick):
    """Advance the clock to *tick* or the next end, or to the next end if *tick* has passed."""
    clocks, segments = state.clocks, state.segments
    began = clocks[CHANNEL]
    while True:
        now, until, begins = clocks[CHANNEL], NONE, NONE
        for i in range(clocks[RUNNING]):
            until = min(until, segments[i, SEG_END])
        if tick > began:
            until = min(until, tick)
        elif clocks[RUNNING] == 0:
            until = now
        until = max(now, until)
        if len(models.work):
            for i in range(clocks[RUNNING]):
                if now < segments[i, SEG_BEGIN] <= until:
                    begins = min(begins, segments[i, SEG_BEGIN])
        clocks[CHANNEL] = min(until, begins)
        if begins == NONE:
            return
        settle(models, state)
        regulate(models, rules, state)


@called
def settle(models, state):
    """Subtract the work done since the speeds last changed."""
    clocks, segments, speeds = state.clocks, state.segments, state.speeds
    now = clocks[CHANNEL]
    if len(models.work):
        for i in range(clocks[RUNNING]):
            speeds[i, REST] -= speeds[i, SPEED] * max(0, now - max(clocks[SETTLED], segments[i, SEG_BEGIN]))
    clocks[SETTLED] = now


@called
def regulate(models, rules, state):
    """Set the speeds and ends of the running segments from the contention between them."""
    clocks, segments, speeds, losses = state.clocks, state.segments, state.speeds, models.losses
    if not len(models.work):
        return
    now, active = clocks[CHANNEL], 0
    for i in range(clocks[RUNNING]):
        active += segments[i, SEG_BEGIN] <= now
    share = min(1.0, rules.cores / active) if rules.cores and active else 1.0
    for i in range(clocks[RUNNING]):
        if segments[i, SEG_BEGIN] > now:
            continue
        speed = share
        if len(losses) and active > 1:
            own, lost = models.programs[segments[i, SEG_PROGRAM], KIND], 0.0
            for j in range(clocks[RUNNING]):
                if segments[j, SEG_BEGIN] <= now:
                    lost += losses[own, models.programs[segments[j, SEG_PROGRAM], KIND]]
            lost -= losses[own, own]
            speed = share * max(rules.least_speed, 1.0 - lost)
        speeds[i, SPEED] = speed
        if not segments[i, ABORTED]:
            segments[i, SEG_END] = now + ceil(max(0.0, speeds[i, REST] - AT_ONCE) / speed)


@called
def end_segments(models, rules, state, log):
    """Move the segments that have ended to those that the source has not seen."""
    clocks, segments, speeds = state.clocks, state.segments, state.speeds
    now, over = clocks[CHANNEL], False
    for i in range(clocks[RUNNING]):
        over |= segments[i, SEG_END] <= now
    if not over:
        return
    settle(models, state)
    kept = 0
    for i in range(clocks[RUNNING]):
        if segments[i, SEG_END] > now:
            segments[kept], speeds[kept] = segments[i], speeds[i]
            kept += 1
            continue
        state.unseen[clocks[UNSEEN]] = segments[i]
        clocks[UNSEEN] += 1
        if not segments[i, ABORTED]:
            _account(models, state, log, segments[i])
    clocks[RUNNING] = kept
    regulate(models, rules, state)


@called
def _account(models, state, log, segment):
    """Count a segment that was computed."""
    clocks, at = state.clocks, segment[SEG_AT]
    begin, end = segment[SEG_BEGIN], segment[SEG_END]
    clocks[ISSUES] += 1
    clocks[ARRAY] = max(clocks[ARRAY], end)
    clocks[COMPUTED] += end - begin if len(models.work) else models.layers[at, COMPUTE]
    if clocks[LOGGED] < len(log.issues):
        row = log.issues[clocks[LOGGED]]
        row[0], row[1] = segment[SEG_OF], segment[SEG_QUERY]
        row[2], row[3] = at - models.programs[segment[SEG_PROGRAM], FIRST], segment[SEG_PROGRAM]
        row[4] = row[5] = row[6] = begin
        row[7] = end
        clocks[LOGGED] += 1


@called
def start_segment(models, terms, rules, state, log, stream, place, at):
    """Start the next segment of a batch on a lane; the engine may take time for it."""
    clocks, job = state.clocks, state.jobs[stream, place]
    started = clocks[CHANNEL] + rules.step
    while clocks[CHANNEL] < started:
        pass_time(models, rules, state, started)
        end_segments(models, rules, state, log)
    clocks[STEPPED] = rules.step > 0
    settle(models, state)
    n = clocks[RUNNING]
    before, ticks = 0, models.layers[at, COMPUTE]
    if len(models.work):
        first, end = models.programs[job[PROGRAM], FIRST], models.programs[job[PROGRAM] + 1, FIRST]
        drawn = _drawn(models, terms, stream, job[QUERY], at, at - first, end - first)
        before = _next_hand_over(models, rules, clocks)
        ticks, state.speeds[n, REST] = max(1, ceil(drawn)), drawn
    state.speeds[n, SPEED] = 1.0
    row = state.segments[n]
    row[SEG_OF], row[SEG_JOB], row[SEG_AT], row[SEG_PROGRAM], row[SEG_QUERY] = (
        stream,
        place,
        at,
        job[PROGRAM],
        job[QUERY],
    )
    row[SEG_BEGIN] = clocks[CHANNEL] + before
    row[SEG_END], row[ABORTED] = row[SEG_BEGIN] + ticks, 0
    row[SEG_CAME], row[SEG_DUE], row[SEG_SIZE] = job[OLDEST], job[BATCH_DUE], job[SIZE]
    clocks[RUNNING] = n + 1
    regulate(models, rules, state)


@inlined
def _next_hand_over(models, rules, clocks):
    if rules.hand_overs == 0:
        return 0
    place = clocks[HANDED_OVER]
    clocks[HANDED_OVER] = place + 1 if place + 1 < rules.hand_overs else 0
    return models.times[place]


@inlined
def _drawn(models, terms, stream, query, at, layer, layers):
    """Ticks of a segment alone, as in the measured run that its batch takes."""
    ticks, runs = models.work[at], terms[stream, RUNS_MEASURED]
    if runs:
        ticks *= models.spread[terms[stream, SPREAD] + (terms[stream, RUN] + query) % runs * layers + layer]
    return max(1.0, ticks)


@inlined
def rest_of(models, state, i):
    """Expected ticks to the end of a segment; the actual end is not looked up where it is drawn."""
    row, now = state.segments[i], state.clocks[CHANNEL]
    if row[ABORTED] or not len(models.work):
        return row[SEG_END] - now
    return max(0, row[SEG_BEGIN] + models.layers[row[SEG_AT], COMPUTE] - now)


@inlined
def stoppable(models, rules, state, i):
    """Whether a segment could be stopped half-way."""
    row = state.segments[i]
    return models.layers[row[SEG_AT], COMPUTE] >= rules.abort_from and not row[ABORTED]


@called
def stop_segment(models, rules, state, stream, place):
    """Stop the segment of a batch."""
    clocks, segments = state.clocks, state.segments
    for i in range(clocks[RUNNING]):
        row = segments[i]
        if row[SEG_OF] == stream and row[SEG_JOB] == place and not row[ABORTED]:
            settle(models, state)
            row[SEG_END], row[ABORTED] = min(row[SEG_END], clocks[CHANNEL] + rules.abort), 1
            row[SEG_BEGIN] = min(row[SEG_BEGIN], row[SEG_END])
            regulate(models, rules, state)
