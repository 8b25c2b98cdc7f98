"""What a stitched file says of its models: they are read back from it as they were, and a form is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.families import TANGLED, random_family
from tests.stitching.graphs import assert_close
from tests.stitching.nets import TINY, images, run, tiny
from weft.base.errors import StitchError
from weft.runtime.metadata import FAMILY_KEY
from weft_stitch import stitch
from weft_stitch.family import Family, Sharing, part
from weft_stitch.file_description import family_metadata, metadata, read_stitched, rebuild_family
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.layouts import tidy
from weft_stitch.lowering import lower
from weft_stitch.net import Net, Op, assemble
from weft_stitch.onnx_writer import write_onnx
from weft_stitch.reading.alignment import align
from weft_stitch.running.module import StitchedModule, torch
from weft_stitch.slabs import slabs

FORMS = ("mts", "split", "half", "separate")
LAST_DIGIT = 2e-7
"""Of a number of float32."""


def read(family: Family, sharing: Sharing, graph: Graph) -> tuple[Family, Sharing]:
    return rebuild_family(family_metadata(family, sharing, graph)[FAMILY_KEY], graph.constants.__getitem__)


def assert_same_sharing(found: Sharing, given: Sharing) -> None:
    wanted = tidy(given).spaces
    assert list(found.spaces) == list(wanted)
    for name, space in wanted.items():
        assert found[name].widths == space.widths
        for mine, theirs in zip(found[name].blocks, space.blocks, strict=True):
            assert mine.tasks == theirs.tasks
            assert all((mine.members[task] == theirs.members[task]).all() for task in mine.tasks)


def assert_same_op(found: Op, wanted: Op, scaled: float) -> None:
    for name in ("kind", "window", "groups", "function", "settings"):
        assert getattr(found, name) == getattr(wanted, name)
    for name, within in (("weight", scaled), ("scale", 0.0), ("shift", 0.0)):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.dtype == theirs.dtype
            np.testing.assert_allclose(mine, theirs, rtol=within, atol=0)


def assert_same(found: Family, wanted: Family, scaled: float = LAST_DIGIT) -> None:
    """The same layers, weights, sizes and ports; kernels that were *scaled* may differ in their last digit."""
    assert (found.inputs, dict(found.values), list(found.outputs)) == (
        wanted.inputs, dict(wanted.values), list(wanted.outputs)
    )  # fmt: skip
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        assert (mine.inputs, mine.output, mine.name) == (theirs.inputs, theirs.output, theirs.name)
        for one, other in zip(mine.ops, theirs.ops, strict=True):
            assert_same_op(one, other, scaled)
    for mine, theirs in zip(found.nets, wanted.nets, strict=True):
        assert (mine.name, mine.batch) == (theirs.name, theirs.batch)
        for ports in ("inputs", "outputs"):
            pairs = zip(getattr(mine, ports), getattr(theirs, ports), strict=True)
            assert all((one.name, one.shape) == (other.name, other.shape) for one, other in pairs)


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("form", FORMS)
def test_models_are_read_back_from_any_form(architecture: str, form: str) -> None:
    made = tiny(architecture)
    family = align(made.nets)
    graph = lower(family, made.planted, form, dynamic=True)
    for each in (graph, slabs(graph)):
        found, sharing = read(family, made.planted, each)
        assert_same_sharing(sharing, made.planted)
        assert_same(found, family)


@given(TANGLED, st.sampled_from(FORMS), st.booleans())
@settings(max_examples=20, deadline=None)
def test_tangled_families_are_read_back(planted, form, cut) -> None:
    graph = lower(planted.family, planted.sharing, form, dynamic=True)
    found, sharing = read(planted.family, planted.sharing, slabs(graph) if cut else graph)
    assert_same_sharing(sharing, planted.sharing)
    assert_same(found, planted.family)


def test_channels_that_some_share_and_filters_of_zeros_are_read_back() -> None:
    planted = random_family(("conv", "residual", "dense"), 3, 5, clusters=[[0, 1], [1, 2]], zeros=0.5)
    for form in FORMS:
        found, sharing = read(
            planted.family, planted.sharing, lower(planted.family, planted.sharing, form, dynamic=True)
        )
        assert_same_sharing(sharing, planted.sharing)
        assert_same(found, planted.family)


def test_some_of_the_models_are_read_back() -> None:
    made = tiny()
    family, sharing = part(align(made.nets), made.planted, (1, 2))
    found, read_sharing = read(family, sharing, lower(family, sharing, "split", dynamic=True))
    assert_same_sharing(read_sharing, sharing)
    assert_same(found, family)


def test_a_scale_of_zero_loses_nothing_that_counts() -> None:
    made = tiny()
    family = align(made.nets)
    first = next(layer for layer in family.layers if layer.op.kind == "affine")
    for op in first.ops:
        op.scale[:2] = 0
    pictures = images(family.nets)
    for form in FORMS:
        found, _ = read(family, made.planted, lower(family, made.planted, form, dynamic=True))
        for net, wanted, picture in zip(found.nets, family.nets, pictures, strict=True):
            assert_close(run(net, picture), run(wanted, picture))


def test_what_models_do_alone_is_read_back() -> None:
    """One of them ends otherwise."""
    made = tiny()

    def longer(net: Net) -> Net:
        last = net.outputs[0]
        more = Op("more", "unary", (last.value,), "more", function="Tanh")
        return assemble(net.name, net.inputs, [*net.ops, more], (type(last)("logits", "more", last.shape),))

    nets = (made.nets[0], longer(made.nets[1]), made.nets[2])
    family = align(nets, islands=True)
    assert any(family.tails)
    graph = lower(family, made.planted, "split", dynamic=True)
    found, sharing = read(family, made.planted, graph)
    assert_same(found, family)
    again = lower(found, sharing, "split", dynamic=True)
    pictures = [torch.from_numpy(each) for each in images(nets)]
    for mine, theirs in zip(StitchedModule(again)(*pictures), StitchedModule(graph)(*pictures), strict=True):
        assert_close([mine.numpy()], [theirs.numpy()])


def test_a_file_has_its_weights_once_and_gives_the_fused_form(tmp_path: Path) -> None:
    made = tiny("tiny-mobile")
    family = align(made.nets)
    graph = lower(family, made.planted, "split", dynamic=True)
    told = metadata(family, family.batches)
    write_onnx(graph, tmp_path / "plain.onnx", told)
    write_onnx(graph, tmp_path / "told.onnx", told | family_metadata(family, made.planted, graph))
    plain, rich = (onnx.load(tmp_path / f"{name}.onnx").graph for name in ("plain", "told"))
    assert plain == rich, "nothing but metadata"
    found, sharing = read_stitched(tmp_path / "told.onnx")
    module = StitchedModule(lower(found, sharing, "fused", batches=[2, 1, 3], align=4))
    pictures = [each.repeat(rows, axis=0) for each, rows in zip(images(family.nets), (2, 1, 3), strict=True)]
    answers = module(*map(torch.from_numpy, pictures))
    for net, picture, answer in zip(family.nets, pictures, answers, strict=True):
        assert_close([answer.numpy()], run(net, picture))


def test_weft_stitch_tells_it(tmp_path: Path) -> None:
    made = stitch(_files(tmp_path), dynamic=True, measure=False, check=False)
    made.to_onnx(tmp_path / "all.onnx")
    found, sharing = read_stitched(tmp_path / "all.onnx")
    assert_same_sharing(sharing, made.sharing)
    assert_same(found, made.family)


def _files(folder: Path) -> list[Path]:
    paths = []
    for net in tiny().nets:
        paths.append(folder / f"{net.name}.onnx")
        write_onnx(plain_graph(net, dynamic=True), paths[-1])
    return paths


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "is of version 2, not 1; stitch it again"),
        ({"layers": 3}, "cannot be read: layers"),
        ({"wieghts": []}, "unknown key 'wieghts'"),
        ({"kernels": {}}, "does not fit its weights"),
        ({"spaces": {}}, "does not fit its weights"),
        ({"missing": "conv3 is odd"}, "conv3 is odd"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict[str, object], complaint: str) -> None:
    made = tiny()
    family = align(made.nets)
    graph = lower(family, made.planted, "split", dynamic=True)
    text = json.dumps(json.loads(family_metadata(family, made.planted, graph)[FAMILY_KEY]) | change)
    with pytest.raises(StitchError) as error:
        rebuild_family(text, graph.constants.__getitem__)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_weight_of_another_size_is_told() -> None:
    made = tiny()
    family = align(made.nets)
    graph = lower(family, made.planted, "split", dynamic=True)
    with pytest.raises(StitchError, match="does not fit its weights"):
        rebuild_family(family_metadata(family, made.planted, graph)[FAMILY_KEY], lambda name: graph.constants[name][:1])


def test_a_part_that_is_missing_is_told() -> None:
    made = tiny()
    family = align(made.nets)
    graph = lower(family, made.planted, "split", dynamic=True)
    noted = json.loads(family_metadata(family, made.planted, graph)[FAMILY_KEY])
    value = next(value for value, kernels in noted["kernels"].items() if len(kernels) > 1)
    del noted["kernels"][value][-1]
    with pytest.raises(StitchError, match="parts of its kernels are missing"):
        rebuild_family(json.dumps(noted), graph.constants.__getitem__)
