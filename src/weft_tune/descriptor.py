"""The network descriptor: layers and settings of a tuning as a TOML file (the chapter's Table III.2).

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

For a model that can be read, sizes and ranges are found in it, and a layer need only be named; values in the file take
precedence.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base import tomlfile
from weft.base.errors import TuneError, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft_tune.network import Network, Target, join_targets
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
    """Read a descriptor from a TOML file."""
    return parse_descriptor(tomlfile.read_toml(path, TuneError, "descriptor"), str(path))


def parse_descriptor(raw: dict[str, Any], where: str) -> Descriptor:
    """Check a mapping and make the descriptor of it; *where* opens the error message."""
    try:
        return Descriptor.model_validate(raw)
    except ValidationError as error:
        raise TuneError(f"{where}: {first_problem(error, Descriptor, DescribedLayer)}") from error


def network_of(descriptor: Descriptor, read: Network | None = None) -> Network:
    """The targets of a descriptor; values that it leaves out are taken from *read*, the network of a model."""
    known = {target.name: target for target in read.targets} if read else {}
    if read and not descriptor.layer:
        return Network(descriptor.name, read.targets)
    return Network(descriptor.name, tuple(_target(layer, known) for layer in descriptor.layer))


def descriptor_of(network: Network, **settings: Any) -> Descriptor:
    """The descriptor of a network; *settings* are its other keys."""
    layers = [asdict(target) for target in network.targets]
    return parse_descriptor({"name": network.name, **settings, "layer": layers}, network.name)


def as_toml(descriptor: Descriptor) -> str:
    """The content of the file; reading it gives the descriptor back."""
    return tomlfile.as_toml(descriptor.model_dump(exclude_defaults=True))


def _target(layer: DescribedLayer, known: dict[str, Target]) -> Target:
    """The target with the values of the file, the others from the layers of the model that it names."""
    values = layer.model_dump(exclude_none=True)
    if known:
        names = layer.branches or (layer.name,)
        if missing := [name for name in names if name not in known]:
            raise TuneError(unknown_name("layer", missing[0], known))
        joined = join_targets(layer.name, [known[name] for name in names])
        # a branch may be a group of layers, and a target alone keeps its own branches
        branches = joined.branches if layer.branches else known[layer.name].branches
        return replace(joined, **values | {"branches": branches})
    for key in ("weights", "inputs", "weight_max", "input_max"):
        if key not in values:
            raise TuneError(f"layer {layer.name!r}: {key} is missing; it must be given where no model is read")
    return Target(**values)
