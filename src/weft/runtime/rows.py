"""Whether the rows of a batch are kept apart all the way from the inputs of a graph to its outputs.

Two samples that were made up may come out together as they do alone, although one with larger values would have moved
the other's answer: by a scale that is taken from the largest value in a tensor, for instance. So a run of several
samples is followed node by node. Every element of an input belongs to its sample, and ``row_rules`` say whom that
belongs to which a node makes of it. Rows are independent where no element comes to belong to two samples, and each row
of an output belongs to its own. What only depends on how many rows there are is left to the comparison of real runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from weft.base.errors import first_line
from weft.models.onnx_import.attributes import Attributes
from weft.runtime.owners import Mixed, Owners, Shape, collapsed, joined, numbered
from weft.runtime.row_rules import ASKED, ELEMENTWISE, LOTS, Case, whom
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import Array
from weft.runtime.values import KNOWN_DOMAINS

METADATA_KEY = "weft.rows"
INDEPENDENT = "independent"
"""What a file says there whose rows may be computed together all the same."""

Feed = Mapping[str, Array]

_BY_NUMBERS = frozenset(
    {
        "Compress", "Expand", "Gather", "GatherElements", "GatherND", "Pad", "Resize", "Scatter",
        "ScatterElements", "ScatterND", "Slice", "Split", "Tile",
    }
)  # fmt: skip
"""Operators that move elements by numbers, which may be right for some sizes only."""
_MOST_TURNS = 8
"""A loop whose values find no owners in so many turns is given up."""


class Seen(NamedTuple):
    """What was seen of a run."""

    shapes: Mapping[str, Shape]
    """Of all tensors that were made."""
    values: Mapping[str, Array]
    """Of those that were asked for."""


class Runner(Protocol):
    """Runs graphs to look at them."""

    def trace(self, model: ModelProto, feed: Feed, wanted: Collection[str]) -> Seen: ...

    def compute(self, model: ModelProto, feed: Feed) -> Sequence[Array]: ...


class Verdict(NamedTuple):
    """What ``judged`` finds."""

    mixing: str | None
    """What stands against batches: the first operator that looks across rows, for instance; None: nothing."""
    by_size: bool = False
    """Whether samples were moved by numbers, or a way was chosen, that may be another for other sizes."""


class _Refused(Exception):
    """Says which operator it is that mixes rows."""


def judged(model: ModelProto, feeds: Sequence[Feed], runner: Runner, tasks: Sequence[TaskSpec] = ()) -> Verdict:
    """Whether the rows of each of the *feeds*, batches of several sizes, are kept apart."""
    for node in _all_nodes(model.graph):
        if node.op_type in LOTS:
            return Verdict(f"{node.op_type} {node.name!r} draws lots")
    try:
        runs = [_followed(model, feed, runner, tasks) for feed in feeds]
    except _Refused as refusal:
        return Verdict(str(refusal))
    except Exception as error:  # what cannot be followed is not known to keep rows apart
        return Verdict(f"its rows cannot be followed: {first_line(error)}")
    if any(run.ways != runs[0].ways for run in runs):
        return Verdict("an If goes another way for another number of rows")
    return Verdict(None, any(run.by_size for run in runs))


def _followed(model: ModelProto, feed: Feed, runner: Runner, tasks: Sequence[TaskSpec]) -> _Run:
    most = max(len(each) for each in feed.values())
    first = {
        name: 1 + number * most
        for number, task in enumerate(tasks)
        for name in (*task.inputs.values(), *task.outputs.values())
    }
    owners = {name: numbered(first.get(name, 1), len(each), each.ndim) for name, each in feed.items()}
    run = _Run(model, runner, feed, dict(owners))
    for spec, found in zip(model.graph.output, run.follow(), strict=True):
        if found is not None and not _in_order(found, run.shape(spec.name), first.get(spec.name, 1)):
            raise _Refused(f"output {spec.name!r} has no row for each sample")
    return run


def _in_order(owners: Owners, shape: Shape | None, first: int) -> bool:
    """Whether the first row belongs to the first sample or nobody, and so on."""
    try:
        rows = collapsed(owners, range(1, owners.ndim)).ravel()
    except Mixed:
        return False
    rows = np.broadcast_to(rows, shape[:1] if shape else ())
    return bool(np.all((rows == 0) | (rows == np.arange(first, first + len(rows)))))


@dataclass(slots=True)
class _Run:
    """One run of a graph on several samples, and whom its tensors belong to."""

    model: ModelProto
    runner: Runner
    feed: Feed
    owners: dict[str, Owners]
    ways: list[bool] = field(default_factory=list)
    """Which way each If went."""
    varying: set[str] = field(default_factory=set)
    """In the body of a loop, what is nobody's and holds something else in every turn."""
    by_size: bool = False
    weights: Mapping[str, TensorProto] = field(init=False)
    seen: Seen = field(init=False)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.weights = _weights(graph)
        made = {name for node in graph.node for name in node.output}
        self.seen = self.runner.trace(self.model, self.feed, _asked(graph) & made)

    def follow(self) -> list[Owners | None]:
        """Whom the outputs belong to."""
        for node in self.model.graph.node:
            read = {*node.input, *_captured(node)}
            if read & self.owners.keys():
                self._pass(node)
            if read & self.varying:
                self.varying |= {name for name in node.output if name not in self.owners}
        return [self.owners.get(each.name) for each in self.model.graph.output]

    def shape(self, name: str) -> Shape | None:
        if name in self.feed:
            return self.feed[name].shape
        return tuple(self.weights[name].dims) if name in self.weights else self.seen.shapes.get(name)

    def _pass(self, node: NodeProto) -> None:
        taken = [self.owners.get(name) for name in node.input]
        try:
            made = self._made(node, taken)
        except Mixed as mixed:
            what = str(mixed) or "computes with several rows at once"
            raise _Refused(f"{node.op_type} {node.name!r} {what}") from mixed
        found = {name: each for name, each in zip(filter(None, node.output), made, strict=True) if each is not None}
        self.owners |= found
        self.by_size = self.by_size or _by_size(node, taken, found.values())

    def _made(self, node: NodeProto, taken: Sequence[Owners | None]) -> Sequence[Owners | None]:
        own = any((each.domain, each.name) == (node.domain, node.op_type) for each in self.model.functions)
        if node.domain not in KNOWN_DOMAINS or own:
            raise Mixed("is not known to keep rows apart")
        if self.varying.intersection(node.input) and node.op_type not in ELEMENTWISE:
            raise Mixed("takes what changes from turn to turn")
        control = {"If": self._if, "Loop": self._loop, "Scan": self._scan}.get(node.op_type)
        if control:
            return control(node, taken)
        made = [self.shape(name) for name in node.output if name]
        shapes = [self.shape(name) if name else None for name in node.input]
        versions = {each.domain: each.version for each in self.model.opset_import}
        version = versions.get("", versions.get("ai.onnx", 1))
        return whom(
            Case(
                node, version, taken, shapes, made,
                value=lambda place: self._value(node.input[place]),
                compute=lambda plain, fed: self._computed(node, plain, fed),
            )
        )  # fmt: skip

    def _value(self, name: str) -> Array:
        for known in (self.feed, self.seen.values):
            if name in known:
                return known[name]
        if name not in self.weights:
            raise Mixed("is not known to keep rows apart")
        return numpy_helper.to_array(self.weights[name])

    def _computed(self, node: NodeProto, plain: NodeProto, fed: Mapping[int, Array]) -> Sequence[Array]:
        """What *plain*, a node much like *node*, makes of some inputs and of what the others held in the run."""
        single = NodeProto()
        single.CopyFrom(plain)
        del single.input[:]
        single.input.extend(f"in{place}" if name else "" for place, name in enumerate(plain.input))
        inputs = [
            helper.make_tensor_value_info(f"in{place}", TensorProto.FLOAT, each.shape) for place, each in fed.items()
        ]
        others = [place for place, name in enumerate(plain.input) if name and place not in fed]
        given = [numpy_helper.from_array(self._value(node.input[place]), f"in{place}") for place in others]
        outputs = [ValueInfoProto(name=name) for name in single.output if name]
        graph = helper.make_graph([single], "one", inputs, outputs, given)
        return self.runner.compute(self._like(graph), {f"in{place}": each for place, each in fed.items()})

    def _like(self, graph: GraphProto) -> ModelProto:
        return helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=max(self.model.ir_version, 4))

    # Control flow: a body is followed as a graph of its own, once or until nothing changes

    def _if(self, node: NodeProto, taken: Sequence[Owners | None]) -> Sequence[Owners | None]:
        if taken[0] is not None:
            raise Mixed
        self.ways.append(bool(np.ravel(self._value(node.input[0]))[0]))
        body = _body(node, "then_branch" if self.ways[-1] else "else_branch")
        return self._inside(body, {}, {}).follow()

    def _loop(self, node: NodeProto, taken: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """Of which neither the number of turns nor whether it goes on is a sample's."""
        if any(each is not None for each in taken[:2]):
            raise Mixed
        body = _body(node, "body")
        given = {body.input[0].name: np.array(0), body.input[1].name: np.array(True)}
        states, made = self._turned(body, node.input[2:], taken[2:], given, {}, skipped=1)
        return [*states, *(None if each is None else each[np.newaxis] for each in made)]

    def _scan(self, node: NodeProto, taken: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """Along axes of no samples."""
        attributes, body = Attributes(node), _body(node, "body")
        count = len(node.input) - attributes.integer("num_scan_inputs", 1)
        axes = attributes.integers("scan_input_axes", (0,) * (len(node.input) - count))
        given: dict[str, Array] = {}
        owners: dict[str, Owners] = {}
        for spec, name, owner, axis in zip(body.input[count:], node.input[count:], taken[count:], axes, strict=True):
            given[spec.name] = np.asarray(self._value(name).take(0, axis))
            if owner is not None:
                owners[spec.name] = np.squeeze(collapsed(owner, [axis]), axis)
        states, made = self._turned(body, node.input[:count], taken[:count], given, owners, skipped=0)
        ends = attributes.integers("scan_output_axes", (0,) * len(made))
        stacked = [None if each is None else np.expand_dims(each, axis) for each, axis in zip(made, ends, strict=True)]
        return [*states, *stacked]

    def _turned(
        self,
        body: GraphProto,
        names: Sequence[str],
        taken: Sequence[Owners | None],
        given: Feed,
        owners: Mapping[str, Owners],
        *,
        skipped: int,
    ) -> tuple[list[Owners | None], list[Owners | None]]:
        """Whom the states of a loop and the rest that it makes belong to; the outputs *skipped* must be nobody's."""
        inner = [each.name for each in body.input if each.name not in given]
        feed = {**given, **{place: self._value(name) for place, name in zip(inner, names, strict=True)}}
        states = list(taken)
        for _ in range(_MOST_TURNS):
            known = {place: each for place, each in zip(inner, states, strict=True) if each is not None}
            run = self._inside(body, feed, {**owners, **known})
            made = run.follow()
            ends = [run.shape(each.name) for each in body.output[skipped : skipped + len(states)]]
            if any(each is not None for each in made[:skipped]) or ends != [feed[place].shape for place in inner]:
                raise Mixed
            after = [joined(*pair) for pair in zip(states, made[skipped:], strict=False)]
            if all(_alike(*pair) for pair in zip(states, after, strict=True)):
                return states, made[skipped + len(states) :]
            states = after
        raise Mixed

    def _inside(self, body: GraphProto, feed: Feed, owners: Mapping[str, Owners]) -> _Run:
        """A run of a body, with what it takes from around it."""
        outer = [name for name in sorted(_free(body)) if name not in self.weights]
        taken = {**{name: self._value(name) for name in outer}, **feed}
        known = {**{name: self.owners[name] for name in outer if name in self.owners}, **owners}
        inner = GraphProto()
        inner.CopyFrom(body)
        del inner.input[:]
        inner.input.extend(_declared(name, each) for name, each in taken.items())
        inner.initializer.extend(self.weights[name] for name in sorted(_free(body)) if name in self.weights)
        varying = {name for name in taken if name not in known and (name in feed or name in self.varying)}
        run = _Run(self._like(inner), self.runner, taken, known, self.ways, varying)
        self.by_size = True
        return run


def _by_size(node: NodeProto, taken: Sequence[Owners | None], made: Iterable[Owners]) -> bool:
    """Whether a node puts samples elsewhere than they were, or may do so for other sizes."""
    if node.op_type == "Reshape":
        return True
    if node.op_type not in _BY_NUMBERS or taken[0] is None:
        return False
    return any(not np.array_equal(np.squeeze(taken[0]), np.squeeze(each)) for each in made)


def _alike(one: Owners | None, other: Owners | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _declared(name: str, value: Array) -> ValueInfoProto:
    kind = TensorProto.STRING if value.dtype == np.object_ else helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, value.shape)


def _body(node: NodeProto, name: str) -> GraphProto:
    found: GraphProto = next(each.g for each in node.attribute if each.name == name)
    return found


def _bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs inside a node, those without nodes included: they may hand on what is around them."""
    single = [each.g for each in node.attribute if each.type == AttributeProto.GRAPH]
    return [*single, *(body for each in node.attribute for body in each.graphs)]


def _all_nodes(graph: GraphProto) -> Iterable[NodeProto]:
    for node in graph.node:
        yield node
        for body in _bodies(node):
            yield from _all_nodes(body)


def _asked(graph: GraphProto) -> set[str]:
    """What rules want to know the values of."""
    found = set[str]()
    for node in graph.node:
        found |= {node.input[place] for place in ASKED.get(node.op_type, ()) if place < len(node.input)}
        if _bodies(node):
            found |= {*node.input, *_captured(node)}
    return found


def _captured(node: NodeProto) -> set[str]:
    """What the bodies of a node take from around it."""
    return set[str]().union(*map(_free, _bodies(node)))


def _free(body: GraphProto) -> set[str]:
    known = {each.name for each in (*body.input, *body.initializer)} | {""}
    known |= {name for node in body.node for name in node.output}
    read = {name for node in body.node for name in (*node.input, *_captured(node))}
    return (read | {each.name for each in body.output}) - known


def _weights(graph: GraphProto) -> dict[str, TensorProto]:
    """The graph's initialisers and constants by name."""
    found = {each.name: each for each in graph.initializer}
    for node in graph.node:
        for each in node.attribute:
            if node.op_type == "Constant" and each.name == "value":
                found[node.output[0]] = TensorProto()
                found[node.output[0]].CopyFrom(each.t)
                found[node.output[0]].name = node.output[0]
    return found
