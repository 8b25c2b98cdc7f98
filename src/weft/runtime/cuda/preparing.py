"""Load a model for a device: read it, cut it, capture and measure its segments; with a cache, only once.

The entry point is ``prepare_on``. Files are opened by the target of their kind (``weft.runtime.metadata``): ONNX files
by ``onnx_files``, programs of torch by ``torch_files``, others by tools. What cannot run on the device runs on the CPU,
with a remark.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft.base.errors import InputError, ModelError, NotLearned
from weft.base.registry import Entry
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.model import DeviceModel, ModelOnHost
from weft.runtime.cuda.model_files import DeviceFile, OpensDeviceFile
from weft.runtime.cuda.precision import FP32
from weft.runtime.cuda.preparation import Unfit
from weft.runtime.cuda.rounds import likeness_by_rows
from weft.runtime.facets import ModelShares
from weft.runtime.metadata import CPU, kind_of
from weft.runtime.onnxruntime_cpu import cache as caching
from weft.runtime.onnxruntime_cpu.allowance import Allowance, OutOfTime
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.own_folder import remove

CUDA = "cuda"
"""The name of GPUs in the entry ``devices`` of model kinds."""
KERNELS = ".kernels"
"""The folder in a cache in which triton keeps compiled kernels."""
HOST_GRAIN_S = 0.005
"""Length of segments, in seconds, of models that run on the CPU after all."""

Prepared = DeviceModel | ModelOnHost


def prepare_on(
    device: Device, path: Path, options: LoadOptions, cache: Path | None = None, *, learn: bool = True
) -> Prepared:
    """Load the model at *path*: from *cache* (a folder) if that has it, else learn it: prepare it and store it there.

    learn: False: only load from the cache, or with weights that another file has on the device; ``NotLearned`` if
    neither is possible.
    """
    if cache is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache.absolute() / KERNELS))
    if options.shares:
        with device.lane_context():
            device = device.model_view()  # its graphs run at the same time as those of other models
    model = _load_or_prepare(device, path, options, cache, learn=learn)
    if options.shares:
        model.shares = ModelShares(likeness_by_rows(model.blueprint), device.cuts)
    return model


def _load_or_prepare(device: Device, path: Path, options: LoadOptions, cache: Path | None, *, learn: bool) -> Prepared:
    """Load a model from the cache, or prepare it within the time limit; *learn*: as for ``prepare_on``."""
    entry_folder = _entry_path(device, path, options, cache) if cache is not None and path.is_file() else None
    if entry_folder is not None and (blueprint := caching.find(entry_folder)) is not None:
        return _open_cached(device, path, options, cache, entry_folder, blueprint)
    # A kind that registers ``takes_over`` may reuse the weights of another file: it decides itself whether to raise.
    may_take_over = kind_of(path, CUDA).details.get("takes_over")
    if not (learn or may_take_over):
        raise NotLearned(f"{path}: is cut and captured before it is served")
    with Allowance(options.learn_s) as allowance:
        try:
            return _prepare_file(device, path, options, cache, entry_folder, allowance, learn=learn)
        except OutOfTime as error:
            raise NotLearned(f"{path}: was not cut and captured within {options.learn_s:g} s; raise learn_s") from error


def _entry_path(device: Device, path: Path, options: LoadOptions, cache: Path) -> Path:
    """The path of the model's entry in the cache; ``ModelError`` if the model's files cannot be read."""
    key: list[Any] = [device.name, options.model_options(), *([device.cuts.model_dump()] if options.shares else [])]
    key += [] if device.runs_sessions else ["torch"]
    try:
        # The packages that a kind names decide which nodes a model has, and whether it runs on the device at all.
        key += [_installed_version(package) for package in kind_of(path, CUDA).details.get("packages", ())]
        return caching.entry(cache, path, json.dumps(key, sort_keys=True))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _open_cached(
    device: Device, path: Path, options: LoadOptions, cache: Path | None, entry_folder: Path, blueprint: Blueprint
) -> Prepared:
    """Open a model from its cache entry, on the device or on the CPU."""
    first = blueprint.segments[0]
    if first.file is None and first.nodes is None:  # a model for the CPU, as ``_prepare_on_host`` stores it
        return ModelOnHost(prepare(path, _host_options(options), cache, learn=False), blueprint.remarks[-1])
    if options.packages is not None:
        return _open_compiled(device, path, options, cache, entry_folder, blueprint)
    with device.lane_context():
        # ``Allowance()`` has no time limit.
        file: DeviceFile = kind_of(path, CUDA).load()(device, path, options, entry_folder, Allowance())
        return file.reopened(blueprint)


def _open_compiled(
    device: Device, path: Path, options: LoadOptions, cache: Path | None, entry_folder: Path, blueprint: Blueprint
) -> Prepared:
    """The compiled model; or if that is refused, the model as it ran before, with a remark."""
    from weft.runtime.cuda.torch_engine import SlowerCompiled, compiled_model

    engines_s: Mapping[str, Mapping[int, float]] = {}
    try:
        with device.lane_context():
            return compiled_model(device, path, options, blueprint)
    except Exception as error:  # compiled code raises several unrelated kinds
        reason = first_line(error)
        if isinstance(error, SlowerCompiled):
            engines_s = error.comparison.engines_s
    model = _open_cached(device, path, dataclasses.replace(options, packages=None), cache, entry_folder, blueprint)
    before = "torch, step by step" if model.timing.engine == "torch" else "ONNX Runtime"
    model.remarks = (*model.remarks, f"stays with {before}: {reason}")
    if isinstance(model, DeviceModel):
        model.timing = dataclasses.replace(model.timing, engines_s=engines_s)
    return model


def _host_options(options: LoadOptions) -> LoadOptions:
    """The options for a model that runs on the CPU instead of the device."""
    return dataclasses.replace(options, grain_s=max(options.grain_s, HOST_GRAIN_S), precision=FP32)


def _prepare_file(
    device: Device,
    path: Path,
    options: LoadOptions,
    cache: Path | None,
    entry_folder: Path | None,
    allowance: Allowance,
    *,
    learn: bool,
) -> Prepared:
    """Prepare a model in a new folder, and move that to *entry_folder*, its place in the cache; None: it is not cached.

    It is prepared for the CPU, with a remark, if the device cannot run it. allowance: the time limit for trial runs.
    learn: False: ``NotLearned`` unless the file reuses what another file has on the device (``OpensDeviceFile``).
    """
    kind, folder = kind_of(path, CUDA), caching.new_folder(cache)
    try:
        file = _open_file(kind, device, path, options, folder, allowance, learn=learn)
        with device.lane_context():
            model = file.built()
        file.clear(model.blueprint)
        if entry_folder is not None:
            caching.store(folder, model.blueprint, entry_folder)  # renames the folder, or leaves it to be removed below
        return model
    except Unfit as reason:
        if CPU not in kind.details["devices"]:
            raise ModelError(f"{path}: {reason}") from reason
        if not learn:
            raise NotLearned(f"{path}: is cut and measured for the CPU before it is served: {reason}") from reason
        return _prepare_on_host(path, options, cache, entry_folder, str(reason))
    except NotLearned:
        raise
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    finally:
        if entry_folder is None or folder.exists():
            remove(folder)


def _open_file(
    kind: Entry, device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance, *, learn: bool
) -> DeviceFile:
    """Open a file by its kind; raises ``Unfit`` if a package that the kind needs is not installed.

    folder, allowance, learn: as for ``OpensDeviceFile``.
    """
    try:
        open_file: OpensDeviceFile = kind.load()
    except InputError as error:
        raise Unfit(str(error)) from error
    if learn:
        return open_file(device, path, options, folder, allowance)
    # Only kinds with ``takes_over`` have this parameter, and only they come here.
    return open_file(device, path, options, folder, allowance, learn=False)


def _prepare_on_host(
    path: Path, options: LoadOptions, cache: Path | None, entry_folder: Path | None, reason: str
) -> ModelOnHost:
    """Prepare the model for the CPU; an entry in the device's cache notes this and the *reason*."""
    model = ModelOnHost(prepare(path, _host_options(options), cache), reason)
    if entry_folder is not None:
        whole = SegmentSpec(name="whole", inputs=(), outputs=())  # neither file nor nodes: ``_open_cached`` sees that
        blueprint = Blueprint(inputs=(), outputs=(), segments=(whole,), warm_shapes=None, remarks=(reason,))
        folder = caching.new_folder(cache)
        if not caching.store(folder, blueprint, entry_folder):
            remove(folder)
    return model
