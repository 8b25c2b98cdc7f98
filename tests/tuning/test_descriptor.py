"""Network descriptors: read, written, joined with what a model says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import TuneError
from weft_tune.network import Network, Target
from weft_tune.subject import (
    DescribedLayer,
    Descriptor,
    as_toml,
    descriptor_of,
    load_descriptor,
    network_of,
    parse_descriptor,
)

LENET = """
name = "lenet"
platform = "fpga"
margin = 0.01
layerwise = "WGT-ONLY"
small = "python eval.py --few {config}"
full = "python eval.py {config}"
score = 'Accuracy: (.*)\\n'

[[layer]]
name = "conv1"
weights = 500
inputs = 784
weight_max = 0.579
input_max = 0.996

[[layer]]
name = "conv2"
weights = 25000
inputs = 2880
weight_max = 0.165
input_max = 5.06
macs = 1600000
"""
FOUND = Network("model", (Target("a", 10, 5, 0.5, 2, 100), Target("b", 20, 6, 0.7, 1, 200), Target("c", 1, 1, 1, 1, 1)))


def write(folder: Path, text: str) -> Path:
    path = folder / "net.toml"
    path.write_text(text, "utf-8")
    return path


def test_the_chapters_example(tmp_path: Path):
    descriptor = load_descriptor(write(tmp_path, LENET))
    assert (descriptor.margin, descriptor.layerwise, descriptor.score) == (0.01, "WGT-ONLY", r"Accuracy: (.*)\n")
    net = network_of(descriptor)
    assert net.targets[1] == Target("conv2", 25000, 2880, 0.165, 5.06, 1600000)
    assert net.targets[0].macs == 0


words = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)
sizes = st.none() | st.floats(0, 1e30)
counts = st.none() | st.integers(0, 10**12)
layers = st.builds(
    DescribedLayer, name=words, weights=counts, inputs=counts, weight_max=sizes, input_max=sizes, macs=counts,
    branches=st.lists(words, max_size=2).map(tuple),
)  # fmt: skip
descriptors = st.builds(
    Descriptor, name=words, platform=words, margin=st.floats(0, 0.99), objective=words, small=st.text(max_size=20),
    full=st.text(max_size=20), score=st.text(max_size=20), layer=st.lists(layers, max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=30)
@given(descriptors)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, descriptor: Descriptor):
    path = write(tmp_path_factory.mktemp("descriptor"), "")
    path.write_bytes(as_toml(descriptor).encode())
    assert load_descriptor(path) == descriptor


def test_a_network_becomes_a_descriptor_and_back():
    descriptor = descriptor_of(FOUND, margin=0.05, full="eval {config}")
    assert network_of(parse_descriptor(descriptor.model_dump(), "x")) == FOUND
    assert descriptor.margin == 0.05


def test_a_model_gives_what_the_file_leaves_out():
    raw = {
        "name": "mine",
        "layer": [{"name": "ab", "branches": ["a", "b"], "input_max": 9.0}, {"name": "c", "weights": 7}],
    }
    net = network_of(parse_descriptor(raw, "x"), FOUND)
    assert net == Network("mine", (Target("ab", 30, 11, 0.7, 9.0, 300, ("a", "b")), Target("c", 7, 1, 1, 1, 1)))
    assert network_of(parse_descriptor({"name": "all"}, "x"), FOUND) == Network("all", FOUND.targets)


def test_branches_may_be_groups_of_the_model():
    found = Network("net", (Target("ab", 2, 2, 1.0, 1.0, branches=("a", "b")), Target("c", 1, 1, 2.0, 1.0)))
    described = parse_descriptor({"name": "net", "layer": [{"name": "all", "branches": ["ab", "c"]}]}, "test")
    (target,) = network_of(described, found).targets
    assert (target.layers, target.weights, target.weight_max) == (("a", "b", "c"), 3, 2.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "name is missing"),
        ({"name": "x", "layers": []}, "unknown key 'layers'; did you mean 'layer'"),
        ({"name": "x", "margin": 1.0}, "margin = 1.0: Input should be less than 1"),
        ({"name": "x", "margin": "0.1"}, "margin = '0.1'"),
        ({"name": "x", "layerwise": "WEIGHTS"}, "layerwise = 'WEIGHTS'"),
        ({"name": "x", "layer": [{"name": "a", "weight": 3}]}, "unknown key 'layer.0.weight'; did you mean 'weights'"),
        ({"name": "x", "layer": [{"name": "a", "weights": -3}]}, "layer.0.weights = -3"),
        ({"name": "x", "layer": [{"name": "a", "weight_max": float("inf")}]}, "layer.0.weight_max = inf"),
        ({"name": "a\nb"}, "must be printable"),
    ],
)
def test_what_is_wrong_is_named(raw, message):
    with pytest.raises(TuneError, match=message):
        parse_descriptor(raw, "net.toml")


@pytest.mark.parametrize("name", ["fc 1", "fc#1", "a//b", "a\tb", ""])
def test_a_layer_that_a_file_of_formats_could_not_name_is_refused(name: str):
    with pytest.raises(TuneError, match="a name must have no blank, # or //"):
        Target(name, 1, 1, 1.0, 1.0)
    with pytest.raises(TuneError, match="a name must have no blank"):
        Target("all", 1, 1, 1.0, 1.0, branches=("fc1", name))
    assert Target("both of them", 1, 1, 1.0, 1.0, branches=("fc1", "fc2")).layers == ("fc1", "fc2")


def test_a_group_may_be_called_like_one_of_its_own_layers_only():
    joined = Target("a", 1, 1, 1.0, 1.0, branches=("a", "b"))
    assert Network("net", (joined, Target("c", 1, 1, 1.0, 1.0))).targets[0] is joined
    with pytest.raises(TuneError, match="'c' is a layer already; call the group something else"):
        Network("net", (Target("c", 1, 1, 1.0, 1.0, branches=("a", "b")), Target("c", 1, 1, 1.0, 1.0)))


def test_layers_without_sizes_need_a_model():
    raw = {"name": "x", "layer": [{"name": "a", "weights": 1, "inputs": 1, "weight_max": 1.0}]}
    with pytest.raises(TuneError, match="layer 'a': input_max is missing"):
        network_of(parse_descriptor(raw, "x"))
    with pytest.raises(TuneError, match="unknown layer 'aa'; did you mean a"):
        network_of(parse_descriptor({"name": "x", "layer": [{"name": "aa"}]}, "x"), FOUND)
    with pytest.raises(TuneError, match="no layer to tune"):
        network_of(parse_descriptor({"name": "x"}, "x"))


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(TuneError, match="cannot read the descriptor"):
        load_descriptor(tmp_path / "none.toml")
    with pytest.raises(TuneError, match="not a TOML file"):
        load_descriptor(write(tmp_path, "name = "))
