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
_NUMBERED = re.compile(r"(.*?(?:\.|layer|block)_?\d+)(?=[./]|$)")


def body_report(made: BodyStitching, files: Sequence[Path]) -> dict[str, Any]:
    """The numbers, ready for JSON."""
    return {
        "format": 1,
        "kind": "stitched body",
        "version": __version__,
        "models": {name: str(path) for name, path in made.files.items()},
        "files": [str(file) for file in files],
        "largest_difference": made.difference and made.difference.relative,
        "fill": made.fill,
        "weight_bytes": {"sequential": made.apart_bytes, "stitched": made.weight_bytes},
        "measured_s": dict(made.times_s),
        "reordered": made.reordered,
        "steps": [
            {
                "name": each.name,
                "op": each.op,
                "bytes": each.bytes,
                "rank": each.rank,
                "own": list(each.own),
                "shared_by": [[made.names[task] for task in crew] for crew in each.crews],
            }
            for each in made.shared
        ],
    }


def way_rows(made: BodyStitching) -> list[tuple[str, ...]]:
    """One after another, and as one body."""
    rows: list[tuple[str, ...]] = []
    for name, way, size in (
        ("one after another", "sequential", made.apart_bytes),
        ("stitched", "stitched", made.weight_bytes),
    ):
        took, first = made.times_s.get(way), made.times_s.get("sequential")
        times = (f"{took * 1e3:.2f}", f"{first / took:.2f}") if took and first else ("", "")
        rows.append((name, f"{size / 1e6:.3f}", f"{size / made.apart_bytes:.3f}", *times))
    return rows


def step_rows(made: BodyStitching) -> list[tuple[str, ...]]:
    """Every step that has weights, and who shares them."""
    return [
        (each.name, each.op, f"{each.bytes / 1e3:.1f}", str(sum(map(len, each.crews))), _who(made, each), _own(each))
        for each in made.shared
    ]


def body_sentences(made: BodyStitching) -> list[str]:
    """What is shared, what is not, and how exact it is."""
    whole = sum(each.bytes for each in made.shared)
    common = sum(each.bytes for each in made.shared if _who(made, each) == "all")
    own = list(dict.fromkeys(_layer(each.name) for each in made.shared if _who(made, each) != "all"))
    more = f" and {len(own) - _FEW} more (--layers names all steps)" if len(own) > _FEW else ""
    rest = f"; not by all: {', '.join(own[:_FEW])}{more}" if own else ""
    told = [f"sharing: {common / max(whole, 1):.0%} of a model's weights are shared by all{rest}"]
    if near := [each for each in made.shared if each.rank]:
        told.append(
            f"low rank: {len(near)} products are shared but for parts of rank {max(e.rank for e in near)} at most"
        )
    if few := [each for each in made.shared if each.own]:
        told.append(f"few differences: {len(few)} weights are shared but for {_listed(few)} (--layers says where)")
    if made.reordered:
        told.append(f"order: {made.reordered} products are another model's, with heads or channels in another order")
    if made.long and made.fill is None:
        told.append("lengths: no input hides what stands behind, so that all rows of a run must be of one length")
    elif made.long and made.fill is not None:
        filled = ", ".join(f"{name} with {number:g}" for name, number in made.fill.items())
        told.append(f"lengths: any in one run; shorter rows are filled, {filled}")
    if any(made.body.exits):
        having = ", ".join(name for name, exits in zip(made.names, made.body.exits, strict=True) if exits)
        told.append(f"exits: {having} answer with the first exit that is sure, but all rows go to the end of the body")
    if made.difference is not None:
        told.append(f"largest difference to the models: {made.difference.relative:.1e} of an output's largest number")
    return told


def _layer(name: str) -> str:
    """The layer of a step, by the first number in its name, else the part of the model that it belongs to."""
    if found := _NUMBERED.match(name):
        return found[1]
    return name.rpartition("/")[0] if name.startswith("/") else name


def _listed(steps: Sequence[SharedStep]) -> str:
    """The kinds of what is a model's own."""
    return ", ".join(sorted({said.split()[-1] for each in steps for said in each.own}))


def _own(step: SharedStep) -> str:
    """What models have beside the weights that they share."""
    return ", ".join(([f"rank {step.rank}"] if step.rank else []) + list(step.own))


def _who(made: BodyStitching, step: SharedStep) -> str:
    """Those who share a step's weights, in words."""
    if step.crews == (tuple(range(len(made.names))),):
        return "all"
    shared = [crew for crew in step.crews if len(crew) > 1]
    return "; ".join(", ".join(made.names[task] for task in crew) for crew in shared) or "none"
