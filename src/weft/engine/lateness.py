"""Rules for requests that can no longer be on time; the simulator and the server share them.

Under ``weave``, the default, late requests give way to those that can be on time: a policy that weaves by deadlines
fills idle time with them, other policies run them when no request on time waits, and a policy with its own order for
late requests sees them among the others. ``keep`` serves them like the others under every policy, ``demote`` after all
others, ``drop`` not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.base.errors import InputError, unknown_name
from weft.devices.decoupled import DeviceClocks, issue
from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, Policy, Setting

SOFT = ("weave", "keep", "demote")
"""Rules under which every request is answered, however late."""
LATE = (*SOFT, "drop")


def check_late(late: str) -> None:
    """Raise InputError unless *late* names a rule for late requests."""
    if late not in LATE:
        raise InputError(unknown_name("rule for late requests", late, LATE))


def late_work(policy: Policy, late: str) -> LateWork:
    """Return the place of late requests in the order of work, under a policy and the rule *late*."""
    if late == "weave":
        return policy.traits.late_work
    return LateWork.LAST if late == "demote" else LateWork.AMONG_OTHERS


def latest_end(on_time: Iterable[Candidate], now: int, margin: int = 0) -> int:
    """Return the tick until which the device may do other work without making one of *on_time* late.

    The requests are assumed to run one by one in order of deadlines; requests that would be late even so do not count.
    margin: percent added to their remaining times.
    """
    latest, need = NO_DEADLINE, 0
    for head in sorted(on_time, key=lambda head: head.deadline):
        remaining = head.remaining * (100 + margin) // 100
        if now + need + remaining <= head.deadline:
            need += remaining
            latest = min(latest, head.deadline - need)
    return latest


def weave_late_heads(heads: Sequence[Candidate], device: DeviceClocks, setting: Setting) -> list[Candidate]:
    """Return the heads on time, and those late heads that use an idle resource without making a head on time late.

    A resource (PE array or memory channel) counts as idle if no head on time is bound by it.
    """
    on_time = [head for head in heads if head.deadline < NO_DEADLINE]
    # Whether the models of heads on time are compute-bound: True stands for the array, False for the channel.
    busy_sides = {setting.programs[head.program].compute_bound for head in on_time}
    latest = latest_end(on_time, device.array_free)

    def fills(head: Candidate) -> bool:
        if setting.programs[head.program].compute_bound in busy_sides:
            return False
        after, _ = issue(device, head.fetch, head.compute, setting.buffer)
        return after.array_free <= latest

    return [head for head in heads if head.deadline < NO_DEADLINE or fills(head)]
