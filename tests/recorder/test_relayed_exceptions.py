"""Errors of another process that an exception passes on."""

from __future__ import annotations

import os
import signal

import pytest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.utils.data import DataLoader, Dataset

from distdiag.diagnosis.endings import ends
from distdiag.diagnosis.model.snapshot import Life
from distdiag.recorder.relayed_exceptions import original, text_of
from tests.diagnosis.made import job, rank


def write_data() -> None:
    raise OSError(122, "Disk quota exceeded", "step_210")


@pytest.fixture(scope="module")
def refused() -> str:
    """The text of torch's exception if ranks 2 and 3 fail to write their parts of a checkpoint."""
    try:
        write_data()
    except OSError as e:
        return text_of(CheckpointException("write", {2: _wrap_exception(e), 3: _wrap_exception(KeyError("x"))}))
    raise AssertionError


def test_a_rank_that_fails_in_a_distributed_checkpoint_has_its_own_error(refused: str) -> None:
    text, frames = original(refused, 2)
    assert text == "OSError: [Errno 122] Disk quota exceeded: 'step_210' (in a distributed checkpoint)"
    assert [(file == __file__, function) for file, _, function in frames] == [(True, "refused"), (True, "write_data")]
    assert original(refused, 3)[0] == "KeyError: 'x' (in a distributed checkpoint)"


def test_the_other_ranks_fail_because_of_it(refused: str) -> None:
    errors = {q: original(refused, q)[0] for q in range(4)}
    assert errors[0] == "CheckpointException: rank 2 failed: OSError: [Errno 122] Disk quota exceeded: 'step_210'"
    found = ends(job(*(rank(q, life=Life.CRASHED, exception=text, ended_s=99.0) for q, text in errors.items())))
    assert found == {0: "echo", 1: "echo", 2: "cause", 3: "cause"}


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError(f"sample {index}")


def test_the_error_of_a_loader_worker_is_that_of_its_dataset() -> None:
    with pytest.raises(ValueError) as e:
        next(iter(DataLoader(Broken(), num_workers=1)))
    text, frames = original(text_of(e.value), 0)
    assert text == "ValueError: sample 0 (in a DataLoader worker)"
    assert frames[-1][0] == __file__ and frames[-1][2] == "__getitem__"


class Crashing(Broken):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_the_error_of_a_worker_that_a_signal_ended_names_the_signal() -> None:
    with pytest.raises(RuntimeError) as e:
        next(iter(DataLoader(Crashing(), num_workers=1)))
    assert text_of(e.value).endswith("is killed by signal: Killed")
    assert text_of(KeyError("device")) == "KeyError: 'device'"


def test_any_other_text_is_kept() -> None:
    assert original("KeyError: 'device'", 1) == ("KeyError: 'device'", [])
    assert original("RuntimeError: CheckpointException ranks: none", 0)[1] == []
