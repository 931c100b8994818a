"""An all_to_all in which some ranks receive more than others: tokens that a router sends to experts, rows that are hashed to shards."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.diagnosis.text.phrases import at
from distdiag.terms.operations import op_name

LEAST = 8  # calls that are known of all ranks
LARGER = 1.25  # times an even share that a rank must receive
MAIN = 0.25  # of the elements of the line with most: lines with fewer are not looked at


class Exchange(NamedTuple):
    """The calls of one line in which ranks receive least evenly."""

    op: str
    site: Site
    ratio: float  # of the most that a rank receives in a call to an even share, typically
    shares: dict[int, float]  # what each rank has received in all of them, in multiples of an even share

    @property
    def where(self) -> str:
        return f"{self.op}{at(self.site)}"


def uneven(s: Snapshot) -> Exchange | None:
    """Return the all_to_all in which one rank typically receives `LARGER` times an even share; None if there is none."""
    of: dict[str, dict[tuple[str, int | None], dict[int, int]]] = {}  # by line and call: elements received, by rank
    last: dict[str, Call] = {}
    for q, r in s.ranks.items():
        for c in r.calls:
            if c.received is not None and c.site is not None and s.whole(c.group):
                last[c.site.key] = c
                of.setdefault(c.site.key, {}).setdefault((c.group, c.seq), {})[q] = c.received
    known = {
        key: [x for x in calls.values() if len(x) == len(s.ranks) and any(x.values())] for key, calls in of.items()
    }
    totals = {key: sum(sum(x.values()) for x in calls) for key, calls in known.items() if len(calls) >= LEAST}
    main = [key for key, n in totals.items() if n >= MAIN * max(totals.values())]
    found = [(statistics.median(max(x.values()) * len(x) / sum(x.values()) for x in known[key]), key) for key in main]
    ratio, key = max(found, default=(0.0, ""))
    if ratio < LARGER:
        return None
    shares = {q: sum(x[q] for x in known[key]) * len(s.ranks) / totals[key] for q in s.ranks}
    return Exchange(op_name(last[key].op), last[key].site or Site("", 0), ratio, shares)
