"""One trace for ui.perfetto.dev from the traces of several ranks: ranks as processes, on one clock, collectives joined."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from distdiag.files import replacing
from distdiag.terms.untrusted import all_encodable, visible
from distdiag.traces.analyse import Key
from distdiag.traces.read import MAX_US, BadTrace, Comm, load

MERGED = b'"distdiag":"merged trace"'
FIRST_RANK = 100  # process ids of ranks, as in the trace of a whole run
FIRST_TRACK = 9_000_000  # thread ids of the tracks of collectives
_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


def write(
    path: Path,
    files: Mapping[int, Path],
    offsets_us: Mapping[int, float],
    names: Mapping[int, str],
    collectives: Mapping[Key, Mapping[int, Comm]],
) -> int:
    """Write the merged trace (gzipped JSON) and return the number of events.

    Args:
        files: By rank: its trace, as `read` has accepted it.
        offsets_us: By rank: time 0 of its trace on a clock that all ranks share.
        names: By rank: the name of its process.

    Raises:
        OSError: a file cannot be read, or the trace not written.
    """
    with (
        replacing(path.parent, path.name) as part,
        open(part, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) as out,
    ):
        return _write(out, files, offsets_us, names, collectives)


def _write(
    out: gzip.GzipFile,
    files: Mapping[int, Path],
    offsets_us: Mapping[int, float],
    names: Mapping[int, str],
    collectives: Mapping[Key, Mapping[int, Comm]],
) -> int:
    out.write(b"{" + MERGED + b',"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for rank, path in sorted(files.items()):
        for event in _of_rank(rank, path, offsets_us[rank], names.get(rank, f"rank {rank}")):
            out.write((b",\n" if count else b"") + _encode(event))
            count += 1
    for event in _joins(offsets_us, collectives):
        out.write((b",\n" if count else b"") + _encode(event))
        count += 1
    out.write(b"\n]}\n")
    return count


def _of_rank(rank: int, path: Path, offset_us: float, name: str) -> Iterator[Event]:
    pid = FIRST_RANK + rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": visible(name)}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank}}
    try:
        events = msgspec.json.decode(load(path)).get("traceEvents")
    except (msgspec.DecodeError, BadTrace, RecursionError, AttributeError):
        return
    for e in events if isinstance(events, list) else ():
        if not isinstance(e, dict) or type(e.get("ts")) not in (int, float) or not -MAX_US < e["ts"] < MAX_US:
            continue
        if e.get("name") in ("process_name", "process_labels", "process_sort_index") or not isinstance(
            e.get("pid"), int
        ):
            continue
        e["ts"] = round(e["ts"] + offset_us, 3)
        e["pid"] = pid
        if "id" in e:  # of flow arrows: unique in one rank only
            e["id"] = f"{rank}.{e['id']}"
        yield all_encodable(e)


def _joins(offsets_us: Mapping[int, float], collectives: Mapping[Key, Mapping[int, Comm]]) -> Iterator[Event]:
    """Return tracks of collectives in each rank's process, with arrows from the last rank, or the sender, to the others."""
    lanes: dict[
        int, list[float]
    ] = {}  # by rank: when the last slice of each track ends; slices of one track must not overlap
    order = sorted(collectives.items(), key=lambda item: min(c.start + offsets_us[q] for q, c in item[1].items()))
    for nth, ((group, seq, op), of_rank) in enumerate(order):
        starts = {q: c.start + offsets_us[q] for q, c in of_rank.items()}
        late = max(starts, key=lambda q: starts[q])
        title = visible(f"{op} #{seq}" if seq >= 0 else op)
        sender = next((q for q, c in of_rank.items() if c.op.startswith("send")), None)
        source = late if sender is None else sender
        place = {}
        for rank, c in sorted(of_rank.items()):
            pid, at, span = FIRST_RANK + rank, starts[rank], c.end - c.start
            ends = lanes.setdefault(rank, [])
            lane = next((i for i, end in enumerate(ends) if end <= at), len(ends))
            if lane == len(ends):
                ends.append(0.0)
                name = {"name": "collectives" + (f" ({lane + 1})" if lane else "")}
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": FIRST_TRACK + lane, "args": name}
            ends[lane] = at + span
            place[rank] = pid, FIRST_TRACK + lane, at, span
            yield {
                "ph": "X",
                "name": title,
                "cat": "collective" if sender is None else "message",
                "pid": pid,
                "tid": FIRST_TRACK + lane,
                "ts": round(at, 3),
                "dur": round(span, 3),
                "args": {
                    "group": visible(group),
                    "seq": seq if seq >= 0 else None,
                    "bytes": c.bytes,
                    "late_rank": late,
                    "late_us": round(at - min(starts.values()), 1),
                },
            }
        for rank, (pid, tid, at, span) in place.items():
            if rank != source:
                name = "last rank" if sender is None else "message"
                arrow = {"name": name, "cat": "join", "id": f"c{nth}.{rank}"}
                yield {
                    **arrow,
                    "ph": "s",
                    "pid": place[source][0],
                    "tid": place[source][1],
                    "ts": round(starts[source], 3),
                }
                end = max(starts[source], at + span * 0.999)
                yield {**arrow, "ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": round(end, 3)}
