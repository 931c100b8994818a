"""The diagnosis over time: rules are pure on one snapshot; here is what makes a finding of what they say.

A proof must be the same in two snapshots between which nothing moved. A suspicion about speed must hold for some
seconds. One incident is one finding: what follows from it is not said again. A finding that goes away keeps its record.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from distdiag.diagnosis.model.findings import Finding, Severity, State, at_least
from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.diagnosis.rules import batches, collectives, endings, gpus, parameters, resources, silent, speed, stalls
from distdiag.diagnosis.text.phrases import op_text, seconds
from distdiag.diagnosis.waits.graph import WaitGraph, build

SETTLE_S = 0.4  # after the first death, before its cause is named: another rank's end may come before it in time
ECHO_S = 2.0  # the same, while all that is seen are echoes
SPEED_PERIOD_S = 1.0
HOLD = {
    "straggler": 3,
    "input_bound": 3,
    "comm_bound": 3,
    "memory": 2,
    "unused_parameters/flag_not_needed": 2,
    "uneven_batches/size": 2,
    "replica_drift": 1,
}  # fmt: skip  evaluations in a row before it is said
RELEASE = {"stall": 2, "deadlock": 2, "mismatch": 2, "straggler": 20, "memory": 60, "gpu": 10, "uneven_batches": 3}
STICKY = {"rank_lost", "timeout", "unused_parameters", "nonfinite", "duplicate_data", "replica_drift", "recorder"}
_FATAL = ("deadlock", "mismatch", "rank_lost", "timeout")


@dataclass(slots=True)
class Record:
    """One finding and its life."""

    finding: Finding
    seen: int = 1
    absent: int = 0
    said: bool = False


@dataclass
class Diagnosis:
    """Findings of one job, snapshot after snapshot.

    Args:
        source: Text of a source file by path, or None where it cannot be read.
    """

    source: Callable[[str], str | None]
    records: dict[str, Record] = field(default_factory=dict)
    state: State = State.WAITING
    state_text: str = ""
    graph: WaitGraph | None = None
    failures: dict[str, int] = field(default_factory=dict)  # of our own rules: text -> how often
    _mark: tuple = ()
    _lock_mark: tuple = ()
    _speed_at: float = -1.0
    _first_end_s: float | None = None
    _late: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
    _episodes: dict[int, float] = field(default_factory=dict)
    recovered: dict[int, float] = field(default_factory=dict)  # rank -> longest it kept others waiting and let go

    def update(self, s: Snapshot, final: bool = False) -> list[Finding]:
        """Take a snapshot; returns the findings that are new or changed (also those that went away)."""
        graph = self.graph = build(s)
        changed: list[Finding] = []
        now: dict[str, Finding] = {}
        self._follow_waits(s, graph)

        ended = self._try(self._endings, s, final)
        lost = tuple(q for f in ended if f.kind == "rank_lost" for q in f.culprits)
        blocking = self._try(self._proofs, s, graph, lost, ended)
        evaluated: set[str] = set(_FATAL) | {"stall"}
        for f in (*ended, *blocking):
            now[f.key] = f
        fatal = [r.finding for r in self.records.values() if _fatal(r.finding) and r.finding.cleared_s is None]
        if not fatal and not any(_fatal(f) for f in now.values()):
            stalled = [f for f in self.open() if f.kind == "stall"]
            # as it was seen: what ranks do that are ended now says nothing new
            for f in stalled if stalled and endings.ends(s) else self._try(stalls.rules, s, graph):
                now[f.key] = f
        fresh_end = any(f.key not in self.records for f in ended)  # it may have its cause among what is looked at now
        if s.t_s - self._speed_at >= SPEED_PERIOD_S or final or fresh_end:
            self._speed_at = s.t_s
            evaluated |= {"unused_parameters", "uneven_batches", "duplicate_data", "replica_drift", "nonfinite", "memory",
                          "gpu", "straggler", "input_bound", "comm_bound"}  # fmt: skip
            slow: list[Finding] = [
                *self._try(parameters.rules, s),
                *self._try(batches.rules, s, self.source),
                *self._try(resources.rules, s),
                *self._try(gpus.rules, s),
                *self._try(silent.rules, s),
            ]
            if not fatal and not any(
                r.finding.kind == "stall" and not r.finding.cleared_s for r in self.records.values()
            ):
                slow += self._try(speed.rules, s)
            else:
                evaluated -= {"straggler", "input_bound", "comm_bound"}
            for f in slow:
                now[f.key] = f
        now = self._one_incident(now)
        for key, f in now.items():
            done = self._take(s, key, f)
            if done is not None:
                changed.append(done)
        changed += self._release(s, now, evaluated, final)
        self._judge_state(s, graph, final)
        return changed

    def _try(self, rule: Callable[..., list[Finding]], *args: object) -> list[Finding]:
        """What a rule says; its failure is ours, is counted, and costs only what that rule would have said."""
        try:
            return rule(*args)
        except Exception as e:
            if "PYTEST_CURRENT_TEST" in os.environ:
                raise
            last = traceback.extract_tb(e.__traceback__)[-1]
            text = f"{type(e).__name__}: {e} at {os.path.basename(last.filename)}:{last.lineno}"
            self.failures[text] = self.failures.get(text, 0) + 1
            return []

    # -- deadlocks and mismatches -------------------------------------------------------------------

    def _proofs(self, s: Snapshot, graph: WaitGraph, lost: tuple[int, ...], ended: list[Finding]) -> list[Finding]:
        standing = [r.finding for r in self.records.values() if r.said and _blocked_kind(r.finding)]
        if standing and endings.ends(s):
            return standing  # as it was proved; that its ranks end now says nothing new
        mark = tuple(
            (q, b.group, b.seq, b.nth, b.peer, b.entered_s, s.ranks[q].life)
            for q in sorted(graph.stuck)
            if (b := s.ranks[q].blocked) is not None
        )
        locks = stalls.lock_cycles(s, graph)
        lock_mark = tuple((f.victims, f.collective) for f in locks)
        locked_still = bool(locks) and lock_mark == self._lock_mark
        self._lock_mark = lock_mark
        if locked_still:
            return locks
        stable = bool(mark) and mark == self._mark
        self._mark = mark
        died_in_it = any(w.conflict and w.died for w in graph.waits)
        if not (stable or died_in_it):
            # what was proved and still stands is kept by its own record
            return [
                r.finding
                for r in self.records.values()
                if _blocked_kind(r.finding) and mark and not r.finding.cleared_s
            ]
        exhausted = batches.exhausted_ranks(s)
        found = collectives.rules(s, graph, exhausted=exhausted, lost=lost, source=self.source)
        if not stable:
            found = [f for f in found if f.kind == "mismatch"]
        if any(f.kind in _FATAL for f in ended):
            found = [f for f in found if f.kind == "mismatch"]
        elif endings.ends(s):  # somebody died, and its cause is not settled yet
            found = [f for f in found if f.cause not in ("rank_exited", "rank_finished")]
        found = [_since(s, f) for f in found]
        if any(f.kind == "deadlock" for f in found):
            seen = batches.seen_uneven(s)
            if seen is not None:
                found.append(seen)
        return found

    def _endings(self, s: Snapshot, final: bool) -> list[Finding]:
        kinds = endings.ends(s)
        if not kinds:
            self._first_end_s = None
            return []
        proved = [r.finding for r in self.records.values() if r.said and _blocked_kind(r.finding)]
        if proved:
            return []  # whatever ends now, ends because of it
        if self._first_end_s is None:
            self._first_end_s = s.t_s
        waited = s.t_s - self._first_end_s
        only_echo = all(k in ("echo", "timeout", "outside") for k in kinds.values())
        gone = all(r.life in (Life.CRASHED, Life.KILLED, Life.FINISHED) for r in s.ranks.values())
        if waited < (ECHO_S if only_echo else SETTLE_S) and not (final or (gone and waited > 0)):
            return []
        late = self._late
        recent = (late[1], late[2]) if late is not None and self._first_end_s - late[0] < 5.0 else None
        found = endings.rules(s, recent)
        if any(f.kind in ("mismatch", "deadlock") for f in found):
            # a rank that ran out of batches goes on to what comes after the loop: that is the cause of the rest
            uneven = batches.seen_uneven(s)
            if uneven is not None and set(uneven.culprits) & {q for f in found for q in (*f.culprits, *f.victims)}:
                return [uneven]
        return found

    def _follow_waits(self, s: Snapshot, graph: WaitGraph) -> None:
        """Whom the others wait for, remembered past its end; and how long a rank usually keeps them waiting."""
        if graph.sinks:
            waiting = tuple(sorted(graph.victims_of(graph.sinks)))
            if waiting:
                self._late = (s.t_s, graph.sinks, waiting)
        for q in graph.sinks:
            since = [
                b.entered_s
                for v in graph.victims_of(q)
                if (b := s.ranks[v].blocked) is not None and b.entered_s is not None
            ]
            if since:
                self._episodes[q] = max(self._episodes.get(q, 0.0), s.t_s - min(since))
        for q in list(self._episodes):
            if q not in graph.sinks:
                if s.ranks.get(q) is not None and s.ranks[q].life == Life.RUNNING:
                    self.recovered[q] = max(self.recovered.get(q, 0.0), self._episodes[q])
                del self._episodes[q]

    # -- records ------------------------------------------------------------------------------------

    def _one_incident(self, now: dict[str, Finding]) -> dict[str, Finding]:
        """What follows from another finding of this moment, or of before, is not said again."""
        before = [r.finding for r in self.records.values() if r.finding.cleared_s is None and r.said]
        everything = [*now.values(), *before]
        explained_by_parameters = any(
            f.kind == "unused_parameters" and at_least(f.severity, Severity.ERROR) for f in everything
        )
        out = {}
        for key, f in now.items():
            if explained_by_parameters and f.kind in ("rank_lost", "deadlock", "timeout", "stall", "mismatch"):
                continue
            if (
                f.kind == "rank_lost"
                and key not in self.records
                and any(
                    g.kind in ("mismatch", "timeout") and set(f.culprits) <= {*g.culprits, *g.victims}
                    for g in everything
                )
            ):
                continue
            if f.kind == "stall" and any(_fatal(g) for g in everything):
                continue
            if (
                f.kind == "deadlock"
                and f.cause in ("rank_exited", "rank_finished")
                and key not in self.records
                and any(g.kind in ("rank_lost", "mismatch", "timeout") for g in everything)
            ):
                continue
            out[key] = f
        return out

    def _take(self, s: Snapshot, key: str, f: Finding) -> Finding | None:
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = Record(f)
        else:
            if record.finding.cleared_s is not None:
                record.seen = 0
            record.seen += 1
            record.absent = 0
        held = HOLD.get(f.kind, HOLD.get(f"{f.kind}/{f.cause}", 1))
        first = record.finding.first_seen_s if record.said else f.first_seen_s
        detected = record.finding.detected_s if record.said else s.t_s
        fresh = msgspec.structs.replace(
            f,
            first_seen_s=first if first is not None else (record.finding.first_seen_s or s.t_s),
            detected_s=detected,
            cleared_s=None,
            evidence=f.evidence or record.finding.evidence,
        )
        changed = not record.said or _differs(fresh, record.finding) or record.finding.cleared_s is not None
        record.finding = fresh
        if record.seen < held:
            return None
        record.said = True
        return fresh if changed else None

    def _release(self, s: Snapshot, now: dict[str, Finding], evaluated: set[str], final: bool) -> list[Finding]:
        changed = []
        for key, record in list(self.records.items()):
            f = record.finding
            if key in now or f.cleared_s is not None or f.kind not in evaluated:
                continue
            record.absent += 1
            if not record.said:
                del self.records[key]
                continue
            superseded = f.kind == "stall" and any(_fatal(g) for g in now.values())
            if superseded:
                record.finding = msgspec.structs.replace(f, severity=Severity.INFO, cleared_s=s.t_s)
                changed.append(record.finding)
                continue
            went_on = f.kind == "stall" and all(r.life == Life.FINISHED and not r.exit_code for r in s.ranks.values())
            if not went_on and (f.kind in STICKY or final or self._all_gone(s)):
                continue
            if went_on or record.absent >= RELEASE.get(f.kind, 5):
                record.finding = msgspec.structs.replace(f, cleared_s=s.t_s)
                changed.append(record.finding)
        return changed

    @staticmethod
    def _all_gone(s: Snapshot) -> bool:
        return all(r.life in (Life.CRASHED, Life.KILLED, Life.FINISHED) for r in s.ranks.values())

    @property
    def findings(self) -> list[Finding]:
        """Everything that was said, open and cleared."""
        return [r.finding for r in self.records.values() if r.said]

    def open(self, severity: str = Severity.INFO) -> list[Finding]:
        return [f for f in self.findings if f.cleared_s is None and at_least(f.severity, severity)]

    def suspects(self) -> bool:
        """Whether something of severity warning or above has been seen, but not often enough yet to be said."""
        return any(not r.said and at_least(r.finding.severity, Severity.WARNING) for r in self.records.values())

    # -- the job's state --------------------------------------------------------------------------------

    def _judge_state(self, s: Snapshot, graph: WaitGraph, final: bool) -> None:
        lives = [r.life for r in s.ranks.values()]
        gone = bool(lives) and all(x in (Life.FINISHED, Life.CRASHED, Life.KILLED) for x in lives)
        worst = self.open(Severity.ERROR)
        expected = s.expected or s.world_size
        if gone and (final or len(lives) >= expected):
            bad = [r for r in s.ranks.values() if r.life != Life.FINISHED]
            steps = max((r.step for r in s.ranks.values()), default=0)
            if bad:
                first = min(bad, key=lambda r: r.ended_s if r.ended_s is not None else s.t_s)
                how = first.exception or (f"signal {first.signal}" if first.signal else "an unknown end")
                self.state, self.state_text = (
                    State.FAILED,
                    f"rank {first.rank}: {how[:120]}; {len(bad)} of {len(lives)} failed",
                )
            elif any(f.kind in _FATAL for f in worst):
                self.state, self.state_text = State.FAILED, worst[0].message
            else:
                self.state, self.state_text = State.ENDED, f"all ranks ended normally after {steps:,} steps"
        elif any(_blocked_kind(f) for f in worst):
            f = next(f for f in worst if _blocked_kind(f))
            self.state, self.state_text = State.DEADLOCKED, f.message
        elif any(f.kind == "stall" for f in self.open()):
            f = next(f for f in self.open() if f.kind == "stall")
            self.state, self.state_text = State.STALLED, f.message
        elif any(f.kind in ("rank_lost", "timeout") for f in worst):
            f = next(f for f in worst if f.kind in ("rank_lost", "timeout"))
            self.state, self.state_text = State.DEGRADED, f.message
        elif len(lives) < expected or (
            all(x == Life.STARTING for x in lives) and not any(r.step for r in s.ranks.values())
        ):
            missing = sorted(set(range(s.world_size)) - set(s.ranks)) if expected == s.world_size else []
            self.state = State.WAITING
            reported = f"{len(lives)} of {expected} ranks have reported"
            self.state_text = reported + (f"; missing {', '.join(map(str, missing[:8]))}" if missing else "")
        elif worst:
            self.state, self.state_text = State.DEGRADED, worst[0].message
        else:
            self.state = State.RUNNING
            waiting = [q for q in graph.of_rank if s.ranks[q].blocked is not None]
            text = ""
            if waiting and len(waiting) < len(lives):
                b = s.ranks[waiting[0]].blocked
                if b is not None and b.entered_s is not None and s.t_s - b.entered_s > 2.0:
                    text = f"{len(waiting)} of {len(lives)} ranks wait in {op_text(b)} since {seconds(s.t_s - b.entered_s)}"
            self.state_text = text


def _since(s: Snapshot, f: Finding) -> Finding:
    """A deadlock is complete when the last of its members has entered what it waits in."""
    members = (*f.culprits, *f.victims)
    times = [b.entered_s for q in members if q in s.ranks and (b := s.ranks[q].blocked) and b.entered_s is not None]
    return msgspec.structs.replace(f, first_seen_s=max(times)) if times and f.first_seen_s is None else f


def _blocked_kind(f: Finding) -> bool:
    return f.kind in ("deadlock", "mismatch") and f.cleared_s is None and f.cost != silent.COST


def _fatal(f: Finding) -> bool:
    """It ends the job, or stops it for good."""
    return f.kind in _FATAL and f.cost != silent.COST


def _differs(a: Finding, b: Finding) -> bool:
    """Whether readers should see the new text: not for a changing number in it."""
    return (a.severity, a.certainty, a.culprits, a.victims, a.names, a.where, a.collective, a.evidence) != (
        b.severity, b.certainty, b.culprits, b.victims, b.names, b.where, b.collective, b.evidence,
    )  # fmt: skip
