"""Whom ranks waited for, as far as facts show it, and what else one row of `rows.py` may name.

A function `(found, facts)` returns the culprits, `waiting` their victims; one of `(facts)` returns fields of a row's text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from distdiag.diagnosis.model.findings import rank_list
from distdiag.sources.logs import meanings
from distdiag.sources.logs.build import job_ranks, library, some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.join import absent_ranks
from distdiag.sources.logs.message import Role
from distdiag.terms.untrusted import MAX_INT, MAX_RANKS, bounded, is_rank, numbers

# in the store, of gloo: the address of one rank of a group, e.g. /default_pg/0//cpu//0/3
_ADDRESS_KEY = bounded(r"default_pg/\d+//\w+//\d+/(\d{1,6})\W*$")
_TASK = bounded(r"/task:(\d{1,6})$")  # of jax: the number of the process
_OF_HOST = ("loopback", "jax_backend")  # they only show something of a host


def waiting(found: Collected, facts: Sequence[Fact]) -> set[int]:
    """Return the ranks that waited or failed, by their lines and by those that name them."""
    own = [f for f in facts if f.name not in _OF_HOST]
    joined = found.joined if any(f.name == "store_barrier" for f in facts) else set[int]()
    return {*job_ranks(own), *_waiters(own), *_named(own, "ready"), *joined}.union(*without_each_other(own))


def nobody(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    return ()


def lost_store(facts: Sequence[Fact]) -> bool:
    return facts[0].role is Role.VICTIM


def ranks_behind(facts: Sequence[Fact]) -> tuple[list[Fact], int, int, int]:
    """Return (the ranks that are behind in a communicator, its size, their last call, that of the others), by NCCL's RAS."""
    groups: list[list[Fact]] = [[]]
    for f in sorted(facts, key=lambda f: f.order):
        groups += [[]] if f.name == "ras_group" else []
        groups[-1].append(f)
    for group in groups:
        counts = [f for f in group if f.name == "ras_count"]
        most = highest(counts, "seq") or 0
        for last, then in itertools.pairwise([*counts, None]):
            seq = last.number("seq") or 0 if last is not None else 0
            until = then.order if then is not None else MAX_INT
            behind = [f for f in group if f.name == "ras_rank" and last is not None and last.order < f.order < until]
            if behind and seq < most:
                return behind, sum(f.number("number") or 0 for f in counts), seq, most
    return [], 0, 0, 0


def own_of_awaited(facts: Sequence[Fact]) -> str:
    """Return what the process that JAX's others wait for printed about its own devices; empty if nothing."""
    keys = [f for f in facts if f.name == "jax_key"]
    rank = awaited_most(keys) if keys else -1
    return next((f.fields["what"] for f in facts if f.name == "jax_backend" and f.rank == rank), "")


def alone_without_device(facts: Sequence[Fact]) -> bool:
    """True if one process alone waits, and it is one that found no accelerator."""
    waiting = {f.rank for f in facts if f.name == "jax_key"}
    return len(waiting) == 1 and waiting == {f.rank for f in facts if f.name == "jax_backend"} != {None}


def awaited_most(facts: Sequence[Fact]) -> int:
    return Counter(f.number("awaited") or 0 for f in facts).most_common(1)[0][0]


def highest(facts: Sequence[Fact], key: str) -> int | None:
    return max((n for f in facts if (n := f.number(key)) is not None), default=None)


def _named(facts: Sequence[Fact], key: str) -> set[int]:
    return {r for f in facts for r in numbers(f.fields.get(key, "")) if is_rank(r)}


def _waiters(facts: Sequence[Fact]) -> set[int]:
    return {r for f in facts if f.rank is None and (r := f.number("waiter")) is not None}


def late(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    return _named(facts, "ranks")


def of_behind(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    """Return the ranks that are behind in a communicator of the whole job: they are numbered in their communicator."""
    behind, size, _, _ = ranks_behind(facts)
    whole = size >= max(found.world_size or 0, 1 + max(found.ranks, default=0))
    return {r for f in behind if whole and is_rank(r := int(f.fields["member"]))}


def without_each_other(facts: Sequence[Fact]) -> list[set[int]]:
    """Return the sides of Horovod's ranks, the smaller ones first, where each side waits for operations that the other one did not submit; else empty."""
    lacking: dict[str, set[int]] = {}
    for f in facts:
        for tensor in f.fields["tensors"].split(", ") if "tensors" in f.fields else [str(f.order)]:
            lacking.setdefault(tensor.strip(), set()).update(_named([f], "ranks"))
    sides = sorted({frozenset(ranks) for ranks in lacking.values()}, key=len)
    apart = len(sides) == 2 and sides[0].isdisjoint(sides[1])
    return [set(side) for side in sides] if apart else []


def of_sides(facts: Sequence[Fact]) -> dict[str, str]:
    """Return what each side of Horovod's ranks did not submit, if the lines name it."""
    few, many = without_each_other(facts)
    texts = {}
    for name, side in (("few", few), ("many", many)):
        first = next(f.fields.get("tensors", "") for f in facts if _named([f], "ranks") <= side)
        tensors = [t for t in first.split(", ") if t]
        texts[name] = rank_list(sorted(side))
        texts[f"{name}_lack"] = f" ({some(tensors)})" if tensors else ""
    return texts


def missing(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    missing = [_named([f], "ranks") for f in facts]
    return set.intersection(*missing) or set.union(*missing)  # those that every stalled tensor waits for


def first_of_group(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    awaited = awaited_most(facts)
    return () if lost_store(facts) or awaited in waiting(found, facts) else (awaited,)


def themselves(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    """Return the writers as culprits, unless RDMA failed where their own devices have addresses: then it may be the other end."""
    own = all(f.name != "ib_setup" or f.fields.get("own") == "::" for f in facts)
    return job_ranks(facts) if own else ()


def without_key(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    return (awaited_most([f for f in facts if f.name == "jax_key"]),)  # it may itself wait for another kind of device


def absent_at_barrier(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    here = found.joined | _waiters([*facts, *found.named("store_waiting")])
    expected = min(highest(facts, "expected") or 0, MAX_RANKS)
    absent = set(range(expected)) - here
    return absent if len(absent) == expected - (highest(facts, "joined") or 0) else ()


def absent_clients(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    """Return the ranks that did not join the job's store, if the log shows all others."""
    expected, joined = highest(facts, "expected") or 0, highest(facts, "joined") or 0
    here = {*found.announced} if "launched" in facts[0].fields else found.ranks
    absent = set(range(min(expected, MAX_RANKS))) - here
    whole = found.world_size in (None, expected) and max(found.ranks, default=0) < expected  # else nodes join
    few = len(absent) == expected - joined <= (expected if "launched" in facts[0].fields else joined)
    return absent if whole and few else ()


def awaited_in_world(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    # torch numbers a group's ranks in their order: where one has its number in the job, all before it have
    same = max((f.rank for f in facts if f.rank is not None and f.rank == f.number("own")), default=-1)
    named = {("group" not in f.fields and f.number("own") in (None, f.rank), f.number("awaited")) for f in facts}
    return {n for in_world, n in named if n is not None and (in_world or n <= same)}


def stuck(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    ranks = job_ranks(facts)
    alone = len(ranks) == 1 or (found.world_size is not None and 0 < len(ranks) <= found.world_size // 2)
    return ranks if alone else ()


def owner_of_key(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    return {int(m[1]) for f in facts if (m := _ADDRESS_KEY.search(f.fields["key"]))}


def gave_loopback(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    """Return the ranks whose connections were only closed, where others tried to reach them at an address inside each host."""
    return {*job_ranks(found.named("full_mesh"))} - {*job_ranks(facts)}


def silent(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    ranks = job_ranks(facts)
    return absent_ranks(found, ranks) if len(ranks) > 1 else ()


def silent_of_job(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    whole = bool(found.world_size or found.named("ended"))  # else the log may be a part of the job's
    return silent(found, facts) if whole else ()


def unhealthy(found: Collected, facts: Sequence[Fact]) -> Collection[int]:
    return {int(m[1]) for f in facts if (m := _TASK.search(f.fields["node"]))} - {*job_ranks(facts)}


def of_ras(facts: Sequence[Fact]) -> dict[str, str]:
    behind, size, seq, most = ranks_behind(facts)
    where = [f"process {f.fields['pid']} on node {f.fields['host']}" for f in behind]
    ranks = rank_list([int(f.fields["member"]) for f in behind])
    counts = {"size": f"{size:,}", "seq": f"{seq:,}", "most": f"{most:,}"}
    return behind[0].fields | counts | {"behind": ranks, "where": some(where)}


def of_ib(facts: Sequence[Fact]) -> dict[str, str]:
    status, devices = facts[0].fields.get("status", ""), {f.fields["hca"] for f in facts if "hca" in f.fields}
    over = f" over {min(devices)}" if len(devices) == 1 else ""
    ends = f" {facts[0].fields['ends']}" if "ends" in facts[0].fields else ""
    return {"meaning": meanings.IB_STATUS.get(status, f"status {status}"), "over": over, "ends": ends}


def of_group(facts: Sequence[Fact]) -> dict[str, str]:
    first, awaited = facts[0].fields, str(awaited_most(facts))
    return {"tag": first.get("tag", "connection"), "group": first.get("group", "its group"), "awaited": awaited}


def of_library(facts: Sequence[Fact]) -> dict[str, str]:
    return {"library": library(facts[0])}
