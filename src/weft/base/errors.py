"""The exceptions of weft.

WeftError
├── InputError            the caller's input cannot be used        (exit code 2)
│   ├── ModelError        a model file, its shapes, or a model's name
│   │   ├── NotLearned    a model could not be cut and measured within its time limit
│   │   └── ShapeNeeded   an input has free dimensions whose sizes are unknown
│   ├── UnusableTool      a tool lacks a package, or cannot be imported (an AttributeError, too)
│   ├── NumberError       a number format, or values it cannot hold
│   ├── DeviceError       a device file, its values, or models that do not fit on it
│   ├── PlacingError      a machines file, a placement, or models that no machine can serve
│   ├── PlanError         a plan folder, or the models of a plan
│   ├── ProfileError      a profile file or its values
│   ├── StitchError       models that cannot be joined, and where they first differ
│   ├── TuneError         the input of a search for number formats
│   │   └── EvaluationError   a configuration could not be scored
│   └── WorkloadError     streams, mixes and counts that make no sense
├── ChildDied             a child process ended before it answered  (exit code 1)
├── PolicyError           a policy broke the scheduling contract    (exit code 3)
│   └── InvalidStart
├── UnfitInputs           a backend cannot compute these inputs     (a BadRequest, in the server)
└── RequestError          a served request has no result            (an HTTP status and a gRPC code)
    ├── BadRequest        malformed, or does not fit the model
    │   └── AlreadyRegistered   a shared memory region of this name exists
    ├── Unauthorised      no API key, or an unknown one
    ├── Forbidden         not allowed for any client: a foreign host, a read-only repository
    ├── NotFound          no such model, version or path
    ├── TooLarge          the body or the headers exceed a limit
    ├── Unsupported       an extension, or a setting of it, that is not implemented
    ├── Overloaded        a queue or the memory is full, or the server is shutting down
    │   ├── LoadFailed    the model cannot be loaded
    │   ├── OverBudget    the byte budget has no room for the body
    │   ├── OverQuota     the rate limit or quota of the API key is exceeded
    │   └── WorkerStarting   the worker process is being started
    ├── Expired           the deadline passed, or cannot be met any more
    ├── Cancelled         the client disconnected
    └── Failed            an internal error
        └── WorkerDied    the worker process died

Errors are split by the party that can act on them: caller, policy author, client or operator. Exit codes and statuses
tell that party.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class WeftError(Exception):
    """Root of the tree; the message is one line and names the thing, the value and the way out."""

    exit_code = 1


class InputError(WeftError):
    """Input from the caller that cannot be used."""

    exit_code = 2


class UnusableTool(InputError, AttributeError):
    """A tool that lacks a package or cannot be imported.

    It is an AttributeError too, so that ``hasattr(weft, name)`` is False for the public names of such a tool.
    """


class ModelError(InputError):
    """A model that cannot be read, or whose description contradicts itself."""


class NotLearned(ModelError):
    """Cutting and measuring a model exceeded its time limit; the model can be served whole."""


class ShapeNeeded(ModelError):
    """An input has free dimensions whose sizes are unknown.

    The message advises ``--shape``; a caller that knows another way to give shapes raises ``advising(...)`` instead.
    """

    def __init__(self, problem: str, name: str = "", sizes: str = "", *, model: str = "", advice: str = "") -> None:
        """name, sizes: the input and an example of its shape. model: the model with that input.

        advice: what the user should do; by default to pass ``--shape``.
        """
        advice = advice or (f"pass --shape {name}={sizes}" if name else "")
        super().__init__(f"{problem}; {advice}" if advice else problem)
        self.problem, self.name, self.sizes, self.model = problem, name, sizes, model

    def advising(self, advice: str) -> ShapeNeeded:
        """Return the error with other advice."""
        return ShapeNeeded(self.problem, self.name, self.sizes, model=self.model, advice=advice)

    def for_model(self, model: str) -> ShapeNeeded:
        """Return the error with *model* named in it."""
        return ShapeNeeded(f"{model}: {self.problem}", self.name, self.sizes, model=model)

    def among_several(self) -> ShapeNeeded:
        """Return the error with advice that names the model, for commands that take several models."""
        return self.advising(f"pass --shape {self.model}:{self.name}={self.sizes}")


class DeviceError(InputError):
    """A device description cannot be used, or does not hold the models put on it."""


class PlacingError(InputError):
    """Machines or a placement that cannot be used, or a model that no machine can serve."""


class PlanError(InputError):
    """A plan folder cannot be used, or cannot be written."""


class ProfileError(InputError):
    """A profile cannot be read or its values cannot be costs."""


class StitchError(InputError):
    """Models cannot be stitched; the message names the first difference or the operator in the way."""


class NumberError(InputError):
    """A number format that cannot exist, or values that it cannot represent."""


class TuneError(InputError):
    """Input from which no search for number formats can be set up."""


class EvaluationError(TuneError):
    """A configuration could not be scored; ``output`` is the text that the evaluation printed before."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class WorkloadError(InputError):
    """Streams, a mix or counts that make no sense."""


class ChildDied(WeftError):
    """A child process ended before it answered; ``how`` names the signal or the exit code."""

    def __init__(self, code: int) -> None:
        """code: the return code of ``subprocess``; a negative one is a signal."""
        self.code = code
        self.how = f"by signal {-code}" if code < 0 else f"with code {code}"
        super().__init__(f"a child process was ended {self.how}")


class PolicyError(WeftError):
    """A policy broke the scheduling contract."""

    exit_code = 3


class InvalidStart(PolicyError):
    """A policy started work that it was not offered."""


class UnfitInputs(WeftError):
    """Inputs that a model cannot compute; the message says why."""


class RequestError(WeftError):
    """A served request without a result; each subclass has an HTTP status, a gRPC code and a reason for the metrics."""

    status = 500
    code = "INTERNAL"
    reason = "internal"


class BadRequest(RequestError):
    """A malformed request, or one that does not fit the model."""

    status, code, reason = 400, "INVALID_ARGUMENT", "bad_request"


class AlreadyRegistered(BadRequest):
    """A shared memory region is registered under a name that is taken."""

    code = "ALREADY_EXISTS"


class Unauthorised(RequestError):
    """A request without an API key, or with an unknown one."""

    status, code, reason = 401, "UNAUTHENTICATED", "unauthorised"


class Forbidden(RequestError):
    """A request that is not allowed with any key."""

    status, code, reason = 403, "PERMISSION_DENIED", "forbidden"


class NotFound(RequestError):
    """No such model, version or path."""

    status, code, reason = 404, "NOT_FOUND", "not_found"


class TooLarge(RequestError):
    """A request whose body or headers exceed a limit."""

    status, code, reason = 413, "RESOURCE_EXHAUSTED", "too_large"


class Unsupported(RequestError):
    """A protocol extension, or a setting of it, that is not implemented; the message names it."""

    status, code, reason = 501, "UNIMPLEMENTED", "unsupported"


class Overloaded(RequestError):
    """A queue or the memory is full, or the server is shutting down; the client may retry after ``retry_after_s``."""

    status, code, reason = 503, "UNAVAILABLE", "queue_full"

    def __init__(self, message: str, *, reason: str = "queue_full", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class LoadFailed(Overloaded):
    """The model of a request cannot be loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="load_failed")


class OverBudget(Overloaded):
    """The byte budget has no room for the body of a request."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="bytes")


class OverQuota(Overloaded):
    """The rate limit or quota of an API key is exceeded; the client may retry after ``retry_after_s``."""

    status, code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, reason="quota", retry_after_s=retry_after_s)


class WorkerStarting(Overloaded):
    """The worker process of a model is being started or restarted."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        advice = f"send it again in {retry_after_s:g} s"
        super().__init__(f"{message}; {advice}", reason="worker_starting", retry_after_s=retry_after_s)


class Expired(RequestError):
    """A request that missed a time limit.

    Reasons: its deadline passed (``expired``), cannot be met any more (``unmeetable``), or it was computed for longer
    than the server allows (``too_long``).
    """

    status, code, reason = 504, "DEADLINE_EXCEEDED", "expired"

    def __init__(self, message: str, *, reason: str = "expired") -> None:
        super().__init__(message)
        self.reason = reason


class Cancelled(RequestError):
    """The client disconnected before the answer."""

    status, code, reason = 499, "CANCELLED", "cancelled"


class Failed(RequestError):
    """An internal error of the server."""


class WorkerDied(Failed):
    """The worker process of a request died, or has not started.

    Only clients whose request may be the cause see this error; others get a ``WorkerStarting``.
    """

    reason = "worker_died"

    def __init__(self, message: str, *, suspects: int = 0, again_s: float = 0.0) -> None:
        """suspects: the number of running steps that may be the cause, the step of this request included.

        0: this request is not the cause. again_s: seconds after which a retry makes sense.
        """
        super().__init__(message)
        self.suspects, self.again_s = suspects, again_s


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known names, or all of them."""
    names = sorted(known)
    suggestions = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


def reason_of(error: BaseException) -> str:
    """Return the text of an error; of an OSError only the reason, since the caller's message has the path already."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.sub(r"\[Errno -?[0-9]+\] ", "", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters; the name of its class if it has no text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:200]
