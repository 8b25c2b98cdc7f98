"""Memory that a server frees is there for the next request."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from weft.serving.held_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def touched(count):
    for _ in range(count):
        places = [libc.malloc(3 << 20) for _ in range(4)]  # as of four requests at a time
        for place in places:
            ctypes.memset(place, 1, 3 << 20)
        for place in places:
            libc.free(place)

touched(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touched(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LEFT = """
import ctypes
from weft.serving import held_memory as allocation

allocation.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
places = [libc.malloc(1 << 20) for _ in range(200)]
for place in places:
    ctypes.memset(place, 1, 1 << 20)
keeper = libc.malloc(2 << 20)  # behind them: the end of the heap is not free
for place in places:
    libc.free(place)
allocation.give_freed_memory_back()
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""

gnu = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU C library"
)


@gnu
def test_an_idle_server_gives_back_what_large_requests_have_left() -> None:
    found = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True).stdout
    assert int(found) < 150 << 20


@gnu
def test_pages_of_requests_are_not_cleared_again_and_again() -> None:
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("usual", "kept")
    )
    assert kept < usual / 10
