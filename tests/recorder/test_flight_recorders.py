"""torch's flight recorders: which of them has a group, whose hook counts what, and what a torch without them costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from distdiag.monitor.evidence.ask import Recorders
from distdiag.page.layout import GroupSlot
from distdiag.recorder.hooks import flight_recorders, group_counters
from distdiag.recorder.hooks.collectives import _connects_at_start
from distdiag.recorder.hooks.flight_recorders import Hook
from distdiag.recorder.hooks.group_counters import OFFSETS_KEPT, Group, Numbering
from tests.jobs import rows, wait_for


def test_numbers_skip_what_another_counter_also_counts() -> None:
    numbering, raw, issued = Numbering(), 0, 0
    of_collectives = []
    for n in range(3 * OFFSETS_KEPT):
        for _ in range(n % 3):  # messages
            raw += 1
            numbering.shift(issued, raw - issued)
            assert numbering.number(raw) == issued
        raw, issued = raw + 1, issued + 1
        of_collectives.append(raw)
    assert [numbering.number(r) for r in of_collectives[-10:]] == list(range(issued - 9, issued + 1))
    assert (numbering.number(0), numbering.number(-1)) == (0, -1)


def test_numbers_that_a_counter_lacks_are_added() -> None:
    """A graph captures two collectives, which take a number and are never counted."""
    numbering = Numbering()
    numbering.shift(5, -2)  # three are counted
    assert [numbering.number(raw) for raw in (1, 3, 4, 9)] == [1, 5, 6, 11]


class Counting:
    """A backend's counter of collectives."""

    issued = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.issued


class Busy(distributed_c10d.ProcessGroup):
    """A process group of the job, which works when it is asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} runs code of the job")


def test_a_groups_own_class_is_asked_for_nothing() -> None:
    pg = Busy(0, 2)
    assert Group(pg, GroupSlot(), 0, [0, 1]).counter is None
    assert flight_recorders.implementations(pg) == () and not _connects_at_start(pg)


def test_a_hooks_counters_become_numbers_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_counters, flight_recorders):
        monkeypatch.setattr(module, "of_torch", lambda pg, name, otherwise=(): getattr(pg, name, otherwise))
    backend = Counting()
    group = Group(backend, GroupSlot(), 0, [0, 1])
    group.hook = Hook("nccl2", 0, True)
    backend.issued = 3
    assert group.by_hook((3, 2), 3, 3) == (3, 2)
    group.message_is_recorded()
    assert group.by_hook((4, 3), 3, 3) == (3, 3)
    backend.issued = 5  # one of them is captured
    assert group.by_hook((5, 5), 5, 5) == (5, 5)
    backend.issued = 6
    assert group.by_hook((6, 5), 6, 6) == (6, 5)
    assert group.by_hook((6, -1), 6, 6) == (6, -1), "the backend reports no completion"
    assert group.by_hook((6, 5), 9, 10) is None, "it advanced while its counters were read"


def test_a_hooks_status_is_that_of_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(*_: bool, backend: str) -> str:
        status = {"last_enqueued_collective": "4", "last_completed_collective": "2", "last_started_collective": "-1"}
        return json.dumps({"pg_status": {"1": status}} if backend == "nccl2" else {})

    monkeypatch.setattr(flight_recorders.c10d, "_dump_fr_trace_json", dump)
    assert Hook("nccl2", 1, True).counters() == (5, 3)
    assert Hook("nccl2", 1, False).counters() == (5, -1)
    assert Hook("nccl2", 0, True).counters() is None and Hook("other", 1, True).counters() is None


HOOKED = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from distdiag.recorder.hooks import flight_recorders as fr

# torch lists `fake` among the backends that record themselves, and attaches no hook to those
dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS.discard("fake")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
fr.install()
groups = [dist.group.WORLD, dist.new_group([0, 1])]
for n, group in enumerate(groups):
    for _ in range(n + 2):
        dist.all_reduce(torch.ones(2), group=group)
for number, group in enumerate(groups):
    names = fr.implementations(group)
    hook = fr.hook_of(group, names)
    assert (names, hook.backend, hook.number, hook.reports_completion) == (("fake",), "fake", number, False), names
    assert hook.counters() == (number + 2, -1), hook.counters()
    assert fr.hook_of(group, ("gloo",)) is None and fr.hook_of(group, ()) is None
print("done")
"""


@pytest.mark.skipif(
    not hasattr(distributed_c10d, "_maybe_attach_flight_recorder"),
    reason="torch before 2.15 attaches no hooks to groups",
)
def test_hooks_are_numbered_in_the_order_in_which_groups_got_them() -> None:
    """Also those attached before the recorder."""
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, timeout=100, check=False)
    assert "done" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Recorders()),
        (
            {"own_recorders": [], "hooked_recorders": {"nccl2": True, "mpi": False}},
            ((), (("nccl2", True), ("mpi", False))),
        ),
        (
            {"own_recorders": ["nccl", "a/b", "x?y=1", 7, None], "hooked_recorders": {"c": 1}},
            (("nccl",), (("c", False),)),
        ),
        ({"own_recorders": "nccl", "hooked_recorders": ["nccl2"]}, Recorders()),
        ({"own_recorders": ["a" * 41], "hooked_recorders": {"b c": True, "": True, "d\n": True}}, ((), ())),
    ],
)
def test_recorders_that_a_page_names_are_checked(facts: dict, expected: Recorders | tuple) -> None:
    found = Recorders.of(facts)
    assert found == expected if isinstance(expected, Recorders) else (found.own, found.hooked) == expected


LACKING = """
import sys, time
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

del c10d._dump_fr_trace_json, functional._are_we_tracing
original = functional.all_reduce
import distdiag

distdiag.attach(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert functional.all_reduce is original
for _ in range(int(sys.argv[2])):
    dist.all_reduce(torch.ones(2))
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.mark.job
@pytest.mark.timeout(120)
def test_functions_that_torch_lacks_are_a_finding_and_cost_the_job_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LACKING, str(tmp_path / "R"), "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = "SELECT json FROM finding WHERE kind = 'recorder'"
    ((text,),) = wait_for(lambda: rows(tmp_path / "R", wanted), 30, "the finding")
    found = json.loads(text)
    assert found["cause"] == "unsupported_torch" and found["severity"] == "info"
    assert "flight recorder (JSON)" in found["message"]
    assert "_functional_collectives._are_we_tracing" in found["message"]
