"""Large JSON is read and written by processes beside the server, so that nobody waits for it but who sent it.

So are many strings, also those in binary: each is an object of its own.
They are started on first need, work for one request at a time, and are started again if they die.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from weft.base.errors import Cancelled, Failed, Overloaded, RequestError
from weft.runtime.isolated.spawning import bare_environment
from weft.runtime.tensors import Array
from weft.serving import json_worker
from weft.serving.json_worker import CallJob, DecodeJob, DecodeMessageJob, EncodeJob, EncodeMessageJob
from weft.serving.wire import LARGE_BYTES, InferRequest, InferResponse, ModelSpec

log = logging.getLogger("weft.server")

LARGE_ELEMENTS = 64 * 1024
"""As many elements make about as much JSON."""
WORKERS = 2

Result = TypeVar("Result")

_COMMAND = "from weft.serving.json_worker import main; main()"


def is_large(response: InferResponse) -> bool:
    """Whether an answer has much JSON, many or long strings, or classes of much."""
    elements, texts = 0, []
    for wanted in response.request.wanted:
        array = response.outputs.get(wanted.name)
        if array is None or wanted.name in response.shared:
            continue
        if array.dtype.kind in "OUS":
            texts.append(array)
        elif wanted.binary and not wanted.classes:
            continue
        elements += array.size
    return elements > LARGE_ELEMENTS or sum(map(_text_size, texts)) > LARGE_BYTES


def _text_size(array: Array) -> int:
    return sum(len(item) for item in array.reshape(-1).tolist() if isinstance(item, str | bytes))


def has_strings(model: ModelSpec) -> bool:
    """Whether it takes strings."""
    return any(spec.datatype == "BYTES" for spec in model.inputs)


class JsonHelpers:
    """Processes for large JSON; their answers are awaited on the event loop."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self._all: set[_Helper] = set()
        self._closed = False
        self.busy = 0
        """Jobs that are not done."""

    def decode(
        self, body: bytes | memoryview, header_length: int | None, model: ModelSpec
    ) -> asyncio.Future[InferRequest]:
        """``wire.decode``, elsewhere."""
        return self._begin(lambda: DecodeJob(pickle.PickleBuffer(body), header_length, model))

    def decode_message(self, message: bytes, model: ModelSpec) -> asyncio.Future[InferRequest]:
        """``grpc_wire.decode_infer`` of a message that is not parsed, elsewhere."""
        return self._begin(lambda: DecodeMessageJob(pickle.PickleBuffer(message), model))

    async def encode(self, response: InferResponse) -> tuple[list[bytes], int | None]:
        """``wire.encode``, elsewhere."""
        parts, length = await self._begin(lambda: EncodeJob(_travelling(response)))
        return parts, length

    async def encode_message(self, response: InferResponse) -> bytes:
        """``grpc_wire.encode_infer`` as bytes, elsewhere."""
        return bytes(await self._begin(lambda: EncodeMessageJob(_travelling(response))))

    async def call(self, function: Callable[..., Result], message: bytes, *arguments: object) -> Result:
        """What a function of a module makes of a message, elsewhere."""
        result: Result = await self._begin(lambda: CallJob(function, pickle.PickleBuffer(message), arguments))
        return result

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._lock:
            self._closed = True
            helpers = [*self._all]
        for helper in helpers:
            helper.end()
        if self._threads:
            self._threads.shutdown(wait=True)  # what waits for its turn is told that there is none

    @property
    def processes(self) -> list[int]:
        """The ids of those that run."""
        with self._lock:
            return [helper.pid for helper in self._all]

    def _begin(self, make: Callable[[], object]) -> asyncio.Future[Any]:
        """Have the job done that *make* gives; it is made in the thread that waits for it, when its turn has come."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="json")
        self.busy += 1
        box = [make]
        begun = asyncio.get_running_loop().run_in_executor(self._threads, self._do, box)
        begun.add_done_callback(partial(self._ended, box))
        return begun

    def _ended(self, box: list[Callable[[], object]], begun: asyncio.Future[Any]) -> None:
        self.busy -= 1
        box.clear()  # where it waits still, nothing is held for who has left
        if not begun.cancelled():
            begun.exception()  # whoever asked may have left

    def _do(self, box: list[Callable[[], object]]) -> Any:
        """Have a job done by a process, in a thread that waits for it."""
        try:
            make = box.pop()
        except IndexError:
            raise Cancelled("the client went away") from None
        helper = self._take()
        try:
            answer = helper.ask(make())
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            self._drop(helper)
            log.warning("a process that reads and writes JSON died: %s", error)
            raise Failed("the JSON of this request could not be worked on: the process for it died") from error
        except BaseException:
            self._drop(helper)
            raise
        self._idle.append(helper)
        if isinstance(answer, RequestError):
            raise answer
        if isinstance(answer, Exception):
            raise Failed(f"internal error: {answer}")
        if isinstance(answer, InferRequest):
            answer.inputs = {**json_worker.unpacked(answer.inputs)}
        return answer

    def _take(self) -> _Helper:
        with self._lock:
            if self._closed:
                raise Overloaded("the server is going down", reason="draining")
            while self._idle:
                helper = self._idle.pop()
                if helper.alive:
                    return helper
                self._all.discard(helper)
                helper.end()
            try:
                helper = _Helper()
            except OSError as error:
                raise Overloaded(f"no process for large JSON can be started: {error.strerror}") from error
            self._all.add(helper)
            return helper

    def _drop(self, helper: _Helper) -> None:
        with self._lock:
            self._all.discard(helper)
        helper.end()


class _Helper:
    """One process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND],  # -P: nothing is imported from the folder it is started in
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environment() | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: object) -> Any:
        assert self._process.stdin and self._process.stdout
        json_worker.send(cast(Any, self._process.stdin), job)
        return json_worker.receive(cast(Any, self._process.stdout))

    def end(self) -> None:
        """Kill it: it holds nothing that anybody would miss."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                _close(stream)


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:
        return  # what was not written is for nobody


def _travelling(response: InferResponse) -> InferResponse:
    """An answer without what its writer does not need."""
    wanted = {each.name for each in response.request.wanted}
    outputs = {name: array for name, array in response.outputs.items() if name in wanted}
    labels = response.labels if any(each.classes for each in response.request.wanted) else {}
    request = replace(response.request, inputs={})
    return replace(response, request=request, outputs=json_worker.packed(outputs), labels=labels)
