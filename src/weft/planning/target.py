"""Which machine a plan is for: the cores of this one, a GPU of it, or what was measured of either before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.base.errors import InputError
from weft.devices import HOST, Host, read_host
from weft.devices.host import device_entry, is_device
from weft.runtime.device_kinds import device_kind
from weft.workloads.requests import Workload


class PlanTarget(NamedTuple):
    """What a plan is made for."""

    device: str | None
    """The device of this machine, as a GPU; None: the cores."""
    measured: tuple[Host, ...]
    """What is known of it; empty: it has to be measured."""


def plan_target(devices: Sequence[str | Host], workload: Workload) -> PlanTarget:
    """What is named by devices, or by the workload where it names one of this machine: its others are simulated."""
    given = list(devices) or ([workload.device] if device_entry(workload.device) else [])
    if not given or given == [HOST]:
        return PlanTarget(None, ())
    first = given[0]
    if len(given) == 1 and isinstance(first, str) and is_device(first):
        device_kind(first).check(first)
        return PlanTarget(first, ())
    hosts = tuple(each if isinstance(each, Host) else _read(each) for each in given)
    device = next((host.name for host in hosts if is_device(host.name)), None)
    if device is not None and len(hosts) > 1:
        raise InputError(f"device = {device}: a plan is for one device, measured once; name that file alone")
    return PlanTarget(device, hosts)


def _read(device: str) -> Host:
    if entry := device_entry(device):
        example = entry.about["example"]
        raise InputError(f"device = {device}: a plan is for one device, by its name; name it alone, as {example}")
    if not device.endswith(".json"):
        raise InputError(
            f"device = {device}: a plan is for a machine that serves; leave it out to measure this one, or name a file "
            f"of weft profile MODELS --device host -o FILE (weft sustain --device {device} tells what an NPU carries)"
        )
    return read_host(device)
