"""The output of ``weft map``: progress of the search, a table of schedules, the mapping, the certificate, and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, isfinite
from typing import TYPE_CHECKING

from weft.base.errors import InputError
from weft.base.version import __version__
from weft.cli.printing import (
    Advance,
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    say_written,
    write_result,
)

if TYPE_CHECKING:
    from weft_map.problem import Objective
    from weft_map.scenario import MappingCase
    from weft_map.schedule import Outcome
    from weft_map.solver import Certificate, Improvement, Solution

DRAWN_BASELINES = 3
"""Number of best baselines that are drawn below our own schedule."""
ORIGINS = {  # origin of a profile -> remark below the mapping
    "derived": "derived: published totals, shared out over the groups by the network's structure, not measured",
    "estimated": "estimated: a roofline from the SoC's description; nothing was measured",
}
ROUNDING = 1e-6
"""Differences by a smaller share are rounding errors."""
MENTIONED_GAIN = 5e-4
"""A gain by idling is mentioned only if it is at least this share."""


def solve_shown(case: MappingCase) -> Solution:
    """Solve *case*, with a progress bar on a terminal."""
    from weft_map.solver import load_kernels, solve

    with progress_bar("loading kernels (the first use compiles them)"):
        load_kernels()
    with progress_bar("searching") as advance:
        return solve(case.problem, case.options, _show_improvements(advance, case.options.objective))


def add_z3(case: MappingCase, solution: Solution) -> Solution:
    """Solve with Z3 as well, and return the solution with Z3's schedule among its baselines."""
    from weft_map.z3_model import solve_like_the_paper

    if case.options.objective != "latency":
        raise InputError("--z3 looks for the least latency only; leave out --objective throughput")
    with progress_bar("asking Z3"):
        z3_solution = solve_like_the_paper(case.problem, case.options.limits, case.options.time_limit_s)
    verdict = "proved its schedule best" if z3_solution.certificate.proved else "proved nothing"
    line = f"Z3, whose steps may wait for any time, {verdict} in {z3_solution.certificate.seconds:.1f} s"
    say(line)
    return replace(solution, baselines={**solution.baselines, **z3_solution.baselines}, within=(*solution.within, "z3"))


def _show_improvements(advance: Advance, objective: Objective) -> Callable[[Improvement], None]:
    """A callback that writes each improvement into the progress bar."""

    def show(improvement: Improvement) -> None:
        has_bound = isfinite(improvement.bound) and improvement.bound != 0
        gap = f", at most {abs(improvement.value / improvement.bound - 1):.1%} from the best" if has_bound else ""
        value = _value(improvement.value, objective)
        advance(f"{value} by {improvement.schedule.made_by} after {improvement.seconds:.2f} s{gap}")

    return show


def _value(value: float, objective: Objective) -> str:
    """Text of a makespan in seconds, or of a throughput in runs per second."""
    return f"{value * 1e3:.3f} ms" if objective == "latency" else f"a sum of 1/T of {value:.1f}/s"


def print_solution(case: MappingCase, solution: Solution) -> None:
    """Print the schedules, the mapping, then sentences about energy, the proof and pauses."""
    _print_schedules(case, solution)
    console.print()
    _print_mapping(case, solution)
    console.print()
    for line in [*_energy_lines(case, solution), *certificate_lines(solution.certificate), *_idling_lines(solution)]:
        say(line)


def _energy_lines(case: MappingCase, solution: Solution) -> list[str]:
    """A line with the energy and its budget; empty without a budget."""
    from weft_map.limits import energy_j

    budget_j = case.options.limits.energy_budget_j
    if budget_j is None:
        return []
    return [f"energy {energy_j(case.problem, solution.schedule):.6g} J of {budget_j:.6g} J"]


def _idling_lines(solution: Solution) -> list[str]:
    """A line about the same mapping with delays of any length (``Solution.idled``), if that gains enough."""
    if solution.idled is None:
        return []
    objective = solution.certificate.objective
    ours, idled = (abs(outcome.value(objective)) for outcome in (solution.outcome, solution.idled))
    if abs(idled / ours - 1) < MENTIONED_GAIN:
        return []
    return [f"with pauses of any length the same mapping comes to {_value(idled, objective)} ({idled / ours - 1:+.2%})"]


def _print_schedules(case: MappingCase, solution: Solution) -> None:
    """Print a table of our schedule and all baselines, best first."""
    problem, objective = case.problem, case.options.objective
    names, goal = " + ".join(task.name for task in problem.tasks), {"latency": "least", "throughput": "most"}[objective]
    columns = ("schedule", "makespan ms", "sum of 1/T, 1/s", "to best baseline", "slow-down", "moves")
    table = plain_table(f"{names} on {problem.soc.name}: {goal} {objective}", columns)
    best = solution.best_baseline
    rival = solution.baselines[best] if best else None
    add_row(table, _title(solution), *_cells(solution.outcome, rival, objective), style="bold")
    for name in sorted(solution.baselines, key=lambda name: solution.baselines[name].value(objective)):
        outcome = solution.baselines[name]
        add_row(
            table,
            name if name in solution.within else f"{name} (breaks the limits)",
            *_cells(outcome, rival, objective),
        )
    console.print(table)


def _title(solution: Solution) -> str:
    made_by = solution.schedule.made_by
    return "weft" if made_by in ("", "weft") else f"weft (from {made_by})"


def _cells(outcome: Outcome, rival: Outcome | None, objective: Objective) -> tuple[str, ...]:
    """The cells of an outcome's row after its name; *rival*: the best baseline."""
    from weft_map.pages.numbers import report_of

    report = report_of(outcome)
    change = "-"
    if rival and rival.makespan_s:
        ratio = outcome.value(objective) / rival.value(objective) - 1
        change = f"{100 * ratio:+.1f} %" if round(100 * ratio, 1) else "same"
    slow_down = 1 + report.contention_s / report.work_s if report.work_s else 1.0
    return (
        number(report.makespan_s, scale=1e3),
        number(report.throughput, 1),
        change,
        number(slow_down),
        str(report.moves),
    )


def _print_mapping(case: MappingCase, solution: Solution) -> None:
    """Print a table of the units of each task: a row per run, or one row if all runs use the same units."""
    from weft_map.export import segment_line, segments

    problem = case.problem
    mapped = segments(problem, solution.schedule)
    table = plain_table("mapping, groups from 0", ("task", "profile", "groups", "through ms", "units"), left=2)
    units_column = table.columns[-1]
    units_column.justify, units_column.no_wrap = "left", False
    for n, task in enumerate(problem.tasks):
        profile = case.profiles[task.name]
        texts = [
            segment_line(problem, [s for s in mapped if (s.task, s.run) == (n, run)]) for run in range(task.repeats)
        ]
        if len(set(texts)) == 1:
            texts = texts[:1]
        for run, text in enumerate(texts):
            name = task.name if len(texts) == 1 else f"{task.name}, run {run + 1}"
            finish_ms = number(solution.outcome.finish_s[n], scale=1e3) if run == len(texts) - 1 else ""
            add_row(table, name, profile.origin, str(len(task.groups)), finish_ms, text)
    console.print(table)
    for origin in dict.fromkeys(profile.origin for profile in case.profiles.values()):
        if origin in ORIGINS:
            say(ORIGINS[origin], style="yellow")


def certificate_lines(certificate: Certificate) -> list[str]:
    """Describe the schedule and its certificate in two or three lines."""
    effort = f"{certificate.seconds:.2f} s, {certificate.states:,} states"
    if certificate.proved:
        slack = f" to {certificate.gap:.2g}" if certificate.gap else ""
        lines = [f"optimal{slack} among event-aligned schedules, proved ({effort})"]
        if certificate.assumes:
            lines.append("the proof takes dominance for granted; --strict goes on without it")
    else:
        bound = _value(certificate.bound, certificate.objective)
        lines = [
            f"not proved optimal: the best event-aligned schedule is at most "
            f"{_better(certificate, certificate.bound):.1%} better (bound {bound}); {certificate.ended} after {effort}"
        ]
    margin = _better(certificate, certificate.any_idling_bound)
    if margin < ROUNDING:
        return [*lines, "no schedule of any kind is better"]
    rounded_up = ceil(1e3 * margin) / 1e3
    return [*lines, f"no schedule of any kind, whatever its pauses, is more than {rounded_up:.1%} better"]


def _better(certificate: Certificate, bound: float) -> float:
    """The distance of *bound* from the certified value, as a share of the value."""
    return abs(1 - bound / certificate.value) if certificate.value else 0.0


# Files


def write_files(
    case: MappingCase,
    solution: Solution,
    *,
    json_file: str | None,
    html: str | None,
    figure: str | None,
    perfetto: str | None,
    trace: str | None,
    devices: str | None,
) -> None:
    """Write the files that the options name, and print their paths."""
    from weft_map.export import solution_as_dict
    from weft_map.pages.numbers import mapping_report

    report = {"report": mapping_report(solution.outcome)}
    write_result(json_file, solution_as_dict(case, solution) | report)
    if html:
        _write_page(html, case, solution)
    if figure:
        from weft_map.pages.picture import draw_mapping

        draw_mapping(_outcomes_to_draw(solution), figure)
        say_written("figure", figure)
    if perfetto:
        from weft_map.export import write_outcome_perfetto

        write_outcome_perfetto(solution.outcome, perfetto)
        say_written("perfetto", perfetto)
    if trace:
        from weft.reports.trace import write_trace
        from weft_map.pages.numbers import outcome_trace

        write_trace(outcome_trace(solution.outcome), trace)
        say_written("trace", trace)
    if devices:
        from weft_map.export import write_device_list

        write_device_list(devices, solution.outcome, {name: profile.model for name, profile in case.profiles.items()})
        say_written("devices", devices)


def _write_page(path: str, case: MappingCase, solution: Solution) -> None:
    from weft_map.export import finite
    from weft_map.pages.page import write_mapping_page

    notes = {
        "objective": case.options.objective,
        "in words": "; ".join([*certificate_lines(solution.certificate), *_idling_lines(solution)]),
        **{f"profile of {name}": f"{profile.origin}; {profile.source}" for name, profile in case.profiles.items()},
        "version": __version__,
    }
    numbers = {key: finite(value) for key, value in solution.certificate.as_dict().items()}
    write_mapping_page(
        path, _outcomes_to_draw(solution), objective=case.options.objective, notes=notes, certificate=numbers
    )
    say_written("timeline", path)


def _outcomes_to_draw(solution: Solution) -> list[Outcome]:
    """Our schedule, then the best baselines with different values, and ``gpu-only`` in any case."""
    objective = solution.certificate.objective
    ours = replace(solution.outcome, schedule=replace(solution.schedule, made_by=_title(solution)))
    by_value: dict[float, Outcome] = {}
    differing = [outcome for outcome in solution.baselines.values() if outcome.schedule != solution.schedule]
    for outcome in sorted(differing, key=lambda outcome: outcome.value(objective)):
        by_value.setdefault(round(outcome.value(objective), 12), outcome)
    best = list(by_value.values())
    gpu_only = [outcome for outcome in best[DRAWN_BASELINES:] if outcome.schedule.made_by == "gpu-only"]
    return [ours, *best[:DRAWN_BASELINES], *gpu_only]
