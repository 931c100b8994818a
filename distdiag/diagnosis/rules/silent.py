"""Collectives that completed although the ranks' calls did not fit together: values were mixed, and nobody was told."""

from __future__ import annotations

from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Call, Met, Snapshot
from distdiag.diagnosis.text.phrases import at, where

COST = "the result is wrong on every rank, without an error"


def rules(s: Snapshot) -> list[Finding]:
    """One finding for each cause, about its first occurrence."""
    seen: dict[str, Met] = {}
    for m in s.met:
        seen.setdefault(m.cause, m)
    return [_finding(s, m) for m in seen.values() if all(q in s.ranks for q in m.calls)]


def _what(c: Call, cause: str) -> str:
    if cause == "dtype":
        return c.dtype or "?"
    return f"root {c.root}" if cause == "root" else c.op


def _finding(s: Snapshot, m: Met) -> Finding:
    sides: dict[str, list[int]] = {}
    for q, c in sorted(m.calls.items()):
        sides.setdefault(_what(c, m.cause), []).append(q)
    most = max(len(v) for v in sides.values())
    odd = tuple(sorted(q for v in sides.values() if len(v) < most for q in v))
    call = next(iter(m.calls.values()))
    text = "; ".join(f"{rank_list(v)}: {k}{at(m.calls[v[0]].site)}" for k, v in sides.items())
    rest = tuple(q for q in sorted(m.calls) if q not in odd)
    return Finding(
        kind="mismatch",
        cause=m.cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=odd,
        victims=rest,
        collective=CollectiveRef(call.op, m.group, m.seq, call.bytes),
        where=tuple(where(s.ranks[q], "user_code", m.calls[q].site) for q in odd or rest),
        waiting=tuple(where(s.ranks[q], "user_code", m.calls[q].site) for q in rest) if odd else (),
        first_seen_s=call.entered_s,
        message=f"{call.op} #{m.seq} ({m.group}) completed, but the ranks called it with different arguments: {text}",
        cost=COST,
        advice="make dtype, root and operation the same on every rank before the call",
    )
