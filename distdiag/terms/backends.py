"""Backends of process groups: in which of them a collective blocks the host."""

from __future__ import annotations

HOST_BLOCKING = frozenset({"gloo", "mpi"})
OWN_MESSAGE_COUNTER = ("nccl", "rccl")  # they number messages and collectives separately


def blocks_host(backend: str) -> bool:
    """True if the host waits inside a synchronous collective of this backend: `gloo`, `cpu:gloo`.

    False for device backends, where the device waits (`nccl`, `cpu:gloo,cuda:nccl`), and for unknown ones: there a wait has
    to be observed. An empty name is a group whose backend was not recorded.
    """
    parts = [p.rpartition(":")[2].strip().lower() for p in backend.split(",")]
    return all(not p or p in HOST_BLOCKING for p in parts)


def may_count_messages(backend: str) -> bool:
    """True if a backend may count messages together with collectives, as gloo does: its counter shows whether it does."""
    return not any(name in backend.lower() for name in OWN_MESSAGE_COUNTER)
