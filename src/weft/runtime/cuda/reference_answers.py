"""Answers in float32 on the CPU, with which a compiled model's are compared whenever it is opened.

ONNX Runtime computes them for ONNX files, and torch for its programs.

The compiler process computes them once, so that opening a model takes neither time nor cores for them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.base.errors import ModelError, reason_of
from weft.runtime.cuda.packages import REFERENCE, CompileJob
from weft.runtime.cuda.pieces import random_batch, unseen
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.onnxruntime_cpu.sessions import open_model, specs
from weft.runtime.tensors import Array, TensorSpec

Arrays = dict[str, Array]
INPUT, OUTPUT = "in", "out"


class _HostModel(NamedTuple):
    """A model in float32 on the CPU."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    run: Callable[[Arrays], Arrays]


def store(job: CompileJob, folder: Path, threads: int) -> None:
    """Compute the answers for one row and for the largest batch, and store them with their inputs in *folder*."""
    if (folder / REFERENCE).exists():  # from an earlier stage
        return
    inputs, outputs, run = (_program if job.is_program else _session)(job.model, threads)
    blueprint = Blueprint(
        inputs=inputs, outputs=outputs, segments=(), warm_shapes=dict(job.shapes), values=dict(job.values),
        batchable=job.batched, max_batch=max(job.rows), times_s={},
    )  # fmt: skip
    feeds = [unseen(blueprint)]
    if job.batched and max(job.rows) > 1:
        feeds.append(random_batch(blueprint, max(job.rows)))
    arrays: dict[str, Array] = {}
    for number, feed in enumerate(feeds):
        for kind, values in ((INPUT, feed), (OUTPUT, run(feed))):
            arrays |= {f"{number} {kind} {name}": array for name, array in values.items()}
    draft = folder / f"draft-{REFERENCE}"
    np.savez(draft, **arrays)  # type: ignore[arg-type]  # its names are no options of numpy's
    draft.replace(folder / REFERENCE)


def _session(path: Path, threads: int) -> _HostModel:
    session = open_model(path, threads)
    names = [value.name for value in session.get_outputs()]
    return _HostModel(
        specs(session.get_inputs()), specs(session.get_outputs()),
        lambda feed: dict(zip(names, session.run(names, feed), strict=True)),
    )  # fmt: skip


def _program(path: Path, threads: int) -> _HostModel:
    from weft.runtime.cuda import torch_files, torch_program  # imported here, as they import torch

    program = torch_program.TorchProgram(torch_program.read_program(path), "cpu")
    return _HostModel(*torch_files.specs(program), lambda feed: torch_files.run_on_host(program, feed))


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
