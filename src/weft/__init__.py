"""Run many neural networks on one accelerator, well.

Models (``load_model``) become profiles on a device (``load_npu``, ``estimate``); ``simulate`` weaves
them under a policy and returns all events (``Trace``) and their statistics (``Report``). ``map_models`` places
models on the units of a ``Soc``, ``place`` on the machines of a cluster, ``stitch`` makes one graph of models that
share weights, ``tune`` finds number formats for a model. The modules behind these functions are ``weft.mapping``,
``weft.placing``, ``weft.stitching``, ``weft.tuning``. The server is ``weft.serving``, its load generator ``weft.load``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from weft.base import moved
from weft.base.version import __version__ as __version__

moved.install()


def __dir__() -> list[str]:
    """The public names of all tools whose required packages are installed."""
    from weft.base.registry import registered

    return sorted(("__version__", *(name for name, entry in registered("names").items() if not entry.missing())))


def __getattr__(name: str) -> Any:
    """Import a public name from its tool on first use, so that ``import weft`` loads no solver and no runtime."""
    if name == "__all__":
        return __dir__()
    if not name.startswith("_"):
        from weft.base.registry import entry_of

        if entry := entry_of("names", name) or entry_of("modules", name):
            value = globals()[name] = entry.load()  # cached: this function is called for absent names only
            return value
        if moved.new_name(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
