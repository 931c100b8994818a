"""Decides whether two calls of one collective are compatible, by names of operations, dtypes and sizes.

The same operation has several names: of the Python function, of the flight recorder, of the coalesced and the object
variants. A mismatch is reported only if the calls are incompatible under every reading of the names; in doubt, `conflict` abstains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import lru_cache

from distdiag.diagnosis.model.snapshot import Call
from distdiag.terms.operations import EVEN_FORMS, bare, family, op_name
from distdiag.terms.units import SCALAR_TYPES

# torch's scalar types as C++ names them (flight recorder) -> as Python does
_COMPLEX = {"complexfloat": "complex64", "complexdouble": "complex128", "complexhalf": "complex32"}
_DTYPES = {name.lower(): python for name, (python, _) in SCALAR_TYPES.items()} | _COMPLEX


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
    all_to_all = all(known is not None and known.name == "all_to_all" for known in (family(c.op) for c in calls))
    if not all_to_all or None in sent or None in received:
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
    known = family(op)
    if known is None:
        return (None, None, None, None, False)
    root = rooted if known.rooted else None
    dtype = dtype_name(dtype) if known.same_dtype else None  # of the first of several tensors
    if dtype is not None and dtype.startswith("complex"):
        dtype = None  # some backends record it as a real dtype of twice the size
    compared = known.same_size != "none" and (even or "coalesced" not in bare(op))
    size = math.prod(shape) if shape is not None and compared else None
    return (known.name, root, dtype, size, known.same_size == "all" or even or op_name(op) in EVEN_FORMS)


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


def first_conflict(calls: Iterable[Call], backend: str) -> str | None:
    """Return why the first of the calls and another one can never complete together; None if all may."""
    first, *others = map(signature, calls)
    return next((cause for other in others if (cause := conflict(first, other, backend)) is not None), None)
