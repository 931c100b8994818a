"""Stalls: ranks wait for one that is alive and busy, unusually long for this job. A suspicion, withdrawn if it recovers."""

from __future__ import annotations

from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, rank_list, size_text
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, op_text, seconds, where, where_stack
from distdiag.diagnosis.waits.graph import WaitGraph

# How long a rank may keep the others waiting before that is worth a word, by what it is seen to do. A person asked at a
# terminal will not answer; a checkpoint to a slow disk takes its time.
PATIENCE_S = {
    "stdin": 5.0,
    "gil_held": 8.0,
    "lock": 10.0,
    "queue": 10.0,
    "socket": 12.0,
    "data": 12.0,
    "sleep": 10.0,
    "user_code": 20.0,
    "checkpoint": 60.0,
}
FIRST_STEP_S = 60.0  # compilation, lazy initialisation, reading an index
USUAL_FACTOR = 3.0  # times the longest that this rank kept the others waiting before, and let them go on
ERROR_FACTOR = 3.0
SILENT_S = 30.0  # files of a network file system may be seen seconds late
_CAUSE = {"data": "data", "gil_held": "gil_held", "checkpoint": "checkpoint"}
_DOES = {
    "stdin": "waits for standard input",
    "gil_held": "is stuck in C code that holds the GIL",
    "lock": "waits for a lock",
    "queue": "waits on a queue",
    "socket": "waits on a socket, a pipe or a key of a store",
    "data": "waits for its data loader",
    "checkpoint": "writes a checkpoint",
    "sleep": "sleeps",
    "user_code": "is busy in its own code",
}
_DO = {
    "stdin": "remove the prompt, or answer it before the launch; only rank 0 may ask, and the others must not wait for it",
    "data": "look at the loader's workers of that rank (dead, stuck on storage?); `distdiag dump` shows them",
    "lock": "find who holds the lock; no lock may be held across a collective",
    "queue": "find who should fill or drain that queue",
    "socket": "look at the other end of that connection (who should send, or set the key?), and give it a timeout",
    "gil_held": "look at the native call at that line",
    "checkpoint": "wait, or write checkpoints asynchronously",
}


def patience_s(r: RankState) -> float:
    """Seconds that others may wait for this rank before it is a finding, for what it does and has done before."""
    word = r.activity
    if word == "user_code" and r.host_blocked:
        word = "sleep"
    base = PATIENCE_S.get(word, PATIENCE_S["user_code"])
    if not r.steps and r.step == 0 and word in ("user_code", "sleep", "socket", "lock"):
        base = max(base, FIRST_STEP_S if not r.calls or len(r.calls) < 4 else 30.0)
    return max(base, USUAL_FACTOR * r.longest_usual_s)


def rules(s: Snapshot, graph: WaitGraph) -> list[Finding]:
    """One finding per living rank that others have waited for, longer than is usual."""
    out: list[Finding] = [*_silent(s, graph)]
    for q in graph.sinks:
        r = s.ranks.get(q)
        if r is None or r.life not in (Life.RUNNING, Life.STARTING):
            continue
        victims = sorted(v for v in graph.victims_of(q) if s.ranks[v].blocked is not None)
        since = [b.entered_s for v in victims if (b := s.ranks[v].blocked) and b.entered_s is not None]
        if not since:
            continue
        waited = s.t_s - min(since)
        # the wait that counts cannot be longer than the rank itself has stood without doing anything collective
        limit = patience_s(r)
        if waited < limit:
            continue
        out.append(_stall(s, r, victims, waited, limit))
    return out


def _silent(s: Snapshot, graph: WaitGraph) -> list[Finding]:
    """Ranks of a node that is not heard of any more, while others wait for them. Alone it may be its monitor that is gone."""
    ranks = tuple(
        q
        for q in sorted(graph.sinks)
        if (r := s.ranks.get(q)) is not None and r.life == Life.SILENT and (r.heartbeat_age_s or 0.0) >= SILENT_S
    )
    victims = sorted({v for q in ranks for v in graph.victims_of(q) if s.ranks[v].blocked is not None})
    since = [b.entered_s for v in victims if (b := s.ranks[v].blocked) and b.entered_s is not None]
    if not since or s.t_s - min(since) < SILENT_S:
        return []
    hosts = ", ".join(dict.fromkeys(s.ranks[q].host or f"node {s.ranks[q].node}" for q in ranks))
    silent_s = max(s.ranks[q].heartbeat_age_s or 0.0 for q in ranks)
    return [
        Finding(
            kind="rank_lost",
            cause="silent",
            certainty=Certainty.SUSPECTED,
            severity=Severity.ERROR,
            culprits=ranks,
            victims=tuple(victims),
            where=tuple(where(s.ranks[q]) for q in ranks),
            waiting=tuple(where(s.ranks[v]) for v in victims),
            first_seen_s=s.t_s - silent_s,
            message=f"nothing has been heard of {rank_list(ranks)} ({hosts}) for {seconds(silent_s)}, and "
            f"{rank_list(victims)} {'waits' if len(victims) == 1 else 'wait'} for {'it' if len(ranks) == 1 else 'them'}",
            cost=f"{len(victims)} of {s.world_size} ranks make no progress",
            advice="is that host up, and does it still see the run directory? look at its console and its network",
        )
    ]


def lock_cycles(s: Snapshot, graph: WaitGraph) -> list[Finding]:
    """A rank waits for a file lock whose holder waits, in a collective, for that rank: a deadlock, and proved.

    The kernel's own table says who holds the lock; no continuation of either can free the other.
    """
    out = []
    for q in graph.sinks:
        r = s.ranks.get(q)
        if r is None:
            continue
        waiting = graph.victims_of(q)
        holders = tuple(h for h in r.holds_up if h in waiting and s.ranks[h].blocked is not None)
        if not holders:
            continue
        call = s.ranks[holders[0]].blocked
        assert call is not None
        members = tuple(sorted({q, *waiting}))
        out.append(
            Finding(
                kind="deadlock",
                cause="missing_rank",
                certainty=Certainty.PROVED,
                severity=Severity.ERROR,
                victims=members,
                collective=CollectiveRef(call.op, call.group, call.seq, call.bytes),
                where=(where(r, "lock"), *(where(s.ranks[h], "waiting") for h in holders)),
                waiting=tuple(where(s.ranks[v]) for v in members if v != q and v not in holders),
                step=r.step,
                message=f"rank {q} waits{at(r.place)} for a file lock that {rank_list(holders)} holds, and "
                f"{rank_list(holders)} waits for rank {q} in {op_text(call)}{at(s.ranks[holders[0]].place)}",
                cost=NO_PROGRESS,
                advice="release the lock before the collective: no lock may be held across one",
            )
        )
    return out


def _left_open(s: Snapshot, r: RankState) -> tuple[Call, tuple[int, ...]] | None:
    """A collective that this rank has issued, by another thread or to wait for it later, and who has not come to it."""
    for name, issued in r.enqueued.items():
        done, group = r.completed.get(name, issued), s.groups.get(name)
        if done >= issued or group is None:
            continue
        missing = tuple(q for q in group.ranks if q in s.ranks and s.ranks[q].enqueued.get(name, 0) <= done)
        if missing:
            known = (c for c in r.calls if c.group == name and c.seq == done + 1)
            return next(known, Call(op="", group=name, seq=done + 1)), missing
    return None


def _stall(s: Snapshot, r: RankState, victims: list[int], waited: float, limit: float) -> Finding:
    word = "sleep" if r.activity == "user_code" and r.host_blocked else r.activity
    call = s.ranks[victims[0]].blocked
    assert call is not None
    busy = [w for w in r.workers if w is not None] if word == "data" else []
    of_worker = f", and {'a worker of it' if len(r.workers) > 1 else 'its worker'} stands{at(busy[0])}" if busy else ""
    behind = _left_open(s, r) if word in ("lock", "queue") else None
    of_call = ""
    if behind is not None:
        left, missing = behind
        of_call = f" while it has {op_text(left)}{at(left.site)} in flight, to which {rank_list(missing)} {verb(missing, 'has', 'have')} not come"
    usual = f" (its longest so far: {seconds(r.longest_usual_s)})" if r.longest_usual_s > 0.5 else ""
    return Finding(
        kind="stall",
        cause=_CAUSE.get(word, "user_code" if r.place else "unknown"),
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR if waited > ERROR_FACTOR * limit else Severity.WARNING,
        culprits=(r.rank,),
        victims=tuple(victims),
        collective=CollectiveRef(call.op, call.group, call.seq, call.bytes) if call.op else None,
        where=(*where_stack(r, r.user_stack, r.activity), *(where(r, "data_worker", w) for w in dict.fromkeys(busy))),
        waiting=tuple(where(s.ranks[v]) for v in victims),
        step=r.step,
        first_seen_s=s.t_s - waited,
        message=f"rank {r.rank} has not entered {op_text(call)}"
        + (f", {size_text(call.bytes)}" if call.bytes else "")
        + f"; it {_DOES.get(word, 'is busy')}{at(r.place)}{of_worker}{of_call}; {rank_list(victims)} {verb(victims, 'has', 'have')} waited {seconds(waited)}{usual}",
        cost=f"{len(victims)} of {s.world_size} ranks make no progress",
        advice="look at that line of the dataset: storage that hangs, a lock, a loop"
        if busy
        else f"{rank_list(behind[1])} must come to {op_text(behind[0])}, too, or nobody: look at what started it, maybe in a thread"
        if behind is not None
        else _DO.get(word, "look at that line; `distdiag dump` saves all stacks; it is withdrawn if the rank goes on"),
    )
