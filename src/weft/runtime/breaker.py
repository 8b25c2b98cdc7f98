"""A circuit breaker: a model whose process dies too often is left alone for a while, and then tried with one request.

It opens when there were too many deaths within some seconds, or as many in a row without a step that ended well; the
second finds models that take so long to come back that the first never would. After a rest one request is let
through: if it ends well all are, if its process dies the rest doubles.
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
class Endurance:
    """How many deaths are too many."""

    deaths: int = 5
    """More than so many open it."""
    within_s: float = 8.0
    rest_s: float = 10.0
    """How long it is open the first time."""
    longest_rest_s: float = 300.0


class Breaker:
    """The breaker of one model; any thread may tell it, and *now* is its clock, in nanoseconds."""

    def __init__(self, endurance: Endurance, now: Callable[[], int]) -> None:
        self.endurance, self._now = endurance, now
        self._lock = threading.Lock()
        self._deaths: deque[int] = deque(maxlen=endurance.deaths + 1)
        self._in_a_row = 0
        self._rest_ns = 0
        self._until = 0
        """When the next try may be made; 0: it is closed."""
        self._trying = False
        self.opened = 0
        """How often."""

    def died(self) -> None:
        """What ran the model died, and the model may have been why."""
        with self._lock:
            now = self._now()
            self._deaths.append(now)
            self._in_a_row += 1
            if self._until and not self._trying:
                return  # what was under way when it opened
            many = len(self._deaths) > self.endurance.deaths
            if (
                self._trying
                or self._in_a_row > self.endurance.deaths
                or (many and now - self._deaths[0] <= self._window)
            ):
                self._open(now)

    def lived(self) -> None:
        """A step ended well."""
        if self._in_a_row or self._trying:
            with self._lock:
                self._in_a_row = 0
                if self._trying:
                    self._trying, self._until, self._rest_ns = False, 0, 0
                    self._deaths.clear()

    def answered(self) -> None:
        """A step ended with an error, and what ran it goes on: no trial has to tell more."""
        if self._trying:
            self.lived()

    def admit(self) -> None:
        """Let a request in, or raise why not; when the rest is over, one at a time is tried."""
        self.check()
        self.enter()

    def check(self) -> None:
        """Raise why no request is let in."""
        if self._until:
            with self._lock:
                now = self._now()
                if now < self._until:
                    raise self._refusal(now)

    def enter(self) -> None:
        """A request was let in; when the rest is over, it is the one that is tried."""
        if self._until:
            with self._lock:
                now = self._now()
                if self._until and now >= self._until:
                    self._trying, self._until = True, now + self._rest_ns

    def refuse(self) -> NoReturn:
        """Raise why a request that was let in before is not computed."""
        with self._lock:
            raise self._refusal(self._now())

    @property
    def state(self) -> State:
        return "closed" if not self._until else "trying" if self._trying else "open"

    @property
    def why(self) -> str:
        """Why requests are refused; nothing where they are not."""
        with self._lock:
            return self._text(self._now()) if self._until else ""

    @property
    def _window(self) -> int:
        return round(self.endurance.within_s * 1e9)

    def _open(self, now: int) -> None:
        self.opened += 1
        longest = round(self.endurance.longest_rest_s * 1e9)
        self._rest_ns = min(2 * self._rest_ns, longest) if self._rest_ns else round(self.endurance.rest_s * 1e9)
        self._until, self._trying = now + self._rest_ns, False

    def _refusal(self, now: int) -> Overloaded:
        rest_s = max(0.0, (self._until - now) / 1e9)
        return Overloaded(self._text(now), reason="breaker", retry_after_s=rest_s)

    def _text(self, now: int) -> str:
        rest_s = max(0.0, (self._until - now) / 1e9)
        return f"its worker died {self._in_a_row or len(self._deaths)} times; it is tried again in {rest_s:.1f} s"
