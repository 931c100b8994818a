"""gpu: cards with errors, throttled, idle, nearly full, or on fewer PCIe lanes."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    GpuState,
    RankState,
    Snapshot,
    Step,
)
from distdiag.diagnosis.rules import gpu
from tests.diagnosis.made import CARD, findings, job, only, rank


def card(**facts: object) -> GpuState:
    return GpuState(node=0, gpu=0, rank=3, **facts)  # type: ignore[arg-type]


def with_card(g: GpuState, device_bytes: int | None = 1 << 30, steps_ms: float = 500.0, t_s: float = 100.0) -> Snapshot:
    n = int(60e3 / steps_ms)
    steps = tuple(
        Step(k, t_s - (n - k) * steps_ms / 1e3, steps_ms, 0, 0, 0, 0, 0, 0, None, 1, 1, None) for k in range(1, n + 1)
    )
    rank = RankState(rank=3, device_bytes=device_bytes, steps=steps, step=n)
    return Snapshot(t_s=t_s, world_size=4, ranks={3: rank}, groups={}, gpus=(g,))


def cards(s: Snapshot) -> list[Finding]:
    return findings(s, gpu)


def test_an_xid_is_explained_and_names_the_rank() -> None:
    assert cards(with_card(card())) == []
    f = only(cards(with_card(card(xids=(79,)))))
    assert (f.kind, f.cause, f.severity, f.culprits) == ("gpu", "xid", "error", (3,))
    assert "79 (the card has fallen off the bus)" in f.message and "drain" in f.advice
    assert "CUDA_LAUNCH_BLOCKING" in only(cards(with_card(card(xids=(31,))))).advice


def test_memory_errors_from_before_the_run_are_info() -> None:
    assert only(cards(with_card(card(ecc_before=2, ecc_uncorrected=2)))).severity == "info"
    f = only(cards(with_card(card(ecc_before=2, ecc_uncorrected=3))))
    assert (f.cause, f.severity) == ("ecc", "error") and "1 uncorrected" in f.message


def test_a_card_is_idle_after_a_minute_in_which_its_rank_made_steps() -> None:
    idle = card(most_used_pct=1.0)
    f = only(cards(with_card(idle)))
    assert (f.cause, f.culprits, f.severity) == ("idle", (3,), "warning")
    assert cards(with_card(card(most_used_pct=None))) == []  # less than a minute, or a MIG instance
    assert cards(with_card(idle, device_bytes=None)) == []  # the rank never used the card
    assert cards(with_card(idle, steps_ms=20_000.0)) == []  # too few steps to know what they run on
    assert cards(with_card(card(most_used_pct=30.0))) == []


def test_a_lost_card_is_an_error_of_its_rank() -> None:
    f = only(cards(with_card(card(lost=True))))
    assert (f.cause, f.severity, f.culprits) == ("lost", "error", (3,)) and "nvidia-smi" in f.advice


def test_nvlinks_that_retrain_or_go_down_are_reported() -> None:
    assert cards(with_card(card(nvlink_active=18, nvlink_before=18, nvlink_recoveries=0))) == []
    f = only(cards(with_card(card(nvlink_active=18, nvlink_before=18, nvlink_recoveries=2))))
    assert (f.cause, f.severity) == ("nvlink", "warning") and "2 times" in f.message
    f = only(cards(with_card(card(nvlink_active=17, nvlink_before=18, nvlink_recoveries=0))))
    assert (f.cause, f.severity) == ("nvlink", "error") and "17 of 18" in f.message


def test_other_processes_on_the_card_are_info() -> None:
    assert cards(with_card(card(others=0))) == []
    f = only(cards(with_card(card(others=2))))
    assert (f.cause, f.severity) == ("shared", "info") and "2 other processes" in f.message


def test_throttling_needs_most_of_a_minute() -> None:
    state = GpuState(node=0, gpu=0, rank=3, throttle="thermal (hardware)", throttled_share=0.4)
    assert cards(with_card(state)) == []
    f = only(cards(with_card(GpuState(node=0, gpu=0, rank=3, throttle="thermal (hardware)", throttled_share=0.6))))
    assert (f.cause, f.culprits) == ("throttled", (3,))


def test_busy_cards_in_a_job_of_long_steps_are_no_finding() -> None:
    card = GpuState(node=0, gpu=0, rank=3, utilization_pct=100.0)
    still = RankState(rank=3, activity_since_s=20.0)

    def at(t_s: float, usual_s: float) -> list[Finding]:
        return cards(Snapshot(t_s=t_s, world_size=1, ranks={3: still}, groups={}, gpus=(card,), usual_step_s=usual_s))

    assert at(110.0, 30.0) == [] and at(70.0, 1.0) == []
    assert only(at(110.0, 1.0)).cause == "busy_without_progress"


def test_a_card_on_fewer_pcie_lanes_is_reported() -> None:
    f = only(cards(job(rank(0), rank(1), gpus=(CARD,))))
    assert (f.kind, f.cause, f.severity, f.culprits) == ("gpu", "pcie_degraded", "warning", (1,))
    assert "x8 of x16" in f.message and "distdiag probe gpu" in f.advice
    unused = msgspec.structs.replace(CARD, rank=None)  # a card without a rank: reported, and nobody is blamed
    assert only(cards(job(rank(0), rank(1), gpus=(unused,)))).culprits == ()


@pytest.mark.parametrize(
    ("width", "most"), [(16, 16), (8, 8), (None, 16), (8, None), (None, None)], ids=lambda w: f"x{w}"
)
def test_full_or_unknown_pcie_width_is_no_finding(width: int | None, most: int | None) -> None:
    card = msgspec.structs.replace(CARD, pcie_width=width, pcie_width_max=most)
    assert cards(job(rank(0), rank(1), gpus=(card,))) == []
