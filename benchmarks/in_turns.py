"""Did a change make weft slower? Two checkouts of it, measured in turns.

    git worktree add ../before COMMIT && (cd ../before && make .venv/ready)
    python benchmarks/in_turns.py --before ../before/.venv/bin/python [--only serving] [--save NAME]

Decisions, requests and mapping run in one process per checkout; planning, with cached measurements, and stitching,
without measuring, are commands; serving is a server with a tiny network (``serving_overhead``). CPU time is measured.
The checkouts take turns at every task; the least of the repeats is compared, because other processes disturb it least;
the median is printed as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from machine import awake, machine
from rich.console import Console
from rich.table import Table
from serving_overhead import Target, binary_request, json_request, measure, write_network

from weft.base.jsonfile import write_json
from weft.serving.process import ServerProcess

RESULTS = Path(__file__).parent / "results"
TASKS = {
    "decisions": "for policy in ('layerweaver', 'fifo'): simulate(saturated, policy, weft.Saturated(400))",
    "weft": "simulate(saturated, 'weft', weft.Saturated(60))",
    "short": "for _ in range(200): simulate(saturated[:2], 'layerweaver', weft.Saturated(2))",
    "requests, compiled": "for policy in POLICIES: simulate_requests(case, policy)",
    "requests, plain": "for policy in POLICIES: simulate_requests(brief, policy, compiled=False)",
    "mapping": "weft.map_models('xavier', ['resnet152', 'inception-v4', 'googlenet'])",
}
"""What is timed in a process, by name."""
PROGRAM = """
import sys, time
import weft
from weft.simulation.requests import prepare, simulate_requests
npu = weft.load_npu("nnpi-like")
names = ["resnet50", "ncf", "bert-base"]
saturated = [weft.estimate(weft.load_model(name), npu, batch=4) for name in names]
def workload(seconds):
    return weft.parse_workload({"device": "weaver-plus", "total_rate": 6000.0, "ratio": [2, 1], "duration_s": seconds,
        "warmup_s": 0.02, "stream": [{"model": "resnet50", "deadline_ms": 15.0, "max_batch": 16},
        {"model": "bert-base", "deadline_ms": 130.0, "max_batch": 16}]})
case, brief = prepare(workload(1.0)), prepare(workload(0.1))
POLICIES = ("edf", "layerweaver+", "punctual", "priority")
def simulate(profiles, policy, amount):
    weft.simulate(profiles, npu, policy, amount)
tasks = {name: compile(text, name, "exec") for name, text in TASKS.items()}
for line in sys.stdin:
    began = time.process_time()
    exec(tasks[line.strip()])
    print(time.process_time() - began, flush=True)
"""
"""Reads names of tasks, runs them and prints the processor time of each; uses names that every version has."""
TIMED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
"""Runs a command and prints its processor time, with that of its children."""
MODELS = " ".join(f"{{both}}/family/resnet18-{task}.onnx" for task in range(8))
FAMILY = "models generate resnet18 --tasks 8 --pruning 0.9 -o {both}/family"
"""Writes the models that are stitched."""
COMMANDS = {
    "planning": "plan -s pp-ocr-cls:rate=40,deadline=40 -s magika:rate=30,deadline=60 -o {own}/p --cache {both}/kept",
    "stitching": f"stitch {MODELS} -o {{own}}/stitched.onnx --no-measure",
}
"""What is timed as a command; ``own`` is a folder of the checkout's, ``both`` one that the checkouts share."""
CONNECTIONS = (1, 8)


class Checkout(NamedTuple):
    """One of the two, with what answers its tasks."""

    name: str
    python: str
    process: subprocess.Popen[str]
    targets: Sequence[Target]
    scratch: Path

    def run(self, task: str) -> float:
        """Processor seconds of a task."""
        assert self.process.stdin and self.process.stdout
        print(task, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name}: {task} failed")
        return float(answer)

    def command(self, line: str) -> float:
        """Processor seconds of a command of weft with its children."""
        words = line.format(own=self.scratch, both=self.scratch.parent).split()
        timed = [self.python, "-c", TIMED, str(Path(self.python).parent / "weft"), *words]
        done = subprocess.run(timed, stdout=subprocess.PIPE, text=True, check=True)
        return float(done.stdout)


@contextmanager
def checkout(name: str, python: str, scratch: Path, tasks: Sequence[str], serve: bool) -> Iterator[Checkout]:
    """A process for tasks, and a server where serving is measured."""
    folder = scratch / name
    folder.mkdir()
    program = f"TASKS = { {task: TASKS[task] for task in tasks}!r}\n{PROGRAM}"
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert process.stdin
        stack.callback(process.stdin.close)
        targets: list[Target] = []
        if serve:
            write_network(folder / "models" / "mlp.onnx")
            server = ServerProcess(str(folder / "models"), "--lanes", "1", python=python)
            stack.enter_context(server)
            port = int(server.url.rpartition(":")[2])
            for wire, request in (("json", json_request()), ("binary", binary_request())):
                targets.append(Target(name, wire, server.pid, port, request))
        yield Checkout(name, python, process, targets, folder)


Spent = dict[str, list[list[float]]]
"""Task -> the seconds of each checkout's repeats."""


def serving(wire: int, connections: int, seconds: float) -> Callable[[Checkout], float]:
    """Processor seconds of a server per request."""
    return lambda side: measure(side.targets[wire], connections, seconds).cpu_us / 1e6


def measured(both: Sequence[Checkout], tasks: Sequence[str], repeats: int, seconds: float) -> Spent:
    """What each task takes, the checkouts in turns."""
    asked: dict[str, Callable[[Checkout], float]] = {}
    for task in tasks:
        if task in COMMANDS:
            asked[task] = lambda side, task=task: side.command(COMMANDS[task])
        elif task == "serving":
            for at, wire in enumerate(("json", "binary")):
                for connections in CONNECTIONS:
                    asked[f"{wire}, {connections} connections"] = serving(at, connections, seconds)
        else:
            asked[task] = lambda side, task=task: side.run(task)
    spent: Spent = {}
    for task, ask in asked.items():
        for side in both:  # not counted: it compiles, loads and measures
            ask(side)
        times = [[ask(side) for side in both] for _ in range(repeats)]
        spent[task] = [list(side) for side in zip(*times, strict=True)]
        print(f"{task}: {' '.join(f'{after / before:.3f}' for before, after in times)}", flush=True)
    return spent


def show(spent: Spent) -> list[dict[str, Any]]:
    """Print a row for each task."""
    table = Table(title="processor time, after over before", title_justify="left", box=None, pad_edge=False)
    for column in ("task", "before ms", "after ms", "least", "median"):
        table.add_column(column, justify="left" if column == "task" else "right")
    rows = []
    for task, (before, after) in spent.items():
        least, middle = min(after) / min(before), median(after) / median(before)
        rows.append({"task": task, "before_s": before, "after_s": after, "least": least, "median": middle})
        table.add_row(task, f"{min(before) * 1e3:.3f}", f"{min(after) * 1e3:.3f}", f"{least:.3f}", f"{middle:.3f}")
    Console(width=110).print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, metavar="PYTHON", help="of the environment of the other checkout")
    parser.add_argument("--only", nargs="+", choices=(*TASKS, *COMMANDS, "serving"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one round against a server")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    tasks = arguments.only or [*TASKS, *COMMANDS, "serving"]
    inner = [task for task in tasks if task in TASKS]
    environment = machine("onnxruntime", "numba")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        both = [
            stack.enter_context(checkout(name, python, Path(scratch), inner, "serving" in tasks))
            for name, python in (("before", arguments.before), ("after", sys.executable))
        ]
        if "stitching" in tasks:
            both[0].command(FAMILY)
        rows = show(measured(both, tasks, arguments.repeats, arguments.seconds))
    if arguments.save:
        write_json(RESULTS / f"{arguments.save}.json", {"machine": environment, "rows": rows})


if __name__ == "__main__":
    with awake():
        main()
