"""`distdiag dump` on a job that hangs: what it shows and saves, and how it reports a rank that cannot answer."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job, clean_env, distdiag, launch, rows, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
    import time
    import torch
    import torch.distributed as dist

    def looks_for_its_file():
        while True:
            time.sleep(0.5)

    def sums_up(x):
        dist.all_reduce(x)

    dist.init_process_group("gloo")
    x = torch.ones(1024)
    for _ in range(20):
        sums_up(x)
    if dist.get_rank() == 1:
        looks_for_its_file()
    sums_up(x)
"""


def line_of(script: Path, text: str) -> str:
    """Return `FILE:LINE` of the only line with this text, as a dump shows it."""
    found = [i for i, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    assert len(found) == 1
    return f"{script}:{found[0]}"


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job in which rank 0 waits in its 21st all_reduce while rank 1 sleeps; no test changes that."""
    folder = tmp_path_factory.mktemp("hanging")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = ["-m", "distdiag.run", "--run-dir", "R", script]
    with launch(command, cwd=folder, timeout=400, fork_ranks=True) as job:
        waiting = "SELECT rank FROM rank WHERE waiting_op = 'all_reduce' AND waiting_seq = 21"
        wait_for(lambda: rows(folder / "R", waiting) == [(0,)], 90, "rank 0 to wait", job)
        yield job


def dump(job: Job, *options: str) -> subprocess.CompletedProcess[str]:
    return distdiag("dump", "R", *options, cwd=job.cwd)


def test_a_dump_shows_every_rank_and_is_saved(hanging: Job) -> None:
    script, run = hanging.cwd / "train.py", hanging.cwd / "R"
    shown = dump(hanging)
    assert shown.returncode == 0, shown.stderr
    assert "1 rank (0)" in shown.stdout and "1 rank (1)" in shown.stdout
    assert f"sums_up {line_of(script, 'dist.all_reduce(x)')}" in shown.stdout
    assert f"looks_for_its_file {line_of(script, 'time.sleep(0.5)')}" in shown.stdout
    assert "in all_reduce #21 default_pg" in shown.stdout
    *saved, hint = unwrapped(shown.stderr).splitlines()[-3:]  # stdout is data
    assert saved[0] == "saved: the stacks in R/stacks/latest.json" and "the flight records of 2 ranks" in saved[1]
    assert hint == "next: distdiag diagnose R"

    given = dump(hanging, "--json", "--no-save")
    assert given.returncode == 0, given.stderr
    output = json.loads(given.stdout)
    assert next(iter(output)) == "schema" and output["schema"] == "distdiag.stacks/1"
    assert (hanging.cwd / output["run"]).samefile(run) and set(output["ranks"]) == {"0", "1"}
    first, second = output["ranks"]["0"], output["ranks"]["1"]
    assert f"sums_up {line_of(script, 'dist.all_reduce(x)')}" in first["stack"]
    assert (first["op"], second["op"]) == ("all_reduce #21 default_pg", None)
    assert second["stack"][-1] == f"looks_for_its_file {line_of(script, 'time.sleep(0.5)')}"
    assert given.stderr == ""  # nothing was saved, and nothing is printed

    assert json.loads((run / "stacks" / "latest.json").read_text())["ranks"]["1"] == second
    records = {q: json.loads((run / "flight_recorder" / f"rank_{q}.json").read_text()) for q in (0, 1)}
    assert [max(e["collective_seq_id"] for e in records[q]["entries"]) for q in (0, 1)] == [21, 20]


def test_torchs_own_analyser_reads_saved_dumps(hanging: Job, tmp_path: Path) -> None:
    assert dump(hanging).returncode == 0
    folder = hanging.cwd / "R" / "flight_recorder" / "torchfrtrace"
    assert sorted(p.name for p in folder.iterdir()) == ["rank_0", "rank_1"]
    read = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-o", "database.pickle"],
        cwd=tmp_path, env=clean_env(tmp_path / "home"), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    output = read.stdout + read.stderr
    assert read.returncode == 0, output
    assert "sequence number: 21" in output and "missing ranks: {1}" in output  # torch's analyser has the same verdict
    _types, database = pickle.loads((tmp_path / "database.pickle").read_bytes())
    assert [(g.desc, g.size) for g in database.groups] == [("default_pg", 2)]
    assert [c.collective_seq_id for c in database.collectives] == list(range(1, 22))


def test_a_rank_that_cannot_answer_is_named_and_ends_the_dump_with_5(hanging: Job) -> None:
    script = hanging.cwd / "train.py"
    ((pid,),) = rows(hanging.cwd / "R", "SELECT pid FROM rank WHERE rank = 1")
    os.kill(pid, signal.SIGSTOP)
    try:
        state = Path(f"/proc/{pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 10, "rank 1 to stop", hanging)
        late = dump(hanging, "--timeout", "2")
        as_json = dump(hanging, "--timeout", "2", "--json", "--no-save")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert late.returncode == 5, late.stderr
    output = [line for line in unwrapped(late.stderr).splitlines() if not line.startswith(("saved: ", "next: "))]
    assert len(output) == 1 and "Traceback" not in late.stderr
    assert re.search(r"\branks? 1\b", output[0]) and not re.search(r"\branks? 0\b", output[0])
    assert f"sums_up {line_of(script, 'dist.all_reduce(x)')}" in late.stdout  # the other ranks' answers are kept
    assert as_json.returncode == 5
    ranks = json.loads(as_json.stdout)["ranks"]
    assert ranks["0"]["op"] == "all_reduce #21 default_pg" and ranks["1"]["note"]
    assert hanging.process.poll() is None  # the request ended no process
