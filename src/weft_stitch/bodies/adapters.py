"""Adapters that are not merged into their base, in folders as PEFT writes them: ``read_adapter``.

``adapter_config.json`` says how they count. ``adapter_model.safetensors`` holds two narrow matrices for each module
that was adapted, and whole weights of modules that were trained beside them, as heads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.base.errors import StitchError
from weft.base.jsonfile import first_problem
from weft_stitch.bodies.low_rank import LowRank
from weft_stitch.bodies.safetensors import read_safetensors
from weft_stitch.net import Array

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
