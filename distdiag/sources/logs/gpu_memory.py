"""Who holds the memory of a full GPU, by the message of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.sources.logs.build import some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.terms.untrusted import bounded

_SIZE = r"(\d{1,9}(?:\.\d{1,4})?) (GiB|MiB|KiB|bytes)"
_MEMORY = bounded(rf"Process (\d{{1,9}}) has {_SIZE} memory in use")
# of the GPU, and of what this process itself has there; torch leaves out "this process has" in a container, whose pids are others
_USED = bounded(rf"capacity of {_SIZE} of which {_SIZE} is free")
_OWN = bounded(rf"memory {_SIZE} is allocated by PyTorch(?:.{{0,120}}?{_SIZE} is reserved by PyTorch)?")
_GPU = bounded(r"\bGPU (\d{1,4}) has a total capac")  # as the process counts them
_TRIED = bounded(rf"Tried to allocate {_SIZE}")
_GIB = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2, "bytes": 1 / 1024**3}
# A process holds up to this much beside PyTorch's memory: two whose sizes differ by less may be taken for each other.
ALIKE_GIB = 2.0


def _gib(size: Sequence[str]) -> float:
    return float(size[0]) * _GIB[size[1]]


class Held(NamedTuple):
    """What others hold of a full GPU; empty if none does, or too little to matter."""

    text: str = ""
    short: str = ""  # which process, and on which GPU
    whose: str = ""  # "ranks", "others", or "left": by a process of an earlier attempt


def _left(f: Fact, found: Collected) -> set[str]:
    """Return the processes of earlier attempts, which torchrun has asked to end."""
    return {pid for pid, run in found.closed.items() if run < f.run}


def held_by_left(f: Fact, found: Collected) -> bool:
    """True if a process of an earlier attempt holds more of the full GPU than any other."""
    held = {pid: _gib(size) for pid, *size in _MEMORY.findall(f.fields.get("what", ""))}
    return f.name == "cuda_oom" and bool(held) and max(held, key=held.__getitem__) in _left(f, found)


def memory_of_others(f: Fact, found: Collected) -> Held:
    """Return what others hold of the full GPU, by the message."""
    what, left = f.fields.get("what", ""), _left(f, found)
    job = {pid: rank for pid, rank in found.pids.items() if pid not in left}
    held = {pid: _gib(size) for pid, *size in _MEMORY.findall(what)}
    own = {str(f.who.pid), *(pid for pid, rank in job.items() if rank is not None and rank == f.rank)} & held.keys()
    others, sure = {pid: gib for pid, gib in held.items() if pid not in own}, True
    if not own and "this process has" not in what:
        others, sure = _without_own(held, what)
    if not others:
        return Held()
    most = max(others, key=others.__getitem__)
    ranks = {pid: gib for pid, gib in others.items() if pid in job} if most in job else {}
    gib = sum(ranks.values()) or others[most]
    tried, used = _TRIED.search(what), _USED.search(what)
    if tried is not None and gib + (_gib(used.groups()[2:]) if used else 0.0) < _gib(tried.groups()):
        return Held()  # without it, the memory would not suffice either
    about = "" if sure else "about "
    device = f"cuda:{m[1]}" if (m := _GPU.search(what)) is not None else ""
    gpu, on = "that GPU" + f" ({device})" * bool(device), f" on {device}" * bool(device)
    if ranks:
        who = "another rank of this job" if len(ranks) == 1 else f"{len(ranks)} other ranks of this job"
        known = [rank for pid in ranks if (rank := job[pid]) is not None]
        named = rank_list(sorted(known)) if len(known) == len(ranks) else f"pid {some([*ranks])}"
        who += f" ({named})" * sure
        short = f"{named}{on}" * sure
        return Held(f": {who} {verb(ranks, 'holds', 'hold')} {about}{gib:.3g} GiB of {gpu}", short, "ranks")
    if most in left:
        who = f"process {most} of an earlier attempt, which has not ended,"
        return Held(f": {who} holds {about}{gib:.3g} GiB of {gpu}", f"process {most}{on}", "left")
    here = (process for process, host, pid in found.in_world if str(pid) == most and host in ("", f.who.host))
    label = next(here, "")
    who = f"process {most}" + (f" ({label.partition(' pid=')[0]})" if label else "") if sure else "another process"
    short = f"{who}{on}" * sure
    return Held(f": {who}, which is not this rank, holds {about}{gib:.3g} GiB of {gpu}", short, "others")


def _without_own(held: dict[str, float], what: str) -> tuple[dict[str, float], bool]:
    """Return (the other processes, whether these are surely others), where the message gives this process as any other.

    Its own is the one that holds just more than PyTorch has allocated and reserved there; it may be missing in the message.
    """
    used, own = _USED.search(what), _OWN.search(what)
    if own is None:
        return {}, False
    mine = _gib(own.groups()[:2]) + (_gib(own.groups()[2:]) if own[3] else 0.0)
    rest = _gib(used.groups()[:2]) - _gib(used.groups()[2:]) - sum(held.values()) if used else 0.0
    fitting = sorted((gib, pid) for pid, gib in [*held.items(), ("", rest)] if gib >= mine - 0.02)  # they are rounded
    if not fitting:
        return {}, False
    sure = len(fitting) == 1 or fitting[1][0] - fitting[0][0] >= ALIKE_GIB
    return {pid: gib for pid, gib in held.items() if pid != fitting[0][1]}, sure
