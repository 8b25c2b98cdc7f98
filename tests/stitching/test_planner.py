"""The planner's choice is the cheapest that can be had, runs, and equals the models; costs are what they say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.graphs import assert_close, execute, separately
from tests.stitching.nets import TINY, images, tiny
from weft.base.errors import StitchError
from weft_stitch.assembly import PlanContest
from weft_stitch.cost import CPU, H200, Machine, Modelled, machine
from weft_stitch.graph import DYNAMIC, Builder, Graph, signature
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import formed_layers, lower
from weft_stitch.planning.planner import ANYWHERE, MIXED, Plan, lower_plan, plan
from weft_stitch.planning.segments import segments
from weft_stitch.reading.alignment import align
from weft_stitch.running.sessions import GraphRunner, GraphTimer, race

LAUNCHES = Machine("launches", 1.0, 10**9, 1e30, (1, 1, 1), 1e30)
"""A machine on which only the number of steps counts."""


def product_graph(rows=1, ins=4, outs=4, size=8, kernel=3, groups=1) -> Graph:
    builder = Builder("product")
    builder.layer = "conv"
    source = builder.input("x", (rows, ins, size, size))
    weight = builder.constant(np.zeros((outs, ins // groups, kernel, kernel), np.float32), "weight", weight=True)
    window = {"kernel_shape": [kernel, kernel], "pads": [kernel // 2] * 4, "strides": [1, 1], "group": groups}
    builder.output(builder.add("Conv", source, weight, shape=(rows, outs, size, size), **window), "y")
    return builder.finish()


def cost_of(graph: Graph, on: Machine = CPU) -> float:
    return Modelled(on).seconds([graph])[0]


@dataclass
class Recording:
    """A cost that remembers what it was asked."""

    asked: list[list[Graph]] = field(default_factory=list)

    def seconds(self, graphs):
        self.asked.append(list(graphs))
        return Modelled().seconds(graphs)


# --- costs ---


def test_a_convolution_costs_its_launch_its_copies_and_its_products():
    on = Machine("sums", 0.5, 1, 100.0, (1, 1, 1), 1e30, unfold_s=0.25, joins_rows=False)
    depth, positions, outs = 4 * 9, 64, 4
    assert cost_of(product_graph(), on) == pytest.approx(
        0.5 + 0.25 * depth * positions + outs * depth * positions / 100
    )


def test_sizes_are_rounded_up_to_tiles_and_tiles_to_waves():
    on = Machine("tiles", 0.0, 3, 1.0, (4, 16, 1), 1e30)
    one_tile_s = 4 * 16 * 36
    assert cost_of(product_graph(outs=5), on) == pytest.approx(3 * one_tile_s)  # 2 x 4 tiles, three at a time
    assert cost_of(product_graph(outs=8), on) == cost_of(product_graph(outs=5), on)


def test_pictures_share_tiles_only_where_rows_are_joined():
    apart = Machine("apart", 0.0, 1, 1.0, (4, 16, 1), 1e30, joins_rows=False)
    small = product_graph(rows=4, size=2)  # four positions of sixteen
    assert cost_of(small, apart) == 4 * cost_of(small, replace(apart, joins_rows=True))


def test_what_only_moves_bytes_costs_them_and_views_cost_nothing():
    builder = Builder("moves")
    source = builder.input("x", (1, 4, 8, 8))
    relu = builder.add("Relu", source, shape=(1, 4, 8, 8))
    builder.output(relu, "y")
    on = Machine("bytes", 2.0, 1, 1.0, (1, 1, 1), 8.0)
    assert cost_of(builder.finish(), on) == pytest.approx(2.0 + 2 * 4 * 256 / 8.0)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.sampled_from([CPU, H200]))
@settings(max_examples=15)
def test_more_work_never_costs_less(ins, outs, kernel, on):
    base = cost_of(product_graph(ins=ins, outs=outs, kernel=kernel), on)
    assert cost_of(product_graph(ins=ins + 1, outs=outs, kernel=kernel), on) >= base
    assert cost_of(product_graph(ins=ins, outs=outs, kernel=kernel, rows=2), on) >= base
    assert cost_of(product_graph(ins=ins, outs=outs, kernel=kernel, size=9), on) >= base


def test_layers_add_up_to_the_graph():
    models = tiny()
    graph = lower(align(models.nets), models.planted, "split")
    by_layer = Modelled().by_layer(graph)
    assert sum(by_layer.values()) == pytest.approx(cost_of(graph))
    assert {layer.name for layer in formed_layers(align(models.nets))} <= set(by_layer)


def test_rows_known_only_at_run_time_are_taken_as_one():
    models = tiny(tasks=2)
    graph = lower(align(models.nets), models.planted, "split", dynamic=True)
    assert DYNAMIC in graph.inputs[0].shape
    assert Modelled().seconds([graph])[0] > 0


def test_an_unknown_machine_is_named():
    assert machine("cpu") is CPU
    with pytest.raises(StitchError, match="unknown machine 'h100'; did you mean h200"):
        machine("h100")


# --- segments and signatures ---


@pytest.mark.parametrize("architecture", TINY)
def test_every_layer_is_in_one_segment_and_every_form_has_one(architecture):
    family = align(tiny(architecture).nets)
    found = segments(family)
    assert Counter(layer.name for each in found for layer in each.layers) == Counter(
        layer.name for layer in family.layers
    )
    assert [each.formed.name for each in found if each.formed] == [layer.name for layer in formed_layers(family)]
    known = set(family.inputs)
    for each in found:
        assert set(each.inputs) <= known
        known |= set(each.outputs)
    assert set(family.outputs) <= known


def test_signatures_tell_shapes_apart_and_numbers_not():
    one, two = (lower(align(tiny(seed=seed).nets), tiny(seed=seed).planted, "mts") for seed in (1, 2))
    assert one.constants.keys() == two.constants.keys()
    assert signature(one) == signature(two)
    assert signature(product_graph()) != signature(product_graph(outs=5)) != signature(product_graph(groups=2))


# --- plans ---


@pytest.mark.parametrize("architecture", TINY)
def test_a_plan_runs_and_equals_the_models(architecture):
    models = tiny(architecture)
    family = align(models.nets)
    chosen = plan(family, models.planted, Modelled(), slabs=True)
    pictures = images(models.nets)
    assert_close(execute(lower_plan(family, models.planted, chosen), pictures), separately(models.nets, pictures))
    assert set(chosen.forms) == {layer.name for layer in formed_layers(family)} == {each.layer for each in chosen.table}


def test_the_plan_is_the_cheapest_of_all_mixtures():
    """Three forms in every combination, as whole graphs, on machines that like different ones."""
    models = tiny("tiny-vgg", tasks=3)
    family = align(models.nets)
    names = [layer.name for layer in formed_layers(family)]
    forms = ("mts", "split", "separate")
    every = [
        lower(family, models.planted, dict(zip(names, each, strict=True))) for each in product(forms, repeat=len(names))
    ]
    kept = set()
    for on in (CPU, H200, LAUNCHES, replace(CPU, launch_s=1e-7), replace(CPU, launch_s=3e-5)):
        chosen = plan(family, models.planted, Modelled(on), forms=forms)
        assert chosen.seconds[chosen.name] == pytest.approx(min(Modelled(on).seconds(every)), rel=1e-9)
        kept.add(chosen.name)
    assert MIXED in kept and len(kept) > 1


@pytest.mark.parametrize("on", [CPU, H200])
def test_a_plan_is_never_worse_than_a_form_throughout(on):
    models = tiny("tiny-mobile", tasks=4)
    family = align(models.nets)
    chosen = plan(family, models.planted, Modelled(on))
    throughout = {form: cost_of(lower(family, models.planted, form), on) for form in ANYWHERE}
    assert chosen.seconds[chosen.name] <= min(throughout.values()) * (1 + 1e-9)
    for form in set(throughout) & set(chosen.seconds):
        assert chosen.seconds[form] == pytest.approx(throughout[form])


def test_a_form_throughout_is_kept_where_the_mixture_is_slower():
    class Grudge:
        """Pieces are as modelled, but of whole graphs it likes ``half`` alone."""

        def seconds(self, graphs):
            names = ["plan", *ANYWHERE]
            if len(graphs) != len(names):
                return Modelled().seconds(graphs)
            return [float(name != "half") for name in names]

    models = tiny()
    chosen = plan(align(models.nets), models.planted, Grudge())
    assert chosen.name == "half" and set(chosen.forms.values()) == {"half"}


def test_the_fused_form_can_be_planned_with():
    models = tiny("tiny-mobile", pruning=0.0)
    family = align(models.nets)
    chosen = plan(family, models.planted, Modelled(H200), forms=[*ANYWHERE, "fused"], align=8)
    assert "fused" in chosen.forms.values()
    graph = lower_plan(family, models.planted, chosen, align=8)
    assert any(step.op == "FusedConv" for step in graph.steps)
    assert chosen.seconds[chosen.name] == pytest.approx(cost_of(graph, H200))


def test_plans_do_not_change_from_run_to_run():
    models = tiny("tiny-dense")
    one, two = (plan(align(models.nets), models.planted, Modelled(), slabs=True) for _ in range(2))
    assert (one.name, one.forms, one.slabs, one.seconds, one.table) == (
        two.name, two.forms, two.slabs, two.seconds, two.table
    )  # fmt: skip


def test_equal_pieces_are_costed_once():
    cost = Recording()
    models = tiny()
    plan(align(models.nets), models.planted, cost, slabs=True)
    *pieces, whole = cost.asked
    counts = Counter(tuple(map(signature, graphs)) for graphs in pieces)
    assert max(counts.values()) == 1
    assert len(whole) == 1 + len(ANYWHERE)


def test_progress_names_layers_and_forms():
    said: list[str] = []
    models = tiny()
    family = align(models.nets)
    plan(family, models.planted, Modelled(), forms=["mts", "split"], progress=said.append)
    assert said == [f"{layer.name} in {form}" for layer in formed_layers(family) for form in ("mts", "split")] + [
        "comparing 2 whole graphs"  # the mixture is one of the forms
    ]


def test_weights_stay_under_a_cap_and_cost_time():
    models = tiny(tasks=4, sharing=0.9, pruning=0.0, norm="shared")
    family = align(models.nets)

    def planned(cap: int | None) -> tuple[Plan, int]:
        chosen = plan(family, models.planted, Modelled(), weight_cap_bytes=cap)
        return chosen, lower_plan(family, models.planted, chosen).weight_bytes

    free, most = planned(None)
    least = lower(family, models.planted, "split").weight_bytes
    assert least < most
    before = free.seconds[free.name]
    for cap in np.linspace(most, least, 3).astype(int).tolist():
        chosen, taken = planned(cap)
        assert taken <= cap
        assert chosen.seconds[chosen.name] >= before * (1 - 1e-9)
    with pytest.raises(StitchError, match=rf"take \d+ bytes at least, and {least // 2} are allowed"):
        planned(least // 2)


def test_forms_that_cannot_do_it_are_left_out():
    models = tiny(batches=[1, 2, 1])
    family = align(models.nets)
    chosen = plan(family, models.planted, Modelled())
    assert "grouped" not in {*chosen.forms.values(), *chosen.seconds, *chosen.table[0].seconds}
    with pytest.raises(StitchError, match=r"'grouped' cannot do it, the batches .* are not equal$"):
        plan(family, models.planted, Modelled(), forms=["grouped"])
    with pytest.raises(StitchError, match="unknown form 'spilt'; did you mean split"):
        plan(family, models.planted, Modelled(), forms=["spilt"])


def test_a_plan_for_any_rows_can_be_lowered_for_them():
    models = tiny()
    family = align(models.nets)
    chosen = plan(family, models.planted, Modelled(), dynamic=True, slabs=True)
    assert "grouped" not in chosen.forms.values()
    graph = lower_plan(family, models.planted, chosen, dynamic=True)
    pictures = [np.repeat(each, 2, axis=0) for each in images(models.nets)]
    assert_close(execute(graph, pictures), separately(models.nets, pictures))


# --- which of them ---


def contender(name: str, seconds: float, weight_bytes: int) -> Plan:
    return Plan(name, {}, frozenset(), {name: seconds}, (), weight_bytes)


def test_the_lightest_within_the_slack_of_the_fastest_is_chosen():
    plans = (contender(MIXED, 1.0, 90), contender("split", 1.2, 50), contender("half", 1.04, 70))
    assert [PlanContest(plans, slack).chosen.name for slack in (0.0, 0.05, 0.3)] == [MIXED, "half", "split"]


def test_times_taken_later_decide():
    """Whatever a plan was said to take: what is slow when all are run together is not chosen."""
    plans = (contender(MIXED, 1.0, 50), contender("grouped", 1.2, 90))
    found = PlanContest(plans, 0.05)
    assert found.choose() == 0 and found.choose([1.15, 1.0]) == 1 and found.choose([1.05, 1.0]) == 0


def test_more_weights_than_the_models_have_are_stored_only_if_there_is_no_other_way():
    plans = (contender("grouped", 1.0, 120), contender("separate", 3.0, 100), contender("split", 4.0, 60))
    assert PlanContest(plans, 0.05, 100).chosen.name == "separate"
    assert PlanContest(plans, 0.5, 100).chosen.name == "separate"  # neither is near the fastest
    assert PlanContest(plans, 3.0, 100).chosen.name == "split"
    assert PlanContest(plans[:1], 0.05, 100).chosen.name == "grouped"
    assert PlanContest(plans, 0.0).chosen.name == "grouped"


# --- the clock ---


def test_a_race_takes_turns_and_leaves_warm_ups_out():
    now = iter(range(1000))
    graphs = [plain_graph(net) for net in tiny(tasks=2).nets]
    found = race({"both": graphs, "one": graphs[:1]}, rounds=3, warm_ups=1, clock=lambda: float(next(now)))
    assert found["both"].seconds == found["one"].seconds == (1.0, 1.0, 1.0)
    assert next(now) == 2 * 2 * (1 + 3)
    assert all(seconds >= 0 for seconds in found["both"].busy) and len(found["both"].busy) == 3
    assert found["one"].median_s == found["one"].least_s == 1.0


def test_a_race_without_rounds_is_refused():
    with pytest.raises(StitchError, match="0 rounds measure nothing"):
        race({}, rounds=0)


def test_what_the_runtime_cannot_load_is_an_error_of_ours():
    builder = Builder("broken")
    builder.output(builder.add("Relo", builder.input("x", (1, 2, 3, 3)), shape=(1, 2, 3, 3)), "y")
    with pytest.raises(StitchError, match=r"broken cannot be loaded by ONNX Runtime: .*Relo"):
        GraphRunner(builder.finish())


def test_a_measured_plan_runs_and_equals_the_models():
    models = tiny(tasks=2)
    family = align(models.nets)
    chosen = plan(family, models.planted, GraphTimer(rounds=1, warm_ups=1), forms=["grouped", "separate"], slabs=True)
    assert all(seconds > 0 for seconds in chosen.seconds.values())
    assert chosen.seconds[chosen.name] == min(chosen.seconds.values())
    assert chosen.name in (MIXED, "grouped", "separate")
    pictures = images(models.nets)
    assert_close(execute(lower_plan(family, models.planted, chosen), pictures), separately(models.nets, pictures))
