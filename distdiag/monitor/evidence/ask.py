"""Evidence: the flight recorder and all stacks of a rank, asked of its witness. Only on suspicion."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distdiag.diagnosis.dumps.pickles import BadDump, load_pickle
from distdiag.diagnosis.model.snapshot import Site
from distdiag.monitor.host import processes
from distdiag.recorder.frames import USER, kind_of_file

TIMEOUT_S = 3.0
MOST_BYTES = 64 << 20  # of an answer
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
MOST_STACKS = 200  # entries whose stacks a rank is made to look up, which takes its GIL


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        _, owner, _ = _PEER.unpack(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if owner != os.getuid():  # the path comes from a page, which may be another user's
            raise PermissionError(errno.EACCES, "is served by another user")


def ask(socket_path: str, handler: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Body of the witness's answer.

    Raises:
        OSError, http.client.HTTPException: no answer, one that reports a failure, or another user's server.
    """
    connection = _UnixConnection(socket_path, timeout_s)
    try:
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        body = response.read(MOST_BYTES)
        if response.status != 200:
            raise http.client.HTTPException(f"{handler}: HTTP {response.status}")
        return body
    finally:
        connection.close()


@dataclass(slots=True)
class Entry:
    """One collective in a rank's flight recorder."""

    group: str
    seq: int
    op: str
    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int | None
    created_ns: int  # wall clock
    retired: bool
    p2p: bool
    site: Site | None = None  # the user's line that issued it, by the recorder's own stack; only of what C++ issued


@dataclass(slots=True)
class FlightRecord:
    """What a rank's flight recorder holds, by (group name, seq)."""

    taken_s: float
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)  # newest seq with all before it done
    # (group name, send or recv, peer's rank in the group) -> how many are not complete
    open_messages: dict[tuple[str, str, int], int] = field(default_factory=dict)
    raw: bytes = b""


_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
_ITEM_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32", "Long": "int64",
    "Short": "int16", "Byte": "uint8", "Char": "int8", "Bool": "bool",
}  # fmt: skip


def flight_record(
    socket_path: str, taken_s: float, timeout_s: float = TIMEOUT_S, known: Collection[tuple[str, int]] = ()
) -> FlightRecord | None:
    """Return the rank's flight recorder(s), merged: NCCL builds have two. None if the witness does not answer.

    Args:
        known: (group name, seq) of collectives whose line is known. The recorder is asked for the stack of any other that is the
            oldest open one of its group.
    """
    record: FlightRecord | None = None
    for handler in ("fr_trace_json", "dump_nccl_trace_json"):
        try:
            raw = ask(socket_path, handler, timeout_s)
            data = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError):
            continue
        record = record or FlightRecord(taken_s)
        if data.get("entries"):
            record.raw = raw
            parse(data, record)
            if handler != "fr_trace_json":
                _add_sites(socket_path, timeout_s, data["entries"], record, known)
    return record


def _add_sites(
    socket_path: str,
    timeout_s: float,
    entries: list[dict[str, Any]],
    record: FlightRecord,
    known: Collection[tuple[str, int]],
) -> None:
    """Add the lines that made C++ issue the oldest open collectives; the recorder's JSON has no stacks, its pickle has."""
    oldest = {
        (group, record.completed[group] + 1) for group, n in record.enqueued.items() if record.completed[group] < n
    }
    wanted = {key for key in oldest.difference(known) if key in record.entries}
    active = sum(not _retired(e) for e in entries)
    if not wanted or active > MOST_STACKS:
        return
    try:
        raw = ask(socket_path, "dump_nccl_trace_pickle?includestacktraces=true&onlyactive=true", timeout_s)
        for e in load_pickle(raw)["entries"]:
            key = str(e["process_group"][0]), int(e["collective_seq_id"])
            if key in wanted and not e.get("is_p2p"):
                frames = ((str(f["filename"]), int(f["line"]), str(f["name"])) for f in e.get("frames") or ())
                site = next((Site(*f) for f in frames if kind_of_file(f[0]) == USER), None)
                record.entries[key].site = record.entries[key].site or site
    except (OSError, http.client.HTTPException, BadDump, LookupError, TypeError, ValueError, AttributeError):
        return  # it lacks the handler, or answers something else: the line is not known


def parse(data: dict[str, Any], record: FlightRecord) -> None:
    """Take the entries of one dump into `record`."""
    open_seqs: dict[str, int] = {}
    entries = data.get("entries", ())
    # NCCL writes an entry for each operation of a coalesced group, which keeps its first state, and one for the
    # whole, which has the state.
    batches = {
        key: _retired(e) for e in entries if "coalesced" in str(e["profiling_name"]).lower() and (key := _number(e))
    }
    for e in entries:
        group = str(e["process_group"][0])
        op = str(e["profiling_name"]).split(":", 1)[-1]
        retired = batches.get(_number(e), _retired(e))
        if e.get("is_p2p"):
            ends = _MESSAGE.match(op)
            if ends and not retired:
                kind = (group, ends["op"], int(ends["peer"]))
                record.open_messages[kind] = record.open_messages.get(kind, 0) + 1
            continue
        seq = int(e["collective_seq_id"])
        sizes, dtypes = e.get("input_sizes") or [], e.get("input_dtypes") or []
        shape = tuple(sizes[0]) if len(sizes) == 1 else None
        dtype = dtypes[0] if dtypes else None
        elements = 0
        for s in sizes:
            n = 1
            for k in s:
                n *= k
            elements += n
        if len(sizes) == 1:
            op = op.removesuffix("_coalesced")  # of one tensor: it matches the plain operation, and its size is known
        record.entries[(group, seq)] = Entry(
            group,
            seq,
            _OPS.get(op, op),
            shape,
            _DTYPES.get(dtype, dtype) if dtype else None,
            elements * _ITEM_BYTES[dtype] if dtype in _ITEM_BYTES and sizes else None,
            int(e.get("time_created_ns", 0)),
            retired,
            False,
        )
        record.enqueued[group] = max(record.enqueued.get(group, 0), seq)
        if not retired:
            open_seqs[group] = min(open_seqs.get(group, seq), seq)
    for group, newest in record.enqueued.items():
        record.completed[group] = open_seqs[group] - 1 if group in open_seqs else newest


_MESSAGE = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d+)")


def _retired(e: dict[str, Any]) -> bool:
    return bool(e.get("retired")) or e.get("state") == "completed"


def _number(e: dict[str, Any]) -> tuple[str, bool, int]:
    """What all entries of a coalesced group share."""
    p2p = bool(e.get("is_p2p"))
    return str(e["process_group"][0]), p2p, int(e["p2p_seq_id" if p2p else "collective_seq_id"])


# faulthandler's words; Python versions differ in the hyphen of one
_FATAL: dict[str, int] = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating point exception": signal.SIGFPE,
}  # fmt: skip
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+?)\s*$')


Thread = tuple[str, list[tuple[str, int, str]]]  # heading; frames (file, line, function), innermost first


def stacks(socket_path: str, timeout_s: float = TIMEOUT_S) -> list[Thread]:
    """All Python stacks of a rank by its witness, which needs the GIL for it.

    Raises:
        OSError, http.client.HTTPException: the witness gives no answer.
    """
    return parse_stacks(ask(socket_path, "dump_traceback", timeout_s).decode("utf-8", "replace"))


def stacks_by_signal(pid: int, number: int, path: Path, timeout_s: float = 1.0) -> list[Thread]:
    """Return the same for a rank that holds the GIL: its C signal handler writes them into a file next to its page.

    Raises:
        OSError: the process or the file is gone, or the handler: the interpreter shuts down, or it was replaced by exec.
    """
    if not processes.catches(pid, number):  # without its handler the signal would end the process
        raise OSError(errno.ESRCH, "does not listen any more")
    size = path.stat().st_size
    os.kill(pid, number)
    deadline = time.monotonic() + timeout_s
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        with path.open("rb") as f:
            f.seek(size)
            more = f.read().decode("utf-8", "replace")
        if more and more == text:  # it has stopped growing
            break
        text = more
    return parse_stacks(text)


def loader_workers(pid: int, number: int) -> list[int]:
    """Children of a rank that were forked with its signal handler: the workers of its DataLoaders.

    A child without that handler would die of the signal; it is never sent one.
    """
    return [c for c in processes.children(pid, of_any_thread=True) if processes.catches(c, number)]


def in_worker(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]] | None:
    """Frames within torch's worker loop, innermost first (below it lie those of the parent at the fork); None: no worker."""
    for i, (file, _, function) in enumerate(frames):
        if function == "_worker_loop" and file.endswith(os.path.join("data", "_utils", "worker.py")):
            return frames[:i]
    return None


def parse_stacks(text: str) -> list[Thread]:
    """Threads of a traceback as faulthandler writes it."""
    out: list[Thread] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            out.append((line.strip(), []))
        elif (m := _FRAME.match(line)) and out:
            out[-1][1].append((m["file"], int(m["line"]), m["function"]))
    return out


def fatal_signal(text: str) -> int | None:
    """The signal that killed a process, by what faulthandler wrote when it came; None where it wrote nothing."""
    found = re.match(r"Fatal Python error: (.+)", text)
    return _FATAL.get(found[1].replace("-", " ")) if found else None


def main_stack(threads: list[Thread]) -> list[tuple[str, int, str]]:
    """The main thread's frames: faulthandler prints it last."""
    return threads[-1][1] if threads else []


def save(run_dir: Path, rank: int, record: FlightRecord) -> str | None:
    """Save a dump in the run directory; return its path relative to it, None if it cannot be written."""
    folder = run_dir / "flight_recorder"
    try:
        folder.mkdir(exist_ok=True)
        (folder / f"rank_{rank}.json").write_bytes(record.raw)
    except OSError:
        return None
    return f"flight_recorder/rank_{rank}.json"


def wall_offset_ns() -> int:
    """Wall clock minus monotonic clock of this host, ns."""
    return time.time_ns() - time.monotonic_ns()
