"""Reads a rank page from another process, at any instant and without a lock. A page is untrusted: a header with impossible values
is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from distdiag import files, procfs
from distdiag.page.layout import (
    CALLERS,
    GROUPS,
    HEAP_BYTES,
    LOADERS,
    MAGIC,
    PAGE_BYTES,
    PEERS,
    SAMPLES,
    SITES,
    STACK,
    VERSION,
    Blocked,
    Header,
    LifeWord,
    Page,
    Phase,
    SampleRecord,
)

_CALLS_AT, _STEPS_AT, _HEAP_AT = Page.calls.offset, Page.steps.offset, Page.heap.offset
_SAMPLES_AT = Page.samples.offset

# Limits of a valid header: slots of its tables, and counts that a job cannot reach in years.
_COUNT = 1 << 48
_MOST = (
    ("phase", len(Phase) - 1), ("blocked", len(Blocked) - 1), ("life", len(LifeWord) - 1), ("stack_depth", STACK),
    ("stack_phase", len(Phase) - 1), ("exception_depth", STACK), ("n_groups", GROUPS), ("n_peers", PEERS),
    ("n_sites", SITES), ("n_loaders", LOADERS), ("n_models", _COUNT), ("heap_used", HEAP_BYTES), ("initialised", 1 << 16),
    ("rank", 1 << 20), ("world_size", 1 << 20), ("local_world_size", 1 << 16), ("node", 1 << 20),
    ("pid", 1 << 30), ("step", _COUNT), ("micro_steps", _COUNT), ("n_steps", _COUNT), ("n_calls", _COUNT),
    ("n_samples", _COUNT), ("n_scalars", _COUNT), ("n_ddp_times", _COUNT), ("dropped", _COUNT), ("errors", _COUNT),
)  # fmt: skip


class PageError(ValueError):
    """The file is not a page, or one of another version."""


def header_of(path: Path) -> Header | None:
    """Return the header of a page, which is not mapped any more then; None if there is no valid page."""
    try:
        page = PageReader(path)
    except (OSError, ValueError):
        return None
    header = page.header()
    page.close()
    return header


def is_mapped(path: Path) -> bool:
    """True if the process that a page names lives, is ours, and really maps it: the page may come from elsewhere."""
    header = header_of(path)
    return header is not None and _is_mapped_by(header, path)


def _is_mapped_by(header: Header, path: Path) -> bool:
    return procfs.start_ticks(header.pid) == header.process_start_ticks and procfs.maps(header.pid, path)


class PageReader:
    """Reads a page in the monitor: a read-only map and copies of it."""

    def __init__(self, path: Path) -> None:
        with open(files.open_to_read(path.parent, path.name), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size < ctypes.sizeof(Header):
                raise PageError(f"{path.name}: too short for a rank page")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        head = Header.from_buffer_copy(self._map)
        if head.magic != MAGIC:
            raise PageError(f"{path.name}: not a rank page")
        if head.version != VERSION or head.page_bytes != PAGE_BYTES:
            raise PageError(f"{path.name}: page version {head.version}, this distdiag reads {VERSION}")
        if size < PAGE_BYTES:
            raise PageError(f"{path.name}: {size} of {PAGE_BYTES} bytes")
        self.path = path
        self._identity = head.pid, head.rank
        damage = self._damage(head)
        if damage:
            raise PageError(f"{path.name} is damaged: {damage}")
        self.words = memoryview(self._map)[: PAGE_BYTES // 8 * 8].cast("Q")  # current values
        self._texts: dict[int, str] = {0: ""}
        self.page = Page()  # the newest copy
        self._from, self._to = memoryview(self._map), memoryview(self.page).cast("B")

    def header(self) -> Header:
        return Header.from_buffer_copy(self._map)

    def is_mapped(self) -> bool:
        """As `is_mapped`, while this reader maps the page, too: true of a page that names this very process."""
        return _is_mapped_by(self.header(), self.path)

    def sample_kinds(self, first: int, end: int) -> set[int]:
        """Return the kinds of the samples `first` to `end` (exclusive, 0-based); the ring holds only the newest."""
        size, at = ctypes.sizeof(SampleRecord), SampleRecord.kind.offset
        found = set()
        for i in range(max(first, end - SAMPLES), end):
            kind = _SAMPLES_AT + i % SAMPLES * size + at
            found.add(int.from_bytes(self._map[kind : kind + 4], "little"))
        return found

    def read(self, calls_known: int = -1) -> Page:
        """Copy the page into `page`, except its texts.

        The calls, its largest part, are not copied again if their number is still `calls_known`.

        Raises:
            PageError: the header has values that no rank can have written.
        """
        self._to[:_CALLS_AT] = self._from[:_CALLS_AT]
        if self.page.header.n_calls != calls_known:
            self._to[_CALLS_AT:_STEPS_AT] = self._from[_CALLS_AT:_STEPS_AT]
        self._to[_STEPS_AT:_HEAP_AT] = self._from[_STEPS_AT:_HEAP_AT]
        damage = self._damage(self.page.header)
        if damage:
            raise PageError(f"{self.path.name} is damaged: {damage}")
        return self.page

    def _damage(self, h: Header) -> str | None:
        """Return which value in a header no rank can have written; None if it is valid."""
        for name, most in _MOST:
            if not 0 <= getattr(h, name) <= most:
                return f"{name} is {getattr(h, name)}"
        if h.magic != MAGIC or h.version != VERSION:
            return "its first bytes are overwritten"
        if (h.pid, h.rank) != self._identity:
            return f"rank {self._identity[1]} with pid {self._identity[0]} became rank {h.rank} with pid {h.pid}"
        return None

    def text(self, offset: int) -> str:
        s = self._texts.get(offset)
        if s is None:
            base = _HEAP_AT + offset
            n = int.from_bytes(self._map[base : base + 2], "little")
            s = self._map[base + 2 : base + 2 + n].decode("utf-8", "replace")
            self._texts[offset] = s
        return s

    def site(self, offset: int) -> list[tuple[str, int, str]]:
        """Return (file, line, function) of a site and of its callers, innermost first; empty if there is none."""
        if not offset:
            return []
        parts = self.text(offset).split("\0")
        lines = parts[1::3]
        if (
            len(parts) % 3
            or len(parts) > 3 * (1 + CALLERS)
            or not all(n.isascii() and n.isdigit() and len(n) <= 9 for n in lines)
        ):
            raise PageError(f"{self.path.name} is damaged: no site at {offset}")
        return [(file, int(n), function) for file, n, function in zip(parts[::3], lines, parts[2::3], strict=True)]

    def close(self) -> None:
        self._from.release()
        self.words.release()
        self._map.close()
