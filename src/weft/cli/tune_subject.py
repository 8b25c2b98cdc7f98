"""What ``weft tune`` is asked for, and what it tunes: a network, its samples, its device, and what scores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import InputError, unknown_name

if TYPE_CHECKING:
    from weft.devices import Npu
    from weft.models.layer import Model
    from weft.runtime.quantised.data import LabelledData
    from weft.runtime.quantised.opened import Opened
    from weft.tuning.descriptor import Descriptor
    from weft.tuning.evaluation import Evaluator
    from weft.tuning.network import Network

SCORES = "scores.db"
"""In the folder of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; None where a network's file, then a default, may say."""

    model: str
    data: str | None
    scale: float | None
    test: str | None
    metric: str | None
    margin: float | None
    network: str | None
    layers: str | tuple[str, ...] | None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    output_name: str | None = None
    platform: str | None
    objective: str | None
    layerwise: str | None
    device: str | None
    small: float | None
    bias_rule: str
    faithful: bool
    workers: int | None
    baselines: tuple[str, ...]
    command: str | None
    small_command: str | None
    score: str | None
    timeout_s: float | None
    on_failure: str
    output: Path | None
    export: str
    database: Path | None
    fresh: bool
    pictures: bool
    json_file: Path | None

    @property
    def folder(self) -> Path:
        return self.output or Path(f"{Path(self.model).stem if '.' in self.model else self.model}-tuned")

    @property
    def measure(self) -> str:
        return self.metric or "top1"

    @property
    def scores(self) -> Path:
        return self.database or self.folder / SCORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """All that a search starts from."""

    network: Network
    descriptor: Descriptor | None
    path: Path | None
    """The ONNX file; None where the network is only described."""
    opened: Opened | None
    data: LabelledData | None
    test: LabelledData | None
    npu: Npu | None
    counted: Model | None
    """The model as cost models see it; None where they cannot."""
    nodes: Mapping[str, str]
    """Layer -> its node in the file."""


def prepare(asked: Request) -> Subject:
    """Read all files that were named."""
    described = _descriptor(asked)
    path = _model_path(asked.model)
    _check_together(asked, described, path)
    opened = data = test = None
    if path is not None:
        from weft.runtime.quantised.opened import open_for_tuning

        opened = open_for_tuning(path, asked.output_name)
        data = _samples(asked, opened, scored_by_command(asked, described))
        test = _read(asked.test, opened, asked.scale) if asked.test else None
    network = _network(asked, described, opened, data)
    npu, counted, nodes = _device(asked, path, opened, data)
    return Subject(
        network=network, descriptor=described, path=path, opened=opened, data=data, test=test, npu=npu, counted=counted,
        nodes=nodes,
    )  # fmt: skip


def make_evaluator(asked: Request, subject: Subject) -> Evaluator:
    """What scores configurations: a command, or the model on its samples."""
    from weft.runtime.quantised.evaluator import OnnxEvaluator
    from weft.runtime.quantised.workers import usable_cores
    from weft.tuning.command import CommandEvaluator

    described = subject.descriptor
    if scored_by_command(asked, described):
        score = asked.score or (described.score if described else "")
        if not score:
            raise InputError("--command needs --score, an expression that finds the score: --score 'Accuracy: (.*)'")
        full, small = _commands(asked, described)
        return CommandEvaluator(full, score, small_command=small, workers=asked.workers or 1, timeout_s=asked.timeout_s)
    assert subject.opened is not None and subject.data is not None
    return OnnxEvaluator(
        subject.opened, subject.data.inputs, subject.data.labels, subject.network, small=asked.small or 0.2,
        metric=asked.measure, workers=asked.workers or usable_cores(),
    )  # fmt: skip


def scored_by_command(asked: Request, described: Descriptor | None) -> bool:
    return bool(asked.command or (described and described.full))


def setting(asked: Request, described: Descriptor | None, name: str) -> Any:
    """An option, else what the network's file says; None if neither does."""
    given = getattr(asked, name)
    return given if given is not None or described is None else getattr(described, name)


def _check_together(asked: Request, described: Descriptor | None, path: Path | None) -> None:
    """Options that need or exclude each other."""
    if scored_by_command(asked, described):
        if asked.test is not None:
            raise InputError("--test is scored by weft itself; a command has to score its own test set")
        if asked.metric is not None:
            raise InputError(f"--metric {asked.metric}: a command measures as it likes; leave one of them out")
        if asked.small is not None:
            raise InputError(
                f"--small {asked.small:g}: a command chooses its samples; say {{subset}} in it, or give --small-command"
            )
    else:
        if path is None:
            raise InputError(f"{asked.model} names no command (full = ...); give --command and --score")
        for option in ("small_command", "score", "timeout_s"):
            if getattr(asked, option) is not None:
                raise InputError(f"--{option.removesuffix('_s').replace('_', '-')} goes with --command")
    if path is None and (asked.data or asked.layers or asked.groups or asked.device or asked.output_name):
        raise InputError(
            "--data, --layers, --group, --device and --scored-output need an .onnx model; "
            f"{asked.model} only describes one"
        )
    if asked.scale is not None and not (asked.data or asked.test):
        raise InputError(
            f"--scale {asked.scale:g} multiplies the samples of --data and --test; give one, or leave it out"
        )
    if "int8" in asked.baselines and (path is None or scored_by_command(asked, described)):
        raise InputError("--baseline int8 needs an .onnx model and its samples, and is not scored by a command")
    if described and described.layer and (asked.layers or asked.groups):
        raise InputError("--layers and --group: the network's file lists its layers already; change them there")


def _descriptor(asked: Request) -> Descriptor | None:
    from weft.tuning.descriptor import load_descriptor

    alone = asked.model if asked.model.endswith(".toml") else None
    if alone and asked.network:
        raise InputError(f"{alone} and --network {asked.network} both describe the network; give one of them")
    path = alone or asked.network
    return load_descriptor(path) if path else None


def _model_path(name: str) -> Path | None:
    """The ONNX file; None where there is only a description."""
    from weft.models import classifiers

    if name.endswith(".toml"):
        return None
    if name in classifiers.NAMES:
        return classifiers.model_path(name)
    if not name.endswith(".onnx") and not Path(name).is_file():
        raise InputError(unknown_name("model", name, classifiers.NAMES) + " (a file ends in .onnx)")
    return Path(name)


def _samples(asked: Request, opened: Opened, by_command: bool) -> LabelledData | None:
    from weft.models import classifiers
    from weft.runtime.quantised.data import LabelledData

    if asked.data is not None:
        return _read(asked.data, opened, asked.scale)
    if asked.model in classifiers.NAMES:
        held = classifiers.validation(asked.model)
        return LabelledData({opened.inputs[0].name: held.inputs()}, held.label.astype("int64"))
    if by_command:
        return None
    raise InputError(f"{asked.model}: give labelled samples with --data FILE.npz, or score it with --command")


def _read(path: str, opened: Opened, scale: float | None) -> LabelledData:
    from weft.runtime.quantised.data import read_data

    return read_data(path, opened.inputs, scale)


def _network(asked: Request, described: Descriptor | None, opened: Opened | None, data: LabelledData | None) -> Network:
    from weft.runtime.quantised.targets import find_targets
    from weft.tuning.descriptor import network_of

    if opened is not None and data is not None:
        found = find_targets(opened, data.inputs, layers=asked.layers, groups=asked.groups)
        return network_of(described, found) if described else found
    if described is None or not described.layer:
        raise InputError(
            f"{asked.model}: nothing says how large its layers' inputs get; give samples with --data, "
            "or list the layers in a file for --network"
        )
    return network_of(described)


def _device(
    asked: Request, path: Path | None, opened: Opened | None, data: LabelledData | None
) -> tuple[Npu | None, Model | None, Mapping[str, str]]:
    """The device, the model that it is priced with, and where its layers are."""
    from weft.devices import load_npu
    from weft.models.sources import load_model
    from weft.tuning.geometry import node_names

    npu = load_npu(asked.device) if asked.device else None
    if path is None or opened is None:
        return npu, None, {}
    rows = opened.fixed_batch or 1
    shapes = {
        spec.name: (rows, *(data.inputs[spec.name].shape[1:] if data else spec.shape[1:])) for spec in opened.inputs
    }
    nodes = node_names(path)
    try:
        return npu, load_model(str(path), shapes=shapes), nodes
    except InputError:
        if npu is not None:
            raise
        return None, None, nodes  # it can be tuned, only not priced


def _commands(asked: Request, described: Descriptor | None) -> tuple[str, str | None]:
    """For the full and for the small set; options hide those of the file together."""
    if asked.command:
        return asked.command, asked.small_command
    assert described is not None
    return described.full, asked.small_command or described.small or None
