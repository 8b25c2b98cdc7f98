"""The time of a decision: ``layerweaver`` and ``weft`` in steady state, against the printed pseudo-code compiled.

Also the time that ``weft`` spends before a run on trying other policies and smaller pieces. One thread. Variants are
interleaved and the fastest of the repeats counts, because the machine is shared. Writes
benchmarks/results/scheduler_speed.json and .png.

    make bench
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numba
import numpy as np
from matplotlib.figure import Figure
from pseudocode import schedule

import weft
from weft.engine.compiled import layer_arrays
from weft.engine.policies import Setting, described
from weft.engine.policies.weft import Weft
from weft.engine.trial import best_contender
from weft.kernels.greedy import weave_greedy
from weft.kernels.rollout import RolloutRules, RolloutStreams, weave_rollout
from weft.simulation.saturated import make_setting

RESULTS = Path(__file__).parent / "results"
FOREVER = 1 << 61

PAIRS = [
    ("resnet50", "bert-base"),
    ("mobilenet-v2", "xlnet-large"),
    ("inception-v3", "bert-large"),
    ("resnext50-32x4d", "ncf"),
]
FOURS = [
    ("resnet50", "bert-base", "inception-v3", "xlnet-large"),
    ("mobilenet-v2", "bert-large", "resnext50-32x4d", "ncf"),
]
EIGHT = [(*FOURS[0], *FOURS[1])]
TARGETS = {2: 30, 4: 15, 8: 6}


def setting_of(
    names: tuple[str, ...], jitter: np.random.Generator | None = None, repeat: int = 1, buffer_mib: float = 48.0
) -> Setting:
    """The models on tpuv3-like; with *jitter*, *repeat* queries whose compute times vary by a tenth."""
    changes = {"activation_buffer_mib": 1000.0, "weight_buffer_mib": buffer_mib}
    npu = weft.load_npu("tpuv3-like").model_copy(update=changes)
    profiles = [weft.estimate(weft.load_model(name), npu) for name in names]
    if jitter is not None:
        profiles = [
            weft.Profile(
                p.model, p.device, p.batch,
                tuple(
                    weft.LayerCost(layer.name, layer.compute_s * jitter.uniform(0.9, 1.1), layer.weight_bytes)
                    for _ in range(repeat) for layer in p.layers
                ),
            )
            for p in profiles
        ]  # fmt: skip
    return make_setting(profiles, npu, weft.Saturated(1))


def greedy_arguments(setting: Setting, issues: int) -> tuple[object, ...]:
    heavy = np.array([program.compute_bound for program in setting.programs])
    return (layer_arrays(setting), heavy, setting.buffer, FOREVER, np.empty(issues, np.int64))


def rollout_arguments(setting: Setting, issues: int) -> tuple[object, ...]:
    fetch, compute, first = layer_arrays(setting)
    policy = Weft(setting)
    heavy = np.array([program.compute_bound for program in setting.programs])
    streams = RolloutStreams(fetch, compute, np.concatenate(policy.gains).astype(np.int64), first, heavy)
    rules = RolloutRules(setting.buffer, int(fetch.max()), *policy.prices, *policy.distances, policy.band.max_lag_units)
    no_quota = np.full(len(setting.programs), -1, np.int64)
    return (streams, rules, policy.length, policy.commit, FOREVER, no_quota, np.empty(issues, np.int64))


def fastest(variants: list[tuple[Callable[..., int], tuple[object, ...]]], repeats: int) -> list[float]:
    """Seconds per issue of each variant, interleaved; the first, compiling round does not count."""
    best = [float("inf")] * len(variants)
    for turn in range(repeats + 1):
        for index, (kernel, arguments) in enumerate(variants):
            began = time.perf_counter()
            issues = kernel(*arguments)
            if turn:
                best[index] = min(best[index], (time.perf_counter() - began) / issues)
    return best


def measure(names: tuple[str, ...], repeats: int, jitter: bool = False) -> dict[str, object]:
    setting = setting_of(names, np.random.default_rng(0), 100) if jitter else setting_of(names)
    plain, ours, roll = fastest(
        [
            (schedule, greedy_arguments(setting, 100_000)),
            (weave_greedy, greedy_arguments(setting, 1_000_000)),
            (weave_rollout, rollout_arguments(setting, 20_000)),
        ],
        repeats,
    )
    return {
        "models": names,
        "k": len(names),
        "jitter": jitter,
        "layerweaver_layers_per_us": 1e-6 / ours,
        "pseudocode_layers_per_us": 1e-6 / plain,
        "ratio": plain / ours,
        "weft_us_per_decision": roll * 1e6,
    }


def trials(repeats: int) -> list[dict[str, object]]:
    """Milliseconds ``weft`` spends before a run of 100 rounds, and what it decides: pieces and decisions per round."""
    rows: list[dict[str, object]] = []
    for names, buffer_mib in product((*PAIRS, FOURS[0]), (48.0, 12.0)):
        setting = replace(setting_of(names, buffer_mib=buffer_mib), rounds=100)
        best = float("inf")
        for turn in range(repeats + 1):
            began = time.process_time()
            chosen = best_contender(Weft(setting))
            best = min(best, time.process_time() - began) if turn else best
        rows.append({
            "models": names, "buffer_mib": buffer_mib, "trial_ms": best * 1e3, "chosen": described(chosen),
            "pieces": chosen.setting.pieces, "layers_per_round": sum(map(len, setting.programs)),
            "decisions_per_round": sum(map(len, chosen.setting.programs)),
        })  # fmt: skip
    return rows


def scaling(repeats: int) -> dict[str, list[tuple[int, float]]]:
    """Microseconds per layer over the number of models, and milliseconds over the number of layers."""
    names = EIGHT[0]
    models = []
    for k in (2, 3, 4, 6, 8, 12, 16):
        setting = setting_of(tuple(names[i % 8] for i in range(k)))
        models.append((k, fastest([(weave_greedy, greedy_arguments(setting, 300_000))], repeats)[0] * 1e6))
    layers = []
    for issues in (50_000, 100_000, 200_000, 400_000, 800_000):
        cost = fastest([(weave_greedy, greedy_arguments(setting_of(PAIRS[0]), issues))], repeats)[0]
        layers.append((issues, cost * issues * 1e3))
    return {"us_per_layer_by_models": models, "ms_by_layers": layers}


def draw(growth: dict[str, list[tuple[int, float]]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    models, cost = zip(*growth["us_per_layer_by_models"], strict=True)
    left.plot(models, np.array(cost) * 1e3, "o-", color="#0072b2")
    left.set(xlabel="models woven", ylabel="ns per issued layer", title="cost of a decision", ylim=0)
    layers, spent = zip(*growth["ms_by_layers"], strict=True)
    right.plot(np.array(layers) / 1e3, spent, "o-", color="#e69f00")
    right.set(xlabel="layers issued (thousands)", ylabel="ms", title="cost of a schedule, two models", ylim=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    rows = [measure(names, repeats) for names in (*PAIRS, *FOURS, *EIGHT)]
    rows += [measure(names, repeats, jitter=True) for names in PAIRS]
    print(f"{'models':>62} {'layerweaver':>12} {'pseudo-code':>12} {'ratio':>6} {'weft':>8}")
    print(f"{'':>62} {'layers/us':>12} {'layers/us':>12} {'':>6} {'us/dec.':>8}")
    for row in rows:
        label = f"{'jittered ' if row['jitter'] else ''}{'+'.join(row['models'])}"
        label = label if len(label) <= 62 else f"{row['k']} models"
        print(
            f"{label:>62} {row['layerweaver_layers_per_us']:12.1f} {row['pseudocode_layers_per_us']:12.2f} "
            f"{row['ratio']:6.1f} {row['weft_us_per_decision']:8.2f}"
        )
    tried = trials(repeats)
    for row in tried:
        print(
            f"{'+'.join(row['models']):>62} {row['buffer_mib']:g} MiB: trial {row['trial_ms']:.0f} ms, "
            f"{row['chosen']} in 1/{row['pieces']}, "
            f"{row['decisions_per_round']} decisions a round for {row['layers_per_round']} layers"
        )
    growth = scaling(repeats)
    print("models -> ns/layer: ", ", ".join(f"{k}: {cost * 1e3:.0f}" for k, cost in growth["us_per_layer_by_models"]))
    print("layers -> ms:       ", ", ".join(f"{n}: {cost:.2f}" for n, cost in growth["ms_by_layers"]))
    for k, target in TARGETS.items():
        worst = min(row["layerweaver_layers_per_us"] for row in rows if row["k"] == k)
        print(f"k = {k}: slowest {worst:.1f} layers/us, target {target}: {'met' if worst >= target else 'MISSED'}")
    slowest = max(row["weft_us_per_decision"] for row in rows if row["k"] == 2)
    print(f"weft, two models: slowest {slowest:.2f} us per decision, target 5: {'met' if slowest <= 5 else 'MISSED'}")
    least = min(row["ratio"] for row in rows)
    print(f"least ratio over the pseudo-code {least:.1f}, target 10: {'met' if least >= 10 else 'MISSED'}")
    RESULTS.mkdir(exist_ok=True)
    draw(growth, RESULTS / "scheduler_speed.png")
    machine = {
        "machine": platform.machine(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
        "weft": weft.__version__,
        "repeats": repeats,
        "statistic": "fastest of the repeats, variants interleaved, one thread",
    }
    (RESULTS / "scheduler_speed.json").write_text(
        json.dumps({"machine": machine, "rows": rows, "trials": tried, **growth}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
