"""The searches of a network: every method at both margins, and the sensitivity studies."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

from weft_papers.libnumber.lab import (
    BIAS_RULE,
    BOTH,
    EXHAUSTIVE,
    FAITHFUL,
    MARGINS,
    OURS,
    RELAXED,
    RESTRICTED,
    RISTRETTO,
    SERIAL,
    SMALL,
    START,
    STRIPES,
    WHOLE,
)
from weft_papers.libnumber.recorded import Option
from weft_tune.baselines import covering_format
from weft_tune.network import ROLES, Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.objective import DEFAULT
from weft_tune.platform import Platform, parse_platform
from weft_tune.tuner import BIAS_RULES, BiasRule, find_formats

SERIAL_MARGIN = 0.01
"""The margin of the comparison on bit-serial hardware and of the sensitivity studies."""
MORE_MARGINS = (0.002, 0.005, 0.02, 0.03, 0.05, 0.1)
SHARES = (0.05, 0.1, 0.3, 0.5)
"""Sizes of the small set, as shares of the images."""
STARTS = (-1, 1)
"""First biases of the search, relative to the chapter's."""
USUAL_RULE: BiasRule = inspect.signature(find_formats).parameters["bias"].default
RULES: tuple[Option, ...] = tuple(rule for rule in BIAS_RULES if rule != USUAL_RULE)
VARIED = ("lenet", "cuda-convnet")
"""The networks of the sensitivity studies."""


class Enumerated(NamedTuple):
    """A search space that is small enough to try all configurations."""

    formats: list[str]
    biases: range
    """The biases tried for each tensor, relative to its first bias."""


ENUMERATED = {
    ("lenet", 0.07): Enumerated(["FIXED 2..4", "EXP 2..3"], range(5)),
    ("lenet", 0.01): Enumerated(["FIXED 2..4", "EXP 2..3"], range(5)),
    ("cuda-convnet", 0.07): Enumerated(["FIXED 3..5"], range(3)),
    ("cuda-convnet", 0.01): Enumerated(["FIXED 5..7"], range(4)),
}
COVERING = "covering"
"""Option of Ristretto: inputs keep the integer bit that Ristretto's code takes from them."""
MACS = "macs"
"""Option of the inputs-only search: the objective counts products, not bits that are stored."""
MACS_OBJECTIVE = "sum(l.macs * l.input_bits for l in layers)"


class SearchJob(NamedTuple):
    """One search: a method, a margin and a variation."""

    method: str
    margin: float
    option: Option = None
    """The value of the setting that the variation changes; None: the default."""


def jobs(net: str) -> list[SearchJob]:
    """All searches of a network; those that the tables need come first."""
    searches = [SearchJob(method, margin) for margin in MARGINS for method in (OURS, RISTRETTO, RELAXED, STRIPES)]
    searches += [SearchJob(method, margin, COVERING) for margin in MARGINS for method in (RISTRETTO, RELAXED)]
    searches += [SearchJob(SERIAL, SERIAL_MARGIN), SearchJob(SERIAL, SERIAL_MARGIN, MACS)]
    searches += [SearchJob(FAITHFUL, margin) for margin in MARGINS]
    searches += [SearchJob(BIAS_RULE, margin, rule) for margin in MARGINS for rule in RULES]
    searches += [
        SearchJob(method, margin)
        for margin in MARGINS
        for method in (RESTRICTED, EXHAUSTIVE)
        if (net, margin) in ENUMERATED
    ]
    searches += [SearchJob(WHOLE, SERIAL_MARGIN), *(SearchJob(BOTH, margin) for margin in MARGINS)]
    if net in VARIED:
        searches += [SearchJob(OURS, margin) for margin in MORE_MARGINS]
        searches += [SearchJob(SMALL, SERIAL_MARGIN, share) for share in SHARES]
        searches += [SearchJob(START, SERIAL_MARGIN, shift) for shift in STARTS]
    return searches


def settings(network: Network, job: SearchJob) -> dict[str, Any]:
    """Keyword arguments of the search for a job, without the margin."""
    arguments: dict[str, dict[str, Any]] = {
        FAITHFUL: {"faithful": True},
        WHOLE: {"two_passes": False},
        BOTH: {"layerwise": "BOTH"},
        BIAS_RULE: {"bias": job.option},
        SERIAL: {
            "platform": "stripes",
            "layerwise": "ACT-ONLY",
            "base": sixteen_bits(network),
            "objective": MACS_OBJECTIVE if job.option == MACS else DEFAULT,
        },
    }
    if job.method == RESTRICTED:
        return {"platform": enumerated(network.name, job.margin)}
    return arguments.get(job.method, {})


def enumerated(net: str, margin: float) -> Platform:
    """The platform with the formats of an enumerated space (see ENUMERATED)."""
    return parse_platform({"name": "enumerated", "formats": ENUMERATED[net, margin].formats}, "enumerated")


def sixteen_bits(network: Network) -> Configuration:
    """Fixed point of 16 bits whose range takes in every value: the baseline of bit-serial hardware."""
    return Configuration(
        {
            name: covering_format(target, role)
            for target in network.targets
            for role in ROLES
            for name in target.objects(role)
        }
    )


def shift_first_biases(network: Network, shift: float) -> Network:
    """The network with all value ranges times ``2 ** -shift``, so that a search starts with biases *shift* higher."""
    factor = 2.0**-shift
    targets = [
        replace(target, weight_max=target.weight_max * factor, input_max=target.input_max * factor)
        for target in network.targets
    ]
    return replace(network, targets=tuple(targets))
