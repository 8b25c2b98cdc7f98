"""``python -m tests.conformance``: against a server that differs, against none, and what it writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conformance.__main__ import main
from tests.conformance.models import LABELS, table_models


class Forgetful(BaseHTTPRequestHandler):
    """Lives and is ready, and knows nothing else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if "/health/" in self.path else 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(404)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def forgetful() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_differences_are_printed_counted_and_written(
    forgetful: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    pattern = "health/http: (the server|a model is)|metadata/http: a model that"
    assert main(["--http", forgetful, "--by", "protocol", "--rows", pattern, "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "health/http: a model is ready" in said and "status 404 instead of 200" in said
    assert "health/http: the server lives" not in said
    found = json.loads(file.read_text())
    assert found["counts"] == [{"by": "protocol", "way": "http", "rows": 4, "as_demanded": 2}]
    rows = {row["name"]: row["differences"] for row in found["rows"]}
    assert rows["health/http: the server lives"] == []
    assert rows["metadata/http: a model that is not there"][0].startswith("the body cannot be read")


def test_nothing_differs(forgetful: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--http", forgetful, "--rows", "health/http: the server"]) == 0
    assert "differences" not in capsys.readouterr().out


def test_it_must_be_told_where_the_server_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--http, --grpc or both" in capsys.readouterr().err


def test_the_models_are_written_for_weft_and_for_triton(tmp_path: Path) -> None:
    assert main(["--write-models", str(tmp_path)]) == 0
    for model in table_models():
        onnx.checker.check_model(str(tmp_path / model.name / str(model.version) / "model.onnx"))
        assert f'name: "{model.name}"' in (tmp_path / model.name / "config.pbtxt").read_text()
    assert (tmp_path / "classifier/labels.txt").read_text().split() == list(LABELS)
