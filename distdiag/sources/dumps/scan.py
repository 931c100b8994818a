"""One pass over the entries of one dump: how far its rank has got in each group, and its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.waits import compatible
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import Entry, by_hook, of_thread, time_ns, user_site
from distdiag.terms.untrusted import short_text

_STATE = ("state", "retired", "time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")


@dataclass(slots=True)
class Tail:
    """How far one rank has got in one group, by its entries."""

    newest: int
    head: int | None = None  # oldest collective in flight
    description: str = ""
    uncounted: bool = False  # completion is not reported: only what no member has left out may be complete


@dataclass(slots=True)
class Scan:
    file: DumpFile
    backend: str
    tails: dict[str, Tail] = field(default_factory=dict)  # by name of the group
    messages: list[Entry] = field(default_factory=list)
    # by (group name, p2p_seq_id): the entry that closes a batch and has the state of all its messages
    batches: dict[tuple[str, int], Entry] = field(default_factory=dict)
    # by group of two ranks that is used for messages only: the newest completed number of the group's own counter
    pair_completed: dict[str, int] = field(default_factory=dict)
    timed: bool = False  # starts are recorded (TORCH_NCCL_ENABLE_TIMING): an entry without one has not begun
    main: bool = False  # the main thread has made calls, too
    keys: dict[str, str] = field(default_factory=dict)  # by name of the group: its key in the snapshot
    assumed: Collection[str] = ()  # keys of groups whose members are not recorded
    helpers: frozenset[Site] = frozenset()  # the user's lines that make calls for several others, on any rank

    def collectives(self, since: Mapping[str, int]) -> Iterator[tuple[str, int, Entry]]:
        """Yield (group, number, entry) of the collectives of these groups from a number on."""
        low = {name: since[key] for name in self.tails if (key := self.keys[name]) in since}
        for e in self.file.entries if low else ():
            least = low.get(e.process_group[0])
            if least is not None and not e.is_p2p and e.seq >= least:
                yield self.keys[e.process_group[0]], e.seq, e

    def batched(self, e: Entry) -> Entry:
        """Return a message with the state and times of the batch that it was issued in, if any."""
        batch = self.batches.get((e.group, e.p2p_seq))
        if batch is not None:
            return msgspec.structs.replace(e, **{name: getattr(batch, name) for name in _STATE})
        done = e.p2p_seq <= self.pair_completed.get(e.group, 0)
        return msgspec.structs.replace(e, state="completed") if done else e

    def call(self, e: Entry, t0_ns: int) -> Call:
        """Return an entry as a call; times in seconds since `t0_ns`."""
        shape, dtype, size, received = e.tensor()
        op, t = compatible.op_name(e.profiling_name), e.created_ns
        uneven = op in ("all_to_all", "all_to_all_single") and self.keys[e.group] not in self.assumed
        completed_ns = time_ns(e.time_discovered_completed_ns) or t or t0_ns
        return Call(
            op=op,
            group=self.keys[e.group],
            seq=e.seq,
            dtype=dtype,
            shape=shape,
            bytes=size,
            received=received if uneven else None,
            site=user_site(e.frames, self.helpers),
            entered_s=(t - t0_ns) / 1e9 if t is not None else None,
            completed_s=(completed_ns - t0_ns) / 1e9 if e.completed else None,
            asynchronous=True,
            other_thread=self.main and of_thread(e.frames),
            started=e.state in ("started", "completed") if self.timed else None,
            timed_out=bool(e.retired) and not e.completed and not e.retired_when_issued,
            # tensors of different sizes take another code path, which records the parts of a batch
            even=self.backend == "nccl",
        )


def scan_file(f: DumpFile) -> Scan:
    """Return the newest and the oldest open collective of each group, and all messages, in one pass."""
    out = Scan(f, f.backend)
    gloo = out.backend == "gloo"
    over: set[tuple[str, int]] = set()  # coalesced collectives that have completed
    unfinished: list[tuple[Tail, str, int]] = []
    for e in f.entries:
        name, description = e.process_group
        if e.is_p2p:
            if e.ends_batch:
                out.batches[name, e.p2p_seq] = e
            else:
                out.messages.append(e)
            continue
        t = out.tails.get(name)
        if t is None:
            t = out.tails[name] = Tail(e.seq, None, description)
        elif e.seq > t.newest:
            t.newest = e.seq
        if e.retired_when_issued:
            t.uncounted = True
        elif not e.completed:
            unfinished.append((t, name, e.seq))
        elif e.ends_batch:
            over.add((name, e.seq))
    for t, name, seq in unfinished:  # the parts of a batch keep the state in which they were issued
        if (t.head is None or seq < t.head) and (name, seq) not in over:
            t.head = seq
    numbered = not gloo and not by_hook(out.backend)  # the status has numbers of collectives
    pairs = {name for name, (_, members) in f.groups.items() if len(members or ()) == 2} if numbered else set()
    for e in out.messages:  # a dump of active entries only lacks the entries that close batches
        number = short_text(e.pg_id)
        if e.group in pairs and not e.seq and number in f.status:
            out.pair_completed[e.group] = f.status[number][1]
    out.main = not all(of_thread(e.frames) for e in f.entries)
    newest = f.entries[-200:]
    out.timed = not gloo and any(e.state == "started" or time_ns(e.time_discovered_started_ns) for e in newest)
    return out
