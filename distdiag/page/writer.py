"""The rank page: a rank's state, readable by another process at any instant without a lock.

A fixed-layout file, memory-mapped by the rank (writer) and by the monitor (reader). Writes are plain stores into
shared memory: no system call and no lock, and the contents survive SIGKILL because the page belongs to the kernel.
Strings live once in an append-only heap and are referred to by offset; rings hold the newest calls and steps.

The space is allocated up front (`posix_fallocate`): a store into a hole on a full disk would raise SIGBUS, a crash of the user's job
caused by the recorder.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from ctypes import Structure
from pathlib import Path

from distdiag.page.layout import (
    CALL_FORMAT,
    CALLS,
    DDP_TIMES,
    FAILED_CALL,
    GROUPS,
    HEAP_BYTES,
    LOADERS,
    MAGIC,
    MODELS,
    PAGE_BYTES,
    PEERS,
    SAMPLES,
    SITES,
    STACK,
    STEPS,
    VERSION,
    Blocked,
    CallRecord,
    Header,
    LifeWord,
    Page,
    Phase,
    SampleRecord,
    StepRecord,
    word,
)

_STEPS_AT, _CALLS_AT, _HEAP_AT = Page.steps.offset, Page.calls.offset, Page.heap.offset
_SAMPLES_AT = Page.samples.offset
_STEP_WORDS = _STEPS_AT // 8, ctypes.sizeof(StepRecord) // 8  # start of the ring, length of a record
assert [getattr(StepRecord, f[0]).offset for f in StepRecord._fields_] == [8 * i for i in range(19)]
_N_STEPS, _N_CALLS = word("n_steps"), word("n_calls")
_WAIT_AT, _LEFT_AT, _FLAGS_AT = CallRecord.wait_ns.offset, CallRecord.left_ns.offset, CallRecord.flags.offset


def _map_at(address: int, flags: int, fd: int) -> bool:
    """Map a page's bytes at a fixed address, in place of the existing mapping; True if it worked (else see `errno`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    fixed = 0x10  # MAP_FIXED
    return libc.mmap(address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags | fixed, fd, 0) == address


def _mapped(fd: int) -> mmap.mmap:
    """Map a file of `PAGE_BYTES`. Unlike `mmap.mmap` it keeps no descriptor, which the script could close and reuse.

    Raises:
        OSError: it cannot be mapped.
    """
    made = mmap.mmap(-1, PAGE_BYTES)  # anonymous memory, then replaced by the file at the same address
    if not _map_at(ctypes.addressof(ctypes.c_char.from_buffer(made)), mmap.MAP_SHARED, fd):
        raise OSError(ctypes.get_errno(), "the page cannot be mapped")
    return made


class PageWriter:
    """Creates a rank's page and writes it.

    Raises:
        OSError: the space could not be allocated; the caller continues without a page and reports it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".new{os.getpid()}")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            self._map = _mapped(fd)
        except BaseException:
            os.unlink(fresh)
            raise
        finally:
            os.close(fd)
        self.page = Page.from_buffer(self._map)
        self.h: Header = self.page.header
        self.h.page_bytes = PAGE_BYTES
        self.h.version = VERSION
        self.h.heap_used = 1  # offset 0 means "no string"
        self.h.gpu = -1
        self.h.epoch = -1
        # The page as plain words, for what is written many times a step: a third of the time of ctypes' fields. One view covers nearly
        # all of it: each further view would have to be loaded into cold caches.
        self.words = memoryview(self._map)[: PAGE_BYTES // 8 * 8].cast("Q")
        self.doubles = memoryview(self._map)[: PAGE_BYTES // 8 * 8].cast("d")
        self._strings: dict[str, int] = {"": 0}
        self._call_numbers = itertools.count(1)  # calls may come from several threads
        self.path = path
        self._fresh = fresh

    def make_private(self) -> None:
        """Replace the mapping by private memory at the same address: all views stay valid, and the file is not written."""
        _map_at(ctypes.addressof(self.page), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def word_of(self, slot: Structure, field: str) -> int:
        """Return the index in `words` of a 64-bit field of a slot of the page."""
        return (ctypes.addressof(slot) - ctypes.addressof(self.page) + getattr(type(slot), field).offset) // 8

    def publish(self) -> None:
        """Make the page visible under its name: from now on a reader may find it. The magic number is written last."""
        self.h.magic = MAGIC
        os.replace(self._fresh, self.path)

    def text(self, s: str) -> int:
        """Return the heap offset of `s`, stored once; 0, and one more in `dropped`, if the heap is full."""
        off = self._strings.get(s)
        if off is not None:
            return off
        raw = s.encode("utf-8", "replace")[:60_000]
        at = self.h.heap_used
        end = at + 2 + len(raw)
        if end > HEAP_BYTES:
            self.h.dropped += 1
            return 0
        base = _HEAP_AT + at
        self._map[base : base + 2] = len(raw).to_bytes(2, "little")
        self._map[base + 2 : base + 2 + len(raw)] = raw
        self.h.heap_used = end  # published only now: a reader never follows an offset beyond it
        if len(self._strings) < 20_000:
            self._strings[s] = at
        return at

    def site(self, file: str, line: int, function: str) -> int:
        return self.text(f"{file}\0{line}\0{function}")

    def write_call(self, *fields: object) -> int:
        """Add a call record and return its number; `fields` are those of CallRecord after `number`."""
        number = next(self._call_numbers)
        at = _CALLS_AT + (number - 1) % CALLS * CALL_FORMAT.size
        CALL_FORMAT.pack_into(self._map, at, 0, *fields)
        self.words[at >> 3] = number  # last: a half-written record is recognised
        self.words[_N_CALLS] = number
        return number

    def has_call(self, number: int) -> bool:
        """True if the record of that call still exists: a newer one may have replaced it."""
        return number + CALLS > self.words[_N_CALLS]

    def call_left(self, number: int, left_ns: int, waited_ns: int, failed: bool) -> None:
        """Record that the host has left a call, after waiting `waited_ns` in it."""
        if not self.has_call(number):
            return
        at = _CALLS_AT + (number - 1) % CALLS * CALL_FORMAT.size
        if waited_ns:
            self.words[at + _WAIT_AT >> 3] = waited_ns
        if failed:
            self._map[at + _FLAGS_AT] |= FAILED_CALL
        self.words[at + _LEFT_AT >> 3] = left_ns

    def write_step(
        self, step: int, epoch: int, start_ns: int, end_ns: int, data_ns: int, h2d_ns: int, forward_ns: int, backward_ns: int,
        optimizer_ns: int, wait_ns: int, ready_ns: int, samples: int, batch: int, loss: float | None, device_bytes: int,
        forward_wait_ns: int, arrived_ns: int,
    ) -> None:  # fmt: skip
        """Add a step record. Word by word: with cold caches this takes a third of the time of packing a struct."""
        words = self.words
        number = words[_N_STEPS] + 1
        at = _STEP_WORDS[0] + (number - 1) % STEPS * _STEP_WORDS[1]
        words[at] = 0  # a half-written record is recognised
        words[at + 1] = step
        words[at + 2] = epoch
        words[at + 3] = start_ns
        words[at + 4] = end_ns
        words[at + 5] = data_ns
        words[at + 6] = h2d_ns
        words[at + 7] = forward_ns
        words[at + 8] = backward_ns
        words[at + 9] = optimizer_ns
        words[at + 10] = wait_ns
        words[at + 11] = ready_ns
        words[at + 12] = samples
        words[at + 13] = batch
        if loss is None:
            words[at + 15] = 0
        else:
            self.doubles[at + 14] = loss
            words[at + 15] = 1
        words[at + 16] = device_bytes
        words[at + 17] = forward_wait_ns
        words[at + 18] = arrived_ns
        words[at] = number
        words[_N_STEPS] = number

    def write_sample(self, kind: int, step: int, value: float, key: int, name: str, site: int, t_ns: int) -> None:
        """Add one sampled check."""
        header = self.h
        number = header.n_samples + 1
        rec = self.page.samples[header.n_samples % SAMPLES]
        rec.number = 0  # a half-written record is recognised
        rec.kind, rec.step, rec.value, rec.key = kind, step, value, key
        rec.name, rec.site, rec.t_ns = self.text(name), site, t_ns
        rec.number = number
        header.n_samples = number

    def write_ddp_time(
        self, model: int, began_ns: int, per_step: int, comm_ns: int, overlap_ns: int, backward_ns: int
    ) -> None:
        """Add one measurement of a DDP module's backward pass."""
        header = self.h
        number = header.n_ddp_times + 1
        rec = self.page.ddp_times[header.n_ddp_times % DDP_TIMES]
        rec.number = 0  # a half-written record is recognised
        rec.model, rec.began_ns, rec.per_step = model, began_ns, per_step
        rec.comm_ns, rec.overlap_ns, rec.backward_ns = comm_ns, overlap_ns, backward_ns
        rec.number = number
        header.n_ddp_times = number


# Limits of a valid header: slots of its tables, and counts that a job cannot reach in years.
_COUNT = 1 << 48
_MOST = (
    ("phase", len(Phase) - 1), ("blocked", len(Blocked) - 1), ("life", len(LifeWord) - 1), ("stack_depth", STACK),
    ("stack_phase", len(Phase) - 1), ("exception_depth", STACK), ("n_groups", GROUPS), ("n_peers", PEERS),
    ("n_sites", SITES), ("n_loaders", LOADERS), ("n_models", MODELS), ("heap_used", HEAP_BYTES), ("initialised", 1 << 16),
    ("rank", 1 << 20), ("world_size", 1 << 20), ("local_world_size", 1 << 16), ("node", 1 << 20),
    ("pid", 1 << 30), ("step", _COUNT), ("micro_steps", _COUNT), ("n_steps", _COUNT), ("n_calls", _COUNT),
    ("n_samples", _COUNT), ("n_scalars", _COUNT), ("n_ddp_times", _COUNT), ("dropped", _COUNT), ("errors", _COUNT),
)  # fmt: skip


class PageError(ValueError):
    """The file is not a page, or one of another version."""


class PageReader:
    """Reads a page in the monitor: a read-only map and copies of it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as f:
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
        self._page = Page()
        self._from, self._to = memoryview(self._map), memoryview(self._page).cast("B")

    def header(self) -> Header:
        return Header.from_buffer_copy(self._map)

    def sample_kinds(self, first: int, end: int) -> set[int]:
        """Return the kinds of the samples `first` to `end` (exclusive, 0-based); the ring holds only the newest."""
        size, at = ctypes.sizeof(SampleRecord), SampleRecord.kind.offset
        found = set()
        for i in range(max(first, end - SAMPLES), end):
            kind = _SAMPLES_AT + i % SAMPLES * size + at
            found.add(int.from_bytes(self._map[kind : kind + 4], "little"))
        return found

    def read(self, calls_known: int = -1) -> Page:
        """Copy the page, except its texts; each copy overwrites the previous one.

        The calls, its largest part, are not copied again if their number is still `calls_known`.

        Raises:
            PageError: the header has values that no rank can have written.
        """
        self._to[:_CALLS_AT] = self._from[:_CALLS_AT]
        if self._page.header.n_calls != calls_known:
            self._to[_CALLS_AT:_STEPS_AT] = self._from[_CALLS_AT:_STEPS_AT]
        self._to[_STEPS_AT:_HEAP_AT] = self._from[_STEPS_AT:_HEAP_AT]
        damage = self._damage(self._page.header)
        if damage:
            raise PageError(f"{self.path.name} is damaged: {damage}")
        return self._page

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

    def site(self, offset: int) -> tuple[str, int, str] | None:
        """Return (file, line, function) of a site, or None."""
        if not offset:
            return None
        parts = self.text(offset).split("\0")
        if len(parts) != 3 or not parts[1].isascii() or not parts[1].isdigit() or len(parts[1]) > 9:
            raise PageError(f"{self.path.name} is damaged: no site at {offset}")
        return parts[0], int(parts[1]), parts[2]

    def close(self) -> None:
        self._from.release()
        self.words.release()
        self._map.close()
