"""Device times of phases: in order, without waiting, events used again; on events that are done when they are told to be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distdiag.page.layout import Phase
from distdiag.recorder.fast import accounts
from distdiag.recorder.hooks.device_clock import PENDING, DeviceClock
from tests.jobs import ONE_RANK, REPOSITORY, free_port, rows, start, wait_for


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


SCRIPT = """
import torch, torch.distributed as dist
torch.version.cuda = "13.0"

class Event:  # the device takes a millisecond from each event to the next
    now_ms = 0.0
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms
    def query(self):
        return True
    def elapsed_time(self, other):
        return other.at_ms - self.at_ms

import distdiag
distdiag.attach()
from distdiag.recorder import session
session.current.pulse.stop()  # it would ask the device for its memory
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.cuda.Event = Event
for k, x in enumerate(torch.utils.data.DataLoader(torch.randn(400, 4), 4)):
    if k == 80:  # of most steps by now the usual way is known
        torch.cuda.is_initialized = lambda: True
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("pure", ["0", "1"], ids=["compiled", "python"])
def test_from_the_first_forward_on_a_device_its_times_stand_for_the_hosts(pure: str, tmp_path: Path) -> None:
    if pure == "0" and not accounts.COMPILED:
        pytest.skip("the hooks were not compiled at the install")
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(SCRIPT)
    env = {**ONE_RANK, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY), "DISTDIAG_RUN_DIR": str(run)}
    with start([sys.executable, str(script)], cwd=tmp_path, timeout=60, env=env | {"DISTDIAG_PURE": pure}) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: rows(run, "SELECT 1 FROM meta WHERE key = 'ended_s'"), 30, "the run to be closed")
    steps = rows(run, "SELECT step, forward_ms, backward_ms, optimizer_ms FROM step ORDER BY step")
    assert [s[0] for s in steps] == list(range(1, 101))
    assert {s[1:] for s in steps[80:]} == {(1.0, 1.0, 1.0)}
    assert (1.0, 1.0, 1.0) not in {s[1:] for s in steps[:80]}
    assert rows(run, "SELECT json FROM finding WHERE kind = 'recorder'") == []
