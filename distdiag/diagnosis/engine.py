"""The diagnosis over time: rules judge one snapshot; the engine turns their results into findings that are reported and cleared.

A finding is reported after enough consecutive evaluations have found it, and cleared after enough have not. One incident is one
finding: what another finding explains is not reported. `kinds` has all policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.history import History, all_ended, asked_to_end
from distdiag.diagnosis.job_state import job_state
from distdiag.diagnosis.model.findings import Abstained, Certainty, Check, Finding, Severity, State, at_least
from distdiag.diagnosis.model.snapshot import DEAD, Life, Snapshot
from distdiag.diagnosis.rules import RULES, Rule
from distdiag.diagnosis.waits import uncounted
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.errors import described, in_own_tests

SLOW_PERIOD_S = 1.0  # seconds between evaluations of the kinds that are not evaluated at every poll
NO_CALLS = "no call of torch.distributed was recorded on any rank"


@dataclass
class Checks:
    """Whether each kind, or a cause that a rule abstained from, could be judged so far, and why not."""

    _known: dict[tuple[str, str | None], Check] = field(default_factory=dict)
    _judged: set[tuple[str, str | None]] = field(default_factory=set)

    def take(self, kind: str, outcomes: Sequence[Finding | Abstained], reported: Sequence[Finding] = ()) -> None:
        """Take what a rule yielded. What it cannot tell of the ranks of open findings of that kind says nothing."""
        mine = [f for f in (*outcomes, *reported) if isinstance(f, Finding) and f.kind == kind]
        known = {q for f in reported if f.kind == kind for q in f.culprits}
        abstained = [x for x in outcomes if isinstance(x, Abstained) and not (x.ranks and known.issuperset(x.ranks))]
        if all(x.cause is not None for x in abstained):
            abstained.insert(0, Abstained("", checked=True))
        causes = (f.cause for f in mine if f.cause is not None and (kind, f.cause) in self._known)
        abstained += (Abstained("", checked=True, cause=cause) for cause in causes)
        for x in abstained:
            key, checked = (kind, x.cause), x.checked or (not x.ranks and any(f.cause == x.cause for f in mine))
            if checked or x.undecided:
                self._judged.add(key)
            elif key in self._judged:  # says more than that the job has ended, or stalls
                continue
            self._known[key] = Check(
                kind=kind, cause=x.cause, checked=checked, reason=x.reason, ranks=x.ranks if x.undecided else ()
            )

    @property
    def all(self) -> tuple[Check, ...]:
        """Every check, in the order of the rules' first evaluation."""
        return tuple(self._known.values())


@dataclass(slots=True)
class Record:
    """One finding and its history.

    Attributes:
        seen: Consecutive evaluations that found it, one a second: one after two seconds counts as two. For a kind judged by steps,
            only evaluations after which the job continued.
        progress: The job's steps and collectives when `seen` last increased.
        absent: The same for evaluations that did not find it.
    """

    finding: Finding
    seen: int = 1
    progress: int = -1
    absent: int = 0
    reported: bool = False


@dataclass
class Diagnosis:
    """Findings of one job, snapshot after snapshot.

    Args:
        source: Text of a source file by path, or None if it cannot be read.
    """

    source: Callable[[str], str | None]
    records: dict[str, Record] = field(default_factory=dict)
    state: State = State.WAITING
    state_text: str = ""
    graph: WaitGraph | None = None
    failures: dict[str, int] = field(default_factory=dict)  # exceptions in our own rules: text -> count
    checks: Checks = field(default_factory=Checks)  # what could be judged, and why not
    rules: tuple[Rule, ...] = RULES
    _history: History = field(default_factory=History)
    _slow_at: float = -1.0
    # the last poll in which all ranks lived, and none was asked to end
    _lived: tuple[Snapshot, WaitGraph] | None = None
    _seconds: int = 1  # from the last evaluation of slow kinds to this one: polls may be further apart than a second

    def update(self, s: Snapshot, final: bool = False) -> list[Finding]:
        """Take a snapshot; return the findings that are new, changed or cleared."""
        s = uncounted.resolved(s)
        facts = self._history.facts(s, self.source, self.open(), final)
        self.graph = facts.graph
        steps_only = s.partial and not final
        evaluated = self._evaluate(facts, [rule for rule in self.rules if rule.kind.every_poll and not steps_only])
        fresh = any(f.key not in self.records for f in facts.found)  # its cause may be among the others
        if s.t_s - self._slow_at >= SLOW_PERIOD_S or final or fresh:
            self._seconds = max(1, round((s.t_s - self._slow_at) / SLOW_PERIOD_S))
            self._slow_at = s.t_s
            evaluated |= self._evaluate(facts, [rule for rule in self.rules if not rule.kind.every_poll])
        now = self._one_incident({f.key: f for f in facts.found})
        changed = [done for key, f in now.items() if (done := self._take(s, key, f)) is not None]
        changed += self._release(s, now, evaluated, final)
        if not (any(r.life in DEAD for r in s.ranks.values()) or asked_to_end(s)):
            self._lived = s, facts.graph
        self.state, self.state_text = job_state(s, facts.graph, self.open(), final, self._lived)
        return changed

    @property
    def recovered(self) -> dict[int, float]:
        """Longest time in seconds that each rank kept others waiting and let them continue."""
        return self._history.recovered

    def _evaluate(self, facts: Facts, rules: Iterable[Rule]) -> set[str]:
        """Run rules; return the kinds that were evaluated. Findings are added to `facts.found`."""
        known = [r.finding for r in self.records.values() if r.finding.cleared_s is None]
        blocked = any(kinds.of(f).suspends or kinds.stops_job(f) for f in known)
        evaluated: set[str] = set()
        for rule in rules:
            name = rule.kind.name
            if blocked and not rule.kind.while_blocked:
                self.checks.take(name, [Abstained("ranks stall, or the job has stopped")])
                continue
            outcomes = self._run(rule, facts)
            facts.found += [x for x in outcomes if isinstance(x, Finding)]
            self.checks.take(name, outcomes, self.open())
            evaluated.add(name)
        return evaluated

    def _run(self, rule: Rule, facts: Facts) -> Sequence[Finding | Abstained]:
        """Run one rule. An exception is counted; only that rule's findings are lost."""
        try:
            outcomes = list(rule.evaluate(facts))
            unseen = rule.kind.of_calls and facts.snapshot.world_size > 1 and not _calls_seen(facts.snapshot)
            found = [x for x in outcomes if isinstance(x, Finding)]
            return found or [Abstained(NO_CALLS)] if unseen else outcomes
        except Exception as e:
            if in_own_tests():
                raise
            text = described(e)
            self.failures[text] = self.failures.get(text, 0) + 1
            return [Abstained(f"the rule failed: {text}")]

    # -- records ------------------------------------------------------------------------------------

    def _one_incident(self, now: dict[str, Finding]) -> dict[str, Finding]:
        """Drop what another finding explains, of this poll or reported before."""
        everything = [*now.values(), *self.open()]

        def explained(key: str, f: Finding) -> bool:
            return any(kinds.explains(other, f, key not in self.records) for other in everything)

        return {key: f for key, f in now.items() if not explained(key, f)}

    def _take(self, s: Snapshot, key: str, f: Finding) -> Finding | None:
        """Add one evaluation that found `f` to its record; return it if readers should see it, or see it again."""
        progress = max((r.step + sum(r.enqueued.values()) for r in s.ranks.values()), default=0)
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = Record(f, progress=progress)
        else:
            again = record.finding.cleared_s is not None and record.absent > 0
            record.seen = 0 if again else record.seen
            if kinds.of(f).while_blocked or progress > record.progress:
                record.seen += 1 if again else self._lasted(kinds.of(f).every_poll)
            record.progress, record.absent = progress, 0
        first = record.finding.first_seen_s if record.reported else f.first_seen_s
        fresh = msgspec.structs.replace(
            f, first_seen_s=first if first is not None else (record.finding.first_seen_s or s.t_s),
            detected_s=record.finding.detected_s if record.reported else s.t_s, cleared_s=None,
            evidence=f.evidence or record.finding.evidence,
        )  # fmt: skip
        changed = not record.reported or _differs(fresh, record.finding) or record.finding.cleared_s is not None
        steps = s.ranks[f.culprits[0]].steps if f.culprits and f.culprits[0] in s.ranks else ()
        held = record.seen >= kinds.hold(f, steps[-1].end_s - (fresh.first_seen_s or 0.0) if steps else 0.0)
        if held or record.finding.cleared_s is None:
            record.finding = fresh
        if not held:
            return None
        record.reported = True
        return fresh if changed else None

    def _release(self, s: Snapshot, now: dict[str, Finding], evaluated: set[str], final: bool) -> list[Finding]:
        """Clear records that enough consecutive evaluations have not found."""
        changed = []
        stopped = any(map(kinds.stops_job, now.values()))
        succeeded = all(r.ended_at_rest or (r.life == Life.FINISHED and not r.exit_code) for r in s.ranks.values())
        for key, record in list(self.records.items()):
            f, kind = record.finding, kinds.of(record.finding)
            if key in now or f.kind not in evaluated:
                continue
            record.absent += self._lasted(kind.every_poll)
            if f.cleared_s is not None:
                continue
            if not record.reported:
                del self.records[key]
                continue
            over = kind.cleared_by_success and succeeded
            sticky = kind.sticky and f.cause not in kind.refutable
            kept = sticky or final or all_ended(s)
            if (kind.superseded and stopped) or any(kinds.replaces(other, f) for other in now.values()):
                record.finding = msgspec.structs.replace(f, severity=Severity.INFO, cleared_s=s.t_s)
            elif over or (not kept and record.absent >= kind.release):
                record.finding = msgspec.structs.replace(f, cleared_s=s.t_s)
            else:
                continue
            changed.append(record.finding)
        return changed

    def _lasted(self, every_poll: bool) -> int:
        """Return how many evaluations the newest one counts as: those of slow kinds are one a second, polls may be further apart."""
        return 1 if every_poll else self._seconds

    @property
    def findings(self) -> list[Finding]:
        """Return all reported findings, open and cleared."""
        return [r.finding for r in self.records.values() if r.reported]

    @property
    def contradicted(self) -> list[Finding]:
        """Return proved findings that the job has contradicted by continuing; not those that another one has replaced."""
        proofs = (f for f in self.findings if kinds.of(f).blocks and f.certainty == Certainty.PROVED)
        return [f for f in proofs if f.cleared_s is not None and not kinds.was_replaced(f)]

    def open(self, severity: str = Severity.INFO) -> list[Finding]:
        """Return the reported findings of at least `severity` that are not cleared."""
        return [f for f in self.findings if f.cleared_s is None and at_least(f.severity, severity)]

    def suspects(self) -> bool:
        """True if something of severity warning or above was found, but not often enough yet to be reported."""
        return any(not r.reported and at_least(r.finding.severity, Severity.WARNING) for r in self.records.values())


def _calls_seen(s: Snapshot) -> bool:
    return any(r.calls or r.enqueued or r.blocked is not None for r in s.ranks.values())


def _differs(a: Finding, b: Finding) -> bool:
    """True if readers should see the new text: more than a number in it has changed."""
    shown = ("severity", "certainty", "culprits", "victims", "names", "where", "collective", "evidence")
    return any(getattr(a, name) != getattr(b, name) for name in shown)
