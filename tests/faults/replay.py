"""Judge the collection's tapes again: `distdiag bench faults --replay`. No process of a job is started."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from distdiag.diagnosis.culprit.witnesses import ORDER, leave_out
from distdiag.errors import DistdiagError
from distdiag.tapes.tape import Answer, Verdict, judge, read_tape
from tests.faults import messages
from tests.faults.collection import Job, load
from tests.faults.record import ANYWHERE, FOLDER, SUFFIX, TAPES, job_hash
from tests.faults.scorecard import Observed, Score, score

_T = TypeVar("_T")


class Replayed(msgspec.Struct, kw_only=True):
    """One tape, judged again."""

    name: str  # backend/job
    score: Score
    answers: tuple[Answer, ...]
    expected: tuple[Answer, ...]  # when it was recorded, or as accepted since
    messages: str = ""  # what its findings state and advise, measured values masked
    failures: tuple[str, ...] = ()  # exceptions in our own rules
    stale: str = ""  # why it should be recorded again

    @property
    def right(self) -> bool:
        return self.score.right and self.answers == self.expected and not self.failures

    def lines(self) -> Iterator[str]:
        """Yield what differs."""
        if self.stale:
            yield f"stale  {self.name}: {self.stale}"
        if self.right:
            return
        yield f"BAD    {self.name}: got {self.score.got}, expected {self.score.expected}"
        yield from (f"         failed: {text}" for text in self.failures)
        yield from (f"         false: {text}" for text in self.score.false_findings)
        yield from (f"         before: {a}" for a in self.expected if a not in self.answers)
        yield from (f"         now:    {a}" for a in self.answers if a not in self.expected)


def tapes(folder: Path, names: Iterable[str] | None = None, backend: str | None = None) -> list[Path]:
    """Return the tapes below `folder`, BACKEND/JOB.tape, of these jobs (default: all).

    Raises:
        DistdiagError: there are none.
    """
    wanted = None if names is None else set(names)
    found = [
        path
        for path in sorted(folder.glob(f"*/*{SUFFIX}"))
        if (wanted is None or path.stem in wanted) and backend in (None, path.parent.name)
    ]
    if not found:
        raise DistdiagError(f"no tapes in {folder}", "`distdiag bench faults --record DIR` makes DIR/BACKEND/JOB.tape")
    return found


@cache
def _jobs(manifest: Path) -> dict[str, Job]:
    return {job.name: job for job in load(manifest).jobs}


@cache
def _accepted() -> dict[str, tuple[Answer, ...]]:
    """Return the verdicts that have been accepted since the tapes were recorded; tests/faults/README.md has the format."""
    path = TAPES / "accepted.json"
    if not path.exists():
        return {}
    given = msgspec.json.decode(path.read_bytes(), type=dict[str, Accepted])
    return {name: one.answers for name, one in given.items()}


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict that differs from the recorded one, and why that is right."""

    reason: str
    answers: tuple[Answer, ...]


@contextmanager
def left_out(names: Collection[str]) -> Iterator[None]:
    """Ask all witnesses but these; so do processes that are forked meanwhile."""
    before = dict(ORDER)
    leave_out(names)
    try:
        yield
    finally:
        ORDER.update(before)


def replay(path: Path, manifest: Path = FOLDER / "manifest.json") -> Replayed:
    """Judge one tape of the collection.

    Raises:
        DistdiagError: it cannot be decoded, or is of no job of the collection.
    """
    name = f"{path.parent.name}/{path.stem}"
    jobs = _jobs(manifest)
    if path.stem not in jobs:
        raise DistdiagError(f"no job of the collection is named '{path.stem}'", f"remove {path}")
    job = jobs[path.stem].on_backend(path.parent.name)
    tape = read_tape(path)
    verdict = judge(tape)
    changed = tape.head.job_hash != job_hash(job, manifest.parent)
    return Replayed(
        name=name,
        score=score(job, ANYWHERE, Observed(findings=verdict.findings, readable=True)),
        answers=verdict.answers,
        messages=messages.text(verdict.findings),
        failures=verdict.failures,
        expected=_accepted().get(name, tape.head.expected or ()),
        stale="the job has changed since" if changed else "",
    )


def _replayed(given: tuple[Path, Path]) -> Replayed | str:
    path, manifest = given
    try:
        return replay(path, manifest)
    except DistdiagError as e:
        return f"stale  {path.parent.name}/{path.stem}: {e}"


def replay_all(paths: Sequence[Path], manifest: Path, parallel: int = 2) -> list[Replayed | str]:
    """Judge tapes, several at a time; a text instead of the result of a tape that cannot be read."""
    return list(spread(_replayed, [(path, manifest) for path in paths], parallel))


def spread(work: Callable[[Any], _T], given: Sequence[Any], parallel: int) -> Iterator[_T]:
    """Yield the results of `work` in the order of `given`, from so many processes."""
    if parallel == 1 or len(given) == 1:
        yield from map(work, given)
        return
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(work, given, chunksize=4)


def why(verdict: Verdict) -> Iterator[str]:
    """Yield what each snapshot changed, and what could not be judged at the end."""
    state = ""
    for poll in verdict.polls:
        if poll.state != state:
            state = poll.state
            yield f"{poll.t_s:9.2f} s  the job is {state}"
        for f in poll.changed:
            cleared = " cleared" if f.cleared_s is not None else ""
            yield f"{poll.t_s:9.2f} s  {f.severity}{cleared} {f.kind}/{f.cause or '–'}: {f.message}"
    for check in verdict.polls[-1].checks if verdict.polls else ():
        if check.reason:
            yield f"not found: {check.kind}{'/' + check.cause if check.cause else ''}: {check.reason}"
