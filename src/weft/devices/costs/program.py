"""A profile lowered to a device's clock: whole ticks, so that ties are real ties and runs repeat exactly.

A tick is the time the memory channel takes for a byte, or a fraction of it on a slow channel. Sizes
are therefore counted in ticks too: a layer of ``fetch`` ticks occupies ``fetch`` ticks of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from weft.base.errors import DeviceError, ProfileError
from weft.devices import Npu
from weft.devices.costs.layer_costs import LayerCost, Profile, cut
from weft.devices.host import Gates
from weft.models.layer import Model

COARSEST_TICK_S = 2e-11
"""Longest tick: a byte's time at 50 GB/s. On slower channels a byte is several ticks, so that rounding a compute time
to ticks changes it by at most 10 ps."""
MAX_CHUNKS = 4096
"""Limit of the pieces of a layer that streams through the weight buffer; beyond it, the buffer or chunk size is
mistyped."""
MAX_TICKS = 2**61
"""Longest run: sums of two such times still fit into the 64 bits of compiled loops."""
MAX_BUFFER_TICKS = 2**52
"""Largest buffer: as a float it is exact, and 512 buffers fit into ``MAX_TICKS``."""


@dataclass(frozen=True)
class Clock:
    """Converts bytes and seconds of one device to ticks."""

    ticks_per_byte: int
    bytes_per_s: float
    buffer: int
    """Capacity of the weight buffer in ticks."""

    @classmethod
    def of(cls, npu: Npu) -> Clock:
        bandwidth = npu.bandwidth_bytes_per_s
        per_byte = max(1, math.ceil(1 / (COARSEST_TICK_S * bandwidth)))
        buffer = npu.weight_buffer_bytes * per_byte
        if buffer > MAX_BUFFER_TICKS:
            raise DeviceError(
                f"{npu.name}: a channel of {npu.bandwidth_gb_s:g} GB/s takes too long to fill a buffer of "
                f"{npu.weight_buffer_mib:g} MiB for the clock; check both"
            )
        return cls(per_byte, bandwidth, buffer)

    @classmethod
    def nanoseconds(cls) -> Clock:
        """The clock of a device without a memory channel: a tick is a nanosecond."""
        return cls(1, 1e9, MAX_BUFFER_TICKS)

    @property
    def tick_s(self) -> float:
        return 1 / (self.bytes_per_s * self.ticks_per_byte)

    def ticks(self, seconds: float) -> int:
        return round(seconds * self.bytes_per_s * self.ticks_per_byte)


@dataclass(frozen=True, eq=False)
class Program:
    """One model's layers in ticks, in execution order."""

    model: str
    names: tuple[str, ...]
    fetch: tuple[int, ...]
    compute: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    exits: tuple[int, ...] = ()
    """Early exits, in order: the number of layers before each; the end of the model is not among them."""
    exit_rates: tuple[float, ...] = ()
    """Share of the samples that leave at each exit, and last at the end; empty if unknown."""
    gated: bool = False
    """Whether one start covers all layers up to the next exit: the device ends it at the next gate, between two layers,
    when the start is revoked."""
    launch: int = 0
    """Ticks from a start to its first layer, if it is gated."""
    leave: int = 0
    """Ticks from the gate at which a revoked start stops until its lane is free."""

    def with_gates(self, gates: Gates) -> Program:
        """Return this program on a device with gates; its ticks are nanoseconds and contain passing them."""
        return replace(self, gated=True, launch=round(gates.launch_us * 1e3), leave=round(gates.leave_us * 1e3))

    def span(self, layer: int) -> int:
        """How many layers one start of *layer* covers."""
        return next((exit_ for exit_ in self.exits if exit_ > layer), len(self)) - layer if self.gated else 1

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def total_fetch(self) -> int:
        return sum(self.fetch)

    @cached_property
    def total_compute(self) -> int:
        return sum(self.compute)

    @cached_property
    def largest_fetch(self) -> int:
        return max(self.fetch)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Per layer, the longer of its fetch and compute times; progress of a run is counted in it."""
        return tuple(map(max, self.fetch, self.compute))

    @cached_property
    def remaining(self) -> tuple[int, ...]:
        """``work`` from each layer to the end: Layerweaver+'s estimate of the remaining time (dissertation, V.2)."""
        return tuple(accumulate(reversed(self.work)))[::-1]

    @cached_property
    def total_work(self) -> int:
        return sum(self.work)

    def inherent_idle(self, buffer: int) -> int:
        """Ticks per query in which the channel must wait, since layers compute longer than the buffer takes to fill.

        While a layer computes, its own weights stay in the buffer, and the channel can only fill the rest.
        buffer: the capacity of the weight buffer, in ticks like the sizes in ``fetch``.
        """
        return sum(max(0, compute - (buffer - size)) for size, compute in zip(self.fetch, self.compute, strict=True))

    @property
    def compute_bound(self) -> bool:
        """Whether the model computes longer than it fetches."""
        return self.total_compute > self.total_fetch

    def cut(self, most: int, cost: int = 0) -> Program:
        """This program with every layer of more than *most* ticks of weights cut into nearly equal, smaller pieces.

        Pieces are whole bytes. cost: additional compute ticks of every piece but the first of its layer.
        """
        ticks_per_byte = [
            fetch // size if size else 1 for fetch, size in zip(self.fetch, self.weight_bytes, strict=True)
        ]
        counts = [
            max(1, -(-size // max(1, most // ticks)))
            for size, ticks in zip(self.weight_bytes, ticks_per_byte, strict=True)
        ]
        added_ticks = [0 if part == 0 else cost for count in counts for part in range(count)]
        compute, sizes = _divide(self.compute, counts), _divide(self.weight_bytes, counts)
        tick_sizes = [ticks for ticks, count in zip(ticks_per_byte, counts, strict=True) for _ in range(count)]
        return replace(
            self,
            names=tuple(
                piece for name, count in zip(self.names, counts, strict=True) for piece in _part_names(name, count)
            ),
            fetch=tuple(size * ticks for size, ticks in zip(sizes, tick_sizes, strict=True)),
            compute=tuple(ticks + added for ticks, added in zip(compute, added_ticks, strict=True)),
            weight_bytes=sizes,
            exits=tuple(sum(counts[:layers]) for layers in self.exits),
        )


def _divide(values: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Divide each value into ``counts[i]`` nearly equal whole parts whose sum is the value; all parts in one tuple."""
    return tuple(
        value * (part + 1) // count - value * part // count
        for value, count in zip(values, counts, strict=True)
        for part in range(count)
    )


def _part_names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{part + 1}/{count}]" for part in range(count)]


def lower(profile: Profile, npu: Npu) -> Program:
    """Convert a profile to ticks; a layer larger than the weight buffer becomes chunks that fit."""
    clock = Clock.of(npu)
    pieces = [piece for layer in profile.layers for piece in _chunks(layer, npu)]
    program = Program(
        profile.model,
        tuple(piece.name for piece in pieces),
        tuple(piece.weight_bytes * clock.ticks_per_byte for piece in pieces),
        tuple(clock.ticks(piece.compute_s) for piece in pieces),
        tuple(piece.weight_bytes for piece in pieces),
    )
    if program.total_work == 0:
        raise ProfileError(f"{profile.model}: no layer takes a measurable time on {npu.name}")
    return program


def one_at_a_time(
    model: Model,
    times_s: Sequence[float],
    clock: Clock,
    *,
    exit_rates: tuple[float, ...] = (),
    decision_s: float = 0.0,
    by_layer: bool = True,
) -> Program:
    """Convert a model to ticks on a device that runs one layer at a time, fetching and computing together.

    times_s: seconds of each layer. A schedulable layer is a matrix product with the other layers after it; without
    *by_layer*, all layers between two exits. exit_rates: as of ``Program``. decision_s: scheduling time added to each
    schedulable layer.
    """
    if not model.layers:
        raise ProfileError(f"{model.name}: nothing in it takes time, so there is nothing to schedule")
    ends = {exit_.after for exit_ in model.exits}
    pieces: list[list[int]] = [[]]
    for index, layer in enumerate(model.layers):
        begins_piece = by_layer and layer.gemm and any(model.layers[i].gemm for i in pieces[-1])
        if pieces[-1] and (index in ends or begins_piece):
            pieces.append([])
        pieces[-1].append(index)
    compute = tuple(max(1, clock.ticks(math.fsum(times_s[i] for i in piece) + decision_s)) for piece in pieces)
    no_fetches = (0,) * len(pieces)
    return Program(
        model.name,
        tuple(_piece_name(model, piece) for piece in pieces),
        no_fetches,
        compute,
        no_fetches,
        tuple(count for count, piece in enumerate(pieces) if piece[0] in ends),
        exit_rates,
    )


def _piece_name(model: Model, piece: Sequence[int]) -> str:
    """The name of its matrix product, or ``first..last`` of several; of all its layers if none is a product."""
    name_indices = [index for index in piece if model.layers[index].gemm] or list(piece)
    first, last = model.layers[name_indices[0]].name, model.layers[name_indices[-1]].name
    return first if first == last else f"{first}..{last}"


def _chunks(layer: LayerCost, npu: Npu) -> Sequence[LayerCost]:
    """The layer, or its chunks if it is larger than the weight buffer; raises DeviceError at too many chunks."""
    if layer.weight_bytes <= npu.weight_buffer_bytes:
        return (layer,)
    count = -(-layer.weight_bytes // npu.chunk_bytes)
    if count > MAX_CHUNKS:
        raise DeviceError(
            f"{npu.name}: layer {layer.name!r} has {layer.weight_bytes} weight bytes and would stream through the "
            f"buffer in {count} chunks of {npu.chunk_bytes} bytes; enlarge weight_buffer_mib or chunk_mib"
        )
    return cut(layer, npu.chunk_bytes)
