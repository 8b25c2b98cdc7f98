"""Packages without a compiler: programs of torch.export in their place, which torch runs step by step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.runtime.cuda import torch_compiler, torch_packages
from weft.runtime.cuda.packages import CompileJob
from weft.runtime.cuda.torch_compiler import PackageWriter


class Program:
    """A package as the loader of compiled ones gives it."""

    def __init__(self, path: str) -> None:
        self._exported = torch.export.load(path)
        self._constants: Mapping[str, Any] = {}

    def get_constant_fqns(self) -> list[str]:
        return [*self._exported.state_dict, *self._exported.constants]

    def load_constants(self, constants: Mapping[str, Any], **settings: bool) -> None:
        assert settings == {"use_inactive": False, "check_full_update": True, "user_managed": True}
        assert {*constants} == {*self.get_constant_fqns()}
        self._constants = constants

    def boxed_run(self, inputs: list[Any]) -> list[Any]:
        held = {**self._exported.state_dict, **self._exported.constants}
        for name, tensor in self._constants.items():
            assert held[name].stride() == tensor.stride()
            held[name].copy_(tensor)  # as they are now
        return list(self._exported.module()(*inputs))


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    """Write and load such packages in this process."""

    def save(exported: Any, *, package_path: str, inductor_configs: object) -> None:
        torch.export.save(exported, package_path)

    patch.setattr(torch_compiler, "aoti_compile_and_package", save)
    patch.setattr(torch_packages, "open_package", lambda path, device: Program(path))


def packaged(job: CompileJob, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    before = os.umask(0o077)
    writer = PackageWriter(job, folder)
    for rows in job.rows:
        writer.add(rows)
    os.umask(before)
    return folder
