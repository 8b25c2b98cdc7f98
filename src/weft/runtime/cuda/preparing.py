"""Loading a model for a device: read it, cut it, and capture and measure its segments; once, where there is a cache.

``prepare_on`` is all there is to call. ONNX files are the affair of ``onnx_files``, programs of torch that of
``torch_files``; what is done to both is in ``workshop``. What cannot run on the device runs on the CPU, with a remark.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from weft.base.errors import ModelError, NotLearned
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.model import DeviceModel, ModelOnHost
from weft.runtime.cuda.onnx_files import OnnxFile, open_pieces
from weft.runtime.cuda.precision import FP32
from weft.runtime.cuda.workshop import Unfit
from weft.runtime.metadata import PROGRAM_SUFFIX
from weft.runtime.onnxruntime_cpu import cache as caching
from weft.runtime.onnxruntime_cpu.allowance import Allowance, OutOfTime
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.own_folder import remove
from weft.runtime.stitched import is_body

BODIES = "weft.runtime.cuda.torch_bodies"
KERNELS = ".kernels"
"""The folder in a cache where triton keeps what it has compiled."""
HOST_GRAIN_S = 0.005
"""How long segments are of what runs on the CPU after all."""

Prepared = DeviceModel | ModelOnHost


def prepare_on(
    device: Device, path: Path, options: LoadOptions, cache: Path | None = None, *, learn: bool = True
) -> Prepared:
    """Load the model at *path*; with *cache*, a folder, the work is done once.

    learn: False: only what is in the cache; ``NotLearned`` where it is not.
    """
    if cache is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache.absolute() / KERNELS))
    if options.shares:
        with device.on():
            device = device.own()
    found = _prepared(device, path, options, cache, learn=learn)
    found.cuts = device.cuts if options.shares else None
    return found


def _prepared(device: Device, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> Prepared:
    """The same, by whatever belongs to the model alone."""
    place = _place(device, path, options, cache) if cache is not None and path.is_file() else None
    if place is not None and (blueprint := caching.find(place)) is not None:
        return _reopened(device, path, options, cache, place, blueprint)
    if not (learn or _may_be_there(path)):
        raise NotLearned(f"{path}: is cut and captured before it is served")
    with Allowance(options.learn_s) as allowance:
        try:
            return _learned(device, path, options, cache, place, allowance, learn=learn)
        except OutOfTime as error:
            raise NotLearned(f"{path}: was not cut and captured within {options.learn_s:g} s; raise learn_s") from error


def _place(device: Device, path: Path, options: LoadOptions, cache: Path) -> Path:
    made_with = dataclasses.asdict(options)
    for name in ("learn_s", "isolation", "rests"):  # where and how long do not change what it is
        del made_with[name]
    told: list[Any] = [device.name, made_with, *([device.cuts.model_dump()] if options.shares else [])]
    if path.suffix == PROGRAM_SUFFIX:  # where its nodes are is torch's affair
        told.append(version("torch"))
    elif is_body(path):  # where it runs depends on what is installed
        told += [_version("torch"), _version("triton")]
    try:
        return caching.entry(cache, path, json.dumps(told, sort_keys=True))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _reopened(
    device: Device, path: Path, options: LoadOptions, cache: Path | None, place: Path, blueprint: Blueprint
) -> Prepared:
    first = blueprint.segments[0]
    if first.file is None and first.nodes is None:
        return ModelOnHost(prepare(path, _for_host(options), cache, learn=False), blueprint.remarks[-1])
    with device.on():
        free = device.memory()[0]
        if path.suffix == PROGRAM_SUFFIX:
            from weft.runtime.cuda.torch_files import ProgramFile  # torch is an extra, and takes long to import

            return ProgramFile(device, path, options, Allowance()).reopened(blueprint).assembled(free)
        if first.nodes is not None and is_body(path):
            from weft.runtime.cuda.torch_bodies import BodyFile

            return BodyFile(device, path, options, place, Allowance()).reopened(blueprint)
        if first.nodes is not None:
            from weft.runtime.cuda.torch_rounds import FusedFile

            return FusedFile(device, path, options, Allowance(), place).opened(blueprint).assembled(free)
        return open_pieces(device, blueprint, place).assembled(free)


def _for_host(options: LoadOptions) -> LoadOptions:
    return dataclasses.replace(options, grain_s=max(options.grain_s, HOST_GRAIN_S), precision=FP32)


def _learned(
    device: Device,
    path: Path,
    options: LoadOptions,
    cache: Path | None,
    place: Path | None,
    allowance: Allowance,
    *,
    learn: bool,
) -> Prepared:
    folder = caching.new_folder(cache)
    try:
        source = _source(device, path, options, folder, allowance, learn=learn)
        with device.on():
            model = source.built()
        source.clear(model.blueprint)
        if place is not None:
            caching.store(folder, model.blueprint, place)
        return model
    except Unfit as reason:
        if path.suffix == PROGRAM_SUFFIX:  # the CPU's sessions take none
            raise ModelError(f"{path}: {reason}") from reason
        if not learn:
            raise NotLearned(f"{path}: is cut and measured for the CPU before it is served: {reason}") from reason
        return _on_host(path, options, cache, place, str(reason))
    except NotLearned:
        raise
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    finally:
        if place is None or folder.exists():
            remove(folder)


class _Source(Protocol):
    """A file of some kind, while it is being prepared."""

    def built(self) -> DeviceModel:
        """The model as the device will serve it; ``Unfit`` where it cannot."""
        ...

    def clear(self, blueprint: Blueprint) -> None:
        """Keep only what the segments need."""
        ...


def _source(
    device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance, *, learn: bool
) -> _Source:
    if is_body(path):
        try:
            from weft.runtime.cuda.torch_bodies import BodyFile
        except ImportError as error:
            raise Unfit(f"its models take rows of any length together, which needs torch: {error}") from error
        return BodyFile(device, path, options, folder, allowance, learn=learn)
    if path.suffix != PROGRAM_SUFFIX:
        return OnnxFile(device, path, options, folder, allowance)
    from weft.runtime.cuda.torch_files import ProgramFile  # torch is an extra, and takes long to import

    return ProgramFile(device, path, options, allowance)


def _may_be_there(path: Path) -> bool:
    """Whether a file may have on the device what it needs already: another one had it."""
    return BODIES in sys.modules and bool(sys.modules[BODIES].BODIES) and is_body(path)


def _on_host(path: Path, options: LoadOptions, cache: Path | None, place: Path | None, reason: str) -> ModelOnHost:
    """The model on the CPU; that it runs there is kept in its place."""
    found = ModelOnHost(prepare(path, _for_host(options), cache), reason)
    if place is not None:
        whole = SegmentSpec(name="whole", inputs=(), outputs=())
        told = Blueprint(inputs=(), outputs=(), segments=(whole,), warm_shapes=None, remarks=(reason,))
        folder = caching.new_folder(cache)
        if not caching.store(folder, told, place):
            remove(folder)
    return found
