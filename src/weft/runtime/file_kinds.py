"""What a path in a folder of models is, where it is not a regular file: opening a named pipe would block for ever."""

from __future__ import annotations

import stat

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def kind_of(mode: int) -> str:
    """The kind of file in words, by its mode (``st_mode``)."""
    return _KINDS.get(stat.S_IFMT(mode), "a file")
