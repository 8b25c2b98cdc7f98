"""A plan as a page that opens from a file: the prediction, all options, why this one, and its busiest second.

The page is ``plan.html`` beside this module; here its data is made.
"""

from __future__ import annotations

from typing import Any

from weft.planning.busiest import BusyStretch
from weft.planning.plan import Plan, PlannedModel, PlanOption, Prediction
from weft.planning.plan_request import PlanRequest
from weft.reports.page import page_text


def plan_page(plan: Plan, asked: PlanRequest, busiest: BusyStretch, measured_on: str) -> str:
    """The page of a plan; *measured_on*: the machine and time of the measurement, in words."""
    return page_text(
        "plan.html", {**page_data(plan, asked), "busiest": _stretch(busiest), "host": measured_on}, "weft.planning"
    )


def page_data(plan: Plan, asked: PlanRequest) -> dict[str, Any]:
    """All the page shows but the picture."""
    return {
        "title": " + ".join(model.name for model in plan.models),
        "objective": plan.objective,
        "made": plan.made,
        "disturbed": plan.measured.in_words if plan.measured else "",
        "limit": asked.limit,
        "deadlines": asked.deadlines,
        "choice": plan.options[0].label,
        "settings": plan.settings.model_dump(mode="json", exclude_none=True),
        "predicted": plan.predicted.model_dump(mode="json"),
        "models": [_model(each) for each in plan.models],
        "options": [_option(each) for each in plan.options if each.predicted],
        "left_out": [[each.label, each.left_out] for each in plan.options if not each.predicted],
        "reasons": plan.reasons.model_dump(mode="json"),
    }


def _model(model: PlannedModel) -> dict[str, Any]:
    return model.model_dump(mode="json", include={"name", "done", "bytes", "segments", "max_batch"})


def _option(option: PlanOption) -> dict[str, Any]:
    predicted = option.predicted
    assert predicted is not None
    return {
        "label": option.label,
        "p50_ms": _each(predicted, "p50_ms"),
        "p99_ms": _each(predicted, "p99_ms"),
        "p99_max_of": _each(predicted, "p99_max_of"),
        "missed": predicted.worst_missed,
        "load": predicted.load,
        "factor": predicted.sustainable_factor,
        "per_s": predicted.sustainable_per_s,
        "memory_bytes": predicted.memory_bytes,
    }


def _each(predicted: Prediction, key: str) -> list[float | None]:
    return [getattr(stream, key) for stream in predicted.streams]


def _stretch(stretch: BusyStretch) -> dict[str, Any]:
    """The busiest second by columns; times in microseconds."""
    return {
        "begins_s": stretch.begins_s,
        "length": round(stretch.length_s * 1e6),
        "lanes": stretch.lanes,
        "models": list(stretch.models),
        "segments": [list(names) for names in stretch.segments],
        "spans": [
            [each.lane, each.model, each.segment, each.rows, round(each.start_s * 1e6), round(each.end_s * 1e6)]
            for each in stretch.spans
        ],
        "requests": [[each.model, round(each.arrival_s * 1e6), int(each.late)] for each in stretch.requests],
    }
