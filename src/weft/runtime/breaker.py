"""A circuit breaker: requests for a model whose process dies too often are refused for a while, then one is tried.

It opens after too many deaths within some seconds, or after as many in a row without a successful step; the second
condition covers models that restart too slowly to meet the first. After a pause one request is let through (the trial):
if it succeeds the breaker closes, if its process dies the pause doubles.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from weft.base.errors import Overloaded

State = Literal["closed", "trying", "open"]


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    deaths: int = 5  # it opens after more deaths than this within ``within_s``, or in a row
    within_s: float = 8.0
    pause_s: float = 10.0
    """The first pause; each failed trial doubles it, up to ``longest_pause_s``."""
    longest_pause_s: float = 300.0


class Breaker:
    """The breaker of one model; its methods may be called on any thread. *now*: its clock, in nanoseconds."""

    def __init__(self, limits: BreakerLimits, now: Callable[[], int]) -> None:
        self.limits, self._now = limits, now
        # Protects all fields below. Readers test ``_until``, ``_in_a_row`` and ``_trying`` without it first: the common
        # case, a closed breaker, must cost nothing per request.
        self._lock = threading.Lock()
        self._deaths: deque[int] = deque(maxlen=limits.deaths + 1)  # when the process died, the latest deaths only
        self._in_a_row = 0  # deaths since the last successful step
        self._pause_ns = 0  # length of the current or last pause; 0 after a successful trial
        self._until = 0  # end of the pause, when the next request is tried; 0: the breaker is closed
        self._trying = False  # whether a trial is under way
        self.opened = 0
        """How often it opened."""

    def died(self) -> None:
        """Count a death of the process that ran the model."""
        with self._lock:
            now = self._now()
            self._deaths.append(now)
            self._in_a_row += 1
            if self._until and not self._trying:
                return  # steps that were running when it opened do not prolong the pause
            too_many = len(self._deaths) > self.limits.deaths
            too_fast = too_many and now - self._deaths[0] <= round(self.limits.within_s * 1e9)
            if self._trying or self._in_a_row > self.limits.deaths or too_fast:
                self._open(now)

    def succeeded(self) -> None:
        """Count a successful step; it closes the breaker after a trial."""
        if self._in_a_row or self._trying:
            with self._lock:
                self._in_a_row = 0
                if self._trying:
                    self._trying, self._until, self._pause_ns = False, 0, 0
                    self._deaths.clear()

    def failed_without_death(self) -> None:
        """Count a step that ended with an error while the process lives on: a trial counts as successful then."""
        if self._trying:
            self.succeeded()

    def admit(self) -> None:
        """Admit a request, or raise ``Overloaded``; after the pause, one request is admitted as the trial."""
        self.check()
        self.enter()

    def check(self) -> None:
        """Raise ``Overloaded`` during a pause."""
        if self._until:
            with self._lock:
                now = self._now()
                if now < self._until:
                    raise self._refusal(now)

    def enter(self) -> None:
        """Record that a request was admitted; after the pause, that request is the trial."""
        if self._until:
            with self._lock:
                now = self._now()
                if self._until and now >= self._until:
                    # A trial that never ends counts for one more pause; then another request is tried.
                    self._trying, self._until = True, now + self._pause_ns

    def refuse(self) -> NoReturn:
        """Raise ``Overloaded`` for a request that was admitted earlier and will not be computed."""
        with self._lock:
            raise self._refusal(self._now())

    @property
    def state(self) -> State:
        return "closed" if not self._until else "trying" if self._trying else "open"

    @property
    def why(self) -> str:
        """Why requests are refused; empty if they are not."""
        with self._lock:
            return self._message(self._now()) if self._until else ""

    def _open(self, now: int) -> None:
        """Begin a pause at *now*, twice as long as the last; the caller holds the lock."""
        self.opened += 1
        longest = round(self.limits.longest_pause_s * 1e9)
        self._pause_ns = min(2 * self._pause_ns, longest) if self._pause_ns else round(self.limits.pause_s * 1e9)
        self._until, self._trying = now + self._pause_ns, False

    def _refusal(self, now: int) -> Overloaded:
        pause_s = max(0.0, (self._until - now) / 1e9)
        return Overloaded(self._message(now), reason="breaker", retry_after_s=pause_s)

    def _message(self, now: int) -> str:
        pause_s = max(0.0, (self._until - now) / 1e9)
        return f"its worker died {self._in_a_row or len(self._deaths)} times; it is tried again in {pause_s:.1f} s"
