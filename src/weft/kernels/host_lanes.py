"""Lanes that compute a segment at a time and may slow each other down: the host of the compiled loop over requests.

Twin of ``weft.engine.SimulatedHost`` without segments ahead; a tiled NPU is one lane whose segments take their expected
time. On a host, durations are drawn from measured runs, as ``simulation.requests.host`` draws them. Parameters are the
arrays of ``request_state``; its constants number their columns.
"""

from __future__ import annotations

from math import ceil

from weft.kernels import request_state as k
from weft.kernels.compiling import called, inlined, shared

AT_ONCE = 1e-6
"""Ticks of remaining work that count as none; ``simulated_host.AT_ONCE``."""


@shared
def pass_time(models, rules, state, tick):
    """Advance the clock to *tick* or to the next end of a segment, whichever is first.

    If *tick* has passed, to the next end. Speeds are set anew whenever a segment begins on the way.
    """
    clocks, segments = state.clocks, state.segments  # on a host, the clock CHANNEL holds the time
    called_at = clocks[k.CHANNEL]
    while True:
        now, until, begins = clocks[k.CHANNEL], k.NONE, k.NONE
        for i in range(clocks[k.RUNNING]):
            until = min(until, segments[i, k.SEG_END])
        if tick > called_at:
            until = min(until, tick)
        elif clocks[k.RUNNING] == 0:
            until = now
        until = max(now, until)
        if len(models.work):  # only a measured host has these tables: its segments begin after a hand-over
            for i in range(clocks[k.RUNNING]):
                if now < segments[i, k.SEG_BEGIN] <= until:
                    begins = min(begins, segments[i, k.SEG_BEGIN])
        clocks[k.CHANNEL] = min(until, begins)
        if begins == k.NONE:
            return
        settle(models, state)
        set_segment_speeds(models, rules, state)


@called
def settle(models, state):
    """Subtract the work done since the last call from the remaining work of every segment."""
    clocks, segments, speeds = state.clocks, state.segments, state.speeds
    now = clocks[k.CHANNEL]
    if len(models.work):
        for i in range(clocks[k.RUNNING]):
            speeds[i, k.REST] -= speeds[i, k.SPEED] * max(0, now - max(clocks[k.SETTLED], segments[i, k.SEG_BEGIN]))
    clocks[k.SETTLED] = now


@shared
def set_segment_speeds(models, rules, state):
    """Set the speed of every running segment from the contention between them, and so the time of its end.

    The speed alone is 1. More segments than ``rules.cores`` share the cores evenly; each segment beside it slows a
    segment down by a measured part (``losses``), but not below ``rules.least_speed`` of its share.
    """
    clocks, segments, speeds, losses = state.clocks, state.segments, state.speeds, models.losses
    if not len(models.work):  # not a measured host: segments take their expected time, whatever runs beside them
        return
    now, active = clocks[k.CHANNEL], 0
    for i in range(clocks[k.RUNNING]):
        active += segments[i, k.SEG_BEGIN] <= now
    share = min(1.0, rules.cores / active) if rules.cores and active else 1.0
    for i in range(clocks[k.RUNNING]):
        if segments[i, k.SEG_BEGIN] > now:
            continue
        speed = share
        if len(losses) and active > 1:
            kind, lost_share = models.programs[segments[i, k.HEAD_PROGRAM], k.KIND], 0.0
            for j in range(clocks[k.RUNNING]):
                if segments[j, k.SEG_BEGIN] <= now:
                    lost_share += losses[kind, models.programs[segments[j, k.HEAD_PROGRAM], k.KIND]]
            lost_share -= losses[kind, kind]  # the loop has counted the segment itself
            speed = share * max(rules.least_speed, 1.0 - lost_share)
        speeds[i, k.SPEED] = speed
        if not segments[i, k.ABORTED]:
            # Less the rounding of speeds, which must not add a tick (AT_ONCE).
            segments[i, k.SEG_END] = now + ceil(max(0.0, speeds[i, k.REST] - AT_ONCE) / speed)


@shared
def end_segments(models, rules, state, log):
    """Move the segments that have ended from ``segments`` to ``unseen``, and set the speeds of the others anew."""
    clocks, segments, speeds = state.clocks, state.segments, state.speeds
    now, any_ended = clocks[k.CHANNEL], False
    for i in range(clocks[k.RUNNING]):
        any_ended |= segments[i, k.SEG_END] <= now
    if not any_ended:
        return
    settle(models, state)
    still_running = 0
    for i in range(clocks[k.RUNNING]):
        if segments[i, k.SEG_END] > now:
            k.copy_row(segments[i], segments[still_running])
            k.copy_row(speeds[i], speeds[still_running])
            still_running += 1
            continue
        k.copy_row(segments[i], state.unseen[clocks[k.UNSEEN]])
        clocks[k.UNSEEN] += 1
        if not segments[i, k.ABORTED]:
            _account(models, state, log, segments[i])
    clocks[k.RUNNING] = still_running
    set_segment_speeds(models, rules, state)


@called
def _account(models, state, log, segment):
    """Count and log a segment that was computed."""
    clocks, layer = state.clocks, segment[k.HEAD_LAYER]
    begin, end = segment[k.SEG_BEGIN], segment[k.SEG_END]
    clocks[k.ISSUES] += 1
    clocks[k.ARRAY] = max(clocks[k.ARRAY], end)
    clocks[k.COMPUTED] += end - begin if len(models.work) else models.layers[layer, k.COMPUTE]
    if clocks[k.LOGGED] < len(log.issues):
        # Stream, query, layer, program; start and end of the fetch, of which a segment has none, and of the compute.
        row = log.issues[clocks[k.LOGGED]]
        row[0], row[1] = segment[k.HEAD_STREAM], segment[k.HEAD_QUERY]
        row[2], row[3] = layer - models.programs[segment[k.HEAD_PROGRAM], k.FIRST], segment[k.HEAD_PROGRAM]
        row[4] = row[5] = row[6] = begin
        row[7] = end
        clocks[k.LOGGED] += 1


@called
def start_segment(models, terms, rules, state, log, stream, place, layer_row):
    """Start the next segment of a batch on a lane, after the time that the engine takes for that (``rules.step``).

    place: of the batch's job. layer_row: the segment's row of ``Models.layers``.
    """
    clocks, job = state.clocks, state.jobs[stream, place]
    started = clocks[k.CHANNEL] + rules.step
    while clocks[k.CHANNEL] < started:
        pass_time(models, rules, state, started)
        end_segments(models, rules, state, log)
    clocks[k.WAS_BUSY] = rules.step > 0
    settle(models, state)
    n = clocks[k.RUNNING]
    hand_over, ticks = 0, models.layers[layer_row, k.COMPUTE]
    if len(models.work):
        first, end = models.programs[job[k.PROGRAM], k.FIRST], models.programs[job[k.PROGRAM] + 1, k.FIRST]
        drawn = _draw_ticks(models, terms, stream, job[k.QUERY], layer_row, layer_row - first, end - first)
        hand_over = _next_hand_over(models, rules, clocks)
        ticks, state.speeds[n, k.REST] = max(1, ceil(drawn)), drawn
    state.speeds[n, k.SPEED] = 1.0
    k.write_head(models, state, stream, place, state.segments, n)
    row = state.segments[n]
    row[k.HEAD_LAYER] = layer_row  # issued already, so no longer the batch's next layer
    row[k.SEG_BEGIN] = clocks[k.CHANNEL] + hand_over
    row[k.SEG_END], row[k.ABORTED] = row[k.SEG_BEGIN] + ticks, 0
    clocks[k.RUNNING] = n + 1
    set_segment_speeds(models, rules, state)


@inlined
def _next_hand_over(models, rules, clocks):
    """Return the next of the measured hand-over times, which are used in turn; 0 if none were measured."""
    if rules.hand_overs == 0:
        return 0
    place = clocks[k.NEXT_HAND_OVER]
    clocks[k.NEXT_HAND_OVER] = place + 1 if place + 1 < rules.hand_overs else 0
    return models.times[place]


@inlined
def _draw_ticks(models, terms, stream, query, layer_row, layer, layers):
    """Return the ticks of a segment alone, as in a measured run; successive batches take the runs in turn.

    layer_row: row of ``Models.layers``; layer, layers: its number within the program, and the program's number of
    layers.
    """
    ticks, runs = models.work[layer_row], terms[stream, k.RUNS_MEASURED]
    if runs:
        ticks *= models.spread[terms[stream, k.SPREAD] + (terms[stream, k.FIRST_RUN] + query) % runs * layers + layer]
    return max(1.0, ticks)


@inlined
def rest_of(models, state, i):
    """Return the expected ticks to the end of running segment *i*; where durations are drawn, not the actual ticks."""
    row, now = state.segments[i], state.clocks[k.CHANNEL]
    if row[k.ABORTED] or not len(models.work):
        return row[k.SEG_END] - now
    return max(0, row[k.SEG_BEGIN] + models.layers[row[k.HEAD_LAYER], k.COMPUTE] - now)


@inlined
def stoppable(models, rules, state, i):
    """Return whether running segment *i* could be stopped half-way."""
    row = state.segments[i]
    return models.layers[row[k.HEAD_LAYER], k.COMPUTE] >= rules.abort_from and not row[k.ABORTED]


@shared
def stop_segment(models, rules, state, stream, place):
    """Stop the running segment of a batch: it ends after ``rules.abort`` ticks, and has to run again."""
    clocks, segments = state.clocks, state.segments
    for i in range(clocks[k.RUNNING]):
        row = segments[i]
        if row[k.HEAD_STREAM] == stream and row[k.HEAD_PLACE] == place and not row[k.ABORTED]:
            settle(models, state)
            row[k.SEG_END], row[k.ABORTED] = min(row[k.SEG_END], clocks[k.CHANNEL] + rules.abort), 1
            row[k.SEG_BEGIN] = min(row[k.SEG_BEGIN], row[k.SEG_END])
            set_segment_speeds(models, rules, state)
