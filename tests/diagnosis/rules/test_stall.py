"""stall: ranks that keep others waiting, unusually long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.job_state import job_state
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Group, Life, Loader, Model, RankState, Sample, Site, Snapshot, Step
from distdiag.diagnosis.rules import deadlock, rank_lost, stall
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits.graph import build
from distdiag.diagnosis.waits.incidents import lock_cycles
from tests.diagnosis.made import LOOP, findings, job, only, proved, rank, waits_for_rank_one


@pytest.mark.parametrize(
    ("activity", "waited_s", "reported"),
    [
        ("user_code", 4.0, False),
        ("user_code", 21.0, True),
        ("stdin", 6.0, True),
        ("checkpoint", 30.0, False),
        ("data", 13.0, True),
    ],
)
def test_patience_depends_on_what_the_late_rank_does(activity: str, waited_s: float, reported: bool) -> None:
    s = waits_for_rank_one(100.0 - waited_s, 100.0, activity=activity)
    assert bool(findings(s, rank_lost, stall)) is reported


@pytest.mark.parametrize(
    ("activity", "end", "text"),
    [
        ("socket", (None, 9), "a process that it started was killed by SIGKILL"),
        ("queue", (3, None), "a process that it started ended with exit code 3"),
        ("user_code", (None, 9), ""),  # what it computes needs no other process
        ("socket", None, ""),
    ],
)
def test_a_rank_that_waits_for_a_process_of_its_own_that_has_died(activity: str, end: Any, text: str) -> None:
    f = only(findings(waits_for_rank_one(30.0, 100.0, activity=activity, dead_child=end), stall))
    assert text in f.message and ("started" in f.message) is bool(text) is ("see what ended that process" in f.advice)


DUTY = """def draw(net):
    {work}
def main():
    for epoch in range(3):
        if rank == 1:
            draw(net)
        {call}
main()
"""


@pytest.mark.parametrize(
    ("call", "work", "activity", "waited_s", "reported"),
    [
        ("dist.barrier()", "[net(i) for i in range(9)]", "user_code", 40.0, False),
        ("dist.barrier()", "[net(i) for i in range(9)]", "user_code", 70.0, True),
        ("dist.barrier()", "subprocess.run(upload)", "socket", 40.0, False),
        ("dist.barrier()", "server.recv(4)", "socket", 40.0, True),
        ("dist.barrier()", "time.sleep(50)", "sleep", 40.0, False),
        ("dist.barrier()", "while busy(): time.sleep(1)", "sleep", 40.0, True),
        ("dist.all_reduce(loss)", "time.sleep(50)", "sleep", 15.0, True),
        ("dist.all_reduce(loss)", "[net(i) for i in range(9)]", "user_code", 40.0, True),
        ("dist.broadcast(order, 1)", "[net(i) for i in range(9)]", "user_code", 40.0, False),
        ("dist.broadcast(order, 0)", "[net(i) for i in range(9)]", "user_code", 40.0, True),
    ],
)
def test_others_wait_longer_in_a_barrier_for_the_work_of_one_rank_under_a_condition_on_the_rank(
    call: str, work: str, activity: str, waited_s: float, reported: bool
) -> None:
    def stack(*lines: int) -> tuple[Site, ...]:
        names = ("draw", "main", "<module>")[-len(lines) :]
        return tuple(Site("/job/train.py", n, name) for n, name in zip(lines, names, strict=True))

    op, root = call[5:].split("(")[0], int(call[-2]) if call[-2].isdigit() else None
    waits = Call(op=op, group="default_pg", seq=7, entered_s=100.0 - waited_s, root=root, site=stack(7)[0])
    waiting = rank(0, blocked=waits, enqueued={"default_pg": 7}, user_stack=stack(7, 8), activity="waiting")
    frames = stack(2, 6, 8)
    late = rank(1, enqueued={"default_pg": 6}, user_stack=frames, current_site=frames[0], activity=activity)
    found = findings(job(waiting, late), stall, source={"/job/train.py": DUTY.format(call=call, work=work)}.get)
    assert bool(found) is reported
    head = "`if rank == 1` at train.py:5 keeps that work to rank 1: "
    assert all(f.advice.startswith(head) or work.startswith("while") for f in found)


BUDGET = """def main():
{around}
        for batch in batches:
            if clock() > end:
                break
            all_reduce(batch)
        export(net)
main()
"""


@pytest.mark.parametrize(("around", "left"), [("    if resumed:", True), ("    for epoch in range(9):", False)])
def test_a_late_rank_that_has_left_the_loop_of_the_others_for_good_is_said_to(around: str, left: bool) -> None:
    """In a loop of epochs the others may be in the next one, where they wait for its work of this one."""

    def stack(line: int) -> tuple[Site, ...]:
        return Site("/job/train.py", line, "main"), Site("/job/train.py", 8, "<module>")

    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=30.0, site=stack(6)[0])
    waiting = rank(0, blocked=waits, enqueued={"default_pg": 7}, user_stack=stack(6), activity="waiting")
    late = rank(1, enqueued={"default_pg": 6}, user_stack=stack(7), current_site=stack(7)[0], activity="user_code")
    f = only(findings(job(waiting, late), stall, source={"/job/train.py": BUDGET.format(around=around)}.get))
    head = (
        "rank 1 left the loop before all_reduce (train.py:6): `if clock() > end` (train.py:4); rank 1 has not entered"
    )
    assert (f.message.startswith(head), "let all ranks decide together" in f.advice) == (left, left)


@pytest.mark.parametrize(
    ("activity", "line", "text"),
    [
        ("socket", "answer = connection.recv(64)", "rank 1 waits on a socket"),
        ("socket", 'subprocess.run(["aws", "s3", "cp", path])', "rank 1 waits for a process that it started at"),
        ("socket", "code = proc.wait()", "rank 1 waits for a process that it started"),
        ("socket", "batch = loop.run_until_complete(queue.get())", "rank 1 waits in an event loop"),
        ("lock", "with self.lock:", "rank 1 waits for a lock"),
        ("lock", "batch = self.ready.get()", "rank 1 waits on a queue"),
        ("lock", "views = self.pool.map(augment, jobs)", "rank 1 waits for a thread or process that it started"),
        ("lock", "return self.future.result()", "rank 1 waits for a thread or process that it started"),
        ("lock", "writer.join()", "rank 1 waits for a thread or process that it started"),
    ],
)
def test_what_a_rank_waits_for_is_read_from_its_line(activity: str, line: str, text: str) -> None:
    s = waits_for_rank_one(85.0, 100.0, activity=activity)
    source = {LOOP.file: "\n" * (LOOP.line - 1) + "    " + line}.get
    assert text in only(findings(s, stall, source=source)).message


@pytest.mark.parametrize(
    ("line", "imports"),
    [("import views", True), ("mod = importlib.import_module(name)", True), ("runpy.run_path(script)", False)],
)
def test_a_rank_that_waits_within_an_import_is_said_to(line: str, imports: bool) -> None:
    """Its threads may wait for the end of that import."""
    wait, body, script = (
        Site(f"/job/{f}.py", 1, n) for f, n in (("views", "fill"), ("views", "<module>"), ("run", "main"))
    )
    s = waits_for_rank_one(85.0, 100.0, activity="lock", current_site=wait, user_stack=(wait, body, script))
    f = only(findings(s, stall, source={"/job/run.py": line, "/job/views.py": "x = pool.map(draw, jobs)"}.get))
    assert ("while run.py:1 imports views.py" in f.message) is imports is ("import" in f.advice)


@pytest.mark.parametrize(
    ("calls", "waited_s", "reported"),
    [(0, 40.0, False), (0, 70.0, True), (8, 25.0, False), (8, 40.0, True), (40, 25.0, True)],
)
@pytest.mark.parametrize("activity", ["user_code", "data"])
def test_before_the_first_step_others_wait_longer_the_fewer_collectives_there_were(
    calls: int, waited_s: float, reported: bool, activity: str
) -> None:
    """Compilation, lazy initialisation and the reading of an index come first, the latter also in the first batch."""
    before = tuple(Call(op="barrier", group="default_pg", seq=n, completed_s=0.0) for n in range(calls))
    s = waits_for_rank_one(100.0 - waited_s, 100.0, activity=activity, step=0, calls=before)
    assert bool(findings(s, stall)) is reported


def test_a_first_batch_without_workers_is_loaded_by_the_rank_itself() -> None:
    """Before its first batch, a loader is not known to be one of the training."""
    loader = Loader(site=LOOP, length=9, batch_size=4, workers=0)
    s = waits_for_rank_one(20.0, 100.0, activity="data", step=0, loaders=(loader,), user_stack=(LOOP,))
    assert "num_workers=0" in (only(findings(s, stall)).advice or "")


def test_a_wait_that_is_too_short_for_a_stall_is_in_the_state_of_the_job() -> None:
    s = waits_for_rank_one(70.0, 100.0, activity="checkpoint")
    assert findings(s, rank_lost, stall) == []
    place = at(s.ranks[1].current_site)
    assert job_state(s, build(s), [], False) == (
        "running", f"rank 0 waits for rank 1,{place}, for 30 s (judged from 60 s on)"
    )  # fmt: skip


def _waiting_for(*late: RankState) -> Snapshot:
    """Rank 0 has waited 15 s for `late` in an all_reduce."""
    blocked = Call(op="all_reduce", group="default_pg", seq=7, entered_s=85.0)
    return job(rank(0, blocked=blocked, enqueued={"default_pg": 7}), *late, t_s=100.0)


def test_ranks_that_wait_at_one_line_are_one_finding() -> None:
    """All wait for a key that one rank should set: not a finding for each of 63 ranks."""

    def late(number: int, line: int, moved_s: float = 0.0, **more: Any) -> RankState:
        made = Call(op="all_reduce", group="default_pg", seq=6, entered_s=moved_s, completed_s=moved_s)
        place = Site(LOOP.file, line, "plan")
        known = {"activity": "socket", "current_site": place, "user_stack": (place,), "calls": (made,), **more}
        return rank(number, enqueued={"default_pg": 6}, **known)

    (f,) = findings(_waiting_for(late(1, 30), late(2, 30), late(3, 30)), stall)
    assert (f.culprits, f.victims) == ((1, 2, 3), (0,))
    assert f.message.startswith("each of ranks 1, 2, 3 waits on a socket")
    assert {(w.rank, w.line) for w in f.where} == {(1, 30), (2, 30), (3, 30)}
    other_line = findings(_waiting_for(late(1, 30), late(2, 30), late(3, 50)), stall)
    assert [f.culprits for f in other_line] == [(1, 2), (3,)]
    assert findings(_waiting_for(late(1, 30), late(2, 30, moved_s=87.5)), stall)[0].culprits == (1, 2)  # nearly as long
    assert findings(_waiting_for(late(1, 30), late(2, 30, moved_s=99.0)), stall)[0].culprits == (1,)  # on its way
    (f,) = findings(_waiting_for(late(1, 30, activity="user_code"), late(2, 30)), stall)  # one looks busy for a moment
    assert f.culprits == (1, 2)


def test_a_rank_that_validates_alone_has_the_patience_of_a_checkpoint() -> None:
    def found(function: str, waited_s: float) -> bool:
        stack = (Site(LOOP.file, 9, function), LOOP)
        return bool(
            findings(waits_for_rank_one(100.0 - waited_s, 100.0, activity="user_code", user_stack=stack), stall)
        )

    assert found("crop", 30.0)
    assert not found("run_validation", 30.0) and not found("evaluateModel", 30.0)
    assert found("run_validation", 61.0)


def test_a_rank_that_has_not_sent_a_message_stalls_its_peer() -> None:
    def message(op: str) -> str:
        blocked = Call(op=op, group="default_pg", peer=1, nth=3, entered_s=60.0, bytes=128)
        ranks = rank(0, blocked=blocked, p2p_issued={f"{op}:1:0:default_pg": 3}), rank(1, activity="socket")
        return only(findings(job(*ranks, t_s=100.0), stall)).message

    assert message("recv").startswith(
        "rank 1 waits on a socket, a pipe or a key of a store at train.py:40 in main; it has not sent what rank 0 waits for in recv from rank 1"
    )
    assert message("send").startswith(
        "rank 1 waits on a socket, a pipe or a key of a store at train.py:40 in main; it has not received what rank 0 waits for in send to rank 1"
    )


def test_a_rank_whose_model_is_in_eval_mode_validates() -> None:
    """Whatever its functions are called: `on_epoch_end` of a callback."""

    def found(evaluating: bool, waited_s: float) -> bool:
        models = (Model(group="default_pg", evaluating=evaluating),)
        s = waits_for_rank_one(100.0 - waited_s, 100.0, activity="user_code", host_blocked=True, models=models)
        return bool(findings(s, stall))

    assert found(False, 12.0)
    assert not found(True, 50.0) and found(True, 61.0)


def test_a_rank_that_computes_intermittently_is_not_asleep() -> None:
    def found(cpu_pct: float | None, waited_s: float) -> bool:
        late = {"activity": "user_code", "host_blocked": True, "cpu_pct": cpu_pct}
        return bool(findings(waits_for_rank_one(100.0 - waited_s, 100.0, **late), stall))

    assert found(None, 12.0) and found(1.5, 12.0)
    assert not found(15.0, 12.0) and found(15.0, 21.0)


def test_a_rank_that_recovered_from_long_waits_has_more_patience() -> None:
    s = waits_for_rank_one(75.0, 100.0, activity="user_code", longest_delay_s=15.0)
    assert findings(s, rank_lost, stall) == []


def test_a_file_lock_held_by_the_waiting_rank_is_a_deadlock() -> None:
    s = waits_for_rank_one(99.0, 100.0, activity="lock", lock_holders=(0,))
    f = only([deadlock.lock_finding(s, lock) for lock in lock_cycles(s, build(s))])
    assert (f.kind, f.cause, f.certainty) == ("deadlock", "file_lock", "proved")
    assert (f.culprits, f.victims) == ((0,), (1,))


def test_a_stall_names_an_open_collective_that_others_never_enter() -> None:
    """A checkpoint in a thread, on some ranks only: the message names the open collective and the line of its rank."""
    open_save = {"enqueued": {"default_pg": 6, "save": 3}, "completed": {"default_pg": 6, "save": 2}}
    s = waits_for_rank_one(80.0, 100.0, activity="lock")
    s = msgspec.structs.replace(s, ranks={**s.ranks, 1: msgspec.structs.replace(s.ranks[1], **open_save)})
    s.groups["save"] = Group(name="save", ranks=(0, 1))
    f = only(findings(s, rank_lost, stall))
    assert f.kind == "stall" and f.culprits == (1,)
    assert ", with collective #3 (save) in flight, which rank 0 has not entered" in f.message
    assert "rank 0 must enter collective #3 (save), too" in f.advice
    text = "\ndef save():\n    if get_rank() == 0:\n        future.result()\n\ndef main():\n    save()\n    step()\n"
    stacks = {0: (Site("/t.py", 8, "main"),), 1: (Site("/t.py", 4, "save"), Site("/t.py", 7, "main"))}
    alone = {q: msgspec.structs.replace(s.ranks[q], user_stack=stack) for q, stack in stacks.items()}
    f = only(findings(msgspec.structs.replace(s, ranks=alone), rank_lost, stall, source={"/t.py": text}.get))
    assert "or no rank may: only rank 1 is under `if get_rank() == 0` at t.py:3" in f.advice
    come = msgspec.structs.replace(s.ranks[0], enqueued={**s.ranks[0].enqueued, "save": 3})
    s = msgspec.structs.replace(s, ranks={**s.ranks, 0: come})
    assert "in flight" not in only(findings(s, rank_lost, stall)).message


def test_a_rank_whose_thread_ended_is_to_blame_for_the_threads_that_wait_for_it() -> None:
    """The main threads of ranks 0 and 2 wait for their writers, which wait for that of rank 1; rank 1 trains on, and waits for them."""
    step = Call(op="all_reduce", group="default_pg", seq=7, site=Site("/t.py", 20, "main"), entered_s=80.0)
    join = {"activity": "lock", "current_site": Site("/t.py", 9, "finish"), "host_blocked": True}
    open_save = {"enqueued": {"default_pg": 6, "save": 3}, "completed": {"default_pg": 6, "save": 2}}
    went_on = {"enqueued": {"default_pg": 7, "save": 2}, "completed": {"default_pg": 6, "save": 2}}

    def found(late: Sequence[int], samples: tuple[Sample, ...] = ()) -> Finding:
        ranks = [rank(q, step=9, **open_save, **join) for q in late] + [
            rank(1, step=9, blocked=step, samples=samples, **went_on)
        ]
        s = job(*ranks)
        s.groups["save"] = Group(name="save", ranks=tuple(sorted(s.ranks)))
        return only(findings(s, rank_lost, stall, source={"/t.py": "\n" * 8 + "self.thread.join()\n"}.get))

    f = found((0, 2))
    assert (f.culprits, f.victims) == ((1,), (0, 2))
    assert f.message.startswith(
        "rank 1 has not entered collective #3 (save), which ranks 0, 2 have in flight; each of ranks 0, 2 waits"
    )
    assert found((0,)).culprits == (0,), "one against one: either may be wrong"
    error = Sample(kind="thread_ended", step=8, value=0.0, name="OSError: no space left", site=Site("/t.py", 5, "dump"))
    f = found((0,), (error,))
    assert f.culprits == (1,)
    assert f.message.startswith(
        "a thread of rank 1 had ended by OSError: no space left, raised at t.py:5 in dump; rank 1 "
    )
    fed = waits_for_rank_one(80.0, 100.0, activity="queue", samples=(error,))
    f = only(findings(fed, rank_lost, stall))
    assert f.culprits == (1,) and f.message.startswith("a thread of rank 1 had ended by OSError: no space left, ")
    assert f.advice.startswith("fix that error on rank 1; let a thread that fails end its rank")


@pytest.mark.parametrize(("waited_s", "severity"), [(9.0, "warning"), (25.0, "error")])
def test_a_rank_stuck_in_native_code_stalls_the_others(waited_s: float, severity: str) -> None:
    s = waits_for_rank_one(100.0 - waited_s, 100.0, activity="gil_held")
    f = only(findings(s, rank_lost, stall))
    assert (f.kind, f.cause, f.severity, f.certainty) == ("stall", "gil_held", severity, "suspected")
    assert (f.culprits, f.victims) == ((1,), (0,))
    assert f.where[0].state == "gil_held" and (f.where[0].file, f.where[0].line) == (LOOP.file, LOOP.line)
    assert "holds the GIL" in f.message and "native call" in f.advice


def test_native_code_without_long_waits_is_no_stall() -> None:
    s = waits_for_rank_one(95.0, 100.0, activity="gil_held")
    assert findings(s, rank_lost, stall) == []
    alone = job(rank(0, enqueued={"default_pg": 6}), rank(1, enqueued={"default_pg": 6}, activity="gil_held"))
    assert findings(alone, rank_lost, stall) == []
    unknown = Call(op="all_reduce", group="default_pg", seq=7, entered_s=None)  # the start is not known
    s = job(
        rank(0, blocked=unknown, enqueued={"default_pg": 7}, activity="waiting"),
        rank(1, enqueued={"default_pg": 6}, activity="gil_held"),
    )
    assert findings(s, rank_lost, stall) == []


def _staged(waiter_since_s: float, late_moved_s: float, phase: str = "backward") -> Snapshot:
    """Ranks 0 and 1 have trained as a pair since 60 s; rank 2 has waited for both in a barrier since 0 s."""
    barrier = Call(op="barrier", group="default_pg", seq=7, entered_s=0.0)
    reduce = Call(op="all_reduce", group="pair", seq=31, entered_s=waiter_since_s)
    step = Step(
        step=30, end_s=late_moved_s, step_ms=200, data_ms=0, forward_ms=60, backward_ms=100, optimizer_ms=20, wait_ms=0,
        other_ms=20, ready_s=None, batch=30, samples=8, loss=None,
    )  # fmt: skip
    s = job(
        rank(0, blocked=reduce, activity="waiting", phase=phase, enqueued={"default_pg": 6, "pair": 31}, steps=(step,)),
        rank(1, enqueued={"default_pg": 6, "pair": 30}, steps=(step,)),
        rank(2, blocked=barrier, activity="waiting", phase="collective", enqueued={"default_pg": 7}),
    )
    s.groups["pair"] = Group(name="pair", ranks=(0, 1))
    return s


def test_the_delay_of_a_rank_counts_from_its_own_newest_step() -> None:
    assert findings(_staged(99.8, 99.7), stall) == [], "rank 2 has waited for 100 s, but rank 1 trains on"
    f = only(findings(_staged(70.0, 69.0), stall))
    assert f.culprits == (1,) and f.victims == (0, 2) and "have waited 31 s" in f.message


def test_a_rank_that_makes_steps_while_another_waits_within_a_step_is_late() -> None:
    """One rank trains without averaging, and the other never gets its gradients."""
    assert only(findings(_staged(70.0, 99.7), stall)).culprits == (1,)
    assert findings(_staged(70.0, 99.7, phase="collective"), stall) == []


def _ahead(steps: int, waiter_steps: int, waited_s: float, **late: Any) -> Snapshot:
    """Rank 1 keeps training, `steps` so far, while rank 0 waits in a barrier after its own steps."""
    barrier = Call(op="barrier", group="default_pg", seq=7, entered_s=100.0 - waited_s)
    step = Step(
        step=steps, end_s=99.9, step_ms=20, data_ms=0, forward_ms=6, backward_ms=10, optimizer_ms=2, wait_ms=0, other_ms=2,
        ready_s=None, batch=30, samples=8, loss=None,
    )  # fmt: skip
    return job(
        rank(0, blocked=barrier, activity="waiting", phase="collective", enqueued={"default_pg": 7}, step=waiter_steps),
        rank(1, **{"enqueued": {"default_pg": 6}, "steps": (step,), "step": steps} | late),
    )


def test_a_rank_that_trains_alone_while_the_others_are_in_a_barrier_stalls_them_after_a_minute() -> None:
    """Each rank trains until its own loss is small, which one never reaches."""
    f = only(findings(_ahead(900, 120, waited_s=70.0), stall))
    assert (f.kind, f.severity, f.culprits, f.victims) == ("stall", "warning", (1,), (0,))
    assert "keeps training" in f.message and "780 steps ahead of rank 0" in f.message
    assert findings(_ahead(900, 120, waited_s=40.0), stall) == [], "a longer round of local training"
    assert findings(_ahead(900, 0, waited_s=70.0), stall) == [], "a stage that rank 0 has no part in"
    assert findings(_ahead(100, 120, waited_s=70.0), stall) == [], "it catches up"
    assert findings(_ahead(900, 120, waited_s=70.0, longest_delay_s=30.0), stall) == [], "it has come after as long"


def test_a_team_of_some_ranks_that_trains_while_the_others_wait_is_no_stall() -> None:
    s = _ahead(900, 120, waited_s=70.0, enqueued={"default_pg": 6, "team": 80})
    s.groups["team"] = Group(name="team", ranks=(1,))
    assert findings(s, stall) == []


def test_a_stall_stays_open_when_its_ranks_are_killed() -> None:
    """A process that is being killed no longer sleeps in its call, for several polls on a busy machine."""

    def at(t_s: float, **waiter: Any) -> Snapshot:
        s = waits_for_rank_one(70.0, t_s)
        return msgspec.structs.replace(s, ranks={**s.ranks, 0: msgspec.structs.replace(s.ranks[0], **waiter)})

    diagnosis = Diagnosis(source=lambda path: None)
    for t_s in (80.0, 95.0, 100.0):
        diagnosis.update(at(t_s))
    dying: dict[str, Any] = {"blocked": None, "activity": "user_code"}
    for t_s in (100.25, 100.5, 100.75):
        diagnosis.update(at(t_s, **dying))
    assert only(diagnosis.open()).kind == "stall"
    for t_s in (101.0, 101.25, 101.5):  # the waiting rank has continued
        diagnosis.update(at(t_s, **dying, step=101, completed={"default_pg": 7}))
    assert diagnosis.open() == []


@pytest.mark.parametrize(
    ("phase", "op", "name"),
    [
        ("forward", "broadcast", "by DDP, before the forward"),
        ("backward", "all_reduce", "DDP's gradients, in backward"),
    ],
)
def test_a_collective_issued_by_ddp_is_named(phase: str, op: str, name: str) -> None:
    """The user's line calls no collective."""
    waits = Call(op=op, group="default_pg", seq=7, entered_s=50.0)
    waiter = rank(0, blocked=waits, phase=phase, enqueued={"default_pg": 7}, activity="waiting")
    late = rank(1, enqueued={"default_pg": 6})
    assert f"({name}); rank 0 has waited" in only(findings(job(waiter, late), stall)).message
    by_hand = msgspec.structs.replace(waiter, calls=(waits,))
    assert name not in only(findings(job(by_hand, late), stall)).message
    finished = msgspec.structs.replace(late, life="finished", activity="finished")
    assert f"({name}); rank 0 waits for it" in only(proved(job(waiter, finished))).message


STUCK = Site("/job/train.py", 105, "main")


def motionless(still_s: float, **more: Any) -> list[Any]:
    ranks = [
        rank(q, current_site=STUCK, activity_since_s=200.0 - still_s - q, **{"host_blocked": True, **more})
        for q in (0, 1)
    ]
    source = {STUCK.file: "\n" * (STUCK.line - 1) + "    loss.backward()"}.get
    return findings(job(*ranks, t_s=200.0), stall, source=source)


def test_a_job_in_which_nobody_moves_and_nobody_waits_is_a_stall() -> None:
    f = only(motionless(70.0))
    assert (f.cause, f.severity, f.certainty, f.culprits, f.victims) == ("unknown", "warning", "suspected", (), (0, 1))
    assert f.message == (
        "no rank has moved for 70 s, and none is known to wait for another: ranks 0, 1 are at train.py:105 in main"
    )
    assert only(motionless(310.0, host_blocked=False))


def test_collectives_that_threads_have_in_flight_show_what_holds_up_ranks_that_do_not_move() -> None:
    """Each rank's pool has one thread, and the tasks are not in one order: who waits for a thread is known by no frame."""

    def found(*first: str) -> Finding:
        ranks = []
        for q, group in enumerate(first):
            site = Site("/t.py", 3 + q, "reduce")
            call = Call(op="all_reduce", group=group, seq=4, site=site, entered_s=100.0, other_thread=True)
            counts = {name: 4 if name == group else 3 for name in ("g", "h")}
            at_rest = {"current_site": STUCK, "host_blocked": True, "activity": "worker", "activity_since_s": 110.0}
            own = (
                {"calls": (call,), "enqueued": counts, "completed": {"g": 3, "h": 3}}
                if group
                else {"enqueued": {"g": 3, "h": 3}}
            )
            ranks.append(rank(q, step=9, **at_rest, **own))
        groups = {name: Group(name=name, ranks=(0, 1), backend="gloo") for name in ("g", "h")}
        return only(findings(job(*ranks, t_s=200.0, groups=groups), stall))

    f = found("g", "h")
    assert (f.severity, f.certainty, f.culprits) == ("warning", "suspected", ())
    assert f.message == (
        "no rank has moved for 90 s: rank 0 is at train.py:105 in main, with all_reduce #4 (g) at t.py:3 in reduce in flight, which "
        "rank 1 has not entered; rank 1 is at train.py:105 in main, with all_reduce #4 (h) at t.py:4 in reduce in flight, which rank 0 "
        "has not entered"
    )
    assert f.advice.startswith("each of these collectives lacks a rank that is in another of them")
    f = found("g", "")
    assert "; rank 1 is at train.py:105 in main" in f.message and f.advice.startswith(
        "rank 1 must enter all_reduce #4 (g), too"
    )
    assert "none is known to wait" in found("", "").message


@pytest.mark.parametrize(
    "change",
    [
        {"still_s": 50.0},
        {"still_s": 200.0, "host_blocked": False},
        {"still_s": 90.0, "step": 0},
        {"still_s": 90.0, "life": "finished"},
        {"still_s": 90.0, "activity_since_s": None},
    ],
    ids=["not long", "computes", "no step yet", "ended", "not known"],
)
def test_a_job_that_may_move_is_no_stall(change: dict[str, Any]) -> None:
    if "activity_since_s" in change:
        ranks = [rank(q, current_site=STUCK, host_blocked=True) for q in (0, 1)]
        assert findings(job(*ranks, t_s=200.0), stall) == []
    else:
        assert motionless(**change) == []


def test_a_job_that_sleeps_on_purpose_is_no_stall() -> None:
    ranks = [rank(q, current_site=STUCK, activity_since_s=20.0, host_blocked=True) for q in (0, 1)]
    source = {STUCK.file: "\n" * (STUCK.line - 1) + "    time.sleep(3600)  # keep the pod"}.get
    assert findings(job(*ranks, t_s=200.0), stall, source=source) == []


def test_a_job_that_is_stopped_while_a_rank_waits_says_for_whom() -> None:
    """The person who presses Ctrl-C has waited less than the rule."""
    s = waits_for_rank_one(70.0, 100.0, activity="checkpoint")
    diagnosis = Diagnosis(lambda path: None)
    diagnosis.update(s)
    unwinding = msgspec.structs.replace(
        s.ranks[1], activity="lock", handling="KeyboardInterrupt", current_site=Site("/job/pool.py", 3)
    )
    for t_s in (100.25, 100.5):  # where that brings it is nothing that the others had waited for
        assert diagnosis.update(msgspec.structs.replace(s, t_s=t_s, ranks={0: s.ranks[0], 1: unwinding})) == []
    gone = {q: msgspec.structs.replace(r, life=Life.KILLED, signal=2, ended_s=100.5) for q, r in s.ranks.items()}
    diagnosis.update(msgspec.structs.replace(s, t_s=101.0, ranks=gone), final=True)
    how_long = f"for rank 1,{at(s.ranks[1].current_site)}, for 30 s (judged from 60 s on)"
    assert diagnosis.state_text == f"stopped by SIGINT (from the launcher or a person), while rank 0 waited {how_long}"
    (check,) = (c for c in diagnosis.checks.all if c.kind == "stall")
    assert check.reason.startswith("rank 0 waits for rank 1")


def _start(waited_s: float, world: int, *others: RankState) -> Snapshot:
    """Ranks 0 and 1 wait in init_process_group."""
    name, site = "init_process_group 1", Site("/job/begin.py", 6, "main")
    call = Call(op="init_process_group", group=name, seq=1, entered_s=100.0 - waited_s, site=site)
    waiting = (rank(q, step=0, models=(), blocked=call, enqueued={name: 1}, calls=(call,)) for q in range(2))
    groups = {name: Group(name=name, ranks=tuple(range(world)))}
    return job(*waiting, *others, world_size=world, groups=groups)


@pytest.mark.parametrize(
    ("world", "head"),
    [
        (3, "rank 2 was never seen and has not joined in init_process_group(); "),
        (4, "ranks 2, 3 were never seen, and at least one of them has not joined in init_process_group(); "),
    ],
)
def test_ranks_that_were_never_seen_keep_a_start_waiting(world: int, head: str) -> None:
    f = only(findings(_start(60.0, world), stall))
    assert f.message == f"{head}ranks 0, 1 have waited 60 s at begin.py:6 in main"
    assert (f.cause, f.certainty, f.severity) == ("unknown", "suspected", "warning")
    assert (f.culprits, f.victims) == (tuple(range(2, world)), (0, 1))
    assert "launcher" in f.advice and "MASTER_ADDR" in f.advice


@pytest.mark.parametrize(
    ("waited_s", "late"),
    [(59.0, ()), (90.0, (rank(2, step=0, models=(), life=Life.CRASHED, exception="OSError: no space"),))],
    ids=["not long enough", "one that was seen has not come"],
)
def test_a_start_that_may_wait_for_a_rank_that_was_seen(waited_s: float, late: tuple[RankState, ...]) -> None:
    assert findings(_start(waited_s, 4, *late), stall) == []


@pytest.mark.parametrize(
    ("waited_s", "severity", "attempt", "earlier", "advice"),
    [
        (59.0, None, 0, {}, ""),
        (60.0, "warning", 0, {}, "check that every rank started, that MASTER_ADDR"),
        (181.0, "error", 1, {}, "the launcher's store may still have the addresses"),
        (60.0, "warning", 0, {"init_process_group 2": 1}, "the launcher's store may still have the addresses"),
    ],
)
def test_ranks_that_are_all_in_init_process_group_do_not_find_each_other(
    waited_s: float, severity: str | None, attempt: int, earlier: dict[str, int], advice: str
) -> None:
    s = _start(waited_s, 2)
    ranks = {q: msgspec.structs.replace(r, enqueued=r.enqueued | earlier) for q, r in s.ranks.items()}
    found = findings(msgspec.structs.replace(s, ranks=ranks, attempt=attempt), deadlock, stall)
    assert [f.severity for f in found] == [severity] * (severity is not None)
    for f in found:
        assert f.message.startswith("all 2 ranks have been in init_process_group() at begin.py:6 in main for ")
        assert str(f.advice).startswith(advice)


def test_ranks_that_do_not_meet_in_the_first_call_of_a_group_made_again() -> None:
    again = Group(name="default_pg#2", ranks=(0, 1), backend="gloo")
    call = Call(op="all_gather", group=again.name, seq=1, entered_s=20.0, site=STUCK)
    earlier = {"init_process_group 2": 1, again.name: 1}
    ranks = [rank(q, step=9, blocked=call, calls=(call,), enqueued=earlier, host_blocked=True) for q in (0, 1)]
    f = only(findings(job(*ranks, groups={again.name: again}, t_s=81.0), deadlock, stall))
    assert f.message.startswith("all 2 ranks have been in all_gather #1")
    assert str(f.advice).startswith("the launcher's store may still have the addresses")


def test_what_could_not_be_compared_is_not_checked() -> None:
    diagnosis = Diagnosis(lambda path: None)
    alone = _start(0.0, 3)
    diagnosis.update(msgspec.structs.replace(alone, ranks={0: rank(0, step=0, models=())}, t_s=50.0))
    diagnosis.update(_start(30.0, 3))
    reasons = {c.kind: c.reason for c in diagnosis.checks.all if not c.checked}
    assert reasons["deadlock"] == reasons["mismatch"] == "2 of 3 ranks have reported"
    waits = "ranks 0, 1 wait in init_process_group(), at begin.py:6 in main, for rank 2, which was never seen, for 30 s"
    assert reasons["stall"] == f"{waits} (judged from 60 s on)"


@pytest.mark.parametrize(("waited_s", "reported"), [(30.0, False), (200.0, True)])
def test_a_start_that_is_stopped_says_for_whom_it_waited(waited_s: float, reported: bool) -> None:
    diagnosis = Diagnosis(lambda path: None)
    s = _start(waited_s, 3)
    diagnosis.update(s)
    gone = {q: msgspec.structs.replace(r, life=Life.KILLED, signal=9, ended_s=100.5) for q, r in s.ranks.items()}
    diagnosis.update(msgspec.structs.replace(s, t_s=101.0, ranks=gone), final=True)
    stopped = "stopped by SIGKILL (from the launcher or a person)"
    waited = ", while ranks 0, 1 waited in init_process_group(), at begin.py:6 in main, for rank 2, which was never seen, for 30 s (judged from 60 s on)"
    assert diagnosis.state_text == stopped + ("" if reported else waited)
    assert [f.culprits for f in diagnosis.open()] == ([(2,)] if reported else [])


@pytest.mark.parametrize(
    ("line", "advised"),
    [
        ("with self.counts_lock:", True),
        ("_guard.acquire()", True),
        ("with FileLock(path):", False),
        ("raw = handle.read()", False),
    ],
)
def test_a_worker_at_the_line_of_a_lock_may_have_been_forked_while_it_was_held(line: str, advised: bool) -> None:
    worker = Site("/job/stats.py", 3, "count")
    s = waits_for_rank_one(10.0, 100.0, activity="data", workers=(worker,))
    f = only(findings(s, stall, source={worker.file: f"\n\n    {line}\n"}.get))
    assert "its worker is at stats.py:3 in count" in f.message
    assert ("forkserver" in f.advice) is advised and ("that line of the dataset" in f.advice) is not advised


QUEUE = """def actor(inbox):
    sync(net)
    if short:
        return
    inbox.put(episode)

def learner(inbox):
    batch = inbox.get()
"""


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        (QUEUE, True),
        (QUEUE.replace("inbox.put", "outbox.put"), False),
        (QUEUE + "    inbox.put(None)\n", False),
    ],
    ids=["cycle", "another queue", "its own"],
)
def test_a_queue_that_only_the_waiting_ranks_fill_is_a_cycle(text: str, cycle: bool) -> None:
    get, sync = Site("/job/rl.py", 8, "learner"), Site("/job/rl.py", 2, "actor")
    s = waits_for_rank_one(20.0, 100.0, activity="socket", current_site=get, user_stack=(get,))
    waiting = msgspec.structs.replace(s.ranks[0], user_stack=(sync,))
    f = only(
        findings(msgspec.structs.replace(s, ranks={**s.ranks, 0: waiting}), stall, source={"/job/rl.py": text}.get)
    )
    fills = "the queue `inbox`, which rank 0 fills at rl.py:5 in actor, and this waits for it in turn: a cycle, unless"
    assert (fills in f.message) is cycle and f.cost == ("the job makes no progress" if cycle else "every rank waits")
    assert ("`inbox.put(…)` at rl.py:5 in actor: `if short` at rl.py:3" in (f.advice or "")) is cycle


PRODUCER = """class Producer(Thread):
    def run(self):
        try:
            for path in self.paths:
                self.q.put(load(path))
        except Exception as e:
            log.warning("stopped: %s", e)

class Batches:
    def __next__(self):
        return self.q.get()
"""


RETRIES = """class Producer(Thread):
    def run(self):
        while True:
            try:
                self.q.put(load(self.path))
            except Exception as e:
                log.warning("stopped: %s", e)

class Batches:
    def __next__(self):
        return self.q.get()
"""


@pytest.mark.parametrize(
    ("text", "put", "handler"),
    [
        (PRODUCER, True, True),
        (PRODUCER.replace('log.warning("stopped: %s", e)', "raise"), True, False),
        (PRODUCER.replace("self.q.put", "self.out.put"), False, False),
        (PRODUCER + "\ndef stop(self):\n    self.q.put(None)\n", False, False),
        (RETRIES, True, False),
        (RETRIES.replace('log.warning("stopped: %s", e)', "break"), True, True),
        (
            PRODUCER.replace("self.q.put(load(path))", "save(self.q.get())").replace(
                "return self.q.get()", "self.q.put(batch)"
            ),
            True,
            True,
        ),
    ],
    ids=["quiet", "raises", "another queue", "two places", "goes on", "leaves the loop", "empties"],
)
def test_the_other_end_of_the_queue_that_a_rank_waits_for_may_have_ended(text: str, put: bool, handler: bool) -> None:
    get = Site("/job/data.py", 11, "__next__")
    s = waits_for_rank_one(20.0, 100.0, activity="queue", current_site=get, user_stack=(get,))
    f = only(findings(s, stall, source={get.file: text}.get))
    does = "empties" if "put(batch)" in text else "fills"
    assert (f"whether what {does} that queue at data.py:5 in run still runs" in f.advice) is put
    assert ("`except Exception as e` at data.py:6 in run catches what ends it" in f.advice) is handler


@pytest.mark.parametrize(("test", "gone"), [("os.path.exists(lock)", True), ("not lock.exists()", False)])
def test_a_file_that_a_rank_waits_to_vanish_may_be_a_lock_of_a_killed_process(test: str, gone: bool) -> None:
    nap = Site("/job/build.py", 2, "wait")
    s = waits_for_rank_one(20.0, 100.0, activity="sleep", current_site=nap, user_stack=(nap,))
    f = only(findings(s, stall, source={nap.file: f"while {test}:\n    time.sleep(1)\n"}.get))
    assert ("a lock file stays if its process was killed" in f.advice) is gone
    assert ("compare the path on the ranks" in f.advice) is not gone
