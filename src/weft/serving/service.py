"""The operations of the server, independent of the protocol: infer (``inference``), describe, load and unload.

Answers are plain dicts in the shape of the protocol's JSON; ``routes`` and ``grpc_service`` turn them into HTTP and
gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.base.errors import BadRequest, Forbidden, InputError, LoadFailed, NotFound, Overloaded
from weft.base.version import __version__
from weft.serving.access import Keys
from weft.serving.background_tasks import ignore_result, run_in_background
from weft.serving.client_settings import LogSettings, parameters_of, requested_settings
from weft.serving.config import ModelConfig, ServerConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.held_memory import HeldMemory
from weft.serving.history import History
from weft.serving.inference import InferenceService
from weft.serving.isolation import THREADS
from weft.serving.library import Library
from weft.serving.renewal import LOAD_KEYS, SCHEDULING_KEYS, Renewal, change_of, renew_models
from weft.serving.slots import ModelSlot
from weft.serving.telemetry import Telemetry
from weft.serving.wire import ModelSpec

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
PRELOADS = 4
"""Models that are loaded in parallel at the start, which hides disk latency; one by one if they are measured first,
since loading next to a measurement would disturb it."""


class Service(InferenceService):
    """The server behind its protocols."""

    def __init__(
        self,
        config: ServerConfig,
        library: Library,
        dispatcher: Dispatcher,
        telemetry: Telemetry | None = None,
        keys: Keys | None = None,
    ) -> None:
        super().__init__(config, library, dispatcher, telemetry, keys)
        self.http_answers: Counter[int] = Counter()
        """HTTP answers by status."""
        self.grpc_answers: Counter[tuple[str, str]] = Counter()
        """gRPC answers by method and status code; methods that do not exist count as ``unknown``."""
        self.history = History(self.started_ns)
        """The last ten minutes; ``sample_history`` adds to it."""
        isolated = config.workers.isolation != THREADS or config.execution.device is not None
        self.held_memory = HeldMemory(workers=isolated)
        self.log_settings = LogSettings()
        self.reread_settings: Callable[[], ServerConfig] = lambda: self.config
        """Reads the settings again from their source; by default they do not change."""
        self._renewing = asyncio.Lock()  # one renewal at a time: each compares with the settings the last one left

    def sample_history(self) -> None:
        """Add a sample to the history."""
        counters = {(slot.entry.name, slot.entry.version): slot.statistics for slot in self.library.slots()}
        self.history.sample(self.now(), counters)

    def check_writable(self) -> None:
        """Raise Forbidden if clients may not load and unload models."""
        if self.config.loading.repository == "read-only":
            raise Forbidden(
                "the repository is read-only: models are loaded at the start or by requests for them; "
                'to load and unload, start the server with repository = "open"'
            )

    def check_settings_open(self) -> None:
        """Raise Forbidden if clients may not change the settings of the log and the trace."""
        if self.config.telemetry.live_settings == "read-only":
            raise Forbidden(
                "settings of the log and of the trace are read-only; to let clients change them, start the server with "
                'live_settings = "open"'
            )

    # Descriptions

    def metadata(self) -> dict[str, Any]:
        """Return the server's name, version and the protocol extensions that it supports."""
        shared = ["system_shared_memory"] if self.system_memory.offered else []
        shared += ["cuda_shared_memory"] if self.cuda_memory.offered else []
        return {"name": "weft", "version": __version__, "extensions": [*EXTENSIONS, *shared]}

    def model_ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model takes requests; NotFound if there is no such model."""
        slot = self.library.find(name, version)
        return not slot.outage and (slot.served is not None or (slot.state == "unloaded" and not slot.client_unloaded))

    async def load_on_demand(self, name: str, version: str = "") -> ModelSlot:
        """Return a model after loading it, if it is not loaded; NotFound, LoadFailed or Overloaded if that fails."""
        slot = self.library.find(name, version)
        if slot.served is None:
            await self.library.ensure_loaded(slot)
        return slot

    async def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's versions, inputs and outputs, after loading it if necessary."""
        slot = await self.load_on_demand(name, version)
        assert slot.served
        spec = slot.served.spec
        return {
            "name": name,
            "versions": self.library.repository.versions(name) if not version else [slot.entry.version],
            "platform": self.library.backend.platform,
            "inputs": list(map(_describe_tensor, spec.inputs)),
            "outputs": list(map(_describe_tensor, spec.outputs)),
        }

    async def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return a model's settings as Triton's ModelConfig, with weft's own as parameters; load it if necessary."""
        slot = await self.load_on_demand(name, version)
        assert slot.served
        batching, spec = slot.served.loaded.batching, slot.served.spec
        # without batching: 1 if requests have a batch dimension, else 0
        batch = batching.max_batch if batching.batchable else int(_has_rows(spec))
        return {
            "name": name,
            "platform": self.library.backend.platform,
            "backend": self.library.backend.name,
            "max_batch_size": batch,
            "input": [_describe_config(tensor, batched=batch > 0) for tensor in spec.inputs],
            "output": [
                _add_label_file(_describe_config(tensor, batched=batch > 0), slot.config.labels)
                for tensor in spec.outputs
            ],
            "parameters": parameters_of(slot.config),
        }

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return the counters of a model; without a name, of all loaded models."""
        slots = [self.library.find(name, version)] if name else [s for s in self.library.slots() if s.served]
        return {"model_stats": [_describe_statistics(slot) for slot in slots]}

    def change_log_settings(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Change log settings, if any are given, and return all of them."""
        if wanted:
            self.check_settings_open()
            self.log_settings.change(wanted)
        return self.log_settings.as_dict()

    def change_trace_settings(self, name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Change the trace settings of the server or of a model, if any are given, and return all of them."""
        if name:
            self.library.find(name)
        if wanted:
            self.check_settings_open()
            self.trace.change(wanted, name)
        return self.trace.as_dict(name)

    async def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """Scan the repository and return every model with its state."""
        await self.library.rescan()
        self.log_readiness()
        state_names = {"ready": "READY", "loading": "LOADING"}
        rows = [
            {
                "name": slot.entry.name,
                "version": slot.entry.version,
                "state": "UNAVAILABLE" if slot.outage else state_names.get(slot.state, "UNAVAILABLE"),
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
        """Load a model, with the settings in the client's *parameters* (``client_settings``), if any."""
        self.check_writable()
        settings = await self._parse_settings(name, parameters) if parameters else None
        try:
            await self.library.load(name, settings)
        except LoadFailed as error:
            raise BadRequest(str(error)) from error
        finally:
            self.log_readiness()

    async def renew(self) -> Renewal:
        """Read settings and models again, and take over the changes that do not need a restart, while serving."""
        async with self._renewing:
            try:
                new_config = await run_in_background("reading of the settings", self.reread_settings, ignore_result)
                change = change_of(self.config, new_config)
                if change.any_of(SCHEDULING_KEYS):
                    rules, lanes = change.config.scheduling, change.config.execution.lanes
                    self.dispatcher.follow(rules.policy, rules.policy_options, rules.late, lanes)
            except InputError as error:
                raise BadRequest(str(error)) from error
            self.config = change.config
            self.library.adjust(
                threads=self.config.execution.threads,
                budget_bytes=self.config.loading.memory_budget_bytes,
                max_compute_s=self.config.scheduling.max_compute_s or None,  # 0: no limit
                isolation=self.config.workers.isolation,
            )
            preload = self.config.loading.preload
            models = await renew_models(self.library, everything=change.any_of(LOAD_KEYS), preload=preload)
            self.log_readiness()
            renewal = replace(models, settings=change.settings, restart=change.restart)
            log.log(logging.WARNING if renewal.failed else logging.INFO, "renewed: %s", renewal)
            return renewal

    async def _parse_settings(self, name: str, parameters: Mapping[str, Any]) -> ModelConfig | None:
        """Return the settings for a model in the parameters of a load request; None if it has none.

        Clients may edit the configuration that ``model_config`` showed them and send all of it back. It is built again
        here, because members that clients cannot set are accepted only with the values that were shown.
        """
        backend = self.library.backend
        shown_config: Mapping[str, Any] = {"name": name, "platform": backend.platform, "backend": backend.name}
        await self.library.rescan()
        slot = self.library.find(name)
        if slot.served:
            shown_config = await self.model_config(name)
        # rescan: the settings on disk may be newer than those of the loaded model
        settings = requested_settings(parameters, {**shown_config, "parameters": parameters_of(slot.config)})
        if settings is not None and slot.entry.body:
            raise BadRequest(f"{name} is one of several models of a file; load it without a config")
        return settings

    async def unload(self, name: str) -> None:
        """Take no more requests for a model; no error if it does not exist."""
        self.check_writable()
        with suppress(NotFound):
            self.library.unload(name)
        self.log_readiness()

    # Life

    async def preload(self, on_load: Callable[[str], None] | None = None) -> None:
        """Load the models to preload, several at a time; failures are logged.

        *on_load* is called with the name of each model that begins to load.
        """
        slots = iter(list(self.library.slots()) if self.config.loading.preload else ())
        parallel = 1 if self.library.learn_first else PRELOADS
        await asyncio.gather(*(self._preload(slots, on_load) for _ in range(parallel)))
        self.started = True
        self.log_readiness()

    async def _preload(self, slots: Iterator[ModelSlot], on_load: Callable[[str], None] | None) -> None:
        """Load models from the iterator *slots*, which several calls share, one after another."""
        for slot in slots:
            newest = self.library.repository.entry(slot.entry.name).version == slot.entry.version
            # perhaps together with another model of the same body
            tried = slot.served or slot.loading or slot.state == "failed"
            if tried or not (slot.config.preload and newest and self.library.fits(slot)):
                continue  # loaded on demand
            if on_load:
                on_load(slot.entry.name)
            try:
                await self.library.ensure_loaded(slot)
            except LoadFailed:
                pass  # logged by the library
            except Overloaded as error:
                log.warning("%s", error)


def _describe_tensor(spec: Any) -> dict[str, Any]:
    """Return a tensor's entry in the metadata of a model."""
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _describe_config(spec: Any, *, batched: bool) -> dict[str, Any]:
    """Return a tensor's entry in Triton's ModelConfig; if *batched*, its shape is without the batch dimension."""
    data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": data_type, "dims": list(spec.shape[1:] if batched else spec.shape)}


def _add_label_file(configured: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Add the label file to the entry of an output in Triton's ModelConfig; *labels*: output -> file."""
    file = labels.get(configured["name"])
    return {**configured, "label_filename": file} if file else configured


def _has_rows(spec: ModelSpec) -> bool:
    """Tell whether the first dimension of all tensors is free: clients then treat it as the batch dimension."""
    return all(tensor.shape[:1] == (-1,) for tensor in (*spec.inputs, *spec.outputs))


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def _describe_statistics(slot: ModelSlot) -> dict[str, Any]:
    """Return a model's entry in the answer to a statistics call."""
    statistics = slot.statistics
    return {
        "name": slot.entry.name,
        "version": slot.entry.version,
        "last_inference": statistics.last_ms,
        "inference_count": statistics.inferences,
        "execution_count": statistics.executions,
        "inference_stats": {
            "success": _duration(statistics.success, statistics.total_ns),
            "fail": _duration(statistics.faults, statistics.failed_ns),
            "queue": _duration(statistics.success, statistics.queue_ns),
            "compute_input": _duration(statistics.success, statistics.input_ns),
            "compute_infer": _duration(statistics.success, statistics.infer_ns),
            "compute_output": _duration(statistics.success, statistics.output_ns),
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
            for rows, (count, ns) in sorted(statistics.batches.items())
        ],
    }
