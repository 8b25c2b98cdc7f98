"""Descriptions of hardware: frozen values read from TOML, and the presets that ship with the package."""

from weft.devices.npu import Npu, check_activations, load_npu, parse_npu, presets

__all__ = ["Npu", "check_activations", "load_npu", "parse_npu", "presets"]
