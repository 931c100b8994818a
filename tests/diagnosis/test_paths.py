"""Why a culprit made another call: a skipped backward, a condition on data; and the smallest edit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.culprit import rank_condition
from distdiag.diagnosis.culprit.paths import call_stack, leaving, parting, with_callers
from distdiag.diagnosis.model.findings import Finding, Where
from distdiag.diagnosis.model.snapshot import Life, Model, RankState, Site
from distdiag.diagnosis.rules import deadlock, mismatch
from distdiag.diagnosis.text.finding import finding_lines
from tests.diagnosis.made import findings
from tests.diagnosis.test_rank_condition import FILE, places
from tests.diagnosis.waits import call, key, only, rank, snapshot


def part(source: str, mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> list[str]:
    """Return the texts of the conditions; frames are (mark, function), innermost first."""
    text, at = places(source)
    stacks = [[Site(FILE, at[m], f) for m, f in frames] for frames in (mine, theirs)]
    return [c.text for c in parting(stacks[0], stacks[1], {FILE: text}.get)]


STEP = """
    def train_step(model, opt, x, y):
        loss = lossf(model(x), y)  # A
        if loss.item() < 0.2:
            return None
        loss.backward()  # B

    def main():
        for step in range(9):
            if step % 10 == 0:
                log()
            train_step(model, opt, x, y)  # C
"""

FIT = """
    class Trainer:
        def fit(self, batches):
            for self.epoch in range(9):
                for x in batches:
                    self.step(x)  # A
                    if self.bad(x):
                        continue
                if self.should_stop:  # on "#1", too
                    break
    def main():
        trainer.fit(batches)  # B
        dist.barrier()  # C
"""

FLUSH = """
    def flush(self):
        if self.items:
            gather(self.items)  # A

    def sync(self):
        if self.n == 0:
            return 0.0
        all_reduce(self.n)  # B

    def main():
        for step in range(9):
            all_reduce(g)  # C
            c.flush()  # D
            m.sync()  # E
"""

STREAM = """
    def main():
        while True:
            try:
                x = next(it)
            except StopIteration:
                break
            loss.backward()  # A
        all_reduce(total)  # B
"""


SKIPS = """
    def main():
        for x in records:
            try:
                step(x)  # A
            except ValueError:
                log(x)
                continue
            all_reduce(mean)  # B
        barrier()  # C
"""

CAUGHT = """
    def fit(model, x):
        try:
            loss = model(x)  # A
            loss.backward()  # B
        except RuntimeError as e:
            opt.zero_grad()
"""

TRIES = """
    def main():
        try:
            train(model)  # A
        except KeyboardInterrupt:
            print("stopping early")
        except RuntimeError:
            raise
        all_reduce(loss)  # B
"""

RETURNS = """
    def finetune():
        first = restore()
        for epoch in range(first, 9):
            for x in loader:
                loss.backward()  # A

    def update(x):
        if dist.is_initialized():
            all_reduce(x)  # B

    def fetch(batches):
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            except (RuntimeError, OSError):
                break
            loss.backward()  # C

    def main():
        finetune()  # D
        fetch(batches)  # E
        update(x)  # F
        barrier()  # G
"""

ROUNDS = """
    def main():
        for step in range(9):
            while tokens < 256:
                loss.backward()  # A
            all_reduce(tokens)  # B
        for epoch in range(start, 5):
            for x in loader:
                loss.backward()  # C
        all_reduce(loss)  # D
"""


@pytest.mark.parametrize(
    ("source", "mine", "theirs", "conditions"),
    [
        pytest.param(
            STEP, "A train_step C main", "B train_step C main", ["if loss.item() < 0.2:"], id="returns before"
        ),
        pytest.param(FIT, "C main", "A fit B main", ["if self.should_stop:"], id="breaks out of the outer loop"),
        pytest.param(
            FIT, "A fit B main", "C main", ["if self.should_stop:"], id="the others break out of the outer loop"
        ),
        pytest.param(FLUSH, "A flush D main", "C main", ["if self.items:"], id="enters a block"),
        pytest.param(FLUSH, "C main", "B sync E main", ["if self.n == 0:"], id="leaves a function"),
        pytest.param(STREAM, "B main", "A main", ["except StopIteration:"], id="an exception ends the loop"),
        pytest.param(FIT, "", "A fit B main", ["if self.should_stop:"], id="has ended"),
        pytest.param(STEP, "C main", "C main", [], id="one site"),
        pytest.param(SKIPS, "A main", "B main", ["except ValueError:"], id="a round earlier, an exception skipped it"),
        pytest.param(CAUGHT, "A fit", "B fit", ["except RuntimeError as e:"], id="an exception between two calls"),
        pytest.param(TRIES, "B main", "A main", ["except KeyboardInterrupt:"], id="an exception ended it, caught"),
        pytest.param(ROUNDS, "A main", "B main", ["while tokens < 256:"], id="one more round of an inner loop"),
        pytest.param(ROUNDS, "D main", "C main", ["for epoch in range(start, 5):"], id="its loop ended earlier"),
        pytest.param(
            RETURNS,
            "G main",
            "A finetune D main",
            ["for epoch in range(first, 9):"],
            id="a callee's loop ended earlier",
        ),
        pytest.param(RETURNS, "A finetune D main", "G main", [], id="it is still in a callee's loop"),
        pytest.param(RETURNS, "B update F main", "G main", [], id="a condition that is the same on all ranks"),
        pytest.param(
            RETURNS,
            "G main",
            "C fetch E main",
            ["except StopIteration:", "except (RuntimeError, OSError):"],
            id="two handlers",
        ),
    ],
)
def test_conditions_at_which_two_paths_diverge_are_found(
    source: str, mine: str, theirs: str, conditions: list[str]
) -> None:
    a, b = (list(zip(x.split()[::2], x.split()[1::2], strict=True)) for x in (mine, theirs))
    assert part(source, a, b) == conditions


ACTOR = """
    import utils

    def push(policy):
        broadcast(policy)  # A

    def update(x):
        all_reduce(x)  # B

    def actor(policy, progress):
        push(policy)  # C
        for _ in range(4):
            episode = play(policy)  # D
            if len(episode) < 2:
                continue
            send(episode)  # E
        progress.update(1)

    def learner(policy):
        push(policy)
        push(policy)  # F
        recv()  # G
"""


def test_callers_of_a_call_on_a_device_are_found_after_its_function_has_returned() -> None:
    text, at = places(ACTOR)

    def sites(frames: str) -> list[Site]:
        return [Site(FILE, at[m], f) for m, f in zip(frames.split()[::2], frames.split()[1::2], strict=True)]

    def callers(call: str, host: str) -> list[int]:
        return [x.line for x in call_stack(sites(call), sites(host), {FILE: text}.get)[1:]]

    assert callers("A push", "D actor") == [at["C"]]
    assert callers("A push", "G learner") == []  # two calls: which of them is not known
    assert callers("B update", "D actor") == []  # the method of another object
    stack = call_stack(sites("A push"), sites("D actor"), {FILE: text}.get)
    assert [c.text for c in parting(stack, sites("E actor"), {FILE: text}.get)] == ["if len(episode) < 2:"]


def test_the_condition_around_sys_exit_is_found() -> None:
    text, at = places("""
        def check(loss):
            if not isfinite(loss):
                sys.exit(0)  # A

        def main():
            for x in batches:
                check(model(x))
                loss.backward()  # B
                if done(x):
                    break
    """)
    theirs = (Site(FILE, at["B"], "main"),)

    def left_at(place: Site | None) -> list[str]:
        return [c.text.removesuffix(":") for c in leaving(place, theirs, {FILE: text}.get)]

    assert left_at(Site(FILE, at["A"], "check")) == ["if not isfinite(loss)"]
    assert left_at(Site(FILE, at["B"], "main")) == left_at(None) == ["if done(x)"]


def test_a_stale_caller_of_a_killed_rank_is_corrected() -> None:
    """The sample of the caller is older than the call in which the rank was killed."""
    text, at = places(FLUSH)
    flush, old, now = Site(FILE, at["A"], "flush"), Site(FILE, at["C"], "main"), Site(FILE, at["D"], "main")
    assert with_callers((flush, old), {FILE: text}.get) == (flush, now)
    assert with_callers((flush, now), {FILE: text}.get) == (flush, now)
    assert with_callers((flush, old), {}.get) == (flush, old)


def test_a_source_that_cannot_be_read_has_no_conditions() -> None:
    mine, theirs = [Site(FILE, 3, "main")], [Site(FILE, 9, "main")]
    for source in ({}.get, {FILE: "def (:"}.get, {FILE: ""}.get):
        assert parting(mine, theirs, source) == []


# -- forwards without backward ------------------------------------------------------------------------------------------

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
    assert "in broadcast #90 at train.py:2 in train_step (DDP's buffers, before the forward) where" in f.message
    assert "all_reduce #90 at train.py:5 in train_step (DDP's gradients, in backward)" in f.message
    assert "rank 0 ran 1 forward without backward (72 forwards, 70 backwards)" in f.message
    assert "`if loss.item() < 0.2` (train.py:3)" in f.message
    assert "backward of every forward on rank 0" in f.advice


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
    log_known = {key(log): 7, key(FORWARD): 71}
    s.ranks[0] = msgspec.structs.replace(s.ranks[0], sites=log_known)
    assert "rank 0 ran 1 forward without backward" in only(s).message
    s.ranks[0] = msgspec.structs.replace(s.ranks[0], caught=None)
    assert "without backward" not in only(s).message


def test_forwards_under_accumulation_are_not_skipped_backwards() -> None:
    """Three of four forwards have no synchronised backward, on both ranks."""
    s = snapshot(
        trained(0, FORWARD, 42, 10, "broadcast", "forward"), trained(1, BACKWARD, 40, 10, "all_reduce", "backward")
    )
    assert "without backward" not in only(s).message


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
    assert "they diverge at `if self.items`" in f.message


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
    found = rank_condition.around(mine, theirs, {FILE: text}.get)
    assert found is not None and found.text == f"@{decorator}"
    assert rank_condition.around(theirs, mine, {FILE: text}.get) is None


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
    assert f"they diverge at `except ConnectionError as e` (train.py:{at['B'] - 2})" in f.message
    assert "or skip them on all ranks together" in f.advice


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
