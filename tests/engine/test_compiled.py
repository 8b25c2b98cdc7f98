"""Which runs a kernel may answer: those of the very policies it was written for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weft.devices import load_npu
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.engine.policies import POLICIES, Start, View
from weft.engine.policies.layerweaver import Layerweaver
from weft.simulation import simulate
from weft.workloads import Saturated


@dataclass(frozen=True)
class Stubborn(Layerweaver):
    """Decides for the last stream, whatever its parent would do."""

    def decide(self, view: View) -> Start:
        return Start(view.candidates[-1])


def test_a_policy_that_inherits_from_ours_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "stubborn", Stubborn)
    heavy = Profile("heavy", "tpuv3-like", 1, (LayerCost("a", 1e-4, 1000),))
    light = Profile("light", "tpuv3-like", 1, (LayerCost("b", 1e-6, 10**6),))
    trace = simulate([heavy, light], load_npu("tpuv3-like"), "stubborn", Saturated(3)).trace
    assert set(trace.stream.tolist()) == {1}
