"""weft compared with other servers: an urgent small model and a heavy one, the same requests at the same times.

Models from published packages, one machine, one run; servers take turns, each alone on the machine with an open-loop
client (``open_loop``). Each is installed into its own environment and set up for two models by its documentation
(``peer_servers``). CPU time is that of all processes of a server; the lower bound is ONNX Runtime alone.

    python benchmarks/peers.py [--seconds 30] [--repeats 2] [--peers weft,MLServer] [--environments DIR] [--save]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from machine import awake, machine
from open_loop import Ask, Seen, run_open_loop
from peer_servers import PEERS, Model, Peer, Running, Weft, install, versions
from verdicts import format_figure, show_table

from weft.base.jsonfile import write_json
from weft.load.report import OK
from weft.models.packaged import packaged_models

URGENT, HEAVY = "pp-ocr-cls", "light-resnet50"
SHAPES = {URGENT: (1, 3, 48, 192), HEAVY: (1, 3, 224, 224)}
URGENT_PER_S, URGENT_MS, HEAVY_LOAD = 10.0, 25.0, 0.7
WARMUP_S = 3.0
FIGURES = ("urgent_p50_ms", "urgent_p99_ms", "urgent_on_time", "heavy_per_s", "heavy_p50_ms", "cpu_ms", "failed")
COLUMNS = {
    "urgent_p50_ms": ("urgent p50 ms", ".1f"),
    "urgent_p99_ms": ("urgent p99 ms", ".1f"),
    "urgent_on_time": ("on time", ".1%"),
    "heavy_per_s": ("heavy/s", ".2f"),
    "heavy_p50_ms": ("heavy p50 ms", ".0f"),
    "cpu_ms": ("CPU ms per request", ".1f"),
    "failed": ("failed", ".0f"),
}
RESULTS = Path(__file__).parent / "results" / "peers.json"


class Alone:
    """The models in ONNX Runtime alone, on one thread: what they answer, and what they take when least disturbed."""

    def __init__(self) -> None:
        files = packaged_models()
        self.sessions = {name: _session(str(files[name])) for name in SHAPES}
        self.models = [_model(name, str(files[name]), self.sessions[name]) for name in SHAPES]
        self.answers = {model.name: self._run(model) for model in self.models}
        self.seconds = {model.name: self._seconds(model) for model in self.models}

    def _run(self, model: Model) -> Any:
        return self.sessions[model.name].run(None, {model.input: model.tensor()})[0]

    def _seconds(self, model: Model, rounds: int = 20) -> float:
        x, taken = model.tensor(), []
        for _ in range(rounds):
            began_s = time.perf_counter()
            self.sessions[model.name].run(None, {model.input: x})
            taken.append(time.perf_counter() - began_s)
        return min(taken)


def _session(path: str) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _model(name: str, path: str, session: Any) -> Model:
    (taken,), made = session.get_inputs(), session.get_outputs()[0]
    blank = session.run(None, {taken.name: np.zeros(SHAPES[name], np.float32)})[0]
    return Model(name, path, taken.name, SHAPES[name], made.name, blank.shape, URGENT_MS if name == URGENT else None)


# One server


def measure(peer: Peer, running: Running, alone: Alone, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """One run against one server."""
    urgent, heavy = alone.models
    asks = [Ask(URGENT, peer.request(urgent), URGENT_PER_S), Ask(HEAVY, peer.request(heavy), rate)]
    for model in alone.models:
        peer.check(running.url, model, alone.answers[model.name])
    run_open_loop(asks, running.url, WARMUP_S, seed=seed + 1000)
    before_s = running.cpu_s()
    seen = run_open_loop(asks, running.url, seconds, seed=seed)
    return figures(seen[URGENT], seen[HEAVY], running.cpu_s() - before_s, seconds) | {"server": peer.name, "seed": seed}


def figures(urgent: Seen, heavy: Seen, cpu_s: float, seconds: float) -> dict[str, Any]:
    """What is compared; a request that failed is late, and what was answered after the end is no part of the rate."""
    answered, good = len(urgent.good_s) + len(heavy.good_s), heavy.status == OK
    return {
        "urgent_p50_ms": _ms(urgent.quantile_s(0.5)),
        "urgent_p99_ms": _ms(urgent.quantile_s(0.99)),
        "urgent_on_time": float(np.count_nonzero(urgent.good_s <= URGENT_MS / 1e3) / max(1, len(urgent.status))),
        "heavy_per_s": float(np.count_nonzero(heavy.due_s[good] + heavy.good_s <= seconds) / seconds),
        "heavy_p50_ms": _ms(heavy.quantile_s(0.5)),
        "cpu_ms": cpu_s / answered * 1e3 if answered else None,
        "failed": sum(urgent.failed.values()) + sum(heavy.failed.values()),
        "requests": len(urgent.status) + len(heavy.status),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def floor_cpu_ms(alone: Alone, rate: float) -> float:
    """Processor time per request of the same mix in ONNX Runtime alone."""
    total = URGENT_PER_S * alone.seconds[URGENT] + rate * alone.seconds[HEAVY]
    return total / (URGENT_PER_S + rate) * 1e3


# All of them


def environments(peers: list[Peer], folder: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """Install them; where the python of each is, and what became of it."""
    pythons, setups = {}, {}
    for peer in peers:
        if isinstance(peer, Weft):
            pythons[peer.name], setups[peer.name] = Path(), {"tuned": peer.tuned}
            continue
        print(f"installing {peer.name}", flush=True)
        try:
            python = install(peer, folder / peer.name.replace(" ", "-").lower())
            pythons[peer.name] = python
            setups[peer.name] = {"tuned": peer.tuned, "versions": versions(peer, python)}
        except (RuntimeError, OSError) as problem:
            setups[peer.name] = {"tuned": peer.tuned, "left_out": str(problem)}
            print(f"{peer.name} is left out: {problem}", flush=True)
    return pythons, setups


def compare(
    peers: list[Peer], pythons: dict[str, Path], alone: Alone, seconds: float, repeats: int
) -> list[dict[str, Any]]:
    """Every server in turn, as often as asked; one that fails is told and left out."""
    rate, rows, failed = HEAVY_LOAD / alone.seconds[HEAVY], [], set()
    for seed in range(repeats):
        for peer in peers:
            if peer.name not in pythons or peer.name in failed:
                continue
            with tempfile.TemporaryDirectory(prefix="peer") as folder:
                try:
                    with peer.running(pythons[peer.name], Path(folder), alone.models) as running:
                        rows.append(measure(peer, running, alone, rate, seconds, seed))
                    print(f"{peer.name}: {_line(rows[-1])}", flush=True)
                except (RuntimeError, OSError) as problem:
                    failed.add(peer.name)
                    print(f"{peer.name} is left out: {problem}", flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{COLUMNS[key][0]} {format_figure(row[key], COLUMNS[key][1])}" for key in FIGURES)


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Server -> the median of each figure over its runs; None where a run has none."""
    results: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row["server"] for row in rows):
        runs = [row for row in rows if row["server"] == name]
        results[name] = {key: _median([row[key] for row in runs]) for key in FIGURES}
    return results


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def markdown(found: dict[str, dict[str, float | None]], about: dict[str, Any], title: str) -> str:
    """The table for the documentation."""
    lines = [title, "", "| server | " + " | ".join(COLUMNS[key][0] for key in FIGURES) + " |"]
    lines.append("|---|" + "---|" * len(FIGURES))
    for name, row in found.items():
        version = next(iter(about.get(name, {}).get("versions", {}).values()), "")
        cells = [format_figure(row[key], COLUMNS[key][1]) for key in FIGURES]
        lines.append(f"| {name} {version}".rstrip() + " | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peers", default=",".join(name.replace(",", ";") for name in names), help="; in names for ,")
    parser.add_argument("--environments", type=Path, help="where they are installed, and found the next time")
    parser.add_argument("--markdown", type=Path, help="write the table for the documentation here")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"write {RESULTS.name}, or another file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    wanted = [part.replace(";", ",") for part in arguments.peers.split(",")]
    peers = [peer for peer in PEERS if peer.name in wanted]
    host, alone = machine("onnxruntime"), Alone()
    rate = HEAVY_LOAD / alone.seconds[HEAVY]
    with tempfile.TemporaryDirectory() as scratch:
        pythons, about = environments(peers, arguments.environments or Path(scratch))
        rows = compare(peers, pythons, alone, arguments.seconds, arguments.repeats)
    found, floor = medians(rows), floor_cpu_ms(alone, rate)
    title = (
        f"{URGENT}: {URGENT_PER_S:g}/s, due in {URGENT_MS:g} ms; {HEAVY}: {rate:.1f}/s, {HEAVY_LOAD:.0%} of a core; "
        f"ONNX Runtime alone takes {floor:.1f} ms of processor time per request"
    )
    cells = [(name, *(format_figure(row[key], COLUMNS[key][1]) for key in FIGURES)) for name, row in found.items()]
    show_table(title, ("server", *(COLUMNS[key][0] for key in FIGURES)), cells)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(found, about, title))
    if arguments.save:
        plan = {"seconds": arguments.seconds, "repeats": arguments.repeats, "heavy_per_s": rate, "floor_cpu_ms": floor}
        write_json(arguments.save, {"machine": host, **plan, "servers": about, "medians": found, "runs": rows})


if __name__ == "__main__":
    with awake():
        main()
