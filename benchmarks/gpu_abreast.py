"""The experiments of `gpu_weaving.py` on a real GPU: weft's engine and policies over captured segments of torch models.

Needs one NVIDIA GPU that can be partitioned, torch and cuda-bindings; no server runs (gpu_sharing.py has one). Each row
is written to the results as soon as it is measured, and is not measured again by a later run:

    PYTHONPATH=src python benchmarks/gpu_abreast.py [--only REGEX] [--segment-ms 0.5] [--most-s 500] [--results FILE]
    PYTHONPATH=src python benchmarks/gpu_abreast.py --simulate [--results FILE]

The rows are those of gpu_weaving.py, relative to the stand-alone rates and durations of the models in the same run;
`hosts` describes the GPU as measured with segments of that length. `--simulate` adds the simulator's prediction for
the same rows and needs no GPU. `RULE, gates`: a batch is one launch, which leaves at gates between segments. `us`:
microseconds of CPU time per decision; `idle`: share of the time in which no lane had work; `step us`: microseconds of
the engine per started segment, which the simulated engine takes as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from gpu_weaving import BESIDE, FIVE, ONE_FOR_ALL, SATURATED, TOGETHER, URGENT

from weft.devices import Host
from weft.devices.host import Gates
from weft.engine.policies import Option, Policy
from weft.serving.gpu_sharing import GpuSharing
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, prepare, serve_requests, simulate_requests
from weft.workloads.requests import Workload

RESULTS = Path(__file__).parent / "results" / "gpu_abreast.json"
WARM_S = 0.3
SEEDS = (1, 2, 3)
RIVALS = {rule: options for rule, options in URGENT.items() if rule != "orion 1600 us"}
"""Orion's rule with those budgets of gpu_weaving.py that suit it best."""
ONE_BY_ONE: Mapping[str, dict[str, Option]] = {"fifo": {}}
GATES = ", gates"
"""Ends the names of rules whose starts are whole batches, on a GPU with gates."""


def with_gates(rules: Mapping[str, dict[str, Option]], *names: str) -> dict[str, dict[str, Option]]:
    """Rules, and those of *names* once more with gates."""
    return {**rules, **{name + GATES: rules[name] for name in names}}


class Stage:
    """Where workloads run: the GPU, or the simulator of what was measured of it."""

    def __init__(self, host: Host, gpu: Any = None, models: Mapping[str, Any] | None = None) -> None:
        self.host, self._gpu, self._models = host, gpu, models or {}
        self.last: dict[str, float] = {}
        """What the last run cost."""
        self.step_us: dict[str, float] = {}
        """How long the simulated engine is busy with a segment, by rules."""

    def run(
        self, streams: list[dict[str, Any]], rule: str, options: dict[str, Option], seconds: float, seed: int = 1
    ) -> RequestReport:
        stream = [{"max_batch": 1, **settings} for settings in streams]
        raw = {"duration_s": seconds + WARM_S, "warmup_s": WARM_S, "stream": stream}
        gates = Gates() if rule.endswith(GATES) else None
        host = self.host.model_copy(update={"step_s": self.step_us.get(rule, 0.0) / 1e6, "gates": gates})
        name = "fifo" if rule.startswith("alone") else rule.removesuffix(GATES).split()[0]
        case = prepare(Workload.model_validate(raw), host)
        if self._gpu is None:
            return simulate_requests(case, name, options=options, seed=seed).report
        return self._for_real(case, name, options, [stream["model"] for stream in streams], seed)

    def _for_real(
        self, case: Case, name: str, options: dict[str, Option], models: list[str], seed: int
    ) -> RequestReport:
        from gpu_lanes import GpuLanes

        sharing, made = GpuSharing(), []
        sharing.recut(self.host.gpu)
        for at, model in enumerate(models):
            sharing.put(at, [self.host.models[model].like_at(1)], at)
        assert case.on_shares
        case = replace(case, on_shares=replace(case.on_shares, shares=sharing.shares))

        def executor(setting: Any) -> GpuLanes:
            own = [self._models[model] for model in models]
            made.append(GpuLanes(self._gpu, own, setting, sharing if setting.shares else None))
            return made[0]

        gc.collect()
        gc.disable()  # all that torch has is looked through, 0.15 s long, in the midst of a run
        try:
            with clocked() as decisions:
                report = serve_requests(case, name, executor, options=options, seed=seed).report
        finally:
            gc.enable()
        lanes = made[0]
        lanes.drain()
        ended = max(1, lanes.now())
        step_us = (ended - lanes.waited_ns) / max(1, len(lanes.log)) / 1e3
        self.last = {"idle": round(1 - lanes.lanes.busy_ticks / ended, 4), "step us": round(step_us, 1)}
        if decisions:
            self.last |= {"us": round(median(decisions) / 1e3, 1), "us mean": round(mean(decisions) / 1e3, 1)}
        return report

    def alone_s(self, model: str) -> float:
        return self.host.models[model].total_s(1)

    def rates(self, report: RequestReport, seconds: float) -> list[float]:
        return [round(stream.completed * self.alone_s(stream.model) / seconds, 3) for stream in report.streams]

    def saturated(self, models: tuple[str, ...], seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for rule, options in with_gates({**ONE_BY_ONE, **SATURATED}, "fifo", "streams", "abreast").items():
            streams = [{"model": model, "arrival": "closed", "clients": 2, "deadline_ms": 1e5} for model in models]
            speeds = self.rates(self.run(streams, rule, options, seconds), seconds)
            least = round(min(speeds) * len(speeds), 3)
            results[rule] = {"sum": round(sum(speeds), 3), "least of fair": least, "each": speeds, **self.last}
        return results

    def at_random(self, model: str, load: float, times: float, priority: int = 1) -> dict[str, Any]:
        alone_s = self.alone_s(model)
        return {"model": model, "rate": load / alone_s, "deadline_ms": times * alone_s * 1e3, "priority": priority}

    def urgent(self, model: str, beside: str, load: float, seconds: float) -> dict[str, Any]:
        alone_s, results = self.alone_s(model), {}
        asked = self.at_random(model, load, 2, priority=9)
        heavy = {"model": beside, "arrival": "closed", "clients": 2, "deadline_ms": 1e5}
        rules = with_gates({"alone": {}, **RIVALS}, "alone", "priority", "priority-streams", "abreast")
        for rule, options in rules.items():
            is_alone = rule.removesuffix(GATES) == "alone"
            report = self.run([asked] if is_alone else [asked, heavy], rule, options, seconds)
            first = report.streams[0]
            results[rule] = {"p50": round(first.p50_s / alone_s, 3), "p99": round(first.p99_s / alone_s, 3)}
            if not is_alone:
                results[rule]["beside"] = self.rates(report, seconds)[1]
            results[rule] |= self.last
        return results

    def deadlines(self, load: float, seconds: float) -> dict[str, Any]:
        streams = [self.at_random(model, load / len(FIVE), times) for model, times in FIVE.items()]
        results = {}
        for rule, options in with_gates(ONE_FOR_ALL, *ONE_FOR_ALL).items():
            reports = [self.run(streams, rule, options, seconds, seed) for seed in SEEDS]
            worst = mean(report.worst_violation_rate for report in reports)
            missed = mean(report.violation_rate for report in reports)
            results[rule] = {"missed": round(missed, 4), "worst": round(worst, 4), **self.last}
        return results


Row = Callable[[Stage, float], dict[str, Any]]


@cache
def rows() -> dict[str, Row]:
    """What is measured, given where and for how many seconds."""
    together = [group if group[0] != "llm1b-b1" else ("llm1b-b1", "llm1b-b1*") for group in TOGETHER]
    results: dict[str, Row] = {
        f"saturated/{'+'.join(each)}": lambda stage, seconds, each=each: stage.saturated(each, seconds)
        for each in together
    }
    for load in (0.1, 0.2, 0.4):
        for urgent, heavy in BESIDE:
            results[f"urgent/{urgent} beside {heavy}/{load:g}"] = partial(_urgent, urgent, heavy, load)
    for load in (0.5, 0.65, 0.8, 0.95):
        results[f"deadlines/{load:g}"] = lambda stage, seconds, load=load: stage.deadlines(load, 2 * seconds)
    return results


def _urgent(model: str, beside: str, load: float, stage: Stage, seconds: float) -> dict[str, Any]:
    return stage.urgent(model, beside, load, 3 * seconds)


class clocked:
    """Processor time of every eighth decision of any policy, in ns, while it is open: the clock costs time itself."""

    def __enter__(self) -> list[int]:
        self._found: list[int] = []
        self._count = 0
        self._classes = {subclass: subclass.decide for subclass in subclasses(Policy) if "decide" in vars(subclass)}
        for each, decide in self._classes.items():
            each.decide = self._timing(decide)
        return self._found

    def _timing(self, decide: Any) -> Any:
        def timed(policy: Any, view: Any) -> Any:
            self._count += 1
            if self._count % 8:
                return decide(policy, view)
            began = time.thread_time_ns()
            result = decide(policy, view)
            self._found.append(time.thread_time_ns() - began)
            return result

        return timed

    def __exit__(self, *_: object) -> None:
        for subclass, decide in self._classes.items():
            subclass.decide = decide


def subclasses(of: type) -> list[type]:
    return [found for subclass in of.__subclasses__() for found in (subclass, *subclasses(subclass))]


def on_gpu(wanted: set[str], segment_ms: float) -> Stage:
    from gpu_lanes import Segments, TorchGpu, measured_host

    gpu = TorchGpu()
    models = {}
    for name in sorted(wanted):
        began_s = time.perf_counter()
        models[name] = Segments(gpu, name, segment_ms, gates=True)
        made, took_s = models[name], time.perf_counter() - began_s
        total_ms = sum(made.times_s) * 1e3
        print(f"{name}: {made.count} x {total_ms / made.count:.3f} ms, {made.kernels} kernels, {made.speeds}", end="")
        print(f" ({took_s:.1f} s)", flush=True)
    return Stage(measured_host(gpu, list(models.values())), gpu, models)


def models_in(row: str) -> set[str]:
    """The models that a row is about, which its name says."""
    kind, about, *_ = row.split("/")
    return set(FIVE) if kind == "deadlines" else set(re.split(r"\+| beside ", about))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--segment-ms", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    done = (
        json.loads(arguments.results.read_text("utf-8"))
        if arguments.results.is_file()
        else {"hosts": {}, "segment_ms": {}}
    )
    length = f"{arguments.segment_ms:g}"
    wanted = [name for name in rows() if re.search(arguments.only, name) and (name not in done or arguments.simulate)]
    if arguments.simulate:
        wanted = [name for name in wanted if name in done and f"simulated {name}" not in done]
        stages = {segment_ms: Stage(Host.model_validate(host)) for segment_ms, host in done["hosts"].items()}
    else:
        stages = {length: on_gpu({model for name in wanted for model in models_in(name)}, arguments.segment_ms)}
        host = json.loads(stages[length].host.model_dump_json())
        host["models"] = {**done["hosts"].get(length, {}).get("models", {}), **host["models"]}
        done["hosts"][length] = host
    for name in wanted:
        if time.monotonic() - began_s > arguments.most_s:
            print("time is up; start it again for the rest")
            return
        own = done["segment_ms"].setdefault(name, length)
        key = f"simulated {name}" if arguments.simulate else name
        if arguments.simulate:
            stages[own].step_us = {rule: found.get("step us", 0.0) for rule, found in done[name].items()}
        done[key] = rows()[name](stages[own], arguments.seconds)
        print(f"{time.monotonic() - began_s:6.1f} s", key, json.dumps(done[key]), flush=True)
        arguments.results.write_text(json.dumps(done, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
