"""The job itself: real processes, a tiny data set, and likely user errors."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import launch, start, wait_for
from tests.train.images import binary_folder

pytestmark = pytest.mark.job
SMALL = ("--batch-size", "8", "--log-every", "1")
ALONE = (sys.executable, "-m", "distdiag.train")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return binary_folder(tmp_path_factory.mktemp("data"), train=160, test=50)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the places at which two checkpoints differ in any bit."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [where]
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, list | tuple):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def own_lines(stderr: str) -> list[str]:
    """Return our own lines; torchrun adds its warnings and its report of failed ranks."""
    return [line for line in stderr.splitlines() if line.startswith(("distdiag:", "hint:"))]


@pytest.mark.timeout(420)  # three launches, one after the other
def test_a_resumed_run_equals_the_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    """5 steps per epoch: the first 3 and then 4 more, from the middle of one epoch into the next."""
    options = [*SMALL, "--max-steps", "7", "--accumulate", "2", "--clip", "1", "--checkpoint-every", "3"]
    options += ["--loader", "workers", "--workers", "1", "--keep-checkpoints", "3", "--data", str(data)]
    with launch(
        ["-m", "distdiag.train", *options, "--checkpoint-dir", tmp_path / "a"], timeout=170, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        out = job.stdout().splitlines()
        assert own_lines(job.stderr()) == []
    # only rank 0 prints: a start line, 7 steps, 2 validations, an end
    assert re.fullmatch(
        r"SimpleCNN \(2,474,058 parameters\) on small \(not CIFAR-10\) \(160 \+ 50 images\): 2 ranks x 8 samples "
        r"x 2 accumulated, ddp, cpu \(gloo\), amp (off|bf16) \(auto: .*\), channels_last, 7 steps",
        out[0],
    )
    assert [m[1] for line in out[1:] if (m := re.match(r"epoch \d  step (\d)/7  loss", line))] == list("1234567")
    assert [m[1] for line in out[1:] if (m := re.match(r"epoch \d  step (\d)/7  test loss", line))] == ["5", "7"]
    assert re.fullmatch(r"done: 7 steps in .* s, loss .*, test accuracy .*%; checkpoint .*step-00000007\.pt", out[-1])
    assert len(out) == 1 + 7 + 2 + 1

    half = tmp_path / "a" / "step-00000003.pt"
    resumed = ["--checkpoint-dir", str(tmp_path / "b"), "--resume", str(half)]
    with launch(["-m", "distdiag.train", *options, *resumed], timeout=170, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        assert f"resumed after step 3 from {half}" in job.stdout()
    uninterrupted, again = load(tmp_path / "a" / "step-00000007.pt"), load(tmp_path / "b" / "step-00000007.pt")
    assert differences(uninterrupted, again) == []
    assert len(uninterrupted["random"]) == 2
    assert differences(load(half), again), "the comparison must be able to find a difference"

    with start([*ALONE, *options, "--resume", half]) as job:  # one rank instead of two
        assert job.wait() == 2, job.tail()
        assert job.stderr().splitlines() == [
            "distdiag: error: the checkpoint was written by 2 ranks, this job has 1",
            "hint: start it with torchrun --nproc-per-node 2 … (in all), or anew without --resume",
        ]


def test_two_accumulated_batches_equal_one_of_their_size(data: Path, tmp_path: Path) -> None:
    with launch([Path(__file__).with_name("accumulate_job.py"), data, tmp_path], timeout=150, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
    one, two, half = (load(tmp_path / name / "step-00000004.pt")["model"] for name in ("8x1", "4x2", "4x1"))
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(half[name], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(420)  # two launches, one after the other
def test_resnet18_trains_to_the_same_bits_with_the_monitor(data: Path, tmp_path: Path) -> None:
    options = [*SMALL[2:], "--batch-size", "2", "--model", "resnet18", "--max-steps", "3", "--amp", "off"]
    options += ["--validate-every", "0", "--checkpoint-every", "3", "--data", str(data)]
    losses, ends = [], []
    for name, recorded in (("with", ["--monitor", "--run-dir", str(tmp_path / "run")]), ("without", [])):
        with launch(
            ["-m", "distdiag.train", *options, *recorded, "--checkpoint-dir", tmp_path / name],
            timeout=200,
            fork_ranks=True,
        ) as job:
            assert job.wait() == 0, job.tail()
            losses.append(re.findall(r"step (\d)/3  loss ([\d.]+)", job.stdout()))
        ends.append(load(tmp_path / name / "step-00000003.pt"))
    assert [step for step, _ in losses[0]] == list("123") and losses[0] == losses[1]
    assert differences(*ends) == []
    # a short job on a busy host may end before its monitor has made run.db; the ranks create the directory themselves
    assert any((tmp_path / "run").iterdir()), "the first job was recorded"


def test_a_damaged_data_set_ends_all_ranks_with_one_error(data: Path, tmp_path: Path) -> None:
    for file in data.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "data_batch_3.bin").unlink()
    with launch(["-m", "distdiag.train", *SMALL, "--data", tmp_path], timeout=120) as job:
        assert job.wait() != 0
        error, hint = own_lines(job.stderr())
        assert error == f"distdiag: error: {tmp_path}/data_batch_3.bin is missing: the folder is incomplete"
        assert "md5sum" in hint
        assert "[rank" not in job.stderr(), "no rank shows a traceback"
        assert re.findall(r"exitcode\s*: (-?\d+)", job.stderr())[-1] == "2"  # torchrun's root cause
        assert job.stdout() == ""


def test_a_job_stuck_in_a_collective_can_be_interrupted(data: Path) -> None:
    options = [*SMALL, "--data", data, "--checkpoint-every", "-1", "--inject", "deadlock@rank1:step3"]
    with launch(["-m", "distdiag.train", *options], timeout=150) as job:
        wait_for(lambda: "step 2/" in job.stdout(), 120, "step 2", job)
        pids = job.rank_pids()
        assert set(pids) == {0, 1}
        job.process.send_signal(signal.SIGINT)
        job.wait(28)  # torchrun itself would kill it after 30 s
        assert "[rank" not in job.stderr(), job.tail()
        assert "step 3/" not in job.stdout()


def test_sigterm_ends_a_single_process_cleanly(data: Path) -> None:
    with start([*ALONE, *SMALL, "--data", data]) as job:
        wait_for(lambda: "step 1/" in job.stdout(), 60, "step 1", job)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 130, job.tail()
        assert job.stderr() == "distdiag: interrupted; continue from a checkpoint with --resume DIR\n"


def test_an_unwritable_checkpoint_directory_is_reported_once_and_training_continues(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-X", "importtime", *ALONE[1:], *SMALL, "--data", data, "--max-steps", "3", "--quiet"]
    options = ["--checkpoint-every", "1", "--checkpoint-dir", tmp_path / "file", "--validate-every", "0"]
    with start([*command, *options]) as job:
        assert job.wait() == 0, job.tail()
        warning, hint = own_lines(job.stderr())
        assert warning.startswith(f"distdiag: warning: no checkpoint in {tmp_path}/file: ")
        assert hint.startswith("hint: choose another directory with")
        start_line, end_line = job.stdout().splitlines()
        assert "160 + 50 images" in start_line
        assert end_line.startswith("done: 3 steps")
        imported = re.findall(r"import time:.*\| +(\S+)", job.stderr())
    assert "distdiag.train.loop" in imported
    assert not [name for name in imported if name.startswith("distdiag.recorder")], "without --monitor"


def test_a_port_that_is_taken_is_named(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with start([*ALONE, *SMALL, "--data", data], env=env) as job:
            assert job.wait() == 2, job.tail()
            assert own_lines(job.stderr()) == [
                f"distdiag: error: port {port} is used by another process",
                "hint: torchrun --standalone chooses a free one; or set another MASTER_PORT",
            ]
            assert "Traceback" not in job.stderr()
