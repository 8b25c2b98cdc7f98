"""A rule stands once: the policy calls the function that its compiled loop takes in, and both change with it.

Run as a script, with the JIT off, this file plants a fault in one rule after another and prints how many changed what
the policy and the loop decide, alike.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from types import FunctionType
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.engine.naive import program
from tests.engine.workloads import Flow, case_of
from tests.kernels.jit import said_with_the_jit_off
from tests.kernels.saturated import OPTIONS, compiled_run, plain_run
from tests.support.refill import crowded_case, serve_compiled
from weft import kernels
from weft.engine import policies
from weft.engine.lateness import SOFT
from weft.engine.policies import Setting
from weft.engine.policies.batching import LazyBatching, Serial
from weft.engine.policies.fluid import Fluid
from weft.engine.policies.top_up import TopUp
from weft.kernels import compiling, rules
from weft.kernels.compiling import borrowed
from weft.simulation.requests import plain, simulate_requests

RULES: dict[str, FunctionType] = {name: rule for name, rule in vars(rules).items() if isinstance(rule, FunctionType)}


def modules(package: Any) -> list[Any]:
    return [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]


# One function for both


def called_by_policies() -> set[str]:
    sources = [ast.parse(inspect.getsource(module)) for module in modules(policies)]
    uses = [node for source in sources for node in ast.walk(source) if isinstance(node, ast.Attribute)]
    return {node.attr for node in uses if isinstance(node.value, ast.Name) and node.value.id == "rules"}


def taken_in_by_loops() -> dict[str, FunctionType]:
    parts = [part for module in modules(kernels) for part in vars(module).values()]
    functions = [getattr(part, "py_func", None) for part in parts]
    return {each.__name__: each for each in functions if each and each.__module__ == rules.__name__}


def test_every_rule_is_called_by_a_policy_and_taken_in_by_a_loop():
    assert called_by_policies() == set(RULES)
    assert taken_in_by_loops() == RULES


def test_rules_know_nothing_of_numba():
    """A policy that is asked one thing at a time is served best by a plain function."""
    assert not any(isinstance(node, ast.Import) for node in ast.walk(ast.parse(inspect.getsource(rules))))


# The same numbers, compiled

TICKS = st.integers(0, 2**44) | st.integers(0, 40)
RANGES = {
    "deadline": TICKS | st.just(1 << 62),
    "last_issued": st.integers(-1, 2**40),
    "layer": st.integers(0, 3),
    "priority": st.integers(1, 9),
    "percent": st.integers(0, 10_000),
    "patience": st.integers(1, 1_000_000),
    "compute_price": st.integers(1, 2**16),
    "memory_price": st.integers(1, 2**16),
    "share": st.floats(0, 1),
    "size": st.integers(1, 64),
    "late": st.integers(0, 640),
    "requests": st.integers(0, 2**17),
    "max_batch": st.integers(1, 64),
    "batch_ticks": st.integers(0, 2**40),
    **dict.fromkeys(("inherent", "wants_weights", "wants_space", "compute_bound"), st.booleans()),
}


@pytest.mark.parametrize("name", RULES)
def test_a_compiled_rule_is_the_plain_one(name):
    rule = RULES[name]
    compiled = numba.njit(rule)

    @settings(max_examples=12, derandomize=True, deadline=None)
    @given(st.tuples(*(RANGES.get(each, TICKS) for each in inspect.signature(rule).parameters)))
    def equal(numbers: tuple[Any, ...]) -> None:
        assert compiled(*numbers) == rule(*numbers)

    equal()


# What is compiled is kept by all sources


def test_a_loop_is_compiled_again_when_a_rule_changes(monkeypatch):
    """What is kept on disk bears the stamp of the rules, which numba does not look at."""

    def changed(module: str, found: dict[str, str]) -> dict[str, str]:
        return {**sources(module, found), rules.__name__: "another rule"}

    sources = compiling._sources
    aimt, numbers = "weft.kernels.aimt", "weft.kernels.tiled"
    before = compiling.stamp(aimt)
    assert {rules.__name__, "weft.kernels.buffer", aimt} <= set(sources(aimt, {}))
    assert rules.__name__ not in sources(numbers, {})
    monkeypatch.setattr(compiling, "_sources", changed)
    assert compiling.stamp.__wrapped__(aimt) != before


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from weft.kernels import compiling
compiling.stamp.cache_clear()
compiling._sources = lambda module, found: {{module: {text!r}}}
from doubled import twice
print(twice(21), sum(twice.stats.cache_hits.values()))
"""


def test_what_was_kept_is_used_until_the_stamp_changes(tmp_path):
    (tmp_path / "doubled.py").write_text(
        "from weft.kernels.compiling import loop\n\n\n@loop\ndef twice(x):\n    return 2 * x\n"
    )
    found = []
    for text in ("one rule", "one rule", "another rule"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(folder=str(tmp_path), text=text)],
            cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split())
    assert found == [["42", "0"], ["42", "1"], ["42", "0"]]


def test_what_another_version_kept_is_not_read(tmp_path):
    """It may name a class that is gone; the function has the same name and place."""
    for name in ("Pair", "Couple"):
        (tmp_path / "summed.py").write_text(
            "from typing import NamedTuple\nfrom weft.kernels.compiling import loop\n\n\n"
            f"class {name}(NamedTuple):\n    a: int\n    b: int\n\n\n"
            "@loop\ndef summed(pair):\n    return pair.a + pair.b\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", f"import summed; print(summed.summed(summed.{name}(1, 2)))"],
            cwd=tmp_path,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout, done.stderr) == ("3\n", "")


def test_borrowed_arrays_are_the_arrays_themselves():
    @numba.njit
    def count_up(numbers, table):
        (numbers, table), most = borrowed(((numbers, table), len(numbers)))
        for i in range(most):
            numbers[i] += table[0, i]
        return most

    numbers, table = np.arange(4), np.ones((2, 4), np.int64)
    owners = sys.getrefcount(numbers), sys.getrefcount(table)
    assert count_up(numbers, table) == 4
    assert numbers.tolist() == [1, 2, 3, 4]
    assert (sys.getrefcount(numbers), sys.getrefcount(table)) == owners


# Faults in a rule befall both


def cheap_fetch(  # its parameters are those of the rule, which is called by keyword
    fetch, compute, fetch_end, channel_start, array_free, compute_price, memory_price, shortest, longest
):
    return fetch


FAULTS: dict[str, Callable[..., Any]] = {
    "resumes": lambda layer, last_issued: last_issued,
    "fifo_key": lambda resumes, arrival, turn, stream: (resumes, -arrival, turn, -stream),
    "edf_key": lambda deadline, arrival: (-deadline, arrival),
    "waited": lambda now, arrival, whole, remaining: arrival,
    "tokens": lambda priority, whole, waited: 10 * whole,
    "level": lambda tokens, whole: 1,
    "rank": lambda priority, waited, whole, patience: -priority,
    "worth": lambda priority, size, waited, whole: 1.0 / (priority * size),
    "slack": lambda deadline, now, remaining, percent: now + remaining - deadline,
    "reachable_due": lambda deadline, arrival, earliest: earliest - deadline,
    "idle": lambda fetch, compute, fetched, prefetch, array, buffer, largest: (0, 0, compute, True, 0),
    "weave_key": lambda idle, inherent, distance: (-idle, distance),
    "weave_due_key": lambda idle, deadline: (-idle, deadline),
    "helps_starved": lambda wants_weights, wants_space, heavy: (
        not wants_weights if heavy else wants_weights or not wants_space
    ),
    "priced_idle": cheap_fetch,
    "aimt_key": lambda fetch, compute, last_issued, free, distance, a, b: (0, fetch),
    "within_lag": lambda progress, gain, least, max_lag: False,
    "fluid_overhead": lambda new_total, new_after_exit, merged_after_exit: 0,
    "leaving_cost": lambda share, size, passed, late, miss: share * miss * late,
    "backlog_cost": lambda left, most, full, passed: 1000.0 * left,
    "backlog_ticks": lambda left, most, full: -full * left * left,
}


def saturated() -> Iterator[tuple[Any, Any]]:
    """What plain and compiled loops decide on streams that never run dry."""
    random = Random(3)
    for streams in (2, 3, 4):
        buffer = random.randrange(15, 40)
        programs = tuple(
            program(f"m{i}", *((random.randrange(buffer + 1), random.randrange(1, 60)) for _ in range(5)))
            for i in range(streams)
        )
        setting = Setting(programs, buffer, 2)
        for name in ("layerweaver", "aimt", "weft"):
            options = OPTIONS[name]
            yield tuple(run(name, setting, None, options)[0] for run in (plain_run, compiled_run))


@cache
def request_cases() -> list[Any]:
    random, found = Random(5), []
    for _ in range(3):
        flows = []
        for _ in range(3):
            layers = [(random.randrange(1, 9), random.randrange(14)) for _ in range(3)]
            flows.append(
                Flow(
                    (layers, [(size, busy + 2) for size, busy in layers]),
                    arrivals=tuple(sorted(random.randrange(90) for _ in range(10))),
                    deadline=random.choice([15, 40, 90]),
                    timeout=0,
                    priority=random.choice([1, 3, 9]),
                )
            )
        found.append(case_of(flows, buffer=20, end=120))
    return found


def requests() -> Iterator[tuple[Any, Any]]:
    for case in request_cases():
        for name in ("fifo", "edf", "priority", "punctual", "prema", "layerweaver", "layerweaver+", "weft+"):
            runs = (simulate_requests(case, name, compiled=compiled, record=True) for compiled in (False, True))
            yield tuple(run.tally.issues.tolist() for run in runs)


def refilled() -> Iterator[tuple[Any, Any]]:
    case = crowded_case(60)
    for kind in (Serial, LazyBatching, Fluid, TopUp):
        policy = kind(case.setting)
        for late in SOFT:
            runs = (plain.serve(case, policy, late, 0), serve_compiled(case, policy, late))
            yield tuple(run.issues.tolist() for run in runs)


WHERE = {
    **dict.fromkeys(("weave_key", "helps_starved", "priced_idle", "aimt_key", "within_lag", "idle"), saturated),
    **dict.fromkeys(("fluid_overhead", "leaving_cost", "backlog_cost", "backlog_ticks"), refilled),
}


def decided(runs: Callable[[], Iterator[tuple[Any, Any]]]) -> list[Any]:
    found = []
    for slow, fast in runs():
        assert slow == fast
        found.append(slow)
    return found


def plant_all() -> Iterator[str]:
    """Plant the faults one by one; yields the rules whose fault was seen in the policy and in the loop."""
    usual = {runs: decided(runs) for runs in (saturated, requests, refilled)}
    for name, fault in FAULTS.items():
        right, runs = RULES[name].__code__, WHERE.get(name, requests)
        RULES[name].__code__ = fault.__code__
        try:
            if decided(runs) != usual[runs]:
                yield name
        except AssertionError as error:
            raise AssertionError(f"with a fault in {name} policy and loop differ") from error
        finally:
            RULES[name].__code__ = right


def test_a_fault_in_a_rule_changes_the_policy_and_its_loop_alike():
    assert set(FAULTS) == set(RULES)
    assert said_with_the_jit_off("tests.kernels.test_rules") == (0, " ".join(FAULTS) + "\n", "")


def test_what_is_compiled_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("weft.kernels"), "propagate", True)  # the command line turns it off
    caplog.set_level("INFO", "weft.kernels")
    key = compiling.inlined(rules.edf_key)
    said = [] if numba.config.DISABLE_JIT else ["compiling rules.edf_key (once; it is kept)"]
    for _ in range(2):
        assert key(3, 4) == rules.edf_key(3, 4)
        assert [record.message for record in caplog.records] == said


if __name__ == "__main__":
    print(*plant_all())  # noqa: T201 - read by the test
