"""Judge a job that was killed together with its monitor, from the pages and the database as they were left.

It runs in a reader, and changes nothing. The pages are untrusted, as always: one that cannot be read costs
only its rank. The rules are those of the running job. Each page is the rank's state at its last sign of life,
so a wait is proved only if all ranks in it were alive in it for long enough, by the times in their pages.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from distdiag import files, source_files
from distdiag.diagnosis.endings import ending_kind
from distdiag.diagnosis.engine import Diagnosis, Record
from distdiag.diagnosis.history import SAME_S
from distdiag.diagnosis.model.findings import KILLED, CollectiveRef, LastSeen, Report, State, rank_list
from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Snapshot
from distdiag.diagnosis.text.phrases import reference, shortened
from distdiag.errors import described
from distdiag.monitor import deaths
from distdiag.monitor.fields import shared
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.snapshot import of_pages
from distdiag.page import directories
from distdiag.page.reader import PageError
from distdiag.store.liveness import SILENT_S, Monitor, number
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import Run, open_run
from distdiag.terms.units import rough_duration

BEATS_S = 1.5  # a rank that was silent for longer, while others beat, had ended earlier, was stopped or held the GIL
AHEAD_S = 60.0  # no page was written later than this from now


def autopsy(run_dir: Path) -> Report | None:
    """Return the verdict on a job of which nothing lives and whose run was never closed; None for any other run."""
    left = directories.abandoned(run_dir)
    if left is None:
        return None
    try:
        with open_run(run_dir) as run:
            return _report(run_dir, run, left)
    except RunUnreadable:
        return _report(run_dir, None, left) if left and all(map(directories.in_memory, left)) else None


def _report(run_dir: Path, run: Run | None, left: Sequence[Path]) -> Report | None:
    meta = {} if run is None else run.meta
    state = None if run is None else run.monitor(meta)
    if state is Monitor.ENDED or (not left and state is not Monitor.GONE):
        return None
    base = Report(run=str(run_dir)) if run is None else run.report()
    views, notes = _views(left, number(meta.get("started_unix_s")))
    if not views:
        return None if run is None else _without_pages(run, base, notes)
    seen = {q: _last_sign_s(v) for q, v in views.items()}
    states = _states(views, seen)
    if states is None:
        return None
    snapshot = of_pages(max(seen.values()), views, states)
    diagnosis = _judged(snapshot, base, _proof_times(views, snapshot))
    killed = sorted(q for q, r in states.items() if r.life not in DEAD)
    if killed:
        notes = [*_order(killed, seen), *_cut_off(states), *deaths.killer(meta), *notes]
    if run is not None:
        notes += deaths.who_grew(run, max(seen.values()))
    world = base.world_size or snapshot.world_size
    if len(views) < world:
        notes.append(f"{world - len(views):,} of {world:,} ranks have left no page on this host")
    age_s = max(0.0, time.time() - _wall_s(min(views.values(), key=lambda v: v.first_header.started_mono_ns)))
    known = {f.key for f in diagnosis.findings}
    return msgspec.structs.replace(
        base,
        state=State.FAILED if killed else diagnosis.state,
        state_text=_state_text(killed, deaths.oom_kills(meta)) if killed else diagnosis.state_text,
        world_size=world,
        ranks_seen=max(base.ranks_seen, len(views)),
        findings=(*diagnosis.findings, *(f for f in base.findings if f.key not in known)),
        notes=tuple(notes),
        checks=base.checks or diagnosis.checks.all,
        unjudged=None if len(views) >= world else f"{len(views):,} of {world:,} ranks have left a page here",
        age_s=base.age_s if base.age_s is not None else age_s,
        ended_ago_s=max(0.0, (base.age_s if base.age_s is not None else age_s) - max(seen.values())),
        last_seen=tuple(_last_seen(r, views[q], seen[q]) for q, r in sorted(states.items())),
    )


# -- the pages ------------------------------------------------------------------------------------------------


def _views(left: Sequence[Path], started_unix_s: float | None) -> tuple[dict[int, RankView], list[str]]:
    """Return the ranks' views with times since the run began, and a note for each page that cannot be read."""
    views: dict[int, RankView] = {}
    notes = []
    for path in (d / name for d in left for name in sorted(os.listdir(d)) if name.endswith(".page")):
        try:
            view = RankView(path, 0)
            views[view.rank] = view
        except Exception as e:  # as in the monitor: whatever a damaged page causes costs only its rank
            notes.append(_unreadable(path, e))
    if not views:
        return {}, notes
    # one rank's page is time zero of the run, on each host; clocks of hosts are compared by their wall clocks only
    zero_s = started_unix_s if started_unix_s is not None else min(map(_wall_s, views.values()))
    by_host: dict[str, RankView] = {}
    for v in views.values():
        best = by_host.setdefault(v.text(v.first_header.host), v)
        if abs(_wall_s(v) - zero_s) < abs(_wall_s(best) - zero_s):
            by_host[v.text(v.first_header.host)] = v
    for q, v in list(views.items()):
        best = by_host[v.text(v.first_header.host)].first_header
        v.decoder.start_ns = best.started_mono_ns - best.started_wall_ns + int(zero_s * 1e9)
        try:
            v.refresh(0.0)
            v.history.forget_progress()
            v.refresh(seen_s := _last_sign_s(v))
            now_s = max(time.time() - zero_s, v.s(time.monotonic_ns()) or 0.0)  # the wall clock may have been set back
            if not -AHEAD_S <= seen_s <= now_s + AHEAD_S:
                raise PageError(f"{v.reader.path.name} is damaged: its times are impossible")
            v.state(seen_s)
            v.decoder.groups()
        except Exception as e:
            notes.append(_unreadable(v.reader.path, e))
            del views[q]
    return views, notes


def _unreadable(path: Path, error: Exception) -> str:
    return f"the page of a rank cannot be read: {error if isinstance(error, PageError) else f'{path.name}: {described(error)}'}"


def _wall_s(v: RankView) -> float:
    """Return when this rank attached, as Unix time."""
    return v.first_header.started_wall_ns / 1e9


def _last_sign_s(v: RankView) -> float:
    """Return when this rank last wrote into its page, by its pulse or its main thread."""
    h = v.header
    return max(v.s(h.heartbeat_ns) or 0.0, _changed_s(v))


def _changed_s(v: RankView) -> float:
    """Return when the main thread last changed its phase, wait or calls."""
    h = v.header
    newest = v.history.calls[-1] if v.history.calls else None
    times = [v.s(h.started_mono_ns), v.s(h.phase_since_ns), v.s(h.blocked_since_ns), v.s(h.exception_ns)]
    if newest is not None:
        times += [newest.entered_s, newest.completed_s, newest.left_s]
    return max(t for t in times if t is not None)


def _states(views: dict[int, RankView], seen: dict[int, float]) -> dict[int, RankState] | None:
    """Return the ranks' states at the end; None if one on another host may live.

    A rank that fell silent before the others did is not part of any proof: whether it had ended is not known.
    """
    ended_s, here = max(seen.values()), socket.gethostname()
    states = {}
    for q, v in views.items():
        state = v.state(seen[q])
        zero_unix_s = _wall_s(v) - (v.s(v.first_header.started_mono_ns) or 0.0)
        if state.host != here and time.time() - zero_unix_s - seen[q] < SILENT_S:
            return None  # its lock may not be visible from here
        if state.life not in DEAD and ended_s - seen[q] > BEATS_S:
            state = msgspec.structs.replace(
                state, life=Life.SILENT, activity="silent", blocked=None, steps=(), calls=(), queued=(),
                heartbeat_age_s=ended_s - seen[q],
            )  # fmt: skip
        states[q] = state
    return dict(sorted(states.items()))


def _proof_times(views: dict[int, RankView], s: Snapshot) -> tuple[float, ...]:
    """Return the times of the snapshots to judge: two if all waits lasted long enough for a proof, else one.

    From the last change of any waiting rank until the first of their last beats, every one of them was alive
    in its wait.
    """
    waiting = [views[q] for q, r in s.ranks.items() if r.blocked is not None]
    one_clock = len({r.host for r in s.ranks.values()}) == 1
    if waiting and one_clock:
        first_s = max(map(_changed_s, waiting))
        last_s = min(min(v.s(v.header.heartbeat_ns) or 0.0, v.s(v.header.counted_ns) or 0.0) for v in waiting)
        if last_s - first_s >= SAME_S:
            return (first_s, last_s)
    return (s.t_s,)


# -- the verdict ----------------------------------------------------------------------------------------------


def _judged(s: Snapshot, base: Report, times: Sequence[float]) -> Diagnosis:
    diagnosis = Diagnosis(source=source_files.text)
    for f in base.findings:
        if f.cleared_s is None:
            diagnosis.records[f.key] = Record(f, reported=True)
    for t_s in times:
        diagnosis.update(msgspec.structs.replace(s, t_s=t_s), final=t_s == times[-1])
    return diagnosis


def _state_text(killed: Sequence[int], kills: int | None) -> str:
    return f"{rank_list(killed)} {KILLED}; {deaths.killed_text(kills) if kills else 'by whom is not known'}"


def _order(killed: Sequence[int], seen: dict[int, float]) -> Iterator[str]:
    last_s = max(seen[q] for q in killed)
    early = [q for q in killed if last_s - seen[q] > BEATS_S]
    together = [q for q in killed if q not in early]
    yield f"{rank_list(together)} ended without a last word, {rough_duration(last_s)} after the start"
    for q in early:
        yield (
            f"rank {q:,} was last heard of {rough_duration(last_s - seen[q])} before: "
            "it had ended, was stopped, or held the GIL"
        )


def _cut_off(states: dict[int, RankState]) -> Iterator[str]:
    """Yield which ranks did not crash by themselves: they had the error that follows when another rank is killed."""
    if ranks := [q for q, r in states.items() if ending_kind(r) == "echo"]:
        error = shortened(states[ranks[0]].exception or "", 120)
        yield f"{rank_list(ranks)} failed because a rank that {'it' if len(ranks) == 1 else 'they'} needed was gone: {error}"


def _doing(r: RankState) -> str | None:
    """Return the rank's activity; for user code its phase, where that is more exact."""
    if ending_kind(r) == "echo":
        return "cut_off"
    if r.life in (Life.RUNNING, Life.STARTING) and r.activity == "user_code":
        return None if r.phase == "init" else r.phase
    return r.activity


def _last_seen(r: RankState, v: RankView, seen_s: float) -> LastSeen:
    calls = v.history.calls
    made = (c for c in reversed(calls) if c.op not in ("init_process_group", "new_group"))
    last: Call | None = r.blocked or next(made, None)
    known = reference(last) if last is not None else None
    counted = r.enqueued.get(last.group, 0) if last is not None and r.blocked is None else 0
    if last is not None and counted > (last.seq or counted):
        known = CollectiveRef("", last.group, counted)  # made in C++, as DDP's: no call, but the group counts it
    return LastSeen(
        rank=r.rank, t_s=seen_s, **shared(LastSeen, r.current_site), state=_doing(r), collective=known,
        waits=r.blocked is not None, since_s=last.entered_s if last is not None else None,
    )  # fmt: skip


def _pages_elsewhere(run_dir: Path) -> str:
    """Return why the pages of a run cannot be read here."""
    if (owner := files.owner_of_other(run_dir)) is not None:
        return f"only {owner} may read the pages of its ranks"
    record = directories.node_record(run_dir, 0).name
    try:
        host = files.text(run_dir, record, directories.RECORD_BYTES).partition(":")[0]
    except OSError:
        host = ""
    if host and host != socket.gethostname():
        return f"the pages of its ranks were on {host}, and can be read there only"
    return "the pages of its ranks are gone, too (a reboot, or the /dev/shm of a container that has ended)"


def _without_pages(run: Run, base: Report, notes: list[str]) -> Report:
    """Return the report of a run whose pages are gone: what its database knows, and up to when."""
    rows = run.ranks()
    known_s = max((r.t_s for r in rows if r.t_s is not None), default=None)
    until = "" if known_s is None else f"; the database knows the ranks until {rough_duration(known_s)} after the start"
    seen = [
        LastSeen(
            rank=r.rank, t_s=None if r.t_s is None else r.t_s - (r.heartbeat_age_s or 0.0),
            file=r.file, line=r.line, function=r.function, state=r.phase if r.life in ("running", "starting") else r.life,
            collective=CollectiveRef(r.waiting_op, r.waiting_group or "", r.waiting_seq, r.waiting_bytes) if r.waiting_op else None,
            waits=r.waiting_op is not None,
            since_s=None if r.t_s is None or r.waiting_age_s is None else r.t_s - r.waiting_age_s,
        )
        for r in rows
    ]  # fmt: skip
    found = [_pages_elsewhere(run.path) + until, *notes, *deaths.killer(run.meta), *deaths.who_grew(run)]
    return msgspec.structs.replace(base, notes=(*base.notes, *found), last_seen=tuple(seen))
