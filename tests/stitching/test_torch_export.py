"""torch models through torch.export: what they are as a net gives what they give."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.stitching.files import assert_close, kinds, run
from weft.base.errors import ModelError, StitchError
from weft_stitch.graph_steps import plain_graph
from weft_stitch.net import Net
from weft_stitch.onnx_writer import to_onnx
from weft_stitch.reading.alignment import align
from weft_stitch.reading.onnx_reader import read_net
from weft_stitch.reading.torch_reader import read_module
from weft_stitch.running.module import StitchedModule

torch.set_num_threads(1)


def prepared(module: nn.Module, seed: int = 0) -> nn.Module:
    """For inference, with weights and statistics that make a difference."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor.data.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return module.eval()


def pictures(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def results(module: nn.Module, *inputs: torch.Tensor) -> list[np.ndarray]:
    with torch.no_grad():
        found = module(*(each.clone() for each in inputs))
    found = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else (found,)
    return [each.numpy() for each in found]


def assert_reads_as_itself(module: nn.Module, *inputs: torch.Tensor, islands: bool = False) -> Net:
    """As ONNX in onnxruntime, and as steps in torch; islands only in torch."""
    net = read_module(module, inputs, islands=islands)
    wanted = results(module, *inputs)
    graph = plain_graph(net)
    assert_close(results(StitchedModule(graph), *inputs), wanted)
    if not islands:
        written = to_onnx(graph)
        onnx.checker.check_model(written, full_check=True)
        feeds = {port.name: each.numpy() for port, each in zip(net.inputs, inputs, strict=True)}
        assert_close(run(written, feeds), wanted)
    return net


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor):
        return self.function(self, x)


LAYERS = {
    "conv": (nn.Conv2d(4, 6, 3, padding=1, stride=2), ["conv", "affine"]),
    "conv same": (nn.Conv2d(4, 6, (1, 3), padding="same", dilation=2, bias=False), ["conv"]),
    "conv valid": (nn.Conv2d(4, 6, 2, padding="valid", dilation=2, bias=False), ["conv"]),
    "conv in groups": (nn.Conv2d(4, 6, 3, groups=2, bias=False), ["conv"]),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=(2, 1), bias=False), ["conv"]),
    "batch norm": (nn.BatchNorm2d(4), ["affine"]),
    "batch norm without weights": (nn.BatchNorm2d(4, affine=False), ["affine"]),
    "conv and batch norm": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)), ["conv", "affine"]),
    "linear": (nn.Sequential(nn.Flatten(), nn.Linear(168, 5)), ["conv", "affine"]),
    "linear without bias": (nn.Sequential(nn.Flatten(), nn.Linear(168, 5, bias=False)), ["conv"]),
    "relu": (nn.ReLU(), ["unary"]),
    "relu in place": (nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.ReLU(inplace=True)), ["conv", "unary"]),
    "relu6": (nn.ReLU6(), ["unary"]),
    "hardtanh": (nn.Hardtanh(-0.3, 0.4), ["unary"]),
    "hardswish": (nn.Hardswish(), ["unary"]),
    "hardsigmoid": (nn.Hardsigmoid(), ["unary"]),
    "sigmoid": (nn.Sigmoid(), ["unary"]),
    "silu": (nn.SiLU(), ["unary"]),
    "gelu": (nn.GELU(), ["unary"]),
    "gelu by tanh": (nn.GELU("tanh"), ["unary"]),
    "tanh": (nn.Tanh(), ["unary"]),
    "leaky relu": (nn.LeakyReLU(0.2), ["unary"]),
    "elu": (nn.ELU(0.5), ["unary"]),
    "softplus": (nn.Softplus(), ["unary"]),
    "prelu": (nn.PReLU(4), ["unary", "unary", "affine", "unary", "add"]),
    "prelu of one slope": (nn.PReLU(), ["unary"]),
    "max pool": (nn.MaxPool2d(3, 2, 1), ["max_pool"]),
    "max pool rounded up": (nn.MaxPool2d(2, 2, ceil_mode=True), ["max_pool"]),
    "average pool": (nn.AvgPool2d(3, 1, 1), ["avg_pool"]),
    "average pool that does not count": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), ["avg_pool"]),
    "average pool rounded up": (nn.AvgPool2d(2, 2, ceil_mode=True), ["avg_pool"]),
    "adaptive pool": (nn.AdaptiveAvgPool2d(1), ["global_pool"]),
    "adaptive pool that does nothing": (nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d((7, 6))), ["unary"]),
    "adaptive pool to a part": (nn.AdaptiveAvgPool2d((7, 2)), ["avg_pool"]),
    "dropout": (nn.Sequential(nn.Dropout(), nn.Dropout2d(), nn.ReLU()), ["unary"]),
    "zeros around": (nn.Sequential(nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(4, 6, 3, bias=False)), ["conv"]),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_comes_out_as_it_went_in(case):
    module, expected = LAYERS[case]
    assert kinds(assert_reads_as_itself(prepared(module), pictures(2, 4, 7, 6))) == expected


FUNCTIONS = {
    "add": (lambda m, x: x + torch.sigmoid(x), ["unary", "add"]),
    "add scaled": (lambda m, x: torch.add(x, torch.sigmoid(x), alpha=0.5), ["unary", "affine", "add"]),
    "sub": (lambda m, x: x - torch.sigmoid(x), ["unary", "affine", "add"]),
    "mul": (lambda m, x: x * torch.sigmoid(x), ["unary", "mul"]),
    "numbers": (lambda m, x: (1 - (2 * x + 1) / 3) - 0.5, ["affine"]),
    "square": (lambda m, x: x**2, ["mul"]),
    "clamp": (lambda m, x: torch.clamp(x, max=0.5).clamp_min(0), ["unary", "unary"]),
    "cat": (lambda m, x: torch.cat((x, x.relu(), x), dim=1), ["unary", "concat"]),
    "mean": (lambda m, x: x.mean((2, 3)), ["global_pool"]),
    "mean that keeps": (lambda m, x: x * x.mean((-1, -2), keepdim=True), ["global_pool", "mul"]),
    "view": (lambda m, x: x.view(x.size(0), -1), []),
    "squeeze": (lambda m, x: functional.adaptive_avg_pool2d(x, 1).squeeze(3).squeeze(-1), ["global_pool"]),
    "unsqueeze": (lambda m, x: x.mean((2, 3))[:, :].unsqueeze(-1).unsqueeze(-1) + x, ["global_pool", "add"]),
    "permute": (lambda m, x: x.mean((2, 3), keepdim=True).permute(0, 2, 3, 1).flatten(1), ["global_pool"]),
    "pad": (lambda m, x: functional.pad(x, (1, 0)).relu(), ["conv", "unary"]),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_comes_out_as_it_went_in(case):
    function, expected = FUNCTIONS[case]
    islands = case == "unsqueeze"  # the slice that takes everything stays in the exported graph
    net = assert_reads_as_itself(Calls(function).eval(), pictures(2, 4, 7, 6), islands=islands)
    assert [kind for kind in kinds(net) if kind != "island"] == expected


def _overwritten(m, x):
    y = m.conv(x)
    flat = y.view(y.size(0), -1)
    functional.relu_(y)
    y += 1
    return y * 2, flat * 3


def _residual(m, x):
    y = m.conv(x)
    kept = y
    y = functional.relu(y, inplace=True)
    y = m.conv(y) * 0.1
    y += kept
    return functional.relu_(y)


@pytest.mark.parametrize("function", [_overwritten, _residual])
def test_what_is_written_in_place_is_seen_by_all_who_look(function):
    module = prepared(Calls(function, conv=nn.Conv2d(4, 4, 3, padding=1)))
    assert_reads_as_itself(module, pictures(2, 4, 7, 6))


class Block(nn.Module):
    """Squeeze-and-excite over a residual block, written with as much in place as torch allows."""

    def __init__(self, width: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.squeeze = nn.Conv2d(width, 2, 1)
        self.excite = nn.Conv2d(2, width, 1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.stem(x)))
        y = self.conv(x)
        y = y * functional.hardsigmoid(self.excite(self.act(self.squeeze(functional.adaptive_avg_pool2d(y, 1)))))
        y += x
        y = self.act(y)
        return self.fc(torch.flatten(functional.max_pool2d(y, 2).mean([2, 3]), 1))


def test_a_block_keeps_the_names_of_its_layers():
    net = assert_reads_as_itself(prepared(Block()), pictures(2, 3, 8, 8))
    names = [op.name for op in net.ops]
    assert {"stem", "norm", "act", "act.2", "act.3", "fc", "fc.bias"} <= set(names)
    assert len(set(names)) == len(names)
    assert ([port.name for port in net.inputs], [port.name for port in net.outputs]) == (["x"], ["output"])
    assert net.batch == 2


def test_models_of_other_widths_align():
    nets = [
        read_module(prepared(Block(width, classes)), (pictures(rows, 3, 8, 8),), name=f"net{width}")
        for width, classes, rows in ((6, 3, 1), (8, 5, 2))
    ]
    family = align(nets)
    assert [size.channels for size in family.values["norm"]] == [6, 8]
    assert family.batches == (1, 2)


def test_outputs_are_named_after_their_place():
    def many(m, x):
        return {"mean": x.mean((2, 3)), "both": (x.relu(), [x.sigmoid()])}

    net = read_module(Calls(many).eval(), (pictures(1, 4, 3, 3),))
    assert [port.name for port in net.outputs] == ["mean", "both_0", "both_1_0"]


def test_weights_computed_from_weights_are_worked_out():
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    assert kinds(assert_reads_as_itself(prepared(normed), pictures(1, 4, 7, 6))) == ["conv", "affine"]


def test_half_precision_is_read_as_float32():
    net = read_module(prepared(nn.Conv2d(4, 6, 3)).half(), (pictures(1, 4, 7, 6).half(),))
    assert net.ops[0].weight is not None and net.ops[0].weight.dtype == np.float32


def test_an_exported_program_is_taken_as_it_is():
    module = prepared(nn.Conv2d(4, 6, 3))
    program = torch.export.export(module, (pictures(1, 4, 7, 6),))
    assert kinds(read_module(program, (), name="p")) == ["conv", "affine"]


# Refusals


def _softmax_of_channels(m, x):
    return torch.softmax(m.conv(x), dim=1)


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.conv(x), dim=1)


def test_an_unknown_operator_is_named_with_its_line():
    with pytest.raises(StitchError) as caught:
        read_module(prepared(Soft()), (pictures(1, 4, 7, 6),), name="mine")
    message = str(caught.value)
    assert message.startswith("mine: softmax is the operator aten.softmax.int (in: return torch.softmax(self.conv(x), ")
    assert "islands=True" in message


def test_training_mode_is_refused():
    with pytest.raises(StitchError, match=r"training mode; call eval\(\)"):
        read_module(nn.BatchNorm2d(4).train(), (pictures(1, 4, 3, 3),))
    part = nn.Sequential(nn.BatchNorm2d(4)).eval()
    part[0].train()
    with pytest.raises(ModelError, match=r"0 \(aten.batch_norm.default\): it is in training mode"):
        read_module(part, (pictures(2, 4, 3, 3),))


def test_numbers_that_are_none_are_refused():
    module = prepared(nn.Conv2d(4, 6, 3))
    module.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(ModelError, match="its weight p_weight holds numbers that are not finite"):
        read_module(module, (pictures(1, 4, 7, 6),))


def test_what_torch_cannot_export_is_refused():
    def chooses(m, x):
        return x if x.sum() > 0 else -x

    with pytest.raises(StitchError, match=r"torch\.export cannot follow it"):
        read_module(Calls(chooses).eval(), (pictures(1, 4, 7, 6),))


@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (lambda m, x: x.relu(), (torch.zeros(4),), "its input x is not a tensor of rows"),
        (lambda m, x: x.float().relu(), (torch.zeros(1, 4, dtype=torch.int64),), "its input x is not a tensor of rows"),
        (lambda m, x: torch.ones(2, 2), (torch.zeros(1, 4),), "does not depend on its inputs"),
    ],
)
def test_inputs_and_outputs_that_are_no_rows_are_refused(function, inputs, words):
    with pytest.raises(StitchError, match=words):
        read_module(Calls(function).eval(), inputs)


# Islands


def _attention(m, x):
    rows, channels, height, width = x.shape
    tokens = m.conv(x).flatten(2).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(tokens, tokens, tokens)
    return x + mixed.transpose(1, 2).reshape(rows, channels, height, width)


def _split(m, x):
    one, two = m.conv(x).chunk(2, dim=1)
    return torch.cat((two.relu(), one), 1)


def _table(m, x):
    return functional.layer_norm(m.conv(x), [4, 7, 6]).relu_()


@pytest.mark.parametrize(("function", "count"), [(_softmax_of_channels, 1), (_attention, 1), (_split, 2), (_table, 1)])
def test_islands_run_what_is_not_understood(function, count):
    module = prepared(Calls(function, conv=nn.Conv2d(4, 4, 3, padding=1)))
    net = assert_reads_as_itself(module, pictures(2, 4, 7, 6), islands=True)
    assert kinds(net).count("island") == count


def test_an_island_of_torch_is_not_written_to_onnx():
    net = read_module(prepared(Soft()), (pictures(1, 4, 7, 6),), islands=True)
    with pytest.raises(StitchError, match="softmax cannot be written to ONNX: it is an operator of torch"):
        to_onnx(plain_graph(net))


def test_islands_with_the_same_settings_have_the_same_signature():
    def signature(dim: int, channels: int) -> str:
        module = Calls(lambda m, x: torch.softmax(x, dim)).eval()
        return read_module(module, (pictures(1, channels, 2, 2),), islands=True).ops[0].payload.signature

    assert signature(1, 3) == signature(1, 5) != signature(2, 3)


def test_what_torch_writes_as_onnx_is_read_as_the_same_net():
    """Both doors lead to one net: a file that holds the net is read as what the module is."""
    net = read_module(prepared(Block()), (pictures(2, 3, 8, 8),))
    again = read_net(to_onnx(plain_graph(net)))
    assert [kind for kind in kinds(again) if kind == "conv"] == [kind for kind in kinds(net) if kind == "conv"]
    family = align([again, read_net(to_onnx(plain_graph(net)))])
    assert len(family.layers) == len(again.ops)
