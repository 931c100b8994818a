"""Find the network interface over which the ranks will try to connect, and whether it can work.

gloo takes GLOO_SOCKET_IFNAME, else the address that this host's own name resolves to, else the loopback
(torch, ProcessGroupGloo::createDefaultDevice). On clusters whose /etc/hosts maps the host name to 127.0.0.1 every
node then advertises itself as 127.0.0.1, and no other rank arrives.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

NO_ADDRESS = "no address"


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str
    reason: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.address} ({self.reason})"


def addresses() -> dict[str, str]:
    """Return the IPv4 address of every interface that has one."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                found.setdefault(name, entry.address)
    return found


def tried_by(backend: str) -> Interface:
    """Return the interface that `backend` ("gloo" or "nccl") would use on this host."""
    by_name = addresses()
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    if wanted := os.environ.get(variable):
        name = wanted.split(",")[0].lstrip("^=")
        return Interface(name, by_name.get(name, NO_ADDRESS), f"{variable}={wanted}")
    if backend == "nccl":
        for name, address in by_name.items():
            if name != "lo" and not name.startswith(("docker", "virbr")):
                return Interface(name, address, "NCCL's first choice: not loopback, not docker")
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        with socket.socket() as s:
            s.bind((address, 0))
    except OSError:
        return Interface("lo", "127.0.0.1", f"the host name {host} does not resolve to this host")
    address = str(address)
    name = next((n for n, a in by_name.items() if a == address), "lo" if address.startswith("127.") else "?")
    return Interface(name, address, f"the host name {host} resolves to it")


def advice(interfaces: dict[int, Interface], nodes: dict[int, str]) -> str:
    """Return one line of advice for ranks that could not connect over gloo; both arguments are by rank."""
    variable = "GLOO_SOCKET_IFNAME"
    several = len(set(nodes.values())) > 1
    for rank, interface in interfaces.items():
        if interface.address == NO_ADDRESS:
            return f"rank {rank} has no interface {interface.name} with an address ({interface.reason}): `ip addr` lists them"
        if interface.address.startswith("127.") and several:
            return (
                f"rank {rank} offers {interface.address}, which no other node can reach: "
                f"export {variable}=<the interface with the cluster's address> on every node"
            )
        if interface.name.startswith(("docker", "virbr", "br-")):
            return f"rank {rank} would use {interface.name}, a bridge inside its host: export {variable}=<the cluster's interface>"
    if interfaces and all(i.address.startswith("127.") for i in interfaces.values()):
        return (
            "start the missing ranks, or read their output; if they are on another node, they cannot reach 127.0.0.1: "
            f"export {variable}=<interface> and MASTER_ADDR=<address>"
        )
    return f"start the missing ranks, or read their output; check that the interface is the right one ({variable})"


def line_rate_gbps(name: str) -> float | None:
    """Return the line rate of a network card in GB/s (10^9 bytes); None for loopback and virtual interfaces."""
    stats = psutil.net_if_stats().get(name)
    return stats.speed / 8e3 if stats is not None and stats.speed > 0 else None
