"""Inference with a body on a GPU: ``FusedEncoder`` runs a ``BodyStitching`` from Python.

``weft serve`` does the same with a file, by ``weft_stitch.on_device.body_file``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import StitchError, unknown_name
from weft_stitch.bodies.bench import BodyBench
from weft_stitch.bodies.body_description import read_body
from weft_stitch.bodies.body_stitching import BodyStitching
from weft_stitch.net import Array
from weft_stitch.running.body_ladder import BodyLadder, Capture, Run, SlottedBody, digests
from weft_stitch.running.body_reading import BodyEncoder, read_encoder
from weft_stitch.running.body_rows import TokenRow
from weft_stitch.running.operators import Tensor, torch
from weft_stitch.running.sessions import relative_difference

__all__ = ["BodyLadder", "FusedEncoder", "SlottedBody", "check", "digests", "read_file", "rows_of"]

CLOSE = 1e-3
"""Largest relative difference of an answer to the model's own, in float32: the kernels sum in another order."""
ROOM = 32
"""Requests of a batch."""
_LENGTH, _HIDDEN = 8, (5, 7)
"""Tokens of a test request, and the positions that its mask hides if there is a mask."""

Feed = dict[str, Array]


class FusedEncoder:
    """Answers requests for any of the models, in one batch."""

    def __init__(self, stitching: BodyStitching, device: Any = "cuda", dtype: Any = None) -> None:
        """dtype: the type of weights and activations; by default float16 on CUDA, else float32."""
        self.device = torch.device(device)
        self.encoder = read_encoder(stitching.body)
        bench = BodyBench(stitching.body, list(stitching.files.values()), 1)

        def alone(feeds: Sequence[Feed]) -> list[Array]:
            ports = stitching.body.ports
            cast = [{name: array.astype(ports[task][name].dtype) for name, array in feed.items()}
                    for task, feed in enumerate(feeds)]  # fmt: skip
            return [next(iter(bench.alone(task, feed).values())) for task, feed in enumerate(cast)]

        check(self.encoder, alone)
        kind = dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        body_digests = digests(self.encoder)
        body = SlottedBody(self.encoder, body_digests.shared, self.device, kind)
        self._slots = body.take(self.encoder, body_digests.models) or ()
        self.ladder = BodyLadder(body.weights, ROOM)

    def __call__(self, requests: Sequence[tuple[str, Array]]) -> list[Array]:
        """Answer requests (model, tokens), in their order."""
        names = self.encoder.names
        for name, _ in requests:
            if name not in names:
                raise StitchError(unknown_name("model", name, names))
        rows = [_shown(self._slots[names.index(name)], np.asarray(tokens, np.int64)) for name, tokens in requests]
        for row in rows:
            self.ladder.check(row)
        order = sorted(range(len(rows)), key=lambda number: rows[number].model)
        with torch.inference_mode(), torch.cuda.device(self.device) if self.device.type == "cuda" else torch.no_grad():
            answers = _ran(
                self.ladder, [rows[number] for number in order], _captured if self.device.type == "cuda" else _plain
            )
        classes = [self.encoder.classes[names.index(name)] for name, _ in requests]
        return [answers[order.index(number)][:count] for number, count in enumerate(classes)]


def _ran(ladder: BodyLadder, asked: Sequence[TokenRow], capture: Capture) -> Array:
    """Run rows, which are sorted by model, and return their answers."""
    answers = []
    for lot in ladder.lots(asked):
        rung = ladder.rung(ladder.rows_of(lot), capture)
        rung.numbers.copy_(torch.from_numpy(rung.layout.laid(lot)))
        rung.run()
        answers.append(_numpy(rung.answers[: len(lot)]))
    return np.concatenate(answers)


def _plain(run: Run) -> Run:
    return run


def _captured(run: Run) -> Run:
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
    """Split inputs of a model, [rows, length] each, into requests, without masked tokens."""
    tokens = given[encoder.tokens]
    kinds = given[encoder.kinds] if encoder.kinds else np.zeros_like(tokens)
    if not encoder.shown:
        return [_shown(model, *pair) for pair in zip(tokens, kinds, strict=True)]
    shown = given[encoder.shown]
    if not ((shown == 0) | (shown == 1)).all():
        raise StitchError(f"{encoder.shown} must be of 0 and 1")
    if not shown[:, :1].all():
        raise StitchError(f"{encoder.shown} hides the first token, which the answer is read of; fill up behind")
    at = [np.flatnonzero(mask) for mask in shown]
    return [TokenRow(model, tokens[row, seen], seen, kinds[row, seen]) for row, seen in enumerate(at)]


def _shown(model: int, tokens: Array, kinds: Array | None = None) -> TokenRow:
    """A request of unmasked tokens."""
    if not len(tokens):
        raise StitchError("a request of 0 tokens: give 1 or more")
    return TokenRow(model, tokens, np.arange(len(tokens)), np.zeros_like(tokens) if kinds is None else kinds)


def check(encoder: BodyEncoder, alone: Callable[[Sequence[Feed]], Sequence[Array]]) -> None:
    """Refuse an *encoder* that answers differently from its models; *alone* runs the models on a row each."""
    feeds = [_example(encoder, task) for task in range(len(encoder.names))]
    ladder = BodyLadder(encoder.weights, len(feeds))
    asked = [row for task, feed in enumerate(feeds) for row in rows_of(encoder, task, feed)]
    answers = _ran(ladder, asked, _plain)
    for name, count, mine, wanted in zip(encoder.names, encoder.classes, answers, alone(feeds), strict=True):
        lost = relative_difference(mine[None, :count], wanted)
        if not lost <= CLOSE:
            raise StitchError(f"{name} differs by {lost:.2g} as a body with kernels of its own")


def _example(encoder: BodyEncoder, task: int) -> Feed:
    """A random row of inputs."""
    rng = np.random.default_rng(task)
    length = min(_LENGTH, len(encoder.weights.positions))
    feed = {encoder.tokens: rng.integers(0, len(encoder.weights.words), (1, length))}
    if encoder.kinds and encoder.weights.kinds is not None:
        feed[encoder.kinds] = rng.integers(0, len(encoder.weights.kinds), (1, length))
    if encoder.shown:
        feed[encoder.shown] = np.array([[at not in _HIDDEN for at in range(length)]], np.int64)
    return feed


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.float().cpu().numpy().copy()
    return array
