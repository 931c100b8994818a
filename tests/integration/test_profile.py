"""`distdiag profile` of running jobs: what it shows, and that no failure of it reaches the job."""

from __future__ import annotations

import gzip
import json
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from distdiag.page import directories
from distdiag.page.profile_files import read_answer
from tests.jobs import Job, distdiag, launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

TRAINER = ["-m", "distdiag.train", "--monitor", "--run-dir", "run", "--batch-size", "8"]
ENDLESS = ["--epochs", "1000", "--validate-every", "0", "--checkpoint-every", "-1"]
# Between two steps each rank does what the file `do` requests; a broadcast makes both ranks agree on it.
OBEYS = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    words = ["", "own profiler", "no profiler", "sleep", "end"]
    for step in range(1_000_000):
        asked = torch.zeros((), dtype=torch.int64)
        if rank == 0 and os.path.exists("do"):
            asked += words.index(open("do").read())
            os.unlink("do")
        dist.broadcast(asked, 0)
        word = words[int(asked)]
        if word == "end":
            break
        if word == "own profiler":
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            profiler.start()
        if word == "no profiler":
            profiler.stop()
            open(f"own.{rank}", "w").write(str(sum(e.count for e in profiler.key_averages() if "addmm" in e.key)))
        if word == "sleep" and rank == 1:
            while not os.path.exists("wake"):
                time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.randn(16, 64)).sum().backward()
        time.sleep(0.1)
        optimizer.step()
        if word:
            open(f"done.{rank}.{word}", "w").close()
    dist.destroy_process_group()
"""


def steps(run_dir: Path) -> int:
    found = rows(run_dir, "SELECT min(s) FROM (SELECT max(step) AS s FROM step GROUP BY rank)")
    return (found[0][0] or 0) if found else 0


def recording(run_dir: Path) -> bool:
    """True if both ranks are recording a profile."""
    found = [read_answer(p) for ds in directories.of_run(run_dir).values() for d in ds for p in d.glob("r*.profiled")]
    return [a.state for a in found if a is not None] == ["recording"] * 2


def train(folder: Path, images: Path, *options: str) -> AbstractContextManager[Job]:
    """Start the recorded reference job on two ranks; it trains until it is killed."""
    return launch([*TRAINER, *ENDLESS, "--data", images, *options], cwd=folder, fork_ranks=True)


def profile(job: Job, *args: str) -> dict[str, Any]:
    ended = distdiag("profile", "run", "--json", "--timeout", "100", *args, cwd=job.cwd, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr + job.tail()
    return json.loads(ended.stdout)


def test_a_job_with_a_straggler_is_profiled_while_it_runs(tmp_path: Path, images: Path) -> None:
    with train(tmp_path, images, "--strategy", "ddp", "--inject", "straggler@rank1:200ms") as job:
        run = tmp_path / "run"
        wait_for(lambda: steps(run) >= 8 or None, 120, "8 steps", job)
        found = profile(job, "--steps", "2")
        assert [r["rank"] for r in found["ranks"]] == [0, 1]
        assert (found["number"], found["steps"], found["missing"]) == (1, 2, [])
        for r in found["ranks"]:
            assert r["compute_ms"] > 0
            assert r["comm_ms"] > 0
            assert r["compute_ms"] + r["exposed_ms"] + r["idle_ms"] == pytest.approx(r["step_ms"])
            assert r["overlap_ms"] + r["exposed_ms"] == pytest.approx(r["comm_ms"])
            assert "aten::convolution_backward" in {o["name"] for o in r["operators"]}
            assert r["rss_peak_bytes"] > 1 << 26
        assert {"all_reduce"} <= {c["op"] for c in found["collectives"] if c["group"] is not None}
        assert steps(run) < found["first_step"] + 1000  # a step number, not a time
        _check_merged(Path(found["trace"]))

        compared = profile(job, "--steps", "3", "--culprit")["comparison"]
        assert (compared["culprit"], compared["peer"]) == (1, 0)
        more = {d["name"]: d["culprit_ms"] - d["peer_ms"] for d in compared["rows"]}
        assert more["idle"] > 100  # it sleeps
        assert more["waiting"] < -100  # the other rank waits for it
        assert max(v for k, v in more.items() if k.startswith("faults.py:")) > 100

        screen = distdiag("tui", "run", "--once", "--screen", "profile", "--size", "140x40", cwd=tmp_path).stdout
        assert "profile 2: " in screen and "compared with rank 0" in screen and "faults.py:" in screen
        report = distdiag("report", "run", "--format", "text", cwd=tmp_path).stdout
        assert "Profile 2 (distdiag profile)" in report and "faults.py:" in report

        unknown = distdiag("profile", "run", "--ranks", "0,7", cwd=tmp_path)
        assert (unknown.returncode, "rank 7 is not alive" in unknown.stderr) == (2, True)
        assert sorted(p.name for p in (run / "profile").iterdir()) == [".lock", "1", "2"]
        at = steps(run)
        wait_for(lambda: steps(run) > at or None, 60, "further steps", job)
        assert "USDT" not in job.stderr() + job.stdout()  # Kineto prints nothing into the job
        assert not [
            r for r in rows(run, "SELECT cause, message FROM finding WHERE kind = 'recorder'") if r[0] == "failed"
        ]


def _check_merged(path: Path) -> None:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    sent = {e["id"]: e for e in events if e.get("cat") == "join" and e["ph"] == "s"}
    received = {e["id"]: e for e in events if e.get("cat") == "join" and e["ph"] == "f"}
    assert sent
    assert sent.keys() == received.keys()
    assert all(sent[i]["pid"] != received[i]["pid"] for i in sent)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_other_strategies_are_profiled(tmp_path: Path, images: Path, strategy: str) -> None:
    with train(tmp_path, images, "--strategy", strategy) as job:
        wait_for(lambda: steps(tmp_path / "run") >= 4 or None, 120, "4 steps", job)
        found = profile(job, "--steps", "2")
        assert [r["rank"] for r in found["ranks"]] == [0, 1]
        assert all(r["compute_ms"] > 0 and r["comm_ms"] > 0 for r in found["ranks"])
        modules = {m["module"] for m in found["modules"]}
        path = found["critical_path"]
        parts = path["transfer_ms"] + sum(r["compute_ms"] + r["idle_ms"] + r["unmatched_ms"] for r in path["ranks"])
        assert parts == pytest.approx(path["step_ms"])
        if strategy == "fsdp":
            assert {"features", "hidden", "classifier"} <= modules
        else:
            assert modules == set()
            assert {"send 0->1", "send 1->0"} <= {c["op"] for c in found["collectives"]}
            _check_merged(Path(found["trace"]))


def test_no_failure_of_a_profile_reaches_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(OBEYS))
    with launch(["-m", "distdiag.run", "--run-dir", "run", "train.py"], cwd=tmp_path, fork_ranks=True) as job:
        wait_for(lambda: steps(tmp_path / "run") >= 4 or None, 90, "4 steps", job)

        def do(word: str, wait: bool = True) -> None:
            for old in tmp_path.glob("done.*"):
                old.unlink()
            (tmp_path / "part").write_text(word)
            (tmp_path / "part").rename(tmp_path / "do")
            if wait:
                both = [tmp_path / f"done.{rank}.{word}" for rank in (0, 1)]
                wait_for(lambda: all(p.exists() for p in both) or None, 60, word, job)

        def refused(code: int, *args: str) -> str:
            ended = distdiag("profile", "run", "--timeout", "60", *args, cwd=tmp_path, timeout=120)
            assert ended.returncode == code, ended.stdout + ended.stderr + job.tail()
            error = ended.stderr.splitlines()[-2:]
            assert error[0].startswith("distdiag: error: no profile: rank ")
            assert error[1].startswith("hint: ")
            return error[0]

        do("own profiler")
        assert "its own profiler right now" in refused(4)
        do("no profiler")
        assert all(int((tmp_path / f"own.{rank}").read_text()) > 0 for rank in (0, 1))

        with ThreadPoolExecutor(1) as pool:  # the job's own profiler replaces ours
            ours = pool.submit(refused, 4, "--steps", "50")
            wait_for(lambda: recording(tmp_path / "run"), 60, "the profile to record", job)
            do("own profiler")
            assert "the job started its own profiler" in ours.result()
        do("no profiler")
        assert all(int((tmp_path / f"own.{rank}").read_text()) > 0 for rank in (0, 1))

        do("sleep", wait=False)
        wait_for(lambda: not (tmp_path / "do").exists() or None, 60, "sleep", job)
        late = refused(5, "--timeout", "6")
        assert "did not reach step" in late
        (tmp_path / "wake").touch()
        at = steps(tmp_path / "run")
        wait_for(lambda: steps(tmp_path / "run") > at + 2 or None, 60, "further steps", job)
        assert [r["rank"] for r in profile(job, "--ranks", "1")["ranks"]] == [1]  # the late request was dropped

        with ThreadPoolExecutor(1) as pool:
            ours = pool.submit(refused, 4, "--steps", "50")
            wait_for(lambda: recording(tmp_path / "run"), 60, "the profile to record", job)
            do("end", wait=False)
            assert "ended" in ours.result()
        assert job.wait(60) == 0, job.tail()
