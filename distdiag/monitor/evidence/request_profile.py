"""Ask ranks of this node for a profile of the same steps, and wait for their traces.

The request is a file next to each rank's page; the pulse finds it within a quarter of a second. All ranks begin at the same
step, a little ahead of the furthest rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from distdiag import files
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call
from distdiag.diagnosis.step_times import self_ms
from distdiag.errors import DistdiagError, ExitCode
from distdiag.monitor.evidence import ask
from distdiag.monitor.ranks.state import RankView
from distdiag.page import profile_files
from distdiag.page.layout import CALLS, LifeWord, Phase
from distdiag.page.profile_files import DONE, FAILED, MAX_NUMBER, RECORDING, SAVING, Answer, Request
from distdiag.terms.ranks import fold_ranks
from distdiag.terms.untrusted import MAX_RANKS

LEAD_S = 1.0  # between the request and its first step; the pulse beats four times a second
NODES_LEAD_S = 2.0  # the same, if other nodes are asked, too
POLL_S = 0.05
SAVE_S = 30.0  # added to the deadline for a trace that is being saved


class Asked(msgspec.Struct, array_like=True):
    """The profile of one rank, or why there is none; nodes send it as it is, and the limits hold for what arrives."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    host: Annotated[str, Meta(max_length=1000)]
    answer: Answer | None = None
    entries: list[ask.Entry] = []  # of its flight recorder, right after the profile
    messages: list[tuple[Call, int]] = []  # its newest sends and recvs, and the wall clock of each
    problem: Annotated[str, Meta(max_length=4000)] = ""  # why there is no trace
    in_time: bool = True

    def trace(self, run_dir: Path, number: int) -> Path:
        return profile_files.trace_path(run_dir, number, self.rank)


@dataclass(slots=True)
class Taken:
    """A profile of a run: its number, the steps asked for, and its ranks."""

    number: int
    first_step: int
    steps: int
    ranks: list[Asked]
    absent: str | None = None  # which ranks of the job cannot be asked from this node


def choose(views: Collection[RankView], wanted: Collection[int] | None, elsewhere: bool = False) -> list[RankView]:
    """Return the views of the wanted ranks, all if None.

    Raises:
        DistdiagError: a wanted rank is not alive on this node, and no other can be asked (`elsewhere`).
    """
    by_rank = {v.rank: v for v in views}
    missing = sorted(set(wanted or ()) - set(by_rank))
    if missing and not elsewhere:
        raise DistdiagError(
            f"{_named(missing)} not alive on this node",
            f"choose from {fold_ranks(sorted(by_rank))}; for ranks of another node run the command there",
        )
    return [v for q, v in sorted(by_rank.items()) if wanted is None or q in wanted]


def not_here(views: Collection[RankView], asked: Collection[int], host_of: Mapping[int, str]) -> str | None:
    """Return which ranks of the job were not asked and are not here, and on which hosts they are; None if there are none."""
    headers = [v.reader.header() for v in views]
    own = {v.text(h.host) for v, h in zip(views, headers, strict=True)}
    missing = sorted({*range(max(h.world_size for h in headers))} - {*asked} - {v.rank for v in views})
    return absent_text(missing, host_of, own) if missing else None


def absent_text(missing: Collection[int], host_of: Mapping[int, str], own_hosts: Collection[str | None]) -> str:
    """Return the note on ranks that are not profiled."""
    ended = [q for q in missing if host_of.get(q) in own_hosts]
    there: dict[str, list[int]] = {}
    for q in missing:
        if q not in ended:
            there.setdefault(host_of.get(q, ""), []).append(q)
    parts = [f"{_named(ended)} not alive on this node"] if ended else []
    for host, ranks in sorted(there.items()):
        on = f"host {host}" if host else "another node"
        parts.append(f"{_named(ranks)} on {on}: run `distdiag profile` there, too")
    return "not all ranks were profiled: " + "; ".join(parts)


def _named(ranks: list[int]) -> str:
    return f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def self_times(views: Collection[RankView]) -> dict[int, float]:
    """Return by rank the median self time of its newest steps in ms: step time minus waits for other ranks."""
    out = {}
    for v in views:
        known = [self_ms(s) for s in list(v.history.steps)[-20:]]
        if known:
            out[v.rank] = statistics.median(known)
    return out


def _step_s(views: Collection[RankView]) -> float | None:
    known = [s.step_ms for v in views for s in list(v.history.steps)[-20:]]
    return statistics.median(known) / 1e3 if known else None


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Hold the lock that allows one profile of a run at a time.

    Raises:
        DistdiagError: another reader holds it, or the run directory cannot be written.
    """
    folder = run_dir / "profile"
    try:
        lock = os.fdopen(files.open_own(run_dir, "profile/.lock", os.O_RDWR))
    except OSError as e:
        raise DistdiagError(
            f"cannot write {folder}: {e.strerror or e}", "the results are kept in the run directory: make it writable"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DistdiagError(
                "another profile of this run is being taken", "wait until it is done", kind="busy"
            ) from None
        yield


def _number(run_dir: Path) -> int:
    """Make the directory of a new profile and return its number."""
    known = [int(n) for n in files.names(run_dir, "profile") if n.isascii() and n.isdigit() and len(n) < 8]
    number = max(known, default=0) + 1
    if number > MAX_NUMBER:
        raise DistdiagError(f"{run_dir / 'profile'} holds {MAX_NUMBER} profiles", "remove those you do not need")
    try:
        with files.entered(run_dir, f"profile/{number}", make=True, own=True):
            pass
    except OSError as e:
        raise DistdiagError(
            f"cannot write {run_dir / 'profile'}: {e.strerror or e}", "make room, or make the run directory writable"
        ) from None
    return number


def first_step(views: Collection[RankView], lead_s: float = LEAD_S) -> int:
    """Return a step that the ranks begin in so many seconds, by the furthest of these ranks and their pace."""
    step_s = _step_s(views)
    lead = 2 + (math.ceil(lead_s / max(step_s, 1e-4)) if step_s else 1)
    return max(v.reader.header().step for v in views) + min(lead, 10_000)


def take(run_dir: Path, views: Collection[RankView], first: int, steps: int, timeout_s: float) -> Taken:
    """Ask these ranks, and return when each has saved its trace, failed, or not recorded its last step in time.

    Raises:
        DistdiagError: another profile is being taken, or the run directory cannot be written.
    """
    with _alone(run_dir):
        taken = Taken(_number(run_dir), first, steps, [])
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        request = Request(taken.number, taken.first_step, steps, deadline_ns)
        for v in views:
            asked = Asked(v.rank, v.text(v.reader.header().host) or "")
            taken.ranks.append(asked)
            try:
                profile_files.write(profile_files.request_path(v.reader.path.parent, v.rank), request)
            except OSError as e:
                asked.problem = f"it cannot be asked: {e.strerror or e}"
        try:
            _wait(taken, {v.rank: v for v in views}, deadline_ns)
        finally:
            for v in views:  # withdraw the requests
                with contextlib.suppress(OSError):
                    profile_files.request_path(v.reader.path.parent, v.rank).unlink(missing_ok=True)
    return taken


def _wait(taken: Taken, views: dict[int, RankView], deadline_ns: int) -> None:
    waited = [a for a in taken.ranks if not a.problem]
    while waited:
        over = time.monotonic_ns() > deadline_ns
        for a in list(waited):
            if _settled(a, views[a.rank], taken, over, deadline_ns):
                waited.remove(a)
        if waited:
            time.sleep(POLL_S)


def _settled(a: Asked, v: RankView, taken: Taken, over: bool, deadline_ns: int) -> bool:
    """Read a rank's answer; True if nothing more will come from it."""
    pages = v.reader.path.parent
    alive = v.reader.is_mapped()
    answer = profile_files.read_answer(profile_files.answer_path(pages, a.rank))
    if answer is not None and answer.number == taken.number:
        a.answer = answer
        if answer.state == FAILED:
            a.problem = answer.detail or "it failed"
            return True
        if answer.state in (SAVING, DONE) and not a.messages:
            a.messages = _messages(v)
        if answer.state == DONE:
            a.entries = _flight_entries(v)
            return True
    if not alive:
        a.problem = "its process ended meanwhile"
        return True
    if v.reader.header().life in (LifeWord.EXITING, LifeWord.RAISED) and over:
        a.problem = "its script ended meanwhile"
        return True
    saving = a.answer is not None and a.answer.state == SAVING
    if not over or (saving and time.monotonic_ns() < deadline_ns + SAVE_S * 1e9):
        return False
    a.in_time = False
    a.problem = _why_late(a, v, taken)
    return True


def _why_late(a: Asked, v: RankView, taken: Taken) -> str:
    h = v.reader.header()
    phase = Phase(h.phase).name.lower() if h.phase in list(Phase) else "?"
    at = f"it is in step {h.step + 1} ({phase})"
    if a.answer is None:
        silent_s = (time.monotonic_ns() - h.heartbeat_ns) / 1e9
        why = f" (no thread of its Python has run for {silent_s:.0f} s)" if silent_s > 2 else ""
        return f"it did not take the request{why}: {at}"
    if a.answer.state == SAVING:
        return "its trace is still being saved"
    if a.answer.state == RECORDING:
        return f"it did not finish step {taken.first_step + taken.steps - 1} in time: {at}"
    return f"it did not reach step {taken.first_step} in time: {at}"


def _flight_entries(v: RankView) -> list[ask.Entry]:
    """Return the newest collectives of the rank's flight recorder; empty if the witness does not answer."""
    path = v.text(v.reader.header().witness)
    try:
        record = ask.flight_record(path, recorders=ask.Recorders.of(v.decoder.facts)) if path else None
    except Exception:  # without it, only the collectives' numbers are missing
        return []
    return list(record.entries.values()) if record is not None else []


def _messages(v: RankView) -> list[tuple[Call, int]]:
    """Return the sends and recvs in the rank's page, each with the wall clock of its call."""
    try:
        view = RankView(v.reader.path, v.decoder.start_ns)
        view.history.calls = deque(maxlen=CALLS)
        view.refresh(0.0)
        wall_ns = time.time_ns() - time.monotonic_ns() + v.decoder.start_ns
        return [(c, wall_ns + int(c.entered_s * 1e9)) for c in view.history.calls if c.p2p and c.entered_s is not None]
    except Exception:  # a damaged page; only the messages' other ends are missing
        return []


def exit_code(taken: Taken) -> ExitCode:
    """Return TIMEOUT if a rank was late, NO_DATA if there is no trace at all."""
    if any(not a.in_time for a in taken.ranks):
        return ExitCode.TIMEOUT
    return ExitCode.NO_DATA if all(a.problem for a in taken.ranks) else ExitCode.OK
