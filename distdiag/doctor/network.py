"""Check the network: the address that other nodes get, and the interface that gloo and NCCL use."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping

from distdiag.doctor.check import Check, failed, passed, skipped, warned
from distdiag.interfaces import routable_addresses

RESOLVE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
SLOW_RESOLVE_S = 1.0
# Bridges and tunnels that reach no other node; gloo and NCCL may choose them.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman", "vmnet", "tailscale", "tun", "wg", "zt",
)  # fmt: skip


def host_name() -> Check:
    """Check what this host's name resolves to: gloo and torchrun send that address to the other ranks."""
    name = socket.gethostname()
    addresses, took_s = resolve(name)
    if addresses is None:
        return warned(
            "host name",
            f"{name} did not resolve within {RESOLVE_TIMEOUT_S:g} s",
            f"add '127.0.0.1 {name}' (one node) or its real address (several) to /etc/hosts: every start waits for this",
        )
    if not addresses:
        remedy = f"add it to /etc/hosts, or export GLOO_SOCKET_IFNAME={candidate() or 'lo'}"
        return warned("host name", f"{name} does not resolve", remedy)
    found = f"{name} is {', '.join(addresses[:3])}"
    if took_s > SLOW_RESOLVE_S:
        return warned("host name", f"{found}, after {took_s:.1f} s", f"add it to /etc/hosts: {addresses[0]} {name}")
    if all(ipaddress.ip_address(a).is_loopback for a in addresses):
        return warned(
            "host name",
            f"{found}: loopback",
            "fine on one node; on several, the other nodes get an address that is their own: correct /etc/hosts or "
            f"export GLOO_SOCKET_IFNAME={candidate() or '<interface>'} and --master-addr by number",
        )
    return passed("host name", found)


def resolve(name: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> tuple[list[str] | None, float]:
    """Return the addresses of `name` (None: no answer in time; []: it has none) and the seconds that took."""
    answer: list[list[str]] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(i[4][0]).partition("%")[0] for i in infos)))
        except (OSError, UnicodeError):
            answer.append([])

    began = time.monotonic()
    # getaddrinfo has no timeout: the thread is abandoned
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return (answer[0] if answer else None), time.monotonic() - began


def addresses() -> dict[str, str]:
    """Return the IPv4 (else IPv6) address of every interface that is up, without loopback and link-local ones."""
    return {name: found[0] for name, found in routable_addresses().items()}


def is_virtual(name: str) -> bool:
    return name.startswith(_VIRTUAL)


def candidate() -> str | None:
    """Return the interface that another node can reach, or None."""
    return next((n for n in addresses() if not is_virtual(n)), None)


def interfaces(env: Mapping[str, str], up: Mapping[str, str] | None = None) -> Check:
    """Check which interfaces gloo and NCCL may use, and whether those named in the environment exist."""
    up = addresses() if up is None else up
    found = ", ".join(f"{n} {a}" for n, a in up.items()) or "loopback only"
    known = {*up, "lo"}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = env.get(variable)
        if not value:
            continue
        # NCCL: prefixes, '=' for exact names, '^' for names to leave out; gloo: exact names
        names = [n for n in value.lstrip("=^").split(",") if n]
        exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
        missing = [n for n in names if not (n in known if exact else any(k.startswith(n) for k in known))]
        if missing and not value.startswith("^"):
            why = f"{variable}={value}: no interface {', '.join(missing)} is up ({found})"
            return failed("interfaces", why, f"export {variable}={next(iter(up), 'lo')}")
        found += f"; {variable}={value}"
    if not env.get("GLOO_SOCKET_IFNAME") and not env.get("NCCL_SOCKET_IFNAME"):
        real = [n for n in up if not is_virtual(n)]
        if (len(real) != len(up) and real) or len(real) > 1:
            return warned(
                "interfaces",
                found,
                "on several nodes name the one they share: "
                f"export GLOO_SOCKET_IFNAME={real[0]} NCCL_SOCKET_IFNAME={real[0]}",
            )
    return passed("interfaces", found)


def reach(host: str, port: int) -> Check:
    """Check whether `host:port`, a rendezvous, accepts a connection, and from which of our addresses."""
    name = f"reach {host}:{port}"
    found, _ = resolve(host)
    if not found:
        return failed(name, f"{host} does not resolve", "use the head node's address by number as --master-addr")
    try:
        with socket.create_connection((found[0], port), CONNECT_TIMEOUT_S) as s:
            ours = s.getsockname()[0]
    except TimeoutError:
        remedy = "open the port between the nodes (a firewall, or another network)"
        return failed(name, f"{found[0]} does not answer", remedy)
    except OSError as e:
        return failed(
            name,
            f"{found[0]}: {e.strerror or e}",
            "start the job on the head node first, and compare --master-port: nothing listens there",
        )
    if ipaddress.ip_address(found[0]).is_loopback:
        why = f"connected, but {host} is {found[0]}, this host itself"
        return warned(name, why, "give the head node's real address")
    return passed(name, f"connected to {found[0]} from {ours}")


def other_nodes() -> Check:
    """Check that monitors of nodes without a shared directory could talk to each other."""
    name = "other nodes"
    if importlib.util.find_spec("zmq") is None:
        found = "pyzmq is not installed: nodes that do not see one run directory are judged each on its own"
        return skipped(name, found)
    import zmq

    if not zmq.has("curve"):
        found = f"libzmq {zmq.zmq_version()} has no CURVE, and nothing is sent in plain"
        return warned(name, found, "install pyzmq from PyPI (pip install --force-reinstall pyzmq)")
    return passed(name, f"pyzmq {zmq.pyzmq_version()} with CURVE: they need no shared run directory")
