"""LoRA adapters in files, and merged into their base in torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.stitching.torch_encoders import Encoder

ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["taken"], "fan_in_fan_out": False}

KINDS = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": "BF16"}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, each in tensors.items():
        ends = [len(data), len(data) + each.nbytes]
        header[name] = {"dtype": KINDS[str(each.dtype)], "shape": each.shape, "data_offsets": ends}
        data += each.tobytes()
    told = json.dumps(header).encode()
    path.write_bytes(len(told).to_bytes(8, "little") + told + data)
    return path


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | settings))
    named = {f"base_model.model.{name}": each.detach().numpy() for name, each in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", named)
    return folder


def lora_factors(module: str, taken: int, made: int, rank: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A.weight": 0.2 * torch.randn(rank, taken, generator=drawn),
        f"{module}.lora_B.weight": 0.2 * torch.randn(made, rank, generator=drawn),
    }


def merge_adapter(base: Encoder, parts: Mapping[str, torch.Tensor], scale: float) -> Encoder:
    """What torch makes of a base and an adapter."""
    model = copy.deepcopy(base)
    for name, second in parts.items():
        if module := name.removesuffix(".lora_B.weight") if name.endswith(".lora_B.weight") else "":
            model.get_submodule(module).weight.data += scale * second @ parts[f"{module}.lora_A.weight"]
    return model
