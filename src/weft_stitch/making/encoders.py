"""Fine-tuned encoders without training: ``EncoderRecipe`` makes models of one base, as exporters write them.

All models have the base's weights, except where they were tuned: only in a head, in the last layers, in layers spread
over the depth, or by a low-rank part that was added to the products of queries and values (an adapter, merged).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.base.files import make_folder
from weft_stitch.graph import DYNAMIC, Builder, Graph
from weft_stitch.net import Array


class EncoderSize(NamedTuple):
    """The size of an encoder."""

    layers: int
    width: int
    heads: int
    tokens: int
    """Number of tokens in the vocabulary."""
    positions: int


ENCODERS = {
    "tiny-encoder": EncoderSize(2, 32, 4, 50, 64),
    "encoder": EncoderSize(6, 384, 12, 8192, 512),
    "base-encoder": EncoderSize(12, 768, 12, 30522, 512),
}
"""Name that a user may give -> size."""
SPREAD = 0.02
"""Standard deviation of the base's weights; tuning changes them by a tenth of it."""


@dataclass(frozen=True, eq=False)
class EncoderRecipe:
    """Describes the models to generate; ``graph`` generates one of them."""

    architecture: str
    tasks: int
    frozen: float | None = None
    """Fraction of the layers, from the first, that equal the base's; all by default, unless *full* is given."""
    full: float | None = None
    """Fraction of the layers, spread over the depth, that are each model's own."""
    rank: int | None = None
    """Rank of the update that is added to the products of queries and values."""
    classes: int | tuple[int, ...] = 3
    seed: int = 0
    drawn: dict[str, Array] = field(default_factory=dict, init=False, repr=False)
    """The base's weights that were drawn so far, by name and shape; all models begin with them."""

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise StitchError(f"{self.tasks} tasks: give 1 or more")
        if sum(option is not None for option in (self.frozen, self.full, self.rank)) > 1:
            raise StitchError("frozen, full and rank are three ways to tune a model; give one of them")
        for option_name, fraction in (("frozen", self.frozen), ("full", self.full)):
            if fraction is not None and not 0 <= fraction <= 1:
                raise StitchError(f"{option_name} = {fraction}: give a part of the layers, from 0 to 1")
        if self.rank is not None and not 1 <= self.rank <= self.size.width:
            raise StitchError(f"rank = {self.rank}: give a number from 1 to the width, {self.size.width}")
        if not isinstance(self.classes, int) and len(self.classes) != self.tasks:
            raise StitchError(f"{len(self.classes)} classes for {self.tasks} models; give one for each")

    @property
    def size(self) -> EncoderSize:
        return ENCODERS[self.architecture]

    @property
    def tuned(self) -> frozenset[int]:
        """The indices of the layers that are each model's own."""
        count = self.size.layers
        if self.full is not None:
            own = round(self.full * count)
            # the layers in the middle of *own* equal parts of the depth
            return frozenset(round((part + 0.5) * count / own - 0.5) for part in range(own)) if own else frozenset()
        return frozenset(range(round((1.0 if self.frozen is None else self.frozen) * count), count))

    def graph(self, task: int) -> Graph:
        """The model of *task*."""
        return _EncoderWriter(self, task).graph()

    def save(self, folder: Path) -> Iterator[Path]:
        """Write one model after another, and yield the files."""
        from weft_stitch.onnx_writer import write_onnx

        make_folder(folder)
        for task in range(self.tasks):
            path = folder / f"{self.architecture}-{task}.onnx"
            write_onnx(self.graph(task), path)
            yield path


class _EncoderWriter:
    """Writes the graph of one model."""

    def __init__(self, recipe: EncoderRecipe, task: int) -> None:
        self._recipe, self._task, self._size = recipe, task, recipe.size
        self._builder = Builder(f"{recipe.architecture}-{task}")
        self._own = False
        """Whether numbers drawn now are the model's own and not the base's."""

    def graph(self) -> Graph:
        """The whole model: embeddings, layers, pooler and classifier."""
        builder, size = self._builder, self._size
        ids = builder.input("input_ids", (DYNAMIC, DYNAMIC))
        attention_mask = builder.input("attention_mask", (DYNAMIC, DYNAMIC))
        hidden = self._normalise("embedding", self._embed(ids))
        mask = self._mask(attention_mask)
        for index in range(size.layers):
            self._own = index in self._recipe.tuned
            hidden = self._layer(f"layer{index}", hidden, mask)
        self._own = True
        classes = self._recipe.classes
        class_count = classes if isinstance(classes, int) else classes[self._task]
        first_token = self._op("Gather", hidden, builder.constant(np.array(0)), axis=1)
        pooled = self._op("Tanh", self._dense("pooler", first_token, size.width, size.width))
        logits = self._dense("classifier", pooled, size.width, class_count, shape=(DYNAMIC, class_count))
        builder.output(logits, "logits")
        finished = builder.finish()
        inputs = tuple(replace(port, dtype="int64", length="length") for port in finished.inputs)
        return replace(finished, inputs=inputs)

    def _embed(self, ids: str) -> str:
        """The embeddings of tokens and positions, summed: [rows, length, width]. *ids*: of the tokens."""
        builder, size = self._builder, self._size
        words = self._op("Gather", self._weight("words", (size.tokens, size.width)), ids)
        zero, one = builder.constant(np.array([0])), builder.constant(np.array([1]))
        length = self._op("Gather", self._op("Shape", ids), one)
        table = self._weight("positions", (1, size.positions, size.width))
        return self._op("Add", words, self._op("Slice", table, zero, length, one))

    def _mask(self, attention_mask: str) -> str:
        """What is added to the scores of attention: a very negative number at padding, else 0."""
        builder = self._builder
        expanded = self._op("Unsqueeze", attention_mask, builder.constant(np.array([1, 2])))
        # 1: the element type float
        padding = self._op("Sub", builder.constant(np.array(1, np.float32)), self._op("Cast", expanded, to=1))
        return self._op("Mul", padding, builder.constant(np.array(np.finfo(np.float32).min)))

    def _layer(self, name: str, hidden: str, mask: str) -> str:
        """A layer: attention and feed-forward, each with a residual sum and a norm; *mask*: what ``_mask`` returns."""
        width = self._size.width
        attended = self._attention(name, hidden, mask)
        hidden = self._normalise(f"{name}.attention", self._op("Add", hidden, attended))
        inner = self._op("Gelu", self._dense(f"{name}.up", hidden, width, 4 * width))
        outer = self._dense(f"{name}.down", inner, 4 * width, width)
        return self._normalise(f"{name}.output", self._op("Add", hidden, outer))

    def _attention(self, name: str, hidden: str, mask: str) -> str:
        """Multi-head self-attention with its output product."""
        builder, (_, width, heads, *_) = self._builder, self._size
        by_head = builder.constant(np.array([0, 0, heads, width // heads]))
        heads_first = []  # queries, keys (transposed) and values: [rows, heads, ...]
        for role, order in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
            dense = self._dense(f"{name}.{role}", hidden, width, width, adapted=role != "key")
            heads_first.append(self._op("Transpose", self._op("Reshape", dense, by_head), perm=order))
        scale = builder.constant(np.array((width // heads) ** -0.5, np.float32))
        scores = self._op("Mul", self._op("MatMul", heads_first[0], heads_first[1]), scale)
        weights = self._op("Softmax", self._op("Add", scores, mask), axis=-1)
        mixed = self._op("Transpose", self._op("MatMul", weights, heads_first[2]), perm=(0, 2, 1, 3))
        joined = self._op("Reshape", mixed, builder.constant(np.array([0, 0, width])))
        return self._dense(f"{name}.mixed", joined, width, width)

    def _normalise(self, name: str, value: str) -> str:
        """A layer norm with scale and shift."""
        width = self._size.width
        scale = self._builder.constant(1 + self._draw_weight(f"{name}.scale", (width,)))
        shift = self._builder.constant(self._draw_weight(f"{name}.shift", (width,)))
        return self._op("LayerNormalization", value, scale, shift, output=f"{name}.norm", axis=-1, epsilon=1e-12)

    def _dense(
        self, name: str, value: str, depth: int, width: int, *, adapted: bool = False, shape: tuple[int, ...] = ()
    ) -> str:
        """Add a fully connected layer: a product of *value* [.., depth] with a weight [depth, width], and a bias.

        With *adapted*, a low-rank update (LoRA) of the model's own is added to the weight, if the recipe has a rank.
        Its standard deviation is a tenth of the weight's.
        """
        weight = self._draw_weight(f"{name}.weight", (depth, width), depth**-0.5)
        rank = self._recipe.rank
        if adapted and rank:
            down = self._random(f"{name}.a", own=True).standard_normal((depth, rank), np.float32)
            up = self._random(f"{name}.b", own=True).standard_normal((rank, width), np.float32)
            weight = weight + np.float32(0.1 * (depth * rank) ** -0.5) * (down @ up)
        stored = self._builder.constant(weight, "weight", weight=True)
        bias = self._builder.constant(self._draw_weight(f"{name}.bias", (width,)))
        return self._op(
            "Add", self._op("MatMul", value, stored, output=f"{name}.product"), bias, output=name, shape=shape
        )

    def _weight(self, name: str, shape: tuple[int, ...]) -> str:
        """The name of a weight of the graph, drawn with standard deviation 1."""
        return self._builder.constant(self._draw_weight(name, shape, 1.0), "weight", weight=True)

    def _draw_weight(self, name: str, shape: tuple[int, ...], spread: float = SPREAD) -> Array:
        """A weight of the base, plus the model's own noise while ``_own``. The array is cached: do not write to it."""
        base_weights, key = self._recipe.drawn, f"{name} {shape}"
        if key not in base_weights:
            base_weights[key] = np.float32(spread) * self._random(name).standard_normal(shape, np.float32)
        weight = base_weights[key]
        if self._own:
            weight = weight + np.float32(0.1 * spread) * self._random(name, own=True).standard_normal(shape, np.float32)
        return weight

    def _random(self, name: str, *, own: bool = False) -> np.random.Generator:
        """A random generator for the base (by *name*), or for this model's *own* numbers."""
        return np.random.default_rng([self._recipe.seed, zlib.crc32(name.encode()), self._task + 1 if own else 0])

    def _op(self, op: str, *inputs: str, shape: tuple[int, ...] = (), **attributes: Any) -> str:
        """Add a step, and return the name of its output, whose *shape* is left out where no later step needs it."""
        return self._builder.add(op, *inputs, shape=shape, **attributes)
