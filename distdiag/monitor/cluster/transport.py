"""Carries the states of nodes that do not see node 0's run directory, as the first rank of each has noted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdiag.errors import described
from distdiag.monitor.cluster import keys
from distdiag.monitor.cluster.client import Client
from distdiag.monitor.cluster.messages import Ask
from distdiag.monitor.cluster.server import Server
from distdiag.page import node_files
from distdiag.page.node_files import ERRORS, Own

LAST_STATE_S = 1.0  # for the last state to arrive, when the job is over


class Transport:
    """The connection of this node; nothing is opened, and pyzmq not imported, until the rank asks for it.

    Args:
        ask: Returns what this node's ranks answer to a reader on node 0.
        port: On which node 0 listens; 0: any.
    """

    def __init__(self, pages: Path, node: int, ask: Callable[[Ask], bytes], port: int = 0) -> None:
        self.pages, self.node, self.ask, self.port = pages, node, ask, port
        self.server: Server | None = None
        self.client: Client | None = None
        self.nodes: tuple[int, ...] = ()  # those that this one expects to hear of
        self.since_s: float | None = None  # monotonic: when the first connection was opened
        self._own: Own | None = None
        self._seen: tuple[int, int] | None = None
        self._failed: str | None = None

    def poll(self) -> bool:
        """Open the connection or admit more nodes, as the rank has noted; True if this node sends from now on."""
        try:
            found = os.stat(self.pages / node_files.PEERS)
        except OSError:
            return False
        mark, before = (found.st_mtime_ns, found.st_ino), self.client
        if mark != self._seen:
            self._seen = mark
            try:
                self._failed = self._follow(node_files.read_peers(self.pages))
            except (
                Exception
            ) as e:  # a pyzmq that cannot be loaded, no descriptor left: this node is judged without the others
                self._failed = f"the exchange with other nodes failed ({described(e)})"
        return self.client is not before

    def _follow(self, peers: node_files.Peers | None) -> str | None:
        """Do what the rank has noted; return what prevents it."""
        if peers is None:
            return f"{self.pages / node_files.PEERS} is damaged"
        try:
            self._own = own = self._own or keys.own_keys(self.pages)
        except OSError as e:
            return f"the keys for other nodes could not be noted: {e.strerror}"
        if own.error:
            return f"node {self.node} cannot talk to other nodes: {ERRORS[own.error]}"
        self._open(own, peers)
        deaf = [f"node {n} does not see this run directory: {ERRORS[word]}" for n, word in sorted(peers.errors.items())]
        return deaf[0] if deaf else None

    def _open(self, own: Own, peers: node_files.Peers) -> None:
        if peers.keys and self.node == 0:
            self.nodes = tuple(sorted(peers.keys))
            if self.server is None:
                self.server, self.since_s = Server(own, self.pages, self.port), time.monotonic()
                self.server.admit(peers.keys)
                self.server.start()
            self.server.admit(peers.keys)
        elif peers.server is not None and self.client is None and self.node:
            self.client, self.since_s = Client(own, peers.server, self.ask), time.monotonic()
            self.client.start()

    @property
    def failed(self) -> str | None:
        """Why other nodes are not heard, or this one is not."""
        link = self.server or self.client
        return self._failed or (link.failed if link is not None else None)

    @property
    def urgent(self) -> bool:
        """True if a rank of the job waits, as node 0 sees it."""
        return self.client is not None and self.client.urgent

    def facts(self) -> dict[str, Any]:
        """Return what run.db has about the connection: who was heard when, and how far the clocks are apart."""
        if self.server is None:
            return {}
        wall_s, now_ns, server = time.time(), time.monotonic_ns(), self.server
        nodes: dict[str, dict[str, float | None]] = {str(n): {"heard_unix_s": None} for n in self.nodes}
        with server.lock:
            for node, h in server.heard.items():
                nodes[str(node)] = {
                    "heard_unix_s": round(wall_s - (now_ns - h.received_ns) / 1e9, 1),
                    "clock_offset_s": round(-h.wall_offset_ns / 1e9, 6),
                    "clock_uncertainty_s": round(h.uncertainty_ns / 1e9, 6),
                }
        return {
            "by": "zeromq",
            "port": server.own.port,
            "nodes": nodes,
            "refused": server.refused,
            "dropped": server.dropped,
        }

    def close(self) -> None:
        """Send the last state, and end."""
        if self.client is not None:
            self.client.flush(LAST_STATE_S)
        for link in (self.client, self.server):
            if link is not None:
                link.close()
