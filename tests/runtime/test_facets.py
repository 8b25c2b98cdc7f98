"""A loaded model has few members, and facets only for the features that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.exit_nets import EXITS, conv_net
from tests.serving import live
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.defaults import ModelDefaults
from weft.runtime.facets import Batching, ModelResidency, SegmentTiming
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import prepare

FACETS = {"exits", "shares", "tasks", "residency"}


def members(protocol: type) -> set[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")}
    return own | set(protocol.__annotations__)


def facets_of(model: CpuModel) -> set[str]:
    return {name for name in FACETS if getattr(model, name) is not None}


def test_a_loaded_model_has_at_most_twelve_members_and_four_facets() -> None:
    assert members(LoadedModel) >= FACETS
    assert len(members(LoadedModel) - FACETS) <= 12


def test_every_member_has_a_default_but_those_that_no_two_models_share() -> None:
    own = {"inputs", "outputs", "segments", "timing", "start", "close"}
    assert members(LoadedModel) - members(ModelDefaults) == own
    assert facets_of(ModelDefaults()) == set() and ModelDefaults.batching == Batching(max_batch=1)  # type: ignore[arg-type]


def test_a_plain_model_on_the_cpu_has_no_facet_but_its_memory(tmp_path: Path) -> None:
    model = prepare(live.mlp(tmp_path / "mlp.onnx"), LoadOptions(max_batch=1))
    assert facets_of(model) == {"residency"} and model.breaker is None
    held = model.residency
    assert held == ModelResidency(held.memory_bytes) and held.memory_bytes > 0 and held.away_s == 0


def test_a_model_with_exits_has_one_facet_more(tmp_path: Path) -> None:
    model = prepare(conv_net(tmp_path / "net.onnx"), LoadOptions(max_batch=1, exits=EXITS))
    assert facets_of(model) == {"residency", "exits"}


def test_what_is_steady_is_foreseen_unless_somebody_knows_better() -> None:
    assert SegmentTiming((True, False)).foreseen == (True, False)
    assert SegmentTiming((False, False), foreseen=(True, False)).foreseen == (True, False)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 1.0), (3, 3.0), (4, 4.0), (12, 12.0)])
def test_times_lie_straight_between_the_measured_ones_and_go_on_behind_them(batch: int, seconds: float) -> None:
    timing = SegmentTiming((True,), {1: (1.0,), 4: (4.0,)})
    assert timing.times_at(batch) == timing.times_at(batch) == (seconds,)
    assert SegmentTiming((True, True)).times_at(batch) == (0.0, 0.0)


def test_times_of_batches_that_were_never_measured_are_not_all_kept() -> None:
    timing = SegmentTiming((True,), {1: (1.0,), 4: (4.0,)})
    for batch in range(1, 1000):
        timing.times_at(batch)
    assert sorted(timing._interpolation_cache) == [1, 2, 3, 4]
