"""Sites of a rank's collectives: the sequence numbers of the last visits, by group and site."""

from __future__ import annotations

from collections import deque

VISITS_KEPT, VISITED_SITES = 4, 256


class Visits:
    """Keeps the last few visits of each site; only the first of consecutive calls at one site counts."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, deque[int]]] = {}
        self._newest: dict[tuple[str, str], int] = {}

    def add(self, group: str, site: str, seq: int) -> None:
        """Add a call of this group; calls come in the order of their sequence numbers."""
        before = self._newest.get((group, site))
        if before is None and len(self._newest) >= VISITED_SITES:
            return
        self._newest[group, site] = seq
        if before is None or seq > before + 1:
            self._kept.setdefault(group, {}).setdefault(site, deque(maxlen=VISITS_KEPT)).append(seq)

    def forget(self) -> None:
        """Drop the visits: some calls were not seen, so distances between earlier visits mean nothing any more."""
        self._kept.clear()

    def known(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the visits in the form of `RankState.visits`."""
        return {g: {site: tuple(v) for site, v in sites.items()} for g, sites in self._kept.items()}
