"""The scorecard itself: right answers score as right, and each kind of error is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from distdiag.cli import main
from distdiag.diagnosis.model.findings import Finding, Where
from tests.faults.bench import quantile, summarise
from tests.faults.collection import Expected, Job, OnBackend, Outcome, Position, load
from tests.faults.scorecard import Observed, Score, score

FOLDER = Path("/collection")
SICK = Job(
    name="sick",
    nproc=3,
    faulty=True,
    diagnosis="rank 1 is missing",
    plain_outcome=Outcome(type="hang"),
    positions=(
        Position(rank=1, role="culprit", file="jobs/sick.py", line=40),
        Position(rank=0, role="victim", file="jobs/sick.py", line=50),
    ),
    expected=Expected(
        kinds_any_or_all=("deadlock", "mismatch"),
        causes=("missing_rank", "op"),
        culprits=(1,),
        tolerated=("input_bound",),
    ),
)
FINE = Job(name="fine", nproc=2, faulty=False, diagnosis="", plain_outcome=Outcome(type="ok"), expected=Expected())


def finding(kind: str = "deadlock", cause: str = "missing_rank", line: int = 40, **more: object) -> Finding:
    fields = {
        "severity": "error",
        "culprits": (1,),
        "where": (Where(rank=1, file="/collection/jobs/sick.py", line=line),),
        "waiting": (Where(rank=0, file="/collection/jobs/sick.py", line=50),),
        "first_seen_s": 10.0,
        "detected_s": 11.0,
    }
    return Finding(kind=kind, cause=cause, **{**fields, **more})  # type: ignore[arg-type]


def judged(*findings: Finding, job: Job = SICK, waits: tuple[float, ...] = ()) -> Score:
    return score(job, FOLDER, Observed(findings=findings, waits_began_s=waits, readable=True))


def test_the_expected_finding_scores_as_right() -> None:
    s = judged(finding(), waits=(10.2, 10.6))
    assert s.right and s.found and s.right_cause and s.right_culprits
    assert (s.lines_right, s.lines_expected) == (1, 1)
    assert s.fault_to_finding_s == pytest.approx(
        0.4
    )  # from the start of the last wait, not from when it was first seen
    assert summarise([s])["all_right"]


@pytest.mark.parametrize(
    ("findings", "field"),
    [
        ([], "found"),
        ([finding(kind="stall", cause="user_code")], "found"),
        ([finding(cause="rank_exited")], "right_cause"),
        ([finding(culprits=(0,))], "right_culprits"),
        ([finding(culprits=(0, 1))], "right_culprits"),
        ([finding(culprits=())], "right_culprits"),
    ],
)
def test_each_kind_of_error_is_counted(findings: list[Finding], field: str) -> None:
    s = judged(*findings)
    assert getattr(s, field) is False and not s.right
    assert not summarise([s])["all_right"]


@pytest.mark.parametrize("line", [39, 41, None])
def test_wrong_lines_are_counted_over_the_collection(line: int | None) -> None:
    wrong = judged(finding(where=(Where(rank=1, file="/collection/jobs/sick.py", line=line),)))
    assert wrong.right and wrong.lines_right == 0
    assert not summarise([wrong])["all_right"]
    assert summarise([wrong, *[judged(finding())] * 19])["all_right"]  # 95 %
    assert not summarise([wrong, *[judged(finding())] * 18])["all_right"]


def test_the_line_must_be_of_the_right_rank_and_file() -> None:
    assert judged(finding(where=(Where(rank=2, file="/collection/jobs/sick.py", line=40),))).lines_right == 0
    assert judged(finding(where=(Where(rank=1, file="/collection/jobs/other.py", line=40),))).lines_right == 0


def test_further_culprits_are_false_findings() -> None:
    assert not judged(finding(), finding(kind="straggler", cause="data", severity="warning", culprits=(2,))).right
    assert not judged(finding(), finding(culprits=(2,))).right
    assert not judged(finding(), finding(kind="stall", cause="user_code", cleared_s=12.0)).right
    assert judged(finding(), finding(kind="input_bound", severity="warning", culprits=())).right
    assert judged(finding(), finding(kind="comm_bound", severity="info", culprits=())).right


def test_another_backend_may_expect_other_sites_with_a_reason() -> None:
    other = OnBackend(
        reason="wait() returns at once",
        positions=(Position(rank=1, role="culprit", file="jobs/sick.py", line=39),),
        plain_outcome=Outcome(type="crash"),
    )
    job = replace(SICK, on={"stream": other})
    assert job.on_backend(None) == job.on_backend("other") == job
    for name in ("stream", "tests/standins/stream"):
        there = job.on_backend(name)
        assert there.expected == SICK.expected and there.plain_outcome.type == "crash"
        assert judged(finding(line=39), job=there).lines_right == 1
        assert judged(finding(), job=there).lines_right == 0
    unseen = replace(SICK, on={"stream": OnBackend(reason="nothing measures it", hidden=True)}).on_backend("stream")
    assert judged(job=unseen).right and not judged(finding(), job=unseen).right


def test_a_healthy_job_must_have_no_warning_not_even_a_cleared_one() -> None:
    assert judged(job=FINE).right
    assert judged(finding(severity="info"), job=FINE).right
    assert not judged(finding(severity="warning"), job=FINE).right
    assert not judged(finding(severity="warning", cleared_s=12.0), job=FINE).right


def test_the_best_matching_of_several_findings_is_scored() -> None:
    s = judged(finding(kind="mismatch", cause="shape", culprits=(0,)), finding(culprits=(1,)))
    assert s.got == "deadlock/missing_rank 1"


def test_quantiles_are_values_that_occurred() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(k) for k in range(1, 101)], 0.95) == 95.0


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--only", "nonesuch"], "no job named 'nonesuch'"),
        (["--subset", "nonesuch"], "no job of this collection is in the subset"),
        (["--jobs", "nowhere"], "nowhere/manifest.json"),
        (["--keep", "."], "is not empty"),
        (["--repeat", "0"], "0 is not in the range"),
    ],
)
def test_bad_options_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").touch()
    assert main(["bench", "faults", *args]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 2
    assert error in output.err


def test_the_list_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "faults", "--subset", "ci", "--list"]) == 0
    output = capsys.readouterr().out
    jobs = [j for j in load(Path(__file__).with_name("manifest.json")).jobs if "ci" in j.subsets]
    assert "three_steps" in output and "healthy" in output and len(output.splitlines()) == len(jobs)
