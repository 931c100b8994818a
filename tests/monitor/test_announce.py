"""What the monitor prints on the job's stderr."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import STOPPED_BY, Certainty, Finding, Severity, State
from distdiag.monitor.announce import Announcer


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
    slow = msgspec.structs.replace(stall, kind="straggler", cause="host", message="rank 1 is slow")
    announcer.finding(slow)  # waits for the end of the job
    assert capfd.readouterr().err == ""
    announcer.finding(stall)
    assert "WARNING stall/user_code (suspected)  rank 1 is in a loop" in capfd.readouterr().err
    announcer.finding(msgspec.structs.replace(stall, severity=Severity.ERROR))
    assert capfd.readouterr().err == "", "printed once"
    announcer.finding(msgspec.structs.replace(stall, cleared_s=9.0))
    assert "cleared, the job continues: warning stall" in capfd.readouterr().err


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
    assert printed.count("not visible") == shown and "clock" not in printed
