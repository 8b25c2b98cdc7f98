"""What the paper's experiments share: eight models, sixteen pairs, two NPUs, and one way to run them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from weft.devices import Npu, load_npu
from weft.devices.costs.layer_costs import Profile, estimate
from weft.devices.costs.program import Clock, lower
from weft.engine.policies import Option
from weft.engine.policies.bound import QueryDemand, demand_of, prices
from weft.models import Model
from weft.models.zoo import load
from weft.simulation import Run, simulate
from weft.simulation.report import Report
from weft.simulation.sweep import Sweep, sweep_aimt
from weft.workloads import Saturated

COMPUTE = {"IC": "inception-v3", "MN": "mobilenet-v2", "RN": "resnet50", "RX": "resnext50-32x4d"}
MEMORY = {"BB": "bert-base", "BL": "bert-large", "NCF": "ncf", "XL": "xlnet-large"}
"""The paper's names of compute- and memory-intensive models. Its XLNet has no size; the large one is taken."""
MODELS = {**COMPUTE, **MEMORY}
ENCODERS = ("BB", "BL", "XL")

Models = tuple[str, ...]
"""Short names of models that run together."""
Options = tuple[tuple[str, Option], ...]
"""Name and value of each option of a policy; hashable, for the caches."""

PAIRS: tuple[Models, ...] = tuple(product(COMPUTE, MEMORY))
FOURS: tuple[Models, ...] = tuple(
    (*cnns, *others)
    for cnns, others in product(
        (("IC", "MN"), ("IC", "RN"), ("MN", "RN")), (("BB", "NCF"), ("BB", "XL"), ("NCF", "XL"))
    )
)
"""Combinations of two compute-intensive and two memory-intensive models (section IV-C)."""

ROOM_MIB = 2.0**16  # an activation buffer that is never full
CUT_PAIRS: tuple[Models, ...] = tuple(product(COMPUTE, ENCODERS))
"""The pairs of a CNN and an encoder: their layers are large compared with a small weight buffer."""

FAILSAFE_OFF: Options = (("failsafe", False),)


@dataclass(frozen=True)
class Scene:
    """The setting of a run without models and policy: NPU, batch, sequence length and cost model."""

    npu: Npu
    batch: int
    seq_len: int = 16
    cost: str = "pipelined"

    def __str__(self) -> str:
        return f"{self.npu.name}, batch {self.batch}, {self.seq_len} tokens"

    def on(self, **changes: float) -> Scene:
        """This scene with other values of fields of its NPU."""
        return replace(self, npu=self.npu.model_copy(update=changes))


def scenes(seq_len: int, cost: str) -> tuple[Scene, Scene]:
    """The two settings of the evaluation: (a) memory-centric at batch 1, (b) compute-centric at batch 16."""
    return Scene(device("tpuv3-like"), 1, seq_len, cost), Scene(device("nnpi-like"), 16, seq_len, cost)


def device(name: str) -> Npu:
    """A preset whose activation buffer fits any models at any batch, as section III-E sizes it; it costs no time."""
    return load_npu(name).model_copy(update={"activation_buffer_mib": ROOM_MIB})


def network(model: str, seq_len: int) -> Model:
    """Load one of the eight models by its short name; *seq_len* applies to the language models."""
    return load(MODELS[model], seq_len=seq_len) if model in ENCODERS else load(MODELS[model])


@lru_cache(maxsize=4096)
def profile(scene: Scene, model: str) -> Profile:
    """Cost of the layers of one of the eight models in the scene."""
    return estimate(network(model, scene.seq_len), scene.npu, batch=scene.batch, cost=scene.cost)


@lru_cache(maxsize=4096)
def demand(scene: Scene, model: str) -> QueryDemand:
    """Ticks of a query: of the PE array, of the DRAM channel, and from begin to end when the model runs alone."""
    return demand_of(lower(profile(scene, model), scene.npu), Clock.of(scene.npu).buffer)


def bound(scene: Scene, models: Models) -> float:
    """The largest system throughput of any schedule of the models."""
    return prices([demand(scene, model) for model in models]).bound


def one_sided(scene: Scene, models: Models) -> bool:
    """Whether all models are compute-bound or all are memory-bound, so that the paper's failsafe disables weaving."""
    return len({demand(scene, model).compute > demand(scene, model).memory for model in models}) == 1


def simulate_models(
    scene: Scene,
    models: Models,
    policy: str,
    rounds: int,
    options: Options = (),
    mix: tuple[float, ...] | None = None,
    pieces: int | None = None,
) -> Run:
    """Simulate a saturated run: queries of every model always wait.

    rounds: length of the run in queries per model. mix: queries of each model in a round; None: as the policy chooses.
    pieces: parts into which a layer may be cut; None: as the policy chooses.
    """
    profiles = [profile(scene, model) for model in models]
    return simulate(profiles, scene.npu, policy, Saturated(rounds, mix), options=dict(options), pieces=pieces)


@lru_cache(maxsize=8192)
def report_of_run(
    scene: Scene,
    models: Models,
    policy: str,
    rounds: int,
    options: Options = (),
    mix: tuple[float, ...] | None = None,
    pieces: int | None = None,
) -> Report:
    """The report of ``simulate_models``, cached."""
    return simulate_models(scene, models, policy, rounds, options, mix, pieces).report


@lru_cache(maxsize=64)
def sweep_thresholds(scene: Scene, combinations: tuple[Models, ...] = PAIRS, queries: int = 20) -> Sweep:
    """Sweep AI-MT's thresholds; its best point has the largest mean throughput over all combinations."""
    return sweep_aimt(
        [[profile(scene, model) for model in models] for models in combinations], scene.npu, queries=queries
    )


def aimt_options(scene: Scene, combinations: tuple[Models, ...] = PAIRS) -> Options:
    """AI-MT's thresholds as tuned on the combinations."""
    return tuple(sweep_thresholds(scene, combinations).options.items())


@dataclass(frozen=True)
class Throughputs:
    """System throughput of one policy over several combinations, and their bounds."""

    stps: tuple[float, ...]
    bounds: tuple[float, ...]

    @cached_property
    def stp(self) -> float:
        """Geometric mean of the throughputs."""
        return geomean(self.stps)

    @cached_property
    def fractions(self) -> tuple[float, ...]:
        """Throughput over its bound, by combination."""
        return tuple(stp / bound for stp, bound in zip(self.stps, self.bounds, strict=True))

    @cached_property
    def fraction(self) -> float:
        """Geometric mean of the fractions of the bound."""
        return geomean(self.fractions)


def throughputs(
    scene: Scene,
    policy: str,
    rounds: int,
    options: Options = (),
    combinations: Sequence[Models] = PAIRS,
    pieces: int | None = None,
) -> Throughputs:
    """Run every combination under a policy.

    Where Layerweaver's failsafe disables weaving, models run one at a time, which has a throughput of 1 by definition.
    """
    has_failsafe = policy == "layerweaver" and options != FAILSAFE_OFF
    stps = tuple(
        1.0
        if has_failsafe and one_sided(scene, models)
        else report_of_run(scene, models, policy, rounds, options, None, pieces).stp
        for models in combinations
    )
    return Throughputs(stps, tuple(bound(scene, models) for models in combinations))


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def joined_names(models: Models) -> str:
    """The name of a combination: its models joined by "+"."""
    return "+".join(models)
