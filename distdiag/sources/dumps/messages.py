"""Matches the two ends of messages in dumps: a send and its recv, by equal numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call
from distdiag.diagnosis.waits.messages import OPPOSITE
from distdiag.sources.dumps.entries import Entry
from distdiag.sources.dumps.scan import Scan
from distdiag.terms.ranks import grouped

# (number, True if it is not known to wait, entry, its file), and those by (rank, peer, direction)
End = tuple[int, bool, Entry, Scan]
Pairs = dict[tuple[int, int, str], list[End]]
SHIFTS = 64  # ways to pair the two ends of a stream of messages that are tried
MOSTLY = 0.9  # share of the messages that both ends must have numbered; a few may lack the other end


@dataclass(frozen=True, slots=True)
class Matched:
    """The messages of a job.

    Attributes:
        calls: By rank: sends and receives in flight, after the completed ones if a history is wanted.
        issued: By rank: how many it has issued, as `RankState.p2p_issued`.
        unmet: By rank: messages in flight that the other end has skipped.
        unequal: (send, recv) of different lengths, of which at least one is in flight, by sender and receiver.
    """

    calls: dict[int, list[Call]]
    issued: dict[int, dict[str, int]]
    unmet: dict[int, list[Call]]
    unequal: dict[tuple[int, int], tuple[Call, Call]]


def match(
    messages: dict[int, list[tuple[str, Entry, Scan]]], members: dict[str, tuple[int, ...]], t0_ns: int, history: bool
) -> Matched:
    """Return the messages of all ranks.

    Numbers are equal at both ends of a message. With `history`, completed messages come before those in flight.
    """
    unmet: dict[int, list[Call]] = {}
    unequal: dict[tuple[int, int], tuple[Call, Call]] = {}
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
                    innermost = e.frames[0] if isinstance(e.frames, list) and e.frames else None
                    in_turn = isinstance(innermost, dict) and innermost.get("name") in ("send", "recv")
                    blocking[rank] = blocking.get(rank, True) and in_turn  # else `isend`, or a batch
                    if seq in passed.get((rank, peer, direction), ()):
                        unmet.setdefault(rank, []).append(call)
            counts[rank][f"{direction}:{peer}:0:{key}"] = number
            recvs = by_pair.get((peer, rank, "recv")) if direction == "send" else None
            if recvs and (ends := _unequal(es, recvs, equal, whole)) is not None:
                send, recv = (source.call(e, t0_ns) for _, _, e, source in ends)
                unequal[rank, peer] = replace(send, op="send", peer=peer), replace(recv, op="recv", peer=rank)
    for rank, mine in calls.items():
        if blocking.get(rank) and len(mine) > 1 and all(c.started is None and c.entered_s is not None for c in mine):
            first = min(mine, key=lambda c: c.entered_s or 0.0)
            calls[rank] = [replace(c, started=c is first) for c in mine]
    return Matched({r: [*before[r], *mine] for r, mine in calls.items()}, counts, unmet, unequal)


def _unequal(sends: list[End], recvs: list[End], numbered: bool, whole: bool) -> tuple[End, End] | None:
    """Return the first send and its recv that differ in their number of elements, with an end in flight; None if nothing proves it.

    Messages of a pair match in order. Where the rings do not show which belong together, each way to pair them counts that their
    states allow: of what is completed, the other end was issued, and a recv completes only with as many elements as were sent.
    """
    if any(e.retired_when_issued for _, _, e, _ in (*sends, *recvs)) or all(done for _, done, *_ in (*sends, *recvs)):
        return None
    if numbered:
        common = {seq for seq, *_ in sends} & {seq for seq, *_ in recvs}
        sends, recvs = ([end for end in ends if end[0] in common] for ends in (sends, recvs))
    done_ends = ([i for i, (_, done, *_) in enumerate(ends) if done] for ends in (sends, recvs))
    newest_sent, newest_received = (max(done, default=-1) for done in done_ends)
    shifts = range(newest_received + 1 - len(sends), len(recvs) - newest_sent)
    if numbered or whole:
        shifts = range(1 if not numbered or len(sends) == len(recvs) else 0)
    if len(shifts) > SHIFTS:
        return None
    shapes = ([e.tensor()[0] for _, _, e, _ in ends] for ends in (sends, recvs))
    sent, received = ([None if shape is None else math.prod(shape) for shape in of_end] for of_end in shapes)
    found: set[tuple[int, int]] = set()
    for shift in shifts:
        pairs = [(i, i + shift) for i in range(len(sends)) if 0 <= i + shift < len(recvs)]
        wrong = [(i, k) for i, k in pairs if None not in (sent[i], received[k]) and sent[i] != received[k]]
        begun = ((i, k) for i, k in pairs if recvs[k][2].state == "started" and not recvs[k][1] and sends[i][1])
        if any(recvs[k][1] for _, k in wrong) or any(sent[i] == received[k] for i, k in begun):
            continue
        if not wrong:
            return None
        found.add(wrong[0])
    if len(found) != 1:
        return None
    ((i, k),) = found
    before = {n for n, (_, done, *_) in zip(received, recvs, strict=True) if done}
    # with a length that was received before, an older dump of the sender looks the same
    return None if not (numbered or whole) and sent[i] in before else (sends[i], recvs[k])


def _passed_by(by_pair: Pairs) -> dict[tuple[int, int, str], set[int]]:
    """Return numbers of messages that the other end has skipped: it issued later ones. Empty if the ends mostly disagree."""
    of_rank = grouped((rank, end[0]) for (rank, _, _), es in by_pair.items() for end in (es[0], es[-1]))
    out: dict[tuple[int, int, str], set[int]] = {}
    matched = 0
    for (rank, peer, direction), es in by_pair.items():
        if peer not in of_rank:
            continue
        theirs = {s for s, *_ in by_pair.get((peer, rank, OPPOSITE[direction]), ())}
        seen = {s for s, *_ in es if min(of_rank[peer]) <= s < max(of_rank[peer])}
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
