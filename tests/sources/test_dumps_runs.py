"""Dumps of two runs in one folder: an earlier start left files of some ranks, and clocks differ without being another run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import Report
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, as_pickle
from tests.sources.test_dumps import only, quiet

SECOND_NS = 1_000_000_000
LIMIT_S = 600


def run(
    folder: Path, steps: int, start_s: float, ranks: range, world: int = 10, keep: int = 40, pace_s: float = 0.05
) -> None:
    """Write the dumps of some ranks of a run whose last collective timed out: each file is written then."""
    folder.mkdir(exist_ok=True)
    job = Job(world)
    job.now_ns += int(start_s * SECOND_NS)
    for _ in range(steps):
        job.collective()
        job.now_ns += int(pace_s * SECOND_NS)
    job.collective(done=())
    written = job.now_ns + (LIMIT_S + 1) * SECOND_NS
    for r in ranks:
        path = folder / f"fr_{r}"
        path.write_bytes(as_pickle(job.dump(r, keep=keep)))
        os.utime(path, ns=(written, written))


def check(report: Report, earlier: tuple[int, ...], waiting: tuple[int, ...]) -> None:
    f = only(report)
    assert (f.kind, f.culprits, f.victims) == ("stall", (), waiting)
    assert f"the dumps of ranks {earlier[0]}–{earlier[-1]} " in f.message and "not used" in f.message
    assert not any("older" in note for note in report.notes) and report.ranks_seen == len(waiting)
    assert "empty the folder" in f.advice and "link" not in f.message


@pytest.mark.parametrize(("steps", "before"), [(70, 900), (900, 70)])
def test_dumps_of_a_run_hours_before_do_not_count(steps: int, before: int, tmp_path: Path) -> None:
    """The later run has got less far, or further, than the one before it."""
    run(tmp_path, before, 0.0, range(5))
    run(tmp_path, steps, 7_200.0, range(5, 10))
    report = diagnose_dumps(tmp_path)
    check(report, (0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    assert (
        f"end {'119 min' if steps < before else '2 hours'} before those of ranks 5–9 begin"
        in report.findings[0].message
    )


def test_the_same_first_steps_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    """Both rings begin with collective 1: the earlier run completed one while the later one's dump shows its ranks stuck before it."""
    run(tmp_path, 30, 0.0, range(5))
    run(tmp_path, 18, 3_600.0, range(5, 10))
    report = diagnose_dumps(tmp_path)
    check(report, (0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    assert "an earlier run or an earlier dump" in report.findings[0].message


def test_another_pace_is_another_run(tmp_path: Path) -> None:
    """Both hang in the same collective: no one clock makes the times of the calls before it fit."""
    run(tmp_path, 25, 0.0, range(5), pace_s=0.05)
    run(tmp_path, 25, 3_600.0, range(5, 10), pace_s=0.4)
    check(diagnose_dumps(tmp_path), (0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def test_files_copied_later_are_still_of_two_runs(tmp_path: Path) -> None:
    run(tmp_path, 900, 0.0, range(5))
    run(tmp_path, 70, 7_200.0, range(5, 10))
    for path in tmp_path.iterdir():
        os.utime(path)
    check(diagnose_dumps(tmp_path), (0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def test_a_smaller_run_after_a_larger_one_is_another_run(tmp_path: Path) -> None:
    """The default groups have other members: ranks 5 to 9 do not exist in the later run, so nobody waits for them."""
    run(tmp_path, 30, 0.0, range(5, 10))
    run(tmp_path, 18, 3_600.0, range(5), world=5)
    report = diagnose_dumps(tmp_path)
    assert report.world_size == 5 and not any(f.culprits for f in report.findings)
    (f,) = [f for f in report.findings if f.kind == "recorder"]
    assert (
        "ranks 5–9 are of another run: their default group has ranks 0–9, that of ranks 0–4 has ranks 0–4" in f.message
    )


@pytest.mark.parametrize("running", [True, False])
def test_a_host_with_a_wrong_clock_is_no_other_run(running: bool, tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(60):
        job.collective()
    if not running:
        job.collective(ranks=(0, 1, 3))
    for r in range(4):
        ahead = 5_000 * SECOND_NS if r > 1 else 0
        for e in job.ranks[r].entries:
            for name in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
                e[name] = e[name] and e[name] + ahead
        (tmp_path / f"fr_{r}").write_bytes(as_pickle(job.dump(r)))
    report = diagnose_dumps(tmp_path)
    assert quiet(report) if running else only(report).culprits == (2,)
    assert report.ranks_seen == 4


def test_a_rank_that_stopped_hours_before_the_others_is_of_their_run(tmp_path: Path) -> None:
    """Its group's next collective is in flight on the others, whose rings hold other groups' calls of the hours since."""
    job = Job(4, {"1": ("heartbeat", (0, 1, 2))})
    for _ in range(60):
        job.collective()
    for r in (0, 1, 2):
        job.issue(r, "all_reduce", "0", False)
    job.now_ns += 9_000 * SECOND_NS
    for _ in range(30):
        job.collective(group="1")
    for r in range(4):
        (tmp_path / f"fr_{r}").write_bytes(as_pickle(job.dump(r, keep=20)))
    assert only(diagnose_dumps(tmp_path)).culprits == (3,)
