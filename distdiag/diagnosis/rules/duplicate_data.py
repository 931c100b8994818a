"""duplicate_data: ranks train on the same batches or samples, the workers of a loader all give the same, or every epoch has the
same order.
Batches are compared by fingerprints, and the samples of a first epoch that ends by hashes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import by_step, minority, vetoed
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Call, Loader, RankState, Site, Snapshot
from distdiag.diagnosis.replicas import limits as averaged
from distdiag.diagnosis.replicas import samples_of
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import NOT_ONE_MODEL
from distdiag.terms.operations import family, op_name
from distdiag.terms.ranks import by_value

kind = kinds.DUPLICATE_DATA


@dataclass(frozen=True)
class Limits:
    times: int = 3
    """Batches in a row that must have equal fingerprints: with few labels, one or two are equal by
    chance. Also the epochs after which a sampler that is still at epoch 0 has no `set_epoch`, and
    the equal checksums of ranks without a process group."""
    same_samples: float = 0.8
    """Share of the samples of two ranks' epochs that both read, as often, from which on they read the same: dropped last batches
    differ. Of random draws with replacement, a fifth are drawn as often by both."""
    some_samples: float = 0.25
    """Parts of the data overlap if several ranks read at least this share of the samples, and no rank reads one twice. A sampler's padding
    and chance give less. If each rank shuffles for itself before it takes its part, the share is between 0.33 and 0.42."""
    later: int = 5
    """Equal later batches that enter a model, of those that are compared, up to the 96th: the ranks train on the same batches."""
    losses: int = 16
    """Different losses that must be equal on all ranks."""


limits = Limits()
SPLIT = 1 << 33  # bit of a data set's index: it is a Subset
BY_INDEX = 1 << 32  # bit of the number of a sampled epoch: its samples are what the sampler has drawn
_EXCHANGES = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
_OF_PARTS = ("all_to_all", "send", "recv")  # the others also serve ranks that each have their own batches
_REPEATED = "{repeated} of {world} ranks train on what another rank trains on"
SAME_BATCHES = Template(kind, "same_batches_on_ranks", "{same} train on the same batches{site}{also}", _REPEATED,
    "{do}", proved=True)  # fmt: skip
FED = Template(kind, "same_batches_on_ranks", "the first batches of {same} are the same{site}{also}; too few later ones were compared",
    f"{_REPEATED}, if the later batches are the same, too", "{do}", proved=True)  # fmt: skip
OWN_SAMPLES = Template(kind, "same_batches_on_ranks", "the loaders of {same} give the same batches{site}{also}; with each, the ranks exchange a "
    "value of each sample{exchange}", f"none, if each rank makes its own samples from them; else {_REPEATED}",
    "{do}, unless it is to give all ranks the same (prompts, of which each rank samples completions)", severity=Severity.INFO, proved=True)  # fmt: skip
SAME_LABELS = Template(kind, "same_batches_on_ranks",
    "{same} train on batches with the same labels{site}{also}: the same samples, augmented differently, or other "
    "samples with the same pattern of labels", _REPEATED, "{do}")  # fmt: skip
SAME_SAMPLES = Template(kind, "same_batches_on_ranks",
    "{same} read the same samples in an epoch{site}, not a part each{also}",
    "each epoch trains on the same samples {times} times", "{do}")  # fmt: skip
OVERLAP = Template(kind, "parts_overlap",
    "the parts of the data that the ranks read in an epoch overlap{site}: about {share:share} of the samples that are read ({n} of {of} that were "
    "compared) are read by several ranks{left_out}",
    "some samples are trained on by several ranks in each epoch",
    "let the sampler shuffle with the same seed on all ranks, and then take each rank's part (a state of it that was saved: load it on all ranks, or on "
    "none); if each rank is to draw at random, ignore this",
    severity=Severity.INFO)  # fmt: skip
SHIFTED = Template(kind, "same_batches_on_ranks",
    "{same} train on the same batches, {second} {n} step{n:|s} later than {first}{site}",
    "{repeated} of {world} ranks train on what another rank has trained on a few steps before",
    "each rank begins at another batch and then takes all of them: let it take one in {world} (`islice(batches, rank, None, "
    "world_size)`), or a part of its own", proved=True)  # fmt: skip
APART = Template(kind, "parts_overlap",
    "the DistributedSamplers of the ranks shuffle differently: their {what} is {each}{site}; so their parts overlap, and some samples are in none",
    "in every epoch some samples are trained on by several ranks, and others by none",
    "give the DistributedSampler the same {what} on all ranks: it shuffles the whole data set, and then takes each rank's part", proved=True)  # fmt: skip
OTHER_DATA = Template(kind, "same_batches_on_ranks",
    "DistributedSampler splits one data set, but the ranks have {n} different ones, by their samples or the order of these{odd}{site}",
    "each epoch leaves some samples out, and may give others to several ranks{also}", "{do}; if each rank is to have its own data, give it no "
    "DistributedSampler")  # fmt: skip
FROM_WORKERS = Template(kind, "same_samples_from_workers",
    "each of the {n} workers of the loader gives the same samples on {victims}{site}: {how}", "an epoch trains on each sample {n} times",
    "let each worker read its own part: where the data are read (`__iter__` of the dataset), split by `get_worker_info()`, too: part rank * "
    "workers + worker id of world size * workers", proved=True)  # fmt: skip
SAME_WORK = Template(kind, "same_batches_on_ranks",
    "there is no process group, and {victims} train the same model on the same batches{site}: their parameters "
    "are equal after the same steps", _REPEATED,
    "call init_process_group, wrap the model in DistributedDataParallel and give the DataLoader a "
    "DistributedSampler; or start one rank", proved=True)  # fmt: skip
SAME_ORDER = Template(kind, "same_order_every_epoch",
    "two epochs in a row have the same order on all ranks{site}: DistributedSampler shuffles by its epoch number, which is {epoch} "
    "in both", "training sees the same batches in the same order again",
    "call sampler.set_epoch() with another number before each pass over the loader", proved=True)  # fmt: skip
KEPT_EPOCH = Template(kind, "same_order_every_epoch",
    "every epoch has the same order on all ranks{site}, although the data set's `set_epoch` was called: its epoch is {epoch}",
    "training sees the same batches in the same order in every epoch",
    "persistent workers keep the copy of the data set that they were started with: set persistent_workers=False, count the epochs in the data "
    "set's `__iter__`, or keep the epoch in shared memory; and see whether the order depends on the epoch at all")  # fmt: skip
EQUAL_LOSSES = Template(kind, "same_batches_on_ranks",
    "{victims} had equal losses in each of {n} steps, to the last bit, and average their gradients: they train on the same batches",
    _REPEATED, "{do}", severity=Severity.INFO)  # fmt: skip
_DO = {
    "fed": "if the data are real: draw them with a seed that differs between ranks (seed + rank), or from one shard per rank; after "
    "a resume, restore each rank's own state of the random numbers (`set_rng_state`), or seed again",
    "labels": "compare a few samples of two ranks; nothing to do if each rank reads its own shards",
    "iterable": "let each rank read its own part: split by rank and worker where the data are read (`__iter__` of the dataset: part rank * "
    "workers + worker id of world size * workers); an IterableDataset takes no sampler",
    "parts": "{world} ranks get {parts} different parts of the data: give the sampler each rank's own number among all that average their "
    "gradients, or use a DistributedSampler(dataset); if ranks share a batch by intent (tensor parallelism), ignore this",
    "no sampler": "give the DataLoader a DistributedSampler(dataset)",
    "dataset": "the DistributedSampler is correct, but the dataset makes the same samples from different indices; seed NumPy and random "
    "with seed + rank (in workers: worker_init_fn), or draw each sample from a generator seeded by its index",
    "sampler": "give its sampler the right rank and number of ranks: those of all nodes, not of one; a sampler that is built before `init_process_group` takes "
    "itself for rank 0 of 1",
    "split": "split with the same seed on all ranks: `random_split(…, generator=torch.Generator().manual_seed(0))`, not with the global generator "
    "that each rank has seeded differently",
    "list": "list the samples in one order on all ranks (`sorted(…)`; shuffle with one seed), and let the sampler alone take each rank's part",
}


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s, loaders = facts.snapshot, dict(facts.loaders)
    if how := _from_workers(s, loaders):
        mine = loaders[min(how)]
        yield _found(FROM_WORKERS, s, loaders, sorted(how), n=mine.workers, how=how[min(how)].format(n=mine.workers))
        loaders |= {q: _of_one_worker(loaders[q]) for q in how}
    used = {group for r in s.ranks.values() for group, calls in r.enqueued.items() if calls}
    if s.world_size > 1 and _same_work(s, loaders):
        yield _found(SAME_WORK, s, loaders, sorted(s.ranks), repeated=len(s.ranks) - 1)
    elif (veto := vetoed(NOT_ONE_MODEL, s)) is not None:
        yield veto
    elif any(1 < len(g.ranks) < s.world_size and name in used for name, g in s.groups.items()):
        yield Abstained(
            "the ranks use smaller groups, as model-parallel ranks do, which read the same batches by design"
        )
    elif len(loaders) < 2 and (n := _equal_losses(s)):
        if shared := next(_exchanged(s, s.ranks, _EXCHANGES), None):
            by = f"the ranks exchange tensors in their steps ({shared[1].op})"
            yield Abstained(f"losses are equal, but {by}, of which all may compute one loss")
        else:
            yield _found(EQUAL_LOSSES, s, {}, sorted(s.ranks), n=n, do=_DO["fed"], repeated=len(s.ranks) - 1)
    elif len(loaders) < 2:
        yield Abstained("not every rank trains from a known DataLoader")
    else:
        if unknown := [q for q, x in loaders.items() if not _comparable(x.first_fingerprints)]:
            why = f"the first batches of rank {unknown[0]} have no fingerprints yet, or no tensor that has one"
            yield Abstained(why)
        found: list[Finding | Abstained] = []
        # else those of more ranks may follow
        if all(len(loaders[q].first_fingerprints) >= limits.times for q in unknown):
            found += _same_batches(s, loaders)
        found += [*_shuffled_apart(s, loaders)] or _other_data(s, loaders)
        yield from found or _same_samples(s, loaders)
        yield from _passes(s, loaders)
        if all(not x.distributed_sampler and x.sampler_epoch and _began_the_same(x) for x in loaders.values()):
            yield _found(KEPT_EPOCH, s, loaders, sorted(loaders), epoch=loaders[min(loaders)].sampler_epoch)


def _found(
    template: Template, s: Snapshot, loaders: dict[int, Loader], ranks: Collection[int], **facts: Any
) -> Finding:
    where = wheres(s, ranks, "data", {q: x.site for q, x in loaders.items()})
    step = min(r.step for r in s.ranks.values())
    return template(victims=ranks, where=where, step=step, world=s.world_size, **facts)


# -- fingerprints ----------------------------------------------------------------------------------------------------


def _halves(prints: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (fingerprints of the labels, of the values)."""
    return tuple(p >> 32 for p in prints), tuple(p & 0xFFFFFFFF for p in prints)


def same_data(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True if the first batches of two rows of fingerprints are the same data, by labels or by values.

    A batch without a fingerprint (0) has none on any rank that gets it.
    """
    n = min(len(a), len(b))
    return any(x == y and _identify(x) for x, y in zip(_halves(a[:n]), _halves(b[:n]), strict=True))


def _shift(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many batches ahead of `a` the row `b` of fingerprints is, negative: behind; 0 if they do not overlap."""
    ahead = next((k for k in range(1, len(a)) if same_data(a[k:], b)), 0)
    return ahead or -next((k for k in range(1, len(b)) if same_data(a, b[k:])), 0)


def _identify(half: tuple[int, ...]) -> bool:
    """True if enough of these batches have fingerprints, all different."""
    known = [x for x in half if x]
    return len(known) >= limits.times and len(set(known)) == len(known)


def _only_labels_equal(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True if the labels are equal while the values of the same batches are known and differ."""
    values = [(x & 0xFFFFFFFF, y & 0xFFFFFFFF) for x, y in zip(a, b, strict=False)]
    return all(all(pair) for pair in values) and any(x != y for x, y in values)


def _comparable(prints: tuple[int, ...]) -> bool:
    """True if the labels or the values of enough batches have fingerprints."""
    return any(map(_identify, _halves(prints)))


# -- the same samples from each worker ---------------------------------------------------------------------------------


def _from_workers(s: Snapshot, loaders: dict[int, Loader]) -> dict[int, str]:
    """Return the ranks of which each worker of the loader gives the same samples of a stream, and how that is seen.

    A loader that gives each sample several times on purpose, such as a stream that begins again, has it from one worker.
    """
    if len(s.ranks) < s.world_size or len({(len(x.first_fingerprints), x.sampled_epoch) for x in loaders.values()}) > 1:
        return {}
    streams = {q: x for q, x in loaders.items() if x.workers > 1 and x.dataset_length is None}
    in_turn = {q: "its first batches come {n} times each, in a row" for q, x in streams.items() if _in_turn(x)}
    of_all = {q: "samples of an epoch came {n} times, once from each" for q, x in streams.items() if _once_each(x)}
    return of_all | in_turn


def _in_turn(x: Loader) -> bool:
    """True if each of the first batches comes once from each worker in turn."""
    n, first = x.workers, x.first_fingerprints
    known = [half for half in _halves(first) if all(half)]
    turns = [half[::n] for half in known]
    same = all(half[i] == half[i - i % n] for half in known for i in range(len(half)))
    return bool(known) and len(first) >= n + 2 and same and all(len({*turn}) == len(turn) for turn in turns)


def _once_each(x: Loader) -> bool:
    """True if nearly each sample of an epoch came once from each worker."""
    all_once = ((1 << x.workers) - 1) << 16 | x.workers
    same = sum(sample & 0xFFFFFFFF == all_once for sample in x.epoch_samples)
    return same >= limits.same_samples * max(1, len(x.epoch_samples))


def _of_one_worker(x: Loader) -> Loader:
    """Return a loader with the first batches of one of its workers."""
    first, previous = x.first_fingerprints[:: x.workers], x.previous_fingerprints[:: x.workers]
    return msgspec.structs.replace(x, first_fingerprints=first, previous_fingerprints=previous)


# -- the same batches on several ranks -------------------------------------------------------------------------------


def _groups(loaders: dict[int, Loader]) -> list[list[int]]:
    """Return the groups of ranks whose first batches are the same."""
    groups: list[list[int]] = []
    # by first fingerprints, so that not all pairs are compared
    near: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    for q, x in sorted(loaders.items()):
        begins = list(enumerate(_halves(x.first_fingerprints[: limits.times])))
        known = [g for b in begins for g in near.get(b, ())]
        found = next((g for g in known if same_data(loaders[g[0]].first_fingerprints, x.first_fingerprints)), None)
        if found is None:
            groups.append(found := [])
            for b in begins:
                if len(b[1]) == limits.times and any(b[1]):
                    near.setdefault(b, []).append(found)
        found.append(q)
    return [g for g in groups if len(g) > 1]


def _split(s: Snapshot, loaders: dict[int, Loader], ranks: Collection[int]) -> bool:
    """True if what enters the models of these ranks is a part for each of the loader's batch, `batch.chunk(world)[rank]`.

    Of the same part, as with micro-batches, all would have the same losses.
    """
    sizes = {loaders[q].batch_size for q in ranks}
    entered = [max((m.batch or 0 for m in s.ranks[q].models), default=0) for q in ranks]
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or not all(0 < n <= -(-size // len(ranks)) for n in entered):
        return False
    losses = _losses(s, ranks)
    return len(losses) < limits.times or any(len(set(x)) > 1 for x in losses)


def _by_design(s: Snapshot, loaders: dict[int, Loader], ranks: Collection[int]) -> Abstained | None:
    """Return why ranks whose loaders give the same may train on other data, or on parts of one model; None if they do not."""
    if _split(s, loaders, ranks):
        why = "the loaders give the same batches, and the model of each rank gets a part of each"
        return Abstained(why, checked=True)
    of_steps = (c for r, c in _exchanged(s, ranks, _OF_PARTS) if c.site is None or r.sites.get(c.site.key, 0) >= r.step)
    own = {of[0].key & 0xFFFFFFFF for q in ranks if (of := samples_of(s.ranks[q], "outside_ddp"))}
    why = ""
    if call := next(of_steps, None):
        why = f"the ranks exchange data within a step, as ranks that split sequences or tables do: {call.op}{at(call.site)}"
    elif len(own) > 1:
        why = "each rank has its own parameters outside DDP, as if it held a part of a table"
    elif any(_part_known(s.ranks[q]) for q in ranks):
        why = "the calls that are known are not all of a step: others may exchange its data"
    return Abstained(why, cause=SAME_BATCHES.cause) if why else None


def _part_known(r: RankState) -> bool:
    """True if the known calls do not reach back over a step, and lines that are called in each step are not among them."""
    if len(r.steps) < 2 or not r.calls or (r.calls[0].entered_s or 0.0) <= r.steps[-2].end_s:
        return False
    known = {c.site.key for c in r.calls if c.site is not None}
    return any(n >= r.step and key not in known for key, n in r.sites.items())


def _losses(s: Snapshot, ranks: Iterable[int]) -> list[tuple[float, ...]]:
    """Return the losses of these ranks in each step in which all of them are known."""
    losses = by_step({q: {x.step: x.loss for x in s.ranks[q].steps if x.loss is not None} for q in ranks})
    return [tuple(of.values()) for of in losses.values()]


def _same_batches(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding | Abstained]:
    if len({x.iterations_started for x in loaders.values()}) != 1:
        yield Abstained("the ranks are in different passes over their data")
        return
    if not (groups := _groups(loaders)):
        yield from _shifted(s, loaders)
        return
    ranks = tuple(sorted(q for g in groups for q in g))
    if why := _by_design(s, loaders, ranks):
        yield why
        return
    mine = [loaders[q] for q in ranks]
    # only the labels: the same samples, augmented by each rank, or others whose labels follow a pattern
    prints = {q: loaders[q].first_fingerprints for q in ranks}
    labels = any(_only_labels_equal(prints[g[0]], prints[q]) for g in groups for q in g)
    shared = all(x.dataset_length is not None and not x.distributed_sampler for x in mine)  # one dataset, not split
    severity, few = Severity.WARNING, False
    if all(x.fed for x in mine):  # no loader: synthetic data in a test or benchmark are often equal on purpose
        do, n = "fed", _later(loaders, groups)
        if n is None:
            yield Abstained(
                "the first batches are the same, and later ones differ", checked=True, cause="same_batches_on_ranks"
            )
            return
        severity, few = Severity.INFO, n < limits.later
    elif labels and not shared:
        severity, do = Severity.INFO, "labels"
    elif not mine[0].distributed_sampler:
        do = "iterable" if mine[0].dataset_length is None else "no sampler"
    else:
        do = "dataset" if all(x.sampler_fits for x in mine) else "sampler"
    template = SAME_LABELS if labels else FED if few else SAME_BATCHES
    own = _value_of_each_sample(s, loaders, ranks) if template is SAME_BATCHES else None
    if own is not None:
        template, severity = OWN_SAMPLES, Severity.INFO
    repeated = len(ranks) - len(groups)
    if len(groups) > 1 and do == "no sampler":
        do = "parts"
    yield _found(
        template, s, loaders, ranks, severity=severity, repeated=repeated, same=rank_list(groups[0]), exchange=at(own),
        also=_also(groups), do=_DO[do].format(parts=s.world_size - repeated, world=s.world_size),
    )  # fmt: skip


def _later(loaders: dict[int, Loader], groups: list[list[int]]) -> int | None:
    """Return how many later batches that entered the models are the same in each group of ranks; None if some differ."""
    n = min(len(loaders[q].previous_fingerprints) for g in groups for q in g)
    same = n
    for a, b in ((loaders[g[0]], loaders[q]) for g in groups for q in g[1:]):
        if a.iterations_started > 1:  # these may be of the first pass
            return 0
        x, y = a.previous_fingerprints[:n], b.previous_fingerprints[:n]
        if x != y and not any(of == other and any(of) for of, other in zip(_halves(x), _halves(y), strict=True)):
            return None
        same *= same_data(x, y)
    return same


def _value_of_each_sample(s: Snapshot, loaders: dict[int, Loader], ranks: Collection[int]) -> Site | None:
    """Return where ranks exchange a value of each sample with each batch; None if they do not, or all always have one loss.

    So do ranks that make samples of their own from the batches: completions of prompts, whose rewards are compared.
    """
    losses = _losses(s, ranks)
    if len(losses) >= limits.times and all(len(set(x)) == 1 for x in losses):
        return None
    for r, x in ((s.ranks[q], loaders[q]) for q in ranks if (loaders[q].batch_size or 0) > 1):
        often = max(x.batches - 1, limits.times)
        sites = {c.site for c in r.calls if c.site is not None and r.sites.get(c.site.key, 0) >= often}
        for c in r.calls:
            one_each = (c.shape or ())[:1] == (x.batch_size,) and (c.bytes or 0) <= averaged.metrics_bytes
            if one_each and c.site in sites and op_name(c.op).startswith(("all_gather", "gather")):
                return c.site
    return None


def _shifted(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding]:
    """Yield the finding of ranks whose batches are those of the first rank, some steps earlier or later."""
    first, *rest = sorted(loaders)
    prints = {q: x.first_fingerprints for q, x in loaders.items()}
    ahead = {q: k for q in rest if (k := _shift(prints[first], prints[q]))}
    if not ahead or all(x.distributed_sampler and x.sampler_fits for x in loaders.values()):
        return  # the sampler splits the data: other samples with the same values
    synthetic = all(x.fed for x in loaders.values())  # a benchmark may pass the same few batches around
    nearest = min(ahead, key=lambda q: abs(ahead[q]))
    pair = (nearest, first) if ahead[nearest] > 0 else (first, nearest)
    yield _found(
        SHIFTED, s, loaders, [first, *ahead], severity=Severity.INFO if synthetic else None, repeated=len(ahead), same=rank_list([first, *ahead]),
        first=rank_list(pair[:1]), second=rank_list(pair[1:]), n=abs(ahead[nearest]),
    )  # fmt: skip


def _shuffled_apart(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding]:
    """Yield the finding of ranks that split one shuffled data set, each shuffled in its own order."""
    rows = loaders.values()
    split = all(x.distributed_sampler and x.shuffle and x.sampler_seed is not None for x in rows)
    if not split or len({(x.dataset_length, x.iterations_started, x.length is None) for x in rows}) > 1:
        return
    for what, values in (
        ("seed", {q: x.sampler_seed for q, x in loaders.items()}), ("epoch", {q: x.sampler_epoch for q, x in loaders.items()})
    ):  # fmt: skip
        if len(set(values.values())) > 1:
            each = [f"{value} on {rank_list(ranks)}" for value, ranks in by_value(values).items()]
            shown = ", ".join(each[:3]) + (", …" if len(each) > 3 else "")
            yield _found(APART, s, loaders, sorted(loaders), what=what, each=shown)
            return


def _other_data(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding]:
    """Yield the finding of ranks whose DistributedSamplers split data sets with other samples, or in another order."""
    rows, index = loaders.values(), {q: x.data_set_index for q, x in loaders.items()}
    fits = all(x.distributed_sampler and x.sampler_fits for x in rows) and all(index.values())
    if not fits or len({x.iterations_started for x in rows}) > 1 or len(set(index.values())) == 1:
        return
    split, odd = all(x & SPLIT for x in index.values()), minority(index)
    yield _found(
        OTHER_DATA, s, loaders, sorted(loaders), n=len(set(index.values())), odd=f", and {rank_list(odd)} not that of the others" if odd else "",
        also="; some may be in another rank's validation" if split else "", do=_DO["split" if split else "list"],
    )  # fmt: skip


def _same_samples(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding | Abstained]:
    """Yield the finding of ranks that read the same samples in an epoch, or parts that overlap, in any order."""
    if len({x.sampled_epoch for x in loaders.values()}) > 1 or not all(x.epoch_samples for x in loaders.values()):
        if not all(x.distributed_sampler and x.sampler_fits for x in loaders.values()):
            why = "only the first batches were compared: no epoch has ended yet, or the first is too long, or not in CPU memory"
            yield Abstained(why, cause="same_batches_on_ranks")
        return
    by_index = all(x.sampled_epoch & BY_INDEX or (x.distributed_sampler and x.sampler_fits) for x in loaders.values())
    times = {q: {x >> 32: x & 0xFFFF for x in loaders[q].epoch_samples} for q in sorted(loaders)}
    groups: list[list[int]] = []
    for q, mine in times.items():
        same = (g for g in groups if _common(times[g[0]], mine) >= limits.same_samples)
        if (found := next(same, None)) is None:
            groups.append(found := [])
        found.append(q)
    several = [g for g in groups if len(g) > 1]
    ranks = sorted(q for g in several for q in g)
    if ranks and (design := _by_design(s, loaders, ranks)):
        yield design
        return
    if ranks:
        mine = loaders[ranks[0]]
        do = "sampler" if mine.distributed_sampler else "iterable" if mine.dataset_length is None else "no sampler"
        same, also, n = rank_list(several[0]), _also(several), max(map(len, several))
        yield _found(SAME_SAMPLES, s, loaders, ranks, same=same, also=also, times=n, do=_DO[do])
        return
    if all(n == 1 for mine in times.values() for n in mine.values()):
        readers = Counter(itertools.chain.from_iterable(times.values()))
        lowest = sorted(readers)[: min(map(len, times.values()))]
        n = sum(readers[x] > 1 for x in lowest)
        if n >= limits.some_samples * len(lowest):
            # so many are left out for those that are read again; by values, unless the data set has samples twice
            split = any(x.distributed_sampler and x.sampler_fits for x in loaders.values())
            parts = not split and all(_is_part(x, s.world_size) for x in loaders.values())
            indices = all(x.sampled_epoch & BY_INDEX for x in loaders.values())
            by_values = "" if indices else ", if the data set has no sample twice"
            yield _found(
                OVERLAP, s, loaders, sorted(loaders), share=n / len(lowest), n=n, of=len(lowest),
                left_out=f", and as many or more by none{by_values}" if parts else "", severity=Severity.WARNING if parts else None,
            )  # fmt: skip
            by_index = True  # enough was compared to find that
    why = "" if by_index else "the values of samples were compared, which masks or augmentation change"
    yield Abstained(why, checked=by_index, cause="same_batches_on_ranks")


def _is_part(x: Loader, ranks: int) -> bool:
    """True if the epochs of all ranks together have as many samples as the data set, but for their last batches."""
    batch = (x.batch_size or 0) * ranks
    return batch < (n := x.dataset_length or 0) and abs((x.length or 0) * batch - n) <= batch


def _also(groups: list[list[int]]) -> str:
    """Return the groups of ranks after the first, in a message about the first."""
    others = [rank_list(g) for g in groups[1:4]]
    return f", and so do {', '.join(others)}" + (", …" if len(groups) > 4 else "") if others else ""


def _common(a: dict[int, int], b: dict[int, int]) -> float:
    """Return the share of all samples in two epochs that are in both, as often; estimated from those with the lowest hashes."""
    lowest = sorted({*a, *b})[: min(len(a), len(b))]
    return sum(a.get(x) == b.get(x) for x in lowest) / len(lowest)


def _passes(s: Snapshot, loaders: dict[int, Loader]) -> Iterator[Finding | Abstained]:
    """Yield that the samplers of all ranks shuffle each pass over the data in the same order, or what is known of the order."""
    abstained = partial(Abstained, cause=SAME_ORDER.cause)
    shuffled = [x for x in loaders.values() if x.distributed_sampler and x.shuffle]
    known = (x for x in shuffled if _comparable(x.first_fingerprints) and _comparable(x.previous_fingerprints))
    same = sorted(q for q, x in loaders.items() if _same_order(x))
    if any(x.iterations_started < 2 for x in shuffled):
        yield abstained("no second pass over the data has begun")
    elif same and len(same) == len(loaders):
        yield _found(SAME_ORDER, s, loaders, same, epoch=loaders[same[0]].sampler_epoch)
    elif any(not _same_order(x) for x in known):
        yield abstained("a pass over the data began with other batches than the one before", checked=True)
    elif shuffled:
        yield abstained(
            "the first batches of two passes over the data have no fingerprints yet, or no tensor that has one"
        )


def _same_order(x: Loader) -> bool:
    """True if the sampler shuffles and the epoch began like the one before.

    Or if it is still at epoch 0 in a later epoch and the labels do not contradict: augmentation changes the
    values even if the order is the same. With few classes, equal labels alone prove nothing.
    """
    if not (x.distributed_sampler and x.shuffle and x.iterations_started >= 2):
        return False
    labels, before = _halves(x.first_fingerprints)[0], _halves(x.previous_fingerprints)[0]
    n = min(len(labels), len(before))
    later = x.sampler_epoch == 0 and x.iterations_started >= limits.times
    same_labels = n >= limits.times and labels[:n] == before[:n] and 0 not in labels[:n]
    return _began_the_same(x) or (later and same_labels)


def _began_the_same(x: Loader) -> bool:
    """True if the epoch began with the batches of the one before."""
    return same_data(x.first_fingerprints, x.previous_fingerprints)


# -- batches that no loader shows -------------------------------------------------------------------------------------


def _equal_losses(s: Snapshot) -> int:
    """Return in how many steps all ranks had one loss, if they always had and it changes; 0 unless they average all gradients.

    Ranks that split a module have one loss by design; what they reduce is no multiple of the gradients.
    """
    least, most = averaged.reduced
    shares = {r.rank: [x.value for x in r.samples if x.kind == "reduced"] for r in s.ranks.values()}
    if len(s.ranks) < max(2, s.world_size) or not all(x and least <= min(x) <= max(x) <= most for x in shares.values()):
        return 0
    losses = _losses(s, s.ranks)
    if any(len(set(x)) > 1 for x in losses):
        return 0
    return len(losses) if len({x[0] for x in losses}) >= limits.losses else 0


def _exchanged(s: Snapshot, ranks: Iterable[int], names: Collection[str]) -> Iterator[tuple[RankState, Call]]:
    """Yield the calls of these operations, and their rank, that gave more than metrics since the rank's oldest step that is known.

    An all_reduce is that of the gradients.
    """
    for r in (s.ranks[q] for q in ranks):
        since_s = r.steps[0].end_s if r.steps else 0.0
        for c in r.calls:
            known = family(c.op)
            if known is not None and known.name in names and averaged.is_data(c) and (c.entered_s or 0.0) >= since_s:
                yield r, c


# -- the same work on every rank, without a process group -------------------------------------------------------------


def _same_work(s: Snapshot, loaders: dict[int, Loader]) -> bool:
    """True if there is no process group, and every rank has the same parameters after the same steps."""
    ranks = list(s.ranks.values())
    if len(ranks) < s.world_size or len(loaders) < len(ranks) or any(g.ranks for g in s.groups.values()):
        return False
    if any(c.op == "init_process_group" for r in ranks for c in r.calls) or any(x.fed for x in loaders.values()):
        return False
    of_ranks = {r.rank: {x.step: x.value for x in r.samples if x.kind == "parameters"} for r in ranks}
    sums = [set(of.values()) for of in by_step(of_ranks).values()]
    return len(sums) >= limits.times and all(len(of) == 1 for of in sums) and len(set().union(*sums)) > 1
