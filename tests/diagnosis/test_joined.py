"""torch's Join: a rank without batches shadows only the collectives of the objects that Join was given."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, RankState, Site
from distdiag.diagnosis.rules import mismatch, rank_lost
from tests.diagnosis.made import findings, job, only, rank

FILE = "/job/train.py"
SOURCE = """with Join([model]):
    for x in loader:
        loss = model(x)
        loss.backward()
        dist.all_reduce(loss)
"""
WITH, FORWARD, BACKWARD, OWN = (Site(FILE, line, "train") for line in (1, 3, 4, 5))


def ended(source: str, in_join: bool = True) -> Finding:
    """Return the finding of three ranks that gloo aborts in backward, two calls after an own one met a shadow of rank 2."""

    def made(seq: int, site: Site) -> Call:
        return Call(
            op="all_reduce",
            group="default_pg",
            seq=seq,
            shape=(1,),
            site=site,
            entered_s=97.0,
            completed_s=97.5 if site is WITH else None,
        )

    def trains(q: int, **more: Any) -> RankState:
        calls = (made(5, FORWARD), made(6, OWN), made(7, FORWARD), made(8, FORWARD))
        return rank(q, ended_s=99.0, current_site=BACKWARD, ended_waiting=True, in_join=in_join, calls=calls, **more)

    shadow = rank(
        2, life="killed", signal=15, ended_s=99.5, current_site=WITH, in_join=in_join,
        calls=tuple(made(seq, WITH) for seq in (5, 6, 7)),
    )  # fmt: skip
    reset = "RuntimeError: Connection reset by peer"
    ranks = (trains(0, life="crashed", exception=reset), trains(1, life="killed", signal=6), shadow)
    return only(findings(job(*ranks), mismatch, rank_lost, source={FILE: source}.get))


def test_a_call_that_join_does_not_shadow_is_named_and_not_where_the_ranks_ended() -> None:
    f = ended(SOURCE)
    assert (f.kind, f.culprits, f.victims, {w.line for w in f.where}) == ("mismatch", (0, 1), (2,), {5})
    assert (
        "rank 2 is out of batches and only shadows the collectives" in f.message
        and "(train.py:5) of ranks 0, 1 is none of them" in f.message
    )
    assert "move all_reduce (train.py:5) out of the `with Join`" in f.advice and "split" not in f.message + f.advice


@pytest.mark.parametrize(("source", "in_join"), [(SOURCE.replace("dist.all_reduce", "meter"), True), (SOURCE, False)])
def test_equal_sizes_are_no_evidence_of_different_ones(source: str, in_join: bool) -> None:
    f = ended(source, in_join)
    assert "first tensor" not in f.message and "split" not in f.advice and "begin to differ" in f.advice
