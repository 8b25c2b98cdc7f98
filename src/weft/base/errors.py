"""Everything weft raises on purpose.

WeftError
├── InputError            what the caller gave us cannot be used   (exit code 2)
│   ├── ModelError        a model file, its shapes, or a model's name
│   │   ├── NotLearned    it could not be cut and measured in the time it was given
│   │   └── ShapeNeeded   an input has free dimensions, and nothing says how large they are
│   ├── UnusableTool      a tool lacks a package, or cannot be imported (an AttributeError, too)
│   ├── NumberError       a number format, or values it cannot hold
│   ├── DeviceError       a device file, its values, or models that do not fit on it
│   ├── PlacingError      a machines file, a placement, or models that no machine can serve
│   ├── PlanError         a plan folder, or what was planned
│   ├── ProfileError      a profile file or its values
│   ├── StitchError       models that cannot be joined, and where they first differ
│   ├── TuneError         what a search for number formats was given
│   │   └── EvaluationError   a configuration could not be scored
│   └── WorkloadError     streams, mixes and counts that make no sense
├── PolicyError           a policy broke the scheduling contract    (exit code 3)
│   └── InvalidStart
├── UnfitInputs           a backend cannot compute what it was given (a BadRequest, in the server)
└── RequestError          a served request has no result            (an HTTP status and a gRPC code)
    ├── BadRequest        it cannot be understood, or does not fit the model
    │   └── AlreadyRegistered   a region of shared memory has the name it asks for
    ├── Unauthorised      it carries no key, or a wrong one
    ├── Forbidden         nobody may ask for that here: a foreign host, a repository that is read-only
    ├── NotFound          no such model, version or path
    ├── TooLarge          its body or its headers exceed a limit
    ├── Unsupported       a part of the protocol, or a setting of it, that is not there
    ├── Overloaded        a queue or the memory is full, or the server is going down
    │   ├── LoadFailed    its model cannot be loaded as it is
    │   ├── OverBudget    its bytes find no room beside those of other requests
    │   ├── OverQuota     its key has asked for as much as it may
    │   └── WorkerStarting   the process that is to compute it is being started
    ├── Expired           its deadline passed, or cannot be met any more
    ├── Cancelled         its client went away
    └── Failed            our own fault
        └── WorkerDied    the process that computed it died

The split is by who can do something about it, because that is what the command line asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class WeftError(Exception):
    """Root of the tree; the message is one line and names the thing, the value and the way out."""

    exit_code = 1


class InputError(WeftError):
    """What the caller gave us cannot be used."""

    exit_code = 2


class UnusableTool(InputError, AttributeError):
    """A tool lacks a package or cannot be imported; for ``hasattr`` its public names are absent then."""


class ModelError(InputError):
    """A model cannot be read, or what it says about itself cannot be true."""


class NotLearned(ModelError):
    """Cutting and measuring a model took longer than it may; it can be served whole."""


class ShapeNeeded(ModelError):
    """An input has free dimensions, and nothing says how large they are.

    The message advises ``--shape``; who knows how else the user asked raises it again with ``advising``.
    """

    def __init__(self, problem: str, name: str = "", sizes: str = "", *, model: str = "", advice: str = "") -> None:
        """*name*, *sizes*: the input, and an example of what to say of it; *model*: whose input it is."""
        said = advice or (f"pass --shape {name}={sizes}" if name else "")
        super().__init__(f"{problem}; {said}" if said else problem)
        self.problem, self.name, self.sizes, self.model = problem, name, sizes, model

    def advising(self, advice: str) -> ShapeNeeded:
        """The same with other advice."""
        return ShapeNeeded(self.problem, self.name, self.sizes, model=self.model, advice=advice)

    def of(self, model: str) -> ShapeNeeded:
        """The same, said of *model*."""
        return ShapeNeeded(f"{model}: {self.problem}", self.name, self.sizes, model=model)

    def among_several(self) -> ShapeNeeded:
        """The same, where an option has to say which model it means."""
        return self.advising(f"pass --shape {self.model}:{self.name}={self.sizes}")


class DeviceError(InputError):
    """A device description cannot be used, or does not hold the models put on it."""


class PlacingError(InputError):
    """Machines or a placement cannot be used, or no machine can serve a model; told with what it needs."""


class PlanError(InputError):
    """A plan folder cannot be used, or cannot be written."""


class ProfileError(InputError):
    """A profile cannot be read or its values cannot be costs."""


class StitchError(InputError):
    """Models cannot be stitched; the message names the first difference or the operator in the way."""


class NumberError(InputError):
    """A number format cannot exist, or cannot hold what it was given."""


class TuneError(InputError):
    """A search for number formats cannot be made of what it was given."""


class EvaluationError(TuneError):
    """A configuration could not be scored; ``output`` is what the evaluation said before it failed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class WorkloadError(InputError):
    """The asked-for streams, mix or counts make no sense."""


class PolicyError(WeftError):
    """A policy broke the scheduling contract."""

    exit_code = 3


class InvalidStart(PolicyError):
    """A policy started something that was not on offer."""


class UnfitInputs(WeftError):
    """A model cannot compute the inputs it was given; the message says why."""


class RequestError(WeftError):
    """A served request has no result; every kind has its status, its gRPC code and the reason it is counted under."""

    status = 500
    code = "INTERNAL"
    reason = "internal"


class BadRequest(RequestError):
    """It cannot be understood, or does not fit the model."""

    status, code, reason = 400, "INVALID_ARGUMENT", "bad_request"


class AlreadyRegistered(BadRequest):
    """A region of shared memory has the name that another one shall get."""

    code = "ALREADY_EXISTS"


class Unauthorised(RequestError):
    """It carries no key, or a wrong one."""

    status, code, reason = 401, "UNAUTHENTICATED", "unauthorised"


class Forbidden(RequestError):
    """Nobody may ask for that here, with whatever key."""

    status, code, reason = 403, "PERMISSION_DENIED", "forbidden"


class NotFound(RequestError):
    """No such model, version or path."""

    status, code, reason = 404, "NOT_FOUND", "not_found"


class TooLarge(RequestError):
    """Its body or its headers exceed a limit."""

    status, code, reason = 413, "RESOURCE_EXHAUSTED", "too_large"


class Unsupported(RequestError):
    """A part of the protocol, or a setting of it, that is not there; the message names it."""

    status, code, reason = 501, "UNIMPLEMENTED", "unsupported"


class Overloaded(RequestError):
    """A queue or the memory is full, or the server is going down; it may be sent again later."""

    status, code, reason = 503, "UNAVAILABLE", "queue_full"

    def __init__(self, message: str, *, reason: str = "queue_full", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class LoadFailed(Overloaded):
    """Its model cannot be loaded as it is."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="load_failed")


class OverBudget(Overloaded):
    """Its bytes find no room beside those of other requests."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="bytes")


class OverQuota(Overloaded):
    """Its key has asked for as much as it may; it may be sent again when ``retry_after_s`` have passed."""

    status, code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, reason="quota", retry_after_s=retry_after_s)


class WorkerStarting(Overloaded):
    """The process that is to compute it is being started, for the first time or again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        advice = f"send it again in {retry_after_s:g} s"
        super().__init__(f"{message}; {advice}", reason="worker_starting", retry_after_s=retry_after_s)


class Expired(RequestError):
    """Its deadline passed (``expired``) or cannot be met any more (``unmeetable``); or it was computed for longer than
    the server allows (``too_long``)."""

    status, code, reason = 504, "DEADLINE_EXCEEDED", "expired"

    def __init__(self, message: str, *, reason: str = "expired") -> None:
        super().__init__(message)
        self.reason = reason


class Cancelled(RequestError):
    """Its client went away."""

    status, code, reason = 499, "CANCELLED", "cancelled"


class Failed(RequestError):
    """Our own fault."""


class WorkerDied(Failed):
    """The process that computed it died, or is not there yet.

    Clients are told of it only where their own request may be why; to others it is a ``WorkerStarting``.
    """

    reason = "worker_died"

    def __init__(self, message: str, *, suspects: int = 0, again_s: float = 0.0) -> None:
        """*suspects*: how many steps, this one among them, may be why; 0: this one had nothing to do with it.

        again_s: when it is worth trying again.
        """
        super().__init__(message)
        self.suspects, self.again_s = suspects, again_s


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name nobody registered: what was asked, the nearest names, or all of them."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


def reason_of(error: BaseException) -> str:
    """What went wrong, in words: of an error of the system without its number and the path, which the message has."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\[Errno -?[0-9]+\] ", "", text)


def first_line(error: BaseException) -> str:
    """What an error says, without what follows the first line; its kind where it says nothing."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:200]
