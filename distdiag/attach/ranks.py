"""Finds the jobs of this user on this host, and the processes that are their ranks: by environment, parents and mapped libraries."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from distdiag import procfs
from distdiag.diagnosis.model.findings import rank_list
from distdiag.errors import DistdiagError, ExitCode
from distdiag.files import user_name
from distdiag.terms.launchers import LAUNCHERS, MPICH, OPEN_MPI, RANKS, TORCHRUN
from distdiag.terms.units import counted
from distdiag.terms.untrusted import is_rank, visible

_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "MASTER_PORT")
_MAX_ENVIRONMENT, _MAX_MAPS = 1 << 20, 16 << 20  # bytes that are read of each
_NO_RANK = re.compile(r"multiprocessing\.(resource_tracker|forkserver)")  # a helper of multiprocessing
_PAGE = re.compile(rb"/rank_\d+\.page$", re.MULTILINE)
LISTED = 8  # jobs in a message


@dataclass(frozen=True)
class Candidate:
    pid: int
    parent: int
    started: int  # clock ticks since boot; with the pid, its identity
    env: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def rank(self) -> int | None:
        return next((n for n in (_int(self.env.get(name)) for name in RANKS) if n is not None), None)

    @cached_property
    def maps(self) -> bytes:
        """The files that it maps; empty if that is not readable."""
        return _read(Path("/proc", str(self.pid), "maps"), _MAX_MAPS)

    @property
    def has_torch(self) -> bool:
        return b"/libtorch" in self.maps

    @property
    def has_device(self) -> bool:
        """True if it has loaded the driver of a GPU: a thread that waits for the device may then spin, and looks busy."""
        return any(driver in self.maps for driver in (b"/libcuda.so", b"/libamdhip64.so"))

    @property
    def recorded(self) -> bool:
        return _PAGE.search(self.maps) is not None

    @property
    def script(self) -> str:
        """Name of the program that it runs, for a message."""
        words = [w for w in self.command[1:] if w.endswith((".py", "/torchrun")) or w == "torchrun"]
        name = PurePath(words[-1] if words else self.command[0] if self.command else "?").name
        return visible(name)[:80]


@dataclass(frozen=True)
class Job:
    """The ranks of one job on this host."""

    processes: tuple[Candidate, ...]
    names: tuple[str, ...]  # by which `--job` finds it: the launcher's pid, its run id, its port, its script
    launcher: int | None  # pid of the parent of all ranks; None if they have several

    @property
    def env(self) -> Mapping[str, str]:
        return self.processes[0].env

    @property
    def world(self) -> int | None:
        """Number of its ranks on all hosts, as its environment has it."""
        if self.processes[0].rank is None:
            return None
        return next((n for n in (_int(self.env.get(name)) for _, name, *_ in LAUNCHERS) if n), None)

    @property
    def recorded(self) -> Candidate | None:
        return next((p for p in self.processes if p.recorded), None)

    @property
    def script(self) -> str:
        """Return the script of the ranks; of those that multiprocessing starts, that of their parent."""
        spawned = "multiprocessing" in " ".join(self.processes[0].command)
        return self.names[-1] if spawned else self.processes[0].script

    @property
    def described(self) -> str:
        """Return `job train.py: launcher 41, ranks 0–1 (pids 42, 43)`."""
        ranks = [p.rank for p in self.processes]
        who = counted(len(ranks), "rank") if None in ranks else rank_list([r for r in ranks if r is not None])
        pids = ", ".join(str(p.pid) for p in self.processes[:LISTED]) + " …" * (len(ranks) > LISTED)
        launcher = f"launcher {self.launcher}, " if self.launcher is not None else ""
        return f"job {self.script}: {launcher}{who} (pid{'s' * (len(ranks) > 1)} {pids})"

    @property
    def title(self) -> str:
        """Return `41 (train.py, 4 ranks, MASTER_PORT 29500)`: what `--job` takes, and what it is."""
        port = f", MASTER_PORT {visible(self.env['MASTER_PORT'])[:12]}" if "MASTER_PORT" in self.env else ""
        return f"{self.names[0]} ({self.script}, {counted(len(self.processes), 'rank')}{port}{', recorded' if self.recorded else ''})"

    def expected(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks that this host should have, `ranks` included."""
        first = self.processes[0]
        local = _int(first.env.get("LOCAL_RANK"))
        size = next((n for *_, k in (TORCHRUN, OPEN_MPI, MPICH) if (n := _int(first.env.get(k)))), None)
        if first.rank is not None and local is not None and size and size <= (self.world or 0):
            base = first.rank - local
            return set(ranks) | {base + i for i in range(size)}
        if self.world and re.fullmatch(r"localhost|127\..*|::1", first.env.get("MASTER_ADDR", "")):
            return set(ranks) | set(range(min(self.world, 4096)))
        return set(ranks)


def jobs_here() -> list[Job]:
    everything = {p.pid: p for p in living()}
    named = {
        p.pid: p
        for p in everything.values()
        if p.rank is not None and not _NO_RANK.search(" ".join(p.command)) and p.has_torch
    }
    launchers = _launchers(named, everything)
    ranks = {
        pid: p
        for pid, p in named.items()
        if pid not in launchers
        and not any(a.pid in named and a.pid not in launchers for a in _ancestors(p, everything))
    }
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for p in ranks.values():
        groups.setdefault(_key(p), []).append(p)
    for parent, children in _spawned(everything, set(named)).items():
        groups["parent", str(parent)] = children
    return [_job(sorted(group, key=lambda p: (p.rank or 0, p.pid)), everything) for group in groups.values()]


def _launchers(named: Mapping[int, Candidate], everything: Mapping[int, Candidate]) -> set[int]:
    """Return processes whose children were given ranks: torchrun in a task of Slurm has SLURM_PROCID, and its children RANK."""
    return {
        a.pid
        for p in named.values()
        for a in _ancestors(p, everything)
        if a.pid in named and _source_of_rank(a) != _source_of_rank(p)
    }


def _source_of_rank(p: Candidate) -> str | None:
    return next((name for name in RANKS if _int(p.env.get(name)) is not None), None)


def _spawned(everything: Mapping[int, Candidate], named: Collection[int]) -> dict[int, list[Candidate]]:
    """Return children with torch of a process with torch, where no environment has a rank: `mp.spawn`, `mp.Process`."""
    families: dict[int, list[Candidate]] = {}
    for p in everything.values():
        parent = everything.get(p.parent)
        if p.rank is None and parent is not None and parent.rank is None and p.pid not in named:
            own = "multiprocessing" in " ".join(p.command) or p.command == parent.command
            if own and not _NO_RANK.search(" ".join(p.command)) and p.has_torch and parent.has_torch:
                families.setdefault(parent.pid, []).append(p)
    parents = {pid for pid, children in families.items() if len(children) > 1}
    # workers of a rank's loader: the rank itself is in a family
    return {
        pid: children
        for pid, children in families.items()
        if pid in parents and not any(pid == x.pid for other in parents for x in families[other])
    }


def chosen(pids: Collection[int], name: str | None, jobs: list[Job]) -> Job:
    """Return the job that has these processes, has this name, or is the only one; else the only one that is not recorded.

    Raises:
        DistdiagError: there is none, or more than one.
    """
    if pids:
        return _of_pids(pids, jobs)
    found = [j for j in jobs if name is None or name in j.names]
    unrecorded = [j for j in found if j.recorded is None]
    if len(found) == 1 or len(unrecorded) == 1:
        return (unrecorded or found)[0]
    if not found:
        if name is not None and jobs:
            raise DistdiagError(f"no job here has the name {visible(name)}", f"one of {_listed(jobs)}", kind="no_rank")
        raise DistdiagError(
            "no rank of a torch job runs here as this user",
            "run it on the host and in the container of the ranks, as their user; or name their pids",
            ExitCode.NO_DATA, "no_rank",
        )  # fmt: skip
    raise DistdiagError(f"{len(found)} jobs run here", f"name one with --job: {_listed(found)}", kind="several_jobs")


def _listed(jobs: list[Job]) -> str:
    return ", ".join(j.title for j in jobs[:LISTED]) + (
        f", and {len(jobs) - LISTED} more" if len(jobs) > LISTED else ""
    )


def _of_pids(pids: Collection[int], jobs: list[Job]) -> Job:
    everything = {p.pid: p for p in living()}
    hit: list[Job] = []
    loose: list[Candidate] = []
    for pid in dict.fromkeys(pids):
        p = _own(pid, everything)
        family = {pid, *(a.pid for a in _ancestors(p, everything))}
        mine = [
            j for j in jobs
            if any(x.pid in family or any(a.pid == pid for a in _ancestors(x, everything)) for x in j.processes)
        ]  # fmt: skip
        if mine:
            hit += [j for j in mine if j not in hit]
        else:
            loose.append(p)
    if len(hit) + bool(loose) > 1:
        titles = [j.title for j in hit] + [f"pid {p.pid} ({p.script})" for p in loose]
        raise DistdiagError(
            f"these pids are of {len(titles)} jobs", f"give those of one: {', '.join(titles)}", kind="several_jobs"
        )
    if hit:
        return hit[0]
    for p in loose:
        if not p.has_torch:
            raise DistdiagError(
                f"pid {p.pid} ({p.script}) has not loaded torch, and none of its children has",
                "name a rank or its launcher; `distdiag attach --here` finds them",
            )
    return _job(loose, everything)


def _own(pid: int, everything: Mapping[int, Candidate]) -> Candidate:
    if pid in everything:
        return everything[pid]
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise DistdiagError(
            f"pid {pid}: no such process", "see `distdiag attach --here`; a pid counts inside its own container only"
        ) from None
    if owner == os.geteuid():
        raise DistdiagError(f"pid {pid} has ended", "name a rank that runs, or its launcher")
    raise DistdiagError(f"pid {pid} belongs to {visible(user_name(owner))}", "attach as the user of the job")


def _job(processes: list[Candidate], everything: Mapping[int, Candidate]) -> Job:
    parents = {p.parent for p in processes}
    launcher = parents.pop() if len(parents) == 1 and (processes[0].rank is None or len(processes) > 1) else None
    launcher = launcher if launcher in everything and launcher != 1 else None
    named = [processes[0].env.get(n) for n in _NAMES]
    first = str(launcher if launcher is not None else processes[0].pid)
    scripts = Counter(p.script for p in processes).most_common(1)
    names = [first, *(n for n in named if n and n != "none"), *(s for s, _ in scripts)]
    if launcher is not None:
        names.append(everything[launcher].script)
    return Job(tuple(processes), tuple(dict.fromkeys(names)), launcher)


def _key(p: Candidate) -> tuple[str, ...]:
    """Return what the ranks of one job have in common."""
    run = p.env.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none" or "MASTER_PORT" in p.env:
        return run, p.env.get("MASTER_ADDR", ""), p.env.get("MASTER_PORT", "")
    found = tuple(p.env.get(n, "") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"))
    return found if any(found) else ("parent", str(p.parent))


def _ancestors(p: Candidate, everything: Mapping[int, Candidate]) -> Iterator[Candidate]:
    seen = {p.pid}
    while (parent := everything.get(p.parent)) is not None and parent.pid not in seen:
        seen.add(parent.pid)
        yield parent
        p = parent


def living() -> Iterator[Candidate]:
    me = os.geteuid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        where = Path("/proc", name)
        try:
            if os.stat(where).st_uid != me:
                continue
            fields = procfs.stat_fields(name)
            if fields[procfs.STATE] in "ZX":
                continue
            env = _read(where / "environ", _MAX_ENVIRONMENT).decode("utf-8", "replace").split("\0")
            command = _read(where / "cmdline", _MAX_ENVIRONMENT).decode("utf-8", "replace").split("\0")
            variables = dict(v.split("=", 1) for v in env if "=" in v)
            started = int(fields[procfs.START_TICKS])
            yield Candidate(int(name), int(fields[procfs.PARENT]), started, variables, tuple(command[:-1] or command))
        except (OSError, ValueError, IndexError):  # it has ended
            continue


def _read(path: Path, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 and is_rank(int(text)) else None
