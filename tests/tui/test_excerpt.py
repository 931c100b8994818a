"""The source around a finding's line: shown as text only, never from a pipe, a device or a file that is not source code."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from distdiag.diagnosis.model.findings import Where
from distdiag.store import stacks
from distdiag.store.writer import Writer
from distdiag.tui.data import excerpt
from tests.tui.drive import showing
from tests.tui.synthetic import TRAIN, Scenario, findings, make, rows, set_monitor, tree


def test_five_lines_around_the_line_are_shown_cleaned(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("".join(f"line {i}\n" for i in range(1, 5)) + "\tx = '\x1b[31m'\nline 6\nline 7\n" + "y" * 9999)
    found = excerpt.read(str(file), 5, None).near(5)
    assert [n for n, _ in found.lines] == [3, 4, 5, 6, 7] and found.why == ""
    assert found.lines[2][1] == "    x = '\\x1b[31m'"
    assert all(len(t) <= excerpt.MAX_LINE for _, t in excerpt.read(str(file), 8, None).lines)
    assert [n for n, _ in excerpt.read(str(file), 1, None).near(5).lines] == [1, 2, 3]


def test_a_file_changed_since_the_run_began_is_marked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("a\nb\n")
    os.utime(file, (1000, 1000))
    assert excerpt.read(str(file), 1, 2000.0).why == ""
    assert "changed since" in excerpt.read(str(file), 1, 500.0).why
    assert "fewer lines" in excerpt.read(str(file), 99, 2000.0).why


def test_nothing_but_a_small_regular_python_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")  # a plain open would block until a writer opens it
    (tmp_path / "large.py").write_text("x\n" * (excerpt.MAX_BYTES // 2 + 1))
    (tmp_path / "notes.txt").write_text("a\nb\n")
    (tmp_path / "folder.py").mkdir()
    for name in ("pipe.py", "large.py", "notes.txt", "folder.py", "missing.py"):
        assert excerpt.read(str(tmp_path / name), 1, None).lines == ()
    assert excerpt.read("train.py", 1, None).lines == () and excerpt.read("/a\0.py", 1, None).lines == ()


def test_the_story_shows_the_culprits_source(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("".join(f"step_{i}()\n" for i in range(1, 200)))
    sc = Scenario(state="deadlocked", ranks=8)
    run = make(tmp_path / "r", sc)
    found = [
        msgspec.structs.replace(
            f,
            where=(Where(0, "/x.py", 1, "f", ""), Where(5, str(source), 118, "next_batch", "data")),
            waiting=(Where(1, str(source), 91, "main", "waiting"),),
        )
        for f in findings(sc)
    ]
    with Writer(run) as w:
        for f in found:
            w.finding(f)
    set_monitor(run, "live")

    async def work() -> None:
        async with showing(run, (120, 40)) as d:
            text = await d.press("5")
            assert "› 118 │ step_118()" in text and "step_116()" in text and "step_120()" in text
            text = await d.resize(200, 70)  # more lines before it, and those of a rank that waits
            assert "› 118 │ step_118()" in text and "step_108()" in text and "› 91 │ step_91()" in text
            text = await d.resize(80, 40)  # too narrow for two columns: below the finding
            assert "› 118 │ step_118()" in text

    asyncio.run(work())


def test_stacks_and_a_stuck_rank_show_the_source_of_their_lines(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("".join(f"step_{i}()\n" for i in range(1, 200)))
    sc = Scenario(state="deadlocked", ranks=8)
    run = make(tmp_path / "r", sc)
    own = tree(sc).ranks
    moved = {
        r: msgspec.structs.replace(s, stack=tuple(f.replace(TRAIN, str(source)) for f in s.stack))
        for r, s in own.items()
    }
    stacks.write(run, stacks.Stacks(t_s=sc.t_s - 1.0, ranks=moved))
    at = [msgspec.structs.replace(r, file=str(source)) for r in rows(sc, sc.state, sc.step, sc.t_s)]
    with Writer(run) as w:
        w.frame(sc.t_s + 0.5, "deadlocked", "", at)
    set_monitor(run, "live")

    async def work() -> None:
        async with showing(run, (160, 60)) as d:
            text = await d.press("7")
            first, second = (
                text.index(x) for x in ("rank 5: train.py:118 in next_batch", "ranks 0–4, 6, 7: train.py:91")
            )
            assert first < second, "the fewest ranks come first"
            assert "› 118 │ step_118()" in text and "› 91 │ step_91()" in text and "queue.py:171 │" not in text
            await d.press("1", "home")
            text = await d.press("enter")
            assert "rank 5 " in text and "› 118 │ step_118()" in text

    asyncio.run(work())
