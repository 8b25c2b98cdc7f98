"""Proof that the rows of a batch are independent all the way from the inputs of a graph to its outputs.

Comparing runs is not enough: two generated samples may give the same answers together as alone, although a third one
with larger values would change them, by a scale that is taken from the largest value in a tensor, for instance. So a
run of several samples is followed node by node. Every element of an input belongs to its sample, its *owner*; row
rules compute the owners of what a node returns. Rows are independent where no element has two owners and each row of an
output belongs to its own sample. Effects of the number of rows alone are left to the comparison of real runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from weft.base.errors import first_line
from weft.models.element_types import ElementType
from weft.models.onnx_graph import (
    Attributes,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    OnnxTensor,
    all_nodes,
    bodies,
    body,
    captured,
    constants,
    copied,
    declared,
    declared_like,
    fill,
    make_model,
    names_read,
    opsets,
    qualified,
    to_array,
    to_tensor,
)
from weft.models.operators import KNOWN_DOMAINS, find
from weft.models.operators.rules.rows import (
    Mixed,
    Owners,
    RowCase,
    Shape,
    collapsed,
    elementwise,
    joined,
    numbered,
    owners_after,
)
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import Array

METADATA_KEY = "weft.rows"
"""Metadata key of an ONNX file."""
INDEPENDENT = "independent"
"""Value of that key: rows may be computed together although no proof is possible."""

Feed = Mapping[str, Array]  # input -> its values

_MAX_ITERATIONS = 8
"""Iterations of a loop after which its owners must not change any more. An iteration can only add owners, so that
two or three are enough for all but damaged graphs."""


class Seen(NamedTuple):
    """Tensors of one run, as observed."""

    shapes: Mapping[str, Shape]  # shapes of all computed tensors
    values: Mapping[str, Array]  # values of the tensors that were requested


class Runner(Protocol):
    """Runs graphs and returns their inner tensors."""

    def trace(self, model: OnnxModel, feed: Feed, wanted: Collection[str]) -> Seen:
        """Run *model*; return the shapes of all inner tensors, and the values of the tensors *wanted*."""
        ...

    def compute(self, model: OnnxModel, feed: Feed) -> Sequence[Array]:
        """Run *model*; return its outputs in order."""
        ...


class Verdict(NamedTuple):
    """Result of ``judge_rows``."""

    mixing: str | None
    """Why rows are not independent, such as the first operator that mixes them; None: they are."""
    by_size: bool = False
    """Whether the proof may fail for other batch sizes: computed indices moved samples, or control flow was run."""


class _Refused(Exception):
    """Rows are not known to be independent; the message names the operator that mixes them."""


def judge_rows(model: OnnxModel, feeds: Sequence[Feed], runner: Runner, tasks: Sequence[TaskSpec] = ()) -> Verdict:
    """Prove that rows are independent, by following each of the *feeds*, batches of several sizes; else say why not.

    *runner*: runs the graph to observe its tensors. *tasks*: of a stitched model; their samples are different owners.
    """
    for node in all_nodes(model.graph):
        if find(qualified(node)).random:
            return Verdict(f"{node.op_type} {node.name!r} is random")
    try:
        runs = [_follow_run(model, feed, runner, tasks) for feed in feeds]
    except _Refused as refusal:
        return Verdict(str(refusal))
    except Exception as error:  # what cannot be followed is not known to keep rows apart
        return Verdict(f"its rows cannot be followed: {first_line(error)}")
    if any(run.branches != runs[0].branches for run in runs):
        return Verdict("an If takes another branch for another number of rows")
    return Verdict(None, any(run.by_size for run in runs))


def _follow_run(model: OnnxModel, feed: Feed, runner: Runner, tasks: Sequence[TaskSpec]) -> _Run:
    """Follow the rows of one batch to the outputs; samples of different tasks are different owners.

    Raises ``_Refused`` if rows are not independent.
    """
    # Owner 0 is "no sample". The samples of each task are numbered in a range of their own.
    largest_batch = max(len(values) for values in feed.values())
    first_owner = {
        name: 1 + number * largest_batch
        for number, task in enumerate(tasks)
        for name in (*task.inputs.values(), *task.outputs.values())
    }
    owners = {name: numbered(first_owner.get(name, 1), len(values), values.ndim) for name, values in feed.items()}
    run = _Run(model, runner, feed, dict(owners))
    for spec, owners_out in zip(model.graph.output, run.follow(), strict=True):
        if owners_out is not None and not _is_in_sample_order(
            owners_out, run.shape(spec.name), first_owner.get(spec.name, 1)
        ):
            raise _Refused(f"output {spec.name!r} has no row for each sample")
    return run


def _is_in_sample_order(owners: Owners, shape: Shape | None, first_owner: int) -> bool:
    """Whether each row of an output belongs to the sample of the same index, or to none.

    first_owner: the owner of row 0.
    """
    try:
        rows = collapsed(owners, range(1, owners.ndim)).ravel()
    except Mixed:
        return False
    rows = np.broadcast_to(rows, shape[:1] if shape else ())  # owners that are equal along an axis are stored once
    return bool(np.all((rows == 0) | (rows == np.arange(first_owner, first_owner + len(rows)))))


@dataclass(slots=True)
class _Run:
    """One run of a graph on several samples, and the owners of its tensors."""

    model: OnnxModel
    runner: Runner
    feed: Feed
    owners: dict[str, Owners]
    """Tensor -> owners of its elements; a tensor without an entry depends on no sample."""
    branches: list[bool] = field(default_factory=list)  # the branch that each If took
    varying: set[str] = field(default_factory=set)
    """In the body of a loop: tensors without owners whose values change from iteration to iteration."""
    by_size: bool = False  # as in ``Verdict``
    weights: Mapping[str, OnnxTensor] = field(init=False)
    seen: Seen = field(init=False)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.weights = constants(graph)
        produced = {name for node in graph.node for name in node.output}
        self.seen = self.runner.trace(self.model, self.feed, _names_of_read_values(graph) & produced)

    def follow(self) -> list[Owners | None]:
        """Follow all nodes; return the owners of each output, None where it depends on no sample."""
        for node in self.model.graph.node:
            read = names_read(node)
            if read & self.owners.keys():
                self._follow_node(node)
            if read & self.varying:  # what is computed from a varying tensor varies, too
                self.varying |= {name for name in node.output if name not in self.owners}
        return [self.owners.get(value.name) for value in self.model.graph.output]

    def shape(self, name: str) -> Shape | None:
        """The shape that a tensor had in the run; None if it is unknown."""
        if name in self.feed:
            return self.feed[name].shape
        return tuple(self.weights[name].dims) if name in self.weights else self.seen.shapes.get(name)

    def _follow_node(self, node: OnnxNode) -> None:
        """Add the owners of a node's outputs."""
        input_owners = [self.owners.get(name) for name in node.input]
        try:
            results = self._owners_of_outputs(node, input_owners)
        except Mixed as mixed:
            reason = str(mixed) or "computes with several rows at once"
            raise _Refused(f"{node.op_type} {node.name!r} {reason}") from mixed
        named = zip(filter(None, node.output), results, strict=True)
        owners = {name: result for name, result in named if result is not None}
        self.owners |= owners
        self.by_size = self.by_size or _depends_on_size(node, input_owners, owners.values())

    def _owners_of_outputs(self, node: OnnxNode, input_owners: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """The owners of each output of a node, from the owners of its inputs; ``Mixed`` if rows are mixed."""
        # A function of the file may have the name of an operator in the table and compute anything else.
        is_function_of_file = any(
            (function.domain, function.name) == (node.domain, node.op_type) for function in self.model.functions
        )
        if node.domain not in KNOWN_DOMAINS or is_function_of_file:
            raise Mixed("is not known to keep rows apart")
        if self.varying.intersection(node.input) and find(qualified(node)).rows is not elementwise:
            raise Mixed("reads a value that changes between the iterations of a loop")
        control = {"If": self._follow_if, "Loop": self._follow_loop, "Scan": self._follow_scan}.get(node.op_type)
        if control:
            return control(node, input_owners)
        shapes_out = [self.shape(name) for name in node.output if name]
        shapes = [self.shape(name) if name else None for name in node.input]
        version = opsets(self.model).get("", 1)
        return owners_after(
            find(qualified(node)).rows,
            RowCase(
                node, version, input_owners, shapes, shapes_out,
                value=lambda position: self._value(node.input[position]),
                compute=lambda variant, replaced: self._compute_variant(node, variant, replaced),
            ),
        )  # fmt: skip

    def _value(self, name: str) -> Array:
        """The values of the tensor *name*: an input, a weight or a traced one; ``Mixed`` if they are unknown."""
        for known in (self.feed, self.seen.values):
            if name in known:
                return known[name]
        if name not in self.weights:
            raise Mixed("is not known to keep rows apart")
        return to_array(self.weights[name])

    def _compute_variant(self, node: OnnxNode, variant: OnnxNode, replaced: Mapping[int, Array]) -> Sequence[Array]:
        """Run *variant*, a variant of *node*, on owners in place of values, to see where it moves them.

        replaced: input position -> owners as numbers; the other inputs have the values of the traced run.
        """
        single = copied(variant)
        fill(single.input, [f"in{position}" if name else "" for position, name in enumerate(variant.input)])
        inputs = [declared(f"in{position}", ElementType.FLOAT, owners.shape) for position, owners in replaced.items()]
        others = [position for position, name in enumerate(variant.input) if name and position not in replaced]
        constant_inputs = [to_tensor(self._value(node.input[position]), f"in{position}") for position in others]
        outputs = [declared(name) for name in single.output if name]
        model = make_model(
            [single], "one", inputs, outputs, constant_inputs, like=self.model, ir_version=self._ir_version
        )
        return self.runner.compute(model, {f"in{position}": owners for position, owners in replaced.items()})

    @property
    def _ir_version(self) -> int:
        """File version of the parts that are run: before version 4, weights had to be inputs."""
        return max(self.model.ir_version, 4)

    # Control flow: a body is followed as a graph of its own, once or until its owners do not change any more

    def _follow_if(self, node: OnnxNode, input_owners: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """The owners of the outputs of an If, by its branch of this run; the condition must not depend on a sample."""
        if input_owners[0] is not None:
            raise Mixed
        self.branches.append(bool(np.ravel(self._value(node.input[0]))[0]))
        return self._body_run(body(node, "then_branch" if self.branches[-1] else "else_branch"), {}, {}).follow()

    def _follow_loop(self, node: OnnxNode, input_owners: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """The owners of a Loop's outputs; neither the number of iterations nor the condition may depend on a sample."""
        if any(owner is not None for owner in input_owners[:2]):
            raise Mixed
        inner = body(node, "body")
        # The first inputs of the body are the number of the iteration and the condition.
        fixed_inputs = {inner.input[0].name: np.array(0), inner.input[1].name: np.array(True)}
        # Inputs from 2 on are the initial states. The first output of the body is the condition, so it is skipped.
        states, stacked = self._follow_iterations(inner, node.input[2:], input_owners[2:], fixed_inputs, {}, skipped=1)
        # Outputs that are stacked have the iterations as their first axis.
        return [*states, *(None if owners is None else owners[np.newaxis] for owners in stacked)]

    def _follow_scan(self, node: OnnxNode, input_owners: Sequence[Owners | None]) -> Sequence[Owners | None]:
        """The owners of a Scan's outputs; the scanned axes must not be the axes of samples."""
        attributes, inner = Attributes(node), body(node, "body")
        state_count = len(node.input) - attributes.integer("num_scan_inputs", 1)
        axes = attributes.integers("scan_input_axes", (0,) * (len(node.input) - state_count))
        fixed_inputs: dict[str, Array] = {}
        owners: dict[str, Owners] = {}
        for spec, name, owner, axis in zip(
            inner.input[state_count:], node.input[state_count:], input_owners[state_count:], axes, strict=True
        ):
            # The first slice stands for all slices; ``collapsed`` joins the owners of all of them.
            fixed_inputs[spec.name] = np.asarray(self._value(name).take(0, axis))
            if owner is not None:
                owners[spec.name] = np.squeeze(collapsed(owner, [axis]), axis)
        states, results = self._follow_iterations(
            inner, node.input[:state_count], input_owners[:state_count], fixed_inputs, owners, skipped=0
        )
        output_axes = attributes.integers("scan_output_axes", (0,) * len(results))
        moved_back = zip(results, output_axes, strict=True)
        return [*states, *(None if owner is None else np.expand_dims(owner, axis) for owner, axis in moved_back)]

    def _follow_iterations(
        self,
        graph: OnnxGraph,
        names: Sequence[str],
        state_owners: Sequence[Owners | None],
        fixed_inputs: Feed,
        owners: Mapping[str, Owners],
        *,
        skipped: int,
    ) -> tuple[list[Owners | None], list[Owners | None]]:
        """The owners of a loop's states and of its other outputs, after any number of iterations.

        graph: the body. names, state_owners: the initial values of the states and their owners. fixed_inputs, owners:
        the other inputs of the body and their owners. The first *skipped* outputs must depend on no sample.
        """
        inner = [value.name for value in graph.input if value.name not in fixed_inputs]
        feed = {**fixed_inputs, **{state: self._value(name) for state, name in zip(inner, names, strict=True)}}
        states = list(state_owners)
        # A fixed point: a state that gets an owner in one iteration may pass it to another state in the next.
        for _ in range(_MAX_ITERATIONS):
            known_owners = {state: owners for state, owners in zip(inner, states, strict=True) if owners is not None}
            run = self._body_run(graph, feed, {**owners, **known_owners})
            results = run.follow()
            shapes_after = [run.shape(value.name) for value in graph.output[skipped : skipped + len(states)]]
            shapes_before = [feed[state].shape for state in inner]
            if any(owner is not None for owner in results[:skipped]) or shapes_after != shapes_before:
                raise Mixed
            states_after = [joined(*pair) for pair in zip(states, results[skipped:], strict=False)]
            if all(_same_owners(*pair) for pair in zip(states, states_after, strict=True)):
                return states, results[skipped + len(states) :]
            states = states_after
        raise Mixed

    def _body_run(self, graph: OnnxGraph, feed: Feed, owners: Mapping[str, Owners]) -> _Run:
        """A run of the body of a control-flow node, in which tensors that it captures from outside are inputs.

        feed, owners: the body's own inputs, and the owners of those that depend on samples.
        """
        captured_names = sorted(captured(graph))
        outer = [name for name in captured_names if name not in self.weights]
        body_inputs = {**{name: self._value(name) for name in outer}, **feed}
        known_owners = {**{name: self.owners[name] for name in outer if name in self.owners}, **owners}
        weights = [*graph.initializer, *(self.weights[name] for name in captured_names if name in self.weights)]
        inputs = [declared_like(name, values) for name, values in body_inputs.items()]
        inner = make_model(
            graph.node, graph.name, inputs, graph.output, weights, like=self.model, ir_version=self._ir_version
        )
        varying = {name for name in body_inputs if name not in known_owners and (name in feed or name in self.varying)}
        run = _Run(inner, self.runner, body_inputs, known_owners, self.branches, varying)
        self.by_size = True
        return run


def _depends_on_size(node: OnnxNode, input_owners: Sequence[Owners | None], results: Iterable[Owners]) -> bool:
    """Whether a node moved samples by computed indices, or (Reshape) may do so in batches of other sizes."""
    if node.op_type == "Reshape":
        return True
    rule = find(qualified(node)).rows
    if rule is None or not rule.by_numbers or input_owners[0] is None:  # no values decide where rows go
        return False
    # Squeezed, because only the order of the samples counts, and not axes of size 1.
    return any(not np.array_equal(np.squeeze(input_owners[0]), np.squeeze(owners)) for owners in results)


def _same_owners(first: Owners | None, second: Owners | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _names_of_read_values(graph: OnnxGraph) -> set[str]:
    """Names of the tensors whose values, and not only their owners, the row rules read."""
    names = set[str]()
    for node in graph.node:
        rule = find(qualified(node)).rows
        names |= {node.input[place] for place in (rule.reads if rule else ()) if place < len(node.input)}
        if bodies(node):
            names |= names_read(node)
    return names
