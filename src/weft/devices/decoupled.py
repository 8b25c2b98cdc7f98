"""The decoupled NPU as arithmetic: how issuing a layer changes its two clocks and its buffer.

Layerweaver, section III-C, on whole ticks. A fetch starts as soon as the channel is free, stalls
when the buffer is full and resumes as earlier layers finish and free their weights; a compute starts
when its weights are there and the array is free. Everything here is a pure function of values.
"""

from __future__ import annotations

from typing import NamedTuple


class Resident(NamedTuple):
    """Weights of a layer in the buffer: their size in ticks, and when the compute that frees them ends."""

    size: int
    done: int


class LayerTimes(NamedTuple):
    """When an issued layer is fetched and computed; without weights, the fetch starts and ends at the same time."""

    fetch_start: int
    fetch_end: int
    compute_start: int
    compute_end: int


class DeviceClocks(NamedTuple):
    """When a device can take its next layer, after everything issued so far: the paper's S = (t_m, t_c, l).

    A lane, or a unit of a SoC, has one clock for all its work and no buffer: make it with ``at``.
    """

    channel_free: int = 0
    """When the last issued fetch ends (t_m)."""
    array_free: int = 0
    """When the last issued compute ends (t_c)."""
    array_began: int = 0
    """When the last issued compute starts."""
    resident: tuple[Resident, ...] = ()
    """Layers whose compute ends after ``channel_free``, in order: their weights are in the buffer."""

    @classmethod
    def at(cls, now: int) -> DeviceClocks:
        """The clocks of a device without a channel that can begin its next work at *now*."""
        return cls(now, now, now)

    @property
    def distance(self) -> int:
        """Decoupling distance: how far the channel runs ahead of the array."""
        return self.array_free - self.channel_free

    def free(self, buffer: int) -> int:
        """Ticks of buffer that are empty when the channel is next free."""
        return buffer - sum(entry.size for entry in self.resident)


def fetch_end(state: DeviceClocks, size: int, buffer: int, start: int) -> int:
    """Return the end of a fetch of *size* ticks of weights from *start* on; *buffer*: the weight buffer in ticks.

    A remainder that exactly fills the space freed by a finished layer does not wait for the next layer to finish. In
    the paper's pseudo-code (Fig. 9, line 14) it would wait, by a strict comparison.
    """
    free = state.free(buffer)
    if size <= free:  # no stall
        return start + size
    time, need = start + free, size - free
    # Each finished layer frees its weights; the channel fills that space, and stalls until the next one is free.
    for entry in state.resident:
        time = max(time, entry.done)
        if need <= entry.size:
            return time + need
        need -= entry.size
        time += entry.size
    raise AssertionError(f"a layer of {size} ticks is larger than the buffer of {buffer}")


def issue(
    state: DeviceClocks, fetch: int, compute: int, buffer: int, not_before: int = 0
) -> tuple[DeviceClocks, LayerTimes]:
    """Issue a layer of *fetch* and *compute* ticks; return the clocks afterwards and the times of the layer.

    buffer: the weight buffer's capacity in ticks. not_before: the earliest start of the fetch.
    """
    start = max(state.channel_free, not_before)
    fetched = fetch_end(state, fetch, buffer, start)
    began = max(state.array_free, fetched)
    done = began + compute
    # Weights that are freed before this fetch ends can no longer stall the channel, so they are not kept.
    still_resident = tuple(entry for entry in state.resident if entry.done > fetched)
    after = DeviceClocks(
        fetched, done, began, (*still_resident, Resident(fetch, done)) if done > fetched else still_resident
    )
    return after, LayerTimes(start, fetched, began, done)


def prefetchable(state: DeviceClocks, size: int, buffer: int, fetched: int) -> int:
    """Return the ticks of later layers that the channel can fetch before the array is free.

    fetched: when the fetch of a layer of *size* ticks ends and the channel becomes free. buffer: the weight buffer's
    capacity in ticks. This is fetch(S'[t_m], S[t_c]) of the paper.
    """
    time, need = fetched, 0
    room = buffer - size - sum(entry.size for entry in state.resident if entry.done > fetched)
    for entry in (resident for resident in state.resident if resident.done > fetched):
        need += min(room, state.array_free - time)
        time = max(time + room, entry.done)
        room = entry.size
        if time >= state.array_free:
            return max(0, need)
    return max(0, need + min(room, state.array_free - time))
