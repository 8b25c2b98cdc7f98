"""What tools may import of the core: its public modules, listed in docs/tools.md, and nothing private."""

from __future__ import annotations

import ast

import pytest

from tests import ROOT
from tests.structure import CORE, MODULES, TOOLS, dotted, imported, parsed

PUBLIC = (
    "weft.base.child_processes",
    "weft.base.errors",
    "weft.base.files",
    "weft.base.jsonfile",
    "weft.base.settings",
    "weft.base.shapes",
    "weft.base.tomlfile",
    "weft.base.version",
    "weft.cli.command",
    "weft.cli.common",
    "weft.cli.printing",
    "weft.cli.saturated",
    "weft.cli.settings",
    "weft.devices",
    "weft.devices.costs",
    "weft.devices.costs.layer_costs",
    "weft.devices.costs.program",
    "weft.engine",
    "weft.engine.policies",
    "weft.engine.policies.base",
    "weft.http.client",
    "weft.http.messages",
    "weft.http.server",
    "weft.kernels.compiling",
    "weft.models",
    "weft.models.classifiers",
    "weft.models.element_types",
    "weft.models.onnx_graph",
    "weft.models.operators",
    "weft.models.sources",
    "weft.models.zoo",
    "weft.planning.machine",
    "weft.planning.planning_run",
    "weft.reports.exhibits",
    "weft.reports.page",
    "weft.reports.pictures",
    "weft.reports.tables",
    "weft.reports.timeline",
    "weft.reports.trace",
    "weft.reports.words",
    "weft.runtime.backend",
    "weft.runtime.cuda.model_files",
    "weft.runtime.cuda.torch_files",
    "weft.runtime.cuda.torch_types",
    "weft.runtime.facets",
    "weft.runtime.metadata",
    "weft.runtime.onnxruntime_cpu.sessions",
    "weft.runtime.samples",
    "weft.runtime.stitched",
    "weft.runtime.tensors",
    "weft.runtime.timing",
    "weft.serving.config",
    "weft.serving.in_process",
    "weft.simulation",
    "weft.simulation.report",
    "weft.simulation.request_report",
    "weft.simulation.requests",
    "weft.simulation.sustain",
    "weft.workloads",
    "weft.workloads.requests",
)
"""Modules of the core that any tool may import; docs/tools.md says what is in each."""

INSIDE = {
    "weft_cluster": {
        "weft.cli.bench",
        "weft.engine.arrivals",
        "weft.engine.batches",
        "weft.engine.lateness",
        "weft.engine.tickets",
        "weft.http.limits",
        "weft.kernels.buffer",
        "weft.kernels.request_loop",
        "weft.kernels.request_state",
        "weft.load",
        "weft.planning.measured",
        "weft.serving.endpoints",
        "weft.serving.grpc_calls",
        "weft.serving.grpc_health",
        "weft.serving.grpc_messages",
        "weft.serving.grpc_wire",
        "weft.serving.json_helpers",
        "weft.serving.access",
        "weft.serving.metrics",
        "weft.serving.openapi",
        "weft.serving.proto",
        "weft.serving.request_parameters",
        "weft.serving.routes",
        "weft.serving.server",
        "weft.serving.telemetry",
        "weft.simulation.requests.case",
        "weft.simulation.requests.plain",
        "weft.simulation.requests.compiled",
    },
    "weft_map": {
        "weft.devices.decoupled",
        "weft.reports.trace_exports",
    },
    "weft_papers": {
        "weft.devices.costs.explore",
        "weft.devices.costs.tiled",
        "weft.devices.gpu_pairs",
        "weft.devices.tiled",
        "weft.engine.policies.abreast",
        "weft.engine.policies.bound",
        "weft.models.exits",
        "weft.simulation.requests.host",
        "weft.simulation.requests.plain",
        "weft.simulation.saturated",
        "weft.simulation.sweep",
        "weft.simulation.workers",
    },
    "weft_stitch": {
        "weft.models.onnx_import.infer",
        "weft.models.onnx_import.widths",
        "weft.models.packaged",
        "weft.models.stored",
        "weft.runtime.external",
    },
    "weft_tune": {
        "weft.devices.host",
        "weft.kernels.replay",
        "weft.models.onnx_import.widths",
        "weft.models.packaged",
        "weft.models.trained",
        "weft.planning.plan_request",
        "weft.planning.early_exits",
        "weft.planning.folder",
        "weft.runtime.cutting",
        "weft.runtime.external",
        "weft.runtime.onnxruntime_cpu",
        "weft.runtime.onnxruntime_cpu.profiler",
    },
}
"""What weft's own tools import besides: inner parts that change with them, in the same commit. It shall only shrink."""


def core_imports(tool: str) -> set[str]:
    paths = [path for path in MODULES if dotted(path).split(".")[0] == tool]
    return {module for path in paths for module in imported(path) if module.split(".")[0] == CORE}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_imports_public_modules_of_the_core(tool: str) -> None:
    inside = core_imports(tool) - set(PUBLIC)
    assert inside <= INSIDE.get(tool, set()), "use a public module, or make one of it in PUBLIC and docs/tools.md"
    assert inside == INSIDE.get(tool, set()), "what is not used any more leaves the table"


def test_a_tool_imports_no_private_name_of_the_core() -> None:
    private = [
        f"{dotted(path)}: {node.module}.{alias.name}"
        for path in MODULES
        if dotted(path).split(".")[0] in TOOLS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == CORE
        for alias in node.names
        if any(part.startswith("_") and part != "__version__" for part in (*node.module.split("."), alias.name))
    ]
    assert not private, private


def test_docs_list_the_public_modules() -> None:
    page = (ROOT / "docs/tools.md").read_text("utf-8")
    section = page.partition("## What a tool may import")[2].partition("\n## ")[0]
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `weft.")]
    assert listed == sorted(PUBLIC)
