"""The compiled loop on a host equals the plain engine exactly: every segment, every answer, every count.

Run as a script, this file compares random cases and prints how many: that is how the loop itself is checked, with the
JIT off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import inf

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.host_cases import host_cases
from tests.kernels.jit import said_with_the_jit_off
from weft.devices import Host, HostModel
from weft.engine.lateness import LATE
from weft.engine.policies import POLICIES, Option, make_request_policy, policy_called
from weft.kernels import request_loop
from weft.kernels import request_state as k
from weft.simulation.requests import Case, compiled, plain, prepare, simulate_requests
from weft.workloads.requests import Stream, Workload

HOST_POLICIES = [name for name, kind in POLICIES.items() if kind in compiled.RULES]
"""Names of the policies with a compiled rule."""
OPTIONS = {
    "punctual": st.fixed_dictionaries({}, optional={"margin": st.sampled_from([0, 40, 300])}),
    "priority": st.fixed_dictionaries({}, optional={"patience": st.sampled_from([1, 3])}),
    "adaptive": st.fixed_dictionaries({"timeout": st.sampled_from([0, 5, 45])}),
    "weft+": st.fixed_dictionaries({}, optional={"stretch": st.integers(0, 400)}),
}
ONE_MODEL = Host(cores=2, lanes=2, models={"m": HostModel(segments=("s",), times_s={1: (0.004,)})})
CLOCKS = [k.ARRAY, k.FETCHED, k.COMPUTED, k.STEPS]
"""Those that the plain engine has too."""


def assert_equal(
    case: Case,
    name: str,
    late: str,
    options: Mapping[str, Option] | None = None,
    most_missed: list[float] | None = None,
) -> None:
    policy = make_request_policy(name, case.setting_of(policy_called(name)), options)
    assert compiled.applies(case, policy)
    fast = compiled.serve(case, policy, late, 0, True, most_missed)
    slow = plain.serve(case, policy, late, 0, most_missed)
    assert fast.issues.tolist() == slow.issues.tolist()
    assert fast.answers == slow.answers
    assert fast.counts[:, :9].tolist() == slow.counts[:, :9].tolist()
    assert (fast.histogram == slow.histogram).all()
    assert fast.clocks[CLOCKS].tolist() == slow.clocks[CLOCKS].tolist()


@st.composite
def limits(draw: st.DrawFn, streams: int) -> list[float] | None:
    """Deadlines that streams may miss before the run ends early; mostly without a limit."""
    if draw(st.integers(0, 2)):
        return None
    return [draw(st.sampled_from([0.0, 2.5, inf])) for _ in range(streams)]


def compare(policy: str, late: str, data: st.DataObject) -> None:
    """Serve a random case both ways."""
    case = data.draw(host_cases())
    options, missed = data.draw(OPTIONS.get(policy, st.just({}))), data.draw(limits(len(case.terms)))
    assert_equal(case, policy, late, options, missed)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("policy", HOST_POLICIES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(data=st.data())
def test_compiled_equals_plain_on_random_hosts(policy, late, data):
    compare(policy, late, data)


def test_runs_on_a_host_are_plain_until_the_loop_is_kept(monkeypatch):
    """Compiling takes longer than most runs, so only an NPU's runs wait for it."""
    case = prepare(Workload(stream=(Stream(model="m", rate=50, deadline_ms=50),), duration_s=1, warmup_s=0), ONE_MODEL)
    served = []
    monkeypatch.setattr(request_loop, "is_compiled", lambda: bool(served))
    monkeypatch.setattr(compiled, "serve", lambda *given: served.append("compiled") or plain.serve(*given[:4]))
    reports = []
    for _ in range(2):
        reports.append(simulate_requests(case, "edf").report)
        served.append("kept")
    assert served == ["kept", "compiled", "kept"] and reports[0] == reports[1]


def test_lanes_that_take_segments_ahead_run_on_the_plain_loop():
    workload = Workload(stream=(Stream(model="m", rate=50, deadline_ms=50),), duration_s=1, warmup_s=0)
    case = prepare(workload, ONE_MODEL.model_copy(update={"ahead": 1}))
    assert not compiled.applies(case, make_request_policy("edf", case.setting))
    case = prepare(workload, ONE_MODEL)
    assert compiled.applies(case, make_request_policy("edf", case.setting))


def test_the_loop_is_right_as_it_is_written():
    """Compiled code is what runs; the source is what is read."""
    status, output, errors = said_with_the_jit_off("tests.kernels.test_host_loop")
    assert (status, output, errors) == (0, "48 pairs of a policy and a rule are equal\n", "")


def checked(policy: str, late: str, examples: int) -> Callable[[], None]:
    """The comparison of a policy under a rule."""

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(data=st.data())
    def check(data):
        compare(policy, late, data)

    return check


def main(examples: int) -> None:
    assert numba.config.DISABLE_JIT
    pairs = [(policy, late) for policy in HOST_POLICIES for late in LATE]
    for policy, late in pairs:
        checked(policy, late, examples)()
    print(f"{len(pairs)} pairs of a policy and a rule are equal")  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
