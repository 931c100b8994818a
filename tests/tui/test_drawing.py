"""Bars, charts and pictures: exact widths, one scale, gaps where nothing was measured, nothing loaded from elsewhere."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from distdiag.store.frames import RankRow
from distdiag.store.reader import open_run
from distdiag.tui.data import history
from distdiag.tui.draw import bars, palette
from distdiag.tui.draw.charts import Chart, Curve, buckets, draw, side_by_side
from distdiag.tui.draw.lines import line, plain, width_of
from distdiag.tui.draw.picture import svg
from distdiag.tui.draw.text import milliseconds
from distdiag.tui.screens import history_charts
from tests.tui.conftest import MakeRun
from tests.tui.synthetic import Scenario

phases = st.lists(st.tuples(st.sampled_from(palette.PHASES), st.floats(0, 500)), unique_by=lambda x: x[0], max_size=6)


@given(phases, st.integers(1, 120), st.floats(1, 1500), st.booleans(), st.booleans())
def test_a_stacked_bar_is_exactly_as_wide_as_its_cell(
    segments: list[tuple[str, float]], width: int, scale: float, colour: bool, words: bool
) -> None:
    made = bars.stacked(segments, scale, width, colour=colour, words=words)
    assert width_of(tuple(made)) == width


def test_two_bars_share_one_scale() -> None:
    fast = bars.stacked([("forward", 50.0), ("wait", 50.0)], 200.0, 40, words=False)
    slow = bars.stacked([("forward", 150.0)], 200.0, 40, words=False)
    lengths = [{s: len(t) for t, s, _ in made if s.startswith("in-")} for made in (fast, slow)]
    assert lengths == [{"in-forward": 10, "in-wait": 10}, {"in-forward": 30}]


def test_without_colour_a_bar_is_letters() -> None:
    made = bars.stacked([("data", 25.0), ("backward", 50.0), ("wait", 25.0)], 100.0, 20, colour=False)
    assert plain(tuple(made)) == "dddddbbbbbbbbbb·····"
    assert "d data" in plain(tuple(bars.legend(60, colour=False)))


def test_waiting_is_taken_out_of_the_phase_it_happened_in() -> None:
    row = RankRow(rank=0, step_ms=100, data_ms=5, forward_ms=20, backward_ms=70, optimizer_ms=5, wait_ms=40)
    found = dict(bars.phases_of(row))
    assert found["backward"] == 30 and found["wait"] == 40 and sum(found.values()) == 100


@pytest.mark.parametrize("share", [None, 0.0, 0.37, 1.0, 7.0, float("nan")])
def test_a_gauge_is_exactly_as_wide_as_asked(share: float | None) -> None:
    for colour in (True, False):
        assert width_of(tuple(bars.gauge(share, 6, colour=colour))) == 6


def test_a_pause_of_the_job_is_a_gap_in_the_chart() -> None:
    times = [*range(20), *range(60, 80)]
    found = buckets(Curve("", times, [1.0] * 40, ""), 80.0, 1.0, 80)
    assert None not in found[1:19] and set(found[25:55]) == {None}


@given(st.integers(30, 120), st.integers(4, 12), st.booleans(), st.lists(st.floats(0.1, 1e5), max_size=60))
def test_a_chart_fits_and_names_its_scale(width: int, height: int, ascii_only: bool, values: list[float]) -> None:
    chart = Chart("step time", "ms", (Curve("p50", range(len(values)), values, "accent", True),), milliseconds)
    made = draw(chart, 0.0, max(1.0, len(values)), width, height, ascii_only)
    assert len(made) <= height and all(width_of(x) <= width for x in made)
    if len(values) > 1:
        assert plain(made[-2]).lstrip().startswith("0.0") or height <= 4
        assert "00:00:" in plain(made[-1])
    joined = side_by_side([made, made], 2 * width + 2)
    assert all(width_of(x) <= 2 * width + 2 for x in joined)


def test_the_history_is_read_step_by_step_and_stays_bounded(runs: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(runs(Scenario(ranks=8))) as run:
        frame, cache = run.latest_frame(), {}
        assert frame is not None
        whole = history.read(run, frame, cache)
        assert [p.step for p in whole] == list(range(1084, 1204))
        again = history.read(run, frame, cache)
        assert again == whole and all(a is b for a, b in zip(again[:-2], whole[:-2], strict=True))  # not made again
        assert whole[-1].samples_per_s == pytest.approx(32 * 8 / whole[-1].step_ms * 1000)  # type: ignore[operator]
        monkeypatch.setattr(history, "POINTS", 40)
        few = history.read(run, frame, {})
        assert len(few) <= 40 and {b.step - a.step for a, b in itertools.pairwise(few)} == {4}


def test_an_svg_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    lines = [line((" <rank> & ", "bold"), ("█▌━⠿", "area-data on-wait")), line("two  words")]

    def style_of(names: str) -> Style:
        area = palette.colours(names.split()[0]) if names else None
        return Style(color=area[0] if area else "#e0e0e0", bgcolor="#121212")

    text = svg(lines, style_of, 40, "a <title>")
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and "href" not in text and "url(" not in text and "@font-face" not in text
    words = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert words == ["a <title>", "<rank> &", "two", "words"]
    assert palette.COLOURS["data"][0] in text


def test_phases_and_heat_differ_in_256_colours() -> None:
    codes = [palette.code_256(palette.COLOURS[p][0]) for p in palette.PHASES]
    assert len(set(codes)) == len(codes)


def test_the_clock_moves_out_of_the_way_of_a_mark() -> None:
    chart = Chart("a", "", (Curve("", range(60), [1.0] * 60, ""),), milliseconds, marks=((57.0, "warning"),))
    axis = plain(draw(chart, 0.0, 60.0, 60, 6)[-1])
    assert "00:01:00" in axis and axis.index("00:01:00") < axis.index("▲")


def test_a_mark_near_the_beginning_moves_the_other_clock() -> None:
    marks = ((6.0, "warning"), (9.0, "error"))
    chart = Chart("a", "", (Curve("", range(60), [1.0] * 60, ""),), milliseconds, marks=marks)
    axis = plain(draw(chart, 0.0, 59.0, 60, 8, False)[-1])
    assert axis.count("▲") == 2 and "00:00:00" in axis and axis.index("▲") < axis.index("00:00:00")


def test_a_slow_first_step_does_not_flatten_the_chart() -> None:
    """64 ranks: two and a half minutes until the first step, then 24 steps of two seconds, on 24 dots."""
    values = [150_000.0, *[2000.0] * 24]
    chart = Chart("step time", "ms", (Curve("p50", [150 + 2 * i for i in range(25)], values, ""),), milliseconds)
    top = plain(draw(chart, 0.0, 200.0, 60, 6)[1]).split()[0]
    assert top in ("3000", "4000", "5000")


def test_a_long_first_step_leaves_no_chart_half_empty() -> None:
    points = tuple(
        history.Point(i, 30.0 + i, 30_000.0 if i == 0 else 1000.0, 10.0, None, 5.0, 0.08812345) for i in range(30)
    )
    made = history_charts.chart_lines(points, 59.0, 160, 8, (), True)
    rows = [plain(x).ljust(60)[8:38] for x in made[1:-1]]
    assert sum(any(row[i] != " " for row in rows) for i in range(30)) > 24, made


@pytest.mark.parametrize("value", [0.08812345, 2.552, 123.456, 9999.0, 1e-7, 3.2e7])
def test_a_loss_fits_left_of_the_axis(value: float) -> None:
    (chart,) = (
        c
        for c in history_charts.charts((history.Point(1, 1.0, 1.0, 1.0, None, 1.0, value),), (), False)
        if c.title == "loss"
    )
    assert float(chart.show(value)) == pytest.approx(value, rel=0.05) and len(chart.show(value)) <= 7
