"""Collectives on a device backend, which hosts leave before they are complete: compared once they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Snapshot
from distdiag.diagnosis.rules import mismatch
from distdiag.monitor.collectives import Collectives
from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import Blocked, page_path
from distdiag.page.writer import PageWriter


def issued(seq: int, dtype: str = "float32", op: str = "all_reduce") -> tuple[Call, float]:
    call = Call(op=op, group="g", seq=seq, dtype=dtype, shape=(2,), entered_s=1.0, left_s=1.1, completed_s=1.1)
    return replace(call, on_device=True), 0.0


def job(*completed: int) -> Snapshot:
    ranks = {q: RankState(rank=q, completed={"g": n}) for q, n in enumerate(completed)}
    group = Group(name="g", ranks=tuple(range(len(completed))), backend="nccl")
    return Snapshot(t_s=9.0, world_size=len(completed), ranks=ranks, groups={"g": group})


def test_calls_that_differ_are_reported_once_all_devices_have_completed_them() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1), issued(2), issued(3)])
    collectives.add(1, [issued(1), issued(2, "int64"), issued(3)])
    collectives.rows(job(2, 1), 7)
    assert collectives.completed_conflicts == []
    collectives.rows(job(3, 2), 7)
    (met,) = collectives.completed_conflicts
    assert (met.group, met.seq, met.cause) == ("g", 2, "dtype") and set(met.calls) == {0, 1}
    assert collectives.rows(job(3, 3), 7)[0].seq == 3
    assert len(collectives.completed_conflicts) == 1


@pytest.mark.parametrize(("failed", "found"), [(False, 1), (True, 0)])
def test_a_larger_tensor_that_a_broadcast_filled_in_part_is_reported(failed: bool, found: int) -> None:
    """gloo: the root sends four elements, the others expect five, and nobody raises. A call that raised is found in another way."""
    collectives = Collectives()
    group = Group(name="g", ranks=(0, 1, 2), backend="gloo")
    for q, size in enumerate((4, 5, 5)):
        call = replace(issued(1, op="broadcast")[0], on_device=False, root=0, shape=(size,), failed=failed and q == 1)
        collectives.add(q, [(call, 0.1)])
    s = replace(job(1, 1, 1), groups={"g": group})
    collectives.rows(s, 7)
    assert len(collectives.completed_conflicts) == found
    for f in mismatch.completed(replace(s, completed_conflicts=tuple(collectives.completed_conflicts))):
        assert (f.cause, f.culprits) == ("shape", (0,)) and "rank 0: 4 elements; ranks 1, 2: 5 elements" in f.message


def test_a_coalesced_group_whose_operations_share_a_number_is_not_judged() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1), issued(1, "int64")])
    collectives.add(1, [issued(1, "int64"), issued(1)])
    collectives.rows(job(1, 1), 7)
    assert collectives.completed_conflicts == []


def test_nothing_is_judged_without_counters_or_without_a_member() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1)])
    collectives.rows(replace(job(1, 1), ranks={q: RankState(rank=q) for q in (0, 1)}), 7)
    collectives.rows(job(1, 1), 7)
    assert collectives.completed_conflicts == []


def test_the_waits_of_a_job_on_a_device_are_not_measured_after_its_groups_are_destroyed(tmp_path: Path) -> None:
    measured = {}
    for rank, backend in enumerate(("gloo", "nccl", "cpu:gloo,cuda:nccl")):
        page = PageWriter(page_path(tmp_path, rank))
        page.header.rank = rank
        slot = page.page.groups[0]
        slot.name, slot.backend, slot.destroyed = page.text("0"), page.text(backend), 1
        page.header.n_groups = 1
        page.publish()
        view = RankView(page.path, 0)
        view.refresh(1.0)
        measured[backend] = view.state(1.0, None, "S", None).wait_measured
        view.reader.close()
    assert measured == {"gloo": True, "nccl": False, "cpu:gloo,cuda:nccl": False}


def test_what_ddp_waits_in_has_the_operation_that_python_saw_the_reducer_issue(tmp_path: Path) -> None:
    """The reducer calls a process group written in Python, so its all_reduce is recorded; no flight recorder has it."""
    page = PageWriter(page_path(tmp_path, 0))
    slot = page.page.groups[0]
    slot.name, slot.backend, slot.enqueued, slot.completed = page.text("0"), page.text("lanes"), 7, 6
    page.header.n_groups, page.header.blocked, page.header.blocked_since_ns, page.header.counted_ns = (
        1,
        Blocked.DDP,
        1,
        2,
    )
    page.publish()
    view = RankView(page.path, 0)
    view.refresh(1.0)
    group = view.decoder.group_key(0)
    view.history.calls.append(replace(issued(7)[0], group=group, completed_s=None, left_s=None))
    call = view.state(1.0, True, "S", None).blocked
    assert call is not None
    assert (call.op, call.seq, call.dtype, call.shape, call.on_device) == ("all_reduce", 7, "float32", (2,), True)
    assert call.left_s is not None  # else the host would be inside the call, making the communicator
    view.reader.close()


@pytest.mark.parametrize(("asynchronous", "line"), [(False, 62), (True, 84)])
def test_a_call_that_a_handler_of_a_signal_makes_within_backward_keeps_its_line_and_its_stack(
    tmp_path: Path, asynchronous: bool, line: int
) -> None:
    page = PageWriter(page_path(tmp_path, 0))
    slot = page.page.groups[0]
    slot.name, slot.backend, slot.enqueued, slot.completed = page.text("0"), page.text("gloo"), 7, 6
    backward, save = (page.site("train.py", n, name) for n, name in ((84, "train"), (62, "save")))
    h = page.header
    h.n_groups, h.blocked, h.blocked_site, h.blocked_since_ns, h.counted_ns = 1, Blocked.DDP, backward, 1, 2
    for i, site in enumerate((save, backward)):
        h.stack[i] = site
    h.stack_depth = 2
    page.publish()
    view = RankView(page.path, 0)
    view.refresh(1.0)
    within = replace(issued(7, op="barrier")[0], group=view.decoder.group_key(0), completed_s=None, left_s=None)
    site = replace(view.decoder.stack()[0], caller=view.decoder.stack()[1])
    view.history.calls.append(replace(within, site=site, on_device=False, asynchronous=asynchronous))
    state = view.state(1.0, True, "S", None)
    assert state.blocked is not None and state.blocked.site is not None and state.blocked.site.line == line
    assert [frame.line for frame in state.user_stack][: 2 if line == 62 else 1] == [62, 84][-2 if line == 62 else -1 :]
    view.reader.close()
