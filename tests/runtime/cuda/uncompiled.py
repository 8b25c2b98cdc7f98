"""Packages without a compiler: programs of torch.export in their place, which torch runs step by step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.runtime.cuda import reference_answers, torch_compiler, torch_packages
from weft.runtime.cuda.packages import CompileJob
from weft.runtime.cuda.torch_compiler import PackageWriter

PROGRAM = "program.pt2"


class Program:
    """A package as ``PackageRunner`` runs it."""

    def __init__(self, folder: Path) -> None:
        self._exported = torch.export.load(folder / PROGRAM)
        self._constants: Mapping[str, Any] = {}

    def weight_names(self) -> dict[str, str]:
        return {f"_{name}": name for name in (*self._exported.state_dict, *self._exported.constants)}

    def use_weights(self, weights: Mapping[str, Any]) -> None:
        names = self.weight_names()
        assert {*weights} == {*names}
        self._constants = {names[name]: tensor for name, tensor in weights.items()}

    def run(self, inputs: list[Any]) -> list[Any]:
        held = {**self._exported.state_dict, **self._exported.constants}
        for name, tensor in self._constants.items():
            assert held[name].stride() == tensor.stride()
            held[name].copy_(tensor)  # as they are now
        return list(self._exported.module()(*inputs))


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    """Write and load such packages in this process."""

    def save(exported: Any, *, package_path: str, inductor_configs: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes weights whose channels come last for parts of others
            torch.export.save(exported, package_path)

    patch.setattr(torch_compiler, "aoti_compile_and_package", save)

    def unpack(archive: Path, folder: Path) -> None:
        folder.mkdir()
        archive.rename(folder / PROGRAM)

    patch.setattr(torch_compiler, "unpack", unpack)
    patch.setattr(torch_packages, "open_package", lambda folder, device: Program(folder))


def packaged(job: CompileJob, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    before = os.umask(0o077)
    writer = PackageWriter(job, folder)
    for rows in job.rows:
        writer.add(rows)
    reference_answers.store(job, folder, 1)
    os.umask(before)
    return folder
