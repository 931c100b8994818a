"""The monitor of one node: polls the pages, judges them and writes run.db until the last rank ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import distdiag
from distdiag import launcher, procfs, source_files
from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import witnesses
from distdiag.diagnosis.engine import Diagnosis, Record
from distdiag.diagnosis.model.findings import Finding, Severity, State, at_least, rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.errors import described
from distdiag.monitor import deaths, hang_limit
from distdiag.monitor.announce import Announcer
from distdiag.monitor.evidence.on_suspicion import Gatherer
from distdiag.monitor.host import processes
from distdiag.monitor.host.samples import Sampling
from distdiag.monitor.metrics.export import Exporters
from distdiag.monitor.node_states import shifted
from distdiag.monitor.nodes import Nodes
from distdiag.monitor.pace import SHORTEST_TICK_S, TICK_S, Pace, stretched_s
from distdiag.monitor.pages import Pages
from distdiag.monitor.priority import Priority
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.recording import Recording
from distdiag.monitor.rows import loader_rows, rank_rows
from distdiag.monitor.self_check import OwnFaults
from distdiag.monitor.snapshot import make_snapshot
from distdiag.page import directories
from distdiag.page.layout import LifeWord
from distdiag.page.reader import PageError
from distdiag.store import rundir
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import open_run
from distdiag.store.writer import Writer
from distdiag.tapes.writer import MAX_TAPE, TapeWriter, wanted_bytes

FULL_POLL_S = 0.9  # between two full polls while every rank changes phases, and between two samples of the host
# Interval of full polls when all cores are busy and nothing is suspected, from this age of the run on; longer
# without a reader.
CALM_POLL_S, CALM_AFTER_S = 1.9, 30.0
UNREAD_POLL_S, UNREAD_AFTER_S = 7.9, 120.0
READERS_S = 0.9  # between two checks for a reader of run.db, if there is none
LAST_RANK_S = 2.0  # from the end of the last known rank to the end of the run, if some ranks never reported
FIRST_PAGE_S = 60.0
FAILED_POLLS = 20  # failed polls in a row, with every page readable, after which the monitor gives up


class Monitor:
    """All state of the monitor; `run()` returns when the job is over."""

    def __init__(
        self,
        run_dir: Path,
        pages: Path,
        node: int,
        *,
        quiet: bool,
        keep_bytes: int,
        overflow: Path | None = None,
        priority: Priority | None = None,
        tape: bool = False,
        metrics: str = "",
        nodes_port: int = 0,
    ) -> None:
        self.run_dir, self.node = run_dir, node
        self.priority = priority or Priority()
        self.pages = Pages(pages, overflow)
        self.views = self.pages.views
        earlier = _earlier_findings(run_dir)
        self.writer = Writer(run_dir, keep_bytes=keep_bytes)
        self.announcer = Announcer(run_dir, quiet)
        self.start_ns = time.monotonic_ns()
        self.started_unix_s = time.time()
        size = MAX_TAPE if tape else wanted_bytes()
        self.tape = TapeWriter(run_dir, size, earlier, distdiag.__version__) if size else None
        source = self.tape.source(source_files.text) if self.tape else source_files.text
        self.diagnosis = Diagnosis(source=source)
        # set by `distdiag bench faults --without`
        witnesses.leave_out(os.environ.get("DISTDIAG_WITHOUT_WITNESSES", "").split(","))
        for f in earlier:  # open findings of a killed monitor: judged again, and cleared if they no longer hold
            self.diagnosis.records[f.key] = Record(f, reported=True)
            self.announcer.mark_printed(f.key)
        self.endings = processes.Endings()
        self.cpu = processes.CpuWatch()
        self.sampling = Sampling(node, self.writer)
        self.recording = Recording(run_dir, node, self.writer, self.views)
        self.gatherer = Gatherer(run_dir)
        self.nodes = Nodes(run_dir, node, pages, nodes_port)
        self._host_at = -10.0
        self.pace = Pace()
        self._poll_s = FULL_POLL_S
        self._readers_at = 0.0
        self._gone_since: float | None = None
        self._idle: dict[int, tuple[bool | None, str | None]] = {}
        self._checked: set[int] = set()  # ranks whose CPU time was read in this poll
        self.own = OwnFaults()
        self.hang_limit = hang_limit.HangLimit()
        self.metrics = Exporters(metrics, run_dir, node)
        self._failed_polls = 0

    # -- life ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.writer.meta(
            started_unix_s=self.started_unix_s, monitor_pid=os.getpid(), node=self.node, distdiag=distdiag.__version__,
            state=State.WAITING, state_since_s=0, memory_cgroup=deaths.noted(),
        )  # fmt: skip
        if self.metrics.where is not None:
            self.writer.meta(metrics=f"http://{self.metrics.where}/metrics")
        directories.sweep(self.pages.directories[0])
        while True:
            began = time.monotonic()
            self.nodes.connect()
            if self.priority.run(self._poll, low=self._well()):
                break
            if self._awaited():
                return
            left = self.pace.pause_s(began) - (time.monotonic() - began)
            if left > 0 and self.endings.wake.wait(left):
                self.pace.poll_at = 0.0
            self.endings.wake.clear()
        self.close()

    def _awaited(self) -> bool:
        """True if a rank waits for this process, which must end; the run notes it. The rank starts another monitor once it goes on.

        The kernel makes orphans children of the first process of a container, or of a child subreaper. If that is a rank,
        and it waits until it has no child left, it would wait for the monitor, which waits for the rank.
        """
        parent = os.getppid()
        rank = next((v.rank for v in self.views.values() if v.header.pid == parent), None)
        if rank is None or not procfs.waits_for_child(parent, os.getpid()):
            return False
        text = f"the monitor ended: rank {rank}, whose child it is, waits for all its children"
        self.writer.event(self.now_s, "monitor", "info", text)
        self.writer.commit()
        return True

    def _tick_s(self, poll_cpu_s: float) -> float:
        """Return the time from the begin of a poll to the next one."""
        next_s, self.gatherer.host_waits.next_s = self.gatherer.host_waits.next_s, None
        if next_s is not None:
            return min(TICK_S, max(SHORTEST_TICK_S, next_s - self.now_s))
        if self.diagnosis.suspects():
            return TICK_S
        return stretched_s(poll_cpu_s)

    def _poll(self) -> bool:
        began, used_s = time.monotonic(), time.process_time()
        if self.pace.rests(began, self._some_rank_waits, self.nodes.differs) and not self.nodes.fell_silent():
            return False
        over = self._survive(lambda: not self._all_moving() and self.tick())
        self.pace.poll_at = began + self._tick_s(time.process_time() - used_s)
        return over

    def _some_rank_waits(self) -> bool:
        """True if a rank of this node waits, as its page shows now."""
        return any(v.history.waits(time.monotonic_ns()) for v in self.views.values())

    def _well(self) -> bool:
        """True if, by the last poll, all ranks run and nothing is suspected: the CPU is theirs then."""
        return self.diagnosis.state == State.RUNNING and not self.diagnosis.suspects() and not self.gatherer.active

    def _survive(self, tick: Callable[[], bool]) -> bool:
        """Run one poll; return True when the job is over. If it raises, drop the ranks with unreadable pages.

        Raises:
            Exception: polls keep failing although every page can be read: a defect of the monitor.
        """
        try:
            over = tick()
            self._failed_polls = 0
            return over
        except Exception as e:
            bad = [(v, problem) for v in self.views.values() if (problem := self._problem(v)) is not None]
            for v, problem in bad:
                self.pages.give_up(v, problem)
            self._failed_polls += not bad
            if self._failed_polls >= FAILED_POLLS:
                raise
            if not bad:
                text = described(e)
                self.diagnosis.failures[text] = self.diagnosis.failures.get(text, 0) + 1
            return False

    def _problem(self, v: RankView) -> Exception | None:
        """Return the exception that reading this rank's page raises, if any."""
        try:
            v.refresh(self.now_s)
            state = v.state(self.now_s, *self._idle.get(v.rank, (None, None)), self.gatherer.record(v.rank))
            alone = Snapshot(t_s=self.now_s, world_size=1, expected=None, ranks={v.rank: state}, groups={})
            v.decoder.groups()
            rank_rows(alone, {v.rank: v}, [])
            loader_rows(alone)
            list(OwnFaults.of_rank(v))
            shifted(state, 0.0)
            msgspec.msgpack.encode(state)
        except Exception as e:
            return e
        return None

    @property
    def now_s(self) -> float:
        return (time.monotonic_ns() - self.start_ns) / 1e9

    def _all_moving(self) -> bool:
        """True if every rank has just changed phases, so that a full poll can be skipped.

        A poll takes its time from the ranks if no core is free.
        """
        now_ns = time.monotonic_ns()
        self._checked.clear()
        if (
            self.now_s - self._host_at >= self._poll_s
            or self.diagnosis.state != State.RUNNING
            or self.endings.wake.is_set()
            or len(self.views) + len(self.pages.damaged) < self.pages.expected
            or not all(
                v.ending is None and v.history.moves_on(now_ns, lambda v=v: self._sleeps(v))
                for v in self.views.values()
            )
        ):
            return False
        if self._poll_s == UNREAD_POLL_S and self.now_s - self._readers_at >= READERS_S:
            self._readers_at = self.now_s
            if processes.open_elsewhere(self.writer.path):
                return False
        calm = self._poll_s > FULL_POLL_S  # then reading CPU times would cost the job time
        for v in self.views.values():
            v.history.sample_site(None if calm else self._sleeps(v))
        return True

    def _poll_interval_s(self, now_s: float) -> float:
        """Return the time between full polls: longer if all cores are busy and nothing is suspected."""
        if now_s <= CALM_AFTER_S or self.sampling.spare_cores() >= 0.5 or self.diagnosis.suspects():
            return FULL_POLL_S
        takes_memory = any(v.gauges.growing() for v in self.views.values())
        if now_s <= UNREAD_AFTER_S or takes_memory or processes.open_elsewhere(self.writer.path):
            return CALM_POLL_S
        return UNREAD_POLL_S

    def _sleeps(self, v: RankView) -> bool | None:
        """True if a rank's main thread sleeps and has used no CPU since the last poll; cached for one poll."""
        if v.rank not in self._checked:
            self._checked.add(v.rank)
            self._idle[v.rank] = self.cpu.idle(v.header.pid)
        return self._idle[v.rank][0]

    def tick(self) -> bool:
        """Run one full poll; return True when the job is over."""
        began = time.monotonic()
        self.pages.discover(self.now_s, self._opened)
        now_s = self.now_s
        for v in list(self.views.values()):
            try:
                v.refresh(now_s)
                self._follow_process(v)
            except PageError as e:
                self.pages.give_up(v, e)
        if not self.views:
            return now_s > FIRST_PAGE_S and not self.pages.unjudged_alive()
        stopped = {q for q, (_, os_state) in self._idle.items() if os_state == "T"}
        self.gatherer.gather(now_s, self.views, stopped, elsewhere=self.nodes.transport.urgent)
        snapshot = self.snapshot(now_s)
        over = self._over(snapshot)
        news = True
        if self.nodes.several(snapshot):
            self.nodes.publish(snapshot, self.started_unix_s, over, self.start_ns)
            if self.node == 0:
                snapshot, news = self.nodes.merged(snapshot, self.started_unix_s, self.start_ns)
        changed = self._judge(snapshot, over) if news or over else []
        for q, longest in self.diagnosis.recovered.items():
            if q in self.views:
                self.views[q].longest_delay_s = longest
        self._write(snapshot, changed, over)
        if self.hang_limit.due(now_s, self.diagnosis):
            self._end_hang(now_s)
        self._export(snapshot, changed, began)
        return over

    def _end_hang(self, now_s: float) -> None:
        self.writer.meta(hang_ended_s=now_s)
        self.writer.commit()  # before the first rank ends: whoever waits for the ranks reads it then
        if ended := self.hang_limit.end(self.views.values()):
            self.writer.event(
                now_s, "monitor", "warning",
                f"the hang is proved: ended {rank_list(ended)} as {hang_limit.VARIABLE} asks",
            )  # fmt: skip
        else:
            self.writer.meta(hang_ended_s=None)

    def _export(self, s: Snapshot, changed: list[Finding], began: float) -> None:
        faults = [f for f in self.own.found if f.cleared_s is None]
        self.metrics.publish(
            s, self.views, self.started_unix_s, self.diagnosis, faults, [*changed, *faults], self.writer.path, began
        )
        for text in self.metrics.failures:
            self.writer.event(s.t_s, "monitor", "warning", text)
        self.metrics.failures.clear()

    def _judge(self, snapshot: Snapshot, over: bool) -> list[Finding]:
        changed = self.diagnosis.update(snapshot, final=over)
        if self.tape is not None:
            self.tape.take(snapshot, self.diagnosis, changed, final=over)
            if over:
                self.tape.close()
            if self.tape.failed is not None:
                self.writer.event(snapshot.t_s, "monitor", "warning", self.tape.failed)
                self.tape = None
        return changed

    def snapshot(self, now_s: float) -> Snapshot:
        made = make_snapshot(now_s, self.views, self._idle, self.gatherer, self.recording.collectives, self.sampling)
        ends_ns = [v.ending.t_mono_ns for v in self.views.values() if v.ending is not None]
        stopped = launcher.stopped_by(self.run_dir) if ends_ns or self.diagnosis.open(Severity.WARNING) else None
        if stopped is None or not self.start_ns <= stopped[1] <= min(ends_ns, default=stopped[1]):
            return msgspec.structs.replace(made, hang_ended=self.hang_limit.ended)
        return msgspec.structs.replace(made, stopped_by=stopped[0], restarts_left=0)

    def _over(self, s: Snapshot) -> bool:
        if any(v.ending is None for v in self.views.values()) or self.pages.unjudged_alive():
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = s.t_s
        expected = len(self.views) >= (s.expected or s.world_size)
        return s.t_s - self._gone_since > (0.4 if expected else LAST_RANK_S)

    def _opened(self, view: RankView) -> None:
        header = view.reader.header()
        if not self.views:  # time zero of the run: when its first rank attached
            self.start_ns, self.started_unix_s = header.started_mono_ns, header.started_wall_ns / 1e9
            self.writer.meta(started_unix_s=self.started_unix_s)
        view.decoder.start_ns = self.start_ns
        self.endings.watch(header.pid)

    def _follow_process(self, v: RankView) -> None:
        pid = v.header.pid
        if v.ending is None:
            ticks = v.header.process_start_ticks
            end = self.endings.ended.get(pid)
            if end is None and ticks and not self.endings.sure(pid) and procfs.start_ticks(pid) not in (None, ticks):
                end = processes.Ending(time.monotonic_ns())  # the pid has been reused
            if end is not None:
                v.refresh(self.now_s)  # what it wrote after our last poll
                v.ending = end
                self.cpu.forget(pid)
                v.ended_s = (end.t_mono_ns - self.start_ns) / 1e9
                self.gatherer.of_death(v, self.now_s)
        if v.ending is None:
            v.history.sample_site(self._sleeps(v))
        else:
            self._idle[v.rank] = (None, None)

    # -- writing --------------------------------------------------------------------------------------------------

    def _write(self, s: Snapshot, changed: list[Finding], over: bool) -> None:
        self.recording.write_calls_and_steps(s, over)
        self._write_findings(s, changed)
        for f in self.diagnosis.findings if over else ():  # as the summary has them, whose numbers are newer
            self.writer.finding(f)
        if s.t_s - self._host_at >= FULL_POLL_S or over:
            self._host_at = s.t_s
            self.sampling.sample(s.t_s, self.views)
            self._poll_s = self._poll_interval_s(s.t_s)
        self.recording.write_state(s, self.diagnosis, self.nodes.windows, now=over or bool(changed))
        self.recording.write_facts(s, self.started_unix_s)
        self.recording.write_nodes(s.t_s, self.nodes)
        for f in self.own.faults(
            self.now_s, self.views, self.diagnosis.failures, self.writer, self.started_unix_s,
            exchange=self.nodes.failed, driver_silent_s=self.sampling.gpus.silent_s(), damaged=self.pages.damaged,
            contradicted=self.diagnosis.contradicted, snapshot=s, elsewhere=self.nodes.faults,
        ):  # fmt: skip
            self.writer.finding(f)
        self.nodes.note(self.own.found)
        self.writer.commit()

    def _write_findings(self, s: Snapshot, changed: list[Finding]) -> None:
        for f in changed:
            if f.cleared_s is None and at_least(f.severity, Severity.WARNING) and not f.evidence:
                f = self._with_evidence(s, f)
            self.writer.finding(f)
            self.announcer.finding(f)

    def _with_evidence(self, s: Snapshot, f: Finding) -> Finding:
        """Return a finding with the paths of its evidence, if its kind has any."""
        if not kinds.of(f).stacks:
            return f
        kept, failed = self.gatherer.keep(s)
        if failed:
            self.writer.event(s.t_s, "monitor", "warning", failed)
        f = msgspec.structs.replace(f, evidence=tuple(kept))
        record = self.diagnosis.records.get(f.key)
        if record is not None:
            record.finding = f
        return f

    def close(self) -> None:
        """Write the last rows, print the summary, and free the pages' memory."""
        directories.note_ended(self.run_dir.parent if self.node else self.run_dir, self.node, sorted(self.views))
        now_s = self.now_s
        self.nodes.transport.close()
        self.writer.meta(ended_s=now_s)
        self.writer.commit()
        self.writer.close()
        self.gatherer.close()
        self.metrics.close()
        self.sampling.gpus.close()
        finished = bool(self.views) and any(v.header.life != LifeWord.STARTING for v in self.views.values())
        if finished:
            self.announcer.summary(self.diagnosis, self.own.found, self.node)
        for v in self.views.values():
            v.reader.close()
        self.pages.close()


def _earlier_findings(run_dir: Path) -> tuple[Finding, ...]:
    """Return the open findings of this run's killed monitor; none if there was none, or if it closed the run."""
    if not rundir.has_run(run_dir):
        return ()
    try:
        with open_run(run_dir) as run:
            return () if run.meta.get("monitor_ended") == "1" else run.findings()
    except RunUnreadable:
        return ()
