"""Ports of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket


def free_port() -> int:
    """A port that nobody listens on, below the range from which systems choose ports by themselves."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")
