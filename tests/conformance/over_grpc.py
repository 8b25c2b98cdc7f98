"""Rows over gRPC, in the messages that Triton's own client was generated from.

Messages go and come as bytes, so that the table may hold some that are none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from tests.conformance.matching import differences, shown
from tests.conformance.rows import GrpcRow

SERVICE = "inference.GRPCInferenceService"
STREAM = "ModelStreamInfer"


@dataclass(frozen=True)
class GrpcAnswer:
    """What came back."""

    code: str
    details: str
    messages: tuple[bytes, ...]


@dataclass(frozen=True)
class GrpcTarget:
    """A server that is asked over gRPC."""

    channel: Any
    patience_s: float

    def ask(self, row: GrpcRow) -> GrpcAnswer:
        return self._call(row.grpc, sent_of(row), row.deadline_s)

    def ask_plainly(self, text: str) -> GrpcAnswer:
        """Send ``CALL MESSAGE``."""
        name, _, message = text.partition(" ")
        return self._call(name, [_message(name, json.loads(message or "{}"), ())], None)

    def _call(self, name: str, sent: list[bytes], deadline_s: float | None) -> GrpcAnswer:
        path = f"/{name}" if "/" in name else f"/{SERVICE}/{name}"
        try:
            if name == STREAM:
                made = tuple(self.channel.stream_stream(path)(iter(sent), timeout=deadline_s or self.patience_s))
            else:
                made = (self.channel.unary_unary(path)(sent[0], timeout=deadline_s or self.patience_s),)
        except grpc.RpcError as error:
            return GrpcAnswer(error.code().name, error.details() or "", ())
        return GrpcAnswer("OK", "", made)


@contextlib.contextmanager
def grpc_target(address: str, patience_s: float) -> Iterator[GrpcTarget]:
    """A server that is asked over one connection until the block ends."""
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        yield GrpcTarget(channel, patience_s)


def sent_of(row: GrpcRow) -> list[bytes]:
    """The bytes of all messages of a row."""
    if row.hex is not None:
        return [bytes.fromhex(row.hex)]
    return [_message(row.grpc, told, row.raw_inputs) for told in row.messages or ({},)]


def judge_grpc(row: GrpcRow, answer: GrpcAnswer) -> list[str]:
    """What an answer lacks of what its row demands."""
    if answer.code not in row.code:
        said = f": {shown(answer.details)}" if answer.details else ""
        return [f"code {answer.code} instead of {' or '.join(row.code)}{said}"]
    if row.answer_hex is not None:
        return differences((row.answer_hex,), [each.hex() for each in answer.messages], "message")
    if row.answers is None:
        return []
    kind = _kind(row.grpc, "Response")
    try:
        found = [plain(kind.FromString(each)) for each in answer.messages]
    except DecodeError as error:
        return [f"the message cannot be read: {error}"]
    return differences(row.answers, found, "answers")


def plain(value: Any) -> Any:
    """A message as plain values, fields that were not sent among them; bytes become hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if not hasattr(value, "DESCRIPTOR"):
        return [plain(each) for each in value] if hasattr(value, "MergeFrom") else value
    if "parameter_choice" in value.DESCRIPTOR.oneofs_by_name:
        chosen = value.WhichOneof("parameter_choice")
        return plain(getattr(value, chosen)) if chosen else None
    return {each.name: _field(value, each) for each in value.DESCRIPTOR.fields}


def _field(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.enum_type and isinstance(value, int):
        return field.enum_type.values_by_number[value].name
    single = field.message_type and hasattr(value, "DESCRIPTOR")
    return None if single and not message.HasField(field.name) else plain(value)


def _message(name: str, told: Mapping[str, Any], raw_inputs: tuple[str, ...]) -> bytes:
    found = json_format.ParseDict(told, _kind(name, "Request")())
    if raw_inputs:
        found.raw_input_contents.extend(map(bytes.fromhex, raw_inputs))
    return bytes(found.SerializeToString())


def _kind(name: str, part: str) -> Any:
    """The class of the messages that a call takes or gives."""
    if name == STREAM and part == "Request":
        name = "ModelInfer"
    return getattr(service_pb2, f"{name}{part}")
