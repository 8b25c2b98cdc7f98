"""A running server takes other settings and other models without losing a request.

Models that have changed are loaded beside those that are served and put in their place; those that are gone leave with
their last request. Of the settings some are taken over at once, some by loading all models again, and all others only
by a restart, which is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.base.errors import RequestError
from weft.serving.config import GROUP_OF, ServerConfig
from weft.serving.library import Library
from weft.serving.slots import ModelSlot

log = logging.getLogger("weft.models")

DECIDING = ("lanes", "policy", "policy_options", "late")
"""Settings that the dispatcher takes over."""
LOADING = ("threads", "isolation", "max_compute_s")
"""Settings that a model has from when it is loaded."""
AT_ONCE = ("memory_budget_bytes", "default_slo_ms", "best_effort_ms", "ready_when", "preload", "wait_for_models")
"""Settings that are asked for whenever they matter."""
SECRET = ("api_key",)
"""Settings whose values nobody is told."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a server took over; the field names are the keys of the answer (docs/formats.md)."""

    loaded: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            *([f"loaded {', '.join(self.loaded)}"] if self.loaded else []),
            *([f"left {', '.join(self.left)}"] if self.left else []),
            *(f"{name} stays as it was: {why}" for name, why in self.failed.items()),
            *self.settings,
            *self.restart,
        ]
        return "; ".join(parts) or "nothing has changed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What other settings come to at a server that runs."""

    config: ServerConfig
    """The settings from now on."""
    changed: frozenset[str]
    """Those of them that are other than before."""
    settings: tuple[str, ...]
    restart: tuple[str, ...]

    def any_of(self, keys: Iterable[str]) -> bool:
        return not self.changed.isdisjoint(keys)


def change_of(config: ServerConfig, wanted: ServerConfig) -> SettingsChange:
    """What a server with some settings takes over where others are wanted."""
    names = [key for key in GROUP_OF if config.value_of(key) != wanted.value_of(key)]
    taken = [name for name in names if name in (*DECIDING, *LOADING, *AT_ONCE)]
    return SettingsChange(
        replace(config, **{name: wanted.value_of(name) for name in taken}),
        frozenset(taken),
        tuple(_said(name, config, wanted) for name in taken),
        tuple(f"{_said(name, config, wanted)} needs a restart" for name in names if name not in taken),
    )


def _said(name: str, config: ServerConfig, wanted: ServerConfig) -> str:
    return name if name in SECRET else f"{name} {_shown(config.value_of(name))} -> {_shown(wanted.value_of(name))}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={each}" for key, each in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


async def renew_models(library: Library, *, everything: bool, preload: bool) -> Renewal:
    """Look at the disk and load what has changed, beside what is served.

    everything: load all models again. preload: load what is new there, too, as its settings say.
    """
    before = set(library.repository.names())
    await library.rescan()
    wanted = [slot for slot in library.slots() if _wanted(library, slot, everything=everything, preload=preload)]
    for slot in library.slots():
        library.refresh(slot)
    loaded, failed = await _reloaded(library, wanted)
    left = before - set(library.repository.names())
    return Renewal(tuple(loaded), tuple(sorted(left)), failed)


def _wanted(library: Library, slot: ModelSlot, *, everything: bool, preload: bool) -> bool:
    """Whether a model shall be loaded, or loaded again; what a client has unloaded stays so."""
    if slot.shut:
        return False
    if slot.served:
        return everything or library.changed(slot)
    entry = library.repository.entry(slot.entry.name)
    return preload and entry.config.preload and entry.version == slot.entry.version and library.fits(slot)


async def _reloaded(library: Library, wanted: list[ModelSlot]) -> tuple[list[str], dict[str, str]]:
    loaded: list[str] = []
    failed: dict[str, str] = {}
    done: set[ModelSlot] = set()
    for slot in wanted:
        name = slot.entry.name
        try:
            if slot not in done:  # with another one of its file
                await library.reload(slot)
            loaded.append(name)
        except RequestError as error:
            log.warning("%s is not renewed: %s", name, error)
            failed[name] = str(error)
        else:
            done |= {each for each in library.slots() if each.served and slot.served and _alike(each, slot)}
    return loaded, failed


def _alike(slot: ModelSlot, other: ModelSlot) -> bool:
    """Whether two models have the same body."""
    return bool(slot.served and other.served and slot.served.body is other.served.body)
