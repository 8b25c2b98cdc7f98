"""Registered backends, by the names that the setting ``backend`` takes."""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from weft.base.errors import InputError, unknown_name
from weft.base.registry import registered, uses_others
from weft.runtime.isolated.limits import WorkerLimits

if TYPE_CHECKING:
    from weft.runtime.backend import Backend

ENTRY_POINTS = "weft.backends"
"""Group of entry points in which packages named theirs before ``tool.toml`` had the section ``backends``: a callable
without arguments that returns a ``Backend``. Read until the next release."""

DEFAULT = "onnxruntime"


def make_backend(name: str = DEFAULT, limits: WorkerLimits | None = None) -> Backend:
    """Make the backend of this name; ``InputError`` if no such backend is registered or its requirements are missing.

    limits: for the backend's worker processes, if it has any.
    """
    entries = registered("backends")
    if name not in entries:
        return _make_from_entry_point(name, list(entries))
    open_backend = entries[name].load()
    try:
        backend: Backend = open_backend(limits or WorkerLimits())
    except ImportError as error:
        raise _missing_requirement(name, error) from error
    except Exception as error:
        if entries[name].tool.own:  # a bug of ours: keep its traceback
            raise
        tool = entries[name].tool.name
        raise InputError(f"tool {tool!r}: its backend {name!r} cannot be used: {error}") from error
    return backend


def _make_from_entry_point(name: str, known: list[str]) -> Backend:
    """Make a backend by the deprecated entry points, with a warning; *known*: registered names, for the error."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)} if uses_others() else {}
    if name not in points:
        raise InputError(unknown_name("backend", name, [*known, *points]))
    warnings.warn(
        f"backend {name!r} is named by an entry point of {ENTRY_POINTS}, which weft reads for one more release; its "
        "package can name it under [backends] in its tool.toml (docs/serving.md)",
        DeprecationWarning,
        stacklevel=3,
    )
    return _load_backend(points[name])


def _load_backend(point: EntryPoint) -> Backend:
    """Call the target of an entry point; ``InputError`` if something that it imports is missing."""
    try:
        backend: Backend = point.load()()
    except ImportError as error:
        raise _missing_requirement(point.name, error) from error
    return backend


def _missing_requirement(name: str, error: ImportError) -> InputError:
    return InputError(f"backend {name!r} cannot be loaded: {error}; install what it needs")
