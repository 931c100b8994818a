"""Ranks that failed by themselves, by their own messages and their launcher's tables: one finding for each reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.phrases import at, shortened, where_at
from distdiag.sources.logs import advice
from distdiag.sources.logs.collect import Collected, Event, evidence
from distdiag.sources.logs.patterns import Role
from distdiag.terms.untrusted import bounded, is_rank

# failures of the device or of the launch: never a consequence of another failure
_ALWAYS = ("xid", "ecc", "device_lost", "shm_full", "duplicate_gpu", "rank_twice")
HANDLED_LINES = 500  # a log that continues for this many lines shows that an exception was caught
_NUMBER = bounded(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class Reason:
    """One reason for which ranks failed.

    Attributes:
        ranks: Ranks known to have failed for this reason.
        unnamed: Writers without a known rank, as text.
    """

    meaning: advice.Meaning
    text: str
    advice: str
    order: float
    ranks: set[int] = field(default_factory=set)
    unnamed: list[str] = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)
    site: Site | None = None
    events: list[Event] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    times: dict[int, str] = field(default_factory=dict)  # when each rank ended, by the launcher


def of_events(found: Collected) -> list[Reason]:
    """Return the reasons of ranks whose first event is a failure of their own, in the order of the log."""
    reasons: dict[tuple[str, str], Reason] = {}
    before = _first_waits(found.events)
    caught = {id(e) for e in handled(found)}
    for e in found.events:
        meaning = advice.MEANINGS.get(e.name)
        if e.role is not Role.CAUSE or meaning is None or _followed(e, before) or id(e) in caught:
            continue
        text = meaning.text.format_map(_Fields(e))
        place = f"{e.site.file}:{e.site.line}" if e.site is not None and e.name == "exception" else ""
        key = (e.name, _NUMBER.sub("#", text) + place if e.name not in ("xid",) else text)
        r = reasons.setdefault(key, Reason(meaning, text, meaning.advice, e.order))
        r.events.append(e)
        ranks = (
            {int(e.fields[k]) for k in ("a", "b") if k in e.fields} if e.name == "duplicate_gpu" else {e.rank} - {None}
        )
        if e.name == "rank_twice":
            ranks = {int(e.fields["a"][:6])}
        if e.name == "nccl_mismatch":
            ranks = {int(e.fields["near"][:6])}
        r.ranks |= {q for q in ranks if is_rank(q)}  # type: ignore[misc]
        if not ranks and (name := _unnamed(e, len(found.files) > 1)) and name not in r.unnamed:
            r.unnamed.append(name)
        if e.site is not None:
            r.site = r.site or e.site
            if e.rank is not None:
                r.sites.setdefault(e.rank, e.site)
        if e.name == "exception":
            r.advice = advice.advice_for(e.text, len(r.ranks))
    return sorted(reasons.values(), key=lambda r: r.order)


def handled(found: Collected) -> list[Event]:
    """Return the exceptions that a rank caught: its log continues for long, and no line shows that the job failed."""
    if found.exits or any(e.role in (Role.WAIT, Role.VICTIM, Role.EXIT, Role.START) for e in found.events):
        return []
    return [e for e in found.events if e.name == "exception" and e.lines_after >= HANDLED_LINES and not e.uncaught]


class _Fields(dict[str, str]):
    """The fields of an event, for a message."""

    def __init__(self, e: Event) -> None:
        super().__init__(e.fields)
        if e.name == "exception":
            self["what"] = f": {shortened(e.fields['what'], 160)}" if e.fields.get("what") else ""
        elif e.name == "xid":
            self["text"] = f": {shortened(e.fields['text'], 80).rstrip('.')}" if e.fields.get("text") else ""
        elif e.name == "port_in_use":
            self["port"] = f"port {self['port']}" if "port" in self else "the port"
        elif "what" in self:
            self["what"] = shortened(self["what"], 120)

    def __missing__(self, key: str) -> str:
        return ""


def _first_waits(events: Iterable[Event]) -> dict[tuple[object, ...], int]:
    """Return the order of each writer's first wait or lost connection: its later exceptions are consequences."""
    out: dict[tuple[object, ...], int] = {}
    for e in events:
        if e.role in (Role.WAIT, Role.VICTIM):
            for writer in _writers(e):
                out.setdefault(writer, e.order)
    return out


def _writers(e: Event) -> list[tuple[object, ...]]:
    out: list[tuple[object, ...]] = []
    if e.rank is not None:
        out.append(("rank", e.rank))
    if e.who.process:
        out.append(("process", e.path, e.who.process))
    return out or [("file", e.path)]


def _followed(e: Event, before: dict[tuple[object, ...], int]) -> bool:
    """True if this writer had already timed out, or lost a connection."""
    if e.name in _ALWAYS:
        return False
    return any(before.get(w, e.order) < e.order for w in _writers(e))


def _unnamed(e: Event, several_files: bool) -> str:
    """Return how the log names a writer whose rank is unknown, with the file if there are several; empty if it does not."""
    name = _own_name(e)
    return f"{name or 'a process'} of {e.path.name}" if several_files else name


def _own_name(e: Event) -> str:
    if e.who.device is not None and e.who.host:
        return f"GPU {e.who.device} of {e.who.host}"
    if e.who.local is not None:
        return f"local rank {e.who.local}"
    return e.who.process or (f"task {e.who.task}" if e.who.task is not None else "")


def number(reasons: list[Reason], ended: list[Reason]) -> None:
    """Set the ranks of the one exception without ranks: those that ended with an exit code, if their number is equal."""
    nameless = [r for r in reasons if not r.ranks and not r.unnamed and r.meaning.cause == "crashed"]
    ranks = {q for r in ended for q in r.ranks}
    if len(nameless) == 1 and len(nameless[0].events) == len(ranks):
        nameless[0].ranks |= ranks


def _first(r: Reason) -> str:
    """Return which of several ranks ended first, by the launchers' clocks; empty if they do not show it."""
    known = {q: t for q, t in r.times.items() if t}
    if len(known) < len(r.ranks) or len(set(known.values())) < 2:
        return ""
    least = min(known.values())
    ranks = [q for q, t in known.items() if t == least]
    return f", {rank_list(ranks)} first ({least.replace('_', ' ')})" if len(ranks) < len(known) else ""


def finding(r: Reason, found: Collected, victims: set[int]) -> Finding:
    """Return the finding on one reason.

    Args:
        victims: Ranks that waited or lost their connections meanwhile.
    """
    ranks = tuple(sorted(r.ranks))
    others = tuple(sorted(victims - r.ranks))
    everyone = len(ranks) > 1 and set(ranks) >= found.ranks and not others
    shown = ", ".join(r.unnamed[:3]) + (f" and {len(r.unnamed) - 3:,} more" if len(r.unnamed) > 3 else "")
    times = len(r.events)
    nobody = "the host" if r.meaning.kind == "gpu" else "a rank"
    who = rank_list(ranks) if ranks else shown or nobody
    of_node = bool(r.events) and all(e.of_node for e in r.events)
    if of_node:
        who = who.replace("rank", "local rank", 1)
    site = r.site
    text = r.text
    if len(ranks) > 1 and r.meaning.kind != "mismatch":
        text = text.replace("was killed", "were killed").replace("has a GPU", "have GPUs")
    if len(r.hosts) == 1 and not r.hosts <= {"localhost"}:
        who += f" on {min(r.hosts)}"
    message = f"{who} {text}{_first(r)}{at(site)}"
    if who is nobody and times > 1:
        message += f" ({times:,} times)"
    if everyone and r.meaning.cause == "crashed":
        message += f": the same on all {len(ranks):,} ranks in the log"
    elif others:
        message += f"; {rank_list(others)} then timed out waiting or lost their connections"
    todo = advice.SAME_EVERYWHERE if everyone and not r.advice else r.advice
    in_collective = bool(r.events) and all(e.in_collective for e in r.events)
    if in_collective and todo in advice.GENERAL:
        todo = advice.IN_COLLECTIVE
    if of_node:
        todo += "; the log does not name the node: the rank is the same only on the first one"
    sure = ranks and r.meaning.kind != "mismatch" and not of_node and not in_collective
    return Finding(
        kind=r.meaning.kind,
        cause=r.meaning.cause,
        certainty=Certainty.PROVED if sure else Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=ranks,
        victims=others,
        where=tuple(where_at(q, r.sites.get(q, site)) for q in ranks),
        message=message,
        cost="the job ended, or hangs without it",
        advice=todo,
        evidence=(*evidence(r.events), *dict.fromkeys(r.paths))[:8],
    )
