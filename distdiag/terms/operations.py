"""The operations of torch.distributed: one table of their names, of what must agree between ranks, and of their bandwidth.

An operation has several names: torch's function, the method of c10d, the flight recorder's and NCCL's, Kineto's, gloo's. A
*form* is torch's function (`all_gather_into_tensor`); a *family* holds the forms that can pair in one collective.

Algorithm and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md and src/*.cu). GB = 10^9 bytes. Other tools may print
2S/t as "throughput", or GiB/s as "GB/s".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


def _whole(ranks: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    name: str  # torch.distributed's name of it
    forms: str  # its forms, each with its other names: `form=name,name`
    # share of S that crosses each rank's link on a perfect network, by the number of ranks; None: it moves no bytes
    factor: Callable[[int], float] | None = None
    rooted: bool = False  # one rank is its source or destination
    synchronizes: bool = False  # it completes on no rank before every member has issued it
    reduces: bool = False  # it computes; the others copy
    in_parts: bool = False  # the recorder keeps the bytes of one rank's part, and S is the sum over all ranks
    same_dtype: bool = False  # all ranks must pass one dtype
    # all ranks must pass the same number of elements: in every form, in some (`even`), or in none
    same_size: str = "none"

    @property
    def probe(self) -> str:
        """Name of the probe that measures it, where there is one."""
        return self.name.replace("_", "")


OPERATIONS = (
    Operation(
        name="all_reduce", factor=lambda n: 2 * (n - 1) / n, synchronizes=True, reduces=True, same_dtype=True,
        same_size="all",
        forms="all_reduce=allreduce,_allreduce all_reduce_coalesced=allreduce_coalesced all_reduce_sparse",
    ),
    Operation(
        name="all_gather", factor=_all_but_one, synchronizes=True, in_parts=True, same_dtype=True, same_size="even",
        forms="all_gather=allgather all_gather_into_tensor=_all_gather_base,_allgather_base,allgather_base,all_gather_single"
        " all_gather_object all_gather_v all_gather_coalesced=allgather_coalesced all_gather_into_tensor_coalesced="
        "allgather_into_tensor_coalesced,all_gather_single_coalesced",
    ),
    Operation(
        name="reduce_scatter", factor=_all_but_one, synchronizes=True, reduces=True, same_dtype=True, same_size="even",
        forms="reduce_scatter=reducescatter reduce_scatter_tensor=_reduce_scatter_base,reduce_scatter_base,reduce_scatter_single"
        " reduce_scatter_v reduce_scatter_tensor_coalesced=reduce_scatter_single_coalesced",
    ),
    Operation(
        name="all_to_all", factor=_all_but_one, synchronizes=True, same_dtype=True,
        forms="all_to_all=alltoall,all_to_allv all_to_all_single=alltoall_base all_to_all_v_single",
    ),
    Operation(
        name="broadcast", factor=_whole, rooted=True, same_dtype=True, same_size="all",
        forms="broadcast=_broadcast_oop broadcast_object_list broadcast_coalesced",
    ),
    Operation(
        name="reduce", factor=_whole, rooted=True, reduces=True, same_dtype=True, same_size="all",
        forms="reduce=_reduce_oop",
    ),
    Operation(name="gather", factor=_all_but_one, rooted=True, in_parts=True, forms="gather=gather_single,gather_into_tensor gather_object"),
    Operation(name="scatter", factor=_all_but_one, rooted=True, in_parts=True, forms="scatter scatter_object_list"),
    Operation(name="barrier", synchronizes=True, forms="barrier=all_reduce_barrier"),
    Operation(name="send", factor=_whole, forms="send isend"),
    Operation(name="recv", factor=_whole, forms="recv=recv_any_source,recv_anysource irecv"),
    Operation(name="sendrecv", factor=_whole, forms="sendrecv"),
)  # fmt: skip
EVEN_FORMS = ("all_gather_into_tensor", "reduce_scatter_tensor")  # one tensor for all ranks: equal parts on any backend

_FORMS: dict[str, tuple[str, Operation]] = {
    name: (form.partition("=")[0], family)
    for family in OPERATIONS
    for form in family.forms.split()
    for name in form.replace("=", ",").split(",")
}


def bare(op: str) -> str:
    """Return `_all_gather_base` for the recorded name `nccl:_all_gather_base` or `nccl:_all_gather_base (…)`."""
    return op.rpartition(":")[2].partition(" ")[0]


def op_name(op: str) -> str:
    """Return torch.distributed's name of a recorded operation: `nccl:_all_gather_base` -> `all_gather_into_tensor`."""
    found = _FORMS.get(bare(op))
    return found[0] if found else bare(op)


def family(op: str) -> Operation | None:
    """Return the family of an operation by any of its names; None if it is not known."""
    found = _FORMS.get(bare(op))
    return found[1] if found else None


def synchronizes(op: str) -> bool:
    """True for operations that complete on no rank before every member has issued them; False for rooted and unknown ones."""
    known = family(op)
    return known is not None and known.synchronizes


def moves_bytes(op: str) -> bool:
    """True if the operation has a bandwidth; False for a barrier, and for an unknown operation."""
    known = family(op)
    return known is not None and known.factor is not None


def message_bytes(op: str, recorded_bytes: int | None, ranks: int | None) -> int | None:
    """Return S, the size that nccl-tests count, from the bytes of one rank's call; None if it is not known.

    S is one rank's buffer for all_reduce, broadcast, reduce, reduce_scatter (its input), all_to_all and messages, and the sum
    over ranks for all_gather, gather and scatter, of which the recorder keeps one rank's part.
    """
    known = family(op)
    if known is None or recorded_bytes is None or not known.in_parts:
        return recorded_bytes
    return recorded_bytes * ranks if ranks else None


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Return the algorithm bandwidth in GB/s: S / t, of `message_bytes` and the time of one operation on the slowest rank."""
    return size_bytes / time_s / 1e9


def bus_factor(op: str, ranks: int) -> float:
    """Return the share of S that crosses each rank's link.

    Raises:
        ValueError: `ranks` is below 2 (a group of one moves no bytes), or `op` moves none.
    """
    if ranks < 2:
        raise ValueError("bus bandwidth needs two ranks; a group of one moves no bytes")
    known = family(op)
    if known is None or known.factor is None:
        raise ValueError(f"{op} has no bandwidth")
    return known.factor(ranks)


def bus_bandwidth(op: str, size_bytes: int, time_s: float, world_size: int) -> float:
    """Return the bus bandwidth in GB/s: algbw x factor. It compares with the link's peak at any number of ranks.

    Raises:
        ValueError: see `bus_factor`.
    """
    return algorithm_bandwidth(size_bytes, time_s) * bus_factor(op, world_size)
