"""The verdict on dumps: simulated jobs of many shapes, and real ones if they are available."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding, Report, Severity, at_least
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, write

MINUTE_NS = 60_000_000_000
SHARED = Path(__file__).resolve().parents[2] / "../shared/fr-dumps"
REAL = ("gpu_error_2nd", "lock_gil_1st")


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == Severity.ERROR]


def only(report: Report) -> Finding:
    worst = errors(report)
    assert len(worst) == 1, report.findings
    return worst[0]


def summary(f: Finding) -> tuple[str, str | None, tuple[int, ...]]:
    return f.kind, f.cause, f.culprits


def quiet(report: Report) -> bool:
    return not any(at_least(f.severity, Severity.WARNING) for f in report.findings)


def trained(job: Job, steps: int = 20) -> Job:
    for _ in range(steps):
        for g in job.groups:
            job.collective(group=g)
    return job


def diagnose(tmp_path: Path, job: Job, **more: object) -> Report:
    write(tmp_path / "dumps", job, **more)  # type: ignore[arg-type]
    return diagnose_dumps(tmp_path / "dumps")


@pytest.mark.parametrize("size", [2048, 1024, 3000])
def test_a_gather_of_the_size_that_is_due_next_shows_a_call_that_was_left_out(tmp_path: Path, size: int) -> None:
    job = Job(4)
    for shape in (1024, 2048, 4096) * 3:
        job.collective("_all_gather_base", shape=(shape,))
    for ranks, shape in (((0, 1, 3), 500), ((2,), size)):
        for r in ranks:
            job.issue(r, "_all_gather_base", "0", False, (shape,), "Float", 91)
    f = only(diagnose(tmp_path, job))
    assert summary(f)[0] == "mismatch" and f.culprits == (2,)
    assert ("left out a call" in f.message and "which module rank 2 skips" in f.advice) is (size == 2048)


# -- a rank is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("form", ["pickle", "json", "pickle.gz", "json.gz"])
def test_a_rank_that_has_not_entered_is_the_culprit(tmp_path: Path, backend: str, form: str) -> None:
    job = trained(Job(4, backend=backend))
    job.collective(ranks=(0, 1, 3), line=91)
    report = diagnose(tmp_path, job, form=form)
    f = only(report)
    assert summary(f) == ("stall", "unknown", (2,))
    assert f.victims == (0, 1, 3)
    assert f.collective is not None
    assert (f.collective.op, f.collective.group, f.collective.seq, f.collective.bytes) == (
        "all_reduce",
        "default_pg",
        21,
        4096,
    )
    assert "rank 2 has not entered all_reduce #21" in f.message and "CPU side launched no more" in f.message
    assert (report.world_size, report.ranks_seen, report.state) == (4, 4, "stalled")
    if form.startswith("pickle"):
        assert [(w.rank, w.file, w.line) for w in f.waiting] == [(r, "/home/user/train.py", 91) for r in (0, 1, 3)]


def test_dumps_of_active_entries_only_are_judged(tmp_path: Path) -> None:
    """Rank 2's dump has no entries at all: its counters show its position."""
    job = trained(Job(4, {"7": ("tp", (0, 1)), "9": ("tp", (2, 3))}))
    job.collective(group="9", ranks=(3,))
    job.collective(group="7")
    job.collective(ranks=(0, 1))
    assert summary(only(diagnose(tmp_path, job, active=True))) == ("stall", "unknown", (2,))


def test_ranks_that_stopped_in_separate_groups_are_all_named(tmp_path: Path) -> None:
    """Tensor-parallel groups of four in a job of 16; ranks 9 and 14 stop; pipelines propagate the wait to the first stage."""
    tp = {str(i + 1): ("tp", tuple(range(4 * i, 4 * i + 4))) for i in range(4)}
    job = Job(16, {**tp, **{str(20 + i): ("pp", (i, i + 8)) for i in range(8)}})
    for _ in range(10):
        for g in tp:
            job.collective(group=g)
        for i in range(8):
            job.message(i, i + 8, str(20 + i))
    for i in range(8):
        job.message(i, i + 8, str(20 + i), received=i + 8 not in (9, 14))
    job.collective(group="3", ranks=(8, 10, 11))
    job.collective(group="4", ranks=(12, 13, 15))
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("stall", "unknown", (9, 14))
    assert set(f.victims) == {1, 6, 8, 10, 11, 12, 13, 15}


def test_the_end_of_a_chain_of_waits_is_the_culprit(tmp_path: Path) -> None:
    job = trained(Job(4, {"a": ("", (0, 1)), "b": ("", (1, 2)), "c": ("", (2, 3))}))
    job.collective(group="c", ranks=(2,))
    job.collective(group="b", ranks=(1,))
    job.collective(group="a", ranks=(0,))
    f = only(diagnose(tmp_path, job))
    assert (f.culprits, f.victims) == ((3,), (0, 1, 2))


def test_a_rank_whose_device_stopped_is_named(tmp_path: Path) -> None:
    """Rank 1 has issued what the others have completed, and does not complete it: its device stopped, not its host."""
    job = trained(Job(4))
    job.collective(done=(0, 2, 3))
    job.collective(ranks=(0, 2, 3))
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (1,)
    assert "device stopped" in f.message


def test_two_ranks_that_stopped_at_different_collectives_are_both_named(tmp_path: Path) -> None:
    """Rank 1 stopped first; rank 2 issued fewer calls than 0, 3, 4 and 5, and waits for nobody."""
    job = trained(Job(6))
    for ranks in ((0, 2, 3, 4, 5), (0, 2, 3, 4, 5), (0, 3, 4, 5), (0, 3, 4, 5)):
        job.collective(ranks=ranks, done=False)
    assert only(diagnose(tmp_path, job)).culprits == (1, 2)


def test_a_rank_alone_in_a_collective_is_the_culprit(tmp_path: Path) -> None:
    job = trained(Job(6))
    job.collective("barrier", ranks=(4,), line=58)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("deadlock", "missing_rank", (4,))
    assert [(w.rank, w.line) for w in f.where] == [(4, 58)]


def all_completed(tmp_path: Path, **odd: Any) -> Report:
    """Let all collectives of a job complete; rank 2's call of one of them has other arguments."""
    job = trained(Job(4, {"tp": ("tp", (0, 1, 2, 3))}))
    for r in range(4):
        job.issue(r, "all_reduce", "tp", True, **(odd if r == 2 else {}))
    return diagnose(tmp_path, trained(job))


def test_a_collective_that_completed_with_another_dtype_is_reported(tmp_path: Path) -> None:
    report = all_completed(tmp_path, dtype="Half", line=188)
    f = only(report)
    assert summary(f) == ("mismatch", "dtype", (2,)) and f.certainty == "proved" and f.collective_completed
    assert f.message.startswith(
        "all_reduce #21 (tp) completed, but the ranks called it with different arguments: rank 2: float16"
    )
    assert [(w.rank, w.line) for w in f.where] == [(2, 188)] and report.state == "degraded"


def test_the_caller_of_a_line_that_many_lines_call_is_shown(tmp_path: Path) -> None:
    job = trained(Job(3))
    job.collective(line=60)
    job.collective(line=70)
    for rank in range(3):
        job.issue(rank, "all_reduce", "0", False, dtype="Half" if rank == 1 else "Float", line=70)
        for e in job.ranks[rank].entries[-3:]:
            e["frames"].insert(2, {"name": "reduce", "filename": "/home/user/comm.py", "line": 9})
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "dtype", (1,))
    assert [(w.file, w.line) for w in f.where] == [("/home/user/comm.py", 9), ("/home/user/train.py", 70)]
    assert "train.py:60" not in f.message


def test_a_rank_waits_in_what_its_device_has_begun(tmp_path: Path) -> None:
    """Ranks 0 and 1 are victims of a mismatch in another group; the collective of all is queued behind that of their pair."""
    job = trained(Job(4, {"1": ("ep", (2, 3)), "2": ("edp", (0, 2)), "3": ("edp", (1, 3))}))
    for rank in (2, 3):
        job.issue(rank, "all_to_all", "1", False, dtype="Half" if rank == 3 else "Float", line=31)
    for rank, group in ((0, "2"), (1, "3")):
        job.issue(rank, "all_reduce", group, False, line=77)
    for recorder in job.ranks:
        recorder.entries[-1] |= {"state": "started", "time_discovered_started_ns": job.now_ns + MINUTE_NS}
    for rank in (0, 1):
        job.issue(rank, "all_reduce", "0", False, line=112)
    f = only(diagnose(tmp_path, job))
    assert f.kind == "mismatch" and {(w.rank, w.line) for w in f.waiting} >= {(0, 77), (1, 77)}
    assert 112 not in [w.line for w in f.waiting]


def test_of_calls_that_differ_for_longer_the_first_is_named(tmp_path: Path) -> None:
    job = trained(Job(4), 40)
    for step in range(20):
        for r in range(4):
            job.issue(r, "all_reduce", "0", step < 19, dtype="Half" if r == 2 and step > 3 else "Float", shape=(7,))
            job.issue(r, "all_reduce", "0", step < 19)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("mismatch", "dtype", (2,)) and "both as collective #79 of" in f.message
    assert "in call #49 rank 2 did not" in f.message


def test_a_completed_collective_of_other_sizes_is_reported_unless_the_numbers_do_not_belong_together(
    tmp_path: Path,
) -> None:
    assert summary(only(all_completed(tmp_path, shape=(7,)))) == ("mismatch", "shape", (2,))
    job = trained(Job(4))
    for r in range(4):
        job.issue(r, "all_reduce", "0", True, shape=(7 if r == 2 else 9,))
        job.issue(r, "all_reduce" if r == 2 else "broadcast", "0", True)
    assert quiet(diagnose(tmp_path / "apart", job))


def test_completed_all_to_alls_of_different_sizes_are_no_mismatch(tmp_path: Path) -> None:
    job = trained(Job(4))
    for r in range(4):
        job.issue(r, "all_to_all", "0", True, shape=(7 + r,))
    assert quiet(diagnose(tmp_path, job))


def test_a_device_that_has_not_begun_the_operation_is_the_culprit(tmp_path: Path) -> None:
    """All hosts ran ahead; starts are timed: the devices of 0, 1 and 3 have begun the operation, that of 2 has not."""
    job = trained(Job(4))
    job.collective(done=False)
    for r in (0, 1, 3):
        job.ranks[r].entries[-1].update(state="started", time_discovered_started_ns=job.now_ns + MINUTE_NS)
    f = only(diagnose(tmp_path, job))
    assert summary(f) == ("stall", "unknown", (2,))
    assert "issued all_reduce #21" in f.message and "not begun" in f.message


def test_a_timeout_without_a_missing_rank_is_a_link_or_a_device(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(done=False)
    for r in range(4):
        job.ranks[r].entries[-1]["retired"] = True
    f = only(diagnose(tmp_path, job))
    assert (f.kind, f.culprits, f.victims) == ("stall", (), (0, 1, 2, 3))
    assert "timed out" in f.message


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_receive_without_its_send_names_the_sender(tmp_path: Path) -> None:
    job = trained(Job(4), 3)
    for _ in range(5):
        for r in range(3):
            job.message(r, r + 1)
    job.message(0, 1)
    job.message(1, 2, sent=False)
    job.message(2, 3, sent=False)
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (1,)
    assert f.victims == (2, 3)
    assert "the send that matches rank 2's recv" in f.message


def test_messages_in_flight_are_not_a_hang(tmp_path: Path) -> None:
    """Both ends are issued, neither is complete."""
    job = Job(2)
    job.issue(0, "send 0->1", "0", False)
    job.issue(1, "recv 1<-0", "0", False)
    assert quiet(diagnose(tmp_path, job))


# -- different calls in one collective ------------------------------------------------------------------------------------


def test_different_operations_are_a_mismatch(tmp_path: Path) -> None:
    job = trained(Job(4))
    for r in range(4):
        job.issue(r, "barrier" if r == 2 else "all_reduce", "0", False, line=58 if r == 2 else 88)
    f = only(diagnose(tmp_path, job))
    assert f.culprits == (2,) and f.kind in ("deadlock", "mismatch")
    assert f.certainty == "proved"
    assert [(w.rank, w.line) for w in f.where] == [(2, 58)]
    assert "barrier" in f.message and "all_reduce" in f.message


@pytest.mark.parametrize(("odd", "cause"), [({"shape": (512,)}, "shape"), ({"dtype": "Half"}, "dtype")])
def test_different_arguments_are_a_mismatch(tmp_path: Path, odd: dict[str, object], cause: str) -> None:
    job = trained(Job(4))
    for r in range(4):
        job.issue(r, "all_reduce", "0", False, **(odd if r == 1 else {}))  # type: ignore[arg-type]
    assert summary(only(diagnose(tmp_path, job))) == ("mismatch", cause, (1,))


def test_operations_with_legally_different_sizes_are_no_mismatch(tmp_path: Path) -> None:
    job = trained(Job(4))
    for op in ("all_to_all", "reduce_scatter_v", "all_gather_v"):
        for r in range(4):
            job.issue(r, op, "0", False, shape=(r + 1,))
    assert quiet(diagnose(tmp_path, job))


def test_coalesced_collectives_share_a_number(tmp_path: Path) -> None:
    job = trained(Job(2))
    for r in range(2):
        for op in (
            ("_all_gather_base", "_reduce_scatter_base", "coalesced") if r else ("_reduce_scatter_base", "coalesced")
        ):
            job.issue(r, op, "0", False)
            job.ranks[r].seq["0"] = 20
            job.ranks[r].entries[-1]["collective_seq_id"] = 21
    assert quiet(diagnose(tmp_path, job))


# -- nothing is stuck ---------------------------------------------------------------------------------------------------


def test_dumps_without_open_operations_have_no_finding(tmp_path: Path) -> None:
    report = diagnose(tmp_path, trained(Job(8, {"1": ("tp", (0, 1, 2, 3)), "2": ("tp", (4, 5, 6, 7))})))
    assert report.findings == ()
    assert report.state == "running"
    (note,) = report.notes
    assert "every recorded operation has completed" in note and "py-spy" in note


def test_all_ranks_in_one_collective_blame_nobody(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(done=False)
    report = diagnose(tmp_path, job)
    assert quiet(report)
    assert [f.severity for f in report.findings] == ["info"]


def test_dumps_taken_at_different_times_are_a_running_job(tmp_path: Path) -> None:
    """Rank 0's dump is ten steps older: the others have since completed collectives with it."""
    job = trained(Job(4), 10)
    write(tmp_path / "dumps", job)
    early = (tmp_path / "dumps" / "_dump_0").read_bytes()
    trained(job, 10)
    job.collective(ranks=(1, 2, 3))
    write(tmp_path / "dumps", job)
    (tmp_path / "dumps" / "_dump_0").write_bytes(early)
    report = diagnose_dumps(tmp_path / "dumps")
    assert quiet(report)
    assert any("rank 0" in n and "older" in n for n in report.notes)


def test_a_rank_one_call_behind_is_a_running_job(tmp_path: Path) -> None:
    """Rank 3's dump is a step older than those of 0 and 1: the job ran, and rank 2 was just the next to arrive."""
    job = trained(Job(4), 10)
    write(tmp_path / "dumps", job)
    early = (tmp_path / "dumps" / "_dump_3").read_bytes()
    trained(job, 2)
    job.collective(ranks=(0, 1, 3))
    write(tmp_path / "dumps", job)
    (tmp_path / "dumps" / "_dump_3").write_bytes(early)
    report = diagnose_dumps(tmp_path / "dumps")  # the files' times are those of copies: it may have hung since
    assert not errors(report) and not quiet(report) and report.state == "waiting"
    for p in (tmp_path / "dumps").iterdir():
        os.utime(p, ns=(job.now_ns, job.now_ns))
    assert quiet(diagnose_dumps(tmp_path / "dumps"))
    for p in (tmp_path / "dumps").iterdir():
        t = job.now_ns + (0 if p.name == "_dump_3" else 600_000_000_000)
        os.utime(p, ns=(t, t))  # the others were written ten minutes later: by then the job was no longer running
    assert only(diagnose_dumps(tmp_path / "dumps")).culprits == (2,)


def test_rings_that_wrapped_at_different_entries_are_compared(tmp_path: Path) -> None:
    """Rank 0 also makes calls in a group of one: its ring reaches back less far, and record ids differ."""
    job = Job(3, {"5": ("self", (0,))})
    for _ in range(40):
        job.collective(group="5")
        job.collective()
    assert diagnose(tmp_path, job, keep=16).findings == ()
    job.collective(ranks=(0, 1))
    assert only(diagnose(tmp_path, job, keep=16)).culprits == (2,)


def test_a_job_with_recent_progress_is_a_running_job(tmp_path: Path) -> None:
    """The file was written 50 ms after the last call, and the entries span seconds: a rank one call behind is no hang."""
    job = trained(Job(2), 200)
    job.collective(ranks=(0,))
    write(tmp_path / "dumps", job)
    written = job.now_ns + 50_000_000
    for p in (tmp_path / "dumps").iterdir():
        os.utime(p, ns=(written, written))
    assert quiet(diagnose_dumps(tmp_path / "dumps"))
    for p in (tmp_path / "dumps").iterdir():
        os.utime(p, ns=(written + 60_000_000_000, written + 60_000_000_000))
    assert only(diagnose_dumps(tmp_path / "dumps")).culprits == (1,)


# -- missing dumps -------------------------------------------------------------------------------------------


def test_a_rank_without_a_dump_is_the_culprit_if_no_other_is(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(done=False)
    write(tmp_path / "dumps", job)
    (tmp_path / "dumps" / "_dump_3").unlink()
    report = diagnose_dumps(tmp_path / "dumps")
    f = only(report)
    assert summary(f) == ("rank_lost", "silent", (3,))
    assert "rank 3 left no dump: dead, stuck outside torch, or it was not collected" in f.message
    assert (report.world_size, report.ranks_seen) == (4, 3)


def test_only_ranks_that_wait_in_the_collective_are_said_to(tmp_path: Path) -> None:
    job = trained(Job(8, {"1": ("shard", (0, 1, 2, 3)), "2": ("shard", (4, 5, 6, 7))}))
    job.collective(group="1", ranks=(0, 1, 3))
    job.collective(group="2")
    job.collective(ranks=(0, 1, 3, 4, 5, 6, 7))
    write(tmp_path / "dumps", job)
    (tmp_path / "dumps" / "_dump_2").unlink()
    f = only(diagnose_dumps(tmp_path / "dumps"))
    assert f.culprits == (2,)
    assert "7 ranks wait, ranks 4–7 of them in all_reduce #21 (default_pg" in f.message


def test_the_missing_dumps_that_a_rank_waits_for_are_asked_for_first(tmp_path: Path) -> None:
    """Rank 1 waits for its data-parallel peers; what its tensor-parallel group waits in is queued behind that."""
    groups = {"1": ("tp", (0, 1, 2, 3)), "2": ("tp", (4, 5, 6, 7)), "3": ("tp", (8, 9, 10, 11))}
    job = trained(Job(12, {**groups, **{str(i + 4): ("dp", (i, i + 4, i + 8)) for i in range(4)}}))
    for i in range(4):
        job.collective("_reduce_scatter_base", group=str(i + 4), ranks=(1, 5) if i == 1 else None)
    job.collective(group="1", done=False)
    write(tmp_path / "dumps", job)
    for rank in range(4, 12):
        (tmp_path / "dumps" / f"_dump_{rank}").unlink()
    f = only(diagnose_dumps(tmp_path / "dumps"))
    assert f.culprits == () and f.collective is not None and f.collective.op == "reduce_scatter_tensor"
    assert "4 ranks wait, rank 1 of them in reduce_scatter_tensor #21 (dp 5, 4.0 KiB), for ranks 5, 9" in f.message
    assert f.advice.startswith("give the dumps of ranks 4–11, too, those of ranks 5, 9 first")


@pytest.mark.parametrize(("world", "given"), [(8, 2), (8, 4)])
def test_most_of_the_dumps_missing_is_no_rank_lost(tmp_path: Path, world: int, given: int) -> None:
    job = trained(Job(world))
    job.collective(done=False)
    write(tmp_path / "dumps", job)
    for rank in range(given, world):
        (tmp_path / "dumps" / f"_dump_{rank}").unlink()
    f = only(diagnose_dumps(tmp_path / "dumps"))
    assert (
        summary(f) == ("stall", "unknown", ()) and f"the dumps of ranks {given}–{world - 1} are not here" in f.message
    )
    assert f.victims == tuple(range(given))


@pytest.mark.parametrize(
    ("timed_out", "state", "severity"), [(True, "degraded", "error"), (False, "waiting", "warning")]
)
def test_one_of_two_dumps_proves_a_hang_only_with_its_time(
    tmp_path: Path, timed_out: bool, state: str, severity: str
) -> None:
    job = trained(Job(2))
    job.collective(done=False)
    write(tmp_path, job)
    (tmp_path / "_dump_0").unlink()
    entered_s = pickle.loads((tmp_path / "_dump_1").read_bytes())["entries"][-1]["time_created_ns"] / 1e9
    os.utime(tmp_path / "_dump_1", (entered_s + (600 if timed_out else 10**7),) * 2)
    report = diagnose_dumps(tmp_path)
    (f,) = report.findings
    assert (f.kind, f.culprits, report.state, f.severity) == ("rank_lost", (0,), state, severity)
    assert report.unjudged == (None if timed_out else "1 of 2 ranks have a dump") and ("if" in f.cost) is not timed_out


def test_a_missing_dump_is_always_reported(tmp_path: Path) -> None:
    write(tmp_path / "dumps", trained(Job(4)))
    (tmp_path / "dumps" / "_dump_1").unlink()
    (found,) = diagnose_dumps(tmp_path / "dumps").findings
    assert "rank 1 left no dump" in found.message and found.severity == Severity.WARNING, "nobody waits for it"


# -- real ones ------------------------------------------------------------------------------------------------------------


class Command:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def real(case: str) -> Path:
    if not (SHARED / case).is_dir():
        pytest.skip(f"the recorded case {case} is not at hand")
    return SHARED / case


@pytest.mark.parametrize("case", REAL)
def test_the_culprit_of_a_real_job_of_16_ranks_is_named(case: str) -> None:
    folder = real(case)
    truth = tuple(int(x) for x in (folder / "fault_injection.log").read_text().split("[")[1].split("]")[0].split(","))
    f = only(diagnose_dumps(folder))
    assert summary(f) == ("stall", "unknown", truth)
    assert set(f.victims) == set(range(16)) - set(truth)
    assert ("device stopped" in f.message) == case.startswith("gpu")


@pytest.mark.parametrize("case", REAL)
def test_a_damaged_copy_of_a_real_job_still_names_the_culprit(case: str, tmp_path: Path) -> None:
    """One dump missing, one truncated, one that would run a command: there is a verdict, the files are named, nothing is run."""
    folder = tmp_path / case
    shutil.copytree(real(case), folder)
    mark = tmp_path / "executed"
    for p in folder.iterdir():
        p.chmod(0o644)
    (folder / "_dump_2").unlink()
    cut = folder / "_dump_5"
    cut.write_bytes(cut.read_bytes()[:1500])
    (folder / "_dump_11").write_bytes(pickle.dumps({"entries": [], "x": Command(mark)}))
    report = diagnose_dumps(folder)
    stall = [f for f in errors(report) if f.kind == "stall"]
    assert [f.culprits for f in stall] == [(9, 14)]
    text = " ".join(f.message for f in report.findings)
    assert "_dump_5: cut short" in text
    assert "_dump_11: the pickle asks for posix.system" in text
    assert "rank 2 left no dump" in text
    assert not mark.exists()


@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("gone", [9, 14])
def test_a_faulty_rank_without_dump_is_still_named(case: str, gone: int, tmp_path: Path) -> None:
    folder = tmp_path / case
    shutil.copytree(real(case), folder, ignore=shutil.ignore_patterns(f"_dump_{gone}"))
    report = diagnose_dumps(folder)
    assert {r for f in errors(report) for r in f.culprits} == {9, 14}
    assert any(f"rank {gone} left no dump" in f.message for f in errors(report))


# -- groups whose members are not recorded ------------------------------------------------------------------------------


def without_members(folder: Path, job: Job) -> Report:
    """Return the verdict on dumps without `pg_config`: of older versions, or of gloo."""
    folder.mkdir()
    for r in range(job.world):
        (folder / f"_dump_{r}").write_bytes(pickle.dumps({**job.dump(r), "pg_config": {}}))
    return diagnose_dumps(folder)


def test_totals_of_an_all_to_all_prove_nothing_if_a_member_may_be_missing(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.groups["5"] = ("experts", (0, 1, 2))
    job.collective("all_to_all", group="5", ranks=(0, 1), done=())
    for r in (0, 1):
        job.ranks[r].entries[-1]["output_sizes"] = [[1000 + r]]
    assert not any(f.certainty == "proved" for f in without_members(tmp_path / "without", job).findings)
    job.issue(2, "all_to_all", "5", False)
    job.ranks[2].entries[-1]["output_sizes"] = [[2000]]
    assert summary(only(diagnose(tmp_path, job))) == ("mismatch", "shape", ())


def test_the_ends_of_a_message_are_not_guessed(tmp_path: Path) -> None:
    """Of ranks 1, 2, 3 of a pipeline only the last two have used its group: rank 2 is number 1 in it, and no message to itself."""
    job = trained(Job(4))
    job.groups["5"] = ("pipe", (1, 2, 3))
    for _ in range(3):
        job.message(2, 3, "5")
    job.message(2, 3, "5", received=False)
    assert all("rank 3" not in f.message for f in without_members(tmp_path / "without", job).findings)


def test_that_no_rank_is_missing_is_not_claimed_of_a_group_without_members(tmp_path: Path) -> None:
    job = trained(Job(4, backend="gloo"))
    job.collective(ranks=(0, 1, 2))
    write(tmp_path, job)
    (tmp_path / "_dump_3").unlink()
    at = job.now_ns + 601 * 10**9
    for path in tmp_path.iterdir():
        os.utime(path, ns=(at, at))
    f = only(diagnose_dumps(tmp_path))
    assert "no rank missing" not in f.message and "a member that never came" in f.message
    assert "world size" in f.advice and "NCCL" not in f.advice


def test_a_rank_that_entered_a_call_is_not_said_to_lack_it(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 1, 2))
    job.collective(ranks=(0, 1))
    report = diagnose(tmp_path, job)
    f = only(report)
    assert (
        "rank 3 has not entered all_reduce #21 (default_pg, 4.0 KiB), nor rank 2 what the others issued after it"
        in f.message
    )
    assert any("second set of dumps" in note for note in report.notes), "the files' times are those of copies"


def test_a_missing_dump_of_a_running_job_is_no_lost_rank(tmp_path: Path) -> None:
    job = trained(Job(4))
    job.collective(ranks=(0, 2))
    write(tmp_path, job)
    (tmp_path / "_dump_1").unlink()
    for path in tmp_path.iterdir():
        os.utime(path, ns=(job.now_ns, job.now_ns))
    report = diagnose_dumps(tmp_path)
    assert not errors(report) and report.state == "running"
    assert any("rank 1 left no dump: not given, or dead" in f.message for f in report.findings)


def test_calls_that_differ_in_size_and_type_are_two_calls_and_no_missing_cast(tmp_path: Path) -> None:
    """Rank 0 went on with the next epoch, the others save a checkpoint; how many steps each has made is in no dump."""
    job = Job(4)
    for _ in range(5):
        job.collective(op="_all_gather_base", dtype="BFloat16", line=96)
    job.collective(op="_all_gather_base", ranks=(0,), dtype="BFloat16", line=96)
    job.now_ns -= 10_000_000
    job.collective(op="_all_gather_base", ranks=(1, 2, 3), shape=(4000,), line=57)
    write(tmp_path, job)
    f = only(diagnose_dumps(tmp_path))
    assert summary(f) == ("mismatch", "dtype", (0,)) and "in as many steps" not in f.message
    assert "rank 0 is in all_gather_into_tensor of 1,024 bfloat16 at train.py:96 in step" in f.message
    assert "of 4,000 float32 at train.py:57" in f.message
    assert (
        f.advice.startswith("find what let rank 0 reach all_gather_into_tensor at train.py:96")
        and "cast" not in f.advice
    )
