"""Published quantization methods over the same networks and evaluators, for comparison with our own.

**Ristretto** (Gysel, Pimentel, Motamedi and Ghiasi, TNNLS 2018): one width of fixed point for each of three groups. Its
dynamic fixed point as its published code has it: two's complement, an integer length for each layer and role from the
largest magnitude (activations get one bit less on purpose, so that the largest saturate), one width for all convolution
weights, one for all fully connected weights, one for all activations. Each group is swept alone, with everything else
in float32, over 16, 8, 4, 2, 1 bits to the first failure; then the three widths are put together and scored once.
Nothing is repaired if that fails, unless ``repair`` asks for it. Three things are not as in its code. The margin is
relative, as in the chapter, not in points. Layer outputs are not rounded where they leave a layer but where they enter
the next target as its input. And of a network only its targets are quantised, as with every other method here.

**Stripes** (Judd et al., MICRO 2016): fixed point of its own width for the input of each layer. Weights stay in FIXED
16. Inputs start with 16 bits, their range from the largest magnitude; then one bit is taken away at a time, the last of
the fraction or the first of the integer part of one layer, always where the network stays most accurate, until every
such step would fall below the threshold. The margin is taken from the float32 network, as in the chapter's comparison;
the paper itself takes it from the network in FIXED 16 (``reference="fixed"``). Its text does not print the search; this
is the greedy one of the same group's earlier study of reduced precision, started at 16 bits.

``exhaustive`` scores every configuration of a small space, in the order of the objective: the optimum that a search is
compared with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

from weft.base.errors import EvaluationError, TuneError
from weft_tune.evaluation import Database, Evaluator, Score, Subset, open_database
from weft_tune.network import Network, Role, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FIXED, FLOAT32, Format, TwosComplement
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, Unbiased, load_platform
from weft_tune.search_space import Layerwise, SearchSpace, TuningSetting, first_scale, space_of
from weft_tune.tuner import threshold_of

WIDTHS = (16, 8, 4, 2, 1)
RELAXED_WIDTHS = tuple(range(32, 1, -1))
"""Every integer, as the chapter relaxes Ristretto: not one bit."""
STRIPES_BITS = 16
"""Width of the weights of Stripes, and of inputs at first."""
STRIPES_FEWEST_BITS = 2
"""Narrowest fixed point: a sign and one bit."""

OnScored = Callable[[int, Configuration, Score], None]
"""Called after every new score: its number, the configuration, and the score."""
Reference = Literal["float", "fixed"]
"""The network that the margin of Stripes is taken from: in float32, or in 16 bits of fixed point."""


class ScoredStep(NamedTuple):
    """One scored configuration of a baseline's search."""

    step: str
    """The step of the search: ``conv weights``, ``inputs``, ``combined``, ``start``, ``drop`` or ``repair``."""
    configuration: Configuration
    score: Score


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of a method, and the scores it needed."""

    method: str
    configuration: Configuration
    score: float
    """The configuration's score, exact."""
    base: float
    """The score that the margin is taken from."""
    threshold: float
    trials: tuple[ScoredStep, ...]
    """Every configuration that was scored, in order."""
    repaired: bool = False
    """Whether the method's own answer failed and was widened until it passed."""

    @property
    def feasible(self) -> bool:
        return self.score >= self.threshold

    @property
    def evaluations(self) -> int:
        return len(self.trials)

    @property
    def samples(self) -> int:
        return sum(trial.score.samples for trial in self.trials)


class Method(Protocol):
    """The parameters that every baseline takes."""

    def __call__(
        self,
        network: Network,
        evaluator: Evaluator,
        *,
        margin: float,
        subset: Subset = ...,
        database: Path | None = ...,
        progress: OnScored | None = ...,
    ) -> Baseline: ...


class Referee:
    """Scores configurations for a baseline on one subset, each one once, and records the trials.

    The database is shared with our own search, so each reuses the scores of the other.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        margin: float,
        subset: Subset,
        *,
        database: Path | None = None,
        progress: OnScored | None = None,
    ) -> None:
        if not 0 <= margin < 1:
            raise TuneError(f"margin = {margin} must be at least 0 and below 1; 0.01 lets 1 % of the score go")
        self._evaluator, self._margin, self._subset, self._progress = evaluator, margin, subset, progress
        self._database = Database(database)
        self._trials: dict[Configuration, ScoredStep] = {}
        self.base = self.threshold = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def measure_base(self, configuration: Configuration) -> None:
        """Score *configuration* as the base, and set the threshold to the margin below its score."""
        self.base = self.score(configuration, "base").value
        self.threshold = threshold_of(self.base, self._margin)

    def score(self, configuration: Configuration, step: str, needed: float = -math.inf) -> Score:
        """Score a configuration: exactly, unless the score lies below *needed*."""
        trial = self._trials.get(configuration)
        if trial and (trial.score.exact or trial.score.value < needed):
            return trial.score
        score = self._database.score(self._evaluator, self._subset, configuration, needed)
        samples = score.samples + (trial.score.samples if trial else 0)
        self._trials[configuration] = ScoredStep(step, configuration, score._replace(samples=samples))
        if self._progress:
            self._progress(len(self._trials), configuration, score)
        return score

    def prepare(self, configurations: Sequence[Configuration]) -> None:
        """Score all *configurations* in parallel into the database, unless the evaluator can stop early."""
        if self._evaluator.stops_early:
            return
        fingerprint, find = self._evaluator.fingerprint, self._database.find
        # A stored failure is tried again.
        unscored = [c for c in configurations if not isinstance(find(fingerprint, self._subset, c), Score)]
        for configuration, outcome in zip(unscored, self._evaluator.evaluate_many(unscored, self._subset), strict=True):
            if isinstance(outcome, EvaluationError):
                raise outcome
            self._database.keep(fingerprint, self._subset, configuration, -math.inf, outcome)

    def passes(self, configuration: Configuration, step: str) -> bool:
        """Whether the score of *configuration* reaches the threshold."""
        return self.score(configuration, step, self.threshold).value >= self.threshold

    def verdict(self, method: str, configuration: Configuration, step: str, repaired: bool = False) -> Baseline:
        """The result of *method* whose final configuration is *configuration*."""
        value, trials = self.score(configuration, step).value, tuple(self._trials.values())
        return Baseline(method, configuration, value, self.base, self.threshold, trials, repaired)


class WidthGroup(NamedTuple):
    """Weights or inputs of some targets that share one width."""

    name: str
    role: Role
    targets: tuple[Target, ...]
    covering: bool = False
    """Whether inputs get one integer bit more than in Ristretto, so that the largest do not saturate."""

    def formats(self, bits: int | None) -> dict[str, AnyFormat]:
        """Object -> its format with *bits* bits; float32 if None."""
        extra = self.covering and self.role == "input"  # one integer bit
        return {
            name: FLOAT32 if bits is None else TwosComplement(bits, bits - integer_length(target, self.role) - extra)
            for target in self.targets
            for name in target.objects(self.role)
        }


def integer_length(target: Target, role: Role) -> int:
    """Ristretto's number of bits before the point, including the sign: all weights fit, the largest inputs saturate."""
    largest = target.largest(role)
    if not largest:
        return 0
    return math.ceil(math.log2(largest) + 1) if role == "weight" else math.ceil(math.log2(largest))


def ristretto(
    network: Network,
    evaluator: Evaluator,
    *,
    margin: float,
    widths: Sequence[int] = WIDTHS,
    covering: bool = False,
    repair: bool = False,
    subset: Subset = "full",
    database: Path | None = None,
    progress: OnScored | None = None,
    method: str = "Ristretto",
) -> Baseline:
    """Ristretto: sweep the width of each of three groups alone, and score the combination of the three results.

    widths: those to try, from wide to narrow. covering: one integer bit more for inputs than in the published code, so
    that none saturates; with few bits, either rule may be better. repair: while the combination fails, widen the group
    whose widening gives the highest score.
    """
    groups = _width_groups(network, covering)
    ladder: tuple[int | None, ...] = (None, *widths)  # None: float32; a *rung* is the index of a width in it
    with Referee(evaluator, margin, subset, database=database, progress=progress) as referee:
        referee.measure_base(Configuration({}))
        rungs = [_sweep(referee, group, ladder) for group in groups]
        repaired = False
        while repair and not referee.passes(_combine(groups, ladder, rungs), "combined"):
            rungs, repaired = _widen(referee, groups, ladder, rungs), True
        return referee.verdict(method, _combine(groups, ladder, rungs), "combined", repaired)


relaxed_ristretto = partial(ristretto, widths=RELAXED_WIDTHS, method="relaxed Ristretto")
"""Ristretto's search with all widths from 32 to 2 bits."""


def _width_groups(network: Network, covering: bool) -> list[WidthGroup]:
    """Ristretto's three groups; fully connected layers are those that use each weight once for a sample."""
    dense = tuple(target for target in network.targets if target.macs == target.weights)
    convolutions = tuple(target for target in network.targets if target.macs != target.weights)
    groups = (
        WidthGroup("conv weights", "weight", convolutions),
        WidthGroup("fc weights", "weight", dense),
        WidthGroup("inputs", "input", network.targets, covering),
    )
    return [group for group in groups if group.targets]


def _sweep(referee: Referee, group: WidthGroup, ladder: Sequence[int | None]) -> int:
    """Index in *ladder* of the narrowest width before the first failure, if only *group* is quantised."""
    for rung in range(1, len(ladder)):
        if not referee.passes(Configuration(group.formats(ladder[rung])), group.name):
            return rung - 1
    return len(ladder) - 1


def _combine(groups: Sequence[WidthGroup], ladder: Sequence[int | None], rungs: Sequence[int]) -> Configuration:
    """The configuration in which each of *groups* has the width ladder[rung]; *rungs*: one for each group."""
    formats: dict[str, AnyFormat] = {}
    for group, rung in zip(groups, rungs, strict=True):
        formats |= group.formats(ladder[rung])
    return Configuration(formats)


def _widen(referee: Referee, groups: Sequence[WidthGroup], ladder: Sequence[int | None], rungs: list[int]) -> list[int]:
    """Widen one group by one rung: the group whose combination then scores highest, the first on a tie.

    rungs: for each group the index of its width in *ladder*, which begins with the widest.
    """
    wider = [[rung - (n == group) for n, rung in enumerate(rungs)] for group in range(len(rungs)) if rungs[group] > 0]
    return max(wider, key=lambda choice: referee.score(_combine(groups, ladder, choice), "repair").value)


def covering_format(target: Target, role: Role) -> Format:
    """16 bits of fixed point whose range covers every value of the target's weights or inputs."""
    return FIXED(STRIPES_BITS, first_scale(target.largest(role)))


def stripes(
    network: Network,
    evaluator: Evaluator,
    *,
    margin: float,
    reference: Reference = "float",
    subset: Subset = "full",
    database: Path | None = None,
    progress: OnScored | None = None,
) -> Baseline:
    """The greedy search of Stripes; if the 16-bit network itself misses the threshold, it is the result.

    reference: see ``Reference``.
    """
    inputs = [covering_format(target, "input") for target in network.targets]
    start = _with_inputs(network, inputs)
    step = "start"
    with Referee(evaluator, margin, subset, database=database, progress=progress) as referee:
        referee.measure_base(Configuration({}) if reference == "float" else start)
        while referee.passes(_with_inputs(network, inputs), step):
            narrower = _best_drop(referee, network, inputs)
            if narrower is None:
                break
            inputs, step = narrower, "drop"
        return referee.verdict("Stripes", _with_inputs(network, inputs), step)


def _with_inputs(network: Network, inputs: Sequence[Format]) -> Configuration:
    """All weights in 16 bits, and the inputs of each target in its format of *inputs*."""
    formats: dict[str, AnyFormat] = {}
    for target, form in zip(network.targets, inputs, strict=True):
        formats |= dict.fromkeys(target.objects("weight"), covering_format(target, "weight"))
        formats |= dict.fromkeys(target.objects("input"), form)
    return Configuration(formats)


def _narrower_inputs(network: Network, inputs: Sequence[Format]) -> Iterator[list[Format]]:
    """Candidates with one bit fewer in one target: without the last fraction bit, then without the first bit.

    Targets with the most inputs come first, because ties go to the earlier candidate.
    """
    for index in sorted(range(len(inputs)), key=lambda index: -network.targets[index].inputs):
        form = inputs[index]
        if form.bits > STRIPES_FEWEST_BITS:
            for bias in (form.bias, form.bias + 1):
                yield [*inputs[:index], FIXED(form.bits - 1, bias), *inputs[index + 1 :]]


def _best_drop(referee: Referee, network: Network, inputs: Sequence[Format]) -> list[Format] | None:
    """The most accurate candidate with one bit fewer that reaches the threshold; None if none does."""
    best, needed = None, referee.threshold
    candidates = list(_narrower_inputs(network, inputs))
    referee.prepare([_with_inputs(network, candidate) for candidate in candidates])
    for candidate in candidates:
        value = referee.score(_with_inputs(network, candidate), "drop", needed).value
        if value >= needed:
            # a later candidate must be better, not equal
            best, needed = candidate, math.nextafter(value, math.inf)
    return best


BASELINES: dict[str, Method] = {
    "ristretto": ristretto,
    "relaxed-ristretto": relaxed_ristretto,
    "stripes": stripes,
}
"""The names that users write. Uniform int8 is not among them: it writes a file, see ``quantised.scoring``."""


MOST_CONFIGURATIONS = 1_000_000
"""Limit of the size of a space: more configurations would take days."""


class Optimum(NamedTuple):
    """The best configuration of a space."""

    configuration: Configuration | None
    """None where nothing is feasible."""
    score: float
    objective: float
    base: float
    threshold: float
    scored: int
    """The number of configurations that were scored, the first that passes among them."""
    size: int
    """The number of configurations in the space."""


def exhaustive(
    network: Network,
    evaluator: Evaluator,
    *,
    platform: Platform | str,
    biases: Sequence[int] = (0,),
    margin: float = 0.01,
    objective: str | Measure = DEFAULT,
    extras: Extras | None = None,
    layerwise: Layerwise = "WGT-ONLY",
    subset: Subset = "full",
    database: Path | Database | None = None,
) -> Optimum:
    """Find the feasible configuration with the smallest objective by trying all of them, the smallest objective first.

    Tried are all formats of the platform in every group, and all *biases*, relative to the start of a search, for every
    object. The objective may depend on types and widths, not on biases. Raises TuneError for more than
    ``MOST_CONFIGURATIONS``.
    """
    hardware = load_platform(platform) if isinstance(platform, str) else platform
    space = space_of(network, hardware, layerwise)
    size = _count_configurations(space, len(biases))
    if size > MOST_CONFIGURATIONS:
        raise TuneError(
            f"{size:.3g} configurations are too many to try; "
            f"allow fewer formats or biases ({MOST_CONFIGURATIONS} at most)"
        )
    measure = partial(objective_from(objective, extras), network)
    with open_database(database) as scores:
        score = partial(scores.score, evaluator, subset)
        base = score(Configuration({})).value
        threshold = threshold_of(base, margin)
        scored = 0
        for value, types in _by_objective(space, measure):
            for configuration in _with_biases(space, types, biases):
                scored += 1
                outcome = score(configuration, threshold)
                if outcome.exact and outcome.value >= threshold:
                    return Optimum(configuration, outcome.value, value, base, threshold, scored, size)
    return Optimum(None, math.nan, math.nan, base, threshold, scored, size)


def _count_configurations(space: SearchSpace, biases: int) -> int:
    """The number of configurations with *biases* biases per object; a type without a bias counts once."""
    objects = Counter(item.group for item in space.items)
    return math.prod(
        sum(biases ** objects[position] if choice.biased else 1 for choice in group.choices)
        for position, group in enumerate(space.groups)
    )


def _by_objective(space: SearchSpace, measure: partial[float]) -> list[tuple[float, tuple[Unbiased, ...]]]:
    """All choices of types and widths with their objectives, the smallest first; ties in the order of the platform."""
    starts = tuple(item.start for item in space.items)
    choices = product(*(group.choices for group in space.groups))
    measured = [(measure(space.configuration(TuningSetting(types, starts))), types) for types in choices]
    return sorted(measured, key=lambda pair: pair[0])


def _with_biases(space: SearchSpace, types: tuple[Unbiased, ...], biases: Sequence[int]) -> Iterator[Configuration]:
    """The configurations with these types and all combinations of biases; a type without a bias has one choice."""
    choices = [
        [item.start + bias for bias in biases] if types[item.group].biased else [item.start] for item in space.items
    ]
    for scales in product(*choices):
        yield space.configuration(TuningSetting(types, scales))
