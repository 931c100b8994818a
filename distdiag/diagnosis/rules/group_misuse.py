"""group_misuse: a rank calls a collective of a group that it is not a member of. torch warns, and the call returns at once.

The rank continues with its own values; the members have the group's.

Faulty jobs: outsider_sum. Healthy look-alikes: insider_sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Sample
from distdiag.diagnosis.text.phrases import at, where

kind = kinds.GROUP_MISUSE


@dataclass(frozen=True)
class Limits:
    harmless: tuple[str, ...] = ("barrier", "monitored_barrier")
    """Operations that return no data, so a non-member loses nothing."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield one finding for each site at which ranks call a collective of a group that they are not members of."""
    by_site: dict[tuple[str, str], dict[int, Sample]] = {}
    for state in facts.snapshot.ranks.values():
        for sample in state.samples:
            if sample.kind == "not_a_member" and sample.name not in limits.harmless:
                key = (sample.name, sample.site.key if sample.site else "")
                by_site.setdefault(key, {})[state.rank] = sample
    if not by_site:
        yield Abstained("no rank called a collective of a group that it is not a member of", checked=True)
    for (op, _), callers in by_site.items():
        yield _finding(facts, op, callers)


def _finding(facts: Facts, op: str, callers: dict[int, Sample]) -> Finding:
    ranks = tuple(sorted(callers))
    first = callers[ranks[0]]
    states = facts.snapshot.ranks
    return Finding(
        kind=kind.name,
        cause="not_a_member",
        certainty=Certainty.PROVED,
        severity=Severity.WARNING,
        culprits=ranks,
        where=tuple(where(states[q], None, callers[q].site) for q in ranks),
        step=first.step,
        first_seen_s=first.t_s,
        message=f"{rank_list(ranks)} {'calls' if len(ranks) == 1 else 'call'} {op}{at(first.site)} in a group "
        f"{'it is' if len(ranks) == 1 else 'they are'} not a member of: the call returns at once and does nothing",
        cost="these ranks continue with their own values; the members have the group's",
        advice="call it on the members only, and send the result to the other ranks if they need it",
    )
