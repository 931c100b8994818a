"""Conditions that the source shows about wrappers, polls and backwards that did not run."""

from __future__ import annotations

from textwrap import dedent

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, RankState, Site
from distdiag.diagnosis.polled import hidden_error, left_unwritten, polled_loop
from distdiag.diagnosis.rules import stall
from tests.diagnosis.made import findings, job, only, rank

FILE = "/job/train.py"

POLL = dedent("""\
    def build(folder):
        try:
            write(folder)
        except OSError as e:
            problems.append(e)

    def wait(ready):
        while not os.path.exists(ready):
            time.sleep(1)

    def main():
        if rank == 0:
            build(folder)
        else:
            wait(ready)
        dist.barrier()
""")


def test_the_loop_that_polls_and_the_handler_in_the_other_branch_are_named() -> None:
    stack = (Site(FILE, 9, "wait"), Site(FILE, 15, "main"))
    assert polled_loop(stack[0], {FILE: POLL}.get) == ("while not os.path.exists(ready)", Site(FILE, 8, "wait"), True)
    assert hidden_error(stack, {FILE: POLL}.get) == ("except OSError as e", Site(FILE, 4))


@pytest.mark.parametrize("activity", ["sleep", "user_code"])
def test_the_rank_that_may_have_caught_an_error_is_to_blame_for_those_that_poll(activity: str) -> None:
    """Between two naps a rank tests its condition: whether a poll sees it asleep is chance."""
    stack = (Site(FILE, 9, "wait"), Site(FILE, 15, "main"))
    barrier = Call(op="barrier", group="default_pg", seq=4, site=Site(FILE, 16, "main"), entered_s=10.0)
    writer = rank(0, blocked=barrier, enqueued={"default_pg": 4}, completed={"default_pg": 3})
    poll = {"user_stack": stack, "current_site": stack[0], "activity": activity, "enqueued": {"default_pg": 3}}
    polling = (rank(q, completed={"default_pg": 3}, step=40, **poll) for q in (1, 2))
    f = only(findings(job(writer, *polling), stall, source={FILE: POLL}.get))
    assert (f.kind, f.culprits, f.victims) == ("stall", (0,), (1, 2))
    assert f.message.startswith(
        "rank 0 may have left out what ranks 1, 2 poll for, at `except OSError as e` at train.py:4"
    )
    assert "it has waited 90 s" in f.message and "see whether `except OSError as e`" in f.advice


def test_the_handler_may_be_in_the_other_branch_itself() -> None:
    inline = POLL.replace(
        "        build(folder)\n",
        "        try:\n            write(folder)\n        except OSError:\n            pass\n",
    )
    assert hidden_error((Site(FILE, 9, "wait"), Site(FILE, 18, "main")), {FILE: inline}.get) == (
        "except OSError", Site(FILE, 15),
    )  # fmt: skip


PUBLISH = dedent("""\
    class Out:
        def put(self, score):
            if score {test} self.best:
                return
            torch.save(net, path)

    def take():
        while not os.path.exists(path):
            time.sleep(1)
""")


def test_a_function_that_may_leave_before_it_writes_the_file_is_named() -> None:
    stack, text = (Site(FILE, 9, "take"),), PUBLISH.format(test="<")
    assert left_unwritten(stack, {FILE: text}.get) == ("if score < self.best", Site(FILE, 3, "put"))
    assert left_unwritten(stack, {FILE: text.replace("return", "self.n += 1")}.get) is None
    assert left_unwritten(stack, {FILE: text + text.replace("Out", "In")}.get) is None, "which of two is not known"


@pytest.mark.parametrize(
    ("written", "names"),
    [("net, path", True), ("net, other", False), ("net, part + name(path)", True)],
)
def test_the_file_is_written_under_a_name_that_is_polled(written: str, names: bool) -> None:
    text = PUBLISH.format(test="<").replace("net, path", written)
    assert (left_unwritten((Site(FILE, 9, "take"),), {FILE: text}.get) is not None) is names
    called = text.replace("take()", "take(file)").replace("exists(path)", "exists(file)") + "take(path)\n"
    stack = Site(FILE, 9, "take"), Site(FILE, 10, "<module>")
    assert (left_unwritten(stack, {FILE: called}.get) is not None) is names
    by_rank = text.replace("score <", "rank <")
    assert left_unwritten(stack[:1], {FILE: by_rank}.get) is None, "it decides who writes"


def test_the_only_rank_that_does_not_poll_is_the_one_to_look_at() -> None:
    poll, text = Site(FILE, 9, "take"), PUBLISH.format(test="<")
    waits = Call(op="all_reduce", group="default_pg", seq=7, site=Site(FILE, 20, "fit"), entered_s=70.0)
    here = rank(0, blocked=waits, calls=(waits,), enqueued={"default_pg": 7})
    polls = [rank(q, current_site=poll, user_stack=(poll,), activity="sleep") for q in (1, 2)]
    f = only(findings(job(here, *polls), stall, source={FILE: text}.get))
    assert (f.culprits, f.victims, f.where[0].line) == ((0,), (1, 2), 3)
    assert f.message.startswith(
        "rank 0 may have left out what ranks 1, 2 poll for, at `if score < self.best` at train.py:3 in put;"
    )
    beside = rank(3, blocked=waits, calls=(waits,), enqueued={"default_pg": 7})
    f = only(findings(job(here, *polls, beside), stall, source={FILE: text}.get))
    assert f.culprits == (1, 2) and "`if score < self.best` at train.py:3" in f.advice, (
        "which of two did not write is not known"
    )


def test_a_handler_that_raises_again_hides_nothing_and_a_clock_ends_a_loop_by_itself() -> None:
    raises = POLL.replace("problems.append(e)", "raise Failed from e")
    assert hidden_error((Site(FILE, 9, "wait"), Site(FILE, 15, "main")), {FILE: raises}.get) is None
    timed = POLL.replace("not os.path.exists(ready)", "time.time() < end")
    found = polled_loop(Site(FILE, 9, "wait"), {FILE: timed}.get)
    assert found is not None and not found[2]
    assert polled_loop(Site(FILE, 9, "wait"), {FILE: POLL.replace("not os.path.exists(ready)", "True")}.get) is None


KEYED = dedent("""\
    def load(self, epoch):
        path, key = self.path(epoch), f"corpus/{epoch}"
        if self.rank == 0:
            if path.exists():
                return read(path)
            self.store.set(key, make(epoch))
            return read(path)
        self.store.wait([key])
        return read(path)
""")


@pytest.mark.parametrize("activity", ["socket", "user_code"])
def test_a_return_before_the_key_is_set_is_to_blame_for_those_that_wait_for_it(activity: str) -> None:
    """TCPStore waits on a socket, FileStore reads its file again and again."""
    site = Site(FILE, 8, "load")
    reduce = Call(op="all_reduce", group="default_pg", seq=4, site=Site(FILE, 30, "main"), entered_s=10.0)
    first = rank(0, blocked=reduce, enqueued={"default_pg": 4}, completed={"default_pg": 3})
    wait = {"user_stack": (site,), "current_site": site, "activity": activity, "enqueued": {"default_pg": 3}}
    others = [rank(q, completed={"default_pg": 3}, step=40, **wait) for q in (1, 2)]
    f = only(findings(job(first, *others), stall, source={FILE: KEYED}.get))
    assert (f.kind, f.culprits, f.victims) == ("stall", (0,), (1, 2))
    assert f.message.startswith(
        "rank 0 may have left out what ranks 1, 2 wait for, at `if path.exists()` at train.py:4"
    )
    plain = KEYED.replace("        if path.exists():\n            return read(path)\n", "\n\n")
    f = only(findings(job(first, *others), stall, source={FILE: plain}.get))
    assert f.culprits == (1, 2) and "each of ranks 1, 2 waits for a key of a store at train.py:8" in f.message
    service = plain.replace("self.store", "feature_store")
    f = only(findings(job(first, *others), stall, source={FILE: service}.get))
    assert "waits for a key of a store at" not in f.message, "that may be any service"


def waits_for_keys(keys: dict[int, str], first: dict[str, object], **more: object) -> list[Finding]:
    """Return what is found where rank 0 waits in a collective for ranks that wait for these keys."""
    site = Site(FILE, 8, "load")
    reduce = Call(op="all_reduce", group="default_pg", seq=4, site=Site(FILE, 30, "main"), entered_s=10.0)
    zero = rank(0, **{"blocked": reduce, "enqueued": {"default_pg": 4}, "completed": {"default_pg": 3}, **first})
    others = [
        rank(q, store_key=key, user_stack=(site,), current_site=site, activity="store_key", step=40, **more)
        for q, key in keys.items()
    ]
    return findings(job(zero, *others), stall)


def test_the_keys_that_ranks_wait_for_are_named_and_compared() -> None:
    here = {"store_set": "cache/51d0e4b97c", "store_set_site": Site(FILE, 6, "load")}
    f = only(waits_for_keys({1: "cache/1f09a2d477", 2: "cache/93c1f0aa52"}, here))
    assert f.severity == "error" and f.certainty == "suspected" and f.culprits == (1, 2)
    assert (
        "rank 1 waits for the key 'cache/1f09a2d477' of a store, rank 2 for 'cache/93c1f0aa52' at train.py:8 in load, "
        "and rank 0 has set 'cache/51d0e4b97c' at train.py:6 in load" in f.message
    )
    assert "salted" in f.advice
    f = only(waits_for_keys({1: "cache/8123456790123"}, {**here, "store_set": "cache/5512345670001"}))
    assert "it waits for the key 'cache/8123456790123' of a store at train.py:8" in f.message and "salted" in f.advice


@pytest.mark.parametrize(
    ("keys", "done"),
    [
        ({1: "epoch/7", 2: "epoch/7"}, "epoch/6"),
        ({1: "rank0/done", 2: "rank1/done"}, "rank0/begun"),
        ({1: "ready", 2: "ready"}, ""),
        ({1: "ready"}, "world_info"),
    ],
    ids=["the next step", "one key for each rank", "none was set", "another key was set"],
)
def test_keys_that_are_meant_to_differ(keys: dict[int, str], done: str) -> None:
    f = only(waits_for_keys(keys, {"store_set": done}))
    assert f.severity == "error" and "salted" not in f.advice and "which rank should set that key" in f.advice


def test_a_rank_that_computes_may_still_set_the_key() -> None:
    site = Site(FILE, 40, "main")
    found = waits_for_keys({1: "a", 2: "b"}, {"blocked": None, "current_site": site, "completed": {"default_pg": 4}})
    assert not found
    reduce = Call(op="all_reduce", group="default_pg", seq=4, site=site, entered_s=75.0)
    waits = rank(1, blocked=reduce, enqueued={"default_pg": 4}, completed={"default_pg": 3})
    late = rank(2, store_key="ready", activity="store_key", enqueued={"default_pg": 3}, completed={"default_pg": 3})
    f = only(
        findings(job(rank(0, step=40, enqueued={"default_pg": 4}, completed={"default_pg": 4}), waits, late), stall)
    )
    assert f.severity == "warning"


def test_every_rank_waits_for_a_key() -> None:
    alone = {"activity_since_s": 20.0, "activity": "store_key", "host_blocked": True}
    states = [rank(q, store_key=f"at/{7**q * 10**9:x}", **alone) for q in range(3)]
    f = only(findings(job(*states), stall))
    assert f.severity == "error" and "rank 0 waits for the key 'at/3b9aca00'" in f.message and "salted" in f.advice


NAMES = ("traj/{round}/{rank}", "rank{rank}.it{round}", "{round}:{rank}:ok", "node0/{rank}/of/{round}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("skips", [1, 2])
@pytest.mark.parametrize("round_", [5, 39, 1007])
def test_the_rank_that_left_out_its_key_is_found_by_what_the_others_have_set(
    name: str, world: int, skips: int, round_: int
) -> None:
    """Rank 0 collects a key of each rank per round, the others wait for its answer; one has gone on without its key."""

    def states(left_out: int | None) -> list[RankState]:
        still = {"activity_since_s": 20.0, "activity": "store_key", "step": 0}
        first = rank(0, store_key=name.format(round=round_, rank=skips), store_set=f"weights/{round_}", **still)
        others = [
            rank(q, store_key=f"weights/{round_ + 1}", store_set=name.format(round=round_ - (q == left_out), rank=q), **still)
            for q in range(1, world)
        ]  # fmt: skip
        return [first, *others]

    f = only(findings(job(*states(skips)), stall))
    assert f.culprits == (skips,) and f.severity == "error" and f.certainty == "suspected"
    assert f"rank {skips} has not set the key '{name.format(round=round_, rank=skips)}'" in f.message
    assert only(findings(job(*states(None)), stall)).culprits == ()  # it has set it: another reason


def test_the_exception_that_the_rank_caught_is_named() -> None:
    text = "def run(self):\n    for k in range(9):\n        try:\n            self.act(k)\n        except ValueError as e:\n            log(e)\n"
    still = {"activity_since_s": 20.0, "activity": "store_key"}
    stack = (Site("/job/box.py", 3, "fetch"), Site(FILE, 4, "run"))
    states = [
        rank(0, store_key="t/8/2", store_set="w/8", **still), rank(1, store_key="w/9", store_set="t/8/1", **still),
        rank(2, store_key="w/9", store_set="t/7/2", user_stack=stack, **still),
    ]  # fmt: skip
    f = only(findings(job(*states), stall, source={FILE: text}.get))
    assert "an error that `except ValueError as e` at train.py:5 in run caught" in f.advice
