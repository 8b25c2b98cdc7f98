"""Defaults of the backend protocol: base classes with the members that a simple backend has no use for.

A backend need not inherit from them, but should: members that later versions add to the protocol
(``weft.runtime.backend``) get their defaults here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from weft.base.errors import BadRequest
from weft.runtime.backend import StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.client_memory import Lender
from weft.runtime.engines import ONNXRUNTIME, Engine
from weft.runtime.facets import Batching, ModelExits, ModelResidency, ModelShares, ModelTasks
from weft.runtime.isolated.limits import WorkerCounts

_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


class BackendDefaults:
    """A backend whose lanes are threads of this process, on the cores."""

    inline = False
    memory_bytes: int | None = None
    device: str | None = None
    labels: tuple[str, ...] = ()
    isolates = False
    grain_s: float | None = None
    region_devices: frozenset[int] = frozenset()
    default_engine: Engine = ONNXRUNTIME

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def used_bytes(self) -> Mapping[str, int]:
        return _NO_COUNTS

    @property
    def returns(self) -> Mapping[str, int]:
        return _NO_COUNTS

    def counts(self) -> WorkerCounts:
        return WorkerCounts(0, 0)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        raise BadRequest("models run on processors here, which have no memory of their own")


class LaneDefaults:
    """A lane that queues no steps and whose outputs all lanes can read."""

    ahead, apart = 0, False

    @property
    def able(self) -> bool:
        return True

    def give_way(self) -> None:
        """Do nothing: the priority of the running step stays."""


class StepDefaults:
    """A step that was started; the next step of its batch has to wait for its end."""

    onward: Sequence[StepOutput] | None = None
    error: Exception | None = None

    def stop(self) -> None:
        """Do nothing: the step runs to its end."""


class ModelDefaults:
    """A model that is not batched and has no facet: it has no early exits, and stays where it was loaded.

    A subclass sets ``inputs``, ``outputs``, ``segments`` and ``timing``.
    """

    batching = Batching()
    remarks: tuple[str, ...] = ()
    borrows = False
    exits: ModelExits | None = None
    shares: ModelShares | None = None
    tasks: ModelTasks | None = None
    residency: ModelResidency | None = None
    breaker: Breaker | None = None

    def prepare(self, rows: int) -> None:
        """Do nothing: the first batch of a size needs no preparation."""
