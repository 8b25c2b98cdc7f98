"""LoRA adapters that are not merged into their base, in the folders that PEFT writes: ``read_adapter``.

``adapter_config.json`` has ranks and scales. ``adapter_model.safetensors`` holds two narrow matrices for each adapted
module, and the whole weights of modules that were trained besides, such as heads.
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
from weft_stitch.bodies.body import BodyStep, LowRank
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants, ModelProgram, ProgramNode

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
"""The name of one of the two matrices of an adapted module."""
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save(?:\.default)?(?=\.)")
"""What PEFT adds to the names of a model's parameters."""
_OF_OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Prefixes of values of ``init_lora_weights`` for which PEFT changes the base as well."""


class AdapterSettings(BaseModel):
    """The keys of a PEFT configuration that are needed here; every release of PEFT adds others."""

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
        """Refuse adapters that are not plain LoRA: a product of two narrow matrices, added to the base."""
        if self.peft_type != "LORA" or self.use_dora:
            kind = "DoRA" if self.use_dora else self.peft_type
            raise StitchError(f"{CONFIG} is of {kind}, not of plain LoRA; merge it into the base and export that")
        if str(self.init_lora_weights).startswith(_OF_OTHER_BASES):
            raise StitchError(
                f"{CONFIG} has init_lora_weights = {self.init_lora_weights}, which changes the base as well; "
                "merge it into its base and export that"
            )

    def rank(self, module: str) -> int:
        """The rank of the matrices of *module*."""
        return self.rank_pattern.get(_matching_pattern(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """The factor on the product of the matrices of *module*."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_matching_pattern(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


class LoraAdapter(NamedTuple):
    """The differences of a fine-tuned model to its base."""

    parts: Mapping[str, LowRank]
    """Module -> the low-rank part to add to its weight [in, out]."""
    weights: Mapping[str, Array]
    """Parameter -> the array that replaces the base's, as torch stores it."""


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether *path* is a folder with an adapter."""
    return (Path(path) / CONFIG).is_file()


def read_adapter(folder: Path) -> LoraAdapter:
    """Read the adapter in *folder*; ``StitchError`` if it is damaged or not plain LoRA."""
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
    """Sort the tensors of a file into the matrices of adapted modules and whole weights."""
    factors: dict[str, dict[str, Array]] = {}
    weights = {}
    for name, array in tensors.items():
        parameter = _WRAPPED.sub("", name)
        if match := _FACTOR.fullmatch(parameter):
            factors.setdefault(match["module"], {})[match["side"]] = array
        elif ".lora_" in parameter:
            raise StitchError(f"{name} is no part of an adapter of a product; merge it into the base and export that")
        else:
            weights[parameter] = array
    return LoraAdapter({module: _low_rank_part(settings, module, sides) for module, sides in factors.items()}, weights)


def _low_rank_part(settings: AdapterSettings, module: str, factors: Mapping[str, Array]) -> LowRank:
    """The low-rank part of *module*. *factors*: the matrices "A" and "B"."""
    # PEFT's fan_in_fan_out is ignored: it says how torch stores the base's weight, not these factors
    rank = settings.rank(module)
    if factors.keys() != {"A", "B"}:
        raise StitchError(f"{module} has lora_{min(factors)} only; save the adapter again")
    lora_a, lora_b = factors["A"], factors["B"]
    if lora_a.ndim != 2 or lora_b.ndim != 2 or not len(lora_a) == lora_b.shape[1] == rank:
        shapes = f"lora_A {lora_a.shape} and lora_B {lora_b.shape}"
        raise StitchError(f"{module} has {shapes}, which are no two matrices of rank {rank} as {CONFIG} says")
    return LowRank(lora_a.T.copy(), (settings.scale(module) * lora_b.T).astype(lora_a.dtype))


def _matching_pattern(patterns: Iterable[str], module: str) -> str:
    """The first pattern that matches a module's name or its end; empty if none does."""
    return next((pattern for pattern in patterns if re.fullmatch(rf"(.*\.)?({pattern})", module)), "")


_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Type in a safetensors file -> numpy's; bfloat16 is read as its bits."""
_MOST_HEADER = 1 << 27
"""Limit on the header, 128 MB: real ones are far smaller, and with a damaged length the whole file would be parsed."""


def read_safetensors(path: Path) -> dict[str, Array]:
    """Read all tensors of a safetensors file as float32; ``InputError`` if it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MOST_HEADER, len(data) - 8):
        raise InputError(f"{path}: is no safetensors file, or not whole; download or save it again")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(name, entry, memoryview(data)[8 + length :]) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is a damaged safetensors file: {error}; download or save it again") from error


def _tensor(name: str, entry: dict[str, Any], data: memoryview) -> Array:
    """The tensor *name* as float32; ``ValueError`` if its entry in the header does not fit *data*."""
    kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if kind not in _TYPES:
        raise ValueError(f"{name} is of type {kind}, not one of {', '.join(_TYPES)}")
    stored = np.dtype(_TYPES[kind])
    if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data) or end - start != prod(shape) * stored.itemsize:
        raise ValueError(f"the bytes of {name} are not those of its shape, {shape}")
    array = np.frombuffer(data[start:end], stored).reshape(shape)
    if kind == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


_PRODUCTS = ("MatMul", "Gemm")
"""Operators that may read an adapted weight."""


class ReadPlace(NamedTuple):
    """An input of a node that is a parameter."""

    node: int
    """Index of the node."""
    input_index: int
    transposed: bool
    """Whether the node reads the matrix transposed."""


class AdaptedBase:
    """A base model, from which adapted models take all weights except those of their adapters."""

    def __init__(self, program: ModelProgram, step_of_node: Sequence[int], constants: Constants) -> None:
        self._program, self._step_of_node, self._constants = program, step_of_node, constants
        self._places: dict[str, list[ReadPlace]] = {}
        """Parameter, by torch's name -> the node inputs that read it."""
        for name, read_place in _named_parameters(program):
            self._places.setdefault(name, []).append(read_place)

    def named(self, name: str) -> ModelProgram:
        """The base's program under the name of another model."""
        return replace(self._program, name=name)

    def adapt(self, steps: Sequence[BodyStep], task: int, adapter: LoraAdapter) -> None:
        """Give model *task*, which equals the base so far, the weights and low-rank parts of its adapter."""
        for parameter, array in adapter.weights.items():
            for read_place in self._places_of(parameter):
                self._replace_weight(steps, task, read_place, array.T if read_place.transposed else array)
        for module, part in adapter.parts.items():
            for read_place in self._places_of(f"{module}.weight"):
                self._add_part(steps, task, read_place, part, module)

    def _places_of(self, parameter: str) -> list[ReadPlace]:
        """All places where nodes read *parameter*, whose name may be longer or shorter at its beginning.

        Raises ``StitchError`` if no single parameter fits.
        """
        if parameter in self._places:
            return self._places[parameter]
        matches = [name for name in self._places if "." in name and _ends_alike(name, parameter)]
        if len(matches) != 1:
            similar = matches or get_close_matches(parameter, self._places, n=3, cutoff=0.4)
            has = f"it has {', '.join(similar[:3])}" if similar else "names of torch's modules are lost in it"
            exporter = "dynamo = False, which keeps biases of zeros" if parameter.endswith(".bias") else "torch.onnx"
            raise StitchError(f"{parameter} is not found in {self._program.name}: {has}; export the base by {exporter}")
        return self._places[matches[0]]

    def _add_part(
        self, steps: Sequence[BodyStep], task: int, read_place: ReadPlace, part: LowRank, module: str
    ) -> None:
        """Add the low-rank part of *module* to the weight that is read at *read_place*.

        A MatMul keeps it as a difference to the shared weight; a Gemm gets a whole weight of its own.
        """
        step = steps[self._step_of_node[read_place.node]]
        key = step.contents[task][read_place.input_index]
        weight = self._constants.arrays.get(key)
        if step.node.op not in _PRODUCTS or read_place.input_index != 1 or weight is None:
            raise StitchError(f"{module} has an adapter, but {step.node.where} is no product with a stored weight")
        transposed = _stores_transposed(step.node)
        shape = weight.shape[::-1] if transposed else weight.shape
        if shape != (len(part.down), part.up.shape[1]):
            sizes = f"{len(part.down)}x{part.up.shape[1]}"
            raise StitchError(f"the adapter of {module} is for a weight of {sizes}, not {shape[0]}x{shape[1]}")
        if step.node.op == "MatMul":
            step.parts[task] = part
            return
        product = part.down @ part.up
        self._replace_weight(steps, task, read_place, weight + (product.T if transposed else product))

    def _replace_weight(self, steps: Sequence[BodyStep], task: int, read_place: ReadPlace, array: Array) -> None:
        """Replace the weight that model *task* reads at *read_place* by *array*."""
        step = steps[self._step_of_node[read_place.node]]
        contents = list(step.contents[task])
        contents[read_place.input_index] = self._constants.keep(array)
        step.contents[task] = tuple(contents)


def _ends_alike(one: str, other: str) -> bool:
    """Whether one dotted name is the end of the other, by whole components."""
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _named_parameters(program: ModelProgram) -> Iterator[tuple[str, ReadPlace]]:
    """Yield torch's name of every parameter, with each place where a node reads it."""
    for number, node in enumerate(program.nodes):
        for input_index, name in enumerate(node.inputs):
            if name in program.constants:
                yield program.transposed.get(name, name), ReadPlace(number, input_index, name in program.transposed)
        if _is_nameless(node, program):
            yield f"{node.module}.weight", ReadPlace(number, 1, not _stores_transposed(node))


def _is_nameless(node: ProgramNode, program: ModelProgram) -> bool:
    """Whether a module's product reads a weight whose name the exporter has dropped."""
    if node.op not in _PRODUCTS or not node.module or node.inputs[1] not in program.constants:
        return False
    return not program.transposed.get(node.inputs[1], node.inputs[1]).endswith(".weight")


def _stores_transposed(node: ProgramNode) -> bool:
    """Whether a product reads its weight as torch stores it: [out, in]."""
    return node.op == "Gemm" and bool(node.attributes.get("transB"))
