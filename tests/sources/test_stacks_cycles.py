"""Who is the culprit of ranks that wait for each other, by local variables and by the source of the loop they are in."""

from __future__ import annotations

import pytest

from distdiag.sources.stacks.calls import position
from distdiag.sources.stacks.frames import Frame, Stack
from distdiag.sources.stacks.verdict import Seen, findings

C10D = "/lib/site-packages/torch/distributed/distributed_c10d.py"
LOGGER = "/lib/site-packages/torch/distributed/c10d_logger.py"
GROUP = "<torch._C._distributed_c10d.ProcessGroup at 0x7f>"


def rank(
    op: str, *frames: tuple[str, int, dict[str, int]], group: str = "", peer: dict[str, int] | None = None
) -> Seen:
    """A rank in an operation; `frames`: function, line and integers of the user's frames, innermost first."""
    passed = {"args": f"({GROUP})"} if group else {}
    library = [
        Frame(op, C10D, 1, {k: str(v) for k, v in (peer or {}).items()}, {"group": 7}),
        Frame("wrapper", LOGGER, 1, passed),
    ]
    users = [
        Frame(name, "/x/a.py", line, {k: str(v) for k, v in own.items()} | {group: GROUP}, {group: 7})
        for name, line, own in frames
    ]
    return Seen(position=position(Stack((*library, *users), idle=True)))


def culprits(text: str, *ranks: Seen) -> tuple[tuple[int, ...], str]:
    (finding,) = findings(dict(enumerate(ranks)), lambda _: text)
    return finding.culprits, finding.message


SKIPS = """
def average(model, group):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
def main():
    for step in range(110):
        if (y < 0).any():
            continue
        loss(model(x)).backward()
        average(model, group)
        MORE
    dist.barrier()
"""


def grid(ended: int = 3) -> list[Seen]:
    replicas = rank("all_reduce", ("average", 4, {}), ("main", 10, {"step": 109}), group="group")
    shards = rank("all_reduce", ("main", 9, {"step": 109}), group="shard")
    past = rank("barrier", ("main", 12, {"step": 109}))
    return [past if q >= ended else shards if q == 2 else replicas for q in range(4)]


def test_a_rank_that_has_ended_the_loop_has_left_out_a_round() -> None:
    named, message = culprits(SKIPS, *grid())
    assert named == (3,)
    assert "rank 3 has ended the loop in which ranks 0, 1, 2 still are" in message


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (
            SKIPS.replace("MORE", "if late(): dist.all_reduce(flag)"),
            3,
        ),  # the others may have made one more
        (SKIPS.replace("MORE", "if late(): average(model, group)"), 3),
        (SKIPS.replace("MORE", "late() and model(x)"), 3),  # a module that may communicate
        (SKIPS.replace("MORE", "for x in late: dist.all_reduce(x)"), 3),
        (SKIPS.replace("range(110)", "loader"), 3),  # each rank may have another number of batches
        (SKIPS, 2),  # two against two
        (SKIPS.replace("            continue", "            pass"), 3),  # no way to leave out a call is known
    ],
    ids=["extra", "same", "module", "inner", "loader", "tie", "no way"],
)
def test_a_loop_whose_source_leaves_it_open(text: str, ended: int) -> None:
    assert all(f.culprits == () for f in findings(dict(enumerate(grid(ended))), lambda _: text))


RELAY = """WIDTH, MICRO = 40, 3
class Link:
    def __init__(self, stage, stages):
        self.after = stage + 1 if stage + 1 < stages else None
        self.before = stage - 1 if stage else None
class Stage:
    def __init__(self, stage, stages):
        self.link = Link(stage, stages)
    def through(self, x):
        if self.link.before is not None:
            dist.recv(x, self.link.before)
        if self.link.after is not None:
            dist.send(x, self.link.after)
    def back(self, y):
        if self.link.after is None:
            y.sum().backward()
        else:
            dist.recv(y, self.link.after)
        if self.link.before is not None:
            dist.send(y, self.link.before)
def held_out(stage, x):
    stage.through(x)
def fit():
    for step in range(200):
        kept = [stage.through(x) for _ in range(MICRO)]
        losses = [stage.back(y) for y in kept]
        if step % 70 == 0 and stage.link.after is None:
            held_out(stage, x)
"""


def relay(step: int = 71) -> list[Seen]:
    def back(q: int) -> Seen:
        return rank("recv", ("back", 18, {}), ("fit", 26, {"step": 71}), peer={"src": q + 1})

    return [back(0), back(1), rank("recv", ("through", 11, {}), ("fit", 25, {"step": step}), peer={"src": 1})]


def test_a_rank_that_alone_can_have_made_one_call_more() -> None:
    named, message = culprits(RELAY, *relay())
    assert named == (2,)
    assert "`if step % 70 == 0 and stage.link.after is None` at a.py:27" in message


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (RELAY, 72),  # in the next round: the others may have left one out
        (RELAY.replace("range(MICRO)", "batches()"), 71),
        (RELAY.replace(" and stage.link.after is None", " and stage.best"), 71),  # it may hold on all
        (
            RELAY.replace("if self.link.after is not None:", "if self.link.after is not None and good(x):"),
            71,
        ),  # or one sent less
        (
            RELAY.replace(
                "            held_out", "            stage.back(x)\n        if stage.best:\n            held_out"
            ),
            71,
        ),
    ],
    ids=["round", "uneven", "all", "skipped", "two"],
)
def test_a_relay_whose_source_leaves_it_open(text: str, step: int) -> None:
    assert all(f.culprits == () for f in findings(dict(enumerate(relay(step))), lambda _: text))


CLIP = """
def train(rank):
    for step in range(200):
        model(x)
        if rank == 0 and step > 60:
            clip(model)
        opt.step()
"""


def test_a_rank_in_wait_tensor_waits_and_its_condition_names_it() -> None:
    """Its group is not known: it was `busy in its own code`."""
    wait = Frame("wait_tensor", C10D.replace("distributed_c10d", "_functional_collectives"), 1)
    clips = Seen(position=position(Stack((wait, Frame("train", "/x/a.py", 6)), idle=True)))
    named, message = culprits(CLIP, clips, rank("all_reduce", ("train", 4, {"step": 61})))
    assert named == (0,)
    assert "rank 0 is in a collective at a.py:6 in train where rank 1 waits in all_reduce" in message
    assert "`if rank == 0 and step > 60`" in message
    (tie,) = findings(
        {0: clips, 1: rank("all_reduce", ("train", 4, {}))}, lambda _: CLIP.replace("rank == 0 and", "late and")
    )
    assert tie.culprits == ()


def test_functions_that_all_call_each_other_are_looked_through_once() -> None:
    calls = "; ".join(f"helper{n}()" for n in range(40))
    helpers = "".join(f"\ndef helper{n}():\n    {calls}\n" for n in range(40))
    text = RELAY.replace("            held_out", "            helper0()\n            held_out") + helpers
    named, _ = culprits(text, *relay())
    assert named == (2,)
