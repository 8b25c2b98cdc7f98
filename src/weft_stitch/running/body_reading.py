"""A body of stitched models -> the weights that kernels for a GPU read: ``read_encoder``.

Supported are encoders with norms after the residual sums (BERT's kind), with a pooler and a classifier for each model.
A body is a list of steps (ONNX nodes) with the constants of each model. The role of a weight follows from the inputs
and readers of its step. Scales, masks and activations are assumed to be
the usual ones, so the caller must compare answers (``body_serving.check``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.bodies.body import Body, BodyStep, BodyValue, LowRank
from weft_stitch.net import Array
from weft_stitch.packing import align_up
from weft_stitch.running.body_rows import FINEST, room_for
from weft_stitch.running.fused_body import BodyLayer, BodyWeights, OwnHead, RowNorm, SharedProduct
from weft_stitch.running.operators import Tensor, torch

NORM = "LayerNormalization"


class BodyEncoder(NamedTuple):
    """Encoders that share a backbone, with weights laid out for the kernels."""

    names: tuple[str, ...]
    weights: BodyWeights
    classes: tuple[int, ...]
    """Number of outputs of each model."""
    tokens: str
    """The input with token ids."""
    token_types: str = ""
    """The input with token types; empty if there is none."""
    mask: str = ""
    """The attention mask, 1 at tokens and 0 at padding; empty if there is none."""


class EmbeddedTables(NamedTuple):
    """The embedding tables that are summed before the first norm, and the inputs that index them."""

    tokens: str
    """The input with token ids."""
    words: Array
    positions: Array
    token_types: str = ""
    """The input with token types; empty if there is none."""
    token_type_table: Array | None = None


class DenseStep(NamedTuple):
    """A product with weights, and the addition of its bias."""

    product: int
    """Index of the product's step."""
    bias: int | None
    """Index of the step that adds the bias; None if the product has it, or there is none."""
    read: BodyValue
    """The value that the product reads."""
    output: BodyValue
    """The value with the bias added."""


def read_encoder(body: Body) -> BodyEncoder:
    """The weights of *body*'s models for the kernels; ``StitchError`` if the body is not of the supported kind.

    The models must share all weights except low-rank parts, biases, norms and heads.
    """
    try:
        return _EncoderReader(body).encoder()
    except (AssertionError, LookupError, StopIteration, TypeError, ValueError) as error:  # the description is wrong
        raise _unsupported(f"its steps do not fit together: {type(error).__name__} {error}") from error


class _EncoderReader:
    """Finds the role of each weight of an encoder by the steps around it.

    In its methods, *number* is the index of a step, and *index* that of an input of a step.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self._users: dict[BodyValue, list[int]] = {}
        """Value -> indices of the steps that read it."""
        for number, step in enumerate(body.steps):
            for value in dict.fromkeys(source for source in step.inputs if source is not None):
                self._users.setdefault(value, []).append(number)

    def encoder(self) -> BodyEncoder:
        """The encoder with all its weights."""
        norms = [number for number, step in enumerate(self._body.steps) if step.node.op == NORM]
        if len(norms) < 3 or not len(norms) % 2:
            raise _unsupported(f"it has {len(norms)} layer norms, not two for each layer and one before")
        tables = self._embedding_tables(norms[0])
        # a layer is between three norms: the last one of a layer is the first of the next
        layers = [self._layer(*norms[first : first + 3]) for first in range(0, len(norms) - 1, 2)]
        pooler, classifier = self._heads()
        classes = tuple(self._matrix(classifier.product, task).shape[1] for task in range(self._body.tasks))
        token_types = None if tables.token_type_table is None else self._tensor(tables.token_type_table)
        weights = BodyWeights(
            self._tensor(tables.words), self._tensor(tables.positions), self._norm(norms[0]),
            [layer for layer, _ in layers], self._head(pooler), self._head(classifier), layers[0][1], token_types,
        )  # fmt: skip
        masks = [name for name in self._body.inputs if name not in (tables.tokens, tables.token_types)]
        if len(masks) > 1:
            raise _unsupported(f"it is not known what its inputs {', '.join(masks)} are")
        return BodyEncoder(self._body.names, weights, classes, tables.tokens, tables.token_types, "".join(masks))

    # Parts of an encoder

    def _embedding_tables(self, norm: int) -> EmbeddedTables:
        """The tables whose entries are summed in front of *norm*, the first; the largest indexed one has the words."""
        # *tables*: model input whose numbers are looked up -> table; "" for positions, which are no input
        pending, tables, visited = [self._first_input(norm)], dict[str, Array](), set[BodyValue]()
        while pending:
            value = pending.pop()
            number = value.step
            if value in visited:
                raise _unsupported(f"its first layer norm reads {self._step_name(number)} more than once")
            visited.add(value)
            step = self._body.steps[number]
            values = [source for source in step.inputs if source is not None]
            if step.node.op == "Add":
                pending += values
                continue
            model_input = self._body.inputs[values[0].output] if step.node.op == "Gather" and values[0].step < 0 else ""
            index = next(index for index, key in enumerate(step.contents[0]) if key)  # the input that is a constant
            tables[model_input] = self._shared_constant(number, index)
        tokens = max((name for name in tables if name), key=lambda name: tables[name].size, default="")
        if not tokens or "" not in tables:
            raise _unsupported("its first layer norm does not read words and positions")
        positions = tables[""].reshape(-1, tables[""].shape[-1])
        others = [name for name in tables if name not in ("", tokens)]
        if len(others) > 1:
            raise _unsupported(f"it adds embeddings for {', '.join(others)}, and only one input besides words is known")
        embedded = EmbeddedTables(tokens, tables[tokens], positions)
        return embedded._replace(token_types=others[0], token_type_table=tables[others[0]]) if others else embedded

    def _layer(self, before: int, between: int, behind: int) -> tuple[BodyLayer, int]:
        """The layer between three norms, given by the indices of their steps, and its number of heads."""
        hidden, middle = BodyValue(before, 0), BodyValue(between, 0)  # the outputs of the first two norms
        projections, heads = self._attention_products(hidden)
        attention_output, outer = self._added_product(between, hidden), self._added_product(behind, middle)
        inner = self._products(middle)
        if len(inner) != 1:
            raise _unsupported(f"{len(inner)} products read what {self._step_name(between)} makes, not one")
        layer = BodyLayer(
            self._shared_product(projections), self._shared_product([attention_output]), self._norm(between),
            self._shared_product(inner), self._shared_product([outer]), self._norm(behind),
        )  # fmt: skip
        return layer, heads

    def _attention_products(self, hidden: BodyValue) -> tuple[list[DenseStep], int]:
        """The products of queries, keys and values, in this order (or one joint product), and the number of heads."""
        products = self._products(hidden)
        if len(products) == 1:
            return products, self._head_count(products[0])
        roles = {self._attention_role(dense.output): dense for dense in products}
        if len(products) != 3 or len(roles) != 3:
            raise _unsupported(f"{len(products)} products read what {self._step_name(hidden.step)} makes, not three")
        return [roles[role] for role in sorted(roles)], self._head_count(roles[0])  # role 0: the queries

    def _attention_role(self, value: BodyValue) -> int:
        """0, 1 or 2 for a value that becomes the queries, keys or values of an attention: its readers are followed."""
        while True:
            number = self._only_reader(value)
            step = self._body.steps[number]
            values = [source for source in step.inputs if source is not None]
            if step.node.op == "Attention":
                return values.index(value)
            if step.node.op == "MatMul" and len(values) == 2:  # of queries and keys, or of softmax and values
                return 2 if values[1] == value and self._is_softmax(values[0]) else values.index(value)
            value = BodyValue(number, 0)

    def _is_softmax(self, value: BodyValue) -> bool:
        """Whether *value* comes from a softmax and not from a product: last inputs are followed back to one of them."""
        while value.step >= 0:
            step = self._body.steps[value.step]
            if step.node.op in ("MatMul", "Softmax"):
                return step.node.op == "Softmax"
            value = [source for source in step.inputs if source is not None][-1]
        return False

    def _head_count(self, dense: DenseStep) -> int:
        """The number of heads, from the shape [.., heads, head width] to which the attention's input is reshaped."""
        step = self._body.steps[self._only_reader(dense.output)]
        sizes = self._numbers(step, 1) if step.node.op == "Reshape" else []
        width = self._matrix(dense.product, 0).shape[0]
        if len(sizes) > 1 and max(sizes[-2:]) > 0:  # one of the two may be -1
            return sizes[-2] if sizes[-2] > 0 else width // sizes[-1]
        raise _unsupported(f"the number of heads of {self._step_name(dense.product)} is not in the graph")

    def _heads(self) -> tuple[DenseStep, DenseStep]:
        """The pooler and the classifier."""
        values = {next(iter(outputs.values())) for outputs in self._body.outputs if len(outputs) == 1}
        if len(values) != 1 or any(len(outputs) != 1 for outputs in self._body.outputs):
            raise _unsupported("its models do not all have one output, of the same step")
        classifier = self._product_behind(values.pop())
        step = self._body.steps[classifier.read.step]
        if step.node.op != "Tanh" or step.inputs[0] is None:
            raise _unsupported(f"{self._step_name(classifier.product)} reads {step.node.op}, not the tanh of a pooler")
        return self._product_behind(step.inputs[0]), classifier

    # Steps

    def _products(self, value: BodyValue) -> list[DenseStep]:
        """The products with weights that read *value*."""
        return [self._dense_step(user) for user in self._users.get(value, ()) if self._is_product(user)]

    def _added_product(self, norm: int, hidden: BodyValue) -> DenseStep:
        """The product whose output is added to *hidden* in the residual sum that *norm* reads."""
        step = self._body.steps[self._first_input(norm).step]
        others = [source for source in step.inputs if source is not None and source != hidden]
        if step.node.op != "Add" or len(others) != 1 or hidden not in step.inputs:
            raise _unsupported(f"{self._step_name(norm)} does not read a sum with what the norm before it made")
        return self._product_behind(others[0])

    def _dense_step(self, product: int) -> DenseStep:
        """The product at the step *product*, with the addition of its bias if that is the only reader."""
        step = self._body.steps[product]
        source, output = step.inputs[0], BodyValue(product, 0)
        assert source is not None
        users = self._users.get(output, ())
        if step.node.op == "MatMul" and len(users) == 1 and self._is_bias(users[0]):
            return DenseStep(product, users[0], source, BodyValue(users[0], 0))
        return DenseStep(product, None, source, output)

    def _product_behind(self, value: BodyValue) -> DenseStep:
        """The product that computes *value*, with its bias, over which the search goes back."""
        number = value.step
        while number >= 0 and (self._body.steps[number].node.op == "Identity" or self._is_bias(number)):
            number = next(source.step for source in self._body.steps[number].inputs if source is not None)
        if number < 0 or not self._is_product(number):
            raise _unsupported(f"{self._step_name(value.step)} is no product with weights")
        return self._dense_step(number)

    def _is_product(self, number: int) -> bool:
        """Whether a step multiplies by a stored matrix."""
        step = self._body.steps[number]
        # an input is None if it is a constant
        has_weight = step.node.op in ("MatMul", "Gemm") and step.inputs[0] is not None and step.inputs[1] is None
        return has_weight and all(len(self._shape(keys[1])) == 2 for keys in step.contents.values())

    def _is_bias(self, number: int) -> bool:
        """Whether a step adds a stored vector."""
        step = self._body.steps[number]
        keys = [key for key in step.contents[min(step.contents)] if key]  # of any model: all have equal shapes
        return step.node.op == "Add" and len(keys) == 1 and len(self._shape(keys[0])) == 1

    def _only_reader(self, value: BodyValue) -> int:
        """The only step that reads *value*, except ``Shape`` steps; ``StitchError`` if there is not exactly one."""
        readers = [user for user in self._users.get(value, ()) if self._body.steps[user].node.op != "Shape"]
        if len(readers) != 1:
            raise _unsupported(f"{len(readers)} steps read what {self._step_name(value.step)} makes, not one")
        return readers[0]

    def _first_input(self, number: int) -> BodyValue:
        """The first input of a step, which another step must write."""
        value = self._body.steps[number].inputs[0]
        if value is None or value.step < 0:
            raise _unsupported(f"{self._step_name(number)} reads no step")
        return value

    def _step_name(self, number: int) -> str:
        """The name of a step in messages; -1 is an input of the body."""
        names = self._body.steps[number].names
        return names[min(names)] if number >= 0 else "an input"

    # Numbers

    def _numbers(self, step: BodyStep, index: int) -> list[int]:
        """The sizes in the shape at input *index* of a step: -1 where not constant, none if the shape is not stored."""
        value, arrays = step.inputs[index], self._body.constants.arrays
        if value is None:
            key = step.contents[min(step.contents)][index]
            return [int(number) for number in arrays[key].reshape(-1)] if key in arrays else []
        writer = self._body.steps[value.step]
        if value.step < 0 or writer.node.op != "Concat":
            return [-1]
        return [
            number
            for position, source in enumerate(writer.inputs)
            for number in (self._numbers(writer, position) if source is None else [-1])
        ]

    def _shape(self, key: str) -> tuple[int, ...]:
        """The shape of the constant with *key*; empty if it is not stored."""
        array = self._body.constants.arrays.get(key)
        return () if array is None else array.shape

    def _weights_of(self, number: int, index: int, task: int) -> Array:
        """The constant at input *index* of the step *number* in model *task*; ``StitchError`` if it has none."""
        contents = self._body.steps[number].contents.get(task)
        array = self._body.constants.arrays.get(contents[index]) if contents else None
        if array is None:
            raise _unsupported(f"{self._body.names[task]} has no stored weights at {self._step_name(number)}")
        return array

    def _shared_constant(self, number: int, index: int) -> Array:
        """The constant at input *index* of a step; ``StitchError`` if models differ in more than low-rank parts."""
        array, step = self._weights_of(number, index, 0), self._body.steps[number]
        if any(self._weights_of(number, index, task) is not array for task in range(1, self._body.tasks)):
            raise _unsupported(f"the models have different weights at {self._step_name(number)}")
        if step.lines:
            raise _unsupported(f"the models have lines of their own in the table at {self._step_name(number)}")
        self._low_rank_parts(number)  # refuses other differences
        return array

    def _low_rank_parts(self, number: int) -> dict[int, LowRank]:
        """Model -> its low-rank part at a step; ``StitchError`` for differences of another kind."""
        parts = self._body.steps[number].parts
        for part in parts.values():
            # factors on rows or columns: kernels have none, and files do not store them
            if part.before is not None or part.after is not None:
                raise _unsupported(
                    f"weights differ in {part.kind}, and not by a low rank, at {self._step_name(number)}"
                )
        return parts

    def _matrix(self, number: int, task: int) -> Array:
        """The weight of a product in model *task*: [in, out]."""
        matrix = self._weights_of(number, 1, task)
        return matrix.T if self._body.steps[number].node.attributes.get("transB") else matrix

    def _shared_product(self, dense_steps: Sequence[DenseStep]) -> SharedProduct:
        """Products of the same input as one product with their columns side by side; each becomes a section."""
        for dense in dense_steps:
            self._shared_constant(dense.product, 1)  # refuses different weights
        weight = np.concatenate([self._matrix(dense.product, 0) for dense in dense_steps], axis=1)
        biases = [self._bias(dense) for dense in dense_steps]
        bias_rows = max(map(len, biases))
        bias = np.concatenate([np.broadcast_to(row, (bias_rows, row.shape[1])) for row in biases], axis=1)
        tensors = self._tensor(weight), self._tensor(bias)
        parts = [part for dense in dense_steps for part in self._body.steps[dense.product].parts.values()]
        rank = max((part.rank for part in parts), default=0)
        if not rank:
            return SharedProduct(*tensors)
        padded_rank = max(FINEST, room_for(rank))  # the kernels need a power of two
        return SharedProduct(*tensors, *self._stack_factors(dense_steps, weight, padded_rank))

    def _stack_factors(self, dense_steps: Sequence[DenseStep], weight: Array, room: int) -> tuple[Tensor, Tensor]:
        """``down`` and ``up`` for *weight* [depth, width]: all models' factors, padded to the rank *room*."""
        (depth, width), tasks = weight.shape, self._body.tasks
        down = np.zeros((tasks, len(dense_steps), room, depth), np.float32)
        up = np.zeros((tasks, room, width), np.float32)
        section_width = width // len(dense_steps)
        for section, dense in enumerate(dense_steps):
            for task, part in self._body.steps[dense.product].parts.items():
                down[task, section, : part.rank] = part.down.T
                up[task, : part.rank, section * section_width : (section + 1) * section_width] = part.up
        return self._tensor(down), self._tensor(up)

    def _bias(self, dense: DenseStep) -> Array:
        """The bias of a product: [1 or models, width]."""
        width = self._matrix(dense.product, 0).shape[1]
        if dense.bias is not None:
            keys = self._body.steps[dense.bias].contents[0]  # empty for inputs that are no constants
            return self._table(dense.bias, next(index for index, key in enumerate(keys) if key))
        step = self._body.steps[dense.product]
        return self._table(dense.product, 2) if len(step.inputs) > 2 else np.zeros((1, width), np.float32)

    def _table(self, number: int, index: int) -> Array:
        """The models' constants at input *index* of a step, stacked along axis 0; one entry if all are one array."""
        arrays = [self._weights_of(number, index, task) for task in range(self._body.tasks)]
        return np.stack(arrays[:1] if all(array is arrays[0] for array in arrays) else arrays)

    def _norm(self, number: int) -> RowNorm:
        """The scale, shift and epsilon of a layer norm."""
        scale, shift = self._table(number, 1), self._table(number, 2)
        table_rows = max(len(scale), len(shift))
        tensors = [self._tensor(np.broadcast_to(table, (table_rows, table.shape[1]))) for table in (scale, shift)]
        return RowNorm(tensors[0], tensors[1], float(self._body.steps[number].node.attributes.get("epsilon", 1e-5)))

    def _head(self, dense: DenseStep) -> OwnHead:
        """Each model's product at *dense* as a head, padded with zeros to the widest."""
        tasks, factors = range(self._body.tasks), self._low_rank_parts(dense.product)
        matrices = [self._matrix(dense.product, task) for task in tasks]
        # rounded up, so that models with more classes fit later
        width = align_up(max(matrix.shape[1] for matrix in matrices), FINEST)
        weight = np.zeros((len(tasks), len(matrices[0]), width), np.float32)
        bias = np.zeros((len(tasks), width), np.float32)
        for task, matrix in enumerate(matrices):
            weight[task, :, : matrix.shape[1]] = factors[task].apply(matrix) if task in factors else matrix
            bias[task, : matrix.shape[1]] = self._own_bias(dense, task)
        return OwnHead(self._tensor(weight), self._tensor(bias))

    def _own_bias(self, dense: DenseStep, task: int) -> Array | float:
        """The bias of model *task* at a product; 0 if it has none."""
        if dense.bias is not None:
            keys = self._body.steps[dense.bias].contents[task]  # empty for inputs that are no constants
            return self._weights_of(dense.bias, next(index for index, key in enumerate(keys) if key), task)
        return self._weights_of(dense.product, 2, task) if len(self._body.steps[dense.product].inputs) > 2 else 0.0

    def _tensor(self, array: Array) -> Tensor:
        """A copy of *array* as a tensor of float32."""
        return torch.from_numpy(np.array(array, np.float32))


def _unsupported(why: str) -> StitchError:
    """The error for a body that has no kernels; *why*: the reason."""
    return StitchError(f"the body is not of a kind that has kernels: {why}")
