"""Findings: the output of the diagnosis, with the names of the public contract (`distdiag.findings/1`)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from distdiag.terms.ranks import ranges

SCHEMA = "distdiag.findings/1"


class Severity(StrEnum):
    """How much a finding matters to the job; ordered by `at_least`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_ORDER = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}


def at_least(severity: str, threshold: str) -> bool:
    """True if `severity` is `threshold` or worse."""
    return _ORDER[Severity(severity)] >= _ORDER[Severity(threshold)]


class Certainty(StrEnum):
    PROVED = "proved"  # stays true whatever the job does next
    SUSPECTED = "suspected"  # the evidence points to it; may be cleared


NO_ERROR = "no error that "  # why logs give no verdict: "distdiag knows", "ended the job"


class State(StrEnum):
    """State of the whole job, as the readers show it."""

    WAITING = "waiting"  # not every rank has reported yet
    RUNNING = "running"
    STALLED = "stalled"  # ranks wait, unusually long for this job, for one that is alive and busy
    DEADLOCKED = "deadlocked"  # proved: it will not continue
    DEGRADED = "degraded"  # continues, with a finding of severity error or a lost rank
    ENDED = "ended"
    FAILED = "failed"


class Where(msgspec.Struct, frozen=True, omit_defaults=False):
    """Where one rank is: the innermost frame of the user's code, never torch's or ours."""

    rank: int
    file: str | None = None  # absolute path
    line: int | None = None
    function: str | None = None
    # waiting user_code data lock queue socket stdin gil_held stopped exited killed crashed finished device
    # waits_for_device last_call
    state: str | None = None


BAD_STATES = (State.FAILED, State.DEGRADED, State.DEADLOCKED)  # nothing is well, even without a finding


class CollectiveRef(msgspec.Struct, frozen=True):
    """The collective a finding is about."""

    op: str
    group: str
    seq: int | None = None
    bytes: int | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; fields in the order of the contract.

    `culprits` is empty if no rank can be blamed (a true tie, a cycle): then `victims` holds the members and
    `where` has the site of each. Times are seconds since the run began; `None` is "not known".
    """

    id: str = ""  # of `key`, so equal as long as the condition is the same; set here, never given
    kind: str
    cause: str | None = None
    certainty: str = Certainty.SUSPECTED
    severity: str = Severity.WARNING
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    collective: CollectiveRef | None = None
    where: tuple[Where, ...] = ()
    waiting: tuple[Where, ...] = ()
    names: tuple[str, ...] = ()
    step: int | None = None
    first_seen_s: float | None = None
    detected_s: float | None = None
    cleared_s: float | None = None
    message: str = ""
    cost: str = ""
    advice: str = ""
    evidence: tuple[str, ...] = ()
    # it completed although the ranks' calls differ: the job continues with wrong values
    collective_completed: bool = False

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(self.key.encode("utf-8", "replace"), digest_size=4).hexdigest()
        msgspec.structs.force_setattr(self, "id", f"{self.kind}-{digest}")

    @property
    def title(self) -> str:
        """Return `deadlock/missing_rank`."""
        return f"{self.kind}/{self.cause}" if self.cause else self.kind

    @property
    def key(self) -> str:
        """Identity over time: the same condition seen again updates its record instead of making a new one."""
        who = ",".join(map(str, self.culprits or self.victims))
        if not self.culprits and self.collective is not None and self.collective.seq is not None:
            who = f"{self.collective.group}#{self.collective.seq}"  # more of its ranks may come to wait in it
        return f"{self.kind}/{self.cause}/{who}/{','.join(self.names[:4])}"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a kind of finding, or one cause of it, could be judged at any time so far."""

    kind: str
    cause: str | None = None
    checked: bool = False
    reason: str = ""  # the newest: why it could not be judged, or the veto; empty: found, or none
    ranks: tuple[int, ...] = ()  # those that differ, but cannot be judged yet


class Gradients(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of DDP's gradients, as measured by its reducers over the steps that DDP timed on all ranks.

    Times are medians over these steps, of the rank with the smallest: what every rank pays, without waiting
    for a late one.
    """

    ranks: int
    pgroup: str | None
    bytes: int | None  # of one rank's gradients, over all its DDP modules
    buckets: int | None  # all-reduces per backward pass
    bucket_bytes: tuple[int, ...]  # in the order of sending; the first 256
    bucket_cap_bytes: int | None
    gradient_as_bucket_view: bool | None
    comm_hook: str | None  # None: none is registered
    dtypes: str | None
    steps: int  # measured on all ranks; the times are None without any
    step_ms: float | None = None
    comm_ms: float | None = None  # from the first bucket's start to the last bucket's end
    exposed_ms: float | None = None  # the part that does not overlap with the computation of gradients
    exposed_share: float | None = None  # of step time


class LastSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was when it was last heard of: of a job that was killed together with its monitor."""

    rank: int
    t_s: float | None = None  # of its last sign of life
    file: str | None = None
    line: int | None = None
    function: str | None = None
    state: str | None = None  # a word as in `Where`, or a phase
    collective: CollectiveRef | None = None  # that it waits in, else the last one that it called
    waits: bool = False  # in this collective
    since_s: float | None = None  # when it entered this collective


KILLED = "and the monitor were killed"  # in the state's text if nothing was left to close the run
STOPPED_BY = "stopped by"  # start of the state's text if only an external signal ended the ranks
ATTEMPT = "attempt "  # the same if the launcher starts the ranks again


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `distdiag diagnose --json` prints: one run, or one set of dumps."""

    schema: str = SCHEMA
    run: str = ""
    state: str = State.RUNNING
    world_size: int | None = None
    ranks_seen: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()  # empty for dumps
    unjudged: str | None = None  # why this is not a verdict on all ranks, or not on all of the run
    state_text: str | None = None  # what decided the state
    command: str | None = None  # of the run's ranks
    age_s: float | None = None  # since the run began
    ended_ago_s: float | None = None  # since its last rank ended; None if it runs, or for dumps
    gradients: Gradients | None = None  # None: no DDP module was measured
    last_seen: tuple[LastSeen, ...] = ()  # of every rank, if the job was killed together with its monitor


def still_open(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that were not cleared, worst first."""
    found = (f for f in findings if f.cleared_s is None)
    return tuple(sorted(found, key=lambda f: _ORDER[Severity(f.severity)], reverse=True))


def ranks_seen(seen: int, world_size: int | None) -> str:
    """Return `4 of 8 ranks seen`; without the number of all ranks if that is not known."""
    if not seen and world_size is None:
        return "no rank known"
    whole = f" of {world_size:,}" if world_size is not None else ""
    return f"{seen:,}{whole} rank{'s' if (world_size or seen) != 1 else ''} seen"


def rank_list(ranks: Collection[int]) -> str:
    """Return `rank 3`, `ranks 0, 1, 3`, `ranks 0–511, 600`: three or more consecutive ranks are folded."""
    n = len(set(ranks))
    if not n:
        return "no rank"
    parts: list[str] = []
    for first, last in ranges(ranks):
        if last - first >= 3:
            parts.append(f"{first:,}–{last:,}")
        else:
            parts += [f"{r:,}" for r in range(first, last + 1)]
    if len(parts) > 12:
        parts = [*parts[:10], f"… ({n:,} in all)"]
    return ("rank " if n == 1 else "ranks ") + ", ".join(parts)


class Abstained(msgspec.Struct, frozen=True):
    """Why a rule has found nothing: an input is missing, or a veto applied."""

    reason: str
    checked: bool = False  # inputs were complete: `reason` is the veto
    undecided: bool = False  # nor can it be excluded, whatever was judged before
    cause: str | None = None  # the only cause that this is about; None: the whole kind
    ranks: tuple[int, ...] = ()  # the only ones that this is about; none: all
