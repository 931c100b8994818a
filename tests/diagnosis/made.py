"""Makes snapshots by hand, for tests of the rules."""

from __future__ import annotations

import random
from typing import Any

from distdiag.diagnosis.culprit.case import Reason
from distdiag.diagnosis.culprit.verdict import Verdict, judge
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Call,
    GpuState,
    Group,
    Loader,
    Model,
    RankState,
    Site,
    Snapshot,
    Step,
)
from distdiag.diagnosis.rules import Rule, comm_bound, input_bound, straggler
from distdiag.diagnosis.text.incident_finding import incident_finding
from distdiag.diagnosis.waits.graph import WaitGraph, build
from distdiag.diagnosis.waits.incidents import Root

GIB = 1 << 30
CARD = GpuState(node=0, gpu=0, rank=1, pcie_width=8, pcie_width_max=16)
LOOP = Site("/job/train.py", 40, "main")
MODEL = Model(
    group="default_pg", parameters=4, find_unused=False, forwards=100, synced_backwards=100, unused_checks=100
)


def rank(q: int, **more: Any) -> RankState:
    return RankState(
        **{"rank": q, "current_site": LOOP, "user_stack": (LOOP,), "step": 100, "models": (MODEL,), **more}
    )


def job(*ranks: RankState, t_s: float = 100.0, **more: Any) -> Snapshot:
    world = len(ranks)
    group = Group(name="default_pg", ranks=tuple(range(world)), backend="gloo")
    return Snapshot(
        **{
            "t_s": t_s,
            "world_size": world,
            "ranks": {r.rank: r for r in ranks},
            "groups": {"default_pg": group},
            **more,
        }
    )


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def findings(snapshot: Snapshot, *rules: Rule, **known: Any) -> list[Finding]:
    """Return what some rules find in one snapshot. `known`: fields of `Facts` from earlier polls."""
    facts = Facts(snapshot, **known)
    for rule in rules:
        facts.found += [x for x in rule.evaluate(facts) if isinstance(x, Finding)]
    return facts.found


def proved(snapshot: Snapshot, graph: WaitGraph | None = None, **known: Any) -> list[Finding]:
    """Return what the wait-for graph of one snapshot proves. `known`: arguments of `judge`."""
    verdicts = judge(snapshot, build(snapshot) if graph is None else graph, **known)
    return [shown(snapshot, verdict) for verdict in verdicts]


def shown(snapshot: Snapshot, verdict: Verdict) -> Finding:
    """Return the finding of a verdict; the reason that it shows is the one that decided."""
    finding = incident_finding(snapshot, verdict)
    decided = verdict.testimony
    assert decided.ranks in ((), finding.culprits)
    if verdict.incident.root is not Root.GONE:  # there the message begins with how the ranks ended
        assert decided.text in finding.message
        assert bool(decided.text or decided.head or decided.conditions) == (
            decided.name not in (Reason.NONE, Reason.MAJORITY)
        )
    assert all(testimony.ranks == decided.ranks for testimony in verdict.also)
    return finding


def of_kind(found: list[Finding], kind: str, cause: str | None = None) -> list[Finding]:
    return [f for f in found if f.kind == kind and (cause is None or f.cause == cause)]


def waits_for_rank_one(since_s: float, t_s: float, **late: Any) -> Snapshot:
    blocked = Call(op="all_reduce", group="default_pg", seq=7, entered_s=since_s)
    return job(
        rank(0, blocked=blocked, enqueued={"default_pg": 7}, activity="waiting"),
        rank(1, enqueued={"default_pg": 6}, **late),
        t_s=t_s,
    )


def loader(**more: Any) -> Loader:
    site = Site("/job/train.py", 2, "main")
    return Loader(**{"site": site, "length": 100, "in_training": True, "iterations_started": 1, "batches": 3, **more})


def steps(
    extra_ms: float = 0.0, phase: str = "forward", wait_ms: float = 0.0, seed: int = 0, n: int = 60
) -> tuple[Step, ...]:
    r = random.Random(seed)
    out = []
    for k in range(1, n + 1):
        parts = {"data": 2.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 1.0}
        parts = {p: v * r.uniform(0.97, 1.03) for p, v in parts.items()}
        parts[phase] += extra_ms
        parts["backward"] += wait_ms
        ready = k * 0.1 + (sum(parts.values()) - wait_ms) / 1e3
        out.append(
            Step(k, k * 0.1 + 0.09, sum(parts.values()), parts["data"], parts["forward"], parts["backward"],
                 parts["optimizer"], wait_ms, parts["other"], ready, 8, 8, 1.0)
        )  # fmt: skip
    return tuple(out)


def speeds(s: Snapshot) -> list[Finding]:
    """Return what the rules on speed find in one snapshot."""
    return findings(s, straggler, input_bound, comm_bound)


def stragglers(s: Snapshot) -> list[Finding]:
    return [f for f in speeds(s) if f.kind == "straggler"]
