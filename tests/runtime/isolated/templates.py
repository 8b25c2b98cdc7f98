"""One process that workers of many backends are forked from: to start one for each takes longer than most tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft.runtime.isolated.spawning import Child, Template


class LastingTemplate(Template):
    """A template that stays when a backend closes it, until its ``end``; so does the thread of its own that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, "template")
        self._thread.submit(int).result()

    def _fork(self, *asked: Any) -> Child:
        return self._thread.submit(super()._fork, *asked).result()

    def close(self) -> None:
        """Others need it."""

    def end(self) -> None:
        self._thread.submit(super().close).result()
        self._thread.shutdown()
