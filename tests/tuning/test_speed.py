"""How fast tuned layers would be on bit-serial hardware and on an FPGA, worked out by hand."""

from __future__ import annotations

import pytest

from weft.base.errors import TuneError
from weft.models.classifiers import model_path
from weft.models.onnx_import import import_onnx
from weft.models.sources import load_model
from weft_tune.hardware import (
    SPEED_MODELS,
    LayerWork,
    bit_serial,
    bit_serial_ideal,
    network_of,
    node_names,
    places,
    word_packing,
    work_of,
)
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED

WIDE = LayerWork("wide", windows=64, channels=32, kernel=9, filters=256, groups=1, convolution=True)
SLIM = LayerWork("slim", windows=24 * 24, channels=1, kernel=25, filters=20, groups=1, convolution=True)
DENSE = LayerWork("dense", windows=1, channels=800, kernel=1, filters=500, groups=1, convolution=False)


def inputs(**bits):
    return Configuration({f"{name}.input": FIXED(width) for name, width in bits.items()})


def test_ideally_p_bits_take_p_sixteenths_of_the_time():
    found = bit_serial_ideal([WIDE, DENSE], inputs(wide=4, dense=8))
    assert found.layers == {"wide": 4.0, "dense": 2.0}
    assert found.network == pytest.approx((WIDE.macs + DENSE.macs) / (WIDE.macs / 4 + DENSE.macs / 2))


def test_wider_than_16_bits_is_the_baseline():
    assert bit_serial_ideal([WIDE], Configuration({})).network == 1.0


def test_a_full_array_reaches_the_ideal():
    assert bit_serial([WIDE], inputs(wide=4)).network == 4.0


def test_windows_that_do_not_fill_the_columns_are_lost():
    partly = LayerWork("wide", windows=17, channels=16, kernel=1, filters=16, groups=1, convolution=True)
    assert bit_serial([partly], inputs(wide=4)).network == 17 / (2 * 4)
    assert bit_serial([partly], inputs(wide=16)).network == 17 / 32  # slower than bit-parallel


def test_a_fully_connected_layer_gains_nothing():
    bricks = 800 // 16 * 2  # 500 filters are two sets of 256
    assert bit_serial([DENSE], inputs(dense=2)).network == bricks / (bricks + 1)


def test_a_word_holds_as_many_products_as_its_wider_operand_fits():
    configuration = Configuration({"wide.weight": EXP(4), "wide.input": FIXED(7), "slim.weight": FIXED(8)})
    found = word_packing([WIDE, SLIM], configuration)
    assert found.layers == {"wide": 4.0, "slim": 1.0}
    assert word_packing([WIDE], Configuration({"wide.weight": FIXED(8), "wide.input": FIXED(8)})).network == 4.0


def test_every_estimate_says_what_it_is():
    assert [model([WIDE], inputs(wide=4)).model for model in SPEED_MODELS.values()] == [
        "bit-serial (ideal)",
        "bit-serial (structural)",
        "word packing (proxy)",
    ]
    with pytest.raises(TuneError, match="no layers"):
        bit_serial([], Configuration({}))


def test_geometry_comes_from_the_model():
    model = import_onnx(model_path("lenet"))
    network = Network("lenet", tuple(Target(name, 1, 1, 1.0, 1.0) for name in ("conv1", "conv2", "ip1")))
    assert work_of(model, network) == (
        LayerWork("conv1", 24 * 24, 1, 25, 20, 1, True),
        LayerWork("conv2", 8 * 8, 20, 25, 50, 1, True),
        LayerWork("ip1", 1, 800, 1, 500, 1, False),
    )


def test_layers_are_found_by_their_nodes():
    names = node_names(model_path("lenet"))
    assert names == {name: name for name in ("conv1", "conv2", "ip1", "ip2")}
    model = import_onnx(model_path("lenet"))
    network = Network("lenet", (Target("first", 1, 1, 1.0, 1.0),))
    assert places(model, network, {"first": "conv1"}) == {"first": 0}
    with pytest.raises(TuneError, match="unknown layer 'first'"):
        places(model, network)


def test_a_network_of_a_model_without_weights():
    network = network_of(load_model("alexnet"), ("conv",))
    assert len(network.targets) == 5
    assert network.weights == sum(layer.weights for layer in load_model("alexnet").layers if layer.kind == "conv")
    work = work_of(load_model("alexnet"), network)
    assert sum(each.macs for each in work) == sum(target.macs for target in network.targets)
    narrow = Configuration({f"{target.name}.input": FIXED(5) for target in network.targets})
    assert bit_serial_ideal(work, narrow).network == pytest.approx(3.2)
    assert 3.0 < bit_serial(work, narrow).network < 3.2
