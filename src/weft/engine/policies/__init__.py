"""Policies: each decides which layer of which model goes next.

``POLICIES`` and ``ON_SHARES`` hold the names that a user may write.

Each policy has one file and one line in ``tool.toml``. ``base.py`` has the interface; ``fairness.py`` the band around a
mix; ``refilling.py`` the base of policies that refill batches; ``bound.py`` the throughput that no policy can exceed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields

from weft.base.errors import InputError, unknown_name
from weft.engine.policies.base import Candidate, Event, EventKind, Policy, Setting, Start, Traits, View
from weft.engine.policies.fairness import Band
from weft.engine.policies.table import PolicyTable

POLICIES = PolicyTable("policies")
"""To add a policy, write it and add one line to ``tool.toml``."""

ON_SHARES = PolicyTable("share_policies")
"""Policies that choose shares of a GPU; they need a device that has shares."""

_ALL = ChainMap(POLICIES, ON_SHARES)

Option = bool | int | float


def make_policy(name: str, setting: Setting, options: Mapping[str, Option] | None = None) -> Policy:
    """Create the policy of that name. InputError for an unknown name or option, or an option of another type."""
    check_policy(name)
    known = options_of(name)
    for key, value in (options or {}).items():
        if key not in known:
            raise InputError(f"{name} has no option {key!r}; it has: {', '.join(known) or 'none'}")
        if type(value) is not type(known[key]) and not (isinstance(known[key], float) and type(value) is int):
            raise InputError(f"{name}: option {key} = {value!r} must be of the kind of its default, {known[key]!r}")
    policy = _ALL[name](setting, **(options or {}))
    if policy.traits.shares and setting.shares is None:
        raise InputError(f"{name} chooses shares of a GPU, and this device has none; weft devices show h200 is one")
    return policy


def make_request_policy(name: str, setting: Setting, options: Mapping[str, Option] | None = None) -> Policy:
    """Create a policy for requests; InputError for policies that only serve saturated streams."""
    policy = make_policy(name, setting, options)
    if not policy.traits.serves_requests:
        raise InputError(
            f"{name} plans for streams that never run dry; for requests with deadlines there are weft+ and punctual"
        )
    return policy


def policy_called(name: str) -> type[Policy]:
    """Return the class of a policy; InputError if the name is not registered."""
    check_policy(name)
    return _ALL[name]


def check_policy(name: str) -> None:
    """Raise InputError for a name that is not registered."""
    if name not in _ALL:
        raise InputError(unknown_name("policy", name, _ALL))


def options_of(name: str) -> dict[str, Option]:
    """Return the options of a policy with their defaults."""
    return {f.name: f.default for f in fields(_ALL[name]) if f.init and f.name != "setting"}  # type: ignore[misc]


def described(policy: Policy) -> str:
    """Return a policy's registered name, with the options that differ from their defaults."""
    from weft.engine.policies.least_shares import WithLeastShares  # only trials use it, and it imports numpy

    if isinstance(policy, WithLeastShares):
        models = ", ".join(policy.setting.programs[stream].model for stream in policy.at_least)
        return f"{described(policy.weaver)} with {models} at the least share"
    name = next(name for name, kind in _ALL.items() if kind is type(policy))
    changed = [
        f"{key}={getattr(policy, key)}" for key, usual in options_of(name).items() if getattr(policy, key) != usual
    ]
    return f"{name} ({', '.join(changed)})" if changed else name


__all__ = [
    "ON_SHARES",
    "POLICIES",
    "Band",
    "Candidate",
    "Event",
    "EventKind",
    "Option",
    "Policy",
    "Setting",
    "Start",
    "Traits",
    "View",
    "check_policy",
    "described",
    "make_policy",
    "make_request_policy",
    "options_of",
    "policy_called",
]
