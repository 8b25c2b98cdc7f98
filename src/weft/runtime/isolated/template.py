"""The process that workers are forked from: it has imported what they need, and does nothing else.

To start Python and ONNX Runtime takes most of a second of a processor (torch, for a GPU, takes more), which those who
are being served would have to do without each time a worker has died; a fork takes milliseconds. No device is touched
here. A worker is to be the server's child, so it is forked twice: its parent is gone at once, and the server, which
asked for its orphans, has it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from typing import Any

from weft.runtime.isolated.confinement import Confinement, end_with
from weft.runtime.isolated.engines import engine_kind
from weft.runtime.isolated.packets import Line, Packet, close_all
from weft.runtime.isolated.worker import work

_LOOK_S = 0.0002


def main() -> None:
    """Fork whenever the process at the other end of the line asks, until it is gone."""
    server = os.getppid()
    end_with(server)
    line, engine = Line(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    engine_kind(engine).warm_up(engine)
    gc.collect()
    gc.freeze()  # collecting garbage would write to every page that all of them share
    try:
        while True:
            packet = line.receive()
            line.send([_forked(line, packet, engine)], wait=True)
            close_all(packet.files)
    except (EOFError, OSError):
        os._exit(0)


def _forked(line: Line, packet: Packet, engine: str) -> int:
    """The number of a new worker, on the line that came."""
    here, there = os.pipe()
    between = os.fork()
    if not between:
        worker = os.fork()
        if worker:
            os.write(there, str(worker).encode())
            os._exit(0)
        os.close(here)
        os.close(there)
        line.close()
        _become_worker(packet.files[0], engine, *packet.head)
    os.close(there)
    try:
        os.waitpid(between, 0)
        return int(os.read(here, 32))
    finally:
        os.close(here)


def _become_worker(file: int, engine: str, wanted: dict[str, Any], scratch: str) -> None:
    """Work in a session of its own, and never return."""
    code = 1
    try:
        os.setsid()
        os.environ.update(TMPDIR=scratch, HOME=scratch)
        confinement = Confinement(**wanted)
        end_s = time.monotonic() + 10.0
        while os.getppid() != confinement.server and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        work(file, confinement, engine)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
