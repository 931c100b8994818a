"""group_misuse: a rank calls a collective of a group that it is not a member of, or ranks create groups in different order.

torch warns of the first, and the call returns at once: the rank continues with its own values. Of the second it says nothing. A
group is named by its number among the `new_group` calls, and its members find each other by that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import outsiders, paths
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Sample, Snapshot
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import Template

kind = kinds.GROUP_MISUSE


@dataclass(frozen=True)
class Limits:
    harmless: tuple[str, ...] = ("barrier", "monitored_barrier")
    """Operations that return no data, so a non-member loses nothing."""


limits = Limits()
NOT_A_MEMBER = Template(kind, "not_a_member",
    "{culprits} {culprits:calls|call} {op}{site} in a group {culprits:it is|they are} not a member of: the call "
    "returns at once and does nothing", "these ranks continue with their own values; the members have the group's",
    "call it on the members only, and send the result to the other ranks if they need it", proved=True,
    severity=Severity.WARNING)  # fmt: skip
ORDER = Template(kind, "order", "{head}ranks create different groups in call {number} of new_group: {each}",
    "these groups have the same name, by which their members find each other: ranks may hang, or connect to "
    "another group",
    "call new_group for every group on all ranks in the same order, also for groups that a rank is not a member "
    "of; or pass use_local_synchronization=True", proved=True)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield a finding for each site at which ranks call a collective of a group of others, and one for groups in another order."""
    s = facts.snapshot
    by_site: dict[tuple[str, str], dict[int, Sample]] = {}
    for state in s.ranks.values():
        for sample in state.samples:
            if sample.kind == "not_a_member" and sample.name not in limits.harmless:
                key = (sample.name, sample.site.key if sample.site else "")
                by_site.setdefault(key, {})[state.rank] = sample
    if not by_site:
        yield Abstained("no rank called a collective of a group that it is not a member of", checked=True)
    for (op, _), callers in by_site.items():
        ranks = sorted(callers)
        first, where = callers[ranks[0]], wheres(s, ranks, None, {q: x.site for q, x in callers.items()})
        yield NOT_A_MEMBER(culprits=ranks, where=where, step=first.step, first_seen_s=first.t_s, op=op)
    yield _order(s, facts.source)


def _order(s: Snapshot, source: Source) -> Finding | Abstained:
    """Return the first `new_group` call in which ranks created different groups."""
    if any("#" in name for name in s.groups):  # torch counts from 0 again after destroy_process_group
        return Abstained("the job has created its groups again after destroying them", cause="order")
    found = outsiders.created(s)
    if found is None:
        return Abstained("no ranks created different groups in the same call of new_group", checked=True, cause="order")
    number, made = found
    most = len(made[0].ranks)
    odd = tuple(sorted(q for g in made[1:] for q in g.ranks)) if len(made[1].ranks) < most else ()
    head = ""
    if (left_out := outsiders.left_out(made)) is not None:
        odd, alone = left_out
        condition = paths.enclosing(alone.site, source)
        guard = f": `{condition.text}` (line {condition.line})" if condition is not None else ""
        head = f"{rank_list(odd)} did not create the group of {rank_list(alone.ranks)}{at(alone.site)}{guard}; "
    every = tuple(sorted({q for g in made for q in g.ranks}))
    each = " and ".join(f"a group of {rank_list(g.ranks)}{at(g.site)}" for g in made[:4])
    shown = (q for q in odd or every if q in s.ranks)
    return ORDER(
        culprits=odd, victims=[q for q in every if q not in odd],
        where=wheres(s, shown, None, {q: g.site for g in reversed(made) for q in g.ranks}), first_seen_s=s.t_s,
        head=head, number=number, each=each,
    )  # fmt: skip
