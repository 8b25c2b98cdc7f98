"""Policies: each decides which layer of which model goes next. ``POLICIES`` and ``ON_SHARES`` hold the names a user
may write.

One file per policy, one line in ``tool.toml``; ``fairness.py`` is the band around a mix, ``refilling.py`` what policies
share that fill batches up, ``bound.py`` what no policy can exceed.
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
"""Those that choose shares of a GPU, and need a device that has some."""

_ALL = ChainMap(POLICIES, ON_SHARES)

Option = bool | int | float


def make_policy(name: str, setting: Setting, options: Mapping[str, Option] | None = None) -> Policy:
    """The policy of that name, with its options checked against its fields."""
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
    """A policy for requests that come and go; those that plan for streams which never run dry are refused."""
    policy = make_policy(name, setting, options)
    if not policy.traits.serves_requests:
        raise InputError(
            f"{name} plans for streams that never run dry; for requests with deadlines there are weft+ and punctual"
        )
    return policy


def policy_called(name: str) -> type[Policy]:
    """The policy of a name that is known."""
    check_policy(name)
    return _ALL[name]


def check_policy(name: str) -> None:
    """Refuse a name nobody registered."""
    if name not in _ALL:
        raise InputError(unknown_name("policy", name, _ALL))


def options_of(name: str) -> dict[str, Option]:
    """The options of a policy and their defaults."""
    return {f.name: f.default for f in fields(_ALL[name]) if f.init and f.name != "setting"}  # type: ignore[misc]


def described(policy: Policy) -> str:
    """A registered policy by its name, and by its options where they are not the defaults."""
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
