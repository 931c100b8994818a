"""Ranks without a launcher find their run by the store of their group; what somebody else wrote there leads nowhere, and says so."""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from distdiag.page import directories
from distdiag.recorder import joining, run_claim, session
from tests.jobs import closed, free_port, launch, rows, start

GOOD = ["0123456789abcdef", "/srv/reports", None, "host"]
HOSTILE = {
    "space": ["a b", *GOOD[1:]],
    "newline": ["a\n", *GOOD[1:]],
    "name_of_a_directory": ["a/../../b", *GOOD[1:]],
    "long_token": ["a" * 65, *GOOD[1:]],
    "number": [7, *GOOD[1:]],
    "relative": [GOOD[0], "reports", None, "host"],
    "escape": [GOOD[0], "/srv/../etc", None, "host"],
    "nul": [GOOD[0], "/a\0b", None, "host"],
    "no_name": [GOOD[0], "/a\ud800", None, "host"],
    "relative_run": [GOOD[0], "/srv", "~/run", "host"],
    "many": [*GOOD, 1],
    "object": {"a": 1, "b": 2, "c": 3, "d": 4},
    "huge": [GOOD[0], "/" + "a" * joining.MOST_BYTES, None, "host"],
}
BROKEN = {"deep": "[" * 100_000, "digits": "9" * 5000, "text": "\xff", "nothing": ""}


class Store:
    """A store with one value."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def check(self, keys: list[str]) -> bool:
        return self.value is not None

    def get(self, key: str) -> bytes:
        return (self.value or "").encode("latin-1", "surrogatepass")


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_joined", "_launcher_job"):
        monkeypatch.setattr(run_claim, name, None)
    monkeypatch.setattr(joining.socket, "gethostname", lambda: "host")


@pytest.mark.parametrize("name", [*HOSTILE, *BROKEN])
def test_a_value_that_rank_0_has_not_written_is_refused(unjoined: None, name: str) -> None:
    value = BROKEN.get(name) if name in BROKEN else json.dumps(HOSTILE[name])
    with pytest.raises(ValueError, match="not from distdiag"):
        joining.join(Store(value), 1, None, "gloo")
    assert run_claim.job_given() is None


def test_the_value_of_rank_0_is_used(unjoined: None) -> None:
    joining.join(Store(json.dumps(GOOD)), 1, None, "nccl")
    assert run_claim.root_of_runs() == Path("/srv/reports") and run_claim.job_token().startswith(GOOD[0])


def test_without_a_recorded_rank_0_the_others_wait_a_moment(unjoined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where it must have written before they have the group."""
    monkeypatch.setattr(joining, "WAIT_S", 0.1)
    waits: list[float] = []
    monkeypatch.setattr(joining, "sleep", waits.append)
    for backends, waited in (("nccl", True), ("cpu:gloo,cuda:nccl", False), ("gloo", False)):
        waits.clear()
        with pytest.raises(TimeoutError, match="rank 0 is not recorded"):
            joining.join(Store(None), 1, None, backends)
        assert bool(waits) is waited


ONE_RECORDED = """
import sys
import torch, torch.distributed as dist
from distdiag.recorder import joining
joining.sleep = None  # a wait would raise
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("done", rank)
"""


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recorded", [(1,), (0, 1)])
def test_no_rank_waits_for_the_run_of_rank_0(tmp_path: Path, recorded: tuple[int, ...]) -> None:
    (tmp_path / "script.py").write_text(ONE_RECORDED)
    port = free_port()
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                start([sys.executable, "script.py", str(q), str(port)], cwd=tmp_path, env={"DISTDIAG": str(int(q in recorded))})
            )
            for q in (0, 1)
        ]  # fmt: skip
        for q, job in enumerate(jobs):
            assert job.wait() == 0 and job.stdout() == f"done {q}\n", job.tail()
        alone = len(recorded) == 1
        assert ("rank 0 is not recorded" in jobs[1].stderr()) is alone, jobs[1].tail()
        assert len([*tmp_path.glob("reports/2*")]) == 1 - alone


def test_a_job_of_any_name_has_one_run(unjoined: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name with a space once made a rank create run directories without end."""
    monkeypatch.setattr(directories, "SHM", tmp_path / "no memory")
    for job in ("my job", "a/b", "x" * 400, "ü\n"):
        run_claim.belong_to(job)
        claims = [run_claim.claim_rank(str(tmp_path / f"run {len(job)}"), "x", rank, 2) for rank in (0, 1)]
        assert claims[0] == claims[1] and claims[0].run_dir == tmp_path / f"run {len(job)}"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_job_that_is_not_recorded_survives_the_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session.report_not_recorded(ValueError("\x1b]0;x\x07\nforged"))
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2 and "\x1b" not in shown and "\\x1b" in shown
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        session.report_not_recorded(ValueError("no"))
    assert capsys.readouterr().out == ""


AGAIN = """
import sys, torch.distributed as dist
for backend in ("nosuch", "gloo"):
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError, AssertionError, AttributeError) as e:
        print(backend, "failed")
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [["-W", "ignore"], ["-W", "ignore", "-m", "distdiag.run"]])
def test_a_group_that_exists_at_the_second_try_is_recorded(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "script.py").write_text(AGAIN)
    env = {"DISTDIAG_RUN_DIR": str(tmp_path / "R"), **({"DISTDIAG": "1"} if "-m" not in how else {})}
    with start([sys.executable, *how, str(tmp_path / "script.py")], cwd=tmp_path, env=env) as job:
        assert job.wait() == 0, job.tail()
        assert job.stdout() == "nosuch failed\n"
        assert (tmp_path / "R" / ".node_0").exists(), job.tail()


ATTACHED_FIRST = """
import distdiag
distdiag.attach("R")
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.job
def test_a_script_that_attaches_before_it_imports_torch_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ATTACHED_FIRST)
    with launch(["script.py"], nproc=1, cwd=tmp_path, timeout=60) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    assert rows(tmp_path / "R", "SELECT max(step) FROM step") == [(3,)]
