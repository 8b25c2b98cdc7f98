"""A body on a device with room for models that come later: ``SlottedBody``.

What all models share lies there once. What each has of its own lies in tables with a line, a *slot*, for each model and
a few more, so that models come and go without anything being moved, or captured again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from weft_stitch.running.body_reading import BodyEncoder
from weft_stitch.running.fused_body import BodyLayer, BodyWeights, OwnHead, RowNorm, SharedProduct
from weft_stitch.running.operators import Tensor, torch

SPARE, LEAST_SPARE = 8, 2
"""Slots that are left free: one for so many models, but some."""

Change = Callable[[Tensor], Tensor]


def changed(
    weights: BodyWeights, shared: Change, own: Change, setting: Callable[[float], object] = lambda number: None
) -> BodyWeights:
    """The weights with what all models share, and the tables of what each has of its own, changed.

    setting: is shown what else all models share.
    """

    def product(given: SharedProduct) -> SharedProduct:
        bias = (own if len(given.bias) > 1 else shared)(given.bias)
        if given.down is None or given.up is None:
            return replace(given, weight=shared(given.weight), bias=bias)
        return SharedProduct(shared(given.weight), bias, own(given.down), own(given.up))

    def norm(given: RowNorm) -> RowNorm:
        change = own if len(given.scale) > 1 else shared
        setting(given.epsilon)
        return RowNorm(change(given.scale), change(given.shift), given.epsilon)

    def head(given: OwnHead) -> OwnHead:
        return OwnHead(own(given.weight), own(given.bias))

    def layer(given: BodyLayer) -> BodyLayer:
        return BodyLayer(
            product(given.asked), product(given.mixed), norm(given.attended),
            product(given.inner), product(given.outer), norm(given.done),
        )  # fmt: skip

    return weights._replace(
        words=shared(weights.words), positions=shared(weights.positions), embedded=norm(weights.embedded),
        layers=[layer(each) for each in weights.layers], pooler=head(weights.pooler),
        classifier=head(weights.classifier), kinds=None if weights.kinds is None else shared(weights.kinds),
    )  # fmt: skip


class BodyDigests(NamedTuple):
    """What tells weights apart."""

    shared: bytes
    """Of what all models share, and of the sizes of the rest."""
    models: tuple[bytes, ...]
    """Of what each has of its own."""


def digests(encoder: BodyEncoder) -> BodyDigests:
    common = blake2b(repr(encoder.weights.heads).encode())
    own = [blake2b() for _ in encoder.names]

    def see_shared(tensor: Tensor) -> Tensor:
        common.update(repr(tuple(tensor.shape)).encode())
        common.update(tensor.contiguous().numpy().data)
        return tensor

    def see_own(tensor: Tensor) -> Tensor:
        common.update(repr(tuple(tensor.shape[1:])).encode())
        for told, mine in zip(own, tensor, strict=True):
            told.update(mine.contiguous().numpy().data)
        return tensor

    changed(encoder.weights, see_shared, see_own, lambda number: common.update(repr(number).encode()))
    return BodyDigests(common.digest(), tuple(each.digest() for each in own))


class SlottedBody:
    """The weights of a body on a device."""

    def __init__(self, encoder: BodyEncoder, shared: bytes, device: Any, dtype: Any) -> None:
        self.shared, self.dtype = shared, dtype
        self.room = len(encoder.names) + max(LEAST_SPARE, len(encoder.names) // SPARE)
        self._taken: list[bytes | None] = [None] * self.room
        self._users = [0] * self.room
        """How many of those that have the body serve the model in each slot."""
        self._lock = threading.Lock()
        self.weights = changed(
            encoder.weights,
            lambda tensor: tensor.to(device=device, dtype=dtype),
            lambda tensor: torch.zeros((self.room, *tensor.shape[1:]), dtype=dtype, device=device),
        )

    def take(self, encoder: BodyEncoder, models: Sequence[bytes]) -> tuple[int, ...] | None:
        """A slot for each model: those that are there already keep theirs; None where there is no room for all."""
        with self._lock:
            free = [slot for slot, users in enumerate(self._users) if not users and self._taken[slot] not in models]
            new = [each for each in dict.fromkeys(models) if each not in self._taken]
            if len(new) > len(free):
                return None
            for told, slot in zip(new, free, strict=False):
                self._taken[slot] = None  # until all of it is written
                self._write(encoder, models.index(told), slot)
                self._taken[slot] = told
            found = tuple(self._taken.index(each) for each in models)
            for slot in found:
                self._users[slot] += 1
            return found

    def give_back(self, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                self._users[slot] -= 1

    def _write(self, encoder: BodyEncoder, model: int, slot: int) -> None:
        for table, given in zip(_own(self.weights), _own(encoder.weights), strict=True):
            table[slot].copy_(given[model])


def _own(weights: BodyWeights) -> Iterator[Tensor]:
    """The tables of what each model has of its own, in order."""
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    changed(weights, lambda tensor: tensor, seen)
    yield from found
