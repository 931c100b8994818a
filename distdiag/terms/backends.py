"""Backends of process groups: whether a collective blocks the host, and how messages are counted."""

from __future__ import annotations

HOST_BLOCKING = frozenset({"gloo", "mpi"})
OWN_MESSAGE_COUNTER = ("nccl", "rccl")  # they number messages and collectives separately


def blocks_host(backend: str) -> bool:
    """True if the host waits inside a synchronous collective of this backend: `gloo`, `cpu:gloo`.

    False for device backends (`nccl`, `cpu:gloo,cuda:nccl`), where the device waits, and for unknown ones: there a wait must
    be observed. An empty name (backend not recorded) counts as blocking.
    """
    parts = [p.rpartition(":")[2].strip().lower() for p in backend.split(",")]
    return all(not p or p in HOST_BLOCKING for p in parts)


def may_count_messages(backend: str) -> bool:
    """True if a backend may count messages together with collectives, as gloo does; its counter shows if it does."""
    return not any(name in backend.lower() for name in OWN_MESSAGE_COUNTER)
