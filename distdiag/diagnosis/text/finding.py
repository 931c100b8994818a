"""Formats a finding as plain text: what and who, cost, where, what to do; and what was checked. Control characters are escaped, lines wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from distdiag.diagnosis.model.findings import Check, Finding, LastSeen, Severity, Where, rank_list
from distdiag.diagnosis.text.phrases import NO_PROGRESS, NO_PROGRESS_MADE, shortened
from distdiag.terms.sites import line_text
from distdiag.terms.tables import WIDTH, wrapped
from distdiag.terms.units import counted, rough_duration
from distdiag.terms.untrusted import visible

GLYPHS = {Severity.ERROR: "█", Severity.WARNING: "▲", Severity.INFO: "·"}
SHOWN_SITES = 4
LONG = 120  # characters of a message that are read at a glance
LAST_SEEN = 16
_NOW = ("`distdiag dump`", "this is cleared if")  # advice that needs the monitor of a running job
# in the cost, or in the message: what is no longer so after the end
_PAST = (
    (re.compile(r"(?<=ranks )wait$"), "waited"), (re.compile(r"(?<=[a-z0-9] )grows by "), "grew by "), (re.compile(r", full (?:with)?in [^;]+ at this rate"), ""),
)  # fmt: skip
# sites where a rank was: the line by which it left the loop, or in which it is now, is not known
_BEFORE = {"finished": "last seen at", "last_call": "last call at"}

printable = visible  # the same escapes on a terminal, in a report and on the screen


def where_text(w: Where) -> str:
    """Return `train.py:88 in evaluate`."""
    return line_text(w.file, w.line, w.function) if w.file is not None else ""


def listed(wheres: tuple[Where, ...]) -> str:
    """Return `train.py:88 in evaluate (ranks 0, 1); …`: each site with its ranks, the first four."""
    seen: dict[str, dict[int, None]] = {}  # ranks in order, each once
    for w in wheres:
        text = where_text(w)
        if text and w.state in _BEFORE:
            text = f"{_BEFORE[w.state]} {text}"
        if text:
            seen.setdefault(text, {})[w.rank] = None
    parts = []
    for text, ranks in list(seen.items())[:SHOWN_SITES]:
        shown = ", ".join(map(str, list(ranks)[:6])) + (" …" if len(ranks) > 6 else "")
        parts.append(f"{text} (rank{'s' if len(ranks) > 1 else ''} {shown})")
    if len(seen) > SHOWN_SITES:
        parts.append(f"and {len(seen) - SHOWN_SITES} more")
    return "; ".join(parts)


def waiting_word(f: Finding) -> str:
    """Return what the ranks in `waiting` do: those that failed after a lost one wait no more."""
    ended = f.kind == "rank_lost" and all(w.state in ("crashed", "exited", "killed") for w in f.waiting)
    return "ended too" if ended else "waiting"


def in_the_past(f: Finding) -> Finding:
    """Return an open finding in the past tense, without advice for a running job, for after the job's end."""
    message, cost = f.message, NO_PROGRESS_MADE if f.cost == NO_PROGRESS else f.cost
    for now, past in _PAST:
        message, cost = now.sub(past, message), now.sub(past, cost)
    return msgspec.structs.replace(f, message=message, cost=cost, advice=without_monitor(f.advice))


def without_monitor(advice: str) -> str:
    """Return advice without what only the monitor of a running job can follow; as it is if there is nothing else."""
    return "; ".join(x for x in advice.split("; ") if not x.startswith(_NOW)) or advice


def finding_lines(f: Finding, width: int = WIDTH) -> list[str]:
    """Return the lines of a finding: message, more of it, cost, where, do. Empty ones are left out.

    A long message keeps its first clause on the first line.
    """
    severity = Severity(f.severity)
    certain = "" if f.certainty == "proved" else " (suspected)"
    gone = ""
    if f.cleared_s and f.first_seen_s is not None:
        gone = f" (cleared after {f.cleared_s - f.first_seen_s:.0f} s)"
    where, waiting = listed(f.where), listed(f.waiting)
    if waiting and where not in ("", waiting):
        where += f"; {waiting_word(f)}: {waiting}"
    head, more = head_and_more(f.message)
    lines = [("", f"{GLYPHS[severity]} {severity.upper()} {f.title}{certain}  {head}{gone}")]
    rest = (("more", more), ("cost", f.cost), ("where", where or waiting), ("do", f.advice))
    lines += [(label, text) for label, text in rest if text]
    out: list[str] = []
    for label, text in lines:
        out += wrapped(text, width, f"  {label:<7}" if label else "")
    return out


def brief_lines(f: Finding, width: int = WIDTH) -> list[str]:
    """Return what a finding costs, cut at the end of a line, and what to do, for a list of findings."""
    texts = (("cost", shortened(f.cost, width - 9)), ("do", f.advice))
    return [line for label, text in texts if text for line in wrapped(text, width, f"  {label:<7}")]


def head_and_more(message: str) -> tuple[str, str]:
    """Return a long message up to its first semicolon outside of parentheses, and the rest; a short one whole."""
    parts = message.split("; ") if len(message) > LONG else []
    for n in range(1, len(parts)):
        head = "; ".join(parts[:n])
        if head.count("(") == head.count(")"):
            return head, "; ".join(parts[n:])
    return message, ""


def last_seen_lines(ranks: Sequence[LastSeen]) -> list[str]:
    """Return where the ranks of a killed job were last seen; equal ones in one line, the first `LAST_SEEN` lines."""
    seen: dict[str, list[int]] = {}
    for r in ranks:
        seen.setdefault(_last_seen(r), []).append(r.rank)
    lines = [f"{rank_list(found)}: {text}" for text, found in seen.items()]
    return lines[:LAST_SEEN] + ([f"and {len(lines) - LAST_SEEN:,} more"] if len(lines) > LAST_SEEN else [])


def _last_seen(r: LastSeen) -> str:
    where = where_text(Where(r.rank, r.file, r.line, r.function)) or "no line is known"
    call = ""
    if r.collective is not None:
        number = f" #{r.collective.seq:,}" if r.collective.seq is not None else ""
        op = r.collective.op or ("a collective" if r.waits or not number else "")
        name = f"{op}{number}".lstrip() + (f" ({r.collective.group})" if r.collective.group else "")
        lasted = f" for {rough_duration(r.t_s - r.since_s)}" if r.t_s is not None and r.since_s is not None else ""
        call = f", waiting in {name}{lasted}" if r.waits else f"; last collective: {name}"
    state = "" if r.waits or not r.state else f" ({r.state.replace('_', ' ')})"
    return f"{where}{state}{call}"


# -- what was checked, what could not be, and why a kind was not found ---------------------------------------------------


def checked_lines(checks: Sequence[Check], width: int = WIDTH) -> list[str]:
    """Return the kinds that were checked, and those that could not be, with the reason."""
    missing = [c for c in checks if not c.checked]
    partly = {c.kind for c in missing if c.cause is None}
    judged = [kind for kind in dict.fromkeys(c.kind for c in checks) if kind not in partly]
    by_reason: dict[str, list[str]] = {}
    for c in missing:
        if c.cause is None or c.kind not in partly:
            by_reason.setdefault(c.reason, []).append(_name(c))
    reasons = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    lines = [f"checked: {', '.join(judged)}"] if judged else []
    lines += [f"not checked: {'; '.join(reasons)}"] if reasons else []
    return [part for line in lines for part in wrapped(line, width)]


def why_lines(kind: str, checks: Iterable[Check], findings: Iterable[Finding]) -> list[str]:
    """Return what is known about one kind: how often it was found, and the newest reason of each check."""
    mine = [c for c in checks if c.kind == kind]
    found = [f for f in findings if f.kind == kind]
    cleared = sum(f.cleared_s is not None for f in found)
    head = f"found {counted(len(found), 'time')}" + (f", {cleared} cleared" if cleared else "")
    if not found:
        head = "not found" if any(c.checked for c in mine) else "not checked" if mine else "not evaluated in this run"
    reasons = [f"{_name(c)}: {'' if c.checked else 'not checked: '}{c.reason}" for c in mine if c.reason]
    return [f"{kind}: {head}", *(line for reason in reasons for line in wrapped(reason, head="  "))]


def _name(c: Check) -> str:
    return c.kind if c.cause is None else f"{c.kind}/{c.cause}"
