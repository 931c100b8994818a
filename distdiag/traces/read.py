"""Read one rank's Kineto trace (`torch.profiler`'s JSON, plain or gzipped) into what the analysis needs."""

from __future__ import annotations

import gzip
import heapq
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from distdiag import guard
from distdiag.guard import Announce
from distdiag.terms.frames import users
from distdiag.terms.operations import family
from distdiag.terms.units import SCALAR_TYPES
from distdiag.terms.untrusted import is_rank, short_text
from distdiag.traces.model import Operator
from distdiag.traces.text import place

MAX_FILE_BYTES = 512 << 20  # unpacked
MAX_EVENTS = 5_000_000
MAX_US = 1e16  # of a time stamp: older versions of Kineto write microseconds since 1970
MAX_NS = 1 << 62
MAX_SHAPES = 4_000  # characters of an operator's inputs
_COMM_CALLS = ("c10d::", "_c10d_functional", "c10d_functional", "record_param_comms", "nccl:", "gloo:")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_FSDP = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \(([\w.,\- ]{1,200})\))?")  # FSDP2, `fully_shard`
_MODULE = re.compile(r"module: ([\w.\-]{1,200}|\(root\))")  # by `distdiag profile`, around each forward
_BACKWARD = "autograd::engine::evaluate_function: "
ROOT = "(root)"  # FSDP names no module for the outermost one
_FUNCTION = re.compile(r"([^<].{0,1000}\.py)\((\d{1,9})\): (.{1,200})")  # with_stack=True: file, line of `def`, name
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "stream:")
Input = tuple[str, tuple[int, ...]]  # operator, shape
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Dims = Annotated[list[_Size], msgspec.Meta(max_length=16)]
_shapes = msgspec.json.Decoder(list[list[_Size | _Dims]])


class BadTrace(ValueError):
    """A file is no trace that can be read; the text says why."""


class _Args(msgspec.Struct, gc=False):
    seq: Any = msgspec.field(default=None, name="Seq")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements: Any = msgspec.field(default=None, name="In msg nelems")
    dtype: Any = msgspec.field(default=None, name="dtype")
    src: Any = msgspec.field(default=None, name="Src Rank")
    dst: Any = msgspec.field(default=None, name="Dst Rank")
    number: Any = msgspec.field(default=None, name="Sequence number")  # of autograd
    device: Any = None
    inputs: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    baseTimeNanoseconds: int = 0
    distributedInfo: Any = None
    host_name: Any = None
    deviceProperties: Any = None


@dataclass(slots=True)
class Op:
    """One operator on a host thread, or a module's forward, or what FSDP does for it; times in µs since `Trace.base_ns`."""

    name: str
    start: float
    end: float
    thread: int | str | None  # or the stream
    inputs: str = ""  # their shapes as JSON, with record_shapes


@dataclass(slots=True)
class Comm:
    """One collective or message as one rank saw it."""

    op: str
    start: float
    end: float
    group: str | None = None
    seq: int | None = None  # its number in the group; of a message, among those with the same ends
    bytes: int | None = None
    thread: int | str | None = None
    module: str | None = None
    ends: str | None = None  # of a message: sender and receiver, `0->1`, and the tag if it is not 0


@dataclass(slots=True)
class Trace:
    """One rank's trace."""

    rank: int | None
    base_ns: int  # wall clock of time 0; 0 if not in the file
    ops: list[Op] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    # of kernels and copies that compute; empty if only the host was traced
    device: list[tuple[float, float]] = field(default_factory=list)
    device_names: list[str] = field(default_factory=list)  # one for each of `device`
    # ProfilerStep annotations: (number, start, end)
    marks: list[tuple[int, float, float]] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)  # waits for the data loader
    own_loads: bool = False  # the training process itself loads (num_workers=0)
    parts: list[Op] = field(default_factory=list)  # what `record_function` names on the host, as the optimizer's step
    syncs: list[float] = field(default_factory=list)  # when the host began to wait for its device
    # by name and line: of the user's functions, with with_stack=True
    functions: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    host: str = ""
    where: str = ""  # its host and device, as `gpu-7, GPU 3 (NVIDIA A100)`; empty if not in the file
    # this and the next four: taken from `ops` and `device` by `Recorded.condense`, which empties both
    compute: list[tuple[float, float]] | None = None
    operators: list[Operator] | None = None
    kernels: dict[str, tuple[float, float]] | None = None
    launching_ms: float | None = None
    inputs: Counter[Input] | None = None
    world_size: int | None = None  # of the job; None if not in the file

    def us(self, wall_ns: int) -> float:
        """Return a wall-clock time as µs of this trace."""
        return (wall_ns - self.base_ns) / 1e3

    def shift(self, us: float) -> None:
        """Count all times from a moment that is `us` earlier."""
        self.base_ns -= round(us * 1e3)
        for span in chain(self.ops, self.comms, self.parts):
            span.start += us
            span.end += us
        self.device = [(start + us, end + us) for start, end in self.device]
        self.loads = [(start + us, end + us) for start, end in self.loads]
        self.functions = {name: [(start + us, end + us) for start, end in x] for name, x in self.functions.items()}
        self.syncs = [start + us for start in self.syncs]
        if self.compute is not None:
            self.compute = [(start + us, end + us) for start, end in self.compute]


def is_comm_call(name: str) -> bool:
    """True for an operator that issues communication or waits for it."""
    return name.startswith(_COMM_CALLS)


def shapes_in(text: str) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of an operator's tensors; those of a list of tensors are one level deeper. Scalars have none."""
    try:
        found = _shapes.decode(text)
    except msgspec.ValidationError:
        return
    for x in found:
        sizes = tuple(y for y in x if isinstance(y, int))
        yield from (tuple(y) for y in x if isinstance(y, list) and y)
        if 0 < len(sizes) <= 16:
            yield sizes


def load(path: Path) -> bytes:
    """Return a trace file's JSON, unpacked; BadTrace if it is too large or damaged, OSError if it cannot be read."""
    try:
        with guard.opened(path) as f:
            data = f.read(MAX_FILE_BYTES + 1)
    except (*guard.DAMAGED, gzip.BadGzipFile):
        raise BadTrace("is damaged: it cannot be unpacked") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadTrace(f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


def read(path: Path, announce: Announce = lambda _step, _bytes: None) -> Trace:
    """Return the trace in a file; raises what `load` and `parse` raise."""
    announce(str(path), guard.stored_bytes(path))
    data = load(path)
    announce(str(path), len(data))
    return parse(data)


def parse(data: bytes) -> Trace:
    """Return a trace from its JSON; BadTrace if it is no Kineto trace."""
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise BadTrace(f"is no Kineto trace: {str(e)[:100]}") from None
    if len(found.traceEvents) > MAX_EVENTS:
        raise BadTrace(f"has more than {MAX_EVENTS:,} events")
    base = found.baseTimeNanoseconds
    info = found.distributedInfo if isinstance(found.distributedInfo, dict) else {}
    rank = info.get("rank")
    trace = Trace(rank if is_rank(rank) else None, base if 0 <= base < MAX_NS else 0)
    world = info.get("world_size")
    trace.world_size = world if is_rank(world) else None
    _sort(trace, found.traceEvents)
    trace.host = short_text(found.host_name)[:60]
    trace.where = ", ".join(x for x in (trace.host, _device(found)) if x)
    return trace


def _device(found: _File) -> str:
    """Return the device of a trace, as far as it names it."""
    kernels = (e.args.device for e in found.traceEvents if e.cat == "kernel" and e.args is not None)
    number = next((n for n in kernels if type(n) is int), None)
    listed = found.deviceProperties if isinstance(found.deviceProperties, list) else []
    names = [d.get("name") for d in listed if isinstance(d, dict) and d.get("id") == number]
    model = f" ({text})" if names and (text := short_text(names[0])[:60]) else ""
    return f"GPU {number}{model}" if number is not None else ""


def _sort(trace: Trace, events: Iterable[_Event]) -> None:
    device_comms: list[Comm] = []
    marks: list[Op] = []
    forwards: list[Op] = []
    shapes: dict[bytes, str] = {}
    for e in events:
        if e.ph != "X" or e.ts is None or not -MAX_US < e.ts < MAX_US:
            continue
        span = e.dur or 0.0
        if not math.isfinite(span) or not 0 <= span < MAX_US:
            continue
        end = e.ts + span
        if e.cat == "cpu_op":
            raw = bytes(e.args.inputs) if e.args is not None else b""
            if raw not in shapes:
                shapes[raw] = raw.decode() if len(raw) < MAX_SHAPES and raw[:1] == b"[" else ""
            trace.ops.append(Op(e.name, e.ts, end, e.tid, shapes[raw]))
        elif e.cat in _DEVICE:
            if "nccl" in e.name[:40].lower():
                device_comms.append(_comm(e, end))
            else:
                trace.device.append((e.ts, end))
                trace.device_names.append(sys.intern(e.name))
        elif e.cat == "user_annotation":
            _annotation(trace, e, end)
        elif e.cat == "python_function":
            _function(trace, e.name, e.ts, end)
        elif e.name.endswith("Synchronize"):  # of CUDA or HIP
            trace.syncs.append(e.ts)
        if e.cat in ("user_annotation", "gpu_user_annotation"):
            if (m := _FSDP.fullmatch(e.name)) is not None:
                marks.append(Op(m[1] or ROOT, e.ts, end, e.tid))
            elif (m := _MODULE.fullmatch(e.name)) is not None:
                forwards.append(Op(m[1], e.ts, end, e.tid))
    # then the annotations of the host show when a collective was issued, not when it ran
    if trace.device or device_comms:
        trace.comms = device_comms
    trace.comms.sort(key=lambda c: c.start)
    trace.marks.sort()
    if forwards:
        marks += forwards + _backwards(events, forwards)
    _name_modules(trace.comms, trace.ops, marks)


def _annotation(trace: Trace, e: _Event, end: float) -> None:
    """Take what `record_function`, a backend or the profiler has written around a part of the host's work."""
    start = e.ts or 0.0
    if e.name.startswith(_BACKENDS):
        trace.comms.append(_comm(e, end))
    elif e.name.startswith("ProfilerStep#") and e.name[13:].isdigit() and len(e.name) < 30:
        trace.marks.append((int(e.name[13:]), start, end))
    elif e.name.startswith("enumerate(DataLoader)"):
        trace.loads.append((start, end))
        trace.own_loads = trace.own_loads or "_SingleProcess" in e.name
    else:
        trace.parts.append(Op(e.name, start, end, e.tid))


def _function(trace: Trace, name: str, start: float, end: float) -> None:
    if (m := _FUNCTION.fullmatch(name)) is not None and users(m[1]):
        trace.functions.setdefault(place(m[1], int(m[2]), m[3]), []).append((start, end))


def _backwards(events: Iterable[_Event], forwards: Sequence[Op]) -> list[Op]:
    """Return a mark for each autograd function that runs backward: the module in whose forward it was recorded.

    Both have the same number; of several operators with it, the last one recorded the function.
    """
    numbered: list[tuple[float, int, int | str | None]] = []
    backward: list[tuple[int, float, float, int | str | None]] = []
    for e in events:
        if e.cat == "cpu_op" and e.ts is not None and e.args is not None and type(n := e.args.number) is int and n >= 0:
            if e.name.startswith(_BACKWARD):
                backward.append((n, e.ts, e.ts + (e.dur or 0.0), e.tid))
            else:
                numbered.append((e.ts, n, e.tid))
    numbered.sort(key=lambda x: x[0])
    modules = _innermost([(ts, thread) for ts, _, thread in numbered], forwards)
    of_number = {n: m for (_, n, _), m in zip(numbered, modules, strict=True) if m is not None}
    return [Op(of_number[n], start, end, thread) for n, start, end, thread in backward if n in of_number]


def _innermost(at: Sequence[tuple[float, int | str | None]], marks: Sequence[Op]) -> list[str | None]:
    """Return for each (time, thread), ascending, the module of the innermost mark on this thread or stream.

    On a thread without marks, as gloo's own ones, the marks of all threads count.
    """
    ordered = sorted(marks, key=lambda m: m.start)
    by_thread: dict[int | str | None, list[Op]] = defaultdict(list)
    for m in ordered:
        by_thread[m.thread].append(m)
    last: dict[int | str | None, int] = defaultdict(int)  # by thread: marks that have begun
    begun: dict[int | str | None, list[int]] = defaultdict(list)  # a heap: the one that began last comes first
    out: list[str | None] = []
    for t, thread in at:
        near, heap = by_thread.get(thread, ordered), begun[thread]
        while last[thread] < len(near) and near[last[thread]].start <= t:
            heapq.heappush(heap, -last[thread])
            last[thread] += 1
        while heap and near[-heap[0]].end < t:  # it has ended for all later times, too
            heapq.heappop(heap)
        out.append(near[-heap[0]].name if heap else None)
    return out


def _name_modules(comms: Sequence[Comm], ops: Iterable[Op], marks: Sequence[Op]) -> None:
    """Give each collective, ascending by start, the module of the innermost mark in which it was issued."""
    at = _issued(comms, ops, {m.thread for m in marks}) if marks else []
    order = sorted(range(len(at)), key=lambda i: at[i][0])
    for i, module in zip(order, _innermost([at[i] for i in order], marks), strict=True):
        comms[i].module = module


def _issued(
    comms: Sequence[Comm], ops: Iterable[Op], marked: Collection[int | str | None]
) -> list[tuple[float, int | str | None]]:
    """Return when and on which thread each collective was issued.

    One on a thread or stream without marks, as gloo's own, may begin later than it was issued: it takes the first call of its
    operation that no collective before it has taken.
    """
    calls: dict[str, list[Op]] = defaultdict(list)
    for o in sorted((o for o in ops if o.name.startswith("c10d::")), key=lambda o: o.start):
        calls[_plain(o.name.removeprefix("c10d::"))].append(o)
    taken: dict[str, int] = defaultdict(int)
    out: list[tuple[float, int | str | None]] = []
    for c in comms:
        op = _plain(c.op)
        of_op = calls.get(op, [])
        if c.thread not in marked and taken[op] < len(of_op) and of_op[taken[op]].start <= c.start:
            call = of_op[taken[op]]
            taken[op] += 1
            out.append((call.start, call.thread))
        else:
            out.append((c.start, c.thread))
    return out


def _plain(op: str) -> str:
    """Return `allgather` for `_allgather_base_`, `all_gather` and `_all_gather_base`."""
    known = family(op.rstrip("_"))
    return known.probe if known else op.replace("_", "")


def _comm(e: _Event, end: float) -> Comm:
    assert e.ts is not None
    a = e.args or _Args()
    op = short_text(a.collective) or (e.name.split(":", 1)[1] if ":" in e.name else e.name)[:100]
    seq = a.seq if type(a.seq) is int and 0 <= a.seq < MAX_NS else None
    _, item = SCALAR_TYPES.get(a.dtype, ("", 0)) if isinstance(a.dtype, str) else ("", 0)
    size = a.elements * item if item and type(a.elements) is int and 0 <= a.elements < MAX_NS else None
    ends = None
    if is_message(op):
        seq = None  # the two ends count differently
        if is_rank(a.src) and is_rank(a.dst):
            ends = message_ends(a.src, a.dst)
    return Comm(op, e.ts, end, short_text(a.group) or None, seq, size, e.tid, ends=ends)


def is_message(op: str) -> bool:
    """True for a send or recv between two ranks."""
    return op.startswith(("send", "recv"))


def message_ends(src: int, dst: int, tag: int = 0) -> str:
    """Return `0->1`, or `0->1 tag 3`."""
    return f"{src}->{dst}" + (f" tag {tag}" if tag else "")
