"""The checks that use torch's answers, and one real examination of this machine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from distdiag.doctor import torch_checks
from distdiag.doctor.check import Check
from distdiag.doctor.torch_facts import Rendezvous, TorchFacts
from tests.jobs import distdiag


def facts(**changes: object) -> TorchFacts:
    known: dict[str, object] = {
        "version": "2.13.0+cpu",
        "distributed": True,
        "backends": ("gloo",),
        "flight_recorder": True,
        "worker_server": True,
        "compiled_hooks": True,
        "rendezvous": Rendezvous(init_ms=8.0, all_reduce_us=300.0),
    }
    return TorchFacts(**(known | changes))  # pyright: ignore[reportArgumentType]


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {c.name: str(c.verdict) for c in checks}


def test_a_healthy_torch_passes_all_checks() -> None:
    assert set(verdicts(torch_checks.torch(facts())).values()) == {"pass"}


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"error": "ImportError: libcudart.so.13"}, "torch", "fail"),
        ({"version": "2.9.1"}, "torch", "warn"),
        ({"version": "2.10.0a0+git1234"}, "torch", "pass"),
        ({"distributed": False}, "torch.distributed", "fail"),
        ({"backends": ("nccl",), "rendezvous": None}, "backends", "warn"),
        ({"flight_recorder": False}, "flight recorder", "warn"),
        ({"worker_server": False}, "worker server", "warn"),
        ({"compiled_hooks": False}, "recorder", "warn"),
        ({"rendezvous": Rendezvous(error="timed out")}, "rendezvous", "fail"),
        ({"rendezvous": Rendezvous(init_ms=9000.0, all_reduce_us=300.0)}, "rendezvous", "warn"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, object], name: str, verdict: str) -> None:
    checks = torch_checks.torch(facts(**changes))
    assert verdicts(checks)[name] == verdict
    assert all(c.remedy for c in checks if c.verdict in ("warn", "fail"))


class FakeNvml(SimpleNamespace):
    """NVML of one H100; tests change its answers. Functions without an answer raise, as on a card without them."""

    class NVMLError(Exception):
        pass

    NVMLLibraryMismatchError = NVMLError

    def __getattr__(self, name: str) -> object:
        def missing(*_: object) -> object:
            raise FakeNvml.NVMLError(name)

        return missing


def nvml(**answers: object) -> FakeNvml:
    given: dict[str, object] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=2**30),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetName": "NVIDIA H100",
        **answers,
    }

    def answer(value: object):
        def call(*_: object) -> object:
            if isinstance(value, Exception):
                raise value
            return value

        return call

    return FakeNvml(**{name: answer(value) for name, value in given.items()})


@pytest.mark.parametrize(
    ("answers", "changes", "expected"),
    [
        ({}, {"cuda": "13.0", "gpus": ("H100",), "backends": ("gloo", "nccl")}, {"GPU": "pass", "GPU 0": "pass"}),
        ({}, {}, {"GPU": "fail", "GPU 0": "pass"}),  # a CPU build on a machine with a GPU
        ({}, {"cuda": "13.0"}, {"GPU": "fail", "GPU 0": "pass"}),  # torch does not see it
        ({}, {"cuda": "13.0", "gpus": ("H100",)}, {"GPU": "warn", "GPU 0": "pass"}),  # no NCCL
        ({"nvmlDeviceGetCurrPcieLinkWidth": 4}, {"cuda": "13.0", "gpus": ("H100",), "backends": ("nccl",)},
         {"GPU": "pass", "GPU 0": "warn"}),
        ({"nvmlDeviceGetTotalEccErrors": 3}, {"cuda": "13.0", "gpus": ("H100",), "backends": ("nccl",)},
         {"GPU": "pass", "GPU 0": "warn"}),
        ({"nvmlDeviceGetTotalEccErrors": FakeNvml.NVMLError("not supported")},
         {"cuda": "13.0", "gpus": ("H100",), "backends": ("nccl",)}, {"GPU": "pass", "GPU 0": "pass"}),
        ({"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)]},
         {"cuda": "13.0", "gpus": ("H100",), "backends": ("nccl",)}, {"GPU": "pass", "GPU 0": "warn"}),
        ({"nvmlDeviceGetCount": 0}, {"cuda": "13.0"}, {"GPU": "warn"}),
        ({"nvmlInit": FakeNvml.NVMLError("no driver")}, {}, {"GPU": "skip"}),
        ({"nvmlInit": FakeNvml.NVMLError("no driver")}, {"cuda": "13.0"}, {"GPU": "warn"}),
        ({"nvmlSystemGetDriverVersion": FakeNvml.NVMLError("mismatch")}, {"cuda": "13.0"}, {"GPU": "fail"}),
    ],
)  # fmt: skip
def test_gpus_in_nvml_and_torch_are_compared(
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, object],
    changes: dict[str, object],
    expected: dict[str, str],
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**answers))
    assert verdicts(torch_checks.gpus(facts(**changes))) == expected


def test_a_torch_that_never_answers_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no answer within" in (torch_checks.ask_torch(timeout_s=0.05).error or "")


@pytest.mark.job
def test_all_checks_run_on_this_machine() -> None:
    answer = distdiag("doctor", "--json", "--ranks", "1", timeout=120)
    examined = json.loads(answer.stdout)
    assert next(iter(examined)) == "schema" and examined["schema"] == "distdiag.doctor/1"
    by_name = {c["name"]: c for c in examined["checks"]}
    assert by_name["torch"]["verdict"] == "pass", by_name["torch"]
    assert by_name["rendezvous"]["verdict"] in ("pass", "warn"), by_name["rendezvous"]
    assert "connected in" in by_name["rendezvous"]["found"]
    assert answer.returncode == (1 if examined["verdict"] == "fail" else 0)
