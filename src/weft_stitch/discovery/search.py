"""Finds the channels that models share, in whatever order each model has them: ``discover``.

Channels of several tasks may be one block of a space if, in every convolution that writes the space, their filters
agree on the inputs that the tasks share. Biases and normalisations may differ. So the sharing at the output of a layer
depends on that at its input, and around a residual block on itself. Therefore spaces are *guessed* in the order of the
layers, from the writers whose inputs are guessed already; *repaired* by all other layers; and then *grown* by joining
channels that agree in all layers around them, until nothing changes. A guess may need a vote of single kernels, in
which two filters are joined if the fraction of their equal kernels is above a *quorum* (``matching``).
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
"""Called with the number of finished steps and of all steps."""


def discover(family: Family, *, tolerance: float = 0.0, on_progress: Progress = lambda done, total: None) -> Sharing:
    """Find the channels that the models of *family* share; finally, shared weights are compared number by number.

    *tolerance*: 0 for equal weights (0 and -0 are equal). Otherwise weights may differ by that much, and the nearest
    channels are matched first. A stitched model then computes all tasks of a block by the weights of one task, so that
    the outputs of the others change a little.
    """
    if not tolerance >= 0:
        raise StitchError(f"tolerance {tolerance}: give the largest difference of two weights, 0 for none")
    steps = _Steps(on_progress)
    search = _SharingSearch(family, tolerance, MAJORITY, steps)
    # Where another quorum would have decided a vote otherwise, the search is repeated with that quorum. The result
    # that stores the fewest weights is kept, the first of equal ones.
    for quorum in sorted(search.doubts):
        search = min(search, _SharingSearch(family, tolerance, quorum, steps), key=lambda other: other.evidence.stored)
    search.check()
    return Sharing({space: partition.space() for space, partition in search.partitions.items()})


class _Steps:
    """Counts finished and planned steps for the progress callback."""

    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def plan(self, steps: int) -> None:
        self._total += steps

    def step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)


class _SharingSearch:
    """One search for the partitions of all spaces: no weights contradict them, and no more channels can be joined.

    *tolerance*: see ``discover``. *quorum*: of votes.
    """

    def __init__(self, family: Family, tolerance: float, quorum: float, steps: _Steps) -> None:
        self.wiring = wire(family)
        self.tolerance, self.quorum = tolerance, quorum
        self.partitions = {space: Partition(widths) for space, widths in self.wiring.widths.items()}
        self.evidence = Evidence(family, self.wiring, self.partitions)
        self.doubts: set[float] = set()
        """Quorums that would have decided some vote otherwise."""
        self._checked: dict[str, tuple[int, ...]] = {}
        """Output of a layer -> the versions of its partitions (``_versions``) at its last repair."""
        self._tried: dict[str, tuple[int, ...]] = {}
        """Space -> the versions around it (``_versions_around``) when it was last grown."""
        self._steps = steps
        steps.plan(len(self.partitions))
        self.guess()
        self.settle()
        self.grow()

    def guess(self) -> None:
        """Guess each space from those of its writers whose inputs are guessed already.

        Its other writers repair the guess as soon as their inputs are guessed.
        """
        known: set[str] = set()
        for space, writers in self._guessing_order():
            self._guess(space, writers)
            known.add(space)
            layer_spaces = ((layer, {*self._spaces(layer)}) for layer in self.evidence.layers)
            self._repair([layer for layer, spaces in layer_spaces if space in spaces and spaces <= known])
            self._steps.step()

    def settle(self) -> None:
        """Repair the partitions until no layer contradicts them."""
        while self._repair(self.evidence.layers):
            pass

    def grow(self) -> None:
        """Join channels that agree in all layers around them, in rounds, as long as the shared channels become more."""
        shared = -1  # below every count, so that there is a first round
        while shared < self._shared_channels:
            # the repair may take apart more than a round has joined; the state before such a round is restored
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
        """Compare the shared weights number by number, as fingerprints of different weights may be equal by chance."""
        self._steps.plan(len(self.evidence.layers))
        for layer in self.evidence.layers:
            for wrong in mismatches(self.evidence, layer, self.tolerance):
                raise AssertionError(f"{layer.name}: tasks {wrong.task_a} and {wrong.task_b} differ by {wrong.largest}")
            self._steps.step()

    def _guess(self, space: str, writers: Sequence[Writer]) -> None:
        """Guess which channels of *space* are shared, by the weights of *writers*.

        Classes are joined if one pair of tasks agrees, or by vote. The repair then finds inputs that are not shared
        after all; without them, classes are joined in which all pairs of tasks agree.
        """
        partition, layers = self.partitions[space], [writer.layer for writer in writers if writer.layer is not None]
        merge(partition, self.evidence.pair_keys(space, writers), one_pair_suffices=True)
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
        """Join the channels of *space* that agree in all its writers and readers."""
        partition, writers = self.partitions[space], self.wiring.writers[space]
        readers = self.evidence.readers(space)
        # keys of readers are costly to compute; mostly the writers already disagree
        if mergeable(partition, self.evidence.pair_keys(space, writers)):
            # with all weights around them known, channels that look the same are interchangeable
            merge(partition, self.evidence.pair_keys(space, writers, readers), ties=True)
        self._merge_near(space, writers, readers)

    def _merge_near(self, space: str, writers: Sequence[Writer], readers: Sequence[FamilyLayer] | None = None) -> None:
        """With a tolerance, join channels of nearly equal weights; with *readers*, ties (see ``merge``) as well."""
        if self.tolerance > 0:
            ties = readers is not None
            merge_near(self.evidence, space, writers, readers or (), self.tolerance, ties=ties)

    def _repair(self, layers: Sequence[FamilyLayer]) -> bool:
        """Repair the layers around which something changed since their last repair; return whether any changed."""
        changed = False
        for layer in layers:
            if self._checked.get(layer.output) != self._versions(layer):
                changed |= repair(self.evidence, layer, self.tolerance)
                self._checked[layer.output] = self._versions(layer)
        return changed

    def _guessing_order(self) -> Iterator[tuple[str, list[Writer]]]:
        """Yield each space, with the writers to guess it from.

        The next space is one all of whose writers are ready; if there is none, the first that remains.
        """
        remaining, known = list(self.partitions), set[str]()
        while remaining:
            ready = {space: self._ready_writers(space, known) for space in remaining}
            complete = (space for space in remaining if len(ready[space]) == len(self.wiring.writers[space]))
            space = next(complete, remaining[0])
            remaining.remove(space)
            known.add(space)
            yield space, ready[space]

    def _ready_writers(self, space: str, known: set[str]) -> list[Writer]:
        """The writers of *space* that can be compared: dense layers only if the spaces they read are *known*."""
        return [
            writer
            for writer in self.wiring.writers[space]
            if writer.role != "dense"
            or (writer.layer is not None and known.issuperset(self.wiring.carries[writer.layer.inputs[0]]))
        ]

    def _spaces(self, layer: FamilyLayer) -> tuple[str, ...]:
        """The spaces that *layer* reads and writes."""
        return (*self.wiring.carries[layer.inputs[0]], *self.wiring.carries[layer.output])

    def _versions(self, layer: FamilyLayer) -> tuple[int, ...]:
        """The versions of the partitions that *layer* reads and writes."""
        return tuple(self.partitions[space].version for space in self._spaces(layer))

    def _versions_around(self, space: str) -> tuple[int, ...]:
        """The versions of *space* and of all spaces of the layers that read or write it."""
        around = [layer for layer in self.evidence.layers if space in self._spaces(layer)]
        return (self.partitions[space].version, *(version for layer in around for version in self._versions(layer)))

    @property
    def _shared_channels(self) -> int:
        """Number of channels that are not stored, as another task's channel is the same."""
        return sum(partition.shared for partition in self.partitions.values())
