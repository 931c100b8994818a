"""The stand-in for NCCL: its semantics, its watchdog, and results equal to gloo's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from distdiag.sources.dumps.pickles import load_pickle
from tests.jobs import Job, free_port, launch
from tests.standins import needs_stream

pytestmark = [pytest.mark.job, needs_stream]

HERE = Path(__file__).parent
STREAM = {"PYTHONPATH": str(HERE / "stream"), "STANDIN_NCCL": "legacy"}
NCCL2 = STREAM | {"STANDIN_NCCL": "nccl2"}
needs_nccl2 = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"),
    reason="torch before 2.15 has no hooks for nccl2",
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    done = subprocess.run([sys.executable, HERE / "stream/prepare.py"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no stand-in: {done.stderr[-300:]}")


def _numbers(env: dict[str, str]) -> Iterator[str]:
    with launch([HERE / "numbers_job.py"], env=env, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        yield from sorted(line for line in job.stdout().splitlines() if line[:2] in ("0 ", "1 "))


def test_the_standin_behaves_like_nccl_to_its_caller() -> None:
    with launch([HERE / "semantics_job.py", str(free_port())], env=STREAM) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout().count("done") == 2


@needs_nccl2
def test_the_standin_behaves_like_nccl2_to_its_caller_and_in_its_flight_recorder() -> None:
    with launch([HERE / "nccl2_job.py", str(free_port())], env=NCCL2) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout().count("done") == 2


def test_the_standins_results_equal_gloos() -> None:
    plain = list(_numbers({}))
    assert len(plain) == 16
    assert list(_numbers(STREAM)) == plain
    if not needs_nccl2.args[0]:
        assert list(_numbers(NCCL2)) == plain


def test_all_pairs_of_ranks_can_make_their_communicators_at_once() -> None:
    with launch([HERE / "pairs_job.py"], env=STREAM, nproc=6, timeout=90, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()


def _aborts(job: Job) -> None:
    assert job.wait() != 0
    error = job.stderr()
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=2" in error
    assert "last enqueued NCCL work: 2, last completed NCCL work: 1" in error
    assert "Signal 6 (SIGABRT)" in error


def test_the_watchdog_ends_the_process_after_the_timeout(tmp_path: Path) -> None:
    env = {**STREAM, "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_")}
    with launch([HERE / "timeout_job.py"], env=env) as job:
        _aborts(job)
    assert (tmp_path / "dump_0").stat().st_size


@needs_nccl2
def test_after_the_timeout_nccl2_runs_its_abort_hooks_and_ends_the_process(tmp_path: Path) -> None:
    env = NCCL2 | {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_")}
    with launch([HERE / "timeout_job.py"], env=env) as job:
        assert job.wait() != 0
        assert "Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout" in job.stderr()
        assert "Signal 6 (SIGABRT)" in job.stderr()
    entries = load_pickle((tmp_path / "dump_0").read_bytes())["entries"]
    assert [(e["state"], e["retired"]) for e in entries] == [("completed", True), ("scheduled", False)]


def test_an_older_torch_refuses_what_it_cannot_imitate() -> None:
    if not needs_nccl2.args[0]:
        pytest.skip("this torch has nccl2")
    code = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | NCCL2, capture_output=True, text=True)
    assert done.returncode and "with torch 2.15 or newer" in done.stderr
