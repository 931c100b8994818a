"""Sequence numbers of collectives where the backend counts messages, too, as gloo does."""

from __future__ import annotations

from distdiag.recorder.groups import Group
from distdiag.recorder.layout import GroupSlot


class Gloo:
    """Its counter, and the numbers that its flight recorder would show."""

    def __init__(self) -> None:
        self.counter = 0
        self.collectives: list[int] = []

    def _get_sequence_number_for_group(self) -> int:
        return self.counter

    def collective(self) -> None:
        self.counter += 1
        self.collectives.append(self.counter)


def group() -> tuple[Gloo, Group]:
    gloo = Gloo()
    return gloo, Group(gloo, GroupSlot(), 0, [0, 1, 2])


def message(gloo: Gloo, g: Group, counts: bool = True) -> None:
    g.message_begins()
    gloo.counter += counts
    g.message_ends()


def test_collectives_between_messages_are_counted_from_one() -> None:
    gloo, g = group()
    for round_ in range(12):
        for _ in range(round_ % 4):
            message(gloo, g)
        gloo.collective()
        gloo.collective()  # DDP's, which nobody of ours sees
    assert [g.number(raw) for raw in gloo.collectives] == list(range(1, 25))
    message(gloo, g)
    assert g.slot.enqueued == 24 and g.slot.offset == gloo.counter - 24
    assert (g.number(0), g.number(-1)) == (0, -1)  # none yet; not known


def test_messages_that_overlap_and_a_backend_that_does_not_count_them() -> None:
    gloo, g = group()
    gloo.collective()
    g.message_begins()
    gloo.counter += 1
    g.message_begins()  # of another thread
    gloo.counter += 1
    g.message_ends()
    assert g.offset == 0
    g.message_ends()
    assert (g.offset, g.slot.enqueued) == (2, 1)
    nccl, h = group()
    nccl.collective()
    message(nccl, h, counts=False)
    nccl.collective()
    assert h.offset == 0 and [h.number(raw) for raw in nccl.collectives] == [1, 2]


def test_old_numbers_are_forgotten_and_new_ones_stay_right() -> None:
    gloo, g = group()
    for _ in range(100):
        gloo.collective()
        message(gloo, g)
    assert [g.number(raw) for raw in gloo.collectives[-10:]] == list(range(91, 101))
