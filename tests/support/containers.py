"""Container files in ``deploy/``, parsed."""

from __future__ import annotations

import re

from tests import ROOT
from weft.serving.environment import API_KEY_FILE_VARIABLE, VARIABLES

DEPLOY = ROOT / "deploy"

KNOWN_VARIABLES = {*VARIABLES, API_KEY_FILE_VARIABLE}
"""Environment variables that the server reads."""


def instructions(file: str = "Containerfile") -> list[tuple[str, str]]:
    """Each instruction of a container file and what follows it, on one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / file).read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def last_stage() -> list[tuple[str, str]]:
    """The instructions of the image that is kept."""
    starts = [place for place, (word, _) in enumerate(instructions()) if word == "FROM"]
    assert len(starts) == 3, "one to build the wheel, one to install it, one that is kept"
    return instructions()[starts[-1] :]
