"""Decides whether two calls of one collective are compatible, by names of operations, dtypes and sizes.

The same operation has several names: of the Python function, of the flight recorder, of the coalesced and the object
variants. A mismatch is reported only if the calls are incompatible under every reading of the names; in doubt, `conflict` abstains.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

from distdiag.diagnosis.model.snapshot import Call

# One family = operations that can pair in one collective. Everything not listed is not judged.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "allreduce", "all_reduce_coalesced", "allreduce_coalesced", "all_reduce_sparse"),
    "broadcast": ("broadcast", "_broadcast_oop", "broadcast_object_list", "broadcast_coalesced"),
    "reduce": ("reduce", "_reduce_oop"),
    "barrier": ("barrier", "all_reduce_barrier"),
    "all_gather": (
        "all_gather", "allgather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor",
        "all_gather_single", "all_gather_object", "all_gather_v", "all_gather_coalesced", "allgather_coalesced",
        "all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
        "allgather_base",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_base", "reduce_scatter_tensor",
        "reduce_scatter_single", "reduce_scatter_v", "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    "all_to_all": ("all_to_all", "alltoall", "all_to_all_single", "alltoall_base", "all_to_all_v_single"),
    "gather": ("gather", "gather_object"),
    "scatter": ("scatter", "scatter_object_list"),
    "send": ("send", "isend"),
    "recv": ("recv", "irecv"),
}  # fmt: skip
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names}
_CANONICAL = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor", "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall_base": "all_to_all_single", "all_reduce_barrier": "barrier", "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce", "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all",
}  # fmt: skip

# torch's scalar types as C++ names them (flight recorder) -> as Python does
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "byte": "uint8",
    "char": "int8", "short": "int16", "int": "int32", "long": "int64", "bool": "bool",
    "complexfloat": "complex64", "complexdouble": "complex128", "complexhalf": "complex32",
}  # fmt: skip

_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
# Operations in which every rank must have the same number of elements; others may vary by rank, or are not recorded completely.
_SAME_SIZE = {"all_reduce", "reduce", "broadcast"}
_SIZE_BY_FORM = {"all_gather", "reduce_scatter"}
_EVEN_FORMS = {"all_gather_into_tensor", "reduce_scatter_tensor"}
_SAME_DTYPE = {"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all"}


def op_name(op: str) -> str:
    """Return torch.distributed's name of a recorded operation: `nccl:_all_gather_base` -> `all_gather_into_tensor`."""
    bare = op.rpartition(":")[2].partition(" ")[0]
    return _CANONICAL.get(bare, bare)


def needs_everybody(op: str) -> bool:
    """True for operations that complete on no rank before every member has issued them; false for rooted ones."""
    return _FAMILY.get(op.rpartition(":")[2]) in ("all_reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all")


def dtype_name(dtype: str | None) -> str | None:
    """Return Python's name of a scalar type: `Float`, `torch.float32` and `float32` are equal."""
    if not dtype:
        return None
    bare = dtype.removeprefix("torch.").lower()
    return _DTYPES.get(bare, bare)


def elements(call: Call) -> int | None:
    """Return the number of elements of the first tensor; None if the shape is not known."""
    return None if call.shape is None else math.prod(call.shape)


def splits_disagree(calls: Collection[Call]) -> bool:
    """True if the calls of one all_to_all, one per member, together send more or fewer elements than they expect.

    Then at least one rank expects a different number of elements from a peer than that peer sends.
    """
    sent, received = [elements(c) for c in calls], [c.received for c in calls]
    if any(_FAMILY.get(c.op.rpartition(":")[2]) != "all_to_all" for c in calls) or None in sent or None in received:
        return False
    return sum(n or 0 for n in sent) != sum(n or 0 for n in received)


Signature = tuple[str | None, int | None, str | None, int | None, bool]


def signature(call: Call) -> Signature:
    """Return what must agree between the members of a collective: family, root, dtype, elements. None is not compared.

    The last field is True if elements must agree on any backend: forms with one tensor for all ranks, and calls known to be even.
    """
    return _signature(call.op, call.root, call.dtype, call.shape, call.even)


@lru_cache(4096)
def _signature(op: str, rooted: int | None, dtype: str | None, shape: tuple[int, ...] | None, even: bool) -> Signature:
    bare = op.rpartition(":")[2].partition(" ")[0]
    family = _FAMILY.get(bare)
    if family is None:
        return (None, None, None, None, False)
    coalesced = "coalesced" in bare
    root = rooted if family in _ROOTED else None
    dtype = dtype_name(dtype) if family in _SAME_DTYPE else None  # of the first of several tensors
    if dtype is not None and dtype.startswith("complex"):
        dtype = None  # some backends record it as a real dtype of twice the size
    compared = family in (*_SAME_SIZE, *_SIZE_BY_FORM) and (even or not coalesced)
    size = math.prod(shape) if shape is not None and compared else None
    return (family, root, dtype, size, family in _SAME_SIZE or even or _CANONICAL.get(bare, bare) in _EVEN_FORMS)


def conflict(a: Signature, b: Signature, backend: str = "") -> str | None:
    """Return why two calls can never complete together: `op`, `root`, `dtype`, `shape`; None if they may.

    Args:
        backend: Of the group. gloo runs (and records) reduce_scatter as all_reduce, and NCCL a barrier as an
            all_reduce of one element: such pairs are not judged unless the backend rules that out.
    """
    if a[0] is None or b[0] is None:
        return None
    if a[0] != b[0]:
        pair = {a[0], b[0]}
        if pair == {"all_reduce", "reduce_scatter"} and not backend.startswith("nccl"):
            return None
        if pair == {"all_reduce", "barrier"} and backend not in ("gloo", "mpi"):
            size = a[3] if a[0] == "all_reduce" else b[3]
            if size is None or size <= 1:
                return None
        return "op"
    for i, cause in ((1, "root"), (2, "dtype"), (3, "shape")):
        if a[i] is not None and b[i] is not None and a[i] != b[i]:
            if cause == "shape" and not (a[4] and b[4]) and (a[0] != "all_gather" or backend != "gloo"):
                continue  # NCCL takes lists of tensors of different sizes; gloo aborts where it gathers
            return cause
    return None
