"""A policy in its own package: this file, and one line of ``tool.toml``.

pip install examples/policy
weft compare examples/assistant.toml -p edf,least-slack
weft serve light-squeezenet --policy least-slack
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft import Policy, Start, View
from weft.engine.policies import Traits


@dataclass(frozen=True)
class LeastSlack(Policy):
    """Start the query with the least slack (deadline minus remaining work), the oldest on a tie."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True)

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda query: (query.deadline - query.remaining, query.arrival)))
