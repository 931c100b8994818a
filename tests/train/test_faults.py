"""`--inject`: what is accepted, what is refused, and on which rank and step it acts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.train import faults as faults_module
from distdiag.train.faults import KINDS, Faults, InjectedFault, parse_fault


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("deadlock@rank1:step30", ("deadlock", 1, 30, 0.0, "forward")),
        ("kill@rank0:step1", ("kill", 0, 1, 0.0, "forward")),
        ("crash@rank12:step7", ("crash", 12, 7, 0.0, "forward")),
        ("nan@step7:rank2", ("nan", 2, 7, 0.0, "forward")),
        ("stall@rank1:step30:10s", ("stall", 1, 30, 10.0, "forward")),
        ("stall@rank1:step30:250ms", ("stall", 1, 30, 0.25, "forward")),
        ("straggler@rank1:20ms", ("straggler", 1, None, 0.02, "forward")),
        ("straggler@rank1:1.5s:data", ("straggler", 1, None, 1.5, "data")),
        ("straggler@rank0:5ms:optimizer", ("straggler", 0, None, 0.005, "optimizer")),
        ("unused", ("unused", None, None, 0.0, "forward")),
        ("uneven", ("uneven", None, None, 0.0, "forward")),
        ("uneven@rank1", ("uneven", 1, None, 0.0, "forward")),
    ],
)
def test_fault_specs_are_parsed(spec: str, expected: tuple) -> None:
    fault = parse_fault(spec)
    assert (fault.kind, fault.rank, fault.step, fault.duration_s, fault.place) == expected
    assert fault.spec == spec


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "deadlok@rank1:step30",
        "deadlock",
        "deadlock@rank1",
        "deadlock@step30",
        "deadlock@rank1:step0",
        "deadlock@rank-1:step3",
        "deadlock@rank1:step30:5s",
        "deadlock@rank1:rank2:step3",
        "kill@1:30",
        "stall@rank1:step30",
        "stall@rank1:10s",
        "straggler@rank1",
        "straggler@20ms",
        "straggler@rank1:20",
        "straggler@rank1:20ms:step3",
        "straggler@rank1:20ms:elsewhere",
        "unused@rank1",
        "uneven@step3",
    ],
)
def test_invalid_specs_are_refused_with_a_valid_example(spec: str) -> None:
    with pytest.raises(DistdiagError) as raised:
        parse_fault(spec)
    assert f"--inject {spec}" in raised.value.message
    example = raised.value.hint.rpartition(" ")[2]
    if example not in KINDS:  # the hint of an unknown kind lists the kinds
        parse_fault(example)


def test_a_fault_acts_on_its_rank_at_its_step_alone() -> None:
    crash = (parse_fault("crash@rank1:step3"),)
    for rank, step in ((0, 3), (1, 2), (1, 4)):
        Faults(crash, rank, 2).before_step(step)
    with pytest.raises(RuntimeError, match="shard of step 3"):
        Faults(crash, 1, 2).before_step(3)


def test_nan_reaches_one_batch_of_one_rank_and_leaves_the_shared_pixels_alone() -> None:
    images = torch.zeros(2, 3, 32, 32)
    nan = (parse_fault("nan@rank1:step3"),)
    assert Faults(nan, 0, 2).on_batch(3, images) is images
    assert Faults(nan, 1, 2).on_batch(2, images) is images
    assert math.isnan(Faults(nan, 1, 2).on_batch(3, images).sum().item())
    assert images.sum().item() == 0


@pytest.mark.parametrize(("spec", "short_rank"), [("uneven", 2), ("uneven@rank0", 0)])
def test_uneven_shortens_the_epoch_of_one_rank(spec: str, short_rank: int) -> None:
    counts = [Faults((parse_fault(spec),), rank, 3).batches(50) for rank in range(3)]
    assert counts[short_rank] == 45
    assert sorted(counts)[1:] == [50, 50]
    assert Faults((parse_fault(spec),), short_rank, 3).batches(4) == 3


def test_unused_adds_parameters_that_get_no_gradient() -> None:
    model = Faults((parse_fault("unused"),), 0, 1).apply_to_model(nn.Linear(4, 10))
    model(torch.randn(2, 4)).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ["auxiliary_head.weight", "auxiliary_head.bias"]


@pytest.mark.parametrize("place", ["data", "forward", "backward", "optimizer"])
def test_a_straggler_loses_its_time_once_per_step_in_the_named_place(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[tuple[str, float]] = []
    now = "start"
    monkeypatch.setattr(faults_module.time, "sleep", lambda s: slept.append((now, s)))
    for rank in (0, 1):
        faults = Faults((InjectedFault("straggler", "", 1, None, 0.02, place),), rank, 2)
        model = faults.apply_to_model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        faults.apply_to_optimizer(optimizer)
        for _ in range(2):
            now = "data"
            faults.on_loading()
            now = "forward"
            loss = model(torch.randn(3, 4)).sum()
            now = "backward"
            loss.backward()
            now = "optimizer"
            optimizer.step()
    assert slept == [(place, 0.02)] * 2


def test_without_faults_nothing_happens() -> None:
    faults = Faults((), 0, 1)
    images, model = torch.zeros(1), nn.Linear(1, 1)
    faults.before_step(1)
    faults.on_loading()
    assert faults.on_batch(1, images) is images
    assert faults.apply_to_model(model) is model
    assert faults.batches(7) == 7
    assert not faults.slows_loading
