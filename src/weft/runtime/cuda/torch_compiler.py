"""A compiler process: it compiles a model for one batch size into a package of each piece (``packages``)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._inductor import aoti_compile_and_package

from weft.runtime import cutting
from weft.runtime.cuda.device import Device, HostDevice
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.packages import (
    MANIFEST,
    WEIGHTS,
    CompiledPiece,
    CompileJob,
    Manifest,
    Package,
    StoredWeight,
    find,
)
from weft.runtime.cuda.rung import Rung
from weft.runtime.cuda.torch_modules import conversion
from weft.runtime.cuda.torch_packages import open_packages
from weft.runtime.cuda.torch_pieces import CutProgram, TracedPiece
from weft.runtime.cuda.torch_types import NUMBERED

SETTINGS = {"aot_inductor.package_constants_in_so": False, "layout_optimization": False}
"""Settings of the compiler: weights are not stored in packages but passed to them, so that packages share weights."""
CODE = (".so", ".cubin")
"""Endings of the files of a package that are needed to run it."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the code in an archive into a new folder; the archive is removed."""
    folder.mkdir()
    with zipfile.ZipFile(archive) as file:
        for member in file.namelist():
            if member.endswith(CODE):
                (folder / Path(member).name).write_bytes(file.read(member))
    archive.unlink()


class ExportedModel:
    """The model of a job at one batch size, as a program of torch."""

    def __init__(self, job: CompileJob, rows: int) -> None:
        shapes = job.shapes_at(rows)
        module = conversion(job.model, job.precision, job.device, job.exits)(shapes)
        self._exits = bool(job.exits)
        inputs, outputs = (tuple(name for name, _ in named) for named in (module.inputs, module.outputs))
        self.names = CompiledPiece(inputs=inputs, outputs=outputs)
        # example inputs, whose values do not matter
        self.examples = tuple(torch.zeros(shapes[name], dtype=kind, device=job.device) for name, kind in module.inputs)
        with torch.no_grad():
            module.store_constants(*self.examples)
            self.exported = torch.export.export(module, self.examples, strict=False)

    def whole(self) -> TracedPiece:
        """The model in one piece."""
        return TracedPiece(self.names, tuple(tuple(example.shape) for example in self.examples), self.exported)

    def cut_program(self) -> CutProgram:
        """The model as a program that can be cut."""
        return CutProgram(self.exported, self.examples, self.names, exits=self._exits)


class PackageWriter:
    """Writes the packages of one model into a folder; several processes may add batch sizes at the same time."""

    def __init__(self, job: CompileJob, folder: Path) -> None:
        self._job, self._folder = job, folder

    def add(self, rows: int) -> None:
        """Compile the packages of a batch size, and add them to the manifest in the folder."""
        model = ExportedModel(self._job, rows)
        pieces, channels_last = [model.whole()], frozenset[str]()
        if self._job.cuts or self._job.exits:
            program = model.cut_program()
            pieces, channels_last = list(program.pieces(self._job.cuts)), program.channels_last()
        manifest = Manifest(
            pieces=tuple(piece.names for piece in pieces),
            batched=self._job.batched,
            channels_last=tuple(sorted({name for piece in pieces for name in piece.names.outputs} & channels_last)),
        )
        packages = tuple(self._store_weights(piece, manifest) for piece in pieces)
        for number, piece in enumerate(pieces):
            folder = self._folder / manifest.folder(rows, number)
            archive = folder.with_name(f"{folder.name}.pt2")
            with torch.no_grad():
                aoti_compile_and_package(piece.exported, package_path=str(archive), inductor_configs=SETTINGS)
            unpack(archive, folder)
        with self._locked():
            manifest = self._read() or manifest
            self._write(manifest.model_copy(update={"packages": {**manifest.packages, rows: packages}}))

    def _store_weights(self, piece: TracedPiece, manifest: Manifest) -> Package:
        """Store the weights of a piece, which all batch sizes share; returns the description of its package."""
        tensors = {**piece.exported.state_dict, **piece.exported.constants}
        with self._locked():
            manifest = self._read() or manifest
            weights = dict(manifest.weights)
            digests = {name: self._store(tensor, weights) for name, tensor in tensors.items()}
            self._write(manifest.model_copy(update={"weights": weights}))
        return Package(shapes=piece.shapes, weights=digests)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude the processes that compile other batch sizes: they write the same manifest and weights."""
        with open(self._folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> Manifest | None:
        """The manifest as other processes have left it; None before the first has written it."""
        path = self._folder / MANIFEST
        return Manifest.model_validate_json(path.read_bytes()) if path.exists() else None

    def _write(self, manifest: Manifest) -> None:
        """Replace the manifest in one step, so that no other process reads a part of it."""
        draft = self._folder / "draft.json"
        draft.write_text(manifest.model_dump_json(), "utf-8")
        draft.replace(self._folder / MANIFEST)

    def _store(self, tensor: Any, weights: dict[str, StoredWeight]) -> str:
        """Append a weight to the file of weights and to *weights*, unless they have its equal; returns its digest."""
        tensor = tensor.detach().cpu()
        if not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)):
            raise ValueError(f"a weight of the shape {list(tensor.shape)} lies with strides {tensor.stride()}")
        content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()  # the bytes in memory order
        layout = (NUMBERED[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
        digest = hashlib.sha256(repr(layout).encode() + content.tobytes()).hexdigest()
        if digest not in weights:
            with (self._folder / WEIGHTS).open("ab") as file:
                offset = file.tell()
                file.write(content.tobytes())
            weights[digest] = StoredWeight(offset=offset, kind=layout[0], shape=layout[1], strides=layout[2])
        return digest


def choose_cuts(job: CompileJob, folder: Path) -> tuple[str, ...]:
    """The nodes before which to cut a model whose packages are in *folder*, uncut or cut at its exits.

    () if all pieces are fast enough.
    """
    manifest, model, device = find(folder), ExportedModel(job, max(job.rows)), _device(job)
    assert manifest is not None and job.grain_s is not None
    types = {
        name: example.cpu().numpy().dtype for name, example in zip(model.names.inputs, model.examples, strict=True)
    }

    def seconds(rows: int) -> list[float]:
        feed = {name: np.zeros(shape, types[name]) for name, shape in job.shapes_at(rows).items()}
        rung = Rung(device, rows, segments, feed, batched=job.batched)
        return [rung.timed(index) for index in range(rung.segments)]

    with device.lane_context():
        segments = open_packages(device, folder, manifest)
        lengths_s = list(map(cutting.device_length_s, seconds(1), seconds(max(job.rows))))
    if not any(cutting.worth_cutting(length_s, job.grain_s) for length_s in lengths_s):
        return ()
    return model.cut_program().choose_cuts(lengths_s, job.grain_s, job.max_pieces)


def _device(job: CompileJob) -> Device:
    return HostDevice() if job.device == "cpu" else device_named(job.device)


def main(folder: Path, job: CompileJob) -> None:
    """Compile a model for its only batch size into *folder*."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    (rows,) = job.rows
    PackageWriter(job, folder).add(rows)
