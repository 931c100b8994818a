"""Joins facts to processes: which rank each is about, what came before what, and what another fact explains.

One process has many names: rank, pid, a label of Ray or NCCL, a task of srun, its file. They are joined where a line has two of
them, and kept apart where none has. Order is that of clocks where both lines have a time, else that of lines of one file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distdiag.diagnosis.model.snapshot import Site
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.files import ranks_of
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.writers import apart
from distdiag.terms.ranks import sets_of, unfold_ranks
from distdiag.terms.untrusted import MAX_RANKS, bounded, is_rank

LATER_S = 2.0  # the clocks of hosts differ by less
HERE = ("127.0.0.1", "127.0.1.1", "localhost", "localhost.localdomain", "::1")  # each host itself
WAITED = (Role.WAIT, Role.VICTIM)
# as `dmesg` and `journalctl -k` print it: where a log has it, after the job or before it, says nothing of the time
KERNEL = bounded(
    r"^\[(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}| {0,9}\d{1,9}\.\d{6})\] |^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\S{19,40}) \S{1,253} kernel: "
)
_BRIDGES = {"172.17.0.1": "docker0", "192.168.122.1": "virbr0"}  # of docker, libvirt, unless configured otherwise
_BRIDGE = bounded(r"docker|veth|br-[0-9a-f]{12}|virbr")  # interfaces for the containers or virtual machines of one host
_INSIDE = bounded(r"127\.|169\.254\.|::1$|fe80:")  # addresses that are not of the network
_UNREACHED = bounded(r"refused|No route|unreachable|timed out")
_NPU = bounded(r"\bnpu:(?P<npu>\d{1,4})\b|\b[Dd]evice(?:[ _]?[Ii][Dd])?[ :=\[]{1,3}(?P<device>\d{1,4})\b")
_FUNCTION = bounded(r"\.\d$")  # of a PCI device
_NUMBER = bounded(r"\d{1,6}")


def join(found: Collected) -> Collected:
    """Set the rank of every fact, drop those that came after the job was stopped from outside, and return what is left."""
    found.of_file = {p: r for p, r in ranks_of(found.files).items() if found.by_path.get(p, set()) <= {r}}
    of_file = {p: r for p, r in found.of_file.items() if p not in found.of_nodes}
    of_file = {p: min(r) for p, r in found.env.items() if len(r) == 1 and found.by_path[p] == r} | of_file
    _of_communicators(found)
    _of_spawned(found)
    numbered = _numbered(found)
    found.per_node |= bool(found.local_of or found.named("exit", "ended"))  # of launchers other than srun
    local = {f.who.local for f in found.facts if f.who.local is not None}
    tasks = {f.who.task for f in found.facts if f.who.task is not None}
    ended_tasks = {f.fields["tasks"] for f in found.named("exit_tasks")}
    one_node = 0 < (found.world_size or 0) <= 1 + max(local, default=0)
    _hosts_of_files(found)
    for f in found.facts:
        f.file = f.path.name if len(found.files) > 1 else ""
        f.rank = _rank_of(found, f, of_file)
        f.inferred |= f.name == "exit_shell" and f.rank is not None and found.rank_of.get(f.number("pid")) is None
        f.inferred |= "nth_node" in f.fields
        if f.rank is None and f.role is not Role.EXIT and _NUMBER.sub("#", f.who.label) in numbered:
            f.rank, f.inferred = int(_NUMBER.findall(f.who.label)[-1]), True
        # a lone `0: ` may be anything
        is_task = max(tasks, default=0) > 0 or f.who.padded or str(f.who.task) in ended_tasks
        if f.rank is None and not found.per_node and is_task and f.name != "exit_tasks":
            f.rank = f.who.task
        label = f.who.label or f.who.host  # a launcher's label is most often its host
        on_node = f.who.local if f.who.local is not None else found.local_of.get((label, f.fields.get("pid", "")))
        if f.rank is None and on_node is not None:
            first = {n for (path, of), n in found.first_rank.items() if of == label and (of or path == f.path)}
            first = min(first) if len(first) == 1 else -1
            if first >= 0 and is_rank(first + on_node):
                f.rank = first + on_node
            elif f.who.local is None or len(found.files) == 1:
                f.rank, f.of_node = on_node, not one_node
    found.facts = [part for f in found.facts for part in _by_task(found, f)]
    for f in found.facts:
        if f.role is Role.EXIT and f.rank is not None and (host := f.fields.get("host")):
            found.on_host.setdefault(host, set()).add(f.rank)
    for name in ("ib", "efa", "closed"):
        _of_one_host(found, name)
    for name, add in _MORE.items():
        for f in found.named(name):
            add(found, f)
    ended = {f.fields["pid"]: f.fields["local"] for f in found.facts if {"pid", "local"} <= f.fields.keys()}
    for f in found.facts:
        if f.rank is None and not f.who.process and (local := ended.get(f.fields.get("pid", ""))) is not None:
            f.who.process = f"local rank {local}"
    found.ranks |= {f.rank for f in found.facts if f.rank is not None and is_rank(f.rank)}
    found.ranks |= {r for ranks in found.by_path.values() for r in ranks if is_rank(r)}
    found.ranks |= {r for r in found.rank_of.values() if r is not None} | set(of_file.values())
    _of_full_pods(found)
    found.past += [f for f in found.facts if f.foreign]
    found.facts = [f for f in found.facts if not f.foreign]
    if stops := [f for f in found.facts if f.role is Role.STOP and f.name != "interrupted"]:
        nodes = {f.fields.get("host", f.fields.get("node", "")) for f in found.named("node_lost")} - {""}
        for stop in found.named("preempted") if len(nodes) == 1 else ():  # the node was lost by it
            stop.fields.setdefault("node", min(nodes))
        found.facts = [f for f in found.facts if not _after_stop(f, stops)]
    return found


def _hosts_of_files(found: Collected) -> None:
    """Give what the kernel reports in a file whose name has a host that other lines name that host."""
    reports = [f for f in found.facts if f.message.of_node and not f.who.host and f.path not in found.by_path]
    names = {f.path.name for f in reports}
    known = {f.who.host for f in found.facts} | found.on_host.keys() | found.interfaces.keys()
    known = {h for h in known if _NUMBER.search(h) and any(h in name for name in names)}
    for f in reports:
        named = (h for h in known if re.search(rf"(?<!\w){re.escape(h)}(?!\w)", f.path.name))
        f.who.host = max(named, key=len, default="")


def _of_full_pods(found: Collected) -> None:
    """Drop that a launcher lost a node, where that node is a pod which ran out of memory: it was lost by that."""
    for f in found.named("horovod_stall"):
        f.rank = None  # its writer did not time out: it only reports who is missing
    full = {f.fields.get("pod") or f.fields.get("host") or f.who.process for f in found.named("host_oom")} - {""}
    lost = [f for f in found.named("node_lost") if f.fields.get("pod", f.fields.get("node")) in full]
    found.facts = [f for f in found.facts if f not in lost]


def _of_communicators(found: Collected) -> None:
    """Note which process, on which host, is which rank, by NCCL's lines on the largest communicator.

    If most ranks have processes on several hosts, there are several such communicators, and no rank is known to be the job's.
    Of a job that was started again, some hosts are the same.
    """
    largest = {who: rank for who, (world, rank) in found.in_world.items() if world == found.world_size}
    if max({*found.ranks, *itertools.chain(*found.by_path.values())}, default=0) >= (found.world_size or MAX_RANKS):
        found.world_size = None  # it is that of another program, such as an inference server
        return
    hosts = sets_of((rank, host) for (_, host, _), rank in largest.items())
    if 2 * sum(len(named) > 1 for named in hosts.values()) > len(hosts):
        found.world_size = None
        return
    for (label, host, pid), rank in largest.items():
        found.is_rank_of((label, host), rank)
        if host:
            found.on_host.setdefault(host, set()).add(rank)
        if pid is not None:
            found.is_rank_of(pid, rank)


def _of_spawned(found: Collected) -> None:
    """Note which pid is which rank, by the launchers of several nodes that name theirs and the rank of their first one."""
    first = sets_of((label, rank) for (_, label), rank in found.first_rank.items())
    for (label, pid), local in found.local_of.items():
        ranks = first.get(label, {-1})
        if label and pid and len(ranks) == 1 and min(ranks) >= 0 and is_rank(rank := min(ranks) + local):
            found.is_rank_of(int(pid), rank)
            found.on_host.setdefault(label, set()).add(rank)


def _by_task(found: Collected, f: Fact) -> list[Fact]:
    """Return a fact of srun's once for each task, of `1-3` or `[0,2]`; a task is a node, if a launcher there started the ranks."""
    if f.name != "exit_tasks":
        return [f]
    try:
        tasks = () if found.per_node else unfold_ranks(f.fields["tasks"].replace("[", "").replace("]", ""))
    except ValueError:
        tasks = ()
    return [replace(f, rank=q) for q in tasks if is_rank(q)] or [replace(f, rank=None)]


def _why_unreached(found: Collected, f: Fact) -> None:
    """Add to a failure to connect what its earlier attempts say, and which address the other nodes were given."""
    own = found.masters.get(f.who.label or f.path.name, {})
    if found.nodes_wanted > 1 and {f.fields["peer"], own.get("addr", "")} <= {*HERE}:
        f.fields |= {"of_nodes": str(found.nodes_wanted)} | {k: v for k, v in own.items() if k == "option"}
    if why := found.unreached.get((f.path, f.who.process or f.who.label)):
        f.fields["why"] = why
        for key, field, what in (("addr", "peer", "address"), ("port", "port", "port"), ("endpoint", "port", "port")):
            given = {name: master[key] for name, master in found.masters.items() if key in master}
            others = {name: value for name, value in given.items() if value != f.fields[field]}
            if own.get(key) == f.fields[field] and len(set(others.values())) == 1:
                f.fields["masters"] = f"; its master {what} is {own[key]}, {min(others)}'s is {others[min(others)]}"
                break


def of_announced(found: Collected, f: Fact) -> None:
    """Add to a store that not all ranks joined that those which did have announced themselves in the log."""
    if len(found.announced) == f.number("joined") and max(found.announced, default=0) < (f.number("expected") or 0):
        f.fields["launched"] = ""
        if found.tasks == f.number("joined") and not found.per_node:
            f.fields["launched"] = f", and Slurm was asked for {found.tasks} tasks, which are one rank each"
            return
    came = {(fact.path, fact.who.process or fact.who.label) for fact in found.named("clients")}
    names = (item for item in found.unreached.items() if item[0] not in came and item[1].startswith("the name"))
    for (path, who), why in itertools.islice(names, 1):
        f.fields["unresolved"] = f"on {who or path.name}, {why}"


def _of_one_host(found: Collected, name: str) -> None:
    """Keep of lost connections those to the host that several others lost, if all else is what that host itself lost; name it."""
    facts = [f for f in found.named(name) if "peer" in f.fields]
    host_of = {address: host for host, (_, address) in found.interfaces.items()}
    if name != "closed":  # its lines get more than the host
        for f in (f for f in facts if f.fields["peer"] in host_of):
            f.fields["of_host"] = f" ({host_of[f.fields['peer']]})"
    # these could not connect, and so closed theirs
    failed = {f.who.host for f in facts if _UNREACHED.search(f.fields.get("reason", ""))} - {""}
    closed = (f for f in facts if "reason" not in f.fields)
    follow = [f for f in closed if host_of.get(f.fields["peer"], f.fields["peer"]) in failed]
    found.facts = [f for f in found.facts if f not in follow]
    named = {(f.path, f.fields["peer"]) for f in facts if f.who.host}  # the same text again, without its process
    again = [f for f in facts if not f.who.host and (f.path, f.fields["peer"]) in named]
    facts = [f for f in facts if f not in follow and f not in again]
    writers = sets_of((f.fields["peer"], f.who.host) for f in facts if f.who.host)
    several = [peer for peer, hosts in writers.items() if len(hosts) > 1]
    if len(several) != 1:
        return
    [peer] = several
    own = [f for f in facts if f.fields["peer"] != peer]
    # without the address of a host: the one that alone lost another one
    alone = {f.who.host or f.who.label for f in own}
    host = host_of.get(peer, min(alone) if len(alone) == 1 else "")
    if not host or host in writers[peer]:
        return
    on_host = found.on_host.get(host, ())
    if all((f.who.host or f.who.label) == host or (not f.who.host and f.rank in on_host) for f in own):
        found.facts = [f for f in found.facts if f.name != name or f.fields.get("peer", peer) == peer]
        for f in (f for f in facts if f.fields["peer"] == peer):
            f.fields |= {"ends": f"at {host} first", "one_end": f"; each connection that failed has {host} at one end"}


def _of_interface(found: Collected, f: Fact) -> None:
    """Add to a lost connection which host has the address, on which interface; and which one to use, if only that host reaches it."""
    own = found.interfaces.get(f.who.host)
    name, peer = own if own is not None and "peer" not in f.fields else ("", f.fields.get("peer", ""))
    hosts = sorted(host for host, (_, address) in found.interfaces.items() if address == peer)
    name = found.interfaces[hosts[0]][0] if hosts else _BRIDGES.get(peer, name)
    inside = len(hosts) > 1 and (_BRIDGE.match(name) or _INSIDE.match(peer)) is not None
    if f.who.host in hosts and not inside:
        return
    if hosts:
        f.fields["of_host"] = f" ({name} on {', '.join(hosts[:3])})"
    unreached = _UNREACHED.search(f.fields.get("reason", f.text)) is not None
    if own is not None and unreached and (inside or _BRIDGE.match(name)):
        f.fields["peer"] = peer
        whose = "libvirt" if name.startswith("virbr") else "docker"
        bridge = "a bridge inside that host" if hosts else f"most often {whose}'s own bridge inside a host"
        f.fields["bridge"] = "an address inside each of these hosts" if inside else bridge
        where = f" (and GLOO_SOCKET_IFNAME) on {', '.join(hosts[:3]) or 'the host that has this address'}"
        shared = _shared_interface(found, hosts)
        of_others = {dev for host, (dev, _) in found.interfaces.items() if host not in hosts and not _BRIDGE.match(dev)}
        f.fields["use"] = f"={shared}{where}" if shared else f" to the interface that all hosts share{where}"
        if not (shared or inside):
            there = f"other hosts (there {min(of_others)})" if of_others else "other hosts"
            names = ",".join(dict.fromkeys((name, *_BRIDGES.values(), "lo")))
            f.fields["use"] = f"{where} to its interface in the network of the {there}, or NCCL_SOCKET_IFNAME=^{names}"


def _shared_interface(found: Collected, hosts: Sequence[str]) -> str:
    """Return the interface of these hosts, as NCCL lists them, whose address is of the network of the other hosts' ones; empty if none is known."""
    networks = {addr.rsplit(".", 2)[0] for host, (_, addr) in found.interfaces.items() if host not in hosts}
    own = [found.addresses.get(host, {}) for host in hosts]
    names = [{dev for dev, addr in of_host.items() if addr.rsplit(".", 2)[0] in networks} for of_host in own]
    shared = set.intersection(*names) if names else set[str]()
    return min(shared, default="")


def _of_setting(found: Collected, f: Fact) -> None:
    """Name the interface that was not found: the one that NCCL was told to use on that host."""
    f.fields.setdefault("dev", found.settings.get(f.who.host, {}).get("NCCL_SOCKET_IFNAME", "of that name"))


# what is added to the facts of a name
_MORE = {"store_connect": _why_unreached, "clients": of_announced, "closed": _of_interface, "no_interface": _of_setting}  # fmt: skip


def _numbered(found: Collected) -> set[str]:
    """Return the forms of launchers' labels whose number is the rank: each label of that form with known ranks has that one rank."""
    forms: dict[str, list[bool]] = {}
    for label, ranks in found.of_label.items():
        numbers = _NUMBER.findall(label)
        forms.setdefault(_NUMBER.sub("#", label), []).append(bool(numbers) and ranks == {int(numbers[-1])})
    return {form for form, same in forms.items() if all(same) and len(same) > 1}


def _rank_of(found: Collected, f: Fact, of_file: Mapping[Path, int]) -> int | None:
    """Return the rank of the process that a fact is about, by the line, then by what names the process elsewhere."""
    pid, who = f.number("pid"), f.who
    nth, on_node = f.number("nth_node"), f.number("on_node")
    if nth is not None and on_node is not None and on_node < found.gpus:  # verl numbers its workers by nodes
        return nth * found.gpus + on_node
    if pid is None and f.role is Role.CAUSE and "pci" in f.fields:  # the driver's later lines name the process
        pid = found.pid_of.get((f.path, f.fields["pci"].rpartition(".")[0] or f.fields["pci"]))
    if f.role is Role.EXIT and (rank := f.number("r")) is not None:
        return rank
    if who.rank is not None:
        return who.rank
    if found.rank_of.get(pid) is None and "pci" in f.fields and (named := _process_of_device(found, f)):
        return found.rank_of.get((named, named.partition(":")[0]))
    if pid is not None:  # it is about that process, whoever wrote it
        own = of_file.get(f.path) if f.name == "exit_shell" else None  # of a shell's child, in the file of one rank
        return found.rank_of.get(pid, own)
    of_pod = [r for p, r in of_file.items() if who.process.endswith(p.name.partition(".")[0])]
    if len(of_pod) == 1:
        return of_file.get(f.path, of_pod[0])
    known = found.rank_of.get((who.process, who.host)) if who.process else found.rank_of.get((f.path, who.local))
    if known is None and who.pid is not None:
        known = found.rank_of.get(who.pid)
    if known is None and (m := _NPU.search(f.text)) is not None:
        known = found.rank_of.get(("npu", m["npu"] or m["device"]))
    return of_file.get(f.path) if known is None else known


def _process_of_device(found: Collected, f: Fact) -> str:
    """Return the process that NCCL names with a device of the driver's line; empty if none, or of several hosts."""
    pci = _FUNCTION.sub("", f.fields["pci"].lower())
    hosts = {host for host, device in found.devices if device == pci}
    host = f.who.host or (min(hosts) if len(hosts) == 1 else "")
    return found.devices.get((host, pci), "")


def _after_stop(f: Fact, stops: Collection[Fact]) -> bool:
    if f.name == "node_lost" and any(stop.name == "preempted" for stop in stops):
        return True  # that is how the node was lost
    if f.role not in (Role.CAUSE, Role.START, Role.EXIT, *WAITED) or f.message.own:
        return False
    return any(before(stop, f) for stop in stops)


def process(f: Fact) -> tuple[object, ...]:
    """Return what is equal for all facts of one process, and as far as is known only for them."""
    if f.rank is not None:
        return "rank", f.rank
    return ("process", f.path, f.who.process) if f.who.process else ("file", f.path)


def earlier(a: Fact, b: Fact) -> bool:
    """True if the clocks in the lines show that `a` came before `b`."""
    return a.who.at is not None and b.at is not None and a.who.at[0] == b.at[0] and b.at[1] - a.who.at[1] > LATER_S


def before(a: Fact, b: Fact) -> bool | None:
    """Return whether `a` came before `b`; None if that is not known."""
    if earlier(a, b):
        return True
    if earlier(b, a):
        return False
    return a.order < b.order if a.path == b.path else None


def same_port(a: Fact, b: Fact) -> bool:
    """True if one process, or kernel, wrote two lines on one port into one file."""
    one, other = ((f.path, f.who.host, f.who.process, f.fields.get("dev")) for f in (a, b))
    return one == other


def active_again(f: Fact, ends: Iterable[Fact]) -> bool:
    """True if a port was active again, and no other failure is shown between that and its loss: the job had not ended by it."""
    return f.back is not None and not any(_between(f, end, f.back) for end in ends if end.name != f.name)


def _between(first: Fact, f: Fact, last: Fact) -> bool:
    if f.path == first.path:
        return first.order < f.order < last.order
    times = first.at, f.at or f.who.at, last.at
    return all(times) and all(apart(a, b) > 0 for a, b in itertools.pairwise(t for t in times if t))


def first_waits(found: Collected) -> dict[tuple[object, ...], Fact]:
    """Return each process's first timeout or lost connection: its later exceptions are consequences."""
    out: dict[tuple[object, ...], Fact] = {}
    for f in found.facts:
        if f.role in WAITED and ((old := out.setdefault(process(f), f)) is not f) and before(f, old):
            out[process(f)] = f
    return out


def first_site(facts: Iterable[Fact]) -> Site | None:
    return next((f.site for f in facts if f.site is not None), None)


def absent_ranks(found: Collected, waiting: Iterable[int], of_all: bool = False) -> tuple[int, ...]:
    """Return the ranks of the job that did not wait, if they are a minority; else empty.

    Args:
        of_all: The others wait for all ranks of the job, so these may be a half that lines name.
    """
    here = set(waiting)
    absent = known_ranks(found, here) - here
    few = len(absent) * (1 if of_all and absent <= found.ranks else 2) <= len(here)
    return tuple(sorted(absent)) if few else ()


def known_ranks(found: Collected, waiting: Collection[int]) -> set[int]:
    """Return all ranks that the job has, as far as the log shows it."""
    return {*found.ranks, *range(max(waiting, default=-1) + 1), *range(found.world_size or 0)}
