"""T models of one structure, side by side: ``Family``. Made by ``alignment``, read by everything after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft_stitch.net import Net, Op, Port, Value


@dataclass(frozen=True, eq=False)
class FamilyLayer:
    """One operation that every model has; *op* is task 0's, and values go by task 0's names."""

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    output: str

    @property
    def op(self) -> Op:
        return self.ops[0]

    @property
    def name(self) -> str:
        return self.op.name


@dataclass(frozen=True, eq=False)
class Family:
    """What the models have in common, in order, and what each of them does alone after it."""

    nets: tuple[Net, ...]
    layers: tuple[FamilyLayer, ...]
    values: Mapping[str, tuple[Value, ...]]
    """For each value (task 0's name) its size in every task; heights and widths agree."""
    inputs: tuple[str, ...]
    """The values that the ports of the nets' inputs stand for, in the order of the ports."""
    outputs: Mapping[str, tuple[Port, ...]]
    """Values that are an output of every net, with each net's port."""
    tails: tuple[tuple[Op, ...], ...] = ()
    """Per task, the operations that have no counterpart in the others; they read values under the task's own names."""
    bridges: tuple[Mapping[str, str], ...] = ()
    """Per task, the family's values its tail reads: the task's own name to the family's."""

    @property
    def tasks(self) -> int:
        return len(self.nets)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(net.batch for net in self.nets)
