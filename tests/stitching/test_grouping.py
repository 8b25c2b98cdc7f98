"""Groupings are the best there are, by trying all; what cannot be met is said with amounts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.graphs import assert_close, execute, separately
from tests.stitching.nets import images, tiny
from weft.base.errors import StitchError
from weft_stitch.cost import Modelled, count
from weft_stitch.family import model_kinds, part
from weft_stitch.lowering import lower
from weft_stitch.planning.grouping import (
    NOTHING,
    SIZES,
    GroupCost,
    Grouping,
    LimitsUnmet,
    Objective,
    group,
    interpolate,
    size,
)
from weft_stitch.planning.planner import lower_plan, plan
from weft_stitch.reading.alignment import align


class Costs:
    """Made-up costs by the kinds in a group: sums of powers, so that a group takes no less than a part of it."""

    def __init__(self, names, power=0.7, start=1.0, shared=0.5):
        self.names, self.power, self.start, self.shared = names, power, start, shared
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, models: tuple[int, ...]) -> GroupCost:
        mine = sorted(self.names[number] for number in models)
        self.asked.append(tuple(mine))
        work = [1.0 + ord(name) - ord("a") for name in mine]
        weights = self.shared * max(work) + (1 - self.shared) * sum(work)
        return GroupCost(self.start + sum(work) ** self.power, round(64 * weights), round(32 * sum(work) ** 1.5))


def partitions(models: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to cut *models* into groups."""
    if not models:
        yield []
        return
    first, *rest = models
    for others in partitions(rest):
        yield [(first,), *others]
        for at, each in enumerate(others):
            yield [*others[:at], (first, *each), *others[at + 1 :]]


def total(groups, costs: Costs) -> GroupCost:
    cost = NOTHING
    for each in groups:
        cost = cost.then(costs(tuple(sorted(each))))
    return cost


def tried(names, costs: Costs, wish: Objective) -> GroupCost | None:
    """The best by trying every partition."""
    every = [total(groups, costs) for groups in partitions(list(range(len(names))))]
    fitting = [each for each in every if wish.met(each)]
    return min(fitting, key=wish.rank) if fitting else None


def assert_valid(found: Grouping, names, costs: Costs) -> None:
    assert sorted(number for each in found.groups for number in each) == list(range(len(names)))
    assert found.cost == pytest.approx(total(found.groups, costs))


WISHES = st.tuples(st.none() | st.floats(200, 4000), st.none() | st.floats(2, 40))


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=7),
    power=st.floats(0.2, 2.0),
    start=st.floats(0.0, 5.0),
    shared=st.floats(0.0, 1.0),
    limits=WISHES,
)
def test_few_models_are_grouped_as_well_as_can_be(names, power, start, shared, limits):
    costs = Costs(names, power, start, shared)
    wish = Objective(*limits)
    best = tried(names, costs, wish)
    if best is None:
        with pytest.raises(StitchError, match=r"no grouping (fits|takes)"):
            group(names, costs, cap_bytes=limits[0], target_s=limits[1])
        return
    found = group(names, costs, cap_bytes=limits[0], target_s=limits[1])
    assert_valid(found, names, costs)
    assert wish.met(found.cost)
    assert wish.rank(found.cost) == pytest.approx(wish.rank(best))


@pytest.mark.parametrize("power", [0.3, 0.9, 1.3, 2.5])
@pytest.mark.parametrize("limits", [(None, None), (900, None), (None, 12.0), (1200, 15.0)])
def test_seven_unequal_models(power, limits):
    names = list("abcdefg")
    costs = Costs(names, power, start=0.5)
    wish = Objective(*limits)
    best = tried(names, costs, wish)
    if best is not None:
        found = group(names, costs, cap_bytes=limits[0], target_s=limits[1])
        assert wish.rank(found.cost) == pytest.approx(wish.rank(best))
        assert_valid(found, names, costs)


def test_equal_groups_are_costed_once():
    names = list("aaabbbcc")
    costs = Costs(names, 1.2)
    group(names, costs, cap_bytes=1e9)
    assert max(Counter(costs.asked).values()) == 1
    assert len(costs.asked) == 4 * 4 * 3 - 1  # and each of them, as a cap is in force


def test_hopeless_groups_are_not_costed():
    """Where joining models takes far longer than running them apart, large groups need not be looked at."""
    names = list("abcdefgh")
    costs = Costs(names, power=3.0, start=0.0)
    found = group(names, costs)
    assert all(len(each) == 1 for each in found.groups)
    assert len(costs.asked) < 50  # of 255


@pytest.mark.parametrize("models", [1, 2, 5, 13, 32, 40])
@pytest.mark.parametrize("power", [0.5, 1.4, 2.0])
def test_equal_models_are_cut_by_size(models, power):
    """Against a plain program over sizes in which every size is costed."""
    names = ["c"] * models
    costs = Costs(names, power, start=20.0)
    best = [0.0]
    for amount in range(1, models + 1):
        best.append(min(best[amount - size] + costs(tuple(range(size))).seconds for size in range(1, amount + 1)))
    costs.asked.clear()
    found = group(names, costs)
    assert_valid(found, names, costs)
    assert found.cost.seconds == pytest.approx(best[-1], rel=0.03)  # sizes never chosen stay interpolated
    if models <= SIZES[3]:
        assert found.cost.seconds == pytest.approx(best[-1])


def test_of_equal_models_only_some_sizes_are_costed():
    names = ["a"] * 64
    costs = Costs(names, 0.5)
    found = group(names, costs)
    assert {len(each) for each in costs.asked} == set(SIZES)
    assert found.groups == (tuple(range(64)),)


def test_a_size_that_was_interpolated_is_costed_before_it_is_chosen():
    class Dear(Costs):
        """Five together take far longer than the line from four to six says."""

        def __call__(self, models):
            cost = super().__call__(models)
            return cost._replace(seconds=100.0) if len(models) == 5 else cost

    names = ["a"] * 10
    costs = Dear(names, 1.5, start=6.0)
    found = group(names, costs)
    assert 5 not in map(len, found.groups)
    assert_valid(found, names, costs)


def test_interpolation_is_exact_at_samples_and_linear_between():
    samples = {1: GroupCost(1.0, 10, 4), 2: GroupCost(2.0, 12, 8), 4: GroupCost(6.0, 16, 16)}
    assert interpolate(samples, 2) == samples[2]
    assert interpolate(samples, 3) == GroupCost(4.0, 14, 12)


@settings(max_examples=18)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=16, max_size=24), st.floats(0.3, 2.0), st.floats(0.0, 5.0))
def test_many_models_are_dealt_out(names, power, start):
    costs = Costs(names, power, start)
    found = group(names, costs)
    assert_valid(found, names, costs)
    everyone = range(len(names))
    assert found.cost.seconds <= total([tuple(everyone)], costs).seconds * (1 + 1e-9)
    assert found.cost.seconds <= total([(each,) for each in everyone], costs).seconds * (1 + 1e-9)


def test_models_are_dealt_to_and_fro():
    names = list("hgfedcba")
    costs = Costs(names, 1.0, start=5.0)
    found = group(names, costs, cap_bytes=total([(0, 3, 4, 7), (1, 2, 5, 6)], costs).bytes, few=3)
    assert set(found.groups) == {(0, 3, 4, 7), (1, 2, 5, 6)}


@pytest.mark.parametrize("names", ["aaaa", "abcd", "abcdefghabcdefgh"])
def test_what_cannot_be_met_is_said_with_amounts(names):
    costs = Costs(list(names))
    soonest = r"the fastest takes \S+ ms \(\S+( bytes)?\)"
    with pytest.raises(LimitsUnmet, match=rf"^no grouping takes 0\.001 ms; {soonest}: raise the latency target$"):
        group(list(names), costs, target_s=1e-6)
    least = r"the smallest takes \S+( bytes)? \(\S+ ms\)"
    with pytest.raises(LimitsUnmet, match=rf"^no grouping fits 10 bytes; {least}: raise the memory cap$") as refusal:
        group(list(names), costs, cap_bytes=10)
    found = group(list(names), costs, cap_bytes=refusal.value.smallest.bytes)
    assert found.cost.bytes == refusal.value.smallest.bytes
    with pytest.raises(
        LimitsUnmet, match=rf"fits 10 bytes in 0\.001 ms; {least}, .*: raise the memory cap or the latency"
    ):
        group(list(names), costs, cap_bytes=10, target_s=1e-6)


def test_sizes_are_told_so_that_what_is_told_suffices():
    assert [size(count) for count in (10, 1024, 1025, 4 << 20, 6187392, 3 << 30)] == [
        "10 bytes", "1k", "1.01k", "4m", "5.91m", "3g"
    ]  # fmt: skip


def test_activations_count_once_and_weights_always():
    one = GroupCost(1.0, 100, 30).then(GroupCost(2.0, 50, 70))
    assert one == GroupCost(3.0, 150, 70) and one.bytes == 220


def test_there_must_be_a_model():
    with pytest.raises(StitchError, match="no models to group"):
        group([], Costs([]))


# --- families ---


def test_a_part_of_a_family_equals_its_models():
    models = tiny("tiny-dense", tasks=4, clusters=[[0, 3], [1, 2]], widths=[1, 1.3, 1, 0.8], batches=[1, 2, 1, 3])
    family = align(models.nets)
    some = [3, 1, 0]
    mine, sharing = part(family, models.planted, some)
    nets = [models.nets[task] for task in some]
    pictures = images(nets)
    for form in ("mts", "split"):
        assert_close(execute(lower(mine, sharing, form), pictures), separately(nets, pictures))


def test_kinds_tell_tasks_apart_that_cannot_stand_for_each_other():
    def found(**settings):
        models = tiny(tasks=4, classes=3, **settings)
        names = model_kinds(align(models.nets), models.planted)
        return [names.index(each) for each in names]

    assert found() == [0, 0, 0, 0]
    assert found(batches=[1, 2, 1, 2]) == [0, 1, 0, 1]
    assert found(widths=[1, 1, 2, 1]) == [0, 0, 2, 0]
    assert found(clusters=[[0, 1], [2, 3]]) == [0, 0, 2, 2]


def test_a_family_is_grouped_by_what_its_groups_cost():
    models = tiny(tasks=4, classes=3, sharing=0.3)
    family = align(models.nets)

    def costs(tasks: tuple[int, ...]) -> GroupCost:
        mine, shared = part(family, models.planted, tasks)
        chosen = plan(mine, shared, Modelled(), forms=["mts"])
        counted = count(lower_plan(mine, shared, chosen))
        return GroupCost(chosen.seconds[chosen.name], counted.weight_bytes, counted.activation_bytes)

    apart, together = total([(0,), (1,), (2,), (3,)], costs), costs((0, 1, 2, 3))
    found = group(model_kinds(family, models.planted), costs)
    assert found.cost.seconds <= min(apart.seconds, together.seconds)
    tight = group(model_kinds(family, models.planted), costs, target_s=max(apart.seconds, together.seconds))
    assert tight.cost.bytes <= min(apart.bytes, together.bytes)
