"""The reader's thread: polls run.db and hands whole snapshots to the screen, never more than one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from distdiag.store import rundir
from distdiag.store.opening import ReadStatus, RunUnreadable
from distdiag.store.reader import Run, open_run
from distdiag.tui.data.snapshot import PageReader, Request, Snapshot, Taker

ATTEMPTS_EVERY_S = 2.0


class Source(threading.Thread):
    """Reads in the background, so that a slow or locked disk never freezes the keys."""

    def __init__(
        self,
        run_dir: Path,
        deliver: Callable[[Snapshot], None],
        readers: Mapping[str, PageReader],
        *,
        hz: float = 2.0,
        follow_attempts: bool = True,
    ) -> None:
        """Prepare; `start()` begins to read. `deliver` is called from this thread with each new snapshot."""
        super().__init__(name="distdiag-reader", daemon=True)
        self._dir = run_dir
        self._deliver = deliver
        self._readers = readers
        self._period_s = 1.0 / hz
        self._follow = follow_attempts
        self._wake = threading.Condition()
        self.wanted = Request()  # what is read from now on
        self._steps: list[tuple[float, int, Callable[[float | None], object]]] = []
        self._stopped = False
        self._run: Run | None = None
        self._taker: Taker | None = None
        self._good: Snapshot | None = None  # what was last read: shown dim under a problem
        self._sent: Snapshot | None = None

    def want(self, request: Request) -> None:
        """Read this from now on; at once if it differs from what is read now."""
        with self._wake:
            if request != self.wanted:
                self.wanted = request
                self._wake.notify()

    def again(self) -> None:
        """Read again now: a file in the run directory has changed."""
        with self._wake:
            if self._taker is not None:
                self._taker.forget()
            self._wake.notify()

    def step(self, from_s: float, count: int, then: Callable[[float | None], object]) -> None:
        """Find the frame `count` frames from that at `from_s`; `then` gets its time, from the reader's thread."""
        with self._wake:
            self._steps.append((from_s, count, then))
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def run(self) -> None:
        rounds = 0
        per_look = max(1, round(ATTEMPTS_EVERY_S / self._period_s))
        while True:
            with self._wake:
                if self._stopped:
                    break
                request, steps = self.wanted, self._steps
                self._steps = []
            if self._follow and rounds % per_look == per_look - 1:
                self._newest_attempt()
            rounds += 1
            self._walk(steps)
            snapshot = self._read(request)
            if snapshot is not self._sent:
                self._sent = snapshot
                self._deliver(snapshot)
            with self._wake:
                if not self._stopped and request == self.wanted and not self._steps:
                    self._wake.wait(self._period_s)
        if self._run is not None:
            self._run.close()

    def _read(self, request: Request) -> Snapshot:
        try:
            if self._taker is None:
                self._run = open_run(self._dir)
                self._taker = Taker(self._run, self._readers)
            self._good = self._taker.take(request)
            return self._good
        except RunUnreadable as e:
            if e.status is not ReadStatus.LOCKED and self._run is not None:
                self._run.close()  # opened again with the next look: it may have moved, or come back
                self._run = self._taker = None
            if self._sent is not None and self._sent.problem is not None and self._sent.problem.message == e.message:
                return self._sent
            return replace(self._good or Snapshot(self._dir), problem=e)

    def _walk(self, steps: list[tuple[float, int, Callable[[float | None], object]]]) -> None:
        for from_s, count, then in steps:
            try:
                then(self._run.frame_step(from_s, count) if self._run is not None else None)
            except RunUnreadable:
                then(None)

    def _newest_attempt(self) -> None:
        found = rundir.attempts(self._dir)
        if found and found[-1] != self._dir and self._dir in found:
            self._dir = found[-1]
            if self._run is not None:
                self._run.close()
            self._run = self._taker = None
