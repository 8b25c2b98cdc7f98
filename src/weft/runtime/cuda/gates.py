"""Gates: several segments of a model in one launch, which ends between two of them when the server asks for that.

The server revokes a launch by storing 1 into its slot of the stop table (``weft.runtime.isolated.stop_table``). Before
every segment stands a gate, which reads the slot; from the first gate that finds it stopped, no segment is computed.
The host launches the rest later, from the segment where the launch ended.

Launches of one rung are executed in order and use one memory. So a launch that ended early leaves values there which
its batch still needs, and a second batch may be queued behind it already. Therefore the device counts the launches of a
rung that ended early, and every launch says how many of them the host knew of: if there are more, it computes nothing
and changes nothing. The host then starts it again, after it has copied away what it would overwrite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from weft.runtime.tensors import Array

NEVER_STOPPED = 0
"""The slot of launches that nobody stops; the server uses it for no step."""
Computed = Callable[[], int]
"""Returns how many segments a launch has computed, once it has ended."""


class Span(NamedTuple):
    """What a launch of a rung computes."""

    first: int  # index of the first segment
    end: int  # index of the segment behind the last
    slot: int  # of the stop table
    known: int
    """How many launches of the rung that ended early the host knows of."""


class GateMemory(Protocol):
    """What the gates of one rung read and write; the same for the graphs of all parts of the device."""

    def launch(self, graph: Any, span: Span, copies: Sequence[tuple[Any, Any]]) -> Computed:
        """Launch a graph (``Device.gated``) on the calling thread's lane, and return at once.

        copies: tensors of the rung's memory and their new contents, which are copied before the first segment unless
        the launch computes nothing.
        """
        ...


class HostGateMemory:
    """The twin of the gates of a GPU: a launch has ended when its call returns."""

    def __init__(self, stops: Array) -> None:
        """stops: the stop table."""
        self._stops, self._early = stops, 0

    def launch(self, graph: Sequence[Callable[[], None]], span: Span, copies: Sequence[tuple[Any, Any]]) -> Computed:
        computed = 0
        if span.known == self._early and not self._stops[span.slot]:
            for target, source in copies:
                target[...] = source
            for segment in range(span.first, span.end):
                if computed and self._stops[span.slot]:
                    break
                graph[segment]()
                computed += 1
        self._early += computed < span.end - span.first
        return lambda: computed
