"""The heat map: cursor, pan and zoom by keys and mouse; colours, half lines, and digits without colour."""

from __future__ import annotations

import asyncio

from distdiag.store.reader import open_run
from distdiag.tui.data.snapshot import Request, Taker
from distdiag.tui.draw.canvas import Canvas
from distdiag.tui.screens import heat
from tests.tui.conftest import MakeRun
from tests.tui.drive import Driver, showing
from tests.tui.synthetic import Scenario


def _taker(run) -> Taker:
    return Taker(run, {"heat": heat.HeatPage.read})


def test_cursor_pan_and_zoom(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=8)), (120, 30)) as d:
            text = await d.press("3")
            assert "steps 1114–1203" in text and "rank 5  step 1203" in text
            assert "step 1201" in await d.press("left", "left") and d.app.ui.step == 1201
            assert "step 1203" in await d.press("right", "right", "right") and d.app.ui.step is None
            await d.press(*["shift+left"] * 10)
            text = await d.settled()
            assert "steps 1103–" in text and "step 1103" in text  # the view follows the cursor
            assert "the highest of 2 steps" in await d.press("minus")
            assert "the highest of" not in await d.press("plus", "plus")
            await _click_and_wheel(d)

    asyncio.run(work())


async def _click_and_wheel(d: Driver) -> None:
    row = next(y for y, t in enumerate(d.app.canvas._lines) if any(p[2] == "cell:3" for p in t))
    await d.pilot.click(Canvas, offset=(heat.LABEL + 4, row))
    await d.until(lambda: d.app.ui.cursor.get("heat") == 3)
    text = await d.settled()
    assert d.app.ui.step is not None and f"rank 3  step {d.app.ui.step}" in text
    before = d.app.ui.step
    d.app.canvas.post_message(Canvas.Wheel(3, "pan"))
    await d.until(lambda: d.app.ui.step == before + 3)
    d.app.canvas.post_message(Canvas.Wheel(3, "zoom"))
    await d.until(lambda: d.app.ui.per == 2)


def test_a_cell_of_many_steps_shows_the_worst_of_them(runs: MakeRun) -> None:
    with open_run(runs(Scenario(ranks=8))) as run:
        take = _taker(run).take
        one = take(Request("heat", ranks=(0, 5), window=40)).panel
        eight = take(Request("heat", ranks=(0, 5), window=40, per=8)).panel
    assert one.first == 1164 and eight.first == 1084 // 8 * 8
    # the culprit's four quiet steps disappear in cells of eight
    assert min(one.values[5]) < 10 and min(eight.values[5]) > 50
    last = [v for s, v in zip(range(one.first, one.last + 1), one.values[5], strict=True) if s // 8 == 1203 // 8]
    assert eight.values[5][-1] == max(last)


def test_panning_back_reads_only_what_is_missing(runs: MakeRun) -> None:
    with open_run(runs(Scenario(ranks=8))) as run:
        taker = _taker(run)
        taker.take(Request("heat", ranks=(0, 5), window=40))
        asked: list[tuple] = []
        real = run.query
        run.query = lambda sql, args=(): (
            (asked.append(tuple(args)) if "step.self_ms" in sql else None) or real(sql, args)
        )  # type: ignore[method-assign]
        moved = taker.take(Request("heat", ranks=(0, 5), window=40, end=1193)).panel
        assert (moved.first, moved.last) == (1154, 1193)
        assert [a[:2] for a in asked] == [(1154, 1163)]
        fresh = _taker(run).take(Request("heat", ranks=(0, 5), window=40, end=1193)).panel
        assert fresh.values == moved.values


def test_levels_and_digits_agree_on_what_is_quiet() -> None:
    for value, quiet in ((None, None), (0.0, True), (5.0, True), (5.1, False), (99.0, False), (1e9, False)):
        found = heat.level(value, 5.0, 60.0)
        assert (found is None) == (quiet is None)
        if found is not None:
            assert (found == 0) == quiet == (heat.digit(value, 5.0, 60.0) == ".")
    assert heat.level(1e9, 5.0, 60.0) == heat.HEAT_LEVELS - 1


def test_two_ranks_share_a_line_only_if_space_is_short(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=67)), (120, 30)) as d:
            text = await d.press("3")
            assert "   5,0" in text and "rows 1–3" in text
            d.app.ui.ascii = True
            d.app.redraw()
            text = await d.settled()
            assert "5,0" not in text and "....." in text  # digits, one rank per line

    asyncio.run(work())


def test_few_ranks_have_tall_rows(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=3)), (130, 34)) as d:
            text = await d.press("3")
            rows = [{p[2] for p in line if p[2].startswith("cell:")} for line in d.app.canvas.lines]
            assert [sum(f"cell:{r}" in hits for hits in rows) for r in range(3)] == [5, 5, 5]
            assert text.count(" slowest\n") == 3 and text.count("◆") == 2  # on the map, and below it

    asyncio.run(work())
