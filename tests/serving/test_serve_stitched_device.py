"""Stitched models on a device, on its twin on the CPU, behind a server: mixes of requests, readiness and counters."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving import live
from tests.support.inference import infer, model_state, send, timeline_spans
from tests.support.stitched import NAMES, NETS, check_output, pictures, stitched_file
from weft.runtime.cuda.cpu_twins import TWIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    """A batch goes when it is full; the body has left the device until the first one begins."""
    root = tmp_path_factory.mktemp("models")
    stitched_file(root / "body.onnx", form="mts")
    settings = "max_batch = 3\nbatch_timeout_ms = 600000\nslo_ms = 900000\ngrain_ms = 0.0001\nmax_pieces = 4\n"
    (root / "body.toml").write_text(settings)
    with live.running(root, device=TWIN, device_memory_bytes=1 << 40) as running:
        yield running


def at_once(server: live.Live, mix: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Answers to requests for models, each with so many rows, that come together."""
    with ThreadPoolExecutor(len(mix)) as clients:
        asked = [
            clients.submit(infer, server, NAMES[task], {"image": pictures(rows, seed)})
            for seed, (task, rows) in enumerate(mix)
        ]
        return [each.result(live.PATIENCE_S) for each in asked]


def test_every_model_is_ready_and_runs_on_the_device(server: live.Live) -> None:
    assert send(server, "GET", "/v2/health/ready").status == 200
    for name in NAMES:
        assert send(server, "GET", f"/v2/models/{name}/ready").status == 200
        slot = server.server.service.library.find(name)
        assert slot is not None and slot.served is not None
        assert slot.message.startswith("one of 3 with the body body; ") and "runs on the CPU" not in slot.message
        assert len(slot.served.loaded.segments) == 4 and slot.served.loaded.batching.max_batch == 3
    assert send(server, "GET", "/v2/models/body").status == 404


@pytest.mark.parametrize("tasks", [(0, 1, 2), (2, 0, 2), (1, 1, 1)])
def test_requests_for_any_of_the_models_run_in_one_go(server: live.Live, tasks: Sequence[int]) -> None:
    before = len(timeline_spans(server))
    found = at_once(server, [(task, 1) for task in tasks])
    for seed, (task, each) in enumerate(zip(tasks, found, strict=True)):
        check_output(each, NETS[task], pictures(seed=seed))
    ran = timeline_spans(server)[before:]
    assert [(each["model"], each["batch"], each["outcome"]) for each in ran] == [("body", 3, "done")] * 4


def test_requests_of_several_rows_and_of_none_are_answered(server: live.Live) -> None:
    mix = [(0, 2), (1, 3), (2, 7), (1, 2)]
    for seed, ((task, rows), each) in enumerate(zip(mix, at_once(server, mix), strict=True)):
        check_output(each, NETS[task], pictures(rows, seed))
    check_output(at_once(server, [(2, 0)] * 3)[0], NETS[2], pictures(0))


def test_each_model_has_its_own_counters(server: live.Live) -> None:
    def counted() -> list[Any]:
        return [send(server, "GET", f"/v2/models/{name}/stats").json()["model_stats"][0] for name in NAMES]

    before = counted()
    at_once(server, [(2, 1), (0, 1), (2, 1)])
    changes = [
        [now[what] - then[what] for what in ("inference_count", "execution_count")]
        for then, now in zip(before, counted(), strict=True)
    ]
    assert changes == [[1, 1], [0, 0], [2, 1]]
    assert all(model_state(server, name)["state"] == "ready" for name in NAMES)
    assert server.server.service.library.backend.returns[TWIN] > 0, "it came back for its first batch"
