"""Descriptions of hardware: frozen values read from TOML, and the presets that ship with the package."""

from weft.devices.npu import Npu, check_activations, load_npu, parse_npu, presets
from weft.devices.tiled import (
    PeShape,
    Platform,
    TiledNpu,
    as_toml,
    check_platform,
    load_device,
    load_platform,
    parse_tiled,
    platforms,
)

__all__ = [
    "Npu",
    "PeShape",
    "Platform",
    "TiledNpu",
    "as_toml",
    "check_activations",
    "check_platform",
    "load_device",
    "load_npu",
    "load_platform",
    "parse_npu",
    "parse_tiled",
    "platforms",
    "presets",
]
