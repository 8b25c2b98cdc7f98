"""``weft place``: which models share which machine; with ``--from``, adapted to changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weft.cli.command import refuse_unused, told_in_options
from weft.cli.common import JsonFile, Shapes, folder_option, how, what, with_shapes
from weft.cli.printing import print_table, say, say_written, stage_bars, write_result

if TYPE_CHECKING:
    from weft.workloads.requests import Workload
    from weft_cluster.placing.machines import Machines
    from weft_cluster.placing.placement import Objective, Placement

SHOWN = 40
"""Machines in the table; the page and the file have all."""


def command(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="A workload file (TOML).")],
    machines: Annotated[str, what("--machines", "-m", metavar="FILE", help="The available machines (TOML).")],
    output: Annotated[
        str | None,
        folder_option("--output", "-o", replaced=True, panel=None, help="The folder to write: the placement, a page."),
    ] = None,
    objective: Annotated[
        str, what("--objective", help="What to optimize: machines (fewest), cost, load or attainment.")
    ] = "machines",
    target: Annotated[
        float, what("--target", help="Fraction of requests that must be on time in the simulation.")
    ] = 0.99,
    before: Annotated[
        str | None,
        what(
            "--from", metavar="FOLDER", help="Adapt this placement to the changes, and load as few models as possible."
        ),
    ] = None,
    lost: Annotated[
        list[str] | None, what("--lost", metavar="MACHINE", help="With --from: a machine that is gone; repeatable.")
    ] = None,
    hysteresis: Annotated[
        float, how("--hysteresis", help="With --from: how far below its cap a machine ends up if it has to change.")
    ] = 0.1,
    fluid: Annotated[bool, how("--fluid", help="Simulate nothing: only loads, memory and deadlines count.")] = False,
    seed: Annotated[int, how("--seed", help="Seed of the sampled arrivals.")] = 0,
    shape: Shapes = None,
    json_file: JsonFile = None,
) -> None:
    """Place models on machines: replicas, their share of the rate, and a bound that no placement exceeds.

    [bold]weft place workload.toml --machines cluster.toml -o placement/[/bold]. See docs/place.md.
    """
    from weft.workloads.requests import read_workload
    from weft_cluster.placing.machines import read_machines
    from weft_cluster.placing.placement_shown import check_place, write_folder
    from weft_cluster.routing.placing_run import place

    if output is not None:
        check_place(output)
    streams, available = with_shapes(read_workload(workload), shape), read_machines(machines)
    if before is not None:
        adapt_placement(
            context,
            before,
            streams,
            available,
            lost=lost or (),
            hysteresis=hysteresis,
            judged=not fluid,
            seed=seed,
            output=output,
            json_file=json_file,
        )
        return
    refuse_unused(context, "a new placement", dict.fromkeys(("lost", "hysteresis"), "add --from FOLDER"))
    with told_in_options(context), stage_bars() as show:
        placement = place(
            streams,
            available,
            objective=cast("Objective", objective),
            target=None if fluid else target,
            seed=seed,
            on_progress=lambda stage: show(stage),
        )
    if output is not None:
        write_folder(placement, output)
    print_placement(placement, output)
    write_result(json_file, placement.model_dump(mode="json"))


def adapt_placement(
    context: typer.Context,
    before: str,
    workload: Workload,
    machines: Machines,
    *,
    lost: Sequence[str],
    hysteresis: float,
    judged: bool,
    seed: int,
    output: str | None,
    json_file: str | None,
) -> None:
    """Adapt the placement of folder *before*, write the new one with its change if *output* is given, and print both.

    judged: whether to simulate which requests meet their deadlines. Raises InputError for options that do not go with
    --from.
    """
    from weft_cluster.placing.adapting import adapt, write_change
    from weft_cluster.placing.placement import read_placement
    from weft_cluster.placing.placement_shown import change_in_words, loads_table, write_folder

    way_out = "the objective and the target are those of the placement; leave it out"
    refuse_unused(context, "--from", dict.fromkeys(("objective", "target"), way_out))
    with told_in_options(context):
        adapted = adapt(
            read_placement(before), workload, machines, lost=lost, hysteresis=hysteresis, judged=judged, seed=seed
        )
    if output is not None:
        write_folder(adapted.placement, output, partial(write_change, adapted.change))
    if adapted.change.loads:
        print_table(loads_table(adapted.change, SHOWN))
    say(change_in_words(adapted.change), soft_wrap=True)
    print_placement(adapted.placement, output)
    results = {"placement": adapted.placement, "change": adapted.change}
    write_result(json_file, {name: result.model_dump(mode="json") for name, result in results.items()})


def print_placement(placement: Placement, output: str | None) -> None:
    """Print a placement, its value beside the bound, and the folder *output* that it was written to, if any."""
    from weft_cluster.placing.placement_shown import in_words, machines_table, unserved_table

    print_table(machines_table(placement, SHOWN))
    if placement.unserved:
        print_table(unserved_table(placement))
    for sentence in in_words(placement):
        say(sentence, soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the placement")
        return
    say_written("placement", output, f"{os.path.join(output, 'report.html')} shows it")
