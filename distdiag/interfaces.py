"""The network interfaces of this host at which other hosts may reach it."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def routable_addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface that is up, IPv4 first, without loopback and link-local ones."""
    stats = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        families = (socket.AF_INET, socket.AF_INET6) if name in stats and stats[name].isup else ()
        usable = [e.address for f in families for e in entries if e.family == f and _is_routable(e.address)]
        if usable:
            found[name] = usable
    return found


def _is_routable(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_link_local)
