"""Readiness: a condition over the models that are preloaded.

A model counts by its newest version, which serves requests without a version. A model that is loaded on demand, or was
evicted for another one, counts as usable; a model that a client unloaded does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.serving.config import ServerConfig
from weft.serving.library import Library
from weft.serving.slots import ModelSlot

MOST_REASONS = 4
"""Reasons in one message, which probes and the log repeat; the repository index has all of them."""

EMPTY = (
    "there is no model to serve; put one into the repository and load it, "
    "or start with --no-preload where models come later"
)
WAITING = "start with --wait-for-models where models come later"
NONE_LEFT = "none of the models can be used: each was unloaded, or failed when it was asked for"


def why_not_ready(library: Library, config: ServerConfig) -> str:
    """Return which models are missing and why; empty if the server is ready."""
    if not config.loading.preload:
        return ""  # models are loaded on demand
    newest = _newest(library)
    broken = _broken(library, newest)
    if _any_usable(library, newest):
        return "" if config.loading.ready_when == "any" else describe(broken)
    return describe(broken) or (NONE_LEFT if newest else EMPTY)


def why_nothing_is_served(library: Library, config: ServerConfig) -> str:
    """Return why a server must stop after its start: no model is usable, and the settings do not allow waiting.

    Empty if the server can run. Models that clients unloaded during the start do not count as missing.
    """
    if config.loading.wait_for_models or not config.loading.preload:
        return ""
    newest = _newest(library)
    if _any_usable(library, newest):
        return ""
    if broken := describe(_broken(library, newest)):
        return f"no model can be served: {broken.rstrip('.')}; mend it, or {WAITING}"
    return "" if newest else f"no model is in {', '.join(config.loading.models)}; put one there, or {WAITING}"


def _newest(library: Library) -> list[ModelSlot]:
    """Return the newest version of each model."""
    return [library.find(name) for name in library.repository.names()]


def _any_usable(library: Library, slots: Iterable[ModelSlot]) -> bool:
    """Tell whether one of the models can be used, now or on demand."""
    return any(not slot.client_unloaded and not library.why_unusable(slot) for slot in slots)


def describe(broken: Mapping[str, str]) -> str:
    """Describe unusable models in one line; models with the same reason, such as those of one file, are grouped."""
    names: dict[str, list[str]] = {}
    for name, why in broken.items():
        names.setdefault(why, []).append(name)
    sentences = [f"{', '.join(models)}: {why}" for why, models in names.items()]
    left_out = sum(len(models) for models in list(names.values())[MOST_REASONS:])
    ending = [f"and {left_out} more, see the repository index"] if left_out else []
    return "; ".join([*sentences[:MOST_REASONS], *ending])


def _broken(library: Library, newest: Iterable[ModelSlot]) -> dict[str, str]:
    """Return the preloaded models and the sources that cannot be used: name -> reason."""
    reasons, known = {}, {slot.entry.name: slot for slot in newest}
    for name, slot in known.items():
        if slot.config.preload and not slot.client_unloaded and (why := library.why_unusable(slot)):
            reasons[name] = why
    for name, why in library.repository.problems.items():
        if name not in known and not _still_served(name, known.values()):
            reasons[name] = why
    return reasons


def _still_served(source: str, slots: Iterable[ModelSlot]) -> bool:
    """Tell whether a problem concerns a whole repository whose models, from an earlier scan, are still served."""
    folder = Path(source)
    return folder.is_absolute() and any(slot.entry.path.is_relative_to(folder.resolve()) for slot in slots)
