"""The effect of an attack on other clients: health probes, other models, the server's shutdown.

One attack at a time (``attacks``) on a server of its own, in threads (T) and with isolation (P). Two other models get
requests at random times, as from independent clients, and health gets 1000 probes over new and 1000 over open
connections, first without and then with the attack. A latency counts from the time at which the request was due
(``open_loop``). Then SIGTERM during the attack; and, on another server, SIGTERM twice. At last: the time until a
request past its deadline, or past ``max_compute_s``, frees its lane.

    python benchmarks/under_attack.py [--attacks loop,json] [--modes T,P] [--seconds 20] [--save]

Ratios are within one run. The servers have two lanes, so that one hostile request leaves one free. A scene that other
machines on the same hardware disturbed is repeated (``undisturbed``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from attacks import (
    ATTACKS,
    Attack,
    attack_process,
    expand_request,
    expanded_shape,
    loop_request,
    write_models,
)
from chaos import infer_tensors
from hostile_models import write_expand
from machine import awake, machine
from modes import MODES, as_served, settings_for, settings_known, wait_until_learned, write_settings
from open_loop import Ask, Seen, run_open_loop
from processes import Process, family, free_port, memory_bytes, survivors
from soak import get
from undisturbed import PATIENCE_S as PATIENCE_AGAIN_S
from undisturbed import Undisturbed
from verdicts import Verdict, finite, format_figure, show_table, show_verdicts

from weft.base.jsonfile import write_json
from weft.load.report import OK
from weft.serving.process import ServerProcess

HEALTH_S, TIMES, LEAVE_S, AT_ONCE_S, FREED_S = 0.1, 2.0, 2.0, 1.0, 1.0
"""The targets: an answer about health, p99 beside the calm one, beyond ``drain_s``, a second SIGTERM, a lane."""
TRIES = 1000
OTHERS_PER_S = {"mlp": 40.0, "chain": 10.0}
LEARNED = (*OTHERS_PER_S, "wide", "loop", "expand")
"""Models that are there from the start: what is learned of them is not what disturbs others."""
PROBES = ("health, fresh", "health, kept")
DRAIN_S, COMPUTE_S, DEADLINE_S = 3.0, 2.0, 1.0
LANE = {"lanes": 1, "drain_s": DRAIN_S, "max_compute_s": COMPUTE_S}
WARMUP_S, BEGIN_S = 3.0, 1.0
"""The attack begins in the warm-up, which is not counted."""
HOLD_S, BETWEEN_S, PATIENCE_S = 3.0, 0.3, 30.0
RESULTS = Path(__file__).parent / "results" / "under_attack.json"


# Servers


def started(config: Path, grpc_port: int) -> ServerProcess:
    return ServerProcess("--config", str(config), f"--grpc-port={grpc_port}", *as_served(settings_known()))


class Attackers:
    """An attack that waits in a process of its own until it may begin."""

    def __init__(self, attack: Attack, server: ServerProcess, grpc_port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._begin, self._stop, self._results = context.Event(), context.Event(), context.Queue()
        ports = int(server.url.rpartition(":")[2]), grpc_port
        shared = (self._begin, self._stop, self._results)
        self._process = context.Process(target=attack_process, args=(attack.name, ports, server.pid, *shared))
        self.tally: dict[str, int] = {}

    def __enter__(self) -> Attackers:
        self._process.start()
        self._results.get(timeout=PATIENCE_S)
        return self

    def begin(self) -> None:
        self._begin.set()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._begin.set()
        with contextlib.suppress(Exception):  # one that hangs has no tally
            self.tally = {key: count for key, count in self._results.get(timeout=PATIENCE_S).items() if count}
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def ended(pid: int, within_s: float) -> float | None:
    """Seconds until a child of ours has ended; None if it has not in time. Its status is left for who started it."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + within_s:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return time.monotonic() - began_s
        time.sleep(0.005)
    return None


@dataclass(frozen=True)
class Ending:
    """How a server went."""

    took_s: float | None
    """From the last signal on; None where it had to be killed."""
    exit_code: int
    left: int
    """Processes of it that went on without it."""


def end(server: ServerProcess, signals: int, limit_s: float) -> Ending:
    """Send so many SIGTERMs, one after another, and wait."""
    members = family(server.pid)
    for number in range(signals):
        if number:
            ended(server.pid, BETWEEN_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
    took_s = ended(server.pid, limit_s + PATIENCE_S)
    if took_s is None:
        os.kill(server.pid, signal.SIGKILL)
    code = server.stop()
    return Ending(took_s, code, _end_rest(members))


def _end_rest(members: list[Process]) -> int:
    """End what a server left behind, a second after it has gone; how many those were."""
    until_s = time.monotonic() + 1.0
    while (left := survivors(members)) and time.monotonic() < until_s:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return len(left)


# What others see


def bystander_requests() -> list[Ask]:
    """Two models of others, and the two ways to ask for health."""
    tensors = {"mlp": np.zeros((1, 64), np.float32), "chain": np.zeros((64, 512), np.float32)}
    return [Ask(name, infer_tensors(name, {"x": tensors[name]}), rate) for name, rate in OTHERS_PER_S.items()]


def probes(seconds: float) -> list[Ask]:
    line = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
    per_s = TRIES / seconds
    fresh, kept = PROBES
    return [
        Ask(fresh, line + b"Connection: close\r\n\r\n", per_s, regular=True, fresh=True),
        Ask(kept, line + b"\r\n", per_s, regular=True),
    ]


@dataclass(frozen=True)
class Scene:
    """One attack in one mode."""

    attack: str
    mode: str
    calm: dict[str, Seen]
    hit: dict[str, Seen]
    answers: dict[str, int]
    """What the attackers were answered."""
    memory_bytes: int
    """The most that the server held meanwhile."""
    first: Ending
    second: Ending

    def verdicts(self) -> list[Verdict]:
        results = [
            judge_health(self.calm[name], self.hit[name], self.where, ATTACKS[self.attack].health_s) for name in PROBES
        ]
        results += [judge_others(self.calm[name], self.hit[name], self.where) for name in OTHERS_PER_S]
        results.append(judge_ending(self.first, DRAIN_S + LEAVE_S, f"{self.where}: SIGTERM ends it"))
        results.append(judge_ending(self.second, AT_ONCE_S, f"{self.where}: a second SIGTERM ends it"))
        return results

    @property
    def where(self) -> str:
        return f"{self.attack} ({self.mode})"


def p99_s(seen: Seen) -> float:
    """Of all requests; one that failed took for ever."""
    times = np.where(seen.status == OK, seen.latency_s, np.inf)
    return float(np.quantile(times, 0.99, method="inverted_cdf")) if len(times) else np.nan


def p99_times(calm: Seen, hit: Seen) -> float:
    """How many times the calm p99 the other one is."""
    calm_s, hit_s = p99_s(calm), p99_s(hit)
    return hit_s / calm_s if np.isfinite(calm_s) else np.nan


def judge_health(calm: Seen, seen: Seen, where: str, limit_s: float = HEALTH_S) -> Verdict:
    slow = int(np.count_nonzero(seen.good_s > limit_s))
    failed = sum(seen.failed.values())
    figures = f"{len(seen.status)} tries, {slow} slower, {failed} failed, slowest {ms(seen.quantile_s(1.0))}"
    figures += f" (calm {ms(calm.quantile_s(1.0))})" + "".join(f"; {text}" for text in list(seen.said.values())[:1])
    promise = f"{where}: {seen.name}: every answer within {limit_s * 1e3:g} ms"
    return Verdict(promise, not slow and not failed and len(seen.status) > 0, figures)


def judge_others(calm: Seen, hit: Seen, where: str) -> Verdict:
    times, failed = p99_times(calm, hit), sum(hit.failed.values())
    figures = f"p99 {ms(p99_s(calm))} -> {ms(p99_s(hit))}, {times:.2f} times, {failed} of {len(hit.status)} failed"
    figures += "".join(f"; {text}" for text in list(hit.said.values())[:1])
    return Verdict(f"{where}: p99 of {hit.name} within {TIMES:g} times of the calm one", times <= TIMES, figures)


def judge_ending(ending: Ending, limit_s: float, what: str) -> Verdict:
    took_s, left = ending.took_s, f", {ending.left} processes left behind" if ending.left else ""
    figures = f"{format_figure(took_s, '.2f', ' s') if took_s is not None else 'killed'}, exit {ending.exit_code}{left}"
    kept = took_s is not None and took_s <= limit_s and not ending.left
    return Verdict(f"{what} within {limit_s:g} s", kept, figures)


def ms(seconds: float | None) -> str:
    return format_figure(None if seconds is None else seconds * 1e3, ".1f", " ms")


class Peak:
    """The most memory a server holds in the block."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid, self._stop = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self.bytes = max(self.bytes, memory_bytes(self._pid))


def play(attack: Attack, mode: str, config: Path, seconds: float) -> Scene:
    """Calm, attack, SIGTERM; then, on a second server, attack and SIGTERM twice."""
    asks, port = [*bystander_requests(), *probes(seconds)], free_port()
    with started(config, port) as server, Attackers(attack, server, port) as attackers:
        wait_until_learned(server.url, *LEARNED)
        run_open_loop(bystander_requests(), server.url, WARMUP_S)
        calm = run_open_loop(asks, server.url, seconds)
        with Peak(server.pid) as peak:
            hit = run_open_loop(
                asks, server.url, WARMUP_S + seconds, seed=1, grace_s=PATIENCE_S, then={BEGIN_S: attackers.begin}
            )
        first = end(server, 1, DRAIN_S + LEAVE_S)
    with started(config, port) as server, Attackers(attack, server, port) as more:
        more.begin()
        time.sleep(HOLD_S)
        second = end(server, 2, AT_ONCE_S)
    hit = {name: seen.after(WARMUP_S) for name, seen in hit.items()}
    return Scene(attack.name, mode, calm, hit, attackers.tally, peak.bytes, first, second)


# Lanes


@dataclass(frozen=True)
class Freed:
    """A request that ran past what it was allowed, and when its lane was free again."""

    request: str
    mode: str
    bound: str
    after_s: float | None
    """From when it should have ended; None if it never was, negative if the work was done before."""
    limit_s: float

    def verdict(self) -> Verdict:
        promise = f"{self.request} ({self.mode}) past its {self.bound} frees its lane within {self.limit_s:.1f} s"
        kept = self.after_s is not None and self.after_s <= self.limit_s
        return Verdict(promise, kept, format_figure(self.after_s, ".2f", " s") if self.after_s is not None else "never")


def free_after_s(url: str, request: bytes, bound_s: float, limit_s: float) -> float | None:
    """Send one, and watch the only lane until it is free."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request)
        sent_s = time.monotonic()
        began = False
        while time.monotonic() < sent_s + bound_s + limit_s + PATIENCE_S:
            busy = any(lane["busy"] for lane in get(url, "/weft/state")["lanes"])
            if began and not busy:
                return time.monotonic() - sent_s - bound_s
            began = began or busy
            time.sleep(0.01)
    return None


def lanes_freed(mode: str, folder: Path, settings: dict[str, Any]) -> Iterator[Freed]:
    """By deadline, and by what the server allows at most, of a loop of small operators and of a large operator."""
    config = write_settings(folder / f"lane-{mode}.toml", (str(folder / "models"),), settings)
    shape = expanded_shape()
    operator_s = longest_operator_s(folder, shape) if mode == "T" else 0.0
    requests: dict[str, Callable[..., bytes]] = {"loop": loop_request, "expand": lambda **p: expand_request(shape, **p)}
    bounds: dict[str, tuple[float, dict[str, Any]]] = {"deadline": (DEADLINE_S, {"timeout": int(DEADLINE_S * 1e6)})}
    if "max_compute_s" in settings:
        bounds["max_compute_s"] = (COMPUTE_S, {})
    for (name, request), (bound, (bound_s, parameters)) in _pairs(requests, bounds):
        limit_s = FREED_S + (operator_s if name == "expand" else 0.0)
        with started(config, 0) as server:
            after_s = free_after_s(server.url, request(**parameters), bound_s, limit_s)
            end(server, 2, AT_ONCE_S)
        yield Freed(name, mode, bound, after_s, limit_s)


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return ((a, b) for a in one.items() for b in other.items())


def longest_operator_s(folder: Path, shape: tuple[int, int]) -> float:
    """What the bomb's longest operator takes on one thread, alone, as ONNX Runtime measures it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    path = write_expand(folder / "alone.onnx")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones(1, np.float32), "shape": np.array(shape)})
    events = json.loads(Path(session.end_profiling()).read_text())
    return max(event["dur"] for event in events if event["cat"] == "Node") / 1e6


# The report


def as_row(scene: Scene) -> dict[str, Any]:
    """A scene as the file has it."""
    return {
        "attack": scene.attack,
        "mode": scene.mode,
        "health": {name: health_figures(scene.hit[name]) for name in PROBES},
        "calm_health": {name: health_figures(scene.calm[name]) for name in PROBES},
        "others": {name: other_figures(scene.calm[name], scene.hit[name]) for name in OTHERS_PER_S},
        "attackers_answers": scene.answers,
        "memory_bytes": scene.memory_bytes,
        "sigterm": asdict(scene.first),
        "second_sigterm": asdict(scene.second),
    }


def health_figures(seen: Seen) -> dict[str, Any]:
    return {
        "tries": len(seen.status),
        "slower": int(np.count_nonzero(seen.good_s > HEALTH_S)),
        "failed": {str(status): count for status, count in seen.failed.items()},
        "p50_ms": _ms(seen.quantile_s(0.5)),
        "p99_ms": _ms(seen.quantile_s(0.99)),
        "slowest_ms": [round(latency_s * 1e3, 3) for latency_s in np.sort(seen.good_s)[::-1][:10].tolist()],
        "client_lag_p99_ms": _ms(_lag_s(seen)),
    }


def other_figures(calm: Seen, hit: Seen) -> dict[str, Any]:
    return {
        "requests": len(hit.status),
        "failed": {str(status): count for status, count in hit.failed.items()},
        "said": {str(status): text for status, text in hit.said.items()},
        "calm_p50_ms": _ms(calm.quantile_s(0.5)),
        "p50_ms": _ms(hit.quantile_s(0.5)),
        "calm_p99_ms": _ms(p99_s(calm)),
        "p99_ms": _ms(p99_s(hit)),
        "times": finite(p99_times(calm, hit)),
        "client_lag_p99_ms": _ms(_lag_s(hit)),
    }


def _ms(seconds: float | None) -> float | None:
    known = finite(seconds)
    return None if known is None else round(known * 1e3, 3)


def _lag_s(seen: Seen) -> float | None:
    known = seen.lag_s[~np.isnan(seen.lag_s)]
    return float(np.quantile(known, 0.99)) if len(known) else None


def show(scenes: list[Scene]) -> None:
    ratios = tuple(f"{name} p99" for name in OTHERS_PER_S)
    columns = ("attack", "mode", "fresh: slowest", "kept: slowest", "over 100 ms", "failed", *ratios)
    show_table("under attack", (*columns, "SIGTERM", "second", "peak"), map(_shown, scenes), left=2)


def _shown(scene: Scene) -> tuple[str, ...]:
    seen = [scene.hit[name] for name in PROBES]
    over = sum(int(np.count_nonzero(probe.good_s > HEALTH_S)) for probe in seen)
    failed = sum(sum(probe.failed.values()) for probe in seen)
    ratios = [f"{p99_times(scene.calm[name], scene.hit[name]):.2f} x" for name in OTHERS_PER_S]
    ends = ["killed" if ending.took_s is None else f"{ending.took_s:.2f} s" for ending in (scene.first, scene.second)]
    slowest = [ms(probe.quantile_s(1.0)) for probe in seen]
    peak = f"{scene.memory_bytes >> 20} MiB"
    return (scene.attack, scene.mode, *slowest, str(over), str(failed), *ratios, *ends, peak)


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    attacks: tuple[str, ...]
    modes: tuple[str, ...]
    seconds: float
    lanes: int
    freed: bool
    patience_s: float


def run(plan: Plan, folder: Path, undisturbed: Undisturbed) -> tuple[list[Scene], list[Freed]]:
    """All scenes of all modes, and the lanes."""
    scenes: list[Scene] = []
    freed: list[Freed] = []
    known = settings_known()
    write_models(folder / "models")
    for mode in plan.modes:
        settings = settings_for(mode, known, lanes=plan.lanes, drain_s=DRAIN_S)
        if settings is None:
            print(f"{mode} is left out: this version of weft has no isolation")
            continue
        config = write_settings(folder / f"{mode}.toml", (str(folder / "models"),), settings)
        for attack in (ATTACKS[name] for name in plan.attacks if mode in ATTACKS[name].modes):
            print(f"{attack.name} ({mode}): {attack.what}", flush=True)
            scenes.append(undisturbed(partial(play, attack, mode, config, plan.seconds)))
            show_verdicts(scenes[-1].verdicts())
        if plan.freed:
            freed += lanes_freed(mode, folder, settings_for(mode, known, **LANE) or {})
    return scenes, freed


def parse() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attacks", default=",".join(ATTACKS), help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="T: in threads, P: with isolation")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase, calm and attack")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--patience", type=float, default=PATIENCE_AGAIN_S, help="seconds for scenes done again")
    parser.add_argument("--no-freed", action="store_true", help="leave out how soon lanes are freed")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"write {RESULTS.name}, or another file")
    arguments = parser.parse_args()
    attacks, modes = tuple(arguments.attacks.split(",")), tuple(arguments.modes.split(","))
    for name in {*attacks} - {*ATTACKS} | {*modes} - {*MODES}:
        parser.error(f"{name}: no such attack or mode")
    return Plan(
        attacks, modes, arguments.seconds, arguments.lanes, not arguments.no_freed, arguments.patience
    ), arguments.save


def main() -> None:
    plan, file = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    environment, undisturbed = machine("onnxruntime"), Undisturbed(plan.patience_s)
    with tempfile.TemporaryDirectory() as scratch:
        scenes, freed = run(plan, Path(scratch), undisturbed)
    verdicts = [verdict for scene in scenes for verdict in scene.verdicts()] + [row.verdict() for row in freed]
    show(scenes)
    show_verdicts(verdicts)
    if file:
        results = {
            "attacks": {name: ATTACKS[name].what for name in plan.attacks},
            "scenes": [as_row(scene) for scene in scenes],
            "lanes_freed": [asdict(row) for row in freed],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        again = {"scenes_done_again": undisturbed.again, "disturbed_scenes": undisturbed.counted}
        write_json(file, {"machine": environment, "plan": asdict(plan), "drain_s": DRAIN_S, **again, **results})
    raise SystemExit(0 if all(verdict.kept for verdict in verdicts) else 1)


if __name__ == "__main__":
    with awake():
        main()
