"""Forms chosen by the clock where torch runs: on a CPU here, the same on CUDA."""

from __future__ import annotations

import torch

from tests.stitching.nets import tiny
from weft_stitch.discovery import discover
from weft_stitch.forms import FORMS
from weft_stitch.lowering import formed_layers, lower
from weft_stitch.planning.planner import MIXED, lower_plan
from weft_stitch.reading.alignment import align
from weft_stitch.running.gpu_timing import GraphClock, Place, plan_for


def test_the_plan_is_the_fastest_of_what_was_timed():
    family = align(tiny("tinynet", 2).nets)
    sharing, place = discover(family), Place("cpu", torch.float32)
    found = plan_for(place, family, sharing, clock=GraphClock(place, rounds=1, replays=1))
    assert found.seconds[found.name] == min(found.seconds.values())
    assert set(FORMS) <= set(found.seconds) | {found.name} | {MIXED} and all(
        each > 0 for each in found.seconds.values()
    )
    assert set(found.forms) == {layer.name for layer in formed_layers(family)}
    assert lower_plan(family, sharing, found, align=place.align).weight_bytes > 0


def test_a_cap_leaves_out_what_stores_more():
    family = align(tiny("tinynet", 3).nets)
    sharing, place = discover(family), Place("cpu", torch.float32)
    clock = GraphClock(place, rounds=1, replays=1)
    least = lower(family, sharing, "split").weight_bytes
    assert "separate" in plan_for(place, family, sharing, clock=clock).seconds
    assert "separate" not in plan_for(place, family, sharing, clock=clock, weight_cap_bytes=least + 1000).seconds
