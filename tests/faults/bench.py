"""`distdiag bench faults`: run the fault collection and print the scorecard."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from distdiag.errors import DistdiagError, ExitCode

if TYPE_CHECKING:
    from distdiag.tapes.tape import Tape
    from tests.faults.collection import Job
    from tests.faults.plain_check import PlainResult
    from tests.faults.scorecard import Score

LINES_WANTED = 0.95  # of the culprits' lines, over the whole collection

_T = TypeVar("_T")


def _manifest(manifest: Path | None, jobs: Path | None) -> Path:
    if manifest is not None:
        return manifest
    if jobs is not None:
        return jobs / "manifest.json" if jobs.name != "jobs" else jobs.parent / "manifest.json"
    import distdiag

    here = Path("tests/faults/manifest.json")
    return here if here.is_file() else Path(distdiag.__file__).resolve().parents[1] / here


def _chosen(jobs: tuple[Job, ...], only: tuple[str, ...], subset: str | None) -> list[Job]:
    names = {n for group in only for n in group.split(",") if n}
    unknown = sorted(names - {j.name for j in jobs})
    if unknown:
        raise DistdiagError(
            f"no job named '{unknown[0]}' in this collection", "`distdiag bench faults --list` shows the names"
        )
    chosen = [j for j in jobs if (not names or j.name in names) and (subset is None or subset in j.subsets)]
    if not chosen:
        raise DistdiagError(
            f"no job of this collection is in the subset '{subset}'", "leave out --subset, or name another"
        )
    return chosen


def _without_witnesses(names: tuple[str, ...]) -> dict[str, str]:
    """Return the environment in which the monitor ignores these witnesses."""
    from distdiag.diagnosis.culprit.witnesses import Reason

    known = [str(reason) for reason in Reason if reason is not Reason.NONE]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DistdiagError(f"no witness named '{unknown[0]}'", f"one of {', '.join(known)}")
    return {"DISTDIAG_WITHOUT_WITNESSES": ",".join(names)} if names else {}


@click.command()
@click.option("--only", multiple=True, metavar="NAME[,NAME…]", help="Run only these jobs (repeatable).")
@click.option("--subset", metavar="WORD", help="Only jobs of this subset, e.g. ci.")
@click.option("--jobs", type=click.Path(path_type=Path), help="Folder of another collection (holds manifest.json).")
@click.option("--manifest", type=click.Path(path_type=Path), help="Manifest of another collection.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Run each job N times.")
@click.option(
    "--parallel",
    type=click.IntRange(1),
    help="Jobs at a time, which distorts the measured times; tapes at a time.  [default: 1 job, 2 tapes]",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep run directories and outputs in this new folder.")
@click.option("--plain", is_flag=True, help="Check the collection: run without distdiag, compare with the manifest.")
@click.option(
    "--backend",
    metavar="NAME",
    help="Run the jobs on another backend, scripts unchanged: stream (NCCL's semantics on the CPU), or a folder with a"
    " sitecustomize.py.",
)
@click.option("--without", multiple=True, metavar="WITNESS", help="Decide without this witness (repeatable).")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Keep a tape of each job as DIR/BACKEND/JOB.tape; jobs that have one are left out.",
)
@click.option(
    "--replay",
    is_flag=False,
    flag_value=Path(),
    type=click.Path(path_type=Path),
    metavar="[DIR|FILE]",
    help="Judge tapes, by default those of the collection; no process is started.",
)
@click.option("--why", is_flag=True, help="With --replay FILE: what each poll changed, and what could not be judged.")
@click.option(
    "--ablate", is_flag=True, help="With --replay: leave out each witness, halve and double each limit; what changes?"
)
@click.option("--list", "list_only", is_flag=True, help="List the jobs and exit.")
@click.option("--json", "as_json", is_flag=True, help="One object of schema distdiag.bench/1.")
def command(
    only: tuple[str, ...], subset: str | None, jobs: Path | None, manifest: Path | None, repeat: int, parallel: int | None, keep: Path | None,
    plain: bool, backend: str | None, without: tuple[str, ...], record: Path | None, replay: Path | None, why: bool, ablate: bool, list_only: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Run faulty and healthy jobs under distdiag and print the scorecard.

    Each job is a real torchrun job with a known diagnosis. The scorecard has, for each job: found or missed, kind, ranks and
    line right or wrong, seconds from the fault to the finding, and false findings.

    Exit codes: 0 all right (95 % of the lines suffice), 1 not, 2 bad option or manifest.
    """
    from tests.faults import collection

    where = _manifest(manifest, jobs).absolute()  # jobs run elsewhere
    every = collection.load(where).jobs
    chosen = [job.on_backend(backend) for job in _chosen(every, only, subset)]
    if replay is not None:
        _without_witnesses(without)
        return _replay(chosen, where, backend, replay, parallel or 2, without, why, ablate, as_json)
    if why or ablate:
        raise DistdiagError("--why and --ablate judge tapes", "add --replay, or --replay FILE")
    if list_only:
        for j in chosen:
            print(f"{j.name:<20} {'faulty ' if j.faulty else 'healthy'} {j.nproc}  {j.diagnosis}")
        return int(ExitCode.OK)
    keep = None if keep is None else keep.absolute()
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise DistdiagError(f"{keep} is not empty", "name a new folder for --keep")
    todo = [j for _ in range(repeat) for j in chosen]
    if record is not None:
        todo = [job for job in todo if not _recorded(record, job, backend, where.parent)]
    environment = collection.backend_environment(where, backend) | _without_witnesses(without)
    if plain:
        return _plain(todo, where.parent, parallel or 1, environment, as_json)
    return _scorecard(todo, where, parallel or 1, keep, environment, as_json, record, backend or "gloo")


def _in_turn(todo: list[Job], parallel: int, one: Callable[[int, Job], _T], show: Callable[[_T], None]) -> list[_T]:
    """Run `one` for each job, `parallel` at a time, and return the results in the order of `todo`.

    `show` gets each result as soon as it is there.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from tests.faults import collection

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)  # else the jobs, which have their own sessions, would survive
    results: dict[int, _T] = {}
    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(one, i, job): i for i, job in enumerate(todo)}
        try:
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                show(results[futures[future]])
        except BaseException:
            collection.interrupted.set()  # running threads end their jobs
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return [results[i] for i in range(len(todo))]


def _plain(todo: list[Job], folder: Path, parallel: int, environment: dict[str, str], as_json: bool) -> int:
    import msgspec

    from tests.faults import plain_check

    def show(r: PlainResult) -> None:
        print(f"{'ok ' if not r.problems else 'BAD'} {r.name:<20} {r.outcome:<6} {r.seconds:6.1f} s", file=out)
        for p in r.problems:
            print(f"      {p}", file=out)
        out.flush()

    out = sys.stderr if as_json else sys.stdout
    results = _in_turn(todo, parallel, lambda _, job: plain_check.check(job, folder, environment), show)
    if as_json:
        print(msgspec.json.encode({"schema": "distdiag.bench/1", "plain": results}).decode())
    wrong = sum(bool(r.problems) for r in results)
    print(f"{len(results) - wrong} of {len(results)} jobs do what the manifest states", file=out)
    return int(ExitCode.FAILED if wrong else ExitCode.OK)


def _scorecard(
    todo: list[Job], manifest: Path, parallel: int, keep: Path | None, environment: dict[str, str], as_json: bool,
    record: Path | None = None, backend: str = "gloo",
) -> int:  # fmt: skip
    import msgspec

    from tests.faults import scorecard

    def one(i: int, job: Job) -> Score:
        place = None if keep is None else keep if names.count(job.name) == 1 else keep / f"{i:03d}"
        if record is None:
            return scorecard.run_job(job, manifest.parent, place, environment)
        return _record(job, manifest.parent, place, environment, record, backend)

    def show(s: Score) -> None:
        for text in _rows(s):
            print(text, file=out, flush=True)

    names = [j.name for j in todo]
    out = sys.stderr if as_json else sys.stdout
    print(f"{'':3} {'job':<18} {'found':<34} {'lines':>5} {'fault→':>7} {'launch→':>8}  {'wrong'}", file=out)
    results = _in_turn(todo, parallel, one, show)
    summary = summarise(results)
    if as_json:
        print(
            msgspec.json.encode(
                {"schema": "distdiag.bench/1", "manifest": str(manifest), "jobs": results, "summary": summary}
            ).decode()
        )
    for text in _summary_lines(summary):
        print(text, file=out)
    return int(ExitCode.OK if summary["all_right"] else ExitCode.FAILED)


def _rows(s: Score) -> list[str]:
    wrong = []
    if s.found is False:
        wrong.append(f"missed, expected {s.expected}")
    elif s.right_culprits is False or s.right_cause is False:
        wrong.append(f"expected {s.expected}")
    if s.problem:
        wrong.append(s.problem)
    wrong += [f"false: {f}" for f in s.false_findings]
    place = f"{s.lines_right}/{s.lines_expected}" if s.lines_expected else "–"
    after = f"{s.fault_to_finding_s:.1f} s" if s.fault_to_finding_s is not None else "–"
    launch = f"{s.launch_to_finding_s:.1f} s" if s.launch_to_finding_s is not None else "–"
    head = f"{'ok ' if s.right else 'BAD'} {s.name:<18} {s.got:<34} {place:>5} {after:>7} {launch:>8}  "
    return [head + (wrong[0] if wrong else ""), *(" " * len(head) + w for w in wrong[1:])]


def quantile(values: list[float], q: float) -> float | None:
    """Return the smallest value that at least a share `q` of `values` does not exceed; None if `values` is empty."""
    import math

    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def summarise(results: list[Score]) -> dict[str, int | float | bool | None]:
    """Return counts over all runs; `all_right` decides the exit code."""
    faulty = [s for s in results if s.faulty]
    healthy = [s for s in results if not s.faulty]
    expected, right = sum(s.lines_expected for s in faulty), sum(s.lines_right for s in faulty)
    proofs = [
        s.fault_to_finding_s
        for s in faulty
        if s.fault_to_finding_s is not None and s.got.startswith(("deadlock", "mismatch"))
    ]
    share = right / expected if expected else None
    return {
        "faulty": len(faulty),
        "found": sum(s.found is True for s in faulty),
        "right_cause": sum(s.found is True and s.right_cause is not False for s in faulty),
        "right_culprits": sum(s.right_culprits is True for s in faulty),
        "lines_expected": expected,
        "lines_right": right,
        "line_share": share,
        "faulty_with_false_findings": sum(bool(s.false_findings) for s in faulty),
        "healthy": len(healthy),
        "healthy_clean": sum(s.right for s in healthy),
        "deadlocks_timed": len(proofs),
        "deadlock_to_finding_p50_s": quantile(proofs, 0.5),
        "deadlock_to_finding_p95_s": quantile(proofs, 0.95),
        "problems": sum(s.problem is not None for s in results),
        "all_right": all(s.right for s in results) and (share is None or share >= LINES_WANTED),
    }


def _summary_lines(s: dict[str, int | float | bool | None]) -> list[str]:
    out = []
    if s["faulty"]:
        out.append(
            f"faulty   {s['faulty']}: found {s['found']}, right cause {s['right_cause']}, right ranks {s['right_culprits']},"
            f" lines {s['lines_right']} of {s['lines_expected']}, other false findings in {s['faulty_with_false_findings']}"
        )
    if s["healthy"]:
        out.append(f"healthy  {s['healthy']}: no finding on {s['healthy_clean']}")
    if s["deadlocks_timed"]:
        out.append(
            f"deadlocks and mismatches, fault to finding: median {s['deadlock_to_finding_p50_s']:.2f} s,"
            f" 95 % within {s['deadlock_to_finding_p95_s']:.2f} s (n = {s['deadlocks_timed']})"
        )
    if s["problems"]:
        out.append(f"{s['problems']} jobs did not run properly")
    out.append("all right" if s["all_right"] else "not all right")
    return out


def _recorded(folder: Path, job: Job, backend: str | None, jobs: Path) -> bool:
    """True if the folder has a tape of this job as it is now."""
    from tests.faults import record

    path = record.tape_path(folder, job, backend or "gloo")
    try:
        return record.read_tape(path).head.job_hash == record.job_hash(job, jobs)
    except DistdiagError:
        return False


def _record(job: Job, folder: Path, keep: Path | None, environment: dict[str, str], to: Path, backend: str) -> Score:
    """Run one job and keep its tape; in `wrong/` if its verdict was wrong, or that of a replay differs from it."""
    from distdiag.tapes import writer
    from tests.faults import record, scorecard
    from tests.faults.collection import interrupted

    made: list[tuple[Tape, bool]] = []

    def ended(run_dir: Path, work: Path) -> None:
        made.append(record.finish(job, folder, backend, run_dir, work))

    result = scorecard.run_job(job, folder, keep, environment | {writer.ON: str(64 << 20)}, ended)
    if not made or interrupted.is_set():
        return result
    ((tape, same),) = made
    if not same and result.problem is None:
        result.problem = "a replay of the tape has other findings than the live run"
    size = record.write(record.tape_path(to if result.right else to / "wrong", job, backend), tape)
    print(f"      {size / 1024:.0f} KiB, {len(tape.snapshots)} snapshots", file=sys.stderr)
    return result


def _replay(
    chosen: list[Job],
    manifest: Path,
    backend: str | None,
    where: Path,
    parallel: int,
    without: tuple[str, ...],
    why: bool,
    ablate: bool,
    as_json: bool,
) -> int:
    """Judge one tape, or those of a folder."""
    import msgspec

    from distdiag.tapes import tape
    from distdiag.terms.untrusted import visible
    from tests.faults import ablation, replay

    if where.is_file():
        verdict = tape.judge_file(where, every_poll=why)
        for text in (*replay.why(verdict), *map(str, verdict.answers)):
            print(visible(text))
        return int(ExitCode.OK)
    folder = manifest.parent / "tapes" if where == Path() else where
    paths = replay.tapes(folder, {job.name for job in chosen}, backend)
    if ablate:
        for text in ablation.report(paths, parallel):
            print(text)
        return int(ExitCode.OK)
    with replay.left_out(without):
        results = replay.replay_all(paths, manifest, parallel)
    out = sys.stderr if as_json else sys.stdout
    for result in results:
        for text in [result] if isinstance(result, str) else result.lines():
            print(text, file=out)
    judged = [r for r in results if not isinstance(r, str)]
    right = sum(r.right for r in judged)
    if as_json:
        print(msgspec.json.encode({"schema": "distdiag.bench/1", "tapes": judged}).decode())
    print(f"{right} of {len(results)} tapes have their verdict", file=out)
    return int(ExitCode.OK if right == len(results) else ExitCode.FAILED)
