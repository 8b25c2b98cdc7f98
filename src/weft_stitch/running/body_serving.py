"""Inference with a body (encoders with one backbone) on a GPU: ``FusedEncoder`` runs a ``BodyStitching`` from Python.

``weft serve`` does the same with a file, by ``weft_stitch.on_device.body_file``. What is each model's own (adapters,
norms, heads) is in a *slot* of the device's tables. A batch runs on a *rung*: a captured batch with a fixed number of
rows, one per token; a ``BodyLadder`` has rungs of several sizes.
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

    *setting*: called with each number that all models share and that is in no tensor, such as the epsilon of a norm.
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
            map_product(layer.qkv), map_product(layer.attention_out), map_norm(layer.attention_norm),
            map_product(layer.inner), map_product(layer.outer), map_norm(layer.outer_norm),
        )  # fmt: skip

    return weights._replace(
        words=shared(weights.words), positions=shared(weights.positions),
        embedding_norm=map_norm(weights.embedding_norm), layers=[map_layer(layer) for layer in weights.layers],
        pooler=map_head(weights.pooler), classifier=map_head(weights.classifier),
        token_types=None if weights.token_types is None else shared(weights.token_types),
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
        shared_digest.update(repr(tuple(tensor.shape[1:])).encode())  # a model fits a slot only if its shapes do
        for digest, entry in zip(model_digests, tensor, strict=True):
            digest.update(entry.contiguous().numpy().data)
        return tensor

    map_weights(encoder.weights, digest_shared, digest_own, lambda number: shared_digest.update(repr(number).encode()))
    return BodyDigests(shared_digest.digest(), tuple(digest.digest() for digest in model_digests))


class SlottedBody:
    """The weights of a body on a device, with a slot for each model and some free slots. Thread-safe."""

    def __init__(self, encoder: BodyEncoder, shared: bytes, device: Any, dtype: Any) -> None:
        """Copy the shared weights to *device*; all slots are empty. *shared*: the digest of ``BodyDigests.shared``."""
        self.shared, self.dtype = shared, dtype
        self.room = len(encoder.names) + max(LEAST_SPARE, len(encoder.names) // SPARE)  # number of slots
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
        """Reserve a slot for each model of *encoder*, and copy its own weights there; None if too few slots are free.

        *models*: the models' digests (``BodyDigests.models``); a model that is in a slot already keeps it.
        """
        with self._lock:
            free = [slot for slot, users in enumerate(self._users) if not users and self._digests[slot] not in models]
            new = [digest for digest in dict.fromkeys(models) if digest not in self._digests]
            if len(new) > len(free):
                return None
            for digest, slot in zip(new, free, strict=False):  # more slots may be free
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
"""Rows of a rung, as text -> the tiles and the launch mode that ``tune_body`` found for them, as JSON."""


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
        # sizes of the embedding tables
        self.positions, self.words = len(weights.positions), len(weights.words)
        self.token_types = 1 if weights.token_types is None else len(weights.token_types)
        self.most = max(MOST_ROWS, room_for(self.positions))
        """Rows of the largest rung."""
        self._rungs: dict[int, BodyRung] = {}
        """Rows -> the rung."""

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
        for name, numbers, count in (
            ("tokens", requested.tokens, self.words),
            ("token types", requested.token_types, self.token_types),
        ):
            least, most = int(numbers.min()), int(numbers.max())
            if not 0 <= least <= most < count:
                raise StitchError(f"a request with {name} from {least} to {most}: there are {count}, from 0")

    def split(self, requested: Sequence[TokenRow]) -> list[Sequence[TokenRow]]:
        """Split requests, which are sorted by model, into batches that rungs hold."""
        return split_requests(requested, self.most, self.room)

    def rung_rows(self, batch: Sequence[TokenRow]) -> int:
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
        """Build a rung: buffers, tuned tiles, and the captured run; parameters as for ``rung``."""
        words, room = self._weights.words, min(self.room, rows)
        layout, longest = RowNumbers(rows, room), min(rows, self.positions)  # *longest*: tokens of a request
        numbers = torch.zeros(layout.size, dtype=torch.int32, device=words.device)
        tokens, token_types, tables = layout.views(numbers)
        body = FusedBody(self._weights)
        if words.is_cuda:
            numbers.copy_(torch.from_numpy(layout.lay_out(self._example(rows, room))))
            self._set_tiles(body, tables, enough)
        width = self._weights.classifier.weight.shape[2]
        answers = torch.zeros((room, width), dtype=torch.float32, device=words.device)

        def run() -> None:
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                answers.copy_(body(tokens, tables, longest, token_types))

        return BodyRung(layout, numbers, answers, capture(run))

    def _example(self, rows: int, room: int) -> list[TokenRow]:
        """At most *room* requests of equal length, spread over all models, that fill a rung: an example for tuning."""
        # a multiple of FINEST, so that no rows are lost between models
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
                "tiles": [[*map(list, entry)] for entry in body.shapes.items()],  # pairs of key and tile
            }
            return
        stored = self.shapes.get(str(rows)) or min(self.shapes.items(), key=lambda entry: abs(int(entry[0]) - rows))[1]
        body.early = Early(stored["early"])
        # the key of a tile has the rows of the rung for which it was tuned: replace them by those of this rung
        body.shapes = {
            (depth, width, rank, rows, FINEST): TileShape(*tile) for (depth, width, rank, *_), tile in stored["tiles"]
        }


__all__ = ["BodyLadder", "FusedEncoder", "SlottedBody", "check", "digests", "read_file", "read_requests"]

CLOSE = 1e-3
"""Largest relative difference of an answer to the separate model's, in float32: the kernels sum in another order."""
ROOM = 32
"""Most requests of a batch."""
_TEST_LENGTH, _TEST_HIDDEN = 8, (5, 7)
"""Tokens of a test request, and the positions that its attention mask hides: one amid others, and the last."""

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
        self._slots = body.take(self.encoder, body_digests.models) or ()  # of a new body, never too few
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
        rung = ladder.rung(ladder.rung_rows(batch), capture)
        rung.numbers.copy_(torch.from_numpy(rung.layout.lay_out(batch)))
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


def read_requests(encoder: BodyEncoder, model: int, inputs: Mapping[str, Array]) -> list[TokenRow]:
    """Split inputs of a model, [rows, length] each, into requests without masked tokens.

    *model*: the index or the slot that the requests name. Raises ``StitchError`` if the mask has other numbers than 0
    and 1, or hides the first token.
    """
    tokens = inputs[encoder.tokens]
    token_types = inputs[encoder.token_types] if encoder.token_types else np.zeros_like(tokens)
    if not encoder.mask:
        return [_token_row(model, *pair) for pair in zip(tokens, token_types, strict=True)]
    mask = inputs[encoder.mask]  # 1 at tokens, 0 at padding
    if not ((mask == 0) | (mask == 1)).all():
        raise StitchError(f"{encoder.mask} must be of 0 and 1")
    if not mask[:, :1].all():
        raise StitchError(f"{encoder.mask} hides the first token, from which the answer is computed; pad at the end")
    unmasked_positions = [np.flatnonzero(mask_row) for mask_row in mask]
    return [
        TokenRow(model, tokens[row, positions], positions, token_types[row, positions])
        for row, positions in enumerate(unmasked_positions)
    ]


def _token_row(model: int, tokens: Array, token_types: Array | None = None) -> TokenRow:
    """A request of unmasked tokens, at positions from 0 on; without *token_types*, all are of type 0."""
    if not len(tokens):
        raise StitchError("a request of 0 tokens: give 1 or more")
    return TokenRow(
        model, tokens, np.arange(len(tokens)), np.zeros_like(tokens) if token_types is None else token_types
    )


def check(encoder: BodyEncoder, alone: Callable[[Sequence[Feed]], Sequence[Array]]) -> None:
    """Compare the kernels' plain versions with the separate models; ``StitchError`` if an answer differs.

    *alone*: runs each model on one row of inputs, and returns the answers.
    """
    feeds = [_example(encoder, task) for task in range(len(encoder.names))]
    ladder = BodyLadder(encoder.weights, len(feeds))
    requested = [row for task, feed in enumerate(feeds) for row in read_requests(encoder, task, feed)]
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
    if encoder.token_types and encoder.weights.token_types is not None:
        feed[encoder.token_types] = rng.integers(0, len(encoder.weights.token_types), (1, length))
    if encoder.mask:
        feed[encoder.mask] = np.array([[position not in _TEST_HIDDEN for position in range(length)]], np.int64)
    return feed


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.float().cpu().numpy().copy()
    return array
