"""When a stuck rank is asked for its flight record again: on a device completions are noticed late."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.diagnosis.model.snapshot import Call
from distdiag.monitor.evidence import ask
from distdiag.monitor.evidence.on_suspicion import RENEWED_S, SUSPECT_S, Gatherer
from distdiag.page.layout import Blocked, Phase
from distdiag.store import stacks
from tests.diagnosis.made import job, rank


class Stuck:
    """A rank that has waited in one call since second 10."""

    rank, ending = 0, None

    def __init__(self, *device_groups: int) -> None:
        self.device = SimpleNamespace(groups=device_groups, has_open=lambda: False, known=frozenset)
        self.decoder = SimpleNamespace(facts={})
        self.history = SimpleNamespace(still_mark=("the same",), in_cpp_wait=lambda: False)
        self.header = SimpleNamespace(
            blocked=Blocked.WAIT, witness=1, heartbeat_ns=0, phase=Phase.BACKWARD, trace_signal=0
        )
        self.now_s = 0.0

    def s(self, ns: int) -> float:
        return self.now_s  # its pulse beats

    def text(self, at: int) -> str:
        return "socket"

    def still_s(self, now_s: float) -> float:
        return now_s - 10.0


@pytest.mark.parametrize(("device_groups", "least", "most"), [((), 1, 1), ((0,), 3, RENEWED_S + 1)])
def test_a_record_is_renewed_for_a_while_on_a_device_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_groups: tuple[int, ...], least: int, most: float
) -> None:
    asked: list[float] = []
    records: list[ask.FlightRecord] = []
    gatherer, stuck = Gatherer(tmp_path), Stuck(*device_groups)

    def flight_record(*_: Any) -> ask.FlightRecord:
        asked.append(stuck.now_s)
        records.append(ask.FlightRecord())
        return records[-1]

    monkeypatch.setattr(ask, "flight_record", flight_record)
    try:
        for i in range(100):
            stuck.now_s = 10.0 + i * 0.25
            gatherer.gather(stuck.now_s, {0: stuck}, ())  # type: ignore[dict-item]
        assert least <= len(asked) <= most
        assert asked[0] - 10.0 >= SUSPECT_S and asked[-1] - 10.0 < max(RENEWED_S, 1.0)
        assert gatherer.record(0) is records[-1]
    finally:
        gatherer.close()


def test_a_kept_stack_names_the_operation_and_a_number_only_if_it_has_one(tmp_path: Path) -> None:
    waits = [Call(op="all_reduce", group="default_pg", seq=4), Call(op="recv", group="default_pg", peer=0)]
    gatherer = Gatherer(tmp_path)
    try:
        gatherer.keep(job(*(rank(q, blocked=call) for q, call in enumerate(waits)), rank(2)))
    finally:
        gatherer.close()
    saved = stacks.read(tmp_path)
    assert saved is not None
    assert [saved.ranks[q].op for q in "012"] == ["all_reduce #4 default_pg", "recv default_pg", None]
