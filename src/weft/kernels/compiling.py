"""Decorators that compile functions with numba: loops are cached on disk, their parts are compiled into each of them.

numba caches compiled code by the source of one file and does not notice when a function from another file changes. So
the name of a loop in the cache has a stamp of all sources that the loop is made of.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils, event, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_njit: Any = numba.njit
_config: Any = numba.config

_log = logging.getLogger("weft.kernels")
_IMPORTS = re.compile(r"^\s*(?:from|import) (weft\w*\.kernels)(?:\.(\w+)| import (\w+))", re.MULTILINE)
"""Imports of kernels in a source: these are in packages named ``kernels``, of the core and of tools."""


class _Announcement(event.Listener):
    """Logs which loop begins to be compiled, since that takes seconds; nothing is logged for code from the cache."""

    _depth = 0
    """Depth of nested compilations: only the outermost is logged."""

    def on_start(self, event: Any) -> None:
        """Log the loop that is compiled, unless it is compiled as a part of another."""
        function = event.data["dispatcher"].py_func
        if not self._depth and function.__module__.startswith(__package__):
            module = function.__module__.rpartition(".")[2]
            _log.info("compiling %s.%s (once; it is kept)", module, function.__name__.strip("_"))
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1


event.register("numba:compile", _Announcement())


def loop(function: F, *, _counts: bool = True) -> F:
    """Compile a function, and cache it on disk until one of the sources that it is made of changes.

    _counts: whether references to arrays are counted (see ``uncounted_loop``).
    """
    # numba names the cache file by __qualname__. With the stamp, a file from other sources is never opened: loading it
    # could fail, because its classes may no longer exist.
    function.__qualname__ += f"-{stamp(function.__module__)[:16]}"
    return cast(F, _njit(cache=True, _nrt=_counts)(function))


def uncounted_loop(function: F) -> F:
    """``loop`` for functions that neither make nor return arrays: references to arrays are not counted."""
    return loop(function, _counts=False)


def is_kept(compiled: Any) -> bool:
    """Return whether a loop is already compiled, in this process or on disk; True if the JIT is disabled."""
    if _config.DISABLE_JIT or compiled.signatures:
        return True
    function = compiled.py_func
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
    return any(cache_folder(compiled).glob(f"{name}-*.nbi"))


def cache_folder(compiled: Any) -> Path:
    """Return the folder in which a loop is kept."""
    return Path(compiled.stats.cache_path)


untyped_loop: Any = loop
"""``loop`` for functions without annotations: callers are not type-checked."""


def inlined(function: F) -> F:
    """Compile a small function as a part of every loop that calls it, as if it were written there."""
    return cast(F, _njit(inline="always")(function))


def part(function: F) -> F:
    """Compile a larger part of a loop by itself, which takes less time than ``inlined``; LLVM inlines it in the end."""
    return cast(F, _njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def untyped_called(function: Any) -> Any:
    """Compile a function that only loops call: without entry points for Python and C, and cached only as part of loops.

    That saved a quarter of the time in which the kernels of ``soc_search`` are compiled. For functions without
    annotations: callers are not type-checked.
    """
    return _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def called(function: F) -> F:
    """``part`` for functions that neither make nor return arrays: references to arrays are not counted."""
    return cast(F, _njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(function))


def shared(function: F) -> F:
    """``called`` for larger functions with several callers: compiled once, and called instead of inlined."""
    return cast(F, _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(function))


def _unchanged(arrays: T) -> T:
    return arrays


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the LLVM value of an array, or of a tuple with arrays, with null as the owner of the memory.

    Other values are returned as they are. kind: the numba type of the value.
    """
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        kinds: Any = kind
        parts = enumerate(cgutils.unpack_tuple(builder, value))
        return context.make_tuple(
            builder, kind, [_without_owner(context, builder, kinds[i], part) for i, part in parts]
        )
    return value


@intrinsic
def _drop_owner(typing: Any, arrays: Any) -> tuple[Any, Any]:
    """Return the signature of ``borrowed`` for the numba type *arrays*, and the function that generates its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _without_owner(context, builder, arrays, arguments[0])

    return arrays(arrays), generate  # a numba type called with types is a signature


borrowed: Callable[[T], T] = _unchanged if _config.DISABLE_JIT else cast(Any, _drop_owner)
"""Return the same array, or tuple of arrays, without reference counting, so that passing it to functions is free.

The caller of the loop must keep the arrays alive: a loop may borrow its arguments, not arrays that it made, and must
not return them.
"""


@lru_cache
def stamp(module: str) -> str:
    """Return a hash of the sources of a module of kernels and of all kernel modules that it imports."""
    sources = sorted(f"{name}\n{text}" for name, text in _sources(module, {}).items())
    return sha256("\n".join(sources).encode()).hexdigest()


def _sources(module: str, texts: dict[str, str]) -> dict[str, str]:
    """Add the source of a module, and of all kernel modules that it imports, to *texts* by name; return *texts*."""
    texts[module] = getsource(import_module(module))
    for package, path, name in _IMPORTS.findall(texts[module]):
        imported = f"{package}.{path or name}"
        if imported not in texts:
            _sources(imported, texts)
    return texts
