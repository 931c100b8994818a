"""Find what a rank's main thread waits for, from its native frames: its device, a communicator, or nothing.

The rank's signal handler writes return addresses (`recorder/fast/c/native.c`); here they get names from the symbol tables of
their libraries. Reading a table takes milliseconds, so libraries without an answer are skipped.

CUDA, HIP and NCCL are recognised by function names. An unknown backend is recognised by its library: it runs inside an
operation of torch, and is neither torch's nor one that torch computes with.
"""

from __future__ import annotations

import bisect
import os
import re
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from distdiag import files

FRAMES = 62  # as in native.c
_SAMPLE = struct.Struct(f"=QQ{FRAMES}Q")

# Calls that return only when the device reaches some point (in CUDA, HIP, Ascend and SYCL all named `synchronize`), or when its
# launch queue has room.
_DEVICE = re.compile(
    r"synchronize|^_?_?(cu|cuda|hip)(memcpy|memfree|free|malloc|memalloc|launch|graphlaunch|streamwaitevent)", re.I
)
_COMMUNICATOR = re.compile(r"^p?(nccl|rccl)(comminit|commsplit|getuniqueid)|initNCCLComm|newCommunicator", re.I)
# Their tables are large and not needed: the call into the device library is a frame further in.
_NO_ANSWER = re.compile(r"^(libtorch_|libpython|python|libc\.|libc-|libm\.|libstdc\+\+|ld-|libgcc)")


# Libraries without a meaning: system libraries, distdiag's signal handler, ctypes.
_NEUTRAL = re.compile(r"^(libc[.-]|libpthread|libstdc\+\+|ld-|libgcc|libm[.-]|librt|libdl|libffi|_ctypes|_native)")
_PYTHON = re.compile(r"^(libpython|python)")
_ACCESSOR = 2  # frames in torch: `Work.is_completed()` has at most two, an operation has more
# Libraries that compute on the host for torch. GPU libraries are judged by function names only: some compile for seconds.
_COMPUTES = re.compile(
    r"^lib(torch|c10|caffe2|shm|gomp|iomp|omp|mkl|openblas|blas|dnnl|tbb|cu|nv|hip|hsa|roc|rccl|nccl|MIOpen|amd)", re.I
)


class HostWait(StrEnum):
    DEVICE = "device"  # a call that waits for the device
    COMMUNICATOR = "communicator"  # creating a communicator
    NO = "no"  # neither: it computes, or waits for something else


@dataclass(slots=True)
class Sample:
    taken_ns: int  # CLOCK_MONOTONIC
    addresses: tuple[int, ...]  # innermost first


def read(path: Path) -> Sample | None:
    """Return the newest sample in a rank's file; None if it has none."""
    try:
        data = files.read(path.parent, path.name, _SAMPLE.size)
    except OSError:
        return None
    if len(data) < _SAMPLE.size:
        return None
    taken_ns, n, *addresses = _SAMPLE.unpack_from(data)
    return Sample(taken_ns, tuple(addresses[: min(n, FRAMES)]))


class Frame(NamedTuple):
    """One native frame: the path of its library and its symbol; "" if it has none."""

    library: str
    name: str


@dataclass(slots=True)
class Symbols:
    """Names of native addresses of one process; libraries loaded later are found at the next sample."""

    pid: int
    _maps: list[tuple[int, int, int, str]] = field(default_factory=list)  # start, end, file offset, path

    def _find(self, address: int) -> tuple[int, int, int, str] | None:
        return next((m for m in self._maps if m[0] <= address < m[1]), None)

    def frames(self, sample: Sample) -> list[Frame]:
        if not self._maps or any(self._find(a) is None for a in sample.addresses):
            self._maps = _executable_maps(self.pid)
        out = []
        for address in sample.addresses:
            start, _, offset, path = self._find(address) or (0, 0, 0, "")
            name = ""
            if path and not _NO_ANSWER.match(os.path.basename(path)):
                name = _table(f"/proc/{self.pid}/root{path}").name(address - start + offset)
            out.append(Frame(path, name))
        return out


def host_wait(names: list[str]) -> tuple[HostWait, str]:
    """Return what a main thread with these symbols, innermost first, waits for, and the one that shows it."""
    for kind, pattern in ((HostWait.COMMUNICATOR, _COMMUNICATOR), (HostWait.DEVICE, _DEVICE)):
        if (name := next(filter(pattern.search, names), None)) is not None:
            return kind, name
    return HostWait.NO, ""


def unknown_backend(frames: list[Frame], in_python: str) -> str | None:
    """Return the function of an unknown backend that the main thread waits in; None if it is in none.

    It is in one if an operation of torch runs a library that belongs to no package, or if the innermost Python frames are a
    backend's (`in_python`: its innermost function) and no operation of torch runs inside them.
    """
    foreign, depth = None, 0
    for path, name in frames:
        file = os.path.basename(path)
        if not file or _NEUTRAL.match(file):
            continue
        if _PYTHON.match(file):
            return in_python or None
        if _COMPUTES.match(file):
            depth += not file.startswith("libtorch_python")
            if foreign is not None or depth > _ACCESSOR:
                return foreign
        elif "-packages/" not in path and "/lib-dynload/" not in path:
            foreign = foreign or name or file
    return None


def innermost(frames: list[Frame]) -> str:
    """Return the innermost function outside of system libraries, with its library; "" if there is none."""
    for path, name in frames:
        file = os.path.basename(path)
        if file and not _NEUTRAL.match(file):
            return f"{name} in {file}" if name else file
    return ""


def _executable_maps(pid: int) -> list[tuple[int, int, int, str]]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/"):
            start, end = (int(x, 16) for x in parts[0].split("-"))
            out.append((start, end, int(parts[2], 16), parts[5]))
    return out


@dataclass(slots=True)
class _Table:
    """Function symbols of one ELF file."""

    functions: list[tuple[int, int, str]] = field(default_factory=list)  # start, end, name; sorted
    segments: list[tuple[int, int, int]] = field(default_factory=list)  # file offset, length, virtual address

    def name(self, offset: int) -> str:
        """Return the function at this offset of the file; "" if there is none."""
        for start, length, virtual in self.segments:
            if start <= offset < start + length:
                at = offset - start + virtual
                i = bisect.bisect_right(self.functions, at, key=itemgetter(0)) - 1
                # a return address may be the end
                return self.functions[i][2] if i >= 0 and at <= self.functions[i][1] else ""
        return ""


@lru_cache(maxsize=64)
def _table(path: str) -> _Table:
    """Return the symbols of a 64-bit ELF file; empty if it cannot be read."""
    try:
        with open(path, "rb") as f:
            return _parse(f)
    except (OSError, struct.error, IndexError, ValueError):
        return _Table()


def _parse(f: BinaryIO) -> _Table:
    head = f.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return _Table()
    ph_at, sh_at = struct.unpack_from("<QQ", head, 32)
    ph_size, ph_n, sh_size, sh_n = struct.unpack_from("<HHHH", head, 54)
    table = _Table()
    f.seek(ph_at)
    data = f.read(ph_size * ph_n)
    for i in range(ph_n):
        kind, _, offset, virtual, _, length = struct.unpack_from("<IIQQQQ", data, i * ph_size)
        if kind == 1:  # PT_LOAD
            table.segments.append((offset, length, virtual))
    f.seek(sh_at)
    data = f.read(sh_size * sh_n)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, i * sh_size) for i in range(sh_n)]
    found: dict[int, tuple[int, str]] = {}
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            continue
        f.seek(sections[link][4])
        strings = f.read(sections[link][5])
        f.seek(offset)
        for name, info, _, where, value, length in struct.iter_unpack("<IBBHQQ", f.read(size // 24 * 24)):
            if info & 15 in (2, 10) and where and length:  # a function, defined here
                end = strings.index(b"\0", name)
                found.setdefault(value, (value + length, strings[name:end].decode("utf-8", "replace")))
    table.functions = sorted((start, *rest) for start, rest in found.items())
    return table
