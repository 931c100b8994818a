"""What the times in dumps show: a running job, a late rank; and differing sizes, orders and batches."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner

from distdiag.cli.diagnose import command
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, write
from tests.sources.test_dumps import only, quiet, summary, trained
from tests.sources.test_dumps_order import SECOND_NS, begin, diagnose
from tests.sources.test_logs import raised

HOUR_S = 3600.0  # files are copied this much later


def just_ended(job: Job, rank: int, at_ns: int) -> None:
    """Mark a rank's newest operation as found complete by the dump itself, at `at_ns`."""
    e = next(e for e in reversed(job.ranks[rank].entries) if e["state"] == "completed")
    e.update(retired=False, time_discovered_completed_ns=at_ns)


def test_a_rank_with_recent_progress_shows_a_running_job(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    just_ended(job, 2, job.now_ns + SECOND_NS // 100)
    report = diagnose(tmp_path, job, after_s=3.0)
    assert quiet(report) and report.state == "running"
    assert "rank 2 was on its way to all_reduce #21" in report.findings[0].message
    copied = diagnose(tmp_path, job, after_s=HOUR_S)
    assert [f.severity for f in copied.findings] == ["warning"] and copied.state == "waiting"


@pytest.mark.parametrize(("asked_s", "severity"), [(0.001, "warning"), (60, "error")])
def test_a_dump_that_found_the_operation_just_begun_may_be_of_a_running_job(
    asked_s: float, severity: str, tmp_path: Path
) -> None:
    """The times of copied files show nothing: a hang was explained away, and a running job was an error."""
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    for r in (0, 1, 3):
        e = job.ranks[r].entries[-1]
        e.update(state="started", time_discovered_started_ns=e["time_created_ns"] + int(asked_s * SECOND_NS))
    report = diagnose(tmp_path, job, after_s=24 * HOUR_S)
    (f,) = report.findings
    assert f.severity == severity and f.culprits == (2,)
    assert (f.cost == "none, if the job ran on") is (severity == "warning")
    assert "running job" not in f.message and any("a second set of dumps" in note for note in report.notes)
    # files written while the job could hang show a later dump
    assert only(diagnose(tmp_path, job, after_s=60.0)).culprits == (2,)


TIMED_OUT = (
    "[rank{0}]:[E904 15:41:22.1 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=21, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600021 milliseconds "
    "before timing out.\n"
)


@pytest.mark.parametrize("arrived", [(0, 1, 3), ()])
def test_a_timeout_in_the_log_is_no_running_job(arrived: tuple[int, ...], tmp_path: Path) -> None:
    """Dumps hid the log's error: they were of a running job by their own times, or showed nothing in flight."""
    job = trained(Job(4))
    job.collective(ranks=arrived)
    for r in arrived:
        just_ended(job, 2, job.now_ns)
        begin(job, r)
    write(tmp_path, job)
    (tmp_path / "job.log").write_text("".join(TIMED_OUT.format(r) for r in (0, 1, 3)))
    shown = CliRunner().invoke(command, [str(tmp_path)]).output
    assert "1 error; look at rank 2 first" in shown and "running job" not in shown and "not read" not in shown


def test_the_dumps_of_a_job_that_a_log_shows_to_be_over(tmp_path: Path) -> None:
    job = trained(Job(4))
    write(tmp_path, job)
    log = tmp_path / "job.log"
    log.write_text("[rank0]: epoch 4 loss 1.0\njob exit 0\n")
    shown = CliRunner().invoke(command, [str(tmp_path)]).output
    assert shown.startswith("ended: nothing found") and "if the job hangs" not in shown
    job.collective(ranks=(0, 1, 3))
    write(tmp_path, job)
    (tmp_path / "_dump_2").unlink()
    log.write_text(raised(2, "KeyError: 'x'") + "".join(TIMED_OUT.format(r) for r in (0, 1, 3)))
    shown = CliRunner().invoke(command, [str(tmp_path)]).output
    assert shown.startswith("failed: 1 error") and "rank 2 left no dump" in shown


def test_later_collectives_of_a_member_show_that_a_job_moves(tmp_path: Path) -> None:
    for done, moves in (((2, 3), False), ((3,), True)):
        job = trained(Job(4))
        job.collective(done=(2, 3))
        job.collective(ranks=(2, 3) if moves else (0, 1, 2, 3), done=done if moves else ())
        report = diagnose(tmp_path / f"{moves}", job, after_s=0.001)
        assert any("the job moved on: rank 3 has completed later" in note for note in report.notes) is moves
        assert bool(report.findings) is not moves


def test_progress_in_another_group_does_not_excuse_a_wait_of_minutes(tmp_path: Path) -> None:
    job = trained(Job(4, {"1": ("heartbeat", (0, 1))}))
    job.collective(ranks=(0, 1, 3))
    job.now_ns += 600 * SECOND_NS
    job.collective(group="1")
    just_ended(job, 0, job.now_ns)
    assert only(diagnose(tmp_path, job, after_s=HOUR_S)).culprits == (2,)


def test_a_recorder_that_retires_nothing_does_not_show_when_the_dump_was_taken(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    for ring in job.ranks:
        for e in ring.entries:
            e["retired"] = False
    assert only(diagnose(tmp_path, job, after_s=HOUR_S)).culprits == (2,)


@pytest.mark.parametrize("op", ["_all_gather_base", "all_gather", "reduce_scatter", "_reduce_scatter_base"])
def test_a_shorter_last_batch_on_one_rank_is_a_mismatch(op: str, tmp_path: Path) -> None:
    job = trained(Job(4))
    for r in range(4):
        job.issue(r, op, "0", False, shape=(37 if r == 3 else 64, 10))
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "shape", (3,)) and "370" in f.message and "640" in f.message


def test_coalesced_parts_of_different_sizes_are_legal(tmp_path: Path) -> None:
    """Tensors of different sizes are gathered by one broadcast per rank, of which only the batch is timed."""
    job = trained(Job(3))
    for done in (True, False):
        for r in range(3):
            for op in ("_broadcast_oop", "_broadcast_oop", "ALLGATHER_coalesced"):
                last = op.endswith("coalesced")
                job.issue(r, op, "0", done and last, shape=(10 + r,))
                ring = job.ranks[r]
                ring.seq["0"] = 21 if done else 22
                ring.entries[-1]["collective_seq_id"] = ring.seq["0"]
        if done:
            assert diagnose(tmp_path / "over", job).findings == ()
    job.collective(ranks=(0, 2))
    f = only(diagnose(tmp_path / "hung", job))
    assert f.culprits == (1,)


@pytest.mark.parametrize("timed", [False, True])
def test_the_rank_with_another_order_of_two_groups_is_the_culprit(timed: bool, tmp_path: Path) -> None:
    """Ranks in only one of the groups show nothing about the order, however many they are."""
    job = trained(Job(8, {"1": ("half", (0, 1, 2, 3))}))
    for again in range(2):
        for r in range(8):
            groups = ["0"] if r > 3 else ["0", "1"] if r == 2 else ["1", "0"]
            if len(groups) > again:
                job.issue(r, "all_reduce", groups[again], False)
                if timed and not again:
                    begin(job, r)
        job.now_ns += SECOND_NS
    if not timed:
        for ring in job.ranks:
            for e in ring.entries:
                e["time_discovered_started_ns"] = None
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "group_cycle", (2,)) and f.certainty == "suspected"


def late(tmp_path: Path, after_s: float, clock_s: float = 0.0) -> Job:
    """Let all ranks of a group issue what none completes, rank 3 much later; its clock may differ."""
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 2))
    job.now_ns += int(after_s * SECOND_NS)
    job.issue(3, "all_reduce", "0", False, line=99)
    for e in job.ranks[3].entries:
        e["time_created_ns"] += int(clock_s * SECOND_NS)
    for ring in job.ranks:
        for e in ring.entries:
            e["timeout_ms"] = 120_000
    return job


def test_a_rank_that_arrived_after_the_timeout_is_the_late_rank(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, late(tmp_path, after_s=240.0), after_s=HOUR_S))
    assert summary(f) == ("timeout", "late_rank", (3,)) and f.victims == (0, 1, 2)
    assert "the timeout is 120 s" in f.message and (f.where[0].rank, f.where[0].line) == (3, 99)


def test_a_wrong_clock_makes_no_rank_late(tmp_path: Path) -> None:
    write(tmp_path, late(tmp_path, after_s=0.1, clock_s=240.0))
    assert not any(f.kind == "timeout" for f in diagnose_dumps(tmp_path).findings)


def test_a_rank_with_a_much_older_dump_is_not_excused(tmp_path: Path) -> None:
    """It died and left a dump; the others waited until their timeout."""
    job = trained(Job(4), 200)
    job.collective(ranks=(0, 1, 3))
    write(tmp_path, job)
    for p in tmp_path.iterdir():
        at = job.now_ns + SECOND_NS // 20 + (0 if p.name.endswith("_2") else 600 * SECOND_NS)
        os.utime(p, ns=(at, at))
    assert only(diagnose_dumps(tmp_path)).culprits == (2,)


@pytest.mark.parametrize(("older_s", "ended"), [(590, True), (2, False)])
def test_a_culprit_whose_dump_is_much_older_may_have_ended(older_s: int, ended: bool, tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    write(tmp_path, job)
    for p in tmp_path.iterdir():
        at = job.now_ns + 1_000_000_000 * (601 - older_s * (p.name == "_dump_2"))
        os.utime(p, ns=(at, at))
    f = only(diagnose_dumps(tmp_path))
    assert f.culprits == (2,) and ("its dump is 9 min 50 s older than the others'" in f.message) is ended
    assert f.advice.startswith(
        "see whether the process of rank 2 ended"
        if ended
        else "see what rank 2 does after the last call at train.py:88"
    )


def test_a_short_ring_of_a_running_job_is_no_hang(tmp_path: Path) -> None:
    job = trained(Job(4), 200)
    job.collective(ranks=(0, 1, 3))
    write(tmp_path, job, keep=3)
    for p in tmp_path.iterdir():
        at = job.now_ns + SECOND_NS // 20
        os.utime(p, ns=(at, at))
    assert quiet(diagnose_dumps(tmp_path))


def test_a_wait_lost_from_the_ring_is_older_than_its_entries(tmp_path: Path) -> None:
    """An asynchronous checkpoint hangs on one rank and training continues: only a group's counters still show it."""
    job = trained(Job(3, {"1": ("checkpoint", (0, 1, 2))}), 2)
    job.collective(group="1", ranks=(0, 1))
    for _ in range(300):
        job.collective()
        job.now_ns += SECOND_NS // 20
    for r in range(3):
        just_ended(job, r, job.now_ns)
    write(tmp_path, job, keep=100)
    f = only(diagnose_dumps(tmp_path))
    assert f.culprits == (2,)
    assert [(w.line, w.state) for w in f.waiting] == [(None, "waiting")] * 2  # the lines of later calls are not theirs
    assert [w.state for w in f.where] == ["last_call"]


@pytest.mark.parametrize("op", ["all_to_all", "_all_gather_base"])
def test_dtypes_must_agree_even_if_sizes_may_differ(op: str, tmp_path: Path) -> None:
    job = trained(Job(3))
    for r in range(3):
        job.issue(r, op, "0", False, dtype="Long" if r == 1 else "BFloat16")
    assert summary(only(diagnose(tmp_path, job))) == ("mismatch", "dtype", (1,))


def test_an_uneven_all_to_all_is_legal(tmp_path: Path) -> None:
    job = trained(Job(3))
    for r in range(3):
        job.issue(r, "all_to_all", "0", False, shape=(10 + r,))
    assert not any(f.kind == "mismatch" for f in diagnose(tmp_path, job).findings)


def test_lists_of_coalesced_tensors_are_compared_as_a_whole(tmp_path: Path) -> None:
    job = trained(Job(3))
    for r in range(3):
        job.issue(r, "reduce_scatter_tensor_coalesced", "0", False)
        job.ranks[r].entries[-1]["input_sizes"] = [[8, 2], [4]] if r == 1 else [[8, 2], [4], [6]]
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "shape", (1,)) and "20 elements" in f.message and "26 elements" in f.message


def test_members_of_a_group_are_numbered_in_its_own_order(tmp_path: Path) -> None:
    """With `new_group(sort_ranks=False)`, `send 0->1` goes from its first member to its second."""
    job = Job(6, {"1": ("pipe", (4, 2, 0))})
    for _ in range(20):
        job.collective()
        job.message(4, 2, "1")
        job.message(2, 0, "1")
    job.message(4, 2, "1", received=False)
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (2,) and "rank 4's send" in f.message


def test_a_rank_with_an_unreadable_dump_counts_as_unknown(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    write(tmp_path, job)
    cut = next(p for p in tmp_path.iterdir() if p.name.endswith("_2"))
    cut.write_bytes(cut.read_bytes()[:500])
    report = diagnose_dumps(tmp_path)
    found = {f.kind: f for f in report.findings}
    assert found["rank_lost"].culprits == (2,) and found["rank_lost"].victims == (0, 1, 3)
    assert str(cut) in found["recorder"].message and report.state == "degraded"


@pytest.mark.parametrize(
    "folder", ["node{n}/rank{r}/dump.pkl", "{r}/trace.pkl", "node-{n}/gpu{r}/fr.pickle", "a_0/{r}/x"]
)
def test_ranks_are_read_from_folders_if_file_names_are_equal(folder: str, tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    write(tmp_path / "flat", job)
    for p in (tmp_path / "flat").iterdir():
        r = int(p.name[-1])
        to = tmp_path / "deep" / folder.format(r=r, n=r // 2)
        to.parent.mkdir(parents=True, exist_ok=True)
        p.rename(to)
    assert only(diagnose_dumps(tmp_path / "deep")).culprits == (2,)


@pytest.mark.parametrize("timed", [False, True])
def test_a_ring_that_sends_before_it_receives_is_a_cycle(timed: bool, tmp_path: Path) -> None:
    """Every receive has been issued, behind a send that waits: no rank is missing, and none is blamed."""
    job = trained(Job(4))
    for op in ("send {r}->{after}", "recv {r}<-{before}"):
        for r in range(4):
            job.issue(r, op.format(r=r, after=(r + 1) % 4, before=(r - 1) % 4), "0", False)
            job.ranks[r].entries[-1]["frames"][0]["name"] = op[:4]
            if timed and op.startswith("send"):
                begin(job, r)
        job.now_ns += SECOND_NS // 1000
    if not timed:
        for ring in job.ranks:
            for e in ring.entries:
                e["time_discovered_started_ns"] = None
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "p2p_cycle", ()) and f.victims == (0, 1, 2, 3)
    assert [w.rank for w in f.where] == [0, 1, 2, 3] and f.where[0].file == "/home/user/train.py"
    assert "rank 0 in send to rank 1" in f.message and "batch_isend_irecv" in f.advice


def test_operations_not_begun_are_queued_behind_running_ones(tmp_path: Path) -> None:
    """A collective that is stuck on all its ranks delays the messages issued after it, and the ranks that wait for those."""
    job = trained(Job(6, {"1": ("tensor", (0, 1)), "2": ("pipe", (1, 2)), "3": ("data", (2, 3, 4, 5))}))
    job.collective(group="1", done=())
    for r in (0, 1):
        begin(job, r)
    for rank, op in ((1, "send 0->1"), (2, "recv 1<-0")):
        job.issue(rank, op, "2", False)
    begin(job, 2)
    job.collective(group="3", ranks=(3, 4, 5))
    for r in (3, 4, 5):
        begin(job, r)
    job.collective(ranks=(3, 4, 5))
    f = only(diagnose(tmp_path, job))
    assert f.kind == "stall" and f.culprits == (0, 1)


def test_the_oldest_operation_of_a_device_that_stopped_is_named(tmp_path: Path) -> None:
    """Others wait for it in a later operation of another group, which it has issued, too."""
    job = trained(Job(6, {"1": ("tensor", (0, 1)), "2": ("data", (1, 2, 3, 4, 5))}))
    job.collective(group="1", done=())
    begin(job, 0)
    job.collective(group="2", done=())
    for r in (2, 3, 4, 5):
        begin(job, r)
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (1,)
    assert "issued all_reduce #21 (data" in f.message and "nor completed all_reduce #21 (tensor" in f.message


def test_a_culprit_is_named_with_an_operation_of_its_own_groups(tmp_path: Path) -> None:
    """All others first issued operations of other groups, which are in flight, too."""
    job = trained(Job(5, {"1": ("pair", (0, 1)), "2": ("pair", (3, 4))}))
    job.collective(group="1", done=())
    job.collective(group="2", done=())
    job.collective(ranks=(0, 1, 3, 4))
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (2,) and "rank 2 has not entered all_reduce #21 (default_pg" in f.message


def test_completed_batches_in_a_dump_of_active_entries_follow_from_the_groups_counter(tmp_path: Path) -> None:
    """The parts of a batch keep the state at issue, and the entry that closes it is missing once it is complete."""
    job = trained(Job(4, {"1": ("pipe", (0, 1))}), steps=0)
    for number in range(1, 6):
        for rank, parts in ((0, ("send 0->1", "recv 0<-1")), (1, ("send 1->0", "recv 1<-0"))):
            for op in parts:
                job.issue(rank, op, "1", False)
                job.ranks[rank].p2p["1"] = job.ranks[rank].entries[-1]["p2p_seq_id"] = number
    job.collective(ranks=(0, 2, 3))
    folder = tmp_path / "dumps"
    for over in (5, 4):
        write(folder, job, active=True)
        for rank in (0, 1):
            at = folder / f"_dump_{rank}"
            dump = pickle.loads(at.read_bytes())
            dump["pg_status"]["1"].update(last_enqueued_collective=5, last_completed_collective=over)
            at.write_bytes(pickle.dumps(dump))
        f = only(diagnose_dumps(folder))
        assert f.culprits == (1,) and ("no collective is in flight there" in f.message) == (over == 5)


def test_a_timeout_is_read_from_the_dump_if_files_were_copied(tmp_path: Path) -> None:
    """The recorder checks which operations have begun when a dump is requested."""
    for waited_s, severity in ((601, "error"), (599, "info")):
        job = trained(Job(4))
        job.collective(done=())
        for r in range(4):
            begin(job, r)
            e = job.ranks[r].entries[-1]
            e["time_discovered_started_ns"] = e["time_created_ns"] + waited_s * SECOND_NS
        (f,) = diagnose(tmp_path / str(waited_s), job, after_s=24 * HOUR_S).findings
        assert (f.kind, f.severity, f.culprits) == ("stall", severity, ())


def test_ranks_that_stopped_in_different_groups_are_named_with_their_own_group(tmp_path: Path) -> None:
    job = trained(Job(8, {"1": ("tensor", (0, 1, 2, 3)), "2": ("tensor", (4, 5, 6, 7))}))
    job.collective(group="1", ranks=(0, 1, 2))
    job.collective(group="2", ranks=(4, 5, 7))
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (3, 6)
    text = f.message
    assert "rank 3 has not entered" in text or "rank 6 has not entered" in text, text
    assert "what other groups wait in" in text and "ranks 3, 6 have not entered" not in text


@pytest.mark.parametrize(
    ("waited_s", "timeout_s", "running"), [(1.0, 600, True), (3.0, 600, False), (1.0, 2, False), (0.3, 2, True)]
)
def test_a_wait_of_a_second_is_no_hang_if_the_timeout_is_long(
    waited_s: float, timeout_s: int, running: bool, tmp_path: Path
) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 3))
    for ring in job.ranks:
        for e in ring.entries:
            e["timeout_ms"] = timeout_s * 1000
    report = diagnose(tmp_path, job, after_s=waited_s)
    assert quiet(report) is running
    assert report.findings[0].culprits == (2,)


def test_a_rank_with_a_damaged_dump_is_not_said_to_have_left_none(tmp_path: Path) -> None:
    job = trained(Job(5))
    job.collective(ranks=(0, 1, 2))
    write(tmp_path, job)
    (tmp_path / "_dump_3").unlink()
    cut = tmp_path / "_dump_4"
    cut.write_bytes(cut.read_bytes()[:500])
    (f,) = [f for f in diagnose_dumps(tmp_path).findings if f.kind == "rank_lost"]
    assert f.culprits == (3, 4) and f.message.startswith("rank 3 left no dump: ")
    assert "; the dump of rank 4 cannot be read; 3 ranks wait" in f.message
    assert f.advice.startswith("give the dumps of rank 3 and copy the dump of rank 4 again")


def test_a_group_that_has_only_a_number_is_called_a_group(tmp_path: Path) -> None:
    job = trained(Job(5, {"3": ("undefined", (0, 1, 2, 3, 4))}))
    for r in range(5):
        for group in ("3", "0") if r == 1 else ("0", "3"):
            job.issue(r, "all_reduce", group, False)
            job.now_ns += 1_000
    assert "(group 3 of ranks 0–4; 4.0 KiB)" in only(diagnose(tmp_path, job)).message


def test_a_wait_is_judged_by_the_timeout_of_its_own_group(tmp_path: Path) -> None:
    """The newest entries of the ranks are of groups with other timeouts, as of NCCL and of gloo."""
    job = trained(Job(4, {"5": ("heartbeat", (0, 1, 2))}))
    job.collective(done=())
    job.collective(group="5")
    for r in (0, 1, 2):
        job.ranks[r].entries[-1]["timeout_ms"] = 1_800_000
    write(tmp_path, job)
    for p in tmp_path.iterdir():
        os.utime(p, ns=(job.now_ns + 601 * 10**9,) * 2)
    assert (
        "all_reduce #21 (default_pg, 4.0 KiB) timed out with no rank missing" in only(diagnose_dumps(tmp_path)).message
    )


def test_calls_of_a_thread_of_torch_and_of_the_main_one_meet_by_chance(tmp_path: Path) -> None:
    """An asynchronous checkpoint uses the default group: no rank is to blame, and its saves need a group."""
    job = trained(Job(4))
    for r in range(4):
        saves = {"name": "save_wrapper", "filename": "/opt/x/torch/distributed/checkpoint/_async_thread_executor.py"}
        thread = {"name": "run", "filename": "/opt/lib/python3.12/threading.py", "line": 982}
        for op in ("barrier", "all_gather") if r == 2 else ("all_gather", "barrier"):
            job.issue(r, op, "0", False)
            if op == "all_gather":
                job.ranks[r].entries[-1]["frames"][2:] = [saves | {"line": 55}, thread]
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "op", ()) and f.advice.startswith("give async_save its own process group")
    for ring in job.ranks:  # all the script runs in a thread, as in a worker of Ray
        for e in ring.entries:
            e["frames"] = [*e["frames"][:3], thread]
    assert only(diagnose(tmp_path, job)).culprits == (2,)
