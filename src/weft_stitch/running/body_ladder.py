"""Batches of a body in memory that stays, for 64, 128 and so on rows: ``BodyLadder``; on a GPU each is captured once.

A batch of any requests goes to the first rung that holds its rows; one that no rung holds is computed in parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.running.body_reading import BodyEncoder
from weft_stitch.running.body_rows import (
    FINEST,
    RowNumbers,
    TokenRequest,
    TokenRow,
    lots,
    pack,
    room_for,
)
from weft_stitch.running.fused_body import (
    BodyLayer,
    BodyWeights,
    Early,
    FusedBody,
    OwnHead,
    RowNorm,
    SharedProduct,
    TileShape,
)
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


LEAST_ROWS, MOST_ROWS = 64, 2048
"""Of rungs; the largest is larger where a single request may be."""

Run = Callable[[], None]
Capture = Callable[[Run], Run]
Shapes = dict[str, Any]
"""Rows of a rung -> what ``tune`` found for it, as JSON has it."""


class BodyRung(NamedTuple):
    """A batch of so many rows."""

    layout: RowNumbers
    numbers: Tensor
    """What is read of it."""
    answers: Tensor
    run: Run


class BodyLadder:
    """The rungs of one body; each is made when it is first needed."""

    def __init__(self, weights: BodyWeights, room: int, shapes: Shapes | None = None) -> None:
        """room: requests of a batch. shapes: those that were found earlier."""
        self._weights, self.room, self.shapes = weights, room, {} if shapes is None else shapes
        self.positions, self.words = len(weights.positions), len(weights.words)
        self.kinds = 1 if weights.kinds is None else len(weights.kinds)
        self.most = max(MOST_ROWS, room_for(self.positions))
        self._rungs: dict[int, BodyRung] = {}

    granule = FINEST
    """Rows that a model has at least."""

    @property
    def sizes(self) -> list[int]:
        """Rows of all rungs that may be needed."""
        found = [LEAST_ROWS]
        while found[-1] < self.most:
            found.append(2 * found[-1])
        return found

    @property
    def nbytes(self) -> int:
        """What rungs keep besides what they compute in."""
        return sum(each.numbers.nbytes + each.answers.nbytes for each in self._rungs.values())

    def check(self, asked: TokenRow) -> None:
        """Refuse what no table has."""
        length = int(asked.positions.max()) + 1
        if length > self.positions:
            raise StitchError(f"a request of {length} tokens: {self.positions} at most")
        for what, numbers, count in (("tokens", asked.tokens, self.words), ("kinds", asked.kinds, self.kinds)):
            least, most = int(numbers.min()), int(numbers.max())
            if not 0 <= least <= most < count:
                raise StitchError(f"a request with {what} from {least} to {most}: there are {count}, from 0")

    def lots(self, asked: Sequence[TokenRow]) -> list[Sequence[TokenRow]]:
        """Requests as batches that rungs hold; those of a model must follow each other."""
        return lots(asked, self.most, self.room)

    def rows_of(self, lot: Sequence[TokenRow]) -> int:
        """Of the rung that holds a batch."""
        return self.size_for(pack([TokenRequest(each.model, len(each.tokens)) for each in lot]).rows)

    def size_for(self, rows: int) -> int:
        return max(LEAST_ROWS, room_for(rows))

    def rung(self, rows: int, capture: Capture, enough: Callable[[], bool] = lambda: False) -> BodyRung:
        """That of so many rows; *enough*: whether there is no time left to find the best tiles for it."""
        if rows not in self._rungs:
            self._rungs[rows] = self._made(rows, capture, enough)
        return self._rungs[rows]

    def _made(self, rows: int, capture: Capture, enough: Callable[[], bool]) -> BodyRung:
        words, room = self._weights.words, min(self.room, rows)
        layout, longest = RowNumbers(rows, room), min(rows, self.positions)
        numbers = torch.zeros(layout.size, dtype=torch.int32, device=words.device)
        tokens, kinds, tables = layout.parts(numbers)
        body = FusedBody(self._weights)
        if words.is_cuda:
            numbers.copy_(torch.from_numpy(layout.laid(self._example(rows, room))))
            self._shape(body, tables, enough)
        width = self._weights.classifier.weight.shape[2]
        answers = torch.zeros((room, width), dtype=torch.float32, device=words.device)

        def run() -> None:
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                answers.copy_(body(tokens, tables, longest, kinds))

        return BodyRung(layout, numbers, answers, capture(run))

    def _example(self, rows: int, room: int) -> list[TokenRow]:
        """Requests of several models that fill a rung."""
        length, models = max(FINEST, rows // room // FINEST * FINEST), len(self._weights.classifier.weight)
        zeros, count = np.zeros(length, np.int32), min(room, rows // length)
        return [TokenRow(number * models // count, zeros, zeros, zeros) for number in range(count)]

    def _shape(self, body: FusedBody, tables: Any, enough: Callable[[], bool]) -> None:
        """Have its products in the tiles that are fastest, by trying, once; or in those of another rung."""
        from weft_stitch.running.kernel_shapes import tune_body

        rows = len(tables.positions)
        if str(rows) not in self.shapes and not (self.shapes and enough()):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                tune_body(body, tables, self._weights.words.dtype)
            self.shapes[str(rows)] = {
                "early": body.early.value,
                "tiles": [[*map(list, each)] for each in body.shapes.items()],
            }
            return
        found = self.shapes.get(str(rows)) or min(self.shapes.items(), key=lambda each: abs(int(each[0]) - rows))[1]
        body.early = Early(found["early"])
        body.shapes = {
            (depth, width, rank, rows, FINEST): TileShape(*tile) for (depth, width, rank, *_), tile in found["tiles"]
        }
