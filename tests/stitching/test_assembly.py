"""The call that goes from models to one graph, its report, groups of models, and the check against the models."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import weft
import weft_stitch
from tests import ROOT
from tests.stitching.files import model, node, numbers
from tests.stitching.graphs import assert_close, execute, separately
from tests.stitching.nets import images, tiny
from weft.base.errors import StitchError
from weft.runtime.metadata import FAMILY_KEY, STITCHED_KEY
from weft_stitch import Stitched, generate, stitch
from weft_stitch.assembly import assemble, uniform
from weft_stitch.cost import Modelled, count
from weft_stitch.discovery import discover
from weft_stitch.family import model_kinds, part, wire
from weft_stitch.forms import FORMS
from weft_stitch.graph import signature
from weft_stitch.graph_steps import plain_graph
from weft_stitch.layouts import pieces
from weft_stitch.lowering import formed_layers
from weft_stitch.making.generator import save_nets
from weft_stitch.net import Net
from weft_stitch.planning.budget import BudgetLimits, stitch_groups
from weft_stitch.planning.grouping import LimitsUnmet
from weft_stitch.reading.alignment import align
from weft_stitch.running.sessions import largest_difference
from weft_stitch.sharing_map import write_sharing
from weft_stitch.summary import SLABBED

SIZE = 20
"""Channels of the layer that the formulas are tried on."""


@pytest.fixture(scope="module")
def nets() -> tuple[Net, ...]:
    return tiny().nets


@pytest.fixture(scope="module")
def files(nets: tuple[Net, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return save_nets(nets, tmp_path_factory.mktemp("models"))


def module(seed: int, shared: torch.nn.Module) -> torch.nn.Module:
    """A net whose first layer is *shared*."""
    torch.manual_seed(seed)
    own = torch.nn.Conv2d(6, 4, 3, padding=1)
    return torch.nn.Sequential(shared, torch.nn.ReLU(), own, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()


# --- the call ---


def graph_of(models, *, cost=None, **settings) -> Stitched:
    """One graph by the described machine, or by *cost*; nothing is run."""
    if cost is not None:
        family = align(models)
        return assemble(family, discover(family), cost=cost, **settings)
    return stitch(models, measure=False, check=False, **{"slabs": False} | settings).groups[0]


def test_nets_files_and_models_in_memory_give_one_graph(nets, files):
    made = graph_of([nets[0], str(files[1]), onnx.load(files[2])], names=["a", "b", "c"], form="split")
    assert made.names == ("a", "b", "c") and set(made.forms.values()) == {"split"}
    assert [tensor.name for tensor in made.graph.outputs] == ["a.logits", "b.logits", "c.logits"]
    pictures = images(nets)
    assert_close(execute(made.graph, pictures), separately(nets, pictures))


def test_torch_modules_become_one_torch_module():
    torch.manual_seed(0)
    shared = torch.nn.Conv2d(3, 6, 3)
    models = [module(seed, shared) for seed in (1, 2)]
    made = graph_of(models, example_inputs=(torch.zeros(2, 3, 8, 8),), names=["one", "two"], form="split")
    pictures = [torch.randn(2, 3, 8, 8) for _ in models]
    with torch.no_grad():
        for got, model, given in zip(made.module()(*pictures), models, pictures, strict=True):
            torch.testing.assert_close(got, model(given), rtol=1e-5, atol=1e-5)
    assert made.report.kernels.by_all == shared.weight.numel()
    different = [(torch.zeros(rows, 3, 8, 8),) for rows in (1, 3)]
    assert graph_of(models, example_inputs=different, form="mts").batches == (1, 3)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_in_torch_also_where_channels_are_filtered_one_by_one(form):
    nets = tiny("tiny-mobile", tasks=2).nets
    made = graph_of(nets, form=form)
    pictures = images(nets)
    with torch.no_grad():
        found = made.module()(*map(torch.from_numpy, pictures))
    assert_close([each.numpy() for each in found], separately(nets, pictures))


def test_a_plan_is_the_default_and_goes_by_the_cost_it_is_given(nets):
    class Launches:
        """Only steps count: many small ones lose."""

        def seconds(self, graphs):
            return [float(count(graph).launches) for graph in graphs]

    planned = graph_of(nets, cost=Launches(), slack=0)
    assert planned.plan is not None and count(planned.graph).launches == min(planned.plan.seconds.values())
    mapping = graph_of(nets, form=planned.forms)
    assert mapping.plan is None and count(mapping.graph).launches == count(planned.graph).launches


def test_slack_is_kept_to_and_weights_are_saved(nets):
    plans = {slack: graph_of(nets, slack=slack) for slack in (0, 0.3, 9)}
    seconds = {slack: made.report.stitched.predicted_s for slack, made in plans.items()}
    sizes = [made.graph.weight_bytes for made in plans.values()]
    assert sizes[0] > sizes[1] >= sizes[2]
    assert seconds[0] < seconds[0.3] <= 1.3 * seconds[0]
    unique = 4 * plans[0].report.kernels.unique
    assert sizes[2] <= unique + 0.05 * (sizes[0] - unique)


def test_forms_used_throughout_are_light_enough_for_much_slack(nets):
    made = graph_of(nets, slack=99)
    assert made.graph.weight_bytes <= min(graph_of(nets, form=form).graph.weight_bytes for form in ("split", "half"))


def test_slack_holds_for_whole_graphs_whatever_layers_take_alone(nets):
    class Whole:
        """Layers are cheap where weights are few; whole graphs take as many seconds as they have steps."""

        def seconds(self, graphs):
            whole = [len(graph.inputs) == len(graph.outputs) == len(nets) and len(graph.steps) > 9 for graph in graphs]
            pairs = zip(graphs, whole, strict=True)
            return [float(count(graph).launches) if all_ else 1e-9 * graph.weight_bytes for graph, all_ in pairs]

    made = graph_of(nets, cost=Whole(), slack=0.1)
    allowed = [each for each in made.contest.plans if each.weight_bytes <= made.contest.most_bytes]
    least = min(count(made.planned(each).graph).launches for each in allowed)
    assert len({each.own_s for each in allowed}) > 2 and count(made.graph).launches <= 1.1 * least


@pytest.mark.parametrize(
    "settings",
    [{"widths": [1, 1.3, 0.8]}, pytest.param({"sharing": 0.0, "widths": [1, 1.3, 0.8]}, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_plan_stores_no_more_than_the_models_unless_only_speed_counts(settings, dynamic):
    nets = generate("tinynet", 3, **{"sharing": 0.5, **settings}).nets
    ways = graph_of(nets, dynamic=dynamic, slabs=True).report
    assert ways.stitched.weight_bytes <= ways.sequential.weight_bytes
    if not dynamic:
        assert graph_of(nets, slabs=True, slack=0).report.stitched.weight_bytes > ways.sequential.weight_bytes


def test_a_cost_is_asked_once_for_graphs_that_differ_in_numbers(nets):
    asked = []

    class Counting:
        def seconds(self, graphs):
            asked.extend(signature(graph) for graph in graphs)
            return Modelled().seconds(graphs)

    graph_of(nets, cost=Counting(), slack=0.3)
    assert len(asked) == len(set(asked)) > 10


def test_sharing_can_be_given_as_a_map_or_a_file(nets, tmp_path):
    found = graph_of(nets, form="split")
    write_sharing(tmp_path / "map.json", found.sharing, found.family)
    for given in (found.sharing, tmp_path / "map.json", str(tmp_path / "map.json")):
        assert graph_of(nets, form="split", sharing=given).graph.weight_bytes == found.graph.weight_bytes


def test_files_are_written_with_the_names_of_the_models(nets, tmp_path):
    made = graph_of(nets, form="split", dynamic=True)
    made.to_onnx(tmp_path / "all.onnx")
    entries = {each.key: each.value for each in onnx.load(tmp_path / "all.onnx").metadata_props}
    assert entries == made.metadata and entries.keys() == {STITCHED_KEY, FAMILY_KEY}
    fixed = graph_of(nets, form="split")
    assert fixed.metadata.keys() == {STITCHED_KEY}, "which nobody serves"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"form": "spilt"}, "did you mean split"),
        ({"names": ["a"]}, "1 names for 3 models"),
        ({"batches": [1, 2]}, "2 batches for 3 models"),
        ({"example_inputs": [(1,), (2,)]}, "2 example_inputs for 3 models"),
    ],
)
def test_settings_that_do_not_fit_are_named(nets, settings, complaint):
    with pytest.raises(StitchError, match=complaint):
        graph_of(nets, **settings)


def test_things_that_are_no_models_are_refused(files):
    with pytest.raises(StitchError, match="is one model; give a list"):
        graph_of(str(files[0]))
    with pytest.raises(StitchError, match="int is no model"):
        graph_of([1])
    with pytest.raises(StitchError, match="give what it is called with as example_inputs"):
        graph_of([torch.nn.ReLU().eval()])
    with pytest.raises(StitchError, match="no models to stitch"):
        graph_of([])


# --- the report ---


def test_the_report_counts_the_graph_and_the_models(nets):
    made = graph_of(nets, form="split")
    report, counts = made.report, count(made.graph)
    assert report.models == made.names and report.form == "split"
    assert (report.stitched.macs, report.stitched.weight_bytes) == (counts.macs, counts.weight_bytes)
    alone = [count(plain_graph(net)) for net in nets]
    assert report.sequential.macs == sum(each.macs for each in alone)
    assert report.sequential.activation_bytes == max(each.activation_bytes for each in alone)
    wiring, layers = wire(made.family), formed_layers(made.family)
    unique = sum(piece.array.size for layer in layers for piece in pieces(layer, wiring, made.sharing))
    assert report.kernels.unique == unique


def test_a_dynamic_graph_is_counted_with_the_rows_it_was_made_for(nets):
    fixed, free = (graph_of(nets, form="split", dynamic=dynamic).report.stitched for dynamic in (False, True))
    assert (free.macs, free.weight_bytes, free.predicted_s) == (fixed.macs, fixed.weight_bytes, fixed.predicted_s)
    assert free.launches > fixed.launches


def test_forms_that_cannot_do_it_say_why(nets):
    made = graph_of([replace(net, batch=task + 1) for task, net in enumerate(nets)], form="split")
    summary = made.summarise(compare=("mts", "grouped"))
    assert [way.name for way in summary.ways] == ["sequential", "stitched", "mts"]
    assert "the batches [1, 2, 3] are not equal" in summary.impossible["grouped"]


def test_what_slabs_gain_without_stitching_is_told():
    nets = generate("tinynet", 2, resolution=32).nets
    made = graph_of(nets, slabs=True, slack=0)
    assert made.slabs
    ways = {way.name: way for way in made.summarise(compare=("grouped",)).ways}
    assert list(ways) == ["sequential", "stitched", SLABBED, "grouped"]
    assert ways[SLABBED].predicted_s < ways["sequential"].predicted_s


@pytest.mark.parametrize(("ratio", "tasks"), [(0.8, 3), (0.5, 2), (0.0, 2), (1.0, 3)])
def test_the_formulas_of_the_documentation_hold_for_an_inner_layer(ratio, tasks):
    """See the table of forms in docs/stitching.md."""
    made = graph_of(generate("tinynet", tasks, sharing=ratio).nets, form="split")
    wide = ratio + tasks * (1 - ratio)
    unique = (ratio**2 + tasks * (1 - ratio**2)) / tasks
    macs = {"separate": 1, "grouped": 1, "split": 1, "fused": 1, "mts": wide**2, "half": ratio * wide + 1 - ratio}
    weights = {"separate": 1, "grouped": 1, "split": unique, "fused": unique, "mts": wide**2 / tasks, "half": unique}
    layer = "block1.1.conv"
    for form in FORMS:
        found = count(made.in_form(form).graph).layers[layer]
        assert found.macs == pytest.approx(macs[form] * tasks * SIZE * SIZE * 9 * 16), form
        if not (form in ("separate", "grouped") and ratio == 1):  # equal kernels are one constant
            assert found.weight_bytes == pytest.approx(weights[form] * tasks * SIZE * SIZE * 9 * 4), form


def upsampling(seed: int) -> onnx.ModelProto:
    """A transposed convolution, which is an island, between two others."""
    weights = {"a": numbers(6, 4, 3, 3), "up": numbers(6, 6, 2, 2, seed=seed), "b": numbers(5, 6, 1, 1)}
    nodes = [
        node("Conv", ["x", "a"], ["p"], name="conv_a"),
        node("ConvTranspose", ["p", "up"], ["q"], name="up", strides=[2, 2]),
        node("Conv", ["q", "b"], ["y"], name="conv_b"),
    ]
    return model(nodes, weights)


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_what_is_different_is_what_is_stored_also_with_islands(seeds):
    made = graph_of([upsampling(seed) for seed in seeds], names=["a", "b"], islands=True, form="separate")
    assert 4 * made.report.kernels.unique == made.report.stitched.weight_bytes
    assert 4 * made.report.kernels.separate == made.report.sequential.weight_bytes


def test_what_adds_up_slabs_is_no_weight():
    nets = generate("tinynet", 2, resolution=32).nets
    made = graph_of(nets, slabs=True, form="separate")
    assert made.slabs and made.report.stitched.weight_bytes == made.report.sequential.weight_bytes
    assert made.report.stitched.table_bytes > graph_of(nets, form="separate").report.stitched.table_bytes


# --- some of the models ---


def test_a_part_of_a_family_equals_its_models():
    nets = tiny(tasks=4, clusters=[[0, 2], [1, 3]]).nets
    family = align(nets)
    sharing = discover(family)
    for tasks in ((1, 3), (0,), (3, 2, 0)):
        fewer, shared = part(family, sharing, tasks)
        mine = [nets[task] for task in tasks]
        pictures = images(mine)
        assert_close(execute(assemble(fewer, shared, form="split").graph, pictures), separately(mine, pictures))
    _, shared = part(family, sharing, (0, 2))
    assert sum(space.shared_width for space in shared.spaces.values()) > sum(
        space.shared_width for space in sharing.spaces.values()
    )


def test_models_are_alike_that_have_one_size_and_share_with_the_same():
    alike = tiny(tasks=4, classes=3)
    family = align(alike.nets)
    assert len(set(model_kinds(family, discover(family)))) == 1
    circles = align(tiny(tasks=4, classes=3, clusters=[[0, 2], [1, 3]]).nets)
    first, second, third, fourth = model_kinds(circles, discover(circles))
    assert first == third != second == fourth
    rows = align([replace(net, batch=1 + task % 2) for task, net in enumerate(alike.nets)])
    assert len(set(model_kinds(rows, discover(rows)))) == 2


def test_groups_follow_the_circles_that_share():
    """Two pairs share everything inside and nothing between them: in the paper's form each is best by itself."""
    one, two = (generate("tiny-vgg", 1, seed=seed).nets[0] for seed in (1, 2))
    nets = [replace(net, name=name) for net, name in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))]
    family = align(nets)
    groups = stitch_groups(family, discover(family), BudgetLimits(memory_bytes=1 << 30), form="mts")
    assert [made.names for made in groups] == [("a", "c"), ("b", "d")]


def test_a_refusal_tells_the_best_of_all_ways_to_group():
    family = align(tiny(classes=3).nets)
    sharing = discover(family)
    with pytest.raises(LimitsUnmet) as too_small:
        stitch_groups(family, sharing, BudgetLimits(memory_bytes=1000))
    least = int(too_small.value.smallest.bytes)
    assert stitch_groups(family, sharing, BudgetLimits(memory_bytes=least))
    with pytest.raises(LimitsUnmet):
        stitch_groups(family, sharing, BudgetLimits(memory_bytes=least - 1))
    with pytest.raises(LimitsUnmet) as too_soon:
        stitch_groups(family, sharing, BudgetLimits(seconds=1e-9))
    fast = assemble(family, sharing, slack=0).report.stitched
    assert too_soon.value.fastest.seconds <= fast.predicted_s


# --- the check ---


def test_the_check_sees_a_weight_that_is_wrong(nets, files):
    made = graph_of(files, form="split")
    close = largest_difference(made.graph, made.family, files, made.batches)
    assert 0 <= close.relative < 1e-5
    name = next(name for name in sorted(made.graph.weights) if made.graph.constants[name].ndim == 4)
    spoilt = replace(made.graph, constants={**made.graph.constants, name: made.graph.constants[name] * 1.01})
    assert largest_difference(spoilt, made.family, files, made.batches).relative > 1e-4
    infinite = replace(made.graph, constants={**made.graph.constants, name: made.graph.constants[name] * np.inf})
    assert largest_difference(infinite, made.family, files, made.batches).relative == np.inf


def test_the_check_runs_models_a_batch_at_a_time_and_nets_without_a_file(nets, files):
    made = graph_of(files, form="mts", dynamic=True)
    rows = (3, 1, 2)  # the files are fixed to one row
    assert largest_difference(made.graph, made.family, [files[0], None, files[2]], rows).relative < 1e-5


# --- the package's face ---


def test_its_names_are_those_of_the_page():
    page = (ROOT / "docs/stitching.md").read_text()
    assert [name for name in weft_stitch.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_what_is_made_is_shown_in_a_line(nets):
    made = stitch(nets, form="split", measure=False)
    kilobytes = made.after.weight_bytes, made.before.weight_bytes
    weights = "{:.3g} MB of weights, {:.3g} MB before".format(*(each / 1e6 for each in kilobytes))
    assert repr(made) == f"Stitching(tinynet-0, tinynet-1, tinynet-2 as one graph; {weights})"
    assert all("\n" not in repr(each) and len(repr(each)) < 120 for each in (made, *made.groups, *made.summaries))


def test_its_names_exist_and_are_sorted():
    assert all(hasattr(weft_stitch, name) for name in weft_stitch.__all__)
    assert list(weft_stitch.__all__) == sorted(weft_stitch.__all__)
    assert weft.stitch is weft_stitch.stitch
    with pytest.raises(AttributeError, match="no attribute 'stich'"):
        weft_stitch.stich  # noqa: B018


def test_stitching_needs_numpy_and_onnx_alone():
    """Also without the rest of the package, as on a machine that has torch and no ONNX Runtime."""
    heavy = "torch", "onnxruntime", "pydantic", "numba", "matplotlib"
    code = f"""
import sys, types
package = types.ModuleType("weft")
package.__path__ = [{str(Path(weft.__file__).parent)!r}]
sys.modules["weft"] = package
from weft_stitch import generate, stitch
made = stitch(generate("tinynet", 2).nets, form="split", measure=False, check=False)
assert made.after.weight_bytes < made.before.weight_bytes
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_fused_falls_back_only_where_channels_are_filtered_one_by_one():
    family = align(tiny("tiny-mobile", tasks=2).nets)
    forms = uniform(family, "fused")
    deep = {layer.name for layer in family.layers if layer.op.depthwise}
    assert deep and {name for name, form in forms.items() if form == "split"} == deep
