"""The fault collection: its manifest, and how one of its jobs is started and killed with all its processes.

A collection is a folder with `manifest.json` and the jobs it names; `tests/faults/README.md` describes the format.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import msgspec
import psutil

from distdiag.errors import DistdiagError, ExitCode
from tests.launchers import Launcher

# variables of a launcher that started us; the job must not see them
_LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "SLURM_")
MARK = "DISTDIAG_BENCH_JOB"  # in the environment of every process of a job, in any session

_forking = threading.Lock()
interrupted = threading.Event()  # set on Ctrl-C: jobs run in threads, which get no signal


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is once the fault is complete."""

    rank: int
    role: Literal["culprit", "victim", "cycle"]
    file: str  # relative to the manifest's folder
    line: int
    last_line: int | None = None  # of a range in which any line is right: an endless loop
    code: str | None = None  # text of that line, to notice an edited job
    state: str | None = None
    op: str | None = None

    def covers(self, line: int | None) -> bool:
        return line is not None and self.line <= line <= (self.last_line or self.line)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the job does without distdiag."""

    type: Literal["hang", "crash", "ok"]
    message: str | None = None


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The right diagnosis. A finding is right if kind, cause and culprits agree."""

    kinds_any_or_all: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()  # any of these; empty: not judged
    culprits: tuple[int, ...] = ()
    culprits_any: tuple[tuple[int, ...], ...] = ()  # also right, where people would disagree
    tolerated: tuple[str, ...] = ()  # other kinds that may be reported: true, but not the fault


class OnBackend(msgspec.Struct, frozen=True, kw_only=True):
    """What is right on another backend, if it differs from gloo; None: the same."""

    reason: str  # what that backend does, or does not show
    plain_outcome: Outcome | None = None
    expected: Expected | None = None
    positions: tuple[Position, ...] | None = None
    hidden: bool = False  # the fault cannot be seen there: nothing may be found


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a collection."""

    name: str
    nproc: int
    faulty: bool
    diagnosis: str
    plain_outcome: Outcome
    expected: Expected = Expected()
    positions: tuple[Position, ...] = ()
    looks_like: tuple[
        str, ...
    ] = ()  # kinds of findings that a healthy job must not have, though it resembles their jobs
    unused_parameters: dict[str, tuple[str, ...]] | None = None
    launch: Literal["torchrun", "python"] = "torchrun"  # python: the script spawns its ranks itself
    file: str | None = None  # default jobs/NAME.py
    subsets: tuple[str, ...] = ()
    forked: bool = True  # False: the fault needs a hash seed of each rank, so ranks are started, not forked
    deadline_s: float | None = None  # from launch; default below
    on: dict[str, OnBackend] = {}  # by name of the backend

    def on_backend(self, name: str | None) -> Job:
        """Return the job with the expectations for this backend (a name, or the folder of a stand-in)."""
        other = self.on.get(Path(name).name) if name else None
        if other is None:
            return self
        if other.hidden:
            return msgspec.structs.replace(self, faulty=False, expected=Expected(), positions=())
        changed = {f: v for f in ("plain_outcome", "expected", "positions") if (v := getattr(other, f)) is not None}
        return msgspec.structs.replace(self, **changed)

    @property
    def path(self) -> str:
        return self.file or f"jobs/{self.name}.py"

    @property
    def limit_s(self) -> float:
        """Seconds from launch after which an expected finding counts as missed, or a healthy job as stuck."""
        return self.deadline_s or 300.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[Job, ...]
    about: str = ""


def load(manifest: Path) -> Manifest:
    """Read a manifest and check that its jobs exist.

    Raises:
        DistdiagError: the file is missing, is not a manifest, or names a missing job.
    """
    try:
        found = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
    except OSError as e:
        raise DistdiagError(
            f"no fault collection at {manifest} ({e.strerror})",
            "run it in a clone of the repository, or name one: `distdiag bench faults --manifest FILE`",
        ) from e
    except (msgspec.DecodeError, RecursionError) as e:
        raise DistdiagError(
            f"{manifest} is not a manifest of fault jobs: {e}", "tests/faults/README.md describes the format"
        ) from e
    for job in found.jobs:
        if not (manifest.parent / job.path).is_file():
            raise DistdiagError(
                f"job '{job.name}' of {manifest} has no file {manifest.parent / job.path}",
                'correct its name, or give its path as "file", relative to the manifest',
                ExitCode.USAGE,
            )
    return found


def backend_environment(manifest: Path, backend: str | None) -> dict[str, str]:
    """Return the environment that starts a job's process groups on another backend, its script unchanged.

    Args:
        backend: Name of a folder in `standins/` next to the collection's folder, or the path of one. It is put on
            PYTHONPATH, so that Python runs its `sitecustomize.py`; its `prepare.py` runs once before.

    Raises:
        DistdiagError: no such folder, or it cannot be prepared here.
    """
    if backend is None or backend == "gloo":
        return {}
    named = [Path(backend), manifest.absolute().parent.parent / "standins" / backend]
    folder = next((d.absolute() for d in reversed(named) if (d / "sitecustomize.py").is_file()), None)
    if folder is None:
        raise DistdiagError(
            f"no backend '{backend}' for this collection",
            "name a folder with a sitecustomize.py, e.g. `--backend tests/standins/stream`",
        )
    if (folder / "prepare.py").is_file():
        done = subprocess.run([sys.executable, folder / "prepare.py"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise DistdiagError(
                f"the backend '{backend}' cannot be built: {done.stderr.strip()[-300:]}", "install a C++ compiler (g++)"
            )
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def command(job: Job, script: Path, run_dir: Path | None) -> list[str]:
    """Return the command line of a job; without distdiag if `run_dir` is None."""
    inner = [str(script)] if run_dir is None else ["-m", "distdiag.run", "--run-dir", str(run_dir), str(script)]
    if job.launch == "python":
        return [sys.executable, *inner]
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(job.nproc), *inner,
    ]  # fmt: skip


def start(
    job: Job, script: Path, run_dir: Path | None, workdir: Path, env: dict[str, str], out: IO[bytes]
) -> subprocess.Popen[bytes] | Launcher:
    """Start the launcher of a job in a new session.

    The ranks of a recorded job are forked from a process that has imported torch, see tests/launchers.py. They share its hash seed.
    """
    if run_dir is None or job.launch == "python":
        return subprocess.Popen(
            command(job, script, run_dir), cwd=workdir, env=env, stdin=subprocess.PIPE, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    program = ["-m", "distdiag.run", "--run-dir", str(run_dir), str(script)]
    log, arguments = Path(out.name), ["--standalone", "--nproc-per-node", str(job.nproc), *program]
    with _forking:
        if not job.forked:
            return Launcher(arguments, workdir, env, log, log)
        return Launcher(program, workdir, env, log, log, forked_ranks=job.nproc)


class Running:
    """A started job: its process, its output, and the processes that carry its mark."""

    def __init__(self, process: subprocess.Popen[bytes] | Launcher, mark: str, log: Path, workdir: Path) -> None:
        self.process = process
        self.mark = mark
        self.log = log
        self.workdir = workdir
        self.started_unix_s = time.time()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def age_s(self) -> float:
        return time.time() - self.started_unix_s

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of this job, in any session, orphans included."""
        return [p for p in psutil.process_iter() if _marked(p, self.mark)]


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


@contextmanager
def started(
    job: Job, script: Path, workdir: Path, run_dir: Path | None, extra_env: dict[str, str] | None = None
) -> Iterator[Running]:
    """Start `job` in `workdir`; at the end, kill all its processes.

    Its standard input is a pipe that stays open and empty, as under a scheduler. torchrun and the monitor start
    new sessions, so killing one process group is not enough: every process with the mark is killed.
    """
    mark = uuid.uuid4().hex
    inherited = ("DISTDIAG_RUN_DIR", "TORCHELASTIC_", "TORCH_NCCL_", "PYTEST_", "PYTHONWARNINGS", *_LAUNCHER)
    env = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra_env or {}), MARK: mark}
    log = workdir / "job.log"
    out: IO[bytes]
    with log.open("wb") as out:
        process = start(job, script, run_dir, workdir, env, out)
        running = Running(process, mark, log, workdir)
        try:
            yield running
        finally:
            _kill(running)


def _kill(running: Running) -> None:
    try:
        os.killpg(running.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    deadline, none_left = time.monotonic() + 5.0, 0
    # several times: a process may have forked in the meantime, or have no environment yet
    while none_left < 3 and time.monotonic() < deadline:
        left = running.processes()
        none_left = 0 if left else none_left + 1
        for p in left:
            try:
                p.kill()
            except psutil.Error:
                pass
        time.sleep(0.05)
    running.process.wait()
    if running.process.stdin is not None:
        running.process.stdin.close()
