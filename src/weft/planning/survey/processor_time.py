"""Processor time during a measurement, of this process and its children, of other processes, and of a hypervisor.

Linux reports it in ``/proc``: ``stat`` per core, ``PID/stat`` per process. The busy time of this process's cores minus
that of its own process tree is the time of other processes. The clock rate is in ``/sys``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

from weft.devices.conditions import Conditions
from weft.devices.host import usable_cores
from weft.serving.held_memory import PROCESSES, read_text, with_offspring

CORES = Path("/sys/devices/system/cpu")
_IDLE, _WAITING, _STOLEN, _GUEST = 3, 4, 7, 8
"""Columns of a core's line in /proc/stat, after its name; columns from guest on are also contained in user and nice."""
_INTERRUPTS = (5, 6)
"""Interrupts (irq, softirq). They count as idle: whether the time of processes includes them depends on the kernel, and
those of loopback sockets belong to the measurement."""
_OWN_TIME = slice(11, 15)
"""utime, stime, cutime and cstime (of ended children) in /proc/PID/stat, after the name."""


class ProcessorTime(NamedTuple):
    """Seconds since the machine started, over all cores that this process may use."""

    passed_s: float
    busy_s: float
    """Time of all processes."""
    stolen_s: float
    """Time in which a hypervisor ran other virtual machines on these cores."""
    own_s: float
    """Time of this process and its descendants."""


def processor_time(
    pid: int | None = None, cores: Collection[int] | None = None, processes: Path = PROCESSES
) -> ProcessorTime | None:
    """Read the time of the cores and of the process tree of *pid*, by default this process; None without /proc.

    cores: numbers of the cores to add up, by default the cores that this process may use. processes: the folder /proc.
    """
    usable = os.sched_getaffinity(0) if cores is None and hasattr(os, "sched_getaffinity") else cores
    lines = [line.split() for line in read_text(processes / "stat").splitlines() if line.startswith("cpu")]
    ticks = [
        [int(part) for part in parts[1:]]
        for parts in lines
        if parts[0] != "cpu" and len(parts) > _GUEST and (usable is None or int(parts[0][3:]) in usable)
    ]
    if not ticks:
        return None
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    passed, stolen = (sum(sum(row[:_GUEST]) for row in ticks), sum(row[_STOLEN] for row in ticks))
    idle = sum(row[column] for row in ticks for column in (_IDLE, _WAITING, *_INTERRUPTS))
    own = sum(_own_ticks(processes / str(member)) for member in with_offspring(pid or os.getpid(), processes))
    return ProcessorTime(passed * tick_s, (passed - stolen - idle) * tick_s, stolen * tick_s, own * tick_s)


def _own_ticks(folder: Path) -> int:
    """Return the ticks of a process and its ended children; 0 if it has ended meanwhile."""
    fields = read_text(folder / "stat").rpartition(")")[2].split()  # its name may hold anything
    return sum(map(int, fields[_OWN_TIME]))


def clock_mhz(cores: Path = CORES) -> float | None:
    """Return the present clock of the fastest core, which is at work; None where the system does not report it."""
    texts = [read_text(file).strip() for file in cores.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    return max((int(text) / 1e3 for text in texts if text.isdigit()), default=None)


@dataclass
class ConditionsWatch:
    """Sums up the processor time of other processes, and samples the clock, during the parts of a measurement."""

    read_time: Callable[[], ProcessorTime | None] = processor_time
    read_clock: Callable[[], float | None] = clock_mhz
    cores: int = field(default_factory=usable_cores)
    _passed_s: float = 0.0
    _others_s: float = 0.0
    _stolen_s: float = 0.0
    _clocks_mhz: list[float] = field(default_factory=list)

    @contextmanager
    def part(self) -> Iterator[None]:
        """Count the time of the block.

        A descendant that ends in the block must be waited for by its parent, or its time is counted as others'.
        """
        before = self.read_time()
        yield
        clock, after = self.read_clock(), self.read_time()
        if clock is not None:
            self._clocks_mhz.append(clock)
        if before is None or after is None:
            return
        passed_s, busy_s, stolen_s, own_s = (end_s - start_s for start_s, end_s in zip(before, after, strict=True))
        self._passed_s += passed_s
        # May be negative: cores are sampled by ticks and processes are not, and errors of several parts cancel out.
        self._others_s += busy_s - own_s
        self._stolen_s += stolen_s

    def conditions(self, repeats_s: Mapping[str, Sequence[float]] | None = None) -> Conditions:
        """Return the conditions so far; *repeats_s*: model -> median times alone, one for each measurement."""
        ratios = [max(times) / min(times) for times in (repeats_s or {}).values() if times and min(times) > 0]
        known = self._passed_s > 0
        return Conditions(
            ended=datetime.now(UTC).replace(microsecond=0),
            cores=self.cores,
            others_cores=round(max(0.0, self._others_s / self._passed_s * self.cores), 3) if known else None,
            stolen_share=round(min(1.0, max(0.0, self._stolen_s / self._passed_s)), 4) if known else None,
            clock_mhz=median(self._clocks_mhz) if self._clocks_mhz else None,
            repeats_ratio=round(max(1.0, *ratios), 3) if ratios else None,
        )
