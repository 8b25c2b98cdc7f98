"""A compiler process: it compiles an ONNX file for one batch size into a package (``packages``)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package

from weft.models.onnx_graph import load
from weft.runtime.cuda.packages import MANIFEST, WEIGHTS, CompileJob, Manifest, StoredWeight
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.cuda.torch_types import NUMBERED, PRECISIONS

SETTINGS = {"aot_inductor.package_constants_in_so": False}
"""Settings of the compiler: weights are not stored in packages but passed to them, so that packages share weights."""
CODE = (".so", ".cubin")
"""Endings of the files of a package that are needed to run it."""


def example_inputs(job: CompileJob, module: OnnxModule, rows: int) -> tuple[Any, ...]:
    """Inputs of *rows* rows for the export of *module*; their values do not matter."""
    shapes = job.shapes_at(rows)
    return tuple(torch.zeros(shapes[name], dtype=kind, device=job.device) for name, kind in module.inputs)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the code in an archive into a new folder; the archive is removed."""
    folder.mkdir()
    with zipfile.ZipFile(archive) as file:
        for member in file.namelist():
            if member.endswith(CODE):
                (folder / Path(member).name).write_bytes(file.read(member))
    archive.unlink()


class PackageWriter:
    """Writes the packages of one model into a folder; several processes may add batch sizes at the same time."""

    def __init__(self, job: CompileJob, folder: Path) -> None:
        self._job, self._folder = job, folder

    def add(self, rows: int) -> None:
        """Compile the package of a batch size, and add it to the manifest in the folder."""
        job = self._job
        dtype = PRECISIONS[job.precision]
        model = folded(load(job.model, weights=True), job.shapes_at(rows))
        module = OnnxModule(model, dtype, channels_last=dtype is not None).to(job.device)
        inputs, outputs = (tuple(name for name, _ in named) for named in (module.inputs, module.outputs))
        empty_manifest = Manifest(inputs=inputs, outputs=outputs)
        examples = example_inputs(job, module, rows)
        with torch.no_grad():
            module.store_constants(*examples)
            exported = torch.export.export(module, examples, strict=False)
            tensors = {**exported.state_dict, **exported.constants}
            with self._locked():  # the weights, which all batch sizes share
                manifest = self._read() or empty_manifest
                weights = dict(manifest.weights)
                digests = {name: self._store(tensor, weights) for name, tensor in tensors.items()}
                self._write(manifest.model_copy(update={"weights": weights}))
            archive = self._folder / f"{empty_manifest.folder(rows)}.pt2"
            aoti_compile_and_package(exported, package_path=str(archive), inductor_configs=SETTINGS)
        unpack(archive, self._folder / empty_manifest.folder(rows))
        with self._locked():
            manifest = self._read() or empty_manifest
            self._write(manifest.model_copy(update={"constants": {**manifest.constants, rows: digests}}))

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


def main(folder: Path, job: CompileJob) -> None:
    """Compile a model for its only batch size into *folder*."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    (rows,) = job.rows
    PackageWriter(job, folder).add(rows)
