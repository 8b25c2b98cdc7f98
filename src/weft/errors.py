"""Everything weft raises on purpose.

WeftError
├── InputError            what the caller gave us cannot be used   (exit code 2)
│   ├── ModelError        a model file, its shapes, or a model's name
│   ├── DeviceError       a device file, its values, or models that do not fit on it
│   ├── ProfileError      a profile file or its values
│   └── WorkloadError     streams, mixes and counts that make no sense
└── PolicyError           a policy broke the scheduling contract    (exit code 3)
    └── InvalidStart

The split is by who can do something about it, because that is what the command line asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WeftError(Exception):
    """Root of the tree; the message is one line and names the thing, the value and the way out."""

    exit_code = 1


class InputError(WeftError):
    """What the caller gave us cannot be used."""

    exit_code = 2


class ModelError(InputError):
    """A model cannot be read, or what it says about itself cannot be true."""


class DeviceError(InputError):
    """A device description cannot be used, or does not hold the models put on it."""


class ProfileError(InputError):
    """A profile cannot be read or its values cannot be costs."""


class WorkloadError(InputError):
    """The asked-for streams, mix or counts make no sense."""


class PolicyError(WeftError):
    """A policy broke the scheduling contract."""

    exit_code = 3


class InvalidStart(PolicyError):
    """A policy started something that was not on offer."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name nobody registered: what was asked, the nearest names, or all of them."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"
