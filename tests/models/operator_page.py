"""``docs/operators.md``: which facets each operator has, and which operators have none.

python -m tests.models.operator_page
"""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill

import onnx
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from tests import ROOT
from weft.models.onnx_import.walk import CONTROL
from weft.models.operators import FAMILIES, OPERATORS, Operator
from weft.models.operators.rules import costs

LISTED = ("1.23", "1.31")
"""The onnx and the ONNX Runtime whose operators the page goes through."""

HEAD = f"""# Operators

Use this page to see what weft knows about an ONNX operator: its cost, and whether a node of it can be batched, compiled
or stitched. Example: `Erf` has no mark under `stitching`, so `weft stitch` runs an `Erf` node for each model alone.

`python -m tests.models.operator_page` writes this page from the table in `src/weft/models/operators`, and a test
compares the two. Each operator is one entry of that table. An entry that lacks a facet (a column) has a safe default:

| column | what the entry says | without it |
|---|---|---|
| cost | the layers of a node: GEMM view, weights, bytes | one layer that costs its activation traffic |
| shapes | shapes of outputs that ONNX's shape inference leaves open | the shapes that ONNX infers, else the file's |
| rows | which rows of the outputs depend on which rows of the inputs | a model that has it is not batched |
| values | inputs whose values decide shapes or time | shapes alone decide |
| torch | what it computes, in torch | the node is left to ONNX Runtime |
| stitching | how `weft stitch` joins it across models | it runs for each model alone |

Operators are those of onnx {LISTED[0]} and ONNX Runtime {LISTED[1]}. A missing mark under `values` is no gap: the
default is right for that operator.
"""


def installed() -> tuple[str, str]:
    onnx_version, runtime = (".".join(each.split(".")[:2]) for each in (onnx.__version__, onnxruntime.__version__))
    return onnx_version, runtime


def page() -> str:
    """The whole text of the page."""
    parts = [HEAD]
    for family in FAMILIES:
        title = family.__name__.rpartition(".")[2].capitalize()
        rows = "\n".join(map(_row, family.OPERATORS))
        parts.append(f"## {title}\n\n| operator | cost | shapes | rows | values | torch | stitching |\n"
                     f"|---|---|---|---|---|---|---|\n{rows}\n")  # fmt: skip
    parts.append(_missing())
    return "\n".join(parts)


def _row(operator: Operator) -> str:
    facets = (
        operator.cost is not costs.unknown,
        bool(operator.shapes or operator.shapes_of),
        operator.rows is not None,
        bool(operator.sized_by),
        operator.torch is not None,
        operator.stitching is not None,
    )
    return f"| `{operator.name}` | {' | '.join('yes' if facet else '' for facet in facets)} |"


def _missing() -> str:
    """Operators of the standard and of ONNX Runtime without an entry, or without a facet that matters."""
    listed = standard() | runtimes()
    control = set(CONTROL)
    without = {
        "no entry": listed - OPERATORS.keys() - control,
        "no rows": {name for name in listed & OPERATORS.keys() if not _of(name).rows and not _of(name).random},
        "no meaning in torch": {name for name in listed & OPERATORS.keys() if not _of(name).torch},
    }
    texts = [f"### With {what} ({len(names)})\n\n{_list(names)}\n" for what, names in without.items()]
    head = (
        "## Missing\n\nThese operators of the standard, of `ai.onnx.ml` and of ONNX Runtime's `com.microsoft` have no\n"
        f"entry, or their entry lacks rows or torch. Control flow ({_list(control)}) needs no entry, because all code\n"
        "that follows a graph also enters the bodies of these nodes.\n"
    )
    return "\n".join([head, *texts])


def _of(name: str) -> Operator:
    return OPERATORS[name]


def _list(names: Iterable[str]) -> str:
    return fill(", ".join(f"`{name}`" for name in sorted(names)), 120, break_on_hyphens=False)


def standard() -> set[str]:
    """The operators of the standard that are not deprecated, and those of ``ai.onnx.ml``."""
    schemas = [each for each in onnx.defs.get_all_schemas() if not each.deprecated]
    return {_name(each.domain, each.name) for each in schemas if each.domain in ("", "ai.onnx.ml")}


def runtimes() -> set[str]:
    return {_name(each.domain, each.name) for each in get_all_operator_schema() if each.domain == "com.microsoft"}


def _name(domain: str, name: str) -> str:
    return f"{domain}:{name}" if domain else name


if __name__ == "__main__":
    (ROOT / "docs" / "operators.md").write_text(page(), "utf-8")
