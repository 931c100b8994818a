"""Ranks that ended abnormally: which end is the cause, and which are echoes (consequences) of it.

When one rank dies, the others' collectives fail with "connection closed", a timeout, or the launcher's SIGTERM. The
cause is the first end in time that is none of these. If every end is an echo, the cause is a rank that ended normally
while the others continued, or one that was late beyond the group's timeout.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from distdiag.diagnosis.comparison import minority
from distdiag.diagnosis.consequences import is_echo, is_timeout
from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Snapshot
from distdiag.diagnosis.waits import abort
from distdiag.diagnosis.waits.incidents import Incident
from distdiag.diagnosis.waits.wait import last_wait

Late = tuple[tuple[int, ...], tuple[int, ...]]  # (late ranks, ranks that waited for them)

_CONNECT = re.compile(r"connectFullMesh|timed out connecting|failed to connect|connection refused", re.IGNORECASE)
_REFUSED_ADDRESS = re.compile(r"connection refused", re.IGNORECASE)
# messages of torch and of Lightning
UNUSED = re.compile(r"finished reduction in the prior iteration|parameters that were not used in producing the loss")
MODEL = re.compile(
    r"expects same model across all ranks|params? .*inconsistent|verify_params|appears not to match", re.I
)
SPLITS = re.compile(r"alltoall\w*\.cc.*LengthPerRank")  # gloo's check of what a rank sends to itself
MISMATCH = re.compile(r"mismatch between collectives|collective mismatch|Detected mismatch", re.IGNORECASE)
STORE_WAIT = re.compile(r"DistStoreError: wait timeout after [0-9]{1,12} ?ms, keys: ([^,\n]{1,400})")
REFUSED = ("unused", "model", "mismatch")  # by DDP or the backend
ECHOES = ("echo", "timeout", "outside")  # ends that another rank's end caused
WATCHDOG_S = 5.0  # seconds that an operation was open on the device before the abort, at least: no timeout is shorter
UNDER_WAY_S = 5.0  # seconds after an abort in which ranks that still run are waited for
_OUTSIDE = {signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT}


def ending_kind(r: RankState) -> str:
    """Return cause, echo, timeout, unused, model, mismatch, outside (a launcher's or a person's signal); '' while alive."""
    if r.life == Life.KILLED:
        if r.signal in _OUTSIDE:
            return "outside"
        if r.signal != signals.SIGABRT:
            return "cause"
        return "timeout" if _by_watchdog(r) else "mismatch"
    if r.life != Life.CRASHED:
        return ""
    text = r.exception or ""
    if text.startswith(("KeyboardInterrupt", "SignalException")):
        return "outside"
    for kind, pattern in (("unused", UNUSED), ("model", MODEL), ("mismatch", MISMATCH)):
        if pattern.search(text):
            return kind
    if is_timeout(text):
        return "timeout"
    return "echo" if is_echo(text) else "cause"


def _by_watchdog(r: RankState) -> bool:
    """True if the watchdog of a device backend aborted this rank: an operation of its device ran into its timeout."""
    if r.wait_measured or not r.ended_waiting or not r.queued or r.ended_s is None:
        return False
    since_s = r.queued[0].entered_s if r.queued[0].entered_s is not None else r.activity_since_s
    return since_s is not None and r.ended_s - since_s >= WATCHDOG_S


def ends(s: Snapshot) -> dict[int, str]:
    """Return the kind of every abnormal end. A rank killed after another had failed was killed by launcher cleanup.

    A rank that ended at rest, while no other waits or failed, is none: its launcher ends idle workers when the work is done.
    """
    kinds = {r.rank: k for r in s.ranks.values() if (k := ending_kind(r))}
    hurt = any(r.blocked or r.ended_waiting or (r.rank in kinds and not r.ended_at_rest) for r in s.ranks.values())
    if not hurt:
        return {}

    def swept(rank: int) -> bool:
        return any(_outlived(s, s.ranks[rank], s.ranks[o], k) for o, k in kinds.items() if o != rank)

    stopped = [s.ranks[q] for q, k in kinds.items() if k == "outside"]
    return {
        q: "outside" if follows_stop(s.ranks[q], stopped) or (k == "cause" and (escalated(s, q) or swept(q))) else k
        for q, k in kinds.items()
    }


def escalated(s: Snapshot, rank: int) -> bool:
    """True if this SIGKILL came after the launcher itself had got a signal: it ends what does not end by that one."""
    r = s.ranks[rank]
    return s.stopped_by is not None and r.life == Life.KILLED and r.signal in (None, signals.SIGKILL)


def follows_stop(r: RankState, stopped: Iterable[RankState]) -> bool:
    """True if a rank lost a connection after a signal from outside had ended one of these: its own signal was still to come."""
    if ending_kind(r) != "echo" or r.ended_s is None:
        return False
    return any(x.ended_s is not None and x.ended_s < r.ended_s for x in stopped)


def _outlived(s: Snapshot, killed: RankState, failed: RankState, kind: str) -> bool:
    """True if this SIGKILL came after `failed` crashed or its watchdog aborted it: launcher cleanup, not the cause.

    If the launcher reaped the rank at once, its SIGTERM shows as no signal. The last heartbeat distinguishes a failure caused by a
    lost peer from a later one, since an end is noticed late.
    """
    if killed.life != Life.KILLED or killed.signal not in (None, signals.SIGKILL):
        return False
    if failed.ended_s is None or killed.ended_s is None or (failed.life != Life.CRASHED and kind != "timeout"):
        return False
    if kind == "echo":
        age_s = killed.heartbeat_age_s
        return age_s is not None and s.t_s - age_s > failed.ended_s
    return killed.ended_s > failed.ended_s


class End(StrEnum):
    """What the abnormal ends of a job have in common."""

    NONE = "none"  # nothing known yet
    LOST = "lost"  # ranks crashed or were killed, and nothing in the job explains it
    MODEL = "model"  # DDP refused to wrap modules that differ between ranks
    ABORTED = "aborted"  # the backend aborted ranks whose calls have different sizes
    FINISHED = "finished"  # a rank ended normally while the others continued
    TIMEOUT = "timeout"  # a collective ran into its timeout although the late rank was alive
    ECHOES = "echoes"  # every rank failed because of another; the first is not known
    UNCONNECTED = "unconnected"  # ranks could not connect to each other at the start
    OUT_OF_BATCHES = "out_of_batches"  # a rank ran out of batches and continued with what follows the loop


@dataclass(frozen=True, slots=True)
class Cascade:
    """The abnormal ends of a job as one incident."""

    end: End
    ranks: tuple[int, ...] = ()  # culprits; none for a tie
    others: tuple[int, ...] = ()  # ranks that ended, or failed, because of them
    incident: Incident | None = None  # of ABORTED: what `culprit` judges; None if two threads of a rank mix


NO_CASCADE = Cascade(End.NONE)


def cascade(snapshot: Snapshot, kinds: dict[int, str], late: Late | None = None) -> Cascade:
    """Return what the abnormal ends have in common.

    Args:
        kinds: `ends(snapshot)`.
        late: Who was late, as last seen before the first end; None: not seen.
    """
    found = _known(snapshot, kinds, late)
    if found is not NO_CASCADE or not kinds or any(state.life not in DEAD for state in snapshot.ranks.values()):
        return found
    # every rank is gone, and the cause is not known; nothing if the job was ended from outside
    if refused := [snapshot.ranks[q] for q, k in kinds.items() if k in REFUSED]:
        return _lost(snapshot, refused)
    echoes = _of(kinds, "echo", "timeout")
    return Cascade(End.ECHOES, (), echoes) if echoes else NO_CASCADE


def _of(kinds: dict[int, str], *names: str) -> tuple[int, ...]:
    return tuple(sorted(q for q, k in kinds.items() if k in names))


def _known(snapshot: Snapshot, kinds: dict[int, str], late: Late | None) -> Cascade:
    causes = [snapshot.ranks[q] for q, k in kinds.items() if k == "cause"]
    if not kinds or killed_together(snapshot, causes):
        return NO_CASCADE
    if causes:
        return _lost(snapshot, causes)
    if _of(kinds, *REFUSED):
        return _refused(snapshot, kinds)
    echoes = _of(kinds, "echo", "timeout")
    finished = tuple(sorted(q for q, r in snapshot.ranks.items() if r.life == Life.FINISHED and gave_up(r) is None))
    if finished and echoes:
        return Cascade(End.FINISHED, finished, echoes)
    return _timeout(snapshot, kinds, late) if "timeout" in kinds.values() else NO_CASCADE


def gave_up(state: RankState) -> Call | None:
    """Return the last collective of a rank that ended normally, if it raised there because another rank was gone; the script caught that."""
    call = state.calls[-1] if state.calls else None
    lost = state.life == Life.FINISHED and not state.exit_code and is_echo(state.caught or "")
    return call if lost and call is not None and call.failed and call.seq is not None else None


def left_early(snapshot: Snapshot) -> tuple[Late, Call] | None:
    """Return ((ranks that finished without a collective, ranks that gave it up), that collective), of a group whose members all ended normally."""
    given_up = {q: call for q, r in snapshot.ranks.items() if (call := gave_up(r)) is not None}
    for call in given_up.values():
        members = snapshot.groups[call.group].ranks if call.group in snapshot.groups else ()
        states = [snapshot.ranks[q] for q in members if q in snapshot.ranks]
        without = tuple(r.rank for r in states if r.enqueued.get(call.group, 0) < (call.seq or 0))
        together = tuple(q for q, c in given_up.items() if (c.group, c.seq) == (call.group, call.seq))
        normally = all(r.life == Life.FINISHED and not r.exit_code for r in states)
        if without and normally and len(states) == len(members):
            return (without, together), call
    return None


def killed_together(snapshot: Snapshot, causes: list[RankState]) -> bool:
    """True if every rank was killed by SIGKILL within a second: from outside (a scheduler, the launcher's death)."""
    if len(causes) < 2 or len(causes) < len(snapshot.ranks):
        return False
    times = [state.ended_s for state in causes if state.ended_s is not None]
    killed = all(state.life == Life.KILLED and state.signal in (None, signals.SIGKILL) for state in causes)
    return killed and len(times) == len(causes) and max(times) - min(times) < 1.0


def _lost(snapshot: Snapshot, causes: list[RankState]) -> Cascade:
    """Return the first end, with those of the same kind within two seconds; `ranks` is in order of time."""

    def end_s(state: RankState) -> float:
        return state.ended_s if state.ended_s is not None else snapshot.t_s

    def what(state: RankState) -> tuple:
        # a launcher's signal may still reach a process that is exiting
        how = state.signal if state.life == Life.KILLED else state.exit_code
        return (state.exception or "").split(":", 1)[0], state.life, how

    causes = sorted(causes, key=lambda state: (end_s(state), state.rank))
    first = causes[0]
    same = (x for x in causes if x is first or (what(x) == what(first) and end_s(x) - end_s(first) < 2.0))
    together = tuple(state.rank for state in same)
    return Cascade(End.LOST, together, tuple(sorted(q for q in snapshot.ranks if q not in together)))


def _refused(snapshot: Snapshot, kinds: dict[int, str]) -> Cascade:
    shapes = model_shapes(snapshot)
    if "model" in kinds.values() and len(set(shapes.values())) > 1:
        odd = minority(shapes)
        return Cascade(End.MODEL, odd, tuple(sorted(set(shapes) - set(odd))))
    if "model" in kinds.values() and (met := _met_another_call(snapshot, kinds)) is not None:
        return met
    if "unused" in kinds.values():
        return NO_CASCADE
    # a mismatch is read from the wait-for graph, by what ranks were about to call; here only an abort without that
    aborted = [snapshot.ranks[q] for q, k in kinds.items() if k == "mismatch" and snapshot.ranks[q].life == Life.KILLED]
    if not aborted:
        return NO_CASCADE
    return _two_threads(snapshot) or _aborted(snapshot, aborted, kinds) or _lost(snapshot, aborted)


def call_of_thread(state: RankState) -> Call | None:
    """Return the newest open collective of another thread in a group that the main thread uses, too."""
    for call in reversed(state.calls):
        if call.other_thread and call.completed_s is None and not call.p2p:
            same = any(c.group == call.group and not c.other_thread for c in state.calls)
            return call if same or any(m.group == call.group for m in state.models) else None
    return None


def _two_threads(snapshot: Snapshot) -> Cascade | None:
    """Return an abort in a group that two threads of some ranks use: their calls mix, and the thread may be faster on one rank."""
    odd = tuple(sorted(q for q, r in snapshot.ranks.items() if call_of_thread(r) is not None))
    if not odd or not any("gloo" in g.backend for g in snapshot.groups.values()):
        return None
    rest = tuple(sorted(q for q in snapshot.ranks if q not in odd))
    return Cascade(End.ABORTED, odd, rest)


def _met_another_call(snapshot: Snapshot, kinds: dict[int, str]) -> Cascade | None:
    """Return ranks whose modules are equal, and whom DDP refused because what it exchanged about them met another call of other ranks."""
    wrapping = {q for q, state in snapshot.ranks.items() if state.models}
    if not all(q in wrapping if kinds.get(q) == "model" else _in_call(r) for q, r in snapshot.ranks.items()):
        return None
    incident = abort.incident(snapshot, sorted(snapshot.ranks))
    return None if incident is None else Cascade(End.ABORTED, (), tuple(sorted(snapshot.ranks)), incident)


def model_shapes(snapshot: Snapshot) -> dict[int, int]:
    """Return a hash of the module that each rank wrapped last."""
    return {state.rank: state.models[-1].shape_hash for state in snapshot.ranks.values() if state.models}


def _aborted(snapshot: Snapshot, aborted: list[RankState], kinds: dict[int, str]) -> Cascade | None:
    """Return an abort by gloo inside collectives; who is to blame is decided by `culprit`, as for ranks that wait.

    Which rank gloo aborts, and which one notices first, is chance: every rank counts, as its page shows it, also one that still
    waits. A rank that is on its way into a collective is waited for.
    """
    states = snapshot.ranks
    if not all(map(_in_call, aborted)) or not any("gloo" in g.backend for g in snapshot.groups.values()):
        return None
    first_s = min((r.ended_s for r in aborted if r.ended_s is not None), default=snapshot.t_s)
    under_way = [r for q, r in states.items() if q not in kinds and r.life == Life.RUNNING and r.blocked is None]
    if under_way and snapshot.t_s - first_s < UNDER_WAY_S:
        return NO_CASCADE
    # the launcher may end the others before they raise; what they waited in is known anyway
    failed = _of(kinds, "mismatch", "echo", "timeout")
    ended = (q for q in _of(kinds, "outside") if _in_call(states[q]))
    waiting = (q for q, r in states.items() if q not in kinds and r.blocked is not None)
    involved = tuple(sorted((*failed, *ended, *waiting)))
    incident = abort.incident(snapshot, involved)
    return None if incident is None else Cascade(End.ABORTED, (), involved, incident)


def _in_call(state: RankState) -> bool:
    """True if a rank ended in a collective, or while it left one that failed: gloo's thread aborts it at any moment."""
    newest = next((call for call in reversed(state.calls) if not call.other_thread), None)
    left = newest is not None and (newest.failed or newest.completed_s is None)
    return state.ended_waiting or left or is_echo(state.caught or "")


def nobody_listens(state: RankState) -> bool:
    """True if a rank tried to connect to an address where nobody listens."""
    return bool(_REFUSED_ADDRESS.search(state.exception or ""))


def unset_key(state: RankState) -> str:
    """Return the first key for which a rank's script waited in a store until the wait raised; empty if it was torch that waited."""
    found = STORE_WAIT.search(state.exception or "")
    return found[1].strip() if found is not None and last_wait(state) is None else ""


def timed_out(snapshot: Snapshot, kinds: dict[int, str]) -> list[RankState]:
    """Return the ranks whose collective ran into its timeout, in order of time."""
    ranks = (snapshot.ranks[q] for q, k in kinds.items() if k == "timeout")
    return sorted(ranks, key=lambda r: r.ended_s or snapshot.t_s)


def _timeout(snapshot: Snapshot, kinds: dict[int, str], late: Late | None) -> Cascade:
    victims = timed_out(snapshot, kinds)
    # a late rank has published no address yet: what is refused is where nobody listens
    tried = tuple(sorted(r.rank for r in victims if _CONNECT.search(r.exception or "")))
    if any(nobody_listens(snapshot.ranks[q]) for q in tried):
        return Cascade(End.UNCONNECTED, (), tried)
    call = last_wait(victims[0])
    who: tuple[int, ...] = ()
    if late is not None and late[0]:
        who = late[0]
    elif call is not None and call.seq is not None and call.group in snapshot.groups:
        members = (q for q in snapshot.groups[call.group].ranks if q in snapshot.ranks)
        who = tuple(q for q in members if snapshot.ranks[q].enqueued.get(call.group, 0) < call.seq)
    who = tuple(sorted(q for q in who if kinds.get(q) != "timeout"))
    if who:
        return Cascade(End.TIMEOUT, who, tuple(r.rank for r in victims))
    first, dead = victims[0], (r for r in snapshot.ranks.values() if r.life in DEAD)
    if unset_key(first) and all((r.ended_s or 0.0) >= (first.ended_s or 0.0) for r in dead):
        return _lost(snapshot, [r for r in victims if unset_key(r)])
    return Cascade(End.UNCONNECTED, (), tried) if tried else NO_CASCADE
