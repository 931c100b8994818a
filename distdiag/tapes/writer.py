"""Writes the tape of a run while the monitor judges it: RUN/run.tape, bounded.

The newest snapshots are held back for a moment. All of those around a change of a finding are written; of the others fewer, the fuller the tape.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from distdiag import files
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.errors import in_own_tests
from distdiag.tapes.delta import difference
from distdiag.tapes.tape import EMPTY, ZLIB, Frame, Head, Source, encoded
from distdiag.terms import secrets

NAME = "run.tape"
ON = "DISTDIAG_TAPE"  # 1: write a tape; a number of bytes: its largest size
MAX_TAPE = 8 << 20  # bytes
BEFORE_S, AFTER_S = 5.0, 5.0  # around a change of a finding every snapshot is kept
MOST_HELD = 1280  # states of ranks in the snapshots that are held back: each takes some tens of KiB
# share of one core that the tape may take, calm and around a change: 1,024 ranks take a second a snapshot
MOST_CPU = (0.02, 0.1)
# (share of the largest size that is used, seconds between two snapshots that are kept when nothing changes)
THINNED = ((0.25, 0.0), (0.5, 2.0), (0.75, 15.0), (0.9, 120.0))


class TapeWriter:
    """One tape. A failure ends the tape and nothing else; `failed` has the reason."""

    def __init__(self, run_dir: Path, max_bytes: int, earlier: tuple[Finding, ...] = (), version: str = "") -> None:
        self.failed: str | None = None
        self._max = max_bytes
        self._compress = zlib.compressobj(6)
        self._written = 0
        self._last = EMPTY  # the newest snapshot on the tape
        self._held: deque[Frame] = deque()  # newest last; `change` is the snapshot itself
        self._dense_until_s = float("-inf")
        self._records: tuple = ()
        self._cost_s = 0.0  # of the newest snapshot on the tape
        self._sources: set[str] = set()
        self._file: IO[bytes] | None = None
        path = run_dir / NAME
        try:
            if path.exists():  # of a monitor that was killed
                path.replace(path.with_name("before." + NAME))
            self._file = os.fdopen(files.open_own(run_dir, NAME, os.O_WRONLY | os.O_TRUNC), "wb", buffering=0)
            self._file.write(ZLIB)
        except OSError as e:
            self._fail(e.strerror or str(e))
        self._write(encoded(Head(version=version, earlier=earlier)))

    def source(self, read: Callable[[str], str | None]) -> Callable[[str], str | None]:
        """Return `read`, whose answers are kept on the tape."""

        def kept(path: str) -> str | None:
            text = read(path)
            if path not in self._sources and len(self._sources) < 256:
                self._sources.add(path)
                masked = text if text is None or secrets.kept() else secrets.mask_source(text)
                self._write(encoded(Source(path, masked)))
            return text

        return kept

    def take(self, snapshot: Snapshot, diagnosis: Diagnosis, changed: list[Finding], final: bool) -> None:
        """Add a snapshot that the diagnosis has judged."""
        self._guarded(lambda: self._take(snapshot, diagnosis, changed, final))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:
            if in_own_tests():
                raise
            self._fail(f"{type(e).__name__}: {e}")

    def _take(self, snapshot: Snapshot, diagnosis: Diagnosis, changed: list[Finding], final: bool) -> None:
        now = tuple((key, r.reported, r.finding.cleared_s is None) for key, r in diagnosis.records.items())
        moment = bool(changed) or now != self._records or diagnosis.suspects()
        self._records = now
        if moment:
            self._dense_until_s = snapshot.t_s + AFTER_S
        self._held.append(Frame(change=snapshot, final=final, answers=len(changed)))
        dense = snapshot.t_s <= self._dense_until_s or final
        many = len(self._held) * len(snapshot.ranks) > MOST_HELD
        while self._held and (dense or many or snapshot.t_s - self._held[0].change.t_s > BEFORE_S):
            frame = self._held.popleft()
            since_s = frame.change.t_s - self._last.t_s
            if frame.answers or frame.final or since_s >= (self._cost_s / MOST_CPU[1] if dense else self._calm_s()):
                self._write_frame(frame)

    def _calm_s(self) -> float:
        """Return the seconds between two snapshots that are kept while no finding changes."""
        thinned_s = next((s for share, s in THINNED if self._written < share * self._max), float("inf"))
        return max(thinned_s, self._cost_s / MOST_CPU[0])

    def _write_frame(self, frame: Frame) -> None:
        snapshot, began_s = frame.change, time.thread_time()
        data = encoded(Frame(change=difference(self._last, snapshot), final=frame.final, answers=frame.answers))
        self._last = snapshot
        self._write(data)
        self._cost_s = time.thread_time() - began_s

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        data = self._compress.compress(data) + self._compress.flush(zlib.Z_SYNC_FLUSH)
        if self._written + len(data) > self._max:
            self._fail(f"it is full ({self._max / 2**20:.0f} MiB)")
            return
        try:
            self._file.write(data)
            self._written += len(data)
        except OSError as e:
            self._fail(e.strerror or str(e))

    def _fail(self, reason: str) -> None:
        self.failed = f"no tape is written: {reason}"
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def close(self) -> None:
        """Write what was held back."""
        while self._held:
            self._guarded(lambda: self._write_frame(self._held.popleft()))
        self._close()


def wanted_bytes() -> int:
    """Return the largest size of the tape that the environment asks for; 0: none."""
    asked = os.environ.get(ON, "")
    if not asked.isdecimal() or len(asked) > 18:
        return 0
    return MAX_TAPE if asked == "1" else int(asked)
