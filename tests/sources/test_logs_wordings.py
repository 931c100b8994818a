"""Messages in the wording of newer versions, and what they must not hide or repeat. All texts are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.test_logs import diagnose, only, raised, timeout

RETRY = "g{0}:7:9 [4] NCCL WARN NET/{1}: Got completion from peer 10.3.0.9<417> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=129\n"
NPU = "RuntimeError: npuSynchronizeDevice:x.ts:4 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048"
MESH = "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"
NVLS = "g7:2:3 [1] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'\n"
LISTEN = "The server socket has failed to listen on any local network address."
OF_TORCHRUN = '{0}: Traceback (most recent call last):\n{0}:   File "/e/torch/distributed/launcher/api.py", line 2, in launch_agent\n{0}:     result = agent.run()\n'
SIZES = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 12 but the current world size is 4."


@pytest.mark.parametrize("net", ["IB", "IB/GIN"])
def test_a_completion_whose_status_has_a_name(tmp_path: Path, net: str) -> None:
    f = only(diagnose(tmp_path, RETRY.format(3, net)))
    assert "10.3.0.9" in f.message and "status 12: no answer after all retries" in f.message
    assert "ibstat" in f.advice


def test_a_rank_whose_npu_waited_lost_no_connection(tmp_path: Path) -> None:
    f = only(diagnose(tmp_path, raised(2, "KeyError: 'id'") + raised(0, NPU) + raised(1, NPU)))
    assert f.culprits == (2,) and f.message.endswith("ranks 0, 1 then timed out waiting")


@pytest.mark.parametrize("first", [raised(0, MESH, prefix=""), timeout(0) + timeout(1)])
def test_a_shell_s_line_after_ranks_that_waited_in_vain_is_not_the_cause(tmp_path: Path, first: str) -> None:
    assert "SIGKILL" not in only(diagnose(tmp_path, f"{first}Killed\n")).message
    assert "SIGKILL" in only(diagnose(tmp_path, f"Killed\n{first}")).message


def test_the_pod_of_an_exit_code(tmp_path: Path) -> None:
    line = "48s  Warning  ExitedWithCode  pytorchjob/fit  Error pod fit-worker-2 container pytorch exitCode: 137 terminated message: \n"
    assert only(diagnose(tmp_path, line)).message.startswith("fit-worker-2 was killed by SIGKILL")


def test_launchers_that_take_each_others_port(tmp_path: Path) -> None:
    """A task of srun that runs torchrun is no rank; torch logs the failure without its port, and raises it with it."""
    text = "".join(
        f"{task}: [E131 11:40:14.1 socket.cpp:500] [c10d] {LISTEN}\n"
        + OF_TORCHRUN.format(task)
        + f"{task}: RuntimeError: {LISTEN} port: 29511, useIpv6: 0, code: -98, name: EADDRINUSE\n"
        for task in (1, 2)
    )
    f = only(diagnose(tmp_path, text))
    assert f.culprits == () and f.message == "task 1, task 2 could not listen: port 29511 is in use"
    assert "one launcher for each node" in f.advice


def test_advice_on_nccls_own_calls_and_on_a_checkpoint_of_other_sizes(tmp_path: Path) -> None:
    assert "NCCL_NVLS_ENABLE=0" in only(diagnose(tmp_path, NVLS)).advice
    assert "NCCL_CUMEM_ENABLE=0" in only(diagnose(tmp_path, NVLS.replace("nvls", "shm"))).advice
    fault = NVLS.replace("nvls", "shm").replace("the operation cannot be performed", "an illegal memory access")
    assert "CUDA_LAUNCH_BLOCKING" in only(diagnose(tmp_path, fault)).advice
    assert "number of ranks" in only(diagnose(tmp_path, raised(0, SIZES) + raised(1, SIZES))).advice


def test_the_rank_that_the_others_wait_for_was_saving(tmp_path: Path) -> None:
    waits = "".join(timeout(r) for r in range(1, 4))
    last = "[rank0] 2031-03-02 09:00:00 INFO {}\n" + "[rank1] step 9\n"
    assert "longer timeout" in only(diagnose(tmp_path, last.format("wrote part-3.safetensors") + waits)).advice
    assert "longer timeout" not in only(diagnose(tmp_path, last.format("shuffled the index") + waits)).advice
