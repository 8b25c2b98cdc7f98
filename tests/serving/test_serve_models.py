"""Real models out of installed packages, and a transformer, served together: bit for bit what ONNX Runtime gives."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.serving import live
from tests.support.inference import Refused, infer, state
from tests.support.references import assert_same_bits, run_session, session
from weft.models import zoo
from weft.models.packaged import packaged_models

NAMES = ("pp-ocr-det", "pp-ocr-cls", "pp-ocr-rec", "silero-vad", "magika")
SHAPES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "pp-ocr-det": {"x": [(1, 3, 64, 64), (1, 3, 96, 160), (2, 3, 64, 96), (1, 3, 64, 64), (1, 3, 32, 320)]},
    "pp-ocr-cls": {"x": [(1, 3, 48, 192), (3, 3, 48, 192), (1, 3, 32, 100), (1, 3, 48, 192)]},
    "pp-ocr-rec": {"x": [(1, 3, 48, 320), (1, 3, 48, 100), (2, 3, 48, 64), (1, 3, 48, 333), (1, 3, 48, 320)]},
    "magika": {"bytes": [(1, 2048), (2, 2048), (5, 2048)]},
}
"""What the models are asked for: their own sizes and others, one size twice."""

PICTURES = (
    ("pp-ocr-det", [1, 3, 96, 96], "grain_ms = 1.0\nmax_batch = 1\n"),
    ("pp-ocr-cls", [1, 3, 32, 100], ""),
    ("pp-ocr-rec", [1, 3, 48, 64], ""),
)
"""What models of pictures are measured at, and other settings of theirs."""


# The models


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = packaged_models()
    missing = [name for name in NAMES if name not in found]
    if missing:
        pytest.skip(f"not installed (requirements-models.txt): {', '.join(missing)}")
    bert = tmp_path_factory.mktemp("zoo") / "small-bert.onnx"
    zoo.export("bert-base", bert, layers=2, hidden=128, heads=2, seq_len=16)
    return {name: found[name] for name in NAMES} | {"small-bert": bert}


@pytest.fixture(scope="module")
def references(files: dict[str, Path]) -> dict[str, ort.InferenceSession]:
    return {name: session(path) for name, path in files.items()}


@pytest.fixture(scope="module")
def server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    """Some by their names; those of pictures are measured at smaller ones, the largest model alone, to save time."""
    repository = tmp_path_factory.mktemp("repository")
    for name, shape, more in PICTURES:
        shutil.copy(files[name], repository / f"{name}.onnx")
        (repository / f"{name}.toml").write_text(f"shapes = {{ x = {shape} }}\n{more}")
    with live.running(repository, *NAMES[3:], files["small-bert"], grpc_port=None) as running:
        yield running


def requests(name: str, references: Mapping[str, ort.InferenceSession]) -> Iterator[dict[str, np.ndarray]]:
    """Inputs for a model, at several of the sizes it takes."""
    rng = np.random.default_rng(len(name))
    if name == "small-bert":
        for rows in (1, 2, 1):
            yield {
                each.name: rng.integers(0, 2 if "type" in each.name else 1000, (rows, *each.shape[1:])).astype(
                    np.int64 if each.type == "tensor(int64)" else np.int32
                )
                for each in references[name].get_inputs()
            }
    elif name == "magika":
        for shape in SHAPES[name]["bytes"]:
            yield {"bytes": rng.integers(0, 257, shape).astype(np.int32)}
    else:
        for shape in SHAPES[name]["x"]:
            yield {"x": rng.normal(size=shape).astype(np.float32)}


STATELESS = ("pp-ocr-det", "pp-ocr-cls", "pp-ocr-rec", "magika", "small-bert")


def check(server: live.Live, name: str, references: Mapping[str, ort.InferenceSession]) -> None:
    for arrays in requests(name, references):
        assert_same_bits(infer(server, name, arrays), run_session(references[name], arrays))


def listen(server: live.Live, reference: ort.InferenceSession, *, rows: int, steps: int) -> None:
    """Let the voice detector hear a few pieces of sound; what it remembers travels with the requests."""
    rng = np.random.default_rng(rows)
    ours = theirs = np.zeros((2, rows, 128), np.float32)
    for _ in range(steps):
        heard = {"input": rng.normal(size=(rows, 576)).astype(np.float32), "sr": np.array(16000, np.int64)}
        wanted = run_session(reference, heard | {"state": theirs})
        got = infer(server, "silero-vad", heard | {"state": ours})
        assert_same_bits(got, wanted)
        ours, theirs = got["stateN"], wanted["stateN"]
    assert np.abs(ours).max() > 0


@pytest.mark.parametrize("name", STATELESS)
def test_one_after_another(server: live.Live, references: dict[str, ort.InferenceSession], name: str) -> None:
    check(server, name, references)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_with_a_memory(server: live.Live, references: dict[str, ort.InferenceSession], rows: int) -> None:
    listen(server, references["silero-vad"], rows=rows, steps=4)


def test_all_at_once(server: live.Live, references: dict[str, ort.InferenceSession]) -> None:
    """A thread for each model, so that their segments mix and no two requests share a batch."""
    problems: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    work: list[Callable[[], None]] = [lambda: listen(server, references["silero-vad"], rows=1, steps=6)]
    work += [lambda name=name: check(server, name, references) for name in STATELESS]  # type: ignore[misc]
    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_size_the_model_cannot_take_is_the_clients_mistake(server: live.Live) -> None:
    with pytest.raises(Refused, match="pp-ocr-rec") as refused:
        infer(server, "pp-ocr-rec", {"x": np.zeros((1, 3, 100, 100), np.float32)})
    assert refused.value.status == 400
    for shape in ((1, 3, 40, 72), (1, 4, 64, 64)):  # one that half of the segments take, and one that none takes
        with pytest.raises(Refused, match=r"pp-ocr-det|input 'x'") as refused:
            infer(server, "pp-ocr-det", {"x": np.zeros(shape, np.float32)})
        assert refused.value.status == 400


def test_every_model_is_measured_and_none_has_failed(server: live.Live) -> None:
    for each in state(server)["models"]:
        assert each["state"] == "ready", each
        assert set(each["failures"]) <= {"bad_request"}, each
        assert each["requests"] > 0
