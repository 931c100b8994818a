"""Small pieces of text that all rules share: sites, durations, operations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from distdiag.diagnosis.model.findings import CollectiveRef, Where
from distdiag.diagnosis.model.snapshot import Call, RankState, Site, Snapshot, lines_of
from distdiag.terms.operations import op_name
from distdiag.terms.sites import line_text

# of a backend or of torch: where in its own source an error was raised
_IN_SOURCE = re.compile(r"\[(?:enforce fail at )?[^][\s]{1,200}\.(?:cc|cpp|cu|h):\d+\] (?:err == 0\. )?")
NO_PROGRESS = "the job makes no progress"  # what stuck ranks cost
NO_PROGRESS_SINCE = "the job made no progress from then on"  # after the end, of a job that had made some
NO_PROGRESS_MADE = "the job made no progress until it ended"  # the same, after the end
_REACH = (
    "check that every rank started, that MASTER_ADDR and its port are the same on all of them and answer, and that their own addresses are "
    "reachable from the others; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface; `distdiag doctor --reach HOST:PORT` tries it"
)
# torchrun's agent hosts one store for all attempts (torch 2.13: with every rendezvous backend), and torch has no prefix for them
_STALE = (
    "the launcher's store may still have the addresses of an earlier init_process_group, and a rank that reads one waits for a process that has gone: "
    "give each its own keys (`store=PrefixStore(NAME, TCPStore(MASTER_ADDR, MASTER_PORT, is_master=False))`, with another NAME each time), or make the "
    "group once; of restarts only, torchrun with `--rdzv-backend=c10d` and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new store for each"
)


def connect_advice(s: Snapshot) -> str:
    """Return what to do if ranks cannot connect; they may have made a default group before, in this attempt or an earlier one."""
    again = s.attempt > 0 or any("init_process_group 2" in r.enqueued for r in s.ranks.values())
    return _STALE if again else _REACH


def _line(site: Site) -> str:
    return line_text(site.file, site.line, base=True)


def site_text(site: Site | None) -> str:
    """Return `train.py:88 in evaluate`, with the callers of a helper; empty if the site is not known."""
    if site is None:
        return ""
    first, *callers = (line_text(s.file, s.line, s.function, base=True) for s in site.path)
    return first + (f" (called at {', from '.join(callers)})" if callers else "")


def places_text(key: str) -> str:
    """Return `comm.py:9, called at train.py:88` for the key of a site."""
    return ", called at ".join(_line(Site(*line)) for line in lines_of(key))


def at(site: Site | None) -> str:
    """Return ` at train.py:88 in evaluate`, or nothing."""
    return f" at {site_text(site)}" if site else ""


def both_sites(a: Site | None, b: Site | None) -> str:
    """Return the sites of two calls; one site if it is the same."""
    if a is None or b is None:
        return "the two calls"
    return f"the ranks at {site_text(a)}" if site_text(a) == site_text(b) else f"{site_text(a)} and {site_text(b)}"


def shortened(text: str, limit: int) -> str:
    """Return `text` on one line of at most `limit` characters, without places in torch's source, cut between words, with an ellipsis if
    it was cut."""
    line = _IN_SOURCE.sub("", " ".join(text.split()))
    if len(line) <= limit:
        return line
    whole = line[: limit - 1].rpartition(" ")[0]
    return (whole if len(whole) > limit // 2 else line[: limit - 2]) + " …"


def op_text(call: Call) -> str:
    """Return `all_reduce #417 (default_pg)`, `recv from rank 2`."""
    if call.op in ("send", "isend"):
        return f"send to rank {call.peer}"
    if call.op in ("recv", "irecv"):
        return f"recv from rank {call.peer}" if call.peer is not None else "recv from any rank"
    if call.op in ("init_process_group", "new_group"):
        return f"{call.op}()"
    number = f" #{call.seq}" if call.seq is not None else ""
    group = f" ({call.group})" if call.group else ""
    return f"{call.op or ('collective' if number else 'a collective')}{number}{group}"


def op_at(call: Call) -> str:
    """Return `all_reduce (train.py:88)`: shorter than `op_text`, for the first words of a message."""
    site = f" ({', called at '.join(map(_line, call.site.path))})" if call.site is not None else ""
    return f"{op_name(call.op) or 'a collective'}{site}"


def reference(call: Call) -> CollectiveRef:
    return CollectiveRef(call.op, call.group, call.seq, call.bytes)


def where_at(rank: int, site: Site | None, state: str | None = None) -> Where:
    return Where(rank, site.file, site.line, site.function or None, state) if site else Where(rank, state=state)


def where(r: RankState, state: str | None = None, site: Site | None = None) -> Where:
    """Return a rank with what it does, at `site` or where it is."""
    return where_at(r.rank, site or r.current_site, state or r.activity)


def wheres(
    snapshot: Snapshot, ranks: Iterable[int], state: str | None = None, sites: Mapping[int, Site | None] | None = None
) -> tuple[Where, ...]:
    """Return what ranks do, each at its site in `sites` or where it is."""
    return tuple(where(snapshot.ranks[q], state, (sites or {}).get(q)) for q in ranks)


def workers_of(states: Mapping[int, RankState], ranks: Iterable[int]) -> tuple[Where, ...]:
    """Return the lines in which workers of these ranks' data loaders are."""
    return tuple(where(states[q], "data_worker", w) for q in ranks for w in dict.fromkeys(states[q].workers) if w)


def worker_text(r: RankState, does: str = "is") -> str:
    """Return `, and its worker is at data.py:14 in read`: the first worker of its data loader that is in a line of the user's."""
    worker = next((w for w in r.workers if w is not None), None)
    return f", and {'one of its workers' if len(r.workers) > 1 else 'its worker'} {does}{at(worker)}" if worker else ""


def waited_for_worker(r: RankState) -> str:
    """Return `; its worker is then at data.py:14 in read`: where workers of its loader were most often when it waited for them for long."""
    return f"; its worker is then{at(r.worker_sites[0][0])}" if r.worker_sites else ""


def where_stack(r: RankState, stack: tuple[Site, ...], state: str | None = None, depth: int = 4) -> tuple[Where, ...]:
    """Return one rank's user frames, innermost first: the line that works, and the loop that called it."""
    out = []
    for s in stack[:depth]:
        if s.function == "<module>" and out:
            break
        out.append(where(r, state, s))
    return tuple(out) or (where(r, state),)


def ordinal(n: int) -> str:
    """Return `2nd`, `15th`."""
    teens = 10 <= n % 100 <= 20
    return f"{n:,}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
