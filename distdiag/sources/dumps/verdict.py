"""Judges flight-recorder dumps from any cluster: `diagnose_dumps(DIR)` returns findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from distdiag import guard
from distdiag.diagnosis.culprit.verdict import judge
from distdiag.diagnosis.model.findings import Certainty, Finding, Report, Severity, State, rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.incident_finding import incident_finding
from distdiag.diagnosis.waits.graph import build
from distdiag.errors import DistdiagError
from distdiag.sources.dumps import culprits as dump_stalls
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.files import find, likely
from distdiag.sources.dumps.findings import in_flight, late_rank, stall, unmatched_messages
from distdiag.sources.dumps.late_ranks import LateRanks
from distdiag.sources.dumps.load import load
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.missing import unreadable, without_dump
from distdiag.sources.dumps.running import was_running
from distdiag.terms.untrusted import all_encodable

LIMITS = guard.Limits()
__all__ = ["LoadReport", "NoDumps", "diagnose_dumps", "load"]


def diagnose_dumps(paths: str | Path | Iterable[str | Path]) -> Report:
    """Return a report from flight-recorder dumps of any cluster: who is missing, who is stuck, what could not be read.

    The dumps are read and judged in a child process with limits. A file that crashes the child is listed as unreadable, with the
    reason, and the others are judged without it.

    Raises:
        NoDumps: none of the files is a dump.
        DistdiagError: the dumps together exceed the limits, or their analysis failed.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)

    def work(announce: guard.Announce, refused: Mapping[str, str], only: str | None) -> bytes:
        return _encoded(given if only is None else [only], announce, refused)

    def files() -> Iterable[str]:
        return (str(path) for path, named in find(map(Path, given)) if named or likely(path))

    try:
        answer = msgspec.msgpack.decode(guard.survivors(work, files, LIMITS), type=_Answer)
    except guard.Died as e:
        raise DistdiagError(
            f"the dumps cannot be judged together: {e.reason}", "give fewer of them, or those of one run"
        ) from e
    if answer.report is None:
        raise NoDumps(LoadReport(bad=answer.bad, others=answer.others))
    return answer.report


class _Answer(msgspec.Struct):
    """What the child sends: the verdict, or the reason why there is none."""

    report: Report | None = None
    bad: list[tuple[str, str]] = []
    others: list[str] = []


def _encoded(given: list[str | Path], announce: guard.Announce, refused: Mapping[str, str]) -> bytes:
    """Return the child's answer, encoded for the parent."""
    try:
        answer = _Answer(report=_judge(given, announce, refused))
    except NoDumps as e:
        answer = _Answer(bad=e.report.bad, others=e.report.others)
    try:
        return msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(all_encodable(msgspec.to_builtins(answer)))


def _judge(given: list[str | Path], announce: guard.Announce, refused: Mapping[str, str]) -> Report:
    """Return the verdict, in this process.

    Raises:
        NoDumps: none of the files is a dump.
    """
    snapshot, loaded = load(given, announce, refused)
    if not loaded.files:
        raise NoDumps(loaded)
    graph = build(snapshot)
    proofs = [incident_finding(snapshot, verdict) for verdict in judge(snapshot, graph)]
    conflicts = [f for f in proofs if f.certainty == Certainty.PROVED]
    blame = dump_stalls.judge(snapshot, graph, loaded.stale)
    found: list[Finding] = list(conflicts)
    running = was_running(loaded, blame)
    if not conflicts and not running and (unmatched := unmatched_messages(snapshot, loaded)) is not None:
        found.append(unmatched)
    elif not conflicts:
        if loaded.late is not None and not running and _late_first(loaded.late, blame):
            found.append(late_rank(snapshot, loaded, blame, loaded.late))
        elif blame.culprits or blame.crossed or blame.circle:
            found.append(stall(snapshot, loaded, blame, running))
        elif not running:
            found += proofs  # cycles: suspected only, and only if no rank is missing
    found += without_dump(snapshot, loaded, blame, found)
    found += unreadable(loaded, given)
    if blame.in_flight and not any(f.severity == Severity.ERROR and f.kind != "recorder" for f in found):
        found.append(in_flight(snapshot, loaded, blame))
    return Report(
        run=", ".join(map(str, given)),
        state=_state(found),
        world_size=snapshot.world_size,
        ranks_seen=len(loaded.files),
        findings=tuple(found),
        notes=tuple(_notes(loaded)),
    )


class NoDumps(Exception):
    """No file could be read; `report.bad` has the reasons."""

    def __init__(self, report: LoadReport) -> None:
        super().__init__("no flight-recorder dump could be read")
        self.report = report


def _state(found: list[Finding]) -> State:
    worst = [f for f in found if f.severity == Severity.ERROR]
    if any(f.kind in ("deadlock", "mismatch") for f in worst):
        return State.DEADLOCKED
    if any(f.kind == "stall" for f in worst):
        return State.STALLED
    return State.DEGRADED if any(f.kind in ("rank_lost", "timeout") for f in worst) else State.RUNNING


def _notes(loaded: LoadReport) -> list[str]:
    notes = list(loaded.notes)
    if loaded.stale:
        notes.append(
            f"the {verb(loaded.stale, 'dump', 'dumps')} of {rank_list(loaded.stale)} {verb(loaded.stale, 'is', 'are')} "
            "older than the rest: operations missing there may have been issued later"
        )
    if loaded.others:
        names = ", ".join(Path(p).name for p in loaded.others[:5]) + (" …" if len(loaded.others) > 5 else "")
        notes.append(f"not read: {names}")
    return notes


def _late_first(late: LateRanks, blame: Blame) -> bool:
    """True if the late ranks are the cause, and not ranks that the dumps show to be missing."""
    if set(blame.culprits) <= {*blame.behind, *late.late_s} and not blame.alone and not blame.silent:
        return True
    since = [t for t in blame.waited_for_since_s.values() if t is not None]
    return bool(since) and late.since_s < min(since)
