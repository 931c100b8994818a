"""Device times of phases: in order, without waiting, events used again; on events that are done when they are told to be."""

from __future__ import annotations

from distdiag.recorder.device_clock import PENDING, DeviceClock
from distdiag.recorder.layout import Phase


class Event:
    """Like torch.cuda.Event: `record` takes the device's time, `query` says whether the device has got there."""

    now_ms = 0.0
    done_until_ms = 0.0
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.done_until_ms

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "read before it was done: that would wait for the device"
        return other.at_ms - self.at_ms


def step(clock: DeviceClock, out: list[dict[Phase, int]]) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD):
        clock.begin(phase)
        clock.end(phase)
    clock.close(out.append)


def test_times_come_when_the_device_is_done_and_in_order() -> None:
    Event.now_ms = Event.done_until_ms = 0.0
    clock, out = DeviceClock(Event), []
    step(clock, out)
    step(clock, out)
    assert out == []
    Event.done_until_ms = 6.0
    clock.poll()
    assert out == [{Phase.FORWARD: 2_000_000, Phase.BACKWARD: 1_000_000}]
    Event.done_until_ms = 100.0
    clock.poll()
    assert len(out) == 2


def test_events_are_used_again_and_a_device_that_never_comes_costs_a_bounded_queue() -> None:
    Event.now_ms, Event.done_until_ms, Event.made = 0.0, 1e9, 0
    clock, out = DeviceClock(Event), []
    for _ in range(50):
        step(clock, out)
    assert Event.made == 6 and len(out) == 50
    Event.done_until_ms = 0.0
    for _ in range(PENDING + 10):
        step(clock, out)
    assert clock.given_up == 10 and out[-1] == {} and len(out) == 60
