"""Adapters that are not merged into their base, in folders as PEFT writes them: ``read_adapter``.

``adapter_config.json`` says how they count. ``adapter_model.safetensors`` holds two narrow matrices for each module
that was adapted, and whole weights of modules that were trained beside them, as heads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.base.errors import InputError, StitchError
from weft.base.jsonfile import first_problem
from weft_stitch.bodies.body import BodyStep
from weft_stitch.bodies.differences import LowRank
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants, ModelProgram, ProgramNode

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save(?:\.default)?(?=\.)")
"""What PEFT puts into the names of a model's parameters."""
_OF_OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Beginnings of ways to start adapters that change the base as well."""


class AdapterSettings(BaseModel):
    """What is needed of a configuration, to which every release of PEFT adds keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peft_type: str
    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    init_lora_weights: bool | str = True

    def check(self) -> None:
        """Refuse what is no sum of the base and a product of two narrow matrices."""
        if self.peft_type != "LORA" or self.use_dora:
            kind = "DoRA" if self.use_dora else self.peft_type
            raise StitchError(f"{CONFIG} is of {kind}, not of plain LoRA; merge it into the base and export that")
        if str(self.init_lora_weights).startswith(_OF_OTHER_BASES):
            raise StitchError(
                f"{CONFIG} has init_lora_weights = {self.init_lora_weights}, which changes the base as well; "
                "merge it into its base and export that"
            )

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(_fitting(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """By what the product of both matrices is multiplied."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_fitting(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


class LoraAdapter(NamedTuple):
    """What a model has beside its base."""

    parts: Mapping[str, LowRank]
    """Module -> what is added to its weight, which multiplies from the right."""
    weights: Mapping[str, Array]
    """Parameter -> what the model has instead of the base's, as torch stores it."""


def is_adapter(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_adapter(folder: Path) -> LoraAdapter:
    """The adapter in a folder."""
    try:
        settings = AdapterSettings.model_validate_json((folder / CONFIG).read_bytes())
        settings.check()
        if not (folder / TENSORS).is_file():
            raise StitchError(f"holds no {TENSORS}; save it with safe_serialization=True")
        return _adapter(settings, read_safetensors(folder / TENSORS))
    except OSError as error:
        raise StitchError(f"{folder}: {CONFIG} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise StitchError(f"{folder}: {CONFIG}: {first_problem(error, AdapterSettings)}") from error
    except StitchError as error:
        raise StitchError(f"{folder}: {error}") from error


def _adapter(settings: AdapterSettings, tensors: Mapping[str, Array]) -> LoraAdapter:
    factors: dict[str, dict[str, Array]] = {}
    weights = {}
    for name, array in tensors.items():
        plain = _WRAPPED.sub("", name)
        if found := _FACTOR.fullmatch(plain):
            factors.setdefault(found["module"], {})[found["side"]] = array
        elif ".lora_" in plain:
            raise StitchError(f"{name} is no part of an adapter of a product; merge it into the base and export that")
        else:
            weights[plain] = array
    return LoraAdapter({module: _part(settings, module, each) for module, each in factors.items()}, weights)


def _part(settings: AdapterSettings, module: str, factors: Mapping[str, Array]) -> LowRank:
    """fan_in_fan_out says nothing here: it is about how torch stores what is added to."""
    rank = settings.rank(module)
    if factors.keys() != {"A", "B"}:
        raise StitchError(f"{module} has lora_{min(factors)} only; save the adapter again")
    first, second = factors["A"], factors["B"]
    if first.ndim != 2 or second.ndim != 2 or not len(first) == second.shape[1] == rank:
        said = f"lora_A {first.shape} and lora_B {second.shape}"
        raise StitchError(f"{module} has {said}, which are no two matrices of rank {rank} as {CONFIG} says")
    return LowRank(first.T.copy(), (settings.scale(module) * second.T).astype(first.dtype))


def _fitting(patterns: Iterable[str], module: str) -> str:
    """The first pattern that a module's name, or the end of it, has; none: empty."""
    return next((each for each in patterns if re.fullmatch(rf"(.*\.)?({each})", module)), "")


_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MOST_HEADER = 1 << 27
"""Bytes; more than any header has."""


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of a file, in float32."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MOST_HEADER, len(data) - 8):
        raise InputError(f"{path}: is no safetensors file, or not whole; download or save it again")
    try:
        header = json.loads(data[8 : 8 + length])
        told = {name: each for name, each in header.items() if name != "__metadata__"}
        return {name: _tensor(name, each, memoryview(data)[8 + length :]) for name, each in told.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is a damaged safetensors file: {error}; download or save it again") from error


def _tensor(name: str, told: dict[str, Any], data: memoryview) -> Array:
    kind, shape, (start, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
    if kind not in _TYPES:
        raise ValueError(f"{name} is of type {kind}, not one of {', '.join(_TYPES)}")
    stored = np.dtype(_TYPES[kind])
    if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data) or end - start != prod(shape) * stored.itemsize:
        raise ValueError(f"the bytes of {name} are not those of its shape, {shape}")
    found = np.frombuffer(data[start:end], stored).reshape(shape)
    if kind == "BF16":  # the upper half of a float32
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32)


_PRODUCTS = ("MatMul", "Gemm")


class ReadPlace(NamedTuple):
    """Where a node reads a parameter."""

    node: int
    place: int
    turned: bool
    """Whether it lies there transposed."""


class AdaptedBase:
    """A base model, of which others have all but what their adapters hold."""

    def __init__(self, program: ModelProgram, walked: Sequence[int], constants: Constants) -> None:
        self._program, self._walked, self._constants = program, walked, constants
        self._places: dict[str, list[ReadPlace]] = {}
        for name, place in _named(program):
            self._places.setdefault(name, []).append(place)

    def named(self, name: str) -> ModelProgram:
        """The base as another model."""
        return replace(self._program, name=name)

    def adapt(self, steps: Sequence[BodyStep], task: int, adapter: LoraAdapter) -> None:
        """Have a model, so far the base, hold what its adapter does."""
        for parameter, array in adapter.weights.items():
            for each in self._found(parameter):
                self._put(steps, task, each, array.T if each.turned else array)
        for module, part in adapter.parts.items():
            for each in self._found(f"{module}.weight"):
                self._add(steps, task, each, part, module)

    def _found(self, parameter: str) -> list[ReadPlace]:
        """All places of a parameter, which may be called by the end of its name."""
        if parameter in self._places:
            return self._places[parameter]
        near = [each for each in self._places if "." in each and _ends_alike(each, parameter)]
        if len(near) != 1:
            like = near or get_close_matches(parameter, self._places, n=3, cutoff=0.4)
            has = f"it has {', '.join(like[:3])}" if like else "names of torch's modules are lost in it"
            way = "dynamo = False, which keeps biases of zeros" if parameter.endswith(".bias") else "torch.onnx"
            raise StitchError(f"{parameter} is not found in {self._program.name}: {has}; export the base by {way}")
        return self._places[near[0]]

    def _add(self, steps: Sequence[BodyStep], task: int, at: ReadPlace, part: LowRank, module: str) -> None:
        step = steps[self._walked[at.node]]
        key = step.contents[task][at.place]
        held = self._constants.arrays.get(key)
        if step.node.op not in _PRODUCTS or at.place != 1 or held is None:
            raise StitchError(f"{module} has an adapter, but {step.node.where} is no product with a stored weight")
        across = _is_across(step.node)
        shape = held.shape[::-1] if across else held.shape
        if shape != (len(part.down), part.up.shape[1]):
            made = f"{len(part.down)}x{part.up.shape[1]}"
            raise StitchError(f"the adapter of {module} is for a weight of {made}, not {shape[0]}x{shape[1]}")
        if step.node.op == "MatMul":
            step.parts[task] = part
            return
        whole = part.down @ part.up
        self._put(steps, task, at, held + (whole.T if across else whole))

    def _put(self, steps: Sequence[BodyStep], task: int, at: ReadPlace, array: Array) -> None:
        step = steps[self._walked[at.node]]
        contents = list(step.contents[task])
        contents[at.place] = self._constants.keep(array)
        step.contents[task] = tuple(contents)


def _ends_alike(one: str, other: str) -> bool:
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _named(program: ModelProgram) -> Iterator[tuple[str, ReadPlace]]:
    """The parameters that nodes read, by the names that torch has for them."""
    for number, node in enumerate(program.nodes):
        for place, name in enumerate(node.inputs):
            if name in program.constants:
                yield program.turned.get(name, name), ReadPlace(number, place, name in program.turned)
        if _is_nameless(node, program):
            yield f"{node.module}.weight", ReadPlace(number, 1, not _is_across(node))


def _is_nameless(node: ProgramNode, program: ModelProgram) -> bool:
    """Whether a product of a module reads a weight that has lost its name."""
    if node.op not in _PRODUCTS or not node.module or node.inputs[1] not in program.constants:
        return False
    return not program.turned.get(node.inputs[1], node.inputs[1]).endswith(".weight")


def _is_across(node: ProgramNode) -> bool:
    """Whether a product reads its weight as torch stores it, a row for each number that it makes."""
    return node.op == "Gemm" and bool(node.attributes.get("transB"))
