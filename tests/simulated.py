"""A job of N simulated ranks: pages as real ranks write them on node 0, states as real monitors publish them for the other nodes.

Node 0's monitor is the real one, in this process; its ranks are sleeping processes without torch, whose pages this process writes.
The other nodes have no process: their states are those of a rank of node 0, read from its page by the monitor's own code, with
other numbers. They are published by `Nodes`: as files, or as packed messages that node 0's monitor finds as if they had just arrived.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import psutil

from distdiag import procfs
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import RankState, Snapshot
from distdiag.monitor.__main__ import COLLECT
from distdiag.monitor.cluster import keys, messages
from distdiag.monitor.cluster.client import ALIVE_S, Client
from distdiag.monitor.cluster.server import Arrived, Server
from distdiag.monitor.loop import Monitor
from distdiag.monitor.node_states import HISTORIES, NodeState, Sender
from distdiag.monitor.nodes import PERIOD_S, WAITING_PERIOD_S, WAITING_S, Nodes, _works_ms
from distdiag.monitor.pace import TICK_S
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.windows import Windows
from distdiag.page import directories, node_files
from distdiag.page.layout import Blocked, LifeWord, Phase, page_path
from distdiag.page.node_files import Own, Peers
from distdiag.page.writer import PageWriter
from distdiag.terms.ranks import fold_ranks
from tests.jobs import REPOSITORY, rows, wait_for

SCRIPT = "/job/train.py"


class Inbox:
    """Stands for node 0's server: what it has received, and when. Encryption and its thread are not simulated."""

    urgent = False
    failed = None
    refused = dropped = 0

    def __init__(self) -> None:
        self.lock, self.own, self.heard = threading.Lock(), Own(), {}
        self.states: dict[int, tuple[bytes, int, int]] = {}
        self.known: dict[int, int] = {}
        self.works: dict[int, tuple[float, float]] = {}
        self.reported_s: dict[int, float] = {}

    def take(self) -> list[Arrived]:
        taken, self.states = self.states, {}
        now_ns = time.monotonic_ns()
        return [
            Arrived(node, packed, started_ns, (now_ns - at_ns) / 1e9)
            for node, (packed, started_ns, at_ns) in taken.items()
        ]

    def silent_s(self) -> dict[int, float]:
        now_s = time.monotonic()
        return {node: now_s - at_s for node, at_s in self.reported_s.items()}

    def knows(self, node: int, number: int, ranks: tuple[int, ...]) -> None:
        self.known[node] = number

    def works_ms(self) -> list[tuple[float, float]]:
        return list(self.works.values())

    def close(self) -> None: ...


@dataclass
class Sent:
    """Stands for the client of another node."""

    inbox: Inbox
    node: int

    @property
    def urgent(self) -> bool:
        return self.inbox.urgent

    @property
    def known(self) -> int:
        return self.inbox.known.get(self.node, 0)

    def publish(self, state: bytes, started_ns: int, works_ms: tuple[float, float]) -> None:
        self.inbox.states[self.node] = messages.pack(state), started_ns, time.monotonic_ns()
        self.inbox.works[self.node] = works_ms


@dataclass
class Job:
    """Size and pace of a simulated job.

    Attributes:
        local: Ranks on node 0, which have pages; all other nodes have as many, and no pages.
        step_s: Time of a step; all ranks end it together.
        sent: Other nodes send their states; else they leave them as files.
    """

    world: int
    local: int
    step_s: float = 0.4
    sent: bool = False

    @property
    def nodes(self) -> int:
        return self.world // self.local


class PageRank:
    """One rank of node 0: its page, and a process that sleeps."""

    def __init__(self, job: Job, pages: Path, rank: int) -> None:
        self.job, self.rank = job, rank
        self.process = subprocess.Popen(["/bin/sleep", "3600"], stdin=subprocess.DEVNULL)
        self.page = PageWriter(page_path(pages, rank))
        page, h = self.page, self.page.header
        now = time.monotonic_ns()
        h.pid, h.rank, h.local_rank, h.world_size, h.local_world_size = (
            self.process.pid,
            rank,
            rank,
            job.world,
            job.local,
        )
        h.started_wall_ns, h.started_mono_ns, h.phase_since_ns, h.heartbeat_ns = time.time_ns(), now, now, now
        h.process_start_ticks = procfs.start_ticks(self.process.pid) or 0
        h.host, h.script = page.text("sim0000"), page.text("train.py")
        h.facts = page.text('{"torch": "2.13.0"}')
        h.life = LifeWord.RUNNING
        h.initialised = 1
        slot = page.page.groups[0]
        slot.name, slot.description, slot.backend = page.text("0"), page.text("default_pg"), page.text("gloo")
        slot.ranks, slot.generation, slot.completed, slot.flight_recorder_id = (
            page.text(fold_ranks([*range(job.world)])),
            1,
            0,
            -1,
        )
        h.n_groups = 1
        self.group = slot
        self.loop, self.save = page.site(SCRIPT, 40, "main"), page.site(SCRIPT, 52, "save")
        self.op = {name: page.text(name) for name in ("all_reduce", "barrier")}
        self.float32 = page.text("float32")
        site = page.page.sites[0]
        site.site, site.op, site.count = self.loop, self.op["all_reduce"], 0
        h.n_sites = 1
        h.stack[0], h.stack_depth = self.loop, 1
        page.publish()

    def step(self, number: int, end_ns: int, late_ms: float) -> None:
        """Write a step that ended now: 60 % of it in forward, an all-reduce, and `late_ms` of other work for which the others wait."""
        step_ns, late_ns = int(self.job.step_s * 1e9), int(late_ms * 1e6)
        wait_ns = max(0, int(0.2 * step_ns) - late_ns)
        words, h, slot = self.page.words, self.page.header, self.group
        slot.enqueued = number
        entered = end_ns - wait_ns
        call = self.page.write_call(
            self.op["all_reduce"], 0, number, 0, -1, 0, self.float32, self.loop, 1, 1024, 0, 0, 0, 0, 0, 1024, 4096, -1,
            entered, wait_ns, end_ns, 0, number,
        )  # fmt: skip
        assert words and call == number
        slot.completed = number
        self.page.page.sites[0].count = number
        self.page.write_step(
            number, 0, end_ns - step_ns, end_ns, step_ns // 50 + late_ns, 0, int(0.6 * step_ns), int(0.1 * step_ns),
            step_ns // 50, wait_ns, entered, 32, 32, 1.0, 0, 0, entered,
        )  # fmt: skip
        h.step, h.micro_steps, h.phase, h.phase_since_ns = number, number, Phase.FORWARD, end_ns

    def beat(self, now_ns: int) -> None:
        h = self.page.header
        h.heartbeat_ns = h.counted_ns = h.stack_ns = now_ns
        h.beats += 1

    def block(self, number: int, op: str) -> None:
        """Enter a collective that never ends."""
        now = time.monotonic_ns()
        site = self.save if op == "barrier" else self.loop
        self.group.enqueued = number
        h = self.page.header
        h.blocked_at = self.page.write_call(
            self.op[op], 0, number, 0, -1, 0, self.float32, site, 1, 1024, 0, 0, 0, 0, 0, 1024, 4096, -1, now, 0, 0, 0, number,
        )  # fmt: skip
        h.blocked_site, h.blocked_since_ns, h.stack[0] = site, now, site
        h.phase, h.phase_since_ns = Phase.COLLECTIVE, now
        h.blocked = Blocked.WAIT

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Clock:
    """Time as the monitor and the ranks see it: it moves by `advance` only, so that a loaded machine measures the same."""

    def __init__(self) -> None:
        self._real = {name: getattr(time, name) for name in ("monotonic", "monotonic_ns", "time", "time_ns")}
        self._start_ns = {name: self._real[name]() for name in ("monotonic_ns", "time_ns")}
        self._passed_ns = 0

    def __enter__(self) -> Clock:
        time.monotonic_ns = lambda: self._start_ns["monotonic_ns"] + self._passed_ns
        time.time_ns = lambda: self._start_ns["time_ns"] + self._passed_ns
        time.monotonic = lambda: time.monotonic_ns() / 1e9
        time.time = lambda: time.time_ns() / 1e9
        return self

    def __exit__(self, *exc: object) -> None:
        for name, function in self._real.items():
            setattr(time, name, function)

    def advance(self, seconds: float) -> None:
        self._passed_ns += int(seconds * 1e9)


class Ranks:
    """The ranks of a job: `move` writes what they have done since the last call, and publishes the states that are due."""

    def __init__(self, job: Job, run_dir: Path, pages: Path) -> None:
        self.job, self.run_dir = job, run_dir
        directories.make(pages, run_dir)
        self.ranks = [PageRank(job, pages, q) for q in range(job.local)]
        if job.nodes > 1:  # the rank that will be at fault is of another node: its page is read here, to be sent
            (run_dir / "other").mkdir(mode=0o700)
            self.ranks.append(PageRank(job, run_dir / "other", job.local))
        self.odd = self.ranks[-1].rank
        self.started_unix_s = time.time()
        self.started_ns = time.monotonic_ns()
        # sent as the pages of the other nodes, and of the rank at fault
        self.view = RankView(page_path(pages, 0), self.started_ns)
        self.odd_view = RankView(self.ranks[-1].page.path, self.started_ns)
        self.others = {k: Nodes(run_dir / f"node_{k}", k, run_dir) for k in range(1, job.nodes)}
        self._publish_at = {k: time.monotonic() + PERIOD_S * k / job.nodes for k in self.others}
        self._sender, self._windows, self._states, self._states_at = Sender(), Windows(), 0, 0.0
        self.lost: set[int] = set()
        self.late_ms = 0.0  # of the rank at fault
        self.blocked = False
        self.number = 0
        self._step_at = time.monotonic()

    def move(self, now: float) -> None:
        while not self.blocked and now >= self._step_at + self.job.step_s:
            self._step_at += self.job.step_s
            self.number += 1
            for r in self.ranks:
                r.step(self.number, int(self._step_at * 1e9), self.late_ms if r is self.ranks[-1] else 0.0)
        for r in self.ranks:
            r.beat(time.monotonic_ns())
        self._publish(now)

    def _publish(self, now: float) -> None:
        if now < self._states_at:
            return
        self._states_at = now + TICK_S
        due = [k for k, at_s in self._publish_at.items() if now >= at_s and k not in self.lost]
        if not due:
            return
        t_s = (time.monotonic_ns() - self.started_ns) / 1e9
        for view in (self.view, self.odd_view):
            view.refresh(t_s)
        state, odd = (view.state(t_s, self.blocked, "S", None) for view in (self.view, self.odd_view))
        parts: dict[int, dict[str, Any]] = {}
        self._states += 1
        for k in due:
            of = range(k * self.job.local, (k + 1) * self.job.local)
            ranks = {q: _as(odd if q == self.odd else state, q, k) for q in of}
            s = Snapshot(t_s=t_s, world_size=self.job.world, expected=self.job.local, ranks=ranks, groups={})
            self._publish_at[k] = now + (WAITING_PERIOD_S if self.blocked else PERIOD_S)
            client = self.others[k].transport.client
            if client is None:
                self.others[k].publish(s, self.started_unix_s, start_ns=self.started_ns)
                continue
            # as `publish`, but the histories are encoded once for all nodes
            if client.known not in parts:
                parts[client.known] = self._sender.parts(
                    self._states, {0: state, self.odd: odd}, {}, self._windows, client.known
                )
            made = dict(parts[client.known])
            made |= {name: {q: made[name][q if q == self.odd else 0] for q in of} for name in ("histories", "windows")}
            made["ranks"] = {q: msgspec.structs.replace(r, **dict.fromkeys(HISTORIES, ())) for q, r in ranks.items()}
            new = NodeState(
                node=k, started_unix_s=self.started_unix_s, written_unix_s=time.time(), local_world_size=len(of), **made
            )
            client.publish(msgspec.msgpack.encode(new), self.started_ns, _works_ms(s))

    def hang(self) -> None:
        """Let one rank enter a barrier where all others enter an all-reduce."""
        self.blocked = True
        for r in self.ranks:
            r.block(self.number + 1, "barrier" if r is self.ranks[-1] else "all_reduce")
        # a node notices a wait after 0.4 s, at its next poll
        self._publish_at = {k: time.monotonic() + WAITING_S + TICK_S * k / self.job.nodes for k in self._publish_at}

    def not_heard_of(self, node: int) -> bool:
        """True if the log of the run says that a node is not heard of: it is no finding, as its ranks may be well."""
        return bool(rows(self.run_dir, f"SELECT 1 FROM event WHERE text LIKE 'node {node} (%not heard of since%'"))

    def close(self) -> None:
        for r in self.ranks:
            r.end()
        self.view.reader.close()
        self.odd_view.reader.close()


class Simulation(Ranks):
    """A running job and node 0's monitor; `run` moves both on. A poll that takes longer than a tick delays the next one."""

    def __init__(self, job: Job, run_dir: Path, pages: Path, keep_bytes: int) -> None:
        self.clock = Clock().__enter__()
        super().__init__(job, run_dir, pages)
        self.inbox = Inbox()
        self.monitor = Monitor(run_dir, pages, 0, quiet=True, keep_bytes=keep_bytes)
        if job.sent:
            self.monitor.nodes.transport.server = cast("Server", self.inbox)
            for k, nodes in self.others.items():
                nodes.transport.client = cast("Client", Sent(self.inbox, k))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> tuple[float, float, bool]:
        """Move on for so many seconds, or until something holds; return (seconds, CPU seconds of the monitor, True if it holds)."""
        began, used = time.monotonic(), 0.0
        while time.monotonic() - began < seconds:
            self.move(time.monotonic())
            before, now = time.process_time(), time.monotonic()
            self.monitor._poll()
            poll_s = time.process_time() - before
            used += poll_s
            self.clock.advance(max(self.monitor.pace.pause_s(now), poll_s))
            if until():
                return time.monotonic() - began, used, True
        return time.monotonic() - began, used, False

    def move(self, now: float) -> None:
        # between its states, a node reports that it is there
        self.inbox.reported_s |= dict.fromkeys(self.others.keys() - self.lost, now - ALIVE_S / 2)
        super().move(now)

    def found(self, kind: str) -> list[Finding]:
        """Return the open findings of a kind."""
        return [f for f in self.monitor.diagnosis.open() if f.kind == kind]

    def close(self) -> None:
        super().close()
        self.monitor.close()
        self.clock.__exit__()


class Connected(Ranks):
    """The same job in real time: node 0's monitor is a process, and each other node has a real client, all in one thread of this process."""

    def __init__(self, job: Job, run_dir: Path, pages: Path, env: Mapping[str, str]) -> None:
        import zmq

        super().__init__(job, run_dir, pages)
        own = {}
        for k in self.others:
            (run_dir / f"pages_{k}").mkdir(mode=0o700)
            own[k] = keys.own_keys(run_dir / f"pages_{k}")
        node_files.write(pages, Peers(keys={k: o.public for k, o in own.items()}))
        command = [sys.executable, "-m", "distdiag.monitor", str(run_dir), "--pages", str(pages), "--foreground"]
        with (run_dir / "stderr").open("wb") as printed:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
                stderr=printed,
                start_new_session=True,  # as a rank does: it changes the priority of its session
            )
        self.monitor = psutil.Process(self.process.pid)
        first = wait_for(lambda: ((o := node_files.read_own(pages)) and o.port and o) or None, 60, "the port")
        self._context = zmq.Context(io_threads=1)
        self._context.max_sockets = 4 * job.nodes + 64
        self._poller = zmq.Poller()
        self._clients: dict[int, Client] = {}
        for k, nodes in self.others.items():
            client = Client(own[k], node_files.Server(first.public, first.port, ("127.0.0.1",)), lambda _: b"")
            client._context.term()
            client._context = self._context
            client.wake = lambda: None  # type: ignore[method-assign]
            client.opened(self._poller)
            self._clients[k] = nodes.transport.client = client
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        """Do what the clients' own threads would."""
        by_socket, all_at = {c._dealer: k for k, c in self._clients.items()}, 0.0
        while not self._ends.is_set():
            ready = dict(self._poller.poll(100))
            if everybody := time.monotonic() >= all_at:
                all_at = time.monotonic() + 0.1
            for k in self._clients if everybody else map(by_socket.__getitem__, ready):
                if k not in self.lost:
                    self._clients[k].turn(ready)
                elif self._clients[k]._dealer in ready:
                    self._clients[k]._dealer.recv()
        self._context.destroy(linger=0)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> tuple[float, float, bool]:
        """Go on for so many seconds, or until something holds; return (seconds, CPU seconds of the monitor, True if it holds)."""
        began, before = time.monotonic(), sum(self.monitor.cpu_times()[:2])
        found = False
        while not found and time.monotonic() - began < seconds:
            self.move(time.monotonic())
            time.sleep(0.02)
            found = until()
        return time.monotonic() - began, sum(self.monitor.cpu_times()[:2]) - before, found

    def found(self, kind: str) -> list[Finding]:
        """Return the open findings of a kind."""
        read = (
            json
            for (json,) in rows(self.run_dir, f"SELECT json FROM finding WHERE kind = '{kind}' AND cleared_s IS NULL")
        )
        return [msgspec.json.decode(json, type=Finding) for json in read]

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self.process.kill()
        self.process.wait()
        super().close()


def _as(state: RankState, rank: int, node: int) -> RankState:
    return msgspec.structs.replace(state, rank=rank, node=node, local_rank=0, host=f"sim{node:04}", pid=100_000 + rank)


@contextmanager
def connected(job: Job, directory: Path, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Connected]:
    """The same in real time, through the real connection.

    Args:
        env: More variables of node 0's monitor.
    """
    (directory / "run" / "nodes").mkdir(parents=True)
    job_of_processes = Connected(job, directory / "run", directory / "pages", env)
    try:
        yield job_of_processes
    finally:
        job_of_processes.close()


@contextmanager
def simulated(job: Job, directory: Path, keep_bytes: int = 2 << 30) -> Iterator[Simulation]:
    """Start a job in a directory; everything is ended afterwards."""
    run_dir = directory / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "nodes").mkdir()
    simulation, before = Simulation(job, run_dir, directory / "pages", keep_bytes), gc.get_threshold()
    gc.set_threshold(*COLLECT)  # as the monitor's process does
    try:
        yield simulation
    finally:
        gc.set_threshold(*before)
        simulation.close()
