"""Early exits on a real server: missed deadlines when batches are refilled at the exits, against adaptive batching.

A network with exits that this project trained, on real test images; the server runs in its own process with one lane
and batches of up to 8; arrivals are Poisson at 85 % of the throughput of adaptive batching. All policies get the same
arrivals and images and are interleaved; every answer must equal that of the image computed alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from machine import awake, machine
from rich.console import Console
from rich.table import Table

from weft.base.jsonfile import write_json
from weft.load import LoadResult, run_load
from weft.models.trained import TRAINED, Trained
from weft.runtime.exits import confidence
from weft.serving.process import ServerProcess
from weft.workloads.requests import parse_workload

TIMEOUTS = "5,45,95"
"""Of adaptive batching, in percent of the deadline: small, medium and large in Fluid Batching (section IV)."""
LOAD, MAX_BATCH, CLIENTS = 0.85, 8, 32
FEWEST = 20
"""Requests of a run, about: on a machine too busy for more, there is still something to show."""
PATIENCE_S = 600.0
"""How long the last answers may take before a run gives them up."""
RESULTS = Path(__file__).parent / "results" / "early_exits.json"


class Contender(NamedTuple):
    """A policy and its option."""

    policy: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.policy, *self.options))


class Bench:
    """One network in a folder of its own, served under one policy after another."""

    def __init__(self, net: Trained, folder: Path, slo_ms: float) -> None:
        self.net, self.slo_ms = net, slo_ms
        self.threshold = net.card().threshold
        self._models, self._cache = folder / "models", folder / "cache"
        self._models.mkdir()
        _, record, self._samples = net.export(self._models / f"{net.name}.onnx")
        settings = f"max_batch = {MAX_BATCH}\nqueue_size = 65536\nexit_threshold = {self.threshold}\n"
        (self._models / f"{net.name}.toml").write_text(settings + f'exit_record = "{record.name}"\n')

    def run(self, contender: Contender, seconds: float, seed: int = 0, **arrivals: Any) -> LoadResult:
        options = [word for option in contender.options for word in ("--option", option)]
        stream = {"model": self.net.name, "deadline_ms": self.slo_ms, "samples": str(self._samples), **arrivals}
        raw = {"duration_s": seconds, "warmup_s": min(2.0, seconds / 5), "seed": seed, "stream": [stream]}
        settings = ["--policy", contender.policy, *options, "--lanes", "1", "--cache", str(self._cache)]
        with ServerProcess(str(self._models), *settings) as server:
            return run_load(parse_workload(raw, "benchmark"), server.url, deadlines="soft", grace_s=PATIENCE_S)

    def alone(self) -> tuple[np.ndarray, np.ndarray]:
        """Class and exit (from 1) of every image computed by itself in plain ONNX Runtime."""
        session = ort.InferenceSession(str(self.net.path()), providers=["CPUExecutionProvider"])
        classes, exits = [], []
        for image in self.net.samples().inputs():
            answers = session.run(list(self.net.exits), {"image": image[None]})
            sure = [confidence(answer, "logits")[0] >= self.threshold for answer in answers[:-1]]
            taken = sure.index(True) if any(sure) else len(answers) - 1
            classes.append(int(answers[taken].argmax()))
            exits.append(taken + 1)
        return np.array(classes), np.array(exits)


def answered_per_s(result: LoadResult) -> float:
    """Of all answers where those to the warm-up are the only ones: a busy machine, and too few --seconds."""
    (stream,) = result.streams
    return stream.figures.answered_per_s or float((stream.status == 200).sum()) / result.elapsed_s


def rate_per_s(trials: Iterable[LoadResult], seconds: float) -> tuple[float, float]:
    """At which requests are sent, and what adaptive batching computes at most."""
    most = max(map(answered_per_s, trials))
    return max(LOAD * most, FEWEST / seconds), most


def row_of(contender: Contender, seed: int, result: LoadResult, alone: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    (stream,) = result.streams
    figures, said = stream.figures, stream.contents
    assert said is not None and figures.met_share is not None and figures.mean_s and figures.p99_s
    answered = np.array(stream.status) == 200
    sample = np.array(said.sample)[answered]
    differing = np.array(said.prediction)[answered] != alone[0][sample]
    differing |= np.array(said.exit)[answered] != alone[1][sample]
    return {
        "policy": contender.name,
        "seed": seed,
        "requests": len(stream.status),
        "answered": int(answered.sum()),
        "missed": 1 - figures.met_share,
        "mean_ms": figures.mean_s * 1e3,
        "p99_ms": figures.p99_s * 1e3,
        "accuracy": figures.accuracy,
        "differing": int(differing.sum()),
        "remarks": list(result.remarks),
    }


def show(rows: list[dict[str, Any]], title: str, baselines: list[Contender], others: list[Contender]) -> dict[str, Any]:
    keys = ("missed", "mean_ms", "p99_ms", "accuracy")
    names = [contender.name for contender in (*baselines, *others)]
    medians = {
        name: {key: statistics.median(row[key] for row in rows if row["policy"] == name) for key in keys}
        for name in names
    }
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("policy", "missed", "mean ms", "p99 ms", "correct", "unlike alone"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, m in medians.items():
        unlike = sum(row["differing"] for row in rows if row["policy"] == name)
        table.add_row(
            name, f"{m['missed']:.2%}", f"{m['mean_ms']:.1f}", f"{m['p99_ms']:.1f}", f"{m['accuracy']:.1%}", str(unlike)
        )
    console = Console(width=110)
    console.print(table)
    best = min((medians[baseline.name]["missed"], baseline.name) for baseline in baselines)
    ratios = {other.name: medians[other.name]["missed"] / best[0] if best[0] else None for other in others}
    for name, ratio in ratios.items():
        if ratio is not None:
            console.print(f"{name} misses {ratio:.2f} times as many deadlines as {best[1]}", highlight=False)
    return {"medians": medians, "best_adaptive": best[1], "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=TRAINED, default="cifar-cnn")
    parser.add_argument("--slo", type=float, default=20.0, help="deadline in milliseconds")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeouts", default=TIMEOUTS, help="of adaptive batching, in percent of the deadline")
    parser.add_argument("--policies", default="fluid,top-up", help="what to compare with it")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/early_exits.json")
    arguments = parser.parse_args()
    before = machine("onnxruntime")
    adaptive = [Contender("adaptive", (f"timeout={share}",)) for share in arguments.timeouts.split(",")]
    others = [Contender(policy) for policy in arguments.policies.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(TRAINED[arguments.net], Path(folder), arguments.slo)
        print("finding out what adaptive batching computes at most", flush=True)
        trial_s = min(5.0, arguments.seconds)
        trials = [bench.run(policy, trial_s, arrival="closed", clients=CLIENTS) for policy in adaptive]
        rate, most = rate_per_s(trials, arguments.seconds)
        alone, rows = bench.alone(), []
        for seed in range(arguments.repeats):
            for contender in (*adaptive, *others):
                print(f"{contender.name}: {arguments.seconds:g} s of requests (seed {seed})", flush=True)
                result = bench.run(contender, arguments.seconds, seed, rate=rate)
                rows.append(row_of(contender, seed, result, alone))
    title = f"{arguments.net}, due in {arguments.slo:g} ms, {rate:.0f} per s of {most:.0f} that adaptive computes"
    found = show(rows, title, adaptive, others)
    if arguments.save:
        settings = {**vars(arguments), "load": LOAD, "most_per_s": most, "max_batch": MAX_BATCH}
        write_json(RESULTS, {"format": 1, "machine": before, "settings": settings, "rows": rows, **found})


if __name__ == "__main__":
    with awake():
        main()
