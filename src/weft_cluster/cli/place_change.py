"""``weft place --from``: a placement adapted to what has changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from weft.cli.command import refuse_unused, told_in_options
from weft.cli.printing import print_table, say, say_written, write_result

if TYPE_CHECKING:
    from weft.workloads.requests import Workload
    from weft_cluster.placing.machines import Machines


def adapt_placement(
    context: typer.Context,
    before: str,
    workload: Workload,
    machines: Machines,
    lost: Sequence[str],
    hysteresis: float,
    judged: bool,
    seed: int,
    output: str | None,
    json_file: str | None,
) -> None:
    """Adapt the placement of a folder, write the new one with its change, and tell of both."""
    from weft_cluster.placing.adapting import adapt
    from weft_cluster.placing.change import write_change
    from weft_cluster.placing.folder import write_folder
    from weft_cluster.placing.placement import read_placement
    from weft_cluster.placing.placement_shown import change_in_words, loads_table

    kept = "the objective and the target are those of the placement; leave it out"
    refuse_unused(context, "--from", dict.fromkeys(("objective", "target"), kept))
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
    parts = {"placement": adapted.placement, "change": adapted.change}
    write_result(json_file, {name: part.model_dump(mode="json") for name, part in parts.items()})


if TYPE_CHECKING:
    from weft_cluster.placing.placement import Placement

SHOWN = 40
"""Machines in the table; the page and the file have all."""


def print_placement(placement: Placement, output: str | None) -> None:
    """Print a placement, its value beside the bound, and where it was written."""
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
