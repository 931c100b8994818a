"""Findings on messages in flight: one that a rank left out, two ranks that wait for each other, ends that differ or are skipped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import message_counts
from distdiag.diagnosis.culprit.case import Case
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.conditions import conditions_text
from distdiag.diagnosis.text.incident import group_label
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, op_at, where_at
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import Incident, Root
from distdiag.diagnosis.waits.wait import call_at
from distdiag.sources.dumps.findings import Findings


def missing(findings: Findings, graph: WaitGraph, source: Source) -> Finding | None:
    """Return the finding on a rank that went on without a message for which another rank waits; None if nothing shows it.

    Its history shows that the message was due, or it now waits for the rank that waits for it: on NCCL the messages of two ranks
    run one after another, so what that rank issued later cannot begin.
    """
    blame, main = findings.blame, findings.blame.main
    if main is None or not main.p2p or blame.culprits != (main.key[4],):
        return None
    receiver, rank = main.key[3], main.key[4]
    awaited, own = main.calls.get(receiver), blame.oldest.get(rank)
    if awaited is None or not main.missing:
        return None
    mutual = own is not None and _behind(findings, receiver, awaited, rank, own)
    incident = Incident(Root.CYCLE, frozenset((receiver, rank)), (main,), frozenset((receiver,)))
    omitted = message_counts.explain(Case(findings.snapshot, graph, incident, source=source), (rank,))
    nccl = findings.snapshot.groups[main.group].backend == "nccl"
    if omitted is None and not (mutual and nccl and blame.oldest.get(receiver) is awaited):
        return None
    waits = f"rank {receiver} waits {f'for it in its {op_at(awaited)}' if omitted else f'in {_of(findings, awaited)}'}"
    if own is not None:
        waits += f", and rank {rank} in {_of(findings, own)}" + (": a cycle" if mutual else "")
    common: dict[str, Any] = {
        "victims": sorted({*blame.victims, *blame.culprits} - {rank}), "where": findings.where((rank,)),
        "waiting": findings.where(blame.victims), "evidence": findings.evidence((rank,)), "waits": waits,
    }  # fmt: skip
    if omitted is None:
        way = "send to" if main.key[2] == "recv" else "recv from"
        return MUTUAL(culprits=(rank,), way=f"{way} rank {receiver}", **common)
    shown = conditions_text(omitted.conditions)
    return LEFT_OUT(
        culprits=(rank,), head=omitted.head + (f": {shown}" if shown else ""), text=omitted.text, advice=omitted.advice, **common
    )  # fmt: skip


def _behind(findings: Findings, receiver: int, awaited: Call, rank: int, own: Call) -> bool:
    """True if the receiver has the other end of the rank's own call behind the call in which it waits for the rank.

    The messages of two ranks are one queue; those of batches and the collectives of their group are another one.
    """
    state = findings.snapshot.ranks[receiver]
    if own.group != awaited.group or own.p2p is (own.group in findings.loaded.batched):
        return False
    if not own.p2p:
        other = call_at(state, own.group, own.seq or 0)
        if other is None or other.completed_s is not None:
            return state.enqueued.get(own.group, 0) < (own.seq or 0)
    elif own.peer != receiver or (other := messages.other_end(state, rank, own, own.nth)) is None:
        return False
    return awaited.entered_s is not None and other.entered_s is not None and awaited.entered_s < other.entered_s


def _of(findings: Findings, call: Call) -> str:
    """Return `recv from rank 3 at pipe.py:41 in recv_backward`."""
    if not call.p2p:
        return findings.call_text(call) + at(call.site)
    return f"{compatible.op_name(call.op)} {'to' if call.op == 'send' else 'from'} rank {call.peer}{at(call.site)}"


def unmatched(findings: Findings) -> Finding | None:
    """Return the finding on unmatched messages; the culprit is the rank with most of them."""
    calls = [(rank, call) for rank, mine in sorted(findings.loaded.unmet.items()) for call in mine]
    ends = Counter(q for rank, call in calls for q in (rank, call.peer) if q is not None)
    most = ends.most_common(2)
    if not most:
        return None
    culprits = (most[0][0],) if len(most) == 1 or most[0][1] > most[1][1] else ()
    members = tuple(sorted(ends))
    shown = sorted(calls, key=lambda x: x[0] not in culprits)[:3]
    texts = [f"rank {rank}'s {_of(findings, call)}" for rank, call in shown]
    sites = {rank: call.site for rank, call in reversed(calls)}
    return UNMATCHED(
        culprits=culprits,
        victims=sorted(r for r, state in findings.snapshot.ranks.items() if state.calls and r not in culprits),
        where=(where_at(r, sites.get(r), "waiting" if sites.get(r) else None) for r in culprits or members),
        evidence=findings.evidence(members), calls=", ".join(texts), n=len(texts),
        group=group_label(findings.snapshot, calls[0][1].group),
    )  # fmt: skip


def unequal(findings: Findings, graph: WaitGraph) -> Finding | None:
    """Return the finding on sends and their recvs of different lengths."""
    found = findings.loaded.unequal
    if not found:
        return None
    (rank, peer), (send, recv) = min(found.items())
    others = [f"rank {a} to rank {b}" for a, b in sorted(found)[1:4]]
    ends = sorted({q for pair in found for q in pair})
    sites = {q: call.site for pair, calls in found.items() for q, call in zip(pair, calls, strict=True)}
    stuck = sorted({*graph.of_rank, *findings.blame.victims, *findings.blame.culprits}.difference(ends))
    open_ends = sum(call.completed_s is None for call in (send, recv))
    return UNEQUAL(
        victims=sorted({*ends, *stuck}), where=(where_at(q, sites[q], "waiting") for q in ends), waiting=(replace(w, state="waiting") for w in findings.where(stuck)),
        evidence=findings.evidence(ends), rank=rank, peer=peer, sent=compatible.elements(send) or 0,
        received=compatible.elements(recv) or 0, here=send.site, there=recv.site, group=group_label(findings.snapshot, send.group),
        still="neither has completed" if open_ends > 1 else "the recv has not completed",
        others=f"; likewise {', '.join(others)}" if others else "",
    )  # fmt: skip


LEFT_OUT = Template(kinds.DEADLOCK, "missing_rank", "{head}; {waits}{text}", NO_PROGRESS, "{advice}")
MUTUAL = Template(kinds.DEADLOCK, "missing_rank",
    "{culprits} {culprits:has|have} not made the next {way}: {waits}", NO_PROGRESS,
    "look for a {way} that {culprits} left out before its own call: a micro-batch less, a shorter last batch, an early return; "
    "both sides must make equally many messages in each round")  # fmt: skip
UNMATCHED = Template(kinds.DEADLOCK, "p2p_cycle",
    "no matching call for {calls} ({group}), and the other {n:end has|ends have} issued later messages", NO_PROGRESS,
    "compare peers and tags at both ends of these messages: what one rank sends, the other must receive")  # fmt: skip
UNEQUAL = Template(kinds.MISMATCH, "shape",
    "rank {rank} sends {sent:,} elements{here} to rank {peer}, which receives {received:,}{there} ({group}); {still}{others}",
    NO_PROGRESS, "compare the tensors at both ends (sequence length, batch size, the last batch): pad them to one length, or send the "
    "length before them")  # fmt: skip
