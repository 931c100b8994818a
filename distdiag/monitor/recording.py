"""Write one poll into run.db: steps, collectives, the state of every rank, versions and groups."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.snapshot import Snapshot, Step
from distdiag.monitor.collectives import Collectives
from distdiag.monitor.nodes import Nodes
from distdiag.monitor.ranks.state import RankView
from distdiag.monitor.rows import Steps, ddp_rows, loader_rows, rank_rows
from distdiag.monitor.windows import Windows
from distdiag.store import rundir
from distdiag.store.rows import GroupRow
from distdiag.store.writer import Writer

FRAME_S, RANKS_PER_S = 0.5, 1024  # between two frames of the screen; of large jobs, so many rows per second
NODES_S = 2.0  # between two writes of the other nodes' clocks
LOADERS_S = 2.0  # between two writes of loaders, DDP modules and checks


class Recording:
    """Remembers what was written so far and when the next rows are due."""

    def __init__(self, run_dir: Path, node: int, writer: Writer, views: Mapping[int, RankView]) -> None:
        self.run_dir, self.node, self.writer, self.views = run_dir, node, writer, views
        self.steps, self.collectives = Steps(), Collectives()
        self._frame_at = self._loaders_at = self._nodes_at = -10.0
        self._newest: dict[int, int] = {}  # step of each rank of another node
        self._groups: set[str] = set()
        self._facts: dict[str, Any] = {}
        self._info: dict[str, Any] = {}  # of run.json
        self._backend = ""

    def write_calls_and_steps(self, s: Snapshot, over: bool) -> None:
        w = self.writer
        for v in self.views.values():
            steps, calls = v.history.taken()
            self.steps.add(v.rank, steps)
            w.step_times(self.steps.measured(v.rank, v.history.ddp_times.taken()))
            self.collectives.add(v.rank, calls)
            w.add(v.history.scalars())
        for q, r in s.ranks.items():
            if q not in self.views:  # of another node: its newest steps, as far as each of its states goes back
                new = _newer(r.steps, self._newest.get(q, -1))
                self.steps.add(q, new)
                if new:
                    self._newest[q] = new[-1].step
        w.add(self.steps.rows(len(s.ranks), s.t_s, s, final=over))
        step = max((r.step for r in s.ranks.values()), default=None)
        w.add(self.collectives.rows(s, step))

    def write_state(self, s: Snapshot, diagnosis: Diagnosis, windows: Windows, now: bool) -> None:
        """Write the ranks' newest state, loaders, DDP modules and checks, each if it is due or `now`."""
        w = self.writer
        if s.t_s - self._frame_at >= max(FRAME_S, s.world_size / RANKS_PER_S) or now:
            self._frame_at = s.t_s
            rows = rank_rows(s, self.views, diagnosis.open(), windows, self.steps.slowest)
            w.add(rows)
            w.frame(s.t_s, diagnosis.state, diagnosis.state_text, rows)
            w.meta(state=diagnosis.state, state_text=diagnosis.state_text, world_size=s.world_size)
        if s.t_s - self._loaders_at >= LOADERS_S or now:
            self._loaders_at = s.t_s
            w.add(loader_rows(s))
            w.add(ddp_rows(s))
            w.checks(diagnosis.checks.all)

    def write_nodes(self, t_s: float, nodes: Nodes) -> None:
        """Write which nodes came or went, and how they are connected, if that is by a connection."""
        w = self.writer
        for text in nodes.events:
            w.event(t_s, "monitor", "warning", text)
        nodes.events.clear()
        if t_s - self._nodes_at >= NODES_S and (facts := nodes.transport.facts()):
            self._nodes_at = t_s
            w.meta(nodes=msgspec.json.encode(facts).decode())
            if self._info and "nodes_by" not in self._info:
                self._info["nodes_by"] = facts["by"]
                rundir.write_run_json(self.run_dir, self._info)

    def write_facts(self, s: Snapshot, started_unix_s: float) -> None:
        w = self.writer
        new = [g for n, g in s.groups.items() if n not in self._groups and g.description != "new_group"]
        if new:
            self._groups |= {g.name for g in new}
            w.groups([GroupRow(name=g.name, ranks=g.ranks, description=g.description, backend=g.backend) for g in new])
        backend = next((g.backend for g in s.groups.values() if g.name == "default_pg"), None)
        if backend and backend != self._backend:
            self._backend = backend
            w.meta(backend=backend)
        v = self.views[min(self.views)]
        facts = v.decoder.facts
        if facts == self._facts or not facts.get("torch"):
            return
        self._facts = dict(facts)
        known = {k: x for k, x in facts.items() if isinstance(x, (str, int, float))}
        w.meta(**known, name=v.text(v.header.script), attempt=v.header.attempt)
        self._info |= {"started_unix_s": started_unix_s, "world_size": s.world_size, "node": self.node, **known}
        rundir.write_run_json(self.run_dir, self._info)


def _newer(steps: tuple[Step, ...], than: int) -> list[Step]:
    """Return the newest steps, as far back as their numbers are higher than this one."""
    return [*takewhile(lambda x: x.step > than, reversed(steps))][::-1]
