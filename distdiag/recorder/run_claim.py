"""Chooses the run directory and the page directory of a rank. All ranks of a job make the same choice without communication.

A job is identified by the environment that its launcher set for all ranks and, on one node, by the launcher process. A decision is
a file that exactly one process can create (written under another name, then linked): the first decides, the others read. No lock
is used: locks of network file systems are often local to a node.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distdiag import files, procfs
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.terms.launchers import LAUNCHERS, OPEN_MPI, RANKS, SLURM, TORCHRUN, launched, number
from distdiag.unpatched import now_s, sleep, wall_s

ENV_DIR = "DISTDIAG_RUN_DIR"
ENV_JOB = "DISTDIAG_JOB"
# job of the launcher that spawned this process; not in the environment, see `belong_to`
_launcher_job: str | None = None
_joined: Joined | None = None  # the job that this process joined by its process group
share = os.environ.get("DISTDIAG_SHARE") == "1"  # others may read the runs of this process; also set by --share
JOIN_S = 3600.0  # between the first and the last node of a job; the store's and the groups' own timeouts are shorter
READ_S = 5.0  # timeout for the text of a decision on a file system without hard links
# Variables that a launcher sets equally for all ranks of one launch, and differently in other launches.
_LAUNCH = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid", "JOBSET_RESTART_ATTEMPT",
)  # fmt: skip
# Variables of one rank: an ancestor with the same values is a wrapper script inside the rank.
_RANK = (*RANKS, "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
_WORD = re.compile(r"[\w.:-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Claim:
    run_dir: Path
    node: int
    pages: Path  # page directory of all ranks of this node
    overflow: Path  # page directory for a rank whose page does not fit into `pages`


@dataclass(frozen=True)
class Joined:
    """A job that ranks without a launcher's variables have joined (`joining`)."""

    token: str  # as `job_token` returns it, without the restart
    root: Path  # directory of the runs that have no directory of their own
    run_dir: str | None  # of the job, if one was named
    node: int  # number of this node


def _launcher() -> tuple[int, int] | None:
    """Return (pid, start time in ticks since boot) of the nearest ancestor without our rank's variables; None if unknown."""
    given = {os.fsencode(f"{k}={os.environ[k]}") for k in _RANK if k in os.environ}
    pid = os.getppid()
    for _ in range(16 if given else 0):
        try:
            theirs = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            above = int(procfs.stat_fields(pid)[procfs.PARENT])
        except (OSError, IndexError):
            break  # another user's process: the launcher
        if not given <= theirs or above <= 1:
            break
        pid = above
    started = procfs.start_ticks(pid)
    return (pid, started) if started is not None else None


def launcher_id() -> str:
    """Return an identifier of this rank's launcher that is unique on this node."""
    if _launcher_job is not None:
        return f"{socket.gethostname()}:{job_given()}"
    found = _launcher()
    return f"{socket.gethostname()}:" + (f"{found[0]}:{found[1]}" if found else "?")


def belong_to(job: str) -> None:
    """Make this process part of `job`: it, or its spawned children, become ranks of that job.

    An environment variable would be inherited by every program that the script starts, and a second job among them would be
    recorded as part of this one.
    """
    global _launcher_job
    _launcher_job = job


def join_job(job: Joined) -> None:
    """Make this process part of the job that its process group belongs to."""
    global _joined
    _joined = job
    belong_to(job.token)


def is_word(text: object) -> bool:
    """True for a text that can be part of a file's name and of a record, whose fields are separated by spaces."""
    return isinstance(text, str) and _WORD.fullmatch(text) is not None


def job_given() -> str | None:
    """Return the job that this process was started for, without the restart, as a word; None if nobody named one."""
    given = _launcher_job or os.environ.get(ENV_JOB)
    return given if not given or is_word(given) else hashlib.sha256(os.fsencode(given)).hexdigest()[:16]


def root_of_runs() -> Path:
    """Return the directory of the runs for which no directory was named."""
    return _joined.root if _joined is not None else Path("reports").absolute()


def job_token() -> str:
    """Return a text that is equal on all ranks of one attempt of a job, and different in other jobs."""
    env = os.environ.get
    restart = env("TORCHELASTIC_RESTART_COUNT", "0")
    if (given := job_given()) and is_word(restart):
        return f"{given}.{restart}"
    parts = [*([given] if given else []), *(env(k, "") for k in _LAUNCH)]
    if int(env("GROUP_WORLD_SIZE", "1") or 1) == 1 and int(env("SLURM_NNODES", "1") or 1) == 1:
        parts.append(launcher_id())
    if not launched(os.environ) and "TORCHELASTIC_RUN_ID" not in os.environ:
        parts.append(str(os.getpid()))
    # a restart may have the same ids, but another restart count
    return hashlib.sha256("|".join([*parts, restart]).encode()).hexdigest()[:16]


def node_number() -> int:
    """Return the number of this node in the job; 0 if the launcher sets none."""
    if _joined is not None:
        return _joined.node
    if (node := number("GROUP_RANK")) is not None:
        return node
    if TORCHRUN.rank not in os.environ:
        if (node := number("SLURM_NODEID")) is not None:
            return node
        if local := number(OPEN_MPI.local_world):
            return (number(OPEN_MPI.rank) or 0) // local
    return 0


def local_ranks(world_size: int) -> int:
    """Return how many ranks this node will have by the launcher's variables; without them, the world size."""
    given = (number(launcher.local_world) for launcher in LAUNCHERS)
    return max(1, next((n for n in given if n is not None), world_size))


def local_world_size(rank: int, world: int) -> int:
    """Return how many ranks this node has, by the launcher that `node_number` uses; 0 if not known."""
    env = os.environ.get
    if (given := number(TORCHRUN.local_world)) is not None:
        return given
    for launcher in (OPEN_MPI, SLURM) if TORCHRUN.rank not in os.environ else ():
        if (env(launcher.rank), env(launcher.world)) == (str(rank), str(world)):  # else it started something else
            return number(launcher.local_world) or 0
    return 0


def launch_time() -> float:
    """Return when the launcher started (Unix seconds): equal for all local ranks."""
    found = _launcher()
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return wall_s()
    return wall_s() - uptime + found[1] / os.sysconf("SC_CLK_TCK") if found else wall_s()


# -- decisions ------------------------------------------------------------------------------------------------


def decide(path: Path, text: str, root: Path | None = None) -> str:
    """Create `path` with `text` unless another process of this user was first; return its content.

    Args:
        root: Below it no link is followed; default: the directory of `path`.

    Raises:
        OSError: the directory cannot be written, another user decided, or another process began to write and never finished.
    """
    folder = root or path.parent
    name = str(path.relative_to(folder))
    if not files.is_file(folder, name):
        files.create(folder, name, f"{text}\n".encode())
    end = now_s() + READ_S
    while not (found := files.text(folder, name, own=True)).endswith("\n"):
        if now_s() > end:
            raise OSError(f"{path} was never finished by the process that created it")
        sleep(0.01)
    return found[:-1]


# -- the run directory ------------------------------------------------------------------------------------------


def claim(option: str | None, name: str) -> Path:
    """Create and return the directory of this job and attempt; the first rank decides.

    A directory that holds an earlier run, or an earlier attempt of an elastic restart, is kept: this run goes into
    `attempt_<k>` inside it. Nothing is overwritten.

    Raises:
        OSError: the directory cannot be created or written.
    """
    return next(_directories(option, name))


def claim_rank(option: str | None, name: str, rank: int, world_size: int) -> Claim:
    """Return the run directory and the page directory of this rank.

    A launch may reuse the ids of an earlier one (the same rendezvous, a second `srun`, a replaced node). So a directory is skipped
    if it already has this rank, or if another launcher on this node uses it.

    Raises:
        OSError: no directory can be created or written.
    """
    for run_dir in _directories(option, name):
        found = _join(run_dir, rank, world_size)
        if found is not None:
            return found
    raise OSError("no run directory left")


def _directories(option: str | None, name: str) -> Iterator[Path]:
    """Yield the directories of this job's token in order; the next one is created on demand."""
    chosen = _joined.run_dir if _joined is not None else option or os.environ.get(ENV_DIR)
    if chosen:
        return _attempts(Path(chosen).absolute(), job_token())
    root = root_of_runs()
    records = _records(root)
    if records is None:  # a read-only working directory
        root = directories.fallback_root()
        directories.private_directory(root.parent)
        records = _records(root)
        if records is None:
            raise PermissionError(f"neither {root} nor ./reports can be written")
    return _fresh_ones(root, records, name, job_token())


def _records(root: Path) -> str | None:
    """Return the name of the directory in `root` in which the jobs of this user note their run; None if there can be none.

    Whoever writes there decides where a job records, so it belongs to this user; in a directory of several users each has one.
    """
    for name in (".jobs", f".jobs-{os.getuid()}"):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with files.entered(root, name, make=True) as fd:
                files.check_owner(fd, root / name)
                closed = not os.fstat(fd).st_mode & 0o022
            if closed and os.access(root / name, os.W_OK):
                return name
        except OSError:
            continue
    return None


def _attempts(base: Path, token: str) -> Iterator[Path]:
    files.make_run_directory(base, share)
    for k in range(10_000):
        path = base if k == 0 else base / f"attempt_{k}"
        # claimed before it is used: one that is used and not claimed is from a version without these records
        used = any((path / name).exists() for name in ("run.db", "run.db.where", "run.json", "pages"))
        if decide(base / ".jobs" / str(k), "-" if used else token, base) == token:
            if k:
                files.make_run_directory(path, share)
            yield path


def _fresh_ones(root: Path, records: str, name: str, token: str) -> Iterator[Path]:
    for k in range(10_000):
        record = f"{records}/{token}.{k}"
        if not files.is_file(root, record):
            mine = _fresh(root, name)
            if decide(root / record, mine.name, root) != mine.name:
                mine.rmdir()
        path = root / Path(decide(root / record, "", root)).name  # a path in runs of older versions; never one outside
        files.make_run_directory(path, share)
        yield path


def _fresh(root: Path, name: str) -> Path:
    """Create a directory named after the launch time and the job."""
    for each in files.run_names(name, launch_time()):
        with contextlib.suppress(FileExistsError):
            files.make_run_directory(root / each, share, exist_ok=False)
            return root / each
    raise AssertionError("unreachable")


# -- the node ---------------------------------------------------------------------------------------------------


def _join(run_dir: Path, rank: int, world_size: int) -> Claim | None:
    """Return this rank's directories in a run directory of its job; None if it must try the next one."""
    node, launcher = node_number(), launcher_id()
    record = directories.node_record(run_dir, node).name
    overflow = directories.overflow(run_dir, node)
    if not files.is_file(run_dir, record):
        pages = _choose_page_directory(run_dir, node, overflow, local_ranks(world_size))
        decide(run_dir / record, f"{launcher} {pages}")
    found = files.text(run_dir, record, own=True).rstrip("\n")
    if not found.startswith(f"{launcher} ") or _too_late(run_dir, record):
        return None
    chosen = found[len(launcher) + 1 :]
    with contextlib.suppress(OSError):
        if str(rank) in files.text(run_dir, directories.ended_record(run_dir, node).name).split():
            return None
    pages = Path(chosen)
    if any(_has_page(d, rank) for d in (pages, overflow)):
        return None
    return Claim(run_dir, node, pages, overflow)


def _too_late(run_dir: Path, record: str) -> bool:
    """True if this node has claimed a directory whose job had ended, or had begun long before.

    A job that is created again may have equal ids, and one of its nodes may never have joined the job before. Only times of files are
    compared, which the file server sets and nobody changes: all ranks of this node get the same answer.
    """
    at = (run_dir / record).stat().st_mtime_ns
    for name in files.names(run_dir):
        if not name.startswith(".node_") or name in (record, f"{record}.ended"):
            continue
        try:
            before_s = (at - (run_dir / name).lstat().st_mtime_ns) / 1e9
        except OSError:
            continue
        if before_s > (0.0 if name.endswith(".ended") else JOIN_S):
            return True
    return False


def _has_page(pages: Path, rank: int) -> bool:
    """True if another process has already published a page of this rank here."""
    from distdiag.page.reader import header_of

    header = header_of(page_path(pages, rank))
    return header is not None and header.pid != os.getpid()


def _choose_page_directory(run_dir: Path, node: int, overflow: Path, ranks: int) -> Path:
    """Return a directory in memory if it is usable and has room for the pages of this node's ranks, else the run directory."""
    key = hashlib.sha256(f"{run_dir}|{node}|{job_token()}|{launcher_id()}".encode()).hexdigest()[:12]
    memory = directories.memory_root() / key
    with contextlib.suppress(OSError):  # read-only, or another user's directory has this name
        if directories.has_room(directories.SHM, ranks):
            directories.make(memory, run_dir)
            return memory
    return overflow


def link_pages(run_dir: Path, pages: Path) -> None:
    """Link `RUN/pages` to the page directory, for users; not possible on file systems without symlinks."""
    link = run_dir / "pages"
    with contextlib.suppress(OSError):
        if not link.is_symlink() and not link.exists():
            link.symlink_to(pages, target_is_directory=True)


def script_name() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None) or (sys.argv[0] if sys.argv else "")
    return Path(file).stem if file else "run"
