"""Is ``weft`` ever worse than a policy that it could imitate? Pairs, or sets of three and four models, on two NPUs with
buffers from 48 to 6 MiB.

Every rival gets the pieces that ``weft`` chose, and once more whole layers. Two comparisons are fair; both are made:

- Every model has at least its least share of the throughput, as under ``weft``. A rival that leaves a model less is
  charged the time in which the model runs alone until it has its share (``weft.engine.policies.bound.raise_starved``).
  The rival's result without that charge is recorded as well.
- Every model completes the same number of queries: which policy needs the shortest time.

Schedules are simulated, so any machine will do.

    python benchmarks/weaving_margin.py --jobs 2
    python benchmarks/weaving_margin.py --streams 3 4 --jobs 16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from machine import machine

from weft import Saturated, estimate, load_model, load_npu
from weft.base.jsonfile import write_json
from weft.devices import Npu
from weft.devices.costs.layer_costs import Profile
from weft.engine.policies.bound import least_share, raise_starved
from weft.models import Model
from weft.simulation import simulate
from weft.simulation.report import Report

RESULTS = Path(__file__).parent / "results"
NPUS = {"tpuv3-like": 1, "nnpi-like": 16}
"""The paper's two, and its batch on each."""
BUFFERS_MIB = (48.0, 24.0, 12.0, 6.0)
RIVALS = ("fifo", "round-robin", "aimt", "layerweaver")
WHOLE_QUERIES = ("fifo", "round-robin")
"""Rivals that complete as many queries of every model without being asked to."""
ONE_AT_A_TIME = {"fair": 1.0}
"""What need not be run: one model at a time, each for an equal time, comes to 1 by definition."""
TOLERANCE = 0.001
ROOM_MIB = 2.0**16


class Variant(NamedTuple):
    """A model with one of its parameters."""

    name: str
    key: str = ""
    value: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.value}" if self.key else self.name


IMAGES = ("alexnet", "densenet121", "fcn-resnet18", "googlenet", "inception-v3", "inception-v4", "mobilenet-v2",
          "resnet18", "resnet50", "resnet101", "resnext50-32x4d", "vgg16")  # fmt: skip
TEXTS = ("bert-base", "bert-large", "xlnet-base", "xlnet-large")
OTHERS = ("ncf", "pp-ocr-det", "pp-ocr-rec", "light-shufflenet", "light-squeezenet", "mtcnn-pnet", "magika")
VARIANTS = (
    *(Variant(name) for name in IMAGES),
    *(Variant(name, "resolution", 299 if "inception" not in name else 399) for name in IMAGES if name != "alexnet"),
    *(Variant(name, "seq_len", tokens) for name in TEXTS for tokens in (16, 32, 64, 128, 384)),
    *(Variant(name) for name in OTHERS),
)
FIRST = {
    2: (Variant("pp-ocr-det"), Variant("bert-base", "seq_len", 16)),
    3: (Variant("resnet50"), Variant("xlnet-large"), Variant("ncf")),
}
"""Known to have been below ``layerweaver``, by the number of models."""


class Case(NamedTuple):
    """What is run."""

    models: tuple[Variant, ...]
    npu: str
    buffer_mib: float


def sets(count: int, streams: list[int]) -> list[tuple[Variant, ...]]:
    """The known ones, and others in an order drawn once, so that few sets are the first of many.

    Sizes take turns; no set occurs twice.
    """
    drawn, random = [FIRST[size] for size in streams if size in FIRST], Random(1)
    while len(drawn) < count:
        models = tuple(random.sample(VARIANTS, streams[len(drawn) % len(streams)]))
        if all(set(models) != set(others) for others in drawn):
            drawn.append(models)
    return drawn[:count]


@cache
def model_of(variant: Variant) -> Model:
    return load_model(variant.name, parameters={variant.key: variant.value} if variant.key else None)


def run(case: Case, queries: int) -> dict[str, Any]:
    """``weft`` as it likes, and every rival with its pieces and with none."""
    wide = {"weight_buffer_mib": case.buffer_mib, "activation_buffer_mib": ROOM_MIB}
    npu, workload = load_npu(case.npu).model_copy(update=wide), Saturated(queries)
    profiles = [estimate(model_of(variant), npu, batch=NPUS[case.npu]) for variant in case.models]
    began_s = time.process_time()
    ours = simulate(profiles, npu, "weft", workload).report
    spent_s = time.process_time() - began_s
    whole = simulate(profiles, npu, "weft", workload, options={"trial": False}).report
    rivals = {
        (name, pieces): simulate(profiles, npu, name, workload, pieces=pieces).report
        for pieces in {1, ours.pieces}
        for name in RIVALS
    }
    fair = {key: sum(raise_starved(shares(report))) for key, report in rivals.items()}
    return {
        "models": "+".join(map(str, case.models)),
        "npu": case.npu,
        "buffer_mib": case.buffer_mib,
        "weft": ours.stp,
        "of_bound": ours.fraction_of_bound,
        "pieces": ours.pieces,
        "remark": ours.remark,
        "shares": shares(ours),
        "without_trial": whole.stp,
        "weft_s": spent_s,
        **beaten("rival", ours.stp, {name: stp for (name, pieces), stp in fair.items() if pieces == ours.pieces}),
        **beaten("whole_rival", ours.stp, {name: stp for (name, pieces), stp in fair.items() if pieces == 1}),
        "starving": max([0.0, *(report.stp / ours.stp for report in rivals.values() if starves(report))]),
        **run_equal(profiles, npu, queries),
    }


def run_equal(profiles: list[Profile], npu: Npu, queries: int) -> dict[str, Any]:
    """The same with as many queries of every model, so that throughput is one over the time they take."""
    workload = Saturated(queries, mix=(1.0,) * len(profiles))
    ours = simulate(profiles, npu, "weft", workload).report
    rivals = {
        (name, pieces): simulate(
            profiles, npu, name, Saturated(queries) if name in WHOLE_QUERIES else workload, pieces=pieces
        ).report.stp
        for pieces in {1, ours.pieces}
        for name in RIVALS
    }
    best = {name: max(stp for (each, _), stp in rivals.items() if each == name) for name in RIVALS}
    return {"equal_weft": ours.stp, "equal_remark": ours.remark, **beaten("equal_rival", ours.stp, best)}


def shares(report: Report) -> list[float]:
    """Of the system throughput, by model."""
    return [stream.progress * stream.standalone_s / report.makespan_s for stream in report.streams]


def starves(report: Report) -> bool:
    """Whether a model has less than its least share."""
    return min(shares(report)) < least_share(len(report.streams))


def beaten(key: str, ours: float, rivals: dict[str, float]) -> dict[str, Any]:
    """The best rival, and what ``weft`` comes to beside it."""
    rivals = ONE_AT_A_TIME | rivals
    name = max(rivals, key=rivals.__getitem__)
    return {key: name, f"{key}_stp": rivals[name], f"of_{key}": ours / rivals[name]}


def run_all(cases: list[Case], queries: int, jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from (run(case, queries) for case in cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, cases, [queries] * len(cases), chunksize=len(NPUS) * len(BUFFERS_MIB))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst ratio and how many lie below, beside rivals with the same pieces and with whole layers."""
    results: dict[str, Any] = {"cases": len(rows), "tolerance": TOLERANCE}
    for key in ("of_rival", "of_whole_rival", "of_equal_rival"):
        worst = min(rows, key=lambda row: row[key])
        results[key] = {
            "below": sum(row[key] < 1 - TOLERANCE for row in rows),
            "worst": worst[key],
            "where": f"{worst['models']} on {worst['npu']}, {worst['buffer_mib']:g} MiB, in 1/{worst['pieces']}",
        }
    results["below_a_rival_that_starves"] = sum(row["starving"] > 1 + TOLERANCE for row in rows)
    results["without_trial_below"] = sum(
        row["without_trial"] < (1 - TOLERANCE) * row["whole_rival_stp"] for row in rows
    )
    results["cut"] = sum(row["pieces"] > 1 for row in rows)
    results["weft_s"] = {"mean": sum(row["weft_s"] for row in rows) / len(rows), "most": max(r["weft_s"] for r in rows)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[2], help="how many models a set has; several: in turn"
    )
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    before = machine("numba", "onnx")
    output = arguments.output or RESULTS / (
        "weaving_margin.json" if arguments.streams == [2] else "weaving_margin_sets.json"
    )
    cases = [Case(*values) for values in product(sets(arguments.sets, arguments.streams), NPUS, BUFFERS_MIB)]
    rows = list[dict[str, Any]]()
    for row in run_all(cases, arguments.queries, arguments.jobs):
        rows.append(row)
        below = min(row["of_rival"], row["of_whole_rival"], row["of_equal_rival"]) < 1 - TOLERANCE
        if below or len(rows) % 40 == 0 or len(rows) == len(cases):
            print(
                f"{len(rows)}/{len(cases)} {row['models']} {row['npu']} {row['buffer_mib']:g} MiB: {row['weft']:.4f} "
                f"in 1/{row['pieces']}, {row['rival']} {row['rival_stp']:.4f}, whole {row['whole_rival']} "
                f"{row['whole_rival_stp']:.4f}; equal {row['equal_weft']:.4f}, {row['equal_rival']} "
                f"{row['equal_rival_stp']:.4f}",
                flush=True,
            )
            # what was run is kept, for all of it takes hours
            environment = {"format": 1, "machine": before, "queries": arguments.queries}
            write_json(output, {**environment, "summary": summary(rows), "rows": rows})
    for key, value in summary(rows).items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
