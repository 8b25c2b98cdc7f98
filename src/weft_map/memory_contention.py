"""Measure how much the cores of this machine slow each other down at its memory, and how fast one multiplies.

One core reads memory at several intensities, alone and while all other cores read at several intensities. The two are
measured in turns, so that a drift of the machine's speed affects both. Times are thread CPU times, because waiting for
a core is no memory contention. ``weft_map.pccs_fit`` fits the result.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.devices import BandwidthSharing, Soc, Unit
from weft.runtime.timing import Clock, mean_seconds
from weft_map.kernels.streaming import BLOCK, stream
from weft_map.pccs_fit import FEWEST, Fit, Matrix

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with the number of windows that are done, and the number of all windows."""

BLOCK_BYTES = BLOCK * 8
CALL_BLOCKS = 2048
"""Blocks (1 MiB together) that a thread reads before it looks at the clock."""
REPEATS = 3
"""Passes over all pairs of levels; medians are used, so that a disturbed window does not count."""
LEAST_WINDOW_S, LONGEST_S = 0.005, 600.0
"""Bounds: of one window (a time in which threads read), and of the whole measurement."""
LEAST_SLICE, LARGEST_SLICE = 2**24, 2**30
"""Bounds in bytes of the memory that one thread reads."""
LEAST_SHARE, MOST_SHARE = 1e-3, 1.5
"""Bounds on the measured speed beside others relative to that alone: noise may exceed 1, and ``Matrix`` needs more than
0."""
NOISE_DEVIATIONS, MOST_NOISE_PCT = 3, 50.0
"""The noise, below which a reduction of speed counts as none: this many median deviations, at most this percentage."""
USUAL_CACHE = 2**25
"""Assumed bytes of the last-level cache where the system does not tell."""
LEAST_NOISE_PCT = 3.0
"""The noise is at least this: other processes on the machine cause as much."""
LEVELS, SECONDS = 6, 20.0
"""Default number of intensities and duration of a measurement."""
QUICK_LEVELS, QUICK_S = 4, 3.0
"""Intensities and seconds of ``weft map calibrate --quick``."""

PRODUCT_SIZE = 512
"""Rows of square matrices: so large that the overhead of a call does not count beside their product."""
PRODUCT_ROUNDS = 8
"""Measurements of the product. The fastest counts: other processes and a rising clock only make a product slower."""


class _ReadWindow(NamedTuple):
    """Bytes that one thread read in a window, and the CPU seconds that it used."""

    bytes: int
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e9


NOTHING_READ = _ReadWindow(0, 0.0)


def physical_cores() -> list[int]:
    """One hardware thread of each core that this process may use: threads of one core share more than the memory."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted({_core_key(cpu): cpu for cpu in reversed(allowed)}.values())


def _core_key(cpu: int) -> str:
    """A text that is the same for all hardware threads of a core: Linux's list of them; elsewhere *cpu* itself."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text(encoding="ascii") if file.exists() else str(cpu)


def measure_host(*, levels: int = LEVELS, seconds: float = SECONDS, on_progress: Progress | None = None) -> Matrix:
    """Measure the bandwidth of one core while all others read too, at *levels* intensities each, in about *seconds*.

    Raises InputError for fewer than two cores, or *levels* or *seconds* out of range.
    """
    if not FEWEST <= levels <= 32:
        raise InputError(f"levels = {levels}: measure at {FEWEST} to 32 intensities")
    if not 0 < seconds <= LONGEST_S:
        raise InputError(f"seconds = {seconds:g}: measure for more than 0 and at most {LONGEST_S:g} s")
    cores = physical_cores()
    if len(cores) < 2:
        raise InputError("this process may use one core only, and contention takes two; fit a measured matrix instead")
    cache = last_level_cache()
    windows = 2 * levels + REPEATS * levels * (1 + 2 * levels)  # as many as ``_ContentionSurvey.matrix`` measures
    window_s = max(LEAST_WINDOW_S, seconds / windows)
    with _reader_threads(cores, cache) as (own, others):
        return _ContentionSurvey(own, others, window_s, levels, windows, on_progress).matrix(cores)


def host_soc(
    matrix: Matrix,
    fit: Fit,
    *,
    name: str = "host",
    unit: str = "cpu",
    instances: int = 1,
    peak_tflops: float | None = None,
) -> Soc:
    """Make a SoC with one unit from a measured matrix and its fit.

    Without contention in the matrix, the unit shares the largest measured bandwidth equally. *peak_tflops*: measured
    speed of a large matrix product on one instance, if known.
    """
    bandwidth_gb_s = matrix.peak_gb_s or max(float(matrix.own_gb_s[-1]), float(matrix.external_gb_s[-1]))
    verdict = f"fitted, mean error {fit.mean_error_points:.2f} points" if fit.contended else "showed no contention"
    return Soc(
        name=name,
        source=f"{matrix.source or 'a measured matrix'}; {verdict}",
        bandwidth_gb_s=round(bandwidth_gb_s, 3),
        units=(
            Unit(
                name=unit,
                instances=instances,
                contention=fit.model if fit.contended else BandwidthSharing(),
                bandwidth_gb_s=round(float(matrix.own_gb_s[-1]), 3),
                peak_tflops=peak_tflops,
                efficiency=0.5 if peak_tflops is None else 1.0,  # a measured speed is what large products reach
            ),
        ),
    )


def last_level_cache() -> int:
    """Bytes of the largest cache of core 0; ``USUAL_CACHE`` if the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)([KMG])", file.read_text(encoding="ascii").strip())
        if size:
            sizes.append(int(size[1]) << {"K": 10, "M": 20, "G": 30}[size[2]])
    return max(sizes, default=USUAL_CACHE)


@dataclass
class _ReaderThread:
    """A thread, pinned to a core, that reads its own memory between ``start`` and ``stop``."""

    core: int
    data: Floats
    steps: int = 0
    """Arithmetic operations after each block: the more, the lower the read intensity."""
    done: _ReadWindow = NOTHING_READ
    """Bytes and CPU seconds since the last ``start``."""
    quit: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    """Set while the thread is to read."""
    idle: threading.Event = field(default_factory=threading.Event)
    """Set while it waits for ``go``."""

    def run(self) -> None:
        """Body of the thread: read while ``go`` is set, until ``quit``."""
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # the system may have taken the core away; then it picks another core
                os.sched_setaffinity(0, {self.core})
        chunks = len(self.data) // (CALL_BLOCKS * BLOCK)
        chunk = 0
        while True:
            self.idle.set()
            self.go.wait()
            if self.quit:
                return
            began_s = time.thread_time()
            bytes_read = 0
            while self.go.is_set() and not self.quit:
                stream(self.data, chunk * CALL_BLOCKS * BLOCK, CALL_BLOCKS, self.steps)
                chunk = (chunk + 1) % chunks
                bytes_read += CALL_BLOCKS * BLOCK_BYTES
                self.done = _ReadWindow(bytes_read, time.thread_time() - began_s)

    def start(self, steps: int) -> None:
        self.steps, self.done = steps, NOTHING_READ
        self.idle.clear()
        self.go.set()

    def stop(self) -> _ReadWindow:
        """Stop reading; return bytes and CPU seconds since ``start``, at least those of one call of ``stream``."""
        while not self.done.bytes:
            time.sleep(1e-4)
        self.go.clear()
        self.idle.wait()
        return self.done


@contextmanager
def _reader_threads(cores: Sequence[int], cache: int) -> Iterator[tuple[_ReaderThread, list[_ReaderThread]]]:
    """Start one reader per core; yield the reader on the first core, and those on the other cores.

    The first array, and all others together, are twice as large as the *cache* in bytes, so that reads go to memory.
    """
    other_size = 2 * cache // (len(cores) - 1)
    sizes = [2 * cache] + [other_size] * (len(cores) - 1)
    readers = [
        _ReaderThread(core, np.ones(min(LARGEST_SLICE, max(LEAST_SLICE, size)) // 8))
        for core, size in zip(cores, sizes, strict=True)
    ]
    threads = [threading.Thread(target=reader.run, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        stream(readers[0].data, 0, 1, 0)  # compiled before the clock runs
        for reader in readers:
            reader.idle.wait()
        yield readers[0], readers[1:]
    finally:
        for reader in readers:
            reader.quit = True
            reader.go.set()
        for thread in threads:
            thread.join()


@dataclass
class _ContentionSurvey:
    """The measurement of a contention matrix, window by window."""

    own: _ReaderThread
    others: list[_ReaderThread]
    window_s: float
    levels: int
    windows: int
    on_progress: Progress | None
    windows_done: int = 0
    peak_gb_s: float = 0.0
    """The most that all cores read together in any window."""

    def matrix(self, cores: Sequence[int]) -> Matrix:
        """Measure all pairs of intensities ``REPEATS`` times; return medians, with the noise from their spread."""
        steps = self._steps()
        own_gb_s = np.empty((REPEATS, self.levels, self.levels))
        external_gb_s, relative_speed = np.empty((REPEATS, self.levels)), np.empty_like(own_gb_s)
        for repeat in range(REPEATS):
            for column, intensity in enumerate(steps):
                _, external_gb_s[repeat, column] = self._measure_window(own=None, others=intensity)
            for row, intensity in enumerate(steps):
                for column, other_intensity in enumerate(steps):
                    own_gb_s[repeat, row, column], _ = self._measure_window(own=intensity, others=None)
                    contended_gb_s, _ = self._measure_window(own=intensity, others=other_intensity)
                    relative_speed[repeat, row, column] = contended_gb_s / own_gb_s[repeat, row, column]
        alone_gb_s = np.median(own_gb_s, axis=(0, 2))  # [row]
        relative_speeds = np.median(relative_speed, axis=0)
        # The larger of two median deviations, as fractions: of the bandwidth alone, and of the share beside others.
        own_spread = np.median(np.abs(own_gb_s / alone_gb_s[None, :, None] - 1))
        spread = max(own_spread, np.median(np.abs(relative_speed - relative_speeds)))
        return Matrix(
            _increasing(alone_gb_s),
            _increasing(np.median(external_gb_s, axis=0)),
            alone_gb_s[:, None] * np.clip(relative_speeds, LEAST_SHARE, MOST_SHARE),
            noise_pct=min(MOST_NOISE_PCT, max(LEAST_NOISE_PCT, 100 * NOISE_DEVIATIONS * float(spread))),
            source=f"measured: a core of {len(cores)} ({platform.machine()}) beside the others, memory reads",
            peak_gb_s=self.peak_gb_s,
        )

    def _steps(self) -> list[int]:
        """[level]: arithmetic operations per block that lead to each intensity, from the lowest intensity.

        Intensities go from a tenth of one core's bandwidth to all of it in even steps; two measurements (0 and 256
        operations per block) give the time of a block and of an operation.
        """
        full_speed = [self._measure_window(own=0, others=None) for _ in range(self.levels)]
        slowed = [self._measure_window(own=256, others=None) for _ in range(self.levels)]
        medians_gb_s = (float(np.median([own_gb_s for own_gb_s, _ in windows])) for windows in (full_speed, slowed))
        block_ns, slow_ns = (BLOCK_BYTES / gb_s for gb_s in medians_gb_s)
        step_ns = max(1e-3, (slow_ns - block_ns) / 256)
        shares = np.linspace(0.1, 1.0, self.levels)
        return [round((block_ns / share - block_ns) / step_ns) for share in shares]

    def _measure_window(self, *, own: int | None, others: int | None) -> tuple[float, float]:
        """Read for one window; return the GB/s of the first core, and of the other cores together.

        own, others: arithmetic operations per block of the first core and of the others; None: they do not read.
        """
        active = [(self.own, own)] if own is not None else []
        if others is not None:
            active += [(reader, others) for reader in self.others]
        for reader, steps in active:
            reader.start(steps)
        time.sleep(self.window_s)
        gb_s = {id(reader): reader.stop().gb_s for reader, _ in active}
        own_gb_s = gb_s.pop(id(self.own), 0.0)
        self.peak_gb_s = max(self.peak_gb_s, own_gb_s + sum(gb_s.values()))
        self.windows_done += 1
        if self.on_progress:
            self.on_progress(self.windows_done, self.windows)
        return own_gb_s, sum(gb_s.values())


def _increasing(levels: Floats) -> Floats:
    """Raise every level that noise put below its predecessor to just above it: a matrix needs increasing levels."""
    raised: Floats = np.maximum.accumulate(levels) * (1 + 1e-9 * np.arange(len(levels)))
    return raised


def core_tflops(*, clock: Clock = time.process_time) -> float:
    """Measure the float32 operations per second of one core in a large matrix product, in 10^12.

    The default clock counts the processor time of all threads, so the result is that of one core even if the product
    uses several.
    """
    left, right = (np.full((PRODUCT_SIZE, PRODUCT_SIZE), value, np.float32) for value in (0.5, 2.0))
    left @ right  # the first product starts BLAS's threads
    least_s = min(mean_seconds(lambda: left @ right, clock) for _ in range(PRODUCT_ROUNDS))
    return round(2 * PRODUCT_SIZE**3 / max(least_s, 1e-6) / 1e12, 4)
