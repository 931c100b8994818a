"""The HTML report: self-contained, and nothing from the job becomes markup."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding, Where
from distdiag.report import charts, html
from distdiag.report.facts import RankSummary, notable_ranks
from distdiag.report.words import visible
from distdiag.store.writer import Writer
from tests import browser
from tests.report.runs import DEADLOCK, STRAGGLER, facts_of, make_run
from tests.tui.test_profile_screen import a_profile, save

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} $x^2$ \x1b[31m\x07\u202e\x00end'


class Page(HTMLParser):
    """Collects tags, attributes and text of a document; an unbalanced tag is an error."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def page(path: Path) -> tuple[str, Page]:
    text = html.render(facts_of(path))
    return text, Page(text)


def test_the_verdict_comes_first_with_who_where_cost_and_what_to_do(tmp_path: Path) -> None:
    _, p = page(make_run(tmp_path / "r", state="deadlocked", findings=(STRAGGLER, DEADLOCK)))
    order = ["deadlocked", DEADLOCK.message, "/home/me/train.py:88", DEADLOCK.cost, DEADLOCK.advice, STRAGGLER.message, "The job", "Ranks"]  # fmt: skip
    places = [p.words.index(word) for word in order]
    assert places == sorted(places)
    assert "proved" in p.words and "cleared after 20.0 s" in p.words


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text, p = page(make_run(tmp_path / "r", findings=(DEADLOCK,), gpus=True))
    assert "script" not in p.tags and "link" not in p.tags and "img" not in p.tags
    for name, value in p.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href"):
            assert (value or "").startswith("#"), value
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_text_from_the_job_is_escaped(tmp_path: Path) -> None:
    finding = Finding(
        kind="rank_lost", cause=HOSTILE, severity="error", message=HOSTILE, cost=HOSTILE, advice=HOSTILE, culprits=(0,),
        where=(Where(0, HOSTILE, 1, HOSTILE, HOSTILE),), names=(HOSTILE,), evidence=(HOSTILE,), detected_s=1.0,
    )  # fmt: skip
    run = make_run(
        tmp_path / "r", name=HOSTILE, host=HOSTILE, command=HOSTILE, exception=HOSTILE, torch=HOSTILE, findings=(finding,),
    )  # fmt: skip
    plain, quiet = page(make_run(tmp_path / "plain", findings=(DEADLOCK,)))
    with Writer(run) as w:
        w.event(1.0, HOSTILE, "warning", HOSTILE)
        w.probe(1.0, HOSTILE, HOSTILE, "{}")
    text, p = page(run)
    assert set(p.tags) <= set(quiet.tags) and not any(name.startswith("on") for name, _ in p.attributes)
    assert "{{ 7*7 }}" in p.words and "49" not in p.words.split("{{")[1][:5]
    assert "\\x1b[31m\\x07\\u202e\\x00end" in p.words
    assert not set(text) & set("\x1b\x07\x00\u202e")
    assert "\x1b" not in plain


def test_the_newest_profile_has_a_section_and_its_names_are_never_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    save(run, a_profile(40, HOSTILE))
    text, p = page(run)
    assert "rank 1 comes last" in p.words and "steps 120–122" in p.words and "train.py:88 main" in p.words
    assert p.tags.count("svg") == 3 and "script" not in p.tags
    assert not set(text) & set("\x1b\x07\x00\u202e")


@pytest.mark.parametrize("ranks", [1, 2, 300])
def test_html_works_for_every_size_of_job(tmp_path: Path, ranks: int) -> None:
    _, p = page(make_run(tmp_path / "r", ranks=ranks, steps=12, slow_rank=ranks - 1))
    assert f"{ranks} of {ranks} rank" in p.words
    if ranks > html.MAX_RANKS:
        assert f"{html.MAX_RANKS} of {ranks} ranks" in p.words
        assert "rank 299" in p.words, "the slow one must not be among those left out"


def test_a_column_that_no_rank_measured_is_left_out_and_the_line_keeps_its_whole_path(tmp_path: Path) -> None:
    facts = facts_of(make_run(tmp_path / "r"))
    ranks = (msgspec.structs.replace(facts.ranks[0], device_bytes=2**30), *facts.ranks[1:])
    assert "device memory" in Page(html.render(msgspec.structs.replace(facts, ranks=ranks))).words
    ranks = (msgspec.structs.replace(facts.ranks[0], place="/home/me/train.py:88 in main"), *facts.ranks[1:])
    p = Page(html.render(msgspec.structs.replace(facts, ranks=ranks)))
    assert "device memory" not in p.words and "last seen at" in p.words
    assert ("title", "/home/me/train.py:88 in main") in p.attributes and "train.py:88 in main" in p.words


@pytest.mark.parametrize(
    ("values", "top"),
    [([100.0, 110.0, 120.0], 126.0), ([6000.0, *[100.0] * 9], 157.5), ([6000.0, *[100.0] * 99], 157.5), ([0.0], 1.0)],
)
def test_a_slow_first_step_does_not_flatten_the_step_times(values: list[float], top: float) -> None:
    assert charts.top_of_axis(values) == pytest.approx(top)


# what is wider than its page, or than the box that scrolls it; labels that leave their chart
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide, figure')
  && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
CLIPPED = """[...document.querySelectorAll('svg text')].filter(t => { const a = t.getBoundingClientRect(),
  b = t.ownerSVGElement.getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1
  || a.top < b.top - 1 || a.bottom > b.bottom + 1 }).map(t => t.textContent)"""
OVERLAPPING = """(() => { const all = [...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')].map(
  t => [t.textContent, t.getBoundingClientRect()])); return all.flatMap(([w, a], i) => all.slice(i + 1).filter(([v, b]) =>
  a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 2 && b.top < a.bottom - 2).map(([v]) => w + ' / ' + v)) })()"""


def test_nothing_overlaps_or_is_cut_off_in_a_browser(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", ranks=12, findings=(DEADLOCK, STRAGGLER), gpus=True, slow_rank=3)
    (tmp_path / "report.html").write_text(page(run)[0])

    async def work() -> None:
        async with browser.tab(tmp_path) as tab:
            address = (tmp_path / "report.html").as_uri()
            grounds = []
            for width, scheme in ((1280, "light"), (1280, "dark"), (480, "light")):
                await tab.open(address, width, 900, scheme)
                found = [await tab.value(script) for script in (TOO_WIDE, CLIPPED, OVERLAPPING)]
                assert found == [[], [], []], (width, scheme)
                grounds.append(await tab.value("getComputedStyle(document.querySelector('.finding')).backgroundColor"))
            assert grounds[0] == grounds[2] != grounds[1]
            assert set(tab.requested) == {address} and tab.problems == []

    asyncio.run(work())


def test_html_of_a_run_without_a_step(tmp_path: Path) -> None:
    Writer(tmp_path / "r").close()
    text, p = page(tmp_path / "r")
    assert "no verdict: no rank" in p.words and "<svg" not in text


def test_html_is_deterministic(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    assert page(run)[0] == page(run)[0]


def test_dead_ranks_are_shown() -> None:
    ranks = tuple(RankSummary(rank=r, self_ms=float(r), life="running") for r in range(100))
    dead = msgspec.structs.replace(ranks[3], life="killed", self_ms=None)
    shown = notable_ranks((*ranks[:3], dead, *ranks[4:]), 10)
    assert [r.rank for r in shown] == [3, *range(91, 100)]


def test_control_characters_are_escaped() -> None:
    assert visible("a\x1b]0;x\x07\n\u202eb\udc80\x9b") == "a\\x1b]0;x\\x07\\n\\u202eb\\udc80\\x9b"
    assert visible("größe – 5 µs ✓ 日本") == "größe – 5 µs ✓ 日本"
