"""The parts of ``benchmarks/under_attack.py`` that compute: who is due when, what counts as late, what is promised."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests import ROOT
from tests.support.concurrency import until
from weft.runtime.isolated import confinement, worker
from weft.serving.config import read_server_config

sys.path.append(str(ROOT / "benchmarks"))
open_loop = pytest.importorskip("open_loop")
attacks = pytest.importorskip("attacks")
hostile_models = pytest.importorskip("hostile_models")
killing = pytest.importorskip("killing")
modes = pytest.importorskip("modes")
processes = pytest.importorskip("processes")
under_attack = pytest.importorskip("under_attack")
undisturbed = pytest.importorskip("undisturbed")

MARK = uuid.uuid4().hex
linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def seen(latencies_ms: list[float], status: list[int] | None = None, due_s: list[float] | None = None) -> Any:
    count = len(latencies_ms)
    latency_s = np.array(latencies_ms) / 1e3
    due = np.arange(count, dtype=float) if due_s is None else np.array(due_s)
    return open_loop.Seen("model", due, np.zeros(count), latency_s, np.array(status or [200] * count, np.int16))


# The client


@contextmanager
def answering(reply: bytes, times: int) -> Iterator[str]:
    """A server that says the same to everybody, one request per connection, and closes the line; so often."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(times):
                line, _ = listening.accept()
                with line:
                    while b"\r\n\r\n" not in line.recv(65536):
                        pass
                    line.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def asked(url: str, **changes: Any) -> Any:
    """Ten requests on connections of their own; none is opened before."""
    ask = open_loop.Ask("health", b"GET / HTTP/1.1\r\n\r\n", 100.0, regular=True, fresh=True)._replace(**changes)
    return open_loop.run_open_loop([ask], url, 0.1, connections=0)["health"]


def test_every_request_is_answered_or_told() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", 10) as url:
        found = asked(url)
    assert found.status.tolist() == [200] * 10
    assert found.failed == {} and (found.good_s > 0).all()
    with answering(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy", 10) as url:
        found = asked(url)
    assert found.failed == {503: 10} and found.said == {503: "busy"} and found.quantile_s(1.0) is None
    with answering(b"", 10) as url:
        assert asked(url).failed == {0: 10}


def test_requests_are_due_at_their_times_and_the_same_for_everybody() -> None:
    even = open_loop.Ask("even", b"", 50.0, regular=True)
    assert open_loop.due_times(even, 2.0, np.random.default_rng(0)).tolist() == [each / 50 for each in range(100)]
    uneven = even._replace(regular=False)
    one, other = (open_loop.due_times(uneven, 100.0, np.random.default_rng(7)) for _ in range(2))
    assert one.tolist() == other.tolist()
    assert (np.diff(one) > 0).all() and one[-1] < 100
    assert 4000 < len(one) < 6000


def test_what_was_due_in_the_warm_up_is_not_counted() -> None:
    later = seen([1, 2, 3], due_s=[0.0, 1.0, 2.0]).after(1.0)
    assert later.due_s.tolist() == [1, 2]
    assert later.good_s.tolist() == [0.002, 0.003]


# Verdicts


def test_one_slow_answer_of_a_thousand_breaks_the_promise() -> None:
    def kept(found: Any) -> bool:
        return bool(under_attack.judge_health(seen([1.0]), found, "x").kept)

    assert kept(seen([99.0] * 1000))
    assert not kept(seen([1.0] * 999 + [101.0]))
    assert not kept(seen([1.0] * 999 + [np.nan], [200] * 999 + [-1]))
    assert not kept(seen([]))


def test_p99_beside_the_calm_one_takes_failures_for_endless() -> None:
    calm = seen([10.0] * 100)
    assert under_attack.p99_times(calm, seen([10.0] * 98 + [20.0, 500.0])) == pytest.approx(2.0)
    assert under_attack.p99_times(calm, seen([10.0] * 99 + [np.nan], [200] * 99 + [503])) == pytest.approx(1.0)
    two_failed = seen([10.0] * 98 + [np.nan] * 2, [200] * 98 + [503, 0])
    assert under_attack.p99_times(calm, two_failed) == np.inf
    assert not under_attack.judge_others(calm, two_failed, "x").kept
    assert json.dumps(under_attack.other_figures(calm, two_failed), allow_nan=False)
    assert not under_attack.judge_others(two_failed, two_failed, "x").kept, "without a calm there is no ratio"


def test_an_end_is_in_time_and_leaves_nobody() -> None:
    judge = under_attack.judge_ending
    assert judge(under_attack.Ending(4.9, 0, 0), 5.0, "x").kept
    assert not judge(under_attack.Ending(5.1, 0, 0), 5.0, "x").kept
    assert not judge(under_attack.Ending(None, -9, 0), 5.0, "x").kept
    assert not judge(under_attack.Ending(1.0, 0, 1), 5.0, "x").kept


def test_a_lane_that_is_never_free_breaks_the_promise() -> None:
    for after_s, kept in ((0.9, True), (-0.5, True), (1.1, False), (None, False)):
        assert under_attack.Freed("loop", "T", "deadline", after_s, 1.0).verdict().kept == kept


# Servers and their processes


def test_settings_are_those_this_version_knows(tmp_path: Path) -> None:
    threads_only, both = frozenset({"lanes"}), frozenset({"lanes", "isolation"})
    assert modes.settings_for("T", threads_only, lanes=2, unheard_of=1) == {"lanes": 2}
    assert modes.settings_for("P", threads_only, lanes=2) is None
    assert modes.settings_for("P", both, lanes=2) == {"lanes": 2, "isolation": "process"}
    assert (modes.as_served(both), modes.as_served(frozenset({"learn_first"}))) == ((), ("--learn-later",))
    given = modes.settings_for("T", modes.settings_known(), lanes=2, drain_s=3.5, preload=False)
    read = read_server_config(modes.write_settings(tmp_path / "serve.toml", (str(tmp_path), "pp-ocr-cls"), given))
    assert (read.execution.lanes, read.network.drain_s, read.loading.preload) == (2, 3.5, False)
    assert read.loading.models == (str(tmp_path), "pp-ocr-cls")


@linux_only
def test_a_process_is_found_by_its_parent_and_by_its_mark() -> None:
    assert worker.NAME.encode() == killing.WORKER
    named = f"from {confinement.__name__} import call_yourself as name; name({worker.NAME!r})"
    waiting = [sys.executable, "-c", f"{named}; print(flush=True); input()"]
    marked = os.environ | {"WEFT_PEER": MARK}
    child = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked)
    try:
        assert child.stdout and child.stdout.readline()
        members = processes.family(os.getpid())
        assert {os.getpid(), child.pid} <= {each.pid for each in members}
        assert child.pid in {each.pid for each in processes.children(os.getpid())}
        assert killing.worker_pids(os.getpid()).count(child.pid) == 1
        assert processes.memory_bytes(child.pid) > 0 and processes.cpu_s(os.getpid()) > 0
        (this,) = [each for each in members if each.pid == child.pid]
        assert [each.pid for each in processes.survivors([this])] == [child.pid]
        until(lambda: [each.pid for each in processes.marked(f"WEFT_PEER={MARK}")] == [child.pid], "it has begun")
    finally:
        child.communicate(b"\n")
    assert under_attack.survivors([this]) == []
    assert processes.marked(f"WEFT_PEER={MARK}") == []


@pytest.mark.parametrize("mark", ["", "=", "WEFT_PEER", "WEFT_PEER=", "WEFT_PEER=short", f"={'a' * 32}"])
def test_a_mark_that_others_may_have_is_refused(mark: str) -> None:
    with pytest.raises(ValueError, match="not ours"):
        processes.marked(mark)


@linux_only
def test_the_end_of_a_child_is_noticed_and_left_for_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert under_attack.ended(child.pid, 600.0) is not None
    assert child.wait() == 3


# Attacks


def test_hostile_models_do_what_they_are_sent(tmp_path: Path) -> None:
    def run(path: Path, **inputs: Any) -> Any:
        return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, inputs)[0]

    x = np.arange(4, dtype=np.float32)
    assert np.array_equal(run(hostile_models.write_loop(tmp_path / "loop.onnx"), turns=np.array([3]), x=x), x)
    shape = np.array([20, 30])
    assert run(hostile_models.write_expand(tmp_path / "expand.onnx"), x=np.ones(1, np.float32), shape=shape) == 1
    images = np.zeros((2, 3, 5, 7), np.float32)
    assert run(hostile_models.write_shapes(tmp_path / "shapes.onnx"), x=images).shape == (2, 8)
    slow = hostile_models.write_slow_load(tmp_path / "slow.onnx", products=2, size=8)
    assert np.allclose(run(slow, x=x), x + 1 / 8)


def test_thirty_megabytes_of_json_are_json() -> None:
    request = attacks.json_request(100_000)
    head, _, body = request.partition(b"\r\n\r\n")
    (tensor,) = json.loads(body)["inputs"]
    assert f"Content-Length: {len(body)}".encode() in head
    assert 90_000 < len(body) <= 101_000
    assert len(tensor["data"]) == tensor["shape"][0] * 64


@linux_only
def test_a_bomb_leaves_memory_for_others() -> None:
    rows, columns = attacks.expanded_shape()
    assert 0 <= rows <= attacks.EXPANDED[0] and columns == attacks.EXPANDED[1]


def test_every_attack_can_be_made() -> None:
    for name in attacks.ATTACKS:
        assert callable(getattr(attacks.Attacker, name.replace("-", "_")))


def test_who_works_is_killed_and_not_a_spare() -> None:
    before = {1: 0, 2: 5_000_000, 3: 7}
    assert killing.at_work(before, {1: 2_000_000, 2: 5_000_000, 4: 9_000_000}) == [1]
    assert killing.at_work(before, {2: 5_000_000, 3: 8}) == [2, 3]
    assert killing.at_work(before, {}) == []


class Clouds:
    """A machine that others take time from, or slow down, while the run of a certain number goes on."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        stolen: frozenset[int] = frozenset(),
        slow: frozenset[int] = frozenset(),
    ) -> None:
        self.runs, self._ticks, self._stolen, self._slow = 0, (0, 0), stolen, slow
        monkeypatch.setattr(undisturbed, "processor_ticks", lambda: self._ticks)
        monkeypatch.setattr(undisturbed, "piece_s", self._piece_s)
        monkeypatch.setattr(undisturbed.time, "sleep", self._sleep)

    def _piece_s(self, _: float) -> list[float]:
        return [1.0, 1.1 * undisturbed.SLOWER if self.runs in self._slow else 1.0, 9.0]

    def _sleep(self, _: float) -> None:
        self._slow = self._slow - {self.runs}  # it passes

    def run(self) -> int:
        self.runs += 1
        self._ticks = (self._ticks[0] + 100 * undisturbed.STOLEN + (self.runs in self._stolen), self._ticks[1] + 100)
        return self.runs


def test_runs_are_done_again_until_nobody_disturbed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds = Clouds(monkeypatch, stolen=frozenset({1, 3}), slow=frozenset({2}))
    again = undisturbed.Undisturbed()
    assert again(clouds.run) == 4
    assert (again.again, again.counted) == (3, 0)


def test_a_disturbed_run_counts_when_patience_is_at_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds = Clouds(monkeypatch, stolen=frozenset({1, 2}))
    again = undisturbed.Undisturbed(patience_s=-1.0)
    assert [again(clouds.run) for _ in range(3)] == [1, 2, 3]
    assert (again.again, again.counted) == (0, 2)
