"""A message that a rank left out in a pipeline: its receiver waits, and the rank itself waits for the receiver."""

from __future__ import annotations

from pathlib import Path

from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, write
from tests.sources.test_dumps import only, summary

MICRO = 3


def issue(job: Job, rank: int, op: str, done: bool, line: int) -> None:
    job.now_ns += 1_000_000
    job.issue(rank, op, "0", done, line=line)


def step(job: Job, left_out: bool = False) -> None:
    """Run one round of three stages: all micro-batches forward, then all back; rank 1 may leave out its last send to rank 2."""
    done = not left_out
    for i in range(MICRO):
        last = left_out and i == MICRO - 1
        issue(job, 0, "send 0->1", True, 50)
        issue(job, 1, "recv 1<-0", True, 51)
        if not last:
            issue(job, 1, "send 1->2", True, 52)
        issue(job, 2, "recv 2<-1", not last, 53)
    for _ in range(MICRO):
        for rank, op, line in ((2, "send 2->1", 60), (1, "recv 1<-2", 61), (1, "send 1->0", 62), (0, "recv 0<-1", 63)):
            issue(job, rank, op, done, line)


def test_a_send_left_out_in_one_round_is_named(tmp_path: Path) -> None:
    job = Job(3)
    for _ in range(15):
        step(job)
    step(job, left_out=True)
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (1,)) and f.victims == (0, 2)
    assert "rank 1 left out its send (train.py:52) to rank 2" in f.message and "a cycle" in f.message
    assert "made that send 47 times" in f.message and "train.py:52" in f.advice and "py-spy" not in f.advice


def test_two_ranks_that_wait_for_each_other_are_a_cycle_without_a_history(tmp_path: Path) -> None:
    job = Job(3)
    step(job)
    step(job, left_out=True)
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (1,))
    assert "rank 1 has made no send to rank 2: rank 2 waits in recv from rank 1 at train.py:53" in f.message
    assert "and rank 1 in recv from rank 2 at train.py:61" in f.message and "equally many messages" in f.advice


def test_a_rank_that_stopped_before_its_send_has_left_out_nothing(tmp_path: Path) -> None:
    """It has received the newest micro-batch and issues nothing more: its host stopped."""
    job = Job(3)
    for _ in range(15):
        step(job)
    issue(job, 0, "send 0->1", True, 50)
    issue(job, 1, "recv 1<-0", True, 51)
    issue(job, 2, "recv 2<-1", False, 53)
    write(tmp_path, job)
    assert summary(only(diagnose_dumps(tmp_path))) == ("stall", "unknown", (1,))
