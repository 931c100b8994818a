"""Snapshot: all that one screen shows at one moment, read from run.db in one go and never changed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from distdiag.diagnosis.model.findings import Finding, still_open
from distdiag.store.frames import Frame
from distdiag.store.liveness import Monitor, heartbeat_age_s, number
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import Run
from distdiag.tui.data.summary import Summary, summarise
from distdiag.tui.draw.severity import of_finding


@dataclass(frozen=True)
class Request:
    page: str = "ranks"  # name of the page
    at_s: float | None = None  # moment to show, seconds since the run began; None follows the job
    rank: int | None = None  # the rank of the detail page, or the one under the cursor
    ranks: tuple[int, ...] = ()  # the ranks that a page shows rows of, where it reads rows per rank
    window: int = 50  # steps that fit on the screen
    metric: str = "delta"  # column of a heat map
    extra: bool = False  # whether the page has room for its optional panels
    places: tuple[tuple[str, int], ...] = ()  # files and lines whose source is shown
    per: int = 1  # steps of one cell of a heat map
    end: int | None = None  # its last step; None follows the newest
    step: int | None = None  # the step under its cursor; None is the newest
    span: float = 0.0  # how many seconds the timeline shows
    until: float | None = None  # moment at its right edge; None follows the job
    gpu: tuple[int, int] | None = None  # node and index of the GPU under the cursor, if no rank uses it


@dataclass(frozen=True)
class Snapshot:
    """One moment of a run, or the reason why there is none (`problem`)."""

    run: Path
    problem: RunUnreadable | None = None
    meta: dict[str, str | None] = field(default_factory=dict)
    monitor: Monitor | None = None
    killed: str | None = None  # which ranks of this host, with the monitor
    heartbeat_age_s: float | None = None
    frame: Frame | None = None
    summary: Summary = field(default_factory=Summary)
    findings: tuple[Finding, ...] = ()  # as known at that moment; open ones first
    later_findings: int = 0  # found after that moment
    newest_t_s: float | None = None
    newest_step: int | None = None
    at_s: float | None = None
    note: str | None = None
    request: Request = field(default_factory=Request)
    panel: Any = None  # what the page's own reader read

    @property
    def t_s(self) -> float | None:
        return None if self.frame is None else self.frame.t_s

    def number(self, key: str) -> float | None:
        return number(self.meta.get(key))

    @property
    def open_findings(self) -> tuple[Finding, ...]:
        return still_open(self.findings)

    @property
    def finding_marks(self) -> tuple[tuple[float, str], ...]:
        """When each finding was first seen, and the style of its mark on a time axis."""
        return tuple((f.first_seen_s, of_finding(f.severity).style) for f in self.findings if f.first_seen_s)

    @property
    def world_size(self) -> int:
        return int(self.number("world_size") or self.summary.n)


class PageReader(Protocol):
    """Reads what one page needs beyond the frame; runs in the reader's thread."""

    def __call__(self, run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> Any: ...


class Taker:
    """Takes snapshots of one open run, keeping what need not be read twice."""

    def __init__(self, run: Run, readers: Mapping[str, PageReader]) -> None:
        self.run = run
        self._readers = readers
        self._frame: Frame | None = None
        self._summary = Summary()
        self._cache: dict[Any, Any] = {}
        self._version: int | None = None
        self._request: Request | None = None
        self._last: Snapshot | None = None

    def forget(self) -> None:
        """Read everything again with the next snapshot: a file in the run directory has changed."""
        self._version = None

    def take(self, request: Request) -> Snapshot:
        """Return the snapshot for a request; cheap if neither the database nor the request changed."""
        self.run.check()
        version = self.run.data_version()
        if self._last is not None and version == self._version and request == self._request:
            return self._refreshed(self._last)
        meta = self.run.meta
        newest = self.run.query("SELECT max(t_s) FROM frame")[0][0]
        frame = self._read_frame(newest, request.at_s)
        findings = self.run.findings()
        n_findings = len(findings)
        if request.at_s is not None and frame is not None:
            findings = known_at(findings, frame.t_s)
        newest_step = self.run.query("SELECT max(step) FROM step")[0][0]
        panel = None
        reader = self._readers.get(request.page)
        if reader is not None and frame is not None:
            panel = reader(self.run, request, frame, self._cache)
        snapshot = Snapshot(
            run=self.run.path,
            meta=meta,
            **self._life(meta),
            frame=frame,
            summary=self._summary if frame is not None else Summary(),
            findings=findings,
            later_findings=n_findings - len(findings),
            newest_t_s=newest,
            newest_step=newest_step,
            at_s=request.at_s,
            note=self.run.note,
            request=request,
            panel=panel,
        )
        self._version, self._request, self._last = version, request, snapshot
        return snapshot

    def _refreshed(self, last: Snapshot) -> Snapshot:
        """Return the same snapshot, with the time since the monitor's last row if it is silent."""
        if last.monitor is Monitor.ENDED:
            return last
        life = self._life(last.meta)
        if life["monitor"] is last.monitor is Monitor.LIVE:
            return last
        self._last = replace(last, **life)
        return self._last

    def _life(self, meta: dict[str, str | None]) -> dict[str, Any]:
        monitor = self.run.monitor(meta)
        killed = self.run.killed(meta)
        return {"monitor": monitor, "killed": killed, "heartbeat_age_s": heartbeat_age_s(meta)}

    def _read_frame(self, newest: float | None, at_s: float | None) -> Frame | None:
        if newest is None:
            return None
        if at_s is None and self._frame is not None and self._frame.t_s == newest:
            return self._frame
        frame = self.run.latest_frame() if at_s is None else self.run.frame_at(at_s)
        if frame is not None and (self._frame is None or frame.t_s != self._frame.t_s):
            self._summary = summarise(frame.table, self._summary)
        self._frame = frame
        return frame


def known_at(findings: tuple[Finding, ...], t_s: float) -> tuple[Finding, ...]:
    """Return the findings as known at a moment: without later findings and later clearings."""
    out = []
    for f in findings:
        seen = f.detected_s if f.detected_s is not None else f.first_seen_s
        if seen is not None and seen > t_s + 1e-6:
            continue
        out.append(msgspec.structs.replace(f, cleared_s=None) if f.cleared_s is not None and f.cleared_s > t_s else f)
    return tuple(sorted(out, key=lambda f: f.cleared_s is not None))
