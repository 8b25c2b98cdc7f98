"""Ten minutes of misbehaving clients: does the server keep its promises to healthy clients, and correct counters?

Healthy clients send about half of what one lane can serve, first alone, then beside clients that disconnect half-way,
send garbage, declare wrong shapes, stall, flood a queue, never read, send hostile values and new shapes, and load and
unload a model all the time; with isolation, a worker is killed every few seconds. Then: no healthy request was lost,
500 was returned only for requests on a killed worker, every request has an answer or a known end, the clients' records
equal the server's counters, memory does not grow, healthy latencies stay within a factor of those without load, no
resource is left over, SIGTERM ends the server with 0. Afterwards come gRPC requests of all sizes, 10 GB of them
(``grpc_sizes``), and their memory must be free again. Run: python benchmarks/soak.py [--minutes 10] [--gigabytes 10]
[--mode T].

With ``--strict 10000`` instead: that number of requests with strict deadlines that are hard to keep, while workers are
killed. By the server's own clock, none may be answered with a result after its deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc_sizes
from chaos import KILLED, NO_MODEL, PATIENCE_S, Chaos, Ledger, chaos_process, infer, reason, write_repository
from machine import awake, machine
from modes import MODES, as_served, settings_for, settings_known, wait_until_learned, write_settings
from processes import WorkerKiller, free_port, memory_bytes
from verdicts import Verdict, show_table, show_verdicts

from weft.base.jsonfile import write_json
from weft.load import LoadResult, StreamLoad, run_load
from weft.serving.process import ServerProcess
from weft.workloads.requests import parse_workload

LOAD = {"chain": 0.35, "pp-ocr-cls": 0.2}
"""Model -> share of the time a request takes alone, nine tenths of it on the lane; chaos comes on top."""
MLP_PER_S = 30.0
DEADLINES_MS = {"mlp": 50.0, "pp-ocr-cls": 100.0, "chain": 500.0}
OCR_SHAPE = (1, 3, 48, 192)
MOST_GROWTH, MOST_TIMES = 0.03, 3.0
KILL_S, SLACK_S = 5.0, 0.1
"""How often a worker is killed, and how far the clocks of those who look may be apart."""
KNOWN_AS = {"expired": "deadline", "unmeetable": "deadline", "too_long": "deadline"}
KNOWN_AS |= dict.fromkeys(("worker_died", "breaker", "quarantined"), KILLED)
"""The server's reasons that have another name in the clients' books."""
Span = tuple[float, float]
SETTLED_S, SAMPLE_S = 180.0, 2.0
"""Until then what is kept of the last requests fills up, and workers that were killed are as warm as the others."""
STRICT_CLIENTS, STRICT_KILL_S, STRICT_CHAINS = 8, 1.0, 0.1
"""Clients with strict deadlines, how often a worker is killed beside them, and their share of long requests."""
SUCCESS, MET, MISSED = "nv_inference_request_success", "weft_deadline_met_total", "weft_deadline_missed_total"
RESULTS, STRICT_RESULTS = (Path(__file__).parent / "results" / name for name in ("soak.json", "soak_strict.json"))


# The server's side of it


class Books(NamedTuple):
    """What the server counted."""

    counted: Counter[str]
    """``model reason`` -> how many, as in the ledger."""
    internal: int
    in_flight: int
    queued: int


def read_books(url: str) -> Books:
    state = get(url, "/weft/state")
    counted: Counter[str] = Counter()
    refused = Counter(state["totals"]["failures"])
    for model in state["models"]:
        refused -= Counter(model["failures"])
        counted[f"{model['name']} success"] = model["requests"] - sum(model["failures"].values())
        counted += _by_reason(model["name"], model["failures"])
    counted += _by_reason(NO_MODEL, refused)
    queued = sum(model["queued"] for model in state["models"])
    return Books(counted, state["totals"]["failures"].get("internal", 0), state["in_flight"], queued)


def _by_reason(model: str, failures: Mapping[str, int]) -> Counter[str]:
    result: Counter[str] = Counter()
    for why, count in failures.items():
        result[f"{model} {KNOWN_AS.get(why, why)}"] += count
    return result


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def read_metrics(url: str) -> dict[str, float]:
    """Sample with its labels -> value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[:1] not in ("", "#")
    }


def metric_sum(metrics: dict[str, float], name: str) -> int:
    return round(sum(value for key, value in metrics.items() if key.partition("{")[0] == name))


class Watch:
    """Samples the memory of the server and its workers in the block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self.samples: list[tuple[float, int]] = []
        """Seconds since the start, bytes."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._stop.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - began_s, memory_bytes(self._pid)))

    def growth(self, settled_s: float) -> float:
        """From what it had when it had settled to what it has at the end, as a share; medians of a tenth each."""
        later = [size for at_s, size in self.samples if at_s >= settled_s] or [size for _, size in self.samples]
        few = max(1, len(later) // 10)
        return statistics.median(later[-few:]) / statistics.median(later[:few]) - 1


class Killing:
    """Ends a worker of the server every few seconds in the block, if it is to."""

    def __init__(self, pid: int, *, kill: bool, every_s: float = KILL_S) -> None:
        self._killer, self._kill, self._stop, self._every_s = WorkerKiller(pid), kill, threading.Event(), every_s
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def kills(self) -> list[float]:
        return self._killer.kills

    def __enter__(self) -> Killing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while self._kill and not self._stop.wait(self._every_s):
            self._killer.kill()


# Healthy clients


def alone(url: str, model: str) -> LoadResult:
    """One request at a time, for a moment: what it takes on this machine today."""
    stream = {"model": model, "arrival": "closed", "deadline_ms": DEADLINES_MS[model], "shapes": _shapes(model)}
    workload = {"duration_s": 3.0, "warmup_s": 1.0, "stream": [stream]}
    return run_load(parse_workload(workload, "soak"), url, deadlines="none")


def healthy(url: str, rates: dict[str, float], seconds: float, seed: int) -> LoadResult:
    """Requests at random times, all of them with soft deadlines."""
    streams = [
        {"model": model, "rate": rate, "deadline_ms": DEADLINES_MS[model], "shapes": _shapes(model)}
        for model, rate in rates.items()
    ]
    workload = {"duration_s": seconds, "warmup_s": min(2.0, seconds / 10), "seed": seed, "stream": streams}
    return run_load(parse_workload(workload, "soak"), url, deadlines="soft")


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    return {"x": OCR_SHAPE} if model == "pp-ocr-cls" else {}


def answers(*results: LoadResult) -> Counter[str]:
    """``model reason`` of all requests, the warm-up's too."""
    return Counter(
        f"{stream.stream.model} {_reason(stream, int(status))}"
        for result in results
        for stream in result.streams
        for status in stream.status
    )


def killed_spans(result: LoadResult) -> list[Span]:
    """When healthy requests were due and answered that a worker took with it, as the answer says."""
    began_s = datetime.fromisoformat(result.started).timestamp()
    return [
        (began_s + due_s, began_s + due_s + latency_s)
        for stream in result.streams
        for due_s, latency_s, status in zip(stream.scheduled_s, stream.latency_s, stream.status, strict=True)
        if _reason(stream, int(status)) == KILLED
    ]


def _reason(stream: StreamLoad, status: int) -> str:
    """By what the first answer of that status said."""
    return reason(status, stream.messages.get(status, ""))


# The report


def judge_latencies(calm: LoadResult, stormy: LoadResult) -> list[Verdict]:
    results = []
    for before, after in zip(calm.streams, stormy.streams, strict=True):
        a, b = before.figures.p99_s, after.figures.p99_s
        times = b / a if a and b else float("nan")
        figures = f"{(a or 0) * 1e3:.1f} -> {(b or 0) * 1e3:.1f} ms, {times:.2f} times"
        promise = f"p99 of {before.stream.model} within {MOST_TIMES:g} times of the calm one"
        results.append(Verdict(promise, times <= MOST_TIMES, figures))
    return results


WITHOUT_RESULT = ("nv_inference_request_failure", "weft_client_errors_total", "weft_requests_refused_total")
"""Counters that together have every request without a result once."""


def judge_books(ledger: Ledger, healthy_ones: Counter[str], books: Books, metrics: dict[str, float]) -> list[Verdict]:
    """Client and server must agree on every model and reason; only abandoned requests may have ended either way."""
    saw, counted = ledger.counted + healthy_ones, books.counted
    gaps = {key: counted[key] - saw[key] for key in sorted({*saw, *counted}) if counted[key] != saw[key]}
    spread = {model: sum(gap for key, gap in gaps.items() if key.split()[0] == model) for model in ledger.abandoned}
    wrong = [
        f"{key}: clients {saw[key]}, server {counted[key]}"
        for key, gap in gaps.items()
        if gap < 0 or key.split()[0] not in ledger.abandoned
    ]
    known = sum(saw.values())
    success = sum(count for key, count in counted.items() if key.endswith(" success"))
    others = sum(counted.values()) - success
    told = (
        metric_sum(metrics, "nv_inference_request_success"),
        sum(metric_sum(metrics, metric) for metric in WITHOUT_RESULT),
    )
    return [
        Verdict(
            "clients and server agree on every model and reason", not wrong, "; ".join(wrong) or f"{known} requests"
        ),
        Verdict(
            "abandoned requests were counted at most once",
            all(0 <= spread[model] <= most for model, most in ledger.abandoned.items()),
            ", ".join(f"{model} {spread[model]} of {most}" for model, most in ledger.abandoned.items()),
        ),
        Verdict("/metrics and /weft/state agree", told == (success, others), f"{told} and {(success, others)}"),
    ]


def judge_run(healthy_ones: Counter[str], ledger: Ledger, books: Books) -> list[Verdict]:
    """What holds at any time, however long it ran."""
    internal = books.internal + sum(
        count for key, count in ledger.answers.items() if key.endswith((" 500", " INTERNAL"))
    )
    odd = {key: count for key, count in healthy_ones.items() if not key.endswith((" success", f" {KILLED}"))}
    left = f"{books.in_flight} in flight, {books.queued} queued"
    return [
        Verdict("nothing was a 500", internal == 0, f"{internal} internal errors"),
        Verdict("every healthy request has its result", not odd, str(odd or f"{sum(healthy_ones.values())} requests")),
        Verdict(
            "chaotic clients saw only what they should", not ledger.problems, "; ".join(ledger.problems[:3]) or "-"
        ),
        Verdict("nothing is left over", books.in_flight == books.queued == 0, left),
    ]


def judge_kills(kills: list[float], killed: list[Span]) -> Verdict:
    """A request may fail because a worker was killed if it was under way then, and not otherwise."""
    strange = [span for span in killed if not any(span[0] - SLACK_S <= at_s <= span[1] + SLACK_S for at_s in kills)]
    figures = f"{len(kills)} kills, {len(killed)} five-hundreds, {len(strange)} of them without a kill"
    return Verdict("five-hundreds only for requests on a killed worker", not strange, figures)


def judge_memory(watch: Watch, settled_s: float) -> Verdict:
    growth, sizes = watch.growth(settled_s), [size / 2**20 for _, size in watch.samples]
    promise = f"memory grew at most {MOST_GROWTH:.0%} after the first {settled_s:.0f} s"
    return Verdict(promise, growth <= MOST_GROWTH, f"{growth:+.1%}, {min(sizes):.0f} to {max(sizes):.0f} MiB")


def judge_end(code: int, output: Iterable[str]) -> Verdict:
    faults = sum("Traceback" in line for line in output)
    told = f"exit {code}, {faults} tracebacks"
    return Verdict("SIGTERM ends it with 0, and its log has no traceback", code == 0 and not faults, told)


# The run


@dataclass(frozen=True)
class Storm:
    """All that was seen in one run."""

    before: list[LoadResult]
    calm: LoadResult
    stormy: LoadResult
    ledger: Ledger
    watch: Watch
    kills: list[float]
    books: Books
    metrics: dict[str, float]
    load_averages: list[float]

    def verdicts(self, settled_s: float) -> list[Verdict]:
        healthy_ones = answers(*self.before, self.calm, self.stormy)
        killed = [*self.ledger.killed, *killed_spans(self.calm), *killed_spans(self.stormy)]
        return [
            *judge_run(healthy_ones, self.ledger, self.books),
            judge_kills(self.kills, killed),
            *judge_books(self.ledger, healthy_ones, self.books, self.metrics),
            *judge_latencies(self.calm, self.stormy),
            judge_memory(self.watch, settled_s),
        ]


def _mean_s(result: LoadResult) -> float:
    found = result.streams[0].figures.mean_s
    assert found is not None, "a model was never answered"
    return found


def settled_books(url: str) -> Books:
    """The books once nothing is under way, or after a while."""
    until_s = time.monotonic() + PATIENCE_S
    while (books := read_books(url)).in_flight and time.monotonic() < until_s:
        time.sleep(0.1)
    return books


def weather(server: ServerProcess, grpc_port: int, total_s: float, *, kill: bool) -> Storm:
    """A calm, then the storm."""
    calm_s = min(60.0, total_s / 4)
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    port = int(server.url.rpartition(":")[2])
    before = [alone(server.url, model) for model in LOAD]
    rates = {
        model: share / _mean_s(latencies_s) for (model, share), latencies_s in zip(LOAD.items(), before, strict=True)
    }
    rates["mlp"] = MLP_PER_S
    storm = context.Process(target=chaos_process, args=(port, grpc_port, total_s - calm_s, begin, results))
    storm.start()
    results.get(timeout=PATIENCE_S)
    calm = healthy(server.url, rates, calm_s, seed=0)
    averages = [os.getloadavg()[0]]
    with Watch(server.pid) as watch, Killing(server.pid, kill=kill) as killing:
        begin.set()
        stormy = healthy(server.url, rates, total_s - calm_s, seed=1)
        averages.append(os.getloadavg()[0])
        ledger: Ledger = results.get(timeout=2 * PATIENCE_S)
    storm.join()
    books, metrics = settled_books(server.url), read_metrics(server.url)
    return Storm(before, calm, stormy, ledger, watch, killing.kills, books, metrics, averages)


def soak(minutes: float, gigabytes: float, mode: str) -> dict[str, Any]:
    """The whole run."""
    total_s = minutes * 60
    grpc_port, known = free_port(), settings_known()
    with tempfile.TemporaryDirectory() as scratch:
        repository = write_repository(Path(scratch) / "models")
        grpc_sizes.write_measured(repository / f"{grpc_sizes.MODEL}.onnx")
        settings = settings_for(mode, known, lanes=1)
        if settings is None:
            raise SystemExit("this version of weft has no isolation; try --mode T")
        config = write_settings(Path(scratch) / "serve.toml", (str(repository), "pp-ocr-cls"), settings)
        with ServerProcess("--config", str(config), f"--grpc-port={grpc_port}", *as_served(known)) as server:
            wait_until_learned(server.url, "chain")
            storm = weather(server, grpc_port, total_s, kill=mode == "P")
            sizes, _, memory = grpc_sizes.send_sizes(server.pid, grpc_port, round(gigabytes * 1e9))
            code = server.stop()
    verdicts = [*storm.verdicts(min(SETTLED_S, total_s / 4)), *sizes, judge_end(code, server.output)]
    show(storm, verdicts, [] if verdicts[-1].kept else list(server.output))
    return {
        "minutes": minutes,
        "mode": mode,
        "load_averages": storm.load_averages,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "answers": dict(sorted(storm.ledger.answers.items())),
        "problems": storm.ledger.problems,
        "kills": len(storm.kills),
        "calm": storm.calm.as_dict(latencies=False),
        "stormy": storm.stormy.as_dict(latencies=False),
        "memory_bytes": storm.watch.samples,
        "grpc_memory_bytes": memory,
    }


# Strict deadlines


def strict_request(rng: random.Random) -> bytes:
    """A request whose deadline is about as far away as its answer; large JSON is written after it was computed."""
    if rng.random() < STRICT_CHAINS:
        return infer("chain", timeout=_about_us(rng, 30_000, 600_000), binary_data_output=rng.random() < 0.5)
    return infer("mlp", timeout=_about_us(rng, 1_000, 100_000))


def _about_us(rng: random.Random, least: float, most: float) -> int:
    return round(least * (most / least) ** rng.random())


async def ask_strictly(port: int, count: int) -> Counter[int]:
    """The statuses of so many strict requests of several clients, each of which sends one at a time."""
    chaos, statuses = Chaos("127.0.0.1", port, None, random.Random(0)), Counter[int]()
    turns = iter(range(count))

    async def ask() -> None:
        while True:
            async with chaos.client() as client:
                for _ in turns:
                    await client.send(strict_request(chaos.rng))
                    status = await client.answer()
                    statuses[status] += 1
                    if not status:
                        break  # the server ended the connection
                else:
                    return

    await asyncio.gather(*(ask() for _ in range(STRICT_CLIENTS)))
    return statuses


def judge_strict(statuses: Mapping[int, int], gained: Mapping[str, int]) -> list[Verdict]:
    """What the server counted of strict requests must be what their clients were told.

    gained: by how much the server's counters grew. Whether a deadline was kept is the server's own judgement, made
    when it handed the answer to the socket, so a result that was late has made ``missed`` larger and ``met`` not.
    """
    results, success, met, missed = statuses.get(200, 0), gained[SUCCESS], gained[MET], gained[MISSED]
    others = sum(statuses.values()) - results
    figures = f"{results} answered with 200, {success} counted as such, {met} deadlines kept"
    return [
        Verdict("no result was sent after its strict deadline", results == success == met, figures),
        Verdict(
            "a missed deadline was never a result, and every 504 missed one",
            statuses.get(504, 0) <= missed <= others,
            f"{missed} missed, {statuses.get(504, 0)} times 504, {others} without a result",
        ),
        Verdict("every request was answered", not statuses.get(0, 0), f"{statuses.get(0, 0)} without an answer"),
    ]


def soak_strict(count: int, mode: str) -> dict[str, Any]:
    """Send strict requests while workers are killed."""
    known = settings_known()
    with tempfile.TemporaryDirectory() as scratch:
        repository = write_repository(Path(scratch) / "models")
        config = write_settings(
            Path(scratch) / "serve.toml", (str(repository),), settings_for(mode, known, lanes=1) or {}
        )
        with ServerProcess("--config", str(config), *as_served(known)) as server:
            wait_until_learned(server.url, "chain")
            before, began_s = read_metrics(server.url), time.monotonic()
            with Killing(server.pid, kill=mode == "P", every_s=STRICT_KILL_S) as killing:
                statuses = asyncio.run(ask_strictly(int(server.url.rpartition(":")[2]), count))
            took_s = time.monotonic() - began_s
            settled_books(server.url)
            after = read_metrics(server.url)
            code = server.stop()
    gained = {name: metric_sum(after, name) - metric_sum(before, name) for name in (SUCCESS, MET, MISSED)}
    verdicts = [*judge_strict(statuses, gained), judge_end(code, server.output)]
    show_verdicts(verdicts)
    print(
        f"{count} requests in {took_s:.0f} s, {len(killing.kills)} kills, by status: {dict(sorted(statuses.items()))}"
    )
    return {"strict": count, "mode": mode, "kills": len(killing.kills), "seconds": took_s, **gained} | {
        "statuses": dict(sorted(statuses.items())),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def show(storm: Storm, verdicts: list[Verdict], log: list[str]) -> None:
    rows = []
    for key, count in sorted(storm.ledger.answers.items()):
        kind, _, status = key.rpartition(" ")
        rows.append((kind, status if status != "0" else "none", str(count)))
    show_table("what chaotic clients saw", ("kind", "status", "times"), rows)
    show_verdicts(verdicts)
    averages = " ".join(f"{average:.2f}" for average in storm.load_averages)
    print(f"load averages of the machine after the calm and after the storm: {averages}")
    for line in log[-60:]:
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of requests over gRPC after the storm")
    parser.add_argument("--mode", choices=MODES, help="T: in threads; P: with isolation, and workers are killed")
    parser.add_argument("--strict", type=int, metavar="N", help="send N strict requests instead")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    environment = machine("onnxruntime")
    mode = arguments.mode or ("P" if "isolation" in settings_known() else "T")
    found = (
        soak_strict(arguments.strict, mode) if arguments.strict else soak(arguments.minutes, arguments.gigabytes, mode)
    )
    if arguments.save:
        write_json(STRICT_RESULTS if arguments.strict else RESULTS, {"machine": environment, **found})
    raise SystemExit(0 if all(result["kept"] for result in found["verdicts"]) else 1)


if __name__ == "__main__":
    with awake():
        main()
