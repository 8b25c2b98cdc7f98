"""Renewal: a running server takes over changed settings and models (a newer plan) without losing a request.

Models that have changed are loaded next to those that are served, and replace them; removed models are closed after
their last request. Some settings take effect at once, some by loading all models again; the others need a restart, and
are reported.
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

SCHEDULING_KEYS = ("lanes", "policy", "policy_options", "late")
"""Settings of scheduling, which the dispatcher takes over at once."""
LOAD_KEYS = ("threads", "isolation", "max_compute_s")
"""Settings that take effect when a model is loaded."""
ON_USE_KEYS = ("memory_budget_bytes", "default_slo_ms", "best_effort_ms", "ready_when", "preload", "wait_for_models")
"""Settings that are read whenever they are needed, so that a change needs no action."""
SECRET_KEYS = ("api_key",)
"""Settings whose values are not reported."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of a renewal; the field names are the keys of the answer (docs/formats.md)."""

    loaded: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """Models that are not served any more, because their files were removed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Model -> why its new version cannot be served; the old one still is."""
    settings: tuple[str, ...] = ()
    """Descriptions of the settings that were changed."""
    restart: tuple[str, ...] = ()
    """Descriptions of changed settings that need a restart."""

    def __str__(self) -> str:
        sentences = [
            *([f"loaded {', '.join(self.loaded)}"] if self.loaded else []),
            *([f"left {', '.join(self.left)}"] if self.left else []),
            *(f"{name} stays as it was: {why}" for name, why in self.failed.items()),
            *self.settings,
            *self.restart,
        ]
        return "; ".join(sentences) or "nothing has changed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """The effect of changed settings on a running server."""

    config: ServerConfig
    """The settings from now on."""
    changed: frozenset[str]
    """Keys of the settings that changed and take effect."""
    settings: tuple[str, ...]
    """This and *restart*: as in ``Renewal``."""
    restart: tuple[str, ...]

    def any_of(self, keys: Iterable[str]) -> bool:
        """Tell whether one of the settings *keys* has changed and takes effect."""
        return not self.changed.isdisjoint(keys)


def change_of(config: ServerConfig, wanted: ServerConfig) -> SettingsChange:
    """Compare the current settings with the *wanted* ones: which take effect now, and which need a restart."""
    names = [key for key in GROUP_OF if config.value_of(key) != wanted.value_of(key)]
    effective = [name for name in names if name in (*SCHEDULING_KEYS, *LOAD_KEYS, *ON_USE_KEYS)]
    return SettingsChange(
        config=replace(config, **{name: wanted.value_of(name) for name in effective}),
        changed=frozenset(effective),
        settings=tuple(_describe(name, config, wanted) for name in effective),
        restart=tuple(f"{_describe(name, config, wanted)} needs a restart" for name in names if name not in effective),
    )


def _describe(name: str, config: ServerConfig, new_config: ServerConfig) -> str:
    """Describe the change of a setting, without the values of secrets."""
    return (
        name
        if name in SECRET_KEYS
        else f"{name} {_value_text(config.value_of(name))} -> {_value_text(new_config.value_of(name))}"
    )


def _value_text(value: Any) -> str:
    """Format the value of a setting for messages."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={option}" for key, option in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


async def renew_models(library: Library, *, everything: bool, preload: bool) -> Renewal:
    """Scan the repository and load changed models, while the old ones are served.

    everything: load all models again. preload: also load new models, if their settings say so.
    """
    names_before = set(library.repository.names())
    await library.rescan()
    changed = [slot for slot in library.slots() if _must_load(library, slot, everything=everything, preload=preload)]
    for slot in library.slots():
        library.refresh(slot)
    loaded, failed = await _reload(library, changed)
    removed = names_before - set(library.repository.names())
    return Renewal(tuple(loaded), tuple(sorted(removed)), failed)


def _must_load(library: Library, slot: ModelSlot, *, everything: bool, preload: bool) -> bool:
    """Tell whether a model must be loaded, or loaded again; a model that a client unloaded stays unloaded.

    everything, preload: as for ``renew_models``.
    """
    if slot.client_unloaded:
        return False
    if slot.served:
        return everything or library.has_changed(slot)
    entry = library.repository.entry(slot.entry.name)
    return preload and entry.config.preload and entry.version == slot.entry.version and library.fits(slot)


async def _reload(library: Library, slots: list[ModelSlot]) -> tuple[list[str], dict[str, str]]:
    """Load models, one after another; return the names of those loaded, and why the others failed, by name."""
    loaded: list[str] = []
    failed: dict[str, str] = {}
    reloaded: set[ModelSlot] = set()
    for slot in slots:
        name = slot.entry.name
        try:
            if slot not in reloaded:  # else it was loaded together with another model of its file
                await library.reload(slot)
            loaded.append(name)
        except RequestError as error:
            log.warning("%s is not renewed: %s", name, error)
            failed[name] = str(error)
        else:
            reloaded |= {other for other in library.slots() if _share_body(other, slot)}
    return loaded, failed


def _share_body(slot: ModelSlot, other: ModelSlot) -> bool:
    """Tell whether two models are served with the same body."""
    return bool(slot.served and other.served and slot.served.body is other.served.body)
