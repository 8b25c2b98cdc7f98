"""Does ``weft plan`` report a busy machine, and only a busy one; and are the reasons in a plan true?

Every workload is planned with nothing cached, on the machine as it is and beside a process that keeps a known part of a
core busy. A plan made beside that process must report it, and its use to within 0.15 cores. A plan made without it must
report nothing. Every sentence of a plan is checked against its numbers (``plan_reasons.py``). Run it on an otherwise
idle machine: other processes that use a core are reported as well.

    python benchmarks/plan_disturbed.py [--workloads "one;two"] [--repeats 2] [--loop 0.6] [--seconds 1.5] [--save]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from machine import machine
from plan_reasons import check_reasons
from processes import TICK_S
from verdicts import Verdict, format_figure, show_table, show_verdicts

from weft.base.jsonfile import write_json
from weft.planning.measured import MEASURED
from weft.planning.plan import read_plan
from weft.planning.prediction import planned_host

START = "from weft.cli.main import main; main()"
LOOP = """
import os, sys, time
share, slice_s, parent = float(sys.argv[1]), 0.02, os.getppid()
while os.getppid() == parent:  # whoever started it may be killed
    until_s = time.perf_counter() + slice_s * share
    while time.perf_counter() < until_s:
        pass
    if share < 1:
        time.sleep(slice_s * (1 - share))
"""
WORKLOADS: dict[str, tuple[str, ...]] = {
    "one": ("light-squeezenet:rate=5,deadline=400",),
    "two light": ("pp-ocr-cls:rate=10,deadline=150", "magika:rate=3,deadline=600"),
    "light beside heavy": ("silero-vad:rate=20,deadline=60", "pp-ocr-rec:rate=1,deadline=1500"),
    "two heavy": ("pp-ocr-rec:rate=1,deadline=1500", "light-squeezenet:rate=3,deadline=800"),
    "three": (
        "pp-ocr-cls:rate=6,deadline=200",
        "silero-vad:rate=10,deadline=100",
        "light-shufflenet:rate=2,deadline=400",
    ),
}
"""Name -> streams, as ``weft plan`` takes them."""
NEAR_CORES = 0.15
"""How far the number may be from what the loop took until all was measured, servers that start included, which do not
count; other processes of a quiet machine are in it as well."""
WORDS = "other processes took"
RESULTS = Path(__file__).parent / "results" / "plan_disturbed.json"


@contextmanager
def busy_loop(share: float) -> Iterator[int | None]:
    """The id of a process that keeps a share of a core busy; none where the share is 0."""
    if not share:
        yield None
        return
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(share)])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def used_s(pid: int | None) -> float:
    """The processor time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


class Reading(NamedTuple):
    """The processor time of the loop at a time of day."""

    at_s: float
    used_s: float


def watched(process: subprocess.Popen[bytes], loop: int | None) -> tuple[list[Reading], int]:
    """What the loop used while a process ran, and the exit status of that."""
    readings = [Reading(time.time(), used_s(loop))]
    try:
        while process.poll() is None:
            time.sleep(0.1)
            readings.append(Reading(time.time(), used_s(loop)))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return readings, process.returncode


def cores_of(readings: list[Reading], until_s: float) -> float:
    """What the loop took while the models were measured; after that the planner simulates on all cores."""
    first, last = readings[0], [reading for reading in readings if reading.at_s <= until_s][-1]
    return (last.used_s - first.used_s) / max(1e-9, last.at_s - first.at_s)


def planned(name: str, share: float, seconds: float) -> dict[str, Any]:
    """A workload, planned with nothing cached beside such a loop: what was said, and what the plan has."""
    options = [part for stream in WORKLOADS[name] for part in ("-s", stream)]
    with tempfile.TemporaryDirectory() as base, busy_loop(share) as loop:
        folder = Path(base) / "plan"
        options += ["--cache", f"{base}/cache", "--seconds", f"{seconds:g}", "-o", str(folder)]
        with open(f"{base}/output", "w+") as output:
            command = [sys.executable, "-c", START, "plan", *options]
            readings, code = watched(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), loop)
            output.seek(0)
            said = output.read()
        if code:
            sys.exit(f"weft plan {' '.join(options)}: {said}")
        plan, host = read_plan(folder), planned_host(folder)
        measured_until_s = max(file.stat().st_mtime for file in Path(base, "cache", MEASURED).iterdir())
        page_says = WORDS in (folder / "report.html").read_text()
    lines = [line for line in said.splitlines() if line.startswith("measured") and WORDS in line]
    reasons = check_reasons(plan, host)
    return {
        "workload": name,
        "loop": share,
        "loop_cores": cores_of(readings, measured_until_s),
        "plan_s": readings[-1].at_s - readings[0].at_s,
        "measured": plan.measured.model_dump(mode="json") if plan.measured else None,
        "said": lines[0] if lines else "",
        "says_so": bool(lines),
        "page_says_so": page_says,
        "reasons_true": reasons.true,
        "reasons_false": reasons.false,
        "reasons_unknown": reasons.unknown,
    }


def off(row: dict[str, Any]) -> float:
    """How far the number that is told is from what the loop took, in cores."""
    others = (row["measured"] or {}).get("others_cores")
    return float("inf") if others is None else abs(float(others) - row["loop_cores"])


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """The claims, and whether they hold."""
    busy, quiet = [row for row in rows if row["loop"]], [row for row in rows if not row["loop"]]
    named = [row for row in busy if row["says_so"] and row["page_says_so"]]
    silent = [row for row in quiet if not row["says_so"] and not row["page_says_so"]]
    near = [row for row in busy if off(row) <= NEAR_CORES]
    false = [sentence for row in rows for sentence in row["reasons_false"]]
    return [
        Verdict("every plan made beside the loop says so", len(named) == len(busy), f"{len(named)} of {len(busy)}"),
        Verdict(
            f"with its number, to {NEAR_CORES:g} cores",
            len(near) == len(busy),
            f"off by {format_figure(max(map(off, busy), default=0.0), '.2f')} at most",
        ),
        Verdict("no plan made without it does", len(silent) == len(quiet), f"{len(silent)} of {len(quiet)}"),
        Verdict(
            "every reason is true by the plan's own numbers",
            not false,
            f"{sum(row['reasons_true'] for row in rows)} true, {len(false)} false: {'; '.join(false) or '-'}",
        ),
    ]


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("workload", "loop", "loop took", "others, said", "planned in s", "says so", "true", "false", "unknown")
    table = [
        (
            row["workload"],
            f"{row['loop']:g}",
            f"{row['loop_cores']:.2f}",
            format_figure((row["measured"] or {}).get("others_cores"), ".2f"),
            f"{row['plan_s']:.0f}",
            "yes" if row["says_so"] else "no",
            str(row["reasons_true"]),
            str(len(row["reasons_false"])),
            str(len(row["reasons_unknown"])),
        )
        for row in rows
    ]
    show_table("plans on a quiet machine and beside a busy loop", columns, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=";".join(WORKLOADS), help="names, with ; between them")
    parser.add_argument("--repeats", type=int, default=2, help="plans of each workload, quiet and disturbed each")
    parser.add_argument("--loop", type=float, default=0.6, help="the part of a core that is kept busy")
    parser.add_argument("--seconds", type=float, default=1.5, help="as of weft plan")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/plan_disturbed.json")
    arguments = parser.parse_args()
    if strange := [name for name in arguments.workloads.split(";") if name not in WORKLOADS]:
        sys.exit(f"--workloads {strange[0]}: there are {', '.join(WORKLOADS)}")
    if not 0 < arguments.loop <= 1:
        sys.exit(f"--loop {arguments.loop:g}: must be above 0 and at most 1, a whole core")
    environment, rows = machine("onnxruntime"), list[dict[str, Any]]()
    for _ in range(arguments.repeats):
        for name in arguments.workloads.split(";"):
            for share in (0.0, arguments.loop):
                rows.append(planned(name, share, arguments.seconds))
                show(rows)
    verdict = verdicts(rows)
    show_verdicts(verdict)
    if arguments.save:
        claims = {claim.promise: claim.kept for claim in verdict}
        write_json(RESULTS, {"machine": environment, "seconds": arguments.seconds, "rows": rows, "verdicts": claims})


if __name__ == "__main__":
    main()
