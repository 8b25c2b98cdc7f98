"""Whether a server has what it was started for: a condition over the models that shall be there from the start.

A model counts by its newest version, which requests get that name none. One that is loaded when it is asked for, or
whose memory another one has for the moment, can be used; one that somebody unloaded is not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.serving.config import ServerConfig
from weft.serving.library import Library
from weft.serving.slots import ModelSlot

MOST_TOLD = 4
"""Reasons that are told together; the index has them all."""

EMPTY = (
    "there is no model to serve; put one into the repository and load it, "
    "or start with --no-preload where models come later"
)
WAITING = "start with --wait-for-models where models come later"
NONE_LEFT = "none of the models can be used: each was unloaded, or failed when it was asked for"


def why_not_ready(library: Library, config: ServerConfig) -> str:
    """What is missing and why; nothing where the server is ready."""
    if not config.loading.preload:
        return ""  # nothing has to be there before somebody asks for it
    newest = _newest(library)
    broken = _broken(library, newest)
    if _any_usable(library, newest):
        return "" if config.loading.ready_when == "any" else told(broken)
    return told(broken) or (NONE_LEFT if newest else EMPTY)


def why_nothing_is_served(library: Library, config: ServerConfig) -> str:
    """Why a server that was just started ends: no model of it can be used, and none is waited for; else nothing.

    Models that clients unloaded while it started do not end it.
    """
    if config.loading.wait_for_models or not config.loading.preload:
        return ""
    newest = _newest(library)
    if _any_usable(library, newest):
        return ""
    if broken := told(_broken(library, newest)):
        return f"no model can be served: {broken.rstrip('.')}; mend it, or {WAITING}"
    return "" if newest else f"no model is in {', '.join(config.loading.models)}; put one there, or {WAITING}"


def _newest(library: Library) -> list[ModelSlot]:
    """The newest version of each model."""
    return [library.find(name) for name in library.repository.names()]


def _any_usable(library: Library, slots: Iterable[ModelSlot]) -> bool:
    return any(not slot.shut and not library.why_unusable(slot) for slot in slots)


def told(broken: Mapping[str, str]) -> str:
    """Models that cannot be used, in one line: a reason that several have, such as those of one file, stands once."""
    names: dict[str, list[str]] = {}
    for name, why in broken.items():
        names.setdefault(why, []).append(name)
    found = [f"{', '.join(each)}: {why}" for why, each in names.items()]
    more = sum(len(each) for each in list(names.values())[MOST_TOLD:])
    return "; ".join([*found[:MOST_TOLD], *([f"and {more} more, see the repository index"] if more else [])])


def _broken(library: Library, newest: Iterable[ModelSlot]) -> dict[str, str]:
    """What shall be there from the start and cannot be used, be it that no model could be made of it; name -> why."""
    found, known = {}, {slot.entry.name: slot for slot in newest}
    for name, slot in known.items():
        if slot.config.preload and not slot.shut and (why := library.why_unusable(slot)):
            found[name] = why
    for name, why in library.repository.problems.items():
        if name not in known and not _still_served(name, known.values()):
            found[name] = why
    return found


def _still_served(source: str, slots: Iterable[ModelSlot]) -> bool:
    """Whether a problem is that of a whole repository whose models, found earlier, go on being served."""
    folder = Path(source)
    return folder.is_absolute() and any(slot.entry.path.is_relative_to(folder.resolve()) for slot in slots)
