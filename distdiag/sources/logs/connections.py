"""Findings on ranks that lost each other, never found each other, or whose watchdog was stuck."""

from __future__ import annotations

from collections import Counter

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, Where, rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, at, rough_time, shortened, where_at
from distdiag.sources.logs import advice
from distdiag.sources.logs.collect import Collected, Event, evidence, first_site
from distdiag.sources.logs.patterns import Role
from distdiag.sources.logs.timeouts import absent_ranks
from distdiag.terms.untrusted import bounded

# in the store, of gloo: the address of one rank of a group, e.g. /default_pg/0//cpu//0/3
_ADDRESS_KEY = bounded(r"default_pg/\d+//\w+//\d+/(\d{1,6})\W*$")
REFUSED = "Connection refused"
LOCAL_ADDRESSES = ("127.0.0.1", "127.0.1.1", "localhost", "::1")


def who(events: list[Event]) -> tuple[tuple[int, ...], str]:
    """Return (ranks, text) of the writers of events: `ranks 0, 2`, else hosts with GPUs or processes."""
    ranks = tuple(sorted({e.rank for e in events if e.rank is not None}))
    if ranks:
        return ranks, rank_list(ranks)
    names = list(dict.fromkeys(
        f"GPU {e.who.device} of {e.who.host}" if e.who.device is not None and e.who.host else e.who.process for e in events
    ))  # fmt: skip
    names = [n for n in names if n]
    return (), ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "") if names else "a rank"


def _finding(
    events: list[Event],
    message: str,
    todo: str,
    culprits: tuple[int, ...] = (),
    kind: str = "rank_lost",
    cause: str = "silent",
) -> Finding:
    ranks, _ = who(events)
    site = first_site(events)
    victims = tuple(r for r in ranks if r not in culprits)
    at_site = tuple(where_at(r, site) for r in victims)
    return Finding(
        kind=kind,
        cause=cause,
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        where=tuple(Where(r) for r in culprits) or at_site,
        waiting=at_site if culprits else (),
        message=message,
        cost=NO_PROGRESS_MADE,
        advice=todo,
        evidence=evidence(events),
    )


def stuck(found: Collected) -> list[Finding]:
    """Return the finding on watchdogs that made no progress: a thread in CUDA or NCCL, or one that holds the GIL there."""
    events = [e for e in found.events if e.name == "stuck_watchdog"]
    if not events:
        return []
    ranks, text = who(events)
    known_s = [int(e.fields["stuck_s"][:9]) for e in events if "stuck_s" in e.fields]
    duration = f" for {rough_time(max(known_s))}" if known_s else ""
    alone = len(ranks) == 1 or (found.world_size is not None and 0 < len(ranks) <= found.world_size // 2)
    message = f"the watchdog of {text} made no progress{duration}: a call to CUDA or NCCL does not return there, or a thread holds the GIL in one"
    todo = "take the stacks of that process with native frames the next time (`py-spy dump --native --pid …`, gdb); look at its GPU (`dmesg -T | grep -i xid`)"
    return [_finding(events, message, todo, ranks if alone else (), "stall", "unknown")]


def starts(found: Collected) -> list[Finding]:
    """Return the finding on ranks that did not find each other when the job began."""
    by_name: dict[str, list[Event]] = {}
    for e in found.events:
        by_name.setdefault(e.name, []).append(e)
    if events := by_name.get("clients"):
        e = max(events, key=lambda x: int(x.fields["joined"][:7]))
        joined, expected = int(e.fields["joined"][:7]), int(e.fields["expected"][:7])
        left = expected - joined
        message = f"{left:,} of {expected:,} ranks had not joined after {rough_time(float(e.fields['after'][:9]))}{at(first_site(events))}: the log does not say which"
        todo = "see whether all nodes have started (squeue, kubectl get pods), with one MASTER_ADDR, MASTER_PORT and world size, and whether they reach that port"
        return [_finding(events, message, todo)]
    if (f := _store_barrier(by_name.get("store_barrier", []))) is not None:
        return [f]
    if events := by_name.get("name"):
        message = f"{who(events)[1]} could not resolve a host name{at(first_site(events))}: the job's first node, or its name, does not exist (yet)"
        todo = "check MASTER_ADDR (--rdzv-endpoint) with `getent hosts NAME` on that node; on Kubernetes, that the master's pod runs and its headless service exists"
        return [_finding(events, message, todo)]
    if events := by_name.get("store_connect"):
        e = events[0]
        peer, port = e.fields["peer"], e.fields["port"]
        _, text = who(events)
        here = peer in LOCAL_ADDRESSES
        message = f"{text} could not reach the job's store at {shortened(peer, 80)}:{port}{at(first_site(events))}: rank 0, or torchrun's first node, does not listen there"
        todo = (
            "the address is this node's own: on several nodes set MASTER_ADDR (--rdzv-endpoint) to the first node; on one, see why rank 0 did not start"
            if here
            else f"see whether rank 0 has started and failed, and whether this node reaches it: `nc -vz {shortened(peer, 80)} {port}`"
        )
        return [_finding(events, message, todo)]
    if events := by_name.get("full_mesh"):
        _, text = who(events)
        hosts = list(dict.fromkeys(e.who.host for e in events if e.who.host))
        on = f" on {', '.join(hosts[:3])}" if hosts else ""
        message = (
            f"gloo on {text}{on} could not connect to every other rank: {shortened(events[0].fields['reason'], 120)}"
        )
        todo = "give gloo the interface that the nodes share (GLOO_SOCKET_IFNAME=eth0): a host name that resolves to 127.0.1.1 is the most common reason"
        return [_finding(events, message, todo)]
    if events := by_name.get("rendezvous"):
        message = f"{who(events)[1]} did not complete torchrun's rendezvous ({events[0].fields['what']})"
        todo = "see whether all nodes have started with one --rdzv-endpoint, --rdzv-id and --nnodes, and reach that address"
        return [_finding(events, message, todo)]
    return []


def _store_barrier(events: list[Event]) -> Finding | None:
    """Return the finding on a barrier in the store, where each rank counts itself; None if ranks only waited for a while."""
    counts = [(int(e.fields["joined"][:9]), int(e.fields["expected"][:9]), e) for e in events]
    over = [e for joined, expected, e in counts if joined > expected]
    if over:
        joined, expected, _ = next(c for c in counts if c[0] > c[1])
        message = f"{joined:,} processes have joined a job of {expected:,} ranks: it was launched twice, or processes of an earlier one use the same store"
        return _finding(
            over,
            message,
            "end the processes of earlier launches on all nodes, and give this one another --master-port (--rdzv-id)",
        )
    late = [c for c in counts if c[2].fields["what"] == "Timed out"]
    if not late:
        return None
    joined, expected, _ = max(late, key=lambda c: c[0])
    message = f"{expected - joined:,} of {expected:,} ranks did not reach init_process_group or new_group in time: the log does not say which"
    return _finding(
        [e for _, _, e in late],
        message,
        "see the logs of all nodes for a rank that failed or is still busy; all ranks must make every new_group call",
    )


def lost(found: Collected) -> list[Finding]:
    """Return the finding on connections that broke, without a message of the process at the other end."""
    if gone := [e for e in found.events if e.name == "keep_alive"]:
        nodes = list(dict.fromkeys(e.fields["node"] for e in gone))
        message = f"torchrun on {', '.join(nodes[:3])}{' …' if len(nodes) > 3 else ''} lost the rendezvous: the node that serves it, the first one, has ended"
        return [
            _finding(gone, message, "read the log of the first node (--rdzv-endpoint): its failure came before these")
        ]
    links = [e for e in found.events if e.name == "ib"]
    closed = [
        e
        for e in found.events
        if e.name in ("closed", "store_lost", "refused")
        or (e.role is Role.VICTIM and e.fields.get("type", "Dist")[:4] != "Dist")
    ]
    errors = [
        e
        for e in found.events
        if e.name in ("nccl_error", "own_error")
        or (e.name == "exception" and e.fields.get("type") in ("DistBackendError", "DistNetworkError"))
    ]
    warnings = [e for e in found.events if e.name == "nccl_warning"]
    if links:
        e = links[0]
        _, text = who(links)
        peers = list(dict.fromkeys(x.fields["peer"] for x in links))
        status = e.fields["status"]
        meaning = advice.IB_STATUS.get(status, f"status {status}")
        message = f"NCCL on {text} lost its RDMA connection to {', '.join(peers[:3])}{' …' if len(peers) > 3 else ''} (status {status}: {meaning})"
        todo = "check that link: `ibstat`, `perfquery`, switch counters, RoCE's GID and flow control (NCCL_IB_GID_INDEX); see first whether the peer's process ended"
        return [_finding(links, message, todo)]
    if gloo := [e for e in found.events if e.name == "gloo_timeout"]:
        return [_gloo_timeout(found, gloo, closed)]
    if closed:
        return [_closed(found, closed, warnings)]
    if errors:
        _, text = who(errors)
        first = next((w.fields["what"] for w in warnings), "")
        reason = f": {shortened(first, 160)}" if first else ""
        name = shortened(errors[0].fields.get("what", ""), 160)
        library = "HCCL" if name.startswith("Hccl") else "NCCL"
        message = f"{library} failed on {text}{at(first_site(errors))}: {name}{reason}"
        todo = "run again with NCCL_DEBUG=WARN, which prints the reason"
        if library == "HCCL":
            todo = "read the lines after it (EI…, EJ…): they have the reason; often another rank failed first"
        if first:
            todo = "see the first NCCL WARN or `Last error` of each rank: it is the reason, the exceptions follow"
        return [_finding([*errors, *warnings[:4]], message, todo, kind="rank_lost", cause="crashed")]
    return _store_wait(found)


def _store_wait(found: Collected) -> list[Finding]:
    """Return the finding on ranks that waited for a key of the store that was never set."""
    waits = [e for e in found.events if e.name == "store_wait"]
    awaited = sorted({int(m[1]) for e in waits if (m := _ADDRESS_KEY.search(e.fields["key"]))})
    if awaited:
        message = f"{rank_list(awaited)} did not join a gloo group{at(first_site(waits))} in {rough_time(int(waits[0].fields['limit'][:12]) / 1e3)}, where {who(waits)[1]} waited"
        todo = (
            f"see whether {rank_list(awaited)} has started, what it did before that call, and whether all ranks make it"
        )
        return [_finding(waits, message, todo, tuple(awaited), kind="timeout", cause="late_rank")]
    if waits:
        e = waits[0]
        s = int(e.fields["limit"][:12]) / 1e3
        message = f"{who(waits)[1]} waited {rough_time(s)} in the job's store{at(first_site(waits))} for {shortened(e.fields['key'], 80)}, which no process has set"
        todo = "see what the other side did: the rank or service that sets this key has failed, or never made the matching call"
        return [_finding(waits, message, todo, kind="timeout", cause="late_rank")]
    return []


def _gloo_timeout(found: Collected, gloo: list[Event], closed: list[Event]) -> Finding:
    """Return the finding on ranks that waited in a gloo collective.

    Some ranks run into the timeout, others lose the connections that those close. The rank that does neither was elsewhere.
    """
    waiting = {e.rank for e in (*gloo, *closed) if e.rank is not None}
    culprits = absent_ranks(found, waiting) if len(waiting) > 1 else ()
    _, text = who([*gloo, *closed])
    limits = [int(e.fields["limit"][:12]) / 1e3 for e in gloo if "limit" in e.fields]
    message = f"a gloo collective timed out{f' after {rough_time(limits[0])}' if limits else ''}: {text} waited in it{at(first_site(gloo))}"
    if culprits:
        message += f"; {rank_list(culprits)} reported no timeout, and may be what they waited for"
        todo = f"read the log of {rank_list(culprits)}, and take {verb(culprits, 'its', 'their')} stack the next time: it did not make that call"
    else:
        message += "; the log does not show which rank they waited for"
        todo = "give the logs of all ranks; with TORCH_DISTRIBUTED_DEBUG=DETAIL a monitored_barrier before the collective names the missing rank"
    return _finding([*gloo, *closed], message, todo, culprits, kind="timeout", cause="late_rank")


def _closed(found: Collected, events: list[Event], warnings: list[Event]) -> Finding:
    ranks, text = who(events)
    peers = Counter(p for e in events if (p := e.fields.get("peer", "").rstrip(".,")) and p not in LOCAL_ADDRESSES)
    whole = bool(found.world_size or found.exits)  # else the log may be a part of the job's
    culprits = absent_ranks(found, ranks) if whole and len(ranks) > 1 else ()
    shown = [p for p, _ in peers.most_common(3)]
    to = f" to {', '.join(shown)}" if shown else ""
    store = all(e.name == "store_lost" for e in events)
    what = "the job's store" if store else "a connection"
    refused = all(REFUSED in e.fields.get("reason", e.text) for e in events)
    message = f"{text} {'could not make' if refused else 'lost'} {what}{to}{at(first_site(events))}: "
    if refused:
        message += "nothing listens there (any more), or a firewall is between them"
    elif store:
        message += "the process that serves it, rank 0 or torchrun's, had ended"
    else:
        message += "the process at the other end had ended, or the network broke"
    if culprits:
        message += f"; {rank_list(culprits)} {verb(culprits, 'reports', 'report')} nothing"
    first = f"look at {', '.join(shown)} first: " if shown else ""
    return _finding(events, message, first + advice.CONNECTION, culprits)
