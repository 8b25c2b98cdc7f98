"""This machine as a device, on the command line: measured, read from a file, shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from weft.base.errors import InputError
from weft.cli.common import complete_devices, how, what
from weft.cli.printing import (
    add_row,
    console,
    counted,
    number,
    plain_table,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from weft.devices import Host, Npu
    from weft.devices.host import GpuCuts
    from weft.planning.survey import Subject
    from weft.simulation.requests import Device
    from weft.workloads.requests import Workload

SECONDS = 5.0
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
    int | None, how("--lanes", show_default="cores less one", help="host: segments computed at a time.")
]
Seconds = Annotated[float, how("--seconds", help="host: how long to watch all models together.")]
Cache = Annotated[str | None, how("--cache", help="host: where cut models are kept, the folder of weft serve --cache.")]

Asked = Mapping[str, tuple[int, ...]]


def subject(source: str, shapes: Asked | None = None) -> Subject:
    """A model to measure; packaged ones bring the shapes of what is sent to them."""
    from weft.planning.survey.measuring import subject

    return subject(source, shapes)


def measure(
    subjects: Sequence[Subject] | Workload,
    device: str,
    lanes: int | None,
    seconds: float = SECONDS,
    cache: str | None = None,
) -> Host:
    """This machine, or a GPU of it, with these models, or with those of a workload."""
    from weft.planning.survey.measuring import measure

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
    workload: Workload, device: str | None, lanes: int | None, seconds: float = SECONDS, cache: str | None = None
) -> Device:
    """The device that a workload runs on: the one named, its own, or this machine, measured now with its models."""
    from weft.devices import is_measured, load_device

    name = device or workload.device
    if not is_measured(name):
        if lanes is not None:
            raise InputError(f"--lanes does not apply to {name}: it is for --device host, which is measured")
        if device is None and "device" not in workload.model_fields_set:
            tell_default(name)
        return load_device(name)
    return measure(workload, name, lanes, seconds, cache)


def named_npu(device: str | None) -> Npu:
    """The NPU to price models for; the usual one, and a line that says so, where none is named."""
    from weft.devices import is_measured, load_npu, read_host

    if device is not None and (is_measured(device) or device.endswith(".json")):
        if not is_measured(device):
            read_host(device)
        raise InputError(f"--device {device} serves requests: give their rates and deadlines in a --workload file")
    found = load_npu(device or DEFAULT_NPU)
    if device is None:
        tell_default(found.name)
    return found


def tell_default(device: str) -> None:
    """Say that nobody named the device."""
    say(f"no device named: priced for {device}, a simulated NPU (--device host measures this machine)", soft_wrap=True)


def print_host(host: Host) -> None:
    """What was measured: models by batch size, and what lanes that run together do to each other."""
    many = host.lanes > 1
    columns = ("model", "segments", "batch", "ms", "longest ms", "p99 / mean", "besides ms")
    beside = [f"beside {other}" for other in host.models] if many else []
    lanes = f"{counted(host.lanes, 'lane')}, {counted(host.threads, 'thread')} each"
    table = plain_table(f"{host.name}: {lanes}", (*columns, *beside))
    for place, (name, model) in enumerate(host.models.items()):
        for batch in sorted(model.times_s):
            lost = host.together().losses[place] if many else ()
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
    say(host.source, style="dim", soft_wrap=True)
    if host.conditions and host.conditions.disturbed:
        say(f"{host.conditions.in_words}: measure again with nothing else running", style="yellow", soft_wrap=True)
    what = "; beside: the speed a lane loses while another runs that model" if many else ""
    say(f"{number(_mean(host.hand_over_s), 2, scale=1e3)} ms pass between two segments{what}", style="dim")


def _print_shares(host: Host, gpu: GpuCuts) -> None:
    """What every model is like: its speed on the shares, and what it is bound by."""
    sides = [side for cut in gpu.cuts for side in cut]
    columns = ("model", "batch", *(f"on {side} SMs" for side in sides), "bound by", "kernel us", "of the memory")
    table = plain_table(f"speeds on shares of {gpu.sms} SMs, 1 on all of them", columns)
    for name, model in host.models.items():
        for batch, like in sorted(model.like.items()):
            speeds = [number(like.speed(side, gpu.sms), 2) for side in sides]
            bound = like.bound(gpu.sms)
            add_row(table, name, str(batch), *speeds, bound, number(like.kernel_us, 1), f"{like.memory:.0%}")
    console.print(table)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
