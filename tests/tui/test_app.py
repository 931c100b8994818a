"""The app, driven by keys and clicks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from distdiag.store.writer import Writer
from distdiag.tui import keys
from distdiag.tui.app import DistdiagApp
from distdiag.tui.data.order import ORDERS
from distdiag.tui.draw.canvas import Canvas
from distdiag.tui.draw.lines import STYLES, hit_at, split_hit
from distdiag.tui.files import Files
from distdiag.tui.navigation import Navigation
from distdiag.tui.ui import Ui
from tests.tui.conftest import MakeRun
from tests.tui.drive import Driver, showing
from tests.tui.synthetic import Scenario, fill, frame_state, make, rows, set_monitor

pytestmark = pytest.mark.usefixtures("frozen")
RUNNING = Scenario(ranks=8)


def _cursor_row(d: Driver) -> str:
    """Return the text of the line with the cursor."""
    found = [y for y, text in enumerate(d.app.canvas._lines) if text and "cursor" in text[0][1]]
    return "".join(p[0] for p in d.app.canvas._lines[found[0]]) if found else ""


def test_the_cursor_moves_and_opens_ranks(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            assert _cursor_row(d).split()[1] == "5"
            await d.press("j", "j")
            assert _cursor_row(d).split()[1] == "1"
            assert "rank 1 " in await d.press("enter")
            assert "rank 2 " in await d.press("n")
            assert "rank 0 " in await d.press("p", "p")
            assert "RUNNING" in await d.press("escape")
            await d.press("end")
            assert _cursor_row(d).split()[1] == "7"
            await d.press("home")
            assert _cursor_row(d).split()[1] == "5"

    asyncio.run(work())


def test_sorting_by_key_and_by_click(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            for order in (*ORDERS[1:], ORDERS[0]):
                await d.press("s")
                assert d.app.ui.sort == order.key
                assert f"sort: {order.title}" in d.text()
            head = next(
                y for y, t in enumerate(d.app.canvas._lines) if any(split_hit(p[2])[0] == "sort:wait_ms" for p in t)
            )
            x = next(x for x in range(80) if split_hit(hit_at(d.app.canvas._lines[head], x))[0] == "sort:wait_ms")
            await d.pilot.click(Canvas, offset=(x, head))
            await d.until(lambda: d.app.ui.sort == "wait_ms")
            assert _cursor_row(d).split()[1] == "5"  # the slow rank waits least; the cursor stays on its rank
            await d.pilot.click(Canvas, offset=(x, head))
            await d.until(lambda: d.app.ui.reverse)

    asyncio.run(work())


def test_rows_keys_and_findings_can_be_clicked(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            lines = d.app.canvas._lines
            row = next(y for y, t in enumerate(lines) if any(p[2] == "row:3" for p in t))
            await d.pilot.click(Canvas, offset=(10, row))
            await d.until(lambda: d.app.ui.cursor.get("ranks") == 3)
            await d.pilot.click(Canvas, offset=(10, row))
            await d.until(lambda: d.app.ui.page == "rank" and d.app.ui.rank == 3)
            await d.press("escape")
            first = next(y for y, t in enumerate(d.app.canvas._lines) if any(p[2].startswith("finding:") for p in t))
            await d.pilot.click(Canvas, offset=(20, first))
            await d.until(lambda: d.app.ui.page == "findings")
            bar = d.app.canvas._lines[-1]
            x = next(x for x in range(80) if hit_at(bar, x) == "do:show('comm')")
            await d.pilot.click(Canvas, offset=(x, 23))
            await d.until(lambda: d.app.ui.page == "comm")

    asyncio.run(work())


def test_the_filter_line_filters_ranks(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=67))) as d:
            await d.pilot.press("slash", *"rank 3-5")
            text = await d.press("enter")
            assert "3 of 67 ranks pass the filter" in text and not d.app.ui.typing
            await d.pilot.press("slash", *" nonsense>4")
            await d.pilot.press("enter")
            await d.until(lambda: "no column 'nonsense'" in d.text())
            assert d.app.ui.typing and d.app.ui.filter.text == "nonsense"  # the valid part applies
            await d.press("escape")
            assert d.app.ui.filter.text == "" and "rows 1–" in d.text()
            await d.pilot.press("slash", *"node999")
            assert "no rank passes the filter `node999`" in await d.press("enter")
            for page in "346":
                await d.press(page)

    asyncio.run(work())


def test_follow_group_and_node_views(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=67))) as d:
            await d.press("j", "j", "f")
            assert _cursor_row(d).split()[1] == "5"
            text = await d.press("g")
            assert "node008" in text and "finding" in text
            await d.press("j", "enter")
            assert d.app.ui.filter.text == "node:1" and "8 of 67 ranks" in d.text()

    asyncio.run(work())


def test_pausing_freezes_the_view_while_the_job_continues(tmp_path: Path) -> None:
    run = make(tmp_path / "r", RUNNING)

    async def work() -> None:
        async with showing(run) as d:
            await d.press("space")
            assert "VIEW PAUSED" in d.text()
            with Writer(run) as w:
                w.frame(RUNNING.t_s + 5, "running", "", rows(RUNNING, "running", 1300, RUNNING.t_s + 5))
                w.meta(state="deadlocked")
            set_monitor(run, "live")
            await d.until(lambda: d.app.snap.newest_t_s == RUNNING.t_s + 5)
            assert "step 1203/" in d.text()
            await d.until(lambda: "; now DEADLOCK at" in d.text())  # an old screen must not reassure
            assert "step 1300/" in await d.press("space")
            await d.press("left_square_bracket")
            await d.until(lambda: d.app.ui.paused_at_s == RUNNING.t_s)
            assert "PAUSED" in await d.settled()

    asyncio.run(work())


def test_a_finding_leads_to_its_time_and_rank(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(state="failed", ranks=8, frames=8), "ended")) as d:
            await d.press("5")
            await d.press("t")
            text = await d.settled()
            assert "REPLAY" in text and "running at step" in text
            assert "FAILED" in await d.press("space")
            await d.press("5")
            assert "rank 5 " in await d.press("enter")

    asyncio.run(work())


def test_new_data_appear_and_a_restart_is_followed(tmp_path: Path) -> None:
    run = make(tmp_path / "r", Scenario(state="waiting", ranks=2, gpus=False))

    async def work() -> None:
        async with showing(run) as d:
            assert "WAITING" in d.text()
            with Writer(run) as w:
                fill(w, Scenario(ranks=2, gpus=False, t_s=300.0))
            set_monitor(run, "live")
            await d.until(lambda: "RUNNING" in d.text())
            again = run / "attempt_1"
            make(again, Scenario(ranks=2, gpus=False, state="deadlocked"))
            with Writer(again) as w:
                w.meta(attempt=1)
            set_monitor(again, "live")
            await d.until(lambda: "DEADLOCK" in d.text())
            await d.resize(120, 30)
            assert "(attempt 1)" in await d.settled()

    asyncio.run(work())


def test_screens_are_exported(runs: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs(Scenario(state="deadlocked", ranks=8, hostile=True))
    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        async with showing(run) as d:
            await d.press("e")
            await d.press("P")
            await d.press("P")
            assert "written: distdiag-llama-1b-" in d.text()

    asyncio.run(work())
    (exported,) = tmp_path.glob("*.json")
    body = json.loads(exported.read_text())
    assert next(iter(body)) == "schema" and body["schema"] == "distdiag.snapshot/1"
    assert body["state"] == "deadlocked" and len(body["ranks"]) == 8 and body["findings"][0]["culprits"] == [5]
    pictures = list(tmp_path.glob("*.svg"))
    assert len(pictures) == 2 and all("DEADLOCK" in p.read_text() for p in pictures)


def test_an_export_that_cannot_be_written_is_reported(runs: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            monkeypatch.setattr(Path, "write_bytes", refuse)
            await d.press("e")
            assert "No space left" in d.text()

    asyncio.run(work())


def test_the_palette_goes_to_a_rank(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(Scenario(ranks=67))) as d:
            await d.pilot.press("ctrl+p")
            await d.until(lambda: len(d.app.screen_stack) == 2)
            await d.pilot.press(*"rank 42")
            await d.pilot.pause(0.6)  # the palette gathers its hits before it accepts one
            await d.pilot.press("down", "enter")
            await d.until(lambda: d.app.ui.page == "rank" and d.app.ui.rank == 42)

    asyncio.run(work())


def test_stacks_are_taken_by_the_dump_command_and_its_failure_is_shown(
    runs: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []
    real = asyncio.create_subprocess_exec

    async def spawn(*argv: str, **options: int) -> asyncio.subprocess.Process:
        seen.append(argv)
        return await real(sys.executable, "-c", "import sys; sys.exit('distdiag: error: no rank answers')", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)

    async def work() -> None:
        run = runs(Scenario(state="deadlocked", ranks=8))
        async with showing(run) as d:
            await d.press("7", "r")
            await d.until(lambda: "no rank answers" in d.text())
            assert seen[0][1:] == ("-m", "distdiag", "dump", str(run))
        async with showing(runs(Scenario(state="ended", ranks=8), "ended")) as d:
            await d.press("7", "r")
            assert "while the job runs" in d.text() and len(seen) == 1

    asyncio.run(work())


def test_only_changed_lines_are_drawn(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            before = d.app.drawn
            d.app.redraw()
            assert d.app.drawn == before
            await d.press("j")
            assert d.app.drawn - before == 2  # the old and the new row of the cursor

    asyncio.run(work())


def test_quitting_does_not_affect_the_job(runs: MakeRun) -> None:
    for key, code in (("q", 0), ("ctrl+c", 130)):

        async def work(key: str = key, code: int = code) -> None:
            async with showing(runs(RUNNING)) as d:
                await d.pilot.press(key)
                await d.until(lambda: not d.app.is_running or d.app._exit)
                assert d.app.return_value_code == code

        asyncio.run(work())


def test_every_key_does_something_and_is_in_the_help(runs: MakeRun) -> None:
    actions = {k.action for k in keys.KEYS}
    for action in actions:
        name = action.split("(")[0]
        parts = (DistdiagApp, Navigation, Files)
        assert name == "command_palette" or any(f"action_{name}" in part.__dict__ for part in parts), name
    assert len({(k.keys, k.needs) for k in keys.KEYS}) == len(keys.KEYS)

    async def work() -> None:
        async with showing(runs(RUNNING), (120, 70)) as d:
            text = await d.press("question_mark")
            for _ in range(4):  # to its end
                text += await d.press("pagedown")
            for k in keys.KEYS:
                assert k.help in text, k
            assert "RUNNING" in await d.press("question_mark")  # the same key closes the help

    asyncio.run(work())


def test_a_key_of_another_screen_says_where_it_works(runs: MakeRun) -> None:
    """It changed the order of a table that is not on the screen."""

    async def work() -> None:
        async with showing(runs(RUNNING), (120, 30)) as d:
            await d.press("2")
            assert "s (next sort order) works on: ranks, heat, " in await d.press("s")
            assert d.app.ui.sort == "severity"
            assert "no rank is under the cursor" in await d.press("8", "enter")
        async with showing(runs(Scenario(state="deadlocked", ranks=8))) as d:
            assert " rank 5 " in await d.press("7", "down", "down", "down", "enter")
            text = await d.press("0")
            assert "No step ends any more" in text and "Record" not in text
            assert "no step ends any more" in await d.press("R")

    asyncio.run(work())


def test_a_slow_page_is_drawn_late_and_correctly(runs: MakeRun) -> None:
    """Until the data of a page have arrived, the previous page stays: no panel shows "nothing" for data that are not read yet."""

    async def work() -> None:
        async with showing(runs(RUNNING)) as d:
            await d.pilot.press("2")
            assert "No collectives yet" not in "".join(p[0] for t in d.app.canvas._lines for p in t)
            await d.settled()
            assert "late rank" in d.text()

    asyncio.run(work())


def test_rows_do_not_jump_under_the_cursor(tmp_path: Path) -> None:
    sc = Scenario(ranks=8)
    run = make(tmp_path / "r", sc)
    now = [100.0]

    async def work() -> None:
        async with showing(run, ui=Ui(sort="self_ms")) as d:
            order = d.app.pages["ranks"].order  # type: ignore[attr-defined]
            order._now = lambda: now[0]
            d.app.redraw()
            await d.press("j")
            first = order.ranks(d.app.snap, d.app.ui)
            fresh = [msgspec.structs.replace(r, self_ms=200.0 + r.rank) for r in rows(sc, "running", 1204, sc.t_s + 1)]
            with Writer(run) as w:
                w.frame(sc.t_s + 1, frame_state("running"), "", fresh)
            set_monitor(run, "live")
            await d.until(lambda: d.app.snap.t_s == sc.t_s + 1)
            assert order.ranks(d.app.snap, d.app.ui) == first
            now[0] += 2.5
            assert order.ranks(d.app.snap, d.app.ui) == [7, 6, 5, 4, 3, 2, 1, 0]

    asyncio.run(work())


def test_first_screen_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, distdiag.cli.tui, distdiag.tui.app, distdiag.tui.data.source\nfrom distdiag.tui.screens import pages\npages()\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def _contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.1, relative luminance)."""

    def luminance(c: tuple[int, int, int]) -> float:
        parts = [v / 255 for v in c]
        r, g, bl = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * bl

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "nord", "gruvbox", "catppuccin-latte"])
def test_every_style_can_be_read_on_dark_and_light_grounds(runs: MakeRun, theme: str) -> None:
    """Plain and highlighted text at 4.5, dimmed text at 3; under the cursor, too."""

    async def work() -> None:
        async with showing(runs(RUNNING), theme=theme) as d:
            assert d.app.theme == theme
            for name in ("", *STYLES):
                for names in (name, f"{name} cursor".strip()):
                    style = d.app.canvas.style_of(names)
                    assert style.color is not None and style.bgcolor is not None
                    ratio = _contrast(style.color.get_truecolor(), style.bgcolor.get_truecolor())
                    needed = 3.0 if name in ("muted", "head", "other") or "cursor" in names else 4.5
                    if theme not in ("textual-dark", "textual-light"):
                        needed = 2.0  # third-party palettes: at least distinguishable
                    assert ratio >= needed, (names, ratio)

    asyncio.run(work())


def test_a_light_terminal_gets_a_light_theme(runs: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    async def theme() -> str:
        async with showing(runs(RUNNING)) as d:
            return d.app.theme

    assert asyncio.run(theme()) == "textual-dark"
    monkeypatch.setenv("COLORFGBG", "0;15")
    assert asyncio.run(theme()) == "textual-light"
    monkeypatch.setenv("TEXTUAL_THEME", "ansi-dark")
    assert asyncio.run(theme()) == "ansi-dark"


def test_an_unchanged_line_is_not_made_again(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUNNING), (120, 30)) as d:
            canvas = d.app.canvas
            before = [canvas.render_line(y) for y in range(30)]
            await d.press("j")  # the cursor leaves one row and enters the next
            again = [y for y in range(30) if canvas.render_line(y) is not before[y]]
            assert len(again) == 2
            assert sum(len(list(canvas.render_line(y))) for y in range(30)) < sum(map(len, canvas.lines))
            await d.resize(100, 30)
            assert {canvas.render_line(y).cell_length for y in range(30)} == {100}

    asyncio.run(work())


def test_collectives_are_read_only_if_the_screen_has_lines_for_them(runs: MakeRun) -> None:
    async def work() -> None:
        for ranks, wanted in ((2, True), (67, False)):
            async with showing(runs(Scenario(ranks=ranks)), (160, 48)) as d:
                assert d.app.snap.request.extra is wanted
                assert ("collectives, last" in d.text()) is wanted

    asyncio.run(work())
