"""Checkpoint files without a job: found, refused if damaged or foreign; an error never ends a training."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from distdiag.errors import DistdiagError
from distdiag.train.checkpoint import (
    Checkpoints,
    check_fits,
    find_checkpoint,
    load_checkpoint,
    options_of,
    random_state,
    restore_random_state,
)
from distdiag.train.config import TrainConfig
from distdiag.train.ranks import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 0, 1, "here", CPU, "none", None)


def state(**changes: Any) -> dict[str, Any]:
    return {
        "world_size": 1,
        "options": options_of(TrainConfig()),
        "data": "fingerprint",
        "model": {"weight": torch.arange(4.0)},
        "optimizer": {},
        "scheduler": {},
        "scaler": {},
    } | changes


def test_checkpoints_round_trip_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "made" / "here", keep=2, ranks=ALONE)
    for step in (5, 10, 15):
        checkpoints.save(state(), step)
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["step-00000010.pt", "step-00000015.pt"]
    assert checkpoints.newest == find_checkpoint(str(checkpoints.directory))
    loaded = load_checkpoint(find_checkpoint(str(checkpoints.directory)), CPU)
    assert loaded["step"] == 15
    assert torch.equal(loaded["model"]["weight"], torch.arange(4.0))


def test_random_states_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = random_state()
    expected = torch.rand(3)
    restore_random_state(before)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_directory_is_accepted_as_checkpoint(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "checkpoints", 2, ALONE).save(state(), 3)
    assert find_checkpoint(str(tmp_path)) == tmp_path / "checkpoints" / "step-00000003.pt"


@pytest.mark.parametrize("what", ["nothing", "empty directory"])
def test_a_missing_checkpoint_is_an_error(tmp_path: Path, what: str) -> None:
    with pytest.raises(DistdiagError, match="no such checkpoint" if what == "nothing" else "no checkpoint"):
        find_checkpoint(str(tmp_path / "absent" if what == "nothing" else tmp_path))


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["truncated", "garbage", "empty", "pickle", "foreign", "newer format"])
def test_an_unreadable_checkpoint_is_an_error_that_names_an_older_one(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path, 2, ALONE)
    checkpoints.save(state(), 5)
    checkpoints.save(state(), 10)
    newest = tmp_path / "step-00000010.pt"
    if content == "truncated":
        newest.write_bytes(newest.read_bytes()[:-200])
    elif content == "garbage":
        newest.write_bytes(b"\x80garbage" * 100)
    elif content == "empty":
        newest.write_bytes(b"")
    elif content == "pickle":
        newest.write_bytes(pickle.dumps(_Hostile(tmp_path / "it_ran")))
    elif content == "foreign":
        torch.save({"model": {}}, newest)
    else:
        torch.save(state(format=2, step=1), newest)
    with pytest.raises(DistdiagError) as raised:
        load_checkpoint(newest, CPU)
    assert str(newest) in raised.value.message
    assert str(tmp_path / "step-00000005.pt") in raised.value.hint
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    ("saved", "config", "message", "hint"),
    [
        (state(world_size=4), TrainConfig(), "written by 4 ranks, this job has 1", "--nproc-per-node 4"),
        (state(), TrainConfig(batch_size=32), "written with --batch-size 64", "--batch-size 64"),
        (state(), TrainConfig(model="resnet18"), "written with --model simple", "--model simple"),
        (state(), TrainConfig(seed=3), "written with --seed 0", "--seed 0"),
        (state(data="other"), TrainConfig(), "another data set", "--data"),
    ],
)
def test_a_resume_with_other_settings_is_refused(
    saved: dict[str, Any], config: TrainConfig, message: str, hint: str
) -> None:
    check_fits(state(), TrainConfig(), ALONE, "fingerprint")
    check_fits(state(), TrainConfig(lr=1.0, epochs=99), ALONE, "fingerprint")  # these may change
    with pytest.raises(DistdiagError) as raised:
        check_fits(saved, config, ALONE, "fingerprint")
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_an_unwritable_directory_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", 2, ALONE)
    for step in (1, 2, 3):
        checkpoints.save(state(), step)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 2
    assert lines[0].startswith("distdiag: warning: no checkpoint in ")
    assert "Not a directory" in lines[0]
    assert "--checkpoint-dir" in lines[1]
    assert checkpoints.newest is None


def test_a_full_disk_leaves_no_partial_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 2, ALONE)
    checkpoints.save(state(), 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distdiag.train.checkpoint.os.fsync", full)
    checkpoints.save(state(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert "No space left on device; training continues" in capsys.readouterr().err
    assert checkpoints.newest == tmp_path / "step-00000001.pt"
