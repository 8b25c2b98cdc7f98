"""How the reports of simulated runs show themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.reports.tables import ResultTable
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport
from weft.simulation.run_tables import report_table, requests_table

if TYPE_CHECKING:
    from weft.reports.pictures import Figure


def tables(report: Report | RequestReport) -> tuple[ResultTable, ...]:
    """The streams of a run."""
    return (report_table(report) if isinstance(report, Report) else requests_table(report),)


def figure(report: Report | RequestReport) -> Figure:
    """How streams fared beside running alone, or how long requests took."""
    from weft.simulation.run_pictures import report_figure, requests_figure

    return report_figure(report) if isinstance(report, Report) else requests_figure(report)
