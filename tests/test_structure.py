"""The shape of the source: dependencies point one way, heavy imports stay where they are used, a name is one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests import ROOT
from tests.structure import (
    CORE,
    DOTTED,
    MODULES,
    TOOLS,
    circles,
    dotted,
    floors,
    hidden,
    imported,
    imported_test_files,
    module_graph,
    modules_imported,
    modules_named,
    name_of,
    parsed,
    room_graph,
    room_of,
)

MOST_ROOMS, MOST_FLOORS = 21, 11

MOST_SHARED_NAMES = 10
"""Class names that may stand for something in more than one file."""

STOREYS = (
    "base", "kernels", "workloads", "models", "reports", "http", "devices", "engine", "runtime", "load", "simulation",
    "serving", "planning", "cli",
)  # fmt: skip
"""A room of the core may import those to its left; tools may import all of them, and papers the other tools."""

ALONE = {
    "base": set(),
    "kernels": set(),
    "models": {"base"},
    "workloads": {"base"},
    "http": {"base"},
    "reports": {"base"},
}
"""Rooms that keep to less than their storey allows: all that they may import of weft."""

ONLY_IN = {
    "matplotlib": (
        "weft/reports/exhibits.py",
        "weft/reports/pictures.py",
        "weft/reports/timeline.py",
        "weft/simulation/designs.py",
        "weft_map/pages/",
        "weft_tune/pages/picture.py",
        "weft_papers/pictures.py",
    ),
    "numba": ("weft/kernels/", "weft_cluster/kernels/", "weft_map/kernels/", "weft_tune/kernels.py"),
    "onnx": (
        "weft/models/",
        "weft/runtime/",
        "weft_stitch/onnx_writer.py",
        "weft_stitch/reading/onnx_",
        "weft_tune/export/",
        "weft_tune/quantised/",
        "weft_tune/runtime_target/",
    ),
    "typer": ("weft/cli/", *(f"{tool}/cli" for tool in TOOLS)),
    "rich": ("weft/cli/", *(f"{tool}/cli" for tool in TOOLS)),
    "onnxruntime": (
        "weft/runtime/onnxruntime_cpu/",
        "weft/runtime/cuda/",
        "weft_tune/quantised/",
        "weft_tune/runtime_target/",
    ),
    "grpc": ("weft/serving/", "weft_cluster/gates/grpc_face.py"),
    "httptools": ("weft/http/connections.py",),
    "opentelemetry": ("weft/serving/telemetry.py",),
    "ortools": ("weft_map/", "weft_cluster/placing/", "weft_papers/placing_rivals/"),
    "ray": ("weft_cluster/ray/",),
    "z3": ("weft_map/z3_model.py",),
    "torch": (
        "weft/runtime/cuda/gpu.py",
        "weft/runtime/cuda/gpu_gates.py",
        "weft/runtime/cuda/borrowed.py",
        "weft/runtime/cuda/movable.py",
        "weft/runtime/cuda/torch_",
        "weft_stitch/on_device/",
        "weft_stitch/running/",
        "weft_stitch/reading/torch_",
    ),
    "triton": (
        "weft_stitch/running/kernel.py",
        "weft_stitch/running/kernel_shapes.py",
        "weft_stitch/running/body_kernels.py",
    ),
    "cuda": ("weft/runtime/cuda/partitions.py", "weft/runtime/cuda/gpu_gates.py"),
}
"""Where a package may be imported."""


ROOM = "weft.runtime.onnxruntime_cpu"
"""A backend, which the server knows by the protocol only."""

ROOM_USERS = {"weft_stitch/running/sessions.py"}
"""Modules that want that one and no other, besides itself, its workers and what runs files on a device."""


def may_import(room: str) -> set[str]:
    if room == "weft_papers":
        return {*STOREYS, *TOOLS}
    if room in TOOLS:
        return {*STOREYS, room}
    return ALONE.get(room, set(STOREYS[: STOREYS.index(room)])) if room != CORE else {"base"}


def test_every_room_has_its_storey():
    assert set(map(room_of, DOTTED)) == {CORE, *STOREYS, *TOOLS}


def test_dependencies_point_one_way_and_the_core_imports_no_tool():
    upward = {
        name_of(path): rooms
        for path in MODULES
        if (rooms := {room_of(module) for module in (imported(path) | hidden(path)) & DOTTED}
            - {room_of(dotted(path))} - may_import(room_of(dotted(path))))
    }  # fmt: skip
    assert not upward, upward


def test_rooms_floors_and_circles_stay_few():
    modules = module_graph()
    rooms = room_graph(modules)
    assert not circles(modules) and not circles(rooms)
    assert len(rooms) <= MOST_ROOMS
    assert max(floors(rooms).values()) <= MOST_FLOORS


def test_no_module_is_imported_by_a_string():
    named = {name_of(path): names for path in MODULES if (names := hidden(path))}
    assert not named, named


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ('MAKER = "weft_stitch.on_device.fused_file"', "weft_stitch.on_device.fused_file"),
        ('import_module("weft.planning.finals")', "weft.planning.finals"),
        ('Entry(target="weft.reports.tables:as_html")', "weft.reports.tables"),
        ('import_module(f"weft.cli.{name}")', "weft.cli"),
        ('import_module("weft_map")', "weft_map"),
        ('MODULE = "weft.mapping.problem"', "weft_map.problem"),
    ],
)
def test_an_import_by_a_string_is_seen(code, module):
    assert modules_named(ast.parse(code)) == {module}


@pytest.mark.parametrize(
    "code",
    ['"""``weft.planning.finals``"""', 'log = logging.getLogger("weft.http")', 'print("weft.planning is a room")'],
)
def test_words_and_loggers_are_no_imports(code):
    assert modules_named(ast.parse(code)) == set()


def test_imports_inside_functions_count():
    code = "def run():\n    from weft.planning import finals\n    import weft.serving.server"
    assert modules_imported(ast.parse(code)) == {"weft.planning.finals", "weft.serving.server"}


def test_an_import_by_an_old_name_counts_as_the_module_that_it_is():
    assert modules_imported(ast.parse("from weft.mapping import Solution\nimport weft.errors")) == {
        "weft_map",
        "weft.base.errors",
    }


def test_circles_and_floors_of_a_small_graph():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert floors({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == {"a": 3, "b": 2, "c": 1, "d": 2}


def test_few_class_names_are_shared_between_files():
    files = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(name_of(path))
    shared = {name: where for name, where in files.items() if len(where) > 1}
    assert len(shared) <= MOST_SHARED_NAMES, shared


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_is_imported_only_where_it_is_used(package):
    users = [name_of(path) for path in MODULES if package in {module.split(".")[0] for module in imported(path)}]
    assert users and all(user.startswith(ONLY_IN[package]) for user in users), users


def test_a_backend_is_known_to_those_who_want_no_other():
    users = {name_of(path) for path in MODULES if any(module.startswith(ROOM) for module in imported(path))}
    within = (
        "weft/runtime/onnxruntime_cpu/",
        "weft/runtime/isolated/",
        "weft/runtime/cuda/",
        "weft_stitch/on_device/",
        "weft_tune/quantised/",
        "weft_tune/runtime_target/",
    )
    assert {name for name in users if not name.startswith(within)} == ROOM_USERS


def test_no_test_file_is_imported():
    """What files share stands in ``tests/support`` or in a module beside them, so that each file can be moved alone."""
    importers = {path: files for path in (ROOT / "tests").rglob("*.py") if (files := imported_test_files(parsed(path)))}
    assert not importers, importers


@pytest.mark.parametrize(
    "code",
    [
        "from tests.test_structure import ROOM",
        "from tests import test_structure as other",
        "def run():\n    import tests.test_structure",
    ],
)
def test_an_import_of_a_test_file_is_seen(code):
    assert imported_test_files(ast.parse(code)) == {"tests.test_structure"}


def test_every_module_says_what_is_in_it():
    assert not [name_of(path) for path in MODULES if not ast.get_docstring(parsed(path))]
