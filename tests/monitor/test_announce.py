"""What the monitor prints on the job's stderr."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import ATTEMPT, STOPPED_BY, Certainty, Finding, Severity, State, Where
from distdiag.monitor.announce import Announcer
from distdiag.sources.logs.verdict import diagnose_logs


def test_a_printed_error_that_is_cleared_is_corrected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer(tmp_path, quiet=False)
    error = Finding(
        kind="deadlock", cause="missing_rank", severity=Severity.ERROR, certainty=Certainty.PROVED, culprits=(1,),
        message="rank 1 is elsewhere",
    )  # fmt: skip
    cleared = msgspec.structs.replace(error, cleared_s=9.0)
    announcer.finding(cleared)  # never printed: nothing to correct
    assert capfd.readouterr().err == ""
    announcer.finding(error)
    assert "ERROR deadlock/missing_rank  rank 1 is elsewhere" in capfd.readouterr().err
    announcer.finding(cleared)
    assert capfd.readouterr().err == "\n[distdiag] cleared, the job continues: error deadlock: rank 1 is elsewhere\n"
    announcer.finding(cleared)
    assert capfd.readouterr().err == "", "one correction for one finding"


def test_the_summary_counts_what_diagnose_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stall = Finding(
        kind="stall", cause="user_code", severity=Severity.ERROR, certainty=Certainty.SUSPECTED, culprits=(1,),
        message="rank 1 is busy", first_seen_s=1.0, cleared_s=9.0,
    )  # fmt: skip
    Announcer(tmp_path, quiet=False).summary(Diagnosis(source=lambda file: None, state=State.ENDED), (stall,))
    lines = capfd.readouterr().err.splitlines()
    assert "[distdiag] nothing found" in lines and not any("error found" in line for line in lines)
    assert "[distdiag]   error stall: rank 1 is busy (cleared)" in lines


def test_the_summary_has_the_order_of_diagnose(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The newest error leads: it was found from what the older one left."""
    lost, mismatch = (
        Finding(kind=kind, cause=cause, severity=Severity.ERROR, certainty=Certainty.PROVED, message=kind, detected_s=t)
        for kind, cause, t in (("rank_lost", "killed", 11.0), ("mismatch", "shape", 35.0))
    )
    diagnosis = Diagnosis(source=lambda file: None, state=State.FAILED)
    Announcer(tmp_path, quiet=False).summary(diagnosis, (lost, mismatch))
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "error " in line.lower()] == [
        "[distdiag] █ ERROR mismatch/shape  mismatch",
        "[distdiag]   error rank_lost: rank_lost",
    ]


@pytest.mark.parametrize(
    ("later_s", "message", "times"),
    [(2.0, "rank 1 was killed", 1), (2.0, "by SIGKILL", 2), (60.0, "rank 1 was killed", 2)],
)
def test_a_crash_is_printed_in_full_once_unless_it_has_changed_or_is_old(
    later_s: float,
    message: str,
    times: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Finding(
        kind="rank_lost", cause="killed", severity=Severity.ERROR, certainty=Certainty.PROVED, culprits=(1,),
        message="rank 1 was killed", advice="look for the killer",
    )  # fmt: skip
    announcer, now_s = Announcer(tmp_path, quiet=False), time.monotonic()
    announcer.finding(lost)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + later_s)
    announcer.summary(
        Diagnosis(source=lambda file: None, state=State.FAILED), (msgspec.structs.replace(lost, message=message),)
    )
    printed = capfd.readouterr().err
    assert printed.count("look for the killer") == times and message in printed
    assert "[distdiag] 1 error found:\n" in printed
    assert "look for the killer" in (tmp_path / "verdict.txt").read_text()


def test_a_stall_replaced_by_a_deadlock_needs_no_correction(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer(tmp_path, quiet=False)
    stall = Finding(
        kind="stall",
        cause="user_code",
        severity=Severity.ERROR,
        certainty=Certainty.SUSPECTED,
        culprits=(1,),
        message="busy",
    )
    announcer.finding(stall)
    capfd.readouterr()
    announcer.finding(msgspec.structs.replace(stall, severity=Severity.INFO, cleared_s=9.0))
    announcer.finding(msgspec.structs.replace(stall, severity=Severity.WARNING))
    assert capfd.readouterr().err == ""


def test_a_warning_that_the_job_makes_no_progress_is_printed_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    announcer = Announcer(tmp_path, quiet=False)
    stall = Finding(
        kind="stall", cause="user_code", severity=Severity.WARNING, certainty=Certainty.SUSPECTED, culprits=(1,),
        message="rank 1 is in a loop",
    )  # fmt: skip
    announcer.finding(stall)
    assert "WARNING stall/user_code (suspected)  rank 1 is in a loop" in capfd.readouterr().err
    announcer.finding(msgspec.structs.replace(stall, severity=Severity.ERROR))
    assert capfd.readouterr().err == "", "printed once"
    announcer.finding(msgspec.structs.replace(stall, cleared_s=9.0))
    assert "cleared, the job continues: warning stall" in capfd.readouterr().err


def test_the_first_warning_of_a_kind_is_printed_while_the_job_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    announcer = Announcer(tmp_path, quiet=False)
    slow = Finding(kind="straggler", cause="host", culprits=(1,), severity=Severity.INFO, message="rank 1 is slow")
    announcer.finding(slow)
    assert capfd.readouterr().err == ""
    warning = msgspec.structs.replace(slow, severity=Severity.WARNING)
    announcer.finding(warning)
    assert "WARNING straggler/host (suspected)  rank 1 is slow" in capfd.readouterr().err
    announcer.finding(msgspec.structs.replace(warning, culprits=(2,), message="rank 2 is slow"))
    announcer.finding(msgspec.structs.replace(warning, cleared_s=9.0))
    assert capfd.readouterr().err == "", "the rest is in the summary"


def test_what_is_printed_fits_80_columns_and_a_log_of_it_has_the_same_findings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "/home/someone/projects/a_repository_with_a_long_name/src/package/train.py"
    error = Finding(
        kind="deadlock", cause="missing_rank", severity=Severity.ERROR, certainty=Certainty.PROVED, culprits=(1,),
        message="rank 1 skipped all_reduce (train.py:15): `if n_tokens > 0 and rank == 1` (line 31); rank 1 is in barrier"
        " at train.py:27 in main where rank 0 is in all_reduce at train.py:14 in main, both as collective #48 of default_pg",
        cost="the job makes no progress", advice="make all_reduce on all ranks or on none: " + "or so, " * 20,
        victims=(0,), where=(Where(1, path, 27, "main"),), waiting=(Where(0, path, 14, "main"),),
    )  # fmt: skip
    slow = Finding(
        kind="straggler", cause="host", severity=Severity.WARNING, culprits=(1,),
        message="rank 1: its own code takes 41 ms longer per step than on the others, in 50 of the last 50 steps",
        cost="rank 0 loses 41 ms of a step", advice="move that work off the training step: it is under `if rank == 1` at train.py:40 in main",
    )  # fmt: skip
    announcer = Announcer(tmp_path, quiet=False)
    announcer.finding(msgspec.structs.replace(slow, message=slow.message.replace("41", "39")))
    announcer.finding(error)
    diagnosis = Diagnosis(source=lambda file: None, state=State.FAILED, state_text="rank 1 exited; " + "words " * 20)
    announcer.summary(diagnosis, (slow, error))
    printed = capfd.readouterr().err
    assert all(len(line) <= 80 or path in line for line in printed.splitlines())
    brief = (
        "  cost   rank 0 loses 41 ms of a step",
        "  do     move that work off the training step: it is under",
        "         `if rank == 1` at train.py:40 in main",
    )
    assert "\n".join(f"[distdiag] {line}" for line in brief) in printed
    (tmp_path / "job.err").write_text(printed)
    report = diagnose_logs([str(tmp_path / "job.err")])
    assert report is not None
    first, second = report.findings
    assert (first.message, first.culprits, first.victims) == (error.message, (1,), (0,))
    assert (first.where, first.waiting) == (error.where, error.waiting) and first.advice == error.advice.rstrip()
    assert (second.message, second.severity, second.advice) == (slow.message, "warning", slow.advice)


def test_an_attempt_that_is_made_again_is_not_called_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"{ATTEMPT}0 failed, and the launcher starts all ranks again: rank 1: SIGSEGV; 1 of 2 failed"
    Announcer(tmp_path, quiet=False).summary(Diagnosis(source=lambda file: None, state=State.FAILED, state_text=text))
    assert capfd.readouterr().err.startswith("\n[distdiag] attempt 0 failed, and the launcher starts all ranks again")


@pytest.mark.parametrize(("state", "shown"), [(State.FAILED, True), (State.ENDED, False)])
def test_what_could_not_be_seen_is_in_the_summary_of_a_job_that_did_not_end_by_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], state: State, shown: bool
) -> None:
    text = f"{STOPPED_BY} SIGTERM" if state == State.FAILED else ""
    diagnosis = Diagnosis(source=lambda file: None, state=state, state_text=text)
    unseen = Finding(
        kind="recorder", cause="device_waits", severity=Severity.INFO, culprits=(0,), message="not visible"
    )
    clock = msgspec.structs.replace(unseen, cause="clock_skew", message="the clock was set")
    later = msgspec.structs.replace(unseen, message="not visible; nor in b")
    Announcer(tmp_path, quiet=False).summary(diagnosis, (unseen, clock, later))
    printed = capfd.readouterr().err
    assert ("info recorder: not visible; nor in b" in printed) is shown
    assert ("[distdiag] nothing found\n" in printed) is not shown
    assert ("[distdiag] no error or warning found; 1 info:\n" in printed) is shown
    assert printed.count("not visible") == shown and "clock" not in printed


def test_ranks_that_crashed_after_another_do_not_wait(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lost = Finding(
        kind="rank_lost", cause="crashed", severity=Severity.ERROR, certainty=Certainty.PROVED, culprits=(1,), victims=(0,),
        message="rank 1 ended with KeyError", where=(Where(1, "t.py", 17, "target", "crashed"),),
        waiting=(Where(0, "t.py", 36, "main", "crashed"),),
    )  # fmt: skip
    Announcer(tmp_path, quiet=False).finding(lost)
    printed = capfd.readouterr().err
    assert "t.py:17 in target (rank 1); ended too: t.py:36 in main (rank" in printed
    (tmp_path / "job.err").write_text(printed)
    report = diagnose_logs([str(tmp_path / "job.err")])
    assert report is not None and [w.line for w in report.findings[0].waiting] == [36]
