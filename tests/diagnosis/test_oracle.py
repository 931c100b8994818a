"""The wait-for graph compared with a model of random programs: exactly the ranks that are stuck for ever are *proved*."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.diagnosis.model.findings import Certainty
from distdiag.diagnosis.model.snapshot import DEAD, Life
from distdiag.diagnosis.waits import graph
from tests.diagnosis import programs, random_programs
from tests.diagnosis.made import proved
from tests.diagnosis.programs import Job, Tape

EXAMPLES = 1000  # 45 % of these programs hang


def numbers_of(data: bytes) -> list[int]:
    """Return 80 to 160 numbers below 2^24; hypothesis draws bytes five times as fast as a list of integers."""
    return [int.from_bytes(data[i : i + 3], "little") for i in range(0, len(data), 3)]


TAPES = st.binary(min_size=240, max_size=480).map(numbers_of)


def reaches(job: Job, start: int, targets: set[int]) -> bool:
    seen, todo = {start}, [start]
    while todo:
        r = todo.pop()
        if r in targets:
            return True
        for q in programs.waits_for(job, r) - seen:
            seen.add(q)
            todo.append(q)
    return False


def check_rule(job: Job, expected: set[int]) -> None:
    """Assert that exactly `expected` is proved, and that every victim reaches the culprits (or the members of the cycle)."""
    snap = programs.snapshot(job)
    found = graph.build(snap)
    assert found.stuck == expected
    findings = proved(snap, found)
    living = [f for f in findings if any(snap.ranks[r].life not in DEAD for r in (*f.victims, *f.culprits))]
    assert bool(living) == bool(expected)
    ranks_named: set[int] = set()
    for f in findings:
        assert f.certainty == Certainty.PROVED
        roots = set(f.culprits) or {w.rank for w in f.where}
        assert roots
        for r in {*f.victims, *(w.rank for w in f.waiting)}:
            if job.life[r] == Life.RUNNING:
                assert r in expected
                assert reaches(job, r, roots - {r} or roots), (r, roots, f)
        ranks_named |= {*f.culprits, *f.victims, *(w.rank for w in f.where), *(w.rank for w in f.waiting)}
    assert expected <= ranks_named


@pytest.mark.timeout(900)  # 5 s of CPU, on shared cores
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(TAPES)
def test_exactly_the_ranks_that_are_stuck_for_ever_are_proved(numbers: list[int]) -> None:
    """At any moment of a program's run, the ranks judged stuck are those that no continuation frees."""
    tape = Tape(numbers)
    job = random_programs.program(tape)
    programs.run(job, tape, steps=tape.pick(40))
    now = programs.stuck_for_ever(job)
    check_rule(job, now)
    # run the programs on, twice: a rank judged stuck never moves again
    for k in (1, 2):
        later = job.copy()
        programs.run(later, Tape([n * k + k for n in reversed(numbers)]))
        blocked = {
            r for r in range(len(job.programs)) if later.waiting[r] is not None and later.life[r] == Life.RUNNING
        }
        assert now <= blocked
        assert all(later.pc[r] == job.pc[r] for r in now)
        if k == 1:
            check_rule(later, blocked)  # when nothing moves, every blocked rank is stuck


def test_the_generated_programs_cover_every_outcome() -> None:
    """Of programs from such tapes, many hang, many do not, and every kind of cause occurs."""
    import random

    rng = random.Random(5)
    seen: dict[tuple[str, str | None], int] = {}
    clean = hung = 0
    start = time.process_time()
    for _ in range(600):
        tape = Tape([rng.randrange(1 << 20) for _ in range(160)])
        job = random_programs.program(tape)
        programs.run(job, tape)
        findings = proved(programs.snapshot(job))
        for f in findings:
            seen[(f.kind, f.cause)] = seen.get((f.kind, f.cause), 0) + 1
        hung += bool(findings)
        clean += not findings
    assert time.process_time() - start < 60
    assert clean > 60 and hung > 60
    for cause in ("rank_finished", "rank_exited", "rank_stopped", "group_cycle", "p2p_cycle", "missing_rank"):
        assert seen.get(("deadlock", cause)), (cause, seen)
    for cause in ("op", "shape", "dtype", "root"):
        assert seen.get(("mismatch", cause)), (cause, seen)
