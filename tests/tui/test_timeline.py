"""The timeline: lanes of exactly the plot's width, phases in their colours, lanes that stop."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.diagnosis.model.findings import Where
from distdiag.store.frames import RankRow
from distdiag.store.reader import open_run
from distdiag.tui.data.snapshot import Request, Taker
from distdiag.tui.data.timeline_data import Step
from distdiag.tui.draw.lines import width_of
from distdiag.tui.draw.palette import PHASES
from distdiag.tui.screens import timeline
from tests.tui.conftest import MakeRun
from tests.tui.drive import showing
from tests.tui.synthetic import Scenario

segments = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.sampled_from((*PHASES, "gone", "unknown")), st.sampled_from(("", "waits for a rank"))),
    max_size=30,
)  # fmt: skip


@given(segments, st.integers(8, 150), st.booleans())
def test_a_lane_is_exactly_as_wide_as_the_plot(found: list[timeline.Segment], width: int, colour: bool) -> None:
    assert width_of(tuple(timeline.lane(found, 10.0, 90.0, width, colour))) == width


def test_a_lane_shows_each_phase_where_it_was() -> None:
    drawn = timeline.lane([(0.0, 5.0, "data", ""), (5.0, 10.0, "backward", "")], 0.0, 10.0, 20, True)
    assert [(len(t), s) for t, s, _ in drawn] == [(10, "on-data"), (10, "on-backward")]
    letters = timeline.lane([(0.0, 5.0, "data", ""), (5.0, 10.0, "wait", "")], 0.0, 10.0, 20, False)
    assert "".join(t for t, _, _ in letters) == "d" * 10 + "·" * 10


def test_the_phases_of_a_step_fill_it_in_the_order_of_a_training_loop() -> None:
    times = {
        "data_ms": 100.0,
        "h2d_ms": None,
        "forward_ms": 200.0,
        "backward_ms": 600.0,
        "optimizer_ms": 100.0,
        "other_ms": 0.0,
    }
    found = timeline.of_step(Step(t_end_s=2.0, step_ms=1000.0, wait_ms=300.0, **times))
    assert [name for _, _, name, _ in found] == ["data", "forward", "backward", "wait", "optimizer"]
    assert found[0][0] == pytest.approx(1.0) and found[-1][1] == pytest.approx(2.0)
    assert sum(b - a for a, b, _, _ in found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (RankRow(rank=0, life="running", phase="data", phase_age_s=3.0, file="/a/t.py", line=7), ("data", "data for 3.0 s at t.py:7")),
        (RankRow(rank=0, life="running", waiting_op="all_reduce", waiting_seq=4, waiting_age_s=3.0), ("wait", "waits in all_reduce #4 for 3.0 s")),
        (RankRow(rank=0, life="killed", t_s=6.0), ("gone", "killed")),
        (RankRow(rank=0, life="finished"), ("done", "done")),
    ],
)  # fmt: skip
def test_what_a_rank_does_now_ends_its_lane(row: RankRow, expected: tuple[str, str]) -> None:
    last = timeline.now_of(row, 5.0, 10.0)[-1]
    assert last[1] == 10.0 and last[2:] == expected


def test_a_lost_rank_shows_what_it_did_until_then() -> None:
    row = RankRow(rank=0, life="killed", t_s=9.0, phase="other", phase_age_s=3.0, file="/a/t.py", line=7)
    assert timeline.now_of(row, 5.0, 10.0) == [
        (5.0, 6.0, "unknown", ""), (6.0, 9.0, "other", "at t.py:7 until 00:00:09"), (9.0, 10.0, "gone", "killed"),
    ]  # fmt: skip
    waited = Where(0, "/a/t.py", 8, "main", "waiting")
    assert timeline.now_of(row, 5.0, 10.0, waited)[1][2:] == (
        "wait",
        "waited in a collective at t.py:8 until 00:00:09",
    )


def test_the_last_steps_stay_on_the_screen_after_the_job_has_stopped(runs: MakeRun) -> None:
    with open_run(runs(Scenario(state="deadlocked", ranks=8))) as run:
        taker = Taker(run, {"timeline": timeline.TimelinePage.read})
        chosen = taker.take(Request("timeline", ranks=(0, 5), span=2.0)).panel
        assert chosen.end_s - chosen.begin_s == pytest.approx(2.0) and not chosen.steps[0]
        stopped = taker.take(Request("timeline", ranks=(0, 5), span=2.0, extra=True)).panel
        steps, span = stopped.steps[0], stopped.end_s - stopped.begin_s
        assert steps and stopped.end_s == chosen.end_s and (steps[-1][0] - stopped.begin_s) / span >= 0.19


def test_a_deadlock_shows_lanes_that_stop(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(state="deadlocked", ranks=8)), (120, 30)) as d:
            lines = (await d.press("9")).splitlines()
            lanes = [x for x in lines if x[3:8].strip().isdigit()]
            assert len(lanes) == 8 and "data for 31.4 s at train.py:118" in lanes[0]
            assert all("waits in all_reduce #5404 (default_pg) for 31.2 s" in x for x in lanes[1:])
            assert "30.0 s up to" in await d.press("plus")
            text = await d.press("left", "left")
            assert d.app.ui.until_s is not None and "waits in" not in text.splitlines()[4]
            await d.press("right", "right", "right")
            assert d.app.ui.until_s is None

    asyncio.run(work())


def test_steps_are_read_once(runs: MakeRun) -> None:
    with open_run(runs(Scenario(ranks=8))) as run:
        taker = Taker(run, {"timeline": timeline.TimelinePage.read})
        first = taker.take(Request("timeline", ranks=(0, 5), span=5.0)).panel
        spans: list[tuple] = []
        real = run.query
        run.query = lambda sql, args=(): (
            (spans.append(tuple(args)[:2]) if "step.step, step.rank" in sql else None) or real(sql, args)
        )  # type: ignore[method-assign]
        again = taker.take(Request("timeline", ranks=(0, 5), span=4.9)).panel
        assert spans == [(1202, 1203)]
        assert len(first.steps[5]) >= len(again.steps[5]) > 15 and first.steps[5][-1] == again.steps[5][-1]
        back = taker.take(Request("timeline", ranks=(0, 5), span=2.0, until=250.0)).panel
        assert back.steps[0] and all(row[0] > 248.0 for row in back.steps[0])


def test_few_lanes_are_tall_and_leave_room_for_the_whole_finding(runs: MakeRun) -> None:
    async def work() -> str:
        async with showing(runs(Scenario(state="deadlocked", ranks=3)), (130, 34)) as d:
            await d.press("9")
            lanes = [[p[2] for p in text if p[2].startswith("cell:")] for text in d.app.canvas.lines]
            assert [sum(f"cell:{r}" in hits for hits in lanes) for r in range(3)] == [5, 5, 5]
            return d.text()

    text = asyncio.run(work())
    assert "cost " in text and "do  " in text and "more lines" not in text
    assert text.count("waits in all_reduce") == 2


@pytest.mark.usefixtures("frozen")
def test_lanes_of_one_line_leave_the_finding_what_they_do_not_need(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=8)), (80, 24)) as d:
            text = await d.press("9")
            assert "cost " in text and "where " in text and "more lines" not in text

    asyncio.run(work())
