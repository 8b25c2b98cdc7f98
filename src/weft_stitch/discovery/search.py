"""Finding the channels that models share, whatever order each has them in: ``discover``.

Channels of several tasks may be one block of a space if, in every convolution that writes the space, their filters
agree on the inputs that the tasks share. Biases and normalisations may differ. What is shared at the output of a layer
so depends on what is shared at its input, and around a residual block on itself: spaces are *guessed* in the order of
the layers from those of their writers whose inputs are known, *repaired* by all others, and then *grown*, channel by
channel that agrees with all that is shared around it, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weft.base.errors import StitchError
from weft_stitch.discovery.comparison import mismatches, repair
from weft_stitch.discovery.evidence import Evidence
from weft_stitch.discovery.matching import MAJORITY, merge, merge_near, merge_strangers, mergeable, vote
from weft_stitch.discovery.partition import Partition
from weft_stitch.family import Family, FamilyLayer, Sharing, Writer, wire

Progress = Callable[[int, int], None]
"""Called with the steps done and the number of steps."""


def discover(family: Family, *, tolerance: float = 0.0, on_progress: Progress = lambda done, total: None) -> Sharing:
    """The sharing of *family*; every block of several tasks is checked number by number.

    tolerance: 0 for the very same weights (0 and -0 are the same). Otherwise weights may differ by that much; the
    nearest are matched first, and a stitched model computes all tasks of a block with the weights of the first of them
    that has both ends of the weight, so that the others' outputs change a little.
    """
    if not tolerance >= 0:
        raise StitchError(f"tolerance {tolerance}: give the largest difference of two weights, 0 for none")
    steps = _Steps(on_progress)
    search = _SharingSearch(family, tolerance, MAJORITY, steps)
    # a vote that another quorum would have decided otherwise is repeated with that one; the result that stores least
    # is kept, the first of equals
    for quorum in sorted(search.doubts):
        search = min(search, _SharingSearch(family, tolerance, quorum, steps), key=lambda other: other.evidence.stored)
    search.check()
    return Sharing({space: partition.space() for space, partition in search.partitions.items()})


class _Steps:
    """Counts steps that are done and planned."""

    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def plan(self, steps: int) -> None:
        self._total += steps

    def step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)


class _SharingSearch:
    """One search: the partitions of all spaces, true and such that nothing can be added."""

    def __init__(self, family: Family, tolerance: float, quorum: float, steps: _Steps) -> None:
        self.wiring = wire(family)
        self.tolerance, self.quorum = tolerance, quorum
        self.partitions = {space: Partition(widths) for space, widths in self.wiring.widths.items()}
        self.evidence = Evidence(family, self.wiring, self.partitions)
        self.doubts: set[float] = set()
        """Quorums that would have led elsewhere."""
        self._checked: dict[str, tuple[int, ...]] = {}
        self._tried: dict[str, tuple[int, ...]] = {}
        self._steps = steps
        steps.plan(len(self.partitions))
        self.guess()
        self.settle()
        self.grow()

    def guess(self) -> None:
        """Guess each space from those of its writers whose inputs are known; the others repair it when theirs are."""
        known: set[str] = set()
        for space, writers in self._in_order():
            self._guess(space, writers)
            known.add(space)
            ends = ((layer, {*self._spaces(layer)}) for layer in self.evidence.layers)
            self._repair([layer for layer, spaces in ends if space in spaces and spaces <= known])
            self._steps.step()

    def settle(self) -> None:
        """Repair until no layer disagrees."""
        while self._repair(self.evidence.layers):
            pass

    def grow(self) -> None:
        """Join whatever agrees with all that is shared around it, as long as more and more is shared."""
        shared = -1
        while shared < self._shared_channels:
            # a round may join what the repair takes apart again, and more; the last round that gained is restored
            best = {space: partition.members.copy() for space, partition in self.partitions.items()}
            shared = self._shared_channels
            for space in self.partitions:
                versions = self._versions_around(space)
                if self._tried.get(space) != versions:
                    self._tried[space] = versions
                    self._grow(space)
            self.settle()
        for space, members in best.items():
            self.partitions[space].replace(members)

    def check(self) -> None:
        """Compare what is shared number by number: fingerprints are only almost certain."""
        self._steps.plan(len(self.evidence.layers))
        for layer in self.evidence.layers:
            for wrong in mismatches(self.evidence, layer, self.tolerance):
                raise AssertionError(f"{layer.name}: tasks {wrong.one} and {wrong.two} differ by {wrong.largest}")
            self._steps.step()

    def _guess(self, space: str, writers: Sequence[Writer]) -> None:
        partition, layers = self.partitions[space], [writer.layer for writer in writers if writer.layer is not None]
        merge(partition, self.evidence.pair_keys(space, writers), hopeful=True)
        self._merge_near(space, writers)
        self._repair(layers)
        if dense := [writer for writer in writers if writer.role == "dense"]:
            self.doubts |= vote(self.evidence, space, dense[0], self.quorum, self.tolerance)
            self._repair(layers)
        evidence = self.evidence.pair_keys(space, writers)
        merge(partition, evidence)
        self._merge_near(space, writers)
        merge_strangers(partition, evidence)
        if self.tolerance > 0:
            merge_near(self.evidence, space, writers, (), self.tolerance, strangers=True)

    def _grow(self, space: str) -> None:
        partition, writers = self.partitions[space], self.wiring.writers[space]
        readers = self.evidence.readers(space)
        # keys of readers are costly to compute; mostly the writers already disagree
        if mergeable(partition, self.evidence.pair_keys(space, writers)):
            merge(partition, self.evidence.pair_keys(space, writers, readers), ties=True)
        self._merge_near(space, writers, readers)

    def _merge_near(self, space: str, writers: Sequence[Writer], readers: Sequence[FamilyLayer] | None = None) -> None:
        if self.tolerance > 0:
            ties = readers is not None
            merge_near(self.evidence, space, writers, readers or (), self.tolerance, ties=ties)

    def _repair(self, layers: Sequence[FamilyLayer]) -> bool:
        """Repair those of *layers* around which something has changed; whether any needed it."""
        changed = False
        for layer in layers:
            if self._checked.get(layer.output) != self._versions(layer):
                changed |= repair(self.evidence, layer, self.tolerance)
                self._checked[layer.output] = self._versions(layer)
        return changed

    def _in_order(self) -> Iterator[tuple[str, list[Writer]]]:
        """Each space with the writers to guess it from: first one whose writers are all ready, or else the next."""
        left, known = list(self.partitions), set[str]()
        while left:
            ready = {space: self._ready(space, known) for space in left}
            complete = (space for space in left if len(ready[space]) == len(self.wiring.writers[space]))
            space = next(complete, left[0])
            left.remove(space)
            known.add(space)
            yield space, ready[space]

    def _ready(self, space: str, known: set[str]) -> list[Writer]:
        """The writers of *space* that read *known* spaces only; only dense layers depend on what they read."""
        return [
            writer
            for writer in self.wiring.writers[space]
            if writer.role != "dense"
            or (writer.layer is not None and known.issuperset(self.wiring.carries[writer.layer.inputs[0]]))
        ]

    def _spaces(self, layer: FamilyLayer) -> tuple[str, ...]:
        return (*self.wiring.carries[layer.inputs[0]], *self.wiring.carries[layer.output])

    def _versions(self, layer: FamilyLayer) -> tuple[int, ...]:
        return tuple(self.partitions[space].version for space in self._spaces(layer))

    def _versions_around(self, space: str) -> tuple[int, ...]:
        around = [layer for layer in self.evidence.layers if space in self._spaces(layer)]
        return (self.partitions[space].version, *(version for layer in around for version in self._versions(layer)))

    @property
    def _shared_channels(self) -> int:
        return sum(partition.shared for partition in self.partitions.values())
