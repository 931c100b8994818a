"""Text and sites shared by the findings about stuck collectives."""

from __future__ import annotations

import re
from collections.abc import Collection, Sized

from distdiag.diagnosis.model.findings import CollectiveRef, Where, rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.text.phrases import site_text, where_at
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait, by_python
from distdiag.terms.ranks import by_value
from distdiag.terms.units import size_text

_NUMBER = re.compile(r"(?:group )?[0-9]+")


def group_label(snapshot: Snapshot, name: str) -> str:
    """Return a process group's description; with its name if several groups share the description."""
    group = snapshot.groups.get(name)
    if group is None or group.description in ("", "undefined"):
        return name
    if sum(g.description == group.description for g in snapshot.groups.values()) > 1:
        return name if name.startswith(f"{group.description}:") else f"{group.description} {name}"
    return group.description


def group_text(snapshot: Snapshot, name: str) -> str:
    """Return how a sentence names a process group: one that has only a number by its members, too."""
    group, label = snapshot.groups.get(name), group_label(snapshot, name)
    if group is None or not group.ranks or _NUMBER.fullmatch(label) is None:
        return label
    same = sum(g.ranks == group.ranks for g in snapshot.groups.values())
    which = "the group" if same == 1 else f"group {label.removeprefix('group ')}"
    return f"{which} of {rank_list(group.ranks)}"


def where_of(st: RankState | None, rank: int, call: Call | None = None) -> Where:
    """Return where a rank is: at its call, else at the user's innermost frame."""
    if st is None:
        return Where(rank)
    known, blocked = call.site if call is not None else None, st.blocked.site if st.blocked else None
    if st.life in (Life.FINISHED, Life.CRASHED, Life.KILLED, Life.STOPPED):
        # the caller of a known call: the last sample may be older, and an exception may come from a later call
        return where_at(rank, known or st.current_site or blocked, str(st.life))
    state = "waiting" if st.blocked is not None or call is not None else st.activity
    return where_at(rank, known or blocked or st.current_site, state)


def collective_ref(snapshot: Snapshot, wait: Wait, call: Call | None) -> CollectiveRef:
    op = compatible.op_name(call.op) if call is not None else ""
    size = call.bytes if call is not None else None
    seq = None if wait.p2p or snapshot.source == "stacks" else wait.seq
    return CollectiveRef(op, group_label(snapshot, wait.group), seq, size)


def number_text(snapshot: Snapshot, wait: Wait) -> str:
    """Return ` #417` for a collective whose number is known: stacks show none."""
    return "" if wait.p2p or snapshot.source == "stacks" else f" #{wait.seq:,}"


def collective_text(snapshot: Snapshot, wait: Wait, call: Call | None) -> str:
    """Return `all_reduce #417 (default_pg, 4.0 KiB)`, `recv from rank 3 (default_pg)`."""
    label = group_text(snapshot, wait.group)
    size = size_text(call.bytes) if call is not None and call.bytes is not None else ""
    size = f"{';' if ' of rank' in label else ','} {size}" if size else ""
    op = (compatible.op_name(call.op) if call is not None else "") or "collective"
    if op == "new_group" and snapshot.source != "stacks":
        number, _, members = wait.group.removeprefix("new_group ").partition(" of ")
        return f"new_group() number {number} (of {members or 'all ranks'})"
    if not wait.p2p:
        return f"{op}{number_text(snapshot, wait)} ({label}{size})"
    direction, peer = wait.key[2], wait.key[4]
    whom = "any rank" if peer is None else f"rank {peer:,}"
    tag = f", tag {call.tag}" if call is not None and call.tag > 0 else ""
    return f"{op} {'to' if direction == 'send' else 'from'} {whom} ({label}{tag}{size})"


def implicit_text(state: RankState | None, call: Call) -> str:
    """Return what DDP does in a collective that the user's line does not call; empty if Python made the call."""
    if state is None or not state.models or by_python(state, call):
        return ""
    return {
        ("forward", "broadcast"): " (by DDP, before the forward)",
        ("validate", "broadcast"): " (by DDP, before the forward)",
        ("backward", "all_reduce"): " (DDP's gradients, in backward)",
    }.get((state.phase, compatible.op_name(call.op)), "")


def calls_of(waits: Collection[Wait]) -> dict[int, tuple[Wait, Call]]:
    """Return the call of each rank in `waits`: of several the conflict, else what its device has begun, else the oldest."""
    made = [(w, r, c) for w in reversed(tuple(waits)) for r, c in w.calls.items()]
    made.sort(key=lambda x: (x[0].conflict is not None, x[2].started is not False, -(x[2].entered_s or 0.0)))
    return {r: (w, c) for w, r, c in made}


def where_of_ranks(
    snapshot: Snapshot, ranks: Collection[int], calls: dict[int, tuple[Wait, Call]]
) -> tuple[Where, ...]:
    """Return where each rank is: at its call, and where its host waits for the device, if that is another site; then the callers of
    helpers.
    """
    out: list[Where] = []
    outer: list[Where] = []
    for r in sorted(ranks):
        state = snapshot.ranks.get(r)
        call = calls[r][1] if r in calls else None
        first = where_of(state, r, call)
        unknown = call is not None and call.site is None and state is not None and not state.user_stack
        if snapshot.source == "dumps" and unknown:
            first = where_at(r, None, "waiting")  # its newest entry is of a later call
        made = call or (state.blocked if state is not None else None)
        callers = made.site.path[1:] if made is not None and made.site is not None else ()
        out.append(first)
        outer += (where_at(r, caller, first.state) for caller in callers)
        host = host_site(state)
        if host is not None and (host.file, host.line) != (first.file, first.line):
            out.append(where_at(r, host, "waits_for_device"))
    return (*out, *outer)


def host_site(state: RankState | None) -> Site | None:
    """Return where the host of a rank waits for its device; None if it does not, or that is not known."""
    waits = state is not None and state.host_wait == "device" and state.blocked is not None and state.blocked.on_device
    return state.current_site if state is not None and waits else None


def host_text(snapshot: Snapshot, ranks: Collection[int]) -> str:
    """Return where the hosts of ranks on a device backend wait: only the device is in the collective. Often empty."""
    states = [st for r in sorted(ranks) if (st := snapshot.ranks.get(r)) and st.blocked and st.blocked.on_device]
    hosts = {st.rank: host for st in states if (host := host_site(st)) is not None}
    calls = {st.rank: st.blocked.site for st in states if st.blocked}
    at_call = {r: (call.file, call.line) for r, call in calls.items() if call is not None}
    # the message has the line of the call already
    sites = {r: site_text(host) for r, host in hosts.items() if (host.file, host.line) != at_call.get(r)}
    texts = [
        f"the {verb(rs, 'host', 'hosts')} of {rank_list(rs)} {verb(rs, 'waits', 'wait')} for the device at {site}"
        for site, rs in list(by_value(sites).items())[:3]
    ]
    connecting = [st.rank for st in states if st.rank not in hosts and st.blocked and st.blocked.left_s is None]
    if connecting:
        needs = "creating the communicator of the group, which needs every member"
        texts.append(f"{rank_list(connecting)} {verb(connecting, 'is', 'are')} {needs}")
    return "".join(f"; {text}" for text in texts)


def verb(ranks: Sized, one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
