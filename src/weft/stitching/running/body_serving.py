"""Fine-tuned models answered by one body on a GPU: ``FusedEncoder``, of what ``stitch_body`` made.

On CUDA a batch is one CUDA graph, out of a ladder: for so many rows, requests and tokens of the longest of them. Rungs
are made and tuned when they are first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.errors import StitchError, unknown_name
from weft.stitching.bodies.bench import BodyBench
from weft.stitching.bodies.body import Body
from weft.stitching.bodies.whole_run import BodyStitching
from weft.stitching.net import Array
from weft.stitching.running.body_reading import BodyEncoder, read_encoder
from weft.stitching.running.body_rows import FINEST, PackedRows, RowTables, TokenRequest, pack
from weft.stitching.running.checking import relative_difference
from weft.stitching.running.fused_body import FusedBody
from weft.stitching.running.operators import Tensor, torch

LEAST_ROWS = 64
CLOSE = 1e-3
"""By so much of its largest number an answer may differ from the model's own, in float32."""


class BodyRung(NamedTuple):
    """A captured batch."""

    graph: Any
    tokens: Tensor
    tables: RowTables
    answers: Tensor


class FusedEncoder:
    """Answers requests for any of the models, in one batch."""

    def __init__(self, made: BodyStitching, device: Any = "cuda", dtype: Any = None) -> None:
        """dtype: what is computed in, half precision on CUDA if not said."""
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        _check(made, read_encoder(made.body))
        self._dtype = dtype or (torch.float16 if cuda else torch.float32)
        self.encoder = read_encoder(made.body, self.device, self._dtype)
        self._rungs: dict[tuple[int, int, int], BodyRung] = {}

    def __call__(self, requests: Sequence[tuple[str, Array]]) -> list[Array]:
        """What the models named answer to their tokens, in the order of the requests."""
        names = self.encoder.names
        for name, _ in requests:
            if name not in names:
                raise StitchError(unknown_name("model", name, names))
        asked = [TokenRequest(names.index(name), len(tokens)) for name, tokens in requests]
        given, words = [np.asarray(tokens, np.int64) for _, tokens in requests], len(self.encoder.weights.words)
        for each in given:
            if len(each) and not 0 <= each.min() <= each.max() < words:
                raise StitchError(f"tokens from {each.min()} to {each.max()}: there are {words} words, from 0")
        found = self._run(asked, given)
        return [row[: self.encoder.classes[each.model]] for row, each in zip(found, asked, strict=True)]

    def _run(self, asked: Sequence[TokenRequest], tokens: Sequence[Array]) -> Array:
        packed = pack(asked)
        most = len(self.encoder.weights.positions)
        if packed.longest > most:
            raise StitchError(f"a request of {packed.longest} tokens: there are {most} positions")
        with torch.no_grad():
            if self.device.type != "cuda":
                laid = torch.from_numpy(packed.laid(tokens))
                return _numpy(FusedBody(self.encoder.weights)(laid, packed.tables("cpu"), packed.longest))
            longest = min(most, max(FINEST, _up(packed.longest)))
            sizes = max(LEAST_ROWS, _up(packed.rows)), longest, _up(len(asked))
            with torch.cuda.device(self.device):
                if sizes not in self._rungs:
                    self._rungs[sizes] = self._captured(*sizes)
                return _replayed(self._rungs[sizes], pack(asked, rows=sizes[0]), tokens)

    def _captured(self, rows: int, longest: int, room: int) -> BodyRung:
        from weft.stitching.running.body_shapes import tune

        count = min(room, max(1, rows // longest))
        tables = pack([TokenRequest(0, longest)] * count, rows=rows).tables(self.device, room)
        body, tokens = FusedBody(self.encoder.weights), torch.zeros(rows, dtype=torch.int64, device=self.device)
        tune(body, tables, self._dtype)
        body(tokens, tables, longest)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answers = body(tokens, tables, longest)
        return BodyRung(graph, tokens, tables, answers)


def _replayed(rung: BodyRung, packed: PackedRows, tokens: Sequence[Array]) -> Array:
    rung.tokens.copy_(torch.from_numpy(packed.laid(tokens)))
    for place, table in zip(rung.tables, packed.tables("cpu", len(rung.tables.first)), strict=True):
        place.copy_(table)
    rung.graph.replay()
    return _numpy(rung.answers[: len(tokens)])


def _check(made: BodyStitching, encoder: BodyEncoder) -> None:
    """Refuse an *encoder* that does not answer as the models do."""
    bench = BodyBench(made.body, list(made.files.values()), 1)
    rng, body = np.random.default_rng(0), FusedBody(encoder.weights)
    for task, name in enumerate(encoder.names):
        tokens = rng.integers(0, len(encoder.weights.words), 5 + task % 4)
        wanted = next(iter(bench.alone(task, _feed(made.body, task, encoder.tokens, tokens)).values()))
        packed = pack([TokenRequest(task, len(tokens))])
        with torch.no_grad():
            found = body(torch.from_numpy(packed.laid([tokens])), packed.tables("cpu"), packed.longest)
        lost = relative_difference(_numpy(found)[:, : encoder.classes[task]], wanted)
        if not lost <= CLOSE:
            raise StitchError(f"{name} differs by {lost:.2g} as a body with kernels of its own; run it on a CPU")


def _feed(body: Body, task: int, tokens: str, given: Array) -> dict[str, Array]:
    """Inputs of one row: masks that hide nothing, and zeros where something else is looked up."""
    looked = {
        body.inputs[each.output]
        for step in body.steps
        if step.node.op == "Gather" and step.inputs[0] is None
        for each in step.inputs
        if each is not None and each.step < 0
    }
    rest = {
        name: np.full((1, len(given)), int(name not in looked), port.dtype) for name, port in body.ports[task].items()
    }
    return rest | {tokens: given[None].astype(body.ports[task][tokens].dtype)}


def _up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _numpy(tensor: Tensor) -> Array:
    found: Array = tensor.float().cpu().numpy()
    return found
