"""The decoupled NPU as arithmetic: what issuing a layer does to its two clocks and its buffer.

Layerweaver, section III-C, on whole ticks. A fetch starts as soon as the channel is free, stalls
when the buffer is full and resumes as earlier layers finish and free their weights; a compute starts
when its weights are there and the array is free. Everything here is a pure function of values.
"""

from __future__ import annotations

from typing import NamedTuple


class Resident(NamedTuple):
    """Weights in the buffer: how many, and when the compute that frees them ends."""

    size: int
    done: int


class LayerTimes(NamedTuple):
    """When one issued layer is fetched and computed; where nothing is fetched, that takes no time."""

    fetch_start: int
    fetch_end: int
    compute_start: int
    compute_end: int


class DeviceClocks(NamedTuple):
    """When a device can take its next layer, after everything issued so far: the paper's S = (t_m, t_c, l).

    A lane, or a unit of a SoC, has one clock for all of it and no buffer: ``at``.
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
        """A device that fetches nothing and can begin now."""
        return cls(now, now, now)

    @property
    def distance(self) -> int:
        """Decoupling distance: how far the channel runs ahead of the array."""
        return self.array_free - self.channel_free

    def free(self, buffer: int) -> int:
        """Ticks of buffer that are empty when the channel is next free."""
        return buffer - sum(entry.size for entry in self.resident)


def fetch_end(state: DeviceClocks, size: int, buffer: int, start: int) -> int:
    """When *size* ticks of weights, begun at *start*, are all on chip.

    A remainder that exactly fits the space a finished layer freed does not wait for the next one to
    finish; the printed pseudo-code (Fig. 9, line 14) does, by a strict comparison.
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
    """The state after issuing a layer next, and when it is fetched and computed."""
    start = max(state.channel_free, not_before)
    fetched = fetch_end(state, fetch, buffer, start)
    began = max(state.array_free, fetched)
    done = began + compute
    # Weights are on chip only while the channel may have to wait for them: later ones were fetched after they left.
    kept = tuple(entry for entry in state.resident if entry.done > fetched)
    after = DeviceClocks(fetched, done, began, (*kept, Resident(fetch, done)) if done > fetched else kept)
    return after, LayerTimes(start, fetched, began, done)


def prefetchable(state: DeviceClocks, size: int, buffer: int, fetched: int) -> int:
    """Return the ticks of later layers that the channel can fetch before the array is free.

    fetched: the end of the fetch of a layer of *size*, from which on the channel is free. This is the paper's
    fetch(S'[t_m], S[t_c]).
    """
    time, need = fetched, 0
    room = buffer - size - sum(entry.size for entry in state.resident if entry.done > fetched)
    for entry in (e for e in state.resident if e.done > fetched):
        need += min(room, state.array_free - time)
        time = max(time + room, entry.done)
        room = entry.size
        if time >= state.array_free:
            return max(0, need)
    return max(0, need + min(room, state.array_free - time))
