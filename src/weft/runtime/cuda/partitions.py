"""Disjoint parts of a GPU's multiprocessors, cut by the driver, each with streams of its own.

A part is a green context of CUDA. torch creates green contexts as well, but each of them from the whole device, so that
two have the same multiprocessors. Here the driver cuts the device once, into the requested part and the rest. All parts
share the memory, its bandwidth and the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LOW, HIGH = range(2)
"""Indices of a part's streams."""


class NoPartitions(Exception):
    """This driver or GPU cannot be partitioned; the text says why."""


class Part(NamedTuple):
    """A disjoint subset of the multiprocessors."""

    sms: int
    streams: tuple[int, int]
    """Handles of a stream of low and a stream of high priority; graphs captured on either run on this part."""
    context: Any  # the green context, which lives as long as it is referred to
    ended: Any
    """An event of this context, because events of other contexts cannot be recorded on its streams."""


def cut(index: int, sms: int) -> tuple[Part, Part]:
    """Partition GPU number *index* in two: *sms* multiprocessors, rounded up as the card requires, and the rest.

    The primary context of the GPU must exist (torch creates it). Raises ``NoPartitions`` if it fails.
    """
    driver = bindings()
    try:
        (device,) = _checked_values(driver.cuDeviceGet(index))
    except RuntimeError as error:
        raise NoPartitions(f"the driver cannot be used: {error}") from error
    if not hasattr(driver, "cuDevSmResourceSplitByCount"):
        raise NoPartitions("cuda-bindings is older than partitions")
    (whole,) = _checked_values(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    # One group of at least *sms* multiprocessors, and the rest; 0: no flags.
    groups, _, rest = _checked_values(driver.cuDevSmResourceSplitByCount(1, whole, 0, sms))
    if not rest.sm.smCount:
        raise NoPartitions(f"nothing is left of {whole.sm.smCount} multiprocessors when {sms} are cut off")
    return _make_part(driver, device, groups[0]), _make_part(driver, device, rest)


def bindings() -> Any:
    """Import the Python bindings of the driver, without calling it; ``NoPartitions`` if they are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoPartitions("cuda-bindings is not installed; pip install cuda-bindings") from error
    return driver


def follow(part: Part, stream: int) -> None:
    """Make *stream* (a handle of a stream of the whole GPU) wait for all work on a part's stream of low priority."""
    driver = bindings()
    _checked_values(driver.cuEventRecord(part.ended, driver.CUstream(part.streams[LOW])))
    _checked_values(driver.cuStreamWaitEvent(driver.CUstream(stream), part.ended, 0))


def another_stream(part: Part) -> int:
    """Create one more stream of low priority on a part; returns its handle."""
    driver = bindings()
    least, _ = _checked_values(driver.cuCtxGetStreamPriorityRange())
    (stream,) = _checked_values(
        driver.cuGreenCtxStreamCreate(part.context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, least)
    )
    return int(stream)


def _make_part(driver: Any, device: Any, resource: Any) -> Part:
    """Create the green context of a part, its two streams and its event; *resource*: its multiprocessors."""
    (description,) = _checked_values(driver.cuDevResourceGenerateDesc([resource], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    (context,) = _checked_values(driver.cuGreenCtxCreate(description, device, flags))
    least, greatest = _checked_values(driver.cuCtxGetStreamPriorityRange())
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    streams = [
        _checked_values(driver.cuGreenCtxStreamCreate(context, non_blocking, priority))[0]
        for priority in (least, greatest)
    ]
    (ordinary_context,) = _checked_values(driver.cuCtxFromGreenCtx(context))
    _checked_values(driver.cuCtxPushCurrent(ordinary_context))  # an event belongs to the current context
    try:
        (ended,) = _checked_values(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    finally:
        _checked_values(driver.cuCtxPopCurrent())
    return Part(resource.sm.smCount, (int(streams[LOW]), int(streams[HIGH])), context, ended)


def _checked_values(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that a driver call returned after its status; ``NoPartitions`` if the status is an error."""
    result, *values = answer
    if int(result):
        raise NoPartitions(f"the driver says {result.name}")
    return tuple(values)
