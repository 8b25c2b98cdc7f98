"""Convolutions in slabs give what convolutions give, whatever their kernel, stride, pads, groups and tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.graphs import assert_close, execute, separately
from tests.stitching.nets import TINY, images, tiny
from weft_stitch.graph import DYNAMIC, Builder, Graph
from weft_stitch.lowering import lower
from weft_stitch.reading.alignment import align
from weft_stitch.slabs import slab_layers, slabs


class Convolution:
    """A graph of one convolution, to which a test adds what follows."""

    def __init__(self, shape, outs, kernel, *, strides=(1, 1), pads=(0, 0, 0, 0), groups=1, bias=True, dynamic=False):
        rows, ins, height, width = shape
        self.rng = np.random.default_rng(0)
        self.shape = shape
        self.builder = Builder("one")
        self.builder.layer = "conv"
        lead = DYNAMIC if dynamic else rows
        source = self.builder.input("x", (lead, ins, height, width))
        weight = self.numbers(outs, ins // groups, *kernel)
        tall = (height + pads[0] + pads[2] - kernel[0]) // strides[0] + 1
        wide = (width + pads[1] + pads[3] - kernel[1]) // strides[1] + 1
        self.output = (lead, outs, tall, wide)
        names = [self.builder.constant(weight, "weight", weight=True)]
        names += [self.builder.constant(self.numbers(outs), "bias", weight=True)] if bias else []
        window = {"kernel_shape": list(kernel), "strides": list(strides), "pads": list(pads), "dilations": [1, 1]}
        self.last = self.builder.add("Conv", source, *names, shape=self.output, **window, group=groups)

    def numbers(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def add(self, op, *others, **attributes):
        self.last = self.builder.add(op, self.last, *others, shape=self.output, **attributes)

    def table(self, op, rows):
        self.add(op, self.builder.constant(self.numbers(rows, self.output[1], 1, 1), "table"))

    def finish(self) -> Graph:
        self.builder.output(self.last, "y")
        return self.builder.finish()

    def check(self) -> Graph:
        graph = self.finish()
        cut = slabs(graph)
        pictures = [self.numbers(*self.shape)]
        assert_close(execute(cut, pictures), execute(graph, pictures))
        return cut


@settings(max_examples=25)
@given(
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    extra=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    groups=st.integers(1, 2),
    rows=st.integers(1, 3),
    bias=st.booleans(),
)
def test_any_convolution_in_slabs_is_the_same(kernel, strides, pads, extra, groups, rows, bias):
    shape = (rows, 2 * groups, kernel[0] + extra[0], kernel[1] + extra[1])
    Convolution(shape, 3 * groups, kernel, strides=strides, pads=pads, groups=groups, bias=bias).check()


@pytest.mark.parametrize("per_row", [("Mul",), ("Add",), ("Mul", "Add"), ()])
def test_tables_become_part_of_it(per_row):
    conv = Convolution((3, 2, 6, 5), 4, (3, 3), pads=(1, 1, 1, 1))
    for op in ("Mul", "Add"):
        conv.table(op, 3 if op in per_row else 1)
    conv.add("Relu")
    ops = [step.op for step in conv.check().steps]
    assert "Mul" not in ops and "Add" not in ops and ops.count("Conv") == 2


def test_what_follows_a_table_by_row_is_done_before_the_shape_is_restored():
    """The runtime joins a sum and an activation to a convolution only if nothing is between them."""
    conv = Convolution((3, 2, 6, 6), 2, (3, 3), pads=(1, 1, 1, 1))
    conv.table("Mul", 3)
    conv.add("Add", "x")
    conv.add("Relu")
    ops = [step.op for step in conv.check().steps]
    last = len(ops) - 1 - ops[::-1].index("Conv")
    assert [op for op in ops[last:] if op != "Reshape"] == ["Conv", "Add", "Relu", "Identity"]
    assert ops[last + 1 : ops.index("Relu")].count("Reshape") <= 1  # of the other operand


def test_a_value_read_twice_keeps_its_table():
    conv = Convolution((2, 2, 6, 6), 2, (3, 3), pads=(1, 1, 1, 1))
    raw = conv.last
    conv.table("Mul", 2)
    conv.add("Add", raw)
    conv.check()


def test_rows_may_be_known_only_at_run_time():
    conv = Convolution((3, 2, 7, 8), 4, (7, 7), strides=(2, 2), pads=(3, 3, 3, 3), dynamic=True)
    conv.add("Relu")
    conv.check()


def test_wide_kernels_with_a_stride_have_their_columns_sorted():
    ops = [step.op for step in Convolution((1, 3, 32, 32), 6, (7, 7), strides=(2, 2), pads=(3, 3, 3, 3)).check().steps]
    assert "Transpose" in ops


def test_without_a_stride_the_weights_take_no_more():
    graph = Convolution((1, 3, 8, 8), 6, (3, 3), pads=(1, 1, 1, 1)).finish()
    cut = slabs(graph)
    assert cut.weight_bytes == graph.weight_bytes
    names = sorted(step.inputs[1] for step in cut.steps if step.op == "Conv" and step.inputs[1] in cut.weights)
    assert len(names) == 1 and cut.constants[names[0]].shape == (18, 3, 1, 3)


def test_only_the_named_layers_change():
    graph = Convolution((1, 3, 8, 8), 6, (3, 3)).finish()
    assert slab_layers(graph) == {"conv"}
    assert slabs(graph, {"another"}).steps == graph.steps
    assert len(slabs(graph, {"conv"}).steps) > len(graph.steps)


@pytest.mark.parametrize(("outs", "kernel", "groups"), [(4, (1, 1), 1), (4, (1, 5), 1), (2, (3, 3), 2)])
def test_what_cannot_be_cut_is_left_alone(outs, kernel, groups):
    graph = Convolution((2, 2, 6, 6), outs, kernel, groups=groups).finish()
    assert not slab_layers(graph)
    assert slabs(graph).steps == graph.steps


@pytest.mark.parametrize("form", ["mts", "grouped", "split", "half", "separate"])
@pytest.mark.parametrize("architecture", TINY)
def test_stitched_models_in_slabs_answer_like_the_models(architecture, form):
    models = tiny(architecture)
    graph = slabs(lower(align(models.nets), models.planted, form))
    pictures = images(models.nets)
    assert_close(execute(graph, pictures), separately(models.nets, pictures))
