"""What a rank or host did itself, before what others report of it. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import diagnose, only, raised

REMOTE = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, remote process exited or there was a network error, NCCL version 2.21.5"
SYSTEM = "torch.distributed.DistBackendError: NCCL error in: U.hpp:8, unhandled system error, NCCL version 2.21.5"
RESET = "[rank{0}]: Last error:\n[rank{0}]: socketProgress: Call to recv from 10.9.0.7<41> failed : Connection reset by peer\n"
OWN = "[rank3]: Last error:\n[rank3]: Call to ibv_create_cq failed with error Cannot allocate memory\n"
WARNS = "k7:31:52 [1] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n"
LOSES = "".join(raised(r, REMOTE) + RESET.format(r) for r in (0, 1, 2))
TORCHRUN = "+ torchrun --nproc_per_node 4 {}fit.py\n"
TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29400, useIpv6: false, code: -98, name: EADDRINUSE\n"
KEY = "".join(raised(r, "KeyError: 'x'") for r in (1, 2))
STACK = (
    "MPIR_Init_thread(170)...: \nMPID_Init(1500).........: \nMPIDI_NM_init_hook(90)..: \nopen_domain(300)........: \n"
    "match_provider(301).....: OFI fi_getinfo() failed (No data available)\n"
)
ABORT = "Abort(9) on node {0} (rank {0} in comm 0): Fatal error in internal_Init_thread: Other MPI error, error stack:\n" + STACK
ENDED = "=   RANK {} PID {} RUNNING AT {}\n=   KILLED BY SIGNAL: 9 (Killed)\n"


@pytest.mark.parametrize("text", [LOSES + WARNS + raised(3, SYSTEM) + OWN, WARNS + raised(3, SYSTEM) + OWN + LOSES])
def test_an_error_of_the_host_comes_before_the_connections_that_others_lost_by_it(tmp_path: Path, text: str) -> None:
    f = only(diagnose(tmp_path, text))
    assert (f.culprits, f.victims) == ((3,), (0, 1, 2))
    assert "rank 3 on k7 failed in NCCL" in f.message and "ibv_create_cq" in f.message
    assert "ulimit -l" in f.advice


@pytest.mark.parametrize("option", ["--master-port 29511 ", "--rdzv-endpoint=h1:29511 ", ""])
def test_a_second_command_for_the_same_job_is_another_run(tmp_path: Path, option: str) -> None:
    report = diagnose(tmp_path, TORCHRUN.format("") + TAKEN + TORCHRUN.format(option) + KEY)
    f = only(report)
    assert f.culprits == (1, 2) and "29400" not in f.message
    assert any("1 run before it" in note and "29400" in note for note in report.notes)


def test_the_command_of_another_node_is_of_the_same_run(tmp_path: Path) -> None:
    first, second = (TORCHRUN.format(f"--node-rank {n} ") for n in (0, 1))
    f = only(diagnose(tmp_path, first + raised(1, "KeyError: 'x'") + second + raised(3, "KeyError: 'x'")))
    assert f.culprits == (1, 3)


def test_what_hydra_kills_after_an_abort_follows_from_it(tmp_path: Path) -> None:
    ends = ENDED.format(2, 71, "m4") + ENDED.format(0, 70, "m3")
    f = only(diagnose(tmp_path, ABORT.format(2) + ABORT.format(3) + ends))
    assert f.culprits == (2, 3), f
    assert "internal_Init_thread: OFI fi_getinfo() failed (No data available)" in f.message
    assert "rank 2 ran on m4" in f.message and "FI_PROVIDER" in f.advice
    assert only(diagnose(tmp_path, ABORT.partition(": ")[2] + ends)).message.startswith("a process aborted MPI")
