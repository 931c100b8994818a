"""What an analysis of traces returns; times in ms per step. Part of `distdiag.profile/1`."""

from __future__ import annotations

import msgspec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of one rank; `self_ms` is without the operators that it calls."""

    name: str
    self_ms: float
    calls: float


class LineTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time that the training thread spent at or below one line of the user's code, by samples."""

    file: str
    line: int
    function: str
    ms: float
    samples: int


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's time goes; see `traces.analyse`."""

    rank: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    overlap_ms: float
    exposed_ms: float
    wait_ms: float | None
    idle_ms: float
    data_ms: float = 0.0  # waits for the data loader, in which nothing else runs
    operators: list[Operator]
    lines: list[LineTime] = []
    rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    start_ms: float | None = None  # what starting and stopping the profiler cost the training thread, once
    stop_ms: float | None = None
    save_ms: float | None = None  # in a thread, mostly with the GIL

    @property
    def peak_bytes(self) -> int | None:
        """Of the device's memory, else of the process's."""
        return self.device_peak_bytes if self.device_peak_bytes is not None else self.rss_peak_bytes


def parts_of(r: RankTimes) -> dict[str, float]:
    """Return the parts of a rank's step, ms; together they are the step. `hidden` is communication during compute."""
    wait = min(r.wait_ms or 0.0, r.exposed_ms)
    return {
        "compute": r.compute_ms - r.overlap_ms, "hidden": r.overlap_ms, "transfer": r.exposed_ms - wait, "wait": wait,
        "idle": r.idle_ms + r.data_ms,
    }  # fmt: skip


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one operation in one group, per step."""

    op: str
    group: str | None
    per_step: float
    bytes_per_step: float | None
    skew_ms: float  # in which a rank waits for a later one; calls that overlap count once, as in the next
    transfer_ms: float
    late_rank: int
    late_share: float


class ModuleTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one module, ms per step, the mean of all ranks."""

    module: str
    per_step: float  # collectives
    comm_ms: float
    exposed_ms: float


class PathTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank adds to the critical path, ms per step."""

    rank: int
    compute_ms: float
    idle_ms: float
    data_ms: float = 0.0
    unmatched_ms: float = 0.0  # communication of which no other rank's part is known: wait or transfer


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The chain of work and transfers that sets the length of the steps; its parts add up to `step_ms`."""

    step_ms: float
    transfer_ms: float
    ranks: list[PathTime]  # the largest part first


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the comparison of two ranks."""

    kind: str  # "time", "operator" or "line"
    name: str
    culprit_ms: float
    peer_ms: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The culprit compared with one peer."""

    culprit: int
    peer: int
    reason: str
    rows: list[Difference]


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A rank without a trace."""

    rank: int
    reason: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One profile of a run."""

    schema: str = "distdiag.profile/1"
    run: str
    number: int
    first_step: int | None
    steps: int
    ranks: list[RankTimes]
    missing: list[Missing]
    verdict: str | None  # the rank that the others wait for, and why; else what every rank waits for
    advice: str | None = None  # what to do about it
    partial: bool = False  # ranks of the job are not in it: what is not hidden may be waiting for them
    collectives: list[CollectiveTimes]
    modules: list[ModuleTimes] = []
    critical_path: CriticalPath | None = None  # None: ranks share no collective or message whose times are known
    comparison: Comparison | None
    trace: str | None  # merged, for ui.perfetto.dev
    notes: list[str]
