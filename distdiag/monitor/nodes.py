"""Several nodes: each monitor gives the state of its ranks to node 0's monitor, which merges them.

A node that sees node 0's run directory has a small file in `RUN/nodes`, replaced as a whole; that needs neither the job's network nor its
TCPStore. Any other node sends its state (`cluster`).
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import msgspec

from distdiag import files
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import DEAD, Group, Life, RankState, Snapshot
from distdiag.monitor.cluster.transport import Transport
from distdiag.monitor.evidence import dump
from distdiag.monitor.moved_times import MOST_S, Moved

VERSION = 1
# between two files of a node; the latter while one of its ranks waits or has ended
PERIOD_S, WAITING_PERIOD_S = 2.0, 0.5
WAITING_S = 0.4  # from this time in a collective on, a rank waits
STALE_S = 12.0  # an older state is ignored; network file systems show files seconds late
RETURN_S = 5.0  # nothing is judged for so long, after another monitor of node 0, until every node is heard of again
MOST_GROUPS = 4096  # of one node
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

    @property
    def mark(self) -> tuple[int, float]:
        """What two states of a node differ in."""
        return self.number, self.written_unix_s


class Nodes:
    """Sends this node's state, and receives those of the other nodes.

    Args:
        run_dir: This node's run directory: RUN, or RUN/node_k.
        node: Number of this node.
        pages: Page directory of this node; None for a reader of the files.
    """

    def __init__(self, run_dir: Path, node: int, pages: Path | None = None) -> None:
        self.node = node
        self.run_dir = run_dir.parent if node else run_dir
        self.directory = self.run_dir / "nodes"
        take_dump = partial(dump.packed, self.run_dir)
        self.transport = Transport(pages, node, take_dump) if pages is not None else None
        self._failed: str | None = None
        self._number = 0
        self._written_at = -1e9
        self._seen: dict[int, NodeState] = {}
        self._mtimes: dict[str, tuple[int, int]] = {}
        self._judged: dict[int, int] = {}
        self._known: set[int] = set()  # nodes that have had a fresh state
        self._silent: set[int] = set()
        self.events: list[str] = []  # what has changed between the nodes, for the log of the run
        self._owner: dict[int, int] = {}  # the node that reported a rank first
        self._moved = Moved()
        self._sound: dict[int, tuple[int, float]] = {}  # the newest state of each node that may be used, or may not
        self._unsound: dict[int, tuple[int, float]] = {}

    @property
    def failed(self) -> str | None:
        """Why the exchange does not work."""
        return self._failed or (self.transport.failed if self.transport is not None else None)

    @property
    def urgent(self) -> bool:
        """True if a rank on another node waits."""
        return self.transport is not None and self.transport.urgent

    def connect(self) -> None:
        """Connect to node 0, or listen, once the first rank of this node has found out that it must.

        Not called at low priority, which the threads would inherit.
        """
        if self.transport is not None and self.transport.poll():
            self._written_at = -1e9  # the state is due at once

    def several(self, s: Snapshot) -> bool:
        """True if the job has ranks on other nodes."""
        return s.expected is not None and s.expected < s.world_size

    def publish(self, s: Snapshot, started_unix_s: float, closed: bool = False, start_ns: int = 0) -> None:
        """Give this node's state to node 0, if it is due.

        Args:
            started_unix_s, start_ns: When this node's run began, by the wall clock and the monotonic one.
            closed: The job is over.
        """
        waiting = _waits(s)
        ended = any(r.life not in (Life.RUNNING, Life.STARTING) for r in s.ranks.values())
        now = time.monotonic()
        if now - self._written_at < (WAITING_PERIOD_S if waiting or ended or self.urgent else PERIOD_S) and not closed:
            return
        self._written_at = now
        self._number += 1
        state = NodeState(
            node=self.node, number=self._number, started_unix_s=started_unix_s, written_unix_s=time.time(), closed=closed,
            local_world_size=s.expected or len(s.ranks), groups=s.groups,
            ranks={rank: _sent(state) for rank, state in s.ranks.items()},
        )  # fmt: skip
        client = self.transport.client if self.transport is not None else None
        if client is not None:
            client.publish(msgspec.msgpack.encode(state), start_ns)
            return
        try:
            files.write(self.run_dir, f"nodes/{self.node}.state", msgspec.msgpack.encode(state))
        except OSError as e:
            self._failed = f"the state of node {self.node} could not be written to {self.directory}: {e.strerror}"

    def read(self) -> None:
        """Read the new files of other nodes."""
        try:
            entries = [e for e in os.scandir(self.directory) if e.name.endswith(".state") and not e.is_symlink()]
        except OSError:
            return
        for entry in entries:
            try:
                stat = entry.stat()
                mark = (stat.st_mtime_ns, stat.st_ino)
                if entry.name == f"{self.node}.state" or self._mtimes.get(entry.name) == mark:
                    continue
                state = msgspec.msgpack.decode(files.read(self.run_dir, f"nodes/{entry.name}"), type=NodeState)
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as problem:
                self._failed = f"{entry.name} of another node cannot be read: {problem}"
                continue
            self._mtimes[entry.name] = mark
            if state.version == VERSION:
                self._seen[state.node] = state

    def merged(self, s: Snapshot, started_unix_s: float, start_ns: int = 0) -> tuple[Snapshot, bool]:
        """Return (snapshot with the ranks of all known nodes, True if every node has written a new state since the last True).

        A proof needs two polls without progress, and two polls of the same files would count as such.

        Args:
            started_unix_s, start_ns: When this node's run began, by the wall clock and the monotonic one.
        """
        self.read()
        self._receive(started_unix_s, start_ns)
        now = time.time()
        seen = {
            node: state for node, state in self._seen.items()
            if self._is_sound(s, state, state.started_unix_s - started_unix_s)
        }  # fmt: skip
        fresh = {node: state for node, state in seen.items() if state.closed or now - state.written_unix_s < STALE_S}
        self._known |= fresh.keys()
        self._note_silence(self._known - fresh.keys(), now)
        ranks, groups, expected = dict(s.ranks), dict(s.groups), s.expected or len(s.ranks)
        for node, state in fresh.items():
            moved = self._moved.of(node, state.mark, state.ranks, state.started_unix_s - started_unix_s)
            ranks |= {rank: moved[rank] for rank in moved.keys() - ranks.keys()}
            groups |= {name: group for name, group in state.groups.items() if name not in groups}
            expected += state.local_world_size
        for node in sorted((self._known - fresh.keys()) & seen.keys()):
            state = seen[node]
            alive = {q: r for q, r in state.ranks.items() if q not in ranks and r.life not in DEAD}
            ranks |= {q: _silent(r, state.written_unix_s, now) for q, r in alive.items()}
            expected += state.local_world_size
        news = all(x.closed or self._judged.get(x.node) != x.number for x in fresh.values()) and not self._returns(
            fresh
        )
        if news:
            self._judged = {node: state.number for node, state in fresh.items()}
        whole = msgspec.structs.replace(
            s, ranks=dict(sorted(ranks.items())), groups=groups, expected=min(expected, s.world_size)
        )
        if self.transport is not None and self.transport.server is not None:
            self.transport.server.urgent = _waits(whole)
        return whole, news

    def _note_silence(self, silent: set[int], now: float) -> None:
        """Note which nodes are no longer heard of, and which are again."""
        for node in sorted(silent ^ self._silent):
            state = self._seen[node]
            who = f"node {node} ({rank_list(sorted(state.ranks))})"
            if node in silent:
                since = time.strftime("%H:%M:%S", time.localtime(state.written_unix_s))
                age_s = now - state.written_unix_s
                self.events.append(f"{who} not heard of since {since} ({age_s:.0f} s): its ranks are not judged")
            else:
                self.events.append(f"{who} heard of again")
        self._silent = silent

    def _receive(self, started_unix_s: float, start_ns: int) -> None:
        """Take the states that were sent, with their times by this host's clock."""
        for arrived in self.transport.arrived() if self.transport is not None else ():
            try:
                state = msgspec.msgpack.decode(arrived.data, type=NodeState)
            except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
                self._failed = f"the state that node {arrived.node} has sent cannot be read: {problem}"
                continue
            if state.version == VERSION and state.node == arrived.node:
                self._seen[arrived.node] = msgspec.structs.replace(
                    state, started_unix_s=started_unix_s + (arrived.started_ns - start_ns) / 1e9,
                    written_unix_s=time.time() - arrived.age_s,
                )  # fmt: skip

    def _is_sound(self, s: Snapshot, state: NodeState, later_s: float) -> bool:
        """True if a state holds only ranks that can be that node's, and times in range; otherwise it is not used."""
        node = state.node
        if state.mark in (self._sound.get(node), self._unsound.get(node)):
            return self._sound.get(node) == state.mark
        try:
            self._check(s, state)
            self._moved.of(node, state.mark, state.ranks, later_s)
        except ValueError as problem:
            self._failed = f"the state of node {node} is not used: {problem}"
            self._unsound[node] = state.mark
            return False
        self._sound[node] = state.mark
        return True

    def _check(self, s: Snapshot, state: NodeState) -> None:
        """Check the ranks and numbers of a state.

        Raises:
            ValueError: one of them is impossible.
        """
        size = state.local_world_size
        if state.node == self.node or len(state.ranks) > size or not 0 < size <= s.world_size:
            raise ValueError("it has more ranks than it can")
        in_range = abs(state.started_unix_s) < MOST_S and abs(state.written_unix_s) < MOST_S
        if len(state.groups) > MOST_GROUPS or not in_range:
            raise ValueError("a number in it is out of range")
        for rank, of_rank in state.ranks.items():
            possible = rank == of_rank.rank and 0 <= rank < s.world_size and rank not in s.ranks
            if not possible or self._owner.setdefault(rank, state.node) != state.node:
                raise ValueError(f"rank {rank} is not there")

    def _returns(self, fresh: dict[int, NodeState]) -> bool:
        """True if this monitor has just begun to listen and has not heard of every node: what an earlier one proved may still hold."""
        transport = self.transport
        if transport is None or transport.since_s is None or time.monotonic() - transport.since_s > RETURN_S:
            return False
        return not fresh.keys() >= set(transport.nodes)

    def close(self) -> None:
        """End the connection, if there is one."""
        if self.transport is not None:
            self.transport.close()


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


def _silent(r: RankState, heard_unix_s: float, now: float) -> RankState:
    """Return the state of a rank whose node is not heard of: life SILENT, no wait, and nothing that a proof could use."""
    return msgspec.structs.replace(
        r, life=Life.SILENT, blocked=None, queued=(), heartbeat_age_s=now - heard_unix_s, steps=(), calls=(),
        heard_at=time.strftime("%H:%M:%S", time.localtime(heard_unix_s)),
    )  # fmt: skip


def _waits(s: Snapshot) -> bool:
    """True if a rank waits in a collective."""
    return any(
        r.blocked is not None and r.blocked.entered_s is not None and s.t_s - r.blocked.entered_s > WAITING_S
        for r in s.ranks.values()
    )
