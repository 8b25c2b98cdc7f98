"""What is deployed: the container file, the unit of systemd and the health check, as far as they can be read here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft_tune.quantised  # noqa: F401  (for what its import sets)
from tests import ROOT
from tests.support.containers import DEPLOY, KNOWN_VARIABLES, instructions, last_stage
from weft.serving.config import ServerConfig

LEFT_OUT = ("numba",)
"""Packages that weft needs and the image does not have."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# The container file


def test_the_container_runs_the_server_as_nobody_in_particular() -> None:
    words = [word for word, _ in last_stage()]
    kept = dict(last_stage())
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert int(kept["USER"]) > 0, "by its number, or Kubernetes cannot tell that it is not root"
    # for users without a name
    assert "-g 0 -m 0770 /var/cache/weft" in kept["RUN"] and "HOME=/var/cache/weft" in kept["ENV"]
    assert (kept["ENTRYPOINT"], kept["CMD"], kept["STOPSIGNAL"]) == ('["weft"]', '["serve", "/models"]', "SIGTERM")
    assert "health.py" in kept["HEALTHCHECK"]
    assert all("-slim" in base for word, base in instructions() if word == "FROM")


@pytest.mark.parametrize("file", ["Containerfile", "Containerfile.ray"])
def test_containers_take_files_that_are_there(file: str) -> None:
    said = instructions(file)
    copied = [what.split()[:-1] for word, what in said if word == "COPY" and not what.startswith("--from")]
    usual = dict(what.split("=") for word, what in said if word == "ARG" and "=" in what)
    names = [name.replace("${REQUIREMENTS}", usual["REQUIREMENTS"]) for names in copied for name in names]
    assert names and [name for name in names if not (ROOT / name).exists()] == []


def test_the_container_has_settings_that_exist() -> None:
    variables = re.findall(r"\b(WEFT_\w+)=", dict(last_stage())["ENV"])
    assert variables and set(variables) <= KNOWN_VARIABLES


def test_the_image_has_all_that_weft_needs_but_what_serving_does_not() -> None:
    listed = [line for line in (DEPLOY / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert listed == [each for each in project()["project"]["dependencies"] if not each.startswith(LEFT_OUT)]


def test_the_image_for_a_gpu_has_the_same_and_what_a_gpu_needs() -> None:
    usual, on_gpu = (
        [line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#")]
        for name in ("requirements.txt", "requirements-cuda.txt")
    )
    swapped = [re.sub("^onnxruntime(?=>)", "onnxruntime-gpu", line) for line in usual]
    assert sorted([*swapped, *project()["project"]["optional-dependencies"]["cuda"]]) == sorted(on_gpu)


def test_serving_and_benching_need_nothing_that_is_left_out() -> None:
    modules = "weft.cli.serve, weft.cli.bench, weft.serving.server, weft.load, weft.runtime.isolated.worker"
    absent = (*LEFT_OUT, "llvmlite", "matplotlib", "ortools", "pandas")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_wheel_needs_is_copied() -> None:
    copied = " ".join(what for word, what in instructions() if word == "COPY")
    named = [project()["project"]["readme"], *project()["project"]["license-files"], "pyproject.toml", "src"]
    assert [name for name in named if name not in copied] == []


# The unit


def unit() -> dict[str, list[str]]:
    """Setting -> its values, as they come."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "weft.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_gives_away_no_more_than_it_says() -> None:
    settings = unit()
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "MemoryDenyWriteExecute"):
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"] and settings["CapabilityBoundingSet"] == [""]


def test_the_unit_leaves_workers_what_they_need() -> None:
    settings = unit()
    assert set(settings["RestrictNamespaces"][0].split()) == {"user", "net"}
    assert "AF_UNIX" in settings["RestrictAddressFamilies"][0].split()
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= set(
        settings["SystemCallFilter"][0].split()
    )
    assert "ProcSubset" not in settings and settings["OOMPolicy"] == ["continue"]


def test_the_unit_waits_for_requests_that_were_accepted() -> None:
    assert int(unit()["TimeoutStopSec"][0]) > ServerConfig().network.drain_s + 2
    assert (unit()["KillMode"], unit()["RestartPreventExitStatus"]) == (["mixed"], ["2"])


def test_the_unit_sets_variables_that_exist() -> None:
    text = (DEPLOY / "weft.service").read_text()
    assert set(re.findall(r"\bWEFT_\w+", text)) <= KNOWN_VARIABLES


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_reads_the_unit_without_a_complaint(tmp_path: Path) -> None:
    copy = tmp_path / "weft.service"
    copy.write_text((DEPLOY / "weft.service").read_text().replace("/opt/weft/bin/weft", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert "weft.service" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


# The health check


@pytest.fixture(scope="module")
def health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("health", DEPLOY / "health.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"WEFT_HOST": "0.0.0.0", "WEFT_HTTP_PORT": ""}, "http://127.0.0.1:8000"),
        ({"WEFT_HOST": "::", "WEFT_HTTP_PORT": "9000"}, "http://[::1]:9000"),
        ({"WEFT_HOST": "fd00::1"}, "http://[fd00::1]:8000"),
        ({"WEFT_HOST": "weft.example", "WEFT_TLS_CERT": "/c.pem"}, "https://weft.example:8000"),
    ],
)
def test_health_is_asked_where_the_server_listens(health: ModuleType, environment: dict[str, str], url: str) -> None:
    assert health.address(environment) == f"{url}/v2/health/ready"


class Ready(BaseHTTPRequestHandler):
    """Says that it is ready below /ready, and why not elsewhere."""

    def do_GET(self) -> None:
        body = b"" if self.path == "/ready" else b'{"ready": false, "reason": "lenet is missing"}'
        self.send_response(503 if body else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Ready) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def test_health_is_nothing_or_a_reason(health: ModuleType, server: str) -> None:
    assert health.problem(f"{server}/ready") == ""
    assert "lenet is missing" in health.problem(f"{server}/v2/health/ready")


def test_the_script_ends_with_the_reason(server: str) -> None:
    environment = {**os.environ, "WEFT_HTTP_PORT": server.rpartition(":")[2]}
    command = [sys.executable, "-I", str(DEPLOY / "health.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, "lenet is missing" in done.stderr) == (1, True)


# What is not told


def test_onnx_runtime_tells_nobody_that_it_runs() -> None:
    assert os.environ["ORT_DISABLE_TELEMETRY"]
