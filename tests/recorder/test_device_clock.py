"""Device times of phases: in order, without waiting, events reused; with events that complete on command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from distdiag.page.layout import Phase
from distdiag.page.writer import PageWriter
from distdiag.recorder.fast import accounts
from distdiag.recorder.hooks.device_clock import PENDING, DeviceClock
from distdiag.recorder.pulse import Pulse, nvml_index
from distdiag.recorder.state import Recorder
from tests.jobs import closed, launch, rows


class Event:
    """Like torch.cuda.Event: `record` takes the device's time, `query` returns whether the device has reached it."""

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


Out = list[tuple[dict[Phase, int], int | None]]


def step(clock: DeviceClock, out: Out) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD):
        clock.begin(phase)
        clock.end(phase)
    clock.close(lambda times, step_ns: out.append((times, step_ns)))


def test_device_times_arrive_in_order_once_the_device_is_done() -> None:
    Event.now_ms = Event.done_until_ms = 0.0
    clock, out = DeviceClock(Event), cast("Out", [])
    step(clock, out)
    step(clock, out)
    assert out == []
    Event.done_until_ms = 6.0
    clock.poll()
    assert out == [({Phase.FORWARD: 2_000_000, Phase.BACKWARD: 1_000_000}, None)]
    Event.done_until_ms = 100.0
    clock.poll()
    assert len(out) == 2


def test_a_step_of_the_device_lasts_from_the_end_of_the_one_before() -> None:
    Event.now_ms, Event.done_until_ms = 0.0, 1e9
    clock, out = DeviceClock(Event), cast("Out", [])
    step(clock, out)  # ends at 6
    Event.now_ms += 10.0  # the device has nothing to do
    step(clock, out)  # ends at 22
    step(clock, out)
    clock.close(lambda times, step_ns: out.append((times, step_ns)))  # without any event
    step(clock, out)
    assert [step_ns for _, step_ns in out] == [None, 16_000_000, 6_000_000, None, None]


def test_events_are_reused_and_a_stuck_device_has_a_bounded_queue() -> None:
    Event.now_ms, Event.done_until_ms, Event.made = 0.0, 1e9, 0
    clock, out = DeviceClock(Event), cast("Out", [])
    for _ in range(50):
        step(clock, out)
    assert Event.made == 7 and len(out) == 50
    Event.done_until_ms = 0.0
    for _ in range(PENDING + 10):
        step(clock, out)
    assert out[50:] == [({}, None)] * 10


SCRIPT = """
import torch, torch.distributed as dist
torch.version.cuda = "13.0"
from distdiag.recorder.hooks import device_clock, ddp_models
ddp_models.cuda_index = lambda parameters: 1  # the model is on the second device, which is not the current one
current = [0]
class Guard:
    def __init__(self, device):
        self.device = device
    def __enter__(self):
        current.append(self.device)
    def __exit__(self, *_):
        current.pop()
torch.cuda.device = Guard
capturing = False
torch.cuda.is_current_stream_capturing = lambda: capturing

class Event:  # the device takes a millisecond from each event to the next
    now_ms = 0.0
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        assert current[-1] == 1, "recorded on another device"
        assert not capturing, "recorded into a captured graph"
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms
    def query(self):
        assert not capturing, "queried during a capture"
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
    capturing = k in (95, 96)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("pure", ["0", "1"], ids=["compiled", "python"])
def test_device_times_replace_host_times_from_the_first_forward_on(pure: str, tmp_path: Path) -> None:
    if pure == "0" and not accounts.COMPILED:
        pytest.skip("the hooks were not compiled at the install")
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(SCRIPT)
    env = {"DISTDIAG_RUN_DIR": str(run), "DISTDIAG_PURE": pure}
    with launch([script], nproc=1, cwd=tmp_path, timeout=60, env=env, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(run)
    columns = "step, forward_ms, backward_ms, optimizer_ms, step_ms"
    *steps, whole = zip(*rows(run, f"SELECT {columns} FROM step ORDER BY step"), strict=True)
    steps = list(zip(*steps, strict=True))
    assert [s[0] for s in steps] == list(range(1, 101))
    assert {s[1:] for s in steps[80:95] + steps[97:]} == {(1.0, 1.0, 1.0)}
    assert set(whole[81:95] + whole[98:]) == {6.0} and 6.0 not in whole[:81], (
        "from the end of a step to the end of the next"
    )
    assert (1.0, 1.0, 1.0) not in {s[1:] for s in steps[95:97]}, "nothing is measured in a capture"
    assert (1.0, 1.0, 1.0) not in {s[1:] for s in steps[:80]}
    assert rows(run, "SELECT json FROM finding WHERE kind = 'recorder'") == []


def test_the_pulse_reads_the_models_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pulse's thread the current device is always 0."""
    recorder = Recorder(PageWriter(tmp_path / "page"))
    pulse = Pulse(recorder)
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="", total_memory=80 if d == 1 else 40)
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: asked.append(d) or 7)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: asked.append(d) or 9)
    pulse._device()
    assert asked == [] and recorder.header.gpu == -1, "no parameter on a device is known: nothing is reported"
    recorder.device = 1
    pulse._device()
    assert asked == [1, 1] and recorder.header.device_total_bytes == 80


class Nvml:
    """Two cards, the second divided into MIG slices."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.open = 0
        self.handles = {"GPU-aa": 0, "GPU-bb": 1, "MIG-cc": "slice of 1"}

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid not in self.handles:
            raise self.NVMLError(uuid)
        return self.handles[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: object) -> int:
        assert handle == "slice of 1"
        return 1

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle


@pytest.mark.parametrize(
    ("uuid", "index"), [("aa", 0), ("bb", 1), ("GPU-bb", 1), ("cc", 1), ("MIG-cc", 1), ("dd", -1), ("", -1)]
)
def test_a_device_is_mapped_to_nvmls_index_by_its_uuid(uuid: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,GPU-aa")  # CUDA's numbers show nothing
    nvml = Nvml()
    assert nvml_index(SimpleNamespace(uuid=uuid), nvml) == index
    assert nvml.open == 0
