"""A message that a rank left out in a pipeline: its receiver waits, and the rank itself waits for the receiver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, write
from tests.sources.test_dumps import MINUTE_NS, only, summary

MICRO = 3


def issue(job: Job, rank: int, op: str, done: bool, line: int, shape: tuple[int, ...] = (1024,)) -> None:
    job.now_ns += 1_000_000
    job.issue(rank, op, "0", done, shape, line=line)


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
    assert "rank 1 has not made the next send to rank 2: rank 2 waits in recv from rank 1 at train.py:53" in f.message
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


def test_what_was_never_issued_is_named_before_what_is_queued_behind(tmp_path: Path) -> None:
    """Blocking messages of hosts that run ahead: rank 0 waits for a send of rank 1 that is queued behind its recv."""
    job = Job(3)
    step(job)
    step(job, left_out=True)
    for recorder in job.ranks:
        for e in recorder.entries:
            e["frames"][0]["name"] = "recv"
    for recorder in job.ranks[:1]:  # the two that wait for rank 1 are equally many
        recorder.entries = [e for e in recorder.entries if e["retired"] or "recv" in e["profiling_name"]]
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (1,))
    assert "rank 1 has not made the next send to rank 2" in f.message


def exchange(job: Job, rank: int, peers: tuple[int, ...], done: bool) -> None:
    """Issue one batch with a send and a recv for each of these neighbours."""
    ring, made = job.ranks[rank], len(job.ranks[rank].entries)
    for peer in peers:
        for op in (f"send {rank}->{peer}", f"recv {rank}<-{peer}"):
            job.issue(rank, op, "0", False, line=70)
            job.now_ns += 1_000  # each message of a batch is recorded at its own time
    job.issue(rank, "recv", "0", done, line=70)
    ring.entries[-1]["profiling_name"] = "nccl:coalesced"
    for e in ring.entries[made:]:  # one number for the batch
        e["p2p_seq_id"] = ring.entries[made]["p2p_seq_id"]
    ring.p2p["0"] = ring.entries[made]["p2p_seq_id"]


def halo(job: Job, without: bool = False, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Let four ranks in a row exchange with their neighbours, then sum; rank 1 may leave out rank 2."""
    for rank in range(4):
        peers = tuple(q for q in (rank - 1, rank + 1) if 0 <= q < 4 and not (without and (rank, q) == (1, 2)))
        exchange(job, rank, peers, done=not (without and rank == 2))
    job.collective(ranks=ranks, done=not without, line=90)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_message_that_the_newest_batch_lacks_is_named(tmp_path: Path, ahead: bool) -> None:
    """The host of rank 2 waits for its batch, or has run ahead."""
    job = Job(4)
    for _ in range(9):
        halo(job)
    halo(job, without=True, ranks=(0, 1, 2, 3) if ahead else (0, 1, 3))
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (1,)) and f.victims == (0, 2, 3)
    assert "the newest batch of rank 1 at train.py:70 in step lacks it, where each of the 9 before had it" in f.message
    assert "rank 1 left out its" in f.message and "in all_reduce #10" in f.message and "py-spy" not in f.advice


def test_two_ranks_whose_batch_and_collective_wait_for_each_other_are_a_cycle(tmp_path: Path) -> None:
    job = Job(4)
    halo(job)
    halo(job, without=True)
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (1,))
    assert "rank 1 has not made the next" in f.message and "a cycle" in f.message


def test_a_rank_that_stopped_before_its_batch_has_left_out_nothing(tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(9):
        halo(job)
    for rank, peers in ((0, (1,)), (2, (1, 3)), (3, (2,))):
        exchange(job, rank, peers, done=False)
    write(tmp_path, job)
    assert summary(only(diagnose_dumps(tmp_path))) == ("stall", "unknown", (1,))


@pytest.mark.parametrize("lost", [0, 5])
def test_a_send_that_completed_shorter_than_its_recv_is_a_mismatch(tmp_path: Path, lost: int) -> None:
    """Its ring has lost the first messages, or not; what waits behind it accuses nobody."""
    job = Job(3)
    for _ in range(4):
        step(job)
    issue(job, 0, "send 0->1", True, 50, (3072,))
    issue(job, 1, "recv 1<-0", False, 51)
    job.ranks[1].entries[-1]["time_discovered_started_ns"] = job.now_ns + MINUTE_NS
    job.ranks[1].entries[-1]["state"] = "started"
    issue(job, 0, "recv 0<-1", False, 63)
    issue(job, 1, "send 1->2", False, 52)
    issue(job, 2, "recv 2<-1", False, 53)
    for ring in job.ranks[:2]:
        del ring.entries[:lost]
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("mismatch", "shape", ()) and f.victims == (0, 1, 2)
    assert (
        "rank 0 sends 3,072 elements at train.py:50 in step to rank 1, which receives 1,024 at train.py:51" in f.message
    )
    assert "the recv has not completed" in f.message and "send the length" in f.advice
    for path in tmp_path.iterdir():  # a fault however young it is
        os.utime(path, ns=(job.now_ns, job.now_ns))
    assert summary(only(diagnose_dumps(tmp_path))) == ("mismatch", "shape", ())


def test_an_older_dump_of_the_sender_shows_no_length_that_differs(tmp_path: Path) -> None:
    """Lengths vary; the receiver was dumped three messages later, and its next recv waits."""
    job = Job(3)
    for length in (7, 8, 7, 9, 7, 7):
        for rank, op in ((0, "send 0->1"), (1, "recv 1<-0")):
            issue(job, rank, op, True, 50, (length,))
    issue(job, 1, "recv 1<-0", False, 51, (8,))
    del job.ranks[0].entries[4:], job.ranks[0].entries[:2], job.ranks[1].entries[:1]
    write(tmp_path, job)
    assert not [f for f in diagnose_dumps(tmp_path).findings if f.kind == "mismatch"]


def test_a_recv_behind_another_has_been_issued(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for each other; rank 1's recv from rank 2 is queued behind that."""
    job = Job(3)
    step(job)
    for rank, op, begun in ((0, "recv 0<-1", 1), (1, "recv 1<-0", 1), (1, "recv 1<-2", 0), (2, "send 2->1", 1)):
        issue(job, rank, op, False, 51)
        if begun:
            job.ranks[rank].entries[-1] |= {"state": "started", "time_discovered_started_ns": job.now_ns + MINUTE_NS}
    for ring in job.ranks:
        del ring.entries[0]
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert "rank 1 has issued the recv that matches rank 2's send (default_pg) but not begun it" in f.message
    assert "rank 0 has not entered the other end of another message" in f.message
