"""Encoders with one body on a device, read from the file of ``weft stitch``, on the twin: answers, coming and going."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx
import pytest
import torch

from tests.runtime.cuda.bodies import FOUR, Counting, check, opened, stitched
from tests.runtime.cuda.stitched import without_tools
from tests.stitching.adapters import lora_factors, merge_adapter, write_adapter
from tests.stitching.classifiers import export_classifiers
from tests.stitching.encoders import TOKENS, Feed, answers, sentences, tiny_encoders, with_exit
from tests.stitching.variants import changed_file, other_columns, scaled_rows
from weft.base.errors import NotLearned, StitchError, UnfitInputs
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda import preparing
from weft.runtime.cuda.model import ModelOnHost
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.metadata import BODY_KEY
from weft_stitch.bodies.body_description import read_body
from weft_stitch.bodies.body_stitching import stitch_body
from weft_stitch.on_device import body_file
from weft_stitch.on_device.body_file import FORM, IN_PLACE, DeviceBody
from weft_stitch.running import body_serving, kernel_shapes
from weft_stitch.running.body_reading import read_encoder
from weft_stitch.running.body_serving import LEAST_SPARE, BodyLadder, SlottedBody, digests
from weft_stitch.running.fused_body import Early, FusedBody, TileShape


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five models, of which a body has some."""
    return tiny_encoders(tmp_path_factory.mktemp("encoders"), 5, rank=2, classes=(2, 5, 3, 4, 17))


@pytest.fixture(scope="module")
def file(files: list[Path]) -> Path:
    return stitched(files[:3], files[0].parent / "body.onnx")


# --- what it answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("fp16", 0.01)])
def test_requests_of_all_models_lengths_and_rows_run_in_one_go(
    files: list[Path], file: Path, precision: str, near: float
) -> None:
    device = Counting()
    model = opened(file, LoadOptions(precision=precision, max_batch=16), device)
    assert model.remarks[0] == FORM and model.tasks.any_lengths and model.batching.max_batch == 16
    before = device.ran
    mix = [(2, 1, 7), (0, 2, 33), (2, 3, 5), (1, 1, 64), (0, 1, 1), (1, 0, 4)]
    check(model, [(files[task], sentences(rows, length, task)) for task, rows, length in mix], near)
    assert device.ran - before == 1


def test_what_no_batch_holds_is_answered_in_several(files: list[Path], file: Path) -> None:
    device = Counting()
    model = opened(file, FOUR, device)
    before = device.ran
    check(model, [(files[1], sentences(6, 9)), (files[0], sentences(1, 30)), (files[1], sentences(2, 3, 1))])
    assert device.ran - before == 3, "nine rows, four at a time"


def test_hidden_tokens_within_a_row_and_rows_that_are_left_out(files: list[Path], file: Path) -> None:
    model = opened(file)
    feed = sentences(3, 12) | {"attention_mask": np.random.default_rng(0).integers(0, 2, (3, 12))}
    feed["attention_mask"][:, 0] = 1
    check(model, [(files[2], feed)])
    part = BatchPart({f"{files[2].stem}.{port}": each for port, each in feed.items()}, [2, 0])
    (made,) = model.launch(Step(0, [part], 0)).outputs
    (wanted,) = answers(files[2], feed).values()
    np.testing.assert_allclose(made.answers[f"{files[2].stem}.logits"], wanted[[2, 0]], atol=1e-5)


def test_kinds_of_tokens_are_looked_up(tmp_path: Path) -> None:
    made, _ = export_classifiers(tmp_path)
    model = opened(stitched(made, tmp_path / "body.onnx", 0.0))
    rng = np.random.default_rng(0)
    feed = {name: rng.integers(0, most, (2, 9)) for name, most in (("tokens", 50), ("kinds", 2))}
    feed["shown"] = np.arange(9) < np.array([[9], [4]])
    check(model, [(path, feed | {"shown": feed["shown"].astype(np.int64)}) for path in made])


def test_adapters_beside_one_base_are_served_as_they_are_merged(tmp_path: Path) -> None:
    (base, _), (model, _) = export_classifiers(tmp_path)
    folders, models = [], []
    for at, modules in enumerate((["layers.0.query", "layers.1.outer"], ["layers.1.query", "layers.1.value"])):
        sizes = {"layers.1.outer": (64, 32)}
        parts = {k: v for each in modules for k, v in lora_factors(each, *sizes.get(each, (32, 32)), seed=at).items()}
        folders.append(write_adapter(tmp_path / f"adapter{at}", parts, target_modules=modules))
        models.append(merge_adapter(model, parts, 3.0))
    stitch_body(folders, base=base, measure=False).to_onnx(tmp_path / "body.onnx")
    found = opened(tmp_path / "body.onnx")
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
    feed = {"tokens": tokens, "shown": np.ones_like(tokens), "kinds": tokens % 2}
    for folder, right in zip(folders, models, strict=True):
        (made,) = found.launch(Step(0, [BatchPart({f"{folder.name}.{k}": v for k, v in feed.items()})], 2)).outputs
        with torch.no_grad():
            wanted = right(*map(torch.from_numpy, feed.values()))
        np.testing.assert_allclose(made.answers[f"{folder.name}.found"], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input_ids": np.full((1, 4), TOKENS)}, f"tokens from {TOKENS} to {TOKENS}: there are {TOKENS}"),
        ({"input_ids": np.full((1, 4), -1)}, "tokens from -1"),
        ({"attention_mask": np.array([[0, 1, 1, 1]])}, "attention_mask hides the first token"),
        ({"attention_mask": np.array([[1, 2, 1, 1]])}, "attention_mask must be of 0 and 1"),
        (
            {name: np.ones((1, 65), np.int64) for name in ("input_ids", "attention_mask")},
            "^a request of 65 tokens: 64 at most$",
        ),
    ],
)
def test_what_it_cannot_answer_is_refused(files: list[Path], file: Path, changes: Feed, why: str) -> None:
    model = opened(file)
    part = BatchPart({f"{files[1].stem}.{port}": each for port, each in (sentences(1, 4) | changes).items()})
    with pytest.raises(UnfitInputs, match=why):
        model.launch(Step(0, [part], 1))


# --- coming and going -------------------------------------------------------------------------------------------------


def test_it_is_learned_once(files: list[Path], file: Path, tmp_path: Path) -> None:
    learned = opened(file, cache=tmp_path)
    again = opened(file, cache=tmp_path, learn=False)
    assert (again.remarks, again.timing.times_s, again.batching.max_batch) == (
        learned.remarks,
        learned.timing.times_s,
        4,
    )
    check(again, [(files[2], sentences(2, 5)), (files[0], sentences(1, 8))])
    assert [each.name for each in tmp_path.rglob("*.*") if each.is_file()] == ["prepared.json"], "no weights"


def test_models_come_and_go_in_place(files: list[Path], file: Path, tmp_path: Path) -> None:
    device = Counting()
    first = opened(file, FOUR, device)
    captured = device.captured
    more = opened(stitched(files[:4], tmp_path / "more.onnx"), FOUR, device)
    assert more._body is first._body and device.captured == captured
    check(first, [(path, sentences(1, 6, at)) for at, path in enumerate(files[:3])])
    check(more, [(path, sentences(1, 6, at)) for at, path in enumerate(files[:4])])
    first.close()
    fewer = opened(stitched([files[0], files[3], files[2]], tmp_path / "fewer.onnx"), FOUR, device)
    assert fewer._body is more._body and set(fewer._slots) < set(more._slots)
    more.close()
    for turn in range(3):  # more than there ever was room for beside those
        others = opened(stitched([files[0], files[3], files[1]], tmp_path / f"{turn}.onnx"), FOUR, device)
        assert others._body is fewer._body
        check(others, [(files[1], sentences(1, 6)), (files[3], sentences(2, 4))])
        others.close()
    check(fewer, [(files[0], sentences(1, 6)), (files[2], sentences(2, 4)), (files[3], sentences(1, 9))])
    assert device.captured == captured


def test_what_is_there_already_is_not_learned(
    files: list[Path], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is asked first; what it could take over is in the cache for the next one."""
    device, more = Counting(), stitched(files[:4], tmp_path / "more.onnx")
    with pytest.raises(NotLearned):
        opened(more, FOUR, device, tmp_path / "cache", learn=False)
    first = opened(file, FOUR, device)
    with pytest.raises(NotLearned, match="no loaded body fits it"):
        opened(stitched(files[1:3], tmp_path / "others.onnx"), FOUR, device, learn=False)
    with monkeypatch.context() as patched, pytest.raises(NotLearned, match="no loaded body has room for it"):
        patched.setattr(body_serving, "check", None)  # nobody comes to compare it
        opened(more, LoadOptions(max_batch=8), device, learn=False)
    taken = opened(more, FOUR, device, tmp_path / "cache", learn=False)
    assert taken._body is first._body
    again = opened(more, FOUR, None, tmp_path / "cache", learn=False)
    assert again._body is not first._body and taken.remarks == (*again.remarks, IN_PLACE)
    check(again, [(files[3], sentences(1, 6))])


def test_bodies_may_come_while_one_is_looked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, come = Counting(), []

    class Meanwhile:
        """Another one is made, as by another thread, when this one is looked at."""

        @property
        def shared(self) -> bytes:
            come.append(DeviceBody(device, Meanwhile(), None))
            body_file.BODIES.add(come[-1])
            return b""

    monkeypatch.setattr(body_file, "BODIES", WeakSet([first := DeviceBody(device, Meanwhile(), None)]))
    with pytest.raises(NotLearned, match="no loaded body"):
        opened(file, FOUR, device, learn=False)
    assert come and first.device is device


def test_where_there_is_no_room_another_body_is_made(files: list[Path], file: Path, tmp_path: Path) -> None:
    device = Counting()
    first = opened(file, FOUR, device)
    full = [opened(stitched([files[0], each], tmp_path / f"{each.stem}.onnx"), FOUR, device) for each in files[3:]]
    assert full[0]._body is first._body, f"one of {LEAST_SPARE}"
    assert full[1]._body is not first._body, "more classes than its tables are wide"
    wider = opened(stitched(files, tmp_path / "all.onnx"), FOUR, device)
    assert wider._body not in (first._body, full[1]._body)
    check(wider, [(path, sentences(1, 6, at)) for at, path in enumerate(files)])
    check(first, [(path, sentences(1, 6, at)) for at, path in enumerate(files[:3])])


def test_a_line_that_was_written_in_part_is_written_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = read_encoder(read_body(file))
    told = digests(encoder)
    body = SlottedBody(encoder, told.shared, "cpu", torch.float32)
    slots = body.take(encoder, told.models)
    assert slots is not None
    body.give_back(slots)

    def fail(self: SlottedBody, encoder: Any, model: int, slot: int) -> None:
        body.weights.classifier.weight[slot] = 5
        raise RuntimeError

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(SlottedBody, "_write", fail)
        body.take(encoder, [b"another"])
    again = body.take(encoder, told.models)
    assert again is not None
    torch.testing.assert_close(body.weights.classifier.weight[list(again)], encoder.weights.classifier.weight)


@pytest.mark.parametrize("failing", ["difference", "EncoderModel"])
def test_lines_of_what_fails_are_given_back(
    files: list[Path], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """While it is learned, and while it is opened again."""
    device = Counting()
    first, more = opened(file, FOUR, device), stitched(files[:4], tmp_path / "more.onnx")
    opened(more, cache=tmp_path / "cache")
    before = list(first._body.slotted._users)

    def fail(*given: Any) -> None:
        raise MemoryError("CUDA out of memory")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(body_file, failing, fail)
        prepare_on(device, more, FOUR, None if failing == "difference" else tmp_path / "cache")
    assert first._body.slotted._users == before
    assert opened(more, FOUR, device)._body is first._body


def test_times_that_were_taken_in_part_are_taken_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, left = Counting(), [0.5]
    first = opened(file, FOUR, device)
    first._body.rung_s = {}

    def timed(run: Callable[[], None]) -> float:
        if not left:
            raise MemoryError("CUDA out of memory")
        return left.pop()

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(device, "timed", timed)
        opened(file, FOUR, device)
    assert opened(file, FOUR, device).timing.times_s == first.timing.times_s


@pytest.mark.parametrize("norm", ["embedding.norm", "layer0.attention.norm", "layer1.output.norm"])
def test_norms_that_differ_in_their_epsilon_are_not_taken_for_the_same(
    files: list[Path], file: Path, tmp_path: Path, norm: str
) -> None:
    device, others = Counting(), []
    for path in files[:3]:
        model = onnx.load(path)
        (node,) = [each for each in model.graph.node if each.name == norm]
        next(each for each in node.attribute if each.name == "epsilon").f = 0.01
        others.append(tmp_path / path.name)
        onnx.save(model, others[-1])
    first, second = opened(file, FOUR, device), opened(stitched(others, tmp_path / "others.onnx"), FOUR, device)
    assert first._body is not second._body
    check(second, [(path, sentences(1, 6)) for path in others])


def test_a_body_that_nobody_has_leaves(file: Path) -> None:
    model = opened(file)
    here = len(body_file.BODIES)
    model.close()
    gc.collect()
    assert len(body_file.BODIES) == here - 1


def test_tiles_that_were_found_are_kept_and_lent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing them takes a GPU; here it is made up."""
    tuned: list[int] = []

    def tune(body: FusedBody, tables: Any, dtype: Any) -> None:
        rows = len(tables.positions)
        tuned.append(rows)
        body.early, body.shapes = Early.LIGHT, {(32, 96, 16, rows, 16): TileShape(32, 32, 32, rows, before=True)}

    monkeypatch.setattr(kernel_shapes, "tune_body", tune)
    weights = read_encoder(read_body(file)).weights
    ladder = BodyLadder(weights, 4)

    def shaped(ladder: BodyLadder, rows: int, *, enough: bool) -> FusedBody:
        body, rung = FusedBody(weights), ladder.rung(rows, lambda run: run)
        ladder._set_tiles(body, rung.layout.views(rung.numbers).tables, lambda: enough)
        return body

    assert shaped(ladder, 64, enough=True).shapes, "the first is always looked for"
    lent = shaped(ladder, 128, enough=True)
    assert (lent.early, lent.shapes) == (Early.LIGHT, {(32, 96, 16, 128, 16): TileShape(32, 32, 32, 64, before=True)})
    shaped(ladder, 128, enough=False)
    again = shaped(BodyLadder(weights, 4, ladder.shapes), 128, enough=False)
    assert again.shapes[32, 96, 16, 128, 16].warps == 128 and tuned == [64, 128]


# --- what is left to ONNX Runtime -------------------------------------------------------------------------------------


def on_host(path: Path, options: LoadOptions = FOUR, cache: Path | None = None) -> str:
    """Why a file is run on the CPU."""
    found = prepare_on(Counting(), path, options, cache)
    assert isinstance(found, ModelOnHost)
    (said,) = [each for each in found.remarks if each.startswith("runs on the CPU: ")]
    assert "\n" not in said
    return said


def test_what_has_no_kernels_is_run_by_onnx_runtime(tmp_path: Path) -> None:
    own = tiny_encoders(tmp_path / "own", full=0.5)
    path = stitched(own, tmp_path / "own.onnx")
    assert "different weights at layer" in on_host(path)
    found = prepare_on(Counting(), path, FOUR)
    feed = sentences(2, 7)
    (made,) = found.launch(Step(0, [BatchPart({f"{own[1].stem}.{k}": v for k, v in feed.items()})], 2)).outputs
    np.testing.assert_allclose(made.answers[f"{own[1].stem}.logits"], answers(own[1], feed)["logits"], atol=1e-5)


def test_what_has_no_kernels_is_prepared_for_the_cpu_elsewhere_first(
    files: list[Path], file: Path, tmp_path: Path
) -> None:
    """Though a body is there that a worker could have taken over."""
    device, path = Counting(), stitched(tiny_encoders(tmp_path / "own", full=0.5), tmp_path / "own.onnx")
    first = opened(file, FOUR, device)
    with pytest.raises(NotLearned, match=r"measured for the CPU .* different weights at layer"):
        prepare_on(device, path, FOUR, tmp_path / "cache", learn=False)
    prepare_on(device, path, FOUR, tmp_path / "cache")
    assert isinstance(prepare_on(device, path, FOUR, tmp_path / "cache", learn=False), ModelOnHost)
    check(first, [(files[0], sentences(1, 6))])


@pytest.mark.parametrize(("change", "kind"), [(scaled_rows, "scale"), (other_columns, "columns")])
def test_heads_that_are_nearly_the_first_models_are_named(
    files: list[Path], tmp_path: Path, change: Any, kind: str
) -> None:
    near = changed_file(files[0], tmp_path / "near.onnx", 1, pooler__product=change)
    said = on_host(stitched([files[0], near], tmp_path / "body.onnx"))
    assert f"weights differ in {kind}, and not by a low rank, at pooler.product" in said


def test_models_with_exits_are_run_by_onnx_runtime(tmp_path: Path) -> None:
    leaving = [with_exit(path, 3, at) for at, path in enumerate(tiny_encoders(tmp_path))]
    assert "do not all have one output, of the same step" in on_host(stitched(leaving, tmp_path / "body.onnx"))


@pytest.mark.parametrize("reason", ["torch", "pip install 'weft[stitch]'", "bf16", "triton"])
def test_where_the_form_cannot_be_had_onnx_runtime_runs_it(
    file: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FOUR
    if reason == "torch":
        monkeypatch.delitem(sys.modules, "weft_stitch.on_device.body_file")
        monkeypatch.setitem(sys.modules, "torch", None)
    elif "pip" in reason:
        without_tools(monkeypatch)
    elif reason == "bf16":
        options = LoadOptions(precision="bf16")
    else:
        monkeypatch.setattr("weft_stitch.running.body_serving.find_spec", lambda name: None)
        monkeypatch.setattr(Counting, "kind", "cuda")
    assert reason in on_host(file, options)


def test_packages_that_come_and_go_are_seen_though_a_cache_was_filled_before(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version

    def without(package: str) -> str:
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError
        return installed(package)

    def lacking(path: Path, *, cuda: bool) -> None:
        raise StitchError("triton is not installed")

    monkeypatch.setattr(preparing, "version", lambda package: "3" if package == "triton" else installed(package))
    opened(file, cache=tmp_path)
    with monkeypatch.context() as gone:
        gone.setattr(preparing, "version", without)
        gone.setattr(body_serving, "read_file", lacking)
        assert "triton is not installed" in on_host(file, cache=tmp_path)
    opened(file, cache=tmp_path, learn=False)


def test_a_file_that_says_nothing_or_nonsense_is_run_by_onnx_runtime(file: Path, tmp_path: Path) -> None:
    for value, why in (
        ("", "does not say how"), ('{"version": 1, "steps": 5}', "its weft.body cannot be read: "),
        ('{"version":2,"names":[],"inputs":[],"outputs":[],"steps":[]}', "is of version 2, not 1"),
    ):  # fmt: skip
        model = onnx.load(file)
        next(each for each in model.metadata_props if each.key == BODY_KEY).value = value
        onnx.save(model, tmp_path / "odd.onnx")
        assert why in on_host(tmp_path / "odd.onnx")


def test_a_constant_that_is_not_there_is_named(file: Path, tmp_path: Path) -> None:
    model = onnx.load(file)
    note = next(each for each in model.metadata_props if each.key == BODY_KEY)
    note.value = note.value.replace('"constant_', '"lost_', 1)
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(StitchError, match=r"names the constant 'lost_\d+', which is not there"):
        read_body(tmp_path / "odd.onnx")


def test_answers_that_are_not_the_files_are_not_given(file: Path, tmp_path: Path) -> None:
    """What is told of the weights must be so."""
    model = onnx.load(file)
    held = {each.name: each for each in model.graph.initializer}
    note = next(each for each in model.metadata_props if each.key == BODY_KEY)
    first = next(name for name, each in held.items() if list(each.dims) == [32, 32])
    other = next(name for name, each in held.items() if list(each.dims) == [32, 32] and name != first)
    note.value = note.value.replace(f'"{first}"', f'"{other}"')
    onnx.save(model, tmp_path / "odd.onnx")
    assert "differs by" in on_host(tmp_path / "odd.onnx")
