"""Ask a rank's witness for its flight record and its stacks. Done only on suspicion."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distdiag import files
from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.diagnosis.waits.compatible import op_name
from distdiag.monitor.evidence import signals
from distdiag.recorder.frames import USER, kind_of_file
from distdiag.sources.dumps.pickles import BadDump, load_pickle
from distdiag.terms.units import SCALAR_TYPES
from distdiag.worker_server import MOST_BYTES, TIMEOUT_S, ask

MOST_STACKS = 200  # entries for which a rank may be asked for stacks: it needs its GIL for them


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
    retired: bool | None  # None: not known
    site: Site | None = None  # the user's line that issued it, from the recorder's stack; only if C++ issued it


@dataclass(slots=True)
class FlightRecord:
    """What a rank's flight recorder holds, by (group name, seq)."""

    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)  # newest seq up to which all are complete
    # (group name, send or recv, peer's rank in the group) -> number of incomplete messages
    open_messages: dict[tuple[str, str, int], int] = field(default_factory=dict)
    # groups of which all incomplete operations are here, and nothing else
    hooked: set[str] = field(default_factory=set)
    raw: bytes = b""


NCCL = ("nccl",)  # what a rank has that notes nothing


@dataclass(frozen=True, slots=True)
class Recorders:
    """Flight recorders of a rank, apart from gloo's."""

    own: tuple[str, ...] = NCCL  # recorders that have handlers of their own
    hooked: tuple[tuple[str, bool], ...] = ()  # backends that torch's hook records; True: they report completion

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Recorders:
        """Return what a rank has noted in its page, which may be damaged."""
        own, hooked = facts.get("own_recorders"), facts.get("hooked_recorders")
        return cls(
            tuple(n for n in own if isinstance(n, str) and _NAME.fullmatch(n)) if isinstance(own, list) else NCCL,
            tuple((n, c is True) for n, c in hooked.items() if _NAME.fullmatch(n)) if isinstance(hooked, dict) else (),
        )


_NAME = re.compile(r"[\w.-]{1,40}", re.ASCII)


def flight_record(
    socket_path: str,
    timeout_s: float = TIMEOUT_S,
    known: Collection[tuple[str, int]] = (),
    recorders: Recorders = Recorders(),
) -> FlightRecord | None:
    """Return the rank's flight recorders, merged; None if the witness does not answer.

    Args:
        known: (group name, seq) of collectives whose line is known. For each other collective that is the oldest open one
            of its group, the recorder is asked for the stack, if it gives stacks without the GIL.
        recorders: Those to ask in addition to gloo's.
    """
    handlers = [
        ("fr_trace_json", True),
        *((f"dump_{name}_trace_json", True) for name in recorders.own),
        *((f"fr_trace_json?backend={name}", completes) for name, completes in recorders.hooked),
    ]
    record: FlightRecord | None = None
    for handler, completes in handlers:
        try:
            raw = ask(socket_path, handler, timeout_s)
            data = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError):
            continue
        record = record or FlightRecord()
        if "backend=" in handler and completes:  # torch leaves out the entries that are complete
            record.hooked |= set(data.get("pg_config") or {})
        if data.get("entries"):
            record.raw = raw
            parse(data, record, completes=completes)
            if handler.startswith("dump_"):
                pickle = handler.removesuffix("_json") + "_pickle?includestacktraces=true&onlyactive=true"
                _add_sites(socket_path, pickle, timeout_s, data["entries"], record, known)
    return record


def _add_sites(
    socket_path: str,
    handler: str,
    timeout_s: float,
    entries: list[dict[str, Any]],
    record: FlightRecord,
    known: Collection[tuple[str, int]],
) -> None:
    """Add the lines at which C++ issued the oldest open collectives. The recorder's pickle has stacks, its JSON has not."""
    oldest = {(group, done + 1) for group, done in record.completed.items() if done < record.enqueued[group]}
    wanted = {key for key in oldest.difference(known) if key in record.entries}
    active = sum(not _retired(e) for e in entries)
    if not wanted or active > MOST_STACKS:
        return
    try:
        raw = ask(socket_path, handler, timeout_s)
        for e in load_pickle(raw)["entries"]:
            key = str(e["process_group"][0]), int(e["collective_seq_id"])
            if key in wanted and not e.get("is_p2p"):
                frames = ((str(f["filename"]), int(f["line"]), str(f["name"])) for f in e.get("frames") or ())
                site = next((Site(*f) for f in frames if kind_of_file(f[0]) == USER), None)
                record.entries[key].site = record.entries[key].site or site
    except (OSError, http.client.HTTPException, BadDump, LookupError, TypeError, ValueError, AttributeError):
        return  # no such handler, or an unknown answer: the line stays unknown


def parse(data: dict[str, Any], record: FlightRecord, completes: bool = True) -> None:
    """Add the entries of one dump to `record`.

    Args:
        completes: False if the backend does not report when an operation is complete. Then its entries are retired as soon as
            they are issued, or never, and neither shows whether they are complete.
    """
    open_seqs: dict[str, int] = {}
    seen: set[str] = set()
    entries = data.get("entries", ())
    # NCCL writes one entry for each operation of a coalesced group, whose state never changes, and one for the whole
    # group, which has the real state.
    batches = {
        key: _retired(e) for e in entries if "coalesced" in str(e["profiling_name"]).lower() and (key := _number(e))
    }
    for e in entries:
        group = str(e["process_group"][0])
        op = str(e["profiling_name"]).split(":", 1)[-1]
        retired = batches.get(_number(e), _retired(e))
        if e.get("is_p2p"):
            ends = _MESSAGE.match(op)
            if ends and not retired and completes:
                kind = (group, ends["op"], int(ends["peer"]))
                record.open_messages[kind] = record.open_messages.get(kind, 0) + 1
            continue
        seq = int(e["collective_seq_id"])
        sizes, dtypes = e.get("input_sizes") or [], e.get("input_dtypes") or []
        shape = tuple(sizes[0]) if len(sizes) == 1 else None
        dtype, item_bytes = SCALAR_TYPES.get(dtypes[0], (dtypes[0], 0)) if dtypes else (None, 0)
        if len(sizes) == 1:
            op = op.removesuffix("_coalesced")  # of one tensor: the same as the plain operation
        record.entries[(group, seq)] = Entry(
            group,
            seq,
            op_name(op),
            shape,
            dtype,
            sum(map(math.prod, sizes)) * item_bytes if item_bytes and sizes else None,
            int(e.get("time_created_ns", 0)),
            retired if completes else None,
        )
        record.enqueued[group] = max(record.enqueued.get(group, 0), seq)
        seen.add(group)
        if not retired:
            open_seqs[group] = min(open_seqs.get(group, seq), seq)
    for group in seen if completes else ():
        record.completed[group] = open_seqs[group] - 1 if group in open_seqs else record.enqueued[group]


_MESSAGE = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d+)")


def _retired(e: dict[str, Any]) -> bool:
    return bool(e.get("retired")) or e.get("state") == "completed"


def _number(e: dict[str, Any]) -> tuple[str, bool, int]:
    """Return (group, message or not, number), which all entries of a coalesced group share."""
    p2p = bool(e.get("is_p2p"))
    return str(e["process_group"][0]), p2p, int(e["p2p_seq_id" if p2p else "collective_seq_id"])


# as faulthandler names them; one has a hyphen in some versions of Python
_FATAL: dict[str, int] = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating point exception": signal.SIGFPE,
}  # fmt: skip
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+?)\s*$')


Thread = tuple[str, list[tuple[str, int, str]]]  # heading; frames (file, line, function), innermost first


def stacks(socket_path: str, timeout_s: float = TIMEOUT_S) -> list[Thread]:
    """Return all Python stacks of a rank from its witness, which needs the GIL for them.

    Raises:
        OSError, http.client.HTTPException: the witness does not answer.
    """
    return parse_stacks(ask(socket_path, "dump_traceback", timeout_s).decode("utf-8", "replace"))


def stacks_by_signal(
    page: Path, pid: int, number: int, timeout_s: float = 1.0, worker: int | None = None
) -> list[Thread]:
    """Return all Python stacks of a rank that holds the GIL: its C signal handler writes them into a file next to its page.

    Raises:
        OSError: process, file or handler no longer exists (interpreter shutdown, exec), or it is not this page's.
    """
    rank = int(page.stem.rpartition("_")[2])
    with open(files.open_to_read(page.parent, f"r{rank}.trace"), "rb") as file:
        size, text = file.seek(0, os.SEEK_END), ""
        signals.send(pid, number, page, worker)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(0.02)
            file.seek(size)
            more = file.read(MOST_BYTES).decode("utf-8", "replace")
            if more and more == text:  # it has stopped growing
                break
            text = more
    return parse_stacks(text)


def in_worker(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]] | None:
    """Return the frames inside torch's worker loop, innermost first; None if this is no worker.

    The frames outside of it are the parent's, from the fork.
    """
    for i, (file, _, function) in enumerate(frames):
        if function == "_worker_loop" and file.endswith(os.path.join("data", "_utils", "worker.py")):
            return frames[:i]
    return None


def parse_stacks(text: str) -> list[Thread]:
    out: list[Thread] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            out.append((line.strip(), []))
        elif (m := _FRAME.match(line)) and out:
            # of `./train.py`; the recorder writes normal paths, too
            out[-1][1].append((os.path.normpath(m["file"]), int(m["line"]), m["function"]))
    return out


def fatal_signal(text: str) -> int | None:
    """Return the signal that killed a process, from faulthandler's text; None if there is none."""
    found = re.match(r"Fatal Python error: (.+)", text)
    return _FATAL.get(found[1].replace("-", " ")) if found else None


def main_stack(threads: list[Thread]) -> list[tuple[str, int, str]]:
    """Return the main thread's frames; faulthandler prints them last."""
    return threads[-1][1] if threads else []


def in_flight(call: Call) -> str:
    """Return what a rank waits in, as saved with its stack: `all_reduce #417 default_pg`; a message has no number."""
    number = f" #{call.seq}" if call.seq is not None else ""
    return f"{call.op or 'collective'}{number} {call.group}"


def save(run_dir: Path, rank: int, record: FlightRecord) -> str | None:
    """Save a dump in the run directory; return its path relative to it, None if it cannot be written."""
    name = f"flight_recorder/rank_{rank}.json"
    try:
        files.write(run_dir, name, record.raw)
    except OSError:
        return None
    return name


def wall_offset_ns() -> int:
    """Return wall clock minus monotonic clock of this host, in ns."""
    return time.time_ns() - time.monotonic_ns()
