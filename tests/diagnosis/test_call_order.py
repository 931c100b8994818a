"""In a cycle: which rank broke the order of its earlier calls."""

from __future__ import annotations

import itertools
import random

import msgspec

from distdiag.diagnosis.culprit import call_order
from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Site, Snapshot, Step
from tests.diagnosis.made import proved


def message(op: str, peer: int, line: int, tag: int = 0, nth: int = 1) -> Call:
    return Call(op=op, group="default_pg", peer=peer, tag=tag, nth=nth, site=Site("pipe.py", line))


def last_stage(steps: int, left_out: int | None = None) -> tuple[Call, ...]:
    """Return the calls of a stage that receives a micro-batch and sends back its gradient, four times per step."""
    out: list[Call] = []
    for i in range(4 * steps):
        out.append(message("recv", 0, 49, nth=i + 1))
        if i != left_out:
            out.append(message("send", 0, 60))
    return tuple(out)


def first_stage(steps: int) -> tuple[Call, ...]:
    """Return the calls of a stage that sends four micro-batches, then receives their gradients."""
    step = [message("send", 1, 40) for _ in range(4)] + [message("recv", 1, 50) for _ in range(4)]
    return tuple(step * steps)


def state(rank: int, calls: tuple[Call, ...]) -> RankState:
    return RankState(rank=rank, calls=calls, blocked=calls[-1])


def test_the_rank_that_skipped_a_call_is_the_culprit_not_the_one_that_waits() -> None:
    ranks = [state(0, first_stage(15)), state(1, last_stage(15, left_out=57))]
    assert call_order.departed(ranks) == 1
    assert call_order.departed([ranks[0], state(1, last_stage(15))]) is None


def test_if_ranks_outside_the_cycle_also_do_something_new_nobody_is_blamed() -> None:
    circle = [state(0, first_stage(15)), state(1, last_stage(15, left_out=57))]
    assert call_order.departed(circle, [state(2, first_stage(15))]) == 1
    assert call_order.departed(circle, [state(2, last_stage(15, left_out=56))]) is None


def test_a_skipped_tag_names_its_rank() -> None:
    def ring(rank: int, twice_at: int | None) -> RankState:
        tag, calls = 0, []
        for i in range(60):
            tag += 2 if i == twice_at else 1
            calls += [message("send", (rank + 1) % 3, 27, tag), message("recv", (rank - 1) % 3, 28, tag)]
        return state(rank, tuple(calls))

    assert call_order.departed([ring(0, None), ring(1, 58), ring(2, None)]) == 1
    assert call_order.departed([ring(0, None), ring(1, 58), ring(2, 57)]) is None  # two of them: neither is blamed
    assert call_order.departed([ring(0, 3), ring(1, None), ring(2, None)]) is None  # long ago


def test_a_shorter_run_of_equal_calls_names_its_rank() -> None:
    def last(left_out: bool) -> tuple[Call, ...]:
        out = []
        for i in range(9):
            out += [message("recv", 0, 49)] * 8 + [message("send", 0, 60)] * (7 if left_out and i == 7 else 8)
        return tuple(out[:-12])  # while receiving

    assert call_order.departed([state(0, first_stage(15)), state(1, last(left_out=True))]) == 1
    assert call_order.departed([state(0, first_stage(15)), state(1, last(left_out=False))]) is None


def test_a_round_with_fewer_messages_of_several_lines_names_its_rank() -> None:
    def first(micro: int) -> tuple[Call, ...]:
        full = [message("send", 1, 10), message("send", 1, 11)] * 4 + [message("recv", 1, 50)] * 4
        return tuple(full * 9 + full[: 2 * micro] + full[8:9])

    def last() -> tuple[Call, ...]:
        each = [message("recv", 0, 16), message("recv", 0, 18)]
        return tuple((each * 4 + [message("send", 0, 22)] * 4) * 9 + each * 3 + each[:1])

    assert call_order.departed([state(0, first(micro=3)), state(1, last())]) == 0
    assert call_order.departed([state(0, first(micro=4)), state(1, last())]) is None


def test_without_a_pattern_nobody_is_blamed() -> None:
    short = [state(0, first_stage(6)), state(1, last_stage(6, left_out=22))]
    assert call_order.departed(short) is None
    any_order = tuple(message("recv", i * i * 7 % 31, 50 + i % 5) for i in range(120))
    assert call_order.departed([state(0, any_order), state(1, last_stage(15, left_out=57))]) is None


def test_the_finding_names_the_culprit_and_the_skipped_call() -> None:
    mine, theirs = last_stage(15, left_out=57), first_stage(15)
    s = Snapshot(
        t_s=9.0,
        world_size=2,
        ranks={
            0: RankState(rank=0, calls=theirs, blocked=message("recv", 1, 50, nth=60), p2p_issued={"recv:1:0:default_pg": 60}),
            1: RankState(rank=1, calls=mine, blocked=message("recv", 0, 49, nth=61), p2p_issued={"recv:0:0:default_pg": 61}),
        },
        groups={"default_pg": Group(name="default_pg", ranks=(0, 1))},
    )  # fmt: skip
    (f,) = proved(s)
    assert (f.kind, f.cause, f.culprits, f.certainty) == ("deadlock", "missing_rank", (1,), "proved")
    assert f.message.startswith(
        "rank 1 left out send (pipe.py:60); rank 1 has not sent what rank 0 waits for in recv from rank 1"
    )


def test_two_sends_in_a_row_are_not_called_a_recv_left_out() -> None:
    """Both wait in a send; rank 0's recv may come next: it has begun to send two micro-batches before it receives."""
    rounds = [m for i in range(40) for m in (message("send", 1, 35, nth=i + 1), message("recv", 1, 27, nth=i + 1))]
    mine = (*rounds, message("send", 1, 35, nth=41), message("send", 1, 35, nth=42))
    theirs = [m for i in range(40) for m in (message("recv", 0, 27, nth=i + 1), message("send", 0, 35, nth=i + 1))]
    theirs += [message("recv", 0, 27, nth=41), message("send", 0, 35, nth=41)]
    s = Snapshot(
        t_s=9.0,
        world_size=2,
        ranks={
            0: RankState(rank=0, calls=mine, blocked=mine[-1], p2p_issued={"send:1:0:default_pg": 42, "recv:1:0:default_pg": 40}),
            1: RankState(rank=1, calls=tuple(theirs), blocked=theirs[-1],
                         p2p_issued={"recv:0:0:default_pg": 41, "send:0:0:default_pg": 41}),
        },
        groups={"default_pg": Group(name="default_pg", ranks=(0, 1))},
    )  # fmt: skip
    (f,) = proved(s)
    assert f.message.startswith("rank 0 made send (pipe.py:35) again before recv (pipe.py:27); rank 0 has not received")
    assert "left out" not in f.message + f.advice and "isend or batch_isend_irecv" in f.advice


def test_ranks_stuck_behind_a_cycle_of_messages_are_not_compared() -> None:
    """With too little history for a pattern nobody is blamed: rank 0 received less often only because it waits for rank 1."""

    def stage(rank: int, blocked: Call, sites: dict[str, int], **messages: int) -> RankState:
        issued = {f"{k[:4]}:{k[4:]}:0:default_pg": n for k, n in messages.items()}
        return RankState(rank=rank, blocked=blocked, sites=sites, p2p_issued=issued)

    first = stage(0, message("recv", 1, 50, nth=5), {"pipe.py:50": 5, "pipe.py:40": 6}, recv1=5, send1=6)
    middle = stage(
        1, message("recv", 2, 50, nth=6), {"pipe.py:50": 6, "pipe.py:49": 6}, recv2=6, send2=6, recv0=6, send0=4
    )
    last = stage(2, message("recv", 1, 49, nth=7), {"pipe.py:49": 7, "pipe.py:60": 5}, recv1=7, send1=5)
    groups = {"default_pg": Group(name="default_pg", ranks=(0, 1, 2))}
    (f,) = proved(Snapshot(t_s=9.0, world_size=3, ranks=dict(enumerate((first, middle, last))), groups=groups))
    assert (f.cause, f.culprits, f.victims) == ("p2p_cycle", (), (1, 2))


def reduced(seq: int, elements: int, line: int = 12, group: str = "default_pg") -> Call:
    return Call(op="all_reduce", group=group, seq=seq, shape=(elements,), dtype="float32", site=Site("net.py", line))


def met(*newest: Call, before: tuple[int, ...] = (8, 64, 3) * 6 + (8,)) -> RankState:
    """Return a rank that reduced the gradients of three layers per step at one line of a loop; then `newest`."""
    calls = [reduced(i + 1, n) for i, n in enumerate(before)]
    return RankState(rank=0, calls=(*calls, *newest), sites={"net.py:12": len(calls) + 1})


def verdict(one: RankState, other: RankState) -> tuple[str, str | None, tuple[int, ...]]:
    seq = one.calls[-1].seq
    assert seq is not None
    ranks = {
        q: msgspec.structs.replace(
            st, rank=q, blocked=st.calls[-1], enqueued={"default_pg": seq}, completed={"default_pg": seq - 1}
        )
        for q, st in enumerate((one, other))
    }
    s = Snapshot(
        t_s=9.0,
        world_size=2,
        ranks=ranks,
        groups={"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")},
    )
    (f,) = proved(s)
    return f.kind, f.cause, f.culprits


def test_of_two_ranks_the_one_that_skips_a_layer_is_the_culprit() -> None:
    assert verdict(met(reduced(20, 64)), met(reduced(20, 3))) == ("mismatch", "shape", (1,))
    assert verdict(met(reduced(20, 3)), met(reduced(20, 64))) == ("mismatch", "shape", (0,))


def test_the_next_call_may_follow_from_several_preceding_calls() -> None:
    before = (8, 8, 64, 8, 3) * 5 + (8, 8)
    assert verdict(met(reduced(28, 64), before=before), met(reduced(28, 3), before=before))[2] == (1,)


def test_without_a_unique_next_call_nobody_is_blamed() -> None:
    for before in [
        (8, 64, 8, 3, 8, 3, 8, 64, 64, 8),
        (8, 64, 8, 64, 8),
        tuple(random.Random(3).choices(range(1, 18), k=40)),
    ]:
        n = len(before) + 1
        assert verdict(met(reduced(n, 64), before=before), met(reduced(n, 3), before=before))[2] == ()
    # neither call is the one that was due
    assert verdict(met(reduced(20, 5)), met(reduced(20, 3)))[2] == ()


def test_lost_calls_leave_no_pattern() -> None:
    one, other = met(reduced(20, 64)), met(reduced(20, 3))
    other = msgspec.structs.replace(other, calls=other.calls[:9] + other.calls[10:])
    assert verdict(one, other)[2] == ()


def trainer(rank: int, metrics: list[int], blocked: str) -> RankState:
    """Return a rank after steps of DDP. After step i it made `metrics[i]` all_reduces in a second group; now it is in `blocked`."""
    calls, steps = [], []
    for i, n in enumerate(metrics, 1):
        steps.append(Step(i, float(i), 900.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None, i, 8, 1.0))
        for k in range(n):
            at = Site("train.py", 18, "log_loss")
            calls.append(Call(op="all_reduce", group="1", seq=len(calls) + 1, site=at, entered_s=i + 0.1 * (k + 1)))
    gradients = Call(
        op="all_reduce", group="default_pg", seq=40, site=Site("train.py", 45, "main"), entered_s=len(metrics) + 0.9
    )
    return RankState(
        rank=rank, calls=tuple(calls), steps=tuple(steps), blocked=calls[-1] if blocked == "metric" else gradients
    )


def metric_against_gradients(first: RankState, second: RankState) -> tuple[str | None, tuple[int, ...]]:
    """Return cause and culprits of two ranks that wait in two groups, each for the other."""
    groups = {name: Group(name=name, ranks=(0, 1)) for name in ("default_pg", "1")}
    issued = [
        {"default_pg": 39, "1": 0} | {state.blocked.group: state.blocked.seq or 0}
        for state in (first, second)
        if state.blocked
    ]
    ranks = {r.rank: msgspec.structs.replace(r, enqueued=n) for r, n in zip((first, second), issued, strict=True)}
    (f,) = proved(Snapshot(t_s=90.0, world_size=2, ranks=ranks, groups=groups))
    return f.cause, f.culprits


def test_a_call_skipped_between_ddp_steps_is_found() -> None:
    """A rank that skips the metric's group is in the next backward: DDP's own all-reduces are not calls of the script."""
    waits = trainer(0, [1, 1, 1, 1, 1, 1], "metric")
    left_out = trainer(1, [1, 1, 1, 1, 1, 0], "gradients")
    assert metric_against_gradients(waits, left_out) == ("missing_rank", (1,))
    one_more = trainer(0, [1, 1, 1, 1, 1, 2], "metric")
    goes_on = trainer(1, [1, 1, 1, 1, 1, 1], "gradients")
    assert metric_against_gradients(one_more, goes_on) == ("missing_rank", (0,))


def test_a_call_is_due_only_if_it_always_followed() -> None:
    new = trainer(0, [1, 1, 1], "metric"), trainer(1, [1, 1, 0], "gradients")
    assert metric_against_gradients(*new) == ("group_cycle", ())
    irregular = trainer(0, [0, 1, 0, 0, 1, 1], "metric"), trainer(1, [0, 1, 0, 0, 1, 0], "gradients")
    assert metric_against_gradients(*irregular) == ("group_cycle", ())


def test_the_rank_whose_batch_splits_into_fewer_micro_batches_is_named() -> None:
    """The last batch has three instead of four: that stage sends less than in every earlier round, and the other expects four."""

    def stage(rank: int, steps: list[int]) -> RankState:
        peer, calls = 1 - rank, []
        send, recv = ("send", "recv") if rank == 0 else ("recv", "send")
        for micro_batches in steps:
            calls += [message(send, peer, line) for _ in range(micro_batches) for line in (29, 30, 31)]
            calls += [message(recv, peer, 36)] * 4
        timed = tuple(msgspec.structs.replace(c, entered_s=0.1 * i) for i, c in enumerate(calls))
        at = msgspec.structs.replace(message("recv", peer, 36 if rank == 0 else 29), entered_s=0.1 * len(calls))
        kept = timed[:-4] if rank == 0 else timed[:-7]
        return RankState(rank=rank, calls=(*kept, at), blocked=at)

    ranks = {0: stage(0, [4] * 12 + [3]), 1: stage(1, [4] * 12 + [4])}
    s = Snapshot(t_s=9.0, world_size=2, ranks=ranks, groups={"default_pg": Group(name="default_pg", ranks=(0, 1))})
    (f,) = proved(s)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank", (0,))


PREVIEW = """
def last(stages):
    for step in range(99):
        x = recv(before)  # 3
        if step % 60 == 59 and stages.last:
            sample(recv(before))  # 5
        send(before, x.grad)  # 6
"""


def test_a_message_that_one_stage_makes_more_is_named_with_its_condition() -> None:
    assert all(line.endswith(f"# {n}") for n, line in enumerate(PREVIEW.strip().splitlines(), 1) if "#" in line)
    theirs = [c for n in range(65) for c in (message("send", 1, 10, nth=n + 1), message("recv", 1, 11, nth=n + 1))]
    mine = []
    for step in range(64):
        mine += [message("recv", 0, 3, nth=step + 1 + (step > 59))]
        mine += [message("recv", 0, 5, nth=61)] if step == 59 else []
        mine += [message("send", 0, 6, nth=step + 1)]
    mine += [message("recv", 0, 3, nth=66)]
    messages = {
        0: {"send:1:0:default_pg": 65, "recv:1:0:default_pg": 65},
        1: {"recv:0:0:default_pg": 66, "send:0:0:default_pg": 64},
    }
    ranks = {
        rank: RankState(rank=rank, calls=tuple(calls), blocked=calls[-1], p2p_issued=messages[rank])
        for rank, calls in enumerate((theirs, mine))
    }
    groups = {"default_pg": Group(name="default_pg", ranks=(0, 1))}
    source = {"pipe.py": PREVIEW.strip()}.get
    (found,) = proved(Snapshot(t_s=9.0, world_size=2, ranks=ranks, groups=groups), source=source)
    assert found.culprits == (1,)
    assert found.message.startswith(
        "rank 1 alone made recv (pipe.py:5): `if step % 60 == 59 and stages.last` (pipe.py:4); "
    )
    assert found.advice is not None and found.advice.startswith(
        "see whether rank 0 makes the other end of that message when `if step % 60 == 59 and stages.last` at pipe.py:4"
    )


def test_a_message_received_once_more_than_ever_in_a_row_names_its_rank() -> None:
    """The last round is not over: the rank is still in the calls that it makes too often."""
    each = [message("recv", 0, 49), message("send", 2, 60)] * 3 + [message("recv", 2, 70), message("send", 0, 80)] * 3
    other = tuple(([message("send", 1, 10)] * 3 + [message("recv", 1, 11)] * 3) * 14)
    for more, culprit in ((1, None), (4, 1)):
        assert (
            call_order.departed([state(0, other), state(1, (*each * 8, *[message("recv", 0, 49)] * more))]) == culprit
        )


def test_a_tag_that_jumps_is_told_as_a_tag_and_not_as_another_call() -> None:
    """The line is the same: to say that it made this call instead of this call would be absurd."""

    def half(peer: int, jump: bool) -> tuple[Call, ...]:
        tags = itertools.accumulate(2 if jump and i == 58 else 1 for i in range(60))
        out = [(message("recv", peer, 27, tag, nth=1), message("send", peer, 28, tag + 500, nth=1)) for tag in tags]
        return tuple(c for pair in out for c in pair)

    ranks = {q: state(q, half(1 - q, jump=q == 1)) for q in range(2)}
    issued = {q: {f"send:{1 - q}:{c.tag}:default_pg": 1 for c in st.calls if c.op == "send"} for q, st in ranks.items()}
    ranks = {q: msgspec.structs.replace(st, p2p_issued=issued[q]) for q, st in ranks.items()}
    groups = {"default_pg": Group(name="default_pg", ranks=(0, 1))}
    (found,) = proved(Snapshot(t_s=9.0, world_size=2, ranks=ranks, groups=groups))
    assert found.culprits == (1,) and "had followed" not in found.message
    assert "the tag of its" in found.message


WORKER = """
def run(server):
    for x in files:
        send(server, grad(x))  # 3
        recv(server)  # 4

def report():
    barrier()  # 7

run(0)  # 9
report()  # 10
"""


def test_a_rank_that_has_left_the_loop_of_the_message_that_was_due_is_said_to() -> None:
    """A worker has fewer files than the others; the server waits for its next gradient."""
    assert all(line.endswith(f"# {n}") for n, line in enumerate(WORKER.strip().splitlines(), 1) if "#" in line)

    def site(line: int, function: str) -> Site:
        return Site("pipe.py", line, function)

    ends = Call(op="barrier", group="default_pg", seq=1, site=Site("pipe.py", 7, "report", site(10, "<module>")))
    worker = [msgspec.structs.replace(message(op, 0, 0, nth=n), site=site(line, "run"))
              for n in range(1, 61) for op, line in (("send", 3), ("recv", 4))]  # fmt: skip
    server = [message(op, 1, line, nth=n) for n in range(1, 62) for op, line in (("recv", 21), ("send", 22))][:-1]
    ranks = {
        0: RankState(rank=0, calls=tuple(server), blocked=server[-1], p2p_issued={"recv:1:0:default_pg": 61, "send:1:0:default_pg": 60}),
        1: RankState(rank=1, calls=(*worker, ends), blocked=ends, enqueued={"default_pg": 1},
                     p2p_issued={"send:0:0:default_pg": 60, "recv:0:0:default_pg": 60}),
    }  # fmt: skip
    groups = {"default_pg": Group(name="default_pg", ranks=(0, 1))}
    source = {"pipe.py": WORKER.strip()}.get
    (found,) = proved(Snapshot(t_s=9.0, world_size=2, ranks=ranks, groups=groups), source=source)
    assert found.message.startswith("rank 1 left the loop before send (pipe.py:3): `for x in files` (pipe.py:2); ")
    assert "run equally often on all ranks" in (found.advice or "")


PATIENCE = """
def forward():
    recv(0)  # 2

def backward():
    send(0)  # 5

def run():
    for step in range(100):
        loss = forward()  # 9
        backward()  # 10
        if stopper.update(loss):
            break
    barrier()  # 13

run()  # 15
"""


def test_a_stage_that_has_left_the_loop_around_the_functions_of_its_messages_is_said_to() -> None:
    """The last stage stops early, by its loss."""
    assert all(line.endswith(f"# {n}") for n, line in enumerate(PATIENCE.strip().splitlines(), 1) if "#" in line)
    main = Site("pipe.py", 15, "<module>")
    ends = Call(op="barrier", group="default_pg", seq=1, site=Site("pipe.py", 13, "run", main))
    stage = [msgspec.structs.replace(message(op, 0, 0, nth=n), site=Site("pipe.py", line, function))
             for n in range(1, 61) for op, line, function in (("recv", 2, "forward"), ("send", 5, "backward"))]  # fmt: skip
    first = [message(op, 1, line, nth=n) for n in range(1, 62) for op, line in (("send", 21), ("recv", 22))][:-1]
    ranks = {
        0: RankState(rank=0, calls=tuple(first), blocked=first[-1], p2p_issued={"send:1:0:default_pg": 61, "recv:1:0:default_pg": 60}),
        1: RankState(rank=1, calls=(*stage, ends), blocked=ends, enqueued={"default_pg": 1}, user_stack=(Site("pipe.py", 13, "run"), main),
                     p2p_issued={"send:0:0:default_pg": 60, "recv:0:0:default_pg": 60}),
    }  # fmt: skip
    groups = {"default_pg": Group(name="default_pg", ranks=(0, 1))}
    (found,) = proved(
        Snapshot(t_s=9.0, world_size=2, ranks=ranks, groups=groups), source={"pipe.py": PATIENCE.strip()}.get
    )
    assert found.message.startswith(
        "rank 1 left the loop before recv (pipe.py:2): `if stopper.update(loss)` (pipe.py:11); "
    )
    assert "let all ranks decide together" in (found.advice or "")


def test_ranks_that_skip_a_collective_together_each_in_its_own_group_are_culprits() -> None:
    """Ranks 2 and 3, one stage of a pipeline, overflow and return before they clip; ranks 0 and 1 wait, each for one of them."""
    text = (
        "def step(self):\n    found = all_reduce(overflow)\n    if found:\n        return False\n    all_reduce(norm)\n"
        "def main():\n    while True:\n        if self.first:\n            send(x)\n        else:\n            recv(x)\n        step(self)\n"
    )
    outer = Site("job.py", 12, "main")
    check, clip = (Site("job.py", line, "step", outer) for line in (2, 5))

    def calls(q: int, rounds: int, skips: bool) -> list[Call]:
        made: list[Call] = []
        for n in range(1, rounds + 1):
            op, line = ("send", 9) if q < 2 else ("recv", 11)
            made += [
                Call(op=op, group="default_pg", peer=(q + 2) % 4, nth=n, site=Site("job.py", line, "main")),
                Call(op="all_reduce", group=f"stage {q // 2}", seq=n, site=check),
                Call(op="all_reduce", group=f"pipe {q % 2}", seq=n, site=clip),
            ]
        return (
            [
                *made[:-1],
                Call(op="recv", group="default_pg", peer=q - 2, nth=rounds + 1, site=Site("job.py", 11, "main")),
            ]
            if skips
            else made
        )

    def found() -> list[tuple[str, tuple[int, ...]]]:
        states = {}
        for q in range(4):
            made = calls(q, 40, q > 1)
            key, n = (f"send:{q + 2}:0:default_pg", 40) if q < 2 else (f"recv:{q - 2}:0:default_pg", 40 + (q > 1))
            states[q] = RankState(
                rank=q, calls=tuple(made), blocked=made[-1], user_stack=made[-1].site.path if made[-1].site else (), p2p_issued={key: n},
                enqueued={f"stage {q // 2}": 40, f"pipe {q % 2}": 39 if q > 1 else 40},
                completed={f"stage {q // 2}": 40, f"pipe {q % 2}": 39},
            )  # fmt: skip
        groups = {"default_pg": (0, 1, 2, 3), "stage 0": (0, 1), "stage 1": (2, 3), "pipe 0": (0, 2), "pipe 1": (1, 3)}
        s = Snapshot(t_s=9.0, world_size=4, ranks=states, groups={n: Group(name=n, ranks=r) for n, r in groups.items()})
        return [(f.message, f.culprits) for f in proved(s, source={"job.py": text}.get)]

    both = found()
    assert [culprits for _, culprits in both] == [(2,), (3,)]
    for message, _ in both:
        assert "left out all_reduce (job.py:5, called at job.py:12): `if found` (job.py:3)" in message
    assert "unlike rank 0: after all_reduce (job.py:2" in both[0][0]


def test_a_call_that_is_left_out_of_a_backward_is_looked_for_in_the_forward() -> None:
    """Autograd runs a function's backward only if its input needs a gradient: rank 2 got no tokens, and its expert returned a new tensor."""
    text = (
        "def expert(x):\n    if len(x) == 0:\n        return x.new_empty((0, 4))\n    return net(x)\n"
        "class AllToAll(torch.autograd.Function):\n    def backward(ctx, grad):\n        all_to_all(out, grad)\n"
        "def train():\n    for step in range(60):\n        loss = model(step)\n        loss.backward()\n        all_reduce(norm)\n"
    )
    ends = [Site("moe.py", line, "train") for line in (10, 11, 12)]
    forward, backward, norm = ends[0], Site("moe.py", 7, "backward", ends[1]), ends[2]
    states, groups = {}, {name: Group(name=name, ranks=(0, 1, 2)) for name in ("default_pg", "ep")}
    for q in range(3):
        made: list[Call] = []
        for n in range(1, 31):
            made += [
                Call(op="all_to_all", group="ep", seq=2 * n - 1, site=forward), Call(op="all_to_all", group="ep", seq=2 * n, site=backward),
                Call(op="all_reduce", group="default_pg", seq=n, site=norm),
            ]  # fmt: skip
        made = [*made[:-2], made[-1]] if q == 2 else made[:-1]
        here = made[-1].site
        states[q] = RankState(
            rank=q, calls=tuple(made), blocked=made[-1], user_stack=here.path if here else (),
            enqueued={"ep": 59 if q == 2 else 60, "default_pg": 30 if q == 2 else 29}, completed={"ep": 59, "default_pg": 29},
        )  # fmt: skip
    (found,) = proved(Snapshot(t_s=9.0, world_size=3, ranks=states, groups=groups), source={"moe.py": text}.get)
    head = (
        "rank 2 left `loss.backward()` at moe.py:11 in train without all_to_all (moe.py:7, called at moe.py:11) in it"
    )
    assert found.culprits == (2,) and found.message.startswith(head)
    assert "keep rank 2's result in the graph" in found.advice and "`if len(x) == 0` at moe.py:2" in found.advice
