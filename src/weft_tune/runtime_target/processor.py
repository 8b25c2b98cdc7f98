"""What this processor is, in words. Nothing is decided by it: clocks decide."""

from __future__ import annotations

import platform
from pathlib import Path

FOR_8_BITS = {
    "amx_int8": "AMX", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX-VNNI", "i8mm": "i8mm", "asimddp": "dot products",
}  # fmt: skip
"""Flag of Linux -> what multiplies and adds 8-bit integers in one instruction."""
WIDE = {"avx512bw": "AVX-512", "avx2": "AVX2"}
"""Flag -> what multiplies them in several, and adds pairs of products in 16 bits."""


def described(info: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor and what it has for 8-bit integers, as far as the system says."""
    try:
        lines = [line.partition(":") for line in info.read_text().splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    told = {key.strip().lower(): value.strip() for key, _, value in reversed(lines)}
    flags = set((told.get("flags") or told.get("features") or "").split())
    name = told.get("model name") or platform.machine()
    for known, what in (
        (FOR_8_BITS, "has instructions for 8-bit products"),
        (WIDE, "has none made for 8-bit products"),
    ):
        if found := [words for flag, words in known.items() if flag in flags]:
            return f"{name}, which {what} ({', '.join(found)})"
    return name
