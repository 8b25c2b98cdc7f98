"""How fast the best mapping is found and proved, with CP-SAT and Z3 in the same run.

Three measurements on synthetic models (a fast unit, a slow one 1.2 to 2.2 times slower, the Xavier's contention): the
time of proofs by size; the speed-up over Z3 for sizes that Z3 finishes; the proofs of CP-SAT without contention. And
one on the pairs of HaX-CoNN's Table 6: the time to the first improvement over the best baseline, and to a schedule
within 2 % of the best. Times are wall time in seconds of a warm process, medians over the seeds.

    make bench                                    (without Z3)
    pip install 'weft[z3]' && python benchmarks/mapping_speed.py --z3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from machine import machine

from weft.base.jsonfile import write_json
from weft.devices import load_soc
from weft_map.cpsat import contention_free
from weft_map.estimate import find_profile
from weft_map.problem import Problem
from weft_map.simulator import simulate
from weft_map.solver import Options, Solution, solve
from weft_map.z3_model import solve_z3

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.mapping.soc_problems import synthetic

RESULTS = Path(__file__).parent / "results" / "mapping_speed.json"
PROOFS = ((2, 12, 0.2), (2, 20, 1.0), (3, 8, 60.0))
"""Models, groups of each, seconds a proof may take in the median."""
Z3_SIZES, Z3_LIMIT_S, Z3_RATIO = (2, 3, 4), 60.0, 100.0
PAIRS = {
    1: ("xavier", ("vgg19", "resnet152")),
    2: ("xavier", ("resnet152", "inception-v4")),
    3: ("xavier", ("alexnet", "resnet101")),
    4: ("xavier", ("resnet101", "googlenet")),
    5: ("xavier", ("googlenet", "resnet152", "fcn-resnet18")),
    6: ("orin", ("vgg19", "resnet152")),
    7: ("orin", ("googlenet", "resnet101")),
    8: ("orin", ("resnet101", "googlenet", "inception-v4")),
    9: ("snapdragon", ("googlenet", "resnet101")),
    10: ("snapdragon", ("inception-v4", "resnet152")),
}
"""Experiments of Table 6. In 5 and 8 the second model waits for the first."""
FIRST_S, NEAR_S, NEAR = 0.025, 0.25, 0.02


def proofs(seeds: int) -> list[dict[str, Any]]:
    """Time from the call to the proof, and to one that assumes nothing."""
    rows = []
    for models, groups, target_s in PROOFS:
        results = [solve(synthetic(seed, models, groups)).certificate for seed in range(1, seeds + 1)]
        rows.append(
            {
                "models": models,
                "groups": groups,
                "seeds": seeds,
                "proved": sum(result.proved for result in results),
                "without_assumption": sum(result.proved and not result.assumes for result in results),
                "median_s": median(result.first_proof_s or result.seconds for result in results),
                "slowest_s": max(result.first_proof_s or result.seconds for result in results),
                "median_states": median(result.states for result in results),
                "target_s": target_s,
            }
        )
    return rows


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    began_s = perf_counter()
    return job(), perf_counter() - began_s


def against_z3(seeds: int) -> list[dict[str, Any]]:
    """Both to the proof, on the same problems; Z3's is for starts at any time, which is worth a little."""
    rows = []
    for groups in Z3_SIZES:
        for seed in range(1, seeds + 1):
            problem = synthetic(seed, 2, groups)
            ours = min((solve(problem).certificate for _ in range(5)), key=lambda each: each.first_proof_s or 1e9)
            theirs, seconds = timed(lambda problem=problem: solve_z3(problem, time_limit_s=Z3_LIMIT_S))
            rows.append(
                {
                    "groups": groups,
                    "seed": seed,
                    "ours_s": ours.first_proof_s,
                    "ours_ms": ours.value * 1e3,
                    "z3_s": seconds,
                    "z3_ms": theirs.makespan_s * 1e3,
                    "z3_proved": theirs.proved,
                    "ratio": seconds / (ours.first_proof_s or ours.seconds),
                }
            )
    return rows


def against_cpsat(seeds: int) -> list[dict[str, Any]]:
    """What CP-SAT proves of the same problems without contention, and how far its bound is from our proved value."""
    rows = []
    for models, groups, _ in PROOFS:
        for seed in range(1, seeds + 1):
            problem = synthetic(seed, models, groups)
            ours = solve(problem).certificate
            blind, seconds = timed(lambda problem=problem: contention_free(problem, "latency", time_limit_s=10.0))
            rows.append(
                {
                    "models": models,
                    "groups": groups,
                    "seed": seed,
                    "cpsat_s": seconds,
                    "cpsat_proved": blind.proved,
                    "cpsat_bound": blind.bound_s / ours.value,
                    "prices_bound": ours.any_idling_bound / ours.value,
                    "cpsat_plan_judged": simulate(problem, blind.schedule).makespan_s / ours.value,
                    "ours_s": ours.first_proof_s,
                }
            )
    return rows


def experiment(number: int) -> Problem:
    name, models = PAIRS[number]
    soc = load_soc(name)
    first = find_profile(models[0], soc, origin="derived").task()
    second = find_profile(models[1], soc, origin="derived").task(after=(models[0],) if len(models) == 3 else ())
    others = [find_profile(model, soc, origin="derived").task() for model in models[2:]]
    return Problem(soc, (first, second, *others))


def when(solution: Solution, value: float) -> float | None:
    """When a schedule of at most that value was published."""
    return next((improvement.seconds for improvement in solution.improvements if improvement.value <= value), None)


def anytime(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for number in PAIRS:
        problem = experiment(number)
        runs = [solve(problem, Options(time_limit_s=30.0)) for _ in range(repeats)]
        best, baseline = runs[0].outcome.makespan_s, runs[0].baselines[runs[0].best_baseline].makespan_s
        better = baseline * (1 - 1e-6)
        firsts = [when(run, better) for run in runs if best <= better]
        rows.append(
            {
                "experiment": number,
                "best_ms": best * 1e3,
                "best_baseline_ms": baseline * 1e3,
                "best_baseline": runs[0].best_baseline,
                "proved": runs[0].certificate.proved,
                "first_s": median(first or 1e9 for first in firsts) if firsts else None,
                "near_s": median(when(run, best * (1 + NEAR)) or 1e9 for run in runs),
                "proof_s": median(run.certificate.first_proof_s or 1e9 for run in runs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--z3", action="store_true", help="Compare with Z3 too; needs the extra z3, some minutes.")
    arguments = parser.parse_args()
    before = machine("numba", "ortools", *(["z3-solver"] if arguments.z3 else []))
    for size in ((2, 3), (2, 12), (3, 4)):
        solve(synthetic(99, *size))  # compile and load
    results = {"proofs": proofs(arguments.seeds), "anytime": anytime(arguments.repeats), "cpsat": against_cpsat(3)}
    if arguments.z3:
        results["z3"] = against_z3(3)
    show(results)
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, {"format": 1, "machine": {**before, "statistic": "medians, warm process"}, **results})


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    for row in found["proofs"]:
        met = "met" if row["median_s"] <= row["target_s"] and row["proved"] == row["seeds"] else "MISSED"
        print(
            f"{row['models']} models of {row['groups']} groups: proved {row['proved']}/{row['seeds']}, median "
            f"{row['median_s']:.3f} s (slowest {row['slowest_s']:.3f}), {row['median_states']:.0f} states; without "
            f"assumption {row['without_assumption']}; target {row['target_s']:g} s: {met}"
        )
    for row in found["anytime"]:
        first = "no better schedule exists" if row["first_s"] is None else f"better after {row['first_s'] * 1e3:.1f} ms"
        print(
            f"experiment {row['experiment']}: {row['best_ms']:.3f} ms against {row['best_baseline_ms']:.3f} "
            f"({row['best_baseline']}); {first}, within 2 % after {row['near_s'] * 1e3:.1f} ms, "
            f"proof after {row['proof_s'] * 1e3:.0f} ms"
        )
    late = [row for row in found["anytime"] if (row["first_s"] or 0) > FIRST_S or row["near_s"] > NEAR_S]
    print(f"first improvement within 25 ms and within 2 % by 250 ms: {'MISSED' if late else 'met'}")
    for row in found["cpsat"]:
        print(
            f"CP-SAT without contention, {row['models']}x{row['groups']}, seed {row['seed']}: "
            f"{'proved' if row['cpsat_proved'] else 'not proved'} in {row['cpsat_s']:.2f} s, bound "
            f"{row['cpsat_bound']:.3f} of the best (prices: {row['prices_bound']:.3f}), its plan takes "
            f"{row['cpsat_plan_judged']:.3f}; ours proved in {row['ours_s']:.3f} s"
        )
    for row in found.get("z3", []):
        print(
            f"Z3, 2x{row['groups']}, seed {row['seed']}: {'proved' if row['z3_proved'] else 'not proved'} in "
            f"{row['z3_s']:.2f} s, {row['z3_ms']:.4f} ms (ours {row['ours_ms']:.4f}); {row['ratio']:.0f} times our time"
        )
    ratios = [row["ratio"] for row in found.get("z3", []) if row["z3_proved"]]
    if ratios:
        verdict = "met" if min(ratios) >= Z3_RATIO else "MISSED"
        print(f"times faster than Z3 where it finishes: {min(ratios):.0f} to {max(ratios):.0f}, target 100: {verdict}")


if __name__ == "__main__":
    main()
