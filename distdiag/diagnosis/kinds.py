"""The registry of finding kinds: how each is evaluated, when it is reported, when it is cleared, and what it explains.

No other file has such policy: the engine, the job's state and the documentation read it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, State, at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Explains:
    """Findings of `kind` that are not reported because another finding already explains them."""

    kind: str
    causes: tuple[str, ...] = ()  # only with one of these causes; empty: any
    only_new: bool = False  # one that was reported before stays
    only_members: bool = False  # only if its culprits are members of the explaining finding
    least: Severity = Severity.INFO  # of the explaining finding
    only_suspected: bool = False  # not if it is proved
    only_stopped: bool = False  # only if the explaining finding stops the job

    def covers(self, finding: Finding, other: Finding, new: bool) -> bool:
        """True if `finding`, whose kind has this entry, explains `other`."""
        return (
            other.kind == self.kind
            and (not self.causes or other.cause in self.causes)
            and (new or not self.only_new)
            and (not self.only_members or set(other.culprits) <= {*finding.culprits, *finding.victims})
            and at_least(finding.severity, self.least)
            and (not self.only_suspected or other.certainty == Certainty.SUSPECTED)
            and (not self.only_stopped or stops_job(finding))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of finding. An evaluation is one poll, or one second; see `every_poll`."""

    name: str
    severities: tuple[Severity, ...]  # severities that its findings may have
    causes: tuple[str, ...] = ()
    every_poll: bool = False  # evaluated at every poll (4 per second); else once a second
    while_blocked: bool = True  # evaluated although ranks stall or the job has stopped
    suspends: bool = False  # while one is open, kinds without `while_blocked` are not evaluated
    hold: int = 1  # evaluations in a row, or seconds of them, that must find it before it is reported
    hold_of_cause: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # overrides `hold`
    lasting_s: float | None = None  # two evaluations are enough if its steps so far have lasted so long
    release: int = 5  # evaluations in a row that no longer find it before it is cleared
    sticky: bool = False  # never cleared
    refutable: tuple[str, ...] = ()  # causes of a sticky kind that are cleared like those of any other
    fatal: bool = False  # it stops the job for good (unless the collective it is about has completed)
    blocks: bool = False  # ranks wait for good; it is repeated unchanged while its ranks end
    superseded: bool = False  # cleared, with severity info, once a finding that stops the job appears
    cleared_by_success: bool = False  # cleared if every rank finishes normally
    stacks: bool = False  # stacks and flight records are kept as its evidence
    of_calls: bool = False  # its rule abstains while no call of any rank was recorded
    state: State | None = None  # of the job while such a finding is open
    explains: tuple[Explains, ...] = ()


_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
_ECHO_OF_END = Explains(kind="deadlock", causes=("rank_exited", "rank_finished"), only_new=True)
_ECHO_OF_ORDER = Explains(kind="group_misuse", causes=("order",))  # the ranks hang in new_group itself
_STALL = Explains(kind="stall", only_stopped=True)
_LOSS = Explains(kind="rank_lost", only_new=True, only_members=True)

_fatal = partial(Kind, every_poll=True, fatal=True)

DEADLOCK = _fatal(
    name="deadlock", severities=(_WARNING, _ERROR),  # warning: all ranks ended normally
    release=2, blocks=True, stacks=True, of_calls=True, state=State.DEADLOCKED,
    causes=(
        "missing_rank", "order_mismatch", "group_cycle", "p2p_cycle", "rank_exited", "rank_finished", "rank_stopped",
        "file_lock",
    ),
    explains=(_STALL, _ECHO_OF_ORDER),
)  # fmt: skip
MISMATCH = _fatal(
    name="mismatch", severities=(_ERROR,), release=2, blocks=True, stacks=True, of_calls=True, state=State.DEADLOCKED,
    causes=("op", "shape", "dtype", "root", "group", "model"), explains=(_STALL, _LOSS, _ECHO_OF_END),
)  # fmt: skip
STALL = Kind(
    name="stall", severities=(_INFO, _WARNING, _ERROR),  # info: dumps of a job that may have been running
    causes=("user_code", "data", "gil_held", "checkpoint", "unknown"), every_poll=True, release=2,
    suspends=True, superseded=True, cleared_by_success=True, stacks=True, of_calls=True, state=State.STALLED,
)  # fmt: skip
TIMEOUT = _fatal(
    name="timeout", severities=(_ERROR,), causes=("late_rank",), sticky=True, stacks=True, of_calls=True,
    state=State.DEGRADED, explains=(_STALL, _LOSS, _ECHO_OF_END),
)  # fmt: skip
RANK_LOST = _fatal(
    name="rank_lost", severities=(_INFO, _WARNING, _ERROR), causes=("killed", "crashed", "configuration", "silent"), sticky=True,
    state=State.DEGRADED, explains=(_STALL, _ECHO_OF_END),
)  # fmt: skip
UNUSED_PARAMETERS = Kind(
    name="unused_parameters", severities=(_INFO, _WARNING, _ERROR), sticky=True,
    causes=("never_used", "differs_between_ranks", "frozen", "flag_not_needed", "not_updated"),
    hold_of_cause=MappingProxyType({"flag_not_needed": 2}), refutable=("flag_not_needed", "frozen"),
    explains=tuple(
        Explains(kind=kind, least=_ERROR) for kind in ("rank_lost", "deadlock", "timeout", "stall", "mismatch")
    ),
)  # fmt: skip
UNEVEN_BATCHES = Kind(
    name="uneven_batches", severities=(_WARNING, _ERROR), causes=("count", "size"), release=3,
    hold_of_cause=MappingProxyType({"size": 2}),
)  # fmt: skip
STRAGGLER = Kind(
    name="straggler", severities=(_INFO, _WARNING), while_blocked=False, hold=3, lasting_s=3.0, release=20,
    causes=("data", "forward", "backward", "optimizer", "host", "rotating", "stage", "pauses", "cores", "gc", "tools", "growth", "outside"),
    # a sum of what was measured, no estimate; the kernel's masks
    hold_of_cause=MappingProxyType({"pauses": 1, "cores": 1, "tools": 10, "growth": 10, "outside": 10}),
    explains=(Explains(kind="comm_bound", only_suspected=True),),  # the others wait for this rank, not for the network
)  # fmt: skip
INPUT_BOUND = Kind(
    name="input_bound", severities=(_INFO, _WARNING), while_blocked=False, hold=3,
    explains=(Explains(kind="straggler", causes=("data", "rotating"), least=_WARNING),),  # who gets their lock last changes by chance
)  # fmt: skip
COMM_BOUND = Kind(name="comm_bound", severities=(_INFO, _WARNING), while_blocked=False, hold=3)
DUPLICATE_DATA = Kind(
    name="duplicate_data", severities=(_INFO, _WARNING), sticky=True,
    causes=("same_batches_on_ranks", "parts_overlap", "same_order_every_epoch", "same_samples_from_workers"),
)  # fmt: skip
REPLICA_DRIFT = Kind(
    name="replica_drift", severities=(_WARNING, _ERROR), sticky=True,
    causes=(
        "gradients_not_synced", "different_init", "learning_rates", "update", "buffers", "split_module", "mode", "logged",
    ),
)  # fmt: skip
NONFINITE = Kind(
    name="nonfinite", severities=(_INFO, _WARNING, _ERROR), causes=("loss", "gradient", "logged"), sticky=True
)
MEMORY = Kind(
    name="memory", severities=(_INFO, _WARNING), causes=("growth", "imbalance", "headroom"), hold=2, release=60
)
GPU = Kind(
    name="gpu", severities=(_INFO, _WARNING, _ERROR), release=10,
    causes=("throttled", "ecc", "pcie_degraded", "xid", "idle", "busy_without_progress", "lost", "nvlink", "shared"),
)  # fmt: skip
GROUP_MISUSE = Kind(
    name="group_misuse", severities=(_WARNING, _ERROR), causes=("not_a_member", "order"), sticky=True, of_calls=True
)
# Reported by the monitor about itself, and by the reader of dumps: it has no rule here.
RECORDER = Kind(
    name="recorder", severities=(_INFO, _WARNING), sticky=True,
    causes=(
        "disk_full", "clock_skew", "dropped", "unsupported_torch", "device_waits", "unfollowed", "damaged_page",
        "driver_silent", "nodes", "failed", "missing_dump", "unreadable_dump", "contradicted",
    ),
)  # fmt: skip

KINDS: Mapping[str, Kind] = MappingProxyType(
    {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}
)


def of(finding: Finding) -> Kind:
    return KINDS[finding.kind]


def hold(finding: Finding, lasted_s: float) -> int:
    """Return how many evaluations in a row must find it before it is reported.

    Args:
        lasted_s: From when it was first seen, as the rule says, to the end of its culprit's newest step.
    """
    kind = of(finding)
    held = kind.hold_of_cause.get(finding.cause or "", kind.hold)
    return min(held, 2) if kind.lasting_s is not None and lasted_s >= kind.lasting_s else held


def stops_job(finding: Finding) -> bool:
    """True if the finding ends the job or stops it for good."""
    return of(finding).fatal and not finding.collective_completed


def blocks(finding: Finding) -> bool:
    """True if ranks wait for good because of an open finding."""
    return of(finding).blocks and finding.cleared_s is None and not finding.collective_completed


def replaces(finding: Finding, other: Finding) -> bool:
    """True if both say that ranks wait for good in one collective: `other` is an earlier judgement, and counts as cleared info."""
    mine, theirs = finding.collective, other.collective
    if mine is None or theirs is None or mine.seq is None or not (blocks(finding) and blocks(other)):
        return False
    return (mine.group, mine.seq) == (theirs.group, theirs.seq)


def was_replaced(finding: Finding) -> bool:
    """True if a later judgement of the same collective replaced a proof: the job has not contradicted it."""
    return of(finding).blocks and finding.cleared_s is not None and finding.severity == Severity.INFO


def explains(finding: Finding, other: Finding, new: bool) -> bool:
    """True if `other` follows from `finding`. `new`: `other` has not been seen at an earlier poll."""
    return any(entry.covers(finding, other, new) for entry in of(finding).explains)
