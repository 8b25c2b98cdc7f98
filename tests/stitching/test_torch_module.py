"""A stitched graph in torch equals the models, can be exported, and says what it cannot do."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.stitching.graphs import assert_close, execute, separately
from tests.stitching.nets import TINY, images, tiny
from weft.base.errors import StitchError
from weft_stitch import stitch
from weft_stitch.forms import FORMS
from weft_stitch.graph import Builder
from weft_stitch.lowering import lower
from weft_stitch.reading.alignment import align
from weft_stitch.running import operators
from weft_stitch.running.kernel_shapes import tune
from weft_stitch.running.module import StitchedModule

torch.set_num_threads(1)


def answers(module, pictures):
    with torch.no_grad():
        return [each.numpy() for each in module(*map(torch.from_numpy, pictures))]


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("form", FORMS)
def test_a_module_equals_the_models(form, architecture):
    made = tiny(architecture, widths=[1.0, 0.8, 1.2], batches=2)
    pictures = images(made.nets)
    for channels_last in (False, True):
        module = StitchedModule(lower(align(made.nets), made.planted, form), channels_last=channels_last)
        assert_close(answers(module, pictures), separately(made.nets, pictures))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("grouped", "fused")])
def test_rows_known_at_run_time(form):
    made = tiny("tiny-mobile", norm="per_task")
    module = StitchedModule(lower(align(made.nets), made.planted, form, dynamic=True))
    for rows in ([1, 2, 3], [2, 0, 1]):
        pictures = images([replace(net, batch=each) for net, each in zip(made.nets, rows, strict=True)])
        assert_close(answers(module, pictures), separately(made.nets, pictures))


def test_a_module_can_be_exported():
    made = tiny(tasks=2)
    module = StitchedModule(lower(align(made.nets), made.planted, "split"))
    pictures = images(made.nets)
    exported = torch.export.export(module, tuple(map(torch.from_numpy, pictures)))
    assert_close(answers(exported.module(), pictures), separately(made.nets, pictures))


def test_constants_are_buffers_of_the_asked_type():
    made = tiny(tasks=2, norm="per_task")
    graph = lower(align(made.nets), made.planted, "mts")
    module = StitchedModule(graph, dtype=torch.float64)
    kinds = {buffer.dtype for buffer in module.buffers()}
    assert kinds == {torch.float64, torch.bool}
    pictures = [each.astype(np.float64) for each in images(made.nets)]
    assert_close(answers(module, pictures), separately(made.nets, pictures))
    stored = sum(buffer.numel() for buffer in StitchedModule(graph).buffers())
    assert stored <= sum(array.size for array in graph.constants.values())


def test_what_it_cannot_do_it_says():
    made = tiny(tasks=2)
    module = StitchedModule(lower(align(made.nets), made.planted, "split"))
    pictures = list(map(torch.from_numpy, images(made.nets)))
    with pytest.raises(StitchError, match=r"takes 2 tensors \(tinynet-0\.image, tinynet-1\.image\), not 1"):
        module(pictures[0])
    with pytest.raises(StitchError, match=r"tinynet-1\.image was planned as .1, 3.*, not .2, 3.*dynamic=True"):
        module(pictures[0], torch.cat([pictures[1]] * 2))
    with pytest.raises(StitchError, match=r"planned as .1, 3, 8, 8., not .1, 3, 8, 9.$"):
        module(pictures[0], torch.zeros(1, 3, 8, 9))
    with pytest.raises(StitchError, match="a CUDA graph needs the module and its inputs on a CUDA device, not on cpu"):
        module.captured(*pictures)
    builder = Builder("strange")
    builder.layer = "norm"
    builder.output(builder.add("NonZero", builder.input("x", (1, 2)), shape=(1, 2)), "y")
    with pytest.raises(StitchError, match="norm: the operator NonZero does not run in torch"):
        StitchedModule(builder.finish())


def test_without_torch_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(StitchError, match=r"pip install 'weft\[torch\]'"):
        runpy.run_path(operators.__file__)


def ones(*shape):
    return np.ones(shape, np.float32)


PICTURE = (2, 3, 7, 6)
EVEN = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
UNEVEN = {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}
STEPS = {
    "uneven pads": ("Conv", [ones(2, 3, 3, 3)], {"kernel_shape": [3, 3], "pads": [0, 1, 2, 0]}, (2, 2, 7, 5)),
    "dilated": ("Conv", [ones(3, 1, 2, 2)], {"kernel_shape": [2, 2], "dilations": [2, 1], "group": 3}, (2, 3, 5, 5)),
    "max": ("MaxPool", [], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]}, (2, 3, 4, 4)),
    "max, uneven": ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}, (2, 3, 4, 3)),
    "average": ("AveragePool", [], {**EVEN, "count_include_pad": 0}, PICTURE),
    "average, pads too": ("AveragePool", [], {**EVEN, "count_include_pad": 1}, PICTURE),
    "average, uneven": ("AveragePool", [], {**UNEVEN, "count_include_pad": 0}, PICTURE),
    "average, uneven, pads too": ("AveragePool", [], {**UNEVEN, "count_include_pad": 1}, PICTURE),
    "mean": ("GlobalAveragePool", [], {}, (2, 3, 1, 1)),
    "most": ("GlobalMaxPool", [], {}, (2, 3, 1, 1)),
    "flat": ("Flatten", [], {"axis": 2}, (6, 42)),
    "turned": ("Transpose", [], {"perm": [0, 2, 3, 1]}, (2, 7, 6, 3)),
    "padded": ("Pad", [np.array([0, 1, 0, 0, 0, 0, 2, 0])], {}, (2, 4, 9, 6)),
    "cut": ("Slice", [np.array([1, 0]), np.array([2**62, -1]), np.array([2, 3]), np.array([2, 1])], {}, (2, 3, 3, 5)),
    "picked": ("Gather", [np.array([2, 0])], {"axis": 1}, (2, 2, 7, 6)),
    "picked as a table": ("Gather", [np.array([[2, 0]])], {"axis": 1}, (2, 1, 2, 7, 6)),
    "reshaped": ("Reshape", [np.array([0, -1, 6])], {}, (2, 21, 6)),
    "longer": ("Unsqueeze", [np.array([0, -1])], {}, (1, 2, 3, 7, 6, 1)),
    "mean over axes": ("ReduceMean", [np.array([1])], {"keepdims": 1}, (2, 1, 7, 6)),
    "largest over axes": ("ReduceMax", [np.array([2, 3])], {"keepdims": 0}, (2, 3)),
    "sum": ("ReduceSum", [np.array([2, 3])], {"keepdims": 1}, (2, 3, 1, 1)),
    "softmax": ("Softmax", [], {"axis": 1}, PICTURE),
    "clip": ("Clip", [np.array(-0.5, np.float32), np.array(0.25, np.float32)], {}, PICTURE),
    "elu": ("Elu", [], {"alpha": 0.5}, PICTURE),
    "leaky": ("LeakyRelu", [], {"alpha": 0.2}, PICTURE),
    "gelu": ("Gelu", [], {"approximate": "tanh"}, PICTURE),
    "gelu, exact": ("Gelu", [], {}, PICTURE),
    "hard sigmoid": ("HardSigmoid", [], {"alpha": 0.3, "beta": 0.4}, PICTURE),
    **{each: (each, [], {}, PICTURE) for each in (
        "Relu", "Sigmoid", "Tanh", "HardSwish", "Softplus", "Exp", "Neg", "Abs", "Erf", "Identity"
    )},
    **{each: (each, [2 * ones(1, 3, 1, 1)], {}, PICTURE) for each in ("Add", "Sub", "Mul", "Div", "Pow")},
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_an_operator_does_what_onnx_says(step):
    op, constants, attributes, shape = STEPS[step]
    builder = Builder(step)
    x = builder.input("x", PICTURE)
    names = [builder.constant(each) for each in constants]
    builder.output(builder.add(op, x, *names, shape=shape, **attributes), "y")
    graph = builder.finish()
    given = np.random.default_rng(0).standard_normal(PICTURE, np.float32)
    given = np.abs(given) if op == "Pow" else given
    wanted = execute(graph, [given])
    assert wanted[0].shape == shape
    assert_close(answers(StitchedModule(graph), [given]), wanted)


@pytest.mark.parametrize("settings", [{"transB": 1}, {"alpha": 0.5, "beta": 2.0}, {"transA": 1, "transB": 1}])
def test_a_product_of_matrices(settings):
    builder = Builder("gemm")
    x = builder.input("x", (3, 4) if settings.get("transA") else (4, 3))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 3) if settings.get("transB") else (3, 5), np.float32)
    bias = builder.constant(rng.standard_normal(5, np.float32))
    builder.output(builder.add("Gemm", x, builder.constant(weight), bias, shape=(4, 5), **settings), "y")
    graph = builder.finish()
    given = rng.standard_normal(graph.inputs[0].shape, np.float32)
    assert_close(answers(StitchedModule(graph), [given]), execute(graph, [given]))


def test_tiles_are_not_timed_on_the_cpu():
    made = tiny(tasks=2)
    module = StitchedModule(lower(align(made.nets), made.planted, "split"))
    with pytest.raises(StitchError, match="tiles are timed on CUDA; the example is on cpu"):
        tune(module, *map(torch.from_numpy, images(made.nets)))


def test_what_was_stitched_is_shown_in_a_line():
    (made,) = stitch(tiny(tasks=2).nets, form="split").groups
    assert repr(made) == "Stitched(tinynet-0, tinynet-1; form split, rows 1, 1)"
