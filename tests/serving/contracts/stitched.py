"""Models with one body: requests for them are answered in one run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.support.inference import infer, model_state, send, state, timeline_spans
from tests.support.stitched import NAMES, NETS, check_output, net_output, pictures, stitched_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stitched_file(tmp_path_factory.mktemp("stitched") / "body.onnx")


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch goes when it is full, so that three requests, one for each model, run in one go."""
    root = tmp_path_factory.mktemp("models")
    (root / "body.onnx").write_bytes(file.read_bytes())
    (root / "body.toml").write_text("max_batch = 3\nbatch_timeout_ms = 600000\nslo_ms = 900000\n")
    live.mlp(root / "plain.onnx")
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder) as running:
        yield running


def together(server: live.Live, seeds: Sequence[int] = (0, 1, 2)) -> list[dict[str, np.ndarray]]:
    """A request for each model at the same time."""
    found: list[Any] = [None] * len(seeds)

    def one(at: int) -> None:
        found[at] = infer(server, NAMES[at], {"image": pictures(seed=seeds[at])})

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(seeds))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_requests_over_http_are_answered_in_one_go(server: live.Live) -> None:
    before = len(timeline_spans(server))
    for net, seed, found in zip(NETS, (0, 1, 2), together(server), strict=True):
        check_output(found, net, pictures(seed=seed))
    (span,) = timeline_spans(server)[before:]
    assert (span["model"], span["batch"], span["outcome"]) == ("body", 3, "done")
    timeline = send(server, "GET", "/weft/timeline?since=0").json()
    assert {"body", *NAMES} <= {*timeline["models"]}


def test_requests_over_grpc_are_answered_like_any_model_s(server: live.Live) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    with triton.InferenceServerClient(server.grpc_address) as client:
        assert client.get_model_metadata(NAMES[0]).inputs[0].name == "image"
        image = triton.InferInput("image", [3, *NETS[0].inputs[0].shape], "FP32")
        image.set_data_from_numpy(pictures(3))
        found = client.infer(NAMES[0], [image])
    port = NETS[0].outputs[0].name
    np.testing.assert_allclose(found.as_numpy(port), net_output(NETS[0], pictures(3)), atol=1e-5)
    assert found.get_response().model_name == NAMES[0]


def test_counters_are_by_model_and_memory_is_counted_once(server: live.Live) -> None:
    before = {name: model_state(server, name)["requests"] for name in NAMES}
    together(server)
    assert {name: model_state(server, name)["requests"] for name in NAMES} == {
        name: n + 1 for name, n in before.items()
    }
    now = state(server)
    held = [each["memory_bytes"] for each in now["models"]]
    assert min(held) > 0 and now["memory"]["used_bytes"] - 2 <= sum(held) <= now["memory"]["used_bytes"]
    stats = send(server, "GET", f"/v2/models/{NAMES[0]}/stats").json()["model_stats"][0]
    assert stats["inference_count"] >= stats["execution_count"] >= 1
    page = send(server, "GET", "/metrics").body.decode()
    assert all(f'nv_inference_request_success{{model="{name}",version="1"}}' in page for name in NAMES)
    assert 'model="body"' not in page
