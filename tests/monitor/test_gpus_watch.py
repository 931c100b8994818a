"""GPUs of the monitor and their rules, against a stand-in for NVML: this suite runs on machines without a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import GpuState, RankState, Snapshot, Step
from distdiag.diagnosis.rules import gpus as rules
from distdiag.monitor.host.gpus import KEPT, Gpus


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """One card whose readings a test sets; what it does not set, the card does not offer."""

    NVMLError = NvmlError
    NVML_ERROR_TIMEOUT = 10
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.readings: dict[str, Any] = {}
        self.xids: list[int] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("card 0", 8, "set")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0  # the monitor never waits for a card
        if not self.xids:
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        return type("Event", (), {"eventData": self.xids.pop(0)})

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            if name.startswith("NVML_"):
                return 0
            raise AttributeError(name)

        def read(*_: Any) -> Any:
            if name not in self.readings:
                raise NvmlError(3)
            return self.readings[name]

        return read


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def use(percent: int) -> Any:
    return type("Use", (), {"gpu": percent, "memory": 0})


def watch(nvml: Nvml, seconds: int) -> GpuState:
    gpus = Gpus(0)
    assert gpus.absent is None
    for t in range(seconds):
        gpus.rows(float(t), {0: 3})
    return gpus.states()[0]


def job(g: GpuState, device_bytes: int | None = 1 << 30, steps_ms: float = 500.0, t_s: float = 100.0) -> Snapshot:
    n = int(60e3 / steps_ms)
    steps = tuple(
        Step(k, t_s - (n - k) * steps_ms / 1e3, steps_ms, 0, 0, 0, 0, 0, 0, None, 1, 1, None) for k in range(1, n + 1)
    )
    rank = RankState(rank=3, device_bytes=device_bytes, steps=steps, step=n)
    return Snapshot(t_s=t_s, world_size=4, ranks={3: rank}, groups={}, gpus=(g,))


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def test_an_xid_is_said_with_its_meaning_and_the_rank(nvml: Nvml) -> None:
    assert rules.rules(job(watch(nvml, 3))) == []
    nvml.xids = [79]
    f = only(rules.rules(job(watch(nvml, 3))))
    assert (f.kind, f.cause, f.severity, f.culprits) == ("gpu", "xid", "error", (3,))
    assert "79 (the card has fallen off the bus)" in f.message and "dmesg" in f.advice
    nvml.xids = [31]
    assert "CUDA_LAUNCH_BLOCKING" in only(rules.rules(job(watch(nvml, 3)))).advice


def test_a_card_without_events_is_watched_all_the_same(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NvmlError(3)

    monkeypatch.setattr(nvml, "nvmlDeviceRegisterEvents", refuse)
    nvml.readings["nvmlDeviceGetUtilizationRates"] = use(50)
    state = watch(nvml, KEPT)
    assert state.xids == () and state.most_used_pct == 50


def test_memory_errors_of_before_the_run_are_no_fault_of_it(nvml: Nvml) -> None:
    gpus = Gpus(0)
    nvml.readings["nvmlDeviceGetTotalEccErrors"] = 2
    gpus.rows(0.0, {0: 3})
    assert only(rules.rules(job(gpus.states()[0]))).severity == "info"
    nvml.readings["nvmlDeviceGetTotalEccErrors"] = 3
    gpus.rows(1.0, {0: 3})
    f = only(rules.rules(job(gpus.states()[0])))
    assert (f.cause, f.severity) == ("ecc", "error") and "1 uncorrected" in f.message


def test_a_card_that_idles_while_its_rank_makes_steps(nvml: Nvml) -> None:
    nvml.readings["nvmlDeviceGetUtilizationRates"] = use(1)
    assert rules.rules(job(watch(nvml, KEPT - 1))) == []  # not a minute yet
    idle = watch(nvml, KEPT)
    f = only(rules.rules(job(idle)))
    assert (f.cause, f.culprits, f.severity) == ("idle", (3,), "warning")
    assert rules.rules(job(idle, device_bytes=None)) == []  # it never used the card
    assert rules.rules(job(idle, steps_ms=20_000.0)) == []  # it hardly makes steps: no word about what they run on
    nvml.readings["nvmlDeviceGetUtilizationRates"] = use(30)
    assert rules.rules(job(watch(nvml, KEPT))) == []


def test_throttling_needs_most_of_a_minute(nvml: Nvml) -> None:
    state = GpuState(node=0, gpu=0, rank=3, throttle="thermal (hardware)", throttled_share=0.4)
    assert rules.rules(job(state)) == []
    f = only(rules.rules(job(GpuState(node=0, gpu=0, rank=3, throttle="thermal (hardware)", throttled_share=0.6))))
    assert (f.cause, f.culprits) == ("throttled", (3,))


def test_busy_cards_without_a_step_in_a_job_of_long_steps_are_nothing(nvml: Nvml) -> None:
    card = GpuState(node=0, gpu=0, rank=3, utilization_pct=100.0)
    still = RankState(rank=3, activity_since_s=20.0)

    def at(t_s: float, usual_s: float) -> list[Finding]:
        return rules.rules(
            Snapshot(t_s=t_s, world_size=1, ranks={3: still}, groups={}, gpus=(card,), usual_step_s=usual_s)
        )

    assert at(110.0, 30.0) == [] and at(70.0, 1.0) == []
    assert only(at(110.0, 1.0)).cause == "busy_without_progress"
