"""A system on chip: several units that share one memory, and how much they slow each other down by it.

Two models of contention. ``pccs`` (Xu et al., MICRO 2021) is fitted per unit: three regions by a unit's own
bandwidth demand, in each a speed that drops with the demand of the other units. ``sharing`` needs no fit: once the
units demand more than the memory's bandwidth, each gets bandwidth in proportion to its demand. Both are plain
arithmetic here; the compiled twin is ``weft_map.kernels.soc``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from weft.base.errors import DeviceError, unknown_name
from weft.base.jsonfile import first_problem, printable, read_json
from weft.base.tomlfile import as_toml
from weft.devices.gpu_pairs import gpus
from weft.devices.host import Host, is_calibration, is_measured
from weft.devices.npu import Npu, Positive, presets, read_description, shipped_of_kind
from weft.devices.tiled import TiledNpu, load_device

Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

SHARING, PCCS = range(2)
"""Values in the first column of ``Soc.contention_table``."""


class BandwidthSharing(BaseModel, extra="forbid", frozen=True, strict=True):
    """Contention model: units get bandwidth in proportion to demand once their total exceeds the memory's bandwidth."""

    model: Literal["sharing"] = "sharing"


class Pccs(BaseModel, extra="forbid", frozen=True, strict=True):
    """The processor-centric slow-down model, for one unit. Bandwidths in GB/s, rates in percent per GB/s."""

    model: Literal["pccs"] = "pccs"
    normal_bw: Amount
    """Own demand up to which contention is minor."""
    intensive_bw: Amount
    """Own demand above which any external traffic hurts at once."""
    mrmc_pct: Annotated[float, Field(ge=0, le=100)]
    """Largest reduction in the minor region, in percent of the unit's speed."""
    pbw: Positive
    """Largest external demand of the calibration."""
    tbwdc: Amount
    """Total demand at which the drop starts."""
    cbp: Amount
    """External demand beyond which the speed no longer drops."""
    rate_n: Amount
    """How fast the speed drops with demand, in percent per GB/s."""
    floor_pct: Annotated[float, Field(gt=0, le=100)] = 10.0
    """No unit falls below this percentage of its speed, even outside the range of the calibration."""


Contention = Annotated[BandwidthSharing | Pccs, Field(discriminator="model")]


class Unit(BaseModel, extra="forbid", frozen=True, strict=True):
    """One kind of processing unit of a SoC."""

    name: Name
    instances: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of units of this kind; a model may move between them at no cost."""
    contention: Contention = BandwidthSharing()
    peak_tflops: Positive | None = None
    """Multiplications and additions per second, in 10^12; for estimates only."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the peak that a large product reaches; for estimates only."""
    bandwidth_gb_s: Positive | None = None
    """Bandwidth that the unit can draw alone, by default all of the memory's; for estimates only."""
    launch_us: Amount = 0.0
    """Fixed cost of a layer; for estimates only."""
    power_w: Positive | None = None
    """Power while the unit runs; for estimates of energy only."""
    refuses: tuple[str, ...] = Field(default=(), strict=False)
    """Operators and kinds of layers that the unit cannot run; for estimates only."""


class Soc(BaseModel, extra="forbid", frozen=True, strict=True):
    """A chip with several units that share one memory. The field names are the keys of the file."""

    kind: Literal["soc"] = "soc"
    name: Name
    source: str = ""
    bandwidth_gb_s: Positive
    """Peak of the shared memory, in 10^9 bytes per second."""
    element_bits: Annotated[int, Field(ge=1, le=64)] = 16
    transition_us: Amount = 0.0
    """Fixed cost of a move between units; for estimates only."""
    units: tuple[Unit, ...] = Field(min_length=1, max_length=8, strict=False)

    @field_validator("units")
    @classmethod
    def _unique_names(cls, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
        names = [unit.name for unit in units]
        if len(set(names)) < len(names):
            raise ValueError(f"units need names, each its own; got {', '.join(names)}")
        return units

    def contention_table(self) -> npt.NDArray[np.float64]:
        """One row per unit: model, peak, normal_bw, intensive_bw, mrmc_pct, pbw, tbwdc, cbp, rate_n, floor_pct."""
        rows = []
        for unit in self.units:
            model = unit.contention
            row = [float(SHARING), self.bandwidth_gb_s, *[0.0] * 8]
            if isinstance(model, Pccs):
                row[0] = PCCS
                row[2:] = [model.normal_bw, model.intensive_bw, model.mrmc_pct, model.pbw, model.tbwdc, model.cbp]
                row += [model.rate_n, model.floor_pct]
            rows.append(row)
        return np.array(rows)

    def slow_down(self, unit: int, own_gb_s: float, others_gb_s: float) -> float:
        """How many times longer work on *unit* takes while other units draw *others_gb_s*; at least 1.

        own_gb_s: the bandwidth that the work draws alone.
        """
        model = self.units[unit].contention
        if own_gb_s <= 0 or others_gb_s <= 0:
            return 1.0
        if isinstance(model, BandwidthSharing):
            return max(1.0, (own_gb_s + others_gb_s) / self.bandwidth_gb_s)
        return 100.0 / relative_speed(model, own_gb_s, others_gb_s)


def relative_speed(model: Pccs, own: float, others: float) -> float:
    """Percent of its stand-alone speed that a unit keeps; *own* and *others*: demands of bandwidth in GB/s."""
    minor_loss = model.mrmc_pct * min(others, model.pbw) / model.pbw
    plateau_loss = max(0.0, own + model.cbp - model.tbwdc) * model.rate_n
    if own <= model.normal_bw:
        lost = minor_loss
    elif own <= model.intensive_bw:
        # the larger of the two, so that more traffic of others never makes a unit faster
        lost = max(minor_loss, min(plateau_loss, (own + others - model.tbwdc) * model.rate_n))
    else:
        lost = plateau_loss * (min(others, model.cbp) / model.cbp if model.cbp else 1.0)
    return min(100.0, max(model.floor_pct, 100 - lost))


def socs() -> list[str]:
    """Names of the SoCs that ship with the package."""
    return list(shipped_of_kind("soc"))


def load_soc(name_or_path: str) -> Soc:
    """Load a preset by name or an unambiguous part of it, or the SoC in a TOML file or a calibration (JSON)."""
    if name_or_path.endswith(".toml"):
        return parse_soc(read_description("device", name_or_path), name_or_path)
    if name_or_path.endswith(".json"):
        return _read_calibrated(name_or_path)
    names = _matching_names(name_or_path)
    if len(names) > 1:
        raise DeviceError(f"SoC {name_or_path!r} may be {' or '.join(names)}; write more of the name")
    if not names and name_or_path in presets():
        raise DeviceError(f"{name_or_path}: an NPU, and models are mapped to a SoC; known: {', '.join(socs())}")
    if not names:
        raise DeviceError(unknown_name("SoC", name_or_path, socs()) + " (a SoC file ends in .toml)")
    return parse_soc(read_description("device", names[0]), names[0])


def _read_calibrated(path: str) -> Soc:
    """The SoC in a file that ``weft map calibrate --json`` wrote; raises DeviceError if the file is not usable."""
    raw = read_json(path, DeviceError)
    if not is_calibration(raw):
        raise DeviceError(f"{path}: no calibration, and models are mapped to a SoC; weft map calibrate --json FILE")
    if not isinstance(raw.get("device"), dict):
        raise DeviceError(f"{path}: no device in it; weft map calibrate --matrix {path} --json FILE")
    return parse_soc(raw["device"], path)


def load_any(name_or_path: str) -> Npu | TiledNpu | Soc | Host:
    """A device of any kind, by name or from a file."""
    if name_or_path.endswith(".json") and is_calibration(read_json(name_or_path, DeviceError)):
        return load_soc(name_or_path)
    if name_or_path.endswith(".toml"):
        is_soc = read_description("device", name_or_path).get("kind") == "soc"
        return load_soc(name_or_path) if is_soc else load_device(name_or_path)
    named = name_or_path in presets() or name_or_path in gpus()
    if named or is_measured(name_or_path) or name_or_path.endswith(".json"):
        return load_device(name_or_path)
    if _matching_names(name_or_path):
        return load_soc(name_or_path)
    raise DeviceError(
        unknown_name("device", name_or_path, [*presets(), *gpus(), *socs()]) + " (a device file ends in .toml)"
    )


def _matching_names(text: str) -> list[str]:
    """Names of shipped SoCs that *text* may mean: the SoC of that name, else all whose names contain *text*."""
    return [name for name in socs() if name == text] or [name for name in socs() if text and text.lower() in name]


def parse_soc(raw: dict[str, Any], where: str) -> Soc:
    """Parse the content of a SoC's file; *where* names the file in error messages."""
    if raw.get("kind") != "soc":
        raise DeviceError(f'{where}: is of kind {raw.get("kind")!r}; models are mapped to a device of kind "soc"')
    try:
        return Soc.model_validate(raw)
    except ValidationError as error:
        raise DeviceError(f"{where}: {first_problem(error, Soc, Unit, Pccs, BandwidthSharing)}") from error


def soc_as_toml(soc: Soc) -> str:
    """The text of a TOML file that describes the SoC."""
    return as_toml(soc.model_dump(exclude_none=True))
