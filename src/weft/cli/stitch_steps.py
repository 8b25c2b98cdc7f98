"""The steps of ``weft stitch``, from files to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.common import console, parse_shapes, progress_bar
from weft.errors import InputError, StitchError

if TYPE_CHECKING:
    from weft.stitching.assembly import Stitched
    from weft.stitching.family import Family
    from weft.stitching.graph import Graph
    from weft.stitching.net import Net
    from weft.stitching.planning.balance import Contest
    from weft.stitching.planning.cost import GraphCost, Modelled
    from weft.stitching.sharing import Sharing
    from weft.stitching.summary import Summary

CLOSE = 1e-5
"""By so much of its largest number an output may differ from the model's own."""
ROUNDS = 20
"""Of the race between the ways to run the models; the least time of each counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for."""

    models: tuple[str, ...]
    names: tuple[str, ...]
    batches: tuple[int | None, ...]
    shapes: tuple[str, ...]
    sharing: str | None
    tolerance: float
    islands: bool
    form: str
    dynamic: bool
    measure: bool
    machine: str
    threads: int
    slack: float
    slabs: bool
    memory_bytes: int | None
    seconds: float | None
    check: bool
    output: Path

    @property
    def in_groups(self) -> bool:
        return self.memory_bytes is not None or self.seconds is not None


class Steps:
    """One run of the command."""

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.groups: tuple[Stitched, ...] = ()
        self.summaries: tuple[Summary, ...] = ()
        self.difference: float | None = None
        self.coarse_difference = 0.0
        """To files in half precision, which are off by themselves."""
        self.times: list[dict[str, float]] = []
        """Seconds by way, for each group, once measured."""

    @cached_property
    def family(self) -> Family:
        from weft.stitching.reading.alignment import align
        from weft.stitching.reading.sources import read_models

        asked = self.asked
        nets: list[Net] = []
        sizes = _sizes(asked.shapes, asked.models)
        with progress_bar("reading", len(asked.models)) as advance:
            for file, name, rows in zip(asked.models, asked.names, asked.batches, strict=True):
                shapes = [sizes.get(file)]
                nets += read_models([file], names=[name], batches=rows, islands=asked.islands, shapes=shapes)
                advance()
        return align(nets, islands=asked.islands)

    @cached_property
    def sharing(self) -> Sharing:
        from weft.stitching.discovery import discover
        from weft.stitching.sharing_map import read_sharing

        family, asked = self.family, self.asked
        if asked.sharing is not None:
            return read_sharing(asked.sharing, family, tolerance=asked.tolerance)
        with progress_bar("looking for what is shared", 1) as advance:
            return discover(family, tolerance=asked.tolerance, on_progress=lambda done, of: advance(done=done, of=of))

    @cached_property
    def modelled(self) -> Modelled:
        from weft.stitching.planning.cost import Modelled, machine

        return Modelled(machine(self.asked.machine))

    @cached_property
    def cost(self) -> GraphCost:
        """What plans go by."""
        if not self.asked.measure:
            return self.modelled
        from weft.runtime.stitching import GraphTimer

        return GraphTimer(threads=self.asked.threads)

    @property
    def files(self) -> Mapping[str, Path]:
        """The file of every model by the model's name."""
        return {net.name: Path(file) for net, file in zip(self.family.nets, self.asked.models, strict=True)}

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The file of every group."""
        path = self.asked.output
        if len(self.groups) == 1:
            return (path,)
        return tuple(path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(len(self.groups)))

    def stitch(self) -> None:
        from weft.stitching.assembly import PLANNED, assemble
        from weft.stitching.lowering import formed
        from weft.stitching.planning.budget import BudgetLimits, stitch_groups
        from weft.stitching.planning.planner import ANYWHERE

        asked, both = self.asked, (self.family, self.sharing)
        if asked.dynamic:
            self._require_free_rows()
        settings: dict[str, Any] = {
            "form": asked.form, "cost": self.cost, "dynamic": asked.dynamic,
            "slabs": asked.slabs and asked.machine == "cpu",
        }  # fmt: skip
        if asked.in_groups:
            with progress_bar("grouping", 3 * self.family.tasks) as advance:
                limits = BudgetLimits(asked.memory_bytes, asked.seconds)
                self.groups = stitch_groups(*both, limits, **settings, progress=advance)
            return
        steps = len(formed(self.family)) * len(ANYWHERE) + 1 if asked.form == PLANNED else 0
        with progress_bar("planning", steps) as advance:
            self.groups = (assemble(*both, **settings, slack=asked.slack, progress=advance),)
        if asked.measure and self.groups[0].contest is not None:
            self._settle(self.groups[0], self.groups[0].contest)

    def _require_free_rows(self) -> None:
        """Refuse models that answer a row by the rows beside it; only what is kept as it stands in a file can do so."""
        from weft.runtime.stitch_check import tied_rows

        for net in self.family.nets:
            foreign = any(op.kind == "island" for op in net.ops)
            if why := tied_rows(net, CLOSE, threads=self.asked.threads) if foreign else "":
                raise StitchError(f"{net.name} {why}; leave out --dynamic")

    def _settle(self, made: Stitched, contest: Contest) -> None:
        """Choose by the times that are shown."""
        from weft.stitching.forms import FORMS
        from weft.stitching.summary import SEQUENTIAL, SLABBED, STITCHED

        plans = contest.plans
        apart = [SEQUENTIAL, *([SLABBED] if made.slabs_alone else [])]
        contenders = {name: self._graphs(made, name) for name in apart}
        contenders |= {str(at): self._graphs(made.planned(each), STITCHED) for at, each in enumerate(plans)}
        found = self._race(contenders)
        seconds = [found[str(at)] for at in range(len(plans))]
        chosen = contest.choose(seconds)
        self.groups = (made.planned(plans[chosen]),)
        pairs = reversed(list(zip(plans, seconds, strict=True)))  # of one form the first counts, as in ``in_form``
        forms = {each.name: mine for each, mine in pairs if each.name in FORMS}
        self.times = [{name: found[name] for name in apart} | forms | {STITCHED: seconds[chosen]}]

    def check(self) -> None:
        """Compare with the models alone; too large a difference that was not asked for is refused."""
        from weft.runtime.stitch_check import largest_difference

        if not self.asked.check:
            return
        self.difference, files = 0.0, self.files
        for made in self.groups:
            mine = [files[name] for name in made.names]
            for rows in _mixes(made):
                found = largest_difference(made.graph, made.family, mine, rows, threads=self.asked.threads)
                self.difference = max(self.difference, found.relative)
                self.coarse_difference = max(self.coarse_difference, found.coarse)
                if found.relative > CLOSE and not self.asked.tolerance:
                    raise StitchError(
                        f"{found.output} differs by {found.relative:.2g} of its largest number from the model alone, "
                        f"{CLOSE:g} is allowed; nothing is written (--no-check writes it all the same)"
                    )

    def summarise(self) -> None:
        """Count, and measure if asked to."""
        compare = self._compared()
        summaries = [made.summarise(self.modelled, compare) for made in self.groups]
        if self.asked.measure:
            self.times = self.times or self._times(summaries)
            summaries = [each.timed(mine) for each, mine in zip(summaries, self.times, strict=True)]
        self.summaries = tuple(summaries)

    def _compared(self) -> tuple[str, ...]:
        """The other forms to show: all that a plan has chosen from, but the one it has chosen."""
        from weft.stitching.assembly import PLANNED
        from weft.stitching.planning.planner import ANYWHERE

        made = self.groups[0]
        if self.asked.form != PLANNED or len(self.groups) > 1 or made.plan is None:
            return ()
        return tuple(form for form in ANYWHERE if form != made.plan.name)

    def _times(self, summaries: Sequence[Summary]) -> list[dict[str, float]]:
        """Seconds by way, for each group."""
        contenders: dict[str, list[Graph]] = {}
        for number, (made, summary) in enumerate(zip(self.groups, summaries, strict=True)):
            contenders |= {f"{number}:{way.name}": self._graphs(made, way.name) for way in summary.ways}
        times: list[dict[str, float]] = [{} for _ in summaries]
        for name, each_s in self._race(contenders).items():
            group, _, way = name.partition(":")
            times[int(group)][way] = each_s
        return times

    def _race(self, contenders: Mapping[str, Sequence[Graph]]) -> dict[str, float]:
        from weft.runtime.stitching import race

        threads = self.asked.threads
        found = race(contenders, threads=threads, rows=self.family.batches[0], rounds=ROUNDS)
        return {name: min(each.busy if threads == 1 else each.seconds) for name, each in found.items()}

    def _graphs(self, made: Stitched, way: str) -> list[Graph]:
        """What is run one after another to go *way*; rows are left free only where all models get the same number."""
        from weft.stitching.summary import SEQUENTIAL, SLABBED, STITCHED

        free = made.dynamic and len(set(self.family.batches)) == 1
        if way in (SEQUENTIAL, SLABBED):
            return [made.alone(task, slabs=way == SLABBED) for task in range(made.family.tasks)]
        if way == STITCHED:
            return [made.graph if free else made.counted]
        other = made.in_form(way)
        return [other.graph if free else other.counted]

    def show(self, *, layers: bool) -> None:
        from weft.cli.stitch_show import print_summaries

        print_summaries(self.summaries, self._title(), layers=layers)
        for net in self.family.nets:
            if net.stored != "float32":
                told = f"{net.name} is {net.stored}: it is read, computed and written in float32"
                console.print(told, highlight=False, markup=False)
        if self.difference is not None:
            told = f"largest difference to the models: {self.difference:.1e} of an output's largest number"
            if self.coarse_difference:
                told += f", {self.coarse_difference:.1e} to files in half precision as they run by themselves"
            console.print(told, highlight=False)

    def _title(self) -> str:
        family, asked = self.family, self.asked
        count = f"{family.tasks} models" if family.tasks > 1 else "1 model, which shares with none"
        same = len(set(family.batches)) == 1
        each = " each" * (family.tasks > 1)
        rows = f"{family.batches[0]}{each}" if same else ", ".join(map(str, family.batches))
        by = (
            f"ONNX Runtime, {asked.threads} thread{'s' * (asked.threads > 1)}"
            if asked.measure
            else f"{asked.machine} as described"
        )
        return f"{count}; rows: {rows}{', or any' if asked.dynamic else ''}; {by}"

    def write(self, json_file: str | None, sharing_file: str | None) -> None:
        from weft.jsonfile import write_json
        from weft.reports.stitching import stitching_report
        from weft.stitching.sharing_map import write_sharing

        for made, path in zip(self.groups, self.outputs, strict=True):
            if path.resolve() in [file.resolve() for file in self.files.values()]:
                raise InputError(f"{path} is one of the models; choose another --output")
            made.to_onnx(path)
            _told("stitched", str(path), ", ".join(made.names))
        for path in self._stale():
            _told("left", str(path), "of an earlier run, and no part of this one")
        if json_file:
            paths = [str(path) for path in self.outputs]
            write_json(json_file, stitching_report(self.summaries, paths, self._settings(), self.difference))
            _told("json", json_file)
        if sharing_file:
            write_sharing(sharing_file, self.sharing, self.family)
            _told("sharing", sharing_file)

    def _stale(self) -> list[Path]:
        """Files of other runs that could be taken for groups of this one."""
        path = self.asked.output
        numbered = path.parent.glob(f"{escape(path.stem)}.*{path.suffix}")
        names = [path, *(each for each in numbered if each.name[len(path.stem) + 1 : -len(path.suffix)].isdecimal())]
        return [each for each in sorted(names) if each.exists() and each not in (*self.outputs, *self.files.values())]

    def _settings(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "files": {name: str(path) for name, path in self.files.items()},
            "form": asked.form,
            "tolerance": asked.tolerance,
            "machine": asked.machine,
            "measured": asked.measure,
            "threads": asked.threads,
            "slack": asked.slack,
            "memory_cap_bytes": asked.memory_bytes,
            "latency_target_s": asked.seconds,
        }


def _sizes(texts: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes by file; one that names no file is for all of them."""
    given: list[str] = []
    for text in texts:
        whose = ":" in text.rpartition("=")[0]
        given += [text] if whose else [f"{model}:{text}" for model in models]
    return parse_shapes(given, models)


def _mixes(made: Stitched) -> list[tuple[int, ...]]:
    """Rows to compare with; where they are free, also unequal ones."""
    mixes = [made.batches]
    if made.dynamic:
        mixes.append(tuple(batch * (1 + task % 3) for task, batch in enumerate(made.batches)))
    return mixes


def _told(what: str, path: str, more: str = "") -> None:
    console.print(f"{what:<9} {path}" + (f"  ({more})" if more else ""), highlight=False, markup=False, soft_wrap=True)
