"""What reading the dumps of a job found besides its snapshot: files, times, missing ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.sources.dumps.times import LateRanks, Times


@dataclass
class LoadReport:
    """Which files were read, which were not, and what a snapshot cannot hold."""

    files: dict[int, tuple[str, ...]] = field(default_factory=dict)  # used for each rank
    bad: list[tuple[str, str]] = field(default_factory=list)  # (path, reason) of files that should have been dumps
    missing: tuple[int, ...] = ()  # ranks of the job that left no file at all
    unreadable: tuple[int, ...] = ()  # ranks whose only file is in `bad`
    others: list[str] = field(default_factory=list)  # files that were not read
    notes: list[str] = field(default_factory=list)  # one line each
    not_visible: tuple[str, ...] = ()  # notes on what the recorder of this backend does not show
    stale: tuple[int, ...] = ()  # ranks whose dump is older than the others': they continued after it
    times: dict[int, Times] = field(default_factory=dict)
    timeouts_s: dict[str, float] = field(default_factory=dict)  # by group, as far as recorded
    assumed: set[str] = field(default_factory=set)  # groups whose members are not recorded: more ranks may be in a call
    # by group: members that never created it, as their own list of groups lacks it
    without_group: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_runs: dict[int, str] = field(default_factory=dict)  # ranks whose only dump is of another run: how that shows
    unmet: dict[int, list[Call]] = field(default_factory=dict)  # in flight, and the peer has issued later messages
    # (send, recv) of different lengths with an end in flight, by sender and receiver
    unequal: dict[tuple[int, int], tuple[Call, Call]] = field(default_factory=dict)
    # groups with batches: their messages run together, in one queue with collectives
    batched: frozenset[str] = frozenset()
    late: LateRanks | None = None
    newest: dict[int, Call] = field(default_factory=dict)  # each rank's newest call
    # the user's frames of each rank's newest collectives, by group and number, outermost first
    paths: dict[int, dict[tuple[str, int], tuple[Site, ...]]] = field(default_factory=dict)
    stacks: dict[int, tuple[Site, ...]] = field(default_factory=dict)  # the user's frames of that call, outermost first
    rates: dict[int, float] = field(default_factory=dict)  # how often a rank made the newest of its calls, per second
