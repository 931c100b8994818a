"""Where the time of each rank goes, by the traces of all ranks over the same steps.

Of one rank, in a window of whole steps: *compute* is the time in which kernels run or, if only the host was traced, operators
other than communication and those of the data loader; *data* is a wait for the loader in which nothing else runs; *communication* is the time in which at least one collective or message is in flight, its wait for
late ranks included; *overlap* is the time of both, *exposed* is communication without compute, *idle* is none of them: Python,
a sleep. *wait* is the part of communication before the last rank of the collective came.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distdiag.terms.operations import synchronizes
from distdiag.traces.intervals import Coverage, Spans, length, union, without
from distdiag.traces.model import CollectiveTimes, Difference, LineTime, ModuleTimes, Operator, RankTimes
from distdiag.traces.read import Comm, Input, Op, Trace, is_comm_call, is_message, shapes_in

Key = tuple[str, int, str]  # group, sequence number, operation
Window = tuple[float, float]
Joined = Mapping[Key, Mapping[int, Comm]]  # by collective, or message: what each rank recorded of it

EVER: Window = (-math.inf, math.inf)
TOP = 12
CALL_US, ISSUED_US = 20.0, 50_000.0  # between the clocks of a call and its event; between a call and its event
MATCH_US = 1e6  # between a collective's entry in the flight recorder and its event in the trace
CLOCK_US, LEAST_ENDS = 5_000.0, 3  # on one host, a rank may notice the end of a gloo collective late
SHOWN_US = 10.0  # times are shown in steps of this
LEAST_SAMPLES = 3  # of a line; fewer show nothing


@dataclass(slots=True)
class Issued:
    """One collective by the flight recorder, one send or recv by its call: the trace of a gloo job lacks their numbers."""

    op: str
    group: str
    seq: int  # of a message, among those with these ends
    at_ns: int  # wall clock
    bytes: int | None
    ends: str | None = None  # of a message, as `read.message_ends` returns them


@dataclass(slots=True)
class Recorded:
    """What one rank recorded."""

    trace: Trace
    boundaries: Sequence[tuple[int, int]]  # (step, wall clock in ns at its end), ascending
    entries: Sequence[Issued] = ()
    lines: Sequence[tuple[str, int, str, int]] = ()  # (file, line, function, samples) of the training thread
    samples: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict)  # further fields of `RankTimes`
    messages: Sequence[Issued] = ()
    window: Window = EVER  # of the steps that are analysed, on the clock of the trace
    steps: int = 1

    def compute(self) -> Spans:
        """Return when the rank computes, disjoint and sorted, on the clock of its trace."""
        trace = self.trace
        if trace.compute is not None or trace.device:
            return union(trace.compute if trace.compute is not None else trace.device, *self.window)
        calls = ((o.start, o.end) for o in trace.ops if is_comm_call(o.name))
        # what a loader without workers runs is no computation of the model
        other = union([*calls, *trace.loads], *self.window)
        return without(union(((o.start, o.end) for o in trace.ops), *self.window), other)

    def alone(self, spans: Iterable[Window]) -> Spans:
        """Return when these spans of the host run, and neither computation nor communication."""
        busy = union([*self.compute(), *((c.start, c.end) for c in self.trace.comms)], *self.window)
        return without(union(spans, *self.window), busy)

    def operators(self) -> list[Operator]:
        """Return the operators that began in the window, by self time: without the operators that they call."""
        if self.trace.operators is not None:
            return self.trace.operators
        by_thread: dict[int | str | None, list[Op]] = defaultdict(list)
        for o in self.trace.ops:
            if self.window[0] <= o.start < self.window[1]:
                by_thread[o.thread].append(o)
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for of_thread in by_thread.values():
            of_thread.sort(key=lambda o: (o.start, -o.end))
            stack: list[Op] = []
            for o in of_thread:
                while stack and stack[-1].end <= o.start:
                    stack.pop()
                entry = total[o.name]
                entry[0] += o.end - o.start
                entry[1] += 1
                if stack:
                    total[stack[-1].name][0] -= min(o.end, stack[-1].end) - o.start
                stack.append(o)
        steps = self.steps
        found = [
            Operator(name=name, self_ms=max(0.0, us) / 1e3 / steps, calls=round(n / steps, 2))
            for name, (us, n) in total.items()
        ]
        return sorted(found, key=lambda o: -o.self_ms)

    def kernels(self) -> dict[str, tuple[float, float]]:
        """Return by name how many kernels began per step, and the sum of their µs."""
        trace, (low, high) = self.trace, self.window
        if trace.kernels is None:
            spans: dict[str, list[float]] = defaultdict(list)
            for (start, end), name in zip(trace.device, trace.device_names, strict=True):
                if low <= start < high:
                    spans[name].append(end - start)
            trace.kernels = {name: (len(us) / self.steps, sum(us) / self.steps) for name, us in spans.items()}
        return trace.kernels

    def launching_ms(self) -> float:
        """Return how long per step the device does nothing while its host is in an operator, ms; 0 if only the host was traced."""
        trace = self.trace
        if trace.launching_ms is None:
            spans = self.alone((o.start, o.end) for o in trace.ops if not is_comm_call(o.name)) if trace.device else []
            trace.launching_ms = length(spans) / 1e3 / self.steps
        return trace.launching_ms

    def inputs(self) -> Counter[Input]:
        """Return the tensors that the operators got and their number, in the order in which they came; nothing without record_shapes."""
        trace, (low, high) = self.trace, self.window
        if trace.inputs is None:
            calls: Counter[tuple[str, str]] = Counter()
            for o in sorted((o for o in trace.ops if o.inputs), key=lambda o: o.start):
                if low <= o.start < high and not is_comm_call(o.name):
                    calls[o.name, o.inputs] += 1
            trace.inputs = Counter()
            for (name, text), n in calls.items():
                for x in shapes_in(text):
                    trace.inputs[name, x] += n
        return trace.inputs

    def syncs(self) -> float:
        """Return how often per step the host waited for its device."""
        return sum(self.window[0] <= at < self.window[1] for at in self.trace.syncs) / self.steps

    def condense(self) -> None:
        """Keep of the operators and kernels only what the analysis of these steps needs: a few thousand intervals."""
        trace = self.trace
        self.kernels()
        self.inputs()
        self.launching_ms()
        trace.compute, trace.operators = self.compute(), self.operators()
        trace.functions = {name: union(spans, *self.window) for name, spans in trace.functions.items()}
        trace.ops, trace.device, trace.device_names = [], [], []


def number_messages(trace: Trace, messages: Sequence[Issued]) -> None:
    """Give each message of the trace the ends and the number of the call that issued it: the newest one before it.

    If two messages follow one call, a call between them is not known, and neither is the second one's.
    """
    for op in ("send", "recv"):
        calls = sorted((trace.us(m.at_ns), i) for i, m in enumerate(messages) if m.op == op)
        newest = -1
        for c in trace.comms:
            if not c.op.startswith(op) or c.ends is not None:
                continue
            at = bisect_right(calls, (c.start + CALL_US, -1)) - 1
            if at <= newest or c.start - calls[at][0] > ISSUED_US:
                continue
            newest, m = at, messages[calls[at][1]]
            c.group, c.seq, c.ends, c.bytes = m.group, m.seq, m.ends, m.bytes


def number_collectives(trace: Trace, entries: Sequence[Issued]) -> None:
    """Give collectives without a group and number those of the nearest entry of the same operation, in order."""
    by_op: dict[str, list[tuple[float, Issued]]] = defaultdict(list)
    for e in entries:
        by_op[e.op].append((trace.us(e.at_ns), e))
    for of_op in by_op.values():
        of_op.sort(key=lambda pair: pair[0])
    used: dict[str, int] = defaultdict(int)
    for c in trace.comms:
        of_op = by_op.get(c.op, [])
        if c.seq is not None or not of_op:
            continue
        at = max(used[c.op], bisect_left(of_op, c.start, key=lambda pair: pair[0]) - 1)
        near = [i for i in (at, at + 1) if used[c.op] <= i < len(of_op)]
        best = min(near, key=lambda i: abs(of_op[i][0] - c.start), default=None)
        if best is not None and abs(of_op[best][0] - c.start) < MATCH_US:
            e = of_op[best][1]
            c.group, c.seq, c.bytes = e.group, e.seq, e.bytes
            used[c.op] = best + 1


def joined(recorded: Mapping[int, Recorded]) -> dict[Key, dict[int, Comm]]:
    """Return by collective, or message, what each rank recorded of it.

    They are joined by group and number; those without a number by their order, if all ranks have as many. A message without
    known ends is left out.
    """
    found: dict[Key, dict[int, Comm]] = defaultdict(dict)
    unnumbered: dict[tuple[str, str], dict[int, list[Comm]]] = defaultdict(lambda: defaultdict(list))
    for rank, r in recorded.items():
        low, high = r.window
        for c in r.trace.comms:
            if c.end <= low or c.start >= high or (is_message(c.op) and c.ends is None):
                continue
            op = c.op if c.ends is None else f"send {c.ends}"
            if c.seq is not None:
                found[c.group or "", c.seq, op][rank] = c
            elif low <= c.start:
                unnumbered[c.group or "", op][rank].append(c)
    for (group, op), of_rank in unnumbered.items():
        if len(of_rank) > 1 and len({len(cs) for cs in of_rank.values()}) == 1:
            for rank, cs in of_rank.items():
                for nth, c in enumerate(cs):
                    found[group, -1 - nth, op][rank] = c
    return {key: of_rank for key, of_rank in found.items() if len(of_rank) > 1}


def align(
    collectives: Joined, offsets_us: dict[int, float], recorded: Mapping[int, Recorded], doubt_us: float
) -> tuple[list[int], dict[int, str]]:
    """Move the clock of each host to that of the first rank; return the ranks that were moved, and by rank which clock it has.

    All ranks leave an all_reduce, an all_gather or a barrier together. Ranks of one host have one clock, unless their ends are
    `CLOCK_US` apart: then several hosts have this name. A clock is unknown, and not moved, if the median of its ends may be wrong by
    more than `doubt_us`, or if its host has no collective with others.
    """
    together = [of_rank for (_, _, op), of_rank in collectives.items() if synchronizes(op.rstrip("_"))]
    first, *others = sorted(offsets_us)
    host = {q: recorded[q].trace.host or f"rank {q}" for q in offsets_us}
    moves, of_host = {first: 0.0}, {host[first]: 0.0}
    for rank in others:
        ends = [
            of_rank[q].end + offsets_us[q] + moves[q] - of_rank[rank].end - offsets_us[rank]
            for of_rank in together
            if rank in of_rank and (q := next((q for q in of_rank if q in moves), None)) is not None
        ]
        shift = statistics.median(ends) if ends else 0.0
        same = of_host.get(host[rank])
        if same is not None and (len(ends) < LEAST_ENDS or abs(shift - same) <= CLOCK_US):
            shift = same
        elif (
            statistics.median(abs(x - shift) for x in ends) > doubt_us * math.sqrt(len(ends))
            if ends
            else recorded[rank].trace.host
        ):
            continue
        moves[rank] = shift
        of_host.setdefault(host[rank], shift)
    moves |= {q: of_host[host[q]] for q in others if q not in moves and host[q] in of_host}
    for rank, shift in moves.items():
        offsets_us[rank] += shift
    return sorted(q for q, us in moves.items() if abs(us) >= SHOWN_US), {q: "" if q in moves else host[q] for q in host}


def last_rank(of_rank: Mapping[int, Comm]) -> int:
    """Return the rank that came last to a collective."""
    return max(of_rank, key=lambda q: of_rank[q].start)


def rank_times(rank: int, r: Recorded, compute: Spans, shared: Sequence[tuple[float, Mapping[int, Comm]]]) -> RankTimes:
    """Return where one rank's time goes, in ms per step; `shared` is the arrival of the last rank, and the collective by rank."""
    low, high = r.window
    comm = union(((c.start, c.end) for c in r.trace.comms), low, high)
    busy = union([*compute, *comm], low, high)
    data_us = length(without(union(r.trace.loads, low, high), busy))
    waits = []
    for last, of_rank in shared:
        own = of_rank.get(rank)
        if own is not None and last > own.start:
            waits.append((own.start, min(own.end, last)))
    per = 1e3 * r.steps
    comm_us, exposed_us = length(comm), length(without(comm, compute))
    return RankTimes(
        rank=rank,
        step_ms=(high - low) / per,
        compute_ms=length(compute) / per,
        comm_ms=comm_us / per,
        overlap_ms=max(0.0, comm_us - exposed_us) / per,
        exposed_ms=exposed_us / per,
        wait_ms=length(union(waits, low, high)) / per if shared else None,
        idle_ms=(high - low - length(busy) - data_us) / per,
        data_ms=data_us / per,
        operators=r.operators()[:TOP],
    )


def collective_times(collectives: Joined, steps: int) -> list[CollectiveTimes]:
    """Return the collectives by operation and group, those that take most time first.

    Skew is from the first arrival to the last, transfer from the last arrival to the last end.
    """
    kinds: dict[tuple[str, str], list[tuple[Window, Window, int, int | None]]] = defaultdict(list)
    for (group, _, op), of_rank in collectives.items():
        late = last_rank(of_rank)
        came, first = of_rank[late].start, min(c.start for c in of_rank.values())
        end = max(c.end for c in of_rank.values())
        sizes = [c.bytes for c in of_rank.values() if c.bytes is not None]
        kinds[op, group].append(((first, came), (came, max(came, end)), late, max(sizes, default=None)))
    out = []
    for (op, group), of_kind in kinds.items():
        lates = [late for _, _, late, _ in of_kind]
        late = statistics.mode(lates)
        bytes_ = [size for *_, size in of_kind if size is not None]
        out.append(
            CollectiveTimes(
                op=op,
                group="default_pg" if group == "0" else group or None,
                per_step=round(len(of_kind) / steps, 2),
                bytes_per_step=sum(bytes_) / steps if len(bytes_) == len(of_kind) else None,
                skew_ms=length(union((x[0] for x in of_kind), *EVER)) / 1e3 / steps,
                transfer_ms=length(union((x[1] for x in of_kind), *EVER)) / 1e3 / steps,
                late_rank=late,
                late_share=lates.count(late) / len(lates),
            )
        )
    return sorted(out, key=lambda c: -(c.skew_ms + c.transfer_ms))


def module_times(recorded: Mapping[int, Recorded], computes: Mapping[int, Spans]) -> list[ModuleTimes]:
    """Return the communication of each module, the mean of all ranks, those with most exposed time first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank, r in recorded.items():
        low, high = r.window
        covered = Coverage(computes[rank])
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for c in r.trace.comms:
            if c.module is not None and low <= c.start < high:
                spans[c.module].append((c.start, c.end))
        for module, of_module in spans.items():
            times, busy = found[module], union(of_module, low, high)
            times[0] += len(of_module)
            times[1] += length(busy)
            times[2] += sum(end - start - covered.within(start, end) for start, end in busy)
    share = max(1, sum(r.steps for r in recorded.values()))
    out = [
        ModuleTimes(
            module=m, per_step=round(n / share, 2), comm_ms=comm / share / 1e3, exposed_ms=exposed / share / 1e3
        )
        for m, (n, comm, exposed) in found.items()
    ]
    return sorted(out, key=lambda m: (-m.exposed_ms, -m.comm_ms, m.module))


def differences(
    culprit: Mapping[str, float], peer: Mapping[str, float], least_ms: float, kind: str
) -> list[Difference]:
    """Return what takes the culprit at least `least_ms` per step more than its peer, largest first.

    What takes the peer longer is its wait for the culprit.
    """
    out = [
        Difference(kind=kind, name=name, culprit_ms=culprit.get(name, 0.0), peer_ms=peer.get(name, 0.0))
        for name in {*culprit, *peer}
    ]
    out = [d for d in out if d.culprit_ms - d.peer_ms >= least_ms]
    return sorted(out, key=lambda d: d.peer_ms - d.culprit_ms)[:TOP]


def line_times(lines: Sequence[tuple[str, int, str, int]], samples: int, step_ms: float) -> list[LineTime]:
    """Return sampled lines of the training thread as ms per step, most first."""
    total = max(1, samples)
    lines = [x for x in lines if x[3] >= LEAST_SAMPLES]
    return [
        LineTime(file=file, line=line, function=function, ms=step_ms * min(n, total) / total, samples=n)
        for file, line, function, n in sorted(lines, key=lambda x: -x[3])
    ]
