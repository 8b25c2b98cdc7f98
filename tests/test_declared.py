"""The core knows backends, devices and models by what their protocols declare: no place asks for a class or a name.

``undeclared`` finds such places: members read by name from anything that is not of another package, classes of
backends asked for, and names of GPUs in code. What a device can do is said by its kind (``weft.runtime.device_kinds``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "src" / "weft"
GPU_ROOM = "runtime/cuda/"

ALLOWED = {
    "cli/app.py": ["app"],  # a command's module is a group of commands, or has one
    "runtime/cuda/device.py": ["part"],  # of a threading.local, which is empty in a new thread; so are the next two
    "runtime/cuda/gpu.py": ["part", "streams"],
    "runtime/cuda/gpu_gates.py": ["cuGraphConditionalHandleCreate"],  # of the driver's bindings
    "runtime/cuda/lane.py": ["context"],
    "runtime/cuda/torch_program.py": ["_schema", "overloadpacket", "tags", "value"],  # torch's nodes, of many kinds
}
"""Members that are not weft's own, by file."""
MEMBER_READERS = {"getattr", "hasattr"}
CLASS_TESTS = {"isinstance", "issubclass"}
TEXT_TESTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "compile", "match", "fullmatch"}


def undeclared(tree: ast.Module, *, gpu_names: bool = True) -> Iterator[str]:
    """What code reads or asks for that no protocol declares. gpu_names: whether names of GPUs are among it."""
    outside = _imported_from_outside(tree)
    spoken = {id(text) for text in _spoken(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _called(node, outside)
            if gpu_names:
                yield from _asked_of_texts(node)
        elif isinstance(node, ast.Constant) and gpu_names and "cuda:" in str(node.value) and id(node) not in spoken:
            yield "name 'cuda:'"


def _called(call: ast.Call, outside: set[str]) -> Iterator[str]:
    function = call.func.id if isinstance(call.func, ast.Name) else ""
    if len(call.args) < 2:
        return
    what, about = call.args[:2]
    if function in MEMBER_READERS and isinstance(about, ast.Constant) and _root(what) not in outside | {"self"}:
        yield f"member {about.value!r}"
    if function in CLASS_TESTS:
        for node in ast.walk(about):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name.endswith("Backend"):
                yield f"class {name}"


def _asked_of_texts(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Attribute) and call.func.attr in TEXT_TESTS:
        for argument in call.args:
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("cuda"):
                yield "name 'cuda'"


def _root(node: ast.expr) -> str:
    """The name that an expression begins with, ``socket`` of ``socket.socket().x``; of ``self.x`` all of it."""
    if isinstance(node, ast.NamedExpr):
        return _root(node.value)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    if isinstance(node, ast.Attribute | ast.Subscript):
        return _root(node.value)
    if isinstance(node, ast.Call):
        return _root(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _imported_from_outside(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names if "weft" not in alias.name}
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("weft"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _spoken(tree: ast.Module) -> Iterator[ast.AST]:
    """Texts for people: documentation, and the help of options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield from ast.walk(node.value)


def test_the_core_asks_for_no_class_of_a_backend_no_name_of_a_gpu_and_no_undeclared_member() -> None:
    found = set()
    for path in sorted(CORE.rglob("*.py")):
        name = path.relative_to(CORE).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        found |= {(name, what) for what in undeclared(tree, gpu_names=not name.startswith(GPU_ROOM))}
    assert found == {(name, f"member {member!r}") for name, members in ALLOWED.items() for member in members}


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('device = getattr(backend, "device", None)', "member 'device'"),
        ('found = getattr(self._backend, "labels", ())', "member 'labels'"),
        ('if hasattr(model, "cuts"): pass', "member 'cuts'"),
        ("if isinstance(backend, CpuBackend): pass", "class CpuBackend"),
        ("if isinstance(each, (str, device.DeviceBackend)): pass", "class DeviceBackend"),
        ('GPU = re.compile("cuda:(0|[1-9][0-9]?|twin)")', "name 'cuda:'"),
        ('name = f"cuda:{number}"', "name 'cuda:'"),
        ('if device.startswith("cuda"): pass', "name 'cuda'"),
    ],
)
def test_such_a_place_is_found_when_it_is_put_back(code: str, what: str) -> None:
    assert what in set(undeclared(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        'import socket\ncopied = getattr(socket, "MSG_TRUNC", 0)',
        'import ctypes\nif hasattr(library := ctypes.CDLL(None), "mallopt"): pass',
        'def close(self):\n    """Ends what runs on cuda:0."""\n    return hasattr(self, "server")',
        'device = option(help="GPUs, as cuda:0")',
        "value = getattr(config, name)",
        "if isinstance(backend, str): pass",
    ],
)
def test_what_others_declare_and_what_people_read_is_left_alone(code: str) -> None:
    assert not list(undeclared(ast.parse(code)))
