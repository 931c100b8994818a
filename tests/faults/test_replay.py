"""`make replay`: every tape of the collection has its verdict, without a process of a job."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest

from distdiag.cli import main
from distdiag.diagnosis import comparison
from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.rules import straggler
from distdiag.diagnosis.text import incident_finding
from distdiag.errors import ExitCode
from distdiag.tapes.tape import read_tape, to_bytes
from tests.faults import ablation, messages, replay
from tests.faults.ablation import applied, scaled, variants
from tests.faults.record import FOLDER, TAPES

PATHS = replay.tapes(TAPES)
MOST_BYTES = 10 << 20  # of all tapes: everybody who clones the repository gets them
WITH_RANKS = TAPES / "gloo" / "unet_cells.tape"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_tape_has_its_verdict(path: Path) -> None:
    result = replay.replay(path)
    assert result.right, "\n".join(result.lines())
    assert not result.stale, f"{result.stale}: distdiag bench faults --record DIR --only {path.stem}"
    # what a person reads; a wording that is better on purpose: python -m tests.faults.messages, and read the difference
    assert result.messages == messages.golden().get(result.name)


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def of_incidents(path: Path) -> bool:
    """True if the golden has a message about ranks that wait for good, or were aborted."""
    return bool(re.search(r"^  (deadlock|mismatch)/", messages.golden().get(name_of(path), ""), re.MULTILINE))


def once(text: str) -> str:
    """Return a text without the callers of its lines, which a message names once."""
    return re.sub(r" \(called at [^()]+\)", "", text)


@pytest.mark.parametrize("path", [*filter(of_incidents, PATHS)], ids=name_of)
def test_the_reason_shown_is_the_reason_that_decided(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decided is in the message, all other evidence names the same ranks, and without the reason the message is another."""
    verdicts: dict[str, Verdict] = {}
    make = incident_finding.incident_finding

    def recording(snapshot: Snapshot, verdict: Verdict) -> Finding:
        finding = make(snapshot, verdict)
        verdicts[finding.message] = verdict
        return finding

    monkeypatch.setattr(incident_finding, "incident_finding", recording)
    tape = read_tape(path)
    found = replay.judge(tape).findings
    for finding in found:
        verdict = verdicts.get(finding.message)
        if verdict is None or verdict.reason is Reason.NONE:
            continue
        shown = once(finding.message)
        assert once(verdict.testimony.text) in shown
        assert all(testimony.ranks == verdict.testimony.ranks == finding.culprits for testimony in verdict.evidence)
        worded = next((t for t in verdict.evidence if t.text or t.head or t.conditions), None)
        if worded is not None:
            assert once(worded.text) in shown and once(worded.head) in shown
            with replay.left_out([worded.name]):
                without = replay.judge(tape).findings
            assert messages.text(without) != messages.text(found)


def test_the_golden_has_no_message_of_a_tape_that_is_gone() -> None:
    assert messages.golden().keys() == set(map(name_of, PATHS))


def test_measured_values_are_masked_and_other_numbers_are_not() -> None:
    text = (
        "rank 1: backward +34 ms in step 45 of 1,024 at train.py:88, 0.93 of it, 4.0 KiB, by 3.1e-05, 22 % of op #417"
    )
    assert messages.masked(text) == (
        "rank 1: backward +~ ms in step 45 of 1,024 at train.py:88, ~ of it, ~ KiB, by ~, ~ % of op #417"
    )


def test_the_tapes_are_small() -> None:
    assert sum(path.stat().st_size for path in PATHS) < MOST_BYTES


def test_a_verdict_is_the_same_twice() -> None:
    assert replay.judge(read_tape(WITH_RANKS)) == replay.judge(read_tape(WITH_RANKS))


def test_the_tape_of_a_changed_job_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = read_tape(WITH_RANKS)
    changed = msgspec.structs.replace(tape, head=msgspec.structs.replace(tape.head, job_hash="0" * 16))
    path = tmp_path / "gloo" / WITH_RANKS.name
    path.parent.mkdir()
    path.write_bytes(to_bytes(changed))
    assert "has changed" in replay.replay(path).stale
    assert main(["bench", "faults", "--replay", str(tmp_path), "--manifest", str(FOLDER / "manifest.json")]) == 0
    assert "stale  gloo/unet_cells" in capsys.readouterr().out


def test_another_verdict_fails_and_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = read_tape(WITH_RANKS)
    (tmp_path / "gloo").mkdir()
    early = msgspec.structs.replace(tape, snapshots=tape.snapshots[:1])
    (tmp_path / "gloo" / WITH_RANKS.name).write_bytes(to_bytes(early))
    shutil.copy(PATHS[0], tmp_path / "gloo")
    args = ["bench", "faults", "--replay", str(tmp_path), "--manifest", str(FOLDER / "manifest.json")]
    assert main(args) == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "BAD    gloo/unet_cells" in output and "before: error" in output and "1 of 2 tapes" in output


def test_one_tape_is_shown_poll_by_poll(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "faults", "--replay", str(WITH_RANKS), "--why"]) == 0
    output = capsys.readouterr().out
    assert "the job is deadlocked" in output and "not found: straggler" in output
    assert "unet_cells.py:88" in output


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--replay", "nowhere"], "no tapes in nowhere"),
        (["--why"], "--why and --ablate judge tapes"),
        (["--replay", __file__], "is not a tape that can be read"),
    ],
)
def test_bad_options_are_one_line_of_error(capsys: pytest.CaptureFixture[str], args: list[str], error: str) -> None:
    assert main(["bench", "faults", *args]) == ExitCode.USAGE
    lines = capsys.readouterr().err.splitlines()
    assert error in lines[0] and lines[1].startswith("hint:") and len(lines) == 2


def test_a_variant_is_undone(capsys: pytest.CaptureFixture[str]) -> None:
    before = replay.judge(read_tape(WITH_RANKS)).answers
    for variant in variants():
        with applied(variant):
            pass
    assert replay.judge(read_tape(WITH_RANKS)).answers == before
    assert scaled(((3.0, 0.5), 4), 2.0) == ((6.0, 1.0), 8) and scaled("barrier", 2.0) is None


def test_every_limit_of_the_diagnosis_is_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {v.where for v in variants()}
    assert {"stall", "slow_case", "slow_because", "call_cost", "step_times", "comparison", "history"} <= where
    assert {"endings", "verdict", "pauses"} <= where
    with applied(ablation.Variant("comparison", "COSTLY", 2.0)):
        assert comparison.COSTLY == straggler.COSTLY == 0.4
    monkeypatch.setattr(ablation, "variants", lambda: [ablation.Variant("history", "SAME_S", 2.0)])
    assert ablation.ablated(WITH_RANKS).tried == tuple(ablation.variants())


def test_leaving_out_the_witness_that_decides_changes_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [v for v in variants() if v.factor is None or v.where == "stall"]
    monkeypatch.setattr(ablation, "variants", lambda: few)
    (tmp_path / "gloo").mkdir()
    shutil.copy(WITH_RANKS, tmp_path / "gloo")
    args = ["bench", "faults", "--replay", str(tmp_path), "--ablate", "--parallel", "1"]
    assert main([*args, "--manifest", str(FOLDER / "manifest.json")]) == 0
    output = capsys.readouterr().out
    assert "| without majority | 1 | 1 | gloo/unet_cells: kind, cause |" in output


def test_without_leaves_a_witness_out_for_this_replay_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gloo").mkdir()
    shutil.copy(WITH_RANKS, tmp_path / "gloo")
    args = ["bench", "faults", "--replay", str(tmp_path), "--manifest", str(FOLDER / "manifest.json")]
    assert main([*args, "--without", "majority"]) == 1
    assert "BAD    gloo/unet_cells" in capsys.readouterr().out
    assert main(args) == 0
