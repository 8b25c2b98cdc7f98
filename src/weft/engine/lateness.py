"""What becomes of requests that can no longer be on time: one rule for the simulator and for the server.

``weave``, the default, lets them give way to those that can be on time. Under a policy that weaves by deadlines they
fill what the others leave idle; under one that does not they come when nobody on time waits; a policy with an order of
its own for them sees them among the others. ``keep`` serves them like the others under every policy, ``demote``
after all others, ``drop`` not at all.
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
    """InputError unless there is such a rule."""
    if late not in LATE:
        raise InputError(unknown_name("rule for late requests", late, LATE))


def late_work(policy: Policy, late: str) -> LateWork:
    """Where late requests go under a policy and a rule."""
    if late == "weave":
        return policy.traits.late_work
    return LateWork.LAST if late == "demote" else LateWork.AMONG_OTHERS


def latest_end(on_time: Iterable[Candidate], now: int) -> int:
    """Until when the device may be taken without harm, by deadlines: whoever can be on time from *now* on still will.

    Each is taken to have the device to itself in turn; who cannot be on time even so need not be waited for.
    """
    latest, need = NO_DEADLINE, 0
    for head in sorted(on_time, key=lambda head: head.deadline):
        if now + need + head.remaining <= head.deadline:
            need += head.remaining
            latest = min(latest, head.deadline - need)
    return latest


def woven(heads: Sequence[Candidate], device: DeviceClocks, setting: Setting) -> list[Candidate]:
    """The heads that can be on time, and the late ones that fill what those leave idle and make none of them late.

    Idle is a resource, array or channel, that no head on time is bound by.
    """
    on_time = [head for head in heads if head.deadline < NO_DEADLINE]
    sides = {setting.programs[head.program].compute_bound for head in on_time}
    latest = latest_end(on_time, device.array_free)

    def fills(head: Candidate) -> bool:
        if setting.programs[head.program].compute_bound in sides:
            return False
        return issue(device, head.fetch, head.compute, setting.buffer)[0].array_free <= latest

    return [head for head in heads if head.deadline < NO_DEADLINE or fills(head)]
