"""``weft plan``: from models, rates and deadlines to a folder that is served."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import PlanError, WorkloadError
from weft.cli.command import name_options_in_errors, refuse_unused, terminated_like_interrupted
from weft.cli.common import (
    JsonFile,
    Shapes,
    compile_for_next_time,
    complete_models,
    folder_option,
    how,
    parse_bytes,
    requested_workload,
    what,
)
from weft.cli.printing import print_table, progress_bar, say, say_written, stage_bars, write_result

if TYPE_CHECKING:
    from weft.devices.conditions import Conditions
    from weft.planning.planning_run import MadePlan
    from weft.workloads.requests import Workload


def command(
    context: typer.Context,
    workload: Annotated[str | None, typer.Argument(help="A workload file (TOML).")] = None,
    output: Annotated[
        str | None,
        folder_option("--output", "-o", replaced=True, panel=None, help="The folder to write, for weft serve."),
    ] = None,
    streams: Annotated[
        list[str] | None,
        what(
            "--stream",
            "-s",
            autocompletion=complete_models,
            help="MODEL:rate=10,deadline=250 (ms) instead of a file; more keys: shape=NAME=1x128, value=INPUT=1, "
            "samples=x.npz, exit_rates=0.5+0.5; repeatable.",
        ),
    ] = None,
    shape: Shapes = None,
    cores: Annotated[int | None, what("--cores", show_default="all", help="Cores that lanes may use.")] = None,
    memory: Annotated[
        str | None, what("--memory", show_default="no limit", help="Memory limit of the server, as 2g.")
    ] = None,
    objective: Annotated[
        str, what("--objective", help="The first criterion: deadlines, load, memory or latency.")
    ] = "deadlines",
    deadlines: Annotated[
        str, what("--deadlines", help="strict: late requests are dropped; soft: they are answered late.")
    ] = "strict",
    machines: Annotated[
        int | None,
        what("--machines", help="Divide the models among this number of machines like this one; a plan for each."),
    ] = None,
    isolation: Annotated[
        str, what("--isolation", help="Where models run: threads, process (a worker each) or group:NAME (one).")
    ] = "threads",
    int8: Annotated[
        bool, what("--int8", help="Also try models in 8 bits, calibrated on the samples= of their streams.")
    ] = False,
    limit: Annotated[float, how("--limit", help="Fraction of deadlines that any stream may miss.")] = 0.01,
    device: Annotated[
        list[str] | None,
        how(
            "--device",
            "-d",
            show_default="host",
            help="cuda:0: plan for a GPU. Or files of weft profile -o, instead of measuring; repeatable.",
        ),
    ] = None,
    seconds: Annotated[float, how("--seconds", help="Length of each joint measurement of all models.")] = 1.5,
    cache: Annotated[
        str | None, how("--cache", show_default="~/.cache/weft/plan", help="Folder for cached measurements.")
    ] = None,
    fresh: Annotated[bool, how("--fresh", help="Measure again instead of using cached measurements.")] = False,
    check: Annotated[
        str | None,
        how(
            "--check",
            metavar="FOLDER",
            help="Time the models of a plan again, print what has changed since, and exit.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure models on this machine or its GPU, choose the best settings by simulation, and write a folder to serve.

    [bold]weft plan -s camera.onnx:rate=50,deadline=20 -s intent.onnx:rate=20,deadline=100 -o plan/[/bold], then
    [bold]weft serve plan/[/bold]. See docs/plan.md.
    """
    from weft.devices.conditions import worst_of
    from weft.devices.host import usable_cores
    from weft.planning.folder import check_place
    from weft.planning.planning_run import make_plan, plan_option

    if check is not None:
        _check(context, check)
        return
    requested = _workload(workload, streams, shape)
    across_machines = None if machines is None else plan_option("machines")
    if output is not None:  # refused before minutes of measuring
        (check_place if across_machines is None else across_machines.check_place)(output)
    began = datetime.now(UTC)
    with name_options_in_errors(context), terminated_like_interrupted(), stage_bars() as show:
        result: Any = (make_plan if across_machines is None else partial(across_machines.plan_across, count=machines))(
            requested,
            cores=cores,
            memory_bytes=parse_bytes("--memory", memory),
            objective=objective,
            deadlines=deadlines,
            limit=limit,
            isolation=isolation,
            int8=int8,
            devices=device or (),
            seconds=seconds,
            cache=cache,
            fresh=fresh,
            processes=usable_cores(),
            on_progress=lambda progress: show(*progress),
        )
    if output is not None:
        result.write(output)
    if across_machines is not None:
        across_machines.print_plans(result, output)
        _print_conditions(worst_of(machine.plan.measured for machine in result.plans.values()), began, device or ())
        write_result(json_file, result.placement.model_dump(mode="json"))
        return
    _print(result, output)
    _print_conditions(result.plan.measured, began, device or ())
    write_result(json_file, result.plan.model_dump(mode="json"))
    compile_for_next_time()


def _workload(path: str | None, streams: list[str] | None, shapes: list[str] | None) -> Workload:
    if (path is None) == (not streams):
        raise WorkloadError("say what to plan for: a workload file, or -s MODEL.onnx:rate=10,deadline=100")
    return requested_workload(path, streams, shapes)


def _check(context: typer.Context, folder: str) -> None:
    """Time a plan's models again and print the differences; the exit code is 1 if there are any."""
    from weft.planning.plan import read_plan
    from weft.planning.plan_check import drift

    advice = "it looks at a plan that is there; leave it out"
    refused = ("workload", "output", "streams", "shape", "device", "json_file")
    refuse_unused(context, "--check", dict.fromkeys(refused, advice))
    read_plan(folder)  # raises PlanError: a mistyped folder must not be reported as a difference
    changes = drift(folder)
    for sentence in changes:
        say(sentence, soft_wrap=True)
    differences = _time_again(folder, changes)
    for sentence in differences:
        say(sentence, soft_wrap=True)
    if changes or differences:
        raise typer.Exit(1)
    say(f"{folder}: nothing has changed since it was planned")


def _time_again(folder: str, changes: list[str]) -> list[str]:
    """Time a plan's models now and return the differences; *changes*: sentences that are printed already."""
    from weft.planning.plan_check import timed_now

    try:
        with progress_bar("timing", 1) as advance:
            timed = timed_now(folder, progress=lambda what, done, of: advance(f"timing: {what}", done, of))
    except PlanError as error:
        if str(error) not in changes:
            say(f"models are not timed: {error}", soft_wrap=True)
        return []
    for model in timed.models:
        if not model.differs:
            say(str(model), style="dim", soft_wrap=True)
    return timed.differences


def _print_conditions(measured: Conditions | None, began: datetime, devices: Sequence[str]) -> None:
    """Print the age of measurements that are older than this command (*began*), and warn of disturbed ones."""
    from weft.devices.conditions import age_in_words
    from weft.devices.host import is_measured

    if measured is None:
        return
    from_file = any(not is_measured(device) for device in devices)
    if measured.ended < began.replace(microsecond=0):
        advice = "" if from_file else " and kept; --fresh measures again"
        say(f"{'measured':<9} {age_in_words(measured.ended)} ago{advice}", soft_wrap=True)
    if measured.disturbed:
        advice = "measure it again" if from_file else "plan with nothing else running, or --fresh later"
        say(f"{'measured':<9} {measured.in_words}: {advice}", style="yellow", soft_wrap=True)


def _print(result: MadePlan, output: str | None) -> None:
    from weft.planning.plan_shown import options_table

    plan = result.plan
    print_table(options_table(plan))
    for heading, sentences in (
        ("why", plan.reasons.won),
        ("limits", plan.reasons.limits),
        ("next", plan.reasons.next),
    ):
        for index, sentence in enumerate(sentences):
            say(f"{heading if index == 0 else '':<9} {sentence}", soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the plan")
        return
    say_written("plan", output, f"{os.path.join(output, 'report.html')} shows it")
    deadlines_option = "" if plan.deadlines == "strict" else f" --deadlines {plan.deadlines}"
    say(f"{'then':<9} weft serve {output}   and   weft bench {output}{deadlines_option}", soft_wrap=True)
