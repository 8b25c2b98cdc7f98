"""``weft place``: which models share which machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from weft.cli.command import refuse_unused, told_in_options
from weft.cli.common import JsonFile, Shapes, folder_option, how, what, with_shapes
from weft.cli.printing import stage_bars, write_result
from weft_cluster.cli.place_change import print_placement

if TYPE_CHECKING:
    from weft_cluster.placing.placement import Objective


def command(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="A workload file (TOML).")],
    machines: Annotated[str, what("--machines", "-m", metavar="FILE", help="The available machines (TOML).")],
    output: Annotated[
        str | None,
        folder_option("--output", "-o", replaced=True, panel=None, help="The folder to write: the placement, a page."),
    ] = None,
    objective: Annotated[
        str, what("--objective", help="The objective: machines (fewest), cost, load or attainment.")
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
    fluid: Annotated[bool, how("--fluid", help="Do not simulate; only loads, memory and deadlines count.")] = False,
    seed: Annotated[int, how("--seed", help="Seed of the sampled arrivals.")] = 0,
    shape: Shapes = None,
    json_file: JsonFile = None,
) -> None:
    """Place models on machines: replicas, their share of the rate, and a bound that no placement exceeds.

    [bold]weft place workload.toml --machines cluster.toml -o placement/[/bold]. See docs/place.md.
    """
    from weft.workloads.requests import read_workload
    from weft_cluster.placing.folder import check_place, write_folder
    from weft_cluster.placing.machines import read_machines
    from weft_cluster.routing.placing_run import place

    if output is not None:
        check_place(output)
    asked, there = with_shapes(read_workload(workload), shape), read_machines(machines)
    if before is not None:
        from weft_cluster.cli.place_change import adapt_placement

        adapt_placement(context, before, asked, there, lost or (), hysteresis, not fluid, seed, output, json_file)
        return
    refuse_unused(context, "a new placement", dict.fromkeys(("lost", "hysteresis"), "add --from FOLDER"))
    with told_in_options(context), stage_bars() as show:
        placement = place(
            asked,
            there,
            objective=cast("Objective", objective),
            target=None if fluid else target,
            seed=seed,
            on_progress=lambda stage: show(stage),
        )
    if output is not None:
        write_folder(placement, output)
    print_placement(placement, output)
    write_result(json_file, placement.model_dump(mode="json"))
