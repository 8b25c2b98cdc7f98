"""What a net cannot express, kept as a piece of the exported torch graph: ``TorchIsland``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import StitchError
from weft_stitch.net import Value

try:
    from torch.fx.node import map_arg
except ImportError as error:
    raise StitchError("reading a torch model needs torch: pip install 'weft[torch]'") from error

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class TorchIsland:
    """Calls that make one value from others; runs only in torch."""

    nodes: tuple[Any, ...]
    """Nodes of a torch.fx graph, in order."""
    constants: Mapping[str, Any]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    """The nodes it reads with their shapes without rows."""
    output: str
    value: Value
    signature: str

    def run(self, *tensors: Any) -> Any:
        """Run the part on tensors [rows, C, H, W]; what comes out has this shape too."""
        first = tensors[0]
        known = {
            name: tensor.reshape(tensor.shape[0], *view)
            for (name, view), tensor in zip(self.inputs, tensors, strict=True)
        }
        for name, constant in self.constants.items():
            known[name] = constant.to(first.device, first.dtype if constant.is_floating_point() else None)
        for node in self.nodes:
            known[node.name] = call(node, known)
        return known[self.output].reshape(first.shape[0], self.value.channels, self.value.height, self.value.width)


def call(node: Any, known: Mapping[str, Any]) -> Any:
    """What *node* makes of what is *known*; nothing known is written over."""
    args = map_arg(node.args, lambda each: known[each.name])
    kwargs = map_arg(node.kwargs, lambda each: known[each.name])
    if writes_in_place(node):
        args = (args[0].clone(), *args[1:])
    return node.target(*args, **kwargs)


def writes_in_place(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def signature(nodes: Sequence[Any]) -> str:
    """Operators and their settings, so that islands that do the same have the same."""
    spelled = [f"{node.target} {map_arg((node.args, dict(node.kwargs)), lambda each: '_')}" for node in nodes]
    if len(nodes) == 1:
        return f"{nodes[0].target} {hashlib.sha256(spelled[0].encode()).hexdigest()[:8]}"
    shown = "+".join(str(node.target) for node in nodes[:_SHOWN]) + ("..." if len(nodes) > _SHOWN else "")
    return f"{shown} {hashlib.sha256(' '.join(spelled).encode()).hexdigest()[:8]}"
