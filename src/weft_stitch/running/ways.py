"""Ways to run many models in torch: ``RivalWay``, what it calls, and ``Place``, where its modules are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.base.errors import StitchError
from weft_stitch.graph import Graph
from weft_stitch.running.module import StitchedModule
from weft_stitch.running.operators import Tensor, torch

UNCAPTURED = ("eager", "grouped-eager")
"""The ways that launch every operation anew; the others are replayed as one CUDA graph."""
LOAD_BYTES = 16
"""What one load of the fused kernel takes."""

Outputs = tuple[Tensor, ...]
Call = Callable[..., Outputs]


class Place(NamedTuple):
    """Where modules lie, what they compute in, and how pictures lie there."""

    device: str
    dtype: Any
    channels_last: bool = False

    @property
    def align(self) -> int:
        """How many numbers a load takes, for ``lower`` in the form ``fused``."""
        return LOAD_BYTES // int(self.dtype.itemsize)

    def module(self, graph: Graph) -> StitchedModule:
        return StitchedModule(graph, device=self.device, dtype=self.dtype, channels_last=self.channels_last)

    def tensor(self, tensor: Tensor) -> Tensor:
        """*tensor* as an input for modules here."""
        spatial = self.channels_last and tensor.dim() == 4
        here = tensor.to(device=self.device, dtype=self.dtype)
        return here.contiguous(memory_format=torch.channels_last) if spatial else here


@dataclass(frozen=True, eq=False)
class RivalWay:
    """Something that runs all tasks: ``call`` of ``inputs``, which stay where they are."""

    name: str
    call: Call
    inputs: tuple[Tensor, ...]
    weight_bytes: int
    """Kernels alone, as they lie on the device."""
    launches: int | None
    """Steps that are not views; None where a compiler decides."""

    @property
    def captured(self) -> bool:
        return self.name not in UNCAPTURED

    def run(self) -> Outputs:
        with torch.no_grad():
            return self.call(*self.inputs)


class Forked:
    """Each model in a CUDA stream of its own; all of them start together, and the caller's stream waits for all."""

    def __init__(self, modules: Sequence[StitchedModule]) -> None:
        if not torch.cuda.is_available():
            raise StitchError("streams need a CUDA device, and there is none; leave out the way 'streams'")
        self.modules = tuple(modules)
        self.streams = [torch.cuda.Stream() for _ in modules]
        self.branch_bytes = 0
        """What the branches of the last call needed, together: they run at the same time."""

    def __call__(self, *inputs: Tensor) -> Outputs:
        caller = torch.cuda.current_stream()
        started = caller.record_event()
        for stream in self.streams:
            stream.wait_event(started)
        self.branch_bytes = 0
        found = []
        for module, stream, given in zip(self.modules, self.streams, inputs, strict=True):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.cuda.stream(stream):
                found.append(module(given)[0])
            self.branch_bytes += torch.cuda.max_memory_allocated() - before
        for stream in self.streams:
            caller.wait_stream(stream)
        return tuple(found)
