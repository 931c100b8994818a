"""Every command line that README and the site show is run as shown, or `NOT_HERE` says why it cannot be run here.

One job of two ranks trains, then hangs, then is ended; commands run against it in these three states. Other lines start jobs themselves.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distdiag.cli import main
from tests.jobs import REPOSITORY, Job, clean_env, closed, free_port, launch, marked, rows, start, wait_for
from tests.report.runs import make_run
from tests.shown_lines import HERE, HUNG, JOB, NOT_HERE, OVER, RUN, RUNNING, reason, row, shown

pytestmark = [pytest.mark.job, pytest.mark.timeout(400)]

SHOWN, USED = shown()
TRAIN = '''"""What a reader would have."""
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if "RANK" not in os.environ:  # plain python
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
endless = Path("endless").exists()
step = 0
while endless or step < 10 * len(sys.argv):
    step += 1
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if endless:
        time.sleep(0.05)
        stop = torch.tensor(float(step > 5 and Path("evaluate").exists()))
        dist.all_reduce(stop)
        if stop > 0 and dist.get_rank() == 0:
            print("rank 0 evaluates", flush=True)
            dist.barrier()
dist.destroy_process_group()
'''
LOG = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
MAIL = "#!/bin/sh\ncat > mail.txt\n"
BAD = ("Traceback (most recent call last)", "No such option", "Usage: ", "command not found")


def lines(when: str) -> list[str]:
    return [line for line in SHOWN if (found := row(line)) is not None and found.when == when]


def furnish(place: Path) -> Path:
    """Write what a reader's directory has before a job runs in it."""
    (place / "mypackage").mkdir(parents=True)
    for name in ("train.py", "mypackage/train.py"):
        (place / name).write_text(TRAIN)
    (place / "mypackage" / "__init__.py").touch()
    (place / "test_sum.py").write_text("def test_sum():\n    assert 1 + 1 == 2\n")
    (place / "pyproject.toml").write_text('[tool.distdiag]\nkeep = "500M"\n')
    (place / "bin").mkdir()
    (place / "bin" / "mail").write_text(MAIL)
    (place / "bin" / "mail").chmod(0o755)
    return place


@dataclass
class Reader:
    """A reader's directory, and what ran in it.

    Args:
        filled: What a line's placeholders are here.
    """

    place: Path
    filled: dict[str, str]
    job: Job | None = None
    ended: dict[str, tuple[int, str]] = field(default_factory=dict)

    def env(self) -> dict[str, str]:
        path = f"{self.place}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "TMPDIR": str(self.place / "tmp"), "HOME": str(self.place / "home")}

    def run(self, line: str) -> tuple[int, str]:
        """Run a line in a shell, once; return its exit code and both outputs."""
        if line not in self.ended:
            text = line
            for name, value in self.filled.items():
                text = text.replace(name, value)
            done = subprocess.run(
                ["bash", "-c", text], cwd=self.place, env=clean_env(self.place / "home", self.env()),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
            )  # fmt: skip
            self.ended[line] = done.returncode, done.stdout + done.stderr
        return self.ended[line]


def check(line: str, code: int, text: str) -> None:
    found = row(line)
    assert found is not None and code in found.codes, f"{SHOWN[line]}: {line}\nended with {code}:\n{text}"
    bad = [words for words in BAD if words in text and "--help" not in line]
    assert bad == [], f"{SHOWN[line]}: {line}\n{text}"


def need_program(line: str) -> None:
    program = next(word for word in shlex.split(line) if "=" not in word)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if program in ("curl", "sqlite3", "py-spy") and shutil.which(program, path=path) is None:
        pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A job of two ranks that trains; what it needs to be asked is asked before it hangs."""
    place = furnish(tmp_path_factory.mktemp("reader"))
    for name in ("tmp", "home", "examples"):
        (place / name).mkdir() if name != "examples" else (place / name).symlink_to(REPOSITORY / name)
    for seed, name in enumerate(("OLD", "NEW", "main", "branch")):
        make_run(place / "reports" / name, seed=seed)
    for name in ("job.log", "node0.log"):
        (place / name).write_text(LOG)
    (place / "endless").touch()
    (line,) = [line for line in SHOWN if line.startswith("DISTDIAG_METRICS")]
    reader = Reader(place, {"9464": str(free_port())})
    variables, _, command = line.partition(" torchrun ")
    name, _, value = variables.partition("=")
    env = {name: reader.filled[value], "DISTDIAG_TAPE": "1", "TMPDIR": str(place / "tmp")}
    with launch(shlex.split(command), nproc=2, cwd=place, env=env, timeout=600) as job:
        reader.job = job
        wait_for(lambda: rows(place / "reports/latest", "SELECT 1 FROM step WHERE step > 20"), 120, "steps", job)
        yield reader


@pytest.fixture(scope="module")
def hung(running: Reader) -> Reader:
    running.run("distdiag profile")
    (running.place / "evaluate").touch()
    found = "SELECT 1 FROM finding WHERE severity = 'error'"
    wait_for(lambda: rows(running.place / "reports/latest", found), 60, "the finding", running.job)
    return running


@pytest.fixture(scope="module")
def unrecorded(hung: Reader) -> Iterator[Reader]:
    """The same hang next to it, without distdiag."""
    for name in ("endless", "evaluate", "train.py"):
        shutil.copy(hung.place / name, (hung.place / "tmp") / name)
    with launch(["train.py"], nproc=2, cwd=hung.place / "tmp", timeout=600) as job:
        wait_for(lambda: "evaluates" in job.stdout(), 120, "the hang", job)
        yield Reader(
            hung.place, {"LAUNCHER": str(job.process.pid), **{f"RANK{r}": str(job.rank_pid(r)) for r in (0, 1)}}
        )


@pytest.fixture(scope="module")
def over(hung: Reader, unrecorded: Reader) -> Reader:
    """The job has been ended, and left its run, dumps, stacks and profiles."""
    assert hung.job is not None
    hung.run("distdiag dump")
    for rank in (0, 1):
        unrecorded.run(f"py-spy dump --pid RANK{rank} > rank{rank}.txt")
    os.kill(hung.job.process.pid, signal.SIGTERM)
    hung.job.wait(60)
    run = (hung.place / "reports" / "latest").resolve()
    closed(run)
    shutil.copytree(run / "flight_recorder", hung.place / "dumps")
    for rank in (0, 1):
        shutil.copy(run / "profile" / "1" / f"rank_{rank}.json", hung.place / f"rank{rank}.pt.trace.json")
    code, text = hung.run("distdiag history reports/ --parquet rows.parquet")
    assert code == 0, text
    return hung


@pytest.mark.parametrize("line", lines(RUNNING))
def test_a_line_while_a_job_trains(line: str, running: Reader) -> None:
    assert running.job is not None
    if line.startswith("DISTDIAG_METRICS"):
        assert running.job.process.poll() is None
        check(line, 0, running.job.stdout() + running.job.stderr())
    else:
        need_program(line)
        check(line, *running.run(line))


@pytest.mark.parametrize("line", lines(HUNG))
def test_a_line_while_the_job_hangs(line: str, hung: Reader, unrecorded: Reader) -> None:
    need_program(line)
    check(line, *(unrecorded if re.match("distdiag attach|py-spy", line) else hung).run(line))


READERS = re.compile(r"distdiag (diagnose|history|compare|config|tui --once|report)( [^<>*|;]+)?")


@pytest.mark.parametrize("line", lines(OVER))
def test_a_line_when_the_job_is_over(
    line: str, over: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only reads and prints runs in this process."""
    need_program(line)
    if not READERS.fullmatch(line):
        check(line, *over.run(line))
        return
    monkeypatch.chdir(over.place)
    for name, value in over.env().items():
        monkeypatch.setenv(name, value)
    code = main(shlex.split(line)[1:])
    output = capsys.readouterr()
    check(line, code, output.out + output.err)


@pytest.mark.parametrize("line", lines(JOB))
def test_a_line_that_starts_a_job(line: str, tmp_path: Path) -> None:
    reader = Reader(furnish(tmp_path), {})
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match("[A-Z]+=", word))
    command = words[len(variables) :]
    env = reader.env() | variables
    (tmp_path / "tmp").mkdir()
    if command[0] == "torchrun":
        begun = launch(command[1:], nproc=1, cwd=tmp_path, env=env, timeout=200)
    else:
        begun = start(["bash", "-c", line], cwd=tmp_path, env=env, timeout=200)
    with begun as job:
        check(line, job.wait(), job.stdout() + job.stderr())
        wait_for(lambda: not marked(job.mark), 60, "the end of the monitor")
    recorded = [path.parent for path in tmp_path.rglob("run.db")]
    assert bool(recorded) == (re.match(r"DISTDIAG=0|pytest|distdiag probe", line) is None)
    assert all(closed(run)["state"] == "ended" for run in recorded)


# -- the tables -------------------------------------------------------------------------------------------------------


def test_every_line_runs_or_says_why_not() -> None:
    assert len(SHOWN) > 150
    assert {line: document for line, document in SHOWN.items() if (row(line) is None) == (reason(line) is None)} == {}


@pytest.mark.parametrize(
    "line", ["distdiag frobnicate", "distdiag diagnose --jsn", "torchrun eval.py", "conda install x"]
)
def test_a_new_line_is_in_no_table(line: str) -> None:
    assert row(line) is None and reason(line) is None


def test_every_row_of_the_tables_has_a_line() -> None:
    assert [found.pattern for found in RUN if not any(row(line) == found for line in SHOWN)] == []
    assert [pattern for pattern in NOT_HERE if not any(re.fullmatch(pattern, line) for line in SHOWN)] == []
    assert [pattern for pattern, _ in HERE if pattern not in USED] == []


def test_tests_that_a_reason_names_exist() -> None:
    named = [path for why in NOT_HERE.values() for path in re.findall(r"(?:tests|tools)/[\w/]+(?:\.py)?", why)]
    assert len(named) > 8 and [path for path in named if not (REPOSITORY / path).exists()] == []
