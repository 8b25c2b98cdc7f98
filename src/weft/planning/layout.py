"""What lies where in the folder of a plan (docs/formats.md)."""

from __future__ import annotations

import os
from pathlib import Path

from weft.base.errors import PlanError
from weft.workloads.requests import Workload, read_workload

PLAN_FILE, SETTINGS_FILE, WORKLOAD_FILE = "plan.json", "weft.toml", "workload.toml"
HOST_FILE, REPORT_FILE = "host.json", "report.html"
MODELS, DATA = "models", "data"
OF_A_PLAN = frozenset({PLAN_FILE, SETTINGS_FILE, WORKLOAD_FILE, HOST_FILE, REPORT_FILE, MODELS, DATA})
"""All that a plan's folder holds."""


def is_plan(path: str | Path) -> bool:
    """Whether this is the folder of a plan."""
    return os.path.isfile(os.path.join(path, PLAN_FILE))


def planned_workload(folder: str | Path) -> Workload:
    """What a plan was made for, as ``weft bench`` sends it."""
    file = Path(folder) / WORKLOAD_FILE
    if not file.is_file():
        raise PlanError(f"{folder}: the plan has no {WORKLOAD_FILE}; plan again")
    return read_workload(file)
