"""Judges flight-recorder dumps from any cluster: `diagnose_dumps(DIR)` returns findings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from distdiag import guard
from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit.verdict import Verdict, judge
from distdiag.diagnosis.model.findings import Certainty, Finding, Report, Severity, State
from distdiag.diagnosis.model.snapshot import RankState, Snapshot
from distdiag.diagnosis.model.syntax import Source, no_source
from distdiag.diagnosis.rules import mismatch
from distdiag.diagnosis.text.incident_finding import incident_finding
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import build
from distdiag.diagnosis.waits.wait import Wait
from distdiag.errors import DistdiagError
from distdiag.sources.dumps import absent, stuck_messages
from distdiag.sources.dumps import culprits as dump_stalls
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.files import find, likely
from distdiag.sources.dumps.findings import Findings
from distdiag.sources.dumps.load import load
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.running import still_working, was_running
from distdiag.sources.dumps.times import LateRanks
from distdiag.sources.stacks.calls import Position

LIMITS = guard.Limits()
# what the child sends: the verdict; if there is none, the files that should have been dumps, and those that were not read
Answer = tuple[Report | None, list[tuple[str, str]], list[str]]
__all__ = ["LoadReport", "NoDumps", "diagnose_dumps", "load"]


def diagnose_dumps(
    paths: str | Path | Iterable[str | Path], places: Mapping[int, Position] | None = None, source: Source = no_source,
    stopped: bool = False,
) -> Report:  # fmt: skip
    """Return a report from flight-recorder dumps of any cluster: who is missing, who is stuck, what could not be read.

    The dumps are read and judged in a child process with limits. A file that crashes the child is listed as unreadable, with the
    reason, and the others are judged without it.

    Args:
        places: Where ranks of the running job are, by their stacks.
        source: Text of a source file by path, or None: conditions on the rank are read from it.
        stopped: A log shows that calls of the job timed out.

    Raises:
        NoDumps: none of the files is a dump.
        DistdiagError: the dumps together exceed the limits, or their analysis failed.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)

    def work(announce: guard.Announce, refused: Mapping[str, str], only: str | None) -> Answer:
        try:
            return _judge(given if only is None else [only], announce, refused, places or {}, source, stopped), [], []
        except NoDumps as e:
            return None, e.report.bad, e.report.others

    def files() -> Iterable[str]:
        return (str(path) for path, named in find(map(Path, given)) if named or likely(path))

    try:
        report, bad, others = guard.judged(work, files, LIMITS, Answer)
    except guard.Died as e:
        raise DistdiagError(
            f"the dumps cannot be judged together: {e.reason}", "give fewer of them, or those of one run"
        ) from e
    if report is None:
        raise NoDumps(LoadReport(bad=bad, others=others))
    return report


def _judge(
    given: list[str | Path], announce: guard.Announce, refused: Mapping[str, str], places: Mapping[int, Position],
    source: Source, stopped: bool,
) -> Report:  # fmt: skip
    """Return the verdict, in this process; raise NoDumps if none of the files is a dump."""
    snapshot, loaded = load(given, announce, refused)
    if not loaded.files:
        raise NoDumps(loaded)
    snapshot = with_places(snapshot, places)
    graph = build(snapshot)
    proofs = [_proof(snapshot, verdict) for verdict in judge(snapshot, graph, source=source)]
    found = [f for f in proofs if f.certainty == Certainty.PROVED]
    message = None  # holds however long the ranks have waited
    blame = dump_stalls.judge(snapshot, graph, loaded.stale)
    findings = Findings(snapshot, loaded, blame)
    running = not stopped and was_running(loaded, blame)
    if not found:
        message = None if running else stuck_messages.unmatched(findings)
        message = message or stuck_messages.unequal(findings, graph)
        message = message or (None if running else findings.other_members(graph.stuck))
        if message is not None:
            found.append(message)
        elif loaded.late is not None and not running and _late_first(loaded.late, blame):
            found.append(findings.late_rank(loaded.late))
        elif not running and (working := still_working(snapshot, loaded, blame)) is not None:
            found.append(findings.still_working(working))
        elif not running and (message := stuck_messages.missing(findings, graph, source)) is not None:
            found.append(message)
        elif blame.culprits or blame.crossed or blame.circle:
            found.append(findings.stall(bool(running)))
            message = found[-1] if findings.one_more() else None
        elif not running:
            found += proofs  # cycles: suspected only, and only if no rank is missing
    decided = any(f.severity == Severity.ERROR for f in found)
    found += (lost := absent.without_dump(findings, decided, bool(running)))
    half = 2 * len(loaded.files) <= snapshot.world_size and any(f.culprits for f in lost)
    few = half and not (decided or stopped) and findings.untimed()
    running = None if few else running
    found += absent.unreadable(findings, given)
    moved = ""
    if blame.in_flight and not any(f.severity == Severity.ERROR and f.kind != "recorder" for f in found):
        moved = findings.moved()
        found += [] if moved else [findings.in_flight(bool(running))]
    notes = [*filter(None, [moved]), *_notes(loaded, bool(graph.waits))]
    by_age = [f for f in found if f.severity == Severity.ERROR and f.certainty != Certainty.PROVED and f is not message]
    if not (running or stopped or findings.waited()) and any(running is None or f.kind == "stall" for f in by_age):
        notes.append(_UNTIMED)
    if running is None:
        found = [replace(f, severity=Severity.WARNING, cost=_IF_RUNNING) if f in by_age else f for f in found]
    if not any(f.kind == kinds.MISMATCH.name for f in found):
        found += mismatch.completed(snapshot)
    return Report(
        run=", ".join(map(str, given)),
        state=_state(found, running),
        world_size=snapshot.world_size,
        ranks_seen=len(loaded.files),
        findings=tuple(found),
        notes=tuple(notes),
        unjudged=f"{len(loaded.files):,} of {snapshot.world_size:,} ranks have a dump" if few else None,
    )


def _proof(snapshot: Snapshot, verdict: Verdict) -> Finding:
    """Return the finding on an incident; on a gather of unequal sizes, with the reason if the ranks' earlier calls show it.

    FSDP gathers its modules in a cycle: the odd size is the one that is due after this call.
    """
    wait, culprits, f = verdict.wait, verdict.culprits, incident_finding(snapshot, verdict)
    if f.cause != "shape" or not culprits or wait.p2p or "all_gather" not in wait.calls[culprits[0]].op:
        return f
    each = [_earlier(snapshot.ranks[q], wait) for q in wait.calls]
    seen = min(map(len, each))
    odd = {(wait.calls[q].op, compatible.elements(wait.calls[q])) for q in culprits}
    if any(calls[:seen] != each[0][:seen] for calls in each):
        return f
    newest = each[0][:seen]
    cycle = next((n for n in range(2, seen // 2 + 1) if newest[:n] == newest[n : 2 * n]), 0)
    if not cycle or newest[cycle - 1] == newest[cycle - 2] or odd != {newest[cycle - 2]}:
        return f
    message = f.message + filled(_SKIPS, culprits=culprits, cycle=cycle)
    return replace(f, message=message, advice=filled(_SKIPS_ADVICE, culprits=culprits))


def _earlier(state: RankState, wait: Wait) -> list[tuple[str, int | None]]:
    """Return (operation, size) of a rank's calls before this one in its group, the newest first, up to the first gap."""
    calls = {c.seq: (c.op, compatible.elements(c)) for c in state.calls if c.group == wait.group and not c.p2p}
    before = range(wait.seq - 1, max(wait.seq - 2 * MAX_CYCLE, 0), -1)
    return [calls[seq] for seq in itertools.takewhile(calls.__contains__, before)]


def with_places(snapshot: Snapshot, places: Mapping[int, Position]) -> Snapshot:
    """Return the snapshot with where each rank is, by its stack: records in JSON have none, and none of a rank that issued nothing."""
    ranks = dict(snapshot.ranks)
    for q, place in places.items():
        if q not in ranks:
            continue
        state, waits_in = ranks[q], place.call
        calls = list(state.calls)
        if waits_in is not None:
            open_ones = (i for i, c in enumerate(calls) if c.op == waits_in.op and c.completed_s is None)
            if (newest := max(open_ones, default=None)) is not None:  # the one that the host waits in
                calls[newest] = replace(calls[newest], site=calls[newest].site or place.site)
        ranks[q] = replace(
            state, calls=tuple(calls), current_site=place.site or state.current_site, user_stack=place.stack,
            activity=place.activity,
        )  # fmt: skip
    return replace(snapshot, ranks=ranks)


class NoDumps(Exception):
    """No file could be read; `report.bad` has the reasons."""

    def __init__(self, report: LoadReport) -> None:
        super().__init__("no flight-recorder dump could be read")
        self.report = report


def _state(found: list[Finding], running: bool | None) -> State:
    worst = [f for f in found if f.severity == Severity.ERROR]
    if any(f.kind in ("deadlock", "mismatch", "group_misuse") and not f.collective_completed for f in worst):
        return State.DEADLOCKED
    if any(f.kind == "stall" for f in worst):
        return State.STALLED
    if any(f.kind in ("rank_lost", "timeout", "mismatch") for f in worst):
        return State.DEGRADED
    waits = any(f.kind in ("deadlock", "stall", "rank_lost") for f in found)
    return State.WAITING if waits and not running else State.RUNNING  # whether it runs is not known


MAX_CYCLE = 256  # calls
_SKIPS = "; {culprits} {culprits:has|have} the size that is due after this call, by the cycle of {cycle} calls that all ranks repeat: most likely {culprits:it|they} left out a call"
_SKIPS_ADVICE = (
    "see which module {culprits} {culprits:skips|skip} (a branch on the data, as a batch without images): FSDP gathers its parameters, and all ranks "
    "must run the same modules in the same order, if need be on a dummy input whose output counts 0"
)
_STALE = "the {stale:dump|dumps} of {stale} {stale:is|are} older than the rest: operations missing there may have been issued later"
_NOTHING_OPEN = "every recorded operation has completed: if the job hangs, it hangs outside of communication; take the stacks (`py-spy dump`)"
_IF_RUNNING = "none, if the job ran on"
_UNTIMED = (
    "the files do not show how long the ranks had waited (copies have other times): if the job ran on, it was only on its way; a second "
    "set of dumps, or a timeout in its log, shows that"
)


def _notes(loaded: LoadReport, in_flight: bool) -> list[str]:
    notes = [*loaded.notes, *loaded.not_visible]
    if not in_flight and not loaded.not_visible:
        notes.append(_NOTHING_OPEN)
    if loaded.stale:
        notes.append(filled(_STALE, stale=loaded.stale))
    if loaded.others:
        names = ", ".join(Path(p).name for p in loaded.others[:5]) + (" …" if len(loaded.others) > 5 else "")
        notes.append(f"not read: {names}")
    return notes


def _late_first(late: LateRanks, blame: Blame) -> bool:
    """True if the late ranks are the cause, and not ranks that the dumps show to be missing."""
    since = [t for t in blame.waited_for_since_s.values() if t is not None]
    others = set(blame.culprits).difference(blame.behind, late.late_s) or blame.alone or blame.silent
    return not others or (bool(since) and late.since_s < min(since))
