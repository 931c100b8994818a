"""Reads entries of a flight-recorder dump: one pass over all, or one entry as a `Call`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.waits import compatible
from distdiag.sources.dumps.content import DumpFile
from distdiag.terms.untrusted import MAX_INT, is_count, short_text

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "complex128": 16,
}  # fmt: skip


MAX_TENSORS, MAX_DIMENSIONS = 1 << 14, 64  # limits of one operation
MAX_FRAMES = 256  # limit of one stack, innermost first

_STATE = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


def ends_batch(name: str) -> bool:
    """True if an entry closes a batch: `nccl:coalesced`, since torch 2.7 also `nccl:ALLGATHER_coalesced`."""
    head, _, last = name.rpartition("coalesced")
    return not last and (head.endswith(":") or (head.endswith("_") and head.rpartition(":")[2].isupper()))


# They write their entries themselves. Those of all others are written by torch's hook, from 2.14 on: `nccl2`, custom backends.
_NATIVE = {"", "nccl", "gloo", "xccl"}


def backend_of(f: DumpFile) -> str:
    """Return `nccl`, `gloo`, `nccl2`, …; empty for a dump without entries."""
    name = f.entries[-1].get("profiling_name", "") if f.entries else ""
    return name.partition(":")[0] if ":" in name else ""


def by_hook(backend: str) -> bool:
    """True if torch's hook writes the entries: tensors as the caller gave them, counters of operations instead of numbers."""
    return backend not in _NATIVE


def completed(e: dict[str, Any]) -> bool:
    """True if an entry's operation is known to be complete; gloo's entries are retired then, and stay `scheduled`."""
    return e["state"] == "completed" or (e["retired"] and e["profiling_name"].startswith("gloo"))


def retired_when_issued(e: dict[str, Any]) -> bool:
    """True for an operation of a backend that reports no completion: whether it is complete is not known.

    torch's hook retires its entry when it is issued. An entry of NCCL itself that is retired and not complete has timed out.
    """
    return e["retired"] and not completed(e) and by_hook(e["profiling_name"].partition(":")[0])


@dataclass(slots=True)
class Tail:
    """How far one rank has got in one group, by its entries."""

    newest: int
    head: int | None = None  # oldest collective in flight
    description: str = ""
    uncounted: bool = False  # completion is not reported: only what no member has left out may be complete


@dataclass(slots=True)
class Scan:
    """The result of one pass over a file's entries."""

    file: DumpFile
    backend: str
    tails: dict[str, Tail] = field(default_factory=dict)  # by name of the group
    messages: list[dict[str, Any]] = field(default_factory=list)
    # by (group name, p2p_seq_id): the entry that closes a batch and has the state of all its messages
    batches: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    # by group of two ranks that is used for messages only: the newest completed number of the group's own counter
    pair_completed: dict[str, int] = field(default_factory=dict)
    timed: bool = False  # starts are recorded (TORCH_NCCL_ENABLE_TIMING): an entry without one has not begun


def scan_file(f: DumpFile) -> Scan:
    """Return the newest and the oldest open collective of each group, and all messages, in one pass."""
    out = Scan(f, backend_of(f))
    gloo = out.backend == "gloo"
    tails, messages = out.tails, out.messages
    over: set[tuple[str, int]] = set()  # coalesced collectives that have completed
    unfinished: list[tuple[Tail, str, int]] = []
    for e in f.entries:
        name = e["process_group"][0]
        if e["is_p2p"]:
            if ends_batch(e["profiling_name"]):
                out.batches[name, e["p2p_seq_id"]] = e
            else:
                messages.append(e)
            continue
        seq = e["collective_seq_id"]
        t = tails.get(name)
        if t is None:
            t = tails[name] = Tail(seq, None, e["process_group"][1])
        elif seq > t.newest:
            t.newest = seq
        if retired_when_issued(e):
            t.uncounted = True
        elif not completed(e):
            unfinished.append((t, name, seq))
        elif ends_batch(e["profiling_name"]):
            over.add((name, seq))
    for t, name, seq in unfinished:  # the parts of a batch keep the state in which they were issued
        if (t.head is None or seq < t.head) and (name, seq) not in over:
            t.head = seq
    numbered = not gloo and not by_hook(out.backend)  # the status has numbers of collectives
    pairs = {name for name, (_, members) in f.groups.items() if len(members or ()) == 2} if numbered else set()
    for e in messages:  # a dump of active entries only lacks the entries that close batches
        name, number = e["process_group"][0], short_text(e.get("pg_id"))
        if name in pairs and not e["collective_seq_id"] and number in f.status:
            out.pair_completed[name] = f.status[number][1]
    out.timed = not gloo and any(
        e["state"] == "started" or ns(e, "time_discovered_started_ns") for e in f.entries[-200:]
    )
    return out


def of_batch(e: dict[str, Any], source: Scan) -> dict[str, Any]:
    """Return a message with the state and times of the batch that it was issued in, if any."""
    name, number = e["process_group"][0], e["p2p_seq_id"]
    batch = source.batches.get((name, number))
    if batch is not None:
        return {**e, **{k: batch.get(k) for k in _STATE}}
    return {**e, "state": "completed"} if number <= source.pair_completed.get(name, 0) else e


def ns(e: dict[str, Any], name: str = "time_created_ns") -> int | None:
    """Return a time of an entry; None if it was not recorded (None, or 0 in JSON)."""
    t = e.get(name)
    return t if type(t) is int and 0 < t < MAX_INT else None


def timeout_ms(e: dict[str, Any]) -> int | None:
    """Return the timeout of an entry's group; None if it was not recorded."""
    return ns(e, "timeout_ms")


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


def call_of(key: str, e: dict[str, Any], source: Scan, t0_ns: int) -> Call:
    """Return one entry of group `key` as a call; times in seconds since `t0_ns`."""
    shapes = _shapes(e.get("input_sizes") or e.get("output_sizes") or ())
    dtypes = e.get("input_dtypes") or e.get("output_dtypes")
    shape = shapes[0] if shapes else None
    if shapes and len(shapes) > 1 and e["profiling_name"].endswith("_coalesced"):  # several tensors: all of them
        shape = (sum(math.prod(one) for one in shapes),)
    elements = _product(shape) if shape is not None else None
    if elements is None:
        shape = None
    first = short_text(dtypes[0]) if isinstance(dtypes, (list, tuple)) and dtypes else ""
    dtype = compatible.dtype_name(first) if first else None
    outputs = _shapes(e.get("output_sizes") or ())
    received = _product(outputs[0]) if len(shapes or ()) == 1 and len(outputs or ()) == 1 and outputs else None
    op = compatible.op_name(e["profiling_name"])
    done = completed(e)
    t = ns(e)
    return Call(
        op=op,
        group=key,
        seq=e["collective_seq_id"],
        dtype=dtype,
        shape=shape,
        bytes=elements * _ITEM_BYTES.get(dtype, 1) if elements is not None and dtype is not None else None,
        received=received if op in ("all_to_all", "all_to_all_single") else None,
        site=user_site(e.get("frames")),
        entered_s=(t - t0_ns) / 1e9 if t is not None else None,
        completed_s=((ns(e, "time_discovered_completed_ns") or t or t0_ns) - t0_ns) / 1e9 if done else None,
        asynchronous=True,
        started=e["state"] in ("started", "completed") if source.timed else None,
        timed_out=bool(e["retired"]) and not done and not retired_when_issued(e),
        # tensors of different sizes take another code path, which records the parts of a batch
        even=source.backend == "nccl",
    )


_LIBRARY = re.compile(
    r"(^|/)(torch|site-packages|dist-packages|lib/python[\d.]+)/|(^|/)distdiag/recorder/"
    r"|^<frozen|^<string>$|\.(cpp|h|hpp|so|cc)$"
)
_TORCH = re.compile(
    r"(^|/)torch/|(^|/)distdiag/recorder/|^<frozen|(^|/)lib/python[\d.]+/(?!site-packages|dist-packages)|\.(cpp|h|hpp|so|cc)$"
)


def user_site(frames: Any) -> Site | None:
    """Return the user's innermost frame: the first that is in no library, else the first that is not torch's."""
    if not isinstance(frames, list):
        return None
    second = None
    for frame in frames[:MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file, line = short_text(frame.get("filename")), frame.get("line")
        if not is_count(line) or not file or file == "??":
            continue
        if not _LIBRARY.search(file):
            return Site(file, line, short_text(frame.get("name")))  # type: ignore[arg-type]
        if second is None and not _TORCH.search(file):
            second = Site(file, line, short_text(frame.get("name")))  # type: ignore[arg-type]
    return second
