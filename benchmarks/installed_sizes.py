"""The size of an installation: the core alone and with each extra, in separate virtual environments, put to use.

Each environment gets the wheel of this checkout by ``pip install weft[EXTRA]``. Its size is that of all its files but
compiled Python (.pyc), before anything was run in it; pip itself is not counted. Then the commands of the extra run
there on small inputs. Downloads some 150 MB per environment, into a temporary folder that is removed at the end.
``--save`` keeps the recorded sizes of other extras.

    python benchmarks/installed_sizes.py --save            # the core and every tool
    python benchmarks/installed_sizes.py core z3 ray       # these alone
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from machine import machine

from weft.base.jsonfile import write_json

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "installed_sizes.json"
CORE = "core"
MOST_MB, MOST_PACKAGES, MOST_HELP_S = 450, 28, 0.4
"""What the core may weigh, and how long ``weft --help`` may take."""
HELPS = 10
PATIENCE_S = 600.0
"""After which a command is given up: compiling loops takes most of a minute on a slow machine."""
LARGEST = 8

WORKLOAD = """
[[stream]]
model = "detector"
rate = 60.0
deadline_ms = 60.0
"""
MACHINES = """
[kinds.box]
memory_gib = 16.0

[[machine]]
kind = "box"
count = 2

[models.detector]
on.box = {compute_ms = 9.0, memory_ms = 2.0, weights_mib = 400, segment_ms = 2.0}
"""
SERVED = """
import json, subprocess, sys
from urllib.request import Request, urlopen
from weft.serving.process import ServerProcess

with ServerProcess("plan") as server:
    address = server.url + "/v2/models/mnist-vit"
    (described,) = json.load(urlopen(address))["inputs"]
    shape = [max(size, 1) for size in described["shape"]]
    count = __import__("math").prod(shape)
    tensor = {"name": described["name"], "datatype": described["datatype"], "shape": shape, "data": [0.5] * count}
    answer = json.load(urlopen(Request(address + "/infer", json.dumps({"inputs": [tensor]}).encode())))
    assert answer["outputs"], answer
    command = [sys.executable, "-m", "weft.cli.main", "bench", "plan", "--url", server.url, "--duration", "3"]
    subprocess.run(command, check=True)
"""
"""A request to ``weft serve plan``, then ``weft bench plan``."""

SIMULATED = ("simulate", "--device", "tpuv3-like", "--models", "resnet50,bert-base")
COMMANDS: dict[str, list[Sequence[str]]] = {
    CORE: [("--help",), SIMULATED, ("plan", "-o", "plan", "-s", "mnist-vit:rate=5,deadline=500"), ("-c", SERVED)],
    "stitch": [
        ("models", "generate", "tinynet", "--tasks", "2", "-o", "family"),
        ("stitch", "family/tinynet-0.onnx", "family/tinynet-1.onnx", "-o", "family.onnx"),
    ],
    "tune": [("tune", "lenet", "--margin", "0.05", "-o", "lenet-small", "--html", "lenet.html")],
    "map": [("map", "--soc", "xavier", "--models", "googlenet,resnet18", "--figure", "mapping.png")],
    "cluster": [("place", "workload.toml", "--machines", "machines.toml", "--fluid", "-o", "placement")],
    "papers": [("reproduce", "mts", "-o", "figures")],
    "figures": [(*SIMULATED, "--figure", "timeline.png")],
    "otel": [("serve", "mnist-vit", "--check", "--otlp", "http://127.0.0.1:4318")],
    "all": [("tools",)],
    "z3": [("map", "--soc", "xavier", "--models", "googlenet,resnet18", "--z3")],
    "ray": [("ray", "--help")],
}
"""Extra -> commands that must work where it is installed; ``-c`` is a program instead."""
USUAL = [extra for extra in COMMANDS if extra not in ("z3", "ray")]


def measure(extra: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Install, weigh and use one environment."""
    folder.mkdir()
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    wanted = str(wheel) if extra == CORE else f"{wheel}[{extra}]"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--disable-pip-version-check", wanted], check=True)
    sizes = dict(sorted(package_sizes(environment).items(), key=lambda item: -item[1]))
    row: dict[str, Any] = {
        "megabytes": megabytes(environment.rglob("*")),
        "packages": len(sizes),
        "largest": {name: size for name, size in list(sizes.items())[:LARGEST]},
    }
    row["commands"] = [use(python, command, folder) for command in COMMANDS[extra]]
    if extra == CORE:
        helps = [use(python, ("--help",), folder) for _ in range(HELPS)]
        row["help"] = {key: statistics.median(run[key] for run in helps) for key in ("seconds", "processor_seconds")}
    return row


def package_sizes(environment: Path) -> dict[str, float]:
    """Package -> MB of its files."""
    (site,) = environment.glob("lib/python*/site-packages")
    return {package.name: megabytes(files_of(package)) for package in distributions(path=[str(site)])}


def files_of(package: Distribution) -> Iterator[Path]:
    return (Path(str(package.locate_file(file))) for file in package.files or ())


def megabytes(files: Iterator[Path]) -> float:
    """Millions of bytes of files, without those that Python compiles itself."""
    counted = (file for file in files if file.suffix != ".pyc" and file.is_file() and not file.is_symlink())
    return round(sum(file.stat().st_size for file in counted) / 1e6, 1)


def use(python: Path, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command in an environment for a user who has nothing yet."""
    (folder / "workload.toml").write_text(WORKLOAD)
    (folder / "machines.toml").write_text(MACHINES)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WEFT_"))}
    line = [str(python), *command] if command[0] == "-c" else [str(python.with_name("weft")), *command]
    begin_s, before_s = time.perf_counter(), processor_s()
    done = subprocess.run(
        line, cwd=folder, env=inherited | {"HOME": str(folder)}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    times = {"seconds": time.perf_counter() - begin_s, "processor_seconds": processor_s() - before_s}
    shown = "a request to weft serve plan, weft bench plan" if command[0] == "-c" else f"weft {' '.join(command)}"
    problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"command": shown, "works": not problem, "problem": problem} | {key: round(s, 3) for key, s in times.items()}


def processor_s() -> float:
    """Processor time of the processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(extra: str, row: dict[str, Any]) -> None:
    largest = ", ".join(f"{name} {size:g}" for name, size in row["largest"].items())
    print(f"{extra:8} {row['megabytes']:7.1f} MB  {row['packages']:3} packages  ({largest})")
    for command in row["commands"]:
        print(f"         {'works' if command['works'] else 'FAILS'}  {command['command']}  {command['problem']}")
    if "help" in row:
        wall_s, processor = row["help"]["seconds"], row["help"]["processor_seconds"]
        print(f"         weft --help in {wall_s:.2f} s, {processor:.2f} s of a processor; medians of {HELPS}")
    sys.stdout.flush()


def is_kept(extra: str, row: dict[str, Any]) -> bool:
    """Whether everything works; and the core keeps its limits, but for times, which a busy machine misses."""
    small = extra != CORE or (row["megabytes"] <= MOST_MB and row["packages"] <= MOST_PACKAGES)
    return small and all(command["works"] for command in row["commands"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", default=USUAL, help=f"of {', '.join(COMMANDS)}")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"write {RESULTS.name}, or another file")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = Path(scratch).glob("weft-*.whl")
        for extra in arguments.extras:
            environment = machine()
            rows[extra] = {"machine": environment} | measure(extra, wheel, Path(scratch) / extra)
            show(extra, rows[extra])
            if arguments.save:
                save(arguments.save, rows)
    raise SystemExit(0 if all(is_kept(extra, row) for extra, row in rows.items()) else 1)


def save(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write the rows, beside those that the file has of other extras."""
    earlier = json.loads(path.read_text())["environments"] if path.exists() else {}
    limits = {"core_megabytes": MOST_MB, "core_packages": MOST_PACKAGES, "help_s": MOST_HELP_S}
    write_json(path, {"limits": limits, "environments": earlier | rows})


if __name__ == "__main__":
    main()
