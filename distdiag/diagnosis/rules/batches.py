"""Batches: ranks that cannot run the same number of steps, weigh gradients unequally, or read the same data."""

from __future__ import annotations

import ast
import math
import statistics
from collections import Counter
from collections.abc import Callable

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import DEAD, Loader, RankState, Snapshot
from distdiag.diagnosis.rules.speed import keeps_company
from distdiag.diagnosis.text.phrases import at, where

SIZE_STEPS = 24  # steps after which a difference in local batch size is a habit
SIZE_LOOK = 40  # of the last steps
MIN_FINGERPRINTS = 3


def synchronous(s: Snapshot) -> bool:
    """True where the ranks train one model together: DDP over all ranks, or gradients reduced by hand in each step."""
    world = set(s.ranks)
    for r in s.ranks.values():
        for m in r.models:
            g = s.groups.get(m.group or "")
            if g is not None and set(g.ranks) >= world and m.synced_backwards:
                return True
    shares = [[x.value for x in r.samples if x.kind == "reduced"] for r in s.ranks.values()]
    return all(mine and all(0.9 <= v <= 1.1 for v in mine) for mine in shares)


def training_loaders(s: Snapshot) -> dict[int, Loader]:
    """The loader that each rank trains from (the busiest, where there are several), only where every rank has one."""
    out: dict[int, Loader] = {}
    for r in s.ranks.values():
        mine = [x for x in r.loaders if x.in_training]
        if not mine:
            return {}
        out[r.rank] = max(mine, key=lambda x: (not x.fed, x.batches + x.iterations_started))
    return out


def exhausted_ranks(s: Snapshot) -> tuple[int, ...]:
    """Ranks whose training loader ran out while another rank's is still giving batches in the same epoch."""
    loaders = training_loaders(s)
    if len(loaders) < 2:
        return ()
    out = [q for q, x in loaders.items() if x.exhausted]
    going = [q for q, x in loaders.items() if not x.exhausted]
    if not out or not going:
        return ()
    epoch = {loaders[q].iterations_started for q in out}
    if len(epoch) != 1 or any(loaders[q].iterations_started not in epoch for q in going):
        return ()
    fewest = max(loaders[q].batches for q in out)
    return tuple(sorted(out)) if all(loaders[q].batches >= fewest for q in going) else ()


def rules(s: Snapshot, source: Callable[[str], str | None]) -> list[Finding]:
    """Findings about batches.

    Args:
        source: Text of a source file, or None: whether a training loop can end early is read from it.
    """
    if len(s.ranks) < 2 or len(s.ranks) < s.world_size:
        return []
    out: list[Finding] = []
    if any(r.in_join for r in s.ranks.values()) or not synchronous(s):
        return out
    out += _count(s, source)
    out += _size(s)
    out += _duplicates(s)
    return out


# -- number of batches ---------------------------------------------------------------------------------------


def _count(s: Snapshot, source: Callable[[str], str | None]) -> list[Finding]:
    """Lengths that cannot agree, at the start of an epoch; abstains where the loop may end before its loader does."""
    loaders = training_loaders(s)
    if len(loaders) < 2 or any(x.length is None or x.site is None for x in loaders.values()):
        return []
    if any(r.life in DEAD for r in s.ranks.values()):
        return []
    lengths = {q: x.length or 0 for q, x in loaders.items()}
    if len(set(lengths.values())) < 2:
        return []
    if any(x.batches > (x.length or 0) for x in loaders.values()):
        return []  # its length is no promise
    for x in loaders.values():
        assert x.site is not None
        if x.promised:
            continue
        text = source(x.site.file)
        if text is None or may_end_early(text, x.site.line):
            return []
    return [count_finding(s, loaders, lengths, predicted=True)]


def count_finding(s: Snapshot, loaders: dict[int, Loader], counts: dict[int, int], predicted: bool) -> Finding:
    """`uneven_batches` / `count`: the ranks with fewest batches are the culprits; majority has the usual count."""
    fewest = min(counts.values())
    short = tuple(sorted(q for q, n in counts.items() if n == fewest))
    rest = tuple(sorted(q for q in counts if q not in short))
    many = Counter(counts.values()).most_common()
    text = "; ".join(
        f"{rank_list([q for q, n in counts.items() if n == k])}: {k}" for k, _ in sorted(many, key=lambda x: x[0])
    )
    first = s.ranks[short[0]]
    x = loaders[short[0]]
    samplers = all(v.distributed_sampler for v in loaders.values())
    return Finding(
        kind="uneven_batches",
        cause="count",
        certainty=Certainty.PROVED if not predicted else Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=short,
        victims=rest,
        where=tuple(w for q in short for w in _past_the_loop(s.ranks[q], loaders[q])),
        waiting=tuple(w for q in rest for w in _past_the_loop(s.ranks[q], loaders[q])),
        step=first.step,
        message=("ranks have different numbers of batches per epoch: " if predicted else "ranks ran different numbers of "
                 "batches: ") + f"{text}{at(x.site)}",
        cost=f"after batch {fewest} {rank_list(rest)} wait{'s' if len(rest) == 1 else ''} for a rank that has left the loop",
        advice=("give every rank as many samples: pad or drop in the sampler"
                if samplers else "use DistributedSampler (it pads), drop_last, or torch's Join context"),
    )  # fmt: skip


def _past_the_loop(r: RankState, x: Loader) -> tuple[Where, ...]:
    """Where a rank waits or ended, once it does; and the loop that its batches are counted in."""
    loop = where(r, "data", x.site)
    there = r.blocked is not None or r.life in DEAD
    return (where(r), loop) if there and r.place is not None and r.place != x.site else (loop,)


def may_end_early(text: str, line: int) -> bool:
    """True where the `for` statement at `line` may stop before its iterator does, or cannot be found.

    A `break` or `return` of the loop, `zip` / `islice` / `enumerate(zip…)` over it, or an iterator advanced by `next()`.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
            calls = {
                n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
                for n in ast.walk(node.iter)
                if isinstance(n, ast.Call)
            }
            return bool(calls & {"zip", "islice", "takewhile", "cycle"}) or _leaves(node.body)
    return True


def _leaves(body: list[ast.stmt]) -> bool:
    """A break of this loop, or a return / raise out of it."""
    for node in body:
        if isinstance(node, (ast.Break, ast.Return)):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inner_loop = isinstance(node, (ast.For, ast.While, ast.AsyncFor))
        for field in ("body", "orelse", "finalbody", "handlers"):
            part = getattr(node, field, None)
            if not isinstance(part, list):
                continue
            statements = [x for h in part for x in (h.body if isinstance(h, ast.ExceptHandler) else [h])]
            if inner_loop and field == "body":
                if any(isinstance(n, ast.Return) for x in statements for n in ast.walk(x)):
                    return True
            elif _leaves(statements):
                return True
        for case in getattr(node, "cases", ()):
            if _leaves(case.body):
                return True
    return False


# -- size of batches -----------------------------------------------------------------------------------------


def _size(s: Snapshot) -> list[Finding]:
    usual: dict[int, int] = {}
    for r in s.ranks.values():
        sizes = [x.batch for x in r.steps[-SIZE_LOOK:] if x.batch]
        if len(sizes) < SIZE_STEPS:
            return []
        size, n = sizes[0], sizes.count(sizes[0])
        if n < 0.9 * len(sizes):
            size, n = Counter(sizes).most_common(1)[0]
        if n < 0.9 * len(sizes):
            return []  # the sizes vary by themselves: token budgets, buckets
        if keeps_company(r.steps[-SIZE_LOOK:]):
            return []
        usual[r.rank] = size
    if len(set(usual.values())) < 2 or _weighed(s, usual):
        return []
    most = Counter(usual.values()).most_common()
    majority = most[0][0] if len(most) == 1 or most[0][1] > most[1][1] else None
    odd = tuple(sorted(q for q, n in usual.items() if majority is not None and n != majority))
    ranks = odd or tuple(sorted(usual))
    text = "; ".join(f"{rank_list([q for q, n in usual.items() if n == k])}: {k} samples" for k, _ in most)
    smallest, largest = min(usual.values()), max(usual.values())
    return [
        Finding(
            kind="uneven_batches",
            cause="size",
            certainty=Certainty.PROVED,
            severity=Severity.WARNING,
            culprits=odd,
            victims=tuple(sorted(set(usual) - set(odd))),
            where=tuple(
                where(s.ranks[q], "data", next((x.site for x in s.ranks[q].loaders if x.in_training), None))
                for q in ranks
            ),
            step=min(r.step for r in s.ranks.values()),
            message=f"local batch sizes differ, step after step: {text}",
            cost=f"DDP averages ranks, not samples: a sample of the small batch weighs {largest / smallest:.1f}x as much",
            advice="use the same batch size on every rank, or weigh each rank's loss by its number of samples",
        )
    ]


def _weighed(s: Snapshot, usual: dict[int, int]) -> bool:
    """True where the losses stand to each other rather as the batches do than as equals: sums over the samples, weighed on
    purpose. Late in training losses scatter, and their ratio with them."""
    small, large = min(usual, key=lambda q: usual[q]), max(usual, key=lambda q: usual[q])
    losses = [{x.step: x.loss for x in s.ranks[q].steps if x.loss is not None and x.loss > 0} for q in (small, large)]
    ratios = [math.log(losses[1][k] / losses[0][k]) for k in losses[0].keys() & losses[1].keys()]
    expected = math.log(usual[large] / usual[small])
    return len(ratios) >= SIZE_STEPS and statistics.median(ratios) > 0.5 * expected


# -- the same data -------------------------------------------------------------------------------------------


def _halves(prints: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(p >> 32 for p in prints), tuple(p & 0xFFFFFFFF for p in prints)


def same_data(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True where the first batches of two fingerprint rows are the same data, by labels or by values."""
    n = min(len(a), len(b))
    if n < MIN_FINGERPRINTS:
        return False
    return any(x == y and 0 not in x and len(set(x)) == n for x, y in zip(_halves(a[:n]), _halves(b[:n]), strict=True))


def _by_labels_alone(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether what is alike are the labels only, while the values of the same batches are known and differ."""
    n = min(len(a), len(b))
    x, y = _halves(a[:n])[1], _halves(b[:n])[1]
    return 0 not in (*x, *y) and x != y


def _duplicates(s: Snapshot) -> list[Finding]:
    if any(g.ranks and 1 < len(g.ranks) < s.world_size and _used(s, name) for name, g in s.groups.items()):
        return []  # model-parallel ranks read the same batches by design
    loaders = training_loaders(s)
    if len(loaders) < 2:
        return []
    out: list[Finding] = []
    epochs = {x.iterations_started for x in loaders.values()}
    groups: list[list[int]] = []
    alike: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}  # groups by how their prints begin: no pair by pair
    for q, x in sorted(loaders.items()) if len(epochs) == 1 else ():
        begins = list(enumerate(_halves(x.first_fingerprints[:MIN_FINGERPRINTS])))
        near = [g for b in begins for g in alike.get(b, ())]
        found = next((g for g in near if same_data(loaders[g[0]].first_fingerprints, x.first_fingerprints)), None)
        if found is None:
            groups.append(found := [])
            for b in begins:
                if len(b[1]) == MIN_FINGERPRINTS and 0 not in b[1]:
                    alike.setdefault(b, []).append(found)
        found.append(q)
    doubled = [g for g in groups if len(g) > 1]
    if doubled:
        ranks = tuple(sorted(q for g in doubled for q in g))
        x = loaders[ranks[0]]
        # what is made up on the spot, to measure or to try something, is often meant to be alike
        made_up = all(loaders[q].fed for q in ranks)
        # the same samples, augmented by each rank in its own way, or others whose labels follow one pattern
        labels = any(
            _by_labels_alone(loaders[g[0]].first_fingerprints, loaders[q].first_fingerprints)
            for g in doubled
            for q in g
        )
        shared = all(loaders[q].dataset_length is not None and not loaders[q].distributed_sampler for q in ranks)
        out.append(
            Finding(
                kind="duplicate_data",
                cause="same_batches_on_ranks",
                certainty=Certainty.SUSPECTED if labels else Certainty.PROVED,
                severity=Severity.INFO if made_up or (labels and not shared) else Severity.WARNING,
                victims=ranks,
                where=tuple(where(s.ranks[q], "data", loaders[q].site) for q in ranks),
                step=min(r.step for r in s.ranks.values()),
                message=f"{rank_list(ranks)} train on batches with the same labels{at(x.site)}: the same samples, augmented apart, "
                "or others whose labels follow one pattern"
                if labels
                else f"{rank_list(ranks)} train on the same batches{at(x.site)}",
                cost=f"{len(ranks) - len(doubled)} of {s.world_size} ranks compute what another has computed",
                advice="unless the data are made up: draw them by a seed of the rank's own (seed + rank), or from a shard of its own"
                if made_up
                else "nothing, if each rank reads shards of its own: look at a few samples of two ranks"
                if labels and not shared
                else "give the DataLoader a DistributedSampler(dataset)"
                if not x.distributed_sampler
                else "the DistributedSampler was made with the wrong rank or num_replicas",
            )
        )
    again = [
        q
        for q, x in loaders.items()
        if x.distributed_sampler
        and x.shuffle
        and x.iterations_started >= 2
        and same_data(x.first_fingerprints, x.previous_fingerprints)
    ]
    if len(again) == len(loaders):
        x = loaders[again[0]]
        out.append(
            Finding(
                kind="duplicate_data",
                cause="same_order_every_epoch",
                certainty=Certainty.PROVED,
                severity=Severity.WARNING,
                victims=tuple(sorted(again)),
                where=tuple(where(s.ranks[q], "data", loaders[q].site) for q in sorted(again)),
                step=min(r.step for r in s.ranks.values()),
                message=f"every epoch has the same order on all ranks{at(x.site)}: DistributedSampler shuffles by its "
                f"epoch number, which stays {x.sampler_epoch}",
                cost="training sees the same batches in the same order in every epoch",
                advice="call sampler.set_epoch(epoch) at the start of each epoch",
            )
        )
    return out


def _used(s: Snapshot, name: str) -> bool:
    return any(r.enqueued.get(name, 0) > 2 for r in s.ranks.values())


def seen_uneven(s: Snapshot) -> Finding | None:
    """A rank ran out of batches while others are inside a step that needs it: seen, not predicted."""
    short = exhausted_ranks(s)
    if not short or not synchronous(s) or any(r.in_join for r in s.ranks.values()):
        return None
    loaders = training_loaders(s)
    counts = {q: x.batches for q, x in loaders.items()}
    return count_finding(s, loaders, counts, predicted=False)
