"""End a probe that hangs, within its time limit, and name the rank that never arrived.

Every rank keeps a note in memory: the step of the probe it is in. This costs the measuring loop nothing. A thread polls
the note a few times a second. A rank without progress for half the limit writes its note into the rendezvous store; a
rank that has waited for the whole limit reads the other notes and reports. Ranks in an earlier step, or without a note
(stopped, dead), never arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from distdiag.errors import DistdiagError, ExitCode

_POLL_S = 0.1
_BACKSTOP_S = 2.0  # gloo's timeout frees the main thread at the limit; NCCL's does not, so the process is ended


@dataclass(slots=True)
class Note:
    """How far one rank has come."""

    sequence: int = 0  # number of the step, the same on every rank
    label: str = "starting"
    inside: bool = False  # in the step, waiting for the others
    operations: int = 0  # operations begun in a measuring block

    @property
    def place(self) -> tuple[int, bool, int]:
        """Orders ranks by how far they have come."""
        return (self.sequence, self.inside, self.operations)


@dataclass(slots=True)
class Progress:
    """This rank's note, and the time of its last change."""

    note: Note = field(default_factory=Note)
    since_s: float = field(default_factory=time.monotonic)
    limit_s: float = 10.0
    counter: list[int] | None = None  # entry stamps of the running block; its length is the count

    @contextlib.contextmanager
    def step(self, label: str, counter: list[int] | None = None) -> Iterator[None]:
        """Mark a step, in which a rank may wait for the others up to the limit. All ranks do the same steps.

        After an exception the note stays inside the step, where the rank failed.
        """
        self.note = Note(self.note.sequence + 1, label, True)
        self.counter = counter
        self.since_s = time.monotonic()
        yield
        self.note = Note(self.note.sequence, label, False)
        self.counter = None
        self.since_s = time.monotonic()

    def current(self) -> Note:
        note, counter = self.note, self.counter
        return Note(note.sequence, note.label, note.inside, len(counter) if counter is not None else 0)


def timed_out(message: str, hint: str) -> DistdiagError:
    return DistdiagError(message, hint, ExitCode.TIMEOUT, "timeout")


def never_arrived(notes: dict[int, Note], world_size: int) -> tuple[list[int], list[int]]:
    """Return (ranks that never arrived, those of them without a note).

    Both are empty if all ranks are in the same step: then the transport is stuck.
    """
    silent = [r for r in range(world_size) if r not in notes]
    furthest = max((n.place for n in notes.values()), default=(0, False, 0))
    behind = [r for r, n in notes.items() if n.place < furthest]
    return sorted(silent + behind), silent


def hang_error(label: str, limit_s: float, notes: dict[int, Note], world_size: int, where: str) -> DistdiagError:
    """Return the TIMEOUT error: which ranks never arrived, where the others wait, and which interface is used."""
    missing, silent = never_arrived(notes, world_size)
    if not missing:
        text = f"{label}: all {world_size} ranks are in it, and nothing completed for {limit_s:g} s"
        return timed_out(text, f"the transport is stuck, not a rank; interface {where}")
    waiting = [r for r in range(world_size) if r not in missing]
    parts = [f"{_ranks(missing)} never arrived within {limit_s:g} s"]
    if waiting:
        parts.append(f"{_ranks(waiting)} waited")
    places = [f"rank {r} is at '{notes[r].label}'" for r in missing if r in notes]
    if silent:
        places.append(f"{_ranks(silent)} {'is' if len(silent) == 1 else 'are'} silent: stopped, dead or cut off")
    hint = f"{'; '.join(places[:4])}; interface {where}"
    return timed_out(f"{label}: {'; '.join(parts)}", hint)


class Watchdog(threading.Thread):
    """Publishes the rank's note if it makes no progress, and ends the process if its main thread cannot.

    `connect` opens a separate connection to the store (a client that waits blocks its other users), only without
    progress. `publish_error` is called with the report before the process ends.
    """

    def __init__(
        self,
        progress: Progress,
        rank: int,
        world_size: int,
        where: str,
        connect: Callable[[], Any],
        publish_error: Callable[[Any, DistdiagError], None],
    ) -> None:
        super().__init__(name="distdiag-probe-watchdog", daemon=True)
        self._progress, self._rank, self._world_size, self._where = progress, rank, world_size, where
        self._connect, self._publish_error = connect, publish_error
        self._store: Any = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        self._ended.set()

    def run(self) -> None:
        published_at = -1.0
        while not self._ended.wait(_POLL_S):
            progress = self._progress
            still_s = time.monotonic() - progress.since_s
            if still_s > progress.limit_s / 2 and published_at != progress.since_s:
                published_at = progress.since_s
                self._publish()
            if progress.note.inside and still_s > progress.limit_s + _BACKSTOP_S:
                error = self.report()
                with contextlib.suppress(Exception):
                    self._publish_error(self._store, error)
                sys.stderr.flush()
                os._exit(int(error.code))

    def report(self) -> DistdiagError:
        """Return the error that names the ranks that never arrived, from the store; also for the main thread."""
        self._publish()
        mine = self._progress.current()
        notes = {self._rank: mine}
        try:
            store = self._connected()
            for rank in range(self._world_size):
                if rank != self._rank and store.check([f"note/{rank}"]):
                    notes[rank] = Note(**json.loads(store.get(f"note/{rank}")))
        except Exception:
            self._where += "; the rendezvous store does not answer"
        return hang_error(mine.label, self._progress.limit_s, notes, self._world_size, self._where)

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _publish(self) -> None:
        # `report` reports a store that does not answer; here it must not end the thread
        with contextlib.suppress(Exception):
            self._connected().set(f"note/{self._rank}", json.dumps(asdict(self._progress.current())))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
