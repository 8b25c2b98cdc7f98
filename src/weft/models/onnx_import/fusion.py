"""Folding what follows a multiplication into it: norms, biases, activations, spelled out or not.

A convolution or weighted product grows by the elementwise layers that read nothing but it (and
constants). It may stop growing wherever nobody outside looks at what lies inside, so a swish written
as Sigmoid and Mul, or a GELU written as six operators, folds as a whole or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from weft.models.onnx_import.drafts import LayerDraft
from weft.models.onnx_import.ops import ACTIVATIONS, ARITHMETIC
from weft.models.onnx_import.tensors import Tensor

_FOLLOWERS = ACTIVATIONS | ARITHMETIC | {"BatchNormalization"}
_LONGEST = 16


def fuse(drafts: Sequence[LayerDraft], outputs: Collection[Tensor]) -> list[LayerDraft]:
    """*drafts* with followers folded in; *outputs* are the tensors the graph hands out."""
    readers: dict[int, list[int]] = defaultdict(list)
    for place, each in enumerate(drafts):
        for tensor in each.reads:
            readers[id(tensor)].append(place)
    exposed = {id(tensor.root) for tensor in outputs}
    absorbed: set[int] = set()
    fused: dict[int, LayerDraft] = {}
    for place, each in enumerate(drafts):
        if place in absorbed or not _anchors(each):
            continue
        group = _group(drafts, place, readers, exposed)
        absorbed.update(group)
        # The last member's place: by then everything that any member reads has been computed.
        fused[group[-1]] = _merged([drafts[member] for member in group])
    return [fused.get(place, each) for place, each in enumerate(drafts) if place not in absorbed or place in fused]


def _anchors(draft: LayerDraft) -> bool:
    return draft.layer.kind in ("conv", "gemm") and len(draft.writes) == 1 and not draft.sealed


def _group(drafts: Sequence[LayerDraft], anchor: int, readers: dict[int, list[int]], exposed: set[int]) -> list[int]:
    """The places of the longest closed run of followers, the anchor first."""
    members, best = [anchor], 1
    inside = {id(drafts[anchor].writes[0])}
    elements = drafts[anchor].layer.output_elements
    while len(members) < _LONGEST:
        if exposed & inside:
            break
        nexts = sorted({place for tensor in inside for place in readers[tensor]} - set(members))
        follower = next((place for place in nexts if _follows(drafts[place], inside, elements)), None)
        if follower is None:
            break
        members.append(follower)
        inside.add(id(drafts[follower].writes[0]))
        hidden = inside - {id(drafts[follower].writes[0])}
        if all(set(readers[tensor]) <= set(members) for tensor in hidden):
            best = len(members)
    return members[:best]


def _follows(draft: LayerDraft, inside: Collection[int], elements: int) -> bool:
    """Whether a layer reads only the group; a lone value beside it, such as a scale, does not count."""
    return (
        draft.layer.op in _FOLLOWERS
        and not draft.sealed
        and len(draft.writes) == 1
        and draft.layer.output_elements == elements
        and all(id(tensor) in inside or tensor.elements == 1 for tensor in draft.reads)
    )


def _merged(group: Sequence[LayerDraft]) -> LayerDraft:
    first, last = group[0], group[-1]
    inside = {id(each.writes[0]) for each in group}
    outside = {id(tensor): tensor for each in group for tensor in each.reads if id(tensor) not in inside}
    return replace(
        first,
        layer=replace(
            first.layer,
            op="+".join(each.layer.op for each in group),
            output_elements=last.layer.output_elements,
            nodes=tuple(node for each in group for node in each.layer.nodes),
        ),
        reads=tuple(outside.values()),
        writes=last.writes,
        stored=tuple(dict.fromkeys(s for each in group for s in each.stored)),
    )
