"""Makes a finding of facts: sites, ranks and evidence are those of the facts; a caller gives who, what it means, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from distdiag.diagnosis.kinds import KINDS
from distdiag.diagnosis.model.findings import Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, shortened, where_at
from distdiag.diagnosis.text.template import Template
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.message import Role
from distdiag.terms.untrusted import bounded

OF_NODE = ("torchrun", "accelerate")  # how tracebacks name the launcher that is on every node
ENDED = "the job ended, or hangs without it"  # what a lost rank costs
_OF_RANK = bounded(r"\b[Rr]ank[ =:]?\d+")
LONG = 160  # most characters of a line that is quoted
EVIDENCE = 8  # most lines that a finding names


def finding(
    kind: str,
    cause: str,
    facts: Sequence[Fact],
    message: str,
    advice: str,
    *,
    culprits: Iterable[int] = (),
    victims: Iterable[int] = (),
    sites: Mapping[int, Site] | None = None,
    proved: bool = False,
    cost: str = NO_PROGRESS_MADE,
    severity: Severity = Severity.ERROR,
    **more: Any,
) -> Finding:
    """Return a finding.

    Args:
        victims: Those that are not culprits count.
        sites: Of ranks; those of their facts, if not given.
    """
    blamed = tuple(sorted(set(culprits)))
    others = tuple(sorted(set(victims) - set(blamed)))
    if sites is None:
        sites = {f.rank: f.site for f in reversed(facts) if f.rank is not None and f.site is not None}
    state = "waiting" if any(f.role is Role.WAIT for f in facts) else None
    raised = {f.rank for f in facts if f.role is Role.CAUSE} if blamed else set()  # they failed, too
    waiting = tuple(where_at(r, sites.get(r), state) for r in others if r not in raised)
    return Template(KINDS[kind], cause, "{message}", "{cost}", "{advice}", proved, severity)(
        culprits=blamed,
        victims=others,
        where=[where_at(r, sites.get(r)) for r in blamed] or waiting,
        waiting=waiting if blamed or state else (),
        message=message,
        cost=cost,
        advice=advice,
        evidence=dict.fromkeys(f"{f.path}:{f.line}" for f in facts[:EVIDENCE]),
        **more,
    )


def library(f: Fact) -> str:
    """Return the library whose error a line has."""
    if "CCL_ERROR" in f.text or "oneCCL" in f.text:
        return "oneCCL"
    return "HCCL" if "HCCL" in f.text or f.fields.get("what", "").startswith(("Hccl", "Acl", "acl")) else "NCCL"


class Fields(dict[str, str]):
    """What a row's text may name; a field that the line lacks is empty."""

    def __missing__(self, key: str) -> str:
        return ""


def some(names: Sequence[str]) -> str:
    """Return up to three names, each once, and how many more there are."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def ranks_of(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(sorted({f.rank for f in facts if f.rank is not None}))


def job_ranks(facts: Iterable[Fact]) -> tuple[int, ...]:
    """Return the known ranks of facts in the job: without those that are only known on their node."""
    return ranks_of(f for f in facts if not f.of_node)


def who(facts: Collection[Fact], subject: str = "a rank") -> str:
    """Return `ranks 0, 2`, else the hosts with GPUs, nodes or processes that the lines name, else the subject, with its files."""
    if ranks := job_ranks(facts):
        return rank_list(ranks)
    names = [(f.who.process or f.who.label) and f.who.name for f in facts]
    known = [name for name in names if name and name not in OF_NODE]
    known = [name for name in known if not any(other.endswith(f" of {name}") for other in known)]
    files = dict.fromkeys(f.file for f in facts if f.file)
    if known or not files:
        return some(known) or subject
    noun = subject.removeprefix("a ")
    one = "the node" if noun == "node" else subject
    return f"{f'the {noun}s' if len(files) > 1 else one} of {some([*files])}"


def same_calls(ranks: Collection[int]) -> str:
    """Return what to do where these ranks, if they are known, made another call than the others."""
    who, its = (rank_list(sorted(ranks)), verb(ranks, "its", "their")) if ranks else ("the rank", "the rank's")
    return f"look for a condition on {who}, or on {its} data, before that call; all ranks must make the same calls in the same order"


def fewer(sides: Iterable[Collection[int]]) -> Collection[int]:
    """Return the ranks of the smaller one of two sides; empty if they are equal, or more."""
    few, *many = sorted(sides, key=len)
    return few if len(many) == 1 and len(few) < len(many[0]) else ()


def last_words(found: Collected, ranks: Collection[int], others: Iterable[int] = ()) -> str:
    """Return the last line of the one rank that the others wait for; the last before the first failure, if it reports one.

    Args:
        others: Ranks whose last line is added if it is the same on all, but for their numbers, and another one than that.
    """
    if len(ranks) != 1:
        return ""
    rank = next(iter(ranks))
    writes = any(rank in (f.who.rank, f.who.task) for f in found.named("horovod_stall"))  # as rank 0 does
    silent = not writes and all(f.rank != rank for f in found.facts)
    if text := found.last_lines(earlier=not silent).get(rank, ""):
        whose = "its last line" if silent else f"the last line of rank {rank} before that"
        before = found.last_lines(earlier=True)
        theirs = {q: before.get(q, "") for q in others}
        same = {_OF_RANK.sub("", line) for line in theirs.values()} - {_OF_RANK.sub("", text)}
        rest = ""
        if len(same) == 1 and all(theirs.values()):
            rest = f", that of {rank_list(sorted(theirs))} `{shortened(min(theirs.values()), LONG)}`"
        return f"; {whose} is `{shortened(text, LONG)}`{rest}"
    return ""
