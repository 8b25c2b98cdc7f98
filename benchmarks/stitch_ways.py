"""The methods to run many models in torch, stitched and not: ``WAYS`` by name, ``draw`` their graphs, ``make`` them.

The rivals of stitching: the models one after another, each in a stream of its own, as one grouped convolution for each
layer (NetFuse), under ``vmap`` or ``torch.compile``; and, as the limit that no form can pass, a plain batch of the same
number of images through one of the models. Normalisations are folded wherever a model runs alone.
``weft_stitch.running.gpu_timing`` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.base.errors import StitchError, unknown_name
from weft_stitch.cost import count
from weft_stitch.family import ChannelSpace, Family, Sharing, part
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import lower
from weft_stitch.running.gpu_timing import Call, Outputs, RivalWay, precision
from weft_stitch.running.module import StitchedModule
from weft_stitch.running.operators import Tensor, torch

SEPARATE, GROUPED, BATCH = "separate", "grouped", "batch"
WAYS: Mapping[str, str] = {
    "eager": SEPARATE, "sequential": SEPARATE, "streams": SEPARATE, "vmap": SEPARATE, "compile": SEPARATE,
    "grouped-eager": GROUPED, "grouped": GROUPED, "mts": "mts", "split": "split", "fused": "fused", "batch": BATCH,
}  # fmt: skip
"""Every way with the graphs it runs, see ``draw``."""
COMPILED = ("vmap", "compile")
COUNTED_BYTES = 4
"""Bytes of a number in a graph."""


def draw(source: str, family: Family, sharing: Sharing, align: int = 1) -> tuple[Graph, ...]:
    """The graphs of the ways of one *source* (see ``WAYS``)."""
    if source == SEPARATE:
        return tuple(plain_graph(net) for net in family.nets)
    if source == BATCH:
        return (plain_graph(replace(family.nets[0], batch=sum(family.batches))),)
    if source == GROUPED:
        return tuple(_grouped(family, sharing, tasks) for tasks in by_batch(family.batches))
    return (lower(family, sharing, source, align=align),)


def by_batch(batches: Sequence[int]) -> list[list[int]]:
    """The tasks of each batch: a grouped convolution has the same rows in all its groups."""
    return [[task for task, rows in enumerate(batches) if rows == batch] for batch in sorted(set(batches))]


def _grouped(family: Family, sharing: Sharing, tasks: Sequence[int]) -> Graph:
    """Shared channels do not matter to it: each task keeps its own order."""
    unshared = Sharing({name: ChannelSpace.completed(space.widths) for name, space in sharing.spaces.items()})
    return lower(*part(family, unshared, tasks), GROUPED)


def make(
    name: str, graphs: Sequence[Graph], modules: Sequence[StitchedModule], inputs: Sequence[Tensor], **options: Any
) -> RivalWay:
    """The way *name* over *modules*, which run *graphs*; *inputs* has each task's. *options* are of ``compiled``."""
    if name not in WAYS:
        raise StitchError(unknown_name("way", name, WAYS))
    given = tuple(inputs)
    source = WAYS[name]
    counts = [count(graph) for graph in graphs]
    size = max(buffer.element_size() for module in modules for buffer in module.buffers() if buffer.is_floating_point())
    weight_bytes = sum(count.weight_bytes for count in counts) * size // COUNTED_BYTES
    launches = None if name in COMPILED else sum(count.launches for count in counts)
    if source == BATCH:
        return RivalWay(name, modules[0], (torch.cat(given),), weight_bytes, launches)
    if name in COMPILED:
        call = (vmapped if name == "vmap" else looped)(modules, given, **options)
    elif name == "streams":
        call = Forked(modules)
    elif source == SEPARATE:
        call = one_by_one(modules)
    elif source == GROUPED:
        call = in_turn(modules, by_batch([len(rows) for rows in given]))
    else:
        call = modules[0]
    return RivalWay(name, call, given, weight_bytes, launches)


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
        outputs = []
        for module, stream, given in zip(self.modules, self.streams, inputs, strict=True):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.cuda.stream(stream):
                outputs.append(module(given)[0])
            self.branch_bytes += torch.cuda.max_memory_allocated() - before
        for stream in self.streams:
            caller.wait_stream(stream)
        return tuple(outputs)


def one_by_one(modules: Sequence[StitchedModule]) -> Call:
    """Each model after the other."""
    return lambda *inputs: tuple(module(given)[0] for module, given in zip(modules, inputs, strict=True))


def in_turn(modules: Sequence[StitchedModule], groups: Sequence[Sequence[int]]) -> Call:
    """Groups of tasks, each one graph, one after the other; outputs come in the order of the tasks."""

    def run(*inputs: Tensor) -> Outputs:
        results: dict[int, Tensor] = {}
        for module, tasks in zip(modules, groups, strict=True):
            results.update(zip(tasks, module(*(inputs[task] for task in tasks)), strict=True))
        return tuple(results[task] for task in range(len(inputs)))

    return run


def vmapped(modules: Sequence[StitchedModule], inputs: Sequence[Tensor], **options: Any) -> Call:
    """One model over the stacked weights of all, compiled; they must be equal but for the weights."""
    shapes = [{name: buffer.shape for name, buffer in module.named_buffers()} for module in modules]
    if any(shape != shapes[0] for shape in shapes) or len({given.shape for given in inputs}) > 1:
        raise StitchError("vmap needs models and batches of the same sizes, and these differ; use another way")
    # vmap has no channels last: the model it maps is one without
    first = next(modules[0].buffers())
    base = StitchedModule(modules[0].graph, device=first.device, dtype=_float_type(modules[0]))
    _, stacked = torch.func.stack_module_state(list(modules))

    def one(weights: Mapping[str, Tensor], given: Tensor) -> Tensor:
        return torch.func.functional_call(base, weights, (given,))[0]

    def every(*tensors: Tensor) -> Outputs:
        weights = dict(zip(stacked, tensors, strict=False))
        return tuple(torch.func.vmap(one)(weights, torch.stack(tensors[len(stacked) :])).unbind())

    return compiled(every, list(stacked.values()), inputs, **options)


def looped(modules: Sequence[StitchedModule], inputs: Sequence[Tensor], **options: Any) -> Call:
    """The models one after another in one compiled function."""
    names = [(number, name) for number, module in enumerate(modules) for name, _ in module.named_buffers()]
    weights = [tensor for module in modules for tensor in module.buffers()]

    def every(*tensors: Tensor) -> Outputs:
        mine: list[dict[str, Tensor]] = [{} for _ in modules]
        for (number, name), tensor in zip(names, tensors, strict=False):
            mine[number][name] = tensor
        given = zip(modules, mine, tensors[len(names) :], strict=True)
        return tuple(torch.func.functional_call(module, state, (images,))[0] for module, state, images in given)

    return compiled(every, weights, inputs, **options)


def compiled(function: Call, weights: Sequence[Tensor], inputs: Sequence[Tensor], *, backend: str = "inductor") -> Call:
    """*function* of weights and inputs traced to plain operators, and those given to torch.compile."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        traced = make_fx(function)(*weights, *inputs)
    fast = torch.compile(traced, backend=backend, dynamic=False, fullgraph=True)
    return lambda *given: tuple(fast(*weights, *given))


def _float_type(module: StitchedModule) -> Any:
    return next(buffer.dtype for buffer in module.buffers() if buffer.is_floating_point())


def error(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of any task's outputs, over the largest of what they should be."""
    pairs = [(got.float().cpu(), want.float().cpu()) for got, want in zip(outputs, wanted, strict=True)]
    return max(_largest(got - want) / _largest(want) for got, want in pairs)


def _largest(tensor: Tensor) -> float:
    """What is not a number is larger than any."""
    return float(tensor.abs().nan_to_num(nan=float("inf")).max())


def reference(graph: Graph, given: Tensor, device: Any) -> Tensor:
    """What a model alone answers in float32, without TF32."""
    with precision(tf32=False, search=False), torch.no_grad():
        return StitchedModule(graph, device=device)(given.to(device))[0].cpu()
