"""Results of searches on the full data, read from the file that ``benchmarks/number_formats.py`` writes.

The file has configurations as text, and scores. Sizes, ratios and speeds are not in it: the parts compute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft_papers.libnumber.lab import NETS, OURS, REPAIRED, sizes
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration, parse_configuration
from weft_tune.result import KeptPoint, Trial, Tuning

FORMAT = 1  # version of the file; benchmarks/number_formats.py writes it
SHIPPED = "results.json"
Option = float | str | None
"""Value of the setting that distinguishes several runs of a method; None: the default run."""


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """One search, or one configuration, and its scores."""

    method: str
    margin: float
    configuration: Configuration
    validation: float
    """The accuracy on all validation images, on which the search was run."""
    test: float
    """The accuracy on the test images, which no search sees."""
    base: float
    """The score on the validation images that the margin is relative to."""
    feasible: bool
    iterations: int
    """Configurations that were scored."""
    samples: int
    """Images that were evaluated, of the small and the full set together."""
    seconds: float
    option: Option = None
    note: str = ""

    @property
    def key(self) -> tuple[str, float, Option]:
        return self.method, self.margin, self.option


class Widths(NamedTuple):
    """Accuracy over the number of bits of fixed point, for Figure II.5(a)."""

    bits: tuple[int, ...]
    weights: tuple[float, ...]
    """The accuracy with only the weights quantised, for each number of bits."""
    both: tuple[float, ...]
    """The accuracy with weights and inputs quantised, for each number of bits."""


class Int8(NamedTuple):
    """The whole network in int8 by ONNX Runtime's quantizer."""

    validation: float
    test: float
    weights: int
    scale_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class NetRecord:
    """The recorded results of one network."""

    name: str
    sha256: str
    """The SHA-256 of the model file that was tuned."""
    training: str
    """How the network was trained."""
    network: Network
    validation: float
    """The accuracy in float32."""
    test: float
    images: Mapping[str, int]
    """The number of images in each set: "small" and "full" (validation images), and "test"."""
    widths: Widths | None
    int8: Mapping[str, Int8]
    runs: tuple[ScoredRun, ...]
    path: Tuning | None
    """A search with all its trials; None: not recorded."""

    def find(self, method: str, margin: float, option: Option = None) -> ScoredRun | None:
        """The run of a method at a margin with an option, or None if it was not recorded."""
        return next((run for run in self.runs if run.key == (method, margin, option)), None)

    def passing(self, method: str, margin: float, *, plain: bool = False) -> ScoredRun | None:
        """The run of a method, in any variant, with the smallest configuration that keeps the margin; None without one.

        plain: only the published variant. If its own formats miss the margin, the repaired ones count.
        """
        runs = [run for run in self.runs if run.margin == margin and run.method in (method, method + REPAIRED)]
        passing_runs = [run for run in runs if run.feasible and not (plain and run.option)]
        return min(passing_runs, key=self.bits, default=None)

    def bits(self, run: ScoredRun) -> int:
        """The bits of all weights and of the activations of one sample."""
        return sizes(self.network, run.configuration).both

    def options(self, method: str, margin: float) -> list[ScoredRun]:
        """All runs of a method at a margin, one per option."""
        return [run for run in self.runs if (run.method, run.margin) == (method, margin)]


@dataclass(frozen=True, slots=True, eq=False)
class SearchRecord:
    """The content of one result file."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    nets: Mapping[str, NetRecord]

    def tuned(self, margin: float) -> list[str]:
        """Networks with a result of ours at a margin, in the chapter's order."""
        return [net for net in NETS if net in self.nets and self.nets[net].find(OURS, margin)]


def read(path: Path | None = None) -> SearchRecord:
    """Read a result file of ``benchmarks/number_formats.py``; None: the shipped one. Raises InputError."""
    with resources.as_file(resources.files("weft_papers") / "data" / "libnumber" / SHIPPED) as shipped:
        raw = read_json(path or shipped, InputError)
    return parse_record(raw, str(path or SHIPPED))


def parse_record(raw: Mapping[str, Any], source: str) -> SearchRecord:
    """Parse the content of a result file; *source* names the file in errors. Raises InputError."""
    try:
        if raw["format"] != FORMAT:
            raise InputError(f"{source}: format {raw['format']!r}; this version reads {FORMAT}")
        nets = {name: _parse_net(name, net) for name, net in raw["nets"].items()}
        return SearchRecord(raw["machine"], raw["settings"], nets)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source}: not a file of benchmarks/number_formats.py: {error!r}") from error


def _parse_net(name: str, raw: Mapping[str, Any]) -> NetRecord:
    """Parse the record of one network."""
    targets = tuple(Target(**{**entry, "branches": tuple(entry["branches"])}) for entry in raw["targets"])
    network = Network(name, targets)
    widths = raw.get("widths")
    return NetRecord(
        name, raw["sha256"], raw["training"], network, raw["validation"], raw["test"], raw["images"],
        Widths(*(tuple(widths[field]) for field in Widths._fields)) if widths else None,
        {kind: Int8(**entry) for kind, entry in raw.get("int8", {}).items()},
        tuple(ScoredRun(**_parse_run(entry)) for entry in raw["runs"]),
        _parse_tuning(network, raw["path"]) if raw.get("path") else None,
    )  # fmt: skip


def _parse_run(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run or trial, with its configuration parsed."""
    return {**raw, "configuration": parse_configuration(raw["configuration"])}


_PLAIN = ("platform", "margin", "layerwise", "score", "objective", "base_objective", "base", "thresholds", "samples")
"""The fields of a search that JSON can hold as they are."""


def _parse_tuning(network: Network, raw: Mapping[str, Any]) -> Tuning:
    """Parse a search with all its trials."""
    values: dict[str, Any] = {key: raw[key] for key in _PLAIN}
    values |= {key: parse_configuration(raw[key]) for key in ("configuration", "base_configuration")}
    trials = tuple(Trial(**_parse_run(entry)) for entry in raw["trials"])
    path = tuple(KeptPoint(**_parse_run(entry)) for entry in raw["path"])
    return Tuning(network=network, trials=trials, path=path, **values)


# Writing


def run_json(run: ScoredRun) -> dict[str, Any]:
    """The JSON object of a run, which ``parse_record`` reads."""
    return {field.name: getattr(run, field.name) for field in fields(run)} | {"configuration": run.configuration.text}


def targets_json(network: Network) -> list[dict[str, Any]]:
    """The JSON list of a network's targets."""
    return [asdict(target) for target in network.targets]


def tuning_json(tuning: Tuning) -> dict[str, Any]:
    """The JSON object of a search with every trial, for its picture."""
    return {key: getattr(tuning, key) for key in _PLAIN} | {
        "configuration": tuning.configuration.text,
        "base_configuration": tuning.base_configuration.text,
        "trials": [trial._asdict() | {"configuration": trial.configuration.text} for trial in tuning.trials],
        "path": [kept._asdict() | {"configuration": kept.configuration.text} for kept in tuning.path],
    }
