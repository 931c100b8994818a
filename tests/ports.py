"""Ports for test jobs."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # tests in parallel must not draw the same ones


def free_port() -> int:
    """Return a port that is free, as is the next. The kernel gives neither to others, unless it may give any port."""
    first_of_kernel = int(_RANGE.read_text().split()[0])
    end = first_of_kernel if first_of_kernel > 20_000 else 32_768
    while True:
        port = _random.randrange(10_000, end - 1, 2)
        try:
            with ExitStack() as stack:
                for n in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", n)))
        except OSError:
            continue
        return port
