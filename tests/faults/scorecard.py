"""Run one fault job under distdiag and score the findings."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from distdiag.diagnosis.model.findings import Finding, Severity, at_least
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import open_run
from tests.faults.collection import Expected, Job, Running, interrupted, started

POLL_S = 0.1
SETTLE_S = 3.0  # after the right finding: wait for other findings
PART_RIGHT_S = 8.0  # after a finding of the right kind with wrong ranks or lines: wait for a correction
# after the right finding in a job that ends on gloo, but hangs if the backend does not notice a lost peer
CRASH_S = 20.0
CLOSE_S = 8.0  # after the end of the job: for the monitor's last rows


class Score(msgspec.Struct, kw_only=True):
    """What one run of one job was expected to find, and what it found. None: not applicable."""

    name: str
    faulty: bool
    nproc: int
    expected: str
    got: str  # the judged finding, "kind/cause ranks"; "–" if there is none
    found: bool | None = None
    right_cause: bool | None = None
    right_culprits: bool | None = None
    lines_right: int = 0
    lines_expected: int = 0
    fault_to_finding_s: float | None = None  # by the times in run.db; see `fault_time_s`
    launch_to_finding_s: float | None = None  # by this process's clock
    false_findings: list[str] = []
    problem: str | None = None  # of the job itself: no run.db, a healthy job that failed
    exit_code: int | None = None  # None: ended by us
    seconds: float = 0.0
    findings: list[Finding] = []
    run_dir: str | None = None

    @property
    def right(self) -> bool:
        """True if found, cause and culprits are right; lines are judged over the whole collection (`line_share`)."""
        right = all(x is not False for x in (self.found, self.right_cause, self.right_culprits))
        return right and not self.false_findings and self.problem is None


class Observed(msgspec.Struct, kw_only=True):
    """The contents of a run.db that the scorecard judges."""

    findings: tuple[Finding, ...] = ()
    waits_began_s: tuple[float, ...] = ()  # of the ranks that sit in a wait now
    closed: bool = False
    readable: bool = False


def observe(run_dir: Path) -> Observed:
    """Return the findings so far; empty if there is no database yet."""
    try:
        with open_run(run_dir) as run:
            waits = run.query(
                "SELECT t_s - waiting_age_s FROM rank WHERE waiting_op IS NOT NULL AND waiting_age_s IS NOT NULL"
            )
            return Observed(
                findings=run.findings(),
                waits_began_s=tuple(w for (w,) in waits if w is not None),
                closed=run.meta.get("ended_s") is not None,
                readable=True,
            )
    except RunUnreadable:
        return Observed()


def accepted_culprits(expected: Expected) -> list[set[int]]:
    return [set(expected.culprits), *(set(c) for c in expected.culprits_any)]


def lines(job: Job, folder: Path, finding: Finding) -> tuple[int, int]:
    """Return how many of the culprits' (or the cycle's) lines the finding names, and of how many."""
    wanted = [p for p in job.positions if p.role != "victim"]
    places = [*finding.where, *finding.waiting]
    right = 0
    for p in wanted:
        path = (folder / p.file).resolve()
        right += any(
            w.rank == p.rank and w.file is not None and Path(w.file).resolve() == path and p.covers(w.line)
            for w in places
        )
    return right, len(wanted)


def best(job: Job, folder: Path, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding nearest to what was expected; None if no finding is of an expected kind."""
    e = job.expected
    of_kind = [f for f in findings if f.kind in e.kinds_any_or_all]
    return max(
        of_kind,
        key=lambda f: (
            set(f.culprits) in accepted_culprits(e),
            not e.causes or f.cause in e.causes,
            lines(job, folder, f)[0],
            f.cleared_s is None,
        ),
        default=None,
    )


def false_findings(job: Job, findings: Sequence[Finding]) -> list[str]:
    """Return findings of severity warning or above that are wrong: another kind, or other culprits."""
    e = job.expected
    false = []
    for f in findings:
        if not at_least(f.severity, Severity.WARNING) or f.kind in e.tolerated:
            continue
        if f.kind in e.kinds_any_or_all and set(f.culprits) in accepted_culprits(e):
            continue
        false.append(f"{short(f)}{' (cleared)' if f.cleared_s is not None else ''}")
    return false


def short(f: Finding) -> str:
    ranks = ",".join(map(str, f.culprits)) or "–"
    return f"{f.kind}/{f.cause or '–'} {ranks}"


def fault_time_s(finding: Finding, observed: Observed) -> float | None:
    """Return when the fault was complete, in seconds since the run began.

    A deadlock or mismatch is complete when the last waiting rank began to wait. run.db has these times from the
    ranks' own clocks, independent of the polls. For other kinds: when the finding was first seen.
    """
    if finding.kind in ("deadlock", "mismatch") and observed.waits_began_s:
        began = max(observed.waits_began_s)
        if finding.detected_s is None or began <= finding.detected_s:
            return began
    return finding.first_seen_s


def score(job: Job, folder: Path, observed: Observed) -> Score:
    """Compare the findings with the manifest."""
    e = job.expected
    kinds = "|".join(e.kinds_any_or_all)
    causes = "|".join(e.causes)
    ranks = ",".join(map(str, e.culprits)) or "–"
    s = Score(
        name=job.name,
        faulty=job.faulty,
        nproc=job.nproc,
        expected=f"{kinds}{'/' + causes if causes else ''} {ranks}" if job.faulty else "nothing",
        got="–",
        false_findings=false_findings(job, observed.findings),
        findings=list(observed.findings),
    )
    if not job.faulty:
        return s
    f = best(job, folder, observed.findings)
    s.found = f is not None
    s.lines_expected = sum(p.role != "victim" for p in job.positions)
    if f is None:
        return s
    s.got = short(f)
    s.right_culprits = set(f.culprits) in accepted_culprits(e)
    s.right_cause = f.cause in e.causes if e.causes else None
    s.lines_right = lines(job, folder, f)[0]
    fault_s = fault_time_s(f, observed)
    if f.detected_s is not None and fault_s is not None:
        s.fault_to_finding_s = round(f.detected_s - fault_s, 2)
    return s


def run_job(
    job: Job, folder: Path, keep: Path | None = None, environment: dict[str, str] | None = None,
    ended: Callable[[Path, Path], object] | None = None,
) -> Score:  # fmt: skip
    """Start one job under distdiag, watch its run.db until the score is clear, end the job, and score it.

    Args:
        keep: Folder that keeps the run directory and the output as NAME/; default: nothing is kept.
        environment: Additional variables, from `backend_environment`.
        ended: Called with the run directory and the working directory, after the job and before they are deleted.
    """
    with tempfile.TemporaryDirectory(prefix="distdiag-bench-") as tmp:
        root = Path(tmp) if keep is None else keep / job.name
        work, run_dir = root / "work", root / "run"
        work.mkdir(parents=True, exist_ok=True)
        with started(job, (folder / job.path).resolve(), work, run_dir, environment) as running:
            observed, found_at = watch(job, folder, running, run_dir)
            seconds = running.age_s()
            exit_code = running.process.poll()
        if ended is not None and observed.readable:
            ended(run_dir, work)
        result = score(job, folder, observed)
        result.seconds = round(seconds, 1)
        result.exit_code = exit_code
        result.launch_to_finding_s = None if found_at is None else round(found_at, 1)
        result.run_dir = None if keep is None else str(run_dir)
        if not observed.readable:
            tail = [line for line in running.output().splitlines() if line.strip()][-1:]
            result.problem = f"no run.db: {tail[0][:160] if tail else 'no output'}"
        elif not job.faulty and exit_code != 0:
            result.problem = (
                f"exit code {exit_code}" if exit_code is not None else f"not ended after {job.limit_s:.0f} s"
            )
        return result


def watch(job: Job, folder: Path, running: Running, run_dir: Path) -> tuple[Observed, float | None]:
    """Poll until the right finding has settled, the job and its monitor have ended, or the limit is reached."""
    found_at = right_at = ended_at = None
    while True:
        ended_at = ended_at or (time.monotonic() if running.ended else None)
        observed = observe(run_dir)
        now = time.monotonic()
        if job.faulty and (f := best(job, folder, observed.findings)) is not None:
            found_at = found_at or (now, running.age_s())
            now_score = score(job, folder, observed)
            if now_score.right and now_score.lines_right == now_score.lines_expected and f.cleared_s is None:
                right_at = right_at or now
            # a crash is judged to the end of the job: its victims must not be accused later
            if right_at is not None and now - right_at > (CRASH_S if job.plain_outcome.type == "crash" else SETTLE_S):
                break
            part_right_s = {"hang": PART_RIGHT_S, "crash": 2 * CRASH_S}.get(job.plain_outcome.type)
            if part_right_s is not None and now - found_at[0] > part_right_s:
                break
        if ended_at is not None and (observed.closed or now - ended_at > CLOSE_S):
            break
        if running.age_s() > job.limit_s or interrupted.is_set():
            break
        time.sleep(POLL_S)
    return observe(run_dir), None if found_at is None else found_at[1]
