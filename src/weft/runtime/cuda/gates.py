"""Gates: several segments of a model in one launch, which ends between two of them when the server asks for that.

The server revokes a launch by storing 1 into its slot of the stop table (``weft.runtime.isolated.stop_table``). Before
every segment stands a gate, which reads the slot; from the first gate that finds it stopped, no segment is computed.
The host launches the rest later, from the segment where the launch ended.

Launches of one rung are executed in order and use one memory. So a launch that a gate ended leaves values there which
its batch still needs, and a second batch may be queued behind it already, for which nothing was copied away. Therefore
every such end begins a new *generation* of the rung, on the device at once and on the host when it learns of the end. A
launch carries the generation that the host knew of; if that is over, the launch is refused: it computes nothing and
changes nothing. A refused launch begins no generation, so one that is made after the end was learnt is not refused
because of others that were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from weft.runtime.tensors import Array

NEVER_STOPPED = 0
"""The slot of launches that are never stopped; the server uses it for no step."""
NO_GENERATION = -1
"""In place of a generation: the launch is refused in any case."""
REFUSED = -1
"""In place of the number of computed segments: the launch was of an earlier generation."""
Computed = Callable[[], int]
"""Returns how many segments a launch has computed, or ``REFUSED``; called once, when it has ended."""


class SegmentSpan(NamedTuple):
    """What a launch of a rung computes."""

    first: int  # index of the first segment
    end: int  # index of the segment behind the last
    slot: int  # of the stop table
    generation: int
    """How many launches of the rung were ended by gates, as far as the host knows."""


class GateMemory(Protocol):
    """What the gates of one rung read and write; the same for the graphs of all parts of the device."""

    def launch(self, graph: Any, span: SegmentSpan, copies: Sequence[tuple[Any, Any]]) -> Computed:
        """Launch a graph (``Device.gated``) on the calling thread's lane, and return at once.

        copies: tensors of the rung's memory and their new contents, which are copied before the first segment unless
        the launch computes nothing.
        """
        ...


class HostGateMemory:
    """The twin of the gates of a GPU: a launch has ended when its call returns."""

    def __init__(self, stops: Array) -> None:
        """stops: the stop table."""
        self._stops, self._generation = stops, 0

    def launch(
        self, graph: Sequence[Callable[[], None]], span: SegmentSpan, copies: Sequence[tuple[Any, Any]]
    ) -> Computed:
        if span.generation != self._generation:
            return lambda: REFUSED
        computed = 0
        if not self._stops[span.slot]:
            for target, source in copies:
                target[...] = source
            for segment in range(span.first, span.end):
                if computed and self._stops[span.slot]:
                    break
                graph[segment]()
                computed += 1
        self._generation += computed < span.end - span.first
        return lambda: computed
