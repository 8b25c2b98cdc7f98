"""Encoders as one body, served under their own names: requests of several models and lengths in one batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.engine.hosts import MS
from tests.runtime.clocks import NO_LENGTH_S
from tests.serving import live
from tests.stitching.encoders import answers, as_tagger, sentences, tiny_encoders, with_exit
from tests.support.concurrency import until
from tests.support.inference import Refused, infer, send, timeline_spans
from tests.support.stitched import served_tasks
from weft.base.errors import BadRequest, StitchError
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.serving.tickets import ClientTicket
from weft_stitch.bodies.body_stitching import stitch_body

NAMES = [f"tiny-encoder-{task}" for task in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers and a tagger, apart and as one body."""
    folder = tmp_path_factory.mktemp("encoders")
    files = tiny_encoders(folder, full=0.5, classes=(2, 3, 4))
    as_tagger(files[2])
    stitch_body(files, measure=False).to_onnx(folder / "body.onnx")
    return folder


@pytest.fixture(scope="module")
def prepared(folder: Path) -> CpuModel:
    return prepare(folder / "body.onnx", LoadOptions(grain_s=NO_LENGTH_S, max_batch=4))


def check(outputs: Any, folder: Path, name: str, given: dict[str, np.ndarray]) -> None:
    """An answer is what the model gives alone."""
    wanted = answers(folder / f"{name}.onnx", given)
    assert outputs.keys() == wanted.keys()
    for key, each in wanted.items():
        assert outputs[key].shape == each.shape
        np.testing.assert_allclose(outputs[key], each, atol=1e-5)


def ask(machine: Any, served: Any, given: dict[str, np.ndarray]) -> list[Any]:
    found: list[Any] = []
    ticket = ClientTicket(
        served, dict(given), lambda ticket, outcome: found.append(outcome), machine.clock.ticks + 1000 * MS
    )
    machine.dispatcher.submit(ticket)
    return found


def test_requests_of_several_models_and_lengths_run_in_one_go(machine, prepared, folder):
    one = machine()
    served = served_tasks(one, prepared)
    asked = [(2, sentences(1, 7, 0)), (0, sentences(1, 5, 1)), (2, sentences(1, 8, 2)), (1, sentences(1, 6, 3))]
    found = [ask(one, served[task], given) for task, given in asked]
    one.run()
    assert len(served[0].loaded.ran) == 1
    for (task, given), (outcome,) in zip(asked, found, strict=True):
        check(outcome, folder, NAMES[task], given)


def test_much_longer_requests_do_not_make_short_ones_wait(machine, prepared, folder):
    one = machine()
    served = served_tasks(one, prepared)
    asked = [(0, sentences(1, 4, 0)), (1, sentences(1, 40, 1))]
    found = [ask(one, served[task], given) for task, given in asked]
    one.run()
    assert len(served[0].loaded.ran) == 2
    for (task, given), (outcome,) in zip(asked, found, strict=True):
        check(outcome, folder, NAMES[task], given)


def test_inputs_of_two_lengths_are_refused(machine, prepared):
    one = machine()
    served = served_tasks(one, prepared)
    given = sentences(1, 7) | {"attention_mask": np.ones((1, 5), np.int64)}
    with pytest.raises(BadRequest, match=r"must be of one length from 1 on, not \[5, 7\]"):
        ask(one, served[0], given)


def test_a_body_is_served_under_the_names_of_its_models(folder):
    with live.running(folder / "body.onnx", grpc_port=None) as server:
        for at, (name, length) in enumerate((name, length) for name in NAMES for length in (1, 16, 33)):
            given = sentences(1 + at % 2, length, at)
            check(infer(server, name, given), folder, name, given)
        with pytest.raises(Refused, match="one length"):
            infer(server, NAMES[0], sentences(1, 7) | {"attention_mask": np.ones((1, 5), np.int64)})


@pytest.mark.parametrize(
    ("device", "tuned"),
    [
        pytest.param(None, {"full": 0.5}, id="prepared beside"),
        # without a server in runtime/cuda/test_body_models.py, too
        pytest.param(TWIN, {"rank": 2}, id="in place", marks=pytest.mark.long),
    ],
)
def test_models_come_and_go_while_others_are_asked(tmp_path: Path, device: str | None, tuned: dict[str, float]) -> None:
    """A body stitched anew takes the place of the old one with no request lost: one model comes, then another goes."""
    files = tiny_encoders(tmp_path / "models", **tuned)
    path = tmp_path / "served" / "body.onnx"
    path.parent.mkdir()
    path.with_suffix(".toml").write_text("max_batch = 2\n")  # larger ones would be measured three times
    bodies = {}
    for name, chosen in (("first", files[:2]), ("more", files), ("fewer", [files[0], files[2]])):
        made = stitch_body(chosen, tolerance=1e-6 if device == TWIN else 0.0, measure=False)
        (bodies[name],) = made.to_onnx(tmp_path / f"{name}.onnx")
    bodies["first"].replace(path)
    wanted = {length: answers(files[0], sentences(1, length)) for length in (4, 7)}
    stop, failed, counts = threading.Event(), [], [0, 0]

    def ask_on(server: live.Live, at: int, length: int) -> None:
        while not stop.is_set() and not failed:
            try:
                found = infer(server, NAMES[0], sentences(1, length))
                np.testing.assert_allclose(found["logits"], wanted[length]["logits"], atol=1e-5)
            except (Refused, OSError, AssertionError) as error:
                failed.append(error)
            counts[at] += 1
            stop.wait(0.01)

    def in_place(server: live.Live) -> bool:
        return "in place, with nothing captured" in server.server.service.library.find(NAMES[0]).message

    def swapped(server: live.Live, body: Path, by: str) -> None:
        """A few requests before, during and after."""
        body.replace(path)
        assert send(server, "POST", f"/v2/repository/models/{by}/load").status == 200
        seen = list(counts)
        until(lambda: failed or min(now - then for now, then in zip(counts, seen, strict=True)) >= 3, "more answers")
        assert in_place(server) == (device == TWIN)

    with live.running(path.parent, grpc_port=None, device=device) as server:
        threads = [threading.Thread(target=ask_on, args=(server, *each)) for each in enumerate((4, 7))]
        for each in threads:
            each.start()
        try:
            swapped(server, bodies["more"], NAMES[2])
            check(infer(server, NAMES[2], sentences(2, 5)), tmp_path / "models", NAMES[2], sentences(2, 5))
            swapped(server, bodies["fewer"], NAMES[0])
        finally:
            stop.set()
            for each in threads:
                each.join()
        assert not failed, failed[0]
        with pytest.raises(Refused, match="404"):
            infer(server, NAMES[1], sentences(1, 5))
        library = server.server.service.library
        until(
            lambda: library.used_bytes == library.find(NAMES[0]).served.residency.memory_bytes, "the old body to leave"
        )
        assert ("by kernels of its own" in library.find(NAMES[0]).message) == (device == TWIN)


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[live.Live, Path]]:
    """Models that differ by a low rank on the twin of a device; a batch goes when it is full."""
    root = tmp_path_factory.mktemp("device")
    files = tiny_encoders(root / "models", rank=2, classes=(2, 3, 4))
    (root / "served").mkdir()
    stitch_body(files, tolerance=1e-6, measure=False).to_onnx(root / "served" / "body.onnx")
    (root / "served" / "body.toml").write_text("max_batch = 4\nbatch_timeout_ms = 600000\nslo_ms = 900000\n")
    with live.running(root / "served", device=TWIN, grpc_port=None) as server:
        yield server, root / "models"


@pytest.mark.parametrize("mix", [((0, 1), (1, 64), (2, 7), (1, 16)), ((2, 3), (2, 40), (2, 5), (2, 64))])
def test_on_a_device_requests_of_any_lengths_run_in_one_go(on_device: Any, mix: Any) -> None:
    server, folder = on_device
    before = len(timeline_spans(server))
    asked = [(NAMES[task], sentences(1, length, length)) for task, length in mix]
    with ThreadPoolExecutor(len(asked)) as clients:
        found = list(clients.map(lambda each: infer(server, *each), asked))
    for (name, given), each in zip(asked, found, strict=True):
        check(each, folder, name, given)
    ran = timeline_spans(server)[before:]
    assert [(each["model"], each["batch"], each["outcome"]) for each in ran] == [("body", 4, "done")]


def test_on_a_device_requests_that_cannot_be_answered_do_not_take_others_with_them(on_device: Any) -> None:
    server, folder = on_device
    asked = [sentences(1, 5, seed) for seed in range(4)]
    asked[2] |= {"attention_mask": np.array([[0, 1, 1, 1, 1]])}
    with ThreadPoolExecutor(len(asked)) as clients:
        running = [clients.submit(infer, server, NAMES[at % 3], given) for at, given in enumerate(asked)]
        with pytest.raises(Refused, match=f"{NAMES[2]} cannot compute these inputs: attention_mask hides the first"):
            running[2].result(live.PATIENCE_S)
    for at, given in enumerate(asked):
        if at != 2:
            check(running[at].result(), folder, NAMES[at % 3], given)


# --- exits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with an exit and one without, apart and as one body."""
    folder = tmp_path_factory.mktemp("exits")
    files = tiny_encoders(folder, full=0.5, classes=(2, 3, 4))
    for task, classes in ((0, 2), (1, 3)):
        with_exit(files[task], classes, task)
    stitch_body(files, measure=False).to_onnx(folder / "body.onnx")
    return folder


def at_exits(folder: Path, name: str, given: dict[str, np.ndarray], threshold: float) -> dict[str, np.ndarray]:
    """What a request that leaves where it is sure is told, from a run of the model alone."""
    found = answers(folder / f"{name}.onnx", given)
    sure = [1 / np.exp(each - each.max(1, keepdims=True)).sum(1) for each in (found["early"], found["logits"])]
    early = sure[0] >= threshold
    return {
        "logits": np.where(early[:, None], found["early"], found["logits"]),
        "weft_exit": np.where(early, 1, 2),
        "weft_confidence": np.where(early, *sure),
    }


def test_models_of_a_body_answer_with_the_exit_that_is_sure(leaving: Path) -> None:
    taken = dict.fromkeys(NAMES[:2], ())
    with live.running(leaving / "body.onnx", grpc_port=None) as server:
        for at, (name, threshold) in enumerate((name, each) for name in NAMES[:2] for each in (0.8, 0.99, 2)):
            given = sentences(4, 6, at)
            asked = {} if threshold == 0.8 else {"weft_exit_threshold": threshold}
            found, wanted = infer(server, name, given, **asked), at_exits(leaving, name, given, threshold)
            assert found.keys() == wanted.keys()
            for key, each in wanted.items():
                np.testing.assert_allclose(found[key], each, atol=1e-5)
            taken[name] += tuple(found["weft_exit"].tolist())
        check(infer(server, NAMES[2], sentences(2, 5)), leaving, NAMES[2], sentences(2, 5))
        with pytest.raises(Refused, match="is an exit; ask for 'logits'"):
            send_for(server, NAMES[0], "early")
        counted = {each["name"]: each["exits"] for each in send(server, "GET", "/weft/state").json()["models"]}
        told = {name: each and (each["names"], each["taken"]) for name, each in counted.items()}
        exits = ["early", "logits"]
        assert told == {NAMES[2]: None} | {
            name: (exits, [seen.count(1), seen.count(2)]) for name, seen in taken.items()
        }
        assert all(1 in seen and 2 in seen for seen in taken.values()), "a test of one way only"


def send_for(server: live.Live, name: str, output: str) -> None:
    """Ask for one output."""
    given = {key: {"name": key, "datatype": "INT64", "shape": list(each.shape), "data": each.ravel().tolist()}
             for key, each in sentences(1, 3).items()}  # fmt: skip
    body = json.dumps({"inputs": list(given.values()), "outputs": [{"name": output}]}).encode()
    reply = send(server, "POST", f"/v2/models/{name}/infer", body, {})
    if reply.status != 200:
        raise Refused(reply)


def test_a_floor_of_the_threshold_means_nothing_to_a_body(leaving: Path, tmp_path: Path) -> None:
    (tmp_path / "body.onnx").write_bytes((leaving / "body.onnx").read_bytes())
    (tmp_path / "body.toml").write_text("exit_threshold = 0.9\nexit_floor = 0.5\nmax_batch = 1\n")
    said = "exit_floor is set, but all requests of a body go to its end"
    with live.running(tmp_path, grpc_port=None) as server, pytest.raises(Refused, match=said):
        infer(server, NAMES[0], sentences(1, 3))


def test_an_exit_that_is_no_output_is_named(tmp_path: Path) -> None:
    (path,) = tiny_encoders(tmp_path, 1)
    proto = onnx.load(path)
    onnx.helper.set_model_props(proto, {"weft.exits": "first, logits"})
    onnx.save(proto, path)
    with pytest.raises(StitchError, match=r"its weft\.exits names first, which is none of its outputs logits"):
        stitch_body([path], measure=False)
