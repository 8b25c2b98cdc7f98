"""An NPU whose memory channel and PE array work in parallel, joined by one weight buffer.

The description is a frozen value read from TOML (``load_npu``); nothing here estimates or runs. The other
kind of NPU is in ``weft.devices.tiled``, chips of several units in ``weft.devices.soc``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base.errors import DeviceError, reason_of, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft.devices.lanes import Lanes

MIB = 2**20
"""Bytes of a MiB."""
FOLDERS = {"device": "presets", "platform": "platforms"}
"""Kind of description -> folder of the files that ship with the package."""

Positive = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31)]


class Npu(BaseModel, extra="forbid", frozen=True, strict=True):
    """A decoupled NPU. The field names are the keys of the file."""

    kind: Literal["npu"] = "npu"
    name: Annotated[str, Field(min_length=1), AfterValidator(printable)]
    source: str = ""
    """Where the numbers come from."""
    bandwidth_gb_s: Positive
    """Off-chip bandwidth in 10^9 bytes per second; weights use all of it."""
    weight_buffer_mib: Positive
    """On-chip buffer of weights that were fetched and whose layer has not finished."""
    activation_buffer_mib: Positive
    """On-chip buffer that must hold the largest activation of every co-located model at once."""
    element_bits: Annotated[int, Field(ge=1, le=64)] = 16
    """Arithmetic precision: wider values in a model file are stored at this width on chip."""
    clock_mhz: Positive
    array_rows: Count
    """Reduction lanes (input channels, or im2col rows)."""
    array_columns: Count
    """Number of output channels that the array computes side by side."""
    positions: Count = 1
    """Output positions computed at once with the same weights."""
    engines: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of such arrays, which divide the tiles and positions of a layer among them."""
    weight_rows_per_cycle: Count
    """Rows of a weight tile that enter the array per cycle; with ``array_rows``, loading takes one cycle."""
    vector_bytes_per_cycle: Positive
    """Activation bytes per cycle for work that is no matrix product (pooling, adding, normalising)."""
    chunk_mib: Positive | None = None
    """Largest piece of a layer that is bigger than the weight buffer; an eighth of the buffer by default."""
    piece_cycles: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Additional cycles of the array for each cut of a layer; 0, since folds follow each other without a gap."""

    @property
    def clock_hz(self) -> float:
        return self.clock_mhz * 1e6

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def weight_buffer_bytes(self) -> int:
        return max(1, int(self.weight_buffer_mib * MIB))

    @property
    def activation_buffer_bytes(self) -> int:
        return max(1, int(self.activation_buffer_mib * MIB))

    @property
    def chunk_bytes(self) -> int:
        """Largest piece of a layer that is larger than the weight buffer and streams through it."""
        chunk = int(self.chunk_mib * MIB) if self.chunk_mib else self.weight_buffer_bytes // 8
        return max(1, min(chunk, self.weight_buffer_bytes))

    @property
    def macs_per_s(self) -> float:
        return self.array_rows * self.array_columns * self.positions * self.engines * self.clock_hz

    @property
    def ridge_ops_per_byte(self) -> float:
        """Operations (two per MAC) per weight byte at which both resources are busy all the time."""
        return 2 * self.macs_per_s / self.bandwidth_bytes_per_s

    def together(self) -> Lanes:
        """The two lanes that run together, without contention: the channel fetches while the array computes."""
        return Lanes(("channel", "array"))


def presets() -> list[str]:
    """Names of the decoupled and tiled NPUs that ship with the package."""
    return list(shipped_of_kind("npu", "tiled"))


@cache
def shipped_of_kind(*kinds: str) -> tuple[str, ...]:
    """Names of the shipped devices of those kinds."""
    return tuple(name for name in shipped("device") if read_description("device", name).get("kind") in kinds)


def shipped(kind: Literal["device", "platform"]) -> list[str]:
    """Names of the device or platform files that ship with the package."""
    folder = resources.files("weft.devices") / FOLDERS[kind]
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_npu(name_or_path: str) -> Npu:
    """Load a preset by name, or an NPU from a TOML file by its path."""
    return parse_npu(read_description("device", name_or_path), name_or_path)


def read_description(kind: Literal["device", "platform"], name_or_path: str) -> dict[str, Any]:
    """Read a device or platform file (TOML) that ships with the package, by name, or a user's file by its path."""
    if name_or_path in shipped(kind):
        text = (resources.files("weft.devices") / FOLDERS[kind] / f"{name_or_path}.toml").read_text("utf-8")
    else:
        text = _read(kind, name_or_path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise DeviceError(f"{name_or_path}: not a TOML file: {error}") from error


def parse_npu(raw: dict[str, Any], where: str) -> Npu:
    """Parse the content of an NPU's TOML file; *where* names the file in error messages."""
    if raw.get("kind") == "soc":
        raise DeviceError(
            f"{where}: a SoC of several units, and this needs an NPU; map models to it: weft map --soc {where}"
        )
    if raw.get("kind") == "tiled":
        raise DeviceError(f'{where}: a tiled NPU has no weight buffer to schedule; this needs a device of kind "npu"')
    try:
        return Npu.model_validate(raw)
    except ValidationError as error:
        raise DeviceError(f"{where}: {first_problem(error, Npu)}") from error


def check_activations(npu: Npu, peaks: Sequence[tuple[str, int]]) -> None:
    """Raise DeviceError if the largest activations of all models together exceed the activation buffer.

    peaks: name and bytes of each model's largest activation.
    """
    total = sum(peak for _, peak in peaks)
    if total > npu.activation_buffer_bytes:
        parts = ", ".join(f"{name} {peak / MIB:.2f}" for name, peak in peaks)
        raise DeviceError(
            f"{npu.name}: the largest activations need {total / MIB:.2f} MiB together ({parts}) and the activation "
            f"buffer has {npu.activation_buffer_mib:.2f} MiB; lower --batch, or allow --spill to pay for the overflow "
            "on the memory channel"
        )


def _read(kind: Literal["device", "platform"], path: str) -> str:
    """The text of a user's file; raises DeviceError with the known names if *path* is no TOML file."""
    if not path.endswith(".toml"):
        known = presets() if kind == "device" else shipped(kind)
        raise DeviceError(unknown_name(kind, path, known) + f" (a {kind} file ends in .toml)")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero in it
        raise DeviceError(f"{path}: cannot read the {kind} file: {reason_of(error)}") from error
