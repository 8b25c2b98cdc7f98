"""Saturated models on a device: the options of ``weft simulate`` and ``weft compare`` without a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import InputError, WorkloadError
from weft.base.settings import how, what
from weft.cli.common import parse_shapes, shapes_of_several, split_names
from weft.cli.printing import progress_bar, warn_of_gaps
from weft.cli.settings import declared

if TYPE_CHECKING:
    from weft.devices import Npu
    from weft.devices.costs.layer_costs import Profile
    from weft.workloads import Saturated


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedOptions:
    """The models, their cost model, and their rounds of work."""

    models: Annotated[str, what("-m", completion="models")] = ""
    """Zoo names, packaged models or .onnx files: a,b,c"""
    profile: Annotated[Sequence[str], what()] = ()
    """A profile JSON to run beside the models; repeatable."""
    batch: Annotated[int, what("-b")] = 1
    """Samples per query."""
    seq_len: Annotated[int, what()] = 16
    """Tokens per sample, for models that take text."""
    tables: Annotated[str, what()] = "stream"
    """ncf: 'stream' its tables for every query, or 'gather' rows."""
    queries: Annotated[int, how("-n")] = 100
    """Rounds of work: a query of every model each."""
    cost: Annotated[str, how()] = "pipelined"
    """Cost model: pipelined, scalesim, maestro or roofline."""
    mix: Annotated[str | None, what()] = None
    """Queries of each model per round, as 1:1 or 2:1:3."""
    max_lag: Annotated[float, how()] = 0.25
    """Rounds a model may fall behind the mix."""
    spill: Annotated[bool, how()] = False
    """Pay for activations that do not fit instead of refusing."""
    pieces: Annotated[int | None, how(shown="none, or as many as weft finds best")] = None
    """Cut layers larger than this part of the buffer, 8 for an eighth; 1 cuts none."""

    def read_profiles(self, npu: Npu, shapes: Sequence[str] | None) -> list[Profile]:
        """Estimate profiles of the named models on the device, and add the profiles from files."""
        from weft.devices.costs.layer_costs import estimate, read_profile
        from weft.models.sources import load_models

        names = split_names(self.models)
        sizes = parse_shapes(shapes, names)
        parameters: dict[str, int | str] = {"seq_len": self.seq_len, "tables": self.tables}
        profiles = []
        with shapes_of_several(names), progress_bar("reading", len(names)) as advance:
            for name in names:
                for model in load_models(name, shapes=sizes.get(name), parameters=parameters):
                    warn_of_gaps(model)
                    profiles.append(estimate(model, npu, batch=self.batch, cost=self.cost))
                advance()
        for path in self.profile:
            profiles.append(read_profile(path))
            if profiles[-1].device != npu.name:
                typer.echo(f"weft: {path} was made for {profiles[-1].device}, and runs on {npu.name} here", err=True)
        if not profiles:
            raise InputError("nothing to run: give --models, --profile, or both")
        return profiles

    @property
    def workload(self) -> Saturated:
        """The rounds of work, with the share of each model."""
        from weft.workloads import Saturated

        try:
            parts = tuple(float(part) for part in self.mix.split(":")) if self.mix else None
        except ValueError:
            raise WorkloadError(f"--mix {self.mix!r} is not of the form 1:1") from None
        return Saturated(self.queries, parts, self.max_lag)


Batch = Annotated[int, declared(SaturatedOptions, "batch")]
SeqLen = Annotated[int, declared(SaturatedOptions, "seq_len")]
Tables = Annotated[str, declared(SaturatedOptions, "tables")]
Cost = Annotated[str, declared(SaturatedOptions, "cost")]
"""The same options for commands that price models without running them."""
