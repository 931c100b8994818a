"""Ten minutes of two nodes whose files arrive late, in bursts or not at all, against a program that knows what the ranks really do."""

from __future__ import annotations

import bisect
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Site, Snapshot
from distdiag.monitor.nodes import Nodes

WORLD = Group(name="default_pg", ranks=(0, 1, 2, 3))
LENGTH_S, POLL_S = 600.0, 0.25
BEGAN = 1_800_000_000.0
STEP, LINE, OTHER = (Site("/job/train.py", n, "main") for n in (10, 20, 30))


@dataclass
class Truth:
    """Four ranks that meet in one all_reduce per step; from `broken_s` on rank 3 calls a broadcast instead, and nobody gets on."""

    rng: random.Random
    broken_s: float | None
    entered: list[list[float]] = field(default_factory=lambda: [[], [], [], []])
    done: list[float] = field(default_factory=list)
    broken: int | None = None  # number of the collective in which they hang

    def __post_init__(self) -> None:
        t = 1.0
        while t < LENGTH_S + 60:
            late = self.rng.random() < 0.03
            for q in range(4):
                slow = self.rng.uniform(1.0, 6.0) if late and q == len(self.done) % 4 else 0.0
                self.entered[q].append(t + self.rng.uniform(0.05, 0.4) + slow)
            arrived = max(each[-1] for each in self.entered)
            if self.broken_s is not None and arrived > self.broken_s:
                self.broken = len(self.entered[0])
                return
            t = arrived + 0.01
            self.done.append(t)

    def state(self, rank: int, t_s: float) -> RankState:
        seq = bisect.bisect_right(self.entered[rank], t_s)
        completed = bisect.bisect_right(self.done, t_s)
        blocked, site = None, STEP
        if seq > completed:
            wrong = seq == self.broken and rank == 3
            site = OTHER if wrong else LINE
            blocked = Call(op="broadcast" if wrong else "all_reduce", group="default_pg", seq=seq, site=site,
                           entered_s=self.entered[rank][seq - 1], root=0 if wrong else None)  # fmt: skip
        return RankState(
            rank=rank, node=rank // 2, host=f"node{rank // 2}", step=completed, current_site=site, blocked=blocked,
            calls=(blocked,) if blocked else (), enqueued={"default_pg": seq}, completed={"default_pg": completed},
            heartbeat_age_s=0.1, activity="waiting" if blocked else "user_code", host_blocked=blocked is not None,
        )  # fmt: skip

    def of_node(self, node: int, t_s: float) -> Snapshot:
        ranks = {q: self.state(q, t_s) for q in (2 * node, 2 * node + 1)}
        return Snapshot(t_s=t_s, world_size=4, expected=2, ranks=ranks, groups={"default_pg": WORLD})


@dataclass
class Network:
    """Shows node 1's file to node 0 late, and in a partition not at all; both ends of one may come at any time."""

    rng: random.Random
    source: Path
    target: Path
    waiting: list[tuple[float, bytes]] = field(default_factory=list)
    cut_until_s: float = 0.0
    partitions: int = 0
    last: bytes = b""

    def carry(self, t_s: float) -> None:
        if t_s >= self.cut_until_s and self.rng.random() < 0.01:
            self.cut_until_s, self.partitions = t_s + self.rng.choice((1.0, 5.0, 11.0, 13.0, 40.0)), self.partitions + 1
        if self.source.exists() and (new := self.source.read_bytes()) != self.last:
            self.last = new
            self.waiting.append((t_s + self.rng.choice((0.0, 0.1, 1.0, 3.0)), new))
        if t_s < self.cut_until_s:
            return
        ready = [data for due_s, data in self.waiting if due_s <= t_s]
        self.waiting = [entry for entry in self.waiting if entry[0] > t_s]
        if ready:  # perhaps an older state after a newer one, as from a cache
            partial = self.target.with_suffix(".new")
            partial.write_bytes(self.rng.choice(ready))
            partial.replace(self.target)


def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, broken_s: float | None
) -> tuple[list[tuple[float, Finding]], int]:
    """Return what was reported, with the time, and the number of partitions."""
    rng, now = random.Random(seed), [0.0]
    monkeypatch.setattr(time, "time", lambda: BEGAN + now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    truth = Truth(rng, broken_s)
    (tmp_path / "there" / "node_1").mkdir(parents=True)
    (tmp_path / "here" / "nodes").mkdir(parents=True)
    here, there = Nodes(tmp_path / "here", 0, tmp_path), Nodes(tmp_path / "there" / "node_1", 1, tmp_path)
    network = Network(rng, tmp_path / "there" / "nodes" / "1.state", tmp_path / "here" / "nodes" / "1.state")
    skew_s = rng.uniform(-1.0, 1.0)  # node 1's wall clock
    diagnosis, reported = Diagnosis(source=lambda _: None), []
    for k in range(int(LENGTH_S / POLL_S)):
        now[0] = t_s = 1.0 + k * POLL_S
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: BEGAN + now[0] + skew_s)
            there.publish(truth.of_node(1, t_s), BEGAN + skew_s)
        network.carry(t_s)
        whole, news = here.merged(truth.of_node(0, t_s), BEGAN)
        if news:
            reported += [(t_s, f) for f in diagnosis.update(whole)]
        if t_s > next((at_s for at_s, f in reported if f.certainty == "proved"), LENGTH_S) + 60:
            break
    assert diagnosis.failures == {}
    shutil.rmtree(tmp_path / "here")
    shutil.rmtree(tmp_path / "there")
    return reported, network.partitions


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_is_taken_for_a_fault_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    reported, partitions = judged(tmp_path, monkeypatch, seed, None)
    assert partitions > 5
    assert [(t, f.kind, f.message) for t, f in reported if f.certainty == "proved" or f.severity == "error"] == []


@pytest.mark.parametrize("seed", range(4))
def test_a_hang_across_nodes_is_proved_after_it_began_and_despite_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    broken_s = 100.0 + 50 * seed
    reported, _ = judged(tmp_path, monkeypatch, seed, broken_s)
    proofs = [(t, f) for t, f in reported if f.certainty == "proved"]
    assert proofs and proofs[0][0] >= broken_s
    assert {f.kind for _, f in proofs} <= {"deadlock", "mismatch"} and {f.culprits for _, f in proofs} <= {(3,)}, proofs
