"""An NPU that computes every layer as one tiled matrix product, with an array that adapts to layer and batch.

``T_C`` processing elements, each a tree of ``T_P`` multipliers, stream ``T_R`` rows at a time; the three
tiles are double-buffered on chip (Fluid Batching, sections II-C and III-A). A ``Board`` is the board
such a design must fit. These are descriptions; ``weft.devices.costs.tiled`` computes the cost of a layer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base import tomlfile
from weft.base.errors import DeviceError, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft.devices.gpu_pairs import gpus, read_pairs
from weft.devices.host import Host, is_measured, read_host
from weft.devices.lanes import Lanes
from weft.devices.npu import Count, Npu, Positive, parse_npu, read_description, shipped

Batching = Literal["fluid", "r", "p", "fc", "none"]
PReading = Literal["straddle", "refetch", "groups", "broadcast"]
Elementwise = Literal["free", "ddr"]
Edges = Literal["added", "within", "none"]
Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]


class Calibration(BaseModel, extra="forbid", frozen=True, strict=True):
    """A bandwidth fitted to published results; *reason* names them."""

    name: Name
    bandwidth_gb_s: Positive
    reason: str


class Board(BaseModel, extra="forbid", frozen=True, strict=True):
    """The resources of a board. The field names are the keys of the file."""

    kind: Literal["platform"] = "platform"
    name: Name
    source: str = ""
    dsps: Count
    """Multipliers; one per MAC."""
    bram_bits: Annotated[int, Field(ge=1, le=2**50)]
    """The on-chip memory that holds tiles."""
    luts: Count | None = None
    registers: Count | None = None
    clock_mhz: Positive
    bandwidth_gb_s: Positive
    """Default off-chip bandwidth of designs on this board, in 10^9 bytes per second."""
    calibration: tuple[Calibration, ...] = Field(default=(), strict=False)
    """Other bandwidths, with the reason for each."""

    def calibrated_gb_s(self, name: str) -> float:
        """The bandwidth of the calibration *name*; raises DeviceError if the board has no such calibration."""
        bandwidths = {entry.name: entry.bandwidth_gb_s for entry in self.calibration}
        if name not in bandwidths:
            raise DeviceError(f"{self.name}: " + unknown_name("calibration", name, bandwidths))
        return bandwidths[name]


class PeShape(NamedTuple):
    """The shape of the array in one setting of the stackable PEs."""

    k: float
    """1: as built; 2: half as many PEs with trees twice as wide; 0.5: twice as many PEs with trees half as wide."""
    t_r: int
    t_p: int
    t_c: int


class TiledNpu(BaseModel, extra="forbid", frozen=True, strict=True):
    """A design <T_R, T_P, T_C>. The field names are the keys of the file."""

    kind: Literal["tiled"] = "tiled"
    name: Name
    source: str = ""
    """Where the numbers come from."""
    platform: str | None = None
    """The board that the design must fit: a name that ships with the package or a TOML file."""
    t_r: Count
    """Rows (output positions) of a tile."""
    t_p: Count
    """Width of a PE's MAC tree (the reduction)."""
    t_c: Count
    """Number of PEs, one per output channel."""
    clock_mhz: Positive
    """If the file has a platform, the platform's clock by default."""
    bandwidth_gb_s: Positive
    """Off-chip bandwidth in 10^9 bytes per second; if the file has a platform, the platform's by default."""
    element_bits: Annotated[int, Field(ge=1, le=64)] = 16
    batching: Batching = "fluid"
    """How a batch enters a matrix product: samples stacked as rows (r); side by side (p); the best mixture of both per
    layer and batch (fluid); as rows, but one by one in convolutions (fc); always one by one (none)."""
    stackable: bool = True
    """Whether PEs may pair up (k = 2) or split (k = 1/2) per layer."""
    p_reading: PReading = "straddle"
    """How samples side by side use the PEs. ``straddle``: their columns lie end to end over the PEs, and a sample cut
    by the end of a pass is fetched once; ``refetch``: the same, but fetched in both passes; ``groups``: only whole
    samples share a pass; ``broadcast``: all PEs get the same input slice, so samples take turns."""
    elementwise: Elementwise = "free"
    """Layers that are no matrix product: fused without cost (free), or read from and written to memory (ddr)."""
    edges: Edges = "added"
    """The load of the first tiles and the write of the last one: on top of the layer's roofline (added), taken out of
    its overlapped traffic (within), or neglected (none)."""
    decision_us: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Time of each decision of the scheduler; a policy that decides at every layer pays this at every layer."""

    @property
    def clock_hz(self) -> float:
        return self.clock_mhz * 1e6

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def element_bytes(self) -> float:
        return self.element_bits / 8

    @property
    def dsps(self) -> int:
        return self.t_p * self.t_c

    @property
    def bram_bits(self) -> int:
        """Bits of the three tiles, double-buffered."""
        return 2 * self.element_bits * (self.t_r * self.t_p + self.t_p * self.t_c + self.t_r * self.t_c)

    @property
    def macs_per_s(self) -> float:
        return self.t_p * self.t_c * self.clock_hz

    @property
    def ridge_ops_per_byte(self) -> float:
        """Operations (two per MAC) per off-chip byte at which both resources are busy all the time."""
        return 2 * self.macs_per_s / self.bandwidth_bytes_per_s

    def together(self) -> Lanes:
        """The only lane: the device runs one layer at a time."""
        return Lanes(("array",))

    @property
    def shapes(self) -> tuple[PeShape, ...]:
        """The shapes that the array can take, the built shape first."""
        built = PeShape(1.0, self.t_r, self.t_p, self.t_c)
        if not self.stackable:
            return (built,)
        half = self.t_r // 2  # so that the buffers of the built shape hold the tiles of the others
        other_shapes = (
            PeShape(2.0, half, 2 * self.t_p, self.t_c // 2),
            PeShape(0.5, half, self.t_p // 2, 2 * self.t_c),
        )
        return (built, *(shape for shape in other_shapes if min(shape[1:]) > 0))


def platforms() -> list[str]:
    """Names of the platforms that ship with the package."""
    return shipped("platform")


def load_platform(name_or_path: str) -> Board:
    """Load a platform by name, or from a TOML file by its path."""
    try:
        return Board.model_validate(read_description("platform", name_or_path))
    except ValidationError as error:
        raise DeviceError(f"{name_or_path}: {first_problem(error, Board)}") from error


def load_device(name_or_path: str) -> Npu | TiledNpu | Host:
    """Return a device by name or file.

    That is a preset, an NPU of either kind described in TOML, a measured host in JSON, or a GPU on which pairs of
    models were measured.
    """
    if is_measured(name_or_path):
        raise DeviceError(
            f"{name_or_path} is this machine, and is measured: weft profile MODELS --device {name_or_path} "
            "-o host.json, then give host.json"
        )
    if name_or_path.endswith(".json"):
        return read_host(name_or_path)
    if name_or_path in gpus():
        return read_pairs().device()
    return load_simulated(name_or_path)


def load_simulated(name_or_path: str) -> Npu | TiledNpu:
    """Load an NPU of either kind by name or file; raises DeviceError for other kinds of devices."""
    raw = read_description("device", name_or_path)
    return parse_tiled(raw, name_or_path) if raw.get("kind") == "tiled" else parse_npu(raw, name_or_path)


def parse_tiled(raw: dict[str, Any], where: str) -> TiledNpu:
    """Parse the content of a tiled NPU's file, with defaults from its platform, which it must fit.

    *where* names the file in error messages.
    """
    platform = load_platform(raw["platform"]) if isinstance(raw.get("platform"), str) else None
    defaults = {"clock_mhz": platform.clock_mhz, "bandwidth_gb_s": platform.bandwidth_gb_s} if platform else {}
    try:
        device = TiledNpu.model_validate({**defaults, **raw})
    except ValidationError as error:
        raise DeviceError(f"{where}: {first_problem(error, TiledNpu)}") from error
    if platform:
        check_platform(device, platform, where)
    return device


def check_platform(device: TiledNpu, platform: Board, where: str) -> None:
    """Raise DeviceError if a design needs more DSPs or memory than the board has; *where* names the design's file."""
    for resource, demand, bound, way_out in (
        ("DSPs (T_P x T_C)", device.dsps, platform.dsps, "lower t_p or t_c"),
        ("bits of BRAM (double-buffered tiles)", device.bram_bits, platform.bram_bits, "lower t_r"),
    ):
        if demand > bound:
            raise DeviceError(
                f"{where}: <{device.t_r}, {device.t_p}, {device.t_c}> needs {demand} {resource} and "
                f"{platform.name} has {bound}; {way_out}"
            )


def as_toml(device: Npu | TiledNpu) -> str:
    """The text of a TOML file that describes the device."""
    return tomlfile.as_toml(device.model_dump(exclude_none=True))
