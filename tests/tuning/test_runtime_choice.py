"""Which layers are left out, on a workplace whose times and scores are made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.runtime.timing import Turns
from weft_tune.runtime_target.choice import (
    FLOAT16,
    FLOAT32,
    HARMFUL,
    INT8,
    SLOWER,
    FastestVariant,
    choose,
)
from weft_tune.runtime_target.qdq import QdqOptions

Variant = tuple[frozenset[str], QdqOptions | None]
"""The layers in 8 bits and how; all of them in float16, if it is not said how."""
HALVES = frozenset(["float16"])


@dataclass
class HandMade:
    """Layer -> its time before, its time in 8 bits, the part of the score that it costs."""

    known: dict[str, tuple[float, float, float]]
    halves_s: float = 99.0
    slow_ways: dict[str, float] = field(default_factory=dict)
    """What a way costs the whole, by how inputs are kept."""
    costs: dict[str, float] = field(default_factory=dict)
    """What the score loses less by, by what is said of a way."""
    races: int = 0

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.known)

    @property
    def original(self) -> Variant:
        return frozenset(), None

    def eight_bits(self, chosen: frozenset[str], way: QdqOptions) -> Variant:
        return (chosen, way) if chosen else self.original

    def halves(self) -> Variant:
        return HALVES, None

    def score(self, variant: Variant) -> float:
        chosen, way = variant
        if chosen == HALVES:
            return 1.0
        spared = sum(gain for word, gain in self.costs.items() if word in str(way))
        return min(1.0, 1 - sum(self.known[name][2] for name in chosen) + spared)

    def race(self, variants: Sequence[Variant], turns: int = 4) -> tuple[Turns, ...]:
        self.races += 1
        return tuple(Turns((self._seconds(variant),) * turns) for variant in variants)

    def harm(self, layer: str, way: QdqOptions) -> float:
        return self.known[layer][2]

    def layer_times(self, variants: Sequence[Variant]) -> list[dict[str, float]]:
        return [{name: self.known[name][name in chosen] for name in self.layers} for chosen, _ in variants]

    def _seconds(self, variant: Variant) -> float:
        chosen, way = variant
        if chosen == HALVES:
            return self.halves_s
        extra = self.slow_ways.get(way.activations, 0.0) if way else 0.0
        return 1 + extra + sum(times[name in chosen] for name, times in self.known.items())


def found(place: Any, threshold: float = 0.99) -> FastestVariant:
    return choose(place, threshold, lambda stage, detail: None)


def test_all_layers_are_in_8_bits_if_that_is_faster_and_costs_nothing() -> None:
    result = found(HandMade({"a": (2, 1, 0), "b": (3, 1, 0)}))
    assert (result.kind, result.left_out) == (INT8, {})
    assert (result.before.median_s, result.after.median_s) == (6, 3)
    assert result.times_after == {"a": 1, "b": 1}


def test_layers_that_are_slower_in_8_bits_are_left_out() -> None:
    result = found(HandMade({"a": (2, 3, 0), "b": (5, 1, 0), "c": (1, 4, 0)}))
    assert result.left_out == {"c": SLOWER, "a": SLOWER} and result.variant[0] == {"b"}
    assert result.after.median_s == 1 + 2 + 1 + 1


def test_a_layer_that_is_slower_by_itself_stays_in_if_the_whole_is_slower_without_it() -> None:
    class Joined(HandMade):
        def _seconds(self, variant: Variant) -> float:
            between = 5 if variant[0] == {"b"} else 0  # numbers are turned into others between the two
            return super()._seconds(variant) + between

    result = found(Joined({"a": (2, 3, 0), "b": (5, 1, 0)}))
    assert result.left_out == {} and result.kind == INT8


def test_the_most_harmful_for_what_they_save_are_left_out_and_no_more() -> None:
    layers = {"a": (3, 1, 0.02), "b": (9, 1, 0.02), "c": (3, 1, 0.001), "d": (3, 1, 0.05)}
    result = found(HandMade(layers), threshold=0.97)
    assert result.left_out == {"d": HARMFUL, "a": HARMFUL} and result.score == pytest.approx(0.979)


def test_other_steps_come_before_leaving_layers_out() -> None:
    result = found(HandMade({"a": (3, 1, 0.02), "b": (3, 1, 0.02)}, costs={"clipped": 0.04}))
    assert result.left_out == {} and result.options is not None and result.options.clipped and result.score == 1


def test_weights_of_7_bits_are_taken_where_products_overflow() -> None:
    result = found(HandMade({"a": (3, 1, 0.5)}, costs={"7-bit": 0.5}))
    assert result.options is not None and result.options.weight_bits == 7 and result.kind == INT8


def test_the_faster_way_is_taken() -> None:
    result = found(HandMade({"a": (3, 1, 0)}, slow_ways={"uint8": 0.5}))
    assert result.options is not None and result.options.activations == "int8"


def test_nothing_faster_leaves_the_model_as_it_was() -> None:
    place = HandMade({"a": (1, 2, 0), "b": (1, 1, 0)})
    result = found(place)
    assert (result.kind, result.variant, result.options) == (FLOAT32, place.original, None)
    assert result.before == result.after and result.times_after == result.times_before and result.score == 1


def test_a_score_that_nothing_keeps_leaves_the_model_as_it_was() -> None:
    result = found(HandMade({"a": (3, 1, 0.5), "b": (3, 1, 0.5)}), threshold=1.0)
    assert result.kind == FLOAT32 and result.score == 1


def test_float16_wins_where_it_is_fastest() -> None:
    result = found(HandMade({"a": (3, 2, 0)}, halves_s=1.5))
    assert (result.kind, result.after.median_s, result.options) == (FLOAT16, 1.5, None)


def test_float16_that_is_slower_than_8_bits_is_left() -> None:
    assert found(HandMade({"a": (3, 1, 0)}, halves_s=3)).kind == INT8


def test_the_search_ends_when_several_layers_in_a_row_are_better_kept() -> None:
    place = HandMade({f"layer{number}": (3, 1, 0) for number in range(40)})
    result = found(place)
    assert result.left_out == {} and place.races == 1 + 1 + 4 + 1  # ways, float16, four layers, the last word


def test_everything_that_was_tried_is_told() -> None:
    result = found(HandMade({"a": (2, 3, 0), "b": (5, 1, 0)}))
    last = result.tried[-1]
    assert (last.what, last.left_out, last.seconds, last.against_s, last.kept) == (INT8, ("a",), 4, 8, True)
    assert any(each.what == FLOAT16 and not each.kept for each in result.tried)
