"""Matches the two ends of messages in dumps: a send and its recv, by equal numbers."""

from __future__ import annotations

import re

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call
from distdiag.diagnosis.waits.messages import OPPOSITE
from distdiag.sources.dumps.entries import Entry
from distdiag.sources.dumps.scan import Scan

# by (rank, peer, direction): (number, True if it is not known to wait, entry, its file)
Pairs = dict[tuple[int, int, str], list[tuple[int, bool, Entry, Scan]]]
MOSTLY = 0.9  # share of the messages that both ends must have numbered; a few may lack the other end


def match(
    messages: dict[int, list[tuple[str, Entry, Scan]]], members: dict[str, tuple[int, ...]], t0_ns: int, history: bool
) -> tuple[dict[int, list[Call]], dict[int, dict[str, int]], dict[int, list[Call]]]:
    """Return (sends and receives in flight, how many each rank has issued, messages in flight that the other end has skipped).

    Numbers are equal at both ends of a message. With `history`, completed messages come before those in flight.
    """
    unmet: dict[int, list[Call]] = {}
    blocking: dict[int, bool] = {}  # by rank: True if all its messages in flight are blocking
    calls: dict[int, list[Call]] = {r: [] for r in messages}
    before: dict[int, list[Call]] = {r: [] for r in messages}
    counts: dict[int, dict[str, int]] = {r: {} for r in messages}
    sent: dict[str, Pairs] = {}
    for rank, mine in messages.items():
        for key, e, source in mine:
            parsed = _ends(e.profiling_name, members[key], rank)
            if parsed is not None:
                direction, peer = parsed
                e = source.batched(e)
                done = e.completed or e.retired_when_issued  # an end that is not known to wait
                sent.setdefault(key, {}).setdefault((rank, peer, direction), []).append((e.p2p_seq, done, e, source))
    for key, by_pair in sent.items():
        if all(done for es in by_pair.values() for _, done, *_ in es):
            continue
        equal = _equal_numbers(by_pair, len(members[key]))
        passed = {} if equal else _passed_by(by_pair)
        lost = {rank: min(es[0][0] for (r, _, _), es in by_pair.items() if r == rank) > 1 for rank, _, _ in by_pair}
        for (rank, peer, direction), es in by_pair.items():
            # if neither ring has lost a message of the group, the nth of one end belongs to the nth of the other
            whole = not equal and lost.get(rank) is lost.get(peer) is False
            head = next((i for i, (_, done, *_) in enumerate(es) if not done), len(es))
            kept = es if equal or whole else [*es[:head], *(x for x in es[head:] if not x[1])]
            number = 0 if whole else -head  # else those in flight begin at 1
            for seq, done, e, source in kept:
                number = seq if equal else number + 1
                if done and not history:
                    continue
                call = replace(source.call(e, t0_ns), op=direction, seq=None, peer=peer, nth=number)
                (before if done else calls)[rank].append(call)
                if not done:
                    blocking[rank] = blocking.get(rank, True) and _blocking(e)
                    if seq in passed.get((rank, peer, direction), ()):
                        unmet.setdefault(rank, []).append(call)
            counts[rank][f"{direction}:{peer}:0:{key}"] = number
    for rank, mine in calls.items():
        if blocking.get(rank) and len(mine) > 1 and all(c.started is None and c.entered_s is not None for c in mine):
            first = min(mine, key=lambda c: c.entered_s or 0.0)
            calls[rank] = [replace(c, started=c is first) for c in mine]
    return {r: [*before[r], *mine] for r, mine in calls.items()}, counts, unmet


def _blocking(e: Entry) -> bool:
    """True for `send` and `recv`, which run on the device one after another; False for `isend` and batches."""
    innermost = e.frames[0] if isinstance(e.frames, list) and e.frames else None
    return isinstance(innermost, dict) and innermost.get("name") in ("send", "recv")


def _passed_by(by_pair: Pairs) -> dict[tuple[int, int, str], set[int]]:
    """Return numbers of messages that the other end has skipped: it issued later ones. Empty if the ends mostly disagree."""
    newest: dict[int, int] = {}
    oldest: dict[int, int] = {}
    for (rank, _, _), es in by_pair.items():
        newest[rank] = max(newest.get(rank, 0), es[-1][0])
        oldest[rank] = min(oldest.get(rank, es[0][0]), es[0][0])
    out: dict[tuple[int, int, str], set[int]] = {}
    matched = 0
    for (rank, peer, direction), es in by_pair.items():
        if peer not in newest:
            continue
        theirs = {s for s, *_ in by_pair.get((peer, rank, OPPOSITE[direction]), ())}
        seen = {s for s, *_ in es if oldest[peer] <= s < newest[peer]}
        matched += len(seen & theirs)
        if alone := seen - theirs:
            out[rank, peer, direction] = alone
    alone_in_all = sum(map(len, out.values()))
    return out if matched >= MOSTLY * (matched + alone_in_all) else {}


_ENDS = re.compile(r"(send|recv) ([0-9]{1,9})(->|<-)([0-9]{1,9})(?![0-9])")


def _ends(name: str, members: tuple[int, ...], rank: int) -> tuple[str, int] | None:
    """Return direction and the peer's global rank from `nccl:send 0->1` or `nccl:recv 0<-1` (ranks in the group).

    None if there is no such peer, or the rank itself has another number in these members: they were not recorded.
    """
    m = _ENDS.search(name)
    own, peer = (int(m[2]), int(m[4])) if m is not None else (0, len(members))
    if m is None or own == peer or max(own, peer) >= len(members) or members[own] != rank:
        return None
    return m[1], members[peer]


def _equal_numbers(by_pair: Pairs, size: int) -> bool:
    """True if both ends of a message carry the same p2p_seq_id.

    A rank counts its messages with all peers of a group together, and those of a batch as one. In a group of two the numbers are
    assumed to be equal unless the dumps contradict; in a larger group the dumps must confirm it.
    """
    agree = 0
    for (rank, peer, direction), es in by_pair.items():
        other = by_pair.get((peer, rank, OPPOSITE[direction]))
        if not other:
            continue
        mine, theirs = {s for s, *_ in es}, {s for s, *_ in other}
        low, high = max(min(mine), min(theirs)), min(max(mine), max(theirs))
        common = {s for s in mine if low <= s <= high}
        if common != {s for s in theirs if low <= s <= high}:
            return False
        agree += len(common)
    return agree > 0 or size <= 2
