"""An exchange with neighbours in which one rank computed another peer: that rank is named, or nobody."""

from __future__ import annotations

from collections import Counter

from distdiag.diagnosis.culprit.exchange import Round, odd_one
from distdiag.diagnosis.model.snapshot import Call, RankState, Site
from tests.diagnosis import waits
from tests.diagnosis.waits import only, snapshot

LINE = Site("/job/halo.py", 27, "swap")


def one_round(left: int | None, right: int | None) -> Round:
    peers = [peer for peer in (left, right) if peer is not None]
    return Counter((way, peer) for way in ("send", "recv") for peer in peers)


def ring(world: int) -> dict[int, Round]:
    return {rank: one_round((rank - 1) % world, (rank + 1) % world) for rank in range(world)}


def chain(world: int) -> dict[int, Round]:
    return {
        rank: one_round(rank - 1 if rank else None, rank + 1 if rank + 1 < world else None) for rank in range(world)
    }


def test_a_wrong_neighbour_on_either_side_is_named() -> None:
    answers: Counter[str] = Counter()
    for world in (4, 5, 6):
        for odd in range(world):
            for wrong in set(range(world)) - {odd}:
                for left, right in ((wrong, (odd + 1) % world), ((odd - 1) % world, wrong)):
                    if {left, right} == {(odd - 1) % world, (odd + 1) % world}:
                        continue
                    found = odd_one(ring(world) | {odd: one_round(left, right)})
                    assert found in (None, odd), (world, odd, left, right)
                    answers["nobody" if found is None else "right"] += 1
    assert answers["right"] >= 0.9 * answers.total(), answers


def test_nobody_is_odd_in_a_ring_or_an_open_chain() -> None:
    assert all(odd_one(of(world)) is None for of in (ring, chain) for world in (2, 3, 4, 5))


def swapping(rank: int, peers: tuple[int, int], rounds: int, waits_in: int) -> RankState:
    """Return a rank that waits in the `waits_in`-th call of its newest round: send, send, recv, recv."""
    counts: Counter[tuple[str, int]] = Counter()
    calls = []
    for k in range(rounds):
        for op, peer in (("send", peers[0]), ("send", peers[1]), ("recv", peers[1]), ("recv", peers[0])):
            counts[op, peer] += 1
            done = 1.0 if k < rounds - 1 else None
            nth = counts[op, peer]
            calls.append(Call(op=op, group="default_pg", peer=peer, nth=nth, site=LINE, shape=(1,), completed_s=done))
    issued = {f"{op}:{peer}:0:default_pg": n for (op, peer), n in counts.items()}
    here = calls[waits_in - 4]
    return waits.rank(rank, here, calls=tuple(calls), p2p_issued=issued, sites={LINE.key: len(calls)})


def test_the_rank_that_swaps_twice_with_one_neighbour_is_the_culprit() -> None:
    """Rank 1 takes rank 0 for both of its neighbours; rank 2, which waits for it, is still in the first round."""
    found = only(snapshot(swapping(0, (2, 1), 2, 0), swapping(1, (0, 0), 2, 0), swapping(2, (1, 0), 1, 0)))
    assert found.culprits == (1,)
    assert "only rank 1's messages do not fit: in a round it sends 2 to rank 0" in found.message
