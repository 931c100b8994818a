"""What reading the dumps of a job found besides its snapshot: files, times, missing ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.diagnosis.dumps.late_ranks import LateRanks
from distdiag.diagnosis.model.snapshot import Call


@dataclass
class LoadReport:
    """Which files were read, and which were not.

    Attributes:
        files: By rank, the files that its state comes from.
        bad: (path, reason) of files that should have been dumps.
        missing: Ranks of the job that left no file at all.
        unreadable: Ranks whose only file is in `bad`.
        others: Other files, which were not read.
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
    newest_s: dict[int, float] = field(default_factory=dict)  # its newest entry
    oldest_s: dict[int, float] = field(default_factory=dict)
    # by group: members whose own list of groups lacks it: they never created it
    without_group: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unmet: dict[int, list[Call]] = field(
        default_factory=dict
    )  # messages in flight whose peer has already issued later ones
    usual_gap_s: dict[int, float] = field(default_factory=dict)  # how long a rank has paused repeatedly
    timeout_s: float | None = None  # of the collectives; None if groups differ
    # of ranks whose dump has completed operations that the watchdog, which runs ten times a second, had not retired yet
    moved_s: dict[int, float] = field(default_factory=dict)
    # when a rank's dump found operations begun and not completed: a lower bound of when it was taken
    asked_s: dict[int, float] = field(default_factory=dict)
    late: LateRanks | None = None
