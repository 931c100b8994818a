"""Record tapes of the collection's jobs, make them small, and judge them again without starting a process."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.tapes.tape import Tape, answers, judge, read_tape, to_bytes
from distdiag.tapes.writer import NAME
from tests.faults.collection import Job
from tests.faults.scorecard import Observed, Score, score

FOLDER = Path(__file__).resolve().parent
TAPES = FOLDER / "tapes"
SUFFIX = ".tape"
ANYWHERE = Path("/collection")  # the folder of the manifest, as tapes have it
# seconds between kept snapshots of a tape in which nothing changes, tried in this order until the verdict stays the same
INTERVALS_S = (4.0, 2.0, 1.0, 0.5, 0.0)
AROUND_S = 1.0  # around a moment every snapshot is kept


def job_hash(job: Job, folder: Path) -> str:
    """Return a hash of the job's file."""
    return hashlib.sha256((folder / job.path).read_bytes()).hexdigest()[:16]


def tape_path(folder: Path, job: Job, backend: str) -> Path:
    return folder / backend / (job.name + SUFFIX)


def finish(job: Job, folder: Path, backend: str, run_dir: Path, work: Path) -> tuple[Tape, bool]:
    """Return the tape of a run of the collection, without this machine's names.

    The second value is True if a replay of the whole tape has the findings of the live run.
    """
    from distdiag.store.reader import open_run

    whole = read_tape(run_dir / NAME)
    with open_run(run_dir) as run:
        live = answers(f for f in run.findings() if f.kind != "recorder")
    same = judge(whole).answers == live
    names = [(str(folder), str(ANYWHERE)), (str(FOLDER.parents[1]), "/checkout"), (str(work), "/work")]
    scrubbed = scrub(whole, [*names, *_installations()])
    expected = judge(scrubbed).answers
    head = msgspec.structs.replace(
        scrubbed.head, job=job.name, backend=backend, job_hash=job_hash(job, folder), expected=expected
    )
    return msgspec.structs.replace(scrubbed, head=head), same


def _installations() -> list[tuple[str, str]]:
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    torch = sys.modules.get("torch")
    if torch is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            places.add(str(Path(spec.origin).parents[1]))
    return [(place, "/python") for place in sorted(places, key=len, reverse=True)]


def scrub(tape: Tape, names: list[tuple[str, str]]) -> Tape:
    """Return the tape with paths replaced, and without host names."""

    def text(value: str) -> str:
        for old, new in names:
            value = value.replace(old, new)
        return value

    cache: dict[str, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            if value not in cache:
                cache[value] = text(value)
            return cache[value]
        if isinstance(value, dict):
            return {walk(k): walk(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v) for v in value]
        return value

    def whole(snapshot: Snapshot) -> Snapshot:
        values = walk(msgspec.to_builtins(snapshot))
        for state in values["ranks"].values():
            state["host"] = "host"
        return msgspec.convert(values, Snapshot)

    sources = {text(path): source for path, source in tape.sources.items()}
    return msgspec.structs.replace(tape, snapshots=tuple(map(whole, tape.snapshots)), sources=sources)


def thinned(tape: Tape) -> Tape:
    """Return the tape with as few snapshots as lead to the same findings."""
    for interval_s in INTERVALS_S[:-1]:
        keep = _kept(tape, interval_s)
        shorter = msgspec.structs.replace(
            tape,
            snapshots=tuple(tape.snapshots[i] for i in keep),
            moments=tuple(n for n, i in enumerate(keep) if i in tape.moments),
        )
        if judge(shorter).answers == tape.expected:
            return shorter
    return tape


def _kept(tape: Tape, interval_s: float) -> list[int]:
    times = [s.t_s for s in tape.snapshots]
    near = [times[i] for i in tape.moments]
    kept: list[int] = []
    for i, t_s in enumerate(times):
        last = i == len(times) - 1
        if not kept or last or t_s - times[kept[-1]] >= interval_s or any(abs(t_s - m) <= AROUND_S for m in near):
            kept.append(i)
    return kept


def score_of(job: Job, tape: Tape) -> Score:
    """Judge a tape and compare the findings with the manifest."""
    return score(job, ANYWHERE, Observed(findings=judge(tape).findings, readable=True))


def write(path: Path, tape: Tape) -> int:
    """Write a tape and return its size in bytes."""
    data = to_bytes(tape)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
    return len(data)
