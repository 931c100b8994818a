"""Profiles of ranks of other nodes: each node takes its own, and sends it to node 0, where the reader is.

Traces are untrusted there, as any trace file is, and are read with the same limits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import msgspec

from distdiag import files
from distdiag.diagnosis.model.findings import rank_list
from distdiag.files import MOST_BYTES
from distdiag.monitor.cluster.messages import MARGIN_BYTES, Ask, BadMessage, Profile, pack, unpack
from distdiag.monitor.cluster.messages import MOST_BYTES as MOST_SENT
from distdiag.monitor.cluster.questions import ask_each, asked_at
from distdiag.monitor.evidence import dump, request_profile
from distdiag.monitor.evidence.request_profile import LEAD_S, NODES_LEAD_S, SAVE_S, Asked, Taken
from distdiag.monitor.ranks.state import RankView
from distdiag.page.profile_files import answer_of
from distdiag.terms.ranks import fold_ranks, unfold_ranks

SPARE_BYTES = 64 << 10  # of an answer, for what is not a trace


class _Sent(Asked, array_like=True):
    """The profile of one rank, between nodes, with its trace."""

    packed: bytes = b""


def packed(run_dir: Path, wanted: Profile) -> bytes:
    """Take a profile of this node's ranks; return it for node 0, without the traces that are too large.

    Raises:
        DistdiagError: no rank of the run is alive here, or another profile is being taken.
    """
    chosen = request_profile.choose(
        dump.living(run_dir), unfold_ranks(wanted.ranks) if wanted.ranks else None, elsewhere=True
    )
    if not chosen:
        return msgspec.msgpack.encode([])
    taken = request_profile.take(run_dir, chosen, wanted.first_step, wanted.steps, wanted.timeout_s)
    left, found = MOST_SENT - MARGIN_BYTES - SPARE_BYTES * len(taken.ranks), []
    for a in taken.ranks:
        trace = b""
        if not a.problem:
            path = a.trace(run_dir, taken.number)
            try:
                trace = pack(files.read(run_dir, str(path.relative_to(run_dir))))
            except OSError as e:
                a.problem = f"its trace cannot be read: {e.strerror or e}"
            if len(trace) > left:
                a.problem = f"its trace is too large to be sent ({len(trace):,} bytes): it is on its host, {path}"
                trace = b""
        left -= len(trace)
        found.append(_Sent(**msgspec.structs.asdict(a), packed=trace))
    return msgspec.msgpack.encode(found)


def take(
    run_dir: Path,
    views: list[RankView],
    wanted: list[int] | None,
    steps: int,
    timeout_s: float,
    report: Callable[[str], None],
) -> Taken:
    """Take a profile of the wanted ranks (None: all), of this node and of those whose monitors can be asked from here.

    Raises:
        DistdiagError: a wanted rank cannot be asked, another profile is being taken, or the run directory cannot be written.
    """
    here, elsewhere = {v.rank for v in views}, asked_at(run_dir) is not None
    chosen = request_profile.choose(views, wanted, elsewhere)
    alone = not elsewhere or (wanted is not None and here.issuperset(wanted))
    first = request_profile.first_step(views, LEAD_S if alone else NODES_LEAD_S)
    names = [rank_list([v.rank for v in chosen])] if chosen else []
    whose = " and ".join([*names, *([] if alone else ["other nodes"])])
    report(f"steps {first} to {first + steps - 1} of {whose}")
    if alone:
        return request_profile.take(run_dir, chosen, first, steps, timeout_s)
    there = "" if wanted is None else fold_ranks(sorted(set(wanted) - here))
    profile = Profile(first_step=first, steps=steps, ranks=there, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as pool:
        question = Ask(timeout_s=timeout_s + SAVE_S, profile=profile)
        asked = pool.submit(ask_each, run_dir, question, _Sent, MOST_BYTES)
        taken = request_profile.take(run_dir, chosen, first, steps, timeout_s)
        sent, silent = asked.result()
    taken.ranks += [_kept(run_dir, taken.number, d) for d in sorted(sent, key=lambda d: d.rank) if d.rank not in here]
    known = {a.rank for a in taken.ranks}
    taken.ranks += [
        Asked(q, "", problem="it is not alive on any node that could be asked")
        for q in sorted(wanted or ())
        if q not in known
    ]
    if silent:
        taken.absent = "not all ranks of other nodes were profiled: " + "; ".join(silent)
    return taken


def _kept(run_dir: Path, number: int, a: _Sent) -> Asked:
    """Write the trace of a rank of another node where this node's ranks write theirs."""
    a.answer = answer_of(asdict(a.answer)) if a.answer is not None else None
    if a.answer is None:
        a.problem = a.problem or "what it recorded cannot be read"
    try:
        if not a.problem:
            path = a.trace(run_dir, number)
            files.write(run_dir, str(path.relative_to(run_dir)), unpack(a.packed, MOST_BYTES))
    except OSError as e:
        a.problem = f"its trace was not saved: {e.strerror or e}"
    except BadMessage:
        a.problem = "its trace was damaged on the way"
    return a
