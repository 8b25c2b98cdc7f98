"""``weft sustain``: the highest load at which deadlines hold, for several policies and ratios."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.common import how, split_names, what, with_shapes
from weft.cli.host import SECONDS, AnyDevice, Cache, LaneCount, Seconds, workload_device
from weft.cli.printing import print_table, progress_bar, say_written, write_result


def command(
    workload: Annotated[str, typer.Argument(help="A workload file (TOML).")],
    policies: common.Policies = "all",
    ratios: Annotated[
        str | None, what("--ratios", help="Shares of the total rate to try, as 4:1,1:1; 'paper' for 64:1...1:64.")
    ] = None,
    device: AnyDevice = None,
    lanes: LaneCount = None,
    shape: common.Shapes = None,
    seconds: Seconds = SECONDS,
    cache: Cache = None,
    late: Annotated[str, how("--late", help="Weave, keep, demote or drop late requests.")] = "weave",
    limit: Annotated[float, how("--limit", help="Fraction of deadlines that any stream may miss.")] = 0.01,
    seeds: Annotated[int, how("--seeds", help="Runs per load.")] = 2,
    tolerance: Annotated[float, how("--tolerance", help="Relative accuracy of the search.")] = 0.01,
    processes: Annotated[
        int, how("--processes", "-j", show_default="one per core", help="Number of parallel searches.")
    ] = 0,
    figure: common.FigureFile = None,
    json_file: common.JsonFile = None,
) -> None:
    """Find the highest load at which at most 1 % of any stream's deadlines are missed."""
    from weft.simulation.loads import check_request, sustain
    from weft.workloads.requests import read_workload

    if processes < 0:
        raise InputError(f"processes = {processes} must be at least 1")
    base = with_shapes(read_workload(workload), shape)
    mixes = _mixes(ratios)
    names = policies if policies == "all" else split_names(policies, "--policies")
    check_request(base, names, mixes, late)
    target = workload_device(base, device, lanes, seconds, cache, shape)
    with progress_bar("searching", 1) as advance:
        loads = sustain(
            base,
            policies=names,
            ratios=mixes,
            device=target,
            late=late,
            limit=limit,
            seeds=seeds,
            tolerance=tolerance,
            processes=processes or os.cpu_count() or 1,
            on_progress=lambda done, of: advance(done=done, of=of),
        )
    print_table(loads.table())
    write_result(json_file, loads.as_dict())
    if figure:
        from weft.reports.pictures import save

        save(loads.plot(), figure)
        say_written("figure", figure)


def _mixes(text: str | None) -> list[tuple[float, ...]] | None:
    """Parse the value of ``--ratios``: a ratio has one number per stream."""
    from weft.simulation.loads import PAPER_RATIOS

    if text is None:
        return None
    if text == "paper":
        return list(PAPER_RATIOS)
    try:
        return [tuple(float(part) for part in mix.split(":")) for mix in text.split(",")]
    except ValueError:
        raise InputError(f"--ratios {text!r} is not of the form 4:1,1:1") from None
