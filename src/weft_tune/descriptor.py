"""The network descriptor: what to tune and how, as a TOML file (the chapter's Table III.2).

    name = "lenet"
    margin = 0.01
    small = "python eval.py --images 1000 {config}"
    full = "python eval.py {config}"
    score = "Accuracy: (.*)"

    [[layer]]
    name = "conv1"
    weights = 500
    inputs = 784
    weight_max = 0.579
    input_max = 0.996

For a model that can be read, sizes and ranges are found in it, and a layer need only be named; what the file gives
takes precedence.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base.errors import TuneError, reason_of, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft_tune.network import Network, Target
from weft_tune.objective import DEFAULT
from weft_tune.search_space import Layerwise

Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DescribedLayer(BaseModel, extra="forbid", frozen=True, strict=True):
    """One layer, or branches that share its formats."""

    name: Name
    weights: Count | None = None
    inputs: Count | None = None
    """Values that enter it for one sample."""
    weight_max: Size | None = None
    input_max: Size | None = None
    macs: Count | None = None
    branches: tuple[Name, ...] = Field(default=(), strict=False)
    """Layers it stands for."""


class Descriptor(BaseModel, extra="forbid", frozen=True, strict=True):
    """The field names are the keys of the file."""

    name: Name
    platform: Name = "fpga"
    margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Relative loss of score allowed."""
    objective: Name = DEFAULT
    layerwise: Layerwise = "WGT-ONLY"
    small: str = ""
    """Command that scores a configuration on few samples; ``{config}`` stands for its file."""
    full: str = ""
    """Command that scores it on all samples; the only one, if ``small`` is not given."""
    score: str = ""
    """Regular expression whose first group is the score in what the command prints."""
    layer: tuple[DescribedLayer, ...] = Field(default=(), strict=False)


def load_descriptor(path: str | Path) -> Descriptor:
    """What a file says."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TuneError(f"{path}: cannot read the descriptor: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise TuneError(f"{path}: not a TOML file: {reason_of(error)}") from error
    return parse_descriptor(raw, str(path))


def parse_descriptor(raw: dict[str, Any], where: str) -> Descriptor:
    """The descriptor a mapping describes; *where* opens the error message."""
    try:
        return Descriptor.model_validate(raw)
    except ValidationError as error:
        raise TuneError(f"{where}: {first_problem(error, Descriptor, DescribedLayer)}") from error


def network_of(descriptor: Descriptor, found: Network | None = None) -> Network:
    """The targets it names; what it leaves out is taken from the network found in a model."""
    known = {target.name: target for target in found.targets} if found else {}
    if found and not descriptor.layer:
        return Network(descriptor.name, found.targets)
    return Network(descriptor.name, tuple(_target(layer, known) for layer in descriptor.layer))


def descriptor_of(network: Network, **settings: Any) -> Descriptor:
    """The descriptor of a network, with other keys as given."""
    layers = [
        {
            "name": target.name, "weights": target.weights, "inputs": target.inputs, "weight_max": target.weight_max,
            "input_max": target.input_max, "macs": target.macs, "branches": target.branches,
        }
        for target in network.targets
    ]  # fmt: skip
    return parse_descriptor({"name": network.name, **settings, "layer": layers}, network.name)


def as_toml(descriptor: Descriptor) -> str:
    """The file; reading it gives the descriptor back."""
    top = descriptor.model_dump(exclude={"layer"}, exclude_defaults=True)
    lines = _lines(top)
    for layer in descriptor.layer:
        lines += ["", "[[layer]]", *_lines(layer.model_dump(exclude_defaults=True))]
    return "\n".join(lines) + "\n"


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{key} = {_spelled(value)}" for key, value in values.items()]


def _spelled(value: str | float | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_spelled(each) for each in value)}]"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007F")


def _target(layer: DescribedLayer, known: dict[str, Target]) -> Target:
    """The target by what the file gives, else by the layers of the model that it stands for."""
    names = layer.branches or (layer.name,)
    if known and (missing := [name for name in names if name not in known]):
        raise TuneError(unknown_name("layer", missing[0], known))
    parts = [known[name] for name in names] if known else []

    def value(key: str, joined: Callable[[Iterable[Any]], Any]) -> Any:
        given = getattr(layer, key)
        if given is None and not parts and key != "macs":
            raise TuneError(f"layer {layer.name!r}: {key} is missing; it must be given where no model is read")
        return given if given is not None else joined(getattr(part, key) for part in parts)

    return Target(
        layer.name, value("weights", sum), value("inputs", sum), value("weight_max", max), value("input_max", max),
        value("macs", sum), _branches(layer, parts),
    )  # fmt: skip


def _branches(layer: DescribedLayer, parts: list[Target]) -> tuple[str, ...]:
    """Layers of the model, also where it names groups of them."""
    if not parts:
        return layer.branches
    return tuple(each for part in parts for each in part.layers) if layer.branches else parts[0].branches
