"""Several nodes: each monitor writes the state of its ranks into the run directory, and node 0's monitor merges them.

Each node has a small file in `RUN/nodes`, replaced as a whole. This needs a run directory that all nodes share, but not the
job's network or its TCPStore. Without a shared directory, each node judges its own ranks.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from distdiag import files
from distdiag.diagnosis.model.snapshot import DEAD, Group, Life, RankState, Seconds, Snapshot

VERSION = 1
# between two files of a node; the latter while one of its ranks waits or has ended
PERIOD_S, WAITING_PERIOD_S = 2.0, 0.5
WAITING_S = 0.4  # from this time in a collective on, a rank waits
STALE_S = 12.0  # an older file is ignored; network file systems show files seconds late
CALLS_SENT, SAMPLES_SENT = 16, 120


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node, as its monitor sees them; times in seconds since `started_unix_s`."""

    version: int = VERSION
    node: int
    number: int  # of this file, increasing
    started_unix_s: float
    written_unix_s: float
    closed: bool = False  # the job is over: this is the last file
    local_world_size: int
    ranks: dict[int, RankState]
    groups: dict[str, Group]


class Nodes:
    """Writes this node's file and reads those of the other nodes.

    Args:
        run_dir: This node's run directory: RUN, or RUN/node_k.
        node: Number of this node.
    """

    def __init__(self, run_dir: Path, node: int) -> None:
        self.node = node
        self.run_dir = run_dir.parent if node else run_dir
        self.directory = self.run_dir / "nodes"
        self.failed: str | None = None  # why the exchange does not work
        self._number = 0
        self._written_at = -1e9
        self._seen: dict[int, NodeState] = {}
        self._mtimes: dict[str, tuple[int, int]] = {}
        self._judged: dict[int, int] = {}
        self._known: set[int] = set()  # nodes that have had a fresh file

    def several(self, s: Snapshot) -> bool:
        """True if the job has ranks on other nodes."""
        return s.expected is not None and s.expected < s.world_size

    def publish(self, s: Snapshot, started_unix_s: float, closed: bool = False) -> None:
        """Write this node's state for node 0, if it is due."""
        waiting = any(
            r.blocked is not None and r.blocked.entered_s is not None and s.t_s - r.blocked.entered_s > WAITING_S
            for r in s.ranks.values()
        )
        ended = any(r.life not in (Life.RUNNING, Life.STARTING) for r in s.ranks.values())
        now = time.monotonic()
        if now - self._written_at < (WAITING_PERIOD_S if waiting or ended else PERIOD_S) and not closed:
            return
        self._written_at = now
        self._number += 1
        state = NodeState(
            node=self.node, number=self._number, started_unix_s=started_unix_s, written_unix_s=time.time(), closed=closed,
            local_world_size=s.expected or len(s.ranks), groups=s.groups,
            ranks={rank: _sent(state) for rank, state in s.ranks.items()},
        )  # fmt: skip
        try:
            files.write(self.run_dir, f"nodes/{self.node}.state", msgspec.msgpack.encode(state))
        except OSError as e:
            self.failed = f"the state of node {self.node} could not be written to {self.directory}: {e.strerror}"

    def read(self) -> None:
        """Read the new files of other nodes."""
        try:
            entries = [e for e in os.scandir(self.directory) if e.name.endswith(".state") and not e.is_symlink()]
        except OSError:
            return
        for e in entries:
            try:
                stat = e.stat()
                mark = (stat.st_mtime_ns, stat.st_ino)
                if e.name == f"{self.node}.state" or self._mtimes.get(e.name) == mark:
                    continue
                state = msgspec.msgpack.decode(files.read(self.run_dir, f"nodes/{e.name}"), type=NodeState)
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as problem:
                self.failed = f"{e.name} of another node cannot be read: {problem}"
                continue
            self._mtimes[e.name] = mark
            if state.version == VERSION:
                self._seen[state.node] = state

    def merged(self, s: Snapshot, started_unix_s: float) -> tuple[Snapshot, bool]:
        """Return (snapshot with the ranks of all known nodes, True if every node has written a new state since the last True).

        A proof needs two polls without progress, and two polls of the same files would count as such.
        """
        self.read()
        now = time.time()
        fresh = {k: x for k, x in self._seen.items() if x.closed or now - x.written_unix_s < STALE_S}
        self._known |= fresh.keys()
        ranks, groups, expected = dict(s.ranks), dict(s.groups), s.expected or len(s.ranks)
        for x in fresh.values():
            later_s = x.started_unix_s - started_unix_s
            ranks |= {q: shifted(r, later_s) for q, r in x.ranks.items() if q not in s.ranks}
            for name, g in x.groups.items():
                groups.setdefault(name, g)
            expected += x.local_world_size
        for k in self._known - fresh.keys():
            x = self._seen[k]
            silent_s = now - x.written_unix_s
            ranks |= {q: _silent(r, silent_s) for q, r in x.ranks.items() if q not in s.ranks and r.life not in DEAD}
            expected += x.local_world_size
        news = all(x.closed or self._judged.get(k) != x.number for k, x in fresh.items())
        if news:
            self._judged = {k: x.number for k, x in fresh.items()}
        whole = msgspec.structs.replace(
            s, ranks=dict(sorted(ranks.items())), groups=groups, expected=min(expected, s.world_size)
        )
        return whole, news


def hosts(run_dir: Path) -> dict[int, str]:
    """Return the host of every rank that a node has reported into the run directory; empty if the job has one node."""
    nodes = Nodes(run_dir, 0)
    nodes.node = -1  # read all files
    nodes.read()
    return {q: r.host for state in nodes._seen.values() for q, r in state.ranks.items()}


def _sent(state: RankState) -> RankState:
    """Return a state without the older part of its histories."""
    return msgspec.structs.replace(
        state,
        calls=state.calls[-CALLS_SENT:],
        memory=state.memory[-SAMPLES_SENT:],
        device_memory=state.device_memory[-SAMPLES_SENT:],
    )


def _silent(r: RankState, silent_s: float) -> RankState:
    """Return the state of a rank whose node has stopped reporting: life SILENT, no wait."""
    return msgspec.structs.replace(r, life=Life.SILENT, blocked=None, heartbeat_age_s=silent_s, steps=(), calls=())


def shifted(state: RankState, by_s: float) -> RankState:
    """Return the same state with times counted from an origin `by_s` seconds earlier."""
    move = _mover(RankState)
    assert move is not None
    return move(state, by_s)


@cache
def _mover(kind: Any) -> Callable[[Any, float], Any] | None:
    """Return a function that adds seconds to every time in a value of this type; None if the type holds no time."""
    origin, parts = get_origin(kind), [_mover(part) for part in get_args(kind)]
    if kind == Seconds:
        return operator.add
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        fields = [(name, of_field) for name, of in hints.items() if (of_field := _mover(of)) is not None]
        return _with_fields(fields) if fields else None
    move = next((part for part in parts if part is not None), None)
    if move is None:
        return None
    if origin in (Union, UnionType):
        return lambda value, by_s: None if value is None else move(value, by_s)
    if origin is dict:
        return lambda value, by_s: {key: move(each, by_s) for key, each in value.items()}
    if get_args(kind)[-1] is Ellipsis:
        return lambda value, by_s: tuple(move(each, by_s) for each in value)
    return lambda value, by_s: tuple(f(x, by_s) if f else x for f, x in zip(parts, value, strict=True))


def _with_fields(fields: list[tuple[str, Callable[[Any, float], Any]]]) -> Callable[[Any, float], Any]:
    return lambda value, by_s: msgspec.structs.replace(
        value, **{name: move(getattr(value, name), by_s) for name, move in fields}
    )
