"""Your own policy in a few lines: always start the layer with the shortest fetch.

python examples/own_policy.py
"""

from dataclasses import dataclass

import weft


@dataclass(frozen=True)
class ShortestFetch(weft.Policy):
    """Start the layer with the shortest fetch; on a tie, the stream that waited longest."""

    def decide(self, view: weft.View) -> weft.Start:
        return weft.Start(min(view.candidates, key=lambda c: (c.fetch, c.last_issued)))


def main() -> None:
    weft.POLICIES["shortest-fetch"] = ShortestFetch
    npu = weft.load_npu("tpuv3-like")
    profiles = [weft.estimate(weft.load_model(name), npu) for name in ("mobilenet-v2", "ncf")]
    for policy in ("fifo", "shortest-fetch", "layerweaver", "weft"):
        report = weft.simulate(profiles, npu, policy, weft.Saturated(20)).report
        print(f"{policy:15} STP {report.stp:.3f}  {report.fraction_of_bound:.1%} of the bound")


if __name__ == "__main__":
    main()
