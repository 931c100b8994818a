"""Ranks that ended: which end is the cause, and which are its echo.

When one rank dies, the others' collectives fail with "connection closed", a timeout, or the launcher's SIGTERM. The
cause is the first end in time that is none of these. Where every end is an echo, the cause is a rank that ended
normally while the others went on, or one that was late beyond the group's timeout.
"""

from __future__ import annotations

import re
import signal as signals

from distdiag.diagnosis.culprit.blame import Rhythm, out_of_rhythm
from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.text.phrases import at, op_text, place_text, seconds, where, where_stack

_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|reset by peer|broken pipe|closed by peer|socket (is )?closed"
    r"|remote process exited|remote rank|communicator was aborted|nccl ?(communicator|comm).*abort|ncclRemoteError"
    r"|recvValue failed|sendBytes failed|failed to recv|peer may have|unhandled system error|DistNetworkError"
    r"|The server socket|heartbeat|store->get|SocketTimeout",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out|timeout|wait timeout|deadline|failed to pass monitoredBarrier", re.IGNORECASE)
CONNECT = re.compile(r"connectFullMesh|timed out connecting|failed to connect|connection refused", re.IGNORECASE)
_IN_TORCH = re.compile(
    r"gloo|nccl|c10d|process ?group|collective|recv operation|send operation|monitoredBarrier|"
    r"waiting \d+ ?ms|wait timeout|DistBackendError|DistStoreError|transport",
    re.IGNORECASE,
)
# torch's own words, and those that Lightning puts in their place
UNUSED = re.compile(r"finished reduction in the prior iteration|parameters that were not used in producing the loss")
MODEL = re.compile(
    r"expects same model across all ranks|params? .*inconsistent|verify_params|appears not to match", re.I
)
MISMATCH = re.compile(r"mismatch between collectives|collective mismatch|Detected mismatch", re.IGNORECASE)
_OUTSIDE = {signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT}


def ending_kind(r: RankState) -> str:
    """cause, echo, timeout, unused, model, mismatch, outside (a signal from a launcher or a person), or '' while alive."""
    if r.life == Life.KILLED:
        if r.signal in _OUTSIDE:
            return "outside"
        return "mismatch" if r.signal == signals.SIGABRT else "cause"
    if r.life != Life.CRASHED:
        return ""
    text = r.exception or ""
    if text.startswith(("KeyboardInterrupt", "SignalException")):
        return "outside"
    if UNUSED.search(text):
        return "unused"
    if MODEL.search(text):
        return "model"
    if MISMATCH.search(text):
        return "mismatch"
    if _TIMEOUT.search(text) and _IN_TORCH.search(text):
        return "timeout"
    return "echo" if _ECHO.search(text) else "cause"


def ends(s: Snapshot) -> dict[int, str]:
    """Kind of every abnormal end. Who was killed only after another had failed was killed by what cleans up."""
    kinds = {r.rank: k for r in s.ranks.values() if (k := ending_kind(r))}
    swept = [
        q
        for q, k in kinds.items()
        if k == "cause" and any(_outlived(s, s.ranks[q], s.ranks[o], kinds[o]) for o in kinds if o != q)
    ]
    return kinds | dict.fromkeys(swept, "outside")


def _outlived(s: Snapshot, killed: RankState, failed: RankState, kind: str) -> bool:
    """True where a kill cannot be what `failed` fell by: a launcher, or its kernel, ended what was left.

    A launcher's SIGTERM reads as no signal at all where it has reaped the rank before anybody could look. The failures
    that a lost peer causes are told from later ones by the rank's last sign of life: its end itself is seen late.
    """
    if killed.life != Life.KILLED or killed.signal not in (None, signals.SIGKILL):
        return False
    if failed.life != Life.CRASHED or failed.ended_s is None or killed.ended_s is None:
        return False
    if kind == "echo":
        age_s = killed.heartbeat_age_s
        return age_s is not None and s.t_s - age_s > failed.ended_s
    return killed.ended_s > failed.ended_s


def rules(s: Snapshot, late: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> list[Finding]:
    """Findings about ranks that ended.

    Args:
        late: (late ranks, ranks that waited for them) as last seen before a collective timed out; None = not seen.
    """
    kinds = ends(s)
    if not kinds:
        return []
    causes = [s.ranks[q] for q, k in kinds.items() if k == "cause"]
    if _all_killed_together(s, causes):
        return []
    if causes:
        return [_lost(s, causes, kinds)]
    if any(k in ("unused", "model", "mismatch") for k in kinds.values()):
        found = _model(s, kinds)
        # what ranks were about to call decides a mismatch: that is the wait-for graph's rule; here only a bare abort
        if found:
            return [found]
        if any(k == "unused" for k in kinds.values()):
            return []
        aborted = [s.ranks[q] for q, k in kinds.items() if k == "mismatch" and s.ranks[q].life == Life.KILLED]
        if aborted:
            return [_aborted(s, aborted, kinds) or _lost(s, aborted, kinds)]
        return []
    finished = [
        r for r in s.ranks.values() if r.life == Life.FINISHED and any(k in ("echo", "timeout") for k in kinds.values())
    ]
    if finished:
        return [_finished(s, finished, kinds)]
    if any(k == "timeout" for k in kinds.values()):
        found = _timeout(s, kinds, late) or _unconnected(s, kinds)
        return [found] if found else []
    return []


def _unconnected(s: Snapshot, kinds: dict[int, str]) -> Finding | None:
    """Ranks that never came to a first collective together: nobody is to blame by what is known."""
    tried = [
        s.ranks[q] for q, k in sorted(kinds.items()) if k == "timeout" and CONNECT.search(s.ranks[q].exception or "")
    ]
    if not tried:
        return None
    first = tried[0]
    return Finding(
        kind="rank_lost",
        cause="crashed",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        victims=tuple(r.rank for r in tried),
        where=tuple(w for r in tried for w in where_stack(r, r.user_stack, None, 2)),
        first_seen_s=min((r.ended_s for r in tried if r.ended_s is not None), default=None),
        message=f"{rank_list([r.rank for r in tried])} could not connect: {(first.exception or '').splitlines()[0][:160]}"
        f"{at(first.place)}",
        cost="the job did not begin",
        advice="did every rank start, and are its address and port reachable from the others? GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME choose the interface; `distdiag doctor --reach HOST:PORT` tries it",
    )


def _all_killed_together(s: Snapshot, causes: list[RankState]) -> bool:
    """Every rank by SIGKILL within a second: the job was killed from outside (a scheduler, its launcher's death)."""
    if len(causes) < 2 or len(causes) < len(s.ranks):
        return False
    times = [r.ended_s for r in causes if r.ended_s is not None]
    return all(r.life == Life.KILLED and r.signal in (None, signals.SIGKILL) for r in causes) and (
        len(times) == len(causes) and max(times) - min(times) < 1.0
    )


def _lost(s: Snapshot, causes: list[RankState], kinds: dict[int, str]) -> Finding:
    causes = sorted(causes, key=lambda r: (r.ended_s if r.ended_s is not None else s.t_s, r.rank))
    first = causes[0]
    t0 = first.ended_s if first.ended_s is not None else s.t_s
    name = (first.exception or "").split(":", 1)[0]
    together = [
        r
        for r in causes
        if r is first
        or (
            (r.exception or "").split(":", 1)[0] == name
            and r.life == first.life
            and r.signal == first.signal
            and (r.ended_s or s.t_s) - t0 < 2.0
        )
    ]
    culprits = tuple(sorted(r.rank for r in together))
    victims = tuple(sorted(r for r in s.ranks if r not in culprits))
    who = rank_list(culprits)
    if first.life == Life.KILLED:
        cause = "killed"
        sig = signals.Signals(first.signal).name if first.signal else "a signal"
        what = f"{who} {'was' if len(culprits) == 1 else 'were'} killed by {sig}{at(first.place)}"
        do = {
            "SIGKILL": "look for the out-of-memory killer: `dmesg -T | grep -i oom`; else who sent it",
            "SIGSEGV": "a native crash: run once with `python -X faulthandler` and look at the extension called there",
            "SIGBUS": "a full /dev/shm or a truncated mapped file: check `df /dev/shm`",
        }.get(sig, "look at the rank's own stderr above for what the library said before it died")
    else:
        cause = "crashed"
        text = first.exception or f"exit code {first.exit_code}"
        what = f"{who} ended by {text[:200]}{at(first.place)}"
        do = f"fix {place_text(first.place) or 'the exception'}; the other ranks' errors are its echo"
    state = "killed" if first.life == Life.KILLED else "crashed"
    echoes = [s.ranks[q] for q, k in kinds.items() if k in ("echo", "timeout") and q not in culprits]
    return Finding(
        kind="rank_lost",
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        where=tuple(w for r in together for w in where_stack(r, r.user_stack, state, 3)),
        waiting=tuple(where(r) for r in s.ranks.values() if r.rank in victims and (r.blocked or r in echoes)),
        step=first.step,
        first_seen_s=t0,
        message=what,
        cost="the job cannot go on without it" if victims else "the job ended",
        advice=do,
    )


def _aborted(s: Snapshot, aborted: list[RankState], kinds: dict[int, str]) -> Finding | None:
    """gloo aborts a rank that receives more bytes than its own call has room for: the calls did not fit together.

    Where each rank died, or failed, is known; who stands where nobody else has been is the odd one out.
    """
    if not all(r.ended_waiting for r in aborted) or not any("gloo" in g.backend for g in s.groups.values()):
        return None
    dead = [s.ranks[q] for q, k in kinds.items() if k in ("mismatch", "echo", "timeout")]
    by_site: dict[str, list[int]] = {}
    for r in dead:
        if r.place is not None:
            by_site.setdefault(r.place.key, []).append(r.rank)
    if len(by_site) < 2:
        return None
    most = max(len(v) for v in by_site.values())
    odd = sorted(q for v in by_site.values() if len(v) < most for q in v)
    if not odd:  # a tie: the one at a place where the other never was, while the other's is common to both
        strange = [
            q
            for site, members in by_site.items()
            for q in members
            if not any(s.ranks[o].sites.get(site) for o in s.ranks if o not in members)
            and all(s.ranks[q].sites.get(other) for other in by_site if other != site)
        ]
        odd = sorted(strange) if len(strange) < len(dead) else []
    beat = _rhythm(s, by_site) if not odd and len(by_site) == 2 else None
    odd = odd or list(beat.ranks if beat is not None else ())
    ranks = [r.rank for r in dead]
    rest = sorted(set(ranks) - set(odd))
    places = "; ".join(f"{rank_list(v)}{at(s.ranks[v[0]].place)}" for v in by_site.values())
    return Finding(
        kind="mismatch",
        cause="shape",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=tuple(odd),
        victims=tuple(rest if odd else sorted(ranks)),
        where=tuple(where(s.ranks[q], "killed" if s.ranks[q].life == Life.KILLED else "crashed") for q in odd or ranks),
        waiting=tuple(where(s.ranks[q]) for q in rest) if odd else (),
        step=aborted[0].step,
        first_seen_s=min((r.ended_s for r in dead if r.ended_s is not None), default=s.t_s),
        message=f"ranks met in one collective with tensors of different sizes, and gloo aborted "
        f"{rank_list([r.rank for r in aborted])}: {places}" + (f"; {beat.text}" if beat is not None else ""),
        cost="the job ended",
        advice="compare the two places: every rank must make the same collective calls in the same order",
    )


def _rhythm(s: Snapshot, by_site: dict[str, list[int]]) -> Rhythm | None:
    """Which of two places has the wrong ranks, by when they came there before; the collective is that of an open call."""
    here = {q: site for site, members in by_site.items() for q in members}
    for q in here:
        call = s.ranks[q].calls[-1] if s.ranks[q].calls else None
        if (
            call is not None
            and call.completed_s is None
            and call.seq is not None
            and call.site
            and call.site.key == here[q]
        ):
            return out_of_rhythm(s.ranks, (call.group, call.seq), here, *by_site.values())
    return None


def _model(s: Snapshot, kinds: dict[int, str]) -> Finding | None:
    """The wrapped module differs between ranks; seen in DDP's own refusal, or in what each was about to wrap."""
    if "model" not in kinds.values():
        return None
    shapes: dict[int, list[int]] = {}
    for r in s.ranks.values():
        if r.models:
            shapes.setdefault(r.models[-1].shape_hash, []).append(r.rank)
    if len(shapes) < 2:
        return None
    most = max(len(v) for v in shapes.values())
    odd = tuple(sorted(q for v in shapes.values() if len(v) < most for q in v))
    ranks = {q: s.ranks[q] for v in shapes.values() for q in v}
    sizes = {q: f"{r.models[-1].parameters} parameters of {r.models[-1].elements:,} elements" for q, r in ranks.items()}
    groups = "; ".join(f"{rank_list(v)}: {sizes[v[0]]}" for v in shapes.values())
    if len(set(sizes.values())) == 1:
        groups += ", in different shapes"
    places = tuple(where(r, "crashed", r.models[-1].site) for r in ranks.values())
    return Finding(
        kind="mismatch",
        cause="model",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=odd,
        victims=tuple(sorted(set(ranks) - set(odd))),
        where=tuple(w for w in places if w.rank in odd or not odd),
        waiting=tuple(w for w in places if odd and w.rank not in odd),
        first_seen_s=min((r.ended_s for r in ranks.values() if r.ended_s is not None), default=s.t_s),
        message=f"the wrapped module differs between ranks: {groups}",
        cost="DDP refuses to start",
        advice="build the same module, in the same order, on every rank; compare what the ranks' configurations say",
    )


def _finished(s: Snapshot, finished: list[RankState], kinds: dict[int, str]) -> Finding:
    first_echo = min((s.ranks[q].ended_s or s.t_s for q in kinds), default=s.t_s)
    culprits = tuple(sorted(r.rank for r in finished))
    victims = tuple(sorted(q for q, k in kinds.items() if k in ("echo", "timeout")))
    victim = s.ranks[victims[0]]
    call = last_wait(victim)
    return Finding(
        kind="deadlock",
        cause="rank_finished",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        collective=CollectiveRef(call.op, call.group, call.seq, call.bytes) if call else None,
        where=tuple(where(r, "finished") for r in finished),
        waiting=tuple(where(s.ranks[q]) for q in victims),
        step=finished[0].step,
        first_seen_s=min((r.ended_s for r in finished if r.ended_s is not None), default=first_echo),
        message=f"{rank_list(culprits)} finished after step {finished[0].step} while {rank_list(victims)} went on"
        + (f" and waited in {op_text(call)}" if call and call.op else ""),
        cost="the others wait for a rank that will not come, and fail",
        advice="give every rank the same number of steps, or leave the loop on all ranks together (or use Join); is there an exit "
        "(sys.exit, os._exit in a thread) on some ranks only?",
    )


def last_wait(r: RankState) -> Call | None:
    """What a rank waited in last: still, or until it failed."""
    if r.blocked is not None:
        return r.blocked
    for c in reversed(r.calls):
        if c.failed or c.completed_s is None:
            return c
    for g, seq in r.enqueued.items():
        if r.completed.get(g, seq) < seq:
            return Call(op="", group=g, seq=r.completed[g] + 1)
    return None


def _timeout(
    s: Snapshot, kinds: dict[int, str], late: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> Finding | None:
    timed_out = sorted((s.ranks[q] for q, k in kinds.items() if k == "timeout"), key=lambda r: r.ended_s or s.t_s)
    first = timed_out[0]
    call = last_wait(first)
    who: tuple[int, ...] = ()
    if late is not None and late[0]:
        who = late[0]
    elif call is not None and call.seq is not None and call.group in s.groups:
        who = tuple(
            q for q in s.groups[call.group].ranks if q in s.ranks and s.ranks[q].enqueued.get(call.group, 0) < call.seq
        )
    who = tuple(sorted(q for q in who if kinds.get(q) != "timeout"))
    if not who:
        return None
    waited = (first.ended_s or s.t_s) - call.entered_s if call is not None and call.entered_s is not None else None
    ranks = [s.ranks[q] for q in who]
    stack: tuple[Site, ...] = ranks[0].user_stack
    return Finding(
        kind="timeout",
        cause="late_rank",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=who,
        victims=tuple(r.rank for r in timed_out),
        collective=CollectiveRef(call.op, call.group, call.seq, call.bytes) if call else None,
        where=tuple(w for r in ranks for w in where_stack(r, r.user_stack, None, 3)),
        waiting=tuple(where(r) for r in timed_out),
        step=first.step,
        first_seen_s=call.entered_s if call else None,
        message=f"{op_text(call) if call else 'a collective'} ran into its timeout on "
        f"{rank_list([r.rank for r in timed_out])}: {rank_list(who)} was alive and late"
        + (f" by more than {seconds(waited)}" if waited else "")
        + at(stack[0] if stack else None),
        cost="the job ended",
        advice="do that work on all ranks, or outside the step, or raise the group's timeout to cover it",
    )
