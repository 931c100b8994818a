"""The verdict in the forms that other programs show on the user's line: GitHub, GitLab, SARIF 2.1.0, JUnit, Markdown.

Each function takes the report of `diagnose`, in which all text is visible, and returns the whole output. Only
files below `root`, the repository, are named as places in it: a path outside says nothing to a reader of the
repository, and shows how the machine is laid out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import msgspec

from distdiag.diagnosis.model.findings import BAD_STATES, Finding, Report, Severity, ranks_seen, still_open
from distdiag.terms.untrusted import visible
from distdiag.version import VERSION

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITLAB = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


class Place(NamedTuple):
    """A line of a file of the repository; `path` is relative to it, with slashes."""

    path: str
    line: int


def places(finding: Finding, root: Path) -> Iterator[Place]:
    """Yield the lines of the culprits, then of the victims, that are in the repository, each once."""
    seen = set()
    for where in (*finding.where, *finding.waiting):
        if where.file is None:
            continue
        try:
            path = Path(os.path.normpath(where.file)).relative_to(root)
        except ValueError:  # outside
            continue
        place = Place(path.as_posix(), max(1, where.line or 1))
        if place not in seen and ".." not in path.parts:
            seen.add(place)
            yield place


def fingerprint(finding: Finding, root: Path) -> str:
    """Return a text that is equal for the same fault in the next run: no rank, number or time is in it."""
    functions = sorted({f"{w.function}" for w in finding.where})
    files = sorted({place.path for place in places(finding, root)})
    return hashlib.sha256(json.dumps([finding.kind, finding.cause, files, functions]).encode()).hexdigest()[:32]


def _text(finding: Finding) -> str:
    parts = (
        finding.message,
        f"Cost: {finding.cost}" if finding.cost else "",
        f"Do: {finding.advice}" if finding.advice else "",
    )
    return "\n".join(filter(None, parts))


def _visible(value: Any) -> Any:
    """Return a record with the control, bidirectional and invisible characters of all its texts as escapes."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, tuple):
        return tuple(map(_visible, value))
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: _visible(getattr(value, name)) for name in value.__struct_fields__})
    return value


def _of_visible(write: Callable[[Report, Path], str]) -> Callable[[Report, Path], str]:
    """Return `write` for a report with visible text: names of kinds, states and files may be forged, too."""
    return lambda report, root: write(_visible(report), Path(visible(str(root))))


def github(report: Report, root: Path) -> str:
    """Return workflow commands: GitHub shows each finding on its line in a pull request."""
    lines = []
    for finding in still_open(report.findings):
        level = "notice" if finding.severity == Severity.INFO else str(finding.severity)
        place = next(places(finding, root), None)
        where = f"file={_property(place.path)},line={place.line}," if place is not None else ""
        lines.append(f"::{level} {where}title={_property(f'distdiag {finding.title}')}::{_data(_text(finding))}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def gitlab(report: Report, root: Path) -> str:
    """Return a Code Quality report; a finding without a place in the repository is not in it, as GitLab needs one."""
    issues = [
        {
            "description": _text(finding),
            "check_name": finding.title,
            "fingerprint": fingerprint(finding, root),
            "severity": _GITLAB[Severity(finding.severity)],
            "location": {"path": place.path, "lines": {"begin": place.line}},
        }
        for finding in still_open(report.findings)
        if (place := next(places(finding, root), None)) is not None
    ]
    return json.dumps(issues, indent=2)


def sarif(report: Report, root: Path) -> str:
    """Return a SARIF 2.1.0 log."""
    findings = still_open(report.findings)
    rules = sorted({f.title for f in findings})
    results: list[dict[str, Any]] = []
    for finding in findings:
        found = [
            {"physicalLocation": {"artifactLocation": {"uri": quote(p.path)}, "region": {"startLine": p.line}}}
            for p in places(finding, root)
        ]
        results.append({
            "ruleId": finding.title,
            "level": _LEVELS[Severity(finding.severity)],
            "message": {"text": _text(finding).replace("](", "] (")},  # SARIF reads [text](address) as a link
            "locations": found[:1],
            "relatedLocations": found[1:],
            "partialFingerprints": {"distdiag/v1": fingerprint(finding, root)},
            "properties": {"certainty": finding.certainty, "culprits": finding.culprits, "victims": finding.victims},
        })  # fmt: skip
    driver = {"name": "distdiag", "version": VERSION, "rules": [{"id": rule} for rule in rules]}
    return json.dumps(
        {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]},
        indent=2,
    )


def junit(report: Report, root: Path) -> str:
    """Return a JUnit report: a failed test per error or warning; without any, one test of the job's state."""
    bad = [f for f in still_open(report.findings) if f.severity != Severity.INFO]
    failures = len(bad) or int(report.state in BAD_STATES)
    suite = ElementTree.Element("testsuite", name="distdiag", tests=str(len(bad) or 1), failures=str(failures))
    for finding in bad:
        place = next(places(finding, root), None)
        attributes = {"classname": "distdiag", "name": finding.title}
        if place is not None:
            attributes |= {"file": place.path, "line": str(place.line)}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        ElementTree.SubElement(case, "failure", type=str(finding.severity), message=finding.message).text = _text(
            finding
        )
    if not bad:
        case = ElementTree.SubElement(suite, "testcase", classname="distdiag", name="the job")
        if failures:
            why = report.state_text or "the cause was not found"
            ElementTree.SubElement(case, "failure", type="error", message=f"{report.state}: {why}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode")


def markdown(report: Report, root: Path) -> str:
    """Return the verdict to paste into an issue."""
    out = [f"**distdiag**: {_escaped(report.state)}, {ranks_seen(report.ranks_seen, report.world_size)}", ""]
    for finding in still_open(report.findings):
        out += [
            f"### {finding.severity}: {_escaped(finding.title)} ({_escaped(finding.certainty)})",
            "",
            _escaped(finding.message),
            "",
        ]
        where = ", ".join("`{}:{}`".format(p.path.replace("`", "'"), p.line) for p in places(finding, root))
        rows = [("cost", _escaped(finding.cost)), ("do", _escaped(finding.advice)), ("where", where)]
        out += [f"- **{name}**: {text}" for name, text in rows if text]
        out.append("")
    if not still_open(report.findings):
        out += ["Nothing found.", ""]
    out += [f"- {_escaped(note)}" for note in report.notes]
    return "\n".join(out).rstrip()


def _escaped(text: str) -> str:
    """Return text in which nothing is Markdown or HTML but code between backticks, which our messages have."""
    parts = text.split("`")
    if len(parts) % 2 == 0 or "" in parts[1:-1]:  # an odd number, or a run of them, which only an equal run closes
        parts = ["'".join(parts)]
    return "".join(f"`{p}`" if i % 2 else p.translate(_MARKUP) for i, p in enumerate(parts))


_MARKUP = {ord(c): f"\\{c}" for c in "\\*_[]#|~!"} | {ord(c): f"&#{ord(c)};" for c in "<>@&"}


FORMATS: dict[str, Callable[[Report, Path], str]] = {
    f.__name__: _of_visible(f) for f in (github, gitlab, sarif, junit, markdown)
}  # fmt: skip


def repository(start: Path) -> Path:
    """Return the directory at or above `start` that has `.git`, else `start`."""
    start = start.absolute()
    return next((p for p in (start, *start.parents) if (p / ".git").exists()), start)
