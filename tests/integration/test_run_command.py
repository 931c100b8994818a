"""Ways to record a job other than `-m distdiag.run`: `distdiag run`, `attach()`, an elastic restart, a sharded model."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from distdiag.tapes.tape import judge_file
from tests.jobs import closed, distdiag, launch, rows, start, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

TRAINS = """
    import json, os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    open(f"seen.{dist.get_rank()}", "w").write(json.dumps([__name__, sys.argv, os.getcwd()]))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    if "fail" in sys.argv and dist.get_rank() == 1:
        raise KeyError("no such column")
    dist.destroy_process_group()
"""
BY_HAND = """
    import os, time
    import torch
    import torch.distributed as dist
    import distdiag

    dist.init_process_group("gloo")
    handle = distdiag.attach()
    rank, weight = dist.get_rank(), torch.zeros(8)
    for step in range(1, 31):
        gradient = torch.full((8,), float(rank))
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient
        handle.step(samples=4)
        handle.log(loss=1.0 / step, own=100.0 * rank + step)
    with handle.phase("validate"):
        open(f"validates.{rank}", "w").close()
        while not os.path.exists("seen"):
            time.sleep(0.05)
    handle.detach()
    dist.destroy_process_group()
"""
RESTARTED = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for i in range(15 if first else 25):
        if first and i == 10 and dist.get_rank() == 1:
            raise ValueError("a bad record")
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
SHARDED = """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(40):
        x = torch.randn(16, 32)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def write(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return script


def verdict(run_dir: Path) -> tuple[int, dict[str, Any]]:
    answer = distdiag("diagnose", run_dir, "--json")
    return answer.returncode, json.loads(answer.stdout)


def serious(report: dict[str, Any]) -> list[tuple[str, str | None, list[int]]]:
    return [(f["kind"], f["cause"], f["culprits"]) for f in report["findings"] if f["severity"] != "info"]


def steps(run_dir: Path) -> list[tuple[Any, ...]]:
    return rows(run_dir, "SELECT rank, count(*), max(step) FROM step GROUP BY rank ORDER BY rank")


# -- distdiag run --------------------------------------------------------------------------------------------


def distdiag_run(tmp_path: Path, *arguments: str) -> Any:
    options = [
        "--nproc-per-node",
        "2",
        "--tape",
        "--run-dir",
        "R",
    ]  # torchrun's and ours, in any order before the script
    return start([sys.executable, "-m", "distdiag", "run", *options, "train.py", *arguments], cwd=tmp_path)


def test_distdiag_run_launches_all_ranks_and_records_them(tmp_path: Path) -> None:
    write(tmp_path, TRAINS)
    with distdiag_run(tmp_path, "--epochs", "3", "--run-dir=data", "a b") as job:
        assert job.wait() == 0, job.tail()
        meta = closed(tmp_path / "R")
    for rank in (0, 1):  # an option behind the script is the script's, whatever its name
        name, argv, cwd = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert (name, argv) == ("__main__", ["train.py", "--epochs", "3", "--run-dir=data", "a b"])
        assert Path(cwd) == tmp_path
    assert (meta["world_size"], meta["name"], meta["state"]) == ("2", "train", "ended")
    assert steps(tmp_path / "R") == [(0, 10, 10), (1, 10, 10)]
    assert not (tmp_path / "data").exists() and not (tmp_path / "reports").exists()
    code, report = verdict(tmp_path / "R")
    assert (code, report["ranks_seen"], serious(report)) == (0, 2, [])


def test_distdiag_run_exits_with_the_code_of_its_script(tmp_path: Path) -> None:
    script = write(tmp_path, TRAINS)
    with distdiag_run(tmp_path, "fail") as job:
        assert job.wait() == 1, job.tail()
        assert "KeyError: 'no such column'" in job.stderr()
        assert closed(tmp_path / "R")["state"] == "failed"
        text = wait_for(lambda: "".join(f.read_text() for f in (tmp_path / "R").glob("verdict.txt")), 30, "the verdict")
        # users copy the last lines: the verdict comes after torchrun's traceback
        end = "".join(text.splitlines(keepends=True)[-2:])  # an error printed just before is named in one line
        wait_for(lambda: job.stderr().endswith(end), 30, "the verdict to be printed last")
    code, report = verdict(tmp_path / "R")
    assert (code, serious(report)) == (1, [("rank_lost", "crashed", [1])])
    shown = unwrapped(distdiag("diagnose", tmp_path / "R").stdout)
    printed = [line.removeprefix("[distdiag] ") for line in unwrapped(text).splitlines()]
    block = printed[printed.index("1 error found:") + 1 : -2]
    assert len(block) == 4 and all(line in shown for line in block), "the summary and diagnose have one text"
    line = next(i for i, text in enumerate(script.read_text().splitlines(), 1) if "raise KeyError" in text)
    assert {(w["file"], w["line"]) for w in report["findings"][0]["where"]} == {(str(script), line)}
    sent = distdiag("report", tmp_path / "R", "--tape", tmp_path / "sent.tape")
    assert sent.returncode == 0 and "snapshots" in sent.stderr, sent.stderr
    again = judge_file(tmp_path / "sent.tape").findings  # the verdict of the live run, from its tape alone
    assert [(f.kind, f.cause, list(f.culprits)) for f in again if f.severity != "info"] == serious(report)
    (lost,) = (f for f in again if f.severity != "info")
    assert {(w.file, w.line) for w in lost.where} == {(str(script), line)}


# -- attach() ------------------------------------------------------------------------------------------------


def test_a_custom_loop_is_recorded_through_the_handle(tmp_path: Path) -> None:
    run = tmp_path / "R"
    env = {"DISTDIAG_RUN_DIR": str(run)}
    with launch([write(tmp_path, BY_HAND)], cwd=tmp_path, env=env, fork_ranks=True) as job:
        wait_for(lambda: all((tmp_path / f"validates.{q}").exists() for q in (0, 1)), 60, "the validation", job)
        wait_for(
            lambda: rows(run, "SELECT rank, phase FROM rank ORDER BY rank") == [(0, "validate"), (1, "validate")],
            30,
            "the phase to be seen",
            job,
        )
        (tmp_path / "seen").touch()
        assert job.wait() == 0, job.tail()
        meta = closed(run)
    assert (meta["state"], meta["world_size"]) == ("ended", "2")
    assert steps(run) == [(0, 30, 30), (1, 30, 30)]
    assert rows(run, "SELECT DISTINCT samples FROM step") == [(4,)]
    logged = rows(run, "SELECT rank, step, value FROM scalar WHERE name = 'own' ORDER BY rank, step")
    assert logged == [(q, k, 100.0 * q + k) for q in (0, 1) for k in range(1, 31)]
    losses = rows(run, "SELECT rank, count(*), min(value), max(value) FROM scalar WHERE name = 'loss' GROUP BY rank")
    assert losses == [(q, 30, pytest.approx(1 / 30), 1.0) for q in (0, 1)]
    code, report = verdict(run)
    assert (code, serious(report)) == (0, [])


# -- elastic restart -----------------------------------------------------------------------------------------


def test_each_attempt_of_an_elastic_restart_is_a_run(tmp_path: Path) -> None:
    run = tmp_path / "R"
    command = ["-m", "distdiag.run", "--run-dir", "R", write(tmp_path, RESTARTED)]
    # torch 2.13 keeps one store for all attempts, in which gloo finds the addresses of the previous attempt
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with launch(command, cwd=tmp_path, env=env, torchrun_args=["--standalone", "--max-restarts", "1"]) as job:
        assert job.wait() == 0, job.tail()
        first, last = closed(run), closed(run / "attempt_1")
    assert (first["attempt"], first["state"]) == ("0", "failed")
    assert (last["attempt"], last["state"]) == ("1", "ended")
    assert steps(run) == [(0, 10, 10), (1, 10, 10)] and steps(run / "attempt_1") == [(0, 25, 25), (1, 25, 25)]
    lost = [json.loads(text) for (text,) in rows(run, "SELECT json FROM finding WHERE severity != 'info'")]
    assert [(f["kind"], f["cause"], f["culprits"]) for f in lost] == [("rank_lost", "crashed", [1])]
    assert "ValueError: a bad record" in lost[0]["message"]
    code, report = verdict(run)  # readers show the newest of several attempts
    assert (code, Path(report["run"]).name, serious(report)) == (0, "attempt_1", [])
    assert f"before this attempt: `distdiag diagnose {run / 'run.db'}`" in report["notes"][-1]
    assert verdict(run / "run.db")[1]["notes"] == []


# -- FSDP ----------------------------------------------------------------------------------------------------


def test_a_sharded_model_is_recorded_and_healthy(tmp_path: Path) -> None:
    run = tmp_path / "R"
    command = ["-m", "distdiag.run", "--run-dir", run, write(tmp_path, SHARDED)]
    with launch(command, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        assert closed(run)["state"] == "ended"
    assert steps(run) == [(0, 40, 40), (1, 40, 40)]
    code, report = verdict(run)
    assert (code, report["ranks_seen"], serious(report)) == (0, 2, [])
