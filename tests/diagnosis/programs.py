"""A model of distributed programs for tests: rendezvous semantics, executed step by step, independent of the diagnosis.

A collective completes for all members at the moment when all have issued it with compatible arguments; a message, when both ends
are issued. A stopped rank takes part in nothing from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Site, Snapshot


class Tape:
    """Choices drawn from a list of numbers; zeros after its end."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.at = 0

    def pick(self, n: int) -> int:
        """Return a number in [0, n)."""
        self.at += 1
        return self.numbers[self.at - 1] % n if self.at <= len(self.numbers) and n > 1 else 0


@dataclass(frozen=True)
class Op:
    """One statement of a rank: a collective, send, recv, wait for an earlier one, or work. `peer` None of a recv: any source."""

    kind: str
    group: str = ""
    root: int | None = None
    shape: int = 4
    dtype: str = "float32"
    peer: int | None = None
    tag: int = 0
    asynchronous: bool = False
    name: int = 0  # identifies an asynchronous operation for its wait
    line: int = 1
    hidden: bool = False  # issued by C++ (DDP): counted, but not among a rank's calls
    step: bool = False  # work that ends an optimizer step


COLLECTIVES = ("all_reduce", "barrier", "broadcast", "all_gather")


@dataclass
class Issued:
    """An operation that a rank has issued."""

    rank: int
    op: Op
    number: int  # number of the collective in its group, or of the message to this peer (both from 1)
    done: bool = False
    at: int = 0  # number of the statement, over all ranks


@dataclass
class Job:
    """All ranks' programs and their positions."""

    programs: list[list[Op]]
    groups: dict[str, tuple[int, ...]]
    ends: list[str]
    pc: list[int] = field(default_factory=list)
    life: list[str] = field(default_factory=list)
    waiting: list[Issued | None] = field(default_factory=list)
    issued: list[list[Issued]] = field(default_factory=list)
    times: list[list[int]] = field(default_factory=list)  # number of each executed statement, over all ranks
    clock: int = 0

    def __post_init__(self) -> None:
        n = len(self.programs)
        self.pc = self.pc or [0] * n
        self.life = self.life or [Life.RUNNING] * n
        self.waiting = self.waiting or [None] * n
        self.issued = self.issued or [[] for _ in range(n)]
        self.times = self.times or [[] for _ in range(n)]

    def copy(self) -> Job:
        again = {id(i): replace(i) for mine in self.issued for i in mine}
        return Job(
            self.programs,
            self.groups,
            self.ends,
            list(self.pc),
            list(self.life),
            [None if w is None else again[id(w)] for w in self.waiting],
            [[again[id(i)] for i in mine] for mine in self.issued],
            [list(mine) for mine in self.times],
            self.clock,
        )

    def movable(self) -> list[int]:
        return [r for r in range(len(self.programs)) if self.life[r] == Life.RUNNING and self.waiting[r] is None]

    def step(self, r: int, tape: Tape) -> None:
        """Let rank `r` execute its next statement."""
        if self.pc[r] >= len(self.programs[r]):
            self.life[r] = self.ends[r]
            return
        op = self.programs[r][self.pc[r]]
        self.pc[r] += 1
        self.clock += 1
        self.times[r].append(self.clock)
        if op.kind == "work":
            return
        if op.kind == "wait":
            open_ops = [i for i in self.issued[r] if i.op.name == op.name and i.op.asynchronous]
            if open_ops and not open_ops[-1].done:
                self.waiting[r] = open_ops[-1]
            return
        same = [i for i in self.issued[r] if self._queue(i.op) == self._queue(op)]
        mine = Issued(r, op, len(same) + 1, at=self.clock)
        self.issued[r].append(mine)
        if not op.asynchronous:
            self.waiting[r] = mine
        self._match(mine, tape)

    @staticmethod
    def _queue(op: Op) -> tuple:
        return (op.kind, op.group, op.peer, op.tag) if op.kind in ("send", "recv") else (op.group,)

    def _finish(self, *ops: Issued) -> None:
        for i in ops:
            i.done = True
            if self.waiting[i.rank] is i:
                self.waiting[i.rank] = None

    def _match(self, mine: Issued, tape: Tape) -> None:
        if mine.op.kind in ("send", "recv"):
            others = [
                i
                for q, theirs in enumerate(self.issued)
                for i in theirs
                if not i.done and self.life[q] != Life.STOPPED and fits(mine, i)
            ]
            first: dict[int, Issued] = {}
            for i in others:  # messages of one pair match in order: only the oldest of each rank can match
                first.setdefault(i.rank, i)
            if first:
                chosen = list(first.values())[tape.pick(len(first))]
                self._finish(mine, chosen)
            return
        met = self.meeting(mine)
        if met is not None and fitting(met):
            self._finish(*met)

    def meeting(self, mine: Issued) -> list[Issued] | None:
        """Return the same collective of all members; None while one is missing or stopped."""
        met = []
        for q in self.groups[mine.op.group]:
            theirs = self.arrived(q, mine)
            if theirs is None or self.life[q] == Life.STOPPED:
                return None
            met.append(theirs)
        return met

    def arrived(self, q: int, mine: Issued) -> Issued | None:
        for i in reversed(self.issued[q]):
            if i.op.kind not in ("send", "recv") and i.op.group == mine.op.group and i.number == mine.number:
                return i
        return None


def fits(a: Issued, b: Issued) -> bool:
    """True if these are the two ends of one message."""
    if {a.op.kind, b.op.kind} != {"send", "recv"} or (a.op.tag, a.op.group) != (b.op.tag, b.op.group):
        return False
    send, recv = (a, b) if a.op.kind == "send" else (b, a)
    return send.op.peer == recv.rank and recv.op.peer in (None, send.rank)


def fitting(met: list[Issued]) -> bool:
    """True if these calls can complete together. A barrier has neither size nor dtype."""
    first = met[0].op
    for i in met[1:]:
        op = i.op
        if op.kind != first.kind or (op.kind == "broadcast" and op.root != first.root):
            return False
        if op.kind in ("all_reduce", "broadcast", "all_gather") and op.dtype != first.dtype:
            return False
        if op.kind != "barrier" and op.shape != first.shape:
            return False
    return True


def run(job: Job, tape: Tape, steps: int | None = None) -> None:
    """Run until nothing moves, or for a number of statements, in an order from the tape."""
    while steps is None or steps > 0:
        movable = job.movable()
        if not movable:
            return
        job.step(movable[tape.pick(len(movable))], tape)
        steps = None if steps is None else steps - 1


def stuck_for_ever(job: Job) -> set[int]:
    """Return the ranks that stay blocked whatever the unblocked ranks execute next, by trying the best case."""
    n = len(job.programs)
    wild = {r for r in range(n) if job.life[r] == Life.RUNNING and job.waiting[r] is None}
    while True:
        more = {r for r in range(n) if job.waiting[r] is not None and r not in wild and _hopeful(job, r, wild)}
        more = {r for r in more if job.life[r] == Life.RUNNING}
        if not more:
            return {r for r in range(n) if job.life[r] == Life.RUNNING and job.waiting[r] is not None and r not in wild}
        wild |= more


def _hopeful(job: Job, r: int, wild: set[int]) -> bool:
    mine = job.waiting[r]
    assert mine is not None
    if mine.op.kind in ("send", "recv"):
        peers = job.groups[mine.op.group] if mine.op.peer is None else (mine.op.peer,)
        return any(q in wild for q in peers if q != r)
    met = [job.arrived(q, mine) for q in job.groups[mine.op.group]]
    here = [i for i in met if i is not None]
    if not fitting(here) or any(job.life[i.rank] == Life.STOPPED for i in here):
        return False
    return all(i is not None or q in wild for q, i in zip(job.groups[mine.op.group], met, strict=True))


def waits_for(job: Job, r: int) -> set[int]:
    """Return the ranks that rank `r` waits for now, according to the model."""
    mine = job.waiting[r]
    if mine is None or job.life[r] != Life.RUNNING:
        return set()
    if mine.op.kind in ("send", "recv"):
        return {q for q in (job.groups[mine.op.group] if mine.op.peer is None else (mine.op.peer,)) if q != r}
    out = set()
    for q in job.groups[mine.op.group]:
        i = job.arrived(q, mine)
        if i is None or job.life[q] == Life.STOPPED or not fitting([mine, i]):
            out.add(q)
    return out


def snapshot(job: Job, stable_since_s: float | None = 0.0) -> Snapshot:
    """Return the snapshot that the recorder would have taken."""
    ranks = {}
    for r, mine in enumerate(job.issued):
        enqueued: dict[str, int] = {}
        completed: dict[str, int] = {}
        p2p: dict[str, int] = {}
        sites: dict[str, int] = {}
        for i in mine:
            key = f"job.py:{i.op.line}"
            sites[key] = sites.get(key, 0) + 1
            if i.op.kind in ("send", "recv"):
                peer = "any" if i.op.peer is None else i.op.peer
                k = f"{i.op.kind}:{peer}:{i.op.tag}:{i.op.group}"
                p2p[k] = p2p.get(k, 0) + 1
                continue
            enqueued[i.op.group] = i.number
            if i.done and completed.get(i.op.group, 0) == i.number - 1:
                completed[i.op.group] = i.number
        waiting = job.waiting[r]
        blocked = _call(waiting) if waiting is not None else None
        ranks[r] = RankState(
            rank=r,
            life=job.life[r],
            enqueued=enqueued,
            completed=completed,
            blocked=blocked,
            calls=tuple(_call(i) for i in mine),
            p2p_issued=p2p,
            sites=sites,
        )
    groups = {g: Group(name=g, ranks=members, backend="gloo") for g, members in job.groups.items()}
    return Snapshot(t_s=100.0, world_size=len(ranks), ranks=ranks, groups=groups, stable_since_s=stable_since_s)


def _call(i: Issued) -> Call:
    op = i.op
    p2p = op.kind in ("send", "recv")
    return Call(
        op=op.kind,
        group=op.group,
        seq=None if p2p else i.number,
        nth=i.number if p2p else None,
        shape=None if op.kind == "barrier" else (op.shape,),
        dtype=None if op.kind == "barrier" else op.dtype,
        bytes=op.shape * 4,
        root=op.root,
        peer=op.peer,
        tag=op.tag,
        site=Site("job.py", op.line, "main"),
        completed_s=1.0 if i.done else None,
        asynchronous=op.asynchronous,
    )
