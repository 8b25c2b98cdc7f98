"""What a worker can still do when it has given up the rest: tried in processes that do so."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from weft.runtime.device_kinds import engine_kind
from weft.runtime.isolated.confinement import Confinement

SCRIPT = """
import json, os, resource, socket, sys
from weft.runtime.isolated.confinement import Confinement, confine
wanted, attempts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
outcome = confine(Confinement(**wanted))
found = {"done": outcome.done, "lacking": outcome.lacking}
for name, code in attempts.items():
    try:
        found[name] = eval(code)
    except BaseException as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""


def confined(tmp_path: Path, attempts: dict[str, str], **changes: Any) -> dict[str, Any]:
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "models" / "m.onnx").write_text("weights")
    (tmp_path / "secret").write_text("secret")
    wanted = asdict(Confinement(os.getpid(), None, 64, (str(tmp_path / "models"),), (str(tmp_path / "cache"),)))
    command = [sys.executable, "-c", SCRIPT, json.dumps(wanted | changes), json.dumps(attempts)]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": paths, "PATH": os.defpath, "TMPDIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_has_as_much_as_it_was_granted(tmp_path: Path) -> None:
    found = confined(
        tmp_path,
        {
            "core": "resource.getrlimit(resource.RLIMIT_CORE)",
            "files": "resource.getrlimit(resource.RLIMIT_NOFILE)[0]",
            "memory": "resource.getrlimit(resource.RLIMIT_DATA)[0]",
            "large": "len(bytearray(1 << 30))",
            "small": "len(bytearray(1 << 20))",
            "oom": "int(open('/proc/self/oom_score_adj').read())",
        },
        memory_bytes=400 << 20,
    )
    assert found["core"] == [0, 0] and found["files"] == 64
    assert found["memory"] == 400 << 20 or resource.getrlimit(resource.RLIMIT_DATA)[1] < 400 << 20
    assert found["large"] == "MemoryError" and found["small"] == 1 << 20
    assert found["oom"] >= 500 or any("killed" in each for each in found["lacking"])
    assert "no core dumps" in found["done"] and "ends with the server" in found["done"]


def test_it_sees_files_of_its_models_only(tmp_path: Path) -> None:
    secret, model, cache = (repr(str(tmp_path / name)) for name in ("secret", "models/m.onnx", "cache/new"))
    found = confined(
        tmp_path,
        {
            "model": f"open({model}).read()",
            "secret": f"open({secret}).read()",
            "overwrite": f"open({model}, 'w')",
            "cache": f"open({cache}, 'w').write('x')",
            "list": f"os.listdir({str(tmp_path)!r})",
            "program": "os.execv('/bin/true', ['true'])",
            "module": "__import__('colorsys').__name__",
            "environment": f"open('/proc/{os.getpid()}/environ').read()",
        },
    )
    assert found["model"] == "weights" and found["cache"] == 1 and found["module"] == "colorsys"
    if any(each.startswith("files of its models only") for each in found["lacking"]):
        pytest.skip("this system has no Landlock, and the worker says so")
    for name in ("secret", "overwrite", "list", "program", "environment"):
        assert found[name] == "PermissionError", name


@pytest.mark.skipif(shutil.which("gcc") is None or find_spec("triton") is None, reason="needs gcc and triton")
def test_one_with_a_gpu_compiles_kernels_and_sees_no_more_by_that(tmp_path: Path) -> None:
    read, written = engine_kind("cuda:0").files("cuda:0")
    cache, secret = str(tmp_path / "cache"), str(tmp_path / "secret")
    (spec,) = find_spec("triton").submodule_search_locations
    run = "__import__('subprocess').run({}, stdout=-3, stderr=-3).returncode"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.c").write_text("#include <stdio.h>\n#include <Python.h>\nint f(void) { return 7; }\n")
    include = sysconfig.get_paths()["include"]
    found = confined(
        tmp_path,
        {
            "ptxas": run.format([f"{spec}/backends/nvidia/bin/ptxas", "--version"]),
            "libraries": run.format(["/sbin/ldconfig", "-p"]),
            "compiled": run.format(["gcc", "-shared", "-fPIC", f"-I{include}", f"{cache}/a.c", "-o", f"{cache}/a.so"]),
            "loaded": f"__import__('ctypes').CDLL({cache + '/a.so'!r}).f()",
            "secret": run.format(["cat", secret]),
            "own": f"os.chmod({cache + '/a.so'!r}, 0o755) or os.execv({cache + '/a.so'!r}, ['a'])",
        },
        readable=(str(tmp_path / "models"), *read),
        device=written,
        programs=engine_kind("cuda:0").programs("cuda:0"),
    )
    assert found["ptxas"] == found["libraries"] == found["compiled"] == 0 and found["loaded"] == 7
    if any(each.startswith("files of its models only") for each in found["lacking"]):
        pytest.skip("this system has no Landlock, and the worker says so")
    assert found["secret"] == 1 and found["own"] == "PermissionError"


def test_it_reaches_nobody(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = confined(
            tmp_path,
            {"connect": f"socket.create_connection(('127.0.0.1', {port}), 5)", "signal": f"os.kill({os.getpid()}, 0)"},
        )
    if any("no network" in each for each in found["lacking"]) and found["connect"] not in (
        "PermissionError",
        "OSError",
    ):
        pytest.skip("this system grants no network of one's own, and the worker says so")
    assert found["connect"] in ("PermissionError", "OSError")
    if any("no signals" in each for each in found["done"]):
        assert found["signal"] == "PermissionError"


def test_one_whose_server_is_gone_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        confined(tmp_path, {}, server=1 if os.getpid() != 1 else 2)
