"""The collection is consistent: lines contain the expected text, every kind and cause has a job, styles differ."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from distdiag.errors import DistdiagError
from tests.faults.collection import Job, load
from tests.faults.renumber import nearest
from tests.jobs import shared

FOLDER = Path(__file__).resolve().parent
JOBS = load(FOLDER / "manifest.json").jobs

# kinds and causes that a job can have on any machine; the others need much memory, GPUs or a second node
COVERED = {
    "deadlock": {
        "missing_rank", "order_mismatch", "group_cycle", "p2p_cycle", "rank_exited", "rank_finished", "rank_stopped", "file_lock",
    },
    "mismatch": {"op", "shape", "dtype", "root", "group", "model"},
    "stall": {"user_code", "data", "gil_held", "checkpoint", "unknown"},
    "timeout": {"late_rank"},
    "rank_lost": {"killed", "crashed"},
    "unused_parameters": {"never_used", "differs_between_ranks", "flag_not_needed"},
    "uneven_batches": {"count", "size"},
    "straggler": {"data", "forward", "backward", "optimizer", "host", "rotating"},
    "input_bound": set(),
    "comm_bound": set(),
    "duplicate_data": {"same_batches_on_ranks", "same_order_every_epoch"},
    "group_misuse": {"not_a_member"},
    "replica_drift": {"gradients_not_synced", "different_init", "learning_rates", "buffers"},
    "nonfinite": {"loss", "gradient"},
    "memory": {"growth", "imbalance"},
}  # fmt: skip


def test_there_are_enough_faulty_and_healthy_jobs() -> None:
    assert sum(j.faulty for j in JOBS) >= 30
    assert sum(not j.faulty for j in JOBS) >= 20
    assert len({j.name for j in JOBS}) == len(JOBS)
    assert {j.path for j in JOBS} == {f"jobs/{p.name}" for p in (FOLDER / "jobs").glob("*.py")}


def test_every_kind_and_cause_has_a_job() -> None:
    seen: dict[str, set[str]] = {}
    for j in JOBS:
        for kind in j.expected.kinds_any_or_all:
            seen.setdefault(kind, set()).update(j.expected.causes)
    assert {k: causes - seen.get(k, set()) for k, causes in COVERED.items() if causes - seen.get(k, set())} == {}
    assert set(COVERED) <= set(seen)


@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_each_job_matches_its_manifest_entry(job: Job) -> None:
    source = (FOLDER / job.path).read_text()
    lines = source.splitlines()
    ast.parse(source)
    assert 15 <= len(lines) <= 130
    assert "prctl(1" in source, "it may outlive its launcher"
    assert "distdiag" not in source
    if job.faulty:
        assert job.expected.kinds_any_or_all
    else:
        assert job.plain_outcome.type == "ok" and not job.expected.kinds_any_or_all and not job.positions
    for p in job.positions:
        assert p.file == job.path
        assert lines[p.line - 1].strip() == p.code, "tests/faults/renumber.py finds the lines again"
        assert p.rank < job.nproc
        assert p.last_line is None or p.line < p.last_line <= len(lines)
    for name, other in job.on.items():
        assert len(other.reason) > 20 and (FOLDER.parent / "standins" / name).is_dir()
        for p in other.positions or ():
            assert lines[p.line - 1].strip() == p.code
    accused = {p.rank for p in job.positions if p.role == "culprit"}
    if accused and job.expected.culprits:
        assert accused == set(job.expected.culprits)


def test_lines_are_found_again_next_to_where_they_were() -> None:
    lines = ["x = 1", "", "    loss.backward()", "y = 2", "loss.backward()"]
    assert nearest(lines, "loss.backward()", 2) == 3
    assert nearest(lines, "loss.backward()", 9) == 5
    assert nearest(lines, "loss.backwards()", 2) is None


def test_manifests_of_other_collections_are_read() -> None:
    other = load(shared("faults", "manifest.json"))
    assert {j.faulty for j in other.jobs} == {True, False}
    assert all(j.launch == "torchrun" and j.limit_s > 0 for j in other.jobs)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "no fault collection"),
        ("{", "is not a manifest"),
        ('{"jobs": ' + "[" * 100_000, "is not a manifest"),
        ('{"jobs": [{"name": "a"}]}', "is not a manifest"),
        (
            json.dumps({"jobs": [{"name": "a", "nproc": 2, "faulty": False, "diagnosis": "", "plain_outcome": {"type": "ok"}, "expected": {}}]}),
            "job 'a'",
        ),
    ],
)  # fmt: skip
def test_a_bad_manifest_is_an_error_with_its_name(tmp_path: Path, content: str | None, error: str) -> None:
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DistdiagError) as e:
        load(path)
    assert error in e.value.message and "\n" not in e.value.message + e.value.hint
