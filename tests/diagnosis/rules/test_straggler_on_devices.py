"""Rules on speed on a device backend, where no host waits in a collective: stragglers by arrival, and slow devices."""

from __future__ import annotations

import random

import msgspec
import pytest

from distdiag.diagnosis import step_times
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained
from distdiag.diagnosis.model.snapshot import Call, Group, Snapshot
from distdiag.diagnosis.rules import straggler
from tests.diagnosis.made import GIB, job, only, rank, steps, stragglers


def on_a_device(
    late_ms: dict[int, float], phase: str = "data", ahead_s: float = 0.0, waits_in: str = "other"
) -> Snapshot:
    """Return a DDP job on NCCL, 200 ms per step: no wait is measured.

    Args:
        late_ms: Extra work of each rank in `phase`.
        ahead_s: How far rank 0's host runs ahead of the others.
        waits_in: Where hosts wait: in `.item()` between steps; with CUDA events, in the device's backward.
    """
    longest = max(late_ms.values())
    ranks = []
    for q, extra in late_ms.items():
        made = [
            msgspec.structs.replace(
                x,
                step_ms=x.step_ms + longest - extra,
                **{f"{waits_in}_ms": getattr(x, f"{waits_in}_ms") + longest - extra},
                wait_ms=0.0,
                ready_s=x.step * 0.2
                + extra / 1e3
                + random.Random(x.step * 8 + q).uniform(0, 1e-3)
                - (ahead_s if q == 0 else 0),
            )
            for x in steps(extra, phase, seed=q)
        ]
        ranks.append(
            msgspec.structs.replace(
                rank(q, steps=tuple(made)),
                wait_measured=False,
                device_total_bytes=80 * GIB if waits_in == "backward" else None,
            )
        )
    return job(*ranks)


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("data", "data"), ("forward", "forward"), ("optimizer", "optimizer"), ("other", "host"), ("backward", "backward")],
)
@pytest.mark.parametrize("waits_in", ["other", "backward"])
def test_on_a_device_the_last_to_arrive_is_the_straggler(phase: str, cause: str, waits_in: str) -> None:
    f = only(stragglers(on_a_device({0: 0.0, 1: 0.0, 2: 60.0}, phase, waits_in=waits_in)))
    assert (f.cause, f.culprits, f.victims) == (cause, (2,), (0, 1))


def test_on_a_device_equally_slow_ranks_are_no_stragglers() -> None:
    assert stragglers(on_a_device({0: 60.0, 1: 60.0, 2: 60.0})) == []


def test_on_a_device_hosts_that_run_ahead_show_no_waiting() -> None:
    found = step_times.window(on_a_device({0: 0.0, 1: 0.0}, ahead_s=0.5))
    assert isinstance(found, Abstained) and "run ahead" in found.reason


def test_on_a_device_steps_without_a_timed_synchronisation_are_not_judged() -> None:
    s = on_a_device({0: 0.0, 1: 60.0})
    blind = {
        q: msgspec.structs.replace(r, steps=tuple(msgspec.structs.replace(x, ready_s=None) for x in r.steps))
        for q, r in s.ranks.items()
    }
    found = step_times.window(msgspec.structs.replace(s, ranks=blind))
    assert isinstance(found, Abstained) and "device" in found.reason


def slow_devices(forward_ms: dict[int, float]) -> Snapshot:
    """Return a DDP job on NCCL with CUDA events: hosts launch at the same time, devices take these times for the forward."""
    s = on_a_device(dict.fromkeys(forward_ms, 0.0), waits_in="backward")
    longest = max(forward_ms.values())
    ranks = {}
    for q, r in s.ranks.items():
        made = (
            msgspec.structs.replace(
                x,
                step_ms=x.step_ms - x.forward_ms + longest,
                forward_ms=forward_ms[q] + random.Random(x.step * 8 + q).uniform(0, 1),
                backward_ms=x.backward_ms + longest - forward_ms[q],
            )
            for x in r.steps
        )
        ranks[q] = msgspec.structs.replace(r, steps=tuple(made))
    return msgspec.structs.replace(s, ranks=ranks)


def test_a_slow_device_whose_host_is_not_late_is_named() -> None:
    f = only(stragglers(slow_devices({0: 60.0, 1: 60.0, 2: 100.0})))
    assert (f.cause, f.culprits, f.victims) == ("forward", (2,), (0, 1))
    assert "takes 100 ms on its device" in f.message and "its host is not late" in f.message


@pytest.mark.parametrize("forward_ms", [{0: 60.0, 1: 60.0, 2: 60.0}, {0: 60.0, 1: 61.0, 2: 70.0}])
def test_similarly_fast_devices_are_no_finding(forward_ms: dict[int, float]) -> None:
    assert stragglers(slow_devices(forward_ms)) == []


def test_a_slow_device_is_not_judged_without_cuda_events() -> None:
    s = slow_devices({0: 60.0, 1: 60.0, 2: 100.0})
    ranks = {q: msgspec.structs.replace(r, device_total_bytes=None) for q, r in s.ranks.items()}
    assert not any("device" in f.message for f in stragglers(msgspec.structs.replace(s, ranks=ranks)))


def test_on_a_device_teams_that_average_among_themselves_are_not_judged() -> None:
    """Two ranks synchronise in every step, but not with the third, whose arrival shows nothing."""
    s = on_a_device({0: 0.0, 1: 0.0, 2: 60.0})

    def with_calls(names: tuple[str, ...]) -> Snapshot:
        calls = tuple(
            Call(op="all_reduce", group=name, seq=x.step, entered_s=x.end_s - 0.01, on_device=True)
            for x in s.ranks[0].steps
            for name in names
        )
        groups = {**s.groups, "team": Group(name="team", ranks=(0, 1))}
        ranks = {q: msgspec.structs.replace(r, models=(), calls=calls) for q, r in s.ranks.items()}
        return msgspec.structs.replace(s, ranks=ranks, groups=groups)

    found = step_times.window(with_calls(("team",)))
    assert isinstance(found, Abstained) and "collective of all ranks" in found.reason
    assert only(stragglers(with_calls(("team", "default_pg")))).culprits == (2,)


def test_on_a_device_a_constant_lead_without_a_wait_is_not_judged() -> None:
    """Hosts run ahead until their launch queue is full: all steps take equally long, and one rank is always last."""
    s = on_a_device({0: 0.0, 1: 0.0, 2: 0.0}, ahead_s=0.0)
    late = {
        q: msgspec.structs.replace(
            r,
            steps=tuple(
                msgspec.structs.replace(x, wait_ms=40.0, ready_s=(x.ready_s or 0.0) + (0.030 if q == 2 else 0.0))
                for x in r.steps
            ),
        )
        for q, r in s.ranks.items()
    }
    (why,) = straggler.evaluate(Facts(msgspec.structs.replace(s, ranks=late)))
    assert isinstance(why, Abstained) and not why.checked and "rank 2 arrives 3" in why.reason
