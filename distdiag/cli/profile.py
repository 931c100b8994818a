"""`distdiag profile`: profile the running job."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distdiag.cli.options import ascii_option
from distdiag.diagnosis.model.findings import State
from distdiag.errors import DistdiagError, ExitCode
from distdiag.streams import say, say_json

if TYPE_CHECKING:
    from distdiag.monitor.evidence.request_profile import Asked, Taken
    from distdiag.monitor.ranks.state import RankView
    from distdiag.traces.analyse import Issued, Recorded
    from distdiag.traces.model import Profile
    from distdiag.traces.read import Trace


def _ranks(text: str | None) -> list[int] | None:
    from distdiag.terms.ranks import unfold_ranks

    if text is None:
        return None
    try:
        found = unfold_ranks(text.replace(" ", ""))
    except ValueError:
        found = ()
    if not found:
        raise DistdiagError(f"--ranks {text}: not a list of ranks", "give them like --ranks 0,3 or --ranks 0-7")
    return sorted(set(found))


def _culprit(run_dir: Path, views: list[RankView]) -> tuple[int, int, str]:
    """Return the straggler, a peer with the median self time, and how the straggler was chosen."""
    from distdiag.monitor.cluster.questions import asked_at
    from distdiag.monitor.evidence.request_profile import self_times
    from distdiag.store.opening import RunUnreadable
    from distdiag.store.reader import open_run

    times, found = self_times(views), []
    try:
        with open_run(run_dir) as run:
            found = [f for f in run.findings() if f.kind == "straggler" and f.cleared_s is None and f.culprits]
            if asked_at(run_dir) is not None and (frame := run.latest_frame()) is not None:
                times = {r.rank: r.self_ms for r in frame.ranks if r.self_ms is not None} | times
    except RunUnreadable:
        pass
    if len(times) < 2:
        text = "fewer than two ranks on this node have recorded a step"
        raise DistdiagError(text, "name the ranks: --ranks 0,1", ExitCode.NO_DATA)
    slowest, reason = max(times, key=lambda q: times[q]), ""
    if found and found[0].culprits[0] in times:
        slowest, reason = found[0].culprits[0], "finding: straggler"
    others = sorted((q for q in times if q != slowest), key=lambda q: times[q])
    peer = others[(len(others) - 1) // 2]
    return slowest, peer, reason or f"most self time: {times[slowest]:.1f} ms a step, rank {peer} {times[peer]:.1f} ms"


@click.command()
@click.argument("run", required=False)
@click.option("--ranks", metavar="LIST", help="Ranks to profile, e.g. 0,3 or 0-7 (default: all).")
@click.option("--steps", default=3, show_default=True, metavar="N", help="Steps to record, at most 50.")
@click.option("--culprit", is_flag=True, help="Profile the straggler and one peer; show the differences.")
@click.option(
    "--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS", help="Give up after this long."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object (distdiag.profile/1) instead of tables.")
@ascii_option
def command(run: str | None, ranks: str | None, steps: int, culprit: bool, timeout_s: float, as_json: bool) -> int:
    """Profile the running job for a few steps. The job is not changed.

    torch.profiler starts in each rank at the end of the same step. Results in RUN/profile/N: trace.json.gz of all ranks for
    ui.perfetto.dev, rank_R.json (Kineto), profile.json. The script's lines are sampled 100 times a second. On node 0, also
    the ranks of nodes that do not see RUN.
    RUN: default reports/latest.
    """
    from distdiag.monitor import nodes
    from distdiag.monitor.cluster.questions import asked_at
    from distdiag.monitor.evidence import dump, profile_of_nodes, request_profile
    from distdiag.page.profile_files import MAX_STEPS
    from distdiag.store import rundir
    from distdiag.store.opening import RunUnreadable
    from distdiag.store.reader import open_run

    if not 1 <= steps <= MAX_STEPS:
        raise DistdiagError(f"--steps {steps} is not between 1 and {MAX_STEPS}", "for example --steps 3")
    if not 0 < timeout_s <= 3000:
        text = f"--timeout {timeout_s:g} is not between 0 and 3000"
        raise DistdiagError(text, "give the time in seconds, for example --timeout 60")
    if culprit and ranks is not None:
        raise DistdiagError("--culprit chooses the ranks itself", "leave out --ranks or --culprit")
    wanted = _ranks(ranks)
    run_dir = rundir.resolve(run)
    views = dump.living(run_dir)
    with suppress(RunUnreadable), open_run(run_dir) as opened:
        if opened.state()[0] == State.DEADLOCKED:  # no step can come that would be profiled
            hint = f"distdiag diagnose {shlex.quote(str(run_dir))}"
            raise DistdiagError("the job is deadlocked", hint, ExitCode.NO_DATA, "no_profile")
    chosen = None
    if culprit:
        chosen = _culprit(run_dir, views)
        wanted = sorted(chosen[:2])
    taken = profile_of_nodes.take(
        run_dir, views, wanted, steps, timeout_s, lambda line: say(f"recording {line}", err=True)
    )
    compared_all = culprit and asked_at(run_dir) is not None
    if ranks is None and taken.absent is None and not compared_all:
        taken.absent = request_profile.not_here(views, {a.rank for a in taken.ranks}, nodes.hosts(run_dir))
    return _show(run_dir, taken, chosen, as_json, timeout_s)


def _show(run_dir: Path, taken: Taken, chosen: tuple[int, int, str] | None, as_json: bool, timeout_s: float) -> int:
    from distdiag.diagnosis.text.finding import printable
    from distdiag.monitor.evidence import request_profile
    from distdiag.traces import text

    found = analysed(run_dir, taken, chosen)
    code = request_profile.exit_code(taken)
    if code == ExitCode.OK and not found.ranks:
        code = ExitCode.NO_DATA
    if not found.ranks:
        first = found.missing[0]
        raise DistdiagError(
            f"no profile: rank {first.rank}: {printable(first.reason)}",
            f"`distdiag dump {run_dir}` shows where the ranks are"
            if code == ExitCode.TIMEOUT
            else f"`distdiag diagnose {run_dir}` prints the verdict on the job",
            code,
            "timeout" if code == ExitCode.TIMEOUT else "no_profile",
        )
    if as_json:
        say_json(found)
    else:
        for line in text.lines(found):
            say(printable(line))
    if found.trace:
        say(f"saved: {found.trace} (open it in ui.perfetto.dev)", err=True)
    if code == ExitCode.TIMEOUT:
        say(f"distdiag: not all ranks finished within {timeout_s:g} s", err=True)
    return int(code)


def analysed(run_dir: Path, taken: Taken, chosen: tuple[int, int, str] | None) -> Profile:
    """Analyse the saved traces; write the result and the merged trace next to them."""
    import msgspec

    from distdiag.page import profile_files
    from distdiag.traces import merge
    from distdiag.traces import saved as saved_profiles
    from distdiag.traces.model import Missing
    from distdiag.traces.profile import profile_of
    from distdiag.traces.read import BadTrace, read

    recorded: dict[int, Recorded] = {}
    missing = [Missing(rank=a.rank, reason=a.problem) for a in taken.ranks if a.problem]
    for a in taken.ranks:
        if a.problem or a.answer is None:
            continue
        try:
            trace: Trace = read(a.trace(run_dir, taken.number))
        except (BadTrace, OSError) as e:
            missing.append(Missing(rank=a.rank, reason=f"its trace {e}" if isinstance(e, BadTrace) else str(e)))
            continue
        recorded[a.rank] = _recorded(a, trace)
    one_host = len({a.host for a in taken.ranks}) == 1
    found, collectives, offsets = profile_of(str(run_dir.absolute()), taken.number, recorded, missing, chosen, one_host)
    folder = profile_files.results(run_dir, taken.number)
    notes = [*found.notes, *([taken.absent] if taken.absent else [])]
    saved = None
    if recorded:
        try:
            names = {a.rank: f"rank {a.rank}" + (f" ({a.host})" if a.host else "") for a in taken.ranks}
            files = {a.rank: a.trace(run_dir, taken.number) for a in taken.ranks if a.rank in recorded}
            merge.write(folder / "trace.json.gz", files, offsets, names, collectives)
            saved = str((folder / "trace.json.gz").absolute())
        except OSError as e:
            notes.append(f"the merged trace was not saved: {e.strerror or e}")
    found = msgspec.structs.replace(found, trace=saved, notes=notes)
    try:
        saved_profiles.write(folder, found)
    except OSError as e:
        found = msgspec.structs.replace(found, notes=[*notes, f"profile.json was not saved: {e.strerror or e}"])
    return found


def _recorded(a: Asked, trace: Trace) -> Recorded:
    from distdiag.traces.analyse import Issued, Recorded

    answer = a.answer
    assert answer is not None
    return Recorded(
        trace=trace,
        boundaries=[(step, ns) for step, ns in answer.boundaries],
        entries=[Issued(e.op, e.group, e.seq, e.created_ns, e.bytes) for e in a.entries],
        messages=_messages(a),
        lines=[(file, line, function, n) for file, line, function, n in answer.lines],
        samples=answer.samples,
        measured={
            key: getattr(answer, key)
            for key in ("start_ms", "stop_ms", "save_ms", "rss_peak_bytes", "device_peak_bytes")
        },
    )


def _messages(a: Asked) -> list[Issued]:
    from distdiag.traces.analyse import Issued
    from distdiag.traces.read import message_ends

    out = []
    for c, entered_ns in a.messages:
        if c.peer is not None and c.nth:
            sends = c.op.endswith("send")
            ends = message_ends(*((a.rank, c.peer) if sends else (c.peer, a.rank)), c.tag)
            out.append(Issued("send" if sends else "recv", c.group, c.nth, entered_ns, c.bytes, ends))
    return out
