"""Screens as pure functions: they fit the terminal at any size, and never interpret text from the job."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.cli import main
from distdiag.diagnosis.model.findings import CollectiveRef, Finding, Where
from distdiag.page import directories
from distdiag.store.frames import RankRow
from distdiag.store.opening import ReadStatus, RunUnreadable
from distdiag.store.reader import open_run
from distdiag.store.rows import GroupRow
from distdiag.store.rundir import DATABASE
from distdiag.store.writer import Writer
from distdiag.tui.data import filters
from distdiag.tui.data.comm_data import CommData, OpStats
from distdiag.tui.data.heat_data import METRICS
from distdiag.tui.data.order import ORDERS, ordered
from distdiag.tui.data.snapshot import Request, Snapshot, Taker
from distdiag.tui.data.state import job_state
from distdiag.tui.draw.lines import ascii_line, plain, width_of
from distdiag.tui.keys import RANKED
from distdiag.tui.once import screen, take
from distdiag.tui.screens import pages, readers
from distdiag.tui.screens.comm import arrivals, verdict
from distdiag.tui.screens.findings import story_lines
from distdiag.tui.screens.page import RankedPage
from distdiag.tui.ui import Ui
from tests.tui.conftest import MakeRun
from tests.tui.synthetic import HOSTILE, Scenario, set_monitor

STATES = ("waiting", "running", "stalled", "deadlocked", "lost", "ended", "failed")
pytestmark = pytest.mark.usefixtures("frozen")


def _check(run: Path, page: str, ui: Ui, width: int, height: int) -> list[str]:
    """Render one page from data read for exactly this size; return its plain lines."""
    snap = take(run, ui, pages()[page], width, height)
    full = pages()[page].render(snap, ui, width, height)
    if page != "help" or ui.interactive:
        assert len(full.lines) <= height
    for text in full.lines:
        assert width_of(text) <= width, plain(text)
        for ch in plain(text):
            assert unicodedata.category(ch) not in ("Cc", "Cf", "Cs"), (page, repr(plain(text)))
        assert all(ord(c) < 128 for c in plain(ascii_line(text)))
        assert width_of(ascii_line(text)) == width_of(text)
    assert full.cursor is None or 0 <= full.cursor < len(full.lines)
    return [plain(x) for x in full.lines]


@given(
    st.sampled_from(STATES), st.sampled_from((1, 67)), st.sampled_from(tuple(pages())), st.integers(60, 250), st.integers(10, 70),
    st.sampled_from([o.key for o in ORDERS]), st.booleans(), st.booleans(), st.sampled_from(list(METRICS)), st.booleans(),
    st.integers(0, 80),
)  # fmt: skip
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_every_screen_fits_every_size(
    runs: MakeRun, state: str, ranks: int, page: str, width: int, height: int, sort: str, reverse: bool, group: bool, metric: str,
    interactive: bool, cursor: int,
) -> None:  # fmt: skip
    run = runs(Scenario(state=state, ranks=ranks, gpus=ranks > 1, steps=20, hostile=True, frames=2))
    ui = Ui(page=page, sort=sort, reverse=reverse, group=group, metric=metric, rank=ranks - 1, interactive=interactive)
    ui.cursor[page] = cursor
    _check(run, page, ui, width, height)


def test_keys_of_tables_of_ranks_are_bound_on_each_of_them() -> None:
    assert {name for name, page in pages().items() if isinstance(page, RankedPage)} == set(RANKED)


@pytest.mark.parametrize("page", tuple(pages()))
def test_hostile_texts_are_shown_and_never_interpreted(runs: MakeRun, page: str) -> None:
    run = runs(Scenario(state="deadlocked", ranks=8, hostile=True))
    text = "\n".join(_check(run, page, Ui(page=page, rank=0), 160, 48))
    if page in ("ranks", "findings", "rank", "memory"):
        assert "[red]" in text and "\\x1b" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert HOSTILE not in text


def test_with_two_ranks_the_faster_is_the_reference(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=2))
    with open_run(run) as opened:
        snap = Taker(opened, readers()).take(Request())
    assert snap.summary.self_p50 == min(snap.frame.table.numbers("self_ms"))  # type: ignore[union-attr]
    rows = [x for x in _check(run, "ranks", Ui(), 80, 24) if x.startswith((" █  ", " ·  "))]
    assert rows[0].split()[1] == "1" and "ERROR" in rows[0]  # rank 1 loads slowly
    assert "ok" in rows[1]
    heat = [x for x in _check(run, "heat", Ui(page="heat", colour=False), 80, 24) if x.startswith((" █", " ·"))]
    assert "8" in heat[0].split()[2] and set(heat[1].split()[2]) == {"."}


def test_worse_ranks_first_and_healthy_ones_by_number(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=67))
    snap = take(run, Ui(), pages()["ranks"], 80, 24)
    rows = ordered(snap, Ui())
    assert rows[0] == 5 and rows[1:] == [r for r in range(67) if r != 5]
    assert ordered(snap, Ui(reverse=True)) == rows[::-1]
    by_wait = ordered(snap, Ui(sort="wait_ms"))
    waits = snap.frame.table.numbers("wait_ms")  # type: ignore[union-attr]
    assert [waits[i] for i in by_wait] == sorted(waits)


def test_of_a_job_that_failed_the_rank_to_blame_comes_first(tmp_path: Path) -> None:
    """All ranks are lost, and a warning names all of them: the error names one."""
    ranks = [
        RankRow(rank=r, life="crashed", delta_self_ms=-float(r), severity="error" if r == 2 else "warning")
        for r in range(4)
    ]
    with Writer(tmp_path) as w:
        w.frame(1.0, "failed", "", ranks)
    assert ordered(take(tmp_path, Ui(), pages()["ranks"], 80, 24), Ui()) == [2, 0, 1, 3]


def test_a_rank_in_another_call_of_the_same_number_is_missing_in_both(tmp_path: Path) -> None:
    def waits(rank: int, op: str) -> RankRow:
        group = {"waiting_group": "default_pg", "last_group": "default_pg", "waiting_seq": 46, "last_seq": 46}
        return RankRow(rank=rank, life="running", waiting_op=op, waiting_age_s=44.1, **group)

    with Writer(tmp_path) as w:
        w.groups([GroupRow(name="default_pg", ranks=(0, 1, 2), backend="gloo", description="")])
        w.frame(1.0, "deadlocked", "", [waits(0, "all_reduce"), waits(1, "all_reduce"), waits(2, "barrier")])
    text = "\n".join(_check(tmp_path, "comm", Ui(page="comm"), 80, 24))
    assert re.search("all_reduce +default_pg +46 +44.1 s 2 of 3 +rank 2", text), text
    assert re.search("barrier +default_pg +46 +44.1 s 1 of 3 +ranks 0, 1", text), text


def test_ranks_that_are_all_there_and_have_not_begun_are_reported_as_that(runs: MakeRun, tmp_path: Path) -> None:
    with Writer(tmp_path) as w:
        w.meta(world_size=2)
        w.frame(1.0, "waiting", "2 of 2 ranks have reported", [RankRow(rank=r, life="starting") for r in range(2)])
    assert "2 of 2 ranks have reported, no step yet" in _check(tmp_path, "ranks", Ui(), 80, 24)[0]


def test_missing_values_are_sorted_last(tmp_path: Path) -> None:
    with Writer(tmp_path) as w:
        w.frame(
            1.0,
            "running",
            "",
            [
                RankRow(rank=0, life="running"),
                RankRow(rank=1, life="running", self_ms=5.0),
                RankRow(rank=2, life="running", self_ms=9.0),
            ],
        )
    snap = take(tmp_path, Ui(), pages()["ranks"], 80, 24)
    assert ordered(snap, Ui(sort="self_ms")) == [2, 1, 0] and ordered(snap, Ui(sort="self_ms", reverse=True)) == [
        1,
        2,
        0,
    ]
    text = "\n".join(_check(tmp_path, "ranks", Ui(), 120, 30))
    assert "  0.0" not in text  # a missing number is a dash, never a zero


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", range(67)), ("rank 3-5,9", [3, 4, 5, 9]), ("ranks 3-5 9", []), ("7", [7]), ("rank 64-", [64, 65, 66]), ("-1", [0, 1]), ("node001", range(8, 16)),
        ("sev>=warn", [5]), ("sev=ok node000", [0, 1, 2, 3, 4, 6, 7]), ("NODE008", [64, 65, 66]), ("delta>10", [5]), ("node:8", [64, 65, 66]),
        ("life:running rank 1–2", [1, 2]), ("wait<20", [5]), ("op:all_reduce", []), ("phase:forward 66", [66]),
    ],
)  # fmt: skip
def test_filters(runs: MakeRun, text: str, expected: list[int]) -> None:
    snap = take(runs(Scenario(ranks=67)), Ui(), pages()["ranks"], 80, 24)
    assert ordered(snap, Ui(filter=filters.parse(text), sort="rank")) == list(expected)


@pytest.mark.parametrize("text", ["sev>=bad", "nothing>5", "wait>x", "rank 5-a", "rank 1-2-3"])
def test_an_invalid_filter_is_refused(text: str) -> None:
    with pytest.raises(filters.BadFilter) as e:
        filters.parse(text)
    assert re.split("[>-]", text.split()[-1])[0] in str(e.value)


def test_everything_that_is_cut_off_is_marked(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=67))
    shown = _check(run, "ranks", Ui(), 80, 24)
    assert any("rows 1–" in x and "of 67" in x for x in shown)
    rank = _check(run, "rank", Ui(page="rank", rank=5), 80, 20)
    assert any("more line" in x for x in rank)
    findings = _check(runs(Scenario(state="failed", ranks=8)), "findings", Ui(page="findings"), 80, 16)
    assert any("more line" in x for x in findings)


def test_everything_is_shown_if_there_is_room(runs: MakeRun) -> None:
    """A pipe has no height: all ranks and all findings are shown."""
    lines, _ = screen(runs(Scenario(ranks=67)), Ui(), 110, None)
    text = "\n".join(map(plain, lines))
    assert all(any(f" {r} node" in x for x in text.splitlines()) for r in range(67))
    assert "rows 1–" not in text and "more finding" not in text


def test_the_cause_is_named_as_network_or_rank(runs: MakeRun) -> None:
    text = "\n".join(_check(runs(Scenario(ranks=8)), "comm", Ui(page="comm"), 120, 30))
    assert "the network is not the cause. See rank 5." in text and "85% of it reached" in text
    stuck = "\n".join(_check(runs(Scenario(state="deadlocked", ranks=8)), "comm", Ui(page="comm"), 120, 30))
    flight = next(x for x in stuck.splitlines() if "5404" in x and "31.2 s" in x)
    assert flight.split()[-5:] == ["7", "of", "8", "rank", "5"]


def test_busy_without_progress_is_shown(runs: MakeRun) -> None:
    text = "\n".join(_check(runs(Scenario(state="deadlocked", ranks=8)), "memory", Ui(page="memory"), 120, 30))
    assert text.count("spinning") == 8 and "8 GPUs are busy, yet the job makes no progress" in text
    assert "spinning" not in "\n".join(_check(runs(Scenario(ranks=8)), "memory", Ui(page="memory"), 120, 30))


def test_a_leak_is_shown_with_the_time_left(runs: MakeRun) -> None:
    text = _check(runs(Scenario(ranks=8)), "memory", Ui(page="memory"), 160, 48)
    row = next(x for x in text if x.split()[1:2] == ["5"])
    assert "+387" in row and "4,238" in row  # 3.9 MiB a step, 16 GiB left


def test_equal_data_and_uneven_lengths_are_shown(runs: MakeRun) -> None:
    text = "\n".join(_check(runs(Scenario(ranks=8)), "data", Ui(page="data"), 120, 30))
    assert "lengths differ: 97 to 98" in text and text.count("twice") == 2


def test_the_odd_rank_is_alone_in_the_tree(runs: MakeRun) -> None:
    text = _check(runs(Scenario(state="deadlocked", ranks=8)), "stacks", Ui(page="stacks"), 120, 30)
    assert any("rank 5 (1 of 8 ranks)" in x and "next_batch" in x for x in text)
    assert any("ranks 0–4, 6, 7 (7 of 8 ranks)" in x and "train_step" in x for x in text)


def test_a_past_view_shows_only_what_was_known_then(runs: MakeRun) -> None:
    run = runs(Scenario(state="failed", ranks=8, frames=8), "ended")
    ui = Ui(paused_at_s=268.0)
    text = "\n".join(_check(run, "ranks", ui, 80, 24))
    assert "REPLAY" in text and "running at step" in text and "SIGKILL" not in text and "rank_lost" not in text
    assert "SIGKILL" in "\n".join(_check(run, "ranks", Ui(), 80, 24))


@pytest.mark.parametrize("page", ["heat", "stacks", "probes"])
def test_a_printed_screen_names_the_command_where_a_live_one_names_the_key(runs: MakeRun, page: str) -> None:
    run = runs(Scenario(state="running", ranks=1024), "live")
    live, printed = ("\n".join(_check(run, page, Ui(interactive=i), 120, 28)) for i in (True, False))
    assert "+1: press 5" in live and "+1: distdiag tui --screen findings" in printed and "press 5" not in printed


def test_an_unreadable_run_shows_reason_and_remedy(runs: MakeRun, tmp_path: Path) -> None:
    for status in ReadStatus:
        error = RunUnreadable(status, f"reason {status}", f"remedy {status}")
        snap = Snapshot(tmp_path, problem=error)
        for page in pages().values():
            full = page.render(snap, Ui(page=page.name), 80, 24)
            text = "\n".join(map(plain, full.lines))
            assert all(width_of(x) <= 80 for x in full.lines)
            assert job_state(snap).word in text, page.name
        text = "\n".join(map(plain, pages()["ranks"].render(snap, Ui(), 80, 24).lines))
        assert f"reason {status}" in text and f"remedy {status}" in text


def test_a_job_that_was_killed_together_with_its_monitor_has_failed(runs: MakeRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs(Scenario(state="running", ranks=2)), tmp_path / "run"))
    set_monitor(run, "gone")
    assert (
        job_state(take(run, Ui(), pages()["ranks"], 80, 24)).word == "MONITOR GONE"
    )  # its pages are on no host that is known
    directory = directories.overflow(run, 0)
    directories.make(directory, run)
    directories.node_record(run, 0).write_text(f"{socket.gethostname()}:1:1 {directory}\n")
    snap = take(run, Ui(), pages()["ranks"], 80, 24)
    assert (snap.killed, job_state(snap).word, job_state(snap).do.split()[:2]) == (
        "ranks 0, 1 and the monitor were killed",
        "FAILED",
        ["distdiag", "diagnose"],
    )
    assert "distdiag dump" not in "\n".join(_check(run, "rank", Ui(), 120, 40))
    held = directories.hold(directory)
    assert held is not None
    assert job_state(take(run, Ui(), pages()["ranks"], 80, 24)).word == "MONITOR GONE"  # a rank lives
    os.close(held)


def test_a_damaged_file_is_a_screen_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"garbage" * 1000)
    assert any("DAMAGED" in x for x in _check(tmp_path, "ranks", Ui(), 80, 24))


def test_foreign_json_in_a_probe_or_a_finding_hides_nothing_else(runs: MakeRun, tmp_path: Path) -> None:
    with Writer(tmp_path) as w:
        w.frame(1.0, "running", "", [RankRow(rank=0, life="running")])
        w.probe(1.0, "allreduce", "pass", "not json")
        w.probe(2.0, "pairs", "pass", '{"rows": [1, {"bytes": "x", "time_us": 3}], "reasons": 5, "fit": []}')
    con = sqlite3.connect(tmp_path / DATABASE)
    with con:
        con.execute("INSERT INTO finding (key, json) VALUES ('a', 'broken')")
    con.close()
    for page in pages():
        _check(tmp_path, page, Ui(page=page, rank=0), 100, 30)


def test_arrivals_show_the_last_rank_if_it_is_known(runs: MakeRun) -> None:
    for ranks, width in ((2, 60), (67, 100), (67, 250)):
        snap = take(runs(Scenario(ranks=ranks)), Ui(), pages()["comm"], width, 40)
        data = snap.panel
        assert isinstance(data, CommData) and len(data.ops) == 3
        assert len(arrivals(snap.frame, data, 0, width, 1)) == 1
        strips = arrivals(snap.frame, data, 1, width, 9)
        assert all(width_of(x) <= width for x in strips)
        text = list(map(plain, strips))
        assert [next(w for w in ("first", "broadcast", "25.0", "4 B") if w in x) for x in text] == [
            "first",
            "broadcast",
            "25.0",
            "4 B",
        ]
        assert all("ms" in x and "rank" in x for x in text)
    alone = take(runs(Scenario(ranks=1)), Ui(), pages()["comm"], 100, 40)
    assert isinstance(alone.panel, CommData) and arrivals(alone.frame, alone.panel, 0, 100, 9) == []


@pytest.mark.parametrize("text", ["", "1,2", "1,x", "nan,1", "1,2,3,4,5,6,7,8,9", "9" * 5000 + ",1,1,1,1,1,1,1"])
def test_arrivals_of_another_program_are_left_out(runs: MakeRun, text: str) -> None:
    run = runs(Scenario(ranks=8), "always")
    con = sqlite3.connect(run / DATABASE)
    with con:
        con.execute("UPDATE collective SET arrivals_us = ?", (text,))
    con.close()
    assert not any("arrivals  all_reduce" in x for x in _check(run, "comm", Ui(), 100, 30))


def test_large_screens_show_collectives_and_waiting_for_data_over_time(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=8), "live")
    comm = "\n".join(_check(run, "comm", Ui(), 250, 70))
    assert comm.count("transfer ms") == 3 and comm.count("skew ms  ") == 3 and comm.count("busbw GB/s") == 2
    data = "\n".join(_check(run, "data", Ui(), 250, 70))
    assert "rank 5   last" in data and "rank 5 63." in data and "others 2." in data
    assert "transfer ms" not in "\n".join(_check(run, "comm", Ui(), 80, 24))


def test_the_charts_of_the_job_include_exposed_communication_where_ddp_timed_it(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=2), "always")
    assert not any("exposed communication" in x for x in _check(run, "ranks", Ui(), 160, 48))
    con = sqlite3.connect(run / DATABASE)
    with con:
        con.execute("UPDATE step SET exposed_ms = 0.25 * step_ms WHERE step % 5 = 0")
    con.close()
    lines = _check(run, "ranks", Ui(), 160, 48)
    title = next(i for i, x in enumerate(lines) if "exposed communication of step time" in x)
    at = lines[title].index("exposed communication")
    assert "30%" in lines[title + 1][at - 2 : at + 8], "the axis ends above the largest share"


def test_an_operation_without_times_is_not_judged(runs: MakeRun) -> None:
    created = OpStats("init_process_group", "default_pg", 8, None, 1, None, None, None, 1e6, 0, 1, 1, 1)
    snap = Snapshot(Path("."))
    text = plain(verdict(CommData((created,), 50), snap))
    assert "no transfer time is known" in text


def test_80_columns_hold_the_number_of_nodes_and_a_finding_of_two_lines(runs: MakeRun) -> None:
    run = runs(Scenario(ranks=64), "live")
    assert "… 6 more nodes" in "\n".join(_check(run, "memory", Ui(), 80, 24))
    for page in ("timeline", "heat", "data"):
        text = "\n".join(_check(run, page, Ui(), 80, 24))
        assert "slowest in 46 of\n         the last 50 steps (suspected)" in text and "more lines" not in text


def test_batches_without_a_loader_are_not_those_of_one(runs: MakeRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs(Scenario(ranks=2)), tmp_path / "run"))
    con = sqlite3.connect(run / DATABASE)
    con.execute("UPDATE loader SET fed = 1, length = NULL")
    con.commit()
    con.close()
    shown = "\n".join(_check(run, "data", Ui(page="data"), 160, 30))
    assert "no loader seen; batches enter the model at train.py:117" in shown
    main(["report", str(run), "-o", str(tmp_path / "x.html")])
    assert "no loader seen; batches enter the model at <code>" in (tmp_path / "x.html").read_text()


def test_the_words_are_those_of_the_verdict(runs: MakeRun, tmp_path: Path) -> None:
    run = runs(Scenario(ranks=2))
    snap = take(run, Ui(), pages()["ranks"], 120, 30)
    summary = replace(snap.summary, self_p50=1.0, self_max=44.0)
    shown = "\n".join(map(plain, pages()["ranks"].render(replace(snap, summary=summary), Ui(), 120, 30).lines))
    assert "spread 44×" in shown
    both_wait = Finding(
        kind="deadlock", cause="missing_rank", culprits=(0,), victims=(1,), message="only rank 0 made barrier",
        where=(Where(0, "t.py", 9, "sync", "waiting"),), collective=CollectiveRef("all_reduce", "default_pg", 127),
    )  # fmt: skip
    assert "in        collective #127" in "\n".join(map(plain, story_lines(both_wait, (), 100)))
