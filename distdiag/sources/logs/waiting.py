"""What each rank waited in when a collective timed out, by its group: from the watchdogs' lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Site
from distdiag.sources.logs.facts import Fact
from distdiag.terms import operations
from distdiag.terms.ranks import sets_of

NOT_RECORDED = {"18446744073709551615", "-1"}  # the size of coalesced operations

Group = tuple[str, str]  # number and description; ("", "") if the lines do not name it


@dataclass(slots=True)
class Waiting:
    """One rank in one group: the first operation that timed out there, and how far it was.

    Attributes:
        seq, op, size: Fields of the operation; None if only the counters were written.
        size_out: Elements that it returns.
        issued, completed: The newest operation, by the rank's own counters.
        signalled: The rank whose timeout it was asked to dump for; it has not timed out itself.
    """

    seq: int | None = None
    op: str = ""
    size: int | None = None
    size_out: int | None = None
    limit_s: float = 0.0
    ran_s: float = 0.0
    issued: int | None = None
    completed: int | None = None
    signalled: int | None = None
    site: Site | None = None
    facts: list[Fact] = field(default_factory=list)

    @property
    def saves(self) -> str:
        """Return the function in which it gathers the state of all ranks, by its stack."""
        return next((f.saves for f in self.facts if f.saves), "")

    @property
    def timed_out(self) -> bool:
        """True if it waited itself: it was not only asked to dump for another rank."""
        open_op = (self.issued or 0) > (self.completed or 0) >= 0
        return bool(self.op) or self.seq is not None or (open_op and self.signalled is None)

    def is_in(self, seq: int | None) -> bool:
        """True if it has issued this operation and not completed it."""
        return seq is not None and (self.issued or 0) >= seq > (self.completed or 0)


Waits = dict[int, Waiting]  # by rank


def op_name(name: str) -> str:
    """Return torch.distributed's name of `ALLREDUCE`, `_ALLGATHER_BASE`."""
    return operations.op_name(name.lower())


def groups_of(facts: Iterable[Fact]) -> dict[Group, Waits]:
    """Return the ranks that a watchdog reported, by group.

    The line of the timeout does not name its group in most versions; the line with the counters does, and both have the
    operation's number.
    """
    ours = [(f.rank, f) for f in facts if f.name in ("timeout", "counters", "dump_signal") and f.rank is not None]
    named: dict[tuple[int, int], Group] = {}
    for rank, f in ours:
        if f.name == "counters" and f.who.group is not None:
            named.setdefault((rank, f.number("at") or 0), f.who.group)
    with_number = sets_of((number, group) for (_, number), group in named.items())
    alone = {number: next(iter(groups)) for number, groups in with_number.items() if len(groups) == 1}
    out: dict[Group, Waits] = {}
    for rank, f in ours:
        seq = f.number("seq" if f.name == "timeout" else "at")
        group = f.who.group or named.get((rank, seq or 0)) or alone.get(seq or 0, ("", ""))
        wait = out.setdefault(group, {}).setdefault(rank, Waiting())
        wait.facts.append(f)
        if f.name == "timeout":
            _note_timeout(wait, f, seq)
            continue
        wait.issued, wait.completed = f.number("enq"), f.number("done")
        if f.name == "counters":
            wait.seq = seq if wait.seq is None else wait.seq
        elif "first" in f.fields:
            wait.signalled = f.number("first")
    return out


def _note_timeout(wait: Waiting, f: Fact, seq: int | None) -> None:
    if wait.op and wait.seq is not None and seq is not None and seq >= wait.seq:
        wait.site = wait.site or (f.site if seq == wait.seq else None)
        return  # the first one matters: later ones were queued behind it
    wait.seq, wait.op = seq, op_name(f.fields["op"])
    wait.size = f.number("nin") if f.fields.get("nin") not in NOT_RECORDED else None
    wait.size_out = f.number("nout") if f.fields.get("nout") not in NOT_RECORDED else None
    wait.limit_s, wait.ran_s = (f.number("limit") or 0) / 1e3, (f.number("ran") or 0) / 1e3
    wait.site = f.site or wait.site


def label(group: Group) -> str:
    """Return how a group is called in a message: its description, else its number; empty if unknown."""
    number, description = group
    return description if description and description != "undefined" else f"group {number}" if number else ""


def gathers(waiting: Waits) -> str:
    """Return the function in which some ranks gather the state of all, where others are shown elsewhere, or no others are shown."""
    inside = [w for w in waiting.values() if w.saves]
    others = [w for w in waiting.values() if not w.saves]
    apart = any(w.site is not None or (w.op, w.seq) != (inside[0].op, inside[0].seq) for w in others if inside)
    return inside[0].saves if inside and (apart or len(waiting) == 1) else ""
