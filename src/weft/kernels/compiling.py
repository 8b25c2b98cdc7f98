"""How functions become compiled ones: loops are kept on disk, what they share is written into each of them.

numba keeps what it compiled by the source of one file and does not see when a function from another file changes. A
loop is therefore kept by all sources it is made of.
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
"""Kernels are in packages called so, of the core and of tools."""


class _Announcement(event.Listener):
    """Says what begins to be compiled, which takes seconds; kept code is loaded without a word."""

    _within = 0

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if not self._within and function.__module__.startswith(__package__):
            home = function.__module__.rpartition(".")[2]
            _log.info("compiling %s.%s (once; it is kept)", home, function.__name__.strip("_"))
        self._within += 1

    def on_end(self, event: Any) -> None:
        self._within -= 1


event.register("numba:compile", _Announcement())


def loop(function: F, *, _counts: bool = True) -> F:
    """Compile a function, and keep it until a source changes that it is made of."""
    # numba names the cache file by this. A file that other sources made is never opened: it may name missing classes.
    function.__qualname__ += f"-{stamp(function.__module__)[:16]}"
    compiled: F = _njit(cache=True, _nrt=_counts)(function)
    return compiled


def uncounted_loop(function: F) -> F:
    """``loop`` for functions that make and return no arrays: their references are not counted."""
    return loop(function, _counts=False)


def is_kept(compiled: Any) -> bool:
    """Whether a loop was compiled before, here or by another process whose result is on disk."""
    if _config.DISABLE_JIT or compiled.signatures:
        return True
    function = compiled.py_func
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
    return any(cache_folder(compiled).glob(f"{name}-*.nbi"))


def cache_folder(compiled: Any) -> Path:
    """Return the folder in which a loop is kept."""
    return Path(compiled.stats.cache_path)


untyped_loop: Any = loop
"""``loop`` for functions without types, which callers may call with any."""


def inlined(function: F) -> F:
    """Compile a small function as a part of every loop that calls it, as if it were written there."""
    compiled: F = _njit(inline="always")(function)
    return compiled


def part(function: F) -> F:
    """Compile a larger part of a loop by itself, which takes less time, and join the two in the end."""
    compiled: F = _njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


def _compile_inner(function: F) -> F:
    """Compile a function that only loops call: without entries for Python and for C, and kept only as a part of them.

    That took a quarter off the time in which the kernels of ``soc_search`` are compiled.
    """
    compiled: F = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


untyped_called: Any = _compile_inner
"""``_compile_inner`` for functions without types."""


def called(function: F) -> F:
    """``part`` for functions that make and return no arrays: references to those are not counted."""
    compiled: F = _njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(function)
    return compiled


def shared(function: F) -> F:
    """``called`` for larger functions that are called from several places, each time as one: less is compiled."""
    compiled: F = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)(function)
    return compiled


def _itself(arrays: T) -> T:
    return arrays


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
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
    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _without_owner(context, builder, arrays, given[0])

    return arrays(arrays), make


borrowed: Callable[[T], T] = _itself if _config.DISABLE_JIT else cast(Any, _drop_owner)
"""The same array, or tuple of arrays, whose references are not counted, so that it costs nothing to hand it on.

The caller of the loop must keep it alive: a loop borrows what it was given, not what it made, and returns none of it.
"""


@lru_cache
def stamp(module: str) -> str:
    """Changes with the source of a module of kernels, or of any that it imports."""
    sources = sorted(f"{name}\n{text}" for name, text in _sources(module, {}).items())
    return sha256("\n".join(sources).encode()).hexdigest()


def _sources(module: str, texts: dict[str, str]) -> dict[str, str]:
    texts[module] = getsource(import_module(module))
    for package, path, name in _IMPORTS.findall(texts[module]):
        imported = f"{package}.{path or name}"
        if imported not in texts:
            _sources(imported, texts)
    return texts
