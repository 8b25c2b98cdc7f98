"""Compiling a model outside of the processes that run models: the compiler in a process group of its own, with limits.

The compiler has limits of time, memory and threads, and no secrets in its environment variables. It writes only to the
folder that becomes the folder of the model's packages (``packages``). Reading a program of torch runs code of its file,
so the compiler of a program is confined like the worker that runs the program, and may read and write less.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from weft.base.child_processes import bare_environment
from weft.base.errors import reason_of
from weft.runtime.cuda.device_files import compilers, device_files
from weft.runtime.cuda.packages import MANIFEST, REFERENCE, WEIGHTS, CompileJob, Manifest, find, is_private
from weft.runtime.isolated.confinement import Confinement, confine, end_with
from weft.runtime.own_folder import LOCK, make_folder, release, remove

MOST_BYTES = 32 << 30
"""Limit for all packages in a cache together; the least recently used packages are removed first."""
PROCESS_BYTES, WEIGHT_COPIES = 3 << 30, 6
"""Memory of a process that compiles one batch size: torch with a GPU, and copies of the weights meanwhile."""
MOST_LOG_BYTES = 64 << 10
"""Bytes that are read of what a compiler wrote, at the end: a program's code may write without end."""
OPEN_FILES = 1024
"""Most open files of a confined compiler, as of a worker."""
LOOK_S = 0.25
"""Seconds between checks of a compiler's time and memory."""
PRIORITY = 10
"""The nice value of compilers, because models are served meanwhile."""


def compiler() -> None:
    """Run the compiler on the arguments of this process's command line: folder, job, and number of processes.

    Each batch size is compiled in a process of its own (*processes* is 0 there), as the compiler is single-threaded for
    most of its time.
    """
    end_with(os.getppid())
    os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    folder, job, processes = Path(sys.argv[1]), CompileJob.model_validate_json(sys.argv[2]), int(sys.argv[3])
    if processes:
        from weft.runtime.cuda import reference_answers  # imported here, as it imports ONNX Runtime

        if job.is_program:  # before there are two threads: torch's modules cannot be imported by both at a time
            import weft.runtime.cuda.torch_compiler  # noqa: F401
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(reference_answers.store, job, folder, processes)
            exit_code = _compile_sizes(folder, job, processes)
            answers.result()
        sys.exit(exit_code)
    from weft.runtime.cuda.torch_compiler import main  # imported here, as it imports torch

    main(folder, job)


def _compile_sizes(folder: Path, job: CompileJob, processes: int) -> int:
    """Compile all batch sizes, in pieces if the job has a grain and the compiled model takes longer; the exit code."""

    def compile_rows(folder: Path, job: CompileJob, sizes: Sequence[int]) -> int:
        present = (find(folder) or Manifest(pieces=())).packages  # of an earlier stage
        jobs = [job.model_copy(update={"rows": (rows,)}).model_dump_json() for rows in sizes if rows not in present]
        with ThreadPoolExecutor(processes) as pool:
            exit_codes = pool.map(lambda single: subprocess.call(_command(folder, single, 0)), jobs)
            return max(exit_codes, key=abs, default=0)  # 0 if all succeeded

    # one row first, then the largest batch: they serve most requests, and time may run out
    sizes = sorted(job.rows, key=lambda rows: (rows != 1, -rows))
    if job.grain_s is None:
        return compile_rows(folder, job, sizes)
    from weft.runtime.cuda.torch_compiler import choose_cuts

    exit_code = compile_rows(folder, job, sizes[:2])
    if exit_code == 0 and (cuts := choose_cuts(job, folder)):
        # In a folder of their own, so that the packages in one piece are left if time runs out or a piece fails.
        cut_folder = folder / "cut"
        cut_folder.mkdir()
        if compile_rows(cut_folder, job.model_copy(update={"cuts": cuts}), sizes) == 0:
            for path in sorted(cut_folder.iterdir(), key=lambda path: path.name == MANIFEST):  # the manifest last
                path.replace(folder / path.name)
            return 0
    return max(exit_code, compile_rows(folder, job, sizes[2:]), key=abs)


def _command(folder: Path, job: str, processes: int, confinement: Confinement | None = None) -> list[str]:
    """The command line of a compiler; *job*: as JSON. *processes*: 0 to compile its only batch size.

    confinement: takes effect before anything is imported that starts threads, which it would not restrict; processes
    that the compiler starts inherit it.
    """
    code = START if confinement is None else CONFINE.format(asdict(confinement)) + START
    return [sys.executable, "-P", "-s", "-c", code, str(folder), job, str(processes)]


START = f"from {compiler.__module__} import {compiler.__name__} as main; main()"
"""The Python code that the compiler process runs."""
CONFINE = f"from {confine.__module__} import Confinement, confine; confine(Confinement(**{{}})); "
"""The code before it that gives up all rights but those of a confinement."""


def _confinement(job: CompileJob, folder: Path) -> Confinement:
    """What the compiler of a program may use: of the worker's rights, those to the program and to the device.

    It may write to *folder*, and run Python, which is the compiler.
    """
    device = device_files()
    return Confinement(
        os.getpid(),
        memory_bytes=None,  # ``_await_compiler`` limits it
        open_files=OPEN_FILES,
        readable=(*map(str, {job.model.absolute().parent, job.model.resolve().parent}), *device.read),
        writable=(str(folder),),
        device=device.written,
        programs=(*compilers(), sys.prefix, sys.base_prefix),
    )


class NotCompiled(Exception):
    """A model was not compiled; the text says why."""


class CompileLimits(NamedTuple):
    """Limits of one compiler process and the processes that it starts."""

    seconds: float
    memory_bytes: int
    threads: int = 1  # of all its processes together

    def processes(self, job: CompileJob) -> int:
        """How many batch sizes are compiled at the same time."""
        fitting = self.memory_bytes // (PROCESS_BYTES + WEIGHT_COPIES * job.model.stat().st_size)
        return max(1, min(len(job.rows), self.threads, fitting))


def compile_model(job: CompileJob, cache: Path, limits: CompileLimits) -> Path:
    """The folder of a model's packages, which are compiled first if *cache* lacks them; ``NotCompiled`` if that fails.

    If the compiler runs out of time, the folder has the batch sizes that were finished.
    """
    check_tools(job.device)
    try:
        target = _private_folder(cache) / job.folder(cache).name
        if find(target) is not None:
            os.utime(target)  # the time of its last use, for ``_make_room``
            return target
        folder = make_folder(".compiling-", cache)
    except OSError as error:
        raise NotCompiled(f"packages cannot be kept in {cache}: {reason_of(error)}") from error
    try:
        if find(first := job.first_stage().folder(cache)) is not None:
            shutil.copytree(first, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK))
        reason = _run_compiler(job, folder, limits)
        if find(folder) is None:
            raise NotCompiled(reason or "the compiler left no package")
        _clear(folder)
        _make_room(cache, _bytes_in(folder))
        remove(target)  # if it exists, it is damaged or belongs to another user
        folder.rename(target)
        release(folder, now_at=target)
    except OSError as error:
        raise NotCompiled(f"packages cannot be kept in {cache}: {reason_of(error)}") from error
    finally:
        if folder.exists():
            remove(folder)
    return target


def check_tools(device: str) -> None:
    """Raise ``NotCompiled`` if torch, a C compiler or triton is missing, as far as *device* needs them."""
    if find_spec("torch") is None:
        raise NotCompiled("torch is not installed; pip install 'weft[cuda]'")
    if not any(map(shutil.which, ("g++", "c++", "clang++") if device == "cpu" else ("gcc", "cc", "clang"))):
        raise NotCompiled("there is no C compiler; install gcc")
    if device != "cpu" and find_spec("triton") is None:
        raise NotCompiled("triton is not installed; pip install triton")


def _run_compiler(job: CompileJob, folder: Path, limits: CompileLimits) -> str:
    """Run the compiler, which writes packages to *folder*; returns why it failed, or an empty text."""
    processes = limits.processes(job)
    threads = str(max(1, limits.threads // processes))
    scratch = folder / "scratch"
    scratch.mkdir(mode=0o700)
    folder_variables = ("TMPDIR", "HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = bare_environment(("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME"))
    environment |= dict.fromkeys(folder_variables, str(scratch)) | {
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        # else ten test programs of 3 s each find the vector instructions of the processor, for code that no GPU runs
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    confinement = _confinement(job, folder) if job.is_program else None
    if confinement is not None:
        # more threads are processes of the compiler's own with semaphores in /dev/shm, where clients' inputs are
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with open(folder / "log", "w+b", opener=partial(os.open, mode=0o600)) as log:
        process = subprocess.Popen(
            _command(folder, job.model_dump_json(), processes, confinement),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            umask=0o077,  # its files are executed later, so no other user may write to them
            start_new_session=True,
        )
        try:
            reason = _await_compiler(process, limits)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it has started
            process.wait()
        log.seek(max(0, log.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
        log_lines = log.read(MOST_LOG_BYTES).decode("utf-8", "replace").strip().splitlines()
    return reason or (log_lines[-1] if process.returncode and log_lines else "")


def _await_compiler(process: subprocess.Popen[bytes], limits: CompileLimits) -> str:
    """Wait for a compiler; returns in words the limit that it exceeded, or an empty text when it ended by itself."""
    ends_s = time.monotonic() + limits.seconds
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
            return ""
        if time.monotonic() > ends_s:
            return f"compiling took longer than {limits.seconds:g} s; raise compile_s"
        if (used := _group_bytes(process.pid)) > limits.memory_bytes:
            return f"compiling took {used >> 20} MiB of memory, more than {limits.memory_bytes >> 20} MiB"


def _group_bytes(group: int) -> int:
    """Resident memory of the processes of a process group, in bytes; 0 where the system does not report it."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # After the name in parentheses, which may hold spaces: field 2 is the group, 21 the resident pages.
            fields = (process / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _private_folder(cache: Path) -> Path:
    """Create the folder of all packages; PermissionError if other users may write to it."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(cache):
        raise PermissionError(None, "others may write to it")
    return cache


def _clear(folder: Path) -> None:
    """Remove the files of a compiler's *folder* that only the compiler needed."""
    manifest = find(folder) or Manifest(pieces=())
    kept = {MANIFEST, WEIGHTS, REFERENCE, LOCK, *manifest.folders()}
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _make_room(cache: Path, wanted_bytes: int) -> None:
    """Remove least recently used packages until *wanted_bytes* more fit into ``MOST_BYTES``."""
    folders = [path for path in cache.iterdir() if path.name[0] != "."]
    folders.sort(key=lambda path: path.stat().st_mtime)
    total = wanted_bytes + sum(map(_bytes_in, folders))
    while folders and total > MOST_BYTES:
        total -= _bytes_in(folders[0])
        shutil.rmtree(folders.pop(0))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
