"""The search for the fastest shape of the fused kernel, with a kernel and a clock that are made up."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # as the tests of the kernel itself need it, in the same process

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stitching.nets import tiny
from weft_stitch.lowering import lower
from weft_stitch.reading.alignment import align
from weft_stitch.running import kernel_shapes
from weft_stitch.running.kernel_shapes import FLOAT_SHAPES, shapes
from weft_stitch.running.module import FusedConv, Shape, StitchedModule, torch


class Bench:
    """Compiles nothing, and says that the smallest tiles are the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = tiny()
        module = StitchedModule(lower(align(made.nets), made.planted, "fused", align=4))
        self.layers = [each for each in module.modules() if isinstance(each, FusedConv)]
        self.trials = [(each, torch.zeros(3, 4, 4, each.packed.inputs), None) for each in self.layers]
        self.compiled: list[Any] = []
        self.timed: list[Shape] = []
        monkeypatch.setattr("weft_stitch.running.kernel.fused_kernel", self)
        monkeypatch.setattr(kernel_shapes, "replay_seconds", self.seconds)
        self.layer = self.layers[0]

    def warmup(self, *arguments: Any, grid: Any, **settings: Any) -> None:
        self.compiled.append(settings)

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        self.timed.append(self.layer.shape)
        return float(self.layer.shape.tall * self.layer.shape.wide)

    def found(self, at: int, enough: Callable[[], bool], compiled: set[Any]) -> Shape:
        self.layer = self.layers[at]
        return kernel_shapes._fastest(*self.trials[at], compiled, enough)


def test_every_shape_is_compiled_once_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    compiled = kernel_shapes._compile(bench.trials, lambda: False)
    assert len(compiled) == len(bench.compiled) > len(FLOAT_SHAPES)
    for at, layer in enumerate(bench.layers):
        bench.timed.clear()
        assert bench.found(at, lambda: False, compiled) == min(shapes(layer), key=lambda shape: shape.tall * shape.wide)
        assert bench.timed == list(shapes(layer))


def test_where_it_is_enough_only_what_is_compiled_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    compiled = kernel_shapes._compile(bench.trials, lambda: len(bench.compiled) >= len(bench.layers))
    assert len(bench.layers) <= len(bench.compiled) < 2 * len(bench.layers) + 64
    for at, layer in enumerate(bench.layers):
        bench.timed.clear()
        ready = [each for each in shapes(layer) if kernel_shapes._compile_job(*bench.trials[at], each)[0] in compiled]
        bench.found(at, lambda: False, compiled)
        assert bench.timed == (ready or [next(shapes(layer))])
        bench.timed.clear()
        bench.found(at, lambda: True, compiled)
        assert len(bench.timed) == 1, "one is found all the same"
    nothing = kernel_shapes._compile(bench.trials, lambda: True)
    assert nothing == set() and bench.found(0, lambda: True, nothing) == next(shapes(bench.layers[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("taps", [1, 9])
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 4), (4, 16), (16, 32), (64, 256)])
def test_every_layer_has_a_shape_to_try(inputs: int, outputs: int, taps: int, dtype: Any) -> None:
    kernel = (3, 3) if taps == 9 else (1, 1)
    packed = SimpleNamespace(
        window=SimpleNamespace(kernel=kernel), inputs=inputs, targets=[[SimpleNamespace(span=outputs)]]
    )
    layer: Any = SimpleNamespace(packed=packed, weights=torch.zeros(1, dtype=dtype))
    found = list(shapes(layer))
    assert found and all(shape.wide < 2 * max(16, outputs) for shape in found)
