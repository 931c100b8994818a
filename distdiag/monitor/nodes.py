"""Several nodes: each monitor gives the state of its ranks to node 0's monitor, which merges them.

A node that sees node 0's run directory has a small file in `RUN/nodes`, replaced as a whole; that needs
neither the job's network nor its TCPStore. Any other node sends its state (`cluster`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from distdiag import files
from distdiag.diagnosis.model.findings import Finding, Severity, at_least, rank_list
from distdiag.diagnosis.model.snapshot import DEAD, Life, RankState, Snapshot
from distdiag.diagnosis.step_times import self_ms
from distdiag.monitor.cluster.messages import Ask, unpack
from distdiag.monitor.cluster.transport import Transport
from distdiag.monitor.evidence import dump, profile_of_nodes
from distdiag.monitor.node_states import (
    MOST_FAULTS,
    MOST_GROUPS,
    MOST_S,
    UNREADABLE,
    VERSION,
    Faults,
    Heard,
    Incomplete,
    NodeState,
    Readings,
    Sender,
)
from distdiag.monitor.windows import Windows

# Between two states of a node: sent, at each full poll, in place of a report without one; left as files; the last while one of
# its ranks waits or has ended.
PERIOD_S, FILE_PERIOD_S, WAITING_PERIOD_S = 0.9, 2.0, 0.5
WAITING_S = 0.4  # from this time in a collective on, a rank waits
# An older state is ignored: on a busy host a calm monitor polls every eight seconds, and network file systems show files late.
STALE_S = 12.0
SILENT_S = 4.0  # without a report over a connection, on which each node sends one a second: three or four are missing
# Polls are not stretched if one rank has worked longer than any other in each of so many steps, by so many ms and by this share.
LATELY, DIFFERS_MS, DIFFERS = 3, 3.0, 0.05
RETURN_S = 5.0  # nothing is judged for so long, after another monitor of node 0, until every node is heard of again


class StateFiles:
    """The states in `RUN/nodes`, one file of each node that sees it; `own`, this node's, is not read."""

    def __init__(self, run_dir: Path, own: int | None = None) -> None:
        self.run_dir, self.own = run_dir, own
        self.failed: str | None = None
        self._mtimes: dict[str, tuple[int, int]] = {}

    def write(self, state: bytes) -> None:
        try:
            files.write(self.run_dir, f"nodes/{self.own}.state", state)
        except OSError as e:
            self.failed = f"the state of node {self.own} could not be written to {self.run_dir}/nodes: {e.strerror}"

    def new(self) -> Iterator[NodeState]:
        try:
            with files.entered(self.run_dir, "nodes") as directory, os.scandir(directory) as entries:
                for e in entries:
                    if e.name.endswith(".state") and e.name != f"{self.own}.state":
                        state = self._new_file(directory, e)
                        if state is not None and state.version == VERSION:
                            yield state
        except OSError:
            return

    def _new_file(self, directory: int, e: os.DirEntry[str]) -> NodeState | None:
        """Return the state in a file, None if it is not new or cannot be read."""
        try:
            stat = e.stat(follow_symlinks=False)
            mark = (stat.st_mtime_ns, stat.st_ino)
            if self._mtimes.get(e.name) == mark or e.is_symlink():
                return None
            state = msgspec.msgpack.decode(files.read_in(directory, e.name), type=NodeState)
        except (OSError, *UNREADABLE) as problem:
            self.failed = f"{e.name} of another node cannot be read: {problem}"
            return None
        self._mtimes[e.name] = mark
        return state


class Nodes:
    """Gives this node's state away, and takes those of the other nodes.

    Args:
        run_dir: This node's run directory: RUN, or RUN/node_k.
        port: Of node 0, for nodes that do not see its run directory; 0: any.
    """

    def __init__(self, run_dir: Path, node: int, pages: Path, port: int = 0) -> None:
        self.node = node
        self.run_dir = run_dir.parent if node else run_dir
        self.files = StateFiles(self.run_dir, node)
        self.transport = Transport(pages, node, partial(_answer, self.run_dir), port)
        self._failed: str | None = None
        self._number = 0
        self._written_at = -1e9
        self._seen: dict[int, Heard] = {}
        # by the monotonic clock: when each node's newest state was made, and when files were read
        self._made_s: dict[int, float] = {}
        self._read_s = -1e9
        self._judged: dict[int, int] = {}
        self._known: set[int] = set()  # nodes that have had a fresh state
        self._silent: set[int] = set()
        self.events: list[str] = []  # what has changed between the nodes, for the log of the run
        self._owner: dict[int, int] = {}  # the node that reported a rank first
        self._readings, self._sender = Readings(), Sender()
        self._faults: Faults = ()
        self._works_ms = (0.0, 0.0)  # of this node's ranks
        self.windows = Windows()  # of all ranks of the job

    @property
    def failed(self) -> str | None:
        return self._failed or self.files.failed or self.transport.failed

    def connect(self) -> None:
        """Connect to node 0, or listen, once the first rank of this node has found out that it must.

        Not called at low priority, which the threads would inherit.
        """
        if self.transport.poll():
            self._written_at = -1e9  # the state is due at once

    def note(self, faults: list[Finding]) -> None:
        """Take note of what this node's monitor could not do: its disk may be full, and then only node 0 can show that."""
        texts = [(f.cause or "", f.message[:1000]) for f in faults if at_least(f.severity, Severity.WARNING)]
        self._faults = tuple(texts[-MOST_FAULTS:])

    @property
    def faults(self) -> Iterator[tuple[int, str, str]]:
        """What the monitors of other nodes could not do: (node, cause, text)."""
        return ((k, *fault) for k, x in sorted(self._seen.items()) for fault in x.faults)

    def several(self, s: Snapshot) -> bool:
        return s.expected is not None and s.expected < s.world_size

    def publish(self, s: Snapshot, started_unix_s: float, closed: bool = False, start_ns: int = 0) -> None:
        """Give this node's state to node 0, if it is due; `started_unix_s` and `start_ns` are when this node's run began."""
        waiting, client = _waits(s.ranks, s.t_s), self.transport.client
        usual_s = FILE_PERIOD_S if client is None else PERIOD_S
        ended = any(r.life not in (Life.RUNNING, Life.STARTING) for r in s.ranks.values())
        now = time.monotonic()
        if (
            now - self._written_at < (WAITING_PERIOD_S if waiting or ended or self.transport.urgent else usual_s)
            and not closed
        ):
            return
        self._written_at = now
        self._number += 1
        state = NodeState(
            node=self.node, started_unix_s=started_unix_s, written_unix_s=time.time(), closed=closed,
            local_world_size=s.expected or len(s.ranks), faults=self._faults,
            **self._sender.parts(self._number, s.ranks, s.groups, self.windows, client.known if client else 0),
        )  # fmt: skip
        if client is not None:
            client.publish(msgspec.msgpack.encode(state), start_ns, _works_ms(s))
        else:
            self.files.write(msgspec.msgpack.encode(state))

    def merged(self, s: Snapshot, started_unix_s: float, start_ns: int = 0) -> tuple[Snapshot, bool]:
        """Return (snapshot with the ranks of all known nodes, True if it can be judged).

        A proof needs two polls without progress, and two polls of the same files would count as such: so a snapshot is partial unless
        every node has given a new state since the last that was not. While no rank waits, its steps can be judged.
        """
        for state, age_s in chain(self._left(), self._sent(started_unix_s, start_ns)):
            self._take(s, state, state.started_unix_s - started_unix_s, age_s)
        seen, silent_s = self._seen, self._silent_s()
        fresh = {k: x for k, x in seen.items() if k not in silent_s}
        self._known |= fresh.keys()
        self._note_silence({k: x for k, x in silent_s.items() if k in self._known})
        ranks, groups, expected = dict(s.ranks), dict(s.groups), s.expected or len(s.ranks)
        for x in fresh.values():
            ranks |= {q: r for q, r in x.ranks.items() if q not in ranks}
            for name, g in x.groups.items():
                groups.setdefault(name, g)
            expected += x.local_world_size
        for k in sorted(self._silent):
            x = seen[k]
            ranks |= {q: _silent(r, silent_s[k]) for q, r in x.ranks.items() if q not in ranks and r.life not in DEAD}
            expected += x.local_world_size
        partial = not all(x.closed or self._judged.get(k) != x.number for k, x in fresh.items())
        whole = msgspec.structs.replace(
            s, ranks=dict(sorted(ranks.items())), groups=groups, expected=min(expected, s.world_size), partial=partial
        )
        waits = _waits(s.ranks, s.t_s) or any(x.waits for x in fresh.values())
        if self.transport.server is not None:
            self.transport.server.urgent, self._works_ms = waits, _works_ms(s)
        if self._returns(fresh):
            return whole, False
        if not partial:
            self._judged = {k: x.number for k, x in fresh.items()}
        return whole, not (partial and waits)

    def differs(self) -> bool:
        """True if one rank works longer than any other, by what has arrived so far: that must be judged soon."""
        server = self.transport.server
        found = sorted([self._works_ms] if server is None else [self._works_ms, *server.works_ms()])
        if len(found) < 2 or not found[0][0]:
            return False
        longest_ms, next_ms = found[-1]
        return longest_ms - max(next_ms, found[-2][0]) > max(DIFFERS_MS, DIFFERS * longest_ms)

    def fell_silent(self) -> bool:
        """True if a node is no longer heard of, and was at the last `merged`."""
        return not self._silent >= self._silent_s().keys() & self._known

    def _silent_s(self) -> dict[int, float]:
        """Return for how many seconds nodes have not been heard of, if that is too long for their states to be used.

        The wall clock plays no part: it may be set while a job runs.
        """
        now_s, server = time.monotonic(), self.transport.server
        links = server.silent_s() if server is not None else {}
        found = {}
        for k, x in self._seen.items():
            age_s, silent_s = now_s - self._made_s[k], links.get(k, 0.0)
            if not x.closed and (silent_s >= SILENT_S or age_s >= STALE_S):
                found[k] = silent_s if silent_s >= SILENT_S else age_s
        return found

    def _note_silence(self, silent: dict[int, float]) -> None:
        """Note which nodes are no longer heard of, and which are again."""
        for k in sorted(silent.keys() ^ self._silent):
            x = self._seen[k]
            who = f"node {k} ({rank_list(sorted(x.ranks))})"
            if k in silent:
                self.events.append(
                    f"{who} not heard of since {_clock(silent[k])} ({silent[k]:.0f} s): its ranks are not judged"
                )
            else:
                self.events.append(f"{who} heard of again")
        self._silent = set(silent)

    def _left(self) -> Iterator[tuple[NodeState, float]]:
        """Yield (state, seconds since it was made) of the files that have changed since the last call."""
        before_s, self._read_s = self._read_s, time.monotonic()
        for state in self.files.new():
            yield state, min(max(0.0, time.time() - state.written_unix_s), self._read_s - before_s)

    def _sent(self, started_unix_s: float, start_ns: int) -> Iterator[tuple[NodeState, float]]:
        """Yield (state, seconds since it arrived) of those that were sent, with their times by this host's clock."""
        server = self.transport.server
        for a in server.take() if server is not None else ():
            try:
                state = msgspec.msgpack.decode(unpack(a.packed), type=NodeState)
            except UNREADABLE as problem:
                self._failed = f"the state that node {a.node} has sent cannot be read: {problem}"
                continue
            if state.version == VERSION and state.node == a.node:
                started_unix_s_here = started_unix_s + (a.started_ns - start_ns) / 1e9
                yield msgspec.structs.replace(state, started_unix_s=started_unix_s_here), a.age_s

    def _take(self, s: Snapshot, x: NodeState, later_s: float, age_s: float) -> None:
        """Use a state if it holds only ranks that can be that node's, and times that are times."""
        try:
            if x.node == self.node or len(x.ranks) > x.local_world_size or not 0 < x.local_world_size <= s.world_size:
                raise ValueError("it has more ranks than it can")
            if len(x.groups) > MOST_GROUPS or not abs(x.started_unix_s) < MOST_S or not abs(x.written_unix_s) < MOST_S:
                raise ValueError("a number in it is out of range")
            for q, r in x.ranks.items():
                if q != r.rank or not 0 <= q < s.world_size:
                    raise ValueError(f"rank {q} is not there")
                owner = self.node if q in s.ranks else self._owner.get(q, x.node)
                if owner != x.node:  # which of them has it is not known here: its node must be looked at
                    raise ValueError(f"node {owner} reports rank {q}, too")
            if not x.windows.keys() <= x.ranks.keys():
                raise ValueError("what is shown of a rank is of another node's")
            heard = self._readings.heard(x, later_s)
            # as it was then: each short wait in it would be a long one by now
            self._seen[x.node] = dataclasses.replace(heard, waits=_waits(heard.ranks, s.t_s - age_s))
            self._made_s[x.node] = time.monotonic() - age_s
            self._owner |= dict.fromkeys(x.ranks, x.node)
            self.windows.take(x.windows)
            read = x.number
        except Incomplete:
            read = 0
        except UNREADABLE as problem:
            self._failed = f"the state of node {x.node} is not used: {problem}"
            return
        if self.transport.server is not None:
            self.transport.server.knows(x.node, read, tuple(x.ranks))

    def _returns(self, fresh: dict[int, Heard]) -> bool:
        """True while a new monitor has not heard of every node: what an earlier one proved may still hold."""
        t = self.transport
        if t.since_s is None or time.monotonic() - t.since_s > RETURN_S:
            return False
        return not fresh.keys() >= set(t.nodes)


def _answer(run_dir: Path, question: Ask) -> bytes:
    """Return what this node's ranks answer to a reader on node 0.

    Raises:
        DistdiagError: no rank is alive, or a profile is being taken.
    """
    if question.profile is not None:
        return profile_of_nodes.packed(run_dir, question.profile)
    return dump.packed(run_dir, question.timeout_s)


def hosts(run_dir: Path) -> dict[int, str]:
    """Return the host of every rank that a node has reported into the run directory; empty if the job has one node."""
    return {q: r.host for state in StateFiles(run_dir).new() for q, r in state.ranks.items()}


def _silent(r: RankState, silent_s: float) -> RankState:
    """Return the state of a rank whose node is silent: no wait, and nothing that a proof could use."""
    return msgspec.structs.replace(
        r, life=Life.SILENT, blocked=None, queued=(), heartbeat_age_s=silent_s, steps=(), calls=(),
        heard_at=_clock(silent_s),
    )  # fmt: skip


def _works_ms(s: Snapshot) -> tuple[float, float]:
    """Return how long the slowest rank has worked in each of its newest steps at least, and the next one."""
    newest = [r.steps[-LATELY:] for r in s.ranks.values()]
    ordered = sorted([min(map(self_ms, steps)) for steps in newest if len(steps) == LATELY], reverse=True)
    return (ordered[0], ordered[1] if len(ordered) > 1 else 0.0) if ordered else (0.0, 0.0)


def _clock(ago_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))


def _waits(ranks: dict[int, RankState], t_s: float) -> bool:
    """True if one of these ranks has waited in a collective for long, at this time."""
    waits = (r.blocked for r in ranks.values() if r.blocked is not None)
    return any(b.entered_s is not None and t_s - b.entered_s > WAITING_S for b in waits)
