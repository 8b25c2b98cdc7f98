"""Every way to run many models answers what they answer alone; the GPU benchmark runs, resumes and stops."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.stitching.families import pairs
from tests.stitching.graphs import assert_close, separately
from tests.stitching.nets import images, tiny
from weft.base.errors import StitchError
from weft_stitch.discovery import discover
from weft_stitch.family import part
from weft_stitch.reading.alignment import align
from weft_stitch.running.gpu_timing import Place, TimedWay, build, precision, prepare, times_ms

sys.path.append(str(ROOT / "benchmarks"))
import stitch_gpu
from stitch_ways import COMPILED, WAYS, by_batch, draw, error, make, reference

torch.set_num_threads(1)

SINGLE = Place("cpu", torch.float32)
PLAIN_WAYS = [way for way in WAYS if way not in (*COMPILED, "streams", "batch")]


def way_of(name, made, pictures, place=SINGLE, **options):
    graphs = draw(WAYS[name], align(made.nets), made.planted, place.align)
    inputs = [place.tensor(torch.from_numpy(each)) for each in pictures]
    return make(name, graphs, [place.module(graph) for graph in graphs], inputs, **options)


def answers(way):
    return [each.float().numpy() for each in way.run()]


@pytest.mark.parametrize("name", PLAIN_WAYS)
@pytest.mark.parametrize(("architecture", "channels_last"), [("tinynet", False), ("tiny-mobile", True)])
def test_a_way_equals_the_models(name, architecture, channels_last):
    made = tiny(architecture, widths=[1.0, 0.8, 1.2], batches=[2, 1, 2])
    pictures = images(made.nets)
    way = way_of(name, made, pictures, Place("cpu", torch.float32, channels_last))
    assert way.inputs[0].is_contiguous(memory_format=torch.channels_last) is channels_last
    assert_close(answers(way), separately(made.nets, pictures))


@pytest.mark.parametrize(("name", "dtype", "close"), [("vmap", torch.bfloat16, 0.03), ("compile", torch.float32, 1e-5)])
def test_a_compiled_way_equals_the_models(name, dtype, close):
    made = tiny(tasks=2, classes=4)
    pictures = images(made.nets)
    way = way_of(name, made, pictures, Place("cpu", dtype, channels_last=True), backend="eager")
    assert_close(answers(way), separately(made.nets, pictures), close)


def test_vmap_needs_equal_models():
    made = tiny(tasks=2, widths=[1.0, 0.8], classes=4)
    with pytest.raises(StitchError, match="the same sizes"):
        way_of("vmap", made, images(made.nets))


def test_a_way_that_is_not_there():
    with pytest.raises(StitchError, match=r"fusd.*fused"):
        make("fusd", [], [], [])


def test_only_what_is_called_eager_is_launched_anew():
    made = tiny(tasks=2)
    assert [name for name in PLAIN_WAYS if not way_of(name, made, images(made.nets)).captured] == [
        "eager",
        "grouped-eager",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are streams")
def test_streams_need_cuda():
    made = tiny(tasks=2)
    with pytest.raises(StitchError, match="CUDA"):
        way_of("streams", made, images(made.nets))


def test_tasks_of_one_batch_go_together():
    assert by_batch([2, 1, 2, 3]) == [[1], [0, 2], [3]]


def test_a_batch_is_all_rows_through_one_model():
    made = tiny(batches=[2, 1, 2])
    pictures = images(made.nets)
    wanted = separately([replace(made.nets[0], batch=5)], [np.concatenate(pictures)])
    assert_close(answers(way_of("batch", made, pictures)), wanted)


def test_weights_are_counted_as_they_lie():
    made = tiny(tasks=3)
    pictures = images(made.nets)
    kernels = sum(op.weight.size for net in made.nets for op in net.ops if op.weight is not None)
    assert way_of("eager", made, pictures).weight_bytes == 4 * kernels
    assert way_of("eager", made, pictures, Place("cpu", torch.bfloat16)).weight_bytes == 2 * kernels
    shared = [way_of(name, made, pictures).weight_bytes for name in ("split", "mts", "grouped")]
    assert shared[0] < shared[1] < shared[2] == 4 * kernels + 4 * _padding(made)


def _padding(made):
    """The classes differ, so that grouped classifiers are padded to the most."""
    widths = [net.outputs[0].shape[0] for net in made.nets]
    inputs = made.nets[0].ops[-2].weight.shape[1]
    return sum(max(widths) - width for width in widths) * inputs


def test_error_is_relative_and_nothing_is_less_than_not_a_number():
    want = [torch.tensor([1.0, -4.0]), torch.tensor([10.0])]
    assert error([torch.tensor([1.0, -3.0]), torch.tensor([10.0])], want) == 0.25
    assert error([torch.tensor([1.0, -4.0]), torch.tensor([float("nan")])], want) == float("inf")


def test_precision_is_put_back():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    with precision(tf32=not before[0], search=True):
        assert torch.backends.cuda.matmul.allow_tf32 is not before[0]
        assert torch.backends.cudnn.benchmark
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before


def test_runs_take_turns():
    said = []
    runs = {name: TimedWay(lambda name=name: said.append(name), (torch.zeros(1),), None, None, None) for name in "ab"}
    found = times_ms(runs, rounds=2, replays=3)
    assert "".join(said) == "ab" + 2 * "aaabbb"
    assert min(found.values()) >= 0


def test_modules_are_built_and_run_once():
    made = tiny(tasks=2)
    graphs = draw("separate", align(made.nets), made.planted)
    pictures = [torch.from_numpy(each) for each in images(made.nets)]
    built = build(graphs, [[each] for each in pictures], SINGLE)
    run = prepare(make("sequential", graphs, built.modules, pictures))
    wanted = [reference(graph, each, "cpu") for graph, each in zip(graphs, pictures, strict=True)]
    assert error(run.outputs, wanted) == 0


def stock(*, net="tinynet", tasks=4, **given):
    return stitch_gpu.Stock(stitch_gpu.Configuration(net, tasks, 0.4, **given), "cpu")


@pytest.mark.parametrize("mixed", ["", "widths", "batches"])
def test_what_the_first_tasks_share_is_what_discovery_finds(mixed):
    stocked = stock(mixed=mixed)
    family, sharing = part(stocked.family, stocked.planted, range(3))
    assert pairs(sharing) == pairs(discover(family))


def test_the_fully_connected_layers_share_what_they_say():
    made = stitch_gpu.fully_connected(3, 0.9, width=20)
    assert pairs(made.planted) == pairs(discover(align(made.nets)))
    pictures = images(made.nets)
    assert_close(answers(way_of("mts", made, pictures)), separately(made.nets, pictures))


def test_graphs_are_drawn_once_and_dropped_when_nobody_takes_them():
    shelf = stitch_gpu.Shelf("cpu")
    large, small = (stitch_gpu.Configuration("tinynet", tasks, 0.4, ways=("mts",)) for tasks in (3, 2))
    half = replace(small, dtype="float16")
    stocked = shelf.take(small, [large, half])
    assert len(stocked.nets) == 3
    stocked.draw(2, ["mts", "fused"], 4)
    first = stocked.graphs[2, "mts", 1]
    stocked.draw(2, ["mts", "fused"], 2)
    assert stocked.graphs[2, "mts", 1] is first
    assert stocked.graphs[2, "fused", 4] is not stocked.graphs[2, "fused", 8]
    shelf.clear([large])
    assert not stocked.graphs and shelf.take(large, []) is stocked
    shelf.clear([])
    assert not shelf.stocks


def benchmark(monkeypatch, path, *arguments):
    given = ["--set", "tiny", "--device", "cpu", "--out", str(path), "--rounds", "1", "--replays", "1", *arguments]
    monkeypatch.setattr(sys, "argv", ["stitch_gpu.py", *given])
    stitch_gpu.main()
    return json.loads(path.read_text())


def test_the_benchmark_measures_writes_and_resumes(monkeypatch, tmp_path, capsys):
    path = tmp_path / "results.json"
    once = benchmark(monkeypatch, path, "--only", "tinynet", "--tasks", "4")
    rows = {row["way"]: row for row in once["rows"]}
    assert list(rows) == list(stitch_gpu.PAPER_WAYS)
    assert rows["fused"]["batches"] == [1, 2, 3, 1] and rows["fused"]["widths"] is None
    for name, row in rows.items():
        if name == "streams" and not torch.cuda.is_available():
            assert row["ms"] is None and "CUDA" in row["note"]
        else:
            assert row["ms"] > 0 and row["note"] is None
            assert row["error"] <= stitch_gpu.EXACT and row["exact_error"] <= stitch_gpu.EXACT
    assert rows["split"]["weight_bytes"] < rows["grouped"]["weight_bytes"]
    assert once["settings"]["tf32"] and once["versions"]["torch"] == torch.__version__
    capsys.readouterr()
    assert benchmark(monkeypatch, path, "--only", "tinynet", "--tasks", "4", "--resume") == once
    assert capsys.readouterr().out == ""
    more = benchmark(monkeypatch, path, "--only", "tiny-mobile", "--ways", "mts")
    assert more["rows"][:-1] == once["rows"] and more["rows"][-1]["net"] == "tiny-mobile"
    again = benchmark(monkeypatch, path, "--only", "tiny-mobile", "--ways", "mts")
    assert len(again["rows"]) == len(more["rows"])


def test_the_benchmark_starts_nothing_it_has_no_time_for(monkeypatch, tmp_path, capsys):
    with pytest.raises(FileNotFoundError):
        benchmark(monkeypatch, tmp_path / "none.json", "--budget-s", "0")
    assert capsys.readouterr().out.count("left out") == len(stitch_gpu.TINY)


def test_what_a_configuration_takes_is_expected_from_its_like():
    clock = stitch_gpu.Clock(100.0)
    small, large = (stitch_gpu.Configuration("resnet50", tasks) for tasks in (8, 32))
    clock.note(large, 120.0)
    assert clock.fits(small) and not clock.fits(large)


def test_the_paper_measures_the_targets_first():
    every = stitch_gpu.SETS["paper"]
    assert every[: len(stitch_gpu.TARGETS)] == stitch_gpu.TARGETS
    assert len(set(every)) == len(every)
    assert {each.net for each in every} == {"resnet18", "resnet50", "vgg16", "fc"}


def test_the_benchmark_needs_only_numpy_and_torch():
    """On a machine with a GPU and without weft's other requirements."""
    missing = ("pydantic", "numba", "typer", "rich", "onnxruntime", "onnx")
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.path = [each for each in sys.path if not each.endswith("src")]
sys.path.append({str(ROOT / "benchmarks")!r})
runpy.run_path({stitch_gpu.__file__!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
