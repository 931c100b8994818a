"""Sets of ranks by a value that they have in common."""

from __future__ import annotations

from distdiag.terms.ranks import by_value


def test_ranks_are_grouped_in_the_order_in_which_their_values_first_occur() -> None:
    assert list(by_value({3: "b", 0: "a", 1: "b"}).items()) == [("b", [3, 1]), ("a", [0])]
    assert by_value({}) == {}
