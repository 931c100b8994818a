"""Sequence numbers of collectives if the backend also counts messages, as gloo does."""

from __future__ import annotations

import json

import pytest

from distdiag.page.layout import GroupSlot
from distdiag.recorder.hooks import flight_recorders, group_counters
from distdiag.recorder.hooks.collectives import Collectives
from distdiag.recorder.hooks.group_counters import Batch, Group, Groups


@pytest.fixture(autouse=True)
def groups_are_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_counters, flight_recorders):
        monkeypatch.setattr(module, "of_torch", lambda pg, name, otherwise=(): getattr(pg, name, otherwise))


class Gloo:
    """gloo's counter, and the numbers that its flight recorder would show."""

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
        gloo.collective()  # DDP's collective, which no hook sees
    assert [g.numbering.number(raw) for raw in gloo.collectives] == list(range(1, 25))
    message(gloo, g)
    assert g.slot.enqueued == 24 and g.slot.offset == gloo.counter - 24
    assert (g.numbering.number(0), g.numbering.number(-1)) == (0, -1)  # none yet; unknown


def test_overlapping_messages_are_subtracted_unless_the_backend_does_not_count_them() -> None:
    gloo, g = group()
    gloo.collective()
    g.message_begins()
    gloo.counter += 1
    g.message_begins()  # in another thread
    gloo.counter += 1
    g.message_ends()
    assert g.offset == 0
    g.message_ends()
    assert (g.offset, g.slot.enqueued) == (2, 1)
    nccl, h = group()
    nccl.collective()
    message(nccl, h, counts=False)
    nccl.collective()
    assert h.offset == 0 and [h.numbering.number(raw) for raw in nccl.collectives] == [1, 2]


def test_a_beat_of_the_pulse_in_a_message_does_not_shift_the_numbers() -> None:
    """It read that no message is open, and the counter once one was on its way."""
    gloo, g = group()
    gloo.collective()
    g.message_begins()
    gloo.counter += 1
    g.slot.enqueued = gloo.counter - g.offset
    g.message_ends()
    assert (g.offset, g.slot.enqueued) == (1, 1)
    gloo.collective()
    assert g.numbering.number(gloo.counter) == 2


def test_old_numbers_are_dropped_and_new_ones_stay_correct() -> None:
    gloo, g = group()
    for _ in range(100):
        gloo.collective()
        message(gloo, g)
    assert [g.numbering.number(raw) for raw in gloo.collectives[-10:]] == list(range(91, 101))


class Recorded:
    """The groups of a process, and the flight recorder's counters of them under its own numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.gloos = [Gloo() for _ in numbers]
        self.groups = Groups.__new__(Groups)
        found = [
            Group(gloo, GroupSlot(completed=-1, flight_recorder_id=-1), i, [0, 1]) for i, gloo in enumerate(self.gloos)
        ]
        self.groups.groups = {id(g): g for g in found}
        self.slots = [g.slot for g in found]
        self.numbers = numbers
        self.meanwhile: list[int] = []  # groups that advance while the counters are read
        monkeypatch.setattr(group_counters, "own_status", self._status)

    def _status(self) -> dict[str, dict[str, str]]:
        out = {}
        for number, gloo in zip(self.numbers, self.gloos, strict=True):
            if number >= 0 and gloo.counter:
                counts = {
                    "last_enqueued_collective": str(gloo.counter),
                    "last_completed_collective": str(gloo.counter - 1),
                }
                out[str(number)] = counts
        for i in self.meanwhile:
            self.gloos[i].collective()
        return out

    def beat(self) -> list[tuple[int, int, int]]:
        """Return (enqueued, completed, number in the flight recorder) of each group."""
        self.groups.refresh_groups()
        return [(s.enqueued, s.completed, s.flight_recorder_id) for s in self.slots]


def test_groups_with_equal_counts_are_distinguished_once_one_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(monkeypatch, 2, 1)  # used in another order than created; the default group is never used
    for gloo in job.gloos:
        gloo.collective()
    assert job.beat() == [(1, -1, -1), (1, -1, -1)]
    job.gloos[1].collective()
    assert job.beat() == [(1, 0, 2), (2, 1, 1)]
    job.gloos[0].collective()
    assert job.beat() == [(2, 1, 2), (2, 1, 1)]


def test_a_group_that_advances_during_the_read_is_not_confused_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(monkeypatch, 1, 2)
    job.gloos[0].collective()
    job.gloos[1].collective()
    job.gloos[1].collective()
    job.meanwhile = [0]  # it reaches the other's count
    assert [number for *_, number in job.beat()] == [-1, 2]
    job.meanwhile = []
    job.gloos[0].collective()
    assert job.beat() == [(3, 2, 1), (2, 1, 2)]


def test_counters_matched_to_the_wrong_group_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(monkeypatch, -1, 1)  # the flight recorder lacks the first group
    job.gloos[0].collective()
    job.slots[0].flight_recorder_id = 1
    job.gloos[1].collective()
    job.gloos[1].collective()
    assert job.beat() == [(1, -1, -1), (2, 1, 1)]


def test_a_running_call_may_be_missing_in_the_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(monkeypatch, 1)
    job.gloos[0].collective()
    job.slots[0].flight_recorder_id = 1
    monkeypatch.setattr(
        group_counters,
        "own_status",
        lambda: {"1": {"last_enqueued_collective": "0", "last_completed_collective": "0"}},
    )
    assert job.beat() == [(1, -1, 1)]  # the count is known, and the counters are still matched


def test_operations_of_a_coalesced_group_share_one_number() -> None:
    """NCCL assigns the number with the first of them."""
    nccl, g = group()
    collectives = Collectives.__new__(Collectives)
    nccl.collective()
    g.coalescing = Batch(0)
    first = collectives._next_seq(g)
    nccl.collective()
    assert first == collectives._next_seq(g) == 2
    g.coalescing = None
    assert collectives._next_seq(g) == 3


def test_counters_of_both_flight_recorders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with NCCL and gloo has two, whose groups have their own numbers."""
    for name, done in (("_dump_nccl_trace_json", "7"), ("_dump_fr_trace_json", "3")):
        text = json.dumps({"pg_status": {"0": {"last_completed_collective": done}}})
        monkeypatch.setattr(flight_recorders.c10d, name, lambda *_, text=text: text, raising=False)
    monkeypatch.setattr(flight_recorders, "OWN", ["nccl"])
    found = flight_recorders.own_status()
    assert {k: v["last_completed_collective"] for k, v in found.items()} == {
        "0": "7",
        str(flight_recorders.SECOND_RECORDER): "3",
    }


class Mute:
    """A process group of a backend without sequence numbers; `inner` is what torch queries for each device."""

    _device_types = ("cpu",)

    def __init__(self, inner: object = None) -> None:
        self.inner = inner

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("ProcessGroup other does not yet support sequence numbers.")

    def _get_backend(self, device: str) -> object:
        if self.inner is None:
            raise RuntimeError("No backend type associated with device type cpu")
        return self.inner


def test_without_sequence_numbers_calls_from_python_are_counted() -> None:
    g = Group(Mute(), GroupSlot(enqueued=3), 0, [0, 1])
    assert g.counter is None and group_counters._issued(g) == 3
    g.message_begins()
    g.message_ends()
    assert (g.slot.enqueued, g.offset) == (3, 0)


def test_a_backend_that_torch_does_not_know_counts_its_own_collectives() -> None:
    gloo = Gloo()
    g = Group(Mute(gloo), GroupSlot(), 0, [0, 1])
    gloo.collective()
    assert group_counters._issued(g) == 1
