"""How long a model may be run with made-up inputs: every such run can be told to stop, and none begins afterwards."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

import onnxruntime as ort


class OutOfTime(BaseException):
    """Learning has to end. No ``Exception``: who tries a model out takes those for a trait of the model and goes on."""


class Allowance:
    """The time one model may be tried out for; ``stop`` ends it early, from any thread."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._options = ort.RunOptions()
        self._stopped = False
        self._timer = None if limit_s is None else threading.Timer(limit_s, self.stop)
        self._half_s, self._half_gone_s = (limit_s or 0.0) / 2, inf

    def __enter__(self) -> Allowance:
        if self._timer:
            self._half_gone_s = monotonic() + self._half_s
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer.join()  # its thread is nobody's any more

    def stop(self) -> None:
        """Have what runs end between two of its operators, and nothing begin any more."""
        self._stopped = True
        self._options.terminate = True

    def run(self, session: Any, outputs: Sequence[str] | None, feed: Mapping[str, Any]) -> Any:
        """Run a session; ``OutOfTime`` if it has to end."""
        self.check()
        try:
            return session.run(outputs, feed, self._options)
        except Exception:  # ONNX Runtime raises several unrelated kinds
            self.check()
            raise

    def half_gone(self) -> bool:
        """Whether half of the time is gone, so that what is only good to have is left out."""
        return monotonic() > self._half_gone_s

    def check(self) -> None:
        """``OutOfTime`` if it was stopped."""
        if self._stopped:
            raise OutOfTime


class BoundedSession:
    """A session whose runs end with an allowance; *session* is the same without."""

    def __init__(self, session: Any, allowance: Allowance) -> None:
        self.session, self._allowance = session, allowance

    def run(self, outputs: Sequence[str] | None, feed: Mapping[str, Any], options: Any = None) -> Any:
        return self._allowance.run(self.session, outputs, feed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)
