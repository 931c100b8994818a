"""deadlock: cycles of waiting ranks, on hand-written snapshots of one situation of a real job each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from distdiag.diagnosis.culprit.conditions import past_the_call
from distdiag.diagnosis.culprit.verdict import judge
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site
from distdiag.diagnosis.text import cycle
from distdiag.diagnosis.waits import graph
from tests.diagnosis.made import loader, proved
from tests.diagnosis.test_rank_condition import FILE, places
from tests.diagnosis.waits import EVAL, SAVE, SEND, TRAIN, call, key, only, rank, snapshot, summary


def test_two_groups_used_in_opposite_order_are_a_cycle() -> None:
    s = snapshot(
        rank(0, call(group="a", seq=1, site=TRAIN)),
        rank(1, call(group="b", seq=1, site=EVAL)),
        rank(2, call(group="c", seq=1, site=SAVE)),
        groups={"a": (0, 1), "b": (1, 2), "c": (2, 0)},
    )
    f = only(s)
    assert summary(f) == ("deadlock", "group_cycle", (), (0, 1, 2))
    assert {w.rank for w in f.where} == {0, 1, 2}


def test_a_rank_with_the_wrong_group_is_the_culprit() -> None:
    s = snapshot(
        *(rank(r, call(group="default_pg")) for r in (0, 1, 3)),
        rank(2, call(group="other", seq=1)),
        groups={"other": (0, 1, 2, 3)},
    )
    assert summary(only(s)) == ("mismatch", "group", (2,), (0, 1, 3))


def test_groups_that_all_ranks_use_at_one_line_in_turn_are_in_another_order() -> None:
    def at(r: int, now: str, *before: str) -> RankState:
        return rank(
            r, call(group=now, seq=2, site=TRAIN), calls=tuple(call(group=g, seq=1, site=TRAIN) for g in before)
        )

    groups = {"a": (0, 1, 2), "b": (0, 1, 2)}
    f = only(snapshot(at(0, "a", "a", "b"), at(1, "a", "b", "a"), at(2, "b", "a", "b"), groups=groups))
    assert summary(f) == ("deadlock", "group_cycle", (), (0, 1, 2))
    assert "sorted list" in f.advice and "different order" in f.message
    never = only(snapshot(at(0, "a", "a"), at(1, "a", "a"), at(2, "b", "a"), groups=groups))
    assert summary(never) == ("mismatch", "group", (2,), (0, 1)), "only rank 2 has ever used the other group"


def test_calls_without_a_known_line_are_not_one_line_with_several_groups() -> None:
    calls = {g: call(group=g, seq=2, site=None) for g in "ab"}
    before = tuple(call(group=g, seq=1, site=None) for g in "ab")
    members = (rank(r, calls[g], calls=before) for r, g in enumerate("aab"))
    f = only(snapshot(*members, groups={"a": (0, 1, 2), "b": (0, 1, 2)}))
    assert f.kind == "deadlock" and "this call" not in f.message and "sorted list" not in f.advice


def test_the_rank_of_a_cycle_at_a_new_site_is_the_culprit() -> None:
    s = snapshot(
        rank(0, call(group="pair", seq=3, site=SAVE), sites={key(SAVE): 1, key(TRAIN): 6}),
        *(rank(r, call(), sites={key(TRAIN): 7}) for r in (1, 2, 3)),
        groups={"pair": (0, 1)},
    )
    assert summary(only(s)) == ("deadlock", "missing_rank", (0,), (1, 2, 3))


def p2p(op: str, peer: int | None, nth: int = 1, site: Site = SEND, tag: int = 0) -> Call:
    return Call(op=op, group="default_pg", peer=peer, nth=nth, site=site, tag=tag, shape=(4,), dtype="float32")


def messaging(r: int, c: Call, **more: Any) -> RankState:
    peer = "any" if c.peer is None else c.peer
    return rank(r, c, p2p_issued={f"{c.op}:{peer}:{c.tag}:default_pg": c.nth or 1, **more.pop("issued", {})}, **more)


def test_a_ring_of_receives_is_a_cycle() -> None:
    s = snapshot(*(messaging(r, p2p("recv", (r - 1) % 4)) for r in range(4)))
    f = only(s)
    assert summary(f) == ("deadlock", "p2p_cycle", (), (0, 1, 2, 3))
    assert f.collective is not None and f.collective.seq is None
    tagged = snapshot(*(messaging(r, p2p("recv", (r - 1) % 4, tag=r)) for r in range(4)))
    assert "never match" not in only(tagged).advice  # the tags may still match: nobody has sent yet


@pytest.mark.parametrize(
    ("batches", "drop_last", "passes", "last"),
    [(4, False, 1, True), (3, False, 1, False), (4, True, 1, False), (4, False, 2, False)],
)
def test_messages_that_do_not_meet_in_a_last_smaller_batch_may_be_fewer_there(
    batches: int, drop_last: bool, passes: int, last: bool
) -> None:
    x = loader(
        length=4, batches=batches, batch_size=32, dataset_length=102, drop_last=drop_last, distributed_sampler=False,
        iterations_started=passes, exhausted=False,
    )  # fmt: skip
    ring = [msgspec.structs.replace(messaging(q, p2p("recv", (q + 1) % 3)), loaders=(x,)) for q in range(3)]
    f = only(snapshot(*ring))
    assert f.advice.startswith("this is the last batch of the epoch, 6 of 32 samples: use drop_last=True, or") is last


def test_partners_that_chose_others_are_told_to_agree() -> None:
    ends = (("send", 2), ("recv", 0), ("send", 3), ("recv", 1))
    f = only(snapshot(*(messaging(r, p2p(op, peer)) for r, (op, peer) in enumerate(ends))))
    assert f.cause == "p2p_cycle" and f.advice.startswith(
        "no message has its other end: ranks may have chosen partners"
    )


@pytest.mark.parametrize("peers_change", [False, True])
def test_a_stage_that_sends_to_the_last_one_before_the_next_one_sends_in_the_wrong_order(peers_change: bool) -> None:
    """Stage 0 sends the labels first: the last stage receives them after the activations, which are still to be sent."""
    forward, label, inputs = (Site("/job/pp.py", n, f) for n, f in ((28, "forward"), (46, "push"), (24, "inputs")))

    def stage(r: int, op: str, peer: int, site: Site, *before: Call) -> RankState:
        now = p2p(op, peer, 6 if op == "recv" else 1, site)
        return messaging(
            r, now, calls=(*before, now), issued={f"{c.op}:{c.peer}:0:default_pg": c.nth or 0 for c in before}
        )

    rounds = range(1, 6)
    got = {r: [p2p("recv", 2 if peers_change and n == 2 else r - 1, n, inputs) for n in rounds] for r in (1, 2)}
    sent = {r: [p2p("send", r + 1, n, forward) for n in rounds] for r in (0, 1)}
    s = snapshot(
        stage(0, "send", 2, label, *sent[0]),
        stage(1, "recv", 0, inputs, *got[1], *sent[1]),
        stage(2, "recv", 1, inputs, *got[2]),
    )
    f = only(s)
    order = (
        "rank 0 is in send to rank 2 at pp.py:46 in push before it sends what rank 1 waits for (earlier at pp.py:28 in forward): "
        "let rank 0 send that first, or use isend, or let rank 2 receive that of rank 0 first"
    )
    assert f.cause == "p2p_cycle" and (f.advice == order) is not peers_change
    assert order in f.advice and ("draw them with one seed" in f.advice) is peers_change


def test_a_collective_of_a_cycle_that_a_condition_keeps_to_some_ranks_is_named() -> None:
    text, at = places("""
    def save(path):
        if dp_rank() == 0:
            commit(path)  # A
    def commit(path):
        barrier()  # B
    def step(batch):
        all_reduce(grads)  # C
    def main():
        for batch in batches:
            step(batch)  # D
            save(path)  # E
    """)
    frames = {m: Site(FILE, at[m], f) for m, f in zip("ABCDE", ("save", "commit", "step", "main", "main"), strict=True)}
    commits, reduces = (frames["B"], frames["A"], frames["E"]), (frames["C"], frames["D"])
    s = snapshot(
        *(rank(r, call("barrier", 1, frames["B"]), user_stack=commits) for r in (0, 1)),
        *(rank(r, call(seq=4, group=g, site=frames["C"]), user_stack=reduces) for r, g in ((2, "a"), (3, "b"))),
        groups={"a": (0, 2), "b": (1, 3)},
    )
    f = only(s, source={FILE: text}.get)
    assert (f.cause, f.culprits) == ("group_cycle", ())
    assert f.message.endswith(f"they diverge at `if dp_rank() == 0` (train.py:{at['A'] - 1})")
    assert "on all ranks or on none: `if dp_rank() == 0`" in f.advice and f.advice.endswith("keeps it to ranks 0, 1")


RING = """
    def exchange(self, periodic):
        reqs = []
        if self.rank > 0 or periodic:
            reqs.append(dist.irecv(self.ghost, self.left))  # A
        if self.rank < self.world - 1:
            reqs.append(dist.isend(self.u, self.right))  # B
        for r in reqs:
            r.wait()  # C
"""


def test_the_rank_of_a_ring_that_never_sends_is_the_culprit() -> None:
    """An open chain becomes a ring: rank 0 waits for the last rank, which has no neighbour to send to."""
    text, at = places(RING)
    recv, send, wait = (Site(FILE, at[m], "exchange") for m in "ABC")
    n = 81

    def state(r: int) -> RankState:
        sent = p2p("send", (r + 1) % 3, n + r, send)
        more = {"calls": (sent,), "issued": {f"send:{(r + 1) % 3}:0:default_pg": n + r}} if r < 2 else {}
        sites = {key(recv): n, key(send): n} if r < 2 else {key(recv): n}
        got = 1 if r == 0 else n + r
        return messaging(r, p2p("recv", (r - 1) % 3, got, recv), user_stack=(wait,), sites=sites, **more)

    f = only(snapshot(*map(state, range(3))), source={FILE: text}.get)
    assert summary(f) == ("deadlock", "missing_rank", (2,), (0, 1))
    assert f.message.startswith(
        f"rank 2 skipped its send to rank 0: `if self.rank < self.world - 1` (train.py:{at['B'] - 1})"
    )
    assert "let rank 2 make the send" in f.advice
    served = {**state(2).p2p_issued, "send:0:0:default_pg": 1}  # it has sent before: not that it never does
    s = snapshot(state(0), state(1), msgspec.structs.replace(state(2), p2p_issued=served))
    assert all(found.culprits != (2,) for found in proved(s, source={FILE: text}.get))


PIPELINE = """
    def collect(local):
        if not local:
            return
        gather(local)  # A

    def step(first):
        if first:
            x = read()
        else:
            x = recv(0)  # B

    def main():
        for i in range(400):
            step(first)  # C
            if i % 50 == 49:
                collect(local)  # D
"""


def test_the_stage_that_skips_a_collective_is_the_culprit_although_it_waits_for_a_message() -> None:
    """Rank 1 has sent rank 2 a message in each of its steps, and none is due before it has left the collective."""
    text, at = places(PIPELINE)
    collect, main = Site(FILE, at["A"], "collect"), Site(FILE, at["D"], "main")
    recv, step = Site(FILE, at["B"], "step"), Site(FILE, at["C"], "main")

    def ranks(sent: int, received: int = 50) -> tuple[RankState, ...]:
        gather, sites = call("all_gather", 1, collect), {collect.key: 1, recv.key: 50}
        more = {"sites": sites, "user_stack": (collect, main), "step": 50}
        issued = {"send:2:0:default_pg": sent, "recv:0:0:default_pg": received}
        last = messaging(2, p2p("recv", 1, sent + 1, recv), sites={recv.key: 51}, user_stack=(recv, step), step=50)
        return rank(0, gather, **more), rank(1, gather, p2p_issued=issued, **more), last

    f = only(snapshot(*ranks(50)), source={FILE: text}.get)
    assert summary(f) == ("deadlock", "missing_rank", (2,), (0, 1))
    assert f.message.startswith("rank 2 skipped all_gather (train.py:4): `if not local` (line 2)")
    for may_lack_one in (ranks(49), ranks(50, 51)):  # in an earlier step, or in the one that it is in
        unknown = only(snapshot(*may_lack_one), source={FILE: text}.get)
        assert unknown.culprits == () and "has ever been" not in unknown.message


ROLES = """
    def learn(self, it):
        recv(obs, self.worker)
        if self.rank == 0:
            broadcast(self.weights)  # A

    def roll(self, it):
        send(obs, self.learner)  # B
        self.refresh()  # C

    def refresh(self):
        if self.spread < 0.1:
            return
        broadcast(self.weights)  # D

    def main():
        for it in range(9):
            role.iteration(it)  # E
"""


def test_a_rank_that_left_out_the_call_of_its_own_role_is_told_of_its_own_line() -> None:
    """The learner waits at its line, where no worker ever is: the condition is the one before the worker's own broadcast."""
    text, at = places(ROLES)
    main = Site(FILE, at["E"], "main")
    push, send = Site(FILE, at["A"], "learn", main), Site(FILE, at["B"], "roll", main)
    pull = Site(FILE, at["D"], "refresh", Site(FILE, at["C"], "roll", main))
    earlier = call("broadcast", 6, pull, group="weights")
    s = snapshot(
        rank(0, call("broadcast", 7, push, group="weights"), sites={push.key: 7}, user_stack=push.path),
        messaging(1, p2p("send", 0, 8, send), calls=(earlier,), sites={pull.key: 6, send.key: 8}, user_stack=send.path,
                  enqueued={"weights": 6}),
        groups={"weights": (0, 1)},
    )  # fmt: skip
    (verdict,) = judge(s, graph.build(s), source={FILE: text}.get)
    own = verdict.case.own_call(1, verdict.case.main((1,)))
    assert own is not None and own.site == pull
    told = past_the_call(verdict.case, (1,))
    assert told is not None and [c.text for c in told.conditions] == ["if self.spread < 0.1"]
    assert verdict.case.own_call(0, verdict.case.main((0,))) is None, "a message has no line of a role"


def test_tags_that_never_match_are_named() -> None:
    s = snapshot(messaging(0, p2p("send", 1, tag=1)), messaging(1, p2p("recv", 0, tag=2)))
    assert summary(only(s)) == ("deadlock", "p2p_cycle", (), (0, 1))
    assert "tags 1 of send (train.py:40) and 2 of recv (train.py:40) never match" in only(s).advice
    assert "hash()" not in only(s).advice
    text = "send(x, peer, tag=hash(name))"
    assert "hash()" in only(s, source=lambda _: text).advice


def test_a_tag_of_a_message_on_its_way_that_nobody_receives_is_named() -> None:
    sent = p2p("isend", 1, tag=7)
    issued = {"send:1:7:default_pg": 1}
    waits = messaging(1, p2p("recv", 0, tag=9))
    s = snapshot(messaging(0, p2p("recv", 1), calls=(sent,), issued=issued), waits)
    assert "tags 9 of recv (train.py:40) and 7 of isend (train.py:40) never match" in only(s).advice
    later = snapshot(
        messaging(0, p2p("recv", 1), calls=(sent,), issued=issued),
        messaging(1, p2p("recv", 0, tag=9), issued={"recv:0:7:default_pg": 3}),
    )
    assert "never match" not in only(later).advice, "rank 1 uses tag 7: it may come to that message later"


def test_a_message_with_both_ends_issued_waits_for_nobody() -> None:
    s = snapshot(messaging(0, p2p("send", 1, nth=3)), messaging(1, p2p("recv", 0, nth=3)))
    assert proved(s) == []


def test_a_receive_against_a_barrier_is_a_cycle() -> None:
    """One recv too many, or one send too few: nothing tells which."""
    s = snapshot(messaging(0, p2p("recv", 1)), *(rank(r, call("barrier", 3, SAVE)) for r in (1, 2, 3)))
    assert summary(only(s)) == ("deadlock", "p2p_cycle", (), (0, 1))
    assert only(s).advice.startswith("see whether rank 0 makes one message more")


@pytest.mark.parametrize(("others", "stuck"), [({}, True), ({"send:0:0:default_pg": 1}, False)])
def test_a_receive_from_any_source_is_stuck_if_all_candidates_are(others: dict[str, int], stuck: bool) -> None:
    """Stuck only if no one can send: rank 1 has ended, and a message that it issued before is still available."""
    s = snapshot(messaging(0, p2p("recv", None)), rank(1, life=Life.FINISHED, p2p_issued=others))
    assert bool(graph.build(s).stuck) is stuck


def test_a_receive_from_any_source_may_still_get_a_message_from_a_living_rank() -> None:
    s = snapshot(messaging(0, p2p("recv", None)), rank(1, life=Life.FINISHED), rank(2))
    g = graph.build(s)
    assert (g.stuck, g.sinks) == (frozenset(), (2,))


@pytest.mark.parametrize(
    ("sent", "culprits"),
    [((121, 90, 121), (2,)), ((121, 121, 121), ()), ((60, 90, 121), ()), ((121, 20, 121), ())],
)
def test_an_actor_that_never_said_that_it_is_done(sent: tuple[int, ...], culprits: tuple[int, ...]) -> None:
    """A server receives from any rank, all others are in the barrier. Episodes may differ in number: then any may have left."""
    s = snapshot(
        messaging(0, p2p("recv", None, nth=340)),
        *(rank(r, call("barrier", 3, SAVE), p2p_issued={"send:0:0:default_pg": n}) for r, n in enumerate(sent, 1)),
    )
    received = {f"recv:{r}:0:default_pg": 0 for r in (1, 2, 3)} | {"recv:any:0:default_pg": sum(sent) + 1}
    s.ranks[0] = msgspec.structs.replace(s.ranks[0], p2p_issued=received)
    f = only(s)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank" if culprits else "p2p_cycle", culprits)
    if culprits == (2,):
        assert f.message.startswith("rank 2 has not sent what rank 0 waits for in recv")


def test_messages_are_compared_with_a_rank_whose_host_is_not_known_to_wait_yet() -> None:
    """On a device rank 1 has issued the broadcast, too; its native frames come a poll later."""
    broadcast = call("broadcast", 67, SAVE)
    s = snapshot(
        messaging(0, p2p("recv", 2, nth=131)),
        rank(1, enqueued={"default_pg": 67}, p2p_issued={"send:0:0:default_pg": 132}),
        rank(2, broadcast, enqueued={"default_pg": 67}, p2p_issued={"send:0:0:default_pg": 130}),
    )
    assert only(s).culprits == (2,)


def test_two_incidents_are_two_findings() -> None:
    pair = {"a": (0, 1), "b": (0, 1), "c": (2, 3), "d": (2, 3)}
    s = snapshot(
        *(
            rank(r, call(group=g, seq=1, site=site))
            for r, (g, site) in enumerate(zip("abcd", (TRAIN, EVAL, TRAIN, EVAL), strict=True))
        ),
        groups=pair,
    )
    assert [f.victims for f in proved(s)] == [(0, 1), (2, 3)]


def test_ranks_stuck_behind_a_cycle_are_its_victims() -> None:
    s = snapshot(
        rank(0, call(group="a", seq=1)), rank(1, call(group="b", seq=1, site=EVAL)), rank(2, call(site=SAVE)),
        groups={"a": (0, 1), "b": (0, 1)},
    )  # fmt: skip
    f = only(s)
    assert f.victims == (0, 1)
    assert [w.rank for w in f.waiting] == [2]


def test_the_advice_names_the_call_of_the_others_where_the_own_one_has_no_operation() -> None:
    own, theirs = (
        Call(op=op, group="g", seq=1, site=Site("/job/train.py", line, "main"))
        for op, line in (("", 83), ("all_reduce", 43))
    )
    wait: Any = SimpleNamespace(p2p=False, calls={0: theirs}, key=("g", 1, ""), ranks=(0,))
    verdict: Any = SimpleNamespace(culprits=(3,), wait=wait, call=None, incident=SimpleNamespace(members={0, 3}))
    advice = cycle._missing_advice(verdict, {3: (cast(Any, SimpleNamespace(ranks=(3,))), own)})
    assert advice.startswith("look for a condition on the rank around all_reduce at train.py:43")


def test_a_message_that_came_before_a_collective_in_every_round_is_to_come_first() -> None:
    """Rank 1 now makes the broadcast at another line, before its send; rank 0 is in the recv that always came first."""
    send, recv, old, new = (Site("/job/decode.py", line, "f") for line in (43, 48, 72, 68))

    def made(message: str, peer: int, site: Site, rounds: int) -> list[Call]:
        pairs = (
            (call(message, None, site, peer=peer, nth=n, completed_s=1.0), call("broadcast", n, old, completed_s=1.0))
            for n in range(1, rounds + 1)
        )
        return [each for pair in pairs for each in pair]

    def found(rounds: int, lately: bool = False) -> Finding:
        waiting, first = call("recv", None, recv, peer=1, nth=rounds + 1), call("broadcast", rounds + 1, new)
        calls = made("send", 0, send, rounds)
        calls = [*calls[:-4], calls[-3], *calls[-2:]] if lately else calls
        sent = {"send:0:0:default_pg": rounds}
        return only(
            snapshot(
                rank(0, waiting, calls=(*made("recv", 1, recv, rounds), waiting), enqueued={"default_pg": rounds},
                     completed={"default_pg": rounds}, p2p_issued={"recv:1:0:default_pg": rounds + 1}),
                rank(1, first, calls=(*calls, first), p2p_issued=sent),
            )
        )  # fmt: skip

    f = found(6)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "p2p_cycle", ())
    assert f.message.endswith(
        "; in each of the last 6 rounds rank 1 made send (decode.py:43) and then a broadcast, and in this one the broadcast first"
    )
    assert f.advice.startswith("let rank 1 make that send (decode.py:43) before the broadcast, as in each round before")
    for other in (found(3), found(6, lately=True)):
        assert "rounds" not in other.message


def test_a_rank_that_made_the_collective_of_a_cycle_before_is_told_at_which_line() -> None:
    """Rank 0 waits for samples, and rank 1 for weights: rank 0 sent them every few rounds, if a counter said so."""
    text = "def fit():\n    while True:\n        if self.step % 4 == 0:\n            broadcast(w)\n        recv(x)\n"
    weights, samples, takes = Site("/job/rl.py", 4, "fit"), Site("/job/rl.py", 5, "fit"), Site("/job/rl.py", 9, "serve")

    def found(op: str) -> Finding:
        waiting, more = call("recv", None, samples, peer=1, nth=5), call("broadcast", 4, takes)
        sent = tuple(call(op, n, weights, completed_s=1.0) for n in (1, 2, 3))
        return only(
            snapshot(
                rank(0, waiting, calls=(*sent, waiting), user_stack=(samples,), enqueued={"default_pg": 3}, completed={"default_pg": 3},
                     p2p_issued={"recv:1:0:default_pg": 5}),
                rank(1, more, p2p_issued={"send:0:0:default_pg": 4}),
            ),
            source={"/job/rl.py": text}.get,
        )  # fmt: skip

    f = found("broadcast")
    assert (f.cause, f.culprits) == ("p2p_cycle", ())
    assert f.message.endswith("; rank 0 made broadcast #3 of that group at rl.py:4 in fit")
    assert f.advice.startswith("rank 1 waits in broadcast #4 (default_pg), which rank 0 has not called: see whether ")
    assert found("all_reduce").advice.startswith("see whether rank 0 makes one message more")
    assert "leads rank 0 past the broadcast at rl.py:4 in fit" in f.advice
