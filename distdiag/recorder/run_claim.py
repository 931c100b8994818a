"""Where this process's run is written: all ranks of one job must come to the same answer without talking.

The job is known by what its launcher gave every rank (run id, master address, restart count) and, on one node, by the
launcher process itself. The first rank that asks assigns the directory under a file lock; the others read the answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from pathlib import Path

ENV_DIR = "DISTDIAG_RUN_DIR"
ENV_JOB = "DISTDIAG_JOB"
_launcher_job: str | None = (
    None  # the job of the launcher that spawned this process; not in the environment, see `belong_to`
)


def _parent_start() -> str:
    """Start time of the parent process in clock ticks since boot: with its pid, unlike any other's."""
    try:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "?"


def belong_to(job: str) -> None:
    """Make this process part of `job`: what it or its spawned children become are ranks of that job.

    The environment would hand this on to every program that the script starts, and a second job among them would be
    recorded as part of this one.
    """
    global _launcher_job
    _launcher_job = job


def job_token() -> str:
    """The same text on every rank of a job, and no other job's."""
    given = _launcher_job or os.environ.get(ENV_JOB)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if given:
        return f"{given}.{restart}"
    env = os.environ.get
    parts = [env("TORCHELASTIC_RUN_ID", ""), env("MASTER_ADDR", ""), env("MASTER_PORT", ""), env("SLURM_JOB_ID", "")]
    if int(env("GROUP_WORLD_SIZE", "1") or 1) == 1 and int(env("SLURM_NNODES", "1") or 1) == 1:
        parts += [str(os.getppid()), _parent_start()]
    if "RANK" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        parts.append(str(os.getpid()))
    # a restart may come with the same ids; the agent's count tells it apart
    return hashlib.sha256("|".join([*parts, restart]).encode()).hexdigest()[:16]


def launch_time() -> float:
    """When the job's launcher started (Unix seconds): the same for all local ranks."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        ticks = int(_parent_start())
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.time()


def claim(option: str | None, name: str) -> Path:
    """The directory of this job (this attempt of it), created; the first rank to ask decides.

    A directory that holds an earlier run, or an earlier attempt of an elastic restart, keeps it: this one goes into
    `attempt_<k>` beside it. Nothing is overwritten.

    Raises:
        OSError: the directory cannot be created or written.
    """
    chosen = option or os.environ.get(ENV_DIR)
    token = job_token()
    if chosen:
        base = Path(chosen).absolute()
    else:
        base = Path("reports").absolute() / f".job-{token}"
        base.parent.mkdir(parents=True, exist_ok=True)
        marker = base.parent / ".jobs"
        marker.mkdir(exist_ok=True)
        return _assigned(marker, token, lambda: _fresh(base.parent, name))
    base.mkdir(parents=True, exist_ok=True)
    return _assigned(base, token, lambda: _next_attempt(base))


def _assigned(where: Path, token: str, decide: object) -> Path:
    """The answer for `token`, decided once under a lock in `where`."""
    path = where / ".jobs.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        lines = os.pread(fd, 1 << 20, 0).decode().splitlines()
        for line in lines:
            known, _, answer = line.partition(" ")
            if known == token:
                return Path(answer)
        answer_path: Path = decide()  # type: ignore[operator]
        answer_path.mkdir(parents=True, exist_ok=True)
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, f"{token} {answer_path}\n".encode())
        return answer_path
    finally:
        os.close(fd)


def _fresh(root: Path, name: str) -> Path:
    clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:60].strip("-.") or "run"
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(launch_time())) + f"-{clean}"
    path, n = root / stem, 2
    while path.exists():
        path, n = root / f"{stem}-{n}", n + 1
    return path


def _next_attempt(base: Path) -> Path:
    if not _used(base):
        return base
    k = 1
    while _used(base / f"attempt_{k}"):
        k += 1
    return base / f"attempt_{k}"


def _used(path: Path) -> bool:
    return any((path / n).exists() for n in ("run.db", "run.db.where", "run.json", "pages"))


def page_dir(run_dir: Path) -> Path:
    """Directory of the rank pages and witness sockets of this node: memory, where there is any to be had.

    A store into a page must never wait for a disk, so the pages live in /dev/shm; `RUN/pages` points there. Where
    /dev/shm cannot hold them they lie in the run directory.
    """
    node = os.environ.get("GROUP_RANK", "0")
    key = hashlib.sha256(f"{run_dir}|{node}|{job_token()}".encode()).hexdigest()[:12]
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        return shm / f"distdiag-{os.getuid()}" / key
    return run_dir / f"pages.{node}"


def link_pages(run_dir: Path, pages: Path) -> None:
    """`RUN/pages` -> the page directory, for people; a file system without symlinks costs only the shortcut."""
    link = run_dir / "pages"
    try:
        if not link.is_symlink() and not link.exists():
            link.symlink_to(pages, target_is_directory=True)
    except OSError:
        pass


def script_name() -> str:
    """Name of a run after the script that is running."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else "")
    return Path(file).stem if file else "run"


def keep_bytes(text: str) -> int:
    """`500M`, `2G`, `1000000`: bytes, K M G of 1024."""
    from distdiag.errors import DistdiagError

    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in "KMG" and text else (text, "")
    try:
        value = int(float(number) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit])
    except ValueError:
        value = 0
    if value < 1 << 20:
        raise DistdiagError(
            f"--keep {text} is no size of at least 1M", "give bytes, or a number with K, M or G: --keep 500M"
        )
    return value
