"""The networks, the boards, and the hardware that runs them: the paper's NPU, or a baseline's own.

Every baseline has the best design for a batch of 8 under its own way of batching, as section IV says. The paper's NPU
is the one of Table I.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.base.errors import DeviceError
from weft.devices import TiledNpu, load_device, load_platform
from weft.devices.costs.explore import Exploration, explore
from weft.devices.tiled import Batching
from weft.models import Model
from weft.models.exits import exit_shares
from weft.models.sources import load_model

EXIT_RATES = {"resnet50": (0.051, 0.169, 0.09, 0.69), "inception-v3": (0.145, 0.186, 0.222, 0.447)}
EXITS = 3  # early exits of each network, as in the paper's section VI; the last output is not counted
TITLES = {"resnet50": "ResNet-50", "inception-v3": "Inception-v3"}
MAX_BATCH = 8  # largest batch of the paper's searches and tables
DECISION_US = 25.0
"""Time of one scheduler decision; the paper does not print it."""


class Spot(NamedTuple):
    """A network on a board."""

    model: str
    board: str

    @property
    def name(self) -> str:
        return f"{TITLES[self.model]}, {self.board.upper()}"

    @property
    def key(self) -> str:
        """The key of its published numbers."""
        return f"{self.model}_{self.board}"

    @property
    def preset(self) -> str:
        return f"{self.board}-{self.model}"


SPOTS = tuple(Spot(model, board) for model in EXIT_RATES for board in ("zc706", "zcu104"))
"""The devices in the order of Tables I and II."""


class HardwareSearch(NamedTuple):
    """Hardware: how it takes a batch, and which batch sizes its design was searched for."""

    batching: Batching
    stackable: bool
    only: int | None = None
    """One batch size; all of 1 to 8, equally weighted, where left out."""


SEARCHES = {
    "fluid": HardwareSearch("fluid", True),
    "fluid, fixed PEs": HardwareSearch("fluid", False),
    "R": HardwareSearch("r", False, MAX_BATCH),
    "P": HardwareSearch("p", False, MAX_BATCH),
    "FC": HardwareSearch("fc", False, MAX_BATCH),
    "serial": HardwareSearch("none", False, 1),
}


@lru_cache(maxsize=64)
def searched(spot: Spot, hardware: str, bandwidth_gb_s: float | None = None) -> Exploration:
    """Search the design space of a kind of hardware, by default at the board's calibrated bandwidth."""
    search = SEARCHES[hardware]
    most = search.only or MAX_BATCH
    return explore(
        [network(spot.model)],
        load_platform(spot.board),
        max_batch=most,
        weights=[0.0] * (most - 1) + [1.0] if search.only else None,
        batching=search.batching,
        stackable=search.stackable,
        bandwidth_gb_s=bandwidth_gb_s,
    )


@lru_cache(maxsize=64)
def npu(spot: Spot, hardware: str) -> TiledNpu:
    """The NPU a scheduler runs on: the paper's, or the best of a baseline's own search."""
    device = tabled(spot) if hardware == "fluid" else searched(spot, hardware).device()
    return device.model_copy(update={"decision_us": DECISION_US})


def tabled(spot: Spot, preset: str | None = None) -> TiledNpu:
    """The NPU of Table I; or another preset."""
    device = load_device(preset or spot.preset)
    if not isinstance(device, TiledNpu):
        raise DeviceError(f"{device.name}: the paper's NPUs are tiled, this one is not")
    return device


def tile(device: TiledNpu) -> str:
    return f"<{device.t_r}, {device.t_p}, {device.t_c}>"


@lru_cache(maxsize=16)
def network(model: str, exits: int | None = None, head: str = "fc") -> Model:
    return load_model(model, exits=exits, exit_head=head)


def macs_per_sample(model: str, head: str = "fc") -> float:
    """Mean MACs per sample, given the shares of samples that leave at each exit."""
    whole = network(model, EXITS, head)
    return whole.macs * sum(rate * share for rate, share in zip(EXIT_RATES[model], exit_shares(whole), strict=True))
