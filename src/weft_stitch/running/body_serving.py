"""Inference with a body on a GPU: ``FusedEncoder`` runs a ``BodyStitching`` from Python.

``weft serve`` does the same with a file, by ``weft_stitch.on_device.body_file``. The rows of a batch are computed on a
rung of a ``BodyLadder``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError, unknown_name
from weft_stitch.bodies.body_description import read_body
from weft_stitch.bodies.body_stitching import BodyBench, BodyStitching
from weft_stitch.net import Array
from weft_stitch.running.body_reading import BodyEncoder, read_encoder
from weft_stitch.running.body_rows import FINEST, RowNumbers, TokenRequest, TokenRow, pack, room_for, split_requests
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
from weft_stitch.running.sessions import relative_difference

SPARE, LEAST_SPARE = 8, 2
"""Free slots for models that are added later: one per 8 models, but at least 2. Each slot costs device memory."""

Change = Callable[[Tensor], Tensor]
"""Maps a tensor of weights to another."""


def map_weights(
    weights: BodyWeights, shared: Change, own: Change, setting: Callable[[float], object] = lambda number: None
) -> BodyWeights:
    """Map all weights: *shared* is applied to tensors that models share, *own* to tables with an entry per model.

    *setting*: called with other numbers that all models share.
    """

    def map_product(product: SharedProduct) -> SharedProduct:
        bias = (own if len(product.bias) > 1 else shared)(product.bias)
        if product.down is None or product.up is None:
            return replace(product, weight=shared(product.weight), bias=bias)
        return SharedProduct(shared(product.weight), bias, own(product.down), own(product.up))

    def map_norm(norm: RowNorm) -> RowNorm:
        change = own if len(norm.scale) > 1 else shared
        setting(norm.epsilon)
        return RowNorm(change(norm.scale), change(norm.shift), norm.epsilon)

    def map_head(head: OwnHead) -> OwnHead:
        return OwnHead(own(head.weight), own(head.bias))

    def map_layer(layer: BodyLayer) -> BodyLayer:
        return BodyLayer(
            map_product(layer.asked), map_product(layer.mixed), map_norm(layer.attended),
            map_product(layer.inner), map_product(layer.outer), map_norm(layer.done),
        )  # fmt: skip

    return weights._replace(
        words=shared(weights.words), positions=shared(weights.positions), embedded=map_norm(weights.embedded),
        layers=[map_layer(layer) for layer in weights.layers], pooler=map_head(weights.pooler),
        classifier=map_head(weights.classifier), kinds=None if weights.kinds is None else shared(weights.kinds),
    )  # fmt: skip


class BodyDigests(NamedTuple):
    """Digests by which weights are compared."""

    shared: bytes
    """Digest of the shared weights, and of the shapes of all others."""
    models: tuple[bytes, ...]
    """Digest of each model's own weights."""


def digests(encoder: BodyEncoder) -> BodyDigests:
    """The digests of an encoder's shared weights and of each model's own weights."""
    shared_digest = blake2b(repr(encoder.weights.heads).encode())
    model_digests = [blake2b() for _ in encoder.names]

    def digest_shared(tensor: Tensor) -> Tensor:
        shared_digest.update(repr(tuple(tensor.shape)).encode())
        shared_digest.update(tensor.contiguous().numpy().data)
        return tensor

    def digest_own(tensor: Tensor) -> Tensor:
        shared_digest.update(repr(tuple(tensor.shape[1:])).encode())
        for digest, entry in zip(model_digests, tensor, strict=True):
            digest.update(entry.contiguous().numpy().data)
        return tensor

    map_weights(encoder.weights, digest_shared, digest_own, lambda number: shared_digest.update(repr(number).encode()))
    return BodyDigests(shared_digest.digest(), tuple(digest.digest() for digest in model_digests))


class SlottedBody:
    """The weights of a body on a device, with a slot for each model and some free slots. Thread-safe."""

    def __init__(self, encoder: BodyEncoder, shared: bytes, device: Any, dtype: Any) -> None:
        self.shared, self.dtype = shared, dtype
        self.room = len(encoder.names) + max(LEAST_SPARE, len(encoder.names) // SPARE)
        self._digests: list[bytes | None] = [None] * self.room
        """For each slot, the digest of the model whose weights it holds; None if it holds none."""
        self._users = [0] * self.room
        """For each slot, the number of loaded files that serve its model."""
        self._lock = threading.Lock()
        """Protects slots and their users: files load and close in different threads."""
        self.weights = map_weights(
            encoder.weights,
            lambda tensor: tensor.to(device=device, dtype=dtype),
            lambda tensor: torch.zeros((self.room, *tensor.shape[1:]), dtype=dtype, device=device),
        )

    def take(self, encoder: BodyEncoder, models: Sequence[bytes]) -> tuple[int, ...] | None:
        """Reserve a slot for each model, by its digest; a loaded model keeps its slot.

        None if there are too few free slots.
        """
        with self._lock:
            free = [slot for slot, users in enumerate(self._users) if not users and self._digests[slot] not in models]
            new = [digest for digest in dict.fromkeys(models) if digest not in self._digests]
            if len(new) > len(free):
                return None
            for digest, slot in zip(new, free, strict=False):
                self._digests[slot] = None  # if writing fails, the slot must not look valid
                self._write(encoder, models.index(digest), slot)
                self._digests[slot] = digest
            slots = tuple(self._digests.index(digest) for digest in models)
            for slot in slots:
                self._users[slot] += 1
            return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Release slots; their weights stay until another model needs the slot."""
        with self._lock:
            for slot in slots:
                self._users[slot] -= 1

    def _write(self, encoder: BodyEncoder, model: int, slot: int) -> None:
        """Copy the own weights of *model* into *slot*."""
        for table, source in zip(_own_tables(self.weights), _own_tables(encoder.weights), strict=True):
            table[slot].copy_(source[model])


def _own_tables(weights: BodyWeights) -> Iterator[Tensor]:
    """The tables with an entry for each model, in a fixed order."""
    tables: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tables.append(tensor)
        return tensor

    map_weights(weights, lambda tensor: tensor, collect)
    yield from tables


LEAST_ROWS, MOST_ROWS = 64, 2048
"""Token rows of the smallest and the largest rung.

Each rung costs tuning, a capture and memory. A batch above the largest rung runs in parts. The largest rung has more
rows if a single request may have more tokens.
"""

Run = Callable[[], None]
"""Runs a batch in fixed buffers."""
Capture = Callable[[Run], Run]
"""Captures a run, as one CUDA graph on a GPU, and returns a function that replays it."""
Shapes = dict[str, Any]
"""Rows of a rung -> the tiles that ``tune_body`` found for them, as JSON."""


class BodyRung(NamedTuple):
    """A captured batch with a fixed number of token rows, and its buffers."""

    layout: RowNumbers
    numbers: Tensor
    """The input buffer (int32), laid out by *layout*."""
    answers: Tensor
    """The output buffer, [requests, classes] in float32."""
    run: Run


class BodyLadder:
    """Captured batches of 64, 128, 256, ... token rows, the *rungs*; each is built when it is first needed.

    A batch runs on the smallest rung that holds its rows; a batch that no rung holds runs in parts. On a GPU each rung
    is one CUDA graph. Callers must not use one rung from several threads at once.
    """

    def __init__(self, weights: BodyWeights, room: int, shapes: Shapes | None = None) -> None:
        """*room*: the most requests of a batch. *shapes*: tiles that an earlier run has found."""
        self._weights, self.room, self.shapes = weights, room, {} if shapes is None else shapes
        self.positions, self.words = len(weights.positions), len(weights.words)
        self.kinds = 1 if weights.kinds is None else len(weights.kinds)
        self.most = max(MOST_ROWS, room_for(self.positions))
        self._rungs: dict[int, BodyRung] = {}

    granule = FINEST
    """The rows of a model begin at a multiple of this."""

    @property
    def sizes(self) -> list[int]:
        """Rows of all possible rungs, in ascending order."""
        sizes = [LEAST_ROWS]
        while sizes[-1] < self.most:
            sizes.append(2 * sizes[-1])
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all rungs built so far."""
        return sum(rung.numbers.nbytes + rung.answers.nbytes for rung in self._rungs.values())

    def check(self, requested: TokenRow) -> None:
        """Raise ``StitchError`` if the tokens, token types or length of a request exceed the model's tables."""
        length = int(requested.positions.max()) + 1
        if length > self.positions:
            raise StitchError(f"a request of {length} tokens: {self.positions} at most")
        for name, numbers, count in (("tokens", requested.tokens, self.words), ("kinds", requested.kinds, self.kinds)):
            least, most = int(numbers.min()), int(numbers.max())
            if not 0 <= least <= most < count:
                raise StitchError(f"a request with {name} from {least} to {most}: there are {count}, from 0")

    def split(self, requested: Sequence[TokenRow]) -> list[Sequence[TokenRow]]:
        """Split requests, which are sorted by model, into batches that rungs hold."""
        return split_requests(requested, self.most, self.room)

    def rows_of(self, batch: Sequence[TokenRow]) -> int:
        """Rows of the smallest rung that holds *batch*."""
        return self.size_for(pack([TokenRequest(row.model, len(row.tokens)) for row in batch]).rows)

    def size_for(self, rows: int) -> int:
        """Rows of the smallest rung that holds *rows* token rows."""
        return max(LEAST_ROWS, room_for(rows))

    def rung(self, rows: int, capture: Capture, enough: Callable[[], bool] = lambda: False) -> BodyRung:
        """The rung of *rows* token rows. *enough* returns whether the time for tuning its tiles is used up."""
        if rows not in self._rungs:
            self._rungs[rows] = self._build(rows, capture, enough)
        return self._rungs[rows]

    def _build(self, rows: int, capture: Capture, enough: Callable[[], bool]) -> BodyRung:
        """Build a rung: buffers, tuned tiles, and the captured run."""
        words, room = self._weights.words, min(self.room, rows)
        layout, longest = RowNumbers(rows, room), min(rows, self.positions)
        numbers = torch.zeros(layout.size, dtype=torch.int32, device=words.device)
        tokens, kinds, tables = layout.parts(numbers)
        body = FusedBody(self._weights)
        if words.is_cuda:
            numbers.copy_(torch.from_numpy(layout.laid(self._example(rows, room))))
            self._set_tiles(body, tables, enough)
        width = self._weights.classifier.weight.shape[2]
        answers = torch.zeros((room, width), dtype=torch.float32, device=words.device)

        def run() -> None:
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                answers.copy_(body(tokens, tables, longest, kinds))

        return BodyRung(layout, numbers, answers, capture(run))

    def _example(self, rows: int, room: int) -> list[TokenRow]:
        """At most *room* requests of equal length, spread over all models, that fill a rung: an example for tuning."""
        length, models = max(FINEST, rows // room // FINEST * FINEST), len(self._weights.classifier.weight)
        zeros, request_count = np.zeros(length, np.int32), min(room, rows // length)
        return [TokenRow(index * models // request_count, zeros, zeros, zeros) for index in range(request_count)]

    def _set_tiles(self, body: FusedBody, tables: Any, enough: Callable[[], bool]) -> None:
        """Set the tiles of *body*: stored ones for its rows, else tuned, or if time is up those of the nearest rung."""
        from weft_stitch.running.kernel_shapes import tune_body

        rows = len(tables.positions)
        if str(rows) not in self.shapes and not (self.shapes and enough()):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                tune_body(body, tables, self._weights.words.dtype)
            self.shapes[str(rows)] = {
                "early": body.early.value,
                "tiles": [[*map(list, entry)] for entry in body.shapes.items()],
            }
            return
        stored = self.shapes.get(str(rows)) or min(self.shapes.items(), key=lambda entry: abs(int(entry[0]) - rows))[1]
        body.early = Early(stored["early"])
        # the key of a tile has the rows of the rung for which it was tuned: replace them by those of this rung
        body.shapes = {
            (depth, width, rank, rows, FINEST): TileShape(*tile) for (depth, width, rank, *_), tile in stored["tiles"]
        }


__all__ = ["BodyLadder", "FusedEncoder", "SlottedBody", "check", "digests", "read_file", "rows_of"]

CLOSE = 1e-3
"""Largest relative difference of an answer to the separate model's, in float32: the kernels sum in another order."""
ROOM = 32
"""Most requests of a batch."""
_TEST_LENGTH, _TEST_HIDDEN = 8, (5, 7)
"""Tokens of a test request, and the positions that its attention mask hides."""

Feed = dict[str, Array]


class FusedEncoder:
    """Answers requests for any of the models of a body in one batch; not thread-safe."""

    def __init__(self, stitching: BodyStitching, device: Any = "cuda", dtype: Any = None) -> None:
        """*dtype*: the type of weights and activations; by default float16 on CUDA, else float32.

        Raises ``StitchError`` if the body has no kernels, or the kernels answer differently from the models.
        """
        self.device = torch.device(device)
        self.encoder = read_encoder(stitching.body)
        bench = BodyBench(stitching.body, list(stitching.files.values()), 1)

        def run_separately(feeds: Sequence[Feed]) -> list[Array]:
            ports = stitching.body.ports
            typed = [{name: array.astype(ports[task][name].dtype) for name, array in feed.items()}
                     for task, feed in enumerate(feeds)]  # fmt: skip
            return [next(iter(bench.alone(task, feed).values())) for task, feed in enumerate(typed)]

        check(self.encoder, run_separately)
        weight_type = dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        body_digests = digests(self.encoder)
        body = SlottedBody(self.encoder, body_digests.shared, self.device, weight_type)
        self._slots = body.take(self.encoder, body_digests.models) or ()
        self.ladder = BodyLadder(body.weights, ROOM)

    def __call__(self, requests: Sequence[tuple[str, Array]]) -> list[Array]:
        """Answer requests (name of the model, token ids), in their order."""
        names = self.encoder.names
        for name, _ in requests:
            if name not in names:
                raise StitchError(unknown_name("model", name, names))
        rows = [_token_row(self._slots[names.index(name)], np.asarray(tokens, np.int64)) for name, tokens in requests]
        for row in rows:
            self.ladder.check(row)
        order = sorted(range(len(rows)), key=lambda index: rows[index].model)  # the ladder wants them by model
        with torch.inference_mode(), torch.cuda.device(self.device) if self.device.type == "cuda" else torch.no_grad():
            answers = _run_requests(
                self.ladder, [rows[index] for index in order], _capture if self.device.type == "cuda" else _uncaptured
            )
        classes = [self.encoder.classes[names.index(name)] for name, _ in requests]
        return [answers[order.index(index)][:count] for index, count in enumerate(classes)]


def _run_requests(ladder: BodyLadder, requested: Sequence[TokenRow], capture: Capture) -> Array:
    """The answers, [requests, classes], to requests that are sorted by model."""
    answers = []
    for batch in ladder.split(requested):
        rung = ladder.rung(ladder.rows_of(batch), capture)
        rung.numbers.copy_(torch.from_numpy(rung.layout.laid(batch)))
        rung.run()
        answers.append(_numpy(rung.answers[: len(batch)]))
    return np.concatenate(answers)


def _uncaptured(run: Run) -> Run:
    """A capture that only returns the run, for the CPU."""
    return run


def _capture(run: Run) -> Run:
    """Capture *run* as a CUDA graph, after one run that compiles its kernels."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Run = graph.replay
    return replay


def read_file(path: Path, *, cuda: bool) -> BodyEncoder:
    """Read the encoders in a file of ``weft stitch``, with weights laid out for the kernels."""
    if cuda and find_spec("triton") is None:
        raise StitchError("triton is not installed")
    return read_encoder(read_body(path))


def rows_of(encoder: BodyEncoder, model: int, given: Mapping[str, Array]) -> list[TokenRow]:
    """Split inputs of a model, [rows, length] each, into requests without masked tokens.

    Raises ``StitchError`` if the mask is not of 0 and 1, or hides the first token.
    """
    tokens = given[encoder.tokens]
    kinds = given[encoder.kinds] if encoder.kinds else np.zeros_like(tokens)
    if not encoder.shown:
        return [_token_row(model, *pair) for pair in zip(tokens, kinds, strict=True)]
    shown = given[encoder.shown]
    if not ((shown == 0) | (shown == 1)).all():
        raise StitchError(f"{encoder.shown} must be of 0 and 1")
    if not shown[:, :1].all():
        raise StitchError(f"{encoder.shown} hides the first token, which the answer is read of; fill up behind")
    positions = [np.flatnonzero(mask) for mask in shown]
    return [
        TokenRow(model, tokens[row, unmasked], unmasked, kinds[row, unmasked]) for row, unmasked in enumerate(positions)
    ]


def _token_row(model: int, tokens: Array, kinds: Array | None = None) -> TokenRow:
    """A request of unmasked tokens, at positions from 0 on; without *kinds*, all are of token type 0."""
    if not len(tokens):
        raise StitchError("a request of 0 tokens: give 1 or more")
    return TokenRow(model, tokens, np.arange(len(tokens)), np.zeros_like(tokens) if kinds is None else kinds)


def check(encoder: BodyEncoder, alone: Callable[[Sequence[Feed]], Sequence[Array]]) -> None:
    """Compare the kernels' plain versions with the separate models; ``StitchError`` if an answer differs.

    *alone*: runs each model on one row of inputs, and returns the answers.
    """
    feeds = [_example(encoder, task) for task in range(len(encoder.names))]
    ladder = BodyLadder(encoder.weights, len(feeds))
    requested = [row for task, feed in enumerate(feeds) for row in rows_of(encoder, task, feed)]
    answers = _run_requests(ladder, requested, _uncaptured)
    for name, count, answer, expected in zip(encoder.names, encoder.classes, answers, alone(feeds), strict=True):
        difference = relative_difference(answer[None, :count], expected)
        if not difference <= CLOSE:
            raise StitchError(f"{name} differs by {difference:.2g} as a body with kernels of its own")


def _example(encoder: BodyEncoder, task: int) -> Feed:
    """A random row of inputs for model *task*."""
    rng = np.random.default_rng(task)
    length = min(_TEST_LENGTH, len(encoder.weights.positions))
    feed = {encoder.tokens: rng.integers(0, len(encoder.weights.words), (1, length))}
    if encoder.kinds and encoder.weights.kinds is not None:
        feed[encoder.kinds] = rng.integers(0, len(encoder.weights.kinds), (1, length))
    if encoder.shown:
        feed[encoder.shown] = np.array([[position not in _TEST_HIDDEN for position in range(length)]], np.int64)
    return feed


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.float().cpu().numpy().copy()
    return array
