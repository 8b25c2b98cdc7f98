"""Output of ``weft plan --machines``: a workload divided among several machines. The core prints the plans."""

from __future__ import annotations

import os

from weft.cli.printing import print_table, say, say_written
from weft_cluster.placing.folder import check_place
from weft_cluster.placing.placement_shown import in_words, machines_table
from weft_cluster.plan_across import PlansAcross, plan_across

__all__ = ["check_place", "plan_across", "print_plans"]


def print_plans(plans: PlansAcross, output: str | None) -> None:
    """Show which machine has which models, and how to serve each."""
    print_table(machines_table(plans.placement))
    for sentence in in_words(plans.placement):
        say(sentence, soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the placement, and a plan for each machine")
        return
    say_written("placement", output, f"{os.path.join(output, 'report.html')} shows it")
    for name in plans.plans:
        say(f"{'then':<9} weft serve {os.path.join(output, name)}   on {name}", soft_wrap=True)
