"""The data that ranks train on: whether they train one model together, their loaders, and which ranks ran out of batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distdiag.diagnosis.comparison import Veto
from distdiag.diagnosis.model.findings import Abstained, rank_list
from distdiag.diagnosis.model.snapshot import Loader, Snapshot, Step

LARGER = 1.25  # times as many elements as the others get, from which on that is why a rank takes longer
_LEAST, _MOST = 0.9, 1.1  # elements reduced in a step per element that is stepped, if those are all gradients


def synchronous(s: Snapshot) -> bool:
    """True if the ranks train one model together: DDP over all ranks, or gradients reduced by hand in each step."""
    groups = (s.groups.get(m.group or "") for r in s.ranks.values() for m in r.models if m.synced_backwards)
    if any(group is not None and set(group.ranks) >= set(s.ranks) for group in groups):
        return True
    return all(mine and all(_LEAST <= v <= _MOST for v in mine) for mine in _reduced(s))


def _more_reduced(s: Snapshot) -> bool:
    """True if each rank reduces more elements in each step than its optimizers step."""
    return not synchronous(s) and all(mine and min(mine) > _MOST for mine in _reduced(s))


def _reduced(s: Snapshot) -> list[list[float]]:
    """Return the elements that each rank has reduced in its sampled steps, per element that its optimizers step."""
    return [[x.value for x in r.samples if x.kind == "reduced"] for r in s.ranks.values()]


def stages(s: Snapshot) -> bool:
    """True if all ranks exchange messages and none has the whole model: stages of a pipeline, or parts of a domain."""
    return all(r.p2p_issued and not any(s.whole(m.group) for m in r.models) for r in s.ranks.values())


def model_parallel(s: Snapshot) -> bool:
    """True if some ranks have a group of their own: they may differ by design."""
    return any(1 < len(g.ranks) < s.world_size for g in s.groups.values())


def training_loaders(s: Snapshot) -> dict[int, Loader]:
    """Return the loader that each rank trains from (the busiest of several); empty unless every rank has one."""
    out: dict[int, Loader] = {}
    for r in s.ranks.values():
        mine = [x for x in r.loaders if x.in_training]
        if not mine:
            return {}
        out[r.rank] = max(mine, key=lambda x: (not x.fed, x.batches + x.iterations_started))
    return out


def elements(s: Snapshot) -> dict[int, float]:
    """Return the mean number of elements in the batches of each rank's training loader, 0 if not known; empty unless every rank has one."""
    return {q: x.mean_elements or 0.0 for q, x in training_loaders(s).items()}


def short_last_batch(x: Loader) -> tuple[int, int] | None:
    """Return (samples, batch size) if a rank is in the last batch of a pass over a loader, and that is smaller than the others.

    A DistributedSampler's part is not known exactly.
    """
    size, batches = x.batch_size or 0, x.length or 0
    n = (x.dataset_length or 0) - (batches - 1) * size
    last = x.batches == batches and not x.drop_last and not x.distributed_sampler
    return (n, size) if last and 0 < n < size else None


def exhausted_ranks(s: Snapshot) -> tuple[int, ...]:
    """Return the ranks whose training loader ran out while another rank's still has batches in the same epoch."""
    loaders = training_loaders(s)
    out = [q for q, x in loaders.items() if x.exhausted]
    going = [q for q in loaders if q not in out]
    if not out or not going or len({x.iterations_started for x in loaders.values()}) != 1:
        return ()
    fewest = max(loaders[q].batches for q in out)
    if {(x.length, x.batches) for x in loaders.values()} == {(fewest, fewest)}:
        return ()  # all got all their batches: a rank is ahead because it skipped a step
    return tuple(sorted(out)) if all(loaders[q].batches >= fewest for q in going) else ()


def uneven_ranks(s: Snapshot) -> tuple[int, ...]:
    """Return the ranks with the fewest batches, if one ran out while another rank is in a step that needs it."""
    out = exhausted_ranks(s)
    if not out or not synchronous(s) or any(r.in_join for r in s.ranks.values()):
        return ()
    counts = {q: x.batches for q, x in training_loaders(s).items()}
    fewest = tuple(sorted(q for q, n in counts.items() if n == min(counts.values())))
    return fewest if len(fewest) < len(counts) else out


def even_advice(loaders: Iterable[Loader]) -> str:
    """Return how these loaders get equally many batches on all ranks."""
    known = list(loaders)
    lengths = [x.length for x in known if x.length is not None]
    if known and all(x.distributed_sampler for x in known):
        return "give every rank the same number of samples: pad or drop in the sampler"
    if known and all(x.batch_size is None or x.length is None for x in known):  # no sampler decides how many there are
        return "let every rank make equally many batches: cut or pad what it reads; or use torch's Join context"
    if lengths and max(lengths) > min(lengths) + 1:  # more than the last, incomplete batch
        return "give every rank equally many samples: DistributedSampler splits one data set so (it pads); or use torch's Join context"
    return "use DistributedSampler (it pads), drop_last, or torch's Join context"


def only_shadows(steps: Sequence[Step]) -> bool:
    """True if most of a rank's steps have a loss of exactly 0: it only shadows the collectives of the others (Join-style)."""
    if not steps or steps[-1].loss != 0:
        return False
    return 2 * sum(x.loss == 0 for x in steps) > len(steps)


def only_shadow(ranks: Sequence[int]) -> Abstained:
    """Return why steps with these ranks are not judged."""
    return Abstained(f"{rank_list(ranks)} only shadow the collectives of the others")


# Why ranks are not compared: in what they train, and in their batches.
UNSEEN = Veto(lambda s: len(s.ranks) < s.world_size, "{c.ranks:#} of {c.world_size} ranks have reported", False)
NOT_ALL = (Veto(lambda s: s.world_size < 2, "there is one rank only", False), UNSEEN)
NOT_ONE_MODEL = (
    *NOT_ALL,
    Veto(lambda s: any(r.in_join for r in s.ranks.values()),
         "the ranks are in torch's Join context: uneven inputs are legal"),
    Veto(_more_reduced,
         "in each step more elements are reduced than the ranks' optimizers step: all gradients, of which each rank steps a shard, or other tensors, too; "
         "so the ranks may train different models", False),
    Veto(lambda s: not synchronous(s),
         "neither DDP over all ranks nor a reduction of all gradients in each step is seen, so the ranks may train different models", False),
)  # fmt: skip


def least_fetching(s: Snapshot) -> float:
    """Return the share of the time in which the least busy loader of the training ranks fetches; 0 if one is not known."""
    return min((x.fetching or 0.0 for x in training_loaders(s).values()), default=0.0)
