"""The compiler process: ONNX file in, packages of torch's compiler out, one for each batch size (``packages``).

python -m weft.runtime.cuda.torch_compiler FOLDER JOB
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package

from weft.models.onnx_graph import load
from weft.runtime.cuda.packages import MANIFEST, WEIGHTS, CompileJob, Manifest, StoredWeight
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.cuda.torch_types import NUMBERED, PRECISIONS
from weft.runtime.isolated.confinement import end_with

SETTINGS = {"aot_inductor.package_constants_in_so": False}
"""Settings of the compiler: weights are not stored in packages but passed to them, so that packages share weights."""
PRIORITY = 10
"""Added to the nice value of this process, because models are served meanwhile."""


def example(job: CompileJob, module: OnnxModule, rows: int) -> tuple[Any, ...]:
    """Inputs of *rows* rows for the export; their values do not matter."""
    shapes = job.shapes_at(rows)
    return tuple(torch.zeros(shapes[name], dtype=kind, device=job.device) for name, kind in module.inputs)


class PackageWriter:
    """Writes the packages of one model into a folder."""

    def __init__(self, job: CompileJob, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._manifest: Manifest | None = None
        self._weights: dict[str, StoredWeight] = {}

    def add(self, rows: int) -> None:
        """Compile the package of a batch size, and add it to the manifest in the folder."""
        job = self._job
        dtype = PRECISIONS[job.precision]
        model = folded(load(job.model, weights=True), job.shapes_at(rows))
        module = OnnxModule(model, dtype, channels_last=dtype is not None).to(job.device)
        with torch.no_grad():
            exported = torch.export.export(module, example(job, module, rows), strict=False)
            tensors = {**exported.state_dict, **exported.constants}
            digests = {name: self._stored(tensor) for name, tensor in tensors.items()}
            inputs, outputs = (tuple(name for name, _ in ends) for ends in (module.inputs, module.outputs))
            manifest = self._manifest or Manifest(inputs=inputs, outputs=outputs)
            aoti_compile_and_package(
                exported, package_path=str(self._folder / manifest.file(rows)), inductor_configs=SETTINGS
            )
        constants = {**manifest.constants, rows: digests}
        self._manifest = manifest.model_copy(update={"constants": constants, "weights": dict(self._weights)})
        draft = self._folder / "draft.json"
        draft.write_text(self._manifest.model_dump_json(), "utf-8")
        draft.replace(self._folder / MANIFEST)

    def _stored(self, tensor: Any) -> str:
        """Write a weight to the file of weights, unless the file has an equal weight; returns its digest."""
        tensor = tensor.detach().cpu()
        if not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)):
            raise ValueError(f"a weight of the shape {list(tensor.shape)} lies with strides {tensor.stride()}")
        content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
        about = (NUMBERED[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
        digest = hashlib.sha256(repr(about).encode() + content.tobytes()).hexdigest()
        if digest not in self._weights:
            with (self._folder / WEIGHTS).open("ab") as file:
                place = file.tell()
                file.write(content.tobytes())
            self._weights[digest] = StoredWeight(offset=place, kind=about[0], shape=about[1], strides=about[2])
        return digest


def main(target: str, description: str) -> None:
    """Compile a model into the folder *target*; *description*: its ``CompileJob`` as JSON."""
    end_with(os.getppid())
    os.nice(PRIORITY)
    folder, job = Path(target), CompileJob.model_validate_json(description)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    writer = PackageWriter(job, folder)
    # one row first, then the largest batch: they serve most requests
    for rows in sorted(job.rows, key=lambda rows: (rows != 1, -rows)):
        writer.add(rows)
