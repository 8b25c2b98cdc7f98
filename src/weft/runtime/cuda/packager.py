"""Which models of a device are compiled, and where their packages are: the server's part of the compiled engine.

A *package* is what torch's compiler writes for one model at one batch size.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from weft.base.errors import ModelError
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.cuda.compiling import CompileLimits, NotCompiled, compile_model
from weft.runtime.cuda.cpu_twins import is_twin
from weft.runtime.cuda.model import ladder
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.engines import AUTO, ONNXRUNTIME, Engine
from weft.runtime.isolated.device import CompiledCode
from weft.runtime.metadata import ONNX, PROGRAM_SUFFIX, kind_of

log = logging.getLogger("weft.models")

FOLDER = "compiled"
"""The folder in a cache for packages; workers may read it."""
MEMORY_BYTES = 64 << 30
"""Most memory of one compiler and the processes that it starts; on a small machine, half of the memory."""


class Packager:
    """Compiles models of one device, in processes of their own."""

    def __init__(self, device: str, device_name: str) -> None:
        """device: such as ``cuda:0``; device_name: the model of the GPU, for which packages are valid."""
        self._device, self._device_name = "cpu" if is_twin(device) else device, device_name
        self.default: Engine = ONNXRUNTIME if is_twin(device) else AUTO  # a twin's processor has other work to do

    def packages(
        self, path: Path, options: LoadOptions, model: LoadedModel, cache: Path | None, *, compile_now: bool
    ) -> CompiledCode | None:
        """The packages for *model*, which is open; compiled first if *compile_now* is true.

        None if there are no packages and *compile_now* is false. ``ModelError`` if the model cannot be compiled.
        """
        if cache is None:
            raise ModelError("packages need a cache; set cache")
        job, folder = self._job(path, options, model), cache.absolute() / FOLDER
        first_job = job.first_stage()
        try:
            for stage in (job, first_job):
                is_last = stage == job
                if find(stage.folder(folder)) is not None and (is_last or options.compile_first or not compile_now):
                    return CompiledCode(stage.folder(folder), complete=is_last)
            if not compile_now:
                return None
            stage = first_job if options.compile_first else job
            return CompiledCode(compile_model(stage, folder, _limits(options)), complete=stage == job)
        except (NotCompiled, OSError) as error:
            if options.compile_first or find(first_job.folder(folder)) is None:
                raise ModelError(str(error)) from error
            log.warning("%s is compiled for %s rows only: %s", path, " and ".join(map(str, first_job.rows)), error)
            return CompiledCode(first_job.folder(folder), complete=True)

    def _job(self, path: Path, options: LoadOptions, model: LoadedModel) -> CompileJob:
        """What is to be compiled; ``ModelError`` if the model cannot be compiled."""
        shapes = model.timing.warm_shapes
        is_stitched = path.suffix != PROGRAM_SUFFIX and kind_of(path, "cuda").name != ONNX
        if is_stitched or model.tasks or shapes is None:
            raise ModelError("stitched models have no compiled engine so far")
        if model.exits and _has_free_sizes(model):
            raise ModelError("it has exits and free sizes: pieces are compiled for their shapes only")
        if any("runs on the CPU" in remark for remark in model.remarks):
            raise ModelError("it runs on the CPU")
        rows = ladder(model.batching.max_batch) if model.batching.batchable else [1]
        return CompileJob(
            model=path,
            shapes=dict(shapes),
            values=options.values,
            rows=tuple(rows),
            exits=tuple(spec.output for spec in model.exits.specs) if model.exits else (),
            precision=options.precision,
            device=self._device,
            device_name=self._device_name,
            batched=model.batching.batchable,
            grain_s=options.grain_s if _may_be_cut(model) else None,
            max_pieces=options.max_pieces,
        )


def _limits(options: LoadOptions) -> CompileLimits:
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))  # models are served meanwhile
    memory_bytes = min(MEMORY_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return CompileLimits(options.compile_s, memory_bytes, threads)


def _may_be_cut(model: LoadedModel) -> bool:
    """Whether a compiled model may have to be cut: if ONNX Runtime cut it, or torch runs it.

    With other free sizes than the rows it stays whole, as pieces are compiled for their shapes only.
    """
    at_exits = len(model.exits.specs) if model.exits else 1
    return (len(model.segments) > at_exits or model.timing.engine == "torch") and not _has_free_sizes(model)


def _has_free_sizes(model: LoadedModel) -> bool:
    """Whether its inputs have free sizes besides the rows."""
    first = int(model.batching.batchable)
    return any(-1 in spec.shape[first:] for spec in model.inputs)
