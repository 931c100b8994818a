"""Chrome trace events, for ui.perfetto.dev and chrome://tracing: times in µs, names of the job made visible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from distdiag.terms.untrusted import visible

Event = dict[str, Any]
Track = tuple[int, int]  # process id, thread id
FIRST_RANK = 100  # process ids of ranks follow from here


def write(out: IO[bytes], head: bytes, events: Iterable[Event], encode: Callable[[Any], bytes]) -> int:
    """Write a trace and return the number of its events; `head` is its first member, encoded."""
    out.write(b"{" + head + b',"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for event in events:
        out.write((b",\n" if count else b"") + encode(event))
        count += 1
    out.write(b"\n]}\n")
    return count


def process(pid: int, name: str, order: int) -> Iterator[Event]:
    """Yield the name and the place of a process."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": visible(name)}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}}


def track(of: Track, name: str) -> Event:
    """Return the name of a track."""
    return {"ph": "M", "name": "thread_name", "pid": of[0], "tid": of[1], "args": {"name": visible(name)}}


def span(of: Track, name: str, category: str, ts_us: float, dur_us: float, args: Event | None = None) -> Event:
    """Return an event that lasts, on one track."""
    event = {"ph": "X", "name": name, "cat": category, "pid": of[0], "tid": of[1]}
    event |= {"ts": round(ts_us, 3), "dur": round(dur_us, 3)}
    return event if args is None else event | {"args": args}
