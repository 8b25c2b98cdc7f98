"""How well ``weft sustain --device host`` tells the largest load this machine serves: two models, one lane and two.

For each number of lanes the machine is measured once (``weft profile --device host``) and the load predicted under each
policy. Then ``weft serve`` is started and ``weft bench`` bisects the load for real, with several seeds: the largest one
at which no stream misses more than 1 % of its deadlines. Printed are the prediction, the median of the bisections, and
their ratio. Every (lanes, policy) that is done is kept in the results file; a second start goes on from there.
Run on a machine that does nothing else: python benchmarks/host_sustain.py [--bisections 5] [--seconds 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from rich.console import Console
from rich.table import Table

from weft.devices import read_host
from weft.jsonfile import write_json
from weft.serving.process import ServerProcess

WEFT = str(Path(sys.executable).parent / "weft")
POLICIES = ("punctual", "edf", "fifo")
LANES = (1, 2)
LIMIT, TARGET = 0.01, 0.15
STEP = 1.15
"""By which the load is raised or lowered until one is sustained and one is not."""
TOLERANCE = 0.04
"""Width of the last bracket, relative."""
STREAMS: tuple[dict[str, Any], ...] = (
    {"model": "pp-ocr-cls", "rate": 40.0, "deadline_ms": 60.0, "shapes": {"x": [1, 3, 48, 192]}},
    {"model": "magika", "rate": 30.0, "deadline_ms": 120.0, "shapes": {"bytes": [1, 2048]}},
)
"""Two small models of different length; what they send per second where the factor is 1."""
RESULTS = Path(__file__).parent / "results" / "host_sustain.json"
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


def weft(*arguments: str) -> None:
    """Run a command; what it prints is shown only if it fails."""
    done = subprocess.run([WEFT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"weft {' '.join(arguments)}: {done.stderr or done.stdout}")


def profiled(lanes: int, folder: Path, seconds: float) -> Path:
    """This machine, measured."""
    path = folder / f"host{lanes}.json"
    models = [str(stream["model"]) for stream in STREAMS]
    options = ("--lanes", str(lanes), "--seconds", str(seconds), "--cache", str(folder / "cache"))
    weft("profile", *models, "--device", "host", *options, "-o", str(path))
    return path


def predicted(host: Path, policy: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``weft sustain`` says, over the seeds that are sent for real."""
    out = folder / "sustain.json"
    base = workload(folder, 1.0, arguments.seconds, seed=1)
    options = ("--limit", str(LIMIT), "--seeds", str(arguments.bisections), "--figure", str(folder / "loads.png"))
    weft("sustain", str(base), "-d", str(host), "-p", policy, *options, "--json", str(out))
    answer: dict[str, Any] = json.loads(out.read_text())["answers"][0]
    return answer


def nearly_full(host: Path) -> float:
    """The factor at which the segments alone would take 80 % of the lanes' time: where the search begins."""
    found = read_host(host)
    busy = sum(float(stream["rate"]) * found.model(str(stream["model"])).total_s(1) for stream in STREAMS)
    return float(0.8 * found.lanes / busy)


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

    low = high = begin
    if sustained(begin):
        while sustained(high := high * STEP):
            low = high
    else:
        while not sustained(low := low / STEP):
            high = low
    while high > low * (1 + TOLERANCE):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sustained(middle) else (low, middle)
    return {"seed": seed, "factor": (low * high) ** 0.5, "tried": sorted(tried.items())}


def compared(lanes: int, policy: str, host: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prediction and bisections of one policy."""
    answer = predicted(host, policy, folder, arguments)
    models = [str(stream["model"]) for stream in STREAMS]
    total = sum(float(stream["rate"]) for stream in STREAMS)
    runs: list[dict[str, Any]] = []
    with ServerProcess(*models, "--policy", policy, "--lanes", str(lanes), "--cache", str(folder / "cache")) as server:
        missed(server.url, 0.2, 0, folder, 2.0)
        for seed in range(1, arguments.bisections + 1):
            begin = statistics.median(run["factor"] for run in runs) if runs else nearly_full(host)
            runs.append(bisected(server.url, begin, seed, folder, arguments.seconds))
    measured = statistics.median(run["factor"] for run in runs)
    return {
        "lanes": lanes,
        "policy": policy,
        "predicted_per_s": answer["rate"],
        "measured_per_s": measured * total,
        "ratio": answer["factor"] / measured,
        "spread_per_s": [min(r["factor"] for r in runs) * total, max(r["factor"] for r in runs) * total],
        "load": answer["load"],
        "bisections": runs,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="largest load with at most 1 % missed", title_justify="left", box=None, pad_edge=False)
    for column in ("lanes", "policy", "predicted /s", "measured /s", "from", "to", "ratio", "load"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        low, high = row["spread_per_s"]
        table.add_row(
            str(row["lanes"]), row["policy"], f"{row['predicted_per_s']:.1f}", f"{row['measured_per_s']:.1f}",
            f"{low:.1f}", f"{high:.1f}", f"{row['ratio']:.2f}", f"{row['load']:.0%}",
        )  # fmt: skip
    console.print(table)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    verdict = "yes" if worst <= TARGET else "NO "
    console.print(
        f"{verdict}  every prediction is within {TARGET:.0%}: the worst is off by {worst:.1%}", highlight=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bisections", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of every run of weft bench")
    parser.add_argument("--survey", type=float, default=10.0, help="seconds in which all models are watched together")
    parser.add_argument("--lanes", default=",".join(map(str, LANES)))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="do again what the results have already")
    arguments = parser.parse_args()
    about, rows = machine("onnxruntime"), []
    if arguments.results.exists() and not arguments.fresh:
        rows = json.loads(arguments.results.read_text())["rows"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for lanes in map(int, arguments.lanes.split(",")):
            done = {row["policy"] for row in rows if row["lanes"] == lanes}
            left = [policy for policy in arguments.policies.split(",") if policy not in done]
            host = profiled(lanes, folder, arguments.survey) if left else None
            for policy in left:
                assert host is not None
                rows.append(compared(lanes, policy, host, folder, arguments))
                write_json(arguments.results, {"machine": about, "streams": STREAMS, "rows": rows})
                show(rows[-1:])
    show(rows)


if __name__ == "__main__":
    main()
