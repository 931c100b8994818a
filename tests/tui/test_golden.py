"""The screens as text, drawn by the app: `UPDATE_GOLDEN=1 pytest tests/tui/test_golden.py` writes them again.

Read each difference before you accept it: users see exactly this text.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from distdiag.store.rundir import DATABASE
from distdiag.tui.ui import Ui
from tests.tui.conftest import MakeRun
from tests.tui.drive import Driver, showing
from tests.tui.synthetic import Scenario, set_monitor

GOLDEN = Path(__file__).with_name("golden")
SIZES = ((80, 24), (120, 30), (160, 48))
PAGES = (
    "1 ranks",
    "2 comm",
    "3 heat",
    "4 memory",
    "5 findings",
    "6 data",
    "7 stacks",
    "8 probes",
    "9 timeline",
    "enter rank",
    "question_mark help",
)
At = Callable[[Path], Path]

pytestmark = pytest.mark.usefixtures("frozen")


def compare(name: str, screens: dict[str, str]) -> None:
    """Compare (or write) a golden file of several screens."""
    text = "".join(f"{'=' * 20} {title}\n{screen}" for title, screen in screens.items())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
        return
    expected = path.read_text()
    if text != expected:
        diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm="", n=1)
        pytest.fail(f"{name} differs; if it is meant, UPDATE_GOLDEN=1 writes it anew\n" + "\n".join(list(diff)[:60]))


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_every_page(runs: MakeRun, at: At, ranks: int) -> None:
    run = at(runs(Scenario(ranks=ranks, steps=60, frames=2)))

    async def work() -> None:
        for size in SIZES:
            async with showing(run, size) as d:
                screens = {}
                for page in PAGES:
                    key, _, name = page.partition(" ")
                    if key == "enter":
                        await d.press("1")
                    screens[name] = await d.press(key)
                compare(f"running-{ranks}-{size[0]}x{size[1]}", screens)

    asyncio.run(work())


@pytest.mark.parametrize("state", ["waiting", "stalled", "deadlocked", "lost", "ended", "failed"])
def test_every_state(runs: MakeRun, at: At, state: str) -> None:
    screens: dict[str, str] = {}

    async def work() -> None:
        for ranks in (2, 8, 1024):
            run = at(runs(Scenario(state=state, ranks=ranks, gpus=ranks > 2, steps=60 if ranks < 100 else 8, frames=2)))
            async with showing(run, SIZES[0]) as d:
                for size in SIZES if ranks == 8 else SIZES[:1]:
                    screens[f"{ranks} ranks, {size[0]}x{size[1]}"] = await d.resize(*size)
                if ranks == 8 and state in ("stalled", "deadlocked", "failed"):
                    for page in ("2 comm", "5 findings", "7 stacks", "9 timeline", "1 ranks", "enter rank"):
                        screens[page] = await d.press(page.split()[0])

    asyncio.run(work())
    compare(f"state-{state}", screens)


def _copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to / "reports" / run.name)
    return to / "reports" / run.name


async def _paused(d: Driver) -> str:
    await d.press("space")
    return await d.press("left_square_bracket", "left_square_bracket")


def test_frames_at_earlier_times_are_read(runs: MakeRun, at: At) -> None:
    screens: dict[str, str] = {}

    async def work() -> None:
        async with showing(at(runs(Scenario(ranks=8)))) as d:
            screens["paused"] = await _paused(d)
            assert "PAUSED" in screens["paused"]
        async with showing(at(runs(Scenario(state="failed", ranks=8), "ended"))) as d:
            await d.press("left_curly_bracket")
            await d.until(lambda: d.app.ui.paused_at_s is not None)
            screens["replay"] = await d.settled()
            assert "REPLAY" in screens["replay"]
            await d.press("right_curly_bracket")
            await d.until(lambda: d.app.ui.paused_at_s is None)
            screens["back at the end"] = await d.settled()

    asyncio.run(work())
    compare("time-travel", screens)


def test_read_errors_are_shown(runs: MakeRun, at: At, tmp_path: Path) -> None:
    """Monitor gone, locked, older and newer versions, damaged, empty, elsewhere, deleted while shown."""
    good = runs(Scenario(ranks=8))
    screens: dict[str, str] = {}
    copies = {n: _copy(good, tmp_path / n) for n in ("gone", "locked", "older", "newer", "damaged", "deleted")}
    set_monitor(copies["gone"], "gone")
    for name, version in (("older", 0), ("newer", 99)):
        con = sqlite3.connect(copies[name] / DATABASE)
        with con:
            con.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
        con.close()
    (copies["damaged"] / DATABASE).write_bytes(b"this is no database, whatever its name says " * 100)
    for name, content in (("starting", ""), ("elsewhere", '{"host": "node17", "path": "/tmp/distdiag-x/run.db"}')):
        path = tmp_path / name / "reports" / "llama-1b"
        path.mkdir(parents=True)
        (path / ("run.db.where" if content else "run.json")).write_text(content or "{}")
        copies[name] = path
    holder = sqlite3.connect(copies["locked"] / DATABASE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    async def work() -> None:
        for name, path in copies.items():
            async with showing(at(path)) as d:
                if name == "deleted":
                    shutil.rmtree(path)

                    # the first read finds the open file deleted, every later one finds no directory: the final state
                    def gone(d: Driver = d) -> bool:
                        problem = d.app.snap.problem
                        return problem is not None and problem.message.startswith("no run directory")

                    await d.until(gone, "deletion noticed")
                screens[name] = await d.settled()

    try:
        asyncio.run(work())
    finally:
        holder.close()
    words = ["MONITOR GONE", "LOCKED", "OLDER VERSION", "NEWER VERSION", "DAMAGED", "DELETED", "WAITING", "ELSEWHERE"]
    for word, screen in zip(words, screens.values(), strict=True):
        assert word in screen.splitlines()[0], screen
    assert "`ssh node17 distdiag tui" in screens.pop("elsewhere")  # an absolute path follows: another one in each run
    compare("reading", screens)


def test_ascii_and_small_terminals(runs: MakeRun, at: At) -> None:
    screens: dict[str, str] = {}

    async def work() -> None:
        run = at(runs(Scenario(state="deadlocked", ranks=8)))
        async with showing(run, (80, 24), Ui(ascii=True)) as d:
            for page in ("1 ranks", "3 heat", "7 stacks"):
                screens[f"ascii {page}"] = await d.press(page[0])
                assert screens[f"ascii {page}"].isascii()
        async with showing(run, (60, 16)) as d:
            screens["60x16"] = await d.settled()
            screens["50x10"] = await d.resize(50, 10)
            screens["250x70"] = await d.resize(250, 70)

    asyncio.run(work())
    compare("ascii-and-sizes", screens)


def test_screens_of_many_nodes(runs: MakeRun, at: At) -> None:
    """4,096 ranks: a map by node, rows on demand, grouped and filtered."""
    screens: dict[str, str] = {}

    async def work() -> None:
        async with showing(at(runs(Scenario(ranks=4096, steps=4, frames=1))), (120, 30)) as d:
            screens["home"] = await d.settled()
            screens["grouped"] = await d.press("g")
            await d.press("g")
            await d.pilot.press("slash", *"sev>=warn")
            screens["filtered"] = await d.press("enter")

    asyncio.run(work())
    compare("4096-ranks", screens)


def test_screens_without_colour_have_the_same_text(runs: MakeRun, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR changes no text, and the picture then has greys only."""
    import re

    run = at(runs(Scenario(state="deadlocked", ranks=8)))

    async def look() -> tuple[str, str]:
        async with showing(run) as d:
            return await d.settled(), d.app.export_screenshot()

    coloured, picture = asyncio.run(look())
    monkeypatch.setenv("NO_COLOR", "1")
    plain, grey_picture = asyncio.run(look())
    assert plain == coloured

    def hues(svg: str) -> set[str]:
        used = re.findall(r"fill: #([0-9a-f]{6})", svg)
        return {c for c in used if not c[:2] == c[2:4] == c[4:]} - {"c5c8c6"}  # that of the picture's own title

    assert hues(picture) and not hues(grey_picture)


def test_the_golden_files_are_made_here() -> None:
    """No stale golden file: each belongs to a test above, or in test_colours.py."""
    names = {p.stem for p in GOLDEN.glob("*.txt")}
    expected = {f"running-{n}-{w}x{h}" for n in (2, 8, 1024) for w, h in SIZES}
    expected |= {f"state-{s}" for s in ("waiting", "stalled", "deadlocked", "lost", "ended", "failed")}
    expected |= {"colour", "colours"}  # test_colours.py
    assert names == expected | {"time-travel", "reading", "ascii-and-sizes", "4096-ranks"}
