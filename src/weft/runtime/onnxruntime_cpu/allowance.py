"""Timeout of learning (``learn_s``): at its end, trial runs (with generated inputs) are stopped, and no more begin."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

import onnxruntime as ort


class OutOfTime(BaseException):
    """The time limit is over. Not an ``Exception``, as the code of trial runs takes those for faults of the model."""


class Allowance:
    """Time limit in seconds (None: none) for the trial runs of one model; any thread may end it early (``stop``)."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._options = ort.RunOptions()
        self._stopped = False
        self._timer = None if limit_s is None else threading.Timer(limit_s, self.stop)
        self._half_s, self._half_used_at_s = (limit_s or 0.0) / 2, inf  # the second: on the monotonic clock

    def __enter__(self) -> Allowance:
        if self._timer:
            self._half_used_at_s = monotonic() + self._half_s
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer.join()  # no thread outlives the preparation

    def stop(self) -> None:
        """Stop the running session between two operators, and refuse further runs."""
        self._stopped = True
        self._options.terminate = True

    def run(self, session: Any, outputs: Sequence[str] | None, feed: Mapping[str, Any]) -> Any:
        """Run a session; ``OutOfTime`` if it was stopped."""
        self.check()
        try:
            return session.run(outputs, feed, self._options)
        except Exception:  # ONNX Runtime raises several kinds; if the run was stopped, that is the cause
            self.check()
            raise

    def is_half_used(self) -> bool:
        """Whether half of the time is over, so that optional measurements are left out."""
        return monotonic() > self._half_used_at_s

    def check(self) -> None:
        """Raise ``OutOfTime`` if the time limit is over or ``stop`` was called."""
        if self._stopped:
            raise OutOfTime


class BoundedSession:
    """An ONNX Runtime session whose runs are stopped when an allowance ends; *session* is the session itself."""

    def __init__(self, session: Any, allowance: Allowance) -> None:
        self.session, self._allowance = session, allowance

    def run(self, outputs: Sequence[str] | None, feed: Mapping[str, Any], options: Any = None) -> Any:
        return self._allowance.run(self.session, outputs, feed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)
