"""Findings on what torch itself reports about several ranks: calls or models that differ, unused parameters, late ranks."""

from __future__ import annotations

import re
from collections import Counter

from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, at, rough_time, shortened, where_at
from distdiag.sources.logs.collect import Collected, Event, evidence, first_site
from distdiag.sources.logs.timeouts import op_name
from distdiag.terms.ranks import fold_ranks
from distdiag.terms.untrusted import bounded, is_rank

MANY_PARAMETERS = 1_000_000  # no model has so many tensors: such a count is another collective's data
LONG_NAMES = 8000
LOST = bounded(r"reset by peer|Broken pipe|got 0 bytes|Connection closed", re.IGNORECASE)

_SEQ = bounded(r"SequenceNumber=(\d{1,18})")
_OP = bounded(r"OpType=(\w+)")
_SHAPE = bounded(r"TensorShape=\[([\d, ]{0,99})\]")
_DTYPE = bounded(r"TensorDtypes=(\w+)")


def findings(found: Collected) -> list[Finding]:
    """Return what torch reports, most specific first."""
    by_name: dict[str, list[Event]] = {}
    for e in found.events:
        by_name.setdefault(e.name, []).append(e)
    out: list[Finding] = []
    if "fingerprints" in by_name:
        out.append(_fingerprints(by_name["fingerprints"]))
    if "ddp_params" in by_name or "ddp_shape" in by_name:
        out.append(_models(by_name.get("ddp_params", []), by_name.get("ddp_shape", [])))
    if "ddp_unused" in by_name or "ddp_unused_index" in by_name:
        out.append(_unused(found, by_name.get("ddp_unused", []), by_name.get("ddp_unused_index", [])))
    return out


def late(found: Collected) -> list[Finding]:
    """Return the findings on ranks that torch names as missing in a barrier or in the creation of a communicator."""
    barrier = [e for e in found.events if e.name == "barrier_late"]
    reached = [e for e in found.events if e.name == "barrier_reached"]
    if barrier or reached:
        return [_barrier(barrier, reached)]
    stalled = [e for e in found.events if e.name == "horovod_late"]
    if stalled:
        return [_horovod(stalled)]
    ids = [e for e in found.events if e.name == "unique_id"]
    return [_unique_id(found, ids)] if ids else []


def _call(text: str) -> dict[str, str]:
    """Return operation, shape, type and number of a fingerprint."""
    out: dict[str, str] = {}
    for key, regex in (("number", _SEQ), ("op", _OP), ("shape", _SHAPE), ("dtype", _DTYPE)):
        if m := regex.search(text):
            out[key] = op_name(m[1]) if key == "op" else m[1]
    return out


def _fingerprints(events: list[Event]) -> Finding:
    e = next((e for e in events if "fb" in e.fields), events[0])
    sides: dict[str, set[int]] = {}
    for x in events:
        for rank, text in (("a", "fa"), ("b", "fb")):
            if rank in x.fields and text in x.fields:
                c = _call(x.fields[text])
                shown = (
                    c.get("op", "a call")
                    + (f" of shape [{c['shape']}]" if c.get("shape") else "")
                    + (f" {c['dtype']}" if "dtype" in c else "")
                )
                sides.setdefault(shown + (f" (#{c['number']})" if "number" in c else ""), set()).add(
                    int(x.fields[rank])
                )
    a, b = _call(e.fields.get("fa", "")), _call(e.fields.get("fb", ""))
    cause = next((k for k in ("op", "shape", "dtype") if k in a and k in b and a[k] != b[k]), "op")
    ranks = tuple(sorted(set().union(*sides.values())))
    texts = [f"{rank_list(sorted(rs))} in {shown}" for shown, rs in sorted(sides.items(), key=lambda s: min(s[1]))[:4]]
    if len(sides) < 2:
        texts.append("the other side is not in the message")
    few, *many = sorted(sides.values(), key=len)
    culprits = tuple(sorted(few)) if len(many) == 1 and len(few) < len(many[0]) else ()
    sites = {x.rank: x.site for x in events if x.rank is not None and x.site is not None}
    site = next((sites[r] for r in culprits if r in sites), first_site(events))
    numbers = {c["number"] for c in (a, b) if "number" in c}
    skipped = "; their numbers differ, so one rank has made one call more or fewer before" if len(numbers) > 1 else ""
    victims = tuple(r for r in ranks if r not in culprits)
    where = [where_at(r, sites.get(r)) for r in ranks]
    return Finding(
        kind="mismatch",
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        collective=CollectiveRef(a["op"], "", int(a["number"]) if "number" in a else None) if "op" in a else None,
        where=tuple(w for w in where if w.rank in culprits or not culprits),
        waiting=tuple(w for w in where if culprits and w.rank in victims),
        message=f"ranks made different calls in one collective: {', '.join(texts)}{skipped}{at(site)}",
        cost=NO_PROGRESS_MADE,
        advice="look for a condition on the rank, or on the rank's data, before that call; all ranks must make the same calls in the same order",
        evidence=evidence(events),
    )


def _models(counts: list[Event], shapes: list[Event]) -> Finding:
    """Return the finding on models that differ: DDP compares the number of parameters, then their sizes.

    A count of 0, or of millions, is not the other rank's number: DDP read the data of another collective of that rank.
    """
    site = first_site(shapes or counts)
    if shapes:
        e = shapes[0]
        ranks = tuple(sorted({int(x.fields[k]) for x in shapes for k in ("a", "b")}))
        message = (
            f"the wrapped model differs: parameter {e.fields['index']} has {e.fields['what']} {e.fields['sa']} on rank {e.fields['a']}, "
            f"others on rank {e.fields['b']}"
        )
        advice = "build the same model on every rank: the same arguments, vocabulary and number of classes"
    else:
        own = {int(e.fields["a"]): int(e.fields["na"]) for e in counts}
        theirs = {int(e.fields["b"]): int(e.fields["nb"][:18]) for e in counts}
        ranks = tuple(sorted({*own, *theirs}))
        real = {**{r: n for r, n in theirs.items() if 0 < n < MANY_PARAMETERS}, **own}
        if len(set(real.values())) > 1:
            texts = [
                f"{n:,} on {rank_list([r for r, m in real.items() if m == n])}" for n in sorted(set(real.values()))
            ]
            message = f"the wrapped model differs: DDP found {', '.join(texts)} parameters"
            advice = (
                "build the same model on every rank: the same arguments, and the same parameters with requires_grad"
            )
        else:
            n = next(iter(own.values()))
            odd = ", ".join(f"{c:,} on rank {r}" for r, c in sorted(theirs.items())[:3])
            message = (
                f"DDP could not compare the models: {rank_list(sorted(own))} {verb(tuple(own), 'has', 'have')} {n:,} parameters and read {odd}, "
                "which no model has: those ranks were in another collective, or had ended"
            )
            advice = "see what those ranks did at that moment: an exception, a collective that only some ranks call, two DDP modules in a different order; then NCCL_DEBUG=WARN"
    return Finding(
        kind="mismatch",
        cause="model",
        certainty=Certainty.PROVED if shapes or "differs" in message else Certainty.SUSPECTED,
        severity=Severity.ERROR,
        victims=ranks,
        where=tuple(where_at(r, site) for r in ranks[:1]),
        message=f"{message} (DDP is made{at(site)})" if site else message,
        cost="the job ends before its first step",
        advice=advice,
        evidence=evidence(shapes or counts),
    )


def _unused(found: Collected, named: list[Event], indexed: list[Event]) -> Finding:
    by_rank: dict[int, str] = {int(e.fields["r"]): " ".join(e.fields["indices"].split()) for e in indexed}
    names = [n.strip() for e in named[:1] for n in e.fields["names"].split(",") if n.strip()]
    ranks = tuple(sorted({*by_rank, *(int(e.fields["r"]) for e in named)}))
    differs = len(set(by_rank.values())) > 1
    first = next(iter(by_rank.values()), "")
    count = len(names) or len(first.split())
    numbers = [int(n) for n in first.split() if len(n) < 7]
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "") if names else f"number {fold_ranks(numbers)[:80]}"
    if differs:
        what = f"different parameters got no gradient on each of {rank_list(ranks)}; on rank {ranks[0]}: {shown}"
    else:
        least = "at least " if len(named) and len(named[0].fields["names"]) > LONG_NAMES else ""  # the line is cut
        what = f"{least}{count:,} {'parameter' if count == 1 else 'parameters'} got no gradient in the step before, on {rank_list(ranks)}: {shown}"
    site = first_site([e for e in found.events if e.name == "exception" and "finished reduction" in e.text])
    call = f"; the next forward was called{at(site)}" if site else ""
    how = "" if names else "; TORCH_DISTRIBUTED_DEBUG=DETAIL prints their names"
    return Finding(
        kind="unused_parameters",
        cause="differs_between_ranks" if differs else "never_used",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        victims=ranks,
        names=tuple(names[:50]),
        where=tuple(where_at(r, site) for r in ranks[:1]),
        message=f"DDP stopped: {what}{call}",
        cost="the job ended",
        advice=f"use them in the loss, freeze them (requires_grad=False before DDP), or pass find_unused_parameters=True{how}",
        evidence=evidence(named or indexed),
    )


def _late_rank(
    culprits: tuple[int, ...],
    victims: tuple[int, ...],
    events: list[Event],
    message: str,
    advice: str,
    *,
    site: Site | None = None,
    collective: CollectiveRef | None = None,
    certainty: Certainty = Certainty.SUSPECTED,
) -> Finding:
    """Return the finding on ranks that torch or Horovod names as missing; the others wait at `site`."""
    return Finding(
        kind="timeout",
        cause="late_rank",
        certainty=certainty,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        collective=collective,
        where=tuple(where_at(r, None) for r in culprits),
        waiting=tuple(where_at(r, site) for r in victims),
        message=message,
        cost=NO_PROGRESS_MADE,
        advice=advice,
        evidence=evidence(events),
    )


def _barrier(barrier: list[Event], reached: list[Event]) -> Finding:
    late = {int(r) for e in barrier for r in e.fields["ranks"].split(", ") if len(r) < 7}
    culprits = tuple(sorted(filter(is_rank, late)))
    waiting = {int(e.fields["waiter"]) for e in reached} | {e.rank for e in barrier if e.rank is not None}
    victims = tuple(sorted(waiting - set(culprits)))
    site = first_site([*barrier, *reached])
    limit_s = next((int(e.fields["limit"]) / 1e3 for e in barrier), None)
    if culprits:
        message = f"{rank_list(culprits)} did not reach monitored_barrier in {rough_time(limit_s or 0)}{at(site)}"
        advice = f"read the log of {rank_list(culprits)}, and take {verb(culprits, 'its', 'their')} stack the next time before the barrier times out"
    else:
        message = f"{rank_list(victims)} reached monitored_barrier{at(site)} and then lost rank 0, which knows the missing rank"
        advice = (
            "read rank 0's log: it names the ranks that failed to pass monitoredBarrier; if it has none, rank 0 ended"
        )
    certainty = Certainty.PROVED if culprits else Certainty.SUSPECTED
    return _late_rank(
        culprits,
        victims,
        barrier or reached,
        message,
        advice,
        site=site,
        collective=CollectiveRef("monitored_barrier", ""),
        certainty=certainty,
    )


def _horovod(events: list[Event]) -> Finding:
    """Return the finding on ranks that Horovod's stall check names as missing."""
    names = [set(map(int, re.findall(r"\d{1,6}", e.fields.get(key, "")))) for e in events for key in ("ranks", "ready")]
    missing = set.intersection(*names[::2])  # those that every stalled tensor waits for
    culprits = tuple(sorted(filter(is_rank, missing or set.union(*names[::2]))))
    victims = tuple(sorted(r for r in set.union(*names[1::2]) - set(culprits) if is_rank(r)))
    message = f"{rank_list(culprits)} did not submit what Horovod's other ranks wait for"
    advice = (
        f"see what {rank_list(culprits)} did meanwhile (`py-spy dump --pid …`): a longer branch, an exception that was caught, "
        "or a collective that only the others call"
    )
    return _late_rank(culprits, victims, events, message, advice)


def _unique_id(found: Collected, events: list[Event]) -> Finding:
    """Return the finding on a missing communicator id: a group's first rank creates it in its first collective, the others wait for it."""
    awaited = Counter(int(e.fields["awaited"][:6]) for e in events).most_common(1)[0][0]
    waiters = tuple(sorted({e.rank if e.rank is not None else int(e.fields["waiter"][:6]) for e in events}))
    reason = shortened(events[0].fields.get("reason", ""), 100)
    site = first_site(events)
    lost = bool(LOST.search(reason))
    culprits = () if lost or awaited in waiters else (awaited,)
    if lost:
        message = f"{rank_list(waiters)} lost the store while a communicator was made{at(site)} ({reason}): the process that serves it, rank 0 or torchrun's, ended first"
        advice = "read the log of rank 0 and of its node's launcher: its failure came before these"
    else:
        message = f"rank {awaited} did not reach the first collective of a group, where {rank_list(waiters)} {verb(waiters, 'waits', 'wait')} for it{at(site)} ({reason})"
        advice = (
            f"see what rank {awaited} did meanwhile: long work before the first collective (data, a download, a model), an exception, "
            "or a collective that only the others call; give long work a longer timeout in init_process_group"
        )
    return _late_rank(culprits, waiters, events, message, advice, site=site)
