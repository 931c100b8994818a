"""The state of the job in one word, what it means, and the next command to type."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.diagnosis.model.findings import State, at_least, rank_list
from distdiag.store.liveness import Monitor
from distdiag.store.opening import ReadStatus
from distdiag.store.rundir import CREATE
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw.text import clean, counted, integer, quote, seconds


@dataclass(frozen=True)
class JobState:
    """How the first line of every screen names the run."""

    word: str  # in capitals: RUNNING, DEADLOCK, …
    glyph: str  # one cell before it
    style: str  # its meaning for the eye
    text: str = ""  # what follows the word
    do: str = ""  # the next command to type, or what to look at; empty where nothing is to be done
    stuck: bool = False  # the job makes no progress: tables show where ranks wait instead of how long they compute


_PROBLEMS = {
    ReadStatus.MISSING: ("WAITING", "○", "muted"),
    ReadStatus.LOCKED: ("LOCKED", "–", "warning"),
    ReadStatus.DELETED: ("DELETED", "×", "error"),
    ReadStatus.CORRUPT: ("DAMAGED", "×", "error"),
    ReadStatus.OLDER: ("OLDER VERSION", "–", "warning"),
    ReadStatus.NEWER: ("NEWER VERSION", "–", "warning"),
    ReadStatus.ELSEWHERE: ("ELSEWHERE", "○", "muted"),
    ReadStatus.UNREADABLE: ("UNREADABLE", "×", "error"),
}


def job_state(snap: Snapshot) -> JobState:
    """Return the state shown for a snapshot.

    Reading problems come first, then replay, then a monitor that is gone: data older than the user expects is marked
    as old before anything else.
    """
    if snap.problem is not None:
        word, glyph, style = _PROBLEMS[snap.problem.status]
        return JobState(word, glyph, style, clean(snap.problem.message), clean(snap.problem.hint))
    job = _from_frame(snap)
    if snap.at_s is not None:
        return _replay(snap, job)
    if snap.killed:
        return JobState(*_WORDS[State.FAILED], snap.killed, f"distdiag diagnose {quote(snap.run)}", job.stuck)
    if snap.monitor is Monitor.GONE and job.word not in ("ENDED", "FAILED"):
        age = snap.heartbeat_age_s
        since = f"nothing written for {seconds(age)}" if age is not None else "it never wrote"
        return JobState(
            "MONITOR GONE", "×", "warning", f"{since}; the job may still run (it was {job.word})",
            f"distdiag dump {quote(snap.run)}", job.stuck,
        )  # fmt: skip
    return job


def _replay(snap: Snapshot, job: JobState) -> JobState:
    """Return the state at the moment that is shown, and next to it what the job does now: an old screen must not reassure."""
    then = f"{job.word.lower()} at step {integer(snap.summary.step, grouped=True)}"
    later = f", {counted(snap.later_findings, 'newer finding')}" if snap.later_findings else ""
    last = integer(snap.newest_step, grouped=True)
    if snap.monitor is not Monitor.LIVE:
        return JobState("REPLAY", "‖", "accent", f"{then} of {last}{later}", "", job.stuck)
    word, *_ = _WORDS.get(snap.meta.get("state") or "", ("RUNNING",))
    same = snap.newest_step == snap.summary.step
    now = "the newest" if same and word == job.word else f"now {word} at {last}"
    return JobState("VIEW PAUSED", "‖", "accent", f"{then}; {now}{later}", "", job.stuck)


_WORDS: dict[str, tuple[str, str, str]] = {
    State.WAITING: ("WAITING", "○", "muted"),
    State.RUNNING: ("RUNNING", "●", "accent"),
    State.STALLED: ("STALLED", "▲", "warning"),
    State.DEADLOCKED: ("DEADLOCK", "█", "error"),
    State.DEGRADED: ("DEGRADED", "▲", "warning"),
    State.ENDED: ("ENDED", "■", "bold"),
    State.FAILED: ("FAILED", "■", "error"),
}


def _from_frame(snap: Snapshot) -> JobState:
    frame, s, run = snap.frame, snap.summary, quote(snap.run)
    state = frame.state if frame is not None else (snap.meta.get("state") or State.WAITING)
    text = clean(frame.state_text) if frame is not None else ""
    ranks = f"{counted(s.n, 'rank')} / {counted(len(s.layout.nodes), 'node')}" if s.n else ""
    if state == State.WAITING:
        world = snap.world_size
        reported = f"{s.reported:,} of {world:,} ranks have reported" if world else "no rank has reported yet"
        if s.missing and world and s.reported:
            reported += f"; missing {rank_list(s.missing).split(' ', 1)[1]}"
        start = "did the launcher start every rank? do they all have `DISTDIAG=1`, and the same run directory?"
        do = CREATE if not world else start if s.missing or s.reported < world else ""
        begun = ", no step yet" if s.reported == world else ""  # for what it waits then
        return JobState(*_WORDS[state], (text or reported) + begun, do)
    if state == State.RUNNING:
        return JobState(*_WORDS[state], text or ranks)
    if state in (State.STALLED, State.DEADLOCKED):
        return JobState(*_WORDS[state], text or _waiting(snap), f"distdiag dump {run}", True)
    if state == State.DEGRADED:
        if s.lost:
            return JobState("LOST", "×", "error", text or f"{rank_list(s.lost)} gone", f"distdiag diagnose {run}")
        return JobState(*_WORDS[state], text or ranks, f"distdiag diagnose {run}")
    if state == State.ENDED:
        steps = f"after {counted(s.step, 'step')}" if s.step is not None else "no step was recorded"
        return JobState(*_WORDS[state], text or steps, f"distdiag report {run}")
    if state == State.FAILED:
        lost = f"{rank_list(s.lost)} failed" if s.lost else ""
        return JobState(*_WORDS[state], text or lost, f"distdiag diagnose {run}")
    return JobState(clean(str(state)).upper() or "UNKNOWN", "–", "muted", text)


def _waiting(snap: Snapshot) -> str:
    s = snap.summary
    if not s.waiting:
        return "no progress"
    (op, _, seq, _), n = s.waiting[0]
    number = f" #{seq}" if seq is not None else ""
    return f"{n:,} of {s.n:,} ranks wait in {clean(op)}{number} for {seconds(s.waiting_age_s)}"


def closing_lines(snap: Snapshot, interactive: bool = True) -> list[str]:
    """Return the closing lines of a finished run: the number of findings and the next commands."""
    run = quote(snap.run)
    errors = [f for f in snap.findings if at_least(f.severity, "error")]
    warnings = [f for f in snap.findings if f.severity == "warning"]
    parts = []
    for found, word in ((errors, "error"), (warnings, "warning")):
        cleared = sum(f.cleared_s is not None for f in found)
        if found:
            parts.append(counted(len(found), word) + (f" ({cleared} cleared)" if cleared else ""))
    n = len(errors) + len(warnings)
    press = "    press 5" if interactive else ""
    head = f"{counted(n, 'finding')}: {', '.join(parts)}{press}" if n else "no findings"
    return [head, f"  report   distdiag report {run}", f"  verdict  distdiag diagnose {run}"]
