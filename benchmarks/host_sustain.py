"""The accuracy of ``weft sustain --device host``: predicted and measured largest load, two models, one lane or two.

In every round ``weft serve`` is started and ``weft bench`` bisects the real load: the largest one at which no stream
misses more than 1 % of its deadlines. Before and after that, the machine is measured (``weft profile --device host``)
and the load predicted; the mean of the two predictions counts. Prediction and measurement get the same arrivals: with
other arrivals of the same rates, a lane sustains 90 or 105 requests per second over eight seconds.
The speed of a shared machine may change twofold within a minute. If the two predictions of a round differ by more than
``STEADY``, the machine may have changed in between, and the round is repeated, whatever its result.
Printed are the medians over the rounds of the prediction and of the bisections, and their ratio.
Every finished round is written to the results file; a later run continues from there.
Run on an otherwise idle machine: python benchmarks/host_sustain.py [--rounds 5] [--seconds 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bisecting import largest
from machine import awake, machine
from rich.console import Console
from rich.table import Table
from undisturbed import piece_s

from weft.base.jsonfile import write_json
from weft.devices import read_host
from weft.serving.process import ServerProcess

WEFT = str(Path(sys.executable).parent / "weft")
POLICIES = ("punctual", "edf", "fifo")
LANES = (1, 2)
LIMIT, TARGET = 0.01, 0.15
STEADY = 0.2
"""How far the predictions before and after a bisection may lie apart where a round counts."""
NOTHING = "no load is sustained"
"""What ``weft sustain`` says of a machine on which every load misses deadlines."""
STREAMS: tuple[dict[str, Any], ...] = (
    {"model": "pp-ocr-cls", "rate": 40.0, "deadline_ms": 60.0, "shapes": {"x": [1, 3, 48, 192]}},
    {"model": "magika", "rate": 30.0, "deadline_ms": 120.0, "shapes": {"bytes": [1, 2048]}},
)
"""Two small models of different length; what they send per second where the factor is 1."""
RESULTS = Path(__file__).parent / "results" / "host_sustain.json"
Round = dict[str, Any]
"""A bisection between two predictions: lanes, policy, seed, the factors, what was tried."""
console = Console(width=110)


def workload(folder: Path, factor: float, seconds: float, seed: int) -> Path:
    """The workload at a multiple of its rates, as a file."""
    lines = [f"duration_s = {seconds + 1}", "warmup_s = 1.0", f"seed = {seed}"]
    for stream in STREAMS:
        shapes = ", ".join(f"{name} = {shape}" for name, shape in stream["shapes"].items())
        lines += [
            "[[stream]]",
            f'model = "{stream["model"]}"',
            f"rate = {float(stream['rate']) * factor}",
            f"deadline_ms = {stream['deadline_ms']}",
            f"shapes = {{{shapes}}}",
        ]
    path = folder / "workload.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class Refused(SystemExit):
    """A command says that it cannot; unless somebody minds that, this program ends with what it said."""


def weft(*arguments: str) -> None:
    """Run a command; what it prints is shown only if it fails."""
    done = subprocess.run([WEFT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"weft {' '.join(arguments)}: {done.stderr or done.stdout}")


def profiled(lanes: int, folder: Path, seconds: float) -> Path:
    """This machine, measured."""
    path = folder / f"host{lanes}.json"
    models = [str(stream["model"]) for stream in STREAMS]
    options = ("--lanes", str(lanes), "--seconds", str(seconds), "--cache", str(folder / "cache"))
    weft("profile", *models, "--device", "host", *options, "-o", str(path))
    return path


def predicted(host: Path, policy: str, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """What ``weft sustain`` says of the arrivals that are sent for real: loads of a few seconds differ by seed."""
    out = folder / "sustain.json"
    base = workload(folder, 1.0, seconds, seed)
    options = ("--limit", str(LIMIT), "--seeds", "1", "--figure", str(folder / "loads.png"))
    weft("sustain", str(base), "-d", str(host), "-p", policy, *options, "--json", str(out))
    answer: dict[str, Any] = json.loads(out.read_text())["answers"][0]
    return answer


def nearly_full(host: Path) -> float:
    """The factor at which the segments alone would take 80 % of the lanes' time: where the search begins."""
    result = read_host(host)
    busy = sum(float(stream["rate"]) * result.model(str(stream["model"])).total_s(1) for stream in STREAMS)
    return float(0.8 * result.lanes / busy)


def missed(url: str, factor: float, seed: int, folder: Path, seconds: float) -> float:
    """Share of its deadlines that the stream misses which suffers most, sent for real."""
    out = folder / "bench.json"
    path = workload(folder, factor, seconds, seed)
    weft("bench", str(path), "--url", url, "--deadlines", "soft", "--grace", "20", "--json", str(out))
    return max(1 - float(stream["met_share"]) for stream in json.loads(out.read_text())["streams"])


def bisected(url: str, begin: float, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """The largest factor that is sustained for real, between the two last ones tried."""
    tried: dict[float, float] = {}

    def sustained(factor: float) -> bool:
        tried[factor] = missed(url, factor, seed, folder, seconds)
        return tried[factor] <= LIMIT

    return {"factor": largest(sustained, begin), "seed": seed, "tried": sorted(tried.items())}


def served(lanes: int, policy: str, seed: int, begin: float, folder: Path, seconds: float) -> dict[str, Any]:
    """One bisection of one policy."""
    models = [str(stream["model"]) for stream in STREAMS]
    with ServerProcess(*models, "--policy", policy, "--lanes", str(lanes), "--cache", str(folder / "cache")) as server:
        missed(server.url, 0.2, 0, folder, 2.0)
        return bisected(server.url, begin, seed, folder, seconds)


@dataclass
class Rounds:
    """Bisections of one number of lanes, each between two measurements of the machine."""

    lanes: int
    seed: int
    folder: Path
    asked: argparse.Namespace
    again: int = 0
    """How many rounds the machine did not keep its speed in."""

    def __post_init__(self) -> None:
        self.host = profiled(self.lanes, self.folder, self.asked.survey)

    def round(self, policy: str, begin: float | None) -> Round:
        """One that counts."""
        while True:
            before = self._predicted(policy)
            run = served(
                self.lanes, policy, self.seed, begin or nearly_full(self.host), self.folder, self.asked.seconds
            )
            self.host = profiled(self.lanes, self.folder, self.asked.survey)
            after = self._predicted(policy)
            if before and max(before, after) <= (1 + STEADY) * min(before, after):
                between = (before * after) ** 0.5
                return {"lanes": self.lanes, "policy": policy, "predicted": between, "ends": [before, after], **run}
            self.again += 1
            console.print(f"again: {self.lanes} {policy} {before:.2f} {run['factor']:.2f} {after:.2f}", highlight=False)

    def _predicted(self, policy: str) -> float:
        """The factor; 0 where the machine was so slow while it was measured that it could sustain nothing."""
        try:
            return float(predicted(self.host, policy, self.seed, self.folder, self.asked.seconds)["factor"])
        except Refused as refused:
            if NOTHING not in str(refused):
                raise
            return 0.0


def summed_up(rounds: list[Round]) -> list[dict[str, Any]]:
    """Of every number of lanes and policy, the medians, in requests per second."""
    total = sum(float(stream["rate"]) for stream in STREAMS)
    rows = []
    for lanes, policy in dict.fromkeys((row["lanes"], row["policy"]) for row in rounds):
        mine = [row for row in rounds if (row["lanes"], row["policy"]) == (lanes, policy)]
        says, is_so = [row["predicted"] * total for row in mine], [row["factor"] * total for row in mine]
        rows.append(
            {
                "lanes": lanes,
                "policy": policy,
                "rounds": len(mine),
                "predicted_per_s": statistics.median(says),
                "predicted_spread_per_s": [min(says), max(says)],
                "measured_per_s": statistics.median(is_so),
                "measured_spread_per_s": [min(is_so), max(is_so)],
                "ratio": statistics.median(says) / statistics.median(is_so),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="largest load with at most 1 % missed, per second", title_justify="left", box=None, pad_edge=False
    )
    for column in ("lanes", "policy", "rounds", "predicted", "from", "to", "measured", "from", "to", "ratio"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        says = [row["predicted_per_s"], *row["predicted_spread_per_s"]]
        is_so = [row["measured_per_s"], *row["measured_spread_per_s"]]
        numbers = [f"{value:.1f}" for value in (*says, *is_so)]
        table.add_row(str(row["lanes"]), row["policy"], str(row["rounds"]), *numbers, f"{row['ratio']:.2f}")
    console.print(table)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    verdict = "yes" if worst <= TARGET else "NO "
    console.print(
        f"{verdict}  every prediction is within {TARGET:.0%}: the worst is off by {worst:.1%}", highlight=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of every run of weft bench")
    parser.add_argument("--survey", type=float, default=8.0, help="seconds in which all models are watched together")
    parser.add_argument("--lanes", default=",".join(map(str, LANES)))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="do again what the results have already")
    arguments = parser.parse_args()
    environment, rounds, drifts, again = machine("onnxruntime"), list[Round](), list[list[float]](), 0
    if arguments.results.exists() and not arguments.fresh:
        kept = json.loads(arguments.results.read_text())
        rounds, drifts, again = kept["rounds"], kept["drift_s"], kept.get("rounds_done_again", 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, lanes in product(range(1, arguments.rounds + 1), map(int, arguments.lanes.split(","))):
            done = {row["policy"] for row in rounds if (row["lanes"], row["seed"]) == (lanes, seed)}
            left = [policy for policy in arguments.policies.split(",") if policy not in done]
            if not left:
                continue
            drifts.append(piece_s(2.0))
            going = Rounds(lanes, seed, folder, arguments)
            for policy in left:
                before = [r["factor"] for r in rounds if (r["lanes"], r["policy"]) == (lanes, policy)]
                rounds.append(going.round(policy, statistics.median(before) if before else None))
                rows = summed_up(rounds)
                raw = {"machine": environment, "streams": STREAMS, "rows": rows, "drift_s": drifts, "rounds": rounds}
                write_json(arguments.results, raw | {"rounds_done_again": again + going.again})
                show(rows)
            again += going.again
    show(summed_up(rounds))


if __name__ == "__main__":
    with awake():
        main()
