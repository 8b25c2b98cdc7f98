"""Every tool takes the others' output: two tiny classifiers, one fine-tuned from the other, go from tool to tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import typer
from onnx import helper, numpy_helper

import weft
from tests.serving.live import running
from tests.support.commands import CommandResult, run
from weft.devices import Host, HostModel, load_npu, load_soc
from weft.devices.costs.layer_costs import estimate, read_profile
from weft.models.onnx_import import import_onnx
from weft.models.onnx_import.widths import Widths, noted
from weft.models.sources import load_model, load_models
from weft.planning.survey import Subject, survey
from weft.planning.survey.measure import with_stitched
from weft.serving.repository import Repository
from weft_map.estimate import estimate as mapping_estimate
from weft_map.memory_contention import host_soc
from weft_map.pccs_fit import calibration_as_dict, fit_matrix, sample_matrix
from weft_stitch.advice import ALONE, TOGETHER, Advice, ServedTimes, advise
from weft_stitch.cost import encode, store_codes
from weft_stitch.graph import Builder
from weft_stitch.onnx_writer import to_onnx
from weft_tune.export import write_export
from weft_tune.hardware import network_of
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED

NAMES = ("cats", "dogs")
INPUTS, HIDDEN, CLASSES, SAMPLES = 16, 96, 3, 48
WORKLOAD = """
device = "tpuv3-like"
duration_s = 0.02
warmup_s = 0.0
[[stream]]
model = "pets.onnx/cats"
rate = 2000
deadline_ms = 5
[[stream]]
model = "pets.onnx/dogs"
rate = 2000
deadline_ms = 5
"""


Command = Callable[..., CommandResult]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def classifier(seed: int) -> onnx.ModelProto:
    """Two layers that all of them have, and a head of its own."""
    weights = {
        "first.weight": drawn(1, HIDDEN, INPUTS),
        "first.bias": drawn(2, HIDDEN),
        "second.weight": drawn(3, HIDDEN, HIDDEN),
        "head.weight": drawn(seed, CLASSES, HIDDEN),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["a"], "first", transB=1),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Gemm", ["b", "second.weight"], ["c"], "second", transB=1),
        helper.make_node("Relu", ["c"], ["d"], "relu2"),
        helper.make_node("Gemm", ["d", "head.weight"], ["y"], "head", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", INPUTS])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def answers(path: Path, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, feed), strict=True))


def samples(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((SAMPLES, INPUTS)).astype(np.float32)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both classifiers and their samples, tuned (to the formats found for one of them) and stitched."""
    folder = tmp_path_factory.mktemp("shop")
    for seed, name in enumerate(NAMES, 7):
        onnx.save(classifier(seed), folder / f"{name}.onnx")
        x = samples(seed)
        np.savez(folder / f"{name}.npz", x=x, label=answers(folder / f"{name}.onnx", {"x": x})["y"].argmax(1))
    found = weft.tune(
        folder / "cats.onnx", data=folder / "cats.npz", margin=0.1, output=folder / "cats-tuned", platform="int8",
        layerwise="NONE", device="tpuv3-like", workers=1,
    ).tuning  # fmt: skip
    (folder / "dogs-tuned").mkdir()
    write_export(folder / "dogs-tuned/dogs.onnx", folder / "dogs.onnx", found.network, found.configuration)
    plain = {"dynamic": True, "measure": False, "slabs": False, "form": "split"}
    weft.stitch([folder / f"{name}.onnx" for name in NAMES], **plain).to_onnx(folder / "pets.onnx")
    tuned = [folder / f"{name}-tuned/{name}.onnx" for name in NAMES]
    weft.stitch(tuned, **plain).to_onnx(folder / "tuned-pets.onnx")
    (folder / "load.toml").write_text(WORKLOAD, encoding="utf-8")
    matrix = sample_matrix()
    fit = fit_matrix(matrix)
    calibration = calibration_as_dict(matrix, fit, host_soc(matrix, fit, instances=2, peak_tflops=0.1))
    (folder / "memory.json").write_text(json.dumps(calibration), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """Each call of the command line builds the options of all commands anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def command(shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs weft in the folder."""
    monkeypatch.chdir(shop)
    return partial(run, capsys)


TAKEN = {
    "tune -> profile": ("profile cats-tuned/cats.onnx", "cats on tpuv3-like"),
    "tune -> simulate": ("simulate -m cats-tuned/cats.onnx,dogs-tuned/dogs.onnx -n 3", "dogs"),
    "tune -> compare": ("compare -m cats-tuned/cats.onnx,dogs.onnx -n 3 -p fifo,weft", "cats + dogs on tpuv3-like"),
    "its profile -> simulate": ("simulate --profile cats-tuned/profile.json -d tpuv3-like -n 3", "cats"),
    "stitch -> profile": ("profile pets.onnx", "dogs on tpuv3-like"),
    "tune -> stitch -> profile": ("profile tuned-pets.onnx/dogs", "dogs on tpuv3-like"),
    "stitch -> compare": ("compare -m pets.onnx -n 3 -p fifo,weft", "cats + dogs on tpuv3-like"),
    "stitch -> simulate": ("simulate -w load.toml -p fifo", "pets.onnx/dogs"),
    "stitch -> sustain": ("sustain load.toml -p fifo --tolerance 0.5 --seeds 1 -j 1", "pets.onnx/cats"),
    "calibrate -> devices": ("devices show memory.json", 'kind = "soc"'),
    "calibrate -> calibrate": ("map calibrate --matrix memory.json", "PCCS parameters"),
}
"""Arrow -> a command that takes what the tool before it wrote, and what it says."""

REFUSED = {
    "stitch -> tune": ("tune pets.onnx --data cats.npz", "stitched of cats, dogs, and one score cannot speak for all"),
    "stitch -> stitch": ("stitch pets.onnx cats.onnx -o again.onnx", "is a stitched file of cats, dogs"),
    "calibrate -> simulate": ("simulate -m cats.onnx -d memory.json", "weft map --soc memory.json takes it"),
    "calibrate -> workload": ("simulate -w load.toml -d memory.json", "a calibration of the memory"),
    "stitch -> profile of a stranger": ("profile pets.onnx/cows", "unknown model in it 'cows'"),
    "a model -> one in it": ("profile cats.onnx/cows", "is not stitched, and holds no cows"),
    "tune -> tune": (
        "tune cats-tuned/cats.onnx --data cats.npz",
        "was tuned already; tune the model that it was made of",
    ),
    "tune over its source": ("tune cats.onnx --data cats.npz -o .", "would be written over"),
    "host file that is none -> map": ("map --soc cats-tuned/profile.json -m cats.onnx", "no calibration"),
}
"""The same for what makes no sense: one line, and what to do instead."""


@pytest.mark.parametrize("arrow", TAKEN)
def test_a_tool_takes_what_another_wrote(arrow: str, command: Command) -> None:
    line, said = TAKEN[arrow]
    code, out, error = command(*line.split())
    assert code == 0, error
    assert said in out


@pytest.mark.parametrize("arrow", REFUSED)
def test_what_makes_no_sense_is_one_line_with_a_way_out(arrow: str, command: Command) -> None:
    line, said = REFUSED[arrow]
    code, _, error = command(*line.split())
    (told,) = error.splitlines()
    assert code == 2 and said in told


def test_a_stream_of_a_stitched_file_says_which_model_it_asks_for(command: Command, shop: Path) -> None:
    (shop / "streams.toml").write_text(WORKLOAD.replace("pets.onnx/cats", "pets.onnx"), encoding="utf-8")
    code, _, error = command("simulate", "-w", "streams.toml")
    assert code == 2 and "pets.onnx holds cats, dogs; say which" in error


def test_a_tuned_file_is_priced_by_the_bits_of_its_formats(shop: Path) -> None:
    npu, own = load_npu("tpuv3-like"), read_profile(shop / "cats-tuned/profile.json")
    tuned, source = (load_model(str(shop / where)) for where in ("cats-tuned/cats.onnx", "cats.onnx"))
    assert estimate(tuned, npu).layers == own.layers
    assert all(layer.weight_bits <= 8 for layer in tuned.layers)
    assert own.weight_bytes * 2 <= estimate(source, npu).weight_bytes
    assert tuned.weights == source.weights and tuned.parameters >= tuned.weights


def test_what_is_noted_of_a_node_that_is_not_there_changes_nothing() -> None:
    model = classifier(7)
    plain = import_onnx(model)
    helper.set_model_props(model, noted({"gone": Widths(2, 2)}, {}))
    assert import_onnx(model).layers == plain.layers


@pytest.mark.parametrize(
    "note", ['{"first": 3}', '{"first": [0, 8]}', '{"first": [3, 8, 9]}', "[]", "{", '{"first": ["a", 8]}']
)
def test_notes_that_make_no_sense_are_refused(note: str) -> None:
    model = classifier(7)
    helper.set_model_props(model, {"weft.widths": note})
    with pytest.raises(weft.ModelError, match=r"weft\.widths .*tune it again"):
        import_onnx(model)


def test_tuned_files_keep_their_names_and_are_served_under_them(shop: Path, tmp_path: Path) -> None:
    found = Repository([shop / f"{name}-tuned/{name}.onnx" for name in NAMES], tmp_path)
    assert found.names() == list(NAMES) and not found.problems
    assert Repository([shop / "cats-tuned"], tmp_path).names() == ["cats"]
    assert Repository([shop / "tuned-pets.onnx"], tmp_path).names() == list(NAMES)


def test_tuned_models_are_stitched_without_losing_their_formats(shop: Path) -> None:
    feed = {f"{name}.x": samples(3) for name in NAMES}
    found = answers(shop / "tuned-pets.onnx", feed)
    for name in NAMES:
        (wanted,) = answers(shop / f"{name}-tuned/{name}.onnx", {"x": samples(3)}).values()
        np.testing.assert_array_equal(found[f"{name}.y"].argmax(1), wanted.argmax(1))
        np.testing.assert_allclose(found[f"{name}.y"], wanted, atol=0.1 * np.abs(wanted).max())
    sizes = [(shop / f"{name}-tuned/{name}.onnx").stat().st_size for name in NAMES]
    assert (shop / "tuned-pets.onnx").stat().st_size <= sum(sizes) < (shop / "pets.onnx").stat().st_size


def rounds(path: Path) -> int:
    return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


def test_what_tuned_models_round_alike_is_rounded_once_in_the_stitched_file(shop: Path) -> None:
    of_one = rounds(shop / "cats-tuned/cats.onnx")
    assert rounds(shop / "tuned-pets.onnx") == of_one + 1, "what comes in is each model's own"


def test_models_that_round_differently_each_keep_their_own(shop: Path, tmp_path: Path) -> None:
    network = network_of(import_onnx(shop / "dogs.onnx"))
    forms = {f"{target.name}.input": FIXED(6, 2) for target in network.targets}
    write_export(tmp_path / "dogs.onnx", shop / "dogs.onnx", network, Configuration(forms))
    both = weft.stitch([shop / "cats-tuned/cats.onnx", tmp_path / "dogs.onnx"], measure=False, form="split")
    both.to_onnx(tmp_path / "both.onnx")
    found = answers(tmp_path / "both.onnx", {f"{name}.x": samples(3)[:1] for name in NAMES})
    for name, path in zip(NAMES, (shop / "cats-tuned/cats.onnx", tmp_path / "dogs.onnx"), strict=True):
        (wanted,) = answers(path, {"x": samples(3)[:1]}).values()
        np.testing.assert_allclose(found[f"{name}.y"], wanted, atol=0.1 * np.abs(wanted).max())


def test_files_of_an_older_weft_and_for_other_tools_are_refused_in_one_line(shop: Path, tmp_path: Path) -> None:
    model = onnx.load(shop / "cats-tuned/cats.onnx")
    kept = {entry.key: entry.value for entry in model.metadata_props if entry.key != "weft.rounded"}
    del model.metadata_props[:]
    helper.set_model_props(model, kept)
    with pytest.raises(weft.StitchError, match="tuned by an older weft"):
        weft.stitch([model, model], names=NAMES)
    network = network_of(import_onnx(shop / "dogs.onnx"))
    forms = Configuration({f"{target.name}.input": FIXED(6, 2) for target in network.targets})
    write_export(tmp_path / "dogs.onnx", shop / "dogs.onnx", network, forms, "qonnx")
    with pytest.raises(weft.StitchError, match="IntQuant, which ONNX Runtime does not know; tune it with --export qdq"):
        weft.stitch([tmp_path / "dogs.onnx"] * 2, names=NAMES)


def test_a_request_for_one_of_the_models_is_priced_by_what_it_computes(shop: Path) -> None:
    for path in ("pets.onnx", "tuned-pets.onnx"):
        models = load_models(str(shop / path))
        assert [model.name for model in models] == list(NAMES)
        for model in models:
            assert model.macs == load_model(str(shop / f"{model.name}.onnx")).macs
            assert model.macs < load_model(str(shop / path)).macs
    bytes_of = {path: load_models(str(shop / path))[0].weight_bytes for path in ("pets.onnx", "tuned-pets.onnx")}
    assert bytes_of["tuned-pets.onnx"] * 2 <= bytes_of["pets.onnx"]


def test_a_model_that_is_one_is_loaded_as_one(shop: Path) -> None:
    assert [model.name for model in load_models(str(shop / "cats.onnx"))] == ["cats"]
    assert [model.name for model in load_models("resnet50")] == ["resnet50"]


def test_a_calibration_is_the_device_that_was_fitted(shop: Path) -> None:
    matrix = sample_matrix()
    soc = load_soc(str(shop / "memory.json"))
    assert soc.units[0].contention == fit_matrix(matrix).model and soc.units[0].instances == 2
    groups = mapping_estimate(load_model(str(shop / "cats.onnx")), soc)
    assert len(groups.groups) > 0


@pytest.mark.parametrize("count", [2, 3, 5, 16, 17, 200, 256, 500, 1000])
def test_few_different_numbers_are_stored_in_few_bits_and_come_back(count: int) -> None:
    different = np.linspace(-1, 1, count, dtype=np.float32)
    others = np.random.default_rng(count).choice(different, 100 * 67 - count)
    array = np.concatenate([different, others]).reshape(100, 67)
    codes = encode(array)
    assert codes is not None and codes.bits == max(1, (count - 1).bit_length())
    builder = Builder("net")
    builder.tuned = True
    x = builder.input("x", (1, 67))
    made = builder.add("Gemm", x, builder.constant(array, "weight", weight=True), shape=(1, 100), transB=1)
    builder.output(made, "y")
    graph = builder.finish()
    proto = to_onnx(store_codes(graph, {"weight_1": codes}))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    one = np.eye(67, dtype=np.float32)[:1]
    np.testing.assert_array_equal(session.run(None, {"x": one})[0], array[:, :1].T)


def test_arrays_that_codes_would_not_make_smaller_stay() -> None:
    assert encode(np.arange(4096, dtype=np.float32)) is None
    assert encode(np.zeros(64, np.float32)) is None
    assert encode(np.zeros(4096, np.float64)) is None


def advice(alone: float, together: float, *, smaller: bool = False) -> Advice:
    cases = (ServedTimes(ALONE, 1, alone, 1.0), ServedTimes(TOGETHER, 4, together, 1.0))
    return Advice(cases, 100, 200 if smaller else 100)


@pytest.mark.parametrize(
    ("found", "serve"),
    [
        (advice(1.0, 1.2), "stitched"),
        (advice(0.4, 0.5), "apart"),
        (advice(0.5, 1.0), "apart"),
        (advice(0.5, 1.5), "either"),
        (advice(1.0, 1.0), "either"),
        (advice(0.99, 1.01, smaller=True), "stitched"),
    ],
)
def test_stitching_advises_against_itself_where_the_models_apart_are_faster(found: Advice, serve: str) -> None:
    assert found.serve == serve == found.as_dict()["serve"]
    assert "\n" not in found.line and ("serve the models apart instead" in found.line) == (serve == "apart")


def test_both_ways_are_run_as_a_server_would(shop: Path) -> None:
    ticks = iter(range(10_000))
    told: list[tuple[int, int]] = []
    sources = {name: shop / f"{name}.onnx" for name in NAMES}
    found = advise(
        shop / "pets.onnx", sources, batches=(1, 3), on_case=lambda *each: told.append(each),
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert [(each.arrival, each.rows) for each in found.cases] == [(ALONE, 1), (TOGETHER, 1), (TOGETHER, 3)]
    assert told == [(0, 3), (1, 3), (2, 3)] and all(each.gain == 1 for each in found.cases)
    with pytest.raises(weft.StitchError, match="holds dogs, whose own file is not known"):
        advise(shop / "pets.onnx", {"cats": shop / "cats.onnx"})
    with pytest.raises(weft.StitchError, match="is not stitched"):
        advise(shop / "cats.onnx", sources)


def test_models_go_through_all_tools(shop: Path, command: Command, tmp_path: Path) -> None:
    stitched = "stitch cats-tuned/cats.onnx dogs-tuned/dogs.onnx -o all.onnx --dynamic --form split --json all.json"
    code, out, error = command(*stitched.split())
    assert code == 0, error
    assert "times the speed of the models apart" in out
    report = json.loads((shop / "all.json").read_text("utf-8"))
    assert report["served"][0]["stitched_bytes"] == (shop / "all.onnx").stat().st_size
    assert report["total"]["stitched"]["weight_bytes"] <= report["total"]["sequential"]["weight_bytes"]
    assert command("profile", "all.onnx", "-o", str(tmp_path / "p.json")).code == 0
    written = [f"--profile={tmp_path}/p.{name}.json" for name in NAMES]
    assert "cats + dogs" in command("compare", *written, "-n", "3", "-p", "fifo,weft", "-d", "tpuv3-like").out
    with running(shop / "all.onnx") as live:
        streams = [f"--stream={name}:rate=40,deadline=60000,samples={name}.npz" for name in NAMES]
        sent = "--duration 0.5 --warmup 0 --save-latencies --json bench.json"
        code, out, error = command("bench", "--url", live.url, *streams, *sent.split())
    assert code == 0, error
    bench = json.loads((shop / "bench.json").read_text("utf-8"))
    threshold = json.loads((shop / "cats-tuned/tuning.json").read_text("utf-8"))["score"]["threshold"]
    for stream in bench["streams"]:
        assert stream["answered"] == stream["scheduled"] > 0
        assert stream["accuracy"] >= threshold - 0.2, "of a few samples"
    assert "simulated under" in command("simulate", "--bench", "bench.json").out


def test_models_that_were_stitched_have_the_times_of_their_body() -> None:
    measured = HostModel(segments=("all",), times_s={1: (0.002,)}, loses={"cats": 0.1, "fish": 0.2})
    alone = HostModel(segments=("all",), times_s={1: (0.001,)}, loses={"cats": 0.3, "fish": 0.4})
    host = Host(source="", cores=2, lanes=2, threads=1, models={"cats": measured, "fish": alone})
    found = with_stitched(host, {"cats": "cats", "dogs": "cats", "fish": "fish"})
    assert found.models["dogs"].times_s == measured.times_s
    assert found.models["dogs"].loses == {"cats": 0.1, "dogs": 0.1, "fish": 0.2}
    assert found.models["fish"].loses == {"cats": 0.3, "dogs": 0.3, "fish": 0.4}


def test_a_stitched_file_is_not_measured_as_if_it_were_one_model(shop: Path) -> None:
    with pytest.raises(weft.InputError, match="holds cats, dogs; say which of them is asked for"):
        survey([Subject(str(shop / "pets.onnx"))], lanes=1)
