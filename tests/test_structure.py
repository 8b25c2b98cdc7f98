"""The shape of the package: dependencies point one way, heavy imports stay where they are used, a name is one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import weft
import weft_papers

SOURCES = Path(weft.__file__).parent
PAPERS = Path(weft_papers.__file__).parent
MODULES = sorted([*SOURCES.rglob("*.py"), *PAPERS.rglob("*.py")])

MOST_SHARED_NAMES = 10
"""Class names that may stand for something in more than one file."""

STOREYS = (
    "version", "errors", "files", "jsonfile", "shapes", "shown", "kernels", "numbers", "models", "workloads", "devices",
    "costs", "policies", "engine", "mapping", "runtime", "stitching", "tuning", "reports", "load", "simulation",
    "placing", "cluster", "serving", "gates", "ray", "survey", "planning", "weft_papers", "cli",
)  # fmt: skip
"""A room may import those to its left; ``weft`` itself shows the public names of all but the last two."""

ALONE = {
    "kernels": set(),
    "models": {"errors", "files", "shapes"},
    "devices": {"errors", "jsonfile"},
    "workloads": {"errors", "jsonfile", "shapes"},
}
"""Parts that keep to less than their storey allows: all they may import of the package."""

ONLY_IN = {
    "matplotlib": (
        "shown.py",
        "reports/pictures.py",
        "reports/run_pictures.py",
        "reports/stitching_picture.py",
        "reports/plan_picture.py",
        "reports/placement_picture.py",
        "reports/timeline.py",
        "reports/loads.py",
        "reports/designs.py",
        "reports/mapping_picture.py",
        "reports/mapping_dynamic.py",
        "reports/tuning_picture.py",
        "weft_papers/",
    ),
    "numba": ("kernels/",),
    "onnx": (
        "models/",
        "runtime/",
        "stitching/onnx_writer.py",
        "stitching/reading/onnx_",
        "tuning/export/",
        "tuning/quantised/",
        "tuning/runtime_target/",
    ),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "onnxruntime": ("runtime/onnxruntime_cpu/", "runtime/cuda/", "tuning/quantised/", "tuning/runtime_target/"),
    "grpc": ("serving/", "gates/grpc_face.py"),
    "httptools": ("serving/http.py",),
    "opentelemetry": ("serving/telemetry.py",),
    "ortools": ("mapping/", "placing/"),
    "ray": ("ray/",),
    "z3": ("mapping/z3_model.py",),
    "torch": (
        "runtime/cuda/gpu.py",
        "runtime/cuda/borrowed.py",
        "runtime/cuda/movable.py",
        "runtime/cuda/torch_",
        "stitching/running/",
        "stitching/reading/torch_",
        "stitching/making/torch_",
    ),
    "triton": (
        "stitching/running/kernel.py",
        "stitching/running/kernel_shapes.py",
        "stitching/running/body_kernels.py",
        "stitching/running/body_shapes.py",
    ),
    "cuda": ("runtime/cuda/partitions.py",),
}
"""Where a package may be imported."""


ROOM = "weft.runtime.onnxruntime_cpu"
"""A backend, which the server knows by the protocol only."""

ROOM_USERS = {"runtime/backends.py", "stitching/running/racing.py"}
"""Who wants that one and no other, besides itself, its workers, ``tuning/quantised`` and ``tuning/runtime_target``."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    """From the package on; the papers' package is a room beside those of ``weft``."""
    return path.relative_to(SOURCES.parent).as_posix().removeprefix("weft/")


def part_of(path: Path) -> str:
    return name_of(path).split("/")[0].removesuffix(".py")


def dotted(path: Path) -> str:
    """As it is imported."""
    return ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__")


DOTTED = frozenset(map(dotted, MODULES))


@cache
def imported(path: Path) -> frozenset[str]:
    """Every module a file imports, wherever in it; ``from weft import x`` counts as ``weft.x``."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name_of(path)} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names if node.module == "weft" or names <= DOTTED else {node.module, *names & DOTTED})
    return frozenset(found)


def parts_imported(path: Path) -> set[str]:
    ours = {module.removeprefix("weft.").split(".")[0] for module in imported(path) if module.startswith("weft")}
    return ours - {part_of(path)}


def test_every_part_of_the_package_has_its_storey():
    assert {part_of(path) for path in MODULES} - {"__init__"} == set(STOREYS)


def test_dependencies_point_one_way():
    upward = {name_of(path): parts for path in MODULES if (parts := parts_imported(path) - may_import(part_of(path)))}
    assert not upward, upward


def may_import(part):
    below = STOREYS[:-2] if part == "__init__" else STOREYS[: STOREYS.index(part)]
    return ALONE.get(part, set(below))


def test_no_modules_import_each_other_in_a_circle():
    graph = {dotted(path): (imported(path) & DOTTED) - {dotted(path)} for path in MODULES}
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


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
    assert all(user.startswith(ONLY_IN[package]) for user in users), users
    assert bool(users) == bool(ONLY_IN[package])


def test_a_backend_is_known_to_the_list_of_backends_and_to_who_wants_no_other():
    users = {name_of(path) for path in MODULES if any(module.startswith(ROOM) for module in imported(path))}
    within = (
        "runtime/onnxruntime_cpu/",
        "runtime/isolated/",
        "runtime/cuda/",
        "tuning/quantised/",
        "tuning/runtime_target/",
    )
    assert {name for name in users if not name.startswith(within)} == ROOM_USERS


def test_every_module_says_what_is_in_it():
    assert not [name_of(path) for path in MODULES if not ast.get_docstring(parsed(path))]
