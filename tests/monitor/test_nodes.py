"""Several nodes: each monitor leaves its state for the first, which gives one verdict over all ranks."""

from __future__ import annotations

import json
import re
import textwrap
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args, get_type_hints

import msgspec
import pytest

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Group, Loader, Model, RankState, Sample, Seconds, Snapshot, Step
from distdiag.diagnosis.rules import rank_lost, stall
from distdiag.monitor.cluster.server import Server
from distdiag.monitor.evidence.request_profile import absent_text, not_here
from distdiag.monitor.node_states import NodeState, shifted
from distdiag.monitor.nodes import STALE_S, Nodes, hosts
from distdiag.monitor.ranks.state import RankView
from distdiag.page.node_files import Own
from tests.jobs import Job, distdiag, free_port, launch, wait_for

WORLD = Group(name="default_pg", ranks=(0, 1, 2, 3))


def snapshot(*ranks: int, t_s: float = 10.0, entered_s: float | None = None) -> Snapshot:
    blocked = None if entered_s is None else Call(op="all_reduce", group="default_pg", seq=5, entered_s=entered_s)
    return Snapshot(
        t_s=t_s,
        world_size=4,
        expected=2,
        ranks={q: RankState(rank=q, blocked=blocked) for q in ranks},
        groups={"default_pg": WORLD},
    )


def test_times_of_another_node_are_counted_from_this_ones_start(tmp_path: Path) -> None:
    (tmp_path / "node_1").mkdir()
    here, there = Nodes(tmp_path, 0, tmp_path), Nodes(tmp_path / "node_1", 1, tmp_path)
    assert here.several(snapshot(0, 1))
    now = time.time()
    there.publish(snapshot(2, 3, entered_s=7.0), started_unix_s=now - 8.0)  # began two seconds after node 0
    whole, news = here.merged(snapshot(0, 1), started_unix_s=now - 10.0)
    assert sorted(whole.ranks) == [0, 1, 2, 3] and whole.expected == 4 and news
    blocked = whole.ranks[3].blocked
    assert blocked is not None and blocked.entered_s == pytest.approx(9.0, abs=0.01)


def test_a_node_that_leaves_a_file_is_merged_though_others_send_their_state(tmp_path: Path) -> None:
    (tmp_path / "node_1").mkdir()
    here, there = Nodes(tmp_path, 0, tmp_path), Nodes(tmp_path / "node_1", 1, tmp_path)
    here.transport.server = server = Server(Own(), tmp_path)  # node 2 sends its state: node 1 is not heard on it
    there.publish(snapshot(2, 3), started_unix_s=time.time())
    whole, _ = here.merged(snapshot(0, 1), started_unix_s=time.time())
    server._context.destroy()
    assert sorted(whole.ranks) == [0, 1, 2, 3] and server.heard == {}


def test_every_time_of_another_node_is_moved() -> None:
    call = Call(op="send", group="g", entered_s=1.0, completed_s=2.0, left_s=3.0)
    step = Step(1, 4.0, *[100.0] * 7, ready_s=None, batch=1, samples=1, loss=None, arrived_s=5.0)
    state = RankState(
        rank=2, host="b", blocked=call, queued=(call, call), calls=(call,), steps=(step,), ended_s=6.0, caught_s=7.0,
        samples=(Sample("loss", 1, 0.5, t_s=8.0),), memory=((9.0, 100),), heartbeat_age_s=0.5, longest_delay_s=3.0,
    )  # fmt: skip
    moved = shifted(state, 10.0)
    for sent in (moved.blocked, *moved.queued, *moved.calls):
        assert sent is not None and (sent.entered_s, sent.completed_s, sent.left_s) == (11.0, 12.0, 13.0)
    assert (moved.steps[0].end_s, moved.steps[0].ready_s, moved.steps[0].arrived_s) == (14.0, None, 15.0)
    assert (moved.ended_s, moved.caught_s, moved.samples[0].t_s, moved.memory) == (16.0, 17.0, 18.0, ((19.0, 100),))
    assert (moved.heartbeat_age_s, moved.longest_delay_s, moved.host) == (0.5, 3.0, "b"), "a duration has no origin"


def test_every_number_of_seconds_is_a_moment_or_a_known_duration() -> None:
    """A new time field that lacks the type `Seconds` would not be moved between the clocks of nodes."""
    durations = {"heartbeat_age_s", "longest_delay_s", "gc_s", "waited_s"}
    for kind in (RankState, Call, Sample, Step, Loader, Model):
        hints = get_type_hints(kind, include_extras=True)
        plain = {name for name, of in hints.items() if name.endswith("_s") and Seconds not in (of, *get_args(of))}
        assert plain <= durations, f"{kind.__name__}: {plain - durations}"


def test_ranks_of_other_nodes_are_named_with_their_hosts(tmp_path: Path) -> None:
    (tmp_path / "node_1").mkdir()
    for node, name in enumerate(("node-a", "node-b")):
        ranks = {q: RankState(rank=q, host=name) for q in (2 * node, 2 * node + 1)}
        state = msgspec.structs.replace(snapshot(), ranks=ranks)
        Nodes(tmp_path / f"node_{node}" if node else tmp_path, node, tmp_path).publish(state, 0.0)
    found = hosts(tmp_path)
    assert found == {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
    there = absent_text([2, 3], found, ["node-a"])
    assert "ranks 2, 3 are on host node-b: run `distdiag profile` there" in there
    assert "rank 1 is not alive on this node; ranks 2, 3 are on host" in absent_text([1, 2, 3], found, ["node-a"])
    assert "ranks 2, 3 are on another node" in absent_text([2, 3], {}, ["node-a"])  # no shared run directory
    assert hosts(tmp_path / "nothing") == {}


def test_a_rank_of_this_node_that_was_left_out_is_not_on_another_node() -> None:
    header = SimpleNamespace(world_size=4, host="node-a")
    views = [
        SimpleNamespace(rank=q, reader=SimpleNamespace(header=lambda: header), text=lambda host: host) for q in range(3)
    ]
    assert "rank 3 is on another node" in (note := not_here(cast("list[RankView]", views), [0, 2], {}) or "")
    assert "rank 1 " not in note


@pytest.mark.parametrize(
    "data", [b"", b"\xa3\xff\xff\xff", b"\x81\xa3\xff\xff\xff\x01", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff"]
)
def test_a_damaged_file_of_another_node_is_reported(data: bytes, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 0, tmp_path)
    (tmp_path / "nodes").mkdir(exist_ok=True)
    (tmp_path / "nodes" / "1.state").write_bytes(data)
    merged, _ = nodes.merged(snapshot(0, 1), 0.0)
    assert set(merged.ranks) == {0, 1} and "1.state" in (nodes.failed or "")


def test_two_polls_of_one_file_count_once(tmp_path: Path) -> None:
    (tmp_path / "node_1").mkdir()
    here, there = Nodes(tmp_path, 0, tmp_path), Nodes(tmp_path / "node_1", 1, tmp_path)

    def partial_and_judged(own: Snapshot) -> tuple[bool, bool]:
        whole, judged = here.merged(own, time.time())
        return whole.partial, judged

    there.publish(snapshot(2, 3, entered_s=9.9), started_unix_s=time.time())
    assert partial_and_judged(snapshot(0, 1)) == (False, True)
    assert partial_and_judged(snapshot(0, 1)) == (True, True)
    assert partial_and_judged(snapshot(0, 1, t_s=11.0)) == (
        True,
        True,
    )  # the wait of 0.1 s is over for all that is known
    assert partial_and_judged(snapshot(0, 1, entered_s=9.0)) == (True, False)  # a rank waits: nothing is judged
    there.publish(snapshot(2, 3), time.time(), closed=True)
    assert partial_and_judged(snapshot(0, 1, entered_s=9.0)) == (False, True)
    assert partial_and_judged(snapshot(0, 1, entered_s=9.0)) == (False, True)  # a finished node writes nothing newer


def test_nothing_is_concluded_from_a_stale_or_foreign_file(tmp_path: Path) -> None:
    here = Nodes(tmp_path, 0, tmp_path)
    (tmp_path / "nodes").mkdir()
    now = time.time()
    old = NodeState(
        node=1, number=9, started_unix_s=now - 60, written_unix_s=now - STALE_S - 1, local_world_size=2,
        ranks=snapshot(2, 3).ranks, groups={},
    )  # fmt: skip
    (tmp_path / "nodes/1.state").write_bytes(msgspec.msgpack.encode(old))
    (tmp_path / "nodes/2.state").write_bytes(b"not a state")
    whole, news = here.merged(snapshot(0, 1), now)
    assert sorted(whole.ranks) == [0, 1] and whole.expected == 2 and news
    assert here.failed is not None and "2.state" in here.failed


def test_ranks_of_a_node_that_falls_silent_are_named_once_others_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node_1").mkdir()
    here, there = Nodes(tmp_path, 0, tmp_path), Nodes(tmp_path / "node_1", 1, tmp_path)
    began, began_s = time.time(), time.monotonic()
    there.publish(snapshot(2, 3), began)
    assert here.merged(snapshot(0, 1), began)[0].ranks[3].life == "running"

    def later(by_s: float) -> list[Finding]:
        monkeypatch.setattr(time, "monotonic", lambda: began_s + by_s)
        waiting = msgspec.structs.replace(snapshot(0, 1, entered_s=1.0), t_s=by_s)
        whole = here.merged(waiting, began)[0]
        assert sorted(whole.ranks) == [0, 1, 2, 3] and whole.expected == 4
        facts = Facts(whole)
        return [f for rule in (rank_lost, stall) for f in rule.evaluate(facts) if isinstance(f, Finding)]

    assert later(STALE_S + 1) == []
    (f,) = later(40.0)
    assert (f.kind, f.cause, f.certainty, f.culprits) == ("rank_lost", "silent", "suspected", (2, 3))
    assert f.victims and set(f.victims) <= {0, 1}


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_makes_no_node_silent_and_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    (tmp_path / "node_1").mkdir()
    here, there = Nodes(tmp_path, 0, tmp_path), Nodes(tmp_path / "node_1", 1, tmp_path)
    began, began_s, wall = time.time(), time.monotonic(), time.time
    there.publish(snapshot(2, 3), began)
    here.merged(snapshot(0, 1), began)
    monkeypatch.setattr(time, "time", lambda: wall() + step_s)

    def lives(after_s: float) -> set[str]:
        monkeypatch.setattr(time, "monotonic", lambda: began_s + after_s)
        return {r.life.value for q, r in here.merged(snapshot(0, 1), began)[0].ranks.items() if q > 1}

    assert lives(STALE_S / 2) == {"running"} and not here.fell_silent() and not here.events
    monkeypatch.setattr(time, "monotonic", lambda: began_s + STALE_S + 1)
    assert here.fell_silent()
    assert lives(STALE_S + 1) == {"silent"} and not here.fell_silent()
    (text,) = here.events
    assert text.startswith("node 1 (ranks 2, 3) not heard of since") and "(13 s)" in text
    there.publish(snapshot(2, 3), began, closed=True)
    assert lives(STALE_S + 2) == {"running"} and here.events[1:] == ["node 1 (ranks 2, 3) heard of again"]


def test_an_unwritable_nodes_directory_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a file where the directory should be")
    nodes = Nodes(tmp_path, 0, tmp_path)
    nodes.publish(snapshot(0, 1), time.time())
    assert nodes.failed is not None and "could not be written" in nodes.failed


@pytest.mark.job
@pytest.mark.timeout(240)
def test_a_rank_of_another_node_is_named(tmp_path: Path) -> None:
    """Two launchers, two nodes of two ranks on this host; rank 3 alone enters a barrier."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(10)
        for i in range(100_000):
            dist.all_reduce(x)
            x /= 4
            time.sleep(0.02)
            if i == 60 and dist.get_rank() == 3:
                dist.barrier()
        """)
    )
    port = str(free_port())
    run = tmp_path / "run"

    def node(number: int) -> AbstractContextManager[Job]:
        given = {"WORLD_SIZE": "4", "GROUP_RANK": str(number), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = ["-m", "distdiag.run", "--run-dir", run, script]
        return launch(command, cwd=tmp_path, timeout=150, env={**given, "MASTER_PORT": port}, fork_ranks=True)

    with node(0) as first, node(1) as second:

        def verdict() -> dict | None:
            answer = distdiag("diagnose", str(run), "--json", timeout=60)
            found = json.loads(answer.stdout)["findings"] if answer.returncode == 1 else []
            return next((f for f in found if f["kind"] == "deadlock"), None)

        f = wait_for(verdict, 120, "the deadlock over both nodes", first)
        assert (f["cause"], f["culprits"], f["victims"]) == ("missing_rank", [3], [0, 1, 2])
        assert f["certainty"] == "proved"
        line = script.read_text().splitlines().index("        dist.barrier()") + 1
        assert [(w["rank"], w["line"]) for w in f["where"]] == [(3, line)]
        wait_for(lambda: "deadlock/missing_rank" in first.stderr() or None, 20, "node 0 to say it", first)
        assert not re.search(r"\branks? [01]\b", second.stderr())  # it judges only its own
    assert not (run / "latest").exists()
