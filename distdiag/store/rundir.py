"""Run directories: where a run is written and found, the link `latest`, attempts after elastic restarts."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import stat
import time
from pathlib import Path
from typing import Any

import msgspec

from distdiag import files
from distdiag.errors import DistdiagError, ExitCode
from distdiag.page import directories
from distdiag.terms.untrusted import visible

ENV = "DISTDIAG_RUN_DIR"
ROOT = Path("reports")
DATABASE = "run.db"
POINTER = "run.db.where"  # JSON {"host", "path"}: the database is on a local disk while the run lasts
_RECORDED = {DATABASE, POINTER, ".node_0"}  # any of them marks a run directory
_DEFAULT_NAME = re.compile(r"\d{8}-\d{6}-")
NEAR = 2  # directories below the working directory in which a run is looked for
MOST_OTHERS = 16  # runs of a directory that are checked for one that is not over
STARTING_S = 600.0  # between the creation of a directory by the launcher and the first rank
CREATE = "DISTDIAG=1 torchrun --nproc-per-node 2 train.py"


def default_run_dir(name: str) -> Path:
    """Return `ROOT/<time>-<name>`, which does not exist yet and is not created."""
    paths = (ROOT / each for each in files.run_names(name, time.time()))
    return next(path for path in paths if not path.exists())


def attempts(run_dir: Path) -> list[Path]:
    """Return the attempts of a run that wrote something, oldest first; `[run_dir]` for a job without a restart."""
    base = run_dir.parent if _attempt_number(run_dir) else run_dir
    found = [(0, base)] if has_run(base) else []
    try:
        children = list(base.iterdir())
    except OSError:
        children = []
    found += [(n, p) for p in children if (n := _attempt_number(p)) and not p.is_symlink() and has_run(p)]
    return [p for _, p in sorted(found)]


def _attempt_number(path: Path) -> int:
    m = re.fullmatch(r"attempt_(\d+)", path.name)
    return int(m[1]) if m else 0


def has_run(path: Path) -> bool:
    """True if a monitor has written a run here, or ranks have claimed the directory for one."""
    return recorded(path) or os.path.lexists(path / "run.json")


def is_claimed(path: Path) -> bool:
    """True if a launch has taken a directory for its run; no rank needs to have written."""
    return has_run(path) or any((path / name).is_dir() for name in (".jobs", f".jobs-{os.getuid()}"))


def no_rank_yet(path: Path) -> DistdiagError:
    return DistdiagError(
        visible(f"no rank has written to {path} yet"),
        "wait for the job to start; `distdiag tui` shows its ranks as they start",
        ExitCode.NO_DATA,
        "no_rank",
    )


def check_readable(path: Path) -> None:
    """Check that this user may list a directory or read a file, if it exists.

    Raises:
        DistdiagError: it may not be read, with its owner.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise DistdiagError(visible(f"{path} may not be read: {e.strerror}"), "check its permissions") from None
    if os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)):
        return
    owner = files.user_name(found.st_uid)
    raise DistdiagError(
        visible(f"{path} may not be read: it belongs to {owner}"),
        visible(f"ask the owner to share it: chmod -R go+rX {shlex.quote(str(path))}"),
        kind="not_permitted",
    )


def resolve(run: str | Path | None = None) -> Path:
    """Return the run directory for a reader: `run`, else DISTDIAG_RUN_DIR, else the newest run here; its newest attempt.

    `run` may also be a `run.db`, one attempt, or a directory of runs (then its `latest`).

    Raises:
        DistdiagError: NO_DATA, with the command that creates a run.
    """
    named = run or os.environ.get(ENV)
    path = Path(named) if named else _latest()
    readable = path.exists() and os.access(path, os.R_OK | os.X_OK)
    if not named and not readable and (own := directories.own_fallback_root()) and (own / "latest").is_dir():
        path = own / "latest"  # the job's working directory was read-only, or `reports` is another user's
    check_readable(path)
    if path.name == DATABASE and (path.is_file() or not path.exists()):
        path = path.parent
        if has_run(path):
            return path  # this attempt
    if path.is_file():
        raise DistdiagError(
            visible(f"{path} is a file, not a run directory"),
            visible(f"`distdiag diagnose {shlex.quote(str(path))}` reads logs and dumps"), kind="no_run",
        )  # fmt: skip
    if not named and not path.is_dir() and (below := run_below(Path(), NEAR)) is not None:
        path = below  # `--run-dir` has put it elsewhere
    if not path.is_dir():
        what = f"no run directory {path}" if named else f"no run here: {path} does not exist"
        hint = f"`{CREATE}` records one" + (
            "" if named else "; or cd to the directory in which the job was started, or name the run"
        )
        raise DistdiagError(what, hint, ExitCode.NO_DATA, "no_run")
    if _attempt_number(path) and has_run(path):
        return path
    found = attempts(path)
    if not found and (path / "latest").is_dir():
        found = attempts(path / "latest")
    if not found:
        if (below := run_below(path)) is not None:
            return attempts(below)[-1] if attempts(below) else below
        if is_claimed(path):
            raise no_rank_yet(path)
        raise DistdiagError(
            f"{path} holds no run (no {DATABASE})", f"`{CREATE}` records one", ExitCode.NO_DATA, "no_run"
        )
    return found[-1]


def _latest() -> Path:
    """Return `reports/latest`, or `latest` in this directory if that run is newer: `--run-dir NAME` wrote it."""
    usual, named = ROOT / "latest", Path("latest")
    if named.is_symlink() and named.is_dir() and _replaceable(named) and _started_s(named) > _started_s(usual):
        return named
    return usual


def _started_s(run_dir: Path) -> float:
    started_s = read_run_json(run_dir).get("started_unix_s")
    with contextlib.suppress(OverflowError):  # JSON has integers of any size
        if isinstance(started_s, int | float):
            return float(started_s)
    return _changed(run_dir)


def shown(path: Path) -> str:
    """Return the real directory of a run (`reports/latest` is a link), relative if it is below the working directory."""
    real, here = path.resolve(), Path.cwd().resolve()
    return str(real.relative_to(here)) if real.is_relative_to(here) else str(real)


def launches(directory: Path) -> list[Path]:
    """Return the directories of launches with a default name in a directory of runs, the newest first, by that name."""
    with contextlib.suppress(OSError):
        found = [p for p in directory.iterdir() if _DEFAULT_NAME.match(p.name) and p.is_dir()]
        return sorted(found, key=lambda p: p.name, reverse=True)
    return []


def recorded(path: Path) -> bool:
    """True if ranks have claimed this directory, or a monitor has written a database."""
    return any(os.path.lexists(path / n) for n in _RECORDED)


def newer_launch(latest: Path) -> tuple[Path, str] | None:
    """Return (its directory, what is known of it) of the newest launch without a rank that is newer than the run `latest` links to."""
    if not latest.is_symlink():
        return None
    current = latest.resolve().name
    path = next((p for p in launches(latest.parent) if p.name > current and not recorded(p)), None)
    if path is None:
        return None
    if (reason := failed_launch(path)) is not None:
        return path, f"a newer launch failed before any rank was recorded: {reason}"
    name = visible(_DEFAULT_NAME.sub("", path.name))
    if time.time() - _changed(path) < STARTING_S and "launch_failed" not in read_run_json(path):
        return path, f"a newer launch ({name}) has not reported yet"
    return path, f"a newer launch ({name}) recorded no rank: it joined no process group, or ended before"


def other_runs(latest: Path) -> list[Path]:
    """Return the other runs in the directory of `latest`, the newest first, at most `MOST_OTHERS`."""
    current = latest.resolve().name
    return list(itertools.islice((p for p in launches(latest.parent) if p.name != current and has_run(p)), MOST_OTHERS))


def run_below(directory: Path, depth: int | None = None) -> Path | None:
    """Return the only run below a directory that is none itself, or None; `depth`: of how many directories.

    Raises:
        DistdiagError: it has several, with the newest.
    """
    found: list[tuple[str, Path]] = []
    for folder, below, names in files.walk(directory, depth):
        if not _RECORDED.isdisjoint(names):
            below.clear()
            path = Path(folder)
            found.append((path.name if _DEFAULT_NAME.match(path.name) else "", path))
    if len(found) < 2:
        return found[0][1] if found else None
    newest = max(found, key=lambda entry: (entry[0], _changed(entry[1])))[1]
    where = "this directory" if directory == Path() else directory
    raise DistdiagError(
        visible(f"{where} holds {len(found):,} distdiag runs, the newest: {newest}"),
        visible(f"name one of them: {shlex.quote(str(newest))}"),
        kind="several_runs",
    )


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def mark_latest(run_dir: Path) -> bool:
    """Point the symlink `latest` next to `run_dir` to it, atomically; False if that is not possible.

    Only our own link, one to a run directory, is replaced: `latest` is a common name in checkpoint directories. Never raises:
    without symlinks, or if a directory has this name, there is no link.
    """
    link = run_dir.parent / "latest"
    try:
        if not _replaceable(link):
            return False
        files.relink(run_dir.parent, link.name, run_dir.name)
        return True
    except (OSError, NotImplementedError):
        return False


def _replaceable(link: Path) -> bool:
    """True if the name is free, or is a link made by `mark_latest`: to a run next to it, or to a deleted one."""
    if not link.is_symlink():
        return not link.exists()
    target = os.readlink(link)
    if "/" in target:
        return False
    path = link.parent / target
    if path.exists():
        return recorded(path) or (path / ".jobs").exists() or failed_launch(path) is not None
    return _DEFAULT_NAME.match(target) is not None  # the name of a deleted run


def note_launch(run_dir: Path, reason: str | None) -> None:
    """Record that a launch produced no rank, and why it failed, if it did; does nothing if the disk refuses."""
    with contextlib.suppress(OSError):
        files.make_run_directory(run_dir)
        written = not has_run(run_dir) and write_run_json(
            run_dir, {"launch_failed": reason, "started_unix_s": time.time()}
        )
        if written and not has_run(run_dir.parent / "latest"):
            mark_latest(run_dir)


def failed_launch(run_dir: Path) -> str | None:
    """Return why the launch of this run produced no rank, on one line; None if it produced one, or if no reason was recorded."""
    if (run_dir / DATABASE).exists() or (run_dir / POINTER).exists():
        return None
    reason = read_run_json(run_dir).get("launch_failed")
    if not isinstance(reason, str):
        return None
    lines = (line.strip() for line in reason.splitlines() if line.strip(" =-"))
    return next(lines, "no reason is known")[:300]


def write_run_json(run_dir: Path, info: Any) -> bool:
    """Write `run.json` (what was started, where, with which versions) atomically; False if the disk refuses."""
    try:
        files.write(run_dir, "run.json", msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        return True
    except OSError:
        return False


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """Return the contents of `run.json`; empty if it is missing or damaged."""
    try:
        found = msgspec.json.decode(files.read(run_dir, "run.json"))
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
