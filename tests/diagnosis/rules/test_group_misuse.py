"""group_misuse: a rank calls a collective in a group that it does not belong to, or ranks create groups in different order."""

from __future__ import annotations

import msgspec

from distdiag.diagnosis.model.snapshot import Group, RankState, Sample, Snapshot
from distdiag.diagnosis.rules import group_misuse
from tests.diagnosis import waits
from tests.diagnosis.made import LOOP, findings, job, only, rank


def test_a_call_by_a_non_member_is_reported_with_its_line() -> None:
    outside = Sample("not_a_member", 3, 0.0, name="all_reduce", site=LOOP)
    f = only(findings(job(rank(0), rank(1, samples=(outside,))), group_misuse))
    assert (f.kind, f.cause, f.culprits) == ("group_misuse", "not_a_member", (1,))
    assert "all_reduce" in f.message and f.where[0].line == LOOP.line
    harmless = msgspec.structs.replace(outside, name="barrier")
    assert findings(job(rank(0), rank(1, samples=(harmless,))), group_misuse) == []


def made(number: int, *ranks: int) -> Group:
    name = f"new_group {number} of ranks {ranks}"
    return Group(name=name, ranks=ranks, description="new_group", number=number, site=LOOP)


def groups(*of: Group, world: int = 4) -> Snapshot:
    every = job(*map(rank, range(world)))
    return msgspec.structs.replace(every, groups={**every.groups, **{g.name: g for g in of}})


def test_ranks_that_create_their_own_group_first_are_reported() -> None:
    f = only(findings(groups(made(1, 0, 1), made(1, 2, 3), made(2, 0, 1), made(2, 2, 3)), group_misuse))
    assert (f.cause, f.severity, f.certainty, f.culprits, f.victims) == ("order", "error", "proved", (), (0, 1, 2, 3))
    assert "call 1 of new_group: a group of ranks 0, 1 at train.py:40 in" in f.message.split("; ")[0]
    assert " and a group of ranks 2, 3 at train.py:40" in f.message.split("; ")[0]
    assert {w.line for w in f.where} == {LOOP.line} and "same order" in f.advice


def test_the_smaller_group_of_two_with_one_number_is_the_culprit() -> None:
    assert only(findings(groups(made(1, 0, 1, 2), made(1, 3, 4), world=5), group_misuse)).culprits == (3, 4)


def test_ranks_that_left_out_a_group_of_others_are_the_culprits() -> None:
    f = only(findings(groups(made(1, 0, 1, 2, 3), made(1, 2, 3)), group_misuse))
    assert (f.culprits, f.victims) == ((0, 1), (2, 3))
    assert f.message.startswith("ranks 0, 1 did not create the group of ranks 2, 3 at train.py:40")


def test_groups_in_the_same_order_are_no_finding() -> None:
    assert findings(groups(made(1, 0, 1), made(2, 2, 3), made(3, 0, 2)), group_misuse) == []
    alone = [made(1, q) for q in range(4)]
    assert findings(groups(*alone), group_misuse) == [], "a group of one rank has nobody to find"
    again = Group(name="default_pg#2", ranks=(0, 1, 2, 3))
    assert findings(groups(made(1, 0, 1), made(1, 2, 3), again), group_misuse) == [], "torch counts from 0 again"


def test_a_group_that_only_its_members_created_explains_the_hang_in_the_next_new_group() -> None:
    """Its number is that of the next group on the rank that left it out."""

    def waiting(q: int, group: Group) -> RankState:
        here = waits.call("new_group", 1, LOOP, group.name, shape=None, dtype=None)
        return waits.rank(q, here, calls=(here,))

    extra, late, early = made(1, 0, 2), made(2, 0, 1, 2), made(1, 0, 1, 2)
    s = waits.snapshot(waiting(0, late), waiting(1, early), waiting(2, late))
    s = msgspec.structs.replace(s, groups={**s.groups, **{g.name: g for g in (extra, late, early)}})
    f = waits.only(s)
    assert (f.kind, f.culprits) == ("deadlock", (1,))
    assert f.message.startswith("rank 1 did not create the group of ranks 0, 2 at train.py:40")
    assert "call new_group on all ranks, in the same order" in f.advice
