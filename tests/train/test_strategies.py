"""Every strategy computes the same training, and wrong combinations of options are refused in two lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distdiag.errors import DistdiagError
from distdiag.train.config import TrainConfig, parse_arguments
from distdiag.train.loop import _batches_per_epoch
from distdiag.train.models import ResNet, SimpleCNN
from distdiag.train.strategies import stages as schedule
from distdiag.train.strategies.split import Stage, cut
from tests.jobs import launch


@pytest.mark.job
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("single", "dp", "ddp", "fsdp", "model", "pipeline:gpipe", "pipeline:interleaved")),
        (4, ("single", "fsdp", "pipeline:1f1b")),
    ],
)
def test_all_strategies_compute_the_same_losses_and_weights(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    """3 steps of 2 accumulated batches with clipping. The job itself checks that a resumed strategy ends equal."""
    job_file = Path(__file__).with_name("strategies_job.py")
    with launch([job_file, tmp_path, *names], nproc=ranks, timeout=360, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
    done: dict[str, dict[str, Any]] = {n: torch.load(tmp_path / f"{n.replace(':', '-')}.pt") for n in names}
    single = done["single"]
    torch.manual_seed(3)
    initial = SimpleCNN(dropout=0.0).state_dict()
    assert single["weights"].keys() == initial.keys()
    moved = max(float((single["weights"][k] - v).abs().max()) for k, v in initial.items())
    assert moved > 10 * 1e-4  # the tolerance below is far smaller than what training changes
    for name, result in done.items():
        torch.testing.assert_close(result["losses"], single["losses"], rtol=1e-5, atol=0, msg=name)
        for key, weights in single["weights"].items():
            torch.testing.assert_close(result["weights"][key], weights, rtol=1e-4, atol=1e-4, msg=f"{name} {key}")
    assert single["losses"][0] != single["losses"][-1]
    staged = [n for n in names if n.startswith(("model", "pipeline"))]
    assert all("bubble" in done[n]["summary"][0] and "measured: rank 0 " in done[n]["summary"][0] for n in staged)


WRONG = {
    "--strategy single": (2, "--strategy single trains in one process, this job has 2 ranks"),
    "--strategy dp": (2, "--strategy dp trains in one process, this job has 2 ranks"),
    "--strategy fsdp": (0, "--strategy fsdp needs a launcher"),
    "--strategy pipeline": (1, "--strategy pipeline divides the layers over ranks, this job has 1 rank"),
    "--strategy pipeline --batch-size 10": (2, "a batch of 10 cannot be divided into 4 equal micro-batches"),
    "--strategy pipeline --micro-batches 2": (4, "--schedule 1f1b with 4 ranks needs at least 4 micro-batches, not 2"),
    "--strategy pipeline --schedule interleaved --micro-batches 3 --batch-size 9": (
        2, "--schedule interleaved needs a multiple of 2 micro-batches, not 3",
    ),
    "--strategy model --micro-batches 8": (2, "--micro-batches has no effect with --strategy model"),
    "--strategy fsdp --bucket-mb 5": (2, "--bucket-mb has no effect with --strategy fsdp"),
    "--strategy fsdp --amp fp16": (2, "--amp fp16 is not supported with --strategy fsdp"),
    "--strategy pipeline --inject unused": (2, "--inject unused and uneven need whole models, not --strategy pipeline"),
}  # fmt: skip


@pytest.mark.parametrize("options", WRONG)
def test_a_combination_that_cannot_work_is_one_line(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, message = WRONG[options]
    if world_size:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(max(1, world_size)))
    with pytest.raises(DistdiagError) as refused:
        parse_arguments(options.split())
    assert refused.value.message == message
    assert refused.value.hint and "\n" not in refused.value.hint


def test_without_the_option_torchrun_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert parse_arguments([]).strategy == "single"
    monkeypatch.setenv("RANK", "0")
    assert parse_arguments([]).strategy == "ddp"


@pytest.mark.parametrize(("network", "stages"), [(SimpleCNN(), 2), (SimpleCNN(), 5), (ResNet((2, 2, 2, 2)), 4)])
def test_the_stages_together_equal_the_model(network: nn.Module, stages: int) -> None:
    network.eval()
    whole = {k: v.clone() for k, v in network.state_dict().items()}
    images = torch.randn(2, 3, 32, 32)
    expected = network(images)
    divided = cut(network.pieces(), stages, (3, 32, 32))  # type: ignore[operator]
    parts = [Stage(pieces) for pieces in divided.stages]
    assert abs(sum(divided.shares) - 1) < 1e-9 and all(list(part.parameters()) for part in parts)
    x = images
    for part, shape in zip(parts, divided.shapes, strict=False):
        assert tuple(x.shape[1:]) == shape
        x = part(x)
    torch.testing.assert_close(x, expected)
    merged = {k: v for part in parts for k, v in part.whole_state().items()}
    assert merged.keys() == whole.keys() and all(torch.equal(merged[k], v) for k, v in whole.items())


@pytest.mark.parametrize(("data_ranks", "batches"), [(1, 10), (2, 4)])
def test_the_strategy_decides_how_many_ranks_share_an_epoch(data_ranks: int, batches: int) -> None:
    strategy: Any = SimpleNamespace(data_ranks=data_ranks)
    config = TrainConfig(strategy="a later one", batch_size=16, accumulate=2)
    assert _batches_per_epoch(config, strategy, 160) == batches
    with pytest.raises(DistdiagError, match=f"{16 // data_ranks} samples per rank are fewer than one step takes"):
        _batches_per_epoch(config, strategy, 16)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(DistdiagError, match="99 stages, but the model has 8 layers with parameters"):
        cut(SimpleCNN().pieces(), 99, (3, 32, 32))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8)])
def test_the_drawn_schedule_has_the_bubble_of_the_formula(kind: str, ranks: int, micro_batches: int) -> None:
    """With one slot per action, both schedules take 2 (m + p - 1) slots, and each rank works in 2 m of them."""
    lanes = schedule.slots(kind, ranks, micro_batches)
    length = 1 + max(slot for lane in lanes for slot in lane)
    assert [len(lane) for lane in lanes] == [2 * micro_batches] * ranks
    assert 1 - 2 * micro_batches / length == pytest.approx(schedule.bubble(ranks, micro_batches))
    at = {action: slot for lane in lanes for slot, action in lane.items()}
    for (what, stage, micro_batch), slot in at.items():  # what an action needs has been computed before
        if what == "F":
            assert stage == 0 or at["F", stage - 1, micro_batch] < slot
        else:
            assert at["F", stage, micro_batch] < slot
            assert stage == ranks - 1 or at["B", stage + 1, micro_batch] < slot


def test_a_schedule_is_drawn_with_a_lane_for_each_rank() -> None:
    assert schedule.drawing(schedule.slots("gpipe", 2, 2)) == [
        "rank 0  F0 F1 .  .  B0 B1",
        "rank 1  .  F0 F1 B0 B1 .",
    ]
    assert schedule.drawing(schedule.slots("1f1b", 3, 4)) == [
        "rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]
