"""Which layers are computed in 8 bits: decided by scores and by clocks, never by what a processor is said to have.

All layers begin in 8 bits, in each of several ways, of which the fastest goes on. Layers that take longer so are left
out together, if the whole model is faster for it. If the score is too low, other steps are tried, and then the layers
that harm most are left out, as few as will do. Then single layers are left out, those first that gain least, as long
as that makes the whole faster. What remains must beat the model as it was, or that is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weft.base.errors import TuneError
from weft_tune.runtime_target.qdq import QdqWay
from weft_tune.runtime_target.timing import LAST_TURNS, Turns

WAYS = (QdqWay("uint8"), QdqWay("uint8", joined=False), QdqWay("int8"))
"""Of these the fastest is taken."""
LEAST_S = 1e-7
"""What a layer is taken to save that saves less or nothing."""
PATIENCE = 4
"""So many layers in a row that are better kept end the search for more to leave out."""

FLOAT32, FLOAT16, INT8 = "float32", "float16", "int8"
SLOWER, HARMFUL = "slower in 8 bits", "costs too much of the score"
"""Why a layer stays as it was."""


class Workplace(Protocol):
    """What variants are asked of; ``RuntimeBench`` is the real one."""

    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def original(self) -> Any: ...
    def eight_bits(self, chosen: frozenset[str], way: QdqWay) -> Any: ...
    def halves(self) -> Any: ...
    def score(self, variant: Any) -> float: ...
    def race(self, variants: Sequence[Any], turns: int = ...) -> tuple[Turns, ...]: ...
    def harm(self, layer: str, way: QdqWay) -> float: ...
    def layer_times(self, variants: Sequence[Any]) -> list[dict[str, float]]: ...


class TriedVariant(NamedTuple):
    """A variant that was looked at, beside what it took turns with."""

    what: str
    left_out: tuple[str, ...]
    """Layers that stayed in float32."""
    seconds: float | None
    """Of one run; None where only the score was asked for."""
    against_s: float | None
    """Of the variant that it took turns with."""
    score: float | None
    """None where it was too slow to be asked."""
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestVariant:
    """What is fastest of all that keeps the score."""

    kind: str
    """``int8``, ``float16``, or ``float32``: the model as it was."""
    variant: Any
    way: QdqWay | None
    left_out: Mapping[str, str]
    """Layer that stayed in float32 -> why."""
    before: Turns
    after: Turns
    """Of the model as it was and of the result, in turns; the same, if that is the result."""
    score: float
    times_before: Mapping[str, float]
    times_int8: Mapping[str, float]
    """Layer -> seconds, with all layers in 8 bits."""
    times_after: Mapping[str, float]
    tried: tuple[TriedVariant, ...]


Told = Callable[[str, str], None]
"""Told what is done, and how far it is."""


def choose(place: Workplace, threshold: float, told: Told) -> FastestVariant:
    """The fastest variant that scores at least *threshold*."""
    search = _Search(place, threshold, told)
    search.begin()
    search.leave_out_slow_together()
    search.keep_the_score()
    search.leave_out_slow_one_by_one()
    return search.end()


class _Entrant(NamedTuple):
    """Who runs in the last race."""

    kind: str
    variant: Any
    score: float | None


@dataclass
class _Search:
    """A search on its way; the variant that it stands on is the current one."""

    place: Workplace
    threshold: float
    told: Told
    way: QdqWay = WAYS[0]
    left_out: dict[str, str] = field(default_factory=dict)
    current: Any = None
    score: float = 0.0
    halves: Any = None
    all_int8: Any = None
    tried: list[TriedVariant] = field(default_factory=list)
    times_before: Mapping[str, float] = field(default_factory=dict)
    times_int8: Mapping[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """All layers in 8 bits; float16 is kept for the end, if it is faster than float32."""
        place = self.place
        self.told("measuring", "all layers at once")
        self.choose_way()
        self._try_halves()
        self.all_int8 = self.current
        self.times_before, self.times_int8 = place.layer_times([place.original, self.current])

    def _try_halves(self) -> None:
        """All layers in float16, which some builds of ONNX Runtime do not have."""
        try:
            halves = self.place.halves()
        except TuneError:
            return
        was, took = self.place.race([self.place.original, halves])
        if took.faster_than(was):
            self.halves = halves
        self._note(FLOAT16, (), took, was, None, kept=self.halves is not None)

    def choose_way(self) -> None:
        """Take the way that is fastest for the layers that are in 8 bits."""
        variants = [self._built(way, self.left_out) for way in WAYS]
        was, *times = self.place.race([self.place.original, *variants])
        best = min(range(len(WAYS)), key=lambda number: times[number].median_s)
        for number, took in enumerate(times):
            self._note(str(WAYS[number]), self.left_out, took, was, None, kept=number == best)
        self.way, self.current = WAYS[best], variants[best]

    def leave_out_slow_together(self) -> None:
        """All layers that take longer in 8 bits, if the whole is no slower without them: fewer keep more of a score."""
        slow = [name for name in self._by_gain() if self._gain(name) < 0]
        if slow:
            self.told("measuring", f"without {len(slow)} layers that are slower in 8 bits")
            if self._try_without(slow, together=True):
                self.choose_way()

    def keep_the_score(self) -> None:
        """Other steps, and then as few layers as will do, the most harmful first."""
        self.told("scoring", "all samples")
        self.score = self.place.score(self.current)
        self._scored(self.way, self.left_out, self.score)
        self._other_steps()
        if self.score >= self.threshold:
            return
        ordered = self._most_harmful_first()
        self.left_out |= dict.fromkeys(ordered[: self._fewest(ordered)], HARMFUL)
        self.current = self._built(self.way, self.left_out)
        self.score = self.place.score(self.current)

    def _most_harmful_first(self) -> list[str]:
        """Layers by the harm they do for the time they save."""
        inside = [name for name in self.place.layers if name not in self.left_out]
        harms = {}
        for number, name in enumerate(inside, 1):
            self.told("scoring", f"layer {number} of {len(inside)} alone: {name}")
            harms[name] = self.place.harm(name, self.way)
        return sorted(inside, key=lambda name: harms[name] / max(self._gain(name), LEAST_S), reverse=True)

    def _fewest(self, ordered: Sequence[str]) -> int:
        """How many of *ordered*, from the first on, must be left out; by halving, as fewer are never better."""
        few, enough = 0, len(ordered)
        while enough - few > 1:
            middle = (few + enough) // 2
            left_out = [*self.left_out, *ordered[:middle]]
            self.told("scoring", f"without {len(left_out)} layers")
            score = self.place.score(self._built(self.way, left_out))
            self._scored(self.way, left_out, score)
            few, enough = (few, middle) if score >= self.threshold else (middle, enough)
        return enough

    def leave_out_slow_one_by_one(self) -> None:
        """Those that gain least first; ends when several in a row are better kept."""
        failed = 0
        inside = [name for name in self._by_gain() if name not in self.left_out]
        for number, name in enumerate(inside, 1):
            if failed == PATIENCE or len(self.left_out) + 1 >= len(self.place.layers):
                return
            self.told("measuring", f"without {name}, {number} of at most {len(inside)}")
            failed = 0 if self._try_without([name]) else failed + 1

    def end(self) -> FastestVariant:
        """The last word: what remains against the model as it was."""
        place = self.place
        self.told("measuring", "before and after")
        entrants = self._entrants()
        was, *times = place.race([place.original, *(each.variant for each in entrants)], LAST_TURNS)
        best, took = _Entrant(FLOAT32, place.original, None), was
        for each, turns in zip(entrants, times, strict=True):
            wins = turns.faster_than(was) and turns.median_s < took.median_s
            self._note(each.kind, self.left_out if each.kind == INT8 else (), turns, was, each.score, kept=wins)
            if wins:
                best, took = each, turns
        before_s, int8_s, after_s = place.layer_times([place.original, self.all_int8, best.variant])
        return FastestVariant(
            kind=best.kind, variant=best.variant, way=self.way if best.kind == INT8 else None, before=was, after=took,
            score=place.score(place.original) if best.score is None else best.score,
            left_out=self.left_out if best.kind != FLOAT16 else {}, times_before=before_s, times_int8=int8_s,
            times_after=before_s if best.kind == FLOAT32 else after_s, tried=tuple(self.tried),
        )  # fmt: skip

    def _entrants(self) -> list[_Entrant]:
        """Who may beat the model as it was: all of them keep the score."""
        found = []
        if self.current is not self.place.original and self.score >= self.threshold:
            found.append(_Entrant(INT8, self.current, self.score))
        if self.halves is not None and (score := self.place.score(self.halves)) >= self.threshold:
            found.append(_Entrant(FLOAT16, self.halves, score))
        return found

    def _other_steps(self) -> None:
        """If the score is too low: smaller steps that clip, or narrower weights; the best of them, if it is better."""
        if self.score >= self.threshold:
            return
        for way in (self.way._replace(clipped=True), self.way._replace(weight_bits=7)):
            self.told("scoring", str(way))
            variant = self._built(way, self.left_out)
            score = self.place.score(variant)
            self._scored(way, self.left_out, score)
            if score > self.score:
                self.way, self.current, self.score = way, variant, score

    def _try_without(self, names: Collection[str], *, together: bool = False) -> bool:
        """Leave out more layers, if the whole is faster for it and the score stays high enough.

        *together*: it need not be faster, only no slower, and is scored later.
        """
        left_out = [*self.left_out, *names]
        variant = self._built(self.way, left_out)
        now, took = self.place.race([self.current, variant])
        wins, score = not now.faster_than(took) if together else took.faster_than(now), None
        if wins and not together:
            score = self.place.score(variant)
            wins = score >= self.threshold
        self._note(str(self.way), left_out, took, now, score, kept=wins)
        if wins:
            self.left_out |= dict.fromkeys(names, SLOWER)
            self.current, self.score = variant, self.score if score is None else score
        return wins

    def _built(self, way: QdqWay, left_out: Collection[str]) -> Any:
        return self.place.eight_bits(frozenset(self.place.layers) - frozenset(left_out), way)

    def _by_gain(self) -> list[str]:
        return sorted(self.place.layers, key=self._gain)

    def _gain(self, name: str) -> float:
        """Seconds that a layer alone is faster in 8 bits."""
        return self.times_before.get(name, 0.0) - self.times_int8.get(name, 0.0)

    def _scored(self, way: QdqWay, left_out: Collection[str], score: float) -> None:
        self.tried.append(TriedVariant(str(way), tuple(left_out), None, None, score, score >= self.threshold))

    def _note(
        self, what: str, left_out: Collection[str], took: Turns, was: Turns, score: float | None, *, kept: bool
    ) -> None:
        self.tried.append(TriedVariant(what, tuple(left_out), took.median_s, was.median_s, score, kept))
