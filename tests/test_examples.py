"""The examples run, and what the documentation shows is true."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from tests.support.ports import free_port
from weft.load import LoadResult
from weft.load.report import stream_load
from weft.workloads.requests import parse_workload

sys.path.append(str(ROOT / "benchmarks"))
head_of_line = pytest.importorskip("head_of_line")
early_exits = pytest.importorskip("early_exits")
gpu_plain_server = pytest.importorskip("gpu_plain_server")

PATIENCE_S = 600
"""After that an example that hangs fails instead; none is meant to come near it."""


def test_the_policy_of_ones_own_runs_beside_ours() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples/own_policy.py"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["fifo", "shortest-fetch", "layerweaver", "weft"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody runs all of them after each change; a module that moved is seen here. Ray need not be installed."""
    monkeypatch.syspath_prepend(str(path.parent))
    for node in ast.parse(path.read_text()).body:
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        ours = [name for name in names if name.partition(".")[0] != "ray"]
        assert [name for name in ours if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("name", ["exact_batches", "mapping_speed"])
def test_a_benchmark_that_uses_the_tests_finds_them(name: str, tmp_path: Path) -> None:
    script = ROOT / f"benchmarks/{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def shell_block(page: str, section: str) -> str:
    """The first block of commands under a heading."""
    below = (ROOT / page).read_text().split(f"\n## {section}\n", 1)[1]
    return re.split(r"^```\w*$", below, maxsplit=2, flags=re.M)[1].strip()


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def percentages(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) ?%", line)]


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("curl")), reason="the example is for bash and curl")
def test_the_early_exits_of_the_page_are_served_measured_and_simulated(tmp_path: Path) -> None:
    port = free_port()
    script = replaced(
        shell_block("docs/exits.md", "Serve, measure and simulate"),
        (
            "weft serve models --policy top-up &",
            f"weft serve models --policy top-up --http-port {port} --grpc-port -1 &\nserver=$!; trap 'kill %1' EXIT",
        ),
        ("127.0.0.1:8000/", f"127.0.0.1:{port}/"),
        ("--retry 60 ", f"--retry {PATIENCE_S} "),
        ("deadline=40,", f"deadline={PATIENCE_S * 1000},"),  # on a slow machine all are answered, too
        ("--duration 5", f"--duration 2 --grace {PATIENCE_S} --url http://127.0.0.1:{port}"),
    )
    shell = subprocess.Popen(
        ["bash", "-c", f"set -e\n{script}\nwait $server; trap - EXIT"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=PATIENCE_S)
    except BaseException:
        os.killpg(shell.pid, signal.SIGKILL)  # the shell is not waited for yet, so the number is still its own
        shell.wait()
        raise
    assert shell.returncode == 0, said
    lines = said.splitlines()
    (table,) = [place for place, line in enumerate(lines) if line.split()[:2] == ["stream", "right"]]
    assert lines[table].split()[2:] == ["exit", "1", "exit", "2", "exit", "3", "exit", "4"]
    measured_right, *measured = percentages(lines[table + 1])
    *simulated, simulated_right = percentages(next(line for line in lines if "leave by its exits" in line))
    assert len(measured) == len(simulated) == 4
    assert sum(measured) == pytest.approx(100, abs=0.3) and sum(simulated) == pytest.approx(100, abs=0.3)
    assert measured_right > 50 and simulated_right > 75


def answered(*, counted: bool) -> LoadResult:
    """A request that took four seconds, in the warm-up or after it, and nothing else."""
    stream = {"model": "net", "arrival": "closed", "deadline_ms": 1000.0}
    workload = parse_workload({"duration_s": 3.0, "warmup_s": 0.5, "stream": [stream]}, "test")
    load = stream_load(
        workload,
        workload.stream[0],
        scheduled_s=np.array([1.0 if counted else 0.0]),
        lag_s=np.zeros(1),
        latency_s=np.array([4.0]),
        status=np.array([200], np.int16),
        messages={},
    )
    return LoadResult("http://h", {}, workload, "none", (load,), "now", 4.0, 1e-4, 0.1, 1, 0)


def test_a_machine_too_busy_for_more_than_the_warm_up_still_has_a_speed() -> None:
    assert [head_of_line.typical_s(answered(counted=each).streams[0]) for each in (True, False)] == [4, 4]
    assert [early_exits.answered_per_s(answered(counted=each)) for each in (True, False)] == [0.4, 0.25]
    rate, most = early_exits.rate_per_s([answered(counted=False)], 2.0)
    assert (rate, most) == (10, 0.25), "so that something arrives at all"


def test_the_rate_at_a_99th_percentile_lies_between_the_points_that_were_measured() -> None:
    numbers = [(1, 100.0, 2.0), (4, 300.0, 4.0), (16, 600.0, 10.0), (64, 500.0, 20.0)]
    points = [gpu_plain_server.Point(*each) for each in numbers]
    limits_ms = (1.0, 2.0, 3.0, 7.0, 10.0, 15.0, 99.0)
    rates = [gpu_plain_server.rate_within(points, each) for each in limits_ms]
    assert rates == [0, 100, 200, 450, 600, 600, 600], "below all of them nothing, and never less than before"
    (found,) = gpu_plain_server.compared(points, [gpu_plain_server.Point(4, 300.0, 7.0)])
    assert (found["weft_per_s"], found["ratio"]) == (450, 1.5)


DEMO = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import demo
smaller = {"resnet18": "tinynet", "tune lenet": "tune lenet --platform int8 --workers 1"}
for old, new in smaller.items():
    assert any(old in each for each in demo.COMMANDS), old
    demo.COMMANDS = [each.replace(old, new) for each in demo.COMMANDS]
demo.main()
"""
"""The demo, with a smaller network to stitch and fewer formats to choose from: the rest is as users run it."""


@pytest.mark.long
def test_the_demo_draws_a_timeline_for_each_npu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEMO, ROOT / "examples", "--seconds", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "punctual: p99 of the urgent model" in done.stdout
    assert "unlike alone" in done.stdout
    for name in ("tpuv3-like.html", "nnpi-like.html", "woven.png"):
        assert (tmp_path / "out/demo" / name).stat().st_size > 10_000
        assert name in done.stdout


def test_the_formats_page_names_every_key_of_a_device_and_a_report() -> None:
    from weft.devices import Npu
    from weft.simulation.report import Report, StreamReport

    page = (ROOT / "docs/formats.md").read_text()
    keys = [
        *Npu.model_fields,
        *(field.name for field in fields(Report)),
        *(field.name for field in fields(StreamReport)),
    ]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_serving_page_names_every_setting() -> None:
    from weft.serving.config import GROUP_OF, ModelConfig

    page = (ROOT / "docs/serving.md").read_text()
    models = [key for key in ModelConfig.model_fields if f"{key} = " not in page and f"[{key}]" not in page]
    assert models == []
    assert [key for key in GROUP_OF if f"`{key}`" not in page] == []


def test_the_example_of_a_server_file_is_one() -> None:
    from weft.serving.config import read_server_config

    assert read_server_config(ROOT / "examples/serve.toml").scheduling.policy == "punctual"


def test_every_policy_has_its_place_on_the_policies_page() -> None:
    from weft.engine.policies import ON_SHARES, POLICIES

    page = (ROOT / "docs/policies.md").read_text()
    assert [name for name in (*POLICIES, *ON_SHARES) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("block", (0, 1))
def test_the_python_of_the_mapping_page_runs(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/mapping.md").read_text(), flags=re.M | re.S)[block]
    exec(compile(text, "docs/mapping.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") == 1
