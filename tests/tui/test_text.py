"""Text, numbers and small widgets, table-driven."""

from __future__ import annotations

import math
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdiag.diagnosis.model.findings import Finding
from distdiag.store.frames import RankRow
from distdiag.terms.quantiles import median_low, quantile
from distdiag.tui.data.snapshot import known_at
from distdiag.tui.draw import severity, text
from distdiag.tui.draw.lines import cut, fitted, hit_at, line, plain, width_of
from distdiag.tui.draw.table import Column, choose
from distdiag.tui.draw.text import (
    cells,
    clean,
    clip,
    clip_left,
    clock,
    delta,
    fit,
    gib,
    milliseconds,
    place,
    quote,
    seconds,
    size,
    spark,
    to_ascii,
    wrap,
)  # fmt: skip
from distdiag.tui.panels import finding_lines
from distdiag.tui.screens.findings import story_lines


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(1, 40))
def test_text_from_the_job_keeps_its_width(text: str, width: int) -> None:
    shown = clean(text)
    assert not any(ord(c) < 32 or ord(c) == 127 for c in shown)
    assert cells(fit(shown, width)) == width and cells(clip(shown, width)) <= width
    assert all(cells(x) <= max(width, 4) for x in wrap(shown, max(width, 4)))
    assert to_ascii(shown).isascii() and len(to_ascii(shown)) == cells(shown)
    assert "\n" not in quote(text) and "\x1b" not in quote(text)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab cd", max_size=80), st.integers(4, 30))
def test_wrapping_loses_no_word(text: str, width: int) -> None:
    assert "".join("".join(wrap(text, width)).split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["x" * 400_000, "\u0301" * 400_000, "字" * 400_000, "字 " * 200_000])
def test_wrapping_takes_a_time_linear_in_the_length(text: str) -> None:
    began_s = time.process_time()
    lines = wrap(text, 80)
    assert time.process_time() - began_s < 10  # it was minutes, and gigabytes
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (milliseconds, 231.64, "231.6"), (milliseconds, 1234.5, "1234"), (milliseconds, 123_456.0, "123s"), (milliseconds, None, "–"),
        (milliseconds, math.nan, "–"), (delta, 0.04, "+0.0"), (delta, -1.25, "-1.2"), (delta, None, "–"),
        (seconds, 0.06, "0.06 s"), (seconds, 31.4, "31.4 s"), (seconds, 724, "12 min 04 s"), (seconds, 11_520, "3 h 12 min"),
        (clock, 271, "00:04:31"), (clock, 90_061, "1d 01:01:01"), (clock, None, "--:--:--"),
        (size, 4, "4 B"), (size, 4096, "4.0 KiB"), (size, 25 * 2**20, "25.0 MiB"), (size, 3 * 2**40, "3072.0 GiB"), (size, None, "–"),
        (gib, 62.2 * 2**30, "62.2"), (gib, 0.6 * 2**30, "0.60"),
    ],
)  # fmt: skip
def test_numbers_are_formatted(function, value, expected) -> None:
    assert function(value) == expected


def test_sites_are_files_and_lines() -> None:
    assert place("/a/b/train.py", 118, "next_batch") == "train.py:118 in next_batch"
    assert place(None, 3) == "–" and place("/x/\x1b.py", 1) == "\\x1b.py:1"
    assert clip_left("abcdef", 4) == "…def"


def test_with_two_values_the_smaller_is_the_median() -> None:
    assert median_low([9.0, 1.0]) == 1.0 and median_low([3.0, 1.0, 2.0]) == 2.0 and median_low([]) is None
    assert quantile([1, 2, 3, 4], 0.99) == 4 and quantile([1, 2, 3, 4], 0.5) == 2


def test_a_flat_series_is_drawn_flat() -> None:
    assert spark([100.0, 101.0, 100.5], 8) == "▁▁▁"
    assert spark([100.0, 100.0, 200.0], 8) == "▁▁█"
    assert spark([None, 1.0, math.nan], 8) == " ▁ " and spark([], 8) == "" and len(spark([1.0] * 100, 10)) == 10


def test_lines_are_cut_with_a_mark_and_answer_clicks() -> None:
    text = line(("ab", "error", "row:1"), "cd", ("ef", "", "do:x"))
    assert (
        plain(text) == "abcdef" and hit_at(text, 1) == "row:1" and hit_at(text, 3) == "" and hit_at(text, 5) == "do:x"
    )
    assert hit_at(text, 6) == ""
    for width in range(1, 7):
        cut = fitted(text, width)
        assert width_of(cut) == min(6, width) and (plain(cut)[-1] == "…") == (width < 6)


def test_more_important_columns_win() -> None:
    columns = [Column(k, k, 10, "", str, priority=p) for k, p in (("a", 2), ("b", 0), ("c", 1))]
    assert [c.key for c, _ in choose(columns, 22)] == ["b", "c"] and [c.key for c, _ in choose(columns, 33)] == [
        "a",
        "b",
        "c",
    ]
    grown = choose([Column("g", "g", 4, "", str, grow=3)], 20)
    assert grown[0][1] == 7


@pytest.mark.parametrize(
    ("life", "severe", "word", "glyph"),
    [
        ("running", None, "ok", "·"), ("running", "warning", "WARNING", "▲"), ("running", "error", "ERROR", "█"), ("missing", None, "not seen", "○"),
        ("killed", None, "SIGKILL", "×"), ("crashed", None, "ValueError", "×"), ("silent", None, "silent 14.0 s", "×"), ("finished", None, "done", "·"),
        ("stopped", "error", "stopped", "█"), ("starting", None, "init", "·"), ("running", "info", "ok", "·"), ("new word", None, "ok", "·"),
    ],
)  # fmt: skip
def test_states_of_ranks(life: str, severe: str | None, word: str, glyph: str) -> None:
    row = RankRow(
        rank=0,
        life=life,
        signal=9 if life == "killed" else None,
        exception="ValueError: x" if life == "crashed" else None,
        heartbeat_age_s=14.0 if life == "silent" else 0.1,
    )
    mark = severity.of_rank(life, severe)
    assert mark.glyph == glyph and severity.state_of(row, mark)[0] == word


def test_old_numbers_show_their_age() -> None:
    row = RankRow(rank=0, life="running", heartbeat_age_s=5.0)
    assert severity.stale(row) and severity.state_of(row, severity.OK)[0] == "5.0 s"


def test_a_suspected_findings_details_claim_no_proof() -> None:
    f = Finding(
        kind="nonfinite", severity="error", certainty="suspected", culprits=(2,), victims=(0, 1), evidence=("stacks/a.txt",)
    )  # fmt: skip
    words = [x.split()[0] for x in map(plain, story_lines(f, (), 80)[1:]) if x]
    assert words == ["who", "waiting", "when", "evidence"]


def test_what_to_do_comes_before_the_rest_of_a_long_message() -> None:
    head, rest = (
        "rank 0 skipped barrier (train.py:9): `if best` (line 7)",
        "rank 0 is in all_reduce " + "at train.py:12 " * 9,
    )
    f = Finding(
        kind="deadlock",
        message=f"{head}; {rest}",
        cost="no progress",
        advice="let all ranks decide",
        severity="error",
        certainty="proved",
    )
    texts = [plain(x) for x in finding_lines(f, 80)]
    assert texts[0].endswith("`if best` (line 7)") and [x.split()[0] for x in texts[1:4]] == ["do", "cost", "more"]
    assert plain(cut(finding_lines(f, 80), 4, "press 5")[-1]).endswith("more lines: press 5")


def test_a_finding_is_four_lines_with_certainty() -> None:
    f = Finding(
        kind="stall",
        severity="warning",
        certainty="suspected",
        message="rank 1 is busy",
        cost="nothing yet",
        advice="wait",
        first_seen_s=3.0,
    )
    texts = [plain(x) for x in finding_lines(f, 80)]
    assert texts == [" ▲ WARNING stall  rank 1 is busy (suspected)", "   do      wait", "   cost    nothing yet"]
    import msgspec

    closed = plain(finding_lines(msgspec.structs.replace(f, cleared_s=9.5), 80)[0])
    assert closed.endswith("cleared after 6.5 s")
    assert len(finding_lines(f, 30, full=False)) == 1


def test_findings_as_known_at_a_moment() -> None:
    early = Finding(kind="a", detected_s=1.0, cleared_s=5.0)
    late = Finding(kind="b", detected_s=4.0)
    assert [f.kind for f in known_at((early, late), 2.0)] == ["a"] and known_at((early, late), 2.0)[0].cleared_s is None
    assert [f.kind for f in known_at((early, late), 6.0)] == ["b", "a"]


def test_widths_are_known_without_the_library_of_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.cells", None)
    assert [text._other_cells.__wrapped__(word) for word in ("Jürgen", "e\u0301té", "日本")] == [6, 3, 4]
