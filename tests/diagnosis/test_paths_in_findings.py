"""Findings that say why a culprit made another call: a skipped backward, a condition on data; and the smallest edit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.culprit import callers, paths
from distdiag.diagnosis.model.findings import Finding, Where
from distdiag.diagnosis.model.snapshot import Call, Life, Model, RankState, Site, Step
from distdiag.diagnosis.rules import deadlock, mismatch
from distdiag.diagnosis.text.finding import finding_lines
from tests.diagnosis.made import findings
from tests.diagnosis.test_paths import FIT, FLUSH, STEP
from tests.diagnosis.test_rank_condition import FILE, places
from tests.diagnosis.waits import call, key, only, rank, snapshot

FORWARD, BACKWARD = Site(FILE, 2, "train_step"), Site(FILE, 5, "train_step")
CALLER = Site(FILE, 11, "main")


def trained(r: int, at: Site, forwards: int, backwards: int, op: str, phase: str, **more: Any) -> RankState:
    model = Model(group="default_pg", forwards=forwards, synced_backwards=backwards)
    sites = {key(FORWARD): forwards, key(BACKWARD): backwards}
    return rank(
        r, call(op, 90, at), models=(model,), sites=sites, phase=phase, user_stack=(at, CALLER), step=backwards, **more
    )


def test_a_forward_without_backward_decides_a_tie_and_its_condition_is_named() -> None:
    text, _ = places(STEP)
    s = snapshot(
        trained(0, FORWARD, 72, 70, "broadcast", "forward"), trained(1, BACKWARD, 71, 71, "all_reduce", "backward")
    )
    f = only(s, source={FILE: text}.get)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank", (0,))
    assert "in broadcast at train.py:2 in train_step (by DDP, before the forward) where" in f.message
    assert (
        "all_reduce at train.py:5 in train_step (DDP's gradients, in backward), both as collective #90 of" in f.message
    )
    assert "rank 0 ran 1 forward without backward (72 forwards, 70 backwards)" in f.message
    assert "`if loss.item() < 0.2` (train.py:3)" in f.message
    assert "backward of every forward on rank 0" in f.advice


def test_the_condition_of_a_skipped_backward_is_found_where_a_helper_runs_the_forward() -> None:
    text, at = places("""
    class Engine:
        def forward(self, batch):
            return lossf(self.model(batch))  # F
        def epoch(self):
            for batch in self.loader:
                loss = self.forward(batch)  # C
                if not math.isfinite(loss.item()):
                    continue
                loss.backward()  # B
    """)
    forward, backward, caller = (Site(FILE, at[m], f) for m, f in (("F", "forward"), ("B", "epoch"), ("C", "epoch")))
    ranks = trained(0, forward, 72, 70, "broadcast", "forward"), trained(1, backward, 71, 71, "all_reduce", "backward")
    known = zip(ranks, (72, 71), (70, 71), ((forward, caller), (backward,)), strict=True)
    s = snapshot(
        *(
            msgspec.structs.replace(r, sites={key(forward): n, key(backward): m}, user_stack=stack)
            for r, n, m, stack in known
        )
    )
    f = only(s, source={FILE: text}.get)
    assert f.message.startswith("rank 0 skipped a backward: `if not math.isfinite(loss.item())` (train.py:7)")


def test_a_batch_that_is_left_out_after_its_forward_names_the_branch_and_each_call_that_it_skips() -> None:
    """The rank has gone on to the end of the epoch: what called the function of the forward is in the source only."""
    text, at = places("""
    def forward(batch):
        return lossf(model(batch))  # F
    def step(batch):
        loss = forward(batch)
        if torch.isnan(loss):
            return
        n = gather(count)  # G
        loss.backward()  # B
    def main():
        for batch in loader:
            step(batch)  # S
        reduce(stats)  # R
    """)
    names = {"F": "forward", "G": "step", "B": "step", "S": "main", "R": "main"}
    f, g, b, s, r = (Site(FILE, at[m], name) for m, name in names.items())
    gather = msgspec.structs.replace(g, caller=s)

    def state(q: int, op: str, site: Site, gathers: int, **more: Any) -> RankState:
        known = {key(f): 40, gather.key: gathers, key(b): 39, key(r): 1}
        earlier = call("all_gather", 82, gather, completed_s=40.0)
        return msgspec.structs.replace(
            trained(q, site, 40, 39, op, "other"), sites=known, calls=(earlier,), step=39, **more
        )

    states = state(0, "all_gather", gather, 40, user_stack=(g, s)), state(1, "all_reduce", r, 39, user_stack=(r,))
    found = only(snapshot(*states), source={FILE: text}.get)
    assert found.message.startswith(
        "rank 1 skipped all_gather (train.py:7, called at train.py:11) and a backward: `if torch.isnan(loss)` (train.py:5)"
    )
    assert found.advice.startswith(
        "make all_gather (train.py:7, called at train.py:11) and the backward of every forward"
    )


@pytest.mark.parametrize(("find_unused", "passes", "named"), [(False, 71, True), (True, 71, False), (False, 72, False)])
def test_a_rank_that_left_backward_before_its_gradients_were_averaged_had_parameters_without(
    find_unused: bool, passes: int, named: bool
) -> None:
    """DDP sends a bucket once all its parameters have a gradient; only rank 0 has come to the next call."""
    log = Site(FILE, 7, "main")
    ranks = trained(0, log, 71, 71, "all_reduce", "other"), trained(1, BACKWARD, 71, passes, "all_reduce", "backward")
    models = [r.models[0] for r in ranks]
    calls = (call("all_reduce", 90, log, shape=(1,)),), ()
    s = snapshot(
        *(
            msgspec.structs.replace(
                r, models=(msgspec.structs.replace(m, find_unused=find_unused),), calls=c, step=71 - r.rank,
                blocked=(c or (r.blocked,))[0], sites={key(BACKWARD): 71, key(log): 71 - r.rank},
            )
            for r, m, c in zip(ranks, models, calls, strict=True)
        )
    )  # fmt: skip
    f = only(s)
    assert f.message.startswith("rank 0 left backward before DDP had averaged its gradients; ") is named
    assert ("if p.grad is None" in f.advice) is named and (not named or f.culprits == (0,))


def test_a_caught_exception_is_named_as_what_skipped_the_backward() -> None:
    s = snapshot(
        trained(0, FORWARD, 72, 70, "broadcast", "forward", caught="RuntimeError: out of memory"),
        trained(1, BACKWARD, 71, 71, "all_reduce", "backward"),
    )
    assert "caught RuntimeError: out of memory" in only(s).message


def test_a_forward_before_a_caught_exception_gets_no_backward() -> None:
    """Both are at sites of every step; rank 0 is one step ahead, and the script caught an exception from its forward."""
    log = Site(FILE, 7, "main")
    more = {"caught": "RuntimeError: out of memory"}
    s = snapshot(
        trained(0, log, 71, 70, "all_reduce", "other", **more), trained(1, BACKWARD, 70, 70, "barrier", "backward")
    )
    log_known = {key(log): 7, key(FORWARD): 71, key(BACKWARD): 70}
    s.ranks[0] = msgspec.structs.replace(s.ranks[0], sites=log_known)
    text = "try:\n    model()\n\n    pass\n    loss.backward()\nexcept RuntimeError as e:\n    if not 'memory' in str(e):\n        raise\n"
    f = only(s, source={FILE: text}.get)
    assert "rank 0 ran 1 forward without backward" in f.message
    assert ", and caught RuntimeError: out of memory: `except RuntimeError as e` (train.py:6)" in f.message
    assert f.advice.startswith("fix what raised RuntimeError on rank 0, ") and "0 * sum" not in f.advice
    s.ranks[0] = msgspec.structs.replace(s.ranks[0], caught=None)
    assert "without backward" not in only(s).message


def test_forwards_under_accumulation_are_not_skipped_backwards() -> None:
    """Three of four forwards have no synchronised backward, on both ranks."""
    s = snapshot(
        trained(0, FORWARD, 42, 10, "broadcast", "forward"), trained(1, BACKWARD, 40, 10, "all_reduce", "backward")
    )
    assert "without backward" not in only(s).message


def test_a_rank_whose_others_have_ended_a_step_since_its_last_call_is_not_ahead() -> None:
    """FSDP2: several collectives in the line of the backward; rank 0 is in the next step's forward, above rank 1's line."""
    text, at = places("""
        def main():
            for step in range(9):
                loss = model(x)  # A
                loss.backward()  # B
                if guard.spiked(loss.item()):
                    clip(model)  # C
                opt.step()
    """)
    forward, backward, clip = (Site(FILE, at[m], "main") for m in "ABC")
    last = call("reduce_scatter", 89, backward)
    sites = {key(forward): 40, key(backward): 49}
    s = snapshot(
        rank(0, call("all_gather", 90, forward), calls=(last,), sites=sites, step=8, user_stack=(forward,)),
        rank(1, call("all_reduce", 90, clip), calls=(last,), sites={**sites, key(clip): 1}, step=7, user_stack=(clip,)),
    )
    f = only(s, source={FILE: text}.get)
    assert f.culprits == (1,)
    assert f.message.startswith("only rank 1 made all_reduce (train.py:6): `if guard.spiked(loss.item())` (line 5)")


def test_an_abort_by_gloo_names_the_condition_of_the_extra_call() -> None:
    text, at = places(FLUSH)
    flush, loop, main = (Site(FILE, at[m], f) for m, f in (("A", "flush"), ("C", "main"), ("D", "main")))
    s = snapshot(
        rank(0, current_site=loop, user_stack=(loop,), life=Life.CRASHED, exception="RuntimeError: Connection closed by peer",
             ended_s=40.1, sites={key(loop): 9}),
        rank(1, current_site=flush, user_stack=(flush, main), life=Life.KILLED, signal=6, ended_waiting=True, ended_s=40.0,
             sites={key(loop): 9, key(flush): 1}),
    )  # fmt: skip
    (f,) = findings(s, mismatch, source={FILE: text}.get)
    assert (f.cause, f.culprits) == ("shape", (1,))
    assert f.message.startswith("only rank 1 made a collective (train.py:3): `if self.items` (line 2); ")


@pytest.mark.parametrize("decorator", ["rank_zero_only", "accelerator.on_main_process"])
def test_a_decorator_that_lets_one_rank_run_a_function_is_a_condition_on_the_rank(decorator: str) -> None:
    text, at = places(f"""
        @{decorator}
        def log_epoch(losses):
            all_reduce(losses)  # A

        def fit():
            loss.backward()  # B
            log_epoch(losses)  # C
    """)
    mine = (Site(FILE, at["A"], "log_epoch"), Site(FILE, at["C"], "fit"))
    theirs = (Site(FILE, at["B"], "fit"),)
    found = paths.rank_condition(mine, theirs, {FILE: text}.get)
    assert found is not None and found.text == f"@{decorator}"
    assert paths.rank_condition(theirs, mine, {FILE: text}.get) is None


def test_the_exception_handler_that_skips_a_message_is_named() -> None:
    text, at = places("""
        def actor():
            for _ in range(9):
                broadcast(policy)  # A
                try:
                    data = play()
                except ConnectionError as e:
                    continue
                send(data, 0)  # B
    """)
    sync, send, recv = Site(FILE, at["A"], "actor"), Site(FILE, at["B"], "actor"), Site(FILE, 90, "learner")
    sent = call("send", None, send, peer=0, nth=6)
    waits = call("recv", None, recv, peer=1, nth=7)
    bcast = call("broadcast", 3, sync)
    s = snapshot(
        rank(0, waits, enqueued={"default_pg": 2}, p2p_issued={"recv:1:0:default_pg": 7, "recv:2:0:default_pg": 6}),
        rank(1, bcast, calls=(sent, bcast), user_stack=(sync,), p2p_issued={"send:0:0:default_pg": 6}),
        rank(2, bcast, user_stack=(sync,), p2p_issued={"send:0:0:default_pg": 7}),
    )
    f = only(s, source={FILE: text}.get)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank", (1,)), f.message
    assert f.message.startswith(
        f"rank 1 skipped its send to rank 0: `except ConnectionError as e` (train.py:{at['B'] - 2}); "
    )
    assert f.advice.startswith("see that rank 1 sends its message to rank 0, too, where `except ConnectionError as e`")


# -- messages and cycles ------------------------------------------------------------------------------------------------


def test_a_tie_names_the_condition_at_which_the_paths_diverge() -> None:
    """Each rank generates until its own sequence ends, with a model whose forward gathers its parameters."""
    text, at = places("""
        def generate(model, ids):
            for _ in range(30):
                ids = model(ids)  # A
                if (ids == EOS).all():
                    break

        def main():
            for epoch in range(9):
                loss.backward()  # B
                generate(model, ids)  # C
    """)
    inside, caller, loop = (Site(FILE, at[m], f) for m, f in (("A", "generate"), ("C", "main"), ("B", "main")))
    known = {key(inside): 40, key(loop): 40}
    s = snapshot(
        rank(0, call("all_gather", 9, inside), user_stack=(inside, caller), sites=known),
        rank(1, call("reduce_scatter", 9, loop), user_stack=(loop,), sites=known),
    )
    f = only(s, source={FILE: text}.get)
    assert (f.culprits, f.victims) == ((), (0, 1))
    assert "they diverge at `if (ids == EOS).all()` (train.py:4)" in f.message


def test_a_cycle_names_the_smallest_edit() -> None:
    a, b = Site(FILE, 1, "f"), Site(FILE, 2, "f")
    s = snapshot(
        rank(0, call(group="x", seq=1, site=a)), rank(1, call(group="y", seq=1, site=b)),
        groups={"x": (0, 1), "y": (0, 1)},
    )  # fmt: skip
    f = only(s)
    assert (f.cause, f.culprits) == ("group_cycle", ())
    assert (
        "it is enough that rank 0 calls all_reduce at train.py:2 in f before all_reduce at train.py:1 in f" in f.advice
    )


def test_a_rank_that_ended_is_shown_at_its_last_site() -> None:
    f = Finding(kind="deadlock", message="m", where=(Where(1, "/job/train.py", 8, "train", "finished"),))
    assert any("last seen at /job/train.py:8 in train (rank 1)" in line for line in finding_lines(f))


def test_the_condition_by_which_a_rank_left_is_named_after_the_others_failed() -> None:
    text, at = places(FIT)
    inside, caller = Site(FILE, at["A"], "fit"), Site(FILE, at["B"], "main")
    s = snapshot(
        rank(0, life=Life.CRASHED, exception="RuntimeError: Connection closed by peer", ended_s=40.1,
             current_site=inside, user_stack=(inside, caller)),
        rank(1, life=Life.FINISHED, ended_s=40.0, step=58),
    )  # fmt: skip
    (f,) = findings(s, deadlock, source={FILE: text}.get)
    assert (f.cause, f.culprits) == ("rank_finished", (1,))
    assert "they diverge at `if self.should_stop` (train.py:8)" in f.message


def repeated(r: int, at: Site, backwards: int, steps: int, op: str, **more: Any) -> RankState:
    failed = 1 if "caught" in more else 0  # a forward that raised
    model = Model(group="default_pg", forwards=backwards + failed, synced_backwards=backwards)
    sites = {key(BACKWARD): backwards, key(CALLER): 1}
    return rank(r, call(op, 90, at), models=(model,), sites=sites, user_stack=(at, CALLER), step=steps, **more)


def test_the_rank_with_a_backward_pass_more_than_steps_is_the_culprit() -> None:
    log = Site(FILE, 12, "main")
    s = snapshot(
        repeated(0, log, 80, 80, "barrier"), repeated(1, BACKWARD, 81, 79, "all_reduce", caught="OutOfMemoryError: 3")
    )
    f = only(s)
    assert f.culprits == (1,) and f.message.endswith("; it caught OutOfMemoryError: 3")
    assert f.message.startswith(
        "rank 1 has made 81 backward passes in 79 steps, the others one for each; rank 1 is in "
    )
    assert f.advice.startswith("fix what raised OutOfMemoryError: 3 on rank 1; or ") and "under `no_sync()`" in f.advice
    fewer = snapshot(
        repeated(0, log, 80, 80, "barrier"), repeated(1, BACKWARD, 77, 79, "all_reduce", caught="ValueError: nan")
    )
    assert (
        only(fewer).advice
        == "fix what raised ValueError: nan on rank 1; or let rank 1 skip a batch together with all ranks"
    )
    under_way = snapshot(repeated(0, log, 80, 80, "barrier"), repeated(1, BACKWARD, 80, 79, "all_reduce"))
    accumulates = snapshot(repeated(0, log, 160, 80, "barrier"), repeated(1, BACKWARD, 163, 79, "all_reduce"))
    for other in (under_way, accumulates):
        assert "backward passes in" not in only(other).message


def test_the_condition_is_in_the_code_of_the_rank_nearest_to_the_culprit() -> None:
    """The learner and an actor wait in a broadcast for another actor; two classes have a method of the same name."""
    text, at = places("""
        class Learner:
            def run(self):
                for update in range(9):
                    if update % self.every == 0:
                        share()  # L

        class Actor:
            def run(self):
                while True:
                    send(header)  # S
                    if not rows:
                        continue
                    if sent % every == 0:
                        share()  # A
    """)
    send, actor, learner = (Site(FILE, at[m], "run") for m in "SAL")
    assert callers.nearest((send,), {0: (learner,), 2: (actor,)}, {FILE: text}.get) == 2
    assert [c.text for c in paths.conditions_between((send,), (actor,), {FILE: text}.get)] == ["if not rows"]
    assert paths.conditions_between((send,), (learner,), {FILE: text}.get) == []


def test_roles_whose_lines_have_met_before_are_not_parted_by_a_condition_of_one_role() -> None:
    """The learner sends its parameters, the actors expect the buffers, too: no learner ever tests what only actors test."""
    text, at = places("""
        def publish(policy):
            for p in policy.parameters():
                broadcast(p)  # A

        def subscribe(policy):
            for t in policy.state_dict().values():
                if t.is_floating_point():
                    broadcast(t)  # B

        worker.run()  # C
    """)
    top = Site(FILE, at["C"], "<module>")

    def role(r: int, mark: str, name: str, size: int) -> RankState:
        site = Site(FILE, at[mark], name)
        calls = tuple(call("broadcast", n, site, shape=(12,)) for n in (1, 2))
        return rank(r, call("broadcast", 3, site, shape=(size,)), calls=calls, user_stack=(site, top))

    actors = (role(r, "B", "subscribe", 12) for r in (1, 2))
    f = only(snapshot(role(0, "A", "publish", 768), *actors), source={FILE: text}.get)
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", (0,))
    assert "is_floating_point" not in f.message + f.advice
    assert "compare train.py:3 in publish and train.py:8 in subscribe" in f.advice


def test_a_role_at_a_line_that_is_new_to_it_is_to_blame_and_no_condition_of_the_function_it_did_not_call() -> None:
    """A driver tells its workers in `told` what to run; one method was not wrapped in it."""
    text, at = places("""
        def told(method, *args):
            if self.is_driver:
                broadcast(method)  # T
            return method(*args)

        def inventory(self):
            gather(self.names)  # I

        def serve(self):
            while True:
                broadcast(box)  # S

        def drive(requests):
            for route, args in requests:
                answer = routes[route](*args)  # D

        def main():
            if not driver:
                return serve()  # W
            drive(requests())  # M
    """)
    drive = Site(FILE, at["D"], "drive", Site(FILE, at["M"], "main"))
    tell, ask = (Site(FILE, at[m], f, drive) for m, f in (("T", "told"), ("I", "inventory")))
    serve = Site(FILE, at["S"], "serve", Site(FILE, at["W"], "main"))

    def role(r: int, now: Call, usual: Site, **sites: int) -> RankState:
        calls = tuple(call("broadcast", n, usual, shape=(12,)) for n in (1, 2))
        assert now.site is not None
        return rank(r, now, calls=calls, user_stack=now.site.path, sites={usual.key: 2, now.site.key: 1} | sites)

    worker = role(1, call("broadcast", 3, serve, shape=(12,)), serve, **{f"{FILE}:{at['I']} < {FILE}:1": 1})
    s = snapshot(role(0, call("gather", 3, ask, shape=(1,)), tell), worker)
    f = only(s, source={FILE: text}.get)
    assert (f.kind, f.cause, f.culprits) == ("deadlock", "missing_rank", (0,))
    assert "is_driver" not in f.message + f.advice and "only rank 0 has ever come to that line from there" in f.message
    again = msgspec.structs.replace(s.ranks[0], sites={tell.key: 2, ask.key: 2})
    f = only(msgspec.structs.replace(s, ranks={0: again, 1: s.ranks[1]}), source={FILE: text}.get)
    assert (f.kind, f.culprits) == ("mismatch", ()), "it has been there before: either may be wrong"


def test_a_long_message_is_not_cut_within_parentheses() -> None:
    f = only(snapshot(*(rank(r, call(group="abc"[r], seq=1, shape=(64, 64))) for r in range(3)),
                      groups={"a": (0, 1), "b": (1, 2), "c": (2, 0)}))  # fmt: skip
    long = msgspec.structs.replace(f, message=f"rank 0 is in all_reduce (group 5; 1.0 KiB); {'x' * 300}")
    assert "all_reduce (group 5; 1.0 KiB)" in finding_lines(long)[0] + finding_lines(long)[1]


def test_a_loop_that_ended_earlier_is_named_although_its_outer_call_is_not_made_in_every_round() -> None:
    """FSDP2 gathers the root's parameters once, in the line of the loop, and those of the blocks in `forward`, in every round."""
    text, at = places("""
        def forward(x):
            return block(x)  # A

        def evaluate(windows):
            for window in windows:
                model(window)  # B
            all_reduce(total)  # C
    """)
    block, root, end = (Site(FILE, at[m], f) for m, f in (("A", "forward"), ("B", "evaluate"), ("C", "evaluate")))
    here = call("all_gather_into_tensor", 90, block)
    sites = {key(block): 205, key(root): 1}
    left = rank(2, call("all_reduce", 90, end), sites={**sites, key(block): 204, key(end): 1}, user_stack=(end,))
    s = snapshot(*(rank(r, here, sites=sites, user_stack=(block, root)) for r in (0, 1)), left)
    f = only(s, source={FILE: text}.get)
    assert f.culprits == (2,)
    assert f.message.startswith(
        "rank 2 left the loop before all_gather_into_tensor (train.py:2): `for window in windows`"
    )
    assert "run equally often on all ranks" in f.advice


def test_a_rank_that_left_the_loop_of_its_role_is_compared_with_the_others_of_that_role() -> None:
    text, at = places("""
        def serve(rounds):
            for _ in range(rounds):
                gather(inbox)  # A

        def work(rounds):
            for _ in range(rounds):
                if reward() > goal:
                    break
                gather(gradient)  # B

        def main():
            if rank == 0:
                serve(600)  # C
            else:
                work(600)  # D
            barrier()  # E
    """)
    serve, work, end = (Site(FILE, at[m], f) for m, f in (("A", "serve"), ("B", "work"), ("E", "main")))
    calls = {s: tuple(call("gather", n, s) for n in (7, 8)) for s in (serve, work)}
    tops = {serve: Site(FILE, at["C"], "main"), work: Site(FILE, at["D"], "main")}
    left = rank(2, call("barrier", 9, end), calls=calls[work], sites={key(work): 8, key(end): 1}, user_stack=(end,))
    in_it = [
        rank(r, call("gather", 9, s), calls=calls[s], sites={key(s): 9}, user_stack=(s, tops[s]))
        for r, s in enumerate((serve, work))
    ]
    f = only(snapshot(*in_it, left), source={FILE: text}.get)
    assert f.culprits == (2,)
    assert f.message.startswith("rank 2 left the loop before gather (train.py:9): `if reward() > goal` (line 7)")
    # the only worker: its own gather is compared, not the server's
    alone = only(snapshot(in_it[0], msgspec.structs.replace(left, rank=1)), source={FILE: text}.get)
    assert "`for _ in range(rounds)` (line 2)" not in alone.message + alone.advice


def test_a_rank_that_has_left_a_helpers_loop_in_an_earlier_round_is_told_so() -> None:
    """All were in the loop over the metrics; rank 1 had fewer of them and is in the next step."""
    text, at = places("""
        def log(metrics):
            for name in metrics.items():
                gather(name)  # A

        def train():
            for step in range(90):
                all_reduce(g)  # B
                if step % 10 == 0:
                    log(pending)  # C
    """)
    gather, reduce, top = Site(FILE, at["A"], "log"), Site(FILE, at["B"], "train"), Site(FILE, at["C"], "train")
    before = (call("all_reduce", 7, reduce), call("all_gather", 8, gather))
    more = {"calls": before, "sites": {key(gather): 5, key(reduce): 9}}
    here = [rank(r, call("all_gather", 9, gather), user_stack=(gather, top), **more) for r in (0, 2)]
    left = rank(1, call("all_reduce", 9, reduce), user_stack=(reduce,), **more)
    f = only(snapshot(here[0], left, here[1]), source={FILE: text}.get)
    assert f.culprits == (1,)
    assert f.message.startswith(
        "rank 1 left the loop before all_gather (train.py:3): `for name in metrics.items()` (line 2)"
    )
    # it may have skipped the whole helper, if its call before was another one
    calls = (call("all_gather", 7, gather), call("all_reduce", 8, reduce))
    ranks = (msgspec.structs.replace(r, calls=(*calls, *r.calls[2:])) for r in (here[0], left, here[1]))
    assert "metrics.items()" not in only(snapshot(*ranks), source={FILE: text}.get).message
    # or a comprehension makes the calls
    text = text.replace("gather(name)", "[gather(part) for part in name]")
    assert "metrics.items()" not in only(snapshot(here[0], left, here[1]), source={FILE: text}.get).message


def test_the_condition_is_named_at_which_histories_parted_and_not_where_the_ranks_are_now() -> None:
    """Rank 1 leaves out one call; its later calls pair with the others' call before, until all of them save."""
    text, at = places("""
        def share(n):
            if n:
                all_reduce(n)  # A

        def main():
            for step in range(90):
                share(n)  # B
                all_reduce(loss)  # C
                if saver.due(step):
                    barrier()  # D
    """)
    top = Site(FILE, at["B"], "main")
    share = msgspec.structs.replace(Site(FILE, at["A"], "share"), caller=top)
    loss, save = Site(FILE, at["C"], "main"), Site(FILE, at["D"], "main")
    steps = [share, loss] * 12

    def waiting(r: int, made: list[Site], op: str, here: Site) -> RankState:
        calls = tuple(call("all_reduce", n, site) for n, site in enumerate(made, 1))
        sites = {site.key: made.count(site) for site in made}
        return rank(r, call(op, len(made) + 1, here), calls=calls, sites=sites, user_stack=(here,))

    skipped = [*steps[:20], loss, *steps[:2]]
    ranks = [waiting(r, steps[:23], "all_reduce", loss) for r in (0, 2)]
    f = only(snapshot(ranks[0], waiting(1, skipped, "barrier", save), ranks[1]), source={FILE: text}.get)
    assert f.culprits == (1,)
    assert f.message.startswith("rank 1 skipped all_reduce (train.py:3, called at train.py:7): `if n` (train.py:2)")
    assert "saver.due" not in f.message + f.advice
    assert f.advice.startswith("make all_reduce at train.py:3 on rank 1, too, where `if n` at line 2 leads past it")


@pytest.mark.parametrize(
    ("ended_s", "head"), [(30.0, "rank 1 makes one more pass of the loop"), (41.0, "rank 1 skipped all_to_all")]
)
def test_a_rank_that_has_ended_a_step_since_its_last_call_is_in_that_loop_anew(ended_s: float, head: str) -> None:
    """The loop after the step's exchange, in which it is now, is that of the next step: it left the exchange out."""
    text, at = places("""
    def exchange(x):
        if x.numel() == 0:
            return x
        return all_to_all(x)  # A
    def fit(model):
        for batch in loader:
            loss = exchange(batch)  # B
            for p in model.shared():
                all_reduce(p.grad)  # C
            opt.step()
    """)
    here, there, caller = (Site(FILE, at[m], f) for m, f in (("C", "fit"), ("A", "exchange"), ("B", "fit")))
    last = call(seq=89, site=here, entered_s=40.0)
    ends = ((call("all_to_all", 90, there), (there, caller)), (call(seq=90, site=here, entered_s=45.0), (here,)))
    ranks = [
        rank(
            r, c, calls=(last, c), user_stack=stack, step=5, sites={key(here): 20, key(there): 5},
            steps=(Step(5, ended_s, 100.0, *[20.0] * 4, 0.0, 20.0, None, 8, 40, None),),
        )
        for r, (c, stack) in enumerate(ends)
    ]  # fmt: skip
    ranks.append(msgspec.structs.replace(ranks[0], rank=2))
    f = only(snapshot(*ranks), source={FILE: text}.get)
    assert f.culprits == (1,) and f.message.startswith(head)


def test_no_condition_is_blamed_for_what_a_finaliser_does_on_some_ranks_only() -> None:
    text, at = places("""
    class Cache:
        def close(self):
            if self.closed:
                return
            dist.barrier()  # B
        def __del__(self):
            self.close()  # D
    def fit(model, folds):
        for fold in folds:
            cache = Cache(fold)
            train(model, cache)
            cache = None  # C
            dist.all_reduce(score(model))  # R
    """)
    end, outer = (
        Site(FILE, at["B"], "close", Site(FILE, at["D"], "__del__", Site(FILE, at["C"], "fit"))),
        Site(FILE, at["R"], "fit"),
    )
    made = [
        call("barrier" if k % 2 else "all_reduce", k, end if k % 2 else outer, completed_s=float(k))
        for k in range(1, 9)
    ]
    sites = {key(end): 4, key(outer): 4}
    freed = [
        rank(q, call("barrier", 9, end), calls=tuple(made), sites=sites, user_stack=(*end.path,)) for q in range(2)
    ]
    kept = rank(2, call("all_reduce", 9, outer), calls=tuple(made), sites=sites, user_stack=(outer,))
    f = only(snapshot(*freed, kept), source={FILE: text}.get)
    assert (f.kind, f.culprits) == ("deadlock", (2,)) and "self.closed" not in f.message + str(f.advice)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_in_a_function_whose_results_are_kept_is_named(ranks: int) -> None:
    """Rank 0 has the result, and is in the next call; of two ranks nobody is to blame."""
    text, at = places("""
        @functools.lru_cache
        def total(name):
            return all_gather(name)  # A

        def main():
            for batch in loader:
                total(batch.name)  # B
                all_reduce(batch)  # C
    """)
    here, caller, after = (Site(FILE, at[m], f) for m, f in (("A", "total"), ("B", "main"), ("C", "main")))
    sites = {key(here): 4, key(after): 8}
    s = snapshot(
        rank(0, call("all_reduce", 90, after), sites=sites, user_stack=(after,), step=8),
        *(
            rank(q, call("all_gather", 90, here), sites=sites, user_stack=(here, caller), step=8)
            for q in range(1, ranks)
        ),
    )
    f = only(s, source={FILE: text}.get)
    assert f.culprits == ((0,) if ranks == 3 else ())
    assert "`@functools.lru_cache` (" in f.message and "around  " not in f.advice
    assert "outside of the function whose results `@functools.lru_cache` at line 1 keeps" in f.advice
    if ranks == 3:
        assert f.message.startswith("rank 0 skipped all_gather (train.py:3): `@functools.lru_cache` (line 1); ")
        assert f.advice.startswith("make all_gather at train.py:3 outside")


def test_a_call_that_exchanges_objects_has_the_name_that_the_line_calls() -> None:
    """A person searches for the words of the finding: no line of the script has `all_gather`."""
    text = (
        "def save(state):\n    if state:\n        dist.gather_object(\n            state, None)\n    dist.barrier()\n"
    )
    objects, barrier = Site(FILE, 3, "save"), Site(FILE, 5, "save")
    ranks = [rank(q, call("all_gather", 9, objects), user_stack=(objects,)) for q in (0, 1)]
    s = snapshot(*ranks, rank(2, call("barrier", 9, barrier), user_stack=(barrier,)))
    f = only(s, source={FILE: text}.get)
    assert (
        f.message.startswith("rank 2 skipped gather_object (train.py:3): ") and "all_gather" not in f.message + f.advice
    )
    assert f.collective is not None and f.collective.op == "all_gather"
