"""Samples the ranks of a job until it is known which of them move, and judges where the others are."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from distdiag import source_files
from distdiag.attach import ras as ncclras
from distdiag.attach import recorders, sample
from distdiag.attach.ranks import Candidate, Job, living
from distdiag.attach.sample import Sample
from distdiag.diagnosis.model.findings import Certainty, Report, Severity, State, rank_list
from distdiag.diagnosis.model.snapshot import Life, Site
from distdiag.diagnosis.model.syntax import Source
from distdiag.errors import DistdiagError, ExitCode
from distdiag.sources.dumps.verdict import NoDumps, diagnose_dumps
from distdiag.sources.stacks.calls import feeder, position
from distdiag.sources.stacks.frames import Process
from distdiag.sources.stacks.verdict import Seen, report
from distdiag.terms.secrets import mask
from distdiag.terms.untrusted import visible

GAP_S = 1.0  # between the first two samples
LONGER_S = 1.5  # until the third, of the ranks that have not moved by then
AGAIN = 3  # more samples at most, of ranks that could not run or whose loader still works
ABLE_S = 2.0  # a rank is stuck if it has not moved for so long while it had a CPU or asked for none
WORKING = 0.1  # share of a core that children of a rank use, or wait for: then it waits for their work
BUSY = 0.3  # share of a core from which a rank counts as computing
_RANK_NAMES = ("rank", "global_rank", "local_rank")


def attach(job: Job, ras: bool = False) -> Report:
    """Return the verdict on a running job.

    Raises:
        DistdiagError: it is recorded, or no stack could be read.
    """
    if (recorded := job.recorded) is not None:
        raise DistdiagError(
            f"pid {recorded.pid} is recorded by distdiag, which knows more than its stacks",
            f"distdiag diagnose {shlex.quote(_run_of(recorded))}", kind="recorded",
        )  # fmt: skip
    taken = _samples(job)
    processes = {pid: newest for pid, all_ in taken.items() if (newest := _newest(all_)) is not None}
    workers = {pid for pid, p in processes.items() if p.data_worker}
    stopped = [p for p in job.processes if taken[p.pid][0].error.startswith("it is stopped")]
    if not set(processes) - workers and not stopped:
        raise _unreadable(job, taken)
    members = [p for p in job.processes if p.pid not in workers]
    ranks, notes = _ranks(members, processes)
    source = _source_of(members[0].pid)
    seen = {rank: _seen(processes.get(p.pid), taken[p.pid], p, source) for rank, p in ranks.items()}
    expected = job.expected(ranks)
    seen |= _with_workers(seen)
    seen |= {rank: Seen(life=Life.MISSING) for rank in expected - set(ranks)}
    paused_ms, longest = max((1e3 * s.paused_s, rank) for rank, p in ranks.items() for s in taken[p.pid])
    notes.append(
        f"sampled {max(map(len, taken.values()))} times; the longest pause: {paused_ms:.0f} ms (rank {longest})"
    )
    failed = {rank: taken[p.pid][-1].error for rank, p in ranks.items() if p.pid not in processes and p not in stopped}
    notes += [f"rank {rank}: no stack ({visible(why)})" for rank, why in list(failed.items())[:4]]
    gone = [rank for rank, p in ranks.items() if p.pid in processes and taken[p.pid][-1].error == sample.ENDED]
    if gone:
        notes.append(f"{rank_list(sorted(gone))} ended while the job was sampled")
    world = job.world or len(seen)
    unjudged = "; ".join([f"rank {rank} {s.open}" for rank, s in sorted(seen.items()) if s.open][:4]) or None
    unjudged = f"{unjudged}: attach again" if unjudged else None
    if failed:
        unjudged = f"the stacks of {rank_list(failed)} could not be read"
    if world > len(seen):
        unjudged = f"{world - len(seen)} of {world} ranks are on other hosts"
        notes.append(f"on each of them run: {elsewhere(job)}")
    for rank in failed:
        del seen[rank]
    found = report(
        seen, source, run=f"job {job.names[0]}", world=world, notes=notes, unjudged=unjudged,
        command=visible(" ".join(mask(list(members[0].command)))),
    )  # fmt: skip
    stuck = any(f.severity != Severity.INFO for f in found.findings) or any(s.waits_for_device for s in seen.values())
    return _with_counts(found, ranks, seen, source, ras) if stuck and len(ranks) == len(seen) == world else found


def _with_counts(
    found: Report, ranks: Mapping[int, Candidate], seen: Mapping[int, Seen], source: Source, ras: bool
) -> Report:
    """Return the verdict with the numbers of the flight records; they decide, where every rank has one."""
    with tempfile.TemporaryDirectory(prefix="distdiag-") as made:
        folder = Path(made)
        taken, notes = recorders.take(ranks, folder)
        if ras and len(taken) < len(ranks):
            by_ras, more = ncclras.take(ranks, folder)
            taken, notes = taken | by_ras, notes + more
        if taken and len(taken) < len(ranks):
            notes.append(f"only {rank_list(sorted(taken))} gave a flight record: not used")
        if len(taken) < len(ranks):
            return replace(found, notes=(*found.notes, *notes))
        places = {rank: s.position for rank, s in seen.items() if s.position is not None}
        try:
            counted = diagnose_dumps(folder, places, source)
        except (NoDumps, DistdiagError) as e:
            return replace(found, notes=(*found.notes, *notes, f"the flight records cannot be judged: {e}"))
    notes += [n for n in counted.notes if made not in n]
    decided = [
        replace(f, evidence=(), severity=f.severity if f.certainty == Certainty.PROVED else Severity.WARNING)
        for f in counted.findings
        if f.kind not in ("recorder", "rank_lost") and f.severity == Severity.ERROR and (f.culprits or f.victims)
    ]  # fmt: skip
    if not decided:
        notes.append("the flight records of all ranks show no other reason")
        return replace(found, notes=(*found.notes, *notes))
    first, of_stacks = decided[0], next(iter(found.findings), None)
    if of_stacks is not None and first.certainty != Certainty.PROVED and set(first.culprits) == set(of_stacks.culprits):
        # the same ranks: stacks have the better text, the records the number
        number = first.collective.seq if first.collective is not None else None
        notes.append(f"the flight records agree: {first.message}")
        numbered = of_stacks.collective and replace(of_stacks.collective, seq=number)
        decided = [replace(of_stacks, collective=numbered), *found.findings[1:]]
    elif of_stacks is not None:
        notes.append(f"by stacks alone: {of_stacks.message}")
    proved = any(f.certainty == Certainty.PROVED for f in decided)
    state = State.DEADLOCKED if proved else found.state
    return replace(found, state=state, findings=tuple(decided), notes=(*found.notes, *notes))


def elsewhere(job: Job) -> str:
    """Return the command for the other hosts of a job."""
    slurm, run = job.env.get("SLURM_JOB_ID", ""), job.env.get("TORCHELASTIC_RUN_ID", "none")
    if slurm.isdecimal():
        return f"srun --jobid={slurm} --overlap --ntasks-per-node=1 distdiag attach --here"
    if run != "none":
        return f"distdiag attach --job {visible(shlex.quote(run))}"
    return "distdiag attach --here"


def _samples(job: Job) -> dict[int, list[Sample]]:
    """Return two samples of each process, and more of those that have not moved."""
    taken = {pid: [s] for pid, s in sample.take(job.processes).items()}
    time.sleep(GAP_S)
    for pid, s in sample.take([p for p in job.processes if taken[p.pid][0].process is not None]).items():
        taken[pid].append(s)
    still = [p for p in job.processes if taken[p.pid][-1].process is not None and not _moved(taken[p.pid])]
    if still:
        time.sleep(LONGER_S)
        unsure = [p for p in still if _unsure(p, taken[p.pid])]
        others = [p for p in still if p not in unsure]
        for pid, s in (sample.take(others) | sample.take(unsure, native=True)).items():
            taken[pid].append(s)
    for _ in range(AGAIN):
        open_ = [p for p in still if taken[p.pid][-1].process is not None and _open(taken[p.pid])]
        if not open_:
            break
        time.sleep(LONGER_S)
        for pid, s in sample.take(open_).items():
            taken[pid].append(s)
    return taken


def _open(samples: list[Sample]) -> str:
    """Return why a process that has not moved may yet move: no CPU, or its children work; else empty."""
    first, last = samples[0], samples[-1]
    interval_s, queued_s = last.at_s - first.at_s, last.queued_s - first.queued_s
    newest = _newest(samples)
    if _moved(samples) or newest is None:
        return ""
    if queued_s > 0 and interval_s - queued_s < ABLE_S:
        return f"waited for a CPU for {queued_s:.1f} of {interval_s:.1f} s"
    children_s = abs(last.children_s - first.children_s)
    if children_s > WORKING * interval_s and position(newest.judged).activity in ("data", "socket"):
        return "waits for its child processes, which work"
    return ""


def _newest(samples: list[Sample]) -> Process | None:
    """Return the newest sample that could be read, preferably one with native frames: it shows most."""
    read = [s.process for s in reversed(samples) if s.process is not None]
    return next((p for p in read if p.judged.native), read[0] if read else None)


def _unsure(p: Candidate, samples: list[Sample]) -> bool:
    newest = _newest(samples)
    if newest is None or (newest.judged.idle is False and not p.has_device):
        return False
    return position(newest.judged).unsure


def _moved(samples: list[Sample]) -> bool:
    """True if a process was in different lines, or had different local variables, in two samples."""
    return len({_state(s.process) for s in samples if s.process is not None}) > 1


def _state(process: Process) -> tuple[object, ...]:
    stack = process.judged
    lines = tuple((f.file, f.function, f.line) for f in stack.frames)
    return lines, tuple(tuple(sorted(f.objects.items())) for f in stack.frames if f.users)


def _seen(process: Process | None, samples: list[Sample], p: Candidate, source: Source) -> Seen:
    if process is None:
        return Seen(pid=p.pid, life=Life.STOPPED)
    first, last = samples[0], samples[-1]
    able_s = last.at_s - first.at_s - (last.queued_s - first.queued_s)
    busy = last.cpu_s - first.cpu_s > BUSY * max(able_s, 0.0)
    moved = _moved(samples) or last.error == sample.ENDED  # what has ended was not stuck
    where = position(process.judged, source, still=not moved and not busy)
    return Seen(
        position=where, feeder=feeder(process, where, source), pid=p.pid, moved=moved, busy=busy and not where.device, open=_open(samples),
    )  # fmt: skip


def _with_workers(seen: Mapping[int, Seen]) -> dict[int, Seen]:
    """Return the ranks that stand still because of their data loader, with the lines in which its workers are."""
    waits = {
        s.pid: rank
        for rank, s in seen.items()
        if s.pid is not None and s.position is not None and s.position.activity == "data" and not s.goes_on
    }
    found: dict[int, list[Site | None]] = {}
    children = {p.pid: p for p in living() if p.parent in waits} if waits else {}
    for pid, taken in sample.take(children.values()).items():
        if taken.process is not None and taken.process.data_worker:
            found.setdefault(waits[children[pid].parent], []).append(position(taken.process.judged).site)
    return {rank: replace(seen[rank], workers=tuple(sites)) for rank, sites in found.items()}


def _ranks(members: list[Candidate], processes: Mapping[int, Process]) -> tuple[dict[int, Candidate], list[str]]:
    """Return the processes by rank: by environment, else by their local variables, else in the order of their start."""
    known = {p.pid: p.rank if p.rank is not None else _by_locals(processes.get(p.pid)) for p in members}
    found = [rank for rank in known.values() if rank is not None]
    if len(found) == len(members) == len(set(found)):
        return {rank: p for p in members if (rank := known[p.pid]) is not None}, []
    ordered = sorted(members, key=lambda p: (p.started, p.pid))
    return dict(enumerate(ordered)), ["ranks are numbered in the order in which their processes started: none is known"]


def _by_locals(process: Process | None) -> int | None:
    """Return the rank that `torch.multiprocessing.spawn` gave to a process, or that its outermost user frame has."""
    frames = process.judged.frames if process is not None else ()
    for f in reversed(frames):
        if f.in_torch == "multiprocessing/spawn.py" and f.name == "_wrap" and f.values.get("i", "").isdecimal():
            return int(f.values["i"])
    for f in reversed(frames):
        for name in _RANK_NAMES if f.users else ():
            if f.values.get(name, "").isdecimal():
                return int(f.values[name])
    return None


def _source_of(pid: int) -> Source:
    """Return what reads source files as the job sees them: its container may have other files."""
    return lambda path: source_files.text(f"/proc/{pid}/root{path}") if path.startswith("/") else None


def _unreadable(job: Job, taken: Mapping[int, list[Sample]]) -> DistdiagError:
    pid, why = next((pid, x.error) for pid, samples in taken.items() for x in reversed(samples) if x.error)
    error = why.lower()
    if "permi" in error or "eperm" in error:
        return DistdiagError(
            f"pid {pid}: no permission to read its stack (ptrace)",
            "run as root or with CAP_SYS_PTRACE (`kubectl debug --profile=sysadmin`, `docker run --cap-add SYS_PTRACE`); with "
            "Yama: `sudo sysctl kernel.yama.ptrace_scope=0`", kind="no_ptrace",
        )  # fmt: skip
    if "has ended" in error or "no such process" in error:
        return DistdiagError(
            "the job has ended meanwhile", "`distdiag diagnose LOG…` reads its logs", ExitCode.NO_DATA, "no_rank"
        )
    if "python" in error:
        return DistdiagError(
            f"pid {pid} is no Python process that py-spy can read: {visible(why)[:160]}",
            "name a rank, or its launcher",
        )
    return DistdiagError(
        f"pid {pid}: no stack: {visible(why)[:160]}",
        f"attach again; if that fails: py-spy dump --pid {pid}",
        ExitCode.NO_DATA,
        "no_stack",
    )


def _run_of(p: Candidate) -> str:
    """Return the run directory of a recorded process, as far as its command and environment show it."""
    words = p.command
    given = next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "--run-dir"), p.env.get("DISTDIAG_RUN_DIR"))
    try:
        folder = os.readlink(f"/proc/{p.pid}/cwd")
    except OSError:
        folder = ""
    return visible(os.path.join(folder, given or "reports/latest"))
