"""Chance must not decide: a faulty job has the same kind, ranks and lines whichever polls the monitor got, and in whichever order."""

from __future__ import annotations

import random
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


def faulty(path: Path) -> bool:
    """True if the golden has a warning or an error about the job."""
    lines = messages.golden().get(name_of(path), "").splitlines()
    return any(line.split(":")[0].endswith((" error", " warning")) for line in lines)


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


FAULTY = [path for path in tapes(TAPES) if faulty(path)]


def test_half_of_the_tapes_are_of_faulty_jobs() -> None:
    assert len(FAULTY) > 150


@pytest.mark.parametrize("path", FAULTY, ids=name_of)
def test_the_verdict_does_not_depend_on_the_polls(path: Path) -> None:
    tape = read_tape(path)
    other = judge(shifted(tape, random.Random(name_of(path))))
    assert not other.failures
    assert stated(other) == stated(judge(tape))
