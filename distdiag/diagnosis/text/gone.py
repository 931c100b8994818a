"""Text for ranks that wait for one that ended or is stopped."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.incident import collective_text, implicit_text
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.waits import compatible

_HISTORY = (
    "{culprits} waits in {what}{site} for ranks that have ended: it has made collective calls that they never made; "
)
_ADVICE = {
    "rank_stopped": "resume it with `kill -CONT` on {culprits}'s process, or end the job",
    "rank_finished": "let all ranks leave the loop in the same step: {culprits} left it before the others (fewer batches, "
    "an early return or break, or an exit on some ranks only); reduce the condition over the ranks (all_reduce a flag), "
    "and leave where it holds on any",
    "missing_rank": "look for {op} (or a forward of the wrapped model) that only {culprits} runs",
    "rank_exited": "see the error of {culprits}, then restart the job: the others cannot continue without it",
}


def message(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return which rank ended, how, and which ranks wait for it where; if it ended normally, how it can have left the loop."""
    wait, call = verdict.wait, verdict.call
    what = collective_text(snapshot, wait, call)
    if call is not None and wait.ranks:
        what += implicit_text(snapshot.ranks.get(min(wait.ranks)), call)
    ended, stuck = sorted(verdict.incident.members), verdict.incident.victims
    text, left = "{ended} " + _ending([snapshot.ranks[q] for q in ended]), ""
    waiting = "; {stuck} {stuck:waits|wait} for {ended:it|them}"
    if verdict.reason is Reason.HISTORY:
        text = _HISTORY + text
    else:
        if verdict.reason is Reason.EXHAUSTED:
            text = "{culprits} ran out of batches and {culprits:has|have} ended"
        text += waiting + " in {what}" if wait.p2p else " and {ended:has|have} not entered {what}" + waiting
        # how a rank left the loop that the others are in is only a question for one that ended normally
        if verdict.reason is Reason.NONE and verdict.cause == "rank_finished":
            left = evidence.reason_text(verdict)
    first, site = snapshot.ranks[ended[0]], call.site if call else None
    facts = {"signal": first.signal, "exception": first.exception, "code": first.exit_code, "what": what, "site": site}
    return filled(text, culprits=verdict.culprits, ended=ended, stuck=stuck, **facts) + left


def _ending(states: list[RankState]) -> str:
    """Return a template of how ranks ended, by the first."""
    first = states[0]
    match first.life:
        case Life.STOPPED:
            return "{ended:is|are} stopped (SIGSTOP)"
        case Life.KILLED:
            return "{ended:was|were} killed" + (" by signal {signal}" if first.signal else "")
        case Life.CRASHED:
            return "ended with an error" + (" ({exception})" if len(states) == 1 and first.exception else "")
    return "exited with code {code}" if first.exit_code else "ended normally"


def advice(verdict: Verdict) -> str:
    op = compatible.op_name(verdict.call.op) if verdict.call is not None else "the collective"
    return evidence.advice(verdict) or filled(_ADVICE[verdict.cause], culprits=verdict.culprits, op=op)
