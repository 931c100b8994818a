"""Ranks that part before they hang: calls that pair silently, a receiver that is left out, a group of others, a backward that did not run."""

from __future__ import annotations

from textwrap import dedent

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, RankState, Sample, Site
from tests.diagnosis import waits
from tests.diagnosis.waits import call, only, snapshot

FILE = "/job/train.py"


def site(line: int, function: str = "main") -> Site:
    return Site(FILE, line, function)


def rank(r: int, *calls: Call, stack: tuple[Site, ...] = (), sites: dict[int, int], **more: object) -> RankState:
    """Return a rank that waits in the last of its calls."""
    counted = {f"{FILE}:{line}": n for line, n in sites.items()}
    return waits.rank(r, calls[-1], calls=calls, user_stack=stack, sites=counted, **more)


RETRY = dedent("""\
    def upload(data):
        try:
            put(data)
        except ConnectionError:
            dist.barrier()
        dist.barrier()

    def main():
        for step in range(900):
            loss.backward()
            upload(data)
""")


def retry(earlier: int = 0, at: int = 5) -> Finding:
    """Return the finding of two ranks; rank 1 has made the barrier of line `at` more, and been there `earlier`."""
    barrier, end, step = (site(line, f) for line, f in ((at, "upload"), (6, "upload"), (10, "main")))
    caller, used = site(11), {6: 3, 10: 3}
    one = call("barrier", 5, barrier, completed_s=3.0), call("barrier", 6, end)
    other = call("barrier", 5, end, completed_s=3.0), call("all_reduce", 6, step)
    return only(
        snapshot(
            rank(0, *other, stack=(step,), sites=used),
            rank(1, *one, stack=(end, caller), sites={**used, at: 1 + earlier}),
        ),
        source={FILE: RETRY}.get,
    )


def test_the_first_pair_of_calls_from_different_lines_is_the_divergence() -> None:
    found = retry()
    assert found.culprits == (1,)
    assert found.message.startswith("only rank 1 made barrier (train.py:5): `except ConnectionError` (train.py:4); ")
    assert "make barrier at train.py:5 on all ranks or on none" in (found.advice or "")


def test_calls_that_have_always_paired_from_different_lines_prove_nothing() -> None:
    assert "only rank 1 made" not in retry(earlier=1).message


def left_out(sent_before: int) -> Finding:
    """Return the finding of a sender (rank 2) that served rank 0 only, at a site used `sent_before` times before."""

    def message(op: str, nth: int, peer: int, line: int, done: float | None) -> Call:
        return Call(op=op, group="default_pg", peer=peer, nth=nth, site=site(line), shape=(1,), completed_s=done)

    return only(
        snapshot(
            rank(
                0, message("recv", 1, 2, 32, 1.0), call("all_reduce", 4, site(33), group="team"),
                sites={32: 1, 33: 1}, p2p_issued={"recv:2:0:default_pg": 1},
            ),
            rank(1, message("recv", 1, 2, 32, None), sites={32: 1}, p2p_issued={"recv:2:0:default_pg": 1}, enqueued={"team": 3}),
            rank(
                2, message("send", 1, 0, 19, 1.0), message("recv", 1, 0, 20, None),
                sites={19: 1 + sent_before, 20: 1}, p2p_issued={"send:0:0:default_pg": 1, "recv:0:0:default_pg": 1},
            ),
            groups={"team": (0, 1)},
        )
    )  # fmt: skip


def test_the_sender_that_left_one_receiver_out_is_named() -> None:
    found = left_out(0)
    assert found.culprits == (2,)
    assert "rank 2 has not sent what rank 1 waits for in recv from rank 2" in found.message
    # first, and without the condition of another send
    assert found.message.startswith("rank 2 made the send at train.py:19 in main for rank 0 only; rank 2 has not sent")
    assert found.message.endswith("; rank 1's recv at train.py:32 in main has none")
    assert "let rank 2 make the send at train.py:19 in main for rank 1, too" in (found.advice or "")


def test_a_sender_that_alternates_between_receivers_has_left_nobody_out() -> None:
    assert "for rank 0 only" not in left_out(4).message


def test_ranks_that_called_a_group_of_others_are_the_culprits_of_the_cycle() -> None:
    line = site(19, "mean")
    outside = (Sample("not_a_member", 0, 0.0, name="all_reduce", site=line),)

    def member(r: int, group: str, seq: int, samples: tuple[Sample, ...] = ()) -> RankState:
        return rank(r, call("all_reduce", seq, line, group=group), sites={19: 1}, samples=samples)

    found = only(
        snapshot(
            member(0, "left", 1), member(1, "default_pg", 2, outside),
            member(2, "default_pg", 2, outside), member(3, "right", 1),
            groups={"left": (0, 1), "right": (2, 3)},
        )
    )  # fmt: skip
    assert found.culprits == (1, 2)
    assert "rank 1 has not entered all_reduce #1 (left" in found.message and "rank 0 waits for it" in found.message
    assert "in a group that they are no members of" in found.message


HALO = dedent("""\
    def smooth(x):
        if x.abs().max() < 1e-6:
            return torch.zeros(len(x), 4)
        return net(x)

    class Gather(torch.autograd.Function):
        @staticmethod
        def backward(ctx, grad):
            dist.all_gather(parts, grad)

    def average(params):
        for p in params:
            if p.grad is not None:
                dist.all_reduce(p.grad)

    def main():
        for step in range(300):
            out = forward(x)
            loss.backward()
            average(model.parameters())
""")


def test_a_condition_that_the_others_have_not_reached_does_not_count() -> None:
    """Rank 2 has left `loss.backward()` without the call in it; `p.grad is not None` leads to its own place only."""
    inside, after, before = site(9, "backward"), site(14, "average"), site(18)
    used = {9: 25, 14: 25, 18: 26}
    shared = call("all_gather", 6, before, completed_s=3.0)
    others = [
        rank(r, shared, call("all_gather", 7, inside), stack=(inside, site(19)), sites=used | {9: 26}) for r in (0, 1)
    ]
    culprit = rank(2, shared, call("all_reduce", 7, after), stack=(after, site(20)), sites=used | {14: 26})
    found = only(snapshot(*others, culprit), source={FILE: HALO}.get)
    assert found.culprits == (2,)
    assert "p.grad is not None" not in found.message
    head = "rank 2 left `loss.backward()` at train.py:19 in main without all_gather (train.py:9) in it"
    assert (
        found.message.startswith(head) and "runs only where the input of its forward needs a gradient" in found.message
    )
    test = "`if x.abs().max() < 1e-6`"
    assert f"decides whether a new tensor, without a graph, is returned: {test}" in found.message
    assert (
        "keep rank 2's result in the graph: look for a tensor that the model makes anew (zeros, empty, detach, no_grad) on some ranks"
        in str(found.advice)
    )
    assert f"as under {test} at train.py:2" in str(found.advice)


RELAY = dedent("""\
    def relay(frames):
        for _ in range(frames):
            dist.recv(frame, src=0)
            if frame.std() < 0.05:
                continue
            dist.send(frame, dst=2)
""")


def relay(frames: int, silent: set[int], expected: int, kept: int = 500, third: bool = False) -> Finding:
    """Return the finding of a relay (rank 1) that sends on all frames but the silent ones; the receiver (rank 2) expects so many."""

    def message(op: str, nth: int, peer: int, line: int, done: float | None = 1.0) -> Call:
        return Call(
            op=op, group="default_pg", peer=peer, nth=nth, site=site(line, "relay"), shape=(1,), completed_s=done
        )

    calls: list[Call] = []
    for k in range(frames):
        calls.append(message("recv", k + 1, 0, 3))
        if k not in silent:
            calls.append(message("send", k + 1, 2, 6))
        if third:
            calls.append(message("send", k + 1, 3, 6))
    sent = frames - len(silent)
    barrier = call("barrier", 1, site(20))
    return only(
        snapshot(
            rank(0, barrier, sites={20: 1}, p2p_issued={"send:1:0:default_pg": frames}),
            rank(
                1, *calls[-kept:], barrier, sites={3: frames, 6: sent, 20: 1},
                p2p_issued={"recv:0:0:default_pg": frames, "send:2:0:default_pg": sent},
            ),
            rank(2, message("recv", expected, 1, 9, None), sites={9: expected}, p2p_issued={"recv:1:0:default_pg": expected}),
        ),
        source={FILE: RELAY}.get,
    )  # fmt: skip


@pytest.mark.parametrize("kept", [500, 60])
def test_the_relay_that_left_out_one_message_is_named_and_not_the_receiver(kept: int) -> None:
    """Also if the round is longer ago than the calls are known: then the two lines' totals differ."""
    found = relay(100, {30}, 100, kept)
    assert found.culprits == (1,)
    assert found.message.startswith(
        "rank 1 left out its send (train.py:6) to rank 2: `if frame.std() < 0.05` (train.py:4)"
    )
    assert "it did so once after recv at train.py:3 in relay, and made that send 99 times" in found.message
    assert "`if frame.std() < 0.05` (train.py:4)" in found.message


def test_what_only_the_newest_calls_show_is_not_given_as_a_total() -> None:
    """The line sends to two ranks: its total is not that of one of them."""
    found = relay(100, {95}, 100, 60, third=True)
    assert (
        "; in its newest calls it did so once after recv at train.py:3 in relay, and made that send 19 times"
        in found.message
    )


def test_a_receiver_that_expects_more_than_the_relay_got_accuses_nobody() -> None:
    assert relay(100, set(), 101).culprits == ()


def test_a_relay_that_often_sends_nothing_on_is_not_accused_of_the_last_time() -> None:
    assert relay(100, {k for k in range(100) if k % 5 == 0}, 100).culprits == ()
