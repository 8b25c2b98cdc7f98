"""gRPC's own health service, ``grpc.health.v1.Health``, which orchestrators and load balancers call.

The service ``""``, or that of the protocol, is the server as a whole; any other is the name of a model. The two
messages, with two fields in all, are built here: the package for them (grpcio-health-checking) would be one more
dependency, must be notified of every change of every model, and registers in the shared descriptor pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from weft.base.errors import NotFound, Overloaded
from weft.serving import proto
from weft.serving.service import Service

PACKAGE = "grpc.health.v1"
SERVICE = f"{PACKAGE}.Health"
UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)

WATCHERS = 64
"""Limit on concurrent ``Watch`` calls, each of which lasts until its client ends it."""
LOOK_S = 0.5
"""Polling interval of ``Watch``: how soon its clients learn of a change."""


def _classes() -> tuple[Any, Any]:
    """Create the message classes of the request and of the response."""
    file = descriptor_pb2.FileDescriptorProto(name="weft/health.proto", package=PACKAGE, syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    status_type = f".{PACKAGE}.HealthCheckResponse.ServingStatus"
    response.field.add(name="status", number=1, type=field.TYPE_ENUM, label=field.LABEL_OPTIONAL, type_name=status_type)
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        statuses.value.add(name=name, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptors = [pool.FindMessageTypeByName(f"{PACKAGE}.{message.name}") for message in (request, response)]
    return message_factory.GetMessageClass(descriptors[0]), message_factory.GetMessageClass(descriptors[1])


HealthCheckRequest, HealthCheckResponse = _classes()


class Health:
    """The health of the server and its models: one answer (``Check``), or an answer per change (``Watch``)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ending = asyncio.Event()
        self.watchers = 0

    def check_server(self) -> Any:
        """Answer ``Check`` without a key, which always concerns the server as a whole."""
        return HealthCheckResponse(status=self.status(""))

    def check(self, message: Any) -> Any:
        """Return the answer to ``Check``; NotFound if there is no such model."""
        status = self.status(message.service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"there is no model {message.service[:128]!r}; the empty service is the server itself")
        return HealthCheckResponse(status=status)

    async def watch(self, message: Any) -> AsyncGenerator[Any, None]:
        """Yield the answers to ``Watch``: the status now and after every change, until the server ends."""
        if self.watchers >= WATCHERS:
            raise Overloaded(f"{WATCHERS} calls watch already; ask with Check, or try again later")
        self.watchers += 1
        last_status = None
        try:
            while True:
                ending, status = self._ending.is_set(), self.status(message.service)
                if status != last_status:
                    yield HealthCheckResponse(status=status)
                    last_status = status
                if ending:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), LOOK_S)
        finally:
            self.watchers -= 1

    def end(self) -> None:
        """End all watches, after a last status."""
        self._ending.set()

    def status(self, name: str) -> int:
        """Return the serving status of the server, or of a model."""
        service = self._service
        if name in ("", proto.SERVICE):
            return SERVING if service.is_ready() else NOT_SERVING
        try:
            ready = service.model_ready(name) and not service.draining
        except NotFound:
            return SERVICE_UNKNOWN
        return SERVING if ready else NOT_SERVING
