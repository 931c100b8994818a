"""Real torchrun jobs for tests: started in their own session, always ended, with nothing left behind.

    with launch(["-m", "distdiag.train", "--max-steps", "20"], nproc=2, cwd=tmp_path) as job:
        wait_for(lambda: "step 10" in job.stdout(), 60, "step 10", job)
        assert job.wait() == 0, job.tail()

torchrun puts every rank in its own session, and so does the monitor; hence a job is found by a mark in the environment that all its
descendants inherit, not by its process group.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.launchers import Launcher, Place
from tests.ports import free_port as free_port

T = TypeVar("T")

JOB_MARK = "TEST_JOB_MARK"  # identifies one job and everything that it starts
TEST_MARK = "TEST_MARK"  # identifies everything that one test starts; set by the autouse fixture of conftest.py

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

# Variables of an outer launcher or the user's shell that a job would obey.
_INHERITED = (
    "DISTDIAG_",
    "TORCHELASTIC_",
    "TORCH_",
    "NCCL_",
    "GLOO_",
    "MASTER_",
    "XDG_",
    "PYTEST_XDIST",
    "COLUMNS",
    "LINES",
)
_INHERITED_NAMES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "DISTDIAG", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE", "NO_COLOR", "FORCE_COLOR", "PYTEST_CURRENT_TEST",
}  # fmt: skip


def shared(*parts: str) -> Path:
    """Return a path in the data next to the repository; skips the test if it is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts)} next to the repository ({SHARED.name}/)")
    return path


# The environment that a launcher sets for the only rank of a job; a job with collectives also needs a MASTER_PORT.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    """Return rows of RUN/run.db as any reader would get them; none while the file is being created or closed."""
    database = run_dir / "run.db"
    if not database.exists():
        return []
    con = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)
    try:
        return con.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        con.close()


def closed(run_dir: Path, deadline_s: float = 60.0) -> dict[str, str]:
    """Wait until the monitor has closed the run and ended; return the run's `meta`.

    A test that only waits for the last rows would kill the monitor while it merges its log into the database.
    """

    def ended() -> dict[str, str] | None:
        meta = dict(rows(run_dir, "SELECT key, value FROM meta"))
        return meta if meta.get("monitor_ended") == "1" and not runs(int(meta["monitor_pid"])) else None

    return wait_for(ended, deadline_s, "the monitor to close the run")


def unwrapped(text: str) -> str:
    """Return what distdiag printed with its wrapped lines joined."""
    return re.sub(r"\n(?:\[distdiag\] )? {4,}", " ", text)


def runs(pid: int) -> bool:
    """True if a process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def clean_env(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a fresh shell with an empty home: one thread per process, no variable of an outer launcher.

    Args:
        home: HOME of the process; created if missing.
        extra: Added to it.
    """
    home.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in _INHERITED_NAMES and not k.startswith(_INHERITED)}
    env |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}
    return env | dict(extra or {})


def marked(mark: str, older: Container[str] = ()) -> dict[int, str]:
    """Return the living processes (pid: command line) whose environment has `mark`; zombies are not alive.

    Args:
        older: Names in /proc from before the mark was made; to read only what is new takes a tenth of the time.
    """
    found: dict[int, str] = {}
    needle = mark.encode()
    for name in os.listdir("/proc"):
        if name in older or not name.isdigit() or int(name) == os.getpid():
            continue
        entry = Path("/proc") / name
        try:
            if needle not in (entry / "environ").read_bytes():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(name)] = command
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def kill_marked(mark: str, deadline_s: float = 10.0) -> None:
    """SIGKILL every process that has `mark`, and repeat until two checks in a row find none.

    One check is not enough: the environment of a process reads as empty while it replaces its program. And it reads as empty before a
    killed process lets go of its files and locks, so all that were seen must have ended.

    Raises:
        TimeoutError: some did not end.
    """
    end = time.monotonic() + deadline_s
    clear = 0
    seen: dict[int, str] = {}
    while clear < 2:
        alive = marked(mark)
        seen |= alive
        left = {pid: command for pid, command in seen.items() if runs(pid)}
        clear = 0 if left else clear + 1
        if left and time.monotonic() > end:
            raise TimeoutError(f"still alive after SIGKILL: {left}")
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


@dataclass
class Job:
    """A running torchrun job, or any other process started the same way."""

    process: subprocess.Popen[bytes] | Launcher
    mark: str
    directory: Path  # holds its stdout and stderr
    cwd: Path
    ends_at: float  # monotonic time at which `wait` gives up
    env: dict[str, str] = field(repr=False)

    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    def stderr(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """Return the end of both outputs, for the message of an assertion."""
        out, err = (t.splitlines()[-lines:] for t in (self.stdout(), self.stderr()))
        return "\n".join(["--- stdout", *out, "--- stderr", *err])

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code of the launcher (negative: a signal).

        Raises:
            AssertionError: it did not end in time; the message has the end of its outputs.
        """
        left = self.ends_at - time.monotonic() if timeout_s is None else timeout_s
        try:
            return self.process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.tail()}") from None

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the living ranks: the launcher's own children, by RANK.

        Forked ranks, whose variables no other process can read, are numbered from 0, and only while all of them live.
        """
        if isinstance(self.process, Launcher) and self.process.forked_ranks:
            pid = self.process.pid
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # in the order of their start
            except OSError:
                children = []
            return dict(enumerate(map(int, children))) if len(children) == self.process.forked_ranks else {}
        pids: dict[int, int] = {}
        for pid in marked(self.mark):
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
            if parent == self.process.pid and rank is not None:
                pids[int(rank)] = pid
        return pids

    def rank_pid(self, rank: int, deadline_s: float = 60.0) -> int:
        return wait_for(lambda: self.rank_pids().get(rank), deadline_s, f"rank {rank} to start", self)

    def monitor_pids(self) -> list[int]:
        return [pid for pid, command in marked(self.mark).items() if "distdiag.monitor" in command]


@contextmanager
def start(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Iterator[Job]:
    """Run any command as a `Job`: own session, stdin an open silent pipe, outputs in files, everything killed at the end.

    Args:
        cwd: Working directory; a new temporary one if None.
        env: Added to a clean environment (see `clean_env`).
        timeout: Seconds from the start after which `Job.wait` fails.
    """

    def begin(where: Path, variables: dict[str, str], out: Path, err: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                [str(c) for c in command],
                cwd=where,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    with _job(begin, cwd, env, timeout) as job:
        yield job


@contextmanager
def launch(
    args: Sequence[str | Path],
    nproc: int = 2,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    *,
    torchrun_args: Sequence[str] = ("--standalone",),
    fork_ranks: bool = False,
    place: Place | None = None,
) -> Iterator[Job]:
    """Run `torchrun TORCHRUN_ARGS --nproc-per-node NPROC ARGS…` as a `Job`; the launcher is forked, see `tests/launchers.py`.

    Args:
        args: Arguments after torchrun's own options: `["-m", "distdiag.train", …]` or `[script, …]`.
        nproc: Ranks.
        cwd: Working directory; a new temporary one if None, so that `./reports` of the job is not the repository's.
        env: Added to a clean environment, for example `{"DISTDIAG_RUN_DIR": …}`.
        timeout: Seconds from the start after which `Job.wait` fails.
        torchrun_args: Other options of torchrun.
        fork_ranks: Fork the ranks as well, without torchrun: for jobs whose start and end are not asserted.
        place: Where forked ranks run; None: here.
    """
    program = [str(a) for a in args]
    arguments = program if fork_ranks else [*torchrun_args, "--nproc-per-node", str(nproc), *program]

    def begin(where: Path, variables: dict[str, str], out: Path, err: Path) -> Launcher:
        out.touch()
        err.touch()
        return Launcher(arguments, where, variables, out, err, forked_ranks=nproc if fork_ranks else 0, place=place)

    with _job(begin, cwd, env, timeout) as job:
        yield job


@contextmanager
def _job(
    begin: Callable[[Path, dict[str, str], Path, Path], subprocess.Popen[bytes] | Launcher],
    cwd: Path | None,
    env: Mapping[str, str] | None,
    timeout: float,
) -> Iterator[Job]:
    """Start a job by `begin(directory, environment, stdout, stderr)`; at the end kill everything that it started."""
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as made:
        directory = Path(made)
        mark = uuid.uuid4().hex
        where = cwd if cwd is not None else directory / "cwd"
        where.mkdir(parents=True, exist_ok=True)
        variables = clean_env(directory / "home", {**(env or {}), JOB_MARK: mark})
        process = begin(where, variables, directory / "stdout", directory / "stderr")
        job = Job(process, mark, directory, where, time.monotonic() + timeout, variables)
        try:
            yield job
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.send_signal(signal.SIGKILL)  # a launcher without its own session yet
            process.wait()
            if isinstance(process, subprocess.Popen) and process.stdin:
                process.stdin.close()
            kill_marked(mark)


def distdiag(
    *args: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    home: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `distdiag ARGS…` to its end in a clean environment; return its outputs as text."""
    with tempfile.TemporaryDirectory(prefix="distdiag-", ignore_cleanup_errors=True) as made:
        return subprocess.run(
            [sys.executable, "-m", "distdiag", *(str(a) for a in args)],
            cwd=cwd if cwd is not None else made,
            env=clean_env(home or Path(made) / "home", env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def wait_for(
    condition: Callable[[], T | None], deadline_s: float, what: str = "condition", job: Job | None = None
) -> T:
    """Return the first true value of `condition()`, evaluated 20 times a second.

    Raises:
        AssertionError: not true within `deadline_s` seconds, or (with `job`) not true after the job's end.
    """
    end = time.monotonic() + deadline_s
    while True:
        ended = job is not None and job.process.poll() is not None
        value = condition()
        if value:
            return value
        if ended or time.monotonic() > end:
            why = "the job ended first" if ended else f"not within {deadline_s:g} s"
            raise AssertionError(f"waited for {what}: {why}" + (f"\n{job.tail()}" if job else ""))
        time.sleep(0.05)
