"""Backends of process groups: whether a collective blocks the host, and how messages are counted."""

from __future__ import annotations

from functools import lru_cache

HOST_BLOCKING = frozenset({"gloo", "mpi"})
# They number messages and collectives separately. The first letters: torch also has nccl2, nccl-lazy and nccl-legacy.
OWN_MESSAGE_COUNTER = ("nccl", "rccl")
# By torch's name of the implementation: always, and never, a communicator of two ranks for a message outside of a batch. The
# old NCCL group has one unless it was bound to a device.
PAIRS, NO_PAIRS = ("nccl-lazy",), ("nccl2",)


def in_group_communicator(tag: int) -> int:
    """Return what is recorded as the tag of a message of a device backend that the whole group's communicator carries.

    Those are the messages of batch_isend_irecv, and all messages of a group that connected at its start. A single send or recv
    uses a communicator of its two ranks, and messages never match across communicators: a tag below 0 distinguishes them.
    """
    return ~tag  # its own inverse


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


@lru_cache(64)  # called for each message of a device backend
def ignores_tags(backend: str, device: str) -> bool:
    """True if messages of tensors on this type of device (`cpu`, `cuda`) match without regard to tags: `nccl`, `cuda:nccl`."""
    for part in backend.lower().split(","):
        where, _, name = part.strip().rpartition(":")
        if name.startswith(OWN_MESSAGE_COUNTER) and where in ("", device):
            return True
    return False
