"""The entries of a flight-recorder dump: one operation each, as its rank recorded it.

The fields are described in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, pairwise
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.waits import compatible
from distdiag.terms.frames import PACKAGE, USER, owner
from distdiag.terms.untrusted import MAX_INT, MAX_TEXT, is_count, short_text

MAX_TENSORS, MAX_DIMENSIONS = 1 << 14, 64  # limits of one operation
MAX_FRAMES = 256  # limit of one stack, innermost first
CALLERS = 3  # most callers of a call's site
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "complex128": 16,
}  # fmt: skip
# They write their entries themselves. Those of all others are written by torch's hook, from 2.14 on: `nccl2`, custom backends.
_NATIVE = {"", "nccl", "gloo", "xccl"}
_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def by_hook(backend: str) -> bool:
    """True if torch's hook writes the entries: tensors as the caller gave them, counters of operations instead of numbers."""
    return backend not in _NATIVE


def time_ns(value: Any) -> int | None:
    """Return a time, or another number above 0, of an entry; None if it was not recorded (None, or 0 in JSON)."""
    return value if type(value) is int and 0 < value < MAX_INT else None


class Entry(msgspec.Struct, gc=False, rename={"seq": "collective_seq_id", "p2p_seq": "p2p_seq_id"}):
    """One entry. Fields of type Any are checked by whoever reads them; of the first three of them, only truth or equality is used."""

    process_group: tuple[_Text, _Text]  # name, description
    seq: _Count
    p2p_seq: _Count
    profiling_name: _Text
    is_p2p: Any
    state: Any
    retired: Any
    pg_id: Any = None
    frames: Any = None
    input_sizes: Any = None
    input_dtypes: Any = None
    output_sizes: Any = None
    output_dtypes: Any = None
    timeout_ms: Any = None
    time_created_ns: Any = None
    time_discovered_started_ns: Any = None
    time_discovered_completed_ns: Any = None

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def created_ns(self) -> int | None:
        return time_ns(self.time_created_ns)

    @property
    def completed(self) -> bool:
        """True if the operation is known to be complete; gloo's entries are retired then, and stay `scheduled`."""
        return self.state == "completed" or bool(self.retired and self.profiling_name.startswith("gloo"))

    @property
    def retired_when_issued(self) -> bool:
        """True for an operation of a backend that reports no completion: whether it is complete is not known.

        torch's hook retires its entry when it is issued. An entry of NCCL itself that is retired and not complete has timed out.
        """
        return bool(self.retired) and not self.completed and by_hook(self.profiling_name.partition(":")[0])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return what is equal in equal calls, and in an all_to_all that may send other sizes."""
        known = compatible.family(self.profiling_name)
        sized = known is None or known.same_size != "none"
        return self.profiling_name, self.input_dtypes, self.output_dtypes, self.input_sizes if sized else None

    @property
    def ends_batch(self) -> bool:
        """True if it closes a batch: `nccl:coalesced`, since torch 2.7 also `nccl:ALLGATHER_coalesced`."""
        head, _, last = self.profiling_name.rpartition("coalesced")
        return not last and (head.endswith(":") or (head.endswith("_") and head.rpartition(":")[2].isupper()))

    def tensor(self) -> tuple[tuple[int, ...] | None, str | None, int | None, int | None]:
        """Return shape, type and bytes of the (first) tensor, and the elements that are received; None where not known."""
        shapes = _shapes(self.input_sizes or self.output_sizes or ())
        dtypes = self.input_dtypes or self.output_dtypes
        shape = shapes[0] if shapes else None
        if shapes and len(shapes) > 1 and self.profiling_name.endswith("_coalesced"):  # several tensors: all of them
            shape = (sum(math.prod(one) for one in shapes),)
        elements = _product(shape) if shape is not None else None
        first = short_text(dtypes[0]) if isinstance(dtypes, (list, tuple)) and dtypes else ""
        dtype = compatible.dtype_name(first) if first else None
        size = elements * _ITEM_BYTES.get(dtype, 1) if elements is not None and dtype is not None else None
        outputs = _shapes(self.output_sizes or ())
        received = _product(outputs[0]) if len(shapes or ()) == 1 and len(outputs or ()) == 1 and outputs else None
        return shape if elements is not None else None, dtype, size, received


def _shapes(value: Any) -> list[tuple[int, ...]] | None:
    """Return the shapes of an operation's tensors; None if they are not lists of sizes, or exceed the limits."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_TENSORS:
        return None
    for one in value:
        if not isinstance(one, (list, tuple)) or len(one) > MAX_DIMENSIONS or not all(map(is_count, one)):
            return None
    return [tuple(one) for one in value]


def _product(shape: tuple[int, ...]) -> int | None:
    """Return the number of elements; None if that exceeds any tensor."""
    n = math.prod(shape)
    return n if n < MAX_INT else None


def entries_of(records: list[Any]) -> tuple[list[Entry], int]:
    """Return the entries in decoded records of version 1.x or 2.x, and how many lack a group, a number or a name."""
    try:
        return msgspec.convert(records, list[Entry]), 0
    except msgspec.ValidationError:
        found = [e for record in records if (e := _older(record)) is not None]
        return found, len(records) - len(found)


def _older(record: Any) -> Entry | None:
    """Return one record of any version with the fields of 2.x; None if it lacks a group, a number or a name."""
    e = dict(record) if isinstance(record, dict) else {}
    name, number = e.get("profiling_name"), e.get("collective_seq_id", e.get("seq_id"))
    group = e.get("process_group", e.get("pg_name", e.get("pg_id")))
    group = group if isinstance(group, (list, tuple)) else (group, "")
    named = isinstance(name, str) and name.rpartition(":")[2].startswith(("send ", "recv "))
    is_p2p, retired = bool(e.get("is_p2p", named)), e.get("retired") is True
    known = {
        "state": "completed" if retired else "scheduled",
        **{field: e[field] for field in Entry.__struct_encode_fields__ if field in e},
        "process_group": [str(part) if is_count(part) else part for part in group],
        "collective_seq_id": number,
        "is_p2p": is_p2p,
        "retired": retired,
    }
    if not is_count(known.get("p2p_seq_id")):
        known["p2p_seq_id"] = number if is_p2p else 0
    try:
        return msgspec.convert(known, Entry)
    except msgspec.ValidationError:
        return None


def user_site(frames: Any, helpers: Collection[Site] = ()) -> Site | None:
    """Return the user's innermost frame, of a helper with its callers; of packages only if there is no other."""
    path, second = [], None
    for whose, site in _sites(frames):
        if whose == USER:
            path.append(site)
            if site not in helpers or len(path) > CALLERS:
                break
        elif second is None and whose == PACKAGE:
            second = site
    caller = None
    for site in reversed(path):
        caller = replace(site, caller=caller)
    return caller or second


def of_thread(frames: Any) -> bool:
    """True for the stack of a thread that Python started: not the main one, nor one of autograd."""
    outermost = frames[-1] if isinstance(frames, list) and frames else None
    return isinstance(outermost, dict) and short_text(outermost.get("filename")).endswith("/threading.py")


def helpers_of(stacks: Iterable[Any]) -> frozenset[Site]:
    """Return the user's lines through which several lines make their calls, among the innermost of these stacks."""
    callers: dict[Site, Site] = {}
    found = set()
    for frames in stacks:
        users = islice((site for whose, site in _sites(frames) if whose == USER), CALLERS + 1)
        found.update(site for site, caller in pairwise(users) if callers.setdefault(site, caller) != caller)
    return frozenset(found)


def user_stack(frames: Any) -> tuple[Site, ...]:
    """Return the user's frames, outermost first."""
    return tuple(site for whose, site in _sites(frames) if whose == USER)[::-1]


def _sites(frames: Any) -> Iterator[tuple[str, Site]]:
    """Yield whose each frame is, and its site, innermost first."""
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        file, line = short_text(frame.get("filename")), frame.get("line")
        if is_count(line) and file and file != "??":
            yield owner(file), Site(file, line, short_text(frame.get("name")))  # type: ignore[arg-type]
