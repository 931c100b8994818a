"""Findings that distdiag printed on the job's stderr while it ran: a log with them needs no other judgement.

The format is that of `monitor/announce.py`: lines behind `[distdiag]`, one finding of several lines or one line each in the summary;
a line that begins with four spaces goes on with the one before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from msgspec.structs import replace

from distdiag.diagnosis.kinds import KINDS
from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, Where, at_least
from distdiag.diagnosis.text.finding import SHOWN_SITES
from distdiag.terms.untrusted import bounded, is_rank

MARK = "[distdiag] "
MOST = 64  # findings of one log that are kept
MAX_TEXT = 4000
_HEAD = bounded(
    r"(?:\S )?(?P<severity>ERROR|WARNING|INFO) (?P<kind>[a-z_]{1,40})(?:/(?P<cause>[a-z_]{1,40}))?(?P<suspected> \(suspected\))?  (?P<message>.+)"
)
_SHORT = bounded(
    r"  (?P<severity>error|warning|info) (?P<kind>[a-z_]{1,40}): (?P<message>.+?)(?P<cleared> \(cleared\))?$"
)
_CLEARED = bounded(r"cleared, the job continues: \w{1,10} (?P<kind>[a-z_]{1,40}): (?P<message>.+)")
_DETAIL = bounded(r"  (?P<label>more|cost|where|do) +(?P<text>\S.*)")
_SITE = bounded(
    r"(?:last (?:seen|call) at )?(?P<file>.{1,400}?):(?P<line>\d{1,7})(?: in (?P<function>[^(]{1,200}?))? \(ranks? (?P<ranks>[\d, ]{1,60})"
)
_VERDICT = bounded(r"verdict: distdiag diagnose (?P<run>\S.{0,400}?)(?:    report: |$)")
_ENDED = "the job ended"
_SUMMARY = bounded(
    r"(?:\d{1,9} (?:error|warning)s?(?:, )?){1,2} found:|nothing found|no error or warning found|no rule explains it"
)
_NODE = bounded(r"node \d{1,6}: ")


@dataclass
class Recorded:
    """What distdiag printed into one file.

    Attributes:
        run: The run directory that the last summary names; None after later findings, which are of another run.
        ended: The job ended, and no rank failed.
        line: Number of the first line of distdiag's in the file.
        found: By (kind, message). What the summary lists replaces what was printed before, whose numbers may have changed.
    """

    run: str | None = None
    ended: bool = False
    line: int | None = None
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)
    _open: tuple[str, str] | None = None  # the finding whose details may follow
    _over: bool = False  # a summary has ended: what follows, except the same again, is of another run
    _held: str = ""  # the last line, which may go on
    _live: dict[tuple[str, str], Finding] = field(default_factory=dict)  # printed before the summary

    def add(self, text: str, number: int) -> None:
        """Read one line that has `MARK` in it."""
        text = text[text.index(MARK) + len(MARK) :].rstrip()
        node = _NODE.match(text)
        text = text[node.end() :] if node is not None else text
        self.line = number if self.line is None else self.line
        if text.startswith("    ") and self._held:
            self._held = f"{self._held} {text.lstrip()}"[:MAX_TEXT]
            return
        self.flush()
        self._held = text[:MAX_TEXT]
        if node is None and _SUMMARY.match(text) is not None:
            self._live, self.found = self.found, {}

    def flush(self) -> None:
        """Read the last line of the file."""
        text, self._held = self._held, ""
        if (m := _DETAIL.match(text)) is not None and self._open is not None:
            self._detail(self._open, m["label"], m["text"])
        elif (m := _HEAD.match(text)) is not None:
            self._open = self._keep(m, m["cause"], Certainty.SUSPECTED if m["suspected"] else Certainty.PROVED)
        else:
            self._open = None
            short = _SHORT.match(text)
            if (m := _CLEARED.match(text) or (short if short is not None and short["cleared"] else None)) is not None:
                self.found.pop((m["kind"], m["message"]), None)
            elif short is not None:
                self._keep(short, None, Certainty.SUSPECTED)
            elif (m := _VERDICT.match(text)) is not None:
                self.run, self._over = m["run"], True
            elif text == _ENDED or text.startswith(f"{_ENDED}: "):
                self.ended = True

    def findings(self) -> list[Finding]:
        """Return the errors and warnings, errors first.

        The lines name no culprit as such: it is the rank of `where` if other ranks wait.
        """
        shown = [f for f in self.found.values() if at_least(f.severity, Severity.WARNING)]
        shown.sort(key=lambda f: f.severity != Severity.ERROR)
        return [replace(f, culprits=_ranks(f.where) if f.waiting else (), victims=_ranks(f.waiting)) for f in shown]

    def _keep(self, m: re.Match[str], cause: str | None, certainty: str) -> tuple[str, str] | None:
        kind, message = m["kind"], m["message"]
        if kind not in KINDS or (cause is not None and cause not in KINDS[kind].causes):
            return None  # of another version
        key = kind, message
        if self._over and key not in self.found:
            self.found, self.run, self.ended = {}, None, False
        self._over = False
        if key not in self.found and len(self.found) < MOST:
            severity = Severity(m["severity"].lower())
            before = next((k for k in self._live if k == key), next((k for k in self._live if k[0] == kind), None))
            new = Finding(kind=kind, cause=cause, certainty=certainty, severity=severity, message=message)
            if before is not None and cause in (None, self._live[before].cause):
                old = self._live.pop(before)
                new = replace(old, severity=severity, message=message)
            self.found[key] = new
        return key if key in self.found else None

    def _detail(self, key: tuple[str, str], label: str, text: str) -> None:
        f = self.found[key]
        if label == "more":
            self._open = f.kind, f"{f.message}; {text}"
            self.found[self._open] = replace(self.found.pop(key), message=self._open[1])
        elif label == "where":
            where, _, waiting = text.replace("; ended too: ", "; waiting: ").partition("; waiting: ")
            self.found[key] = replace(f, where=_sites(where), waiting=_sites(waiting))
        else:
            self.found[key] = replace(f, **{"cost" if label == "cost" else "advice": text})


def _ranks(sites: tuple[Where, ...]) -> tuple[int, ...]:
    return tuple(sorted({w.rank for w in sites}))


def _sites(text: str) -> tuple[Where, ...]:
    out = []
    for m in filter(None, map(_SITE.match, text.split("; ")[: SHOWN_SITES + 1])):
        for rank in m["ranks"].split(","):
            if rank.strip().isdigit() and is_rank(int(rank)):
                function = m["function"].strip() if m["function"] else None
                out.append(Where(int(rank), m["file"].strip(), int(m["line"]), function))
    return tuple(out)
