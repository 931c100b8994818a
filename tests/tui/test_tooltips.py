"""Column headers, charts and legends have explanations: on hovering, on a click, and in `?`, with the same text."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets._tooltip import Tooltip

from distdiag.tui.app import DistdiagApp
from distdiag.tui.draw.lines import explained, explanations, hit_at, line, split_hit
from distdiag.tui.draw.text import clean
from distdiag.tui.ui import Ui
from tests.tui.conftest import MakeRun
from tests.tui.drive import Driver, showing
from tests.tui.synthetic import Scenario

pytestmark = pytest.mark.usefixtures("frozen")
RUN = Scenario(ranks=8, steps=60, frames=2)


def test_an_explanation_leaves_the_click_as_it_is() -> None:
    text = explained(line(("Δ self", "head", "sort:delta"), " ms"), "Δ self", "against the median")
    assert [split_hit(hit_at(text, x)) for x in (0, 7)] == [
        ("sort:delta", "Δ self: against the median"),
        ("", "Δ self: against the median"),
    ]
    assert explanations([text, text, line("rank")]) == ("Δ self: against the median",)
    assert split_hit(clean("node\x1fforged"))[1] == ""  # text of the job cannot explain anything


def _at(d: Driver, text: str) -> tuple[int, int]:
    """Return the cell at which this text first begins."""
    for y, row in enumerate(d.text().splitlines()):
        if text in row:
            return row.index(text), y
    raise AssertionError(f"{text!r} is not on the screen:\n{d.text()}")


def test_a_click_explains_and_still_sorts(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUN), (120, 30)) as d:
            await d.pilot.click(offset=_at(d, "self ms  "[:7] + "  Δ"))
            assert d.app.ui.sort == "self_ms" and "self ms: step - wait" in await d.settled()
            await d.pilot.click(offset=_at(d, "step time ms"))
            assert "step time, ms: median (p50) and 95th percentile" in await d.settled()
            assert "1 Ranks" in await d.press("up")  # the next key restores the key bar

    asyncio.run(work())


def test_a_long_answer_is_wrapped_and_never_longer_than_three_lines(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUN), (80, 24)) as d:
            d.app.say("word " * 30)
            assert [row.strip().startswith("word") for row in d.text().splitlines()[-3:]] == [False, True, True]
            d.app.say("word " * 300)
            last = d.text().splitlines()[-4:]
            assert (
                not last[0].strip().startswith("word") and last[-1].endswith("…") and len(d.text().splitlines()) == 24
            )

    asyncio.run(work())


def test_hovering_shows_the_tooltip_and_leaving_hides_it(runs: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistdiagApp, "TOOLTIP_DELAY", 0.01)

    async def work() -> None:
        app = DistdiagApp(runs(RUN), Ui(), hz=10.0)
        async with app.run_test(size=(120, 30), tooltips=True) as pilot:
            d = Driver(app, pilot)
            await d.press("4")
            tip = app.screen.get_child_by_type(Tooltip)
            for what, words in (
                ("throttle", "throttle: why the clock is held back"),
                ("SM clock MHz", "SM clock, MHz: clock of the multiprocessors"),
            ):
                x, y = _at(d, what)
                for i in range(200):  # a movement hides the tooltip, a rest shows it
                    await pilot.hover(offset=(x + i % 2, y))
                    await pilot.pause(0.1)
                    if tip.display:
                        break
                assert tip.display and str(tip.content).startswith(words)
            await pilot.hover(
                offset=(x + 2, y)
            )  # a movement hides the tooltip; a second one must not be needed to show it
            await d.until(lambda: tip.display and str(tip.content).startswith(words), "the tooltip again")
            await d.press("1")  # another screen: nothing, or something else is under the mouse
            await d.until(lambda: not tip.display or not str(tip.content).startswith(words), "no tooltip")
            await d.press("4")
            await pilot.hover(offset=(1, 3))  # the row of a rank has no tooltip
            await d.until(lambda: not tip.display, "no tooltip")

    asyncio.run(work())


def test_the_help_has_what_is_on_the_screen(runs: MakeRun) -> None:
    async def work() -> None:
        async with showing(runs(RUN), (120, 48)) as d:
            for key, page, known in (
                ("1", "ranks", ("Δ self", "waiting, of step time", "optimizer")),
                ("2", "comm", ("busbw", "late rank", "arrivals, ms")),
                ("3", "heat", ("Δ self, ms against the median rank",)),
                ("4", "memory", ("throttle", "temperature, °C", "host CPU")),
                ("6", "data", ("sampler", "batches")),
                ("9", "timeline", ("comm", "waiting")),
            ):
                await d.press(key)
                terms = explanations(d.app.canvas.lines)
                assert set(known) <= {t.partition(": ")[0] for t in terms}
                text = await d.press("question_mark")
                assert f"on the screen {page} " in text
                words = " ".join(text.split())
                for term in terms[:12]:  # the terms that fit on one screen of the help
                    assert " ".join(term.replace(": ", " ", 1).split()) in words or len(term) > 90, term

    asyncio.run(work())
