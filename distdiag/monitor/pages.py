"""The rank pages of this node: find them, keep a view of each, drop those that cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from distdiag import procfs
from distdiag.errors import described
from distdiag.monitor.ranks.state import RankView
from distdiag.page import directories
from distdiag.page.layout import Header
from distdiag.page.reader import PageError

DISCOVER_S = 1.0  # between two listings of the directories, once all ranks of this node are known


class Pages:
    """Views of the rank pages in one node's directory, and in that of the pages which did not fit into it."""

    def __init__(self, directory: Path, overflow: Path | None = None) -> None:
        self.directories = [directory]
        if overflow is not None and overflow != directory:
            self.directories.append(overflow)
        self.views: dict[int, RankView] = {}
        self.damaged: dict[str, tuple[int | None, str]] = {}  # by file: rank if known, reason
        self.expected = 1  # ranks of this node
        self._unjudged: list[Header] = []  # of ranks with a damaged page: the monitor still waits for their processes
        self._listed_s = -10.0
        self._held: dict[Path, int] = {}

    def discover(self, now_s: float, opened: Callable[[RankView], None]) -> None:
        """Open new pages; call `opened` with each view before it is kept."""
        found = len(self.views) + len(self.damaged)
        if self.views and found >= self.expected and now_s - self._listed_s < DISCOVER_S:
            return
        self._listed_s = now_s
        known = {v.reader.path for v in self.views.values()}
        for path in self._listed():
            if path in known or str(path) in self.damaged:
                continue
            view = None
            try:
                view = RankView(path, 0)
                opened(view)
                view.refresh(now_s)
                view.history.forget_progress()  # `opened` may have changed the time zero
            except OSError:
                continue
            except Exception as e:
                self._give_up(path, view, e)
                continue
            self.views[view.rank] = view
            self.expected = max(self.expected, view.reader.header().local_world_size)

    def _listed(self) -> list[Path]:
        out = []
        for d in self.directories:
            try:
                out += [d / n for n in sorted(os.listdir(d)) if n.endswith(".page")]
            except OSError:
                continue
            if d not in self._held and (fd := directories.hold(d)) is not None:
                self._held[d] = fd
        return out

    def give_up(self, view: RankView, reason: Exception) -> None:
        """Drop this rank: the job is judged without it from now on."""
        self.views.pop(view.rank, None)
        self._give_up(view.reader.path, view, reason)

    def _give_up(self, path: Path, view: RankView | None, reason: Exception) -> None:
        text = str(reason) if isinstance(reason, PageError) else described(reason)
        self.damaged[str(path)] = (None if view is None else view.rank, text)
        if view is not None:
            self._unjudged.append(view.first_header)

    def unjudged_alive(self) -> bool:
        """True if the process of a rank with a damaged page still runs."""
        return any(procfs.start_ticks(h.pid) == h.process_start_ticks for h in self._unjudged)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        deadline = time.monotonic() + 1.0  # a dead rank's lock is released with its last thread
        for d in self.directories:
            while not directories.remove(d) and d.is_dir() and time.monotonic() < deadline:
                time.sleep(0.02)
