"""Ranks that others wait for, and that worked until the dumps were taken: late and alive, not stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, frames, write
from tests.sources.test_dumps import only, summary, trained

SECOND_NS = 1_000_000_000
STACK = [*frames(9)[:2], *({"name": n, "filename": f"/home/user/{f}.py", "line": i} for n, f, i in (
    ("merge", "beam", 31), ("decode", "beam", 77), ("evaluate", "eval", 140), ("main", "eval", 210)))]  # fmt: skip
WAITING = [*frames(9)[:2], *({"name": n, "filename": "/home/user/eval.py", "line": i} for n, i in (
    ("evaluate", 152), ("main", 210)))]  # fmt: skip


def beam_search(tmp_path: Path, waited_s: int, members: tuple[int, ...] = (4, 5), copied_s: int = 0) -> Finding:
    """Let ranks 0 to 3 wait in an all_gather while 4 and 5 still communicate in a group of their own, eight times a second."""
    job = trained(Job(6, {"1": ("beam", members)}), 30)
    for r in range(4):
        job.issue(r, "_all_gather_base", "0", False)
        job.ranks[r].entries[-1]["frames"] = WAITING
    for _ in range(8 * waited_s):
        job.now_ns += SECOND_NS // 8
        for r in members:
            job.issue(r, "all_reduce", "1", True)
            job.ranks[r].entries[-1]["frames"] = STACK
    write(tmp_path, job, keep=50)
    for path in tmp_path.iterdir():
        at = job.now_ns + SECOND_NS // 5 + copied_s * SECOND_NS
        os.utime(path, ns=(at, at))
    return only(diagnose_dumps(tmp_path)) if waited_s >= 600 else diagnose_dumps(tmp_path).findings[0]


def test_ranks_that_work_past_the_timeout_are_late_and_not_stopped(tmp_path: Path) -> None:
    f = beam_search(tmp_path, 601)
    assert summary(f) == ("timeout", "late_rank", (4, 5)) and f.victims == (0, 1, 2, 3)
    assert "were still working" in f.message and "8 all_reduce a second" in f.message
    assert "had waited 10 min, and the timeout is 600 s" in f.message
    assert (
        "the call at eval.py:140 in evaluate" in f.advice and "longer timeout" in f.advice and "py-spy" not in f.advice
    )


def test_before_the_timeout_it_is_a_warning(tmp_path: Path) -> None:
    f = beam_search(tmp_path, 90)
    assert (f.kind, f.severity, f.culprits) == ("stall", "warning", (4, 5)) and "timeout" not in f.advice


@pytest.mark.parametrize(("members", "copied_s"), [((4, 5), 60), ((3, 4, 5), 0)])
def test_a_copied_file_or_a_call_of_all_ranks_does_not_show_work(
    members: tuple[int, ...], copied_s: int, tmp_path: Path
) -> None:
    """A copy's time is not that of the dump; a thread that also runs on a waiting rank is no progress."""
    f = beam_search(tmp_path, 601, members, copied_s)
    assert summary(f) == ("stall", "unknown", (4, 5)) and "working" not in f.message


@pytest.mark.parametrize("after_s", [250, 90_000])
def test_how_long_ranks_waited_is_bounded_by_the_files_times(after_s: int, tmp_path: Path) -> None:
    """Files that are a day younger than the timeout allows are copies."""
    job = trained(Job(7), 30)
    job.collective(ranks=(0, 1, 2, 3, 5, 6))
    write(tmp_path, job)
    for path in tmp_path.iterdir():
        at = job.now_ns + after_s * SECOND_NS
        os.utime(path, ns=(at, at))
    f = only(diagnose_dumps(tmp_path))
    assert f.culprits == (4,) and ("for 4 min 10 s at most" in f.message) is (after_s == 250)
