"""Get stacks and collectives in flight from every rank of this node, or of all nodes, and save them in the run directory."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from distdiag import files
from distdiag.errors import DistdiagError, ExitCode
from distdiag.files import MOST_BYTES
from distdiag.monitor.cluster.messages import Ask
from distdiag.monitor.cluster.questions import ask_each
from distdiag.monitor.evidence import ask
from distdiag.monitor.evidence.on_suspicion import waits_for_data, workers_of
from distdiag.monitor.host import processes
from distdiag.monitor.ranks.state import RankView
from distdiag.page import directories
from distdiag.page.reader import PageError
from distdiag.recorder.frames import LIBRARY, kind_of_file
from distdiag.store import stacks
from distdiag.terms.untrusted import MAX_RANKS

_Text = Annotated[str, Meta(max_length=8192)]


class RankDump(msgspec.Struct, array_like=True):
    """What one rank answered; nodes send it as it is, and the limits hold for what arrives."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    frames: Annotated[tuple[_Text, ...], Meta(max_length=1000)]  # outermost first, "function file:line"
    op: _Text | None
    note: _Text | None
    record: bytes | None  # the flight record, in JSON
    groups: dict[str, dict[str, str]]
    answered: bool = True  # else the stack is the newest sample of its pulse


def packed(run_dir: Path, timeout_s: float) -> bytes:
    """Return the dump of this node's ranks for another node.

    Raises:
        DistdiagError: NO_DATA if no rank of the run is alive here.
    """
    return msgspec.msgpack.encode(take(run_dir, timeout_s)[1])


def of_other_nodes(run_dir: Path, timeout_s: float) -> tuple[list[RankDump], list[str]]:
    """Ask the nodes that send their state to this host's monitor; return (their ranks' dumps, what is wrong with which node)."""
    found, silent = ask_each(run_dir, Ask(timeout_s=timeout_s), RankDump, MOST_BYTES)
    for d in found:
        try:
            _for_torchfrtrace(d)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # its flight record is none
            d.record = None
    return found, silent


def take(run_dir: Path, timeout_s: float = 5.0) -> tuple[float, list[RankDump]]:
    """Ask all living ranks of the run on this node at once; return (run time in seconds, answers).

    Raises:
        DistdiagError: NO_DATA if no rank of the run is alive here.
    """
    alive = living(run_dir)
    now_s = (time.monotonic_ns() - min(v.decoder.start_ns for v in alive)) / 1e9
    with ThreadPoolExecutor(min(32, len(alive))) as pool:
        return now_s, list(pool.map(lambda v: _answer(v, timeout_s), alive))


def living(run_dir: Path) -> list[RankView]:
    """Return views of the ranks of a run that are alive on this node.

    Raises:
        DistdiagError: NO_DATA if there is none.
    """
    views: list[RankView] = []
    for path in sorted(p for found in directories.of_run(run_dir).values() for d in found for p in d.glob("*.page")):
        try:
            view = RankView(path, 0)
        except (PageError, OSError):
            continue
        try:
            if not view.reader.is_mapped():  # its process gets requests and a signal
                continue
            view.decoder.start_ns = view.first_header.started_mono_ns
            view.refresh(0.0)
        except Exception:  # a damaged page; only its rank is left out
            continue
        views.append(view)
    if not views and (owner := files.owner_of_other(run_dir)) is not None:
        raise DistdiagError(
            f"the ranks of {run_dir} belong to {owner}: only that user can ask them",
            f"`distdiag diagnose {run_dir}` prints what their monitor has found",
            ExitCode.NO_DATA,
            "not_permitted",
        )
    if not views:
        raise DistdiagError(
            f"no rank of {run_dir} is alive on this node",
            f"`distdiag diagnose {run_dir}` prints what was found while it ran",
            ExitCode.NO_DATA,
            "no_rank",
        )
    return views


def merged(now_s: float, dumps: list[RankDump]) -> stacks.Stacks:
    """Return the answers as saved in the run directory."""
    found = {str(d.rank): stacks.RankStack(stack=d.frames, op=d.op, note=d.note) for d in dumps}
    return stacks.Stacks(t_s=now_s, ranks=found)


def _answer(v: RankView, timeout_s: float) -> RankDump:
    """Return the dump of one rank; without an answer if its page is damaged."""
    try:
        return _ask(v, timeout_s)
    except Exception as e:  # a damaged page; only its rank is left out
        return RankDump(v.rank, (), None, f"its page is damaged ({type(e).__name__})", None, {}, answered=False)


def _ask(v: RankView, timeout_s: float) -> RankDump:
    h = v.header
    record = None
    frames: list[tuple[str, int, str]] = []
    note = None
    path = v.text(h.witness)
    now_s = (time.monotonic_ns() - v.decoder.start_ns) / 1e9
    state_silent = (v.s(h.heartbeat_ns) or 0.0) < now_s - 1.5
    thread = processes.main_thread(h.pid)
    stopped = thread is not None and thread.state in "Tt"
    if stopped:  # it cannot answer
        note = "stopped by a signal"
    elif state_silent and h.trace_signal:
        try:
            frames = ask.main_stack(ask.stacks_by_signal(v.reader.path, h.pid, h.trace_signal, timeout_s))
            note = "GIL held"
        except OSError as e:
            note = f"no stack ({e.strerror})"
    if path and not frames and not stopped:
        try:
            frames = ask.main_stack(ask.stacks(path, timeout_s))
            record = ask.flight_record(path, timeout_s, recorders=ask.Recorders.of(v.decoder.facts))
        except (OSError, http.client.HTTPException) as e:
            note = f"did not answer within {timeout_s:g} s ({type(e).__name__})"
    answered = bool(frames)
    if not frames:
        frames = [(s.file, s.line, s.function) for s in v.decoder.stack()]
        note = note or ("no witness: the stack is from its pulse" if frames else "no stack")
    state = v.state(now_s, True, thread.state if thread is not None else None, record)
    op = ask.in_flight(state.blocked) if state.blocked is not None else None
    if answered and state.activity == "gil_held":
        note = "GIL held"
    shown = tuple(f"{name} {file}:{line}" for file, line, name in reversed(_from_user(frames)))
    if waits_for_data(v) and not stopped:
        workers = dict.fromkeys(f"{w.function} {w.file}:{w.line}" for w in workers_of(v) if w is not None)
        shown += tuple(f"in a worker of its data loader: {site}" for site in workers)
    groups = {
        name: {"name": name, "desc": group.description, "ranks": json.dumps(list(group.ranks))}
        for name, group in v.decoder.groups()
    }
    return RankDump(h.rank, shown, op, note, record.raw or None if record else None, groups, answered)


def _from_user(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the frames without distdiag's and the import system's. Library frames show what the user's line does."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    return [
        f
        for f in frames
        if not f[0].startswith("<frozen") and not (f[0].startswith(ours) and kind_of_file(f[0]) == LIBRARY)
    ]


def save(run_dir: Path, now_s: float, dumps: list[RankDump]) -> list[Path]:
    """Write `stacks/latest.json`, and per rank the flight record as JSON and as a pickle for `torchfrtrace`.

    Raises:
        OSError: the run directory cannot be written.
    """
    written = [stacks.write(run_dir, merged(now_s, dumps))]
    trace = "flight_recorder/torchfrtrace"
    for old in files.names(run_dir, trace):  # of an earlier dump: torchfrtrace reads all files there
        if old.startswith("rank_"):
            files.remove(run_dir, f"{trace}/{old}")
    for d in dumps:
        if d.record is None:
            continue
        written.append(files.write(run_dir, f"flight_recorder/rank_{d.rank}.json", d.record))
        written.append(files.write(run_dir, f"{trace}/rank_{d.rank}", pickle.dumps(_for_torchfrtrace(d))))
    return written


def _for_torchfrtrace(d: RankDump) -> dict:
    """Return the flight record with what torchfrtrace needs and gloo's JSON lacks: members of groups, frames, final states."""
    data = json.loads(d.record or b"")
    data["pg_config"] = d.groups
    for e in data["entries"]:
        e.setdefault("frames", [])
        e["state"] = "completed" if e.get("retired") else e.get("state", "scheduled")
        e["process_group"] = tuple(e["process_group"])
        e["thread_id"] = str(e.get("thread_id", ""))
    return data
