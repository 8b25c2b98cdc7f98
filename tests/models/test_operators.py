"""The table of operators: each facet of an entry says what ONNX's reference or ONNX Runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import ROOT
from tests.models.operator_cases import (
    Array,
    NodeCase,
    cases_by_operator,
    fed,
    in_torch,
    known_to_torch,
    opened,
)
from tests.models.operator_page import LISTED, installed, page
from weft.base.errors import ModelError
from weft.models.onnx_graph import Attributes, qualified
from weft.models.onnx_import.tensors import computed
from weft.models.operators import FAMILIES, OPERATORS, find
from weft.models.operators.rules.rows import Mixed, RowCase, numbered, owners_after
from weft_stitch.reading.onnx_ops import FORMS


def test_an_operator_has_one_entry():
    assert len(OPERATORS) == sum(len(family.OPERATORS) for family in FAMILIES)


def test_an_operator_without_an_entry_has_the_defaults():
    unknown = find("elsewhere:Relu")
    assert (unknown.rows, unknown.torch, unknown.stitching, unknown.sized_by) == (None, None, None, ())


def test_every_stitching_form_is_one_that_the_reader_has_and_every_form_is_used():
    forms = {operator.stitching.form for operator in OPERATORS.values() if operator.stitching}
    assert forms == set(FORMS)


def test_docs_list_the_facets_of_every_operator():
    if installed() != LISTED:
        pytest.skip(f"the page lists the operators of onnx and ONNX Runtime {LISTED}, installed are {installed()}")
    path = ROOT / "docs" / "operators.md"
    assert path.read_text("utf-8") == page(), "write it anew: python -m tests.models.operator_page"


# Meanings in torch


def test_every_meaning_in_torch_computes_what_the_reference_does():
    torch = pytest.importorskip("torch")
    wrong: list[str] = []
    compared: set[str] = set()
    for name, cases in cases_by_operator().items():
        operator = find(name)
        for case in cases if operator.torch else ():
            if not known_to_torch(case):
                continue
            try:
                results = in_torch(torch, operator, case)
            except ModelError:
                continue  # it says that it does not cover these attributes
            wrong += [case.title] if not equal(results, case.outputs) else []
            compared.add(name)
    assert not wrong
    assert {name for name, operator in OPERATORS.items() if operator.torch} == compared


def equal(results: list[Array], expected: Any) -> bool:
    return len(results) == len(expected) and all(
        result.shape == value.shape
        and result.dtype == value.dtype
        and np.allclose(result, value, rtol=tolerance(value), atol=tolerance(value), equal_nan=True)
        for result, value in zip(results, expected, strict=True)
    )


def tolerance(value: Array) -> float:
    return 1e-3 if value.dtype == np.float16 else 1e-5


def test_every_meaning_in_torch_survives_the_conversion_of_a_graph():
    """Nodes as graphs, beside ONNX Runtime; four cases of each operator, which are far apart in onnx's list."""
    pytest.importorskip("torch")
    from tests.runtime.cuda.conversion_cases import operator_graphs
    from tests.runtime.cuda.converted import problems

    graphs = operator_graphs(4)
    assert {name for name, operator in OPERATORS.items() if operator.torch} == {name for name in graphs if graphs[name]}
    assert not problems(case for cases in graphs.values() for case in cases)[1]


# Shapes


def test_every_shape_rule_gives_the_shape_that_the_reference_does():
    wrong: list[str] = []
    compared: set[str] = set()
    for name, cases in cases_by_operator().items():
        rules = find(name).shapes
        for case in cases if rules else ():
            tensors = [None if value is None or value.dtype == object else computed(value) for value in case.inputs]
            if tensors[0] is None or name == "Reshape":  # whose rule is for the oldest version
                continue
            named = [rule for rule, output in zip(rules, case.node.output, strict=False) if output]
            for rule, value in zip(named, case.outputs, strict=False):
                shape = rule(tensors, Attributes(case.node))
                agrees = shape is None or (
                    len(shape) == value.ndim
                    and all(size in (None, real) for size, real in zip(shape, value.shape, strict=True))
                )
                wrong += [] if agrees or broadcasts(name) else [case.title]
                compared.add(name)
    assert not wrong
    assert len(compared) > 40


def broadcasts(name: str) -> bool:
    """Whether the rule holds only where ONNX infers nothing: old versions, whose first input has the shape."""
    return name in ("Add", "Sub", "Mul", "Div", "Sum", "Min", "Max", "Mean", "LayerNormalization")


# Rows


def test_no_element_changes_with_a_row_that_its_rule_does_not_name():
    """Rows of the first input are drawn anew one by one; the elements that change must belong to the row drawn."""
    compared: set[str] = set()
    for name, cases in cases_by_operator().items():
        rule = find(name).rows
        for case in cases if rule else ():
            value = case.inputs[0] if case.inputs else None
            if value is None or value.dtype != np.float32 or not len(value.shape) > 1 or value.shape[0] < 2:
                continue
            session = opened(case)
            owners = session and owners_of(case, session)
            if not owners:
                continue
            compared.add(name)
            for row in range(value.shape[0]):
                assert_only_its_own_change(case, session, owners, row)
    assert len(compared) > 60


def run(case: NodeCase, session: Any, first: Array) -> list[Array]:
    return list(session.run(None, {**fed(case), case.node.input[0]: first}))


def owners_of(case: NodeCase, session: Any) -> list[Any] | None:
    """What the row rule says of the outputs, with each row of the first input a sample; None where they mix."""
    first = case.inputs[0]
    owners = [numbered(1, len(first), first.ndim), *[None] * (len(case.inputs) - 1)]
    shapes = [None if value is None else value.shape for value in case.inputs]

    def compute(node: Any, feed: Any) -> list[Array]:
        if node.op_type != case.node.op_type or len(feed) > 1:
            raise Mixed
        return run(case, session, feed[0])

    try:
        made = [value.shape for value in run(case, session, first)]
        row_case = RowCase(case.node, case.version, owners, shapes, made, lambda place: case.inputs[place], compute)
        return owners_after(find(qualified(case.node)).rows, row_case)
    except Exception:  # ``Mixed``, or ONNX Runtime does not take these inputs
        return None


def assert_only_its_own_change(case: NodeCase, session: Any, owners: list[Any], row: int) -> None:
    first = case.inputs[0].copy()
    before = run(case, session, first)
    first[row] = np.random.default_rng(row).permutation(first[row].ravel()).reshape(first[row].shape) * 0.5
    for old, new, owner in zip(before, run(case, session, first), owners, strict=True):
        changed = ~((old == new) | ((old != old) & (new != new)))
        belongs = np.broadcast_to(0 if owner is None else owner, old.shape) == row + 1
        assert not np.any(changed & ~belongs), f"{case.title}: row {row}"
