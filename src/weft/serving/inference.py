"""Inference, independent of the protocol: finds a request's model, submits the request, and counts its outcome.

A protocol (``routes``, ``grpc_service``, ``in_process``) calls ``InferenceService.infer`` and gets an ``InferCall``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from weft.base.errors import Cancelled, Expired, Failed, NotFound, Overloaded, RequestError
from weft.http.limits import ByteBudget
from weft.http.messages import ANYONE, ClientRank, ServerEstimate
from weft.runtime.backend import LoadedModel
from weft.runtime.client_memory import Lender
from weft.runtime.tensors import Array
from weft.serving.access import Caller, Keys
from weft.serving.client_settings import TraceSettings
from weft.serving.config import ServerConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.exit_rules import THRESHOLD
from weft.serving.json_helpers import JsonHelpers
from weft.serving.library import Library
from weft.serving.readiness import why_not_ready
from weft.serving.region_tensors import RegionTensors, RequestRegions
from weft.serving.regions import Region, RegionTable
from weft.serving.request_parameters import LONGEST_NS, MOST_WHOLE, ModelTerms, due_of, positive_number, whole_number
from weft.serving.shared_memory import CudaMemory, SystemMemory
from weft.serving.slots import ModelSlot
from weft.serving.statistics import Statistics
from weft.serving.telemetry import Telemetry
from weft.serving.tickets import ClientTicket, Reply
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, Parameter, SharedTensors

log = logging.getLogger("weft.server")

GOING_DOWN = "the server is going down"
PRIORITIES = {1: 9, 2: 3}
"""Weights of the protocol's priorities, of which 1 is the highest; all others weigh 1."""

Decode = Callable[[ModelSpec], "InferRequest | Awaitable[InferRequest]"]
"""Decodes a request, here or in a helper process."""
Peek = Callable[[], Mapping[str, object]]
"""Returns the unchecked parameters of a request that cannot be decoded yet, because its model is not loaded."""
Done = Callable[["InferResponse | RequestError"], None]


class InferCall:
    """One inference request, from the client's first byte until its answer is handed to the socket.

    The protocol (HTTP, gRPC, the calling program) encodes the result, then calls ``settle`` and sends its verdict: the
    deadline is checked, and the request is counted, after everything that takes time.
    """

    __slots__ = (
        "_computed_at", "_done", "_parent", "_service", "_settled", "arrival", "caller", "deadline", "name", "rank",
        "regions", "request", "slot", "ticket", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        service: InferenceService,
        name: str,
        done: Done,
        deadline: int | None,
        caller: Caller | None = None,
        age: int = 0,
        parent: str = "",
        rank: ClientRank | None = None,
    ) -> None:
        """name: of the model. Other parameters are as for ``InferenceService.infer``."""
        self._service, self.name, self._done, self.caller, self._parent = service, name, done, caller, parent
        key_rank = caller.rank if caller else ANYONE
        self.rank = key_rank if rank is None else rank.within(key_rank)
        self.arrival = service.now() - age
        self.deadline = deadline
        """The deadline of the transport (gRPC), on the clock of the lanes."""
        self.slot: ModelSlot | None = None
        """The model; None until one of this name and version is found."""
        self.regions: RequestRegions | None = None
        """The shared memory regions that it uses."""
        self.request: InferRequest | None = None
        self.ticket: ClientTicket | None = None
        self.waiting: asyncio.Task[None] | None = None
        """The task that loads its model, decodes it, or writes its outputs into regions."""
        self._computed_at = 0  # on the clock of the lanes
        self._settled = False

    @property
    def age_s(self) -> float:
        """Seconds since the client sent the request."""
        return (self._service.now() - self.arrival) / 1e9

    def begin(self, slot: ModelSlot, decode: Decode) -> None:
        """Decode the request and submit it to the dispatcher; the answer comes later, a refusal at once."""
        assert slot.served
        began = time.monotonic_ns()
        slot.used_ns = self.arrival
        try:
            request = decode(slot.served.spec)
            if isinstance(request, InferRequest) and request.shared is not None:
                request = self._fetch(request, request.shared, borrows=slot.served.loaded.borrows)
            if isinstance(request, InferRequest):
                self._submit(slot, request, began)
            else:
                self.waiting = self._service.start_task(self._begin_when_decoded(slot, slot.served.spec, request))
        except Exception as error:  # internal errors are answered, too
            self.refuse(error)

    def _fetch(
        self, request: InferRequest, tensors: SharedTensors, *, borrows: bool
    ) -> InferRequest | Awaitable[InferRequest]:
        """Read the inputs of a request that lie in shared memory regions; the regions are released with the answer.

        borrows: whether the model can read inputs directly from a region.
        """
        assert self.caller
        regions = self.regions = self._service.regions_of(tensors, self.caller)
        done = self._done

        def release_regions(outcome: InferResponse | RequestError) -> None:
            regions.end()
            done(outcome)

        self._done = release_regions
        return regions.read_inputs(request, borrows=borrows)

    def _submit(self, slot: ModelSlot, request: InferRequest, began: int) -> None:
        """Submit a decoded request to the dispatcher; *began*: when decoding began (``time.monotonic_ns``)."""
        assert slot.served
        self.request = request
        ticket = self._service.ticket(slot, request, self.arrival, self.deadline, self._reply, self.rank)
        if self.regions and _writes_outputs(slot.served.loaded):
            ticket.output_parts = self.regions.lend_outputs(slot.served.spec)
        slot.statistics.input_ns += time.monotonic_ns() - began
        self._service.dispatcher.submit(ticket)
        trace = self._service.trace
        ticket.traced = trace.everything or trace.sample(slot.entry.name)
        self.ticket = ticket

    async def _begin_when_decoded(self, slot: ModelSlot, spec: ModelSpec, reading: Awaitable[InferRequest]) -> None:
        """Wait until the request was decoded in a helper process, then submit it with its original arrival time."""
        try:
            request = await reading
            if slot.served is None or slot.served.spec != spec:
                name = slot.entry.name
                raise Overloaded(f"{name} left or changed while its request was read; send it again", reason="unloaded")
        except Exception as error:
            # without its traceback: that is a reference cycle (frames, *reading*, error), which would keep the body
            # until the next garbage collection
            self.refuse(error.with_traceback(None) if isinstance(error, RequestError) else error)
        else:
            self.waiting = None
            self.begin(slot, lambda _: request)

    def _reply(self, ticket: ClientTicket, outcome: dict[str, Array] | RequestError) -> None:
        """Pass the outputs, or the error, to the protocol; the dispatcher calls this once."""
        now = self._computed_at = self._service.now()
        # A result that is late already is not worth encoding, and its client may use the output regions for other data.
        error = outcome if isinstance(outcome, RequestError) else ticket.late(now) if ticket.strict else None
        if error:
            self.refuse(error)
            return
        assert self.request and not isinstance(outcome, RequestError)
        parameters: dict[str, Parameter] = {
            "weft_queue_us": (ticket.began - ticket.arrival) // 1000,
            "weft_compute_us": ticket.compute_ns // 1000,
            "weft_batch": ticket.batch_size,
        }
        if ticket.model.exit_rules:
            parameters[THRESHOLD] = ticket.threshold
        response = InferResponse(self.request, ticket.model.spec, outcome, parameters, ticket.model.labels)
        if self.regions:
            self._write_outputs(response, self.regions, written=ticket.written)
        else:
            self._done(response)

    def _write_outputs(self, response: InferResponse, regions: RequestRegions, *, written: bool) -> None:
        """Write outputs into the shared memory regions that were requested, unless a device has, then answer."""
        try:
            completed = regions.write_outputs(response, written=written)  # a response, or an awaitable of one
        except Exception as error:
            self.refuse(error)
            return
        if isinstance(completed, InferResponse):
            self._done(completed)
        else:
            self.waiting = self._service.start_task(self._answer_when_written(completed))

    async def _answer_when_written(self, writing: Awaitable[InferResponse]) -> None:
        """Answer after a thread has written the outputs into regions."""
        try:
            response = await writing
        except Exception as error:
            self.refuse(error)
        else:
            self.waiting = None
            self._done(response)

    def refuse(self, error: Exception) -> None:
        """Answer with an error."""
        self._done(self.fail(error))

    def fail(self, error: Exception) -> RequestError:
        """Count a request without a result, and return the error for the client. Internal exceptions are logged."""
        if not isinstance(error, RequestError):
            log.error("%s: a request failed inside the server", self.name, exc_info=error)
            error = internal_error(error)
        self.settle(error)
        return error

    def settle(self, error: RequestError | None = None) -> RequestError | None:
        """Decide the outcome of the request and count it, once; a protocol calls this right before it sends a result.

        Returns the error to send instead: *error*, or ``Expired`` after a strict deadline. None: send the result.
        """
        if self._settled:  # the client disconnected meanwhile, so the answer is lost
            return error
        self._settled = True
        service, ticket, now = self._service, self.ticket, self._service.now()
        if ticket:
            error = ticket.settle(now, error)
            if error is None:
                ticket.model.statistics.output_ns += now - self._computed_at
        else:
            assert error, "a request without a ticket has no result"
            statistics = self.slot.statistics if self.slot else service.refused
            # without a ticket, only a passed deadline shows that the request had one
            statistics.failed(now, latency_ns=0, reason=error.reason, had_deadline=isinstance(error, Expired))
        if service.telemetry.enabled and (ticket.traced if ticket else service.trace.sample(self.name)):
            service.telemetry.ended(self.name, now - self.arrival, ticket, error, self._parent)
        self._done = _ignore  # a reference cycle through the protocol's request would keep the body
        return error

    def cancel(self) -> None:
        """Withdraw the request: its client disconnected."""
        if self.regions:
            self.regions.end()
        if self.waiting:
            self.waiting.cancel()
        if self.ticket:
            self._service.dispatcher.withdraw(self.ticket)
        self.settle(Cancelled("the client went away"))  # no effect if the dispatcher answered just now


class InferenceService:
    """Accepts inference requests, holds what they share (keys, budgets, regions), and reports readiness."""

    def __init__(
        self,
        config: ServerConfig,
        library: Library,
        dispatcher: Dispatcher,
        telemetry: Telemetry | None,
        keys: Keys | None,
    ) -> None:
        """telemetry: None: no spans are sent. keys: None: those that *config* names."""
        self.config, self.library, self.dispatcher = config, library, dispatcher
        self.telemetry = telemetry or Telemetry()
        self.now = dispatcher.lanes.now
        """The clock of arrivals, deadlines and segments, in nanoseconds: that of the lanes."""
        self.started_ns = self.now()
        self.started = False
        """Whether all models to preload were loaded or have failed."""
        self.draining = False
        self._last_reason: str | None = None
        """The reason for not being ready that was last logged."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused = Statistics()
        """Counters of requests for which no model was found."""
        self.keys = keys or Keys(config.network.api_key, config.network.keys_file)
        self.budget = ByteBudget(config.inflight_bytes)
        """Backpressure: bounds the bytes that requests of all connections hold together."""
        self.json = JsonHelpers()
        self.trace = TraceSettings()
        limits: dict[str, Any] = {
            "enabled": config.shares_memory,
            "most_regions": config.limits.max_shared_memory_regions,
            "most_bytes": config.limits.max_shared_memory_bytes,
        }
        self.system_memory = SystemMemory(**limits)
        self.cuda_memory = CudaMemory(library.backend.region_devices, self._write_on_device, **limits)
        self.regions: dict[str, RegionTable] = {"system": self.system_memory, "cuda": self.cuda_memory}
        """Kind of shared memory -> its registered regions."""
        self.region_tensors = RegionTensors(self.budget, config.limits.max_body_bytes)

    def check_key(self, headers: Mapping[str, str]) -> Caller:
        """Return the user of a request's API key; Unauthorised without a valid one. *headers* have lower-case names."""
        return self.keys.require_caller(headers)

    def slot_for(self, name: str, version: str) -> ModelSlot:
        """Find the model of a new inference request; NotFound, or Overloaded while draining, which are counted."""
        try:
            if self.draining:
                raise Overloaded(GOING_DOWN, reason="draining", retry_after_s=5)
            return self.library.find(name, version)
        except RequestError as error:
            self.refused.failed(self.now(), latency_ns=0, reason=error.reason, had_deadline=False)
            raise

    def trace_refusal(self, name: str, error: RequestError, parent: str = "") -> None:
        """Send the span of a request that was refused before it became an ``InferCall``.

        name: its model; empty where that is not known. parent: the parent span.
        """
        if self.telemetry.enabled and self.trace.sample(name):
            self.telemetry.ended(name, lasted_ns=0, ticket=None, error=error, parent=parent)

    def infer(
        self,
        slot: ModelSlot,
        decode: Decode,
        done: Done,
        peek: Peek,
        deadline: int | None = None,
        caller: Caller | None = None,
        age: int = 0,
        parent: str = "",
        rank: ClientRank | None = None,
    ) -> InferCall:
        """Start a request; it is answered even if the server starts to drain meanwhile.

        slot: the model, from ``slot_for``. decode: decodes the request. peek: see ``Peek``.
        done: called once: with an error, perhaps before this returns, or later with a result. An error is counted
        already; a result is counted, or refused as too late, by ``InferCall.settle``, which the caller calls when it is
        encoded and about to be sent.
        deadline: that of the transport (gRPC), on the clock of the lanes. caller: the user of its API key.
        age: nanoseconds since the client sent the request, if a gate forwarded it; deadlines count from then.
        parent: the parent span, as in ``telemetry``. rank: the priorities of the client's key, if a gate checked it.
        """
        call = InferCall(self, slot.entry.name, done, deadline, caller, age, parent, rank)
        call.slot = slot
        if slot.file_removed:
            call.refuse(NotFound(f"model {slot.entry.name} is gone: its file was removed"))
        elif slot.served:
            call.begin(slot, decode)
        else:
            call.waiting = self.start_task(self._begin_when_loaded(call, slot, decode, peek))
        return call

    async def _begin_when_loaded(self, call: InferCall, slot: ModelSlot, decode: Decode, peek: Peek) -> None:
        """Load a model, then begin the request; refuse it if its strict deadline passes before."""
        try:
            async with asyncio.timeout(_loading_timeout_s(call, slot, peek)):
                await self.library.ensure_loaded(slot)
        except TimeoutError:
            call.refuse(Expired(f"{slot.entry.name}: its deadline passed while it was loading"))
        except RequestError as error:
            self.log_readiness()
            call.refuse(error)
        else:
            self.log_readiness()
            call.waiting = None
            call.begin(slot, decode)

    def ticket(
        self,
        slot: ModelSlot,
        request: InferRequest,
        arrival: int,
        deadline: int | None,
        reply: Reply,
        rank: ClientRank = ANYONE,
    ) -> ClientTicket:
        """Create the ticket of a request. Its deadline and priority override its model's, and those the server's.

        arrival, deadline: on the clock of the lanes; *deadline*: that of the transport (gRPC). reply: gets the outcome.
        rank: the priorities of the client's key.
        """
        assert slot.served
        parameters, model = request.parameters, slot.entry.config
        threshold, priority = None, 0
        if parameters:
            threshold = positive_number(parameters, THRESHOLD, "a number above 0; above 1 no row leaves early")
            priority = whole_number(parameters, "priority")
        weight = _weight(priority, model.priority, rank)
        server = self.config.scheduling
        terms = ModelTerms(model.slo_ms, model.timeout_ms, server.default_slo_ms, server.best_effort_ms)
        due = due_of(parameters, arrival, terms, deadline)
        return ClientTicket(
            slot.served,
            request.inputs,
            reply,
            due.deadline_ns,
            priority=weight,
            strict=due.strict,
            best_effort=due.best_effort,
            exit_threshold=threshold,
        )

    def estimate(self, name: str, version: str) -> ServerEstimate | None:
        """Estimate the waiting and computing time of another request for a model; None if it is not loaded."""
        try:
            served = self.library.find(name, version).served
        except NotFound:
            return None
        if served is None:
            return None
        compute_ns, lanes = self.dispatcher.streams.typical_request_ns(served), self.dispatcher.lanes.count
        return ServerEstimate(self.dispatcher.wait_ns(), compute_ns, lanes)

    def regions_of(self, tensors: SharedTensors, caller: Caller) -> RequestRegions:
        """Return the shared memory regions that a request uses; they must belong to its caller."""

        def find(name: str) -> Region:
            table = self.cuda_memory if self.cuda_memory.has(caller, name) else self.system_memory
            return table.find(caller, name)

        return RequestRegions(self.region_tensors, tensors, find)

    def _write_on_device(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Write bytes into a client's region in device memory; blocks until the device's worker has done so."""
        self.library.backend.write_region(lender, offset, data)

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Continue a request in a task, which draining waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Readiness and end

    def is_ready(self) -> bool:
        return not self.why_not_ready()

    def why_not_ready(self, *, in_full: bool = True) -> str:
        """Return why the server is not ready, empty if it is; models are named only if *in_full*."""
        if self.draining:
            return GOING_DOWN
        if not self.started:
            return "models are being loaded"
        why = why_not_ready(self.library, self.config)
        return why if in_full or not why else "models are missing; see the log, or ask with the API key"

    def log_readiness(self) -> None:
        """Log readiness if it has changed, so that the reason for a failing probe is in the log."""
        why = self.why_not_ready()
        if why != self._last_reason and not self.draining:
            # "ready%s": *why* is empty then
            log.log(logging.WARNING if why else logging.INFO, "not ready: %s" if why else "ready%s", why)
            self._last_reason = why

    async def wait_until_drained(self) -> None:
        """Wait until every accepted request is answered."""
        while self.dispatcher.pending or self._tasks:
            await asyncio.sleep(0.005)

    def close_regions(self) -> None:
        """Release all shared memory regions of clients."""
        self.region_tensors.close()
        self.system_memory.close()
        self.cuda_memory.close()


def _loading_timeout_s(call: InferCall, slot: ModelSlot, peek: Peek) -> float | None:
    """Return the timeout for loading a request's model, from its strict deadline; None without one."""
    timeouts_s = [(call.deadline - call.arrival) / 1e9] if call.deadline is not None else []
    timeout_us = peek().get("timeout")
    if isinstance(timeout_us, int) and 0 < timeout_us <= MOST_WHOLE:
        timeouts_s.append(min(timeout_us / 1e6, LONGEST_NS / 1e9))
    if not timeouts_s and slot.config.timeout_ms is not None:
        timeouts_s.append(slot.config.timeout_ms / 1e3)
    return min(timeouts_s) - call.age_s if timeouts_s else None


def _weight(requested: int, model: int, rank: ClientRank) -> int:
    """Return the scheduling weight of a request: by its priority, else its key's or model's, limited by its key.

    requested, model: the priorities of the request and of its model; 0: none.
    """
    return min(PRIORITIES.get(requested or rank.priority or model, 1), PRIORITIES.get(rank.top, 1))


def _writes_outputs(model: LoadedModel) -> bool:
    """Tell whether a model can write outputs into clients' regions: not where exits or several models share a batch."""
    return model.borrows and model.exits is None and model.tasks is None


def _ignore(outcome: InferResponse | RequestError) -> None:
    """Do nothing: replaces a callback that was called."""


def internal_error(error: Exception) -> Failed:
    """Convert an internal exception to the client's error, which does not show its message."""
    return Failed(f"internal error: {type(error).__name__}")
