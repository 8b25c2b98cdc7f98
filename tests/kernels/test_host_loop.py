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
from weft.engine.lateness import LATE
from weft.engine.policies import POLICIES, Option, make_request_policy, policy_called
from weft.kernels import request_state as k
from weft.simulation.requests import Case, compiled, plain

HOST_POLICIES = [name for name, kind in POLICIES.items() if kind in compiled.RULES]
"""Names of the policies with a compiled rule."""
OPTIONS = {
    "punctual": st.fixed_dictionaries({}, optional={"margin": st.sampled_from([0, 40, 300])}),
    "priority": st.fixed_dictionaries({}, optional={"patience": st.sampled_from([1, 3])}),
    "adaptive": st.fixed_dictionaries({"timeout": st.sampled_from([0, 5, 45])}),
    "weft+": st.fixed_dictionaries({}, optional={"stretch": st.integers(0, 400)}),
}
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
