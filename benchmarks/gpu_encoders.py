"""Fine-tuned encoders as one stitched body on a GPU, compared with other methods: time, weights and error of each.

Models are a 12-layer encoder of width 768 with random weights, fine-tuned by adapters of rank 16 in every product, or
in the head alone; one request of each model, in fp16. All methods of a configuration get the same tokens, are one CUDA
graph each and take turns. Errors are relative to the models run alone in float32. Rows are written at once.

    python benchmarks/gpu_encoders.py
    python benchmarks/gpu_encoders.py --tasks 4 32 --tokens 16 --resume

It needs torch and triton with CUDA, and of weft's own requirements only numpy.
"""

from __future__ import annotations

import argparse
import gc
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import stitch_gpu  # makes the package ready where its requirements are missing
import torch
from gpu_encoder_rivals import (
    NAMES,
    Alone,
    Batched,
    Merged,
    PlainParts,
    Reference,
    ServerParts,
    merged,
)
from stitch_ways import Forked, error
from torch.nn import functional

from weft_stitch.running.body_rows import PackedRows, TokenRequest, pack
from weft_stitch.running.fused_body import (
    LIBRARY,
    BodyLayer,
    BodyWeights,
    FusedBody,
    OwnHead,
    RowNorm,
    SharedProduct,
    TileShape,
    launch_attention,
)
from weft_stitch.running.gpu_timing import RivalWay, prepare, settle, times_ms
from weft_stitch.running.kernel_shapes import replay_seconds, tune_body

RESULTS = Path(__file__).parent / "results" / "gpu_encoders.json"
LAYERS, WIDTH, HEADS, WORDS, POSITIONS, CLASSES = 12, 768, 12, 30522, 512, 3
RANK = 16
TUNED = {"rank 16": RANK, "own heads": 0}
BODY, ONE = "body", "one model"
MIXED = (128, 7, 64, 16, 33, 100, 1, 48)
"""Lengths of a batch that is only checked."""


class Configuration(NamedTuple):
    tuned: str
    tasks: int
    tokens: int

    @property
    def granule(self) -> int:
        """Rows of a model are a multiple of it: lengths that are not are filled up."""
        return 128 if self.tokens % 128 == 0 else 16


class Maker:
    """Draws models."""

    def __init__(self, models: int, rank: int, device: str, dtype: torch.dtype) -> None:
        self.models, self.rank, self.device, self.dtype = models, rank, device, dtype
        self._random = torch.Generator(device).manual_seed(0)

    def drawn(self, *sizes: int, spread: float = 0.02, mean: float = 0.0) -> torch.Tensor:
        return (mean + spread * torch.randn(*sizes, generator=self._random, device=self.device)).to(self.dtype)

    def product(self, depth: int, width: int, sections: int = 1) -> SharedProduct:
        shared = self.drawn(depth, width, spread=depth**-0.5), self.drawn(1, width)
        if not self.rank:
            return SharedProduct(*shared)
        down = self.drawn(self.models, sections, self.rank, depth, spread=depth**-0.5)
        return SharedProduct(*shared, down, self.drawn(self.models, self.rank, width, spread=0.3 * self.rank**-0.5))

    def norm(self) -> RowNorm:
        return RowNorm(self.drawn(1, WIDTH, mean=1.0), self.drawn(1, WIDTH), 1e-12)

    def head(self, width: int) -> OwnHead:
        spread = WIDTH**-0.5
        return OwnHead(self.drawn(self.models, WIDTH, width, spread=spread), self.drawn(self.models, width))

    def layer(self) -> BodyLayer:
        return BodyLayer(
            self.product(WIDTH, 3 * WIDTH, 3), self.product(WIDTH, WIDTH), self.norm(),
            self.product(WIDTH, 4 * WIDTH), self.product(4 * WIDTH, WIDTH), self.norm(),
        )  # fmt: skip

    def weights(self, layers: int) -> BodyWeights:
        tables = self.drawn(WORDS, WIDTH, spread=1.0), self.drawn(POSITIONS, WIDTH, spread=1.0)
        body = [self.layer() for _ in range(layers)]
        return BodyWeights(*tables, self.norm(), body, self.head(WIDTH), self.head(CLASSES), HEADS)


class Stock:
    """Models of one kind, as many as any configuration takes; whole weights for the ways that need them."""

    def __init__(self, tuned: str, models: int, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.weights = Maker(models, TUNED[tuned], settings.device, settings.dtype).weights(settings.layers)
        self.whole = merged(self.weights, models)
        self.shapes: dict[Any, Any] = {}

    def first(self, models: int) -> tuple[BodyWeights, Merged]:
        """Of so many models; views, not copies."""

        def head(each: OwnHead) -> OwnHead:
            return OwnHead(each.weight[:models], each.bias[:models])

        weights = self.weights._replace(pooler=head(self.weights.pooler), classifier=head(self.weights.classifier))
        layers = [
            layer._replace(**{name: _first(getattr(layer, name), models) for name in NAMES}) for layer in weights.layers
        ]
        return weights._replace(layers=layers), self.whole

    def apart_bytes(self, models: int) -> int:
        """What so many models hold apart."""
        rest = [array for layer in self.weights.layers for array in (*layer.attention_norm[:2], *layer.outer_norm[:2])]
        rest += [getattr(layer, name).bias for layer in self.weights.layers for name in NAMES]
        rest += [self.weights.words, self.weights.positions, *self.weights.embedding_norm[:2]]
        products = [weight[0] for layer in self.whole.layers for weight in layer.values()]
        heads = [weight[0] for head in (self.weights.pooler, self.weights.classifier) for weight in head]
        return models * sum(array.nbytes for array in (*rest, *products, *heads))


def _first(product: SharedProduct, models: int) -> SharedProduct:
    if product.down is None or product.up is None:
        return product
    return SharedProduct(product.weight, product.bias, product.down[:models], product.up[:models])


class Bench:
    """One configuration on the device."""

    def __init__(self, given: Configuration, stock: Stock, settings: argparse.Namespace) -> None:
        self.given, self.stock, self.settings = given, stock, settings
        self.weights, self.whole = stock.first(given.tasks)
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, WORDS, (given.tasks, given.tokens), generator=random).to(settings.device)
        self.packed = pack([TokenRequest(task, given.tokens) for task in range(given.tasks)], given.granule)
        self.tables = self.packed.tables(settings.device)
        self.rows: list[dict[str, Any]] = []

    def measure(self) -> list[dict[str, Any]]:
        runs, kept = {}, []  # a graph reads what its way holds
        for name, make in self.ways():
            row: dict[str, Any] = {**self.given._asdict(), "way": name, "ms": None, "weight_bytes": None, "error": None}
            self.rows.append(row)
            try:
                way, row["weight_bytes"], wanted = make()
                run = prepare(RivalWay(name, way, (self.tokens,), row["weight_bytes"], None))
                row["error"] = error(run.outputs, wanted())
                row["added_bytes"] = run.added_bytes
                runs[name] = run
                kept.append(way)
            except Exception as problem:  # one way's failure must not cost the others their numbers
                row["note"] = f"{type(problem).__name__}: {str(problem).strip()[:200]}"
                traceback.print_exc(limit=6)
        write(self.settings.out, self.settings, self.rows)  # should the device fail, it is not tried again
        for name, ms in times_ms(runs, rounds=self.settings.rounds, replays=self.settings.replays).items():
            next(row for row in self.rows if row["way"] == name)["ms"] = ms
        return self.rows

    def ways(self) -> Iterator[tuple[str, Callable[[], tuple[Any, int, Callable[[], Any]]]]]:
        """Each way: what runs it, the bytes of its weights, and what it shall answer."""
        apart, ranked = self.stock.apart_bytes(self.given.tasks), bool(TUNED[self.given.tuned])
        yield BODY, lambda: (self.body(), self.weights.nbytes, lambda: self.expected)
        yield ONE, lambda: (self.alone(0), self.stock.apart_bytes(1), lambda: self.expected_of_one)
        if ranked:
            yield "plain parts", lambda: (PlainParts(self.weights), self.weights.nbytes, lambda: self.expected)
            yield "server's parts", lambda: (self.server(), self.weights.nbytes, lambda: self.expected)
            yield "batched", lambda: (Batched(*self.all_whole()), apart, lambda: self.expected)
        every = [self.alone(task) for task in range(self.given.tasks)]

        def in_turn(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(encoder(mine)[0] for encoder, mine in zip(every, tokens.split(1), strict=True))

        def forked() -> Callable[..., tuple[torch.Tensor, ...]]:
            streams = Forked(every)  # type: ignore[arg-type]
            return lambda tokens: streams(*tokens.split(1))

        yield "streams", lambda: (forked(), apart, lambda: self.expected)
        yield "one by one", lambda: (in_turn, apart, lambda: self.expected)

    def body(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        body = FusedBody(self.weights, self.stock.shapes)
        self._tune(body)
        laid, longest = self.tokens.flatten(), self.packed.longest
        return lambda _: tuple(body(laid, self.tables, longest).unbind())

    def _tune(self, body: FusedBody) -> None:
        began_s = perf_counter()
        if self.settings.device != "cuda":
            return
        result = tune_body(body, self.tables, self.settings.dtype)
        self.stock.shapes = dict(body.shapes)
        print(f"  tuned in {perf_counter() - began_s:.1f} s")
        said = ", ".join(f"{early.value} {1e3 * body:.3f}" for early, body in result.bodies.items())
        print(f"    started early, ms: {said}")
        for name, times in result.products.items():
            best = sorted(times.items(), key=lambda each: each[1])
            said = ", ".join(f"{_short(shape)} {1e6 * time_s:.1f}" for shape, time_s in best[:5])
            print(f"    {name:6} us: {said}", flush=True)

    def server(self) -> ServerParts:
        made = ServerParts(self.weights, self.tables)
        if self.settings.device == "cuda":
            made.tune()
        print(f"  server's parts: {', '.join(f'{name} {tuple(each)}' for name, each in made.shapes.items())}")
        return made

    def alone(self, model: int) -> Alone:
        return Alone(self.weights, self.whole, model)

    def all_whole(self) -> tuple[BodyWeights, Merged]:
        models = self.given.tasks
        return self.weights, Merged(
            [{name: stack[:models] for name, stack in layer.items()} for layer in self.whole.layers]
        )

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        return [Reference(self.weights, task)(self.tokens[task : task + 1])[0] for task in range(self.given.tasks)]

    @cached_property
    def expected_of_one(self) -> list[torch.Tensor]:
        return list(Reference(self.weights, 0)(self.tokens))


def _short(shape: TileShape) -> str:
    if shape == LIBRARY:
        return "torch"
    parts = f" in {shape.parts}" if shape.parts > 1 else ""
    return f"{shape.tall}x{shape.wide}x{shape.deep}{parts}{' before' if shape.before else ''}"


def mixed_error(stock: Stock, settings: argparse.Namespace) -> float:
    """A batch of different lengths, models out of order and several requests of some: the largest difference."""
    weights, _ = stock.first(4)
    requests = [TokenRequest((3 * number) % 4, length) for number, length in enumerate(MIXED)]
    packed: PackedRows = pack(requests, 16, rows=640)
    random = torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, WORDS, (request.length,), generator=random) for request in requests]
    laid = torch.from_numpy(packed.lay_out([token.numpy() for token in tokens])).to(settings.device)
    tables = packed.tables(settings.device, room=16)
    result = FusedBody(weights)(laid, tables, packed.longest)
    wanted = [
        Reference(weights, request.model)(mine[None].to(settings.device))[0]
        for request, mine in zip(requests, tokens, strict=True)
    ]
    return error(list(result[: len(wanted)]), wanted)


def attention_us(given: Configuration, device: str) -> dict[str, float]:
    """One attention by the body's kernel and by torch."""
    packed = pack([TokenRequest(task, given.tokens) for task in range(given.tasks)], given.granule)
    x = torch.randn(packed.rows, 3 * WIDTH, device=device, dtype=torch.float16)
    tables = packed.tables(device)
    parts = x.view(given.tasks, given.tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    ways: dict[str, Callable[[], Any]] = {
        "body": partial(launch_attention, x, HEADS, tables, given.tokens),
        "torch": partial(functional.scaled_dot_product_attention, *parts),
    }
    return {name: 1e6 * replay_seconds(run) for name, run in ways.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    one = next((row["ms"] for row in rows if row["way"] == ONE), None)
    lines = []
    for row in rows:
        ms, ratio = row["ms"], f"{row['ms'] / one:6.2f}" if row["ms"] and one else "     -"
        said = "       -" if ms is None else f"{ms:8.3f}"
        size = "-" if row["weight_bytes"] is None else f"{row['weight_bytes'] / 1e6:.0f}"
        wrong = "-" if row["error"] is None else f"{row['error']:.1e}"
        lines.append(f"  {row['way']:28}{said} ms {ratio}{size:>8} MB{wrong:>10}  {row.get('note', '')}")
    return "\n".join(lines)


def write(path: Path, settings: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """The file with *rows* in place of those of the same configurations and ways."""
    new = {_key(row) for row in rows}
    kept = [row for row in read(path) if _key(row) not in new]
    result = {
        "machine": stitch_gpu.described_machine(settings.device),
        "versions": stitch_gpu.versions(),
        "settings": {
            "layers": settings.layers,
            "width": WIDTH,
            "dtype": str(settings.dtype),
            "rounds": settings.rounds,
        },
        "rows": [*kept, *rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(stitch_gpu.text(result))


def read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*Configuration._fields, "way"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tuned", nargs="*", choices=TUNED, default=list(TUNED))
    parser.add_argument("--tasks", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="leave out configurations that the file has")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing after this")
    parser.add_argument("--device", default="cuda")
    settings = parser.parse_args()
    settings.dtype = torch.float16 if settings.device == "cuda" else torch.float32
    began_s = perf_counter()
    have = {_key(row)[:-1] for row in read(settings.out)} if settings.resume else set()
    for tuned in settings.tuned:
        stock = Stock(tuned, max(settings.tasks), settings)
        with torch.no_grad():
            print(f"{tuned}: a mixed batch differs by {mixed_error(stock, settings):.1e}", flush=True)
        for given in (Configuration(tuned, tasks, tokens) for tasks in settings.tasks for tokens in settings.tokens):
            if given in have or perf_counter() - began_s > settings.budget_s:
                continue
            print(f"{tuned}, T = {given.tasks}, {given.tokens} tokens")
            with torch.no_grad():
                if settings.device == "cuda":
                    print(f"  attention us: {attention_us(given, settings.device)}", flush=True)
                rows = Bench(given, stock, settings).measure()
            write(settings.out, settings, rows)
            print(f"{table(rows)}\n  {perf_counter() - began_s:.0f} s in all\n", flush=True)
            settle()
        del stock
        settle()


if __name__ == "__main__":
    gc.freeze()
    main()
