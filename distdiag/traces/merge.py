"""One trace for ui.perfetto.dev from the traces of several ranks: ranks as processes, on one clock, collectives joined."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from distdiag.files import replacing
from distdiag.terms.untrusted import all_encodable, visible
from distdiag.traces import chrome
from distdiag.traces.analyse import Joined, last_rank
from distdiag.traces.chrome import FIRST_RANK, Event, Track, process, span, track
from distdiag.traces.read import MAX_US, BadTrace, load

MERGED = b'"distdiag":"merged trace"'
FIRST_TRACK = 9_000_000  # thread ids of the tracks of collectives
_encode = msgspec.json.Encoder().encode


def write(
    path: Path,
    files: Mapping[int, Path],
    offsets_us: Mapping[int, float],
    names: Mapping[int, str],
    collectives: Joined,
) -> int:
    """Write the merged trace (gzipped JSON) and return the number of events; all times are on a clock that ranks share.

    By rank: its trace, as `read` has accepted it, the time 0 of it, and the name of its process.
    """
    ranks = (_of_rank(q, p, offsets_us[q], names.get(q, f"rank {q}")) for q, p in sorted(files.items()))
    events = chain(chain.from_iterable(ranks), _joins(collectives))
    with (
        replacing(path.parent, path.name) as part,
        open(part, "wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) as out,
    ):
        return chrome.write(out, MERGED, events, _encode)  # type: ignore[arg-type]


def _of_rank(rank: int, path: Path, offset_us: float, name: str) -> Iterator[Event]:
    pid = FIRST_RANK + rank
    yield from process(pid, name, rank)
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


def _joins(collectives: Joined) -> Iterator[Event]:
    """Return tracks of collectives in each rank's process, with arrows from the last rank, or the sender, to the others."""
    # by rank: when the last slice of each track ends; slices of one track must not overlap
    lanes: dict[int, list[float]] = {}
    order = sorted(collectives.items(), key=lambda item: min(c.start for c in item[1].values()))
    for nth, ((group, seq, op), of_rank) in enumerate(order):
        late, first = last_rank(of_rank), min(c.start for c in of_rank.values())
        sender = next((q for q, c in of_rank.items() if c.op.startswith("send")), None)
        category, arrow = ("collective", "last rank") if sender is None else ("message", "message")
        about = {"group": visible(group), "seq": seq if seq >= 0 else None, "late_rank": late}
        tracks: dict[int, Track] = {}
        for rank, c in sorted(of_rank.items()):
            ends = lanes.setdefault(rank, [])
            lane = next((i for i, end in enumerate(ends) if end <= c.start), len(ends))
            place = tracks[rank] = FIRST_RANK + rank, FIRST_TRACK + lane
            if lane == len(ends):
                ends.append(0.0)
                yield track(place, "collectives" + (f" ({lane + 1})" if lane else ""))
            ends[lane] = c.end
            args = about | {"bytes": c.bytes, "late_us": round(c.start - first, 1)}
            yield span(place, visible(f"{op} #{seq}" if seq >= 0 else op), category, c.start, c.end - c.start, args)
        source = late if sender is None else sender
        begin = of_rank[source].start
        for rank, place in tracks.items():
            if rank != source:
                end = max(begin, of_rank[rank].start + (of_rank[rank].end - of_rank[rank].start) * 0.999)
                for phase, (pid, tid), at in (
                    ({"ph": "s"}, tracks[source], begin),
                    ({"ph": "f", "bp": "e"}, place, end),
                ):
                    where = {"pid": pid, "tid": tid, "ts": round(at, 3)}
                    yield {"name": arrow, "cat": "join", "id": f"c{nth}.{rank}", **phase, **where}
