"""The finding of ranks that gloo aborted because their calls have different sizes."""

from __future__ import annotations

import signal

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import conditions
from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import Finding, rank_list
from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.phrases import at, where, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.terms.operations import op_name
from distdiag.terms.units import size_text

ABORT = Template(kinds.MISMATCH, "shape",
    "{head}ranks {what}: {places}{why}", "the job ended", "{do}",
    proved=True)  # fmt: skip
SHOWN = 8  # tensors
_STATES = {Life.KILLED: "killed", Life.CRASHED: "crashed"}  # while it waits: what it does
SPLITS = "compare what each rank sends with what its peer expects: split sizes and output shapes must agree"
MESSAGES = "compare the messages of the ranks with their receives: in number, order, tag and size"
ONE_SHAPE = "let both ends compute the shape of that message in one function, or send the shape first"
COMPARE = "compare the two call sites: every rank must make the same collective calls in the same order"
ORDER = "find where the ranks' calls begin to differ: every rank must make the same collective calls in the same order"


def finding(snapshot: Snapshot, verdict: Verdict) -> Finding:
    """Return who called what where, whom gloo aborted, and why the culprit made another call."""
    states, odd, rest = snapshot.ranks, verdict.culprits, verdict.victims
    dead = sorted({*odd, *rest})
    killed = [rank for rank in dead if states[rank].life == Life.KILLED and states[rank].signal == signal.SIGABRT]
    what, why, advice = _text(snapshot, verdict, dead)
    if killed and verdict.reason is Reason.JOIN:
        what = f"called one collective from different lines: from there on their calls do not fit, and gloo aborted {rank_list(killed)}"
    elif killed:
        what += f" of different sizes, and gloo aborted {rank_list(killed)}"
    else:
        what = (
            "called one collective from different lines, and DDP took what it received there for other ranks' modules"
        )
    sites = {r: call.site for r, call in verdict.wait.calls.items() if call.site is not None}
    head = evidence.head_text(verdict) if len(set(sites.values())) > 1 else ""
    lines = {sites[min(side)].key: sites[min(side)] for side in verdict.wait.sides}
    ranks = {key: [r for r in dead if r in sites and sites[r].key == key] for key in lines}
    each = (f"{rank_list(ranks[key])}{_size(verdict, ranks[key])}{at(site)}" for key, site in lines.items())
    return ABORT(
        culprits=odd, victims=rest, where=(where(states[r], _STATES.get(Life(states[r].life)), sites.get(r)) for r in odd or dead),
        waiting=wheres(snapshot, rest, None, sites) if odd else (), step=states[killed[0]].step if killed else None,
        first_seen_s=min((t for r in dead if (t := states[r].ended_s) is not None), default=snapshot.t_s),
        head=head, what=what, places=", ".join(each), why=why, do=advice, proved=_members(snapshot, verdict) <= set(dead),
    )  # fmt: skip


def _members(snapshot: Snapshot, verdict: Verdict) -> set[int]:
    """Return the ranks whose calls must be known for a proof: the members of the group, or both ends of a message."""
    calls = verdict.wait.calls
    if len(calls) == 2 and all(call.p2p and call.peer in calls for call in calls.values()):
        return set(calls)
    group = snapshot.groups.get(verdict.wait.group)
    return set(group.ranks if group is not None else snapshot.ranks)


def _size(verdict: Verdict, ranks: list[int]) -> str:
    """Return ` sends 34.0 KiB`, of one rank's message."""
    call = verdict.wait.calls[ranks[0]]
    if len(ranks) > 1 or not call.p2p or not call.bytes:
        return ""
    return f" {'sends' if 'send' in call.op else 'receives into'} {size_text(call.bytes)}"


def _text(snapshot: Snapshot, verdict: Verdict, dead: list[int]) -> tuple[str, str, str]:
    """Return (what the ranks did, why it did not fit, advice)."""
    calls = {rank: call for rank in dead if (call := verdict.wait.calls[rank]).op or call.shape}
    if calls and all(call.p2p for call in calls.values()):
        met = ((q, conditions.met_in(verdict.case, q, c.peer)) for q, c in calls.items() if c.peer in calls)
        paired = any(site is not None and site.key == verdict.case.here[q] for q, site in met)
        return "exchanged messages", evidence.reason_text(verdict), ONE_SHAPE if paired else MESSAGES
    what = "called one collective with tensors"
    if len({call.site for call in verdict.wait.calls.values()}) > 1:
        return what, evidence.reason_text(verdict), evidence.advice(verdict) or COMPARE
    shapes = {rank: "x".join(map(str, call.shape)) for rank, call in calls.items() if call.shape is not None}
    if shapes and len({*shapes.values()}) == 1 and not any("all_to_all" in op_name(call.op) for call in calls.values()):
        return "called collectives with tensors", evidence.reason_text(verdict), evidence.advice(verdict) or ORDER
    text = f"; first tensor: {', '.join(f'rank {r} {shapes[r]}' for r in sorted(shapes)[:SHOWN])}" if shapes else ""
    return what, text + evidence.reason_text(verdict), SPLITS
