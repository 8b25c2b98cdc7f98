"""Models as one body on paper: ``body_report`` for JSON, tables and sentences for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.base.version import __version__
from weft_stitch.bodies.body_stitching import BodyStitching, SharedStep

WAYS = ("", "weights MB", "of separate", "measured ms", "speed-up")
STEPS = ("step", "operator", "kB", "models", "shared by", "own")
_FEW = 8
"""Layers that a sentence names; more would fill the terminal, and ``--layers`` has all."""
_NUMBERED = re.compile(r"(.*?(?:\.|layer|block)_?\d+)(?=[./]|$)")


def body_report(stitching: BodyStitching, files: Sequence[Path]) -> dict[str, Any]:
    """The numbers, ready for JSON."""
    return {
        "format": 1,
        "kind": "stitched body",
        "version": __version__,
        "models": {name: str(path) for name, path in stitching.files.items()},
        "files": [str(file) for file in files],
        "largest_difference": stitching.difference and stitching.difference.relative,
        "fill": stitching.fill,
        "weight_bytes": {"sequential": stitching.apart_bytes, "stitched": stitching.weight_bytes},
        "measured_s": dict(stitching.times_s),
        "reordered": stitching.reordered,
        "steps": [
            {
                "name": step.name,
                "op": step.op,
                "bytes": step.bytes,
                "rank": step.rank,
                "own": list(step.own),
                "shared_by": [[stitching.names[task] for task in crew] for crew in step.crews],
            }
            for step in stitching.shared
        ],
    }


def way_rows(stitching: BodyStitching) -> list[tuple[str, ...]]:
    """One after another, and as one body."""
    rows: list[tuple[str, ...]] = []
    for name, way, size in (
        ("one after another", "sequential", stitching.apart_bytes),
        ("stitched", "stitched", stitching.weight_bytes),
    ):
        took, first = stitching.times_s.get(way), stitching.times_s.get("sequential")
        times = (f"{took * 1e3:.2f}", f"{first / took:.2f}") if took and first else ("", "")
        rows.append((name, f"{size / 1e6:.3f}", f"{size / stitching.apart_bytes:.3f}", *times))
    return rows


def step_rows(stitching: BodyStitching) -> list[tuple[str, ...]]:
    """Every step that has weights, with the models that share them."""
    return [
        (step.name, step.op, f"{step.bytes / 1e3:.1f}", str(sum(map(len, step.crews))), shared_by, _own(step))
        for step in stitching.shared
        for shared_by in [_sharers(stitching, step)]
    ]


def body_sentences(stitching: BodyStitching) -> list[str]:
    """What is shared, what is not, and how exact it is."""
    whole = sum(step.bytes for step in stitching.shared)
    common = sum(step.bytes for step in stitching.shared if _sharers(stitching, step) == "all")
    own = list(dict.fromkeys(_layer(step.name) for step in stitching.shared if _sharers(stitching, step) != "all"))
    more = f" and {len(own) - _FEW} more (--layers names all steps)" if len(own) > _FEW else ""
    rest = f"; not by all: {', '.join(own[:_FEW])}{more}" if own else ""
    lines = [f"sharing: {common / max(whole, 1):.0%} of a model's weights are shared by all{rest}"]
    if near := [step for step in stitching.shared if step.rank]:
        lines.append(
            f"low rank: {len(near)} products are shared but for parts of rank {max(e.rank for e in near)} at most"
        )
    if few := [step for step in stitching.shared if step.own]:
        lines.append(f"few differences: {len(few)} weights are shared but for {_listed(few)} (--layers says where)")
    if stitching.reordered:
        lines.append(
            f"order: {stitching.reordered} products are another model's, with heads or channels in another order"
        )
    if stitching.long and stitching.fill is None:
        lines.append("lengths: no input hides what stands behind, so that all rows of a run must be of one length")
    elif stitching.long and stitching.fill is not None:
        filled = ", ".join(f"{name} with {number:g}" for name, number in stitching.fill.items())
        lines.append(f"lengths: any in one run; shorter rows are filled, {filled}")
    if any(stitching.body.exits):
        having = ", ".join(name for name, exits in zip(stitching.names, stitching.body.exits, strict=True) if exits)
        lines.append(f"exits: {having} answer with the first exit that is sure, but all rows go to the end of the body")
    if stitching.difference is not None:
        lines.append(
            f"largest difference to the models: {stitching.difference.relative:.1e} of an output's largest number"
        )
    return lines


def _layer(name: str) -> str:
    """The layer of a step, by the first number in its name, else the part of the model that it belongs to."""
    if match := _NUMBERED.match(name):
        return match[1]
    return name.rpartition("/")[0] if name.startswith("/") else name


def _listed(steps: Sequence[SharedStep]) -> str:
    """The kinds of what is a model's own."""
    return ", ".join(sorted({said.split()[-1] for step in steps for said in step.own}))


def _own(step: SharedStep) -> str:
    """The differences of models to the shared weights, in words."""
    return ", ".join(([f"rank {step.rank}"] if step.rank else []) + list(step.own))


def _sharers(stitching: BodyStitching, step: SharedStep) -> str:
    """The models that share a step's weights, in words."""
    if step.crews == (tuple(range(len(stitching.names))),):
        return "all"
    shared = [crew for crew in step.crews if len(crew) > 1]
    return "; ".join(", ".join(stitching.names[task] for task in crew) for crew in shared) or "none"
