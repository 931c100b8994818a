"""Dumps that torch 2.13 to 2.15 wrote: the verdict on each situation, and that the installed torch still writes the same fields."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding, Report, Severity, at_least
from distdiag.sources.dumps.verdict import diagnose_dumps
from tests.diagnosis.recordings import Job, write
from tests.sources.golden import write as golden

FILES = sorted(golden.HERE.glob("torch-*.json"))
WAITED_S = 120.0  # from the newest entry to the time of the file: no running job's


def _diagnose(folder: Path, dumps: dict[str, Any]) -> Report:
    for rank, dump in dumps.items():
        file = folder / f"rank_{rank}.json"
        file.write_text(json.dumps(dump))
        written = max(e["time_created_ns"] for e in dump["entries"]) + int(WAITED_S * 1e9)
        os.utime(file, ns=(written, written))
    return diagnose_dumps(folder)


def _only(report: Report) -> Finding:
    (found,) = [f for f in report.findings if f.severity == Severity.ERROR]
    return found


@pytest.fixture(params=FILES, ids=lambda f: f.stem)
def dumps(request: pytest.FixtureRequest) -> tuple[str, golden.Dumps]:
    return request.param.stem.rpartition("-")[2], json.loads(request.param.read_text())


@pytest.mark.parametrize("situation", ["healthy", "uneven"])
def test_a_job_without_fault_has_no_finding(tmp_path: Path, dumps: tuple[str, golden.Dumps], situation: str) -> None:
    report = _diagnose(tmp_path, dumps[1][situation])
    assert not [f for f in report.findings if at_least(f.severity, Severity.WARNING)], report.findings


def test_a_rank_that_left_out_a_collective_is_the_culprit(tmp_path: Path, dumps: tuple[str, golden.Dumps]) -> None:
    found = _only(_diagnose(tmp_path, dumps[1]["missing"]))
    assert (found.kind, found.culprits, found.victims) == ("stall", (1,), (0,))
    assert found.collective is not None and (found.collective.op, found.collective.seq) == ("all_reduce", 4)
    assert "timeout" not in found.message


@pytest.mark.parametrize(("situation", "cause"), [("order", "op"), ("size", "shape")])
def test_incompatible_calls_are_a_mismatch(
    tmp_path: Path, dumps: tuple[str, golden.Dumps], situation: str, cause: str
) -> None:
    found = _only(_diagnose(tmp_path, dumps[1][situation]))
    assert (found.kind, found.cause) == ("mismatch", cause)


def test_a_receive_without_its_send_names_the_sender(tmp_path: Path, dumps: tuple[str, golden.Dumps]) -> None:
    backend, of_all = dumps
    report = _diagnose(tmp_path, of_all["message"])
    if backend == "plain":  # whether it was received is not recorded
        assert not [f for f in report.findings if at_least(f.severity, Severity.WARNING)], report.findings
    else:
        found = _only(report)
        assert (found.kind, found.culprits) == ("stall", (1,))


def _issued_only(tmp_path: Path, job: Job) -> Report:
    """Diagnose the dumps of a backend that reports no completion: torch's hook retires each entry when it is issued."""
    for ring in job.ranks:
        for e in ring.entries:
            e.update(
                state="scheduled", retired=True, time_discovered_started_ns=None, time_discovered_completed_ns=None
            )
    write(tmp_path, job)
    return diagnose_dumps(tmp_path)


def _trained() -> Job:
    job = Job(4, backend="plain")
    for _ in range(20):
        job.collective()
    return job


def test_an_operation_retired_when_issued_has_not_timed_out(tmp_path: Path) -> None:
    report = _issued_only(tmp_path, _trained())
    assert not [f for f in report.findings if at_least(f.severity, Severity.WARNING)], report.findings


def test_without_completions_a_rank_that_has_issued_less_is_the_culprit(tmp_path: Path) -> None:
    job = _trained()
    for _ in range(3):  # the hosts of the others run ahead
        job.collective(ranks=(0, 1, 3))
    found = _only(_issued_only(tmp_path, job))
    assert (found.kind, found.culprits, found.victims) == ("stall", (2,), (0, 1, 3))
    assert found.collective is not None and found.collective.seq == 21


def test_without_completions_incompatible_calls_are_a_mismatch(tmp_path: Path) -> None:
    job = _trained()
    for rank in range(4):
        job.issue(rank, "broadcast" if rank == 2 else "all_reduce", "0", done=False)
    job.collective()
    found = _only(_issued_only(tmp_path, job))
    assert (found.kind, found.cause, found.culprits) == ("mismatch", "op", (2,))


def test_what_a_dump_cannot_show_is_a_note(tmp_path: Path) -> None:
    job = _trained()
    job.issue(0, "recv 0<-?", "0", done=False)
    write(tmp_path / "anybody", job)
    (note,) = diagnose_dumps(tmp_path / "anybody").notes
    assert note == "rank 0 may wait for a message from any rank: the sender is not recorded"
    batch = Job(2, backend="nccl2")
    batch.collective()
    batch.message(0, 1)
    write(tmp_path / "batch", batch)
    (note,) = diagnose_dumps(tmp_path / "batch").notes
    assert "as completed when they are issued: whether those of ranks 0, 1 have arrived is not known" in note
    (tmp_path / "plain").mkdir()
    assert any("reports no completion" in note for note in _issued_only(tmp_path / "plain", _trained()).notes)


def _shape(dump: dict[str, Any]) -> tuple[Any, ...]:
    entries = [(e["profiling_name"], e["state"], e["retired"], *sorted(e)) for e in dump["entries"]]
    return sorted(dump), sorted(map(str, dump["pg_config"].values())), entries


@pytest.mark.job
@pytest.mark.parametrize("backend", golden.BACKENDS)
def test_the_installed_torch_writes_what_the_golden_dumps_have(backend: str) -> None:
    file = golden.file_of(backend)
    if not file.exists():
        pytest.skip(f"no golden dumps of this torch ({file.name}); README.md in tests/sources/golden has the command")
    if backend != "plain" and shutil.which("c++") is None:
        pytest.skip("the stand-in needs a C++ compiler")
    assert {r: _shape(d) for r, d in golden.dumps("message", backend).items()} == {
        r: _shape(d) for r, d in json.loads(file.read_text())["message"].items()
    }
