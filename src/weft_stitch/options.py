"""What to stitch and how: ``StitchOptions``, the arguments of ``weft.stitch`` and the options of ``weft stitch``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from weft.base.errors import StitchError, unknown_name
from weft.base.settings import how, what
from weft.runtime.metadata import servable
from weft_stitch.assembly import PLANNED, SLACK
from weft_stitch.cost import machine
from weft_stitch.family import Sharing
from weft_stitch.forms import FORMS

HERE = "cpu"
"""Name of the described machine that stands for this one; graphs can only be timed for it."""
TORCH_ONLY = "fused"
"""The form that only torch can run."""
_CHANNEL_FIELDS = (
    "batches", "shapes", "example_inputs", "sharing", "islands", "form", "machine", "slack", "slabs",
    "memory_cap_bytes", "latency_target_s", "align",
)  # fmt: skip
"""Fields that only apply to stitching by channels, not to a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StitchOptions:
    """One stitching. The fields are the arguments of ``stitch`` and the options of ``weft stitch``."""

    models: Sequence[Any]
    """ONNX files, ONNX models in memory, torch modules (with *example_inputs*), nets, adapters, in any mixture."""
    names: Annotated[Sequence[str] | None, what(text=True)] = None
    """Names of the models, as a,b,c; by default those of their files."""
    batches: Annotated[int | Sequence[int] | None, what("--batch", "-b", text=True)] = None
    """Rows where a file leaves them open: 4, or 1,2,4.

    One number is for all models, several are for each.
    """
    shapes: Sequence[Mapping[str, tuple[int, ...]] | None] | None = None
    """The inputs of each model, where its file leaves sizes open."""
    example_inputs: Sequence[Any] | None = None
    """Example inputs of torch modules, or a list with those of each module."""
    sharing: Annotated[Sharing | str | os.PathLike[str] | None, what()] = None
    """A file that lists shared channels, instead of a search for them."""
    tolerance: Annotated[float, what()] = 0.0
    """Largest difference between weights that count as equal; in a body, the part of a weight that may be lost."""
    base: Annotated[str | os.PathLike[str] | None, what()] = None
    """The model that a body's models, or adapters, were tuned from.

    The first model of a body where it is left out.
    """
    body: Annotated[bool | None, what(shown="for whole numbers")] = None
    """Share whole weights of models of any operators, as encoders."""
    islands: Annotated[bool, what()] = False
    """Run operators that differ or are not supported model by model."""
    form: Annotated[str | Mapping[str, str], how(text=True)] = PLANNED
    """planned (the best for each layer), mts, grouped, split, half, separate; fused is for torch only.

    In Python also a form for each layer.
    """
    dynamic: Annotated[bool, how()] = False
    """Accept any number of rows of each model, as weft serve needs."""
    measure: Annotated[bool | None, how(shown="by the clock, for cpu")] = None
    """Plan by measured times, or by a described machine."""
    machine: Annotated[str, how()] = HERE
    """The described machine: cpu (one core), h200."""
    threads: Annotated[int | None, how(shown="1")] = None
    """Threads of ONNX Runtime when it measures.

    Also when it compares.
    """
    slack: Annotated[float | None, how(shown="0.05")] = None
    """A plan with fewer weights may be slower by this part; 0: the fastest."""
    slabs: Annotated[bool | None, how(shown="slabs, for cpu")] = None
    """Convolutions in slabs where that is faster."""
    memory_cap_bytes: Annotated[int | None, how()] = None
    """Limit on weights and activations, as 64m; in groups if need be."""
    latency_target_s: Annotated[float | None, how("--latency-target")] = None
    """Limit in milliseconds for all models, met with the least memory.

    In Python seconds; in groups if need be.
    """
    check: Annotated[bool, how()] = True
    """Compare with the models before writing."""
    align: int = 1
    """Numbers per vector load in the form ``fused``."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_values()
        self._check_together()

    def _check_names(self) -> None:
        """Refuse names that are too few, equal, or not allowed for a served model."""
        names, count = self.names, len(self.models)
        if names is None:
            return
        setting = f"names = {','.join(names)}"
        if len(names) != count or not all(names):
            raise StitchError(f"{setting}: {len(names)} names for {count} models; give one for each, as a,b,c")
        if len(set(names)) < count:
            raise StitchError(f"{setting}: two models have one name; give each its own")
        if refused := [name for name in names if not servable(name)]:
            raise StitchError(
                f"{setting}: {refused[0]!r} is no name for a model; it takes letters, digits, '.', '_' and '-'"
            )

    def _check_values(self) -> None:
        """Refuse values out of range, by field."""
        machine(self.machine)  # raises if there is none of this name
        if isinstance(self.form, str) and self.form not in (PLANNED, *FORMS):
            raise StitchError(f"form = {self.form}: {unknown_name('form', self.form, (PLANNED, *FORMS))}")
        rows = [self.batches] if isinstance(self.batches, int) else self.batches or ()
        slack, seconds = self.slack, self.latency_target_s
        for argument, value, is_valid, way_out in (
            ("batches", ",".join(map(str, rows)), all(row_count >= 1 for row_count in rows), "give rows from 1"),
            ("threads", self.threads, self.threads is None or self.threads >= 1, "give 1 or more"),
            ("tolerance", self.tolerance, 0 <= self.tolerance < inf, "give the largest difference of equal weights"),
            ("slack", slack, slack is None or 0 <= slack < inf, "give 0 for the fastest plan, or a part, as 0.05"),
            ("latency_target_s", seconds, seconds is None or 0 < seconds < inf, "give seconds above 0"),
        ):
            if not is_valid:
                raise StitchError(f"{argument} = {value}: {way_out}")

    def _check_together(self) -> None:
        """Refuse fields that contradict each other or would have no effect."""
        measure, form, slack = self.measure, self.form, f"slack = {self.slack} does not apply to"
        for conflict, why in (
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
            if conflict:
                raise StitchError(f"{why}; leave out one of them")

    @property
    def adapters(self) -> list[str | os.PathLike[str]]:
        """The models that are folders of adapters."""
        folders = [model for model in self.models if isinstance(model, str | os.PathLike) and os.path.isdir(model)]
        if not folders:
            return []
        from weft_stitch.bodies.adapters import is_adapter  # pydantic is for files

        return [folder for folder in folders if is_adapter(folder)]

    @property
    def as_body(self) -> bool:
        """Whether models are stitched to a body: operators stay as they are, and whole weights are shared.

        By default this is so for adapters, and for models whose inputs are whole numbers, as encoders.
        """
        if self.body is not None or self.adapters:
            return self.body is not False
        files = [model for model in self.models if isinstance(model, str | os.PathLike)]
        if not files:
            return False
        from weft_stitch.reading.onnx_program import takes_whole_numbers

        return any(map(takes_whole_numbers, files))

    def check_body(self) -> None:
        """Refuse fields and models that do not apply to a body."""
        defaults = StitchOptions(models=self.models)
        for name in _CHANNEL_FIELDS:
            if getattr(self, name) != getattr(defaults, name):
                raise StitchError(f"{name} = {getattr(self, name)} is for stitching by channels, not for a body")
        if self.adapters and self.base is None:
            raise StitchError(f"{self.adapters[0]} is an adapter; give base = the ONNX file of what it was trained on")
        if no_files := [model for model in self.models if not isinstance(model, str | os.PathLike)]:
            raise StitchError(f"{type(no_files[0]).__name__} is no file; a body is made of ONNX files")

    @property
    def in_groups(self) -> bool:
        """Whether limits are set, for which the models may be stitched in groups."""
        return self.memory_cap_bytes is not None or self.latency_target_s is not None

    @property
    def torch_only(self) -> bool:
        """Whether a layer has the form that only torch can run."""
        return TORCH_ONLY in (self.form.values() if isinstance(self.form, Mapping) else (self.form,))

    @property
    def measures(self) -> bool:
        """Whether graphs are timed; by default only if they run on this machine."""
        return self.measure if self.measure is not None else self.machine == HERE and not self.torch_only

    @property
    def checks(self) -> bool:
        """Whether outputs are compared with the models'."""
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
