"""`distdiag diagnose` on dumps and runs: verdict first, JSON, exit codes."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.diagnosis.model.findings import Check, CollectiveRef, Finding, LastSeen, Where
from distdiag.diagnosis.text.finding import last_seen_lines
from distdiag.errors import ExitCode
from distdiag.store import rundir
from distdiag.store.frames import RankRow
from distdiag.store.writer import Writer
from tests.diagnosis.recordings import Job, write
from tests.jobs import unwrapped


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hung(folder: Path) -> str:
    job = Job(4)
    job.collective()
    job.collective(ranks=(0, 1, 3), line=91)
    write(folder, job)
    return str(folder)


def healthy(folder: Path) -> str:
    job = Job(4)
    job.collective()
    write(folder, job)
    return str(folder)


FINDING = Finding(
    kind="straggler",
    cause="data",
    severity="warning",
    culprits=(1,),
    where=(Where(1, "/job/train.py", 40, "load"),),
    message="rank 1  data +62 ms/step",
    cost="26 % of step time",
    advice="check storage",
    first_seen_s=1.0,
)


def a_run(path: Path, *findings: Finding, ranks: int = 2, **meta: object) -> str:
    with Writer(path) as w:
        w.meta(**{"world_size": 2, "state": "running", **meta})
        w.add([RankRow(rank=r, life="running", step=3) for r in range(ranks)])
        for f in findings:
            w.finding(f)
    return str(path)


def test_the_verdict_comes_first_then_the_four_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", hung(tmp_path / "d")]) == ExitCode.FAILED
    out, err = capsys.readouterr()
    out = unwrapped(out)
    lines = out.splitlines()
    assert lines[0] == "stalled: 1 error; look at rank 2 first (4 of 4 ranks seen)"
    assert lines[2].startswith(
        "█ ERROR stall/unknown (suspected)  rank 2 has not entered all_reduce #2 (default_pg, 4.0 KiB)"
    )
    assert [line.split()[0] for line in lines[3:7]] == ["more", "cost", "where", "do"]
    assert "/home/user/train.py:91" in lines[5]
    assert err == ""


def test_json_is_one_object_with_the_schema_as_first_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json", hung(tmp_path / "d")]) == ExitCode.FAILED
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert next(iter(report)) == "schema" and report["schema"] == "distdiag.findings/1"
    assert (report["world_size"], report["ranks_seen"], report["state"]) == (4, 4, "stalled")
    (found,) = report["findings"]
    assert (found["kind"], found["culprits"], found["victims"]) == ("stall", [2], [0, 1, 3])
    assert found["collective"] == {"op": "all_reduce", "group": "default_pg", "seq": 2, "bytes": 4096}
    assert found["waiting"][0]["file"] == "/home/user/train.py" and found["cleared_s"] is None
    assert err == ""


def test_a_run_without_findings_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", healthy(tmp_path / "d")]) == ExitCode.OK
    first, _, *note = capsys.readouterr().out.splitlines()
    assert first == "running: nothing found, 4 of 4 ranks seen"
    assert unwrapped("\n".join(note)).startswith("note: every recorded operation has completed: if the job hangs")


def test_a_wait_that_is_not_judged_yet_is_in_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = "rank 0 waits for rank 1 for 57 s (judged from 60 s on)"
    assert main(["diagnose", a_run(tmp_path / "run", state_text=waits)]) == ExitCode.OK
    assert unwrapped(capsys.readouterr().out).startswith(f"running: {waits}; nothing else found, 2 of 2 ranks seen")


def test_a_slow_rank_that_cannot_be_judged_is_in_the_second_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = json.dumps([{"kind": "straggler", "reason": "the cores are all in use", "ranks": [1]}])
    assert main(["diagnose", a_run(tmp_path / "run", checks=checks)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "rank 1 may be slower; not judged yet: the cores are all in use"


def test_why_not_names_what_was_checked_and_who_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", checks=json.dumps([{"kind": "deadlock", "checked": True}]), world_size=4)
    assert main(["diagnose", run, "--why", "deadlock"]) == ExitCode.OK
    text = unwrapped(capsys.readouterr().out)
    assert text.startswith("deadlock: not found\n  checked for: missing_rank, order_mismatch, ")
    assert "; 2 of 4 ranks seen\n  only partly judged: " in text


def test_files_and_folders_together(tmp_path: Path) -> None:
    hung(tmp_path / "d")
    (tmp_path / "e").mkdir()
    (tmp_path / "d" / "_dump_3").rename(tmp_path / "e" / "_dump_3")
    assert main(["diagnose", str(tmp_path / "d"), str(tmp_path / "e" / "_dump_3")]) == ExitCode.FAILED


def test_an_info_finding_alone_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import msgspec

    info = msgspec.structs.replace(FINDING, severity="info")
    assert main(["diagnose", a_run(tmp_path / "run", info)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("running: no error or warning, 1 info (2 of 2 ranks seen)")
    assert "INFO straggler/data" in out
    stopped = a_run(tmp_path / "stopped", info, state="failed", state_text="stopped by SIGINT (from a person)")
    assert main(["diagnose", stopped]) == ExitCode.FAILED
    assert "stopped by SIGINT (from a person); no error or warning, 1 info" in unwrapped(capsys.readouterr().out)


@pytest.mark.parametrize(("fail_on", "code"), [("error", 0), ("warning", 1), ("never", 0)])
def test_fail_on(tmp_path: Path, fail_on: str, code: int) -> None:
    assert main(["diagnose", a_run(tmp_path / "run", FINDING), "--fail-on", fail_on]) == code


def test_never_fails_on_an_error_either(tmp_path: Path) -> None:
    assert main(["diagnose", hung(tmp_path / "d"), "--fail-on", "never"]) == ExitCode.OK


def test_a_run_by_name_by_database_and_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "run", FINDING)
    for args in ([run], [f"{run}/run.db"]):
        assert main(["diagnose", *args]) == ExitCode.OK
        out = capsys.readouterr().out
        assert out.startswith("running: 1 warning")
        assert "straggler/data" in out and "/job/train.py:40 in load (rank 1)" in out
    monkeypatch.setenv("DISTDIAG_RUN_DIR", run)
    assert main(["diagnose", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "straggler"


def test_a_cleared_finding_does_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import msgspec

    gone = msgspec.structs.replace(FINDING, severity="error", cleared_s=9.0)
    assert main(["diagnose", a_run(tmp_path / "run", gone)]) == ExitCode.OK
    out = unwrapped(capsys.readouterr().out)
    assert out.startswith("running: nothing found, 2 of 2 ranks seen; 1 cleared")
    assert "cleared after 8 s" in out


@pytest.mark.parametrize(
    ("findings", "meta", "ranks", "code", "words"),
    [
        (
            (),
            {"state": "failed", "state_text": "rank 0: ValueError: x"},
            2,
            1,
            "the cause was not found, 2 of 2 ranks seen; rank 0: ValueError: x",
        ),
        ((), {"state": "degraded"}, 2, 1, "the cause was not found"),
        ((FINDING,), {"state": "failed"}, 2, 1, "failed: 1 warning"),
        ((FINDING,), {}, 2, 0, "running: 1 warning"),  # README: a warning alone does not fail
        ((), {}, 1, 3, "only partly judged: 1 of 2 ranks seen"),
        ((FINDING,), {}, 1, 3, "1 warning"),
        ((), {"monitor_ended": False, "heartbeat_unix_s": 1e9}, 2, 3, "only partly judged: the monitor is gone"),
    ],
)
def test_exit_0_requires_that_all_ranks_were_judged_and_the_job_did_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], findings: tuple[Finding, ...], meta: dict[str, object],
    ranks: int, code: int, words: str,
) -> None:  # fmt: skip
    run = a_run(tmp_path / "run", *findings, ranks=ranks, **meta)
    if "monitor_ended" in meta:
        with sqlite3.connect(tmp_path / "run" / "run.db") as con:
            con.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("monitor_ended", "0"), ("heartbeat_unix_s", "1e9")]
            )
        con.close()
        (tmp_path / "run" / "monitor.log").write_text("KeyError: 3\n")
    assert main(["diagnose", run]) == code
    out = capsys.readouterr().out
    assert words in out.splitlines()[0] and "nothing found" not in out
    assert ("it failed: KeyError: 3" in out) == ("monitor_ended" in meta)
    assert main(["diagnose", run, "--fail-on", "never"]) == ExitCode.OK


@pytest.mark.parametrize(("age_s", "early"), [(2, True), (100, False)])
def test_a_young_job_without_findings_is_too_young_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age_s: float, early: bool
) -> None:
    main(["diagnose", a_run(tmp_path / "run", started_unix_s=time.time() - age_s)])
    assert ("running: too early to tell, nothing found in" in capsys.readouterr().out) == early


def test_the_first_line_names_the_run_its_age_and_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", started_unix_s=time.time() - 100, command="python train.py --lr 1")
    main(["diagnose", run])
    first, second, *_ = unwrapped(capsys.readouterr().out).splitlines()
    assert re.fullmatch(rf"run {re.escape(run)}, started 1\d\d s ago: python train.py --lr 1", first)
    assert second.startswith("running: ")


def test_a_launch_that_started_no_rank_is_reported_instead_of_the_run_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "reports" / "20250101-120000-train")
    rundir.mark_latest(tmp_path / "reports" / "20250101-120000-train")
    rundir.note_launch(tmp_path / "reports" / "20250102-120000-launch-failed", "RuntimeError: port in use")
    assert main(["diagnose"]) == ExitCode.NO_DATA
    assert capsys.readouterr().err.splitlines() == [
        "distdiag: error: the last launch failed before any rank was recorded: RuntimeError: port in use",
        "hint: for the previous run: distdiag diagnose reports/20250101-120000-train",
    ]
    assert main(["report", "--format", "text", "-o", "-"]) == ExitCode.OK  # of the last run that there is
    out, err = capsys.readouterr()
    assert "20250101-120000-train" in out and err == ""
    assert "note: a newer launch failed before any rank was recorded: RuntimeError: port in use" in unwrapped(out)


@pytest.mark.parametrize("command", [["diagnose"], ["report"], ["compare", "reports/latest", "reports/latest"]])
def test_a_first_launch_that_started_no_rank_is_reported_by_all(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.note_launch(tmp_path / "reports" / "20250102-120000-launch-failed", "RuntimeError: port in use")
    assert main(command) == ExitCode.NO_DATA
    assert capsys.readouterr().err.splitlines() == [
        "distdiag: error: the last launch failed before any rank was recorded: RuntimeError: port in use",
        "hint: read the launcher's messages",
    ]


def test_the_latest_run_is_named_by_its_directory_and_a_newer_launch_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "reports" / "20250101-120000-train"
    a_run(run, started_unix_s=time.time() - 200, ended_s=100, state="ended")
    rundir.mark_latest(run)
    assert main(["diagnose"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert re.match(rf"run reports/{run.name} \(latest\), ended 1\d\d s ago", out) and "newer launch" not in out
    newer = tmp_path / "reports" / "20250102-120000-train_slow"
    newer.mkdir()
    main(["diagnose"])
    assert "note: a newer launch (train_slow) has not reported yet" in capsys.readouterr().out
    rundir.note_launch(newer, None)  # its launcher has ended
    main(["diagnose"])
    assert "note: a newer launch (train_slow) recorded no rank" in unwrapped(capsys.readouterr().out)
    (newer / "run.json").unlink()
    os.utime(newer, (time.time() - 3600,) * 2)  # a script that started no process group, an hour ago
    for command in (["diagnose"], ["report", "--format", "text", "-o", "-"]):
        main(command)
        assert unwrapped("".join(capsys.readouterr())).count("a newer launch (train_slow) recorded no rank") == 1, (
            command
        )
    main(["diagnose", str(run)])
    assert "newer launch" not in capsys.readouterr().out


def test_another_job_of_this_directory_that_still_runs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs were started here at the same time; the one that hangs is not the latest."""
    hangs, ended = (tmp_path / "reports" / f"20250101-12000{n}-train" for n in (0, 1))
    a_run(hangs, heartbeat_unix_s=time.time(), monitor_pid=os.getpid(), state="deadlocked")
    with closing(sqlite3.connect(hangs / "run.db")) as con, con:
        con.execute("DELETE FROM meta WHERE key = 'monitor_ended'")
    a_run(ended, started_unix_s=time.time() - 200, ended_s=100, state="ended")
    rundir.mark_latest(ended)
    main(["diagnose"])
    out = unwrapped(capsys.readouterr().out)
    assert f"note: another run here is not over (deadlocked): distdiag diagnose reports/{hangs.name}\n" in out
    main(["diagnose", str(ended)])
    assert "not over" not in unwrapped(capsys.readouterr().out)


def test_a_recording_that_ended_before_the_job_is_no_good_news(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", started_unix_s=time.time() - 200, ended_s=100.0, state="running")
    assert main(["diagnose", run]) == ExitCode.INCONCLUSIVE
    out = capsys.readouterr().out
    assert "only partly judged: the recording ended before the job" in out and "note: the monitor was ended" in out


def test_cleared_findings_are_one_line_each_and_an_error_comes_without_the_list_of_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    error = Finding(
        kind="deadlock", cause="missing_rank", severity="error", certainty="proved", culprits=(1,),
        message="rank 1 is elsewhere", cost="the job makes no progress", first_seen_s=20.0,
    )  # fmt: skip
    gone = msgspec.structs.replace(FINDING, cleared_s=9.0)
    replaced = msgspec.structs.replace(error, cause="order_mismatch", severity="info", cleared_s=21.0)
    run = a_run(
        tmp_path / "run", error, gone, replaced, started_unix_s=time.time() - 60, ended_s=30.0, state="failed",
        state_text="stopped by SIGTERM (from the launcher or a person)",
    )  # fmt: skip
    with Writer(tmp_path / "run") as w:
        w.checks((Check(kind="straggler", reason="fewer than two ranks are running"),))
    assert main(["diagnose", run]) == ExitCode.FAILED
    lines = unwrapped(capsys.readouterr().out).splitlines()
    assert lines[1].startswith("failed: stopped by SIGTERM (from the launcher or a person); 1 error; look at rank 1")
    assert "the job made no progress until it ended" in "".join(lines)
    at = lines.index("cleared:")
    assert "deadlock" in "".join(lines[:at])
    assert lines[at + 1 :] == ["  ▲ WARNING straggler/data (suspected)  rank 1  data +62 ms/step (cleared after 8 s)"]
    main(["diagnose", run, "--why", "straggler"])
    assert unwrapped(capsys.readouterr().out).splitlines()[:2] == [
        "straggler: found 1 time, 1 cleared",
        "  straggler: not checked: fewer than two ranks are running",
    ]


def test_a_profile_of_a_deadlock_does_not_wait_for_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distdiag.monitor.evidence.dump.living", lambda run_dir: [])
    assert main(["profile", a_run(tmp_path / "run", state="deadlocked")]) == ExitCode.NO_DATA
    assert capsys.readouterr().err.splitlines() == [
        "distdiag: error: the job is deadlocked",
        f"hint: distdiag diagnose {tmp_path / 'run'}",
    ]


@pytest.mark.parametrize("target", [(), (".",), ("runs",)])
def test_the_only_run_below_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: tuple[str, ...]
) -> None:
    a_run(tmp_path / "runs" / "slow", FINDING)
    assert main(["diagnose", *target]) == ExitCode.OK
    assert "straggler/data" in capsys.readouterr().out
    assert main(["tui", "--once", *target]) == ExitCode.OK
    a_run(tmp_path / "runs" / "fast")
    assert main(["diagnose", *target]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "holds 2 distdiag runs" in err and "hint: name one of them: runs/" in err


def test_a_run_far_below_is_not_looked_for_without_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "a" / "b" / "c")
    assert main(["diagnose"]) == ExitCode.NO_DATA


def test_a_directory_with_more_files_than_a_job_leaves_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distdiag.files.MOST_WALKED", 3)
    hung(tmp_path / "a" / "disk")
    for command in (["diagnose"], ["tui", "--once"]):
        assert main([*command, "a"]) == ExitCode.USAGE
        assert "a has more than 3 files" in capsys.readouterr().err
    assert main(["diagnose"]) == ExitCode.NO_DATA


@pytest.mark.parametrize("target", [".", "project"])
def test_a_directory_above_runs_names_the_newest_and_its_dumps_are_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    reports = Path("reports") if target == "." else Path(target, "reports")
    for name in ("20250101-120000-train", "20250102-090000-train"):
        a_run(tmp_path / reports / name)
        hung(tmp_path / reports / name / "flight_recorder")
    (tmp_path / target / "job.log.pid").write_text("12\n")
    assert main(["diagnose", target]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    newest = reports / "20250102-090000-train"
    where = "this directory" if target == "." else target
    assert out == "" and err.splitlines() == [
        f"distdiag: error: {where} holds 2 distdiag runs, the newest: {newest}",
        f"hint: name one of them: {newest}",
    ]
    # dumps outside a run are judged; those of a run only if they are named
    hung(tmp_path / target / "dumps" / "host0")
    assert main(["diagnose", target]) == ExitCode.FAILED
    assert "rank 2 has not entered" in capsys.readouterr().out
    assert main(["diagnose", str(newest / "flight_recorder")]) == ExitCode.FAILED


def test_a_log_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text("mpirun noticed that process rank 2 with PID 0 on node n1 exited on signal 9 (Killed).\n")
    assert main(["diagnose", str(log)]) == ExitCode.FAILED
    assert "rank 2 on n1 was killed by SIGKILL" in capsys.readouterr().out
    log.write_text("step 1 loss 0.5\n")
    assert main(["diagnose", str(log)]) == ExitCode.INCONCLUSIVE
    assert "no error that distdiag knows in 1 log" in capsys.readouterr().out


def test_dumps_and_logs_together_give_one_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(4)
    job.collective()
    job.collective(ranks=(0, 1, 3), line=91)
    write(tmp_path / "job", job)
    (tmp_path / "job" / "_dump_2").unlink()
    log = tmp_path / "job" / "launcher.log"
    log.write_text("mpirun noticed that process rank 2 with PID 0 on node n1 exited on signal 9 (Killed).\n")
    assert main(["diagnose", str(tmp_path / "job"), "--json"]) == ExitCode.FAILED
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["cause"], f["culprits"]) for f in found if f["severity"] == "error"] == [("killed", [2])]


def test_a_run_without_data_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", a_run(tmp_path / "run", ranks=0)]) == ExitCode.NO_DATA
    assert "no rank has written" in capsys.readouterr().err
    (tmp_path / "run" / "monitor.log").write_text("Traceback (most recent call last):\nOSError: no space\n")
    assert main(["diagnose", str(tmp_path / "run")]) == ExitCode.NO_DATA
    assert "failed: OSError: no space" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 4, "no run here"),
        (["nowhere"], 4, "nowhere: no such file or directory"),
        (["a", "b"], 2, "a: no such file or directory"),
        (["empty"], 4, "no flight-recorder dump in empty"),
        (["other.bin"], 2, "other.bin: not a flight-recorder dump"),
        (["--fail-on", "sometimes"], 2, "'sometimes' is not one of"),
    ],
)
def test_bad_input_prints_an_error_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.bin").write_bytes(b"\0hello\n")
    assert main(["diagnose", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("distdiag: error: ") and lines[1].startswith("hint: ")
    assert words in lines[0]
    assert "find MARK" not in err and "load key" not in err
    assert args or "cd to the directory in which the job was started" in lines[1]


@pytest.mark.parametrize(
    ("name", "command"),
    [("job 1.tar.gz", "tar -C unpacked -xf 'job 1.tar.gz'"), ("job.zip", "unzip -d unpacked job.zip")],
)
def test_an_archive_is_not_read_and_the_hint_unpacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"PK\0hello\n")
    assert main(["diagnose", name]) == ExitCode.USAGE
    assert f"{command} && distdiag diagnose unpacked" in capsys.readouterr().err


def test_two_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", a_run(tmp_path / "run"), a_run(tmp_path / "b")]) == ExitCode.USAGE
    assert "are both runs" in capsys.readouterr().err


def test_a_run_is_read_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert main(["diagnose", a_run(tmp_path / "run"), str(log)]) == ExitCode.FAILED
    out = unwrapped(capsys.readouterr().out)
    assert "rank 1 ran out of GPU memory" in out and f"note: from {log}: 1 error" in out


def test_a_directory_that_a_launch_has_claimed_waits_for_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / ".jobs" / "0").mkdir(parents=True)
    assert main(["diagnose", str(tmp_path / "run")]) == ExitCode.NO_DATA
    assert f"no rank has written to {tmp_path / 'run'} yet" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--ascii", "encoding"])
def test_ascii_output_has_only_ascii(tmp_path: Path, how: str) -> None:
    folder = hung(tmp_path / "d")
    (tmp_path / "d" / "_dump_3").write_bytes(b"x\xffy")
    args = [sys.executable, "-m", "distdiag", "diagnose", folder] + (["--ascii"] if how == "--ascii" else [])
    done = subprocess.run(
        args, capture_output=True, timeout=120, env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8" if how == "--ascii" else "ascii"}
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.decode("ascii").startswith("stalled: 2 errors")


def test_diagnose_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from distdiag.cli import main; main(['diagnose', sys.argv[1]]); "
        "print(sorted({'torch', 'textual', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, hung(tmp_path / "d")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_last_lines_list_what_was_checked_and_what_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    few = "22 of 30 steps after the warm-up"
    checks = (
        Check(kind="deadlock", checked=True),
        Check(kind="straggler", reason=few),
        Check(kind="input_bound", reason=few),
        Check(kind="uneven_batches", checked=True),
        Check(kind="uneven_batches", cause="count", reason="the length of a loader is not known"),
        Check(kind="memory", checked=True, reason="no growth"),
    )
    with Writer(tmp_path / "run") as w:
        w.checks(checks)
    assert main(["diagnose", run]) == ExitCode.OK
    assert unwrapped(capsys.readouterr().out).splitlines()[-2:] == [
        "checked: deadlock, uneven_batches, memory",
        f"not checked: straggler, input_bound ({few}); uneven_batches/count (the length of a loader is not known)",
    ]
    assert main(["diagnose", run, "--why", "straggler"]) == ExitCode.OK
    assert unwrapped(capsys.readouterr().out).splitlines() == [
        "straggler: not checked",
        f"  straggler: not checked: {few}",
    ]
    assert main(["diagnose", run, "--why", "memory"]) == ExitCode.OK
    assert unwrapped(capsys.readouterr().out).splitlines() == [
        "memory: not found",
        "  memory: no growth",
        "  checked for: growth, imbalance, headroom; 2 of 2 ranks seen",
    ]
    assert main(["diagnose", run, "--why", "nonsense"]) == ExitCode.USAGE
    assert main(["diagnose", run, "--json"]) == ExitCode.OK
    assert json.loads(unwrapped(capsys.readouterr().out))["checks"][1] == {
        "kind": "straggler", "cause": None, "checked": False, "reason": few, "ranks": []
    }  # fmt: skip


def test_thousands_of_findings_are_printed_worst_first_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    from distdiag.cli.verdict import SHOWN

    many = [msgspec.structs.replace(FINDING, culprits=(k,)) for k in range(SHOWN + 1200)]
    worst = msgspec.structs.replace(FINDING, kind="deadlock", severity="error", message="the worst")
    main(["diagnose", a_run(tmp_path / "R", *many, worst)])
    out = capsys.readouterr().out
    assert "and 1,201 more findings: --json prints them all" in out and out.count("WARNING") == SHOWN - 1
    assert "the worst" in out and "1 error, 1,300 warnings" in out


def test_ranks_of_a_killed_job_that_were_at_one_line_share_one(tmp_path: Path) -> None:
    call = CollectiveRef("all_reduce", "default_pg", 417, 4096)
    waiting = [LastSeen(rank=q, t_s=20.0, file="/job/train.py", line=88, function="evaluate", collective=call, waits=True, since_s=8.0) for q in (0, 1, 3)]  # fmt: skip
    other = LastSeen(
        rank=2, t_s=20.0, file="/job/train.py", line=70, function="step", state="gil_held", collective=call
    )
    assert last_seen_lines([*waiting[:2], other, waiting[2], LastSeen(rank=4)]) == [
        "ranks 0, 1, 3: /job/train.py:88 in evaluate, waiting in all_reduce #417 (default_pg) for 12 s",
        "rank 2: /job/train.py:70 in step (gil held); last collective: all_reduce #417 (default_pg)",
        "rank 4: no line is known",
    ]
    lines = last_seen_lines([LastSeen(rank=q, file="x.py", line=q) for q in range(1024)])
    assert len(lines) == 17 and lines[-1] == "and 1,008 more"
