"""Are the predictions of ``weft plan`` correct? Mixes of real models, each planned, served and loaded on this machine.

A mix is planned with nothing cached, and the planning is timed. ``weft serve PLAN`` then serves it, and its streams are
sent at 0.7, 0.9 and 1.05 of the largest load that the plan predicts: the share of missed deadlines and the 99th
percentile are compared with the simulator's for the same arrivals. Then the largest load is bisected on the real
server, and the ten options that the simulator ranks next are served in the plan's place, each with 5 % more than that:
none of them should keep the deadlines. The speed of a shared machine changes: the machine is measured again after a
mix, and a mix is repeated if the largest load that follows from the new measurement is different.

    python benchmarks/plan_holds.py [--mixes "heavy;one"] [--seconds 12] [--client-cores 1]

The clients take CPU time, too, for images of 600 KB. ``--client-cores`` reserves that number of cores for them, as if
they were on another machine; planner and server have the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bisecting import largest
from machine import awake, machine
from rich.console import Console
from rich.table import Table

from weft.base.jsonfile import write_json
from weft.base.tomlfile import as_toml
from weft.devices import Host
from weft.load import run_load
from weft.planning.plan import Plan, PlanOption, planned_workload, read_plan
from weft.planning.prediction import planned_host, predict
from weft.serving.process import ServerProcess
from weft.workloads.requests import Workload

WEFT = str(Path(sys.executable).parent / "weft")
LOADS = (0.7, 0.9, 1.05)
LIMIT, POINTS, P99, LOAD, STEADY = 0.01, 0.05, 0.2, 0.15, 0.15
TRIES = 3
RIVALS, MORE = 10, 1.05
"""How many options are served in the plan's place, and with how many times the load that it carries."""
RESULTS = Path(__file__).parent / "results" / "plan_holds.json"
MIXES: dict[str, tuple[str, ...]] = {
    "light, tight": ("pp-ocr-cls:rate=40,deadline=40", "magika:rate=30,deadline=60"),
    "light, loose": ("pp-ocr-cls:rate=40,deadline=400", "magika:rate=30,deadline=600"),
    "heavy": ("pp-ocr-rec:rate=6,deadline=300", "light-squeezenet:rate=10,deadline=250"),
    "light beside heavy": ("silero-vad:rate=60,deadline=30", "pp-ocr-rec:rate=4,deadline=500"),
    "many": (
        "pp-ocr-cls:rate=15,deadline=80",
        "magika:rate=15,deadline=100",
        "silero-vad:rate=30,deadline=60",
        "mtcnn-onet:rate=15,deadline=80",
        "light-shufflenet:rate=5,deadline=150",
    ),
    "one": ("light-squeezenet:rate=20,deadline=120",),
}
"""Name -> streams, as ``weft plan`` takes them."""
console = Console(width=120)


class Cores(NamedTuple):
    """Who computes where; the same cores where they are not divided."""

    server: frozenset[int]
    client: frozenset[int]


def divided(for_client: int) -> Cores:
    """This process's cores, the last so many for the client."""
    there = sorted(os.sched_getaffinity(0))
    if not 0 <= for_client < len(there):
        sys.exit(f"--client-cores {for_client}: there are {len(there)} cores, and the server needs one")
    at = len(there) - for_client
    return Cores(frozenset(there[:at]), frozenset(there[at:] or there))


@contextmanager
def on(cores: frozenset[int]) -> Iterator[None]:
    """What is started in the block stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def served(folder: Path, cores: Cores) -> Iterator[str]:
    """The address of a server of a plan; in the block this process is a client."""
    with ExitStack() as stack:
        with on(cores.server):
            server = stack.enter_context(ServerProcess(str(folder)))
        stack.enter_context(on(cores.client))
        yield server.url


class Seen(NamedTuple):
    """What the streams of a run saw."""

    missed: tuple[float, ...]
    p99_ms: tuple[float | None, ...]


def planned(streams: tuple[str, ...], folder: Path, cache: Path, cores: Cores) -> tuple[Plan, float]:
    """The plan of a mix, and the seconds that it took."""
    options = [part for stream in streams for part in ("-s", stream)]
    began_s = time.perf_counter()
    command = [WEFT, "plan", *options, "-o", str(folder), "--cache", str(cache)]
    with on(cores.server):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"weft plan {' '.join(options)}: {done.stderr or done.stdout}")
    return read_plan(folder), time.perf_counter() - began_s


def at_load(folder: Path, factor: float, seconds: float) -> Workload:
    """The planned workload at a multiple of its rates."""
    return planned_workload(folder).scaled(factor).model_copy(update={"duration_s": seconds + 1, "warmup_s": 1.0})


def predicted(plan: Plan, host: Host, workload: Workload) -> Seen:
    """What the simulator says, by the server's rules and with the same arrivals."""
    streams = predict(plan, host, workload).streams
    return Seen(tuple(stream.missed for stream in streams), tuple(stream.p99_ms for stream in streams))


def measured(plan: Plan, url: str, workload: Workload) -> Seen:
    """What a server really does."""
    figures = [stream.figures for stream in run_load(workload, url, deadlines=plan.deadlines).streams]
    p99_ms = tuple(None if figure.p99_s is None else figure.p99_s * 1e3 for figure in figures)
    return Seen(tuple(1 - (figure.met_share or 0.0) for figure in figures), p99_ms)


def driven(plan: Plan, folder: Path, seconds: float, cores: Cores) -> dict[str, Any]:
    """A served plan at all loads, and the largest one."""
    host, promised = planned_host(folder), plan.predicted.sustainable_factor or 1.0
    rows = []
    with served(folder, cores) as url:
        measured(plan, url, at_load(folder, 0.2, 2.0))
        for share in LOADS:
            workload = at_load(folder, share * promised, seconds)
            says, is_so = predicted(plan, host, workload), measured(plan, url, workload)
            rows.append({"load": share, "predicted": says._asdict(), "measured": is_so._asdict()})
        carried = largest(
            lambda factor: max(measured(plan, url, at_load(folder, factor, seconds)).missed) <= LIMIT, promised
        )
    return {"loads": rows, "promised": promised, "carried": carried}


def better_ones(plan: Plan, folder: Path, carried: float, seconds: float, cores: Cores) -> dict[str, Any]:
    """The options next to the best, and those of them that keep the deadlines at more than the plan carries."""
    rivals = plan.options[1 : 1 + RIVALS]
    better = [option.label for option in rivals if keeps(plan, option, folder, MORE * carried, seconds, cores)]
    return {"rivals": len(rivals), "better": better}


def keeps(plan: Plan, option: PlanOption, folder: Path, factor: float, seconds: float, cores: Cores) -> bool:
    """Whether a server with the settings of an option keeps the deadlines at a load, twice."""
    with tempfile.TemporaryDirectory() as base:
        copy = Path(shutil.copytree(folder, Path(base) / "option"))
        settings = option.settings.model_dump(mode="json", exclude_none=True)
        change(copy / "weft.toml", settings)
        for name, choice in option.models.items():
            change(copy / "models" / name / "weft.toml", {"max_batch": choice.max_batch, "grain_ms": choice.grain_ms})
        with served(copy, cores) as url:
            measured(plan, url, at_load(folder, 0.2, 2.0))
            runs = (measured(plan, url, at_load(folder, factor, seconds)) for _ in range(2))
            return all(max(run.missed) <= LIMIT for run in runs)


def change(file: Path, keys: dict[str, Any]) -> None:
    """Set keys of a file of settings."""
    file.write_text(as_toml({**tomllib.loads(file.read_text()), **keys}))


def mix_driven(name: str, seconds: float, most_tries: int, cores: Cores) -> dict[str, Any]:
    """A mix, planned and driven; again where the machine was another one afterwards."""
    for tries in range(1, most_tries + 1):
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base) / "plan"
            plan, took_s = planned(MIXES[name], folder, Path(base) / "cache", cores)
            result = driven(plan, folder, seconds, cores)
            result |= better_ones(plan, folder, result["carried"], seconds, cores)
            after, _ = planned(MIXES[name], Path(base) / "after", Path(base) / "cache2", cores)
        later = (after.predicted.sustainable_factor or 1.0) / result["promised"]
        steady = 1 / (1 + STEADY) <= later <= 1 + STEADY
        if steady or tries == most_tries:
            break
    settings = plan.settings.model_dump(mode="json")
    row = {
        "mix": name,
        "cores": len(cores.server),
        "client_cores": len(cores.client),
        "plan_s": took_s,
        "settings": settings,
        "machine_after": later,
        "steady": steady,
    }
    return row | {"tries": tries, **result, **judged(result)}


def judged(found: dict[str, Any]) -> dict[str, float]:
    """How far predictions are off at the worst."""
    missed, p99 = [], []
    for row in found["loads"]:
        says, is_so = row["predicted"], row["measured"]
        missed += [abs(a - b) for a, b in zip(says["missed"], is_so["missed"], strict=True)]
        pairs = zip(says["p99_ms"], is_so["p99_ms"], strict=True)
        p99 += [abs(b / a - 1) for a, b in pairs if a and b]
    return {
        "missed_off": max(missed),
        "p99_off": max(p99, default=0.0),
        "load_off": abs(found["carried"] / found["promised"] - 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="plans and what became of them", title_justify="left", box=None, pad_edge=False)
    columns = "mix,policy,lanes,planned in s,promised,carried,load off,missed off (points),p99 off,better,steady"
    for column in columns.split(","):
        table.add_column(column, justify="left" if column in ("mix", "policy") else "right")
    for row in rows:
        table.add_row(
            row["mix"],
            row["settings"]["policy"],
            f"{row['settings']['lanes']} x {row['settings']['threads']}",
            f"{row['plan_s']:.0f}",
            f"{row['promised']:.2f}",
            f"{row['carried']:.2f}",
            f"{row['load_off']:.0%}",
            f"{100 * row['missed_off']:.1f}",
            f"{row['p99_off']:.0%}",
            f"{len(row['better'])} of {row['rivals']}",
            "yes" if row["steady"] else "no",
        )
    console.print(table)
    for claim, holds in verdicts(rows).items():
        console.print(f"{'yes' if holds else 'NO '}  {claim}", highlight=False)


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The claims, and whether they hold."""
    return {
        f"missed deadlines within {100 * POINTS:g} points of the prediction": all(
            row["missed_off"] <= POINTS for row in rows
        ),
        f"the 99th percentile within {P99:.0%}": all(row["p99_off"] <= P99 for row in rows),
        f"the largest load within {LOAD:.0%}": all(row["load_off"] <= LOAD for row in rows),
        f"no option next to the plan keeps the deadlines at {MORE:g} times what the plan carries": not any(
            row["better"] for row in rows
        ),
        "two models are planned in under 60 s, five in under 300 s": all(
            row["plan_s"] < (60 if len(MIXES[row["mix"]]) <= 2 else 300) for row in rows
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=";".join(MIXES), help="names, with ; between them")
    parser.add_argument("--seconds", type=float, default=12.0, help="of every run")
    parser.add_argument("--tries", type=int, default=TRIES, help="of a mix, where the machine changes meanwhile")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--client-cores", type=int, default=0, help="for who sends the load, and nobody else")
    parser.add_argument("--fresh", action="store_true", help="do again what the results have already")
    arguments = parser.parse_args()
    cores = divided(arguments.client_cores)
    environment, rows = machine("onnxruntime"), list[dict[str, Any]]()
    if arguments.results.exists() and not arguments.fresh:
        rows = json.loads(arguments.results.read_text())["rows"]
    for name in arguments.mixes.split(";"):
        if name in {row["mix"] for row in rows}:
            continue
        rows.append(mix_driven(name, arguments.seconds, arguments.tries, cores))
        write_json(arguments.results, {"machine": environment, "rows": rows, "verdicts": verdicts(rows)})
        show(rows)
    show(rows)


if __name__ == "__main__":
    with awake():
        main()
