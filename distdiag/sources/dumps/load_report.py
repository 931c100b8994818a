"""What reading the dumps of a job found besides its snapshot: files, times, missing ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call
from distdiag.sources.dumps.late_ranks import LateRanks


@dataclass
class LoadReport:
    """Which files were read, and which were not.

    Attributes:
        files: The files used for each rank.
        bad: (path, reason) of files that should have been dumps.
        missing: Ranks of the job that left no file at all.
        unreadable: Ranks whose only file is in `bad`.
        others: Other files, not read.
        notes: Further remarks, one line each.
    """

    files: dict[int, tuple[str, ...]] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    missing: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: tuple[int, ...] = ()  # ranks whose dump is older than the others': they continued after it
    modified_s: dict[int, float] = field(default_factory=dict)  # when each rank's file was written, on the run's clock
    newest_s: dict[int, float] = field(default_factory=dict)  # time of each rank's newest entry
    oldest_s: dict[int, float] = field(default_factory=dict)
    # by group: members that never created it, as their own list of groups lacks it
    without_group: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # messages in flight whose peer has already issued later ones
    unmet: dict[int, list[Call]] = field(default_factory=dict)
    usual_gap_s: dict[int, float] = field(default_factory=dict)  # length of a rank's repeated pauses
    timeout_s: float | None = None  # of the collectives; None if groups differ
    # when a rank's dump found operations complete that the watchdog (10 times a second) had not retired yet
    moved_s: dict[int, float] = field(default_factory=dict)
    # when a rank's dump found operations begun and not completed: it was taken at this time or later
    asked_s: dict[int, float] = field(default_factory=dict)
    late: LateRanks | None = None
