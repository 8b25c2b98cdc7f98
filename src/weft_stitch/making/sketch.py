"""The shape of a network without its weights: ``NetSketch``, written by a ``Sketch``.

A plan knows which values carry the same channels (a *space*): an addition or a product puts its operands into one, a
depthwise convolution keeps its input's. It also guesses the mean square of every value, so that weights can be drawn
that keep outputs of order one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.base.errors import StitchError
from weft_stitch.net import Window

IMAGE, INNER, CLASSES = "image", "inner", "classes"
"""What a space is: all tasks share it; a share of it is shared; nobody shares it."""

MEAN_SQUARE = {"Relu": 0.5, "Sigmoid": 0.29, "HardSigmoid": 0.28, "HardSwish": 0.37, "Tanh": 0.39, "Silu": 0.36}
"""Mean square of each function of a standard normal number."""

SUMMED = 0.9
"""What an activation keeps of the mean square of a sum with something that was activated before: most."""

ONE = Window()

GATE = {"alpha": 1 / 6, "beta": 0.5}
"""Settings of the HardSigmoid in squeeze-excite."""


@dataclass(frozen=True, slots=True)
class SketchNode:
    """An operation; it writes the value of its own name."""

    name: str
    kind: str
    """A kind of ``net.Op``, or ``depthwise``, ``norm`` (a batch normalisation) or ``bias``."""
    inputs: tuple[str, ...]
    window: Window = ONE
    function: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    power: float = 1.0
    """conv, depthwise: guessed mean square of what it reads."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A space before pruning."""

    width: int
    role: str = INNER


@dataclass(frozen=True, eq=False)
class NetSketch:
    """One network's operations; *carries* has the names of the spaces in each value."""

    resolution: int
    """Height and width of its pictures."""
    nodes: tuple[SketchNode, ...]
    output: str
    carries: Mapping[str, tuple[str, ...]]
    spaces: Mapping[str, Wire]


class Sketch:
    """Collects operations and keeps account of spaces, sizes and mean squares; ends as a ``NetSketch``."""

    def __init__(self, resolution: int, activation: str, channels: int = 3) -> None:
        self._resolution = resolution
        self._activation = activation
        self._nodes: list[SketchNode] = []
        self._carries: dict[str, tuple[str, ...]] = {"image": ("image",)}
        self._wires: dict[str, Wire] = {"image": Wire(channels, IMAGE)}
        self._joined: dict[str, str] = {}
        self._side = {"image": resolution}
        self._power = {"image": 1.0}
        self._sums: set[str] = set()

    def conv(self, name: str, source: str, width: int, kernel: int = 1, stride: int = 1, role: str = INNER) -> str:
        """A convolution that keeps the size of the picture but for its stride; it begins a space."""
        window = Window((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
        return self._mix(name, source, width, window, role)

    def dense(self, name: str, source: str, width: int, role: str = INNER) -> str:
        """A fully connected layer over the whole picture, with its bias."""
        side = self._side[source]
        return self.bias(f"{name}.bias", self._mix(name, source, width, Window((side, side)), role))

    def _mix(self, name: str, source: str, width: int, window: Window, role: str) -> str:
        self._nodes.append(SketchNode(name, "conv", (source,), window, power=self._power[source]))
        self._wires[name] = Wire(width, role)
        return self._wrote(name, (name,), window.output(self._side[source], 1)[0], 1.0)

    def depthwise(self, name: str, source: str, kernel: int, stride: int) -> str:
        window = Window((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
        self._nodes.append(SketchNode(name, "depthwise", (source,), window, power=self._power[source]))
        return self._wrote(name, self._carries[source], window.output(self._side[source], 1)[0], 1.0)

    def norm(self, name: str, source: str) -> str:
        return self._keep(name, "norm", source)

    def bias(self, name: str, source: str) -> str:
        return self._keep(name, "bias", source)

    def act(self, name: str, source: str, function: str = "") -> str:
        """*function*, or the sketch's activation."""
        return self._unary(name, source, function or self._activation)

    def gate(self, name: str, source: str) -> str:
        return self._unary(name, source, "HardSigmoid", GATE)

    def _unary(self, name: str, source: str, function: str, settings: Mapping[str, float] | None = None) -> str:
        self._nodes.append(SketchNode(name, "unary", (source,), function=function, settings=settings or {}))
        kept = SUMMED if source in self._sums else MEAN_SQUARE.get(function, 0.5)
        power = kept * self._power[source]
        return self._wrote(name, self._carries[source], self._side[source], power)

    def add(self, name: str, left: str, right: str) -> str:
        self._sums.add(name)
        return self._pair(name, "add", left, right, self._power[left] + self._power[right])

    def scale(self, name: str, picture: str, factor: str) -> str:
        """A picture times one factor per channel."""
        return self._pair(name, "mul", picture, factor, self._power[picture] * self._power[factor])

    def _pair(self, name: str, kind: str, left: str, right: str, power: float) -> str:
        for ours, theirs in zip(self._carries[left], self._carries[right], strict=True):
            self._join(ours, theirs)
        self._nodes.append(SketchNode(name, kind, (left, right)))
        return self._wrote(name, self._carries[left], self._side[left], power)

    def concat(self, name: str, *parts: str) -> str:
        self._nodes.append(SketchNode(name, "concat", parts))
        spaces = tuple(space for part in parts for space in self._carries[part])
        power = sum(self._power[part] for part in parts) / len(parts)
        return self._wrote(name, spaces, self._side[parts[0]], power)

    def pool(self, name: str, source: str, kind: str, kernel: int, stride: int, pad: int = 0) -> str:
        window = Window((kernel, kernel), (stride, stride), (pad,) * 4)
        self._nodes.append(SketchNode(name, kind, (source,), window))
        power = self._power[source] * (2.2 if kind == "max_pool" else 0.6)
        return self._wrote(name, self._carries[source], window.output(self._side[source], 1)[0], power)

    def global_pool(self, name: str, source: str) -> str:
        self._nodes.append(SketchNode(name, "global_pool", (source,)))
        return self._wrote(name, self._carries[source], 1, 0.4 * self._power[source])

    def finish(self, output: str) -> NetSketch:
        carries = {value: tuple(map(self._root, spaces)) for value, spaces in self._carries.items()}
        spaces = {name: wire for name, wire in self._wires.items() if name not in self._joined}
        return NetSketch(self._resolution, tuple(self._nodes), output, carries, spaces)

    def _keep(self, name: str, kind: str, source: str) -> str:
        self._nodes.append(SketchNode(name, kind, (source,)))
        return self._wrote(name, self._carries[source], self._side[source], self._power[source])

    def _wrote(self, name: str, spaces: tuple[str, ...], side: int, power: float) -> str:
        if side < 1:
            raise StitchError(f"a picture of {self._resolution} pixels ends before {name}; take a larger resolution")
        self._carries[name], self._side[name], self._power[name] = spaces, side, power
        return name

    def _root(self, space: str) -> str:
        while space in self._joined:
            space = self._joined[space]
        return space

    def _join(self, left: str, right: str) -> None:
        """The space that was there first gives its name."""
        names = list(self._wires)
        first, second = sorted((self._root(left), self._root(right)), key=names.index)
        if first != second:
            self._joined[second] = first
