"""Witness by arguments: a dtype or a peer that is new at its call site, and the edit that corrects it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.culprit import divergence
from distdiag.diagnosis.model.snapshot import RankState, Site
from tests.diagnosis.waits import call, only, rank, snapshot

FILE = "/job/train.py"
SITE = Site(FILE, 5, "reduce")


def came_with(r: int, *dtypes: str) -> RankState:
    """Return a rank that waits in the last of its calls at one site."""
    calls = [call(seq=n, site=SITE, dtype=dtype) for n, dtype in enumerate(dtypes, 1)]
    return rank(r, calls[-1], calls=tuple(calls))


def came_with_shapes(r: int, *sizes: int) -> RankState:
    calls = [call(seq=n, site=SITE, shape=(size,)) for n, size in enumerate(sizes, 1)]
    return rank(r, calls[-1], calls=tuple(calls))


def test_the_side_with_a_new_dtype_at_its_site_is_the_culprit() -> None:
    f = only(snapshot(came_with(0, *["float64"] * 4), came_with(1, *["float64"] * 3, "float32")))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "dtype", (1,))
    assert "before, rank 1 called it with float64 (3 times)" in f.message
    assert "on rank 1 cast the tensor to float64" in f.advice


@pytest.mark.parametrize(("shape", "last"), [((24, 16), True), ((60, 16), False), ((24, 8), False), ((384,), False)])
def test_fewer_rows_than_before_are_those_of_a_last_batch(shape: tuple[int, ...], last: bool) -> None:
    def of(r: int, *shapes: tuple[int, ...]) -> RankState:
        calls = [call("all_gather", seq=n, site=SITE, shape=x) for n, x in enumerate(shapes, 1)]
        return rank(r, calls[-1], calls=tuple(calls))

    f = only(snapshot(of(0, *[(50, 16)] * 4), of(1, *[(50, 16)] * 3, shape)))
    assert (f.cause, f.culprits) == ("shape", (1,))
    assert ("drop_last=True" in f.advice) is last


def test_lists_of_objects_of_different_lengths_are_said_to_be_that() -> None:
    """A rank that has gone on to the objects themselves, at the same line, has made no call more than the others."""
    sizes = [call("broadcast", 2, SITE, dtype="int64", shape=(n,)) for n in (3, 2, 2)]
    after = call("broadcast", 3, SITE, dtype="uint8", shape=(101,))
    ranks = [rank(r, c, calls=(c,), sites={f"{FILE}:5": 1}) for r, c in enumerate(sizes)]
    ranks[0] = msgspec.structs.replace(ranks[0], calls=(sizes[0], after), sites={f"{FILE}:5": 2})
    text = {True: "\n" * 4 + "dist.broadcast_object_list(info)", False: "\n" * 4 + "dist.broadcast(sizes)"}
    lists, tensors = (only(snapshot(*ranks), source={FILE: text[known]}.get) for known in (True, False))
    assert lists.culprits == tensors.culprits == (0,)
    assert "has lists of different lengths: ranks 1, 2: 2 objects; rank 0: 3 objects" in lists.message
    assert "pass a list of the same length on all ranks" in lists.advice
    assert "more than the others" not in tensors.message


def test_of_two_sides_that_part_at_an_except_the_one_that_caught_something_is_asked_for() -> None:
    text = "def run():\n    try:\n        load()\n        broadcast()\n    except OSError:\n        pass\n    DDP()\n"
    sides = (call("broadcast", 1, Site(FILE, 4, "run")), call("all_gather", 1, Site(FILE, 7, "run")))
    f = only(
        snapshot(*(rank(r, c, calls=(c,), user_stack=(c.site,)) for r, c in enumerate(sides))), source={FILE: text}.get
    )
    assert f.culprits == () and "find which rank caught an exception there" in f.advice


def test_calls_after_the_conflict_are_not_history() -> None:
    """gloo lets a rank pass a conflict: it is already in its next call, with the new dtype again."""
    odd = came_with(0, "float32", "float32", "float64")
    after = call(seq=4, site=SITE, dtype="float64")
    odd = msgspec.structs.replace(odd, calls=(*odd.calls, after))
    f = only(snapshot(odd, came_with(1, "float32", "float32", "float32")))
    assert f.culprits == (0,) and "rank 0 called it with float32 (twice)" in f.message


def test_two_dtypes_without_history_blame_nobody_and_name_both_edits() -> None:
    f = only(snapshot(came_with(0, "float64"), came_with(1, "float32")))
    assert (f.cause, f.culprits) == ("dtype", ())
    assert "on rank 0 cast the tensor to float32 before the call, or on rank 1 to float64" in f.advice


def test_calls_that_both_ranks_made_before_differ_in_their_order_only() -> None:
    """Each rank loops over a set of names, whose order depends on the process."""

    def reduces(r: int, *elements: int) -> RankState:
        calls = [call(seq=n, site=SITE, shape=(size,)) for n, size in enumerate(elements, 1)]
        return rank(r, calls[-1], calls=tuple(calls))

    f = only(snapshot(reduces(0, 64, 32, 64), reduces(1, 64, 32, 32)))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", ())
    assert "both sides have made either call before: they make them in a different order" in f.message
    assert "loop over a sorted list" in f.advice

    f = only(snapshot(reduces(0, 64, 32, 64), reduces(1, 64, 64, 32)))
    assert "different order" not in f.message and "cannot tell which side is wrong" in f.message


SET = "def sync(self, names):\n    for name in {}:\n        tensor = self.state[name]\n        # of each\n        all_reduce(tensor)\n"


@pytest.mark.parametrize(
    ("names", "other", "is_set"),
    [
        ("self.active", "self.active = set(x) & ALL", True),
        ("self.active", "self.active = set(x)\nself.active = sorted(self.active)", False),
        ("list({'loss', 'accuracy'})", "", True),
        ("ALL", "ALL = {'loss', 'accuracy'}\nALL |= {'more'}", True),
        ("names", "names = {'loss', 'accuracy'}", False),
        ("sorted(self.active)", "self.active = set(x)", False),
    ],
)
def test_a_loop_over_a_set_is_the_reason_for_other_sizes(names: str, other: str, is_set: bool) -> None:
    """Of three ranks, too: the one whose size is its own is not the one to blame."""
    ranks = [came_with_shapes(r, n) for r, n in enumerate((144, 12, 12))]
    f = only(snapshot(*ranks), source={FILE: SET.format(names) + other}.get)
    assert (f.cause, f.culprits) == ("shape", () if is_set else (0,))
    assert (f"`for name in {names}` at train.py:2 in reduce goes over a set" in f.message) is is_set
    assert f.advice.startswith(f"loop over `sorted({names})` at train.py:2") is is_set
    assert not is_set or "cannot tell" not in f.message


def test_a_loop_over_a_set_is_no_reason_where_all_its_tensors_were_of_one_size() -> None:
    ranks = [came_with_shapes(r, 48, 48, n) for r, n in enumerate((48, 30))]
    f = only(snapshot(*ranks), source={FILE: SET.format("{1, 2}")}.get)
    assert f.culprits == (1,) and "set" not in f.message


def test_a_rank_that_sends_to_a_new_peer_is_the_culprit() -> None:
    """Rank 0 always sent to rank 1 from this line; now it sends to rank 2, which does not receive from it."""
    send, recv = Site(FILE, 9, "exchange"), Site(FILE, 12, "exchange")

    def message(op: str, peer: int, nth: int, site: Site) -> Any:
        return call(op, None, site, peer=peer, nth=nth)

    def sends(r: int, peers: list[int]) -> RankState:
        calls = [message("send", p, peers[: n + 1].count(p), send) for n, p in enumerate(peers)]
        return rank(r, calls[-1], calls=tuple(calls))

    def receives(r: int, peer: int, n: int) -> RankState:
        calls = [message("recv", peer, k, recv) for k in range(1, n + 1)]
        return rank(r, calls[-1], calls=tuple(calls))

    s = snapshot(sends(0, [1, 1, 1, 2]), receives(1, 0, 4), receives(2, 1, 4))
    f = only(s)
    assert (f.kind, f.culprits) == ("deadlock", (0,))
    assert "in 3 earlier calls there its peer was rank 1" in f.message


def test_the_argument_in_which_two_calls_at_one_line_differ_is_named() -> None:
    def differ(made: tuple[int, int], due: tuple[int, int]) -> str:
        a, b = (call("gather", 9, SITE, root=root, shape=(size,)) for root, size in (made, due))
        return divergence.argument(divergence.Departure(1, a, b))

    assert differ((1, 66), (0, 66)) == "roots"
    assert differ((1, 66), (1, 40)) == "sizes"
