"""The HTML page of a plan: the prediction, all options, the reasons for the choice, and its busiest second.

The page is ``plan.html`` beside this module; this module makes its data.
"""

from __future__ import annotations

from typing import Any

from weft.planning.busiest import BusyStretch
from weft.planning.plan import Plan, PlannedModel, PlanOption, Prediction
from weft.planning.plan_request import PlanRequest
from weft.reports.page import page_text


def plan_page(plan: Plan, request: PlanRequest, busiest: BusyStretch, measured_on: str) -> str:
    """Return the page of a plan; *measured_on*: the machine and time of the measurement, in words."""
    return page_text(
        "plan.html", {**page_data(plan, request), "busiest": _stretch(busiest), "host": measured_on}, "weft.planning"
    )


def page_data(plan: Plan, request: PlanRequest) -> dict[str, Any]:
    """Return the data of the page except for the picture of the busiest second."""
    return {
        "title": " + ".join(model.name for model in plan.models),
        "objective": plan.objective,
        "made": plan.made,
        "disturbed": plan.measured.in_words if plan.measured else "",
        "limit": request.limit,
        "deadlines": request.deadlines,
        "choice": plan.options[0].label,
        "settings": plan.settings.model_dump(mode="json", exclude_none=True),
        "predicted": plan.predicted.model_dump(mode="json"),
        "models": [_model(model) for model in plan.models],
        "options": [_option(option) for option in plan.options if option.predicted],
        "left_out": [[option.label, option.left_out] for option in plan.options if not option.predicted],
        "reasons": plan.reasons.model_dump(mode="json"),
    }


def _model(model: PlannedModel) -> dict[str, Any]:
    return model.model_dump(mode="json", include={"name", "done", "bytes", "segments", "max_batch"})


def _option(option: PlanOption) -> dict[str, Any]:
    """Return the figures of a simulated option."""
    predicted = option.predicted
    assert predicted is not None
    return {
        "label": option.label,
        "p50_ms": _by_stream(predicted, "p50_ms"),
        "p99_ms": _by_stream(predicted, "p99_ms"),
        "p99_max_of": _by_stream(predicted, "p99_max_of"),
        "missed": predicted.worst_missed,
        "load": predicted.load,
        "factor": predicted.sustainable_factor,
        "per_s": predicted.sustainable_per_s,
        "memory_bytes": predicted.memory_bytes,
    }


def _by_stream(predicted: Prediction, key: str) -> list[float | None]:
    return [getattr(stream, key) for stream in predicted.streams]


def _stretch(stretch: BusyStretch) -> dict[str, Any]:
    """Return the busiest second as lists; times in microseconds."""
    return {
        "begins_s": stretch.begins_s,
        "length": round(stretch.length_s * 1e6),
        "lanes": stretch.lanes,
        "models": list(stretch.models),
        "segments": [list(names) for names in stretch.segments],
        "spans": [
            [span.lane, span.model, span.segment, span.rows, round(span.start_s * 1e6), round(span.end_s * 1e6)]
            for span in stretch.spans
        ],
        "requests": [[mark.model, round(mark.arrival_s * 1e6), int(mark.late)] for mark in stretch.requests],
    }
