"""`distdiag doctor`, its text and its exit codes."""

from __future__ import annotations

import json

from tests.jobs import distdiag


def test_each_line_has_verdict_fact_and_remedy() -> None:
    answer = distdiag("doctor", "--no-torch", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    lines = answer.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "TORCH_DISTRIBUTED_DEBUG=DETAIL" in line)
    assert lines[at].startswith("warn  variables")
    assert lines[at + 1].strip() == "→ unset TORCH_DISTRIBUTED_DEBUG"
    assert "warnings" in lines[-1] and answer.stderr == ""


def test_exit_code_follows_fail_on() -> None:
    trap = {"CUDA_LAUNCH_BLOCKING": "1"}
    assert distdiag("doctor", "--no-torch", env=trap).returncode == 0
    assert distdiag("doctor", "--no-torch", "--fail-on", "warn", env=trap).returncode == 1
    unfit = distdiag("doctor", "--no-torch", "--json", env={"GLOO_SOCKET_IFNAME": "no-such-if"})
    assert unfit.returncode == 1
    assert json.loads(unfit.stdout)["verdict"] == "fail"


def test_an_endpoint_must_have_a_port() -> None:
    answer = distdiag("doctor", "--no-torch", "--reach", "node0")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "distdiag: error: --reach node0: not HOST:PORT",
        "hint: for example --reach node0:29500, torchrun's default port",
    ]
