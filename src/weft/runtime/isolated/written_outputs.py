"""Outputs that a worker writes into clients' regions, in the messages of a step and of its report.

A step names parts of regions for the outputs of some of its requests. The report says which of these requests have
their outputs there. The rest, and the outputs of a worker that cannot write them, come back with the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from weft.base.errors import BadRequest
from weft.runtime.backend import OutputTarget, Step, Written
from weft.runtime.client_memory import Borrowed, Lender
from weft.runtime.isolated.packets import DATATYPE_OF, Garbled
from weft.runtime.tensors import DATATYPES, Array


def describe_targets(targets: Sequence[OutputTarget], lenders: list[Lender]) -> list[Any]:
    """Describe the targets of a step for the worker; their regions are added to *lenders*.

    For each target: its rows, and output -> number of the region, offset and byte size of the part.
    """
    lenders += [part.lender for target in targets for part in target.parts.values()]
    return [
        (rows, {name: (part.lender.terms.number, part.offset, part.byte_size) for name, part in parts.items()})
        for parts, rows in targets
    ]


def open_targets(described: Sequence[Any], regions: Mapping[int, Borrowed]) -> tuple[OutputTarget, ...]:
    """The targets of a step in a worker, from their descriptions and its open *regions*.

    A target in a region that cannot be used has no parts: the server then reports the reason to that client only.
    """
    targets = []
    for rows, parts in described:
        try:
            opened = {name: regions[number].target(offset, size) for name, (number, offset, size) in parts.items()}
        except BadRequest:
            opened = {}
        targets.append(OutputTarget(opened, rows and tuple(rows)))
    return tuple(targets)


def describe_written(written: Written | None) -> Any:
    """Describe what a step has written for the server: requests, and name, type and shape of each output; or None."""
    if written is None:
        return None
    return written.requests, [(name, DATATYPE_OF[kind], shape) for name, (shape, kind) in written.outputs.items()]


def restore_written(step: Step, described: Any, answers: dict[str, Array], parts: int) -> Written | None:
    """Check what a worker says it has written, and add stand-ins for outputs that only clients have to *answers*.

    A stand-in has the shape and the type of an output, and no memory. ``Garbled`` if a request of the step would get
    one in place of an output that it did not offer a region for. parts: of the batch that the report has outputs for.
    """
    if described is None:
        return None
    try:
        if parts != 1:  # rows of targets are those of the whole batch
            raise ValueError(f"one of {parts} parts")
        requests, outputs = described
        if not all(type(index) is int and 0 <= index < len(step.targets) for index in requests):
            raise ValueError(f"requests {requests!r} of {len(step.targets)}")
        targets, shapes = [step.targets[index] for index in dict.fromkeys(requests)], {}
        for name, kind, shape in outputs:
            rows = sum(rows[1] - rows[0] if rows else step.rows for places, rows in targets if name in places)
            if rows != step.rows or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"{rows} of {step.rows} rows of {name!r}, {shape!r}")
            most_bytes = sum(places[name].byte_size for places, _ in targets if name in places)
            if prod(shape) * np.dtype(DATATYPES[kind]).itemsize > most_bytes:  # stand-ins may be copied later
                raise ValueError(f"{shape!r} of {name!r} in {most_bytes} bytes")
            shapes[name] = tuple(shape), DATATYPES[kind]
            answers[name] = np.broadcast_to(np.zeros((), DATATYPES[kind]), shape)
        return Written(tuple(requests), shapes)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Garbled(f"no written outputs: {error}") from error
