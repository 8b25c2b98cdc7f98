"""The choice of the layers that are computed in 8 bits: by measured scores and times, never by a processor's features.

1. All layers are in 8 bits; of several options for that, the fastest is taken.
2. Layers that are slower in 8 bits are left out (stay in float32) together, if the whole model is no slower then.
3. If the score is too low, other quantisation steps are tried; then the most harmful layers are left out, as few as
   suffice.
4. Single layers are left out, those first that gain least, as long as that makes the whole model faster.
5. The result is the remaining variant if it beats the original model, otherwise the original model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.base.errors import TuneError
from weft.runtime.timing import Turns
from weft_tune.runtime_target.bench import BuiltVariant, RuntimeBench
from weft_tune.runtime_target.qdq import QdqOptions

OPTIONS = (QdqOptions("uint8"), QdqOptions("uint8", joined=False), QdqOptions("int8"))
"""The options of which the fastest is taken."""
LEAST_GAIN_S = 1e-7
"""The least time that a layer is assumed to save, because its harm is divided by the time."""
LAST_TURNS = 31
"""Turns of every variant in the last race."""
PATIENCE = 4
"""Step 4 ends after this many attempts in a row that make the model no faster."""

FLOAT32, FLOAT16, INT8 = "float32", "float16", "int8"
SLOWER, HARMFUL = "slower in 8 bits", "costs too much of the score"
"""Reasons why a layer stays in its original format."""

OnStage = Callable[[str, str], None]
"""Called with the present stage and its detail."""


class TriedVariant(NamedTuple):
    """The record of a variant that was scored, or timed in turns with another variant."""

    what: str
    """The options of the 8 bits in words, or ``int8`` or ``float16`` in the last race."""
    left_out: tuple[str, ...]
    """Layers that stayed in float32."""
    seconds: float | None
    """The time of one run; None where only the score was measured."""
    against_s: float | None
    """The time of the variant that it took turns with."""
    score: float | None
    """None where it was too slow to be scored."""
    kept: bool
    """Whether the search continued with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestVariant:
    """The fastest variant that keeps the score."""

    kind: str
    """``int8``, ``float16``, or ``float32``: the original model."""
    variant: BuiltVariant
    options: QdqOptions | None
    left_out: Mapping[str, str]
    """Layer that stayed in float32 -> why."""
    before: Turns
    after: Turns
    """Times of the original model and of the result, which took turns; equal if nothing was faster."""
    score: float
    times_before: Mapping[str, float]
    times_int8: Mapping[str, float]
    """Layer -> seconds, with all layers in 8 bits."""
    times_after: Mapping[str, float]
    tried: tuple[TriedVariant, ...]


def choose(bench: RuntimeBench, threshold: float, on_stage: OnStage) -> FastestVariant:
    """Search for the fastest variant that scores at least *threshold*; *on_stage* is called with the progress."""
    search = _Search(bench, threshold, on_stage)
    search.begin()
    search.leave_out_slow_together()
    search.keep_the_score()
    search.leave_out_slow_one_by_one()
    return search.end()


class _Entrant(NamedTuple):
    """A variant in the final race."""

    kind: str
    variant: BuiltVariant
    score: float | None


@dataclass
class _Search:
    """The state of a search."""

    bench: RuntimeBench
    threshold: float
    on_stage: OnStage
    options: QdqOptions = OPTIONS[0]
    left_out: dict[str, str] = field(default_factory=dict)
    """Layer -> why it is left out of the current variant."""
    score: float = 0.0
    """Score of the current variant."""
    halves: BuiltVariant | None = None
    """The variant in float16, if it is faster than float32."""
    current: BuiltVariant = field(init=False)
    all_int8: BuiltVariant = field(init=False)
    tried: list[TriedVariant] = field(default_factory=list)
    times_before: Mapping[str, float] = field(default_factory=dict)
    times_int8: Mapping[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start with all layers in 8 bits; float16 is tried at the end, if it is faster than float32."""
        bench = self.bench
        self.on_stage("measuring", "all layers at once")
        self.choose_options()
        self._try_halves()
        self.all_int8 = self.current
        self.times_before, self.times_int8 = bench.layer_times([bench.original, self.current])

    def _try_halves(self) -> None:
        """Time all layers in float16 against the original, and keep that variant if it is faster."""
        try:
            halves = self.bench.halves()
        except TuneError:  # this build of ONNX Runtime has no float16 kernels
            return
        original_times, half_times = self.bench.race([self.bench.original, halves])
        if half_times.faster_than(original_times):
            self.halves = halves
        self._note(FLOAT16, (), half_times, original_times, score=None, kept=self.halves is not None)

    def choose_options(self) -> None:
        """Choose the options that are fastest for the layers in 8 bits."""
        variants = [self._build(options, self.left_out) for options in OPTIONS]
        original_times, *times = self.bench.race([self.bench.original, *variants])
        best = min(range(len(OPTIONS)), key=lambda number: times[number].median_s)
        for number, variant_times in enumerate(times):
            self._note(
                str(OPTIONS[number]), self.left_out, variant_times, original_times, score=None, kept=number == best
            )
        self.options, self.current = OPTIONS[best], variants[best]

    def leave_out_slow_together(self) -> None:
        """Leave out all layers that are slower in 8 bits, if the whole is no slower: fewer layers lose less score."""
        slow = [name for name in self._by_gain() if self._gain(name) < 0]
        if slow:
            self.on_stage("measuring", f"without {len(slow)} layers that are slower in 8 bits")
            if self._try_without(slow, together=True):
                self.choose_options()

    def keep_the_score(self) -> None:
        """Reach the threshold with other steps, then by leaving out the fewest layers, the most harmful first."""
        self.on_stage("scoring", "all samples")
        self.score = self.bench.score(self.current)
        self._note_score(self.options, self.left_out, self.score)
        self._try_other_steps()
        if self.score >= self.threshold:
            return
        ordered = self._most_harmful_first()
        self.left_out |= dict.fromkeys(ordered[: self._fewest_to_leave_out(ordered)], HARMFUL)
        self.current = self._build(self.options, self.left_out)
        self.score = self.bench.score(self.current)

    def _most_harmful_first(self) -> list[str]:
        """Return the layers in 8 bits by lost score per saved time, the largest first."""
        in_8_bits = [name for name in self.bench.layers if name not in self.left_out]
        harms = {}
        for number, name in enumerate(in_8_bits, 1):
            self.on_stage("scoring", f"layer {number} of {len(in_8_bits)} alone: {name}")
            harms[name] = self.bench.harm(name, self.options)
        return sorted(in_8_bits, key=lambda name: harms[name] / max(self._gain(name), LEAST_GAIN_S), reverse=True)

    def _fewest_to_leave_out(self, ordered: Sequence[str]) -> int:
        """Return the least number of layers at the start of *ordered* to leave out; by bisection.

        Leaving out more layers is assumed never to lower the score.
        """
        too_few, enough = 0, len(ordered)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            left_out = [*self.left_out, *ordered[:middle]]
            self.on_stage("scoring", f"without {len(left_out)} layers")
            score = self.bench.score(self._build(self.options, left_out))
            self._note_score(self.options, left_out, score)
            too_few, enough = (too_few, middle) if score >= self.threshold else (middle, enough)
        return enough

    def leave_out_slow_one_by_one(self) -> None:
        """Try to leave out single layers, those first that gain least; ends when several in a row are better kept."""
        failures_in_a_row = 0
        in_8_bits = [name for name in self._by_gain() if name not in self.left_out]
        for number, name in enumerate(in_8_bits, 1):
            if failures_in_a_row == PATIENCE or len(self.left_out) + 1 >= len(self.bench.layers):
                return
            self.on_stage("measuring", f"without {name}, {number} of at most {len(in_8_bits)}")
            failures_in_a_row = 0 if self._try_without([name]) else failures_in_a_row + 1

    def end(self) -> FastestVariant:
        """Race the remaining variants against the original model; the winner is the result."""
        bench = self.bench
        self.on_stage("measuring", "before and after")
        entrants = self._entrants()
        variants = [bench.original, *(entrant.variant for entrant in entrants)]
        before, *entrants_times = bench.race(variants, LAST_TURNS)
        best, after = _Entrant(FLOAT32, bench.original, None), before
        for entrant, times in zip(entrants, entrants_times, strict=True):
            wins = times.faster_than(before) and times.median_s < after.median_s
            left_out = self.left_out if entrant.kind == INT8 else ()
            self._note(entrant.kind, left_out, times, before, entrant.score, kept=wins)
            if wins:
                best, after = entrant, times
        before_s, int8_s, after_s = bench.layer_times([bench.original, self.all_int8, best.variant])
        return FastestVariant(
            kind=best.kind, variant=best.variant, options=self.options if best.kind == INT8 else None, before=before,
            after=after, score=bench.score(bench.original) if best.score is None else best.score,
            left_out=self.left_out if best.kind != FLOAT16 else {}, times_before=before_s, times_int8=int8_s,
            times_after=before_s if best.kind == FLOAT32 else after_s, tried=tuple(self.tried),
        )  # fmt: skip

    def _entrants(self) -> list[_Entrant]:
        """Return the variants that keep the score and may beat the original model."""
        entrants = []
        if self.current is not self.bench.original and self.score >= self.threshold:
            entrants.append(_Entrant(INT8, self.current, self.score))
        if self.halves is not None and (score := self.bench.score(self.halves)) >= self.threshold:
            entrants.append(_Entrant(FLOAT16, self.halves, score))
        return entrants

    def _try_other_steps(self) -> None:
        """If the score is too low, try smaller steps that clip, and narrower weights; take the best if it is better."""
        if self.score >= self.threshold:
            return
        for options in (self.options._replace(clipped=True), self.options._replace(weight_bits=7)):
            self.on_stage("scoring", str(options))
            variant = self._build(options, self.left_out)
            score = self.bench.score(variant)
            self._note_score(options, self.left_out, score)
            if score > self.score:
                self.options, self.current, self.score = options, variant, score

    def _try_without(self, names: Collection[str], *, together: bool = False) -> bool:
        """Leave out the layers *names* as well, if the model is faster and keeps the score; return whether it is.

        together: the model need not be faster, only no slower, and is scored later.
        """
        left_out = [*self.left_out, *names]
        variant = self._build(self.options, left_out)
        current, times = self.bench.race([self.current, variant])
        wins, score = not current.faster_than(times) if together else times.faster_than(current), None
        if wins and not together:
            score = self.bench.score(variant)
            wins = score >= self.threshold
        self._note(str(self.options), left_out, times, current, score, kept=wins)
        if wins:
            self.left_out |= dict.fromkeys(names, SLOWER)
            self.current, self.score = variant, self.score if score is None else score
        return wins

    def _build(self, options: QdqOptions, left_out: Collection[str]) -> BuiltVariant:
        return self.bench.eight_bits(frozenset(self.bench.layers) - frozenset(left_out), options)

    def _by_gain(self) -> list[str]:
        """All layers by the time that they save in 8 bits, the least first."""
        return sorted(self.bench.layers, key=self._gain)

    def _gain(self, name: str) -> float:
        """Return the seconds that a layer alone saves in 8 bits; 0 if the profiler saw none of its nodes."""
        return self.times_before.get(name, 0.0) - self.times_int8.get(name, 0.0)

    def _note_score(self, options: QdqOptions, left_out: Collection[str], score: float) -> None:
        kept = score >= self.threshold
        self.tried.append(
            TriedVariant(str(options), tuple(left_out), seconds=None, against_s=None, score=score, kept=kept)
        )

    def _note(
        self, what: str, left_out: Collection[str], times: Turns, against: Turns, score: float | None, *, kept: bool
    ) -> None:
        """Record a variant: its *times*, those of the variant that it took turns with, and its score."""
        self.tried.append(TriedVariant(what, tuple(left_out), times.median_s, against.median_s, score, kept))
