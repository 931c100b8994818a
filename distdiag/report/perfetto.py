"""A run as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

One process per rank with its steps; the phases of a step are drawn one after the other in the order of a
training loop, because what was recorded is how long each took, not when. Collectives have a process of their
own with a track per group, hosts and GPUs have counters, findings are marks over all tracks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

import msgspec

from distdiag.report.words import visible
from distdiag.store.reader import Run
from distdiag.streams import json_ascii_controls
from distdiag.terms.steps import DDP_TIMES, PHASES
from distdiag.traces import chrome
from distdiag.traces.chrome import FIRST_RANK, Event, process, span, track

FINDINGS, COLLECTIVES, HOSTS, GPUS = 1, 2, 3, 4  # process ids of what is no rank
STEPS, WAITING = 1, 2  # tracks of a rank
MAX_STEP_ROWS = 60_000  # about 400,000 events, 60 MB: what the viewer still opens at once
MAX_COLLECTIVES = 100_000

_ENCODER = msgspec.json.Encoder()


def _encode(value: Any) -> bytes:
    """Return JSON in which what a terminal may obey is an escape: the trace may go to stdout."""
    return json_ascii_controls(_ENCODER.encode(value)).encode()


def write(run: Run, out: IO[bytes], last_steps: int | None = None) -> int:
    """Write the trace of `run`, one JSON object, and return the number of events.

    `last_steps` of it, or as many as `MAX_STEP_ROWS` rows allow.
    """
    first, low_s = _window(run, last_steps)
    meta = run.meta
    head = {"run": str(run.path), "distdiag": meta.get("distdiag"), "first_step": first}
    events = chain(_findings(run), _steps(run, first), _collectives(run, low_s), _counters(run, low_s))
    return chrome.write(out, b'"otherData":' + _encode(head), events, _encode)


def _window(run: Run, last_steps: int | None) -> tuple[int, float]:
    """Return the first step to show, and the time from which everything else is shown."""
    newest, ranks = run.query("SELECT max(step), count(DISTINCT rank) FROM step")[0]
    if newest is None:
        return 0, 0.0
    most = max(1, MAX_STEP_ROWS // max(1, ranks))
    first = max(0, newest - min(last_steps or most, most) + 1)
    low = run.query(
        "SELECT min(t_end_s - step_ms / 1e3) FROM step WHERE step = (SELECT min(step) FROM step WHERE step >= ?)",
        (first,),
    )
    return first, (low[0][0] or 0.0) if low and first > 0 else 0.0


def _rows(run: Run, query: str, values: tuple[Any, ...], needed: int) -> list[Any]:
    """Return rows with a value in each of the first `needed` columns; a value of another type becomes None."""
    return [row for row in run.query(query, values) if None not in row[:needed]]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _findings(run: Run) -> Iterator[Event]:
    yield from process(FINDINGS, "findings", 0)
    for i, finding in enumerate(run.findings()):
        began = finding.first_seen_s if finding.first_seen_s is not None else finding.detected_s
        if began is None:
            continue
        name = visible(f"{finding.severity}: {finding.title}")
        args = {"message": visible(finding.message), "culprits": list(finding.culprits), "do": visible(finding.advice)}
        yield track((FINDINGS, i), finding.kind)
        yield {"ph": "i", "s": "g", "name": name, "pid": FINDINGS, "tid": i, "ts": _us(began), "args": args}
        if finding.cleared_s is not None:
            yield span((FINDINGS, i), name, "finding", _us(began), _us(finding.cleared_s - began), args)


def _steps(run: Run, first: int) -> Iterator[Event]:
    hosts = {r.rank: r.host for r in run.ranks()}
    seen: set[int] = set()
    columns = [
        *("rank", "step", "t_end_s", "step_ms", "epoch", "wait_ms", "loss"), *DDP_TIMES, *(f"{p}_ms" for p in PHASES),
    ]  # fmt: skip
    query = f"SELECT {', '.join(run.named('step', columns))} FROM step WHERE step >= ? ORDER BY step, rank"
    rows = _rows(run, query, (first,), needed=4)
    for rank, step, t_end_s, step_ms, epoch, wait_ms, loss, comm_ms, exposed_ms, *phases in rows:
        pid = FIRST_RANK + rank
        if rank not in seen:
            seen.add(rank)
            host = hosts.get(rank)
            yield from process(pid, f"rank {rank}" + (f" ({host})" if host else ""), pid)
            yield track((pid, STEPS), "steps, phases in order")
            yield track((pid, WAITING), "of it: waiting in collectives")
        at_us = _us(t_end_s) - step_ms * 1e3
        end_us = at_us + step_ms * 1e3
        args = {"step": step, "epoch": epoch, "loss": loss, "wait_ms": wait_ms}
        if comm_ms is not None:  # only of the steps that DDP timed
            args |= {"comm_ms": comm_ms, "exposed_ms": exposed_ms}
        yield span((pid, STEPS), f"step {step}", "step", at_us, step_ms * 1e3, args)
        for phase, ms in zip(PHASES, phases, strict=True):
            # rounding must not let a phase stick out of its step: the viewer would drop it
            dur_us = min((ms or 0.0) * 1e3, end_us - at_us)
            if dur_us > 0:
                yield span((pid, STEPS), phase, "phase", at_us, dur_us)
                at_us += dur_us
        if wait_ms:
            dur_us = min(wait_ms, step_ms) * 1e3
            yield span((pid, WAITING), "wait", "wait", end_us - dur_us, dur_us)


def _collectives(run: Run, low_s: float) -> Iterator[Event]:
    rows = _rows(
        run,
        "SELECT pgroup, op, t_s, seq, dtype, bytes, ranks, duration_us, skew_us, late_rank, step FROM collective"
        " WHERE t_s >= ? ORDER BY t_s DESC LIMIT ?",
        (low_s, MAX_COLLECTIVES),
        needed=3,
    )
    if not rows:
        return
    yield from process(COLLECTIVES, "collectives: first to last arrival, then on the last rank", 1)
    tracks: dict[str, int] = {}
    for pgroup, op, t_s, seq, dtype, size, ranks, duration_us, skew_us, late_rank, step in reversed(rows):
        if pgroup not in tracks:
            tracks[pgroup] = len(tracks) + 1
            yield track((COLLECTIVES, tracks[pgroup]), pgroup)
        group, skew = (COLLECTIVES, tracks[pgroup]), skew_us or 0.0
        args = {"seq": seq, "dtype": dtype, "bytes": size, "ranks": ranks, "late_rank": late_rank, "step": step}
        if skew > 0:
            yield span(group, "skew", "skew", _us(t_s), skew, args)
        if duration_us is not None:
            yield span(group, visible(op), "collective", _us(t_s) + skew, duration_us, args)


_HOST = {"CPU %": "cpu_pct", "memory GiB": "memory_used_bytes"}
_GPU = {"utilisation %": "utilization_pct", "memory GiB": "memory_used_bytes", "power W": "power_w"}


def _counters(run: Run, low_s: float) -> Iterator[Event]:
    for pid, table, key, heading, shown in (
        (HOSTS, "host", "'node ' || node", "hosts", _HOST),
        (GPUS, "gpu", "'node ' || node || ' GPU ' || gpu", "GPUs", _GPU),
    ):
        query = f"SELECT t_s, {key}, {', '.join(shown.values())} FROM {table} WHERE t_s >= ? ORDER BY t_s"
        rows = _rows(run, query, (low_s,), needed=2)
        if rows:
            yield from process(pid, heading, pid)
        for t_s, who, *values in rows:
            for name, value in zip(shown, values, strict=True):
                if value is not None:
                    scaled = value / 2**30 if "GiB" in name else value
                    counter = f"{who} {name}"
                    yield {"ph": "C", "name": counter, "pid": pid, "ts": _us(t_s), "args": {name: round(scaled, 3)}}
