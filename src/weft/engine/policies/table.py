"""The registered policies, by the names that a user may write."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from weft.base.errors import InputError
from weft.base.registry import Entry, registered
from weft.engine.policies.base import Policy


class PolicyTable(MutableMapping[str, type[Policy]]):
    """The policies of one section of the registry. A policy is imported on first access; a script may add its own."""

    def __init__(self, section: str) -> None:
        self._section = section
        self._entries: dict[str, Entry | type[Policy]] | None = None

    @property
    def _policies(self) -> dict[str, Entry | type[Policy]]:
        if self._entries is None:
            self._entries = dict(registered(self._section))
        return self._entries

    def __getitem__(self, name: str) -> type[Policy]:
        policy = self._policies[name]
        if isinstance(policy, Entry):
            policy = self._policies[name] = _load_policy(policy)
        return policy

    def __setitem__(self, name: str, policy: type[Policy]) -> None:
        self._policies[name] = policy

    def __delitem__(self, name: str) -> None:
        del self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)


def _load_policy(entry: Entry) -> type[Policy]:
    """Import a registered policy; InputError if the registered name is not that of a policy class."""
    policy = entry.load()
    if not isinstance(policy, type) or not issubclass(policy, Policy):
        raise InputError(f"tool {entry.tool.name!r}: policy {entry.name!r} is {entry.target}, which is no weft.Policy")
    return policy
