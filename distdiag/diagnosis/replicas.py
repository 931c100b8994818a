"""What is known of replicas of one model: samples of each rank at the same steps, and who averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Model, RankState, Sample, Site, Snapshot
from distdiag.terms.ranks import by_value

SHARDED = 1 << 32  # bit of a learning rate's key
SPARSE = 1 << 33  # bit of the key of a class of layers


@dataclass(frozen=True)
class Limits:
    relative: float = 1e-5
    """Relative difference of parameter checksums; float32 sums in another order differ by less."""
    buffers_relative: float = 0.3
    """The same for buffers: statistics of different batches normally differ by some per cent."""
    samples: int = 2
    """Steps that all ranks must have sampled, and how many of the newest in a row must differ."""
    constant: float = 0.9
    """Replicas whose first distance is at least this share of the newest do not move apart: a growing distance grows at least
    like the square root of the steps."""
    gradients: float = 1e-3
    """The same for the magnitudes of averaged gradients, which are summed in one order on all ranks."""
    no_exchange: tuple[str, ...] = (
        "init_process_group", "new_group", "barrier", "monitored_barrier", "broadcast", "gather", "scatter"
    )  # fmt: skip
    """Operations that do not average: jobs without any averaging use them, too."""
    of_fsdp: tuple[str, ...] = ("all_gather_into_tensor", "reduce_scatter_tensor")
    """The same of what FSDP calls by itself; all_gather of objects is made of others."""
    metrics: float = 0.01
    """Up to this share of the parameters, reduced elements are metrics, not gradients."""
    metrics_bytes: int = 1024
    """The same for one call, in bytes."""
    modes: int = 3
    """Newest sampled steps in which the modes of the layers must have differed: a rank may be back in `train()` a step later."""
    logged_equal: int = 8
    """Different values of a logged name that must have been equal on all ranks: a local one is not."""
    logged: int = 4
    """Steps since which all its values must differ."""
    certain_step: int = 32
    """Up to this step the cause is only suspected: too few samples to distinguish rates, gradients and initial values."""
    averaged: float = 0.9
    """Share of the steps with averaged gradients from which on a model counts as averaged."""
    almost: float = 0.9
    """From this share of the reduced elements on the rest is more likely forgotten than each rank's own."""
    reduced: tuple[float, float] = (0.999, 1.05)
    """All gradients are averaged if the elements reduced per parameter are in this range. Fewer: some parameters belong to one
    rank by design (experts, personal layers), or are averaged now and then. More: activations of a split model are reduced."""

    def is_data(self, call: Call) -> bool:
        """True if a call may exchange tensors that are no metrics."""
        return call.bytes is None or call.bytes > self.metrics_bytes


limits = Limits()


def exchange_tensors(s: Snapshot, *besides: str) -> bool:
    """True if the script itself exchanges tensors that are no metrics, by other operations than these: gradients, activations."""
    calls = (c for r in s.ranks.values() for c in r.calls if c.op not in (*limits.no_exchange, *besides))
    return any(map(limits.is_data, calls))


def sampled(s: Snapshot, kind: str) -> list[Sample]:
    return [x for r in s.ranks.values() for x in samples_of(r, kind)]


def samples_of(r: RankState, kind: str) -> list[Sample]:
    return [x for x in r.samples if x.kind == kind]


def values_of(r: RankState, kind: str) -> dict[int, float]:
    return {x.step: x.value for x in samples_of(r, kind)}


def spread(values: Mapping[int, float]) -> float:
    return max(values.values()) - min(values.values())


def comparable(keys: list[int]) -> bool:
    """True if checksums are of the same elements, averaged in the same group (`SampleRecord.key`), at the same point of the job.

    Ranks that trained separately before have different step counts when they enter a shared model. A rank that skips an
    occasional step is only a few steps behind.
    """
    synced = [k >> 32 for k in keys]
    return len({k & 0xFFFFFFFF for k in keys}) == 1 and max(synced) - min(synced) <= 2 + min(max(synced) // 20, 14)


def differ(values: list[float], relative: float) -> bool:
    scale = max(abs(v) for v in values) + 1e-3
    return (max(values) - min(values)) / scale > relative or any(v != v for v in values) != all(v != v for v in values)


# of a model and its rank's steps; with accumulation not in each backward
_BY_DDP: dict[str, Callable[[Model, int], bool]] = {
    "each_step": lambda m, steps: m.synced_backwards >= limits.averaged * min(m.forwards, max(steps, 1)) > 0,
    "some_steps": lambda m, steps: 0 < m.synced_backwards < limits.averaged * min(m.forwards, steps),
    "never_synced": lambda m, steps: not m.synced_backwards and 2 * m.forwards > steps,
}


def averaged_by_ddp(s: Snapshot) -> str:
    """Return how often DDP averages the gradients of every model of all ranks; nothing if they differ, or there is no DDP."""
    models = [[(m, r.step) for m in r.models] for r in s.ranks.values()]
    return next((how for how, of in _BY_DDP.items() if all(x and all(of(*m) for m in x) for x in models)), "")


def separate_sets(s: Snapshot) -> list[tuple[int, ...]]:
    """Return the sets of several ranks between which no group has a collective in most steps; nothing if there is one set, or messages are sent."""
    sets = {q: {q} for q in s.ranks}
    for name, group in s.groups.items():
        members = [q for q in group.ranks if q in s.ranks]
        if any(2 * s.ranks[q].enqueued.get(name, 0) > s.ranks[q].step for q in members):
            merged = set[int]().union(*(sets[q] for q in members))
            sets |= dict.fromkeys(merged, merged)
    found = sorted({tuple(sorted(x)) for x in sets.values()})
    alone = any(len(x) < 2 for x in found) or any(r.p2p_issued for r in s.ranks.values())
    return [] if len(found) < 2 or alone else found


def sets_text(sets: list[tuple[int, ...]]) -> str:
    return " and ".join(map(rank_list, sets[:3])) + (", …" if len(sets) > 3 else "")


def averaging_site(r: RankState, by_hand: bool) -> Site | None:
    """Return where gradients are averaged: by hand, the newest all_reduce of more than a number or two; else the last backward."""
    calls = (c.site for c in reversed(r.calls) if c.op == "all_reduce" and (c.bytes or 0) > 16)
    site = next(calls, None) if by_hand else None
    stack = r.phase_stacks.get("backward")
    return site or (stack[0] if stack else None)


def step_site(r: RankState) -> Site | None:
    """Return where the optimizer steps: its phase may be too short to be sampled, but some of its steps record the line."""
    stack = r.phase_stacks.get("optimizer")
    return stack[0] if stack else next((x.site for x in reversed(r.samples) if x.kind == "learning_rate"), None)


def each_text(rates: dict[int, float]) -> str:
    by_rate = sorted(by_value(dict(sorted(rates.items()))).items(), key=lambda x: -len(x[1]))
    shown = [f"{rate:.6g} on {rank_list(ranks)}" for rate, ranks in by_rate[:4]]
    return "; ".join(shown) + ("; …" if len(by_rate) > 4 else "")
