"""The speed-up of stitched models on a CPU: eight pruned ResNet-18 in ONNX Runtime, on one thread.

The baseline is the models one after another, each in its own session with its normalisations folded and all of ONNX
Runtime's optimisations on. In the same rounds: the models one after another with their convolutions in slabs, which
shows the part of the gain that is due to slabs and not to stitching; every form throughout, plain and in slabs; and the
planner's choices, by its model of the machine, by measured times, and by measured times with fewer weights.

    python benchmarks/stitch_cpu.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import machine

from weft.base.jsonfile import write_json
from weft.runtime.timing import Turns
from weft_stitch.cost import Modelled, count
from weft_stitch.family import Family
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import lower
from weft_stitch.making.generator import Generated, generate
from weft_stitch.planning.planner import ANYWHERE, Plan, lower_plan, plan
from weft_stitch.reading.alignment import align
from weft_stitch.running.sessions import GraphRunner, GraphTimer, race
from weft_stitch.slabs import slabs

RESULTS = Path(__file__).parent / "results" / "stitch_cpu.json"
TARGET = 1.5
SEQUENTIAL = "sequential"
CLOCKED = "planned by the clock"


def contenders(models: Generated, family: Family, plans: Mapping[str, Plan]) -> dict[str, list[Graph]]:
    alone = [plain_graph(net) for net in models.nets]
    results = {SEQUENTIAL: alone, "sequential, slabs": [slabs(graph) for graph in alone]}
    for form in ANYWHERE:
        graph = lower(family, models.planted, form)
        results |= {form: [graph], f"{form}, slabs": [slabs(graph)]}
    return results | {name: [lower_plan(family, models.planted, plan)] for name, plan in plans.items()}


def planned(models: Generated, family: Family, light: float) -> dict[str, Plan]:
    """Plans by name; *light* is the part of the separate models' weights that the last may have."""
    clock = GraphTimer()
    cap_bytes = int(light * sum(plain_graph(net).weight_bytes for net in models.nets))
    how: dict[str, dict[str, Any]] = {
        "planned by the model": {"cost": Modelled()},
        CLOCKED: {"cost": clock},
        f"planned, {light:.0%} of the weights": {"cost": clock, "weight_cap_bytes": cap_bytes},
    }
    return {name: plan(family, models.planted, slabs=True, **options) for name, options in how.items()}


def difference(graphs: Sequence[Graph], wanted: Sequence[np.ndarray], pictures: Sequence[np.ndarray]) -> float:
    """The largest difference of an answer from those of the models, in parts of the largest answer."""
    results: list[np.ndarray] = []
    left = list(pictures)
    for graph in graphs:
        runner = GraphRunner(graph)
        runner.feed = {tensor.name: left.pop(0) for tensor in graph.inputs}
        results += runner()
    pairs = zip(results, wanted, strict=True)
    return max(float(np.abs(mine - theirs).max() / np.abs(theirs).max()) for mine, theirs in pairs)


def row(name: str, graphs: Sequence[Graph], times: Turns, base: Turns, differing: float) -> dict[str, Any]:
    return {
        "contender": name,
        "median_ms": times.median_s * 1e3,
        "least_ms": times.least_s * 1e3,
        "processor_ms": median(times.busy) * 1e3,
        "faster": base.median_s / times.median_s,
        "faster_by_least": base.least_s / times.least_s,
        "faster_by_processor": median(base.busy) / median(times.busy),
        "weight_bytes": sum(graph.weight_bytes for graph in graphs),
        "launches": sum(count(graph).launches for graph in graphs),
        "difference": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--architecture", default="resnet18")
    parser.add_argument("--pruning", type=float, default=0.9)
    parser.add_argument("--sharing", type=float, default=0.9)
    parser.add_argument("--light", type=float, default=0.6, help="part of the separate weights for the lightest plan")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    before = machine("onnxruntime")
    models = generate(arguments.architecture, arguments.tasks, pruning=arguments.pruning, sharing=arguments.sharing)
    family = align(models.nets)
    print("planning", flush=True)
    plans = planned(models, family, arguments.light)
    runs = contenders(models, family, plans)
    rng = np.random.default_rng(1)
    pictures = [rng.standard_normal((net.batch, *net.inputs[0].shape), np.float32) for net in models.nets]
    wanted = []
    for graph, picture in zip(runs[SEQUENTIAL], pictures, strict=True):
        runner = GraphRunner(graph)
        runner.feed = {graph.inputs[0].name: picture}
        wanted += runner()
    times = race(runs, rounds=arguments.rounds, threads=arguments.threads)
    rows = [
        row(name, graphs, times[name], times[SEQUENTIAL], difference(graphs, wanted, pictures))
        for name, graphs in runs.items()
    ]
    print(f"{'contender':>28} {'ms':>7} {'least':>7} {'busy':>7} {'faster':>7} {'by busy':>8} {'MB':>6} {'unlike':>8}")
    for each in rows:
        print(
            f"{each['contender']:>28} {each['median_ms']:7.2f} {each['least_ms']:7.2f} {each['processor_ms']:7.2f} "
            f"{each['faster']:7.2f} {each['faster_by_processor']:8.2f} {each['weight_bytes'] / 1e6:6.2f} "
            f"{each['difference']:8.1e}"
        )
    reached = next(row["faster"] for row in rows if row["contender"] == CLOCKED)
    print(f"{CLOCKED}: {reached:.2f} times faster, target {TARGET:g}: {'met' if reached >= TARGET else 'MISSED'}")
    statistic = f"median and least of {arguments.rounds} rounds in which all contenders take turns; processor: median"
    how = {"statistic": statistic}
    forms = {name: {"forms": dict(plan.forms), "slabs": sorted(plan.slabs)} for name, plan in plans.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(
        RESULTS, {"format": 1, "machine": {**before, **how}, "settings": vars(arguments), "rows": rows, "plans": forms}
    )


if __name__ == "__main__":
    main()
