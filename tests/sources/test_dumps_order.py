"""Dumps with operations begun in different orders, with batches, with slightly late ranks, and with partly created groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distdiag.diagnosis.model.findings import Report
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, as_json, write
from tests.sources.test_dumps import errors, only, quiet, summary, trained

SECOND_NS = 1_000_000_000


def begin(job: Job, rank: int) -> None:
    """Mark the newest operation of a rank as begun on its device."""
    e = job.ranks[rank].entries[-1]
    e.update(state="started", time_discovered_started_ns=e["time_created_ns"] + 1000)


def diagnose(folder: Path, job: Job, after_s: float = 600.0) -> Report:
    """Return the verdict on dumps that were all written this long after the newest entry."""
    write(folder, job)
    newest = max(e["time_created_ns"] for ring in job.ranks for e in ring.entries)
    for p in folder.iterdir():
        t = newest + int(after_s * SECOND_NS)
        os.utime(p, ns=(t, t))
    return diagnose_dumps(folder)


def test_devices_that_run_two_groups_in_opposite_order_are_a_cycle(tmp_path: Path) -> None:
    job = trained(Job(4, {"1": ("fsdp", (0, 1, 2, 3))}))
    for r in range(4):
        first, second = ("1", "0") if r == 2 else ("0", "1")
        job.issue(r, "all_reduce", first, False)
        begin(job, r)
        job.issue(r, "all_reduce", second, False)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "group_cycle", (2,)) and f.certainty == "suspected"
    assert "rank 2 issued all_reduce #21 (fsdp" in f.message and "same order" in f.advice


def swapping(calls: str) -> Job:
    """Let the hosts run ahead: three ranks issue a sum, a table and a mean (a, b, c), rank 2 these calls instead."""
    made = {"a": ("all_reduce", (4,), 58), "b": ("_all_gather_base", (64,), 71), "c": ("all_reduce", (2,), 60)}
    job = trained(Job(4))
    for r in range(4):
        for op, shape, line in map(made.__getitem__, calls if r == 2 else "abcab"):
            job.issue(r, op, "0", False, shape=shape, line=line)
    return job


def test_two_calls_that_one_rank_exchanges_are_an_order_mismatch(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, swapping("bacab")))
    assert summary(f) == ("deadlock", "order_mismatch", (2,)) and f.certainty == "proved"
    assert "each side makes the other's call next: only their order differs" in f.message
    assert "in the same order on all ranks" in f.advice and "on that rank alone" not in f.advice


def test_a_call_left_out_is_no_exchange(tmp_path: Path) -> None:
    for i, calls in enumerate(("bcab", "babc", "ba")):  # the last one: what follows is not known
        f = only(diagnose(tmp_path / str(i), swapping(calls)))
        assert f.cause != "order_mismatch" and "only their order" not in f.message


def test_devices_of_other_groups_are_in_no_cycle(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for rank 2, which waits for rank 3: none of them has begun what another has not, in both directions."""
    job = trained(Job(4, {"1": ("tp", (2, 3))}))
    job.collective(group="1", ranks=(2,))
    begin(job, 2)
    job.collective(ranks=(0, 1))
    for r in (0, 1):
        begin(job, r)
    assert only(diagnose(tmp_path, job)).culprits == (3,)


def batch(job: Job, rank: int, group: str, done: bool, *messages: str) -> None:
    """Issue a `batch_isend_irecv`: its messages keep the state at issue, the entry that closes it has their state."""
    ring = job.ranks[rank]
    number = ring.p2p.get(group, 0) + 1
    for op in (*messages, "coalesced"):
        job.issue(rank, op, group, done and op == "coalesced")
        ring.p2p[group] = number
        ring.entries[-1].update(is_p2p=True, p2p_seq_id=number)
    ring.seq[group] -= 1  # `issue` counted the last one as a collective
    ring.entries[-1]["collective_seq_id"] = ring.seq[group]


def test_messages_complete_with_their_batch(tmp_path: Path) -> None:
    job = trained(Job(3))
    for _ in range(3):
        for r in range(3):
            batch(job, r, "0", True, f"send {r}->{(r + 1) % 3}", f"recv {r}<-{(r - 1) % 3}")
        job.now_ns += SECOND_NS // 100
    assert diagnose(tmp_path / "over", job).findings == ()
    job.collective(ranks=(0, 2))
    assert only(diagnose(tmp_path / "hung", job)).culprits == (1,)


def test_parts_of_a_coalesced_collective_complete_with_it(tmp_path: Path) -> None:
    job = trained(Job(2))
    for r in range(2):
        for op in ("_all_gather_base", "_all_gather_base", "coalesced"):
            job.issue(r, op, "0", op == "coalesced")
            job.ranks[r].seq["0"] = 21
            job.ranks[r].entries[-1]["collective_seq_id"] = 21
    assert diagnose(tmp_path, job).findings == ()


def test_different_dtypes_of_coalesced_tensors_are_a_mismatch(tmp_path: Path) -> None:
    job = trained(Job(3))
    for r in range(3):
        job.issue(r, "allreduce_coalesced", "0", False, dtype="Float" if r == 1 else "BFloat16")
    assert summary(only(diagnose(tmp_path, job))) == ("mismatch", "dtype", (1,))


def test_a_rank_one_call_behind_is_late_only_after_a_while(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(done=())  # in flight everywhere, and the next one not yet issued on rank 1
    job.collective(ranks=(0, 2, 3), done=())
    assert quiet(diagnose(tmp_path / "young", job, after_s=0.1))
    assert only(diagnose(tmp_path / "old", job)).culprits == (1,)


def test_a_rank_that_often_pauses_this_long_is_not_stuck(tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(10):
        job.collective()
        job.now_ns += 2 * SECOND_NS  # every step takes this long
    job.collective(ranks=(0, 1, 3))
    assert quiet(diagnose(tmp_path / "young", job, after_s=1.0))
    assert only(diagnose(tmp_path / "old", job, after_s=10.0)).culprits == (2,)


def test_a_member_that_never_created_the_group_is_named(tmp_path: Path) -> None:
    """The others wait for it where no operation is recorded yet, and the ranks that seem to be missing do, too."""
    job = trained(Job(4))
    job.groups["1"] = ("eval", (1, 2, 3))
    job.collective(ranks=(0, 2))
    for r in range(4):
        dump = job.dump(r)
        if r == 2:
            del dump["pg_config"]["1"]
        (tmp_path / f"rank{r}.json").write_bytes(as_json(dump))
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("deadlock", "missing_rank", (2,)) and "never created group eval" in f.message


def test_a_collective_that_all_devices_have_begun_is_no_cycle(tmp_path: Path) -> None:
    """One pair of the data-parallel groups hangs; its ranks' next calls are queued behind, and the others wait in those."""
    tp = {"1": ("tp", (0, 1)), "2": ("tp", (2, 3))}
    for queued in (True, False):
        job = trained(Job(4, {**tp, "3": ("dp", (0, 2)), "4": ("dp", (1, 3))}))
        job.collective("reduce_scatter", "3")
        job.collective("reduce_scatter", "4", done=())
        for r in (1, 3):
            begin(job, r)
        for group, (_, members) in tp.items():
            job.collective(group=group, ranks=members if queued else members[:1], done=())
        for r in (0, 2):
            begin(job, r)
        f = only(diagnose(tmp_path / f"{queued}", job))
        assert summary(f) == ("stall", "unknown", (1, 3)) and f.victims == (0, 2)
        assert "reduce_scatter #21 (dp 4, 4.0 KiB) timed out with no rank missing" in f.message
        early = only(diagnose(tmp_path / f"{queued}, early", job, after_s=120.0))
        assert "has not completed with no rank missing" in early.message and early.culprits == (1, 3)
        assert "between ranks 1, 3" in f.message and "ranks 0, 2 wait for them" in f.message


def test_a_member_whose_list_of_the_group_differs_is_named(tmp_path: Path) -> None:
    """Rank 3 counts itself in, the others do not: its communicator is not made, or its collective waits for the others."""
    for entered in (False, True):
        job = trained(Job(5))
        job.groups["1"] = ("expert", (0, 1, 2, 3))
        job.collective(group="1", ranks=(0, 1, 2), done=(0, 1, 2))
        if entered:
            job.collective(group="1", ranks=(3,), done=())
        job.collective(ranks=(0, 1, 2, 4))
        folder = tmp_path / f"{entered}"
        folder.mkdir()
        for r in range(5):
            dump = job.dump(r)
            if r < 3:
                dump["pg_config"]["1"]["ranks"] = "[0, 1, 2]"
            (folder / f"rank{r}.json").write_bytes(as_json(dump))
        f = only(diagnose_dumps(folder))
        assert summary(f) == ("group_misuse", "not_a_member", (3,)) and f.victims == (0, 1, 2, 4)
        assert "group expert consists of ranks 0–3 on rank 3, but of ranks 0, 1, 2 on ranks 0, 1, 2" in f.message


def test_a_rank_with_a_dump_of_an_earlier_attempt_only_is_missing(tmp_path: Path) -> None:
    old, new = trained(Job(4)), trained(Job(4))
    old.collective(ranks=(0, 1, 2))
    for ring in new.ranks:
        for e in ring.entries:
            e["time_created_ns"] += 3600 * SECOND_NS
    new.now_ns += 3600 * SECOND_NS
    new.collective(ranks=(0, 1, 3))
    write(tmp_path / "attempt_0", old)
    write(tmp_path / "attempt_1", new)
    (tmp_path / "attempt_1" / "_dump_2").unlink()
    report = diagnose_dumps(tmp_path)
    assert summary(only(report)) == ("rank_lost", "silent", (2,))
    assert any("of an earlier run" in n for n in report.notes)


def test_a_message_to_the_wrong_rank_is_named(tmp_path: Path) -> None:
    """A ring in batches: all numbers agree except the misdirected message's, and what follows is stuck behind it."""
    job = Job(5)
    for i in range(16):
        for r in range(5):
            to = (r + 2) % 5 if i == 12 and r == 3 else (r + 1) % 5
            batch(job, r, "0", i < 12, f"send {r}->{to}", f"recv {r}<-{(r - 1) % 5}")
        job.now_ns += SECOND_NS // 100
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "p2p_cycle", (3,)) and f.certainty == "suspected"
    assert "rank 3's send to rank 0" in f.message and "rank 4's recv from rank 3" in f.message


def test_a_send_and_its_recv_of_different_lengths_are_a_mismatch(tmp_path: Path) -> None:
    """Both ends are in flight in a pipeline: the messages and collectives behind them accuse nobody."""
    job = trained(Job(4, {"1": ("pipe", (0, 1, 2, 3))}), 3)
    for source in (0, 1, 2):
        job.message(source, source + 1, "1")
    job.issue(2, "send 2->3", "1", False, shape=(2048, 512), line=40)
    job.issue(3, "recv 3<-2", "1", False, shape=(1024, 512), line=41)
    job.now_ns += SECOND_NS // 100
    job.issue(1, "send 1->2", "1", False)
    job.issue(2, "recv 2<-1", "1", False)
    job.now_ns += SECOND_NS // 100
    job.collective(ranks=(0,))
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "shape", ()) and f.certainty == "suspected"
    assert "rank 2 sends 1,048,576 elements" in f.message and "rank 3, which receives 524,288" in f.message
    assert [(w.rank, w.line) for w in f.where] == [(2, 40), (3, 41)]


def test_a_rank_with_messages_in_flight_has_something_in_flight(tmp_path: Path) -> None:
    job = trained(Job(4))
    for r in (1, 2, 3):
        job.message(r, r % 3 + 1, received=False)
    job.collective(ranks=(0,))
    assert "nothing in flight" not in only(diagnose(tmp_path, job)).message


def test_a_device_that_has_not_begun_its_oldest_operation_is_the_culprit(tmp_path: Path) -> None:
    """Its later operations lead to all ranks, and its peers have not begun what is queued behind that operation."""
    groups = {
        "1": ("inner", (0, 1, 2)),
        "2": ("inner", (3, 4, 5)),
        **{str(3 + k): ("outer", (k, 3 + k)) for k in range(3)},
    }
    job = trained(Job(6, groups))
    job.collective(group="1")
    job.collective(group="2", done=())
    for r in (3, 4):
        begin(job, r)
    for k in range(3):
        job.collective(group=str(3 + k), done=())
        begin(job, k)
    job.collective(done=())
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("stall", "unknown", (5,)) and f.victims == (0, 1, 2, 3, 4)


def test_a_device_that_has_not_begun_its_messages_is_the_culprit(tmp_path: Path) -> None:
    """Each rank of a ring exchanges a batch with both neighbours; the peers of rank 2 have begun theirs."""
    job = trained(Job(4, {"1": ("ring", (0, 1, 2, 3))}))
    for r in range(4):
        for op in (f"send {r}->{(r + 1) % 4}", f"recv {r}<-{(r - 1) % 4}"):
            job.issue(r, op, "1", False)
            if r != 2:
                begin(job, r)
    job.now_ns += SECOND_NS // 100
    job.collective(done=())
    assert only(diagnose(tmp_path, job)).culprits == (2,)


def test_of_both_ends_of_a_message_in_flight_neither_is_accused(tmp_path: Path) -> None:
    """The receiver's host has gone on, the sender's has not: either device may have stopped, or the link."""
    job = trained(Job(4, {"1": ("pipe", (0, 1, 2))}))
    job.issue(1, "send 1->2", "1", False)
    job.issue(2, "recv 2<-1", "1", False)
    job.issue(0, "recv 0<-1", "1", False)
    job.now_ns += SECOND_NS // 100
    job.collective(ranks=(2, 3))
    assert all(not f.culprits for f in diagnose(tmp_path, job).findings)


def test_a_rank_that_is_past_a_collective_has_left_it_out(tmp_path: Path) -> None:
    """A rank without tokens skips its group's all_to_all, and waits in the next collective of all ranks."""
    job = trained(Job(6, {"1": ("expert", (0, 1, 2)), "2": ("expert", (3, 4, 5))}))
    job.collective("all_to_all", group="1", ranks=(0, 1), line=71)
    job.collective("all_to_all", group="2", line=71)
    job.collective(done=())
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "missing_rank", (2,))
    assert "rank 2 has not entered all_to_all #21" in f.message
    assert "but is in all_reduce #21 (default_pg, 4.0 KiB), which ranks 0, 1 issued after it" in f.message
    assert "train.py:71" in f.advice


def test_a_cycle_whose_culprit_waits_with_outsiders_names_the_call_that_it_left_out(tmp_path: Path) -> None:
    """The members of the other group wait in the barrier, too: it is no call of the culprit alone."""
    job = trained(Job(8, {"1": ("even", (0, 2, 4, 6)), "2": ("odd", (1, 3, 5, 7))}))
    job.collective("all_gather", group="1", ranks=(0, 2, 4), line=61)
    job.collective("all_gather", group="2", line=61)
    job.collective("barrier", ranks=(1, 3, 5, 6, 7), line=58)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "missing_rank", (6,))
    assert "alone" not in f.message and "only rank 6 of that group is there" in f.message
    assert "past all_gather at train.py:61" in f.advice


def test_dumps_of_one_node_only_do_not_accuse_the_other_node(tmp_path: Path) -> None:
    job = trained(Job(16))
    job.collective(ranks=tuple(r for r in range(16) if r != 11))
    write(tmp_path, job)
    for r in range(8):
        (tmp_path / f"_dump_{r}").unlink()
    report = diagnose_dumps(tmp_path)
    assert only(report).culprits == (11,)
    rest = next(f for f in report.findings if f.cause == "missing_dump")
    assert rest.severity == "warning" and "ranks 0–7 left no dump: whole nodes" in rest.message


def test_a_single_missing_dump_is_accused_although_another_rank_is_late(tmp_path: Path) -> None:
    job = trained(Job(8))
    job.collective(ranks=(0, 1, 2, 4, 6, 7))
    write(tmp_path, job)
    (tmp_path / "_dump_3").unlink()
    assert {r for f in errors(diagnose_dumps(tmp_path)) for r in f.culprits} == {3, 5}


def test_a_message_of_a_running_job_is_named_from_the_end_that_is_missing(tmp_path: Path) -> None:
    job = trained(Job(2))
    for _ in range(5):
        job.message(0, 1)
    job.message(0, 1, sent=False)
    (f,) = diagnose(tmp_path, job, after_s=0.1).findings
    assert (f.severity, f.culprits) == ("info", (0,)) and "the send that matches rank 1's recv" in f.message


def pipeline(steps: int) -> Job:
    """Return a job of four stages that pass on eight messages, and as many back, in each step."""
    job = trained(Job(4))
    for _ in range(steps):
        for forward in (True, False):
            for _ in range(8):
                for a, b in ((0, 1), (1, 2), (2, 3)) if forward else ((3, 2), (2, 1), (1, 0)):
                    job.message(a, b)
    return job


def test_dumps_of_a_pipeline_that_were_taken_after_each_other_lack_no_message(tmp_path: Path) -> None:
    """The recv of the first dump is open, and the sender's later dump has the send."""
    job = pipeline(2)
    job.issue(1, "send 1->2", "0", True, line=40)
    job.issue(2, "recv 2<-1", "0", False, line=41)
    assert not diagnose(tmp_path, job, after_s=0.1).findings


def test_in_a_running_job_each_late_rank_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    job = pipeline(2)
    job.issue(1, "recv 1<-0", "0", False, line=41)
    job.issue(3, "recv 3<-2", "0", False, line=41)
    (f,) = diagnose(tmp_path, job, after_s=0.1).findings
    assert f.culprits == (0, 2)
    assert (
        "rank 0 was on its way to the send that matches rank 1's recv (default_pg), rank 2 to the other end of"
        in f.message
    )


def test_in_a_running_job_those_behind_a_late_rank_are_on_their_way_too(tmp_path: Path) -> None:
    job = trained(Job(4, {"1": ("tp", (2, 3))}))
    job.collective(group="1", ranks=(2,))
    job.collective(ranks=(0, 1))
    (f,) = diagnose(tmp_path, job, after_s=0.05).findings
    assert f.culprits == (3,) and "ranks 2, 3 were on their way to all_reduce #21 (default_pg" in f.message


def test_a_stage_that_has_not_passed_on_a_message_is_named(tmp_path: Path) -> None:
    """Stages 1 and 2 wait for each other: 1 for what comes back, 2 for what 1 has received and not sent."""
    job = pipeline(2)
    for i in range(8):
        job.message(0, 1)
        job.message(1, 2, sent=i < 7)
        if i < 7:
            job.message(2, 3)
    job.issue(1, "recv 1<-2", "0", False, line=41)
    (f,) = errors(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "missing_rank", (1,))
    assert "rank 1 left out its send" in f.message


def logged(left_out_by: int = -1, more: int = 0) -> Job:
    """Let five ranks average two buckets, without frames as DDP's, then sum a counter; one may leave out its last counter and go on."""
    job = Job(5)
    for i in range(12):
        for r in range(5):
            last = i == 11
            for size in (4096, 70_000):
                job.issue(r, "all_reduce", "0", True, shape=(size,))
                job.ranks[r].entries[-1]["frames"] = []
            if not (last and r == left_out_by):
                job.issue(r, "all_reduce", "0", not last, shape=(3,), line=27)
        job.now_ns += SECOND_NS
    for size in (4096, 70_000)[: more if left_out_by >= 0 else 0]:
        job.issue(left_out_by, "all_reduce", "0", False, shape=(size,))
        job.ranks[left_out_by].entries[-1]["frames"] = []
    return job


def test_a_call_left_out_before_another_of_its_kind_is_not_a_wrong_size(tmp_path: Path) -> None:
    """The rank's next call meets the one that it left out; it waits in that, though its newest call is a later one with a line."""
    job = logged(left_out_by=3, more=2)
    job.issue(3, "all_reduce", "0", False, shape=(3,), line=27)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "shape", (3,))
    assert f.message.startswith("rank 3 left out all_reduce (train.py:27); rank 3 is in all_reduce of 4,096 elements")
    assert f.advice.startswith("find what led rank 3 past all_reduce (train.py:27)") and "compare" not in f.advice
    assert [(w.rank, w.line) for w in f.where] == [(3, None)]
    assert [(w.rank, w.line) for w in f.waiting] == [(r, 27) for r in (0, 1, 2, 4)]


def test_another_size_at_the_same_line_is_nothing_left_out(tmp_path: Path) -> None:
    job = logged()
    for r in range(5):
        job.ranks[r].entries[-1]["input_sizes"] = [[7 if r == 3 else 3]]
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "shape", (3,)) and "left out" not in f.message + f.advice


def test_other_operations_of_one_number_are_a_mismatch_also_on_a_path_that_the_data_leads_away(tmp_path: Path) -> None:
    """It was a deadlock for a missing rank: no token for an expert, so one rank leaves out its all_gather."""
    job = trained(Job(4))
    for n in range(30):
        for r in range(4):
            for op, line in (("_all_gather_base", 52), ("_reduce_scatter_base", 77)):
                if n < 29 or (op == "_all_gather_base") is (r != 2):
                    job.issue(r, op, "0", n < 29, line=line)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "op", (2,)) and "a branch on the data (no token for an expert)" in f.advice


@pytest.mark.parametrize(("ahead", "behind"), [((0,), (1, 2, 3)), ((0, 1, 3), (2,))])
def test_a_completed_call_from_another_line_is_where_the_calls_part(
    ahead: tuple[int, ...], behind: tuple[int, ...], tmp_path: Path
) -> None:
    """All calls are one helper's; the advice named the line that all ranks reach."""
    job = Job(4)
    for _ in range(5):
        job.collective("barrier", line=88)
        if len(behind) == 1:  # what it leaves out it has made before
            job.collective("barrier", line=251)
    for r in range(4):
        job.issue(r, "barrier", "0", True, line=251 if r in ahead else 268)
    for r in ahead:
        job.issue(r, "barrier", "0", False, line=268)
    for entry in (e for ring in job.ranks for e in ring.entries):
        line = entry["frames"][2]["line"]
        entry["frames"].insert(2, {"name": "sync", "filename": "/home/user/helper.py", "line": 7})
        assert line in (88, 251, 268)
    f = only(diagnose(tmp_path, job, after_s=2e6))  # copies: how long it waited is not needed
    assert summary(f) == ("deadlock", "missing_rank", ahead if len(ahead) == 1 else behind)
    assert "the call at train.py:251 in step" in f.advice and "helper" not in f.message + f.advice


@pytest.mark.parametrize(("after_s", "state"), [(0.1, "running"), (60.0, "deadlocked")])
def test_the_first_rank_in_a_call_is_ahead_of_a_running_job(after_s: float, state: str, tmp_path: Path) -> None:
    job = trained(Job(4), 1_000)
    job.collective(ranks=(0,))
    report = diagnose(tmp_path, job, after_s=after_s)
    assert report.state == state and quiet(report) is (state == "running")
    if quiet(report):
        assert report.findings[0].message.startswith(
            "ranks 1, 2, 3 were on their way to all_reduce #1,001 (default_pg, 4.0 KiB) when"
        )


def test_a_role_with_its_own_line_has_made_no_call_more(tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(5):
        for line in (88, 90):
            for r in range(4):
                job.issue(r, "broadcast", "0", True, line=line + 100 * (r == 0))
    job.issue(0, "broadcast", "0", False, line=188)
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (0,) and "train.py:188" in f.advice
