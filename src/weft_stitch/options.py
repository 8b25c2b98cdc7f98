"""What is to be stitched and how: ``StitchOptions``, all that ``weft.stitch`` and ``weft stitch`` are told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from weft.base.errors import StitchError, unknown_name
from weft.runtime.metadata import servable
from weft_stitch.assembly import PLANNED
from weft_stitch.forms import FORMS
from weft_stitch.planning.balance import SLACK
from weft_stitch.planning.cost import machine
from weft_stitch.sharing import Sharing

HERE = "cpu"
"""The machine that can be measured."""
TORCH_ONLY = "fused"
"""The form that ONNX Runtime cannot run."""
_OF_CHANNELS = (
    "batches", "shapes", "example_inputs", "sharing", "islands", "form", "machine", "slack", "slabs",
    "memory_cap_bytes", "latency_target_s", "align",
)  # fmt: skip
"""Fields that have no say where nodes are left as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StitchOptions:
    """One stitching. The fields are the arguments of ``stitch`` and the options of ``weft stitch``."""

    models: Sequence[Any]
    """ONNX files, ONNX models in memory, torch modules (with *example_inputs*), nets, adapters, in any mixture."""
    names: Sequence[str] | None = None
    """What the models are called; after their files, if left out."""
    batches: int | Sequence[int] | None = None
    """Rows of all models, or of each, where they are left open."""
    shapes: Sequence[Mapping[str, tuple[int, ...]] | None] | None = None
    """The inputs of each model, where its file leaves sizes open."""
    example_inputs: Sequence[Any] | None = None
    """What torch modules are called with, or a list with that of each."""
    sharing: Sharing | str | os.PathLike[str] | None = None
    """What is shared, or a file that says so; it is found, if left out."""
    tolerance: float = 0.0
    """Weights that differ by no more are the same; of a body, the part of a weight that may be lost."""
    base: str | os.PathLike[str] | None = None
    """The model that those of a body were made from; the first of them, if left out."""
    body: bool | None = None
    """Whether models of any operators share whole weights; if left out, where one takes whole numbers."""
    islands: bool = False
    """Whether what differs or is not understood runs model by model."""
    form: str | Mapping[str, str] = PLANNED
    """``planned``, a form for all layers, or one for each."""
    dynamic: bool = False
    """Whether each model takes any number of rows."""
    measure: bool | None = None
    """Whether plans go by the clock; if left out, wherever they can."""
    machine: str = HERE
    """The described machine that plans go by where nothing is measured."""
    threads: int | None = None
    """Of ONNX Runtime when it measures and compares; 1, if left out."""
    slack: float | None = None
    """How much slower than the fastest a plan with fewer weights may be; 0.05, if left out."""
    slabs: bool | None = None
    """Whether convolutions may be in slabs; if left out, on a CPU."""
    memory_cap_bytes: int | None = None
    """Weights and activations at most, in groups if need be."""
    latency_target_s: float | None = None
    """The time for all models, met with the least memory, in groups if need be."""
    check: bool = True
    """Whether what was made is compared with the models, where ONNX Runtime can run it."""
    align: int = 1
    """Numbers that a load takes in the form ``fused``."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_values()
        self._check_together()

    def _check_names(self) -> None:
        names, count = self.names, len(self.models)
        if names is None:
            return
        told = f"names = {','.join(names)}"
        if len(names) != count or not all(names):
            raise StitchError(f"{told}: {len(names)} names for {count} models; give one for each, as a,b,c")
        if len(set(names)) < count:
            raise StitchError(f"{told}: two models have one name; give each its own")
        if strange := [name for name in names if not servable(name)]:
            raise StitchError(
                f"{told}: {strange[0]!r} is no name for a model; it takes letters, digits, '.', '_' and '-'"
            )

    def _check_values(self) -> None:
        machine(self.machine)
        if isinstance(self.form, str) and self.form not in (PLANNED, *FORMS):
            raise StitchError(f"form = {self.form}: {unknown_name('form', self.form, (PLANNED, *FORMS))}")
        rows = [self.batches] if isinstance(self.batches, int) else self.batches or ()
        slack, seconds = self.slack, self.latency_target_s
        for argument, value, fine, way_out in (
            ("batches", ",".join(map(str, rows)), all(each >= 1 for each in rows), "give rows from 1"),
            ("threads", self.threads, self.threads is None or self.threads >= 1, "give 1 or more"),
            ("tolerance", self.tolerance, 0 <= self.tolerance < inf, "give the largest difference of equal weights"),
            ("slack", slack, slack is None or 0 <= slack < inf, "give 0 for the fastest plan, or a part, as 0.05"),
            ("latency_target_s", seconds, seconds is None or 0 < seconds < inf, "give seconds above 0"),
        ):
            if not fine:
                raise StitchError(f"{argument} = {value}: {way_out}")

    def _check_together(self) -> None:
        """Refuse what cannot be had beside the rest, or would come to nothing."""
        measure, form, slack = self.measure, self.form, f"slack = {self.slack} does not apply to"
        for wrong, why in (
            (measure and self.machine != HERE, f"measure = True is on this machine's {HERE}, not on {self.machine}"),
            (measure and self.torch_only, f"measure = True is in ONNX Runtime, form = {TORCH_ONLY} in torch only"),
            (
                self.slack is not None and form != PLANNED,
                f"{slack} form = {form}: only {PLANNED} chooses between plans",
            ),
            (
                self.slack and self.in_groups,
                f"{slack} memory_cap_bytes and latency_target_s: each group is as fast as they allow",
            ),
            (
                self.slabs and self.machine != HERE,
                f"slabs = True does not apply to machine = {self.machine}: slabs are for the {HERE}",
            ),
            (
                self.base is not None and not self.tolerance and not self.adapters,
                f"base = {self.base} does not apply to tolerance = 0: only what is equal is shared",
            ),
            (
                self.threads is not None and not (self.measures or self.checks),
                f"threads = {self.threads} does not apply to measure = False and check = False: nothing is run",
            ),
        ):
            if wrong:
                raise StitchError(f"{why}; leave out one of them")

    @property
    def adapters(self) -> list[str | os.PathLike[str]]:
        """The models that are folders of adapters, which add to *base*."""
        folders = [each for each in self.models if isinstance(each, str | os.PathLike) and os.path.isdir(each)]
        if not folders:
            return []
        from weft_stitch.bodies.adapters import is_adapter  # pydantic is for files

        return [each for each in folders if is_adapter(each)]

    @property
    def as_body(self) -> bool:
        """Whether nodes are left as they are, and weights are shared as a whole or not at all."""
        if self.body is not None or self.adapters:
            return self.body is not False
        files = [model for model in self.models if isinstance(model, str | os.PathLike)]
        if not files:
            return False
        from weft_stitch.reading.onnx_program import takes_whole_numbers

        return any(map(takes_whole_numbers, files))

    def check_body(self) -> None:
        """Refuse what does not apply to a body."""
        plain = StitchOptions(models=self.models)
        for name in _OF_CHANNELS:
            if getattr(self, name) != getattr(plain, name):
                raise StitchError(f"{name} = {getattr(self, name)} is for stitching by channels, not for a body")
        if self.adapters and self.base is None:
            raise StitchError(f"{self.adapters[0]} is an adapter; give base = the ONNX file of what it was trained on")
        if strange := [model for model in self.models if not isinstance(model, str | os.PathLike)]:
            raise StitchError(f"{type(strange[0]).__name__} is no file; a body is made of ONNX files")

    @property
    def in_groups(self) -> bool:
        """Whether there are limits, for which models may be stitched in groups."""
        return self.memory_cap_bytes is not None or self.latency_target_s is not None

    @property
    def torch_only(self) -> bool:
        """Whether a layer is to have the form that ONNX Runtime cannot run."""
        return TORCH_ONLY in (self.form.values() if isinstance(self.form, Mapping) else (self.form,))

    @property
    def measures(self) -> bool:
        return self.measure if self.measure is not None else self.machine == HERE and not self.torch_only

    @property
    def checks(self) -> bool:
        return self.check and not self.torch_only

    @property
    def allowed_slack(self) -> float:
        return SLACK if self.slack is None else self.slack

    @property
    def allows_slabs(self) -> bool:
        return self.machine == HERE and not self.torch_only if self.slabs is None else self.slabs

    @property
    def used_threads(self) -> int:
        return self.threads or 1
