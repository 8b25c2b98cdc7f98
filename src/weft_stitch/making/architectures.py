"""Well-known networks, and tiny ones for tests, as sketches without weights: ``ARCHITECTURES`` by name, ``plan``.

A *space* is a set of channels that several values carry, as the operands of an addition do; models may share a part of
it. The *power* of a value is the estimated mean square of its numbers, by which random weights are scaled.

ResNet: He et al., Deep Residual Learning for Image Recognition, 2016, table 1. VGG16: Simonyan and Zisserman, Very
Deep Convolutional Networks for Large-Scale Image Recognition, 2015, configuration D. MobileNet: Howard et al.,
Searching for MobileNetV3, 2019, table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Protocol

from weft.base.errors import StitchError
from weft_stitch.net import Window

IMAGE, INNER, CLASSES = "image", "inner", "classes"
"""Roles of a channel space: the input, shared by all tasks; inner, shared in part; classes, not shared."""
ANY_WIDTH = 0
"""Stands for the width of a space of classes: each task has its own number of classes, which the recipe gives."""

MEAN_SQUARE = {"Relu": 0.5, "Sigmoid": 0.29, "HardSigmoid": 0.28, "HardSwish": 0.37, "Tanh": 0.39, "Silu": 0.36}
"""Function -> the mean square of its result for a standard normal number."""

SUMMED = 0.9
"""Fraction of the mean square that an activation keeps of a sum: most of it, as one operand was activated before."""

ONE = Window()
"""The window of a 1x1 convolution."""

GATE = {"alpha": 1 / 6, "beta": 0.5}
"""Settings of the HardSigmoid in squeeze-excite."""


@dataclass(frozen=True, slots=True)
class SketchNode:
    """An operation without weights; it writes the value of its own name."""

    name: str
    kind: str
    """A kind of ``net.Op``, or ``depthwise``, ``norm`` (a batch normalisation) or ``bias``."""
    inputs: tuple[str, ...]
    window: Window = ONE
    function: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    power: float = 1.0
    """conv, depthwise: the estimated mean square of its input."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A channel space before pruning: its number of channels and its role."""

    width: int
    role: str = INNER


@dataclass(frozen=True, eq=False)
class NetSketch:
    """A network's operations without weights."""

    resolution: int
    """Height and width of the input pictures."""
    nodes: tuple[SketchNode, ...]
    output: str
    carries: Mapping[str, tuple[str, ...]]
    """Value -> its spaces, in the order of its channels."""
    spaces: Mapping[str, Wire]


class Sketch:
    """Collects operations, and tracks spaces, sizes and mean squares of values; ``finish`` returns a ``NetSketch``.

    Random weights are scaled by the mean squares, so that numbers neither grow nor vanish through the layers.
    """

    def __init__(self, resolution: int, activation: str, channels: int = 3) -> None:
        self._resolution = resolution
        self._activation = activation
        self._nodes: list[SketchNode] = []
        self._carries: dict[str, tuple[str, ...]] = {"image": ("image",)}
        """Value -> its spaces; a space has the name of the convolution that writes it."""
        self._wires: dict[str, Wire] = {"image": Wire(channels, IMAGE)}
        self._joined: dict[str, str] = {}
        """Space -> the space that it was joined to."""
        self._side = {"image": resolution}
        """Value -> its height, which is its width."""
        self._power = {"image": 1.0}
        """Value -> its estimated mean square."""
        self._sums: set[str] = set()
        """Values that are sums of two others."""

    def conv(self, name: str, source: str, width: int, kernel: int = 1, stride: int = 1, role: str = INNER) -> str:
        """A convolution padded to keep the picture's size, divided by *stride*; its output is a new space."""
        window = Window((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
        return self._convolve(name, source, width, window, role)

    def dense(self, name: str, source: str, width: int, role: str = INNER) -> str:
        """A fully connected layer over the whole picture, with a bias."""
        side = self._side[source]
        return self.bias(f"{name}.bias", self._convolve(name, source, width, Window((side, side)), role))

    def _convolve(self, name: str, source: str, width: int, window: Window, role: str) -> str:
        """Add a convolution, whose output is a new space of *width* channels and has a mean square of 1."""
        self._nodes.append(SketchNode(name, "conv", (source,), window, power=self._power[source]))
        self._wires[name] = Wire(width, role)
        return self._record(name, (name,), window.output(self._side[source], 1)[0], 1.0)

    def depthwise(self, name: str, source: str, kernel: int, stride: int) -> str:
        """A depthwise convolution (one filter per channel) padded to keep the picture's size, divided by *stride*."""
        window = Window((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
        self._nodes.append(SketchNode(name, "depthwise", (source,), window, power=self._power[source]))
        return self._record(name, self._carries[source], window.output(self._side[source], 1)[0], 1.0)

    def norm(self, name: str, source: str) -> str:
        """A batch normalisation."""
        return self._add_channelwise(name, "norm", source)

    def bias(self, name: str, source: str) -> str:
        """A term per channel."""
        return self._add_channelwise(name, "bias", source)

    def act(self, name: str, source: str, function: str = "") -> str:
        """An activation: *function*, or by default the sketch's."""
        return self._unary(name, source, function or self._activation)

    def gate(self, name: str, source: str) -> str:
        """The HardSigmoid of squeeze-excite."""
        return self._unary(name, source, "HardSigmoid", GATE)

    def _unary(self, name: str, source: str, function: str, settings: Mapping[str, float] | None = None) -> str:
        """An elementwise function, with its effect on the mean square (``MEAN_SQUARE``, or ``SUMMED`` after a sum)."""
        self._nodes.append(SketchNode(name, "unary", (source,), function=function, settings=settings or {}))
        kept_fraction = SUMMED if source in self._sums else MEAN_SQUARE.get(function, 0.5)
        power = kept_fraction * self._power[source]
        return self._record(name, self._carries[source], self._side[source], power)

    def add(self, name: str, left: str, right: str) -> str:
        """The sum of two values, whose spaces become one."""
        self._sums.add(name)
        return self._combine(name, "add", left, right, self._power[left] + self._power[right])

    def scale(self, name: str, picture: str, factor: str) -> str:
        """*picture* times one factor per channel."""
        return self._combine(name, "mul", picture, factor, self._power[picture] * self._power[factor])

    def _combine(self, name: str, kind: str, left: str, right: str, power: float) -> str:
        """Add an operation of two operands with the same channels; their spaces are joined."""
        for left_space, right_space in zip(self._carries[left], self._carries[right], strict=True):
            self._join_spaces(left_space, right_space)
        self._nodes.append(SketchNode(name, kind, (left, right)))
        return self._record(name, self._carries[left], self._side[left], power)

    def concat(self, name: str, *operands: str) -> str:
        """The concatenation of *operands* along the channels."""
        self._nodes.append(SketchNode(name, "concat", operands))
        spaces = tuple(space for operand in operands for space in self._carries[operand])
        power = sum(self._power[operand] for operand in operands) / len(operands)
        return self._record(name, spaces, self._side[operands[0]], power)

    def pool(self, name: str, source: str, kind: str, kernel: int, stride: int, pad: int = 0) -> str:
        """A pool of *kind* "max_pool" or "avg_pool"; its effect on the mean square is estimated."""
        window = Window((kernel, kernel), (stride, stride), (pad,) * 4)
        self._nodes.append(SketchNode(name, kind, (source,), window))
        power = self._power[source] * (2.2 if kind == "max_pool" else 0.6)
        return self._record(name, self._carries[source], window.output(self._side[source], 1)[0], power)

    def global_pool(self, name: str, source: str) -> str:
        """A mean over all positions; its effect on the mean square is estimated."""
        self._nodes.append(SketchNode(name, "global_pool", (source,)))
        return self._record(name, self._carries[source], 1, 0.4 * self._power[source])

    def finish(self, output: str) -> NetSketch:
        """The network that has been drawn, with *output* as its output."""
        carries = {value: tuple(map(self._root, spaces)) for value, spaces in self._carries.items()}
        spaces = {name: wire for name, wire in self._wires.items() if name not in self._joined}
        return NetSketch(self._resolution, tuple(self._nodes), output, carries, spaces)

    def _add_channelwise(self, name: str, kind: str, source: str) -> str:
        """Add an operation that changes neither size nor mean square."""
        self._nodes.append(SketchNode(name, kind, (source,)))
        return self._record(name, self._carries[source], self._side[source], self._power[source])

    def _record(self, name: str, spaces: tuple[str, ...], side: int, power: float) -> str:
        """Record spaces, size and mean square of the value *name*, and return its name."""
        if side < 1:
            raise StitchError(f"a picture of {self._resolution} pixels ends before {name}; take a larger resolution")
        self._carries[name], self._side[name], self._power[name] = spaces, side, power
        return name

    def _root(self, space: str) -> str:
        """The space to which *space* was joined, or itself."""
        while space in self._joined:
            space = self._joined[space]
        return space

    def _join_spaces(self, left: str, right: str) -> None:
        """Make two spaces one, with the name of the older space."""
        names = list(self._wires)
        first, second = sorted((self._root(left), self._root(right)), key=names.index)
        if first != second:
            self._joined[second] = first


def _conv_norm(sketch: Sketch, name: str, source: str, width: int, kernel: int = 1, stride: int = 1) -> str:
    """A convolution and its batch normalisation."""
    return sketch.norm(f"{name}.norm", sketch.conv(f"{name}.conv", source, width, kernel, stride))


def _conv_act(sketch: Sketch, name: str, source: str, width: int, kernel: int = 1, stride: int = 1) -> str:
    """A convolution, its batch normalisation and the activation."""
    return sketch.act(f"{name}.act", _conv_norm(sketch, name, source, width, kernel, stride))


def _residual(sketch: Sketch, name: str, source: str, branch: str, project: tuple[int, int] | None) -> str:
    """*branch* plus *source*, activated.

    *project*: width and stride of a 1x1 convolution of *source*, if it needs one.
    """
    shortcut = _conv_norm(sketch, f"{name}.project", source, project[0], 1, project[1]) if project else source
    return sketch.act(f"{name}.act", sketch.add(f"{name}.add", branch, shortcut))


def _basic(sketch: Sketch, name: str, source: str, width: int, stride: int, project: bool) -> str:
    """ResNet's block of two 3x3 convolutions; *project*: whether the shortcut has a convolution."""
    inner = _conv_act(sketch, f"{name}.1", source, width, 3, stride)
    branch = _conv_norm(sketch, f"{name}.2", inner, width, 3)
    return _residual(sketch, name, source, branch, (width, stride) if project else None)


def _bottleneck(sketch: Sketch, name: str, source: str, width: int, stride: int, project: bool) -> str:
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions, four times *width* at the end."""
    inner = _conv_act(sketch, f"{name}.1", source, width)
    inner = _conv_act(sketch, f"{name}.2", inner, width, 3, stride)
    branch = _conv_norm(sketch, f"{name}.3", inner, 4 * width)
    return _residual(sketch, name, source, branch, (4 * width, stride) if project else None)


def _resnet(sketch: Sketch, blocks: tuple[int, ...], block: Callable[..., str], widens: bool) -> str:
    """A ResNet of *blocks* per stage; *widens*: whether the first stage's blocks are wider than the stem."""
    value = _conv_act(sketch, "stem", "image", 64, 7, 2)
    value = sketch.pool("stem.pool", value, "max_pool", 3, 2, 1)
    for stage, count in enumerate(blocks):
        for index in range(count):
            # the first block of a stage halves the picture and changes the width
            stride = 2 if stage and not index else 1
            project = not index and (stage > 0 or widens)
            value = block(sketch, f"stage{stage + 1}.{index + 1}", value, 64 << stage, stride, project)
    return sketch.dense("fc", sketch.global_pool("pool", value), ANY_WIDTH, CLASSES)


def _vgg16(sketch: Sketch) -> str:
    value = "image"
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1):
        for index in range(1, count + 1):
            value = _conv_act(sketch, f"stage{stage}.{index}", value, width, 3)
        value = sketch.pool(f"stage{stage}.pool", value, "max_pool", 2, 2)
    for number in (1, 2):
        value = sketch.act(f"fc{number}.act", sketch.dense(f"fc{number}", value, 4096))
    return sketch.dense("fc3", value, ANY_WIDTH, CLASSES)


def _squeeze_excite(sketch: Sketch, name: str, source: str, width: int) -> str:
    """*source* times a factor per channel, which is computed from the means of all channels."""
    means = sketch.global_pool(f"{name}.pool", source)
    squeezed = sketch.act(f"{name}.act", sketch.dense(f"{name}.1", means, max(1, width // 4)), "Relu")
    factor = sketch.gate(f"{name}.gate", sketch.dense(f"{name}.2", squeezed, width))
    return sketch.scale(f"{name}.scale", source, factor)


class _MobileBlock(Protocol):
    """Draws a block after *source*, which has *source_width* channels."""

    def __call__(self, sketch: Sketch, name: str, source: str, source_width: int) -> str: ...


def _inverted_bottleneck(kernel: int, wide: int, width: int, excite: bool, function: str, stride: int) -> _MobileBlock:
    """MobileNetV3's block: widen to *wide*, filter each channel, weight the channels (*excite*), narrow to *width*."""

    def block(sketch: Sketch, name: str, source: str, source_width: int) -> str:
        value = source
        if wide != source_width:
            value = sketch.act(f"{name}.1.act", _conv_norm(sketch, f"{name}.1", value, wide), function)
        value = sketch.depthwise(f"{name}.2.conv", value, kernel, stride)
        value = sketch.act(f"{name}.2.act", sketch.norm(f"{name}.2.norm", value), function)
        if excite:
            value = _squeeze_excite(sketch, f"{name}.excite", value, wide)
        value = _conv_norm(sketch, f"{name}.3", value, width)
        return sketch.add(f"{name}.add", value, source) if stride == 1 and source_width == width else value

    return block


MOBILE_BLOCKS = (
    (3, 16, 16, False, "Relu", 1), (3, 64, 24, False, "Relu", 2), (3, 72, 24, False, "Relu", 1),
    (5, 72, 40, True, "Relu", 2), (5, 120, 40, True, "Relu", 1), (5, 120, 40, True, "Relu", 1),
    (3, 240, 80, False, "HardSwish", 2), (3, 200, 80, False, "HardSwish", 1), (3, 184, 80, False, "HardSwish", 1),
    (3, 184, 80, False, "HardSwish", 1), (3, 480, 112, True, "HardSwish", 1), (3, 672, 112, True, "HardSwish", 1),
    (5, 672, 160, True, "HardSwish", 2), (5, 960, 160, True, "HardSwish", 1), (5, 960, 160, True, "HardSwish", 1),
)  # fmt: skip
"""Blocks of MobileNetV3-Large: kernel, inner width, output width, squeeze-excite, activation, stride."""


def _mobile(sketch: Sketch, stem: int, blocks: tuple[tuple[int, int, int, bool, str, int], ...], wide: int) -> str:
    """A MobileNetV3 up to the pooled features, *wide* channels; *stem*: channels of the first convolution.

    *blocks*: as in ``MOBILE_BLOCKS``.
    """
    value, source_width = _conv_act(sketch, "stem", "image", stem, 3, 2), stem
    for number, (kernel, inner_width, width, excite, function, stride) in enumerate(blocks, start=1):
        block = _inverted_bottleneck(kernel, inner_width, width, excite, function, stride)
        value, source_width = block(sketch, f"block{number}", value, source_width), width
    return sketch.global_pool("pool", _conv_act(sketch, "last", value, wide))


def _mobilenet(sketch: Sketch) -> str:
    value = sketch.act("fc1.act", sketch.dense("fc1", _mobile(sketch, 16, MOBILE_BLOCKS, 960), 1280))
    return sketch.dense("fc2", value, ANY_WIDTH, CLASSES)


def _tinynet(sketch: Sketch) -> str:
    """The smallest ResNet: a stem, a block that adds its own input, a strided one with a projection."""
    value = sketch.pool("stem.pool", _conv_act(sketch, "stem", "image", 20, 3), "max_pool", 2, 2)
    value = _basic(sketch, "block1", value, 20, 1, project=False)
    value = _basic(sketch, "block2", value, 40, 2, project=True)
    return sketch.dense("fc", sketch.global_pool("pool", value), ANY_WIDTH, CLASSES)


def _tiny_vgg(sketch: Sketch) -> str:
    value = _conv_act(sketch, "conv1", "image", 10, 3)
    value = sketch.pool("pool1", value, "max_pool", 2, 2)
    value = sketch.pool("pool2", _conv_act(sketch, "conv2", value, 20, 3), "avg_pool", 2, 2)
    value = sketch.act("fc1.act", sketch.dense("fc1", value, 30))
    return sketch.dense("fc2", value, ANY_WIDTH, CLASSES)


def _tiny_dense(sketch: Sketch) -> str:
    """A small DenseNet: normalise, convolve, and concatenate the result with the input."""
    value = sketch.conv("stem.conv", "image", 20, 3)
    for number in (1, 2):
        inner = sketch.act(f"dense{number}.act", sketch.norm(f"dense{number}.norm", value))
        grown = sketch.conv(f"dense{number}.conv", inner, 10, 3)
        value = sketch.concat(f"dense{number}.concat", value, grown)
    value = sketch.act("transition.act", sketch.norm("transition.norm", value))
    value = sketch.pool("transition.pool", sketch.conv("transition.conv", value, 20), "avg_pool", 2, 2)
    value = sketch.act("last.act", sketch.norm("last.norm", value))
    return sketch.dense("fc", sketch.global_pool("pool", value), ANY_WIDTH, CLASSES)


def _tiny_mobile(sketch: Sketch) -> str:
    blocks = ((3, 10, 10, False, "Relu", 1), (3, 30, 20, True, "HardSwish", 2), (5, 40, 20, True, "HardSwish", 1))
    return sketch.dense("fc", _mobile(sketch, 10, blocks, 40), ANY_WIDTH, CLASSES)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A named network with its default picture size, classes and activation."""

    draw: Callable[[Sketch], str]
    """Adds its operations to a sketch, and returns the name of its output."""
    resolution: int = 224
    classes: int = 1000
    activation: str = "Relu"


ARCHITECTURES: Mapping[str, Architecture] = {
    "resnet18": Architecture(partial(_resnet, blocks=(2, 2, 2, 2), block=_basic, widens=False)),
    "resnet50": Architecture(partial(_resnet, blocks=(3, 4, 6, 3), block=_bottleneck, widens=True)),
    "vgg16": Architecture(_vgg16),
    "mobilenet": Architecture(_mobilenet, activation="HardSwish"),
    "tinynet": Architecture(_tinynet, 8, 4),
    "tiny-sigmoid": Architecture(_tinynet, 8, 4, "Sigmoid"),
    "tiny-vgg": Architecture(_tiny_vgg, 8, 4),
    "tiny-dense": Architecture(_tiny_dense, 8, 4),
    "tiny-mobile": Architecture(_tiny_mobile, 8, 4, "HardSwish"),
}
"""Name that a user may give -> network."""


def find_architecture(architecture: str) -> Architecture:
    """The architecture called *architecture*; ``StitchError`` with a suggestion if there is none."""
    if architecture not in ARCHITECTURES:
        matches = get_close_matches(architecture.lower(), ARCHITECTURES, n=1, cutoff=0.7)
        hint = f"did you mean {matches[0]}?" if matches else f"known: {', '.join(ARCHITECTURES)}"
        raise StitchError(f"unknown architecture {architecture!r}; {hint}")
    return ARCHITECTURES[architecture]


def plan(
    architecture: str, resolution: int | None = None, activation: str | None = None, channels: int = 3
) -> NetSketch:
    """The sketch of a named network.

    *resolution*, *activation*: instead of the architecture's own. *channels*: of the input pictures.
    """
    named = find_architecture(architecture)
    sketch = Sketch(resolution or named.resolution, activation or named.activation, channels)
    return sketch.finish(named.draw(sketch))
