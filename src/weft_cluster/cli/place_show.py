"""What ``weft place`` prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft.cli.printing import print_table, say, told

if TYPE_CHECKING:
    from weft_cluster.placing.placement import Placement

SHOWN = 40
"""Machines in the table; the page and the file have all."""


def print_placement(placement: Placement, output: str | None) -> None:
    """Tell what a placement comes to, and where it was written."""
    from weft_cluster.placing.placement_shown import in_words, machines_table, unserved_table

    print_table(machines_table(placement, SHOWN))
    if placement.unserved:
        print_table(unserved_table(placement))
    for sentence in in_words(placement):
        say(sentence, soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the placement")
        return
    told("placement", output, f"{os.path.join(output, 'report.html')} shows it")
