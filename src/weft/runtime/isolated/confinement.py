"""Confinement of a worker before it opens a model: limits of memory, files and network, and exit with the server.

The system may not support or not allow some restrictions; then the worker runs without them, and reports that. A worker
has one thread when it restricts itself; threads that it starts later inherit the restrictions.
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

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 15, 36, 38  # of prctl
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # flags of unshare
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, which have the same numbers on every machine."""
_RUN, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3  # Landlock's rights over files
_FILE_RIGHTS = 0b1100000000000111
"""Landlock's rights that apply to files: run, write, read, truncate and ioctl."""
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Landlock's version -> how many rights over files it knows; 16 from the fifth on."""
_NET_FROM, _SCOPES_FROM = 4, 6
"""The first version of Landlock that restricts TCP, and the first that restricts signals to other processes."""

OOM_SCORE = 500
"""Added to the worker's score when the system is out of memory, so that it kills a worker before the server."""

SYSTEM_FILES = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system", "/dev/null", "/dev/urandom", "/dev/zero",
)  # fmt: skip
"""Files of the system that Python and ONNX Runtime read."""
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Confinement:
    """The files, memory and programs that a worker may use."""

    server: int
    """Process number of its parent, the server; the worker is killed when the server ends."""
    memory_bytes: int | None  # None: no limit
    open_files: int
    readable: tuple[str, ...]  # folders of models
    writable: tuple[str, ...]
    device: tuple[str, ...] = ()  # files of an accelerator
    programs: tuple[str, ...] = ()
    """Files and folders of programs that it may run; they inherit its restrictions."""


@dataclass(slots=True)
class Outcome:
    """Which restrictions are in force, and which the system refused, in words."""

    done: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], str | None]) -> None:
        """Run *action* and record whether it worked. *what*: the text to record, unless *action* returns another."""
        try:
            self.done.append(action() or what)
        except (OSError, ValueError, AttributeError) as error:
            self.lacking.append(f"{what} ({reason_of(error)})")


def confine(wanted: Confinement) -> Outcome:
    """Give up everything that *wanted* does not grant, as far as the system supports it."""
    outcome = Outcome()
    outcome.attempt("ends with the server", lambda: end_with(wanted.server))
    outcome.attempt("first to be killed for memory", _raise_oom_score)
    outcome.attempt("no core dumps", lambda: _set_limit(resource.RLIMIT_CORE, 0))
    outcome.attempt(f"{wanted.open_files} open files", lambda: _set_limit(resource.RLIMIT_NOFILE, wanted.open_files))
    if wanted.memory_bytes is not None and wanted.device:
        outcome.lacking.append(f"{wanted.memory_bytes >> 20} MiB of memory (a driver maps more than is used)")
    elif wanted.memory_bytes is not None:
        size = wanted.memory_bytes
        outcome.attempt(f"{size >> 20} MiB of memory", lambda: _set_limit(resource.RLIMIT_DATA, size))
    outcome.attempt("no network", _leave_network)
    writable = (*wanted.writable, *wanted.device)
    outcome.attempt("files of its models only", lambda: _restrict_files(wanted.readable, writable, wanted.programs))
    return outcome


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check_result(result: int) -> int:
    """Return the result of a C function; OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def end_with(server: int) -> None:
    """Have the kernel kill this process when the thread of the parent *server* that started it ends."""
    _check_result(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != server:  # the server died before the request above
        os._exit(1)


def inherit_orphans() -> None:
    """Become the parent of descendants whose own parents exit (a subreaper)."""
    _check_result(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def call_yourself(name: str) -> None:
    """Set the name of this process, at most 15 letters."""
    _check_result(_libc().prctl(_PR_SET_NAME, name.encode(), 0, 0, 0))


def _raise_oom_score() -> None:
    """Let the kernel kill this process before the server if memory runs out."""
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _set_limit(kind: int, most: int) -> None:
    """Lower a resource limit (*kind*: ``resource.RLIMIT_...``) to *most*, or to its hard limit if that is lower."""
    _, hard_limit = resource.getrlimit(kind)
    most = most if hard_limit == resource.RLIM_INFINITY else min(most, hard_limit)
    resource.setrlimit(kind, (most, most))


def _leave_network() -> None:
    """Enter an empty network namespace; a process that is not root needs a user namespace for that."""
    user, group = os.getuid(), os.getgid()
    if _libc().unshare(_CLONE_NEWNET) == 0:
        return
    _check_result(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")  # first: without it, gid_map may not be written
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


class _Ruleset(ctypes.Structure):
    """Landlock's ``landlock_ruleset_attr``: the rights that are taken away, by kind."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    """Landlock's ``landlock_path_beneath_attr``: rights over a file or a folder."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("file", ctypes.c_int32))


def _restrict_files(readable: Iterable[str], writable: Iterable[str], programs: Iterable[str]) -> str:
    """Restrict this process with Landlock to these files and programs, without TCP and signals to other processes.

    Returns what is in force, which depends on the version of Landlock.
    """
    libc = _libc()
    version = _check_result(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))  # flag 1 asks for the version
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    # 0b11: binding and connecting of TCP; abstract sockets and signals.
    ruleset = _Ruleset(rights, 0b11 if version >= _NET_FROM else 0, 0b11 if version >= _SCOPES_FROM else 0)
    size = 8 * (1 + (version >= _NET_FROM) + (version >= _SCOPES_FROM))  # bytes of the fields that this version knows
    rules = _check_result(libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))
    try:
        for path in (*readable, *python_files(), *LIBRARIES, *SYSTEM_FILES):
            _allow(rules, path, (_READ_FILE | _READ_DIR) & rights)
        for path in writable:
            _allow(rules, path, rights & ~_RUN)
        for path in programs:
            _allow(rules, path, (_RUN | _READ_FILE | _READ_DIR) & rights)
        _check_result(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _check_result(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)
    return "files of its models only" + (", no signals to others" if version >= _SCOPES_FROM else "")


def _allow(rules: int, path: str, rights: int) -> None:
    """Add a Landlock rule that grants *rights* over a file, or all files in a folder; a missing path is skipped."""
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        granted = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        rule = _PathRule(granted, file)
        _check_result(_libc().syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))  # 1: a rule about a path
    finally:
        os.close(file)


def python_files() -> list[str]:
    """Folders of modules that may be imported later."""
    return [path for path in dict.fromkeys([*sys.path, sys.prefix, sys.base_prefix]) if os.path.isabs(path)]
