"""Collectives that the script itself calls: the line that costs all ranks most, and all_to_alls in which some ranks receive more than others
(tokens that a router sends to experts, rows that are hashed to shards)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from distdiag.diagnosis.model.snapshot import Call, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source, line_at
from distdiag.diagnosis.replicas import limits as exchanged
from distdiag.diagnosis.text.phrases import at, site_text
from distdiag.diagnosis.training_data import LARGER
from distdiag.terms.operations import op_name
from distdiag.terms.units import counted, percent, size_text

HISTORY = (
    "if it sends a history (a metric's state, a list that is never cleared): clear that, gather it once, at the end of an epoch "
    "(`dist_sync_on_step=False`), or keep running sums and reduce those"
)
AS_TENSORS = "exchange tensors instead of pickled objects (all_gather_into_tensor of numbers, padded to one size), and less often"
_FULL_TENSOR, _OBJECTS = "full_tensor(", "_object"  # in the text of a line
ON_SHARDS = (
    "each `full_tensor()` gathers a tensor of all ranks' shards: compute on the shards (`to_local()`) and reduce the numbers in one call (a norm: the "
    "sum of the squares of the shards' norms), or do it every n-th step only"
)
LEAST = 8  # complete calls of a line on every rank
MAIN = 0.25  # of the elements of the all_to_all with most: lines with fewer are not looked at


@dataclass(frozen=True)
class Limits:
    small_bytes: int = 1 << 16
    """Mean bytes of a call below which its latency matters more than its bytes."""
    several: float = 2.5
    """Calls of a line per step from which on they are worth being put together."""
    many: int = 32
    """The same if each carries a number or two, whatever share of the time they take."""
    grows: float = 0.98
    """Least correlation of the bytes of calls with their number, if they grow steadily."""


limits = Limits()
AGAIN = "leave the second out: DDP has averaged the gradients in backward, and a sum of the averages is as many times too large as there are ranks"


@dataclass(frozen=True)
class Line:
    """What the calls of one line cost, on the rank that loses least to them."""

    op: str
    site: Site
    share: float  # of the time, in calls that the host waits for
    per_step: float  # calls; 0: not known
    mean_bytes: int
    source: str = field(default="", compare=False)  # the text of the line
    again: bool = False  # it reduces as much as DDP has averaged already
    others: int = 0  # other calls that the same line of the caller leads to: `share` includes them
    grew: tuple[int, int] | None = None  # bytes of the first and the newest known call, if they grow steadily
    asynchronous: bool = False  # most of the time is waited for later
    uneven: bool = False  # its calls carry different numbers of bytes
    rank: int | None = None  # of the mean, if other ranks have another one

    @property
    def text(self) -> str:
        times = f"{self.per_step:.0f}" if self.per_step < 100 else f"about {round(self.per_step, -1):.0f}"
        often = f", {times} times a step" if self.per_step >= limits.several else ""
        size = f" of {size_text(self.mean_bytes)}{' on average' * self.uneven}" if self.mean_bytes else ""
        size += f" on rank {self.rank}" if size and self.rank is not None else ""
        again = ", which reduces as many elements as DDP has averaged already" if self.again else ""
        if self.grew is not None:
            size, (first, newest) = "", map(size_text, self.grew)
            often += f", whose calls carry ever more, from {first} to {newest}"
        others = f", with {counted(self.others, 'other call')} from there" if self.others else ""
        return f"{self.op}{size} at {site_text(self.site)}{often}{again}{others}, takes {percent(self.share)}"

    @property
    def many(self) -> bool:
        """True if these are so many calls per step, of a number or two each, that their count alone tells what to do."""
        other = self.op in ("send", "recv", "barrier") or _OBJECTS in self.source or self.asynchronous
        return self.per_step >= limits.many and self.mean_bytes <= exchanged.metrics_bytes and not other

    @property
    def advice(self) -> str:
        return next(advice for holds, advice in _ADVICE if holds(self))


def often(s: Snapshot) -> bool:
    """True if a step has so many calls that a line with `many` of them may be among theirs."""
    r = next(iter(s.ranks.values()), None)
    return r is not None and sum(r.sites.values()) >= limits.many * r.step > 0


def pickles(site: Site, source: Source) -> bool:
    """True if this line exchanges objects: most of what that costs is no waiting."""
    return _OBJECTS in line_at(site, source)


def dearest(s: Snapshot, source: Source, again: Site | None) -> Line | None:
    """Return the line (of the caller, if that is known) whose calls cost most of every rank's time; None if none is known of all ranks.

    Args:
        again: Where the script reduces what DDP has averaged.
    """
    of_ranks = {q: _lines(r, source) for q, r in s.ranks.items()}
    common = set.intersection(*(set(x) for x in of_ranks.values())) if of_ranks else set()
    if not common:
        return None
    # of a helper itself, if no line that calls it has most of its cost
    key = max(common, key=lambda k: min(lines[k][0] for lines in of_ranks.values()) / (2 if k.helper else 1))
    rank = min(of_ranks, key=lambda q: of_ranks[q][key][0])
    share, by_call = of_ranks[rank][key]
    which, calls = max(by_call.items(), key=lambda x: _waited_s(x[1]))
    means = {_mean_bytes(lines[key][1].get(which, calls)) for lines in of_ranks.values()}
    newest, site = calls[-1], calls[-1].site
    assert site is not None
    site = msgspec.structs.replace(site, caller=None) if key.helper else site
    at_site = sum(len(of) for (_, where), of in by_call.items() if where == site.key)  # of every operation
    return Line(
        op=op_name(newest.op), site=site, share=share, source=line_at(site, source), others=len(by_call) - 1, grew=_growth(calls),
        per_step=min(_whole_steps(r, site) for r in s.ranks.values()) * len(calls) / at_site,
        mean_bytes=_mean_bytes(calls), uneven=len({c.bytes for c in calls}) > 1, rank=rank if len(means) > 1 else None,
        again=again is not None and again.key == site.key, asynchronous=newest.asynchronous,
    )  # fmt: skip


def _mean_bytes(calls: Sequence[Call]) -> int:
    return int(statistics.mean(c.bytes or 0 for c in calls))


def _whole_steps(r: RankState, site: Site) -> float:
    """Return how often a rank calls a line in a whole step, on average; 0 if it makes no steps.

    The calls since its last step are left out: all of them, if the page keeps so many.
    """
    since_s = r.steps[-1].end_s if r.steps else math.inf
    begun = sum(c.site is not None and _is_of(c.site.key, site) and (c.entered_s or 0.0) > since_s for c in r.calls)
    return (sum(n for key, n in r.sites.items() if _is_of(key, site)) - begun) / r.step if r.step else 0.0


def _is_of(key: str, site: Site) -> bool:
    """True if a key is of this site; of a helper without a caller, if it is that of any of its callers."""
    return key == site.key or key.startswith(f"{site.key} < ")


def _growth(calls: list[Call]) -> tuple[int, int] | None:
    """Return the bytes of the first and the newest of these calls if they grow steadily: those of one type, of which most bytes are."""
    of: dict[str | None, list[int]] = {}
    for c in calls:
        of.setdefault(c.dtype, []).append(c.bytes or 0)
    sizes = max(of.values(), key=sum)
    grows = len(sizes) >= LEAST and sizes[-1] > sizes[0]
    return (sizes[0], sizes[-1]) if grows and statistics.correlation(range(len(sizes)), sizes) >= limits.grows else None


def _waited_s(calls: Iterable[Call]) -> float:
    # messages are under way side by side
    return sum(c.waited_s if c.asynchronous or c.p2p else (c.completed_s or 0.0) - (c.entered_s or 0.0) for c in calls)


class _Counted(NamedTuple):
    """What the cost of calls is added to."""

    key: str
    helper: bool = False  # a line that calls from several lines lead to


def _counted_as(site: Site, small: bool, source: Source) -> dict[_Counted, str]:
    """Return what the cost of a call is added to, each with the site of the call there.

    That is the line that calls its helper; of `full_tensor` and of objects, the function. The cost of a small call is also added to the
    helper's own line.
    """
    line = line_at(site, source)
    word = next((word for word in (_FULL_TENSOR, _OBJECTS) if word in line), None)
    if word is not None:
        return {_Counted(f"{site.file} {site.function} {word}"): site.key}
    out = {_Counted((site.caller or site).key): site.key}
    if site.caller is not None and small:
        own = f"{site.file}:{site.line}"
        out[_Counted(own, helper=True)] = own
    return out


def _lines(r: RankState, source: Source) -> dict[_Counted, tuple[float, dict[tuple[str, str], list[Call]]]]:
    """Return of each line that a rank has called often enough: the share of the time that it waits there, and its calls by (operation, site).

    A helper's calls count together, for the line that calls the helper; in one function, so do those of `full_tensor` and of objects.
    """
    done = [c for c in r.calls if c.entered_s is not None and c.completed_s is not None and not c.on_device]
    if len(done) < LEAST:
        return {}
    span_s = max(c.completed_s or 0.0 for c in done) - min(c.entered_s or 0.0 for c in done)
    each_step = sum(r.sites.values()) / max(r.step, 1)
    if r.steps and len(done) < each_step:  # the page keeps those of a part of a step only, which may have no other work
        span_s = max(span_s, statistics.fmean(x.step_ms for x in r.steps) / 1e3 * len(done) / each_step)
    of: dict[_Counted, dict[tuple[str, str], list[Call]]] = {}
    keys: dict[tuple[str, bool], dict[_Counted, str]] = {}
    for c in done:
        if c.site is not None:
            small = (c.bytes or 0) < limits.small_bytes
            if (counted := keys.get((c.site.key, small))) is None:
                counted = keys[c.site.key, small] = _counted_as(c.site, small, source)
            for key, where in counted.items():
                of.setdefault(key, {}).setdefault((c.op, where), []).append(c)
    often = {k: {call: x for call, x in mine.items() if len(x) >= LEAST} for k, mine in of.items() if span_s > 0}
    return {k: (sum(map(_waited_s, mine.values())) / span_s, mine) for k, mine in often.items() if mine}


# The script calls `backward`, and what that calls for every layer or group of parameters are FSDP's collectives, or a hook's.
GATHERED_AGAIN = (
    "backward gathers parameters again that forward has had: keep them until then, if memory allows (`reshard_after_forward=False`, or "
    "SHARD_GRAD_OP), or let each call carry more (`fully_shard` on larger blocks)"
)
IN_BACKWARD = (
    "let each reduction of the backward carry more (`fully_shard` on larger blocks), reduce in bf16 (reduce_dtype of MixedPrecisionPolicy), "
    "or accumulate, with set_requires_gradient_sync(False) in all but the last backward"
)
OF_LAYERS = (
    "the model's own layers need each result (batch norm over ranks, gathered embeddings, tensor parallelism): fuse layers, so that one call serves "
    "several (q, k and v), let fewer ranks take part, or give each rank a larger batch"
)
_ADVICE: tuple[tuple[Callable[[Line], bool], str], ...] = (
    (lambda x: x.again, AGAIN),
    (lambda x: x.grew is not None, HISTORY),
    (lambda x: x.site.function in ("forward", "backward") or (".backward(" in x.source and x.op == "all_reduce"), OF_LAYERS),
    (lambda x: ".backward(" in x.source and x.op.startswith("all_gather"), GATHERED_AGAIN),
    (lambda x: ".backward(" in x.source and "reduce" in x.op, IN_BACKWARD),
    (lambda x: x.op == "barrier",
     "leave the barrier out of the loop: a collective that follows waits for all ranks by itself"),
    (lambda x: _FULL_TENSOR in x.source, ON_SHARDS),
    (lambda x: _OBJECTS in x.source, AS_TENSORS),
    (lambda x: x.mean_bytes < limits.small_bytes and (x.per_step or math.inf) >= limits.several,
     "put the tensors of a step into one and send that in one call: small calls cost their latency, not their bytes"),
    (lambda x: x.mean_bytes < limits.small_bytes and "reduce" in x.op,
     "add up on each rank, and call it every n-th step only"),
    (lambda x: x.asynchronous, "call it less often, send less (a lower precision, what has changed), or compute more before it is waited for"),
    (lambda x: True,
     "call it less often, send less (a lower precision, what has changed), or start it with `async_op=True` and compute until `wait()`"),
)  # fmt: skip


# -- what ranks receive in an all_to_all ---------------------------------------------------------------------------------


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
    whole = ((key, [x for x in calls.values() if len(x) == len(s.ranks)]) for key, calls in of.items())
    known = {key: [x for x in calls if any(x.values())] for key, calls in whole}
    totals = {key: sum(sum(x.values()) for x in calls) for key, calls in known.items() if len(calls) >= LEAST}
    main = [key for key, n in totals.items() if n >= MAIN * max(totals.values())]
    found = [(statistics.median(max(x.values()) * len(x) / sum(x.values()) for x in known[key]), key) for key in main]
    ratio, key = max(found, default=(0.0, ""))
    if ratio < LARGER:
        return None
    shares = {q: sum(x[q] for x in known[key]) * len(s.ranks) / totals[key] for q in s.ranks}
    return Exchange(op_name(last[key].op), last[key].site or Site("", 0), ratio, shares)
