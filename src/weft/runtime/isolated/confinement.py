"""What a worker gives up before it opens a model: memory, files, the network, and its life after the server's.

Each of these is a request to the system, which may have no such thing or not allow it; then the worker goes on without
and says so. A worker has one thread when it does this, and those it starts later have no more than that one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.base.errors import reason_of

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 15, 36, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, which have the same numbers on every machine."""
_RUN, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FILE_RIGHTS = 0b1100000000000111
"""Those of a file: to run, write, read and truncate it, and ioctl."""
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Landlock's version -> how many rights over files it knows; 16 from the fifth on."""
_NET_FROM, _SCOPES_FROM = 4, 6

OOM_SCORE = 500
"""Of all processes that the system may kill for their memory, a worker goes before its server."""

SYSTEM_FILES = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system", "/dev/null", "/dev/urandom", "/dev/zero",
)  # fmt: skip
"""What Python and ONNX Runtime look at."""
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a worker may have."""

    server: int
    """The process it ends with."""
    memory_bytes: int | None
    open_files: int
    readable: tuple[str, ...]
    """Folders of models."""
    writable: tuple[str, ...]
    device: tuple[str, ...] = ()
    """Files of an accelerator."""
    programs: tuple[str, ...] = ()
    """Files and folders of programs that it may run; they have no more than it has."""


@dataclass(slots=True)
class Outcome:
    """What of it could be had."""

    done: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], str | None]) -> None:
        """Do it, and note whether that worked; what it returns is said instead of *what*."""
        try:
            self.done.append(action() or what)
        except (OSError, ValueError, AttributeError) as error:
            self.lacking.append(f"{what} ({reason_of(error)})")


def confine(wanted: Confinement) -> Outcome:
    """Give up all that was not granted, as far as the system lets us."""
    outcome = Outcome()
    outcome.attempt("ends with the server", lambda: end_with(wanted.server))
    outcome.attempt("first to be killed for memory", _volunteer)
    outcome.attempt("no core dumps", lambda: _limit(resource.RLIMIT_CORE, 0))
    outcome.attempt(f"{wanted.open_files} open files", lambda: _limit(resource.RLIMIT_NOFILE, wanted.open_files))
    if wanted.memory_bytes is not None and wanted.device:
        outcome.lacking.append(f"{wanted.memory_bytes >> 20} MiB of memory (a driver maps more than is used)")
    elif wanted.memory_bytes is not None:
        size = wanted.memory_bytes
        outcome.attempt(f"{size >> 20} MiB of memory", lambda: _limit(resource.RLIMIT_DATA, size))
    outcome.attempt("no network", _leave_network)
    written = (*wanted.writable, *wanted.device)
    outcome.attempt("files of its models only", lambda: _see_only(wanted.readable, written, wanted.programs))
    return outcome


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def end_with(server: int) -> None:
    """Be killed when the thread ends whose child this process is."""
    _checked(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != server:  # it has died before we asked
        os._exit(1)


def inherit_orphans() -> None:
    """Have processes whose parents are gone, if those descend from this one."""
    _checked(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def call_yourself(name: str) -> None:
    """Have this process shown under a name of at most 15 letters."""
    _checked(_libc().prctl(_PR_SET_NAME, name.encode(), 0, 0, 0))


def _volunteer() -> None:
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _leave_network() -> None:
    """A network of its own, in which there is nothing; who is not root needs users of its own for that."""
    user, group = os.getuid(), os.getgid()
    if _libc().unshare(_CLONE_NEWNET) == 0:
        return
    _checked(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _see_only(readable: Iterable[str], writable: Iterable[str], programs: Iterable[str]) -> str:
    """Landlock: no file and no program but these from now on, no TCP, and no signal to other processes."""
    libc = _libc()
    version = _checked(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    wanted = _Ruleset(rights, 0b11 if version >= _NET_FROM else 0, 0b11 if version >= _SCOPES_FROM else 0)
    size = 8 * (1 + (version >= _NET_FROM) + (version >= _SCOPES_FROM))
    rules = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(size), 0))
    try:
        for path in (*readable, *python_files(), *LIBRARIES, *SYSTEM_FILES):
            _allow(rules, path, (_READ_FILE | _READ_DIR) & rights)
        for path in writable:
            _allow(rules, path, rights & ~_RUN)
        for path in programs:
            _allow(rules, path, (_RUN | _READ_FILE | _READ_DIR) & rights)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)
    return "files of its models only" + (", no signals to others" if version >= _SCOPES_FROM else "")


def _allow(rules: int, path: str, rights: int) -> None:
    """Grant rights over a file, or all that is beneath a folder; what is not there needs none."""
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        granted = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        rule = _Beneath(granted, folder)
        _checked(_libc().syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))
    finally:
        os.close(folder)


def python_files() -> list[str]:
    """Where modules are that may be imported later."""
    return [path for path in dict.fromkeys([*sys.path, sys.prefix, sys.base_prefix]) if os.path.isabs(path)]
