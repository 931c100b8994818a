"""The filter line: `node084`, `rank 600-700`, `sev>=warn`, `state:lost`, `wait>10`; words are joined by AND."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from distdiag.store.frames import RankTable
from distdiag.tui.draw import severity

HELP = (
    ("node084", "host name contains it"),
    ("rank 600-700,9", "these ranks; a bare number is a rank"),
    ("sev>=warning", "this severity or worse: ok wait warning error lost; also sev=ok"),
    ("life:killed", "starting running finished crashed killed stopped silent missing"),
    ("phase:data", "in this phase now"),
    ("op:all_reduce", "waiting in this collective"),
    ("wait>10", "a column of the table: self delta wait data step mem, with > or <"),
)

_NUMBERS = {
    "self": "self_ms", "delta": "delta_self_ms", "wait": "wait_ms", "data": "data_ms", "step": "step",
    "forward": "forward_ms", "fwd": "forward_ms", "backward": "backward_ms", "bwd": "backward_ms", "cpu": "cpu_pct",
    "late": "late_ms", "loss": "loss", "mem": "rss_bytes", "node": "node", "gpu": "gpu", "local": "local_rank",
}  # fmt: skip
_LEVELS = {"ok": 0, "wait": 1, "warning": 2, "warn": 2, "error": 3, "lost": 4}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq, ":": operator.eq,
}  # fmt: skip

Test = Callable[[RankTable, list[severity.Mark], int], bool]


class BadFilter(ValueError):
    """A filter that cannot be parsed; the message names the word."""


@dataclass(frozen=True)
class Filter:
    """A parsed filter; empty text lets everything through."""

    text: str
    tests: tuple[Test, ...] = ()

    def indices(self, table: RankTable, marks: list[severity.Mark]) -> list[int]:
        """Return the rows of the frame that pass, in the frame's order."""
        if not self.tests:
            return list(range(len(table)))
        return [i for i in range(len(table)) if all(t(table, marks, i) for t in self.tests)]


def parse(text: str) -> Filter:
    """Return the filter that the user typed; raises BadFilter if a word cannot be parsed."""
    words = re.sub(r"\branks?\s+(?=[\d])", "rank:", text.strip(), flags=re.IGNORECASE).split()
    return Filter(text.strip(), tuple(_test(w) for w in words))


def _test(word: str) -> Test:
    m = re.fullmatch(r"([A-Za-z]\w*)(>=|<=|>|<|=|:)(.*)", word)
    if re.fullmatch(r"[\d,\-–]+", word):
        return _ranks(word)
    if m is None:
        low = word.lower()
        return lambda table, marks, i: low in (table.words("host")[i] or "").lower()
    name, compare, value = m[1].lower(), m[2], m[3]
    if not value:
        raise BadFilter(f"'{word}': a value is missing")
    if name in ("rank", "ranks") and compare in ("=", ":"):
        return _ranks(value)
    if name in ("sev", "severity"):
        if value.lower() not in _LEVELS:
            raise BadFilter(f"'{word}': severity is one of {', '.join(_LEVELS)}")
        level, op = _LEVELS[value.lower()], _COMPARE[compare]
        return lambda table, marks, i: op(marks[i].level, level)
    texts = {"life": "life", "phase": "phase", "op": "waiting_op", "host": "host", "activity": "activity"}
    if (name in texts or name == "node") and compare in ("=", ":") and not value.lstrip("-").isdigit():
        column, low = texts.get(name, "host"), value.lower()
        return lambda table, marks, i: low in (table.words(column)[i] or "").lower()
    column = "rank" if name == "rank" else _NUMBERS.get(name)
    if column is None:
        raise BadFilter(f"'{word}': no column '{name}'; try rank node sev life phase op {' '.join(_NUMBERS)}")
    try:
        limit = float(value) * (2**30 if column == "rss_bytes" else 1)
    except ValueError:
        raise BadFilter(f"'{word}': '{value}' is not a number") from None
    op = _COMPARE[compare]
    return lambda table, marks, i: op(table.numbers(column)[i], limit)


def _ranks(text: str) -> Test:
    """Parse `600-700,9`; an open end (`600-`, `-7`) reaches to the last, or from the first."""
    spans: list[tuple[float, float]] = []
    for piece in filter(None, text.replace("–", "-").split(",")):
        m = re.fullmatch(r"(\d*)(-?)(\d*)", piece)
        if m is None or not (m[1] or m[3]):
            raise BadFilter(f"'{text}' is not a set of ranks; write 600-700,9")
        low = float(m[1] or 0)
        spans.append((low, float(m[3]) if m[3] else float("inf") if m[2] else low))
    return lambda table, marks, i: any(a <= table.numbers("rank")[i] <= b for a, b in spans)
