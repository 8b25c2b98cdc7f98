"""Rows over HTTP: bytes on a socket of their own, so that nothing is added, mended or tried again."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.conformance.matching import differences, shown
from tests.conformance.rows import HttpRow
from tests.conformance.schema import violations

HEADER_LENGTH = "inference-header-content-length"
PACKED = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACKED = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@dataclass(frozen=True)
class HttpAnswer:
    """What came back; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class NoAnswer(Exception):
    """The server sent nothing that is an answer."""


@dataclass(frozen=True)
class HttpTarget:
    """A server that is asked over HTTP."""

    url: str
    patience_s: float

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def ask(self, row: HttpRow) -> HttpAnswer:
        """Send a row on a connection of its own, and read its answer."""
        return self.send(request_of(row, self.host), head=row.http.startswith("HEAD "))

    def ask_plainly(self, text: str) -> HttpAnswer:
        """Send ``VERB /path BODY``."""
        verb, path, body = [*text.split(" ", 2), ""][:3]
        return self.send(_framed(f"{verb} {path}", {"Host": self.host}, body.encode()), head=verb == "HEAD")

    def send(self, data: bytes, *, head: bool = False) -> HttpAnswer:
        parts = urlsplit(self.url)
        address = parts.hostname or "127.0.0.1", parts.port or 80
        try:
            with socket.create_connection(address, timeout=self.patience_s) as connection:
                connection.sendall(data)
                return _read(connection, head)
        except OSError as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error


def request_of(row: HttpRow, host: str) -> bytes:
    """The bytes of a request."""
    if row.exactly:
        return row.exactly.replace("{host}", host).encode("latin-1")
    body, headers = row.body.encode(), {"Host": host} | dict(row.headers)
    if row.binary is not None:
        if HEADER_LENGTH not in {name.lower() for name in headers}:
            headers["Inference-Header-Content-Length"] = str(len(body))
        body += bytes.fromhex(row.binary)
    if row.packed:
        body = PACKED[row.packed](body)
        body = body[: len(body) - row.cut]
        headers.setdefault("Content-Encoding", row.packed)
    return _framed(row.http, headers, body)


def judge_http(row: HttpRow, answer: HttpAnswer) -> list[str]:
    """What an answer lacks of what its row demands."""
    if answer.status not in row.status:
        said = f": {shown(answer.body[:200])}" if answer.body else ""
        return [f"status {answer.status} instead of {' or '.join(map(str, row.status))}{said}"]
    found = differences(dict(row.answer_headers), answer.headers, "header")
    if row.empty and answer.body:
        found.append(f"a body: {shown(answer.body[:200])}")
    try:
        told, binary = parts_of(answer)
    except ValueError as error:
        return [*found, f"the body cannot be read: {error}"] if _body_matters(row) else found
    if row.answer is not None:
        found += differences(row.answer, told)
    if row.answer_binary is not None:
        found += differences(row.answer_binary, binary.hex(), "binary part")
    return found + violations(row.schema, told) if row.schema else found


def parts_of(answer: HttpAnswer) -> tuple[Any, bytes]:
    """The JSON of an answer, and what follows it; ValueError where it is not JSON."""
    body = answer.body
    if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
        try:
            body = UNPACKED[encoding](body)
        except (KeyError, OSError, zlib.error) as error:
            raise ValueError(f"it is not {encoding}: {error}") from error
    length = int(answer.headers.get(HEADER_LENGTH, len(body)))
    return json.loads(body[:length]), body[length:]


def _body_matters(row: HttpRow) -> bool:
    return row.answer is not None or row.answer_binary is not None or bool(row.schema)


def _framed(line: str, headers: dict[str, str], body: bytes) -> bytes:
    names = {name.lower() for name in headers}
    if "content-length" not in names and (body or line.startswith("POST ")):
        headers = headers | {"Content-Length": str(len(body))}
    if "connection" not in names:
        headers = headers | {"Connection": "close"}
    lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _read(connection: socket.socket, head: bool) -> HttpAnswer:
    """The first answer that is final."""
    with connection.makefile("rb") as stream:
        while True:
            status, headers = _read_head(stream)
            if status >= 200:
                return HttpAnswer(status, headers, b"" if head or status in (204, 304) else _read_body(stream, headers))


def _read_head(stream: Any) -> tuple[int, dict[str, str]]:
    line = stream.readline().decode("latin-1").split(" ", 2)
    if len(line) < 2 or not line[0].startswith("HTTP/1."):
        raise NoAnswer(f"no status line but {shown(' '.join(line))}")
    headers: dict[str, str] = {}
    while (header := stream.readline().decode("latin-1").rstrip("\r\n")) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    return int(line[1]), headers


def _read_body(stream: Any, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        pieces = []
        while size := int(stream.readline().partition(b";")[0] or b"0", 16):
            pieces.append(stream.read(size))
            stream.readline()
        return b"".join(pieces)
    return bytes(stream.read(int(headers["content-length"])) if "content-length" in headers else stream.read())
