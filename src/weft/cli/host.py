"""Devices of commands: options, the device of a workload, measuring this machine, and tables of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from weft.base.errors import InputError
from weft.cli.common import complete_devices, how, what
from weft.cli.printing import add_row, console, counted, number, plain_table, progress_bar, say

if TYPE_CHECKING:
    from weft.devices import Host, Npu
    from weft.devices.host import GpuCuts
    from weft.planning.survey import Subject
    from weft.simulation.requests import Device
    from weft.workloads.requests import Workload

SECONDS = 5.0
"""Default length of the measurement of all models together; longer measurements have less noise."""
DEFAULT_NPU = "tpuv3-like"

AnyDevice = Annotated[
    str | None,
    what(
        "--device",
        "-d",
        autocompletion=complete_devices,
        show_default=f"{DEFAULT_NPU}, or the workload's",
        help="host or cuda:0: this machine or its GPU, measured; a preset (weft devices list), or a file.",
    ),
]
LaneCount = Annotated[
    int | None, how("--lanes", show_default="cores less one", help="host: number of segments that run at a time.")
]
Seconds = Annotated[float, how("--seconds", help="host: length of the joint measurement of all models.")]
Cache = Annotated[str | None, how("--cache", help="host: folder for cut models, as in weft serve --cache.")]


def measure(
    subjects: Sequence[Subject] | Workload,
    device: str,
    lanes: int | None,
    seconds: float = SECONDS,
    cache: str | None = None,
) -> Host:
    """Measure this machine or its GPU with these models or those of a workload, and show the progress."""
    from weft.planning.survey.host_measurement import measure

    with progress_bar("measuring", 1) as advance:
        return measure(
            subjects,
            device=device,
            lanes=lanes,
            seconds=seconds,
            cache=cache,
            on_progress=lambda what, done, of: advance(f"measuring: {what}", done, of),
        )


def workload_device(
    workload: Workload,
    device: str | None,
    lanes: int | None,
    seconds: float = SECONDS,
    cache: str | None = None,
    shapes: Sequence[str] | None = None,
) -> Device:
    """Return the device *device*, by default that of the workload; this machine is measured with the models.

    shapes: the values of ``--shape``; raises InputError for shapes if the device's models are measured already.
    """
    from weft.devices import Host, is_measured, load_device

    name = device or workload.device
    if not is_measured(name):
        if lanes is not None:
            raise InputError(f"--lanes does not apply to {name}: it is for --device host, which is measured")
        if device is None and "device" not in workload.model_fields_set:
            _say_default(name)
        loaded = load_device(name)
        if shapes and isinstance(loaded, Host):
            raise InputError(
                f"--shape does not apply to {name}: its models are measured already; --device host measures them again"
            )
        return loaded
    return measure(workload, name, lanes, seconds, cache)


def named_npu(device: str | None) -> Npu:
    """Return the NPU named *device*, by default ``DEFAULT_NPU``, whose name is then printed."""
    from weft.devices import is_measured, load_npu, read_host

    if device is not None and (is_measured(device) or device.endswith(".json")):
        if not is_measured(device):
            read_host(device)  # raises DeviceError if the file is not a measured host
        raise InputError(f"--device {device} serves requests: give their rates and deadlines in a --workload file")
    npu = load_npu(device or DEFAULT_NPU)
    if device is None:
        _say_default(npu.name)
    return npu


def _say_default(device: str) -> None:
    say(f"no device named: priced for {device}, a simulated NPU (--device host measures this machine)", soft_wrap=True)


def print_host(host: Host) -> None:
    """Print the measurements of a machine: models by batch size, and the contention between lanes."""
    several_lanes = host.lanes > 1
    columns = ("model", "segments", "batch", "ms", "longest ms", "p99 / mean", "besides ms")
    beside = [f"beside {other}" for other in host.models] if several_lanes else []
    lanes = f"{counted(host.lanes, 'lane')}, {counted(host.threads, 'thread')} each"
    table = plain_table(f"{host.name}: {lanes}", (*columns, *beside))
    for index, (name, model) in enumerate(host.models.items()):
        for batch in sorted(model.times_s):
            lost = host.together().losses[index] if several_lanes else ()
            add_row(
                table,
                name if batch == 1 else "",
                str(len(model.segments)) if batch == 1 else "",
                str(batch),
                number(model.total_s(batch), 2, scale=1e3),
                number(max(model.times_at(batch)), 2, scale=1e3),
                number(model.tail, 2) if batch == 1 else "",
                number(_mean(model.overhead_s), 2, scale=1e3) if batch == 1 else "",
                *(f"-{share:.1%}" if batch == 1 else "" for share in lost),
            )
    console.print(table)
    if host.gpu:
        _print_shares(host, host.gpu)
    if any(model.engines_s for model in host.models.values()):
        _print_engines(host)
    say(host.source, style="dim", soft_wrap=True)
    if host.conditions and host.conditions.disturbed:
        say(f"{host.conditions.in_words}: measure again with nothing else running", style="yellow", soft_wrap=True)
    note = "; beside: the speed a lane loses while another runs that model" if several_lanes else ""
    say(f"{number(_mean(host.hand_over_s), 2, scale=1e3)} ms pass between two segments{note}", style="dim")


def _print_shares(host: Host, gpu: GpuCuts) -> None:
    """Print the speed of every model on the shares of a GPU, and the resource that bounds it."""
    sides = [side for cut in gpu.cuts for side in cut]
    columns = ("model", "batch", *(f"on {side} SMs" for side in sides), "bound by", "kernel us", "of the memory")
    table = plain_table(f"speeds on shares of {gpu.sms} SMs, 1 on all of them", columns)
    for name, model in host.models.items():
        for batch, like in sorted(model.like.items()):
            speeds = [number(like.speed(side, gpu.sms), 2) for side in sides]
            bound = like.bound(gpu.sms)
            add_row(table, name, str(batch), *speeds, bound, number(like.kernel_us, 1), f"{like.memory:.0%}")
    console.print(table)


def _print_engines(host: Host) -> None:
    """Print the times of each engine that was timed, by batch size, and which engine runs the model."""
    engines = sorted({engine for model in host.models.values() for engine in model.engines_s})
    table = plain_table("engines", ("model", "batch", *(f"{engine} ms" for engine in engines), "runs in"))
    for name, model in host.models.items():
        for batch in sorted({batch for times_s in model.engines_s.values() for batch in times_s}):
            times_s = [model.engines_s.get(engine, {}).get(batch) for engine in engines]
            add_row(table, name, str(batch), *(number(took_s, 3, scale=1e3) for took_s in times_s), model.engine)
    console.print(table)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
