"""Chance must not decide: a job that hangs or fails has the same kind, ranks and lines whichever polls the monitor got, and in whichever order."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.tapes.tape import Tape, Verdict, judge, read_tape
from tests.faults import messages
from tests.faults.record import TAPES
from tests.faults.replay import tapes
from tests.faults.test_replay import name_of

KEPT = (0.3, 0.5, 0.7, 0.9)  # share of the polls
SWAPPED = 0.2  # share of the polls that change places with the next


def hangs(path: Path) -> bool:
    """True if the golden has a finding about ranks that hang or ended. What is measured over polls (memory, speed, unusual stalls) needs them."""
    text = messages.golden().get(name_of(path), "")
    return bool(re.search(r"^  (deadlock|mismatch|timeout|rank_lost|group_misuse)/", text, re.MULTILINE))


def shifted(tape: Tape, chance: random.Random) -> Tape:
    """Return the tape with polls left out and swapped; the last one, after the end of the job, is kept."""
    *polls, last = tape.snapshots
    share = chance.choice(KEPT)
    kept = [poll for poll in polls if chance.random() < share]
    for i in range(len(kept) - 1):
        if chance.random() < SWAPPED:
            kept[i], kept[i + 1] = kept[i + 1], kept[i]
    snapshots: list[Snapshot] = [*kept, last]
    return replace(tape, snapshots=tuple(snapshots), moments=())


def stated(verdict: Verdict) -> list[tuple[object, ...]]:
    """Return what the warnings and errors state that stand at the end."""
    worst = [f for f in verdict.findings if f.severity in ("warning", "error") and f.cleared_s is None]
    return sorted(
        (f.kind, f.cause or "", f.culprits, sorted({(w.rank, w.file or "", w.line or 0) for w in f.where}))
        for f in worst
    )


HANGS = [path for path in tapes(TAPES) if hangs(path)]


def test_most_faulty_jobs_hang() -> None:
    assert len(HANGS) > 90


@pytest.mark.parametrize("path", HANGS, ids=name_of)
def test_the_verdict_does_not_depend_on_the_polls(path: Path) -> None:
    tape = read_tape(path)
    other = judge(shifted(tape, random.Random(name_of(path))))
    assert not other.failures
    assert stated(other) == stated(judge(tape))
