"""Text for ranks that wait for one that ended or is stopped."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.incident import collective_text, implicit_text, verb
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import compatible


def message(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return which rank ended, how, and which ranks wait for it where; if it ended normally, how it can have left the loop."""
    wait, call, culprits = verdict.wait, verdict.call, verdict.culprits
    ended, stuck = sorted(verdict.incident.members), verdict.incident.victims
    what = collective_text(snapshot, wait, call)
    if call is not None and wait.ranks:
        what += implicit_text(snapshot.ranks.get(min(wait.ranks)), call)
    ending = f"{rank_list(ended)} {_ending([snapshot.ranks[q] for q in ended])}"
    if verdict.reason is Reason.HISTORY:
        return (
            f"{rank_list(culprits)} waits in {what}{at(call.site if call else None)} for ranks that have ended: it has "
            f"made collective calls that they never made; {ending}"
        )
    if verdict.reason is Reason.EXHAUSTED:
        ending = f"{rank_list(culprits)} ran out of batches and {verb(culprits, 'has', 'have')} ended"
    waiting = f"{rank_list(stuck)} {verb(stuck, 'waits', 'wait')} for {verb(ended, 'it', 'them')}"
    if wait.p2p:
        return f"{ending}; {waiting} in {what}"
    # how a rank left the loop that the others are in is only a question for one that ended normally
    left = evidence.reason_text(verdict) if verdict.reason is Reason.NONE and verdict.cause == "rank_finished" else ""
    return f"{ending} and {verb(ended, 'has', 'have')} not entered {what}; {waiting}{left}"


def _ending(states: list[RankState]) -> str:
    first = states[0]
    one = len(states) == 1
    match first.life:
        case Life.STOPPED:
            return f"{'is' if one else 'are'} stopped (SIGSTOP)"
        case Life.KILLED:
            return f"{'was' if one else 'were'} killed" + (f" by signal {first.signal}" if first.signal else "")
        case Life.CRASHED:
            return "ended with an error" + (f" ({first.exception})" if one and first.exception else "")
    if first.exit_code:
        return f"exited with code {first.exit_code}"
    return "ended normally"


def advice(verdict: Verdict) -> str:
    """Return what to do."""
    culprits, call = verdict.culprits, verdict.call
    if advised := evidence.advice(verdict):
        return advised
    match verdict.cause:
        case "rank_stopped":
            return f"resume it with `kill -CONT` on {rank_list(culprits)}'s process, or end the job"
        case "rank_finished":
            return (
                f"find why {rank_list(culprits)} left the loop before the others: fewer batches, an early return or "
                "break, or an exit (sys.exit, os._exit in a thread) on some ranks only"
            )
        case "missing_rank":
            op = compatible.op_name(call.op) if call is not None else "the collective"
            return f"look for {op} (or a forward of the wrapped model) that only {rank_list(culprits)} runs"
    return f"see the error of {rank_list(culprits)}, then restart the job: the others cannot continue without it"
