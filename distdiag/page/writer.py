"""Writes the rank page: a rank's state, readable by another process at any instant without a lock.

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

from distdiag import files
from distdiag.page.layout import (
    CALL_FORMAT,
    CALLS,
    FAILED_CALL,
    HEAP_BYTES,
    MAGIC,
    PAGE_BYTES,
    STEPS,
    VERSION,
    CallRecord,
    Header,
    Page,
    StepRecord,
    word,
)
from distdiag.unpatched import RLock, now_ns

_STEPS_AT, _CALLS_AT, _HEAP_AT = Page.steps.offset, Page.calls.offset, Page.heap.offset
_STEP_WORDS = _STEPS_AT // 8, ctypes.sizeof(StepRecord) // 8  # start of the ring, length of a record
assert [getattr(StepRecord, f[0]).offset for f in StepRecord._fields_] == [8 * i for i in range(21)]
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
        fd = files.open_own(path.parent, fresh.name, os.O_RDWR | os.O_TRUNC)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            self._map = _mapped(fd)
        except BaseException:
            os.unlink(fresh)
            raise
        finally:
            os.close(fd)
        self.page = Page.from_buffer(self._map)
        self.header: Header = self.page.header
        self.header.page_bytes = PAGE_BYTES
        self.header.version = VERSION
        self.header.heap_used = 1  # offset 0 means "no string"
        self.header.gpu = -1
        self.header.epoch = -1
        # The page as plain words, for what is written many times a step: a third of the time of ctypes' fields. One view covers nearly
        # all of it: each further view would have to be loaded into cold caches.
        self.words = memoryview(self._map)[: PAGE_BYTES // 8 * 8].cast("Q")
        self.doubles = memoryview(self._map)[: PAGE_BYTES // 8 * 8].cast("d")
        self._strings: dict[str, int] = {"": 0}
        self._adding = RLock()  # strings and records come from several threads, and from signal handlers
        self._call_numbers = itertools.count(1)  # calls may come from several threads
        self.path = path
        self._fresh = fresh

    def make_private(self) -> None:
        """Replace the mapping by private memory at the same address: all views stay valid, and the file is not written."""
        _map_at(ctypes.addressof(self.page), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._adding = RLock()  # a thread that held it is not in the child

    def word_of(self, slot: Structure, field: str) -> int:
        """Return the index in `words` of a 64-bit field of a slot of the page."""
        return (ctypes.addressof(slot) - ctypes.addressof(self.page) + getattr(type(slot), field).offset) // 8

    def publish(self) -> None:
        """Make the page visible under its name: from now on a reader may find it. The magic number is written last."""
        self.header.magic = MAGIC
        os.replace(self._fresh, self.path)

    def text(self, s: str) -> int:
        """Return the heap offset of `s`, stored once; 0, and one more in `dropped`, if the heap is full."""
        off = self._strings.get(s)
        if off is not None:
            return off
        raw = s.encode("utf-8", "replace")[:60_000]
        with self._adding:
            at = self.header.heap_used
            end = at + 2 + len(raw)
            if end > HEAP_BYTES:
                self.header.dropped += 1
                return 0
            base = _HEAP_AT + at
            self._map[base : base + 2] = len(raw).to_bytes(2, "little")
            self._map[base + 2 : base + 2 + len(raw)] = raw
            self.header.heap_used = end  # published only now: a reader never follows an offset beyond it
            if len(self._strings) < 20_000:
                self._strings[s] = at
        return at

    def site(self, file: str, line: int, function: str, *callers: tuple[str, int, str]) -> int:
        """Add a site, with up to `CALLERS` callers, innermost first; return its offset."""
        return self.text("\0".join(f"{a}\0{b}\0{c}" for a, b, c in ((file, line, function), *callers)))

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
        forward_wait_ns: int, arrived_ns: int, optimizer_wait_ns: int = 0, elements: int = 0,
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
        words[at + 19] = optimizer_wait_ns
        words[at + 20] = elements
        words[at] = number
        words[_N_STEPS] = number

    def add(self, ring: str, **fields: int | float) -> None:
        """Add a record to a ring of what is rare: `samples`, `scalars` or `ddp_times`."""
        records, count = getattr(self.page, ring), f"n_{ring}"
        with self._adding:
            number = getattr(self.header, count) + 1
            record = records[(number - 1) % len(records)]
            record.number = 0  # a half-written record is recognised
            for name, value in fields.items():
                setattr(record, name, value)
            record.number = number
            setattr(self.header, count, number)

    def write_sample(self, kind: int, step: int, value: float, key: int = 0, name: str = "", site: int = 0) -> None:
        t_ns = now_ns()
        self.add("samples", kind=kind, step=step, value=value, key=key, name=self.text(name), site=site, t_ns=t_ns)
