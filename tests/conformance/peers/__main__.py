"""Set other servers beside weft: install each into an environment of its own, have it serve the table's models, ask it.

    python -m tests.conformance.peers mlserver triton [--environments DIR] [--json DIR] [--save]

MLServer needs a package index, and so does Triton, whose binary comes out of the package nvidia-pytriton, with the
Python backend alone. OpenVINO Model Server has no package: start it with what ``--write-models`` wrote, and ask it with
``python -m tests.conformance``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tests import ROOT
from tests.conformance.__main__ import asked_for
from tests.conformance.models import TableModel, table_models, write_repository
from tests.conformance.over_http import HttpTarget, NoAnswer
from tests.conformance.peers.explained import HERE, read_differences, unexplained
from tests.conformance.reporting import Outcome, as_json, differing, print_table, show
from tests.conformance.rows import GrpcRow, HttpRow, read_table

sys.path.append(str(ROOT / "benchmarks"))
from peer_servers import Peer, free_port, install, versions

START_S, STOP_S, PATIENCE_S = 180.0, 20.0, 60.0
DYING_S = 0.5
"""How long it may take until it is seen that a server has ended which does not answer."""


class Ports(NamedTuple):
    """Where a server shall listen."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True)
class TablePeer(Peer):
    """A server that can be had serve the models of the table."""

    def start(self, python: Path, folder: Path, ports: Ports) -> tuple[list[str], dict[str, str]]:
        """Write what it reads; the command that starts it, and its variables."""
        raise NotImplementedError


@dataclass(frozen=True)
class MlServerTable(TablePeer):
    def start(self, python: Path, folder: Path, ports: Ports) -> tuple[list[str], dict[str, str]]:
        where = {"http_port": ports.http, "grpc_port": ports.grpc, "metrics_port": ports.metrics}
        settings = {**where, "host": "127.0.0.1", "parallel_workers": 0, "debug": False}
        (folder / "settings.json").write_text(json.dumps(settings))
        for model in table_models():
            place = folder / f"{model.name}-{model.version}"
            model.save(place / "model.onnx")
            (place / "model-settings.json").write_text(json.dumps(_settings(model, place / "model.onnx")))
        return [str(python.parent / "mlserver"), "start", str(folder)], {"PYTHONPATH": str(HERE)}


def _settings(model: TableModel, path: Path) -> dict[str, object]:
    def told(sides: Sequence[object]) -> list[dict[str, object]]:
        return [{"name": each.name, "datatype": each.datatype, "shape": [-1, each.columns]} for each in sides]  # type: ignore[attr-defined]

    return {
        "name": model.name,
        "platform": "onnx",
        "implementation": "mlserver_table.TableModel",
        "inputs": told(model.inputs),
        "outputs": told(model.outputs),
        "parameters": {"uri": str(path), "version": str(model.version)},
    }


@dataclass(frozen=True)
class TritonTable(TablePeer):
    def start(self, python: Path, folder: Path, ports: Ports) -> tuple[list[str], dict[str, str]]:
        packages = next((python.parents[1] / "lib").glob("python*")) / "site-packages"
        home = packages / "pytriton" / "tritonserver"
        models = write_repository(folder / "models", "python")
        for version in models.glob("*/[0-9]*"):
            shutil.copy(HERE / "triton_table.py", version / "model.py")
        shutil.copytree(home / "backends", folder / "backends")
        stub = f"{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"
        shutil.copy(home / "python_backend_stubs" / stub, folder / "backends" / "python")
        options = [f"--model-repository={models}", f"--backend-directory={folder / 'backends'}"]
        options += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
        options += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
        options += ["--model-control-mode=explicit", "--load-model=*"]
        libraries = f"{packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
        path = f"{python.parent}:{os.environ['PATH']}"
        variables = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(packages), "PATH": path}
        return [str(home / "bin" / "tritonserver"), *options], variables


PEERS: dict[str, TablePeer] = {
    "mlserver": MlServerTable("MLServer", ("mlserver==1.7.1", "onnxruntime", "uvloop<0.22"), ""),
    "triton": TritonTable("Triton", ("nvidia-pytriton==0.7.0", "onnxruntime", "numpy<2"), ""),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.peers", description=__doc__.split("\n")[0])
    parser.add_argument("peers", nargs="+", choices=PEERS)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "weft-conformance-peers")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write NAME.json for each, with all rows")
    parser.add_argument("--save", action="store_true", help="keep what differs beside this file, as NAME.json")
    args = parser.parse_args(argv)
    for name in args.peers:
        about, outcomes = _ask(name, args.environments)
        show(outcomes, f"{about['server']} {about['versions']}")
        _explain(name, outcomes)
        if args.json:
            args.json.mkdir(parents=True, exist_ok=True)
            _write(args.json / f"{name}.json", as_json(outcomes, about))
        if args.save:
            _write(HERE / f"{name}.json", as_json(outcomes, about) | {"rows": differing(outcomes)})
    return 0


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def _explain(name: str, outcomes: Sequence[Outcome]) -> None:
    """Print how many rows each known reason is behind, and which have none."""
    rows, differences = [each.name for each in outcomes if each.differences], read_differences(name)
    told = [(str(sum(map(each.covers, rows))), each.title) for each in differences]
    missing = unexplained(rows, differences) if differences else []
    print_table("reasons", ("rows", "reason"), [*told, *(("none", row) for row in missing)])


def _ask(name: str, environments: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Who it is, and what it answers to every row."""
    environments.mkdir(parents=True, exist_ok=True)
    peer = PEERS[name]
    python = install(peer, environments / name)
    about = {"server": peer.name, "versions": versions(peer, python)}
    outcomes: list[Outcome] = []
    rows = read_table()
    while len(outcomes) < len(rows):
        outcomes += _while_it_lives(peer, python, rows[len(outcomes) :])
    return about, outcomes


def _while_it_lives(peer: TablePeer, python: Path, rows: Sequence[HttpRow | GrpcRow]) -> Iterator[Outcome]:
    """Ask a new server for one row after another; a row that ends it is the last, and says so."""
    with tempfile.TemporaryDirectory() as folder, _running(peer, python, Path(folder)) as (process, ports):
        where = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
        for row in rows:
            (found,) = asked_for(*where, [row], PATIENCE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DYING_S if _silent(found) else 0)
                yield replace(found, differences=("the server ended",))
                return
            yield found


def _silent(found: Outcome) -> bool:
    return any(said.startswith(("no answer", "code UNAVAILABLE")) for said in found.differences)


@contextlib.contextmanager
def _running(peer: TablePeer, python: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Ports]]:
    ports = Ports(free_port(), free_port(), free_port())
    command, variables = peer.start(python, folder, ports)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, folder / "log", HttpTarget(f"http://127.0.0.1:{ports.http}", 5.0))
        yield process, ports
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], log: Path, target: HttpTarget) -> None:
    until_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(NoAnswer):
            if target.ask_plainly("GET /v2/health/ready").status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"it did not start: {log.read_text()[-1500:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it and all it has started, which are one group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return


if __name__ == "__main__":
    sys.exit(main())
