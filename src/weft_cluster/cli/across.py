"""``weft plan --machines``: what a division among several machines is told as; the plans themselves are the core's."""

from __future__ import annotations

import os

from weft.cli.printing import print_table, say, told
from weft_cluster.placing.folder import check_place
from weft_cluster.placing.placement_shown import in_words, machines_table
from weft_cluster.plan_across import PlansAcross, plan_across

__all__ = ["check_place", "plan_across", "print_plans"]


def print_plans(made: PlansAcross, output: str | None) -> None:
    """Show which machine has which models, and how to serve each."""
    print_table(machines_table(made.placement))
    for sentence in in_words(made.placement):
        say(sentence, soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the placement, and a plan for each machine")
        return
    told("placement", output, f"{os.path.join(output, 'report.html')} shows it")
    for name in made.plans:
        say(f"{'then':<9} weft serve {os.path.join(output, name)}   on {name}", soft_wrap=True)
