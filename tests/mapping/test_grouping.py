"""Layers are grouped where one activation crosses, never inside a kernel; estimates are rooflines done by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.models.onnx_graphs import ints, node, read, tensor, weight
from weft.base.errors import InputError, ModelError, ProfileError
from weft.devices.soc import Soc, load_soc
from weft.models.layer import Gemm, Layer, Model
from weft.models.zoo import ZOO, load
from weft_map.estimate import estimate, group_layers, kernels
from weft_map.problem import Problem

CNNS = [name for name in ZOO if not name.startswith(("bert", "xlnet", "ncf"))]


def conv(name, n=10, k=10, m=100, op="Conv+Relu"):
    return Layer(name, "conv", op, Gemm(m, k, n), weights=k * n, input_elements=m * k, output_elements=m * n)


def plain(name, kind, op, read=1000, written=1000):
    return Layer(name, kind, op, input_elements=read, output_elements=written)


def chain(*layers):
    """A model in which one activation crosses after every layer."""
    return Model("net", layers, block_ends=tuple(range(1, len(layers))))


def names(groups):
    return [[layer.name for layer in group.layers] for group in groups]


# Grouping


def test_every_layer_of_a_plain_chain_is_a_group():
    groups = group_layers(chain(conv("a"), conv("b"), conv("c")))
    assert names(groups) == [["a"], ["b"], ["c"]]
    assert [group.output_elements for group in groups] == [1000, 1000, 1000]


def test_what_a_kernel_does_on_its_way_out_stays_with_it():
    add, relu = plain("add", "elementwise", "Add", read=2000), plain("relu", "elementwise", "Relu")
    pool = plain("pool", "pool", "MaxPool", written=250)
    assert names(group_layers(chain(conv("a"), add, relu, conv("b"), pool, conv("c")))) == [
        ["a", "add", "relu"],
        ["b", "pool"],
        ["c"],
    ]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (plain("softmax", "elementwise", "Softmax"), "no activation: a unit may refuse it"),
        (plain("norm", "norm", "LRN"), "a kernel of its own"),
        (plain("mean", "elementwise", "Mul", read=1010, written=10), "another size"),
        (plain("turn", "movement", "Transpose"), "a kernel of its own"),
    ],
)
def test_what_is_a_kernel_of_its_own_is_a_group_of_its_own(layer, reason):
    assert names(group_layers(chain(conv("a"), layer, conv("b")))) == [["a"], [layer.name], ["b"]], reason


def test_a_pool_of_a_concatenation_may_go_elsewhere():
    concat, pool = plain("concat", "movement", "Concat"), plain("pool", "pool", "MaxPool")
    assert names(group_layers(chain(conv("a"), concat, pool))) == [["a"], ["concat"], ["pool"]]


def test_no_group_ends_inside_a_block():
    model = Model("net", (conv("a"), conv("b"), conv("c"), conv("d")), block_ends=(1, 3), block_shapes=((7, 3), (5, 2)))
    groups = group_layers(model)
    assert names(groups) == [["a"], ["b", "c"], ["d"]]
    assert [group.output_elements for group in groups] == [21, 10, 1000]
    assert [group.name for group in groups] == ["a", "b .. c", "d"]


def test_of_too_many_groups_the_smallest_neighbours_join():
    model = chain(conv("a", n=50), conv("b"), conv("c"), conv("d", n=50))
    assert names(group_layers(model, max_groups=3)) == [["a"], ["b", "c"], ["d"]]
    assert names(group_layers(model, max_groups=1)) == [["a", "b", "c", "d"]]
    assert group_layers(model, max_groups=9) == group_layers(model)
    with pytest.raises(ModelError, match="max_groups = 0 must be at least 1"):
        group_layers(model, max_groups=0)


@pytest.mark.parametrize("name", ZOO)
def test_the_groups_of_a_network_are_its_layers_in_order_cut_at_block_ends(name):
    model = load(name)
    for most in (None, 12, 1):
        groups = group_layers(model, max_groups=most)
        assert tuple(layer for group in groups for layer in group.layers) == model.layers
        ends = [sum(len(group.layers) for group in groups[:place]) for place in range(1, len(groups))]
        assert set(ends) <= set(model.block_ends)
        assert most is None or len(groups) <= most


@pytest.mark.parametrize("name", CNNS)
def test_no_network_is_cut_between_a_product_and_its_activation(name):
    for before, after in pairwise(group_layers(load(name))):
        first, last = after.layers[0], before.layers[-1]
        assert first.op not in ("Relu", "Clip", "Add", "Mul")
        assert not (first.kind in ("pool", "norm") and first.op != "LRN" and last.kind in ("conv", "gemm"))


def test_the_blocks_of_well_known_networks_are_groups():
    googlenet = [group.layers[-1].name for group in group_layers(load("googlenet"))]
    assert [name for name in googlenet if name.endswith(".concat")] == [
        f"inception{block}.concat" for block in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    ]
    resnet = [group.layers[-1].name for group in group_layers(load("resnet152"))]
    assert sum(name.endswith(".relu") for name in resnet) == 3 + 8 + 36 + 3 - 1  # the last block is pooled at once


def test_a_layer_names_every_node_it_stands_for():
    nodes = [
        node("Reshape", ["flat", "image"], ["x"], name="unflatten"),
        node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "s", "b", "s", "b"], ["n"], name="norm"),
        node("Relu", ["n"], ["r"]),
        node("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2]),
        node("Flatten", ["p"], ["f"], name="flatten"),
        node("Gemm", ["f", "v"], ["y"], name="fc"),
    ]
    constants = [ints("image", 1, 3, 4, 4), weight("w", 8, 3, 3, 3), weight("s", 8), weight("b", 8), weight("v", 72, 5)]
    model = read(nodes, [tensor("flat", 1, 48)], ["y"], constants)
    assert [layer.nodes for layer in model.layers] == [
        ("unflatten", "conv", "norm", "node_of_r"),
        ("pool", "flatten"),
        ("fc",),
    ]
    made = estimate(model, soc())
    assert [each.layers for each in made.groups] == [
        ("unflatten", "conv", "norm", "node_of_r", "pool", "flatten"),
        ("fc",),
    ]


# Estimates


def soc(**changes):
    units = [
        {"name": "gpu", "peak_tflops": 2.0, "efficiency": 0.5, "bandwidth_gb_s": 10.0, "launch_us": 3.0},
        {"name": "dla", "peak_tflops": 1.0, "efficiency": 0.5, "refuses": ["Softmax", "norm"], "power_w": 2.0},
    ]
    base = {"name": "toy", "bandwidth_gb_s": 20.0, "element_bits": 16, "transition_us": 5.0, "units": units}
    return Soc.model_validate(base | changes)


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic_and_its_launch():
    large, wide = conv("large", m=1000, k=1000, n=1000), conv("wide", m=1, k=1000, n=1000)
    profile = estimate(chain(large, wide), soc())
    arithmetic_s, traffic_b = 2e9 / 1e12, 2 * 3_000_000
    assert profile.groups[0].costs["gpu"].time_s == pytest.approx(arithmetic_s + 3e-6)
    assert profile.groups[0].costs["gpu"].demand_gb_s == pytest.approx(traffic_b / 1e9 / (arithmetic_s + 3e-6))
    assert profile.groups[0].costs["dla"].time_s == pytest.approx(2e9 / 0.5e12)
    assert profile.groups[1].costs["gpu"].time_s == pytest.approx(2 * 1_002_000 / 10e9 + 3e-6)
    assert profile.groups[1].costs["dla"].time_s == pytest.approx(2 * 1_002_000 / 20e9)
    assert profile.groups[1].costs["dla"].demand_gb_s == pytest.approx(20)
    assert (profile.origin, profile.soc, profile.model) == ("estimated", "toy", "net")


def test_a_move_costs_its_fixed_part_and_what_crosses_at_half_the_bandwidth():
    (first, _) = estimate(chain(conv("a"), conv("b")), soc()).groups
    for unit in ("gpu", "dla"):
        assert first.costs[unit].out_s == pytest.approx(5e-6 + 2 * 1000 / 10e9)
        assert first.costs[unit].in_s == 0


def test_followers_ride_along_and_concatenations_are_written_in_place():
    layers = (
        conv("a", op="Conv"),
        plain("add", "elementwise", "Add", read=2000),
        plain("relu", "elementwise", "Relu"),
        plain("concat", "movement", "Concat"),
    )
    made = kernels(layers, batch=1, element_bits=16)
    assert [kernel.layer.name for kernel in made] == ["a", "concat"]
    # weights, input and output of the product, and the other side of the addition
    assert made[0].moved_bytes == 2 * (100 + 1000 + 1000 + 1000)
    assert made[0].ops == {"conv", "Conv", "elementwise", "Add", "Relu"}
    assert estimate(chain(*layers), soc()).groups[-1].costs["gpu"].time_s == 0


def test_a_batch_shares_the_weights():
    one, four = (estimate(chain(conv("a", m=1)), soc(), batch=batch).groups[0].costs["dla"] for batch in (1, 4))
    assert one.time_s == pytest.approx(2 * (100 + 20) / 20e9)
    assert four.time_s == pytest.approx(2 * (100 + 80) / 20e9)
    with pytest.raises(ProfileError, match="batch = 0 must be at least 1"):
        estimate(chain(conv("a")), soc(), batch=0)


def test_narrow_values_stay_narrow():
    eight = Layer("q", "conv", "Conv", Gemm(1, 10, 10), 100, 0, 0, 10, 10, weight_bits=8, activation_bits=8)
    assert kernels((eight,), batch=1, element_bits=16)[0].moved_bytes == 120
    assert kernels((eight,), batch=1, element_bits=4)[0].moved_bytes == 60


def test_a_unit_that_refuses_an_operator_or_a_kind_is_left_out():
    model = chain(conv("a"), plain("softmax", "elementwise", "Softmax"), plain("lrn", "norm", "LRN"), conv("b"))
    profile = estimate(model, soc())
    assert [tuple(group.costs) for group in profile.groups] == [("gpu", "dla"), ("gpu",), ("gpu",), ("gpu", "dla")]
    Problem(soc(), (profile.task(),))
    short = estimate(model, soc(), max_groups=3)
    assert [group.name for group in short.groups] == ["a", "softmax .. lrn", "b"]
    assert profile.total_s("dla") is None


def test_a_layer_that_nobody_runs_is_an_error_that_says_why():
    units = [{"name": "npu", "peak_tflops": 1.0, "refuses": ["Softmax"]}]
    with pytest.raises(ProfileError, match="net: no unit of toy runs group 'softmax': npu refuses Softmax"):
        estimate(chain(plain("softmax", "elementwise", "Softmax")), soc(units=units))


def test_energy_is_power_times_time_where_power_is_known():
    (group,) = estimate(chain(conv("a")), soc()).groups
    assert group.costs["gpu"].energy_j is None
    assert group.costs["dla"].energy_j == pytest.approx(2.0 * group.costs["dla"].time_s)


def test_a_soc_without_a_peak_cannot_be_estimated_on():
    with pytest.raises(ProfileError, match=r"toy: unit cpu has no peak_tflops to estimate net by; add it"):
        estimate(chain(conv("a")), soc(units=[{"name": "cpu"}]))


def test_a_time_beyond_all_bounds_is_a_one_line_error():
    slow = [{"name": "gpu", "peak_tflops": 1e-6, "efficiency": 1e-9}]
    with pytest.raises(InputError, match=r"net on toy: time_s = 2\d*.0: .* less than or equal to 1000000"):
        estimate(chain(conv("a", m=1000, k=1000, n=1000_000)), soc(units=slow))


def test_names_of_a_file_are_made_fit_for_a_profile():
    model = chain(conv("a\nb"), conv("a\nb"), conv(""), conv("x" * 5000))
    made = [group.name for group in estimate(model, soc()).groups]
    assert made[:3] == ["a\\nb", "a\\nb #2", "unnamed"]
    assert len(made[3]) == 400


TABLE_5 = {  # HaX-CoNN: ms alone on gpu and dla, of xavier-agx and agx-orin
    "caffenet": ((2.26, 5.51), (0.74, 1.79)),
    "densenet121": ((7.84, None), (2.19, 3.10)),
    "googlenet": ((1.98, 3.68), (0.99, 1.52)),
    "inception-resnet-v2": ((15.12, 17.95), (3.06, 5.15)),
    "inception-v4": ((8.31, 15.94), (2.49, 5.66)),
    "resnet18": ((1.37, 2.81), (0.41, 0.74)),
    "resnet50": ((2.88, 6.01), (0.91, 1.67)),
    "resnet101": ((5.34, 10.6), (1.56, 2.47)),
    "resnet152": ((7.7, 12.71), (2.19, 3.26)),
    "vgg19": ((5.95, 19.05), (1.07, 2.93)),
}
FITTED = {  # reached TFLOP/s, GB/s, us a kernel
    "xavier-agx": ((7.61, 67.5, 24.7), (2.18, 25.4, 16.1)),
    "agx-orin": ((51.0, 112.0, 9.1), (15.7, 46.8, 10.4)),
}


def without_dense(model):
    """The paper's VGG-19 cannot have had its three large fully connected layers: their bytes alone take longer."""
    layers = tuple(layer for layer in model.layers if layer.kind != "gemm")
    return Model(model.name, layers, block_ends=model.block_ends[: len(layers) - 1])


@pytest.mark.parametrize(("which", "name"), [*enumerate(FITTED)])
def test_a_roofline_with_three_constants_explains_the_published_times(which, name):
    device = load_soc(name)
    for number, (tflops, bandwidth, launch) in enumerate(FITTED[name]):
        unit = device.units[number].model_copy(
            update={"peak_tflops": tflops, "efficiency": 1.0, "bandwidth_gb_s": bandwidth, "launch_us": launch}
        )
        alone = device.model_copy(update={"units": (unit.model_copy(update={"refuses": ()}),)})
        errors = []
        for network, times in TABLE_5.items():
            if (printed := times[which][number]) is not None:
                model = without_dense(load(network)) if network == "vgg19" else load(network)
                total_s = estimate(model, alone).total_s(unit.name)
                errors.append(abs(total_s * 1e3 / printed - 1))
        assert sum(errors) / len(errors) < 0.15
        assert max(errors) < 0.35
