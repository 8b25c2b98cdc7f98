"""Descriptions of hardware: frozen values read from TOML, and the presets that ship with the package.

Its modules: one file per kind (``npu.py``, ``tiled.py``, ``soc.py``, ``host.py``) and presets as TOML; ``lanes.py``,
the lanes of a device and how they slow each other down; ``decoupled.py``, clocks and buffer of an NPU.
"""

from weft.devices.gpu_pairs import gpus
from weft.devices.host import (
    HOST,
    Host,
    HostModel,
    is_measured,
    parse_host,
    read_host,
    write_host,
)
from weft.devices.lanes import Lanes
from weft.devices.npu import Npu, check_activations, load_npu, parse_npu, presets
from weft.devices.shares import Contention, GpuLikeness, Share, Shares
from weft.devices.soc import (
    BandwidthSharing,
    Pccs,
    Soc,
    Unit,
    load_any,
    load_soc,
    parse_soc,
    relative_speed,
    soc_as_toml,
    socs,
)
from weft.devices.tiled import (
    Board,
    PeShape,
    TiledNpu,
    as_toml,
    check_platform,
    load_device,
    load_platform,
    load_simulated,
    parse_tiled,
    platforms,
)

__all__ = [
    "HOST",
    "BandwidthSharing",
    "Board",
    "Contention",
    "GpuLikeness",
    "Host",
    "HostModel",
    "Lanes",
    "Npu",
    "Pccs",
    "PeShape",
    "Share",
    "Shares",
    "Soc",
    "TiledNpu",
    "Unit",
    "as_toml",
    "check_activations",
    "check_platform",
    "gpus",
    "is_measured",
    "load_any",
    "load_device",
    "load_npu",
    "load_platform",
    "load_simulated",
    "load_soc",
    "parse_host",
    "parse_npu",
    "parse_soc",
    "parse_tiled",
    "platforms",
    "presets",
    "read_host",
    "relative_speed",
    "soc_as_toml",
    "socs",
    "write_host",
]
