"""What the monitor prints on the job's stderr."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity
from distdiag.monitor.announce import Voice


def test_a_printed_error_that_is_cleared_is_corrected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    voice = Voice(tmp_path, quiet=False)
    error = Finding(
        kind="deadlock", cause="missing_rank", severity=Severity.ERROR, certainty=Certainty.PROVED, culprits=(1,),
        message="rank 1 is elsewhere",
    )  # fmt: skip
    cleared = msgspec.structs.replace(error, cleared_s=9.0)
    voice.finding(cleared)  # never printed: nothing to correct
    assert capfd.readouterr().err == ""
    voice.finding(error)
    assert "ERROR deadlock/missing_rank  rank 1 is elsewhere" in capfd.readouterr().err
    voice.finding(cleared)
    assert capfd.readouterr().err == "\n[distdiag] cleared, the job continues: error deadlock: rank 1 is elsewhere\n"
    voice.finding(cleared)
    assert capfd.readouterr().err == "", "one correction for one finding"


def test_a_stall_replaced_by_a_deadlock_needs_no_correction(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    voice = Voice(tmp_path, quiet=False)
    stall = Finding(
        kind="stall",
        cause="user_code",
        severity=Severity.ERROR,
        certainty=Certainty.SUSPECTED,
        culprits=(1,),
        message="busy",
    )
    voice.finding(stall)
    capfd.readouterr()
    voice.finding(msgspec.structs.replace(stall, severity=Severity.INFO, cleared_s=9.0))
    voice.finding(msgspec.structs.replace(stall, severity=Severity.WARNING))
    assert capfd.readouterr().err == ""
