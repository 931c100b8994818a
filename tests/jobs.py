"""Real torchrun jobs for tests: started in a session of their own, always ended, with nothing left behind.

    with launch(["-m", "distdiag.train", "--max-steps", "20"], nproc=2, cwd=tmp_path) as job:
        wait_for(lambda: "step 10" in job.stdout(), 60, "step 10", job)
        assert job.wait() == 0, job.tail()

torchrun puts every rank in a session of its own, and so does the monitor; hence a job is found by a mark in the
environment that all its descendants inherit, not by its process group.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.launchers import Launcher

T = TypeVar("T")

JOB_MARK = "TEST_JOB_MARK"  # one job, and all that it starts
TEST_MARK = "TEST_MARK"  # all that one test starts; set by the autouse fixture of conftest.py

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

# What a launcher above us, or the person's own shell, may have set and a job would obey.
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
    "ROLE_WORLD_SIZE", "PYTHONPATH", "PYTHONWARNINGS", "NO_COLOR", "FORCE_COLOR", "PYTEST_CURRENT_TEST",
}  # fmt: skip


def shared(*parts: str) -> Path:
    """A path in the data that lies beside the repository; skips the test where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts)} beside the repository ({SHARED.name}/)")
    return path


# The environment that a launcher gives the only rank of a job; a job with collectives needs a MASTER_PORT, too.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    """Of RUN/run.db, as any reader outside the project would get them; none while it is being made or folded."""
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

    A test that only waits for the last rows kills the monitor while it folds its log into the database.
    """

    def ended() -> dict[str, str] | None:
        meta = dict(rows(run_dir, "SELECT key, value FROM meta"))
        return meta if meta.get("monitor_ended") == "1" and not runs(int(meta["monitor_pid"])) else None

    return wait_for(ended, deadline_s, "the monitor to close the run")


def runs(pid: int) -> bool:
    """True if a process runs; False for a zombie, which has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def clean_env(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a fresh shell with an empty home: one thread per process, no word of an outer launcher.

    Args:
        home: HOME of the process; created where absent.
        extra: Set on top.
    """
    home.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in _INHERITED_NAMES and not k.startswith(_INHERITED)}
    env |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}
    return env | dict(extra or {})


def marked(mark: str) -> dict[int, str]:
    """Living processes (pid: command line) whose environment holds `mark`; zombies are not alive."""
    found: dict[int, str] = {}
    needle = mark.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle not in (entry / "environ").read_bytes():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(entry.name)] = command
        except OSError:  # gone meanwhile, or not ours to look at
            continue
    return found


def kill_marked(mark: str, deadline_s: float = 10.0) -> None:
    """SIGKILL every process that holds `mark`, and again until none is left at two looks.

    One look is not enough: the environment of a process reads as empty while it replaces its program.

    Raises:
        TimeoutError: some would not die.
    """
    end = time.monotonic() + deadline_s
    clear = 0
    while clear < 2:
        left = marked(mark)
        clear = 0 if left else clear + 1
        if left and time.monotonic() > end:
            raise TimeoutError(f"still alive after SIGKILL: {left}")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


@dataclass
class Job:
    """A running torchrun job (or any other process started like one)."""

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
        """The end of both outputs, for the message of an assertion."""
        out, err = (t.splitlines()[-lines:] for t in (self.stdout(), self.stderr()))
        return "\n".join(["--- stdout", *out, "--- stderr", *err])

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit code of the launcher (negative: a signal).

        Raises:
            AssertionError: it did not end in time; the message holds the end of its outputs.
        """
        left = self.ends_at - time.monotonic() if timeout_s is None else timeout_s
        try:
            return self.process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.tail()}") from None

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the living ranks: the launcher's own children, by RANK."""
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
    """Any command as a `Job`: own session, stdin an open silent pipe, outputs in files, everything killed at the end.

    Args:
        cwd: Working directory; a new temporary one if None.
        env: Set on top of a clean environment (see `clean_env`).
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
    torchrun_args: Sequence[str] = (),
    fork_ranks: bool = False,
) -> Iterator[Job]:
    """`torchrun --standalone --nproc-per-node NPROC ARGS…` as a `Job`; the launcher is forked, see `tests/launchers.py`.

    Args:
        args: What follows torchrun's own options: `["-m", "distdiag.train", …]` or `[script, …]`.
        nproc: Ranks.
        cwd: Working directory; a new temporary one if None, so that `./reports` of the job is not the repository's.
        env: Set on top of a clean environment, for example `{"DISTDIAG_RUN_DIR": …}`.
        timeout: Seconds from the start after which `Job.wait` fails.
        torchrun_args: Further options of torchrun.
        fork_ranks: Fork the ranks as well, without torchrun: for jobs whose start and end are not what is asserted.
    """
    program = [str(a) for a in args]
    arguments = program if fork_ranks else ["--standalone", "--nproc-per-node", str(nproc), *torchrun_args, *program]

    def begin(where: Path, variables: dict[str, str], out: Path, err: Path) -> Launcher:
        out.touch()
        err.touch()
        return Launcher(arguments, where, variables, out, err, forked_ranks=nproc if fork_ranks else 0)

    with _job(begin, cwd, env, timeout) as job:
        yield job


@contextmanager
def _job(
    begin: Callable[[Path, dict[str, str], Path, Path], subprocess.Popen[bytes] | Launcher],
    cwd: Path | None,
    env: Mapping[str, str] | None,
    timeout: float,
) -> Iterator[Job]:
    """Start a job by `begin(directory, environment, stdout, stderr)`; at the end kill all that it has started."""
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
                process.send_signal(signal.SIGKILL)  # a launcher that has no session yet
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
    """Run `distdiag ARGS…` to its end in a clean environment; outputs as text."""
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
    """The first true value of `condition()`, asked 20 times a second.

    Raises:
        AssertionError: not within `deadline_s` seconds, or (with `job`) the job ended and it still was not true.
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
