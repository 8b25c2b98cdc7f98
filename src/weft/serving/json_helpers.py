"""A pool of helper processes that read and write large JSON, which would block the event loop and hold the GIL.

They also read and write large tensors of strings, binary ones included, because every string is an object. A helper is
started on first need, works for one request at a time, and is restarted if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from weft.base.child_processes import ChildPool, ChildProcess, PoolClosed, bare_environment
from weft.base.errors import Cancelled, ChildDied, Failed, Overloaded, RequestError, reason_of
from weft.serving import json_worker
from weft.serving.wire import InferRequest, InferResponse, ModelSpec

log = logging.getLogger("weft.server")

WORKERS = 2
"""Helper processes. They run at low priority; more would only compete with the lanes for cores."""

Result = TypeVar("Result")
_Arguments = Callable[[], tuple[object, ...]]
"""Builds the arguments of a call."""


def has_strings(model: ModelSpec) -> bool:
    """Tell whether a model has inputs of strings."""
    return any(spec.datatype == "BYTES" for spec in model.inputs)


class JsonHelpers:
    """A thread pool whose threads each wait for a helper process; results are awaited on the event loop."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._threads: ThreadPoolExecutor | None = None
        self._children = ChildPool(_start)
        self.busy = 0
        """Jobs that are queued or running."""

    def decode(
        self, body: bytes | memoryview, header_length: int | None, model: ModelSpec
    ) -> asyncio.Future[InferRequest]:
        """Run ``wire.decode`` in a helper."""
        return self._begin(json_worker.decode, lambda: (pickle.PickleBuffer(body), header_length, model))

    def decode_message(self, message: bytes, model: ModelSpec) -> asyncio.Future[InferRequest]:
        """Parse a message and run ``grpc_wire.decode_infer`` in a helper."""
        return self._begin(json_worker.decode_message, lambda: (pickle.PickleBuffer(message), model))

    async def encode(self, response: InferResponse) -> tuple[list[bytes], int | None]:
        """Run ``wire.encode`` in a helper."""
        parts, length = await self._begin(json_worker.encode, lambda: (_prepare_for_transport(response),))
        return parts, length

    async def encode_message(self, response: InferResponse) -> bytes:
        """Run ``grpc_wire.encode_infer`` in a helper and return the message as bytes."""
        return bytes(await self._begin(json_worker.encode_message, lambda: (_prepare_for_transport(response),)))

    async def call(self, function: Callable[..., Result], message: bytes, *arguments: object) -> Result:
        """Call a module-level function with a message and arguments, in a helper."""
        result: Result = await self._begin(function, lambda: (pickle.PickleBuffer(message), *arguments))
        return result

    def close(self) -> None:
        """Kill the helper processes, also in the middle of a job; blocks until the threads have ended."""
        self._children.close()
        if self._threads:
            self._threads.shutdown(wait=True)  # jobs that are still queued fail: the pool is closed

    @property
    def processes(self) -> list[int]:
        """The ids of the running helpers."""
        return self._children.process_ids

    def _begin(self, function: Callable[..., object], make_arguments: _Arguments) -> asyncio.Future[Any]:
        """Queue a call in a helper. *make_arguments* builds its arguments, on a pool thread, right before the call."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="json")
        self.busy += 1
        box = [make_arguments]  # the job takes it out; ``_end_job`` empties it if the job is cancelled in the queue
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._run_job, function, box)
        job.add_done_callback(partial(self._end_job, box))
        return job

    def _end_job(self, box: list[_Arguments], job: asyncio.Future[Any]) -> None:
        """Count a job as ended, and release its arguments if it was cancelled in the queue; *box*: see ``_begin``."""
        self.busy -= 1
        box.clear()
        if not job.cancelled():
            job.exception()  # marks the exception as retrieved: the request may have been cancelled

    def _run_job(self, function: Callable[..., object], box: list[_Arguments]) -> Any:
        """Call a function in a helper and wait for its result, on a pool thread; *box*: see ``_begin``."""
        try:
            make_arguments = box.pop()
        except IndexError:
            raise Cancelled("the client went away") from None
        try:
            answer = self._children.call(function, *make_arguments())
        except PoolClosed:
            raise Overloaded("the server is going down", reason="draining") from None
        except ChildDied as death:
            log.warning("a process that reads and writes JSON died: it was ended %s", death.how)
            raise Failed("the JSON of this request could not be worked on: the process for it died") from death
        except RequestError:
            raise
        except Exception as error:
            raise Failed(f"internal error: {type(error).__name__}: {error}") from error
        if isinstance(answer, InferRequest):
            answer.inputs = {**json_worker.unpacked(answer.inputs)}
        return answer


def _start() -> ChildProcess:
    """Start a helper process; Overloaded if the system cannot."""
    try:
        return ChildProcess(json_worker.main, env=bare_environment() | {"OMP_NUM_THREADS": "1"})
    except OSError as error:
        raise Overloaded(f"no process for large JSON can be started: {reason_of(error)}") from error


def _prepare_for_transport(response: InferResponse) -> InferResponse:
    """Reduce a response to what a helper needs to encode it, with strings in binary form."""
    wanted = {output.name for output in response.request.wanted}
    outputs = {name: array for name, array in response.outputs.items() if name in wanted}
    labels = response.labels if any(output.classes for output in response.request.wanted) else {}
    request = replace(response.request, inputs={})
    return replace(response, request=request, outputs=json_worker.packed(outputs), labels=labels)
