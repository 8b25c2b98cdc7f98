"""Answers of ONNX Runtime in float32 on the CPU, with which a compiled model's are compared whenever it is opened.

The compiler process computes them once, so that opening a model takes neither time nor cores for them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.base.errors import ModelError, reason_of
from weft.runtime.cuda.packages import REFERENCE, CompileJob
from weft.runtime.cuda.pieces import random_batch, unseen
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.onnxruntime_cpu.sessions import open_model, specs
from weft.runtime.tensors import Array

Arrays = dict[str, Array]
INPUT, OUTPUT = "in", "out"


def store(job: CompileJob, folder: Path, threads: int) -> None:
    """Compute the answers for one row and for the largest batch, and store them with their inputs in *folder*."""
    if (folder / REFERENCE).exists():  # from an earlier stage
        return
    session = open_model(job.model, threads)
    inputs, outputs = specs(session.get_inputs()), specs(session.get_outputs())
    blueprint = Blueprint(
        inputs=inputs, outputs=outputs, segments=(), warm_shapes=dict(job.shapes), values=dict(job.values),
        batchable=job.batched, max_batch=max(job.rows), times_s={},
    )  # fmt: skip
    names, feeds = [spec.name for spec in outputs], [unseen(blueprint)]
    if job.batched and max(job.rows) > 1:
        feeds.append(random_batch(blueprint, max(job.rows)))
    arrays: dict[str, Array] = {}
    for number, feed in enumerate(feeds):
        answers = dict(zip(names, session.run(names, feed), strict=True))
        for kind, values in ((INPUT, feed), (OUTPUT, answers)):
            arrays |= {f"{number} {kind} {name}": array for name, array in values.items()}
    draft = folder / f"draft-{REFERENCE}"
    np.savez(draft, **arrays)  # type: ignore[arg-type]  # its names are no options of numpy's
    draft.replace(folder / REFERENCE)


def read(folder: Path) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield the inputs and the answers to them; ``ModelError`` if there are none."""
    try:
        with np.load(folder / REFERENCE) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"its packages have no reference answers: {reason_of(error)}") from error
    numbers = sorted({key.split(" ", 1)[0] for key in arrays})
    for number in numbers:
        of_kind = [
            {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            for prefix in (f"{number} {INPUT} ", f"{number} {OUTPUT} ")
        ]
        yield of_kind[0], of_kind[1]
