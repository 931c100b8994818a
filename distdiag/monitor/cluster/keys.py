"""The keys of this node, and the ZeroMQ sockets that accept nothing without them."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdiag.interfaces import routable_addresses
from distdiag.page import node_files
from distdiag.page.node_files import Own

DOMAIN = "distdiag"  # for the authentication: every socket with it accepts listed keys only
ALIVE_MS, LOST_MS = 2_000, 6_000  # heartbeats of a connection; without any for so long it is made anew
HANDSHAKE_MS, CONNECT_MS = 5_000, 2_000
RECONNECT_MS, MOST_RECONNECT_MS = 200, 2_000
QUEUED = 64  # messages of one peer
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def refusal() -> str:
    """Return why this node cannot talk to others, a word of `node_files.ERRORS`; empty if it can."""
    if importlib.util.find_spec("zmq") is None:
        return "no_pyzmq"
    import zmq

    return "" if zmq.has("curve") else "no_curve"


def own_keys(pages: Path) -> Own:
    """Return the keys that an earlier monitor of this node has left, or new ones, for the next incarnation.

    Raises:
        OSError: they cannot be written.
    """
    before = node_files.read_own(pages) or Own()
    error = refusal()
    own = replace(before, incarnation=before.incarnation + 1, error=error)
    if not error and not own.secret:
        import zmq

        public, secret = zmq.curve_keypair()
        own = replace(own, public=public.decode(), secret=secret.decode())
    node_files.write(pages, own)
    return own


def secured(s: Any, own: Own, most_bytes: int) -> Any:
    """Return a socket with our keys, limits and heartbeats; it is neither bound nor connected."""
    import zmq

    s.linger = 0
    s.curve_publickey, s.curve_secretkey = own.public.encode(), own.secret.encode()
    s.maxmsgsize = most_bytes
    s.sndhwm = s.rcvhwm = QUEUED
    s.setsockopt(zmq.HEARTBEAT_IVL, ALIVE_MS)
    s.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MS)
    s.setsockopt(zmq.HEARTBEAT_TTL, LOST_MS)
    s.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    s.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    s.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    s.setsockopt(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
    return s


def endpoint(address: str, port: int | str) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def own_addresses() -> tuple[str | None, tuple[str, ...]]:
    """Return (the address to bind, None for all; the addresses at which other nodes may reach this one).

    The job's own choice counts: the interface that it names for gloo or NCCL, else the address of this host
    that others know as MASTER_ADDR.
    """
    by_name = routable_addresses()
    for variable in _INTERFACES:
        wanted = tuple(n.strip(" =") for n in os.environ.get(variable, "").split(",") if n.strip(" ="))  # prefixes
        for name, found in by_name.items():
            if wanted and name.startswith(wanted):
                return found[0], (found[0],)
    every = [a for found in by_name.values() for a in found]
    master = os.environ.get("MASTER_ADDR", "")
    try:
        known = [str(a[4][0]) for a in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)] if master else []
    except OSError:
        known = []
    mine = next((a for a in known if a in every), None)
    return mine, (mine,) if mine else tuple(every[: node_files.MOST_ADDRESSES])
