"""Compiled models: the limits of the compiler's process, what it leaves, and who may have written it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.runtime.cuda.nets import WIDTH, chain, drawn, wanted
from weft.runtime.cuda import compiling
from weft.runtime.cuda.compiling import CompileLimits, NotCompiled, compile_model
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.packages import MANIFEST, WEIGHTS, CompiledPiece, CompileJob, Manifest, Package, find

AMPLE = CompileLimits(60, 8 << 30)
WRITES = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
def leave(rows, size=1):
    (folder / f"rows{rows}.0of1").mkdir()
    (folder / f"rows{rows}.0of1" / "code.so").write_bytes(b"x" * size)
    pieces, packages = [{"inputs": ["x"], "outputs": ["y"]}], {rows: [{"shapes": [[rows, 8]]}]}
    (folder / "packages.json").write_text(json.dumps({"pieces": pieces, "packages": packages}))
"""
"""A compiler that compiles nothing, for what its process may do."""


@pytest.fixture
def job(tmp_path: Path) -> CompileJob:
    shapes = {"x": (1, WIDTH)}
    path = chain(tmp_path / "chain.onnx")
    return CompileJob(model=path, shapes=shapes, rows=(1, 4), precision="fp32", device="cpu", device_name="cpu")


def compiler(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(compiling, "START", WRITES + code)


def test_a_model_is_compiled_once(job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, "leave(1); (folder / 'other').write_text('')")
    place = compile_model(job, tmp_path / "cache", AMPLE)
    manifest = find(place)
    assert manifest is not None and manifest.pieces[0].inputs == ("x",) and list(manifest.packages) == [1]
    assert sorted(path.name for path in place.iterdir()) == ["packages.json", "rows1.0of1"]
    compiler(monkeypatch, "raise SystemExit(1)")
    assert compile_model(job, tmp_path / "cache", AMPLE) == place
    for change in ({"precision": "fp16"}, {"rows": (1, 2)}, {"device_name": "other"}, {"shapes": {"x": (1, 9)}}):
        assert job.model_copy(update=change).folder(tmp_path) != job.folder(tmp_path)


def test_batch_sizes_of_an_earlier_stage_are_not_compiled_again(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from tests.runtime.cuda.uncompiled import packaged, without_compiler

    job, cache = job.model_copy(update={"rows": (1, 2, 4)}), tmp_path / "cache"
    without_compiler(monkeypatch)
    cache.mkdir(mode=0o700)
    packaged(job.first_stage(), job.first_stage().folder(cache))
    compiler(monkeypatch, "print('nothing more')")
    place = compile_model(job, cache, AMPLE)
    manifest = find(place)
    assert manifest is not None and sorted(manifest.packages) == [1, 4] and place != job.first_stage().folder(cache)
    seen: list[list[str]] = []
    monkeypatch.setattr(compiling.subprocess, "call", lambda command: seen.append(command) or 0)
    assert compiling._compile_sizes(place, job, 2) == 0
    assert [CompileJob.model_validate_json(command[-2]).rows for command in seen] == [(2,)]


def test_the_compiler_of_a_program_is_confined(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 0:  # which asks for its version
        pytest.skip("this system has no Landlock, and the compiler is as little confined as the worker")
    place = tmp_path / "models"
    place.mkdir()
    (place / "program.pt2").write_text("read")
    (tmp_path / "secret").write_text("secret")
    tries = f"""
def attempt(action, *arguments):
    try:
        return str(action(*arguments))
    except OSError as error:
        return type(error).__name__
print([
    attempt(pathlib.Path({str(place / "program.pt2")!r}).read_text),
    attempt(pathlib.Path({str(tmp_path / "secret")!r}).read_text),
    attempt(pathlib.Path({str(place / "written")!r}).write_text, ""),
    attempt(pathlib.Path("/dev/shm/written").write_text, ""),
    attempt((folder / "written").write_text, ""),
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"],
])
raise SystemExit(1)
"""
    compiler(monkeypatch, tries)
    program = job.model_copy(update={"model": place / "program.pt2"})
    with pytest.raises(NotCompiled) as refused:
        compile_model(program, tmp_path / "cache", AMPLE)
    denied = "PermissionError"
    assert str(refused.value) == str(["read", denied, denied, denied, "0", "1"])
    with pytest.raises(NotCompiled) as refused:
        compile_model(job, tmp_path / "cache", AMPLE._replace(threads=2))
    assert str(refused.value).startswith("['read', 'secret', '0', ")


def test_its_environment_has_no_secrets_and_its_folders_are_its_own(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_KEY", "secret")
    compiler(monkeypatch, "print(sorted(os.environ.items()), os.umask(0)); raise SystemExit(3)")
    with pytest.raises(NotCompiled) as refused:
        compile_model(job, tmp_path / "cache", AMPLE)
    assert "secret" not in str(refused.value) and "('TMPDIR', " in str(refused.value) and "63" in str(refused.value)
    assert "('TORCHINDUCTOR_VEC_ISA_OK', '0')" in str(refused.value)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("import time; time.sleep(60)", CompileLimits(0.5, 8 << 30), "longer than 0.5 s; raise compile_s"),
        ("kept = b'x' * (400 << 20)\nimport time; time.sleep(60)", CompileLimits(60, 200 << 20), "more than 200 MiB"),
        ("raise ValueError('no kernel')", AMPLE, "ValueError: no kernel"),
        ("pass", AMPLE, "left no package"),
        ("leave(1); (folder / 'rows1.0of1' / 'code.so').chmod(0o666)", AMPLE, "left no package"),
    ],
)
def test_a_compiler_that_fails_says_why_and_leaves_nothing(
    code: str, limits: CompileLimits, reason: str, job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(monkeypatch, code)
    with pytest.raises(NotCompiled, match=reason):
        compile_model(job, tmp_path / "cache", limits)
    assert not list((tmp_path / "cache").iterdir())


def test_what_it_has_started_ends_with_it(job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = tmp_path / "pid"
    started = (
        f"import subprocess; run = subprocess.Popen(['sleep', '60']); open({str(noted)!r}, 'w').write(str(run.pid))"
    )
    compiler(monkeypatch, f"{started}\nleave(1)")
    compile_model(job, tmp_path / "cache", AMPLE)
    pid = int(noted.read_text())
    ends_s = time.monotonic() + 30
    with suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # a zombie has ended
            assert time.monotonic() < ends_s
            time.sleep(0.01)


def test_batch_sizes_that_were_finished_in_time_are_kept(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(monkeypatch, "leave(1); (folder / 'rows4.0of1').mkdir(); import time; time.sleep(60)")
    place = compile_model(job, tmp_path / "cache", CompileLimits(3, 8 << 30))
    assert sorted(path.name for path in place.iterdir()) == ["packages.json", "rows1.0of1"]


@pytest.mark.parametrize("fails", [False, True])
def test_packages_in_one_piece_stay_unless_all_pieces_are_compiled(
    fails: bool, job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    whole, cut = (tuple(CompiledPiece(inputs=(), outputs=()) for _ in range(count)) for count in (1, 2))

    def compile_rows(command: list[str]) -> int:
        folder, single = Path(command[-3]), CompileJob.model_validate_json(command[-2])
        manifest = Manifest(pieces=cut if single.cuts else whole)
        stored = folder / MANIFEST
        if stored.exists():
            manifest = Manifest.model_validate_json(stored.read_bytes())
        packages = {**manifest.packages, single.rows[0]: (Package(shapes=()),) * len(manifest.pieces)}
        stored.write_text(manifest.model_copy(update={"packages": packages}).model_dump_json())
        (folder / WEIGHTS).write_text("cut" if single.cuts else "whole")
        return int(fails and bool(single.cuts) and single.rows == (4,))

    monkeypatch.setattr(subprocess, "call", compile_rows)
    monkeypatch.setattr("weft.runtime.cuda.torch_compiler.choose_cuts", lambda job, folder: ("node",))
    job = job.model_copy(update={"rows": (1, 2, 4), "grain_s": 1e-9})
    assert compiling._compile_sizes(tmp_path, job, 1) == 0
    manifest = Manifest.model_validate_json((tmp_path / MANIFEST).read_bytes())
    assert manifest.pieces == (whole if fails else cut) and sorted(manifest.packages) == [1, 2, 4]
    assert (tmp_path / WEIGHTS).read_text() == ("whole" if fails else "cut")


def test_what_is_missing_or_cannot_be_written_is_named(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(monkeypatch, "leave(1)")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotCompiled, match=r"cannot be kept in .*file"):
        compile_model(job, tmp_path / "file", AMPLE)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotCompiled, match="others may write to it"):
        compile_model(job, tmp_path / "open", AMPLE)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(NotCompiled, match="no C compiler; install gcc"):
            compile_model(job, tmp_path / "cache", AMPLE)
    monkeypatch.setattr(compiling, "find_spec", lambda name: None if name == "triton" else SimpleNamespace())
    with pytest.raises(NotCompiled, match="triton is not installed"):
        compile_model(job.model_copy(update={"device": "cuda:0"}), tmp_path / "cache", AMPLE)


def test_packages_that_others_could_write_are_not_used(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(monkeypatch, "leave(1)")
    place = compile_model(job, tmp_path / "cache", AMPLE)
    (place / "rows1.0of1" / "code.so").chmod(0o622)
    assert find(place) is None
    assert find(compile_model(job, tmp_path / "cache", AMPLE)) is not None  # compiled anew


@pytest.mark.parametrize("leave", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_manifest_that_is_no_regular_file_is_not_read(leave: Callable[[Path], None], tmp_path: Path) -> None:
    """Reading either of these would never end."""
    tmp_path.chmod(0o700)
    leave(tmp_path / MANIFEST)
    assert find(tmp_path) is None


def test_those_not_used_for_longest_make_room(job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST_BYTES", 2500)
    compiler(monkeypatch, "leave(1, 1000)")
    jobs = [job.model_copy(update={"device_name": name}) for name in "abc"]
    places = [compile_model(each, tmp_path / "cache", AMPLE) for each in jobs[:2]]
    os.utime(places[0], (2, 2))
    os.utime(places[1], (1, 1))
    places.append(compile_model(jobs[2], tmp_path / "cache", AMPLE))
    assert [place.exists() for place in places] == [True, False, True]


@pytest.mark.long
def test_a_compiled_model_gives_what_the_file_does_over_weights_that_come_and_go(
    job: CompileJob, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from weft.runtime.cuda.torch_packages import open_packages

    place = compile_model(job, tmp_path / "cache", CompileLimits(1800, 8 << 30, 2))
    manifest = find(place)
    assert isinstance(manifest, Manifest) and (place / WEIGHTS).stat().st_size == 3 * WIDTH * WIDTH * 4
    (segment,) = open_packages(HostDevice(), place, manifest)

    def far(rows: int) -> float:
        result = segment.run_uncaptured(segment.from_arrays(drawn(rows)))
        return float(np.abs(segment.to_array(result["y"]) - wanted(job.model, drawn(rows))).max())

    assert far(1) < 1e-5 and far(4) < 1e-5
    (memory,) = segment.weights.memories
    memory.evict()
    assert not far(4) < 1e-5
    memory.restore()
    assert far(4) < 1e-5
