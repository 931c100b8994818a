"""What distdiag could not see or write itself: reported once, with its severity, from real pages and a real database."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Group, RankState, Snapshot
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.self_check import CLOCK_JUMP_S, OwnFaults
from distdiag.page.layout import HEAP_BYTES, page_path
from distdiag.page.writer import PageWriter
from distdiag.store.reader import open_run
from distdiag.store.rows import StepRow
from distdiag.store.writer import Writer

T_S = 30.0  # run time of every poll


class Run:
    """The pages of two ranks, a database, and the record of what one monitor has reported."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "run"
        self.pages = [PageWriter(page_path(tmp_path / "pages", q)) for q in (0, 1)]
        for q, page in enumerate(self.pages):
            page.header.rank = q
            page.publish()
        self.views = {q: RankView(page.path, 0) for q, page in enumerate(self.pages)}
        self.writer = Writer(self.directory)
        self.own = OwnFaults()

    def poll(
        self,
        failures: Iterable[str] = (),
        began_s_ago: float = T_S,
        exchange: str | None = None,
        contradicted: Iterable[Finding] = (),
        snapshot: Snapshot | None = None,
    ) -> list[Finding]:
        for view in self.views.values():
            view.refresh(T_S)
        began_s = time.time() - began_s_ago
        more = {"exchange": exchange, "contradicted": contradicted, "snapshot": snapshot}
        return self.own.faults(T_S, self.views, failures, self.writer, began_s, **more)

    def close(self) -> None:
        self.writer.close()
        for view in self.views.values():
            view.reader.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    it = Run(tmp_path)
    yield it
    it.close()


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    assert found[0].kind == "recorder" and found[0].certainty == "proved"
    assert (found[0].first_seen_s, found[0].detected_s) == (T_S, T_S)
    return found[0]


def test_a_complete_recorder_has_no_finding(run: Run) -> None:
    facts = json.dumps({"torch": "2.13.0", "cuda": None, "backend": "gloo"})
    for page in run.pages:
        page.header.facts = page.text(facts)
    run.writer.add([StepRow(rank=0, step=1, step_ms=1.0)])
    assert run.writer.commit()
    assert run.poll() == [] and run.own.found == []


def test_records_that_did_not_fit_are_counted_with_their_rank(run: Run) -> None:
    page = run.pages[1]
    while page.text(f"{page.header.heap_used}" + "x" * 50_000):  # until the page's space for texts is full
        assert page.header.heap_used < HEAP_BYTES
    f = only(run.poll())
    assert (f.cause, f.severity, f.culprits) == ("dropped", "info", (1,))
    assert f.message.startswith("rank 1 dropped 1 ") and "incomplete" in f.message
    page.text("y" * 50_000)
    assert run.poll() == []  # once per rank, not at every poll


def test_steps_that_were_overwritten_before_they_were_read_are_counted_and_no_finding(run: Run) -> None:
    """Steps of 3 ms fill the page in 0.8 s; the rules need the newest ones only. Nor are logged values a finding."""
    header = run.pages[1].header
    for n_steps, missed in ((1_000, 0), (1_100, 0), (1_900, 544), (3_000, 1_388), (100_000, 98_132)):
        header.n_steps = n_steps
        header.n_scalars = 10 * n_steps
        run.views[1].refresh(T_S)
        run.views[1].history.scalars()
        assert run.views[1].history.missed >= missed
        assert run.poll() == []


def test_features_that_this_torch_lacks_are_named(run: Run) -> None:
    for page in run.pages:
        facts = {"torch": "2.10.0", "unsupported": "flight recorder (JSON), worker server"}
        page.header.facts = page.text(json.dumps(facts))
    f = only(run.poll())
    assert (f.cause, f.severity, f.culprits) == ("unsupported_torch", "info", ())
    assert "flight recorder (JSON), worker server" in f.message
    assert run.poll() == []


@pytest.mark.parametrize(("jump_s", "way"), [(3600.0, "forward by 3600 s"), (-120.0, "back by 120 s")])
def test_a_wall_clock_that_was_set_is_reported_with_its_direction(jump_s: float, way: str, run: Run) -> None:
    f = only(run.poll(began_s_ago=T_S + jump_s))
    assert (f.cause, f.severity, f.culprits) == ("clock_skew", "info", ())
    assert way in f.message and "differences" in f.advice
    assert run.poll(began_s_ago=T_S + 2 * jump_s) == []


def test_a_slowly_adjusted_wall_clock_is_no_finding(run: Run) -> None:
    assert run.poll(began_s_ago=T_S + 0.8 * CLOCK_JUMP_S) == []
    assert run.poll(began_s_ago=T_S - 0.8 * CLOCK_JUMP_S) == []


def test_proofs_that_the_job_has_contradicted_are_counted(run: Run) -> None:
    first = Finding(
        kind="deadlock", cause="missing_rank", severity="error", certainty="proved", culprits=(1,), cleared_s=12.0,
        message="rank 1 is elsewhere",
    )  # fmt: skip
    f = only(run.poll(contradicted=[first]))
    assert (f.cause, f.severity) == ("contradicted", "info")
    assert "contradicted: 1; the newest, cleared at 12.0 s: deadlock: rank 1 is elsewhere" in f.message
    assert run.poll(contradicted=[first]) == []
    second = msgspec.structs.replace(first, culprits=(0,))
    assert "contradicted: 2;" in only(run.poll(contradicted=[first, second])).message


def full(writer: Writer) -> None:
    """Let SQLite get no further page: its error is that of a full disk."""
    assert writer._con is not None
    pages = writer._con.execute("PRAGMA page_count").fetchone()[0]
    writer._con.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_reported_once_and_kept_for_summary_and_database(run: Run) -> None:
    full(run.writer)
    run.writer.add([StepRow(rank=0, step=k, step_ms=1.0) for k in range(20_000)])
    assert not run.writer.commit()
    f = only(run.poll())
    assert (f.cause, f.severity, f.culprits) == ("disk_full", "warning", ())
    assert "full" in f.message and "free the disk" in f.advice
    run.writer.finding(f)
    assert run.poll() == [] and run.own.found == [f]
    # once there is space again, the record notes that it was incomplete for a while
    assert run.writer._con is not None
    run.writer._con.execute("PRAGMA max_page_count = 1000000")
    run.writer._retry_at = 0.0
    assert run.writer.commit()
    with open_run(run.directory) as reader:
        assert [(x.kind, x.cause) for x in reader.findings()] == [("recorder", "disk_full")]


def test_a_failed_write_that_was_retried_before_the_poll_is_no_finding(run: Run) -> None:
    full(run.writer)
    run.writer.add([StepRow(rank=0, step=k, step_ms=1.0) for k in range(20_000)])
    assert not run.writer.commit() and run.writer._con is not None
    run.writer._con.execute("PRAGMA max_page_count = 1000000")
    run.writer._retry_at = 0.0
    assert run.writer.commit() and run.writer.failed_writes == 1
    assert run.poll() == []


def test_failures_of_recorder_and_rules_are_reported_with_their_text(run: Run) -> None:
    run.pages[0].header.errors, run.pages[0].header.n_calls = 2, 1
    run.pages[0].header.error = run.pages[0].text("KeyError: 'x' at hooks.py:40")
    failures = {"ZeroDivisionError: division by zero at speed.py:99": 12}
    found = run.poll(failures)
    assert [(f.cause, f.severity, f.culprits) for f in found] == [("failed", "info", (0,)), ("failed", "info", ())]
    assert "KeyError: 'x' at hooks.py:40" in found[0].message and "speed.py:99" in found[1].message
    assert run.poll(failures) == []
    assert only(run.poll({**failures, "TypeError: x at gpus.py:1": 1})).cause == "failed"  # a second rule
    run.pages[1].header.errors = 1  # before its first call: it may record none
    assert (f := only(run.poll(failures))).severity == "warning" and "rank 1 failed 1 time:" in f.message


def test_unreadable_ranks_of_other_nodes_are_reported(run: Run) -> None:
    f = only(run.poll(exchange="nodes/1.state cannot be read"))
    assert (f.cause, f.severity) == ("nodes", "info") and "nodes/1.state" in f.message


def test_each_fault_has_its_own_record(run: Run) -> None:
    """The key of a finding is its identity in the database: one must not overwrite another."""
    for page in run.pages:
        page.header.dropped = 5
        page.header.facts = page.text(json.dumps({"unsupported": "worker server"}))
    found = run.poll(began_s_ago=T_S + 60)
    assert len(found) == 4 and len({f.key for f in found}) == 4  # what torch lacks is one finding for all


def test_what_one_rank_lacks_in_two_groups_is_one_finding_with_both(run: Run) -> None:
    """The later one has the key of the first, and takes over its record."""
    groups = {name: Group(name=name, ranks=(0, 1), backend="other") for name in "ab"}
    ranks = {q: RankState(rank=q, activity_since_s=0.0, host_wait="device", enqueued={"a": 7}) for q in (0, 1)}
    s = Snapshot(t_s=100.0, world_size=2, ranks=ranks, groups=groups)
    first = only(run.poll(snapshot=s))
    later = {**ranks, 0: replace(ranks[0], enqueued={"b": 7})}
    second = only(run.poll(snapshot=replace(s, ranks=later)))
    assert first.key == second.key and first.cause == "device_waits"
    assert "group a (other)" in first.message
    assert "group a (other)" in second.message and "group b (other)" in second.message
    assert run.poll(snapshot=replace(s, ranks=later)) == []
