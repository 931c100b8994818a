"""The tournament measures every pair once, in disjoint rounds; a slow rank or a slow link is named."""

from __future__ import annotations

from itertools import combinations

import pytest

from distdiag.probes.pairs import PairRow, blame, heat_map, tournament
from distdiag.streams import PLAINER


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 17, 64])
def test_every_pair_is_measured_once_in_disjoint_rounds(ranks: int):
    rounds = tournament(ranks)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        busy = [r for pair in pairs for r in pair]
        assert len(busy) == len(set(busy)) == ranks - ranks % 2
    assert len(rounds) == ranks - 1 + ranks % 2


def times(ranks: int, slow_ranks: set[int] = frozenset(), slow_links: set[tuple[int, int]] = frozenset()):  # type: ignore[assignment]
    return {
        pair: 100.0 * (4 if set(pair) & slow_ranks else 1) * (3 if pair in slow_links else 1)
        for pair in combinations(range(ranks), 2)
    }


def test_a_slow_rank_is_slow_in_all_its_pairs():
    assert blame(times(8, {5}), 8) == ({5: (7, 7)}, [])


def test_a_slow_link_between_healthy_ranks_is_named():
    assert blame(times(8, set(), {(2, 6)}), 8) == ({}, [(2, 6)])


def test_slow_ranks_and_a_slow_link_are_distinguished():
    ranks, links = blame(times(10, {3, 7}, {(0, 1)}), 10)
    assert set(ranks) == {3, 7} and links == [(0, 1)]


def test_an_even_matrix_blames_nobody():
    assert blame(times(6), 6) == ({}, [])
    assert blame(times(2), 2) == ({}, [])


def test_the_heat_map_shows_no_difference_where_there_is_none():
    rows = [PairRow((a, b), 100.0 + a + b, 0.0) for a in range(4) for b in range(a + 1, 4)]
    assert all(set(line[6:]) <= {" ", "╲"} for line in heat_map(rows, 4)[1:])


def test_the_heat_map_is_darkest_where_it_is_slowest():
    rows = [PairRow(pair, t, 1.0) for pair, t in times(4, set(), {(1, 2)}).items()]
    lines = heat_map(rows, 4)
    assert [i for i, line in enumerate(lines[1:]) if "█" in line] == [1, 2]
    plainer = [line.encode("ascii", PLAINER).decode() for line in lines[1:]]  # as --ascii prints them
    assert [i for i, line in enumerate(plainer) if "#" in line] == [1, 2]
