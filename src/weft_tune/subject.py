"""The subject of a tuning: a network, its samples, its device and its evaluator, as ``TuneOptions`` name them.

A network may be given by a descriptor, layers and settings as a TOML file (the chapter's Table III.2):

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

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base import tomlfile
from weft.base.errors import InputError, TuneError, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft.devices import Npu, load_npu
from weft.models import Model, classifiers
from weft.models.packaged import PACKAGED
from weft.models.sources import load_model, named_file
from weft.models.trained import TRAINED
from weft.models.zoo import ZOO
from weft_tune.command_evaluator import CommandEvaluator
from weft_tune.evaluation import Evaluator
from weft_tune.hardware import node_names
from weft_tune.network import Network, Target, join_targets
from weft_tune.objective import DEFAULT
from weft_tune.options import INT8, TuneOptions
from weft_tune.search_space import Layerwise

if TYPE_CHECKING:
    from weft_tune.quantised.data import LabelledData
    from weft_tune.quantised.opened import OpenedModel


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


def network_of(descriptor: Descriptor, measured: Network | None = None) -> Network:
    """The network of a descriptor; values that it leaves out come from *measured*, the network of a model, if given."""
    known_targets = {target.name: target for target in measured.targets} if measured else {}
    if measured and not descriptor.layer:
        return Network(descriptor.name, measured.targets)
    return Network(descriptor.name, tuple(_target(layer, known_targets) for layer in descriptor.layer))


def descriptor_of(network: Network, **settings: Any) -> Descriptor:
    """The descriptor of a network; *settings* are its other keys."""
    layers = [asdict(target) for target in network.targets]
    return parse_descriptor({"name": network.name, **settings, "layer": layers}, network.name)


def as_toml(descriptor: Descriptor) -> str:
    """The descriptor as text of a TOML file."""
    return tomlfile.as_toml(descriptor.model_dump(exclude_defaults=True))


def _target(layer: DescribedLayer, known: dict[str, Target]) -> Target:
    """Make a target: values of the file first, the others from the model's layers that it names (*known*, by name).

    Raises TuneError if a value is missing and no model is known, or if the model has no such layer.
    """
    values = layer.model_dump(exclude_none=True)
    if known:
        names = layer.branches or (layer.name,)
        if missing := [name for name in names if name not in known]:
            raise TuneError(unknown_name("layer", missing[0], known))
        joined = join_targets(layer.name, [known[name] for name in names])
        # A branch may itself be a group of layers; a layer without branches keeps those of the model's target.
        branches = joined.branches if layer.branches else known[layer.name].branches
        return replace(joined, **values | {"branches": branches})
    for key in ("weights", "inputs", "weight_max", "input_max"):
        if key not in values:
            raise TuneError(f"layer {layer.name!r}: {key} is missing; it must be given where no model is read")
    return Target(**values)


NETWORK = "network.toml"
"""The description of a network, in the folder of the results."""
COMMAND_OPTIONS = ("small_command", "score", "timeout_s")
"""Options that apply to a command only."""
MODEL_OPTIONS = ("data", "layers", "groups", "device", "scored_output", "shapes")
"""Options that need a model that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSubject:
    """The subject of a search: a network, and where known its file, samples, device and costs."""

    network: Network
    descriptor: Descriptor | None
    path: Path | None
    """The ONNX file; None where the network is only described."""
    opened: OpenedModel | None
    data: LabelledData | None
    test: LabelledData | None
    npu: Npu | None
    cost_model: Model | None
    """The model for cost estimates; None if it cannot be estimated."""
    nodes: Mapping[str, str]
    """Layer -> name of its node in the file."""


def prepare(options: TuneOptions, scratch: Path) -> TuningSubject:
    """Read all files that the options name; a model of ``weft models list`` is written into the folder *scratch*."""
    descriptor = _load_named_descriptor(options)
    path = model_file(str(options.model), scratch)
    _check_together(options, descriptor, path)
    opened = data = test = None
    if path is not None:
        from weft_tune.quantised.data import read_data
        from weft_tune.quantised.opened import open_for_tuning

        opened = open_for_tuning(path, options.scored_output)
        data = _samples(options, opened, scored_by_command(options, descriptor))
        test = read_data(options.test, opened.inputs, options.scale) if options.test else None
    network = _network(options, descriptor, opened, data)
    npu, cost_model, nodes = _device(options, path, opened, data)
    return TuningSubject(
        network=network, descriptor=descriptor, path=path, opened=opened, data=data, test=test, npu=npu,
        cost_model=cost_model, nodes=nodes,
    )  # fmt: skip


def make_evaluator(options: TuneOptions, subject: TuningSubject) -> Evaluator:
    """The evaluator that scores configurations: a command, or the model on its samples."""
    descriptor = subject.descriptor
    if scored_by_command(options, descriptor):
        score = options.score or (descriptor.score if descriptor else "")
        if not score:
            raise TuneError("a command needs score = 'Accuracy: (.*)', an expression that finds the score")
        full, small = _commands(options, descriptor)
        return CommandEvaluator(
            full, score, small_command=small, workers=options.workers or 1, timeout_s=options.timeout_s
        )
    from weft.devices.host import usable_cores
    from weft_tune.quantised.evaluator import OnnxEvaluator

    assert subject.opened is not None and subject.data is not None
    return OnnxEvaluator(
        subject.opened, subject.data.inputs, subject.data.labels, subject.network, small=options.small or 0.2,
        metric=options.metric_or_default, workers=options.workers or usable_cores(),
    )  # fmt: skip


def scored_by_command(options: TuneOptions, descriptor: Descriptor | None) -> bool:
    return bool(options.command or (descriptor and descriptor.full))


def setting(options: TuneOptions, descriptor: Descriptor | None, name: str, default: Any) -> Any:
    """The value of an option, else that of the network's file, else the default."""
    value = getattr(options, name)
    if value is None and descriptor is not None:
        value = getattr(descriptor, name)
    return default if value is None else value


def _check_together(options: TuneOptions, descriptor: Descriptor | None, path: Path | None) -> None:
    """Refuse options that lack or exclude each other."""
    by_command, lists_layers = scored_by_command(options, descriptor), bool(descriptor and descriptor.layer)
    if path is None and not by_command:
        raise TuneError(f"{options.model} names no command (full = ...); give command = ... and score = ...")
    if INT8 in options.baselines and (path is None or by_command):
        raise TuneError(f"baselines = {INT8} needs an .onnx model and its samples, and is not scored by a command")
    for names, allowed, reason in (
        (("test",), not by_command, " is scored by weft itself; a command has to score its own test set"),
        (("metric",), not by_command, ": a command measures as it likes; leave one of them out"),
        (("small",), not by_command, ": a command chooses its samples; say {subset} in it, or give small_command"),
        (COMMAND_OPTIONS, by_command, " goes with command = ..."),
        (MODEL_OPTIONS, path is not None, f" needs an .onnx model; {options.model} only describes one"),
        (("layers", "groups"), not lists_layers, ": the network's file lists its layers already; change them there"),
        (("scale",), options.data or options.test, " multiplies samples of files; name them, as data = FILE.npz"),
    ):
        for name in names if not allowed else ():
            if (value := getattr(options, name)) not in (None, {}):
                raise TuneError(f"{name} = {f'{value:g}' if isinstance(value, float) else value}{reason}")


def _load_named_descriptor(options: TuneOptions) -> Descriptor | None:
    """The description that the options name, as the model itself or beside it; None if there is none."""
    model = options.model if str(options.model).endswith(".toml") else None
    if model and options.network:
        raise TuneError(f"{model} and network = {options.network} both describe the network; give one of them")
    path = model or options.network
    return load_descriptor(path) if path else None


def tuned_file(source: Path) -> str:
    """The file name of the tuned model: that of its source, so that it is served under the same name.

    A model called ``network`` gets another name, because a server would read ``network.toml`` beside it as its
    settings.
    """
    return f"{source.stem}-tuned.onnx" if source.stem == Path(NETWORK).stem else f"{source.stem}.onnx"


def check_source_stays(folder: Path | None, source: Path | None) -> None:
    """Refuse a folder in which the tuned model would overwrite its source."""
    if folder and source and (folder / tuned_file(source)).resolve() == source.resolve():
        raise TuneError(f"{source} would be written over by the tuned model; name another folder as output")


def model_file(name: str, scratch: Path) -> Path | None:
    """The ONNX file of the model *name*; models of the zoo are written into *scratch*. None for a .toml description."""
    if name.endswith(".toml"):
        return None
    if name in classifiers.NAMES:
        return classifiers.model_path(name)
    if path := named_file(name, scratch):
        return path
    if not name.endswith(".onnx") and not Path(name).is_file():
        names = (*classifiers.NAMES, *TRAINED, *PACKAGED, *ZOO)
        raise TuneError(unknown_name("model", name, names) + " (a file ends in .onnx)")
    return Path(name)


def labelled_samples(options: TuneOptions, opened: OpenedModel) -> LabelledData:
    """The samples that the options name, or those that come with a classifier."""
    from weft_tune.quantised.data import LabelledData, read_data

    if options.data is not None:
        return read_data(options.data, opened.inputs, options.scale)
    if options.model in classifiers.NAMES:
        images = classifiers.validation(str(options.model))
        return LabelledData({opened.inputs[0].name: images.inputs()}, images.label.astype("int64"))
    raise TuneError(f"{options.model}: give labelled samples with data = FILE.npz, or score it with command = ...")


def _samples(options: TuneOptions, opened: OpenedModel, by_command: bool) -> LabelledData | None:
    """The samples; None if a command scores and no samples are named."""
    if by_command and options.data is None and options.model not in classifiers.NAMES:
        return None
    return labelled_samples(options, opened)


def _network(
    options: TuneOptions, descriptor: Descriptor | None, opened: OpenedModel | None, data: LabelledData | None
) -> Network:
    """The network to tune: from the model and its samples if given, completed by the description; else described."""
    if opened is not None and data is not None:
        from weft_tune.quantised.opened import find_targets

        network = find_targets(opened, data.inputs, layers=options.layers, groups=options.groups)
        return network_of(descriptor, network) if descriptor else network
    if descriptor is None or not descriptor.layer:
        raise TuneError(
            f"{options.model}: nothing says how large its layers' inputs get; give samples with data = FILE.npz, "
            "or list the layers in a file for network = FILE.toml"
        )
    return network_of(descriptor)


def _device(
    options: TuneOptions, path: Path | None, opened: OpenedModel | None, data: LabelledData | None
) -> tuple[Npu | None, Model | None, Mapping[str, str]]:
    """The device, the model for cost estimates, and the nodes of its layers.

    The device is None if none is named. The model is None if it cannot be estimated and no device asks for it.
    """
    npu = load_npu(options.device) if options.device else None
    if path is None or opened is None:
        return npu, None, {}
    batch = opened.fixed_batch or 1
    shapes_of_samples = {
        spec.name: (batch, *(data.inputs[spec.name].shape[1:] if data else spec.shape[1:])) for spec in opened.inputs
    }
    shapes = {name: shape for name, shape in shapes_of_samples.items() if -1 not in shape} | dict(options.shapes)
    nodes = node_names(path)
    try:
        return npu, load_model(str(path), shapes=shapes), nodes
    except InputError:
        if npu is not None or options.shapes:
            raise
        return None, None, nodes  # such a model can be tuned, but its cost cannot be estimated


def _commands(options: TuneOptions, descriptor: Descriptor | None) -> tuple[str, str | None]:
    """The commands for the full and the small set; with a command in the options, both of the file are ignored."""
    if options.command:
        return options.command, options.small_command
    assert descriptor is not None
    return descriptor.full, options.small_command or descriptor.small or None
