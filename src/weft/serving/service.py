"""What the server does, whichever protocol asks: infer, describe, load and unload.

Answers are plain dicts in the shape of the protocol's JSON; ``routes`` and ``grpc_service`` turn them into
HTTP and gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.base.errors import (
    BadRequest,
    Cancelled,
    Expired,
    Failed,
    Forbidden,
    InputError,
    LoadFailed,
    NotFound,
    Overloaded,
    RequestError,
)
from weft.base.version import __version__
from weft.http.budget import ByteBudget
from weft.http.hops import ANYONE, ClientRank, ServerEstimate
from weft.runtime.lent import Lender
from weft.runtime.tensors import Array
from weft.serving.config import ModelConfig, ServerConfig
from weft.serving.cuda_memory import CudaMemory
from weft.serving.dispatch import Dispatcher
from weft.serving.errands import errand
from weft.serving.held_memory import HeldMemory
from weft.serving.history import History
from weft.serving.isolation import THREADS
from weft.serving.json_helpers import JsonHelpers
from weft.serving.keys import Caller, Keys
from weft.serving.leaving import THRESHOLD
from weft.serving.library import Library
from weft.serving.log_settings import LogSettings
from weft.serving.readiness import why_not_ready
from weft.serving.region_tensors import RegionTensors, RequestRegions
from weft.serving.regions import Region, RegionTable
from weft.serving.renewal import DECIDING, LOADING, Renewal, change_of, renew_models
from weft.serving.request_parameters import LONGEST_NS, MOST_WHOLE, ModelTerms, above_zero, due_of, whole
from weft.serving.shared_memory import SystemMemory
from weft.serving.slots import ModelSlot
from weft.serving.statistics import Statistics
from weft.serving.telemetry import Telemetry
from weft.serving.tickets import ClientTicket, Reply
from weft.serving.trace_settings import TraceSettings
from weft.serving.triton_config import asked_settings, parameters_of
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, Parameter, SharedTensors

log = logging.getLogger("weft.server")

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
    "trace",
)
GOING_DOWN = "the server is going down"
PRELOADS = 4
"""Models that are loaded at the same time when the server starts; where they are measured first, one by one."""
PRIORITIES = {1: 9, 2: 3}
"""Weights of the protocol's priorities, of which 1 is the highest; all others weigh 1."""


Decode = Callable[[ModelSpec], "InferRequest | Awaitable[InferRequest]"]
"""Reads a request, here or elsewhere."""
Peek = Callable[[], Mapping[str, object]]
"""The parameters of a request that cannot be read yet, because its model is not loaded; unchecked."""
Done = Callable[["InferResponse | RequestError"], None]


class InferCall:
    """One request for a result, from the client's first byte until its answer is handed to the socket.

    The server's face (HTTP, gRPC, the calling program) encodes the result, then calls ``settle`` and sends what that
    decides: the deadline is judged, and the request is counted, after everything that takes time.
    """

    __slots__ = (
        "_computed_at", "_done", "_parent", "_service", "_settled", "arrival", "caller", "deadline", "name", "rank",
        "regions", "request", "slot", "ticket", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        name: str,
        done: Done,
        deadline: int | None,
        caller: Caller | None = None,
        age: int = 0,
        parent: str = "",
        rank: ClientRank | None = None,
    ) -> None:
        self._service, self.name, self._done, self.caller, self._parent = service, name, done, caller, parent
        own = caller.rank if caller else ANYONE
        self.rank = own if rank is None else rank.within(own)
        self.arrival = service.now() - age
        self.deadline = deadline
        """The transport's own, on the clock of the lanes."""
        self.slot: ModelSlot | None = None
        """Its model; None while none of this name and version is known."""
        self.regions: RequestRegions | None = None
        """Where tensors of it lie that do not travel with it."""
        self.request: InferRequest | None = None
        self.ticket: ClientTicket | None = None
        self.waiting: asyncio.Task[None] | None = None
        self._computed_at = 0
        self._settled = False

    @property
    def passed_s(self) -> float:
        """How long ago its client sent it."""
        return (self._service.now() - self.arrival) / 1e9

    def begin(self, slot: ModelSlot, decode: Decode) -> None:
        """Read it, hand it to the dispatcher; the answer comes later, a refusal at once."""
        assert slot.served
        began = time.monotonic_ns()
        slot.used_ns = self.arrival
        try:
            found = decode(slot.served.spec)
            if isinstance(found, InferRequest) and found.shared is not None:
                found = self._fetch(found, found.shared, borrows=slot.served.loaded.borrows)
            if isinstance(found, InferRequest):
                self._submit(slot, found, began)
            else:
                self.waiting = self._service.soon(self._begin_when_read(slot, slot.served.spec, found))
        except Exception as error:  # nobody shall wait because of a fault of ours
            self.refuse(error)

    def _fetch(
        self, request: InferRequest, tensors: SharedTensors, *, borrows: bool
    ) -> InferRequest | Awaitable[InferRequest]:
        """Read inputs that lie in regions."""
        assert self.caller
        regions = self.regions = self._service.regions_of(tensors, self.caller)
        done = self._done

        def ended(outcome: InferResponse | RequestError) -> None:
            regions.end()
            done(outcome)

        self._done = ended
        return regions.filled(request, borrows=borrows)

    def _submit(self, slot: ModelSlot, request: InferRequest, began: int) -> None:
        self.request = request
        ticket = self._service.ticket(slot, request, self.arrival, self.deadline, self._replied, self.rank)
        slot.statistics.input_ns += time.monotonic_ns() - began
        self._service.dispatcher.submit(ticket)
        ticket.traced = self._service.trace.takes(slot.entry.name)
        self.ticket = ticket

    async def _begin_when_read(self, slot: ModelSlot, spec: ModelSpec, reading: Awaitable[InferRequest]) -> None:
        """Go on when it was read elsewhere, as a request that came when it did."""
        try:
            request = await reading
            if slot.served is None or slot.served.spec != spec:
                name = slot.entry.name
                raise Overloaded(f"{name} left or changed while its request was read; send it again", reason="unloaded")
        except Exception as error:
            # without its traceback: the frames hold *reading*, which holds the error, and the body until garbage is
            # collected, which is seldom
            self.refuse(error.with_traceback(None) if isinstance(error, RequestError) else error)
        else:
            self.waiting = None
            self.begin(slot, lambda _: request)

    def _replied(self, ticket: ClientTicket, outcome: dict[str, Array] | RequestError) -> None:
        now = self._computed_at = self._service.now()
        # A result that is late already is not worth encoding, and its client may use the output regions for other data.
        error = outcome if isinstance(outcome, RequestError) else ticket.late(now)
        if error:
            self.refuse(error)
            return
        assert self.request and not isinstance(outcome, RequestError)
        parameters: dict[str, Parameter] = {
            "weft_queue_us": (ticket.began - ticket.arrival) // 1000,
            "weft_compute_us": ticket.compute_ns // 1000,
            "weft_batch": ticket.batch_size,
        }
        if ticket.model.leaving:
            parameters[THRESHOLD] = ticket.threshold
        response = InferResponse(self.request, ticket.model.spec, outcome, parameters, ticket.model.labels)
        if self.regions:
            self._write_outputs(response, self.regions)
        else:
            self._done(response)

    def _write_outputs(self, response: InferResponse, regions: RequestRegions) -> None:
        """Write outputs that shall lie in regions, then answer."""
        try:
            written = regions.delivered(response)
        except Exception as error:
            self.refuse(error)
            return
        if isinstance(written, InferResponse):
            self._done(written)
        else:
            self.waiting = self._service.soon(self._answer_when_written(written))

    async def _answer_when_written(self, writing: Awaitable[InferResponse]) -> None:
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
        """Count that there is no result to send; returns what the client is told. An exception of ours is logged."""
        if not isinstance(error, RequestError):
            log.error("%s: a request failed inside the server", self.name, exc_info=error)
            error = internal(error)
        self.settle(error)
        return error

    def settle(self, error: RequestError | None = None) -> RequestError | None:
        """Decide how the request ends, and count it, once; a face calls this last before it sends a result.

        Returns the error to send in its place: *error*, or ``Expired`` after a strict deadline. None: send the result.
        """
        if self._settled:  # its client left meanwhile: what is sent now reaches nobody
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
            statistics.failed(now, 0, error.reason, had_deadline=isinstance(error, Expired))
        if service.telemetry.enabled and (ticket.traced if ticket else service.trace.takes(self.name)):
            service.telemetry.ended(self.name, now - self.arrival, ticket, error, self._parent)
        self._done = _ignore  # it refers to the face's request, and that to this: the cycle would keep its body
        return error

    def cancel(self) -> None:
        """Its client went away."""
        if self.regions:
            self.regions.end()
        if self.waiting:
            self.waiting.cancel()
        if self.ticket:
            self._service.dispatcher.withdraw(self.ticket)
        self.settle(Cancelled("the client went away"))  # unless the dispatcher had it, and answered just now


class Service:
    """The server behind its protocols."""

    def __init__(
        self,
        config: ServerConfig,
        library: Library,
        dispatcher: Dispatcher,
        telemetry: Telemetry | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.config, self.library, self.dispatcher = config, library, dispatcher
        self.telemetry = telemetry or Telemetry()
        self.now = dispatcher.lanes.now
        """The clock of arrivals, deadlines and segments: that of what computes them."""
        self.started_ns = self.now()
        self.started = False
        """All that shall be there from the start was loaded, or has failed to."""
        self.draining = False
        self._last_told: str | None = None
        """Why it was not ready when the log was last told."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.http_answers: Counter[int] = Counter()
        """How many answers had each status, whatever was asked."""
        self.grpc_answers: Counter[tuple[str, str]] = Counter()
        """How many answers over gRPC each method gave with each code; methods that there are not are ``unknown``."""
        self.refused = Statistics()
        """Requests that met no model."""
        self.history = History(self.started_ns)
        """The last ten minutes; ``look_back`` adds to it."""
        self.keys = keys or Keys(config.api_key, config.keys_file)
        self.held_memory = HeldMemory(workers=config.isolation != THREADS or config.device is not None)
        self.budget = ByteBudget(config.inflight_bytes)
        """What requests hold of all connections together."""
        self.json = JsonHelpers()
        self.trace, self.log_settings = TraceSettings(), LogSettings()
        limits: dict[str, Any] = {
            "enabled": config.shares_memory,
            "most_regions": config.max_shared_memory_regions,
            "most_bytes": config.max_shared_memory_bytes,
        }
        self.system_memory = SystemMemory(**limits)
        self.cuda_memory = CudaMemory(library.backend.region_devices, self._write_on_device, **limits)
        self.regions: dict[str, RegionTable] = {"system": self.system_memory, "cuda": self.cuda_memory}
        """Kind of shared memory -> what is registered of it."""
        self.region_tensors = RegionTensors(self.budget, config.max_body_bytes)
        self.settings_again: Callable[[], ServerConfig] = lambda: self.config
        """Reads the settings once more from where they came; by default they are what they are."""
        self._renewing = asyncio.Lock()

    def look_back(self) -> None:
        """Add a sample to the history."""
        seen = {(slot.entry.name, slot.entry.version): slot.statistics for slot in self.library.slots()}
        self.history.sample(self.now(), seen)

    def check_key(self, headers: Mapping[str, str]) -> Caller:
        """Whose key a request carries; refuse one without, if keys are set. *headers* have lower-case names."""
        return self.keys.known(headers)

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries a key of the server's; any does where there is none."""
        return self.keys.caller(headers) is not None

    def check_writable(self) -> None:
        """Refuse who would load or unload a model where nobody may."""
        if self.config.repository == "read-only":
            raise Forbidden(
                "the repository is read-only: models are loaded at the start or by requests for them; "
                'to load and unload, start the server with repository = "open"'
            )

    def check_steerable(self) -> None:
        """Refuse who would change the settings of the log or the trace where nobody may."""
        if self.config.live_settings == "read-only":
            raise Forbidden(
                "settings of the log and of the trace are read-only; to let clients change them, start the server with "
                'live_settings = "open"'
            )

    # Inference

    def meant(self, name: str, version: str) -> ModelSlot:
        """The model that a new request for a result is for; that it can have none is counted."""
        try:
            if self.draining:
                raise Overloaded(GOING_DOWN, reason="draining", retry_after_s=5)
            return self.library.find(name, version)
        except RequestError as error:
            self.refused.failed(self.now(), 0, error.reason, had_deadline=False)
            raise

    def trace_refusal(self, name: str, error: RequestError, parent: str = "") -> None:
        """Send the span of a request that was refused before it became an ``InferCall``.

        name: its model; empty where that is not known.
        """
        if self.telemetry.enabled and self.trace.takes(name):
            self.telemetry.ended(name, 0, None, error, parent)

    def infer(
        self,
        name: str,
        version: str,
        decode: Decode,
        done: Done,
        peek: Peek,
        deadline: int | None = None,
        caller: Caller | None = None,
        age: int = 0,
        parent: str = "",
        rank: ClientRank | None = None,
    ) -> InferCall:
        """Have a request computed that was let in by ``meant``.

        done: called once: with an error, perhaps before this returns, or later with a result. An error is counted
        already; a result is counted, or turned down as too late, by ``InferCall.settle``, which the caller calls when
        it is encoded and about to be sent.
        age: nanoseconds since its client sent it, where others had it before; its deadlines count from then.
        parent: the span that it is a part of, as ``telemetry`` knows it.
        rank: what its client's key gives it, where another server knows that.
        It is computed also if the server goes down meanwhile: whoever was let in has a result.
        """
        call = InferCall(self, name, done, deadline, caller, age, parent, rank)
        try:
            slot = call.slot = self.library.find(name, version)
        except RequestError as error:
            call.refuse(error)
            return call
        if slot.served:
            call.begin(slot, decode)
        else:
            call.waiting = self.soon(self._begin_when_loaded(call, slot, decode, peek))
        return call

    def estimate(self, name: str, version: str) -> ServerEstimate | None:
        """What is expected for another request for a model; None while it is not loaded, or gone."""
        try:
            served = self.library.find(name, version).served
        except NotFound:
            return None
        if served is None:
            return None
        own, lanes = self.dispatcher.streams.whole(served), self.dispatcher.lanes.count
        return ServerEstimate(self.dispatcher.ahead(), own, lanes)

    def regions_of(self, tensors: SharedTensors, caller: Caller) -> RequestRegions:
        """The regions that a request of the caller's uses, which are its own."""

        def find(name: str) -> Region:
            table = self.cuda_memory if self.cuda_memory.has(caller, name) else self.system_memory
            return table.find(caller, name)

        return self.region_tensors.of(tensors, find)

    def _write_on_device(self, lender: Lender, offset: int, data: memoryview) -> None:
        self.library.backend.write_region(lender, offset, data)

    def soon(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Go on with a request in a task, for which a server that goes down waits."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin_when_loaded(self, call: InferCall, slot: ModelSlot, decode: Decode, peek: Peek) -> None:
        try:
            async with asyncio.timeout(_patience_s(call, slot, peek)):
                await self.library.ensure(slot)
        except TimeoutError:
            call.refuse(Expired(f"{slot.entry.name}: its deadline passed while it was loading"))
        except RequestError as error:
            self._tell_readiness()
            call.refuse(error)
        else:
            self._tell_readiness()
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
        """What a request waits with: its deadline and priority are its own, else its model's, else the server's."""
        assert slot.served
        parameters, model = request.parameters, slot.config
        threshold = above_zero(parameters, THRESHOLD, "a number above 0; above 1 nobody leaves early")
        weight = _weight(whole(parameters, "priority"), model.priority, rank)
        terms = ModelTerms(model.slo_ms, model.timeout_ms, self.config.default_slo_ms, self.config.best_effort_ms)
        due = due_of(parameters, arrival, terms, deadline)
        return ClientTicket(
            slot.served,
            request.inputs,
            reply,
            due.at,
            priority=weight,
            strict=due.strict,
            best_effort=due.best_effort,
            exit_threshold=threshold,
        )

    # Descriptions

    def metadata(self) -> dict[str, Any]:
        shared = ["system_shared_memory"] if self.system_memory.offered else []
        shared += ["cuda_shared_memory"] if self.cuda_memory.offered else []
        return {"name": "weft", "version": __version__, "extensions": [*EXTENSIONS, *shared]}

    def is_ready(self) -> bool:
        return not self.why_not_ready()

    def why_not_ready(self, *, in_full: bool = True) -> str:
        """What keeps the server from being ready, with the models' names if *in_full*; nothing where it is."""
        if self.draining:
            return GOING_DOWN
        if not self.started:
            return "models are being loaded"
        why = why_not_ready(self.library, self.config)
        return why if in_full or not why else "models are missing; see the log, or ask with the API key"

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a request would be taken; NotFound if there is no such model."""
        slot = self.library.find(name, version)
        return not slot.outage and (slot.served is not None or (slot.state == "unloaded" and not slot.shut))

    async def loaded(self, name: str, version: str = "") -> ModelSlot:
        """A model that is in memory, brought there if need be."""
        slot = self.library.find(name, version)
        if slot.served is None:
            await self.library.ensure(slot)
        return slot

    async def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        slot = await self.loaded(name, version)
        assert slot.served
        spec = slot.served.spec
        return {
            "name": name,
            "versions": self.library.repository.versions(name) if not version else [slot.entry.version],
            "platform": self.library.backend.platform,
            "inputs": list(map(_tensor, spec.inputs)),
            "outputs": list(map(_tensor, spec.outputs)),
        }

    async def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """Triton's ModelConfig, with our own settings as parameters."""
        slot = await self.loaded(name, version)
        assert slot.served
        loaded, spec = slot.served.loaded, slot.served.spec
        batch = loaded.max_batch if loaded.batchable else int(_has_rows(spec))
        return {
            "name": name,
            "platform": self.library.backend.platform,
            "backend": self.library.backend.name,
            "max_batch_size": batch,
            "input": [_configured(each, batched=batch > 0) for each in spec.inputs],
            "output": [_labelled(_configured(each, batched=batch > 0), slot.config.labels) for each in spec.outputs],
            "parameters": parameters_of(slot.config),
        }

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        slots = [self.library.find(name, version)] if name else [s for s in self.library.slots() if s.served]
        return {"model_stats": [_statistics(slot) for slot in slots]}

    def log_told(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the log, once those that are *wanted* are taken over."""
        if wanted:
            self.check_steerable()
            self.log_settings.change(wanted)
        return self.log_settings.told()

    def trace_told(self, name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the trace, or of that of a model, once those that are *wanted* are taken over."""
        if name:
            self.library.find(name)
        if wanted:
            self.check_steerable()
            self.trace.change(wanted, name)
        return self.trace.told(name)

    async def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """Every model there is and its state, after another look at the disk."""
        await self.library.rescan()
        self._tell_readiness()
        names = {"ready": "READY", "loading": "LOADING"}
        rows = [
            {
                "name": slot.entry.name,
                "version": slot.entry.version,
                "state": "UNAVAILABLE" if slot.outage else names.get(slot.state, "UNAVAILABLE"),
                "reason": slot.outage or (slot.message if slot.state != "ready" else ""),
            }
            for slot in self.library.slots()
        ]
        known = {row["name"] for row in rows}
        problems = self.library.repository.problems
        rows += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": why}
            for name, why in problems.items()
            if name not in known
        ]
        return [row for row in rows if row["state"] == "READY"] if ready_only else rows

    async def load(self, name: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Load a model, with settings of the client's where its *parameters* have some (``triton_config``)."""
        self.check_writable()
        settings = await self._asked_settings(name, parameters) if parameters else None
        try:
            await self.library.load(name, settings)
        except LoadFailed as error:
            raise BadRequest(str(error)) from error
        finally:
            self._tell_readiness()

    async def renew(self) -> Renewal:
        """Read the settings and look at the models again, and take over what can be while requests come and go."""
        async with self._renewing:
            try:
                wanted = await errand("reading of the settings", self.settings_again, lambda _: None)
                change = change_of(self.config, wanted)
                if change.any_of(DECIDING):
                    config = change.config
                    self.dispatcher.follow(config.policy, config.policy_options, config.late, config.lanes)
            except InputError as error:
                raise BadRequest(str(error)) from error
            self.config = change.config
            self.library.adjust(
                threads=self.config.threads,
                budget_bytes=self.config.memory_budget_bytes,
                max_compute_s=self.config.max_compute_s or None,
                isolation=self.config.isolation,
            )
            models = await renew_models(self.library, everything=change.any_of(LOADING), preload=self.config.preload)
            self._tell_readiness()
            renewal = replace(models, settings=change.settings, restart=change.restart)
            log.log(logging.WARNING if renewal.failed else logging.INFO, "renewed: %s", renewal)
            return renewal

    async def _asked_settings(self, name: str, parameters: Mapping[str, Any]) -> ModelConfig | None:
        backend = self.library.backend
        shown: Mapping[str, Any] = {"name": name, "platform": backend.platform, "backend": backend.name}
        await self.library.rescan()
        slot = self.library.find(name)
        if slot.served:
            shown = await self.model_config(name)
        settings = asked_settings(parameters, {**shown, "parameters": parameters_of(slot.config)})
        if settings is not None and slot.entry.body:
            raise BadRequest(f"{name} is one of several models of a file; load it without a config")
        return settings

    async def unload(self, name: str) -> None:
        """Take no more requests for a model; one that is not there has none."""
        self.check_writable()
        with suppress(NotFound):
            self.library.unload(name)
        self._tell_readiness()

    # Life

    async def preload(self, say: Callable[[str], None] | None = None) -> None:
        """Load what shall be there from the start, some at a time; what cannot be loaded is logged and left out.

        *say* hears which model begins to load, in their order.
        """
        waiting = iter(list(self.library.slots()) if self.config.preload else ())
        await asyncio.gather(*(self._preload(waiting, say) for _ in range(1 if self.library.learn_first else PRELOADS)))
        self.started = True
        self._tell_readiness()

    async def _preload(self, waiting: Iterator[ModelSlot], say: Callable[[str], None] | None) -> None:
        """Load one after another of those that wait."""
        for slot in waiting:
            newest = self.library.repository.entry(slot.entry.name).version == slot.entry.version
            done = slot.served or slot.loading or slot.state == "failed"  # with a model of the same body
            if done or not (slot.config.preload and newest and self.library.fits(slot)):
                continue  # the others come on demand
            if say:
                say(slot.entry.name)
            try:
                await self.library.ensure(slot)
            except LoadFailed:
                pass  # that is logged where it happens
            except Overloaded as error:
                log.warning("%s", error)

    def _tell_readiness(self) -> None:
        """A line in the log where it has changed: whoever watches a probe finds the reason there."""
        why = self.why_not_ready()
        if why != self._last_told and not self.draining:
            log.log(logging.WARNING if why else logging.INFO, "not ready: %s" if why else "ready%s", why)
            self._last_told = why

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        while self.dispatcher.pending or self._tasks:
            await asyncio.sleep(0.005)

    def close_regions(self) -> None:
        """Let go of all that clients have registered."""
        self.region_tensors.close()
        self.system_memory.close()
        self.cuda_memory.close()


def _patience_s(call: InferCall, slot: ModelSlot, peek: Peek) -> float | None:
    """How long a request waits for its model: until its strict deadline, if it or its model has one."""
    found = [(call.deadline - call.arrival) / 1e9] if call.deadline is not None else []
    timeout_us = peek().get("timeout")
    if isinstance(timeout_us, int) and 0 < timeout_us <= MOST_WHOLE:
        found.append(min(timeout_us / 1e6, LONGEST_NS / 1e9))
    if not found and slot.config.timeout_ms is not None:
        found.append(slot.config.timeout_ms / 1e3)
    return min(found) - call.passed_s if found else None


def _tensor(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _configured(spec: Any, *, batched: bool) -> dict[str, Any]:
    kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": kind, "dims": list(spec.shape[1:] if batched else spec.shape)}


def _labelled(configured: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    file = labels.get(configured["name"])
    return {**configured, "label_filename": file} if file else configured


def _has_rows(spec: ModelSpec) -> bool:
    """Whether the first dimension of all tensors is free: to clients that is the batch, however it is computed."""
    return all(each.shape[:1] == (-1,) for each in (*spec.inputs, *spec.outputs))


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def _statistics(slot: ModelSlot) -> dict[str, Any]:
    seen = slot.statistics
    return {
        "name": slot.entry.name,
        "version": slot.entry.version,
        "last_inference": seen.last_ms,
        "inference_count": seen.inferences,
        "execution_count": seen.executions,
        "inference_stats": {
            "success": _duration(seen.success, seen.total_ns),
            "fail": _duration(seen.faults, seen.failed_ns),
            "queue": _duration(seen.success, seen.queue_ns),
            "compute_input": _duration(seen.success, seen.input_ns),
            "compute_infer": _duration(seen.success, seen.infer_ns),
            "compute_output": _duration(seen.success, seen.output_ns),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(count, 0),
                "compute_infer": _duration(count, ns),
                "compute_output": _duration(count, 0),
            }
            for rows, (count, ns) in sorted(seen.batches.items())
        ],
    }


def _weight(asked: int, model: int, rank: ClientRank) -> int:
    """What a request weighs by its own priority, that of its key or that of its model, as far as its key allows."""
    return min(PRIORITIES.get(asked or rank.priority or model, 1), PRIORITIES.get(rank.top, 1))


def _ignore(outcome: InferResponse | RequestError) -> None:
    """Takes the place of a callback that was called."""


def internal(error: Exception) -> Failed:
    """What a client is told of a fault of ours."""
    return Failed(f"internal error: {type(error).__name__}")
