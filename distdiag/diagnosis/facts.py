"""The input of the rules at one poll: the snapshot, what follows from it, and earlier findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from distdiag.diagnosis import endings, kinds, step_times
from distdiag.diagnosis.culprit import verdict
from distdiag.diagnosis.culprit.case import Case
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.endings import NO_CASCADE, Cascade, End
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Loader, Snapshot
from distdiag.diagnosis.model.syntax import Source, no_source
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.training_data import exhausted_ranks, only_shadows, training_loaders, uneven_ranks
from distdiag.diagnosis.waits.graph import WaitGraph, build
from distdiag.diagnosis.waits.incidents import LockCycle


@dataclass
class Facts:
    """Input of every rule. Fields that depend on earlier polls default to what a single snapshot shows."""

    snapshot: Snapshot
    source: Source = no_source
    late: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (late ranks, ranks waiting) just before the first end
    ends_settled: bool = True  # the first abnormal end was long enough ago that its cause is known, too
    waits_settled: bool = True  # no rank made progress since the last poll: what the waits prove may be reported
    # no rank waits now, but none has made progress since some waited for a living rank: ranks are being killed
    no_progress_since_wait: bool = False
    repeated: tuple[Finding, ...] = ()  # findings about ranks that wait, repeated unchanged at this poll
    # the ranks have been asked to end since this poll: what keeps others waiting is that
    interrupted_s: float | None = None
    locks: tuple[LockCycle, ...] = ()  # cycles through file locks, the same as at the last poll
    reported: tuple[Finding, ...] = ()  # open findings of earlier polls
    pauses: Pauses = field(default_factory=Pauses)  # of all ranks so far
    found: list[Finding] = field(default_factory=list)  # findings of this poll so far

    @cached_property
    def graph(self) -> WaitGraph:
        return build(self.snapshot)

    @cached_property
    def ends(self) -> dict[int, str]:
        """The kind of every abnormal end, by rank; see `endings.ends`."""
        return endings.ends(self.snapshot)

    @cached_property
    def loaders(self) -> dict[int, Loader]:
        """The loader that each rank trains from; empty unless every rank has one."""
        return training_loaders(self.snapshot)

    @cached_property
    def exhausted(self) -> tuple[int, ...]:
        """Ranks that ran out of batches while others have some left."""
        return exhausted_ranks(self.snapshot)

    @cached_property
    def cascade(self) -> Cascade:
        """What the abnormal ends have in common; `End.NONE` while that is undecided or already explained."""
        if not self.ends_settled or not self.ends:
            return NO_CASCADE
        found = endings.cascade(self.snapshot, self.ends, self.late)
        if found.end in (End.MODEL, End.ABORTED, End.FINISHED):
            # a rank that ran out of batches continues with what follows the loop: that causes the rest
            uneven = uneven_ranks(self.snapshot)
            if set(uneven) & {*found.ranks, *found.others}:
                return Cascade(End.OUT_OF_BATCHES)
        return found

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict for each incident: of the wait-for graph at this poll, or the backend's abort."""
        waiting = self._waiting_verdicts()
        incident = self.cascade.incident
        if incident is None or any(v.kind is kinds.MISMATCH for v in waiting):
            return waiting
        case = Case(self.snapshot, self.graph, incident, self.exhausted, self.source)
        return (*waiting, *verdict.judge_incident(case))

    def _waiting_verdicts(self) -> tuple[Verdict, ...]:
        if self.repeated or self.locks:
            return ()
        conflict_died = any(wait.conflict and wait.died for wait in self.graph.waits)
        if not (self.waits_settled or conflict_died):
            return ()
        out = verdict.judge(self.snapshot, self.graph, self.exhausted, self.source)
        if not self.waits_settled or self.cascade.end not in (End.NONE, End.OUT_OF_BATCHES):
            return tuple(v for v in out if v.kind is kinds.MISMATCH)
        if self.ends:  # a rank ended abnormally, and the cause is not settled yet
            return tuple(v for v in out if v.cause not in ("rank_exited", "rank_finished"))
        return tuple(out)

    @cached_property
    def window(self) -> step_times.Window | Abstained:
        """The same last steps of every rank, or why there are none."""
        return step_times.window(self.snapshot)

    @cached_property
    def shadows(self) -> tuple[int, ...]:
        """Ranks that have run out of data and only shadow the collectives of the others."""
        if isinstance(self.window, Abstained):
            return ()
        return tuple(rank for rank, steps in self.window.steps.items() if only_shadows(steps))

    @property
    def stopped(self) -> bool:
        """True if an open finding, or one of this poll, stops the job for good."""
        return any(map(kinds.stops_job, (*self.reported, *self.found)))
