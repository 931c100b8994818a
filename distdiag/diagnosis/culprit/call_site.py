"""Witnesses by call site: who is at, or has been at, a site where the others have never been."""

from __future__ import annotations

from collections.abc import Iterable

from distdiag.diagnosis.model.snapshot import Call, RankState


def site_of(st: RankState | None, call: Call | None) -> str | None:
    """Return the site of a rank's call; the main thread's site if the call has none and the rank waits in it."""
    site = call.site if call is not None else None
    if site is None and st is not None and st.blocked is call:
        site = st.current_site
    return site.key if site is not None else None


def _past(st: RankState, here: str | None) -> set[str]:
    """Return the sites a rank has visited, not counting the call it is in now."""
    return {s for s, n in st.sites.items() if n - (s == here) > 0}


def odd_by_site(states: dict[int, RankState], here: dict[int, str | None], odd: Iterable[int], rest: list[int]) -> bool:
    """True if `odd` are at sites that `rest` never visited, and have visited the sites of `rest` themselves."""
    for a in odd:
        mine = here.get(a)
        if mine is None or not states[a].sites:
            return False
        for b in rest:
            theirs = here.get(b)
            if theirs is None or mine in states[b].sites or theirs not in states[a].sites:
                return False
    return True


def odd_by_history(
    states: dict[int, RankState], here: dict[int, str | None], odd: Iterable[int], rest: Iterable[int]
) -> bool:
    """True if `odd` have visited every site that `rest` have, and at least one more."""
    common: set[str] = set()
    for b in rest:
        if not states[b].sites:
            return False
        common |= _past(states[b], here.get(b))
    for a in odd:
        if not common <= set(states[a].sites):
            return False
        everywhere = common.union(*(states[b].sites for b in rest))
        if not _past(states[a], here.get(a)) - everywhere:
            return False
    return True
