"""The registered policies, by the names that a user may write."""

from __future__ import annotations

from collections import UserDict
from functools import cached_property

from weft.base.errors import InputError
from weft.base.registry import Entry, registered
from weft.engine.policies.base import Policy


class PolicyTable(UserDict[str, type[Policy]]):
    """The policies of one section of the registry. A policy is imported on first access; a script may add its own."""

    def __init__(self, section: str) -> None:
        self._section = section

    @cached_property
    def data(self) -> dict[str, Entry | type[Policy]]:  # type: ignore[override]
        """The policies of the section, and the entries of those that were not imported yet."""
        return dict(registered(self._section))

    def __getitem__(self, name: str) -> type[Policy]:
        policy = self.data[name]
        if isinstance(policy, Entry):
            policy = self.data[name] = _load_policy(policy)
        return policy

    def __repr__(self) -> str:
        return f"PolicyTable({', '.join(self.data)})"


def _load_policy(entry: Entry) -> type[Policy]:
    """Import a registered policy; InputError if the registered name is not that of a policy class."""
    policy = entry.load()
    if not isinstance(policy, type) or not issubclass(policy, Policy):
        raise InputError(f"tool {entry.tool.name!r}: policy {entry.name!r} is {entry.target}, which is no weft.Policy")
    return policy
