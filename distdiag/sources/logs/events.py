"""One event is one reason: the failures by which one device, one process or the host's memory shows itself several times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distdiag.diagnosis.known_errors import remedy
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.failures import Reason
from distdiag.sources.logs.join import before, earlier, process
from distdiag.sources.logs.meanings import GENERAL, OF_EARLIER_LOG, RERUN_ELSEWHERE, RERUNS
from distdiag.sources.logs.patterns import MEANINGS
from distdiag.terms.ranks import grouped
from distdiag.terms.untrusted import MAX_RANKS, bounded

SAME_EVENT_S = 600.0  # a process reports its device's failure no later
_LOADER = bounded(r"DataLoader worker \(pid\(s\) (\d{1,9}(?:, \d{1,9})*)\) exited unexpectedly")
_THREAD_ENDED = bounded(r"Pin memory thread exited unexpectedly")
_HAS = bounded(r"^ha[sd] ")  # of the texts on a device
NEXT_LINES = 2  # after an exception, in which its process reports the system's error
_DEVICE = bounded(r"NVLink|ECC|critical error|fallen off the bus|by GPU node-")


def merged(reasons: list[Reason], found: Collected) -> list[Reason]:
    """Return the reasons, each event once: the fact stays, what follows from it becomes a part of it."""
    memory, exceptions = found.named("host_oom"), found.named("exception")
    of_system = (f for f in exceptions if not f.uncaught and "[Errno " in f.text)
    reported: dict[tuple[object, ...], Fact] = {(f.path, process(f), f.line): f for f in of_system}
    for r in reasons:
        _of_memory(r, memory)
        _of_all(r, found)
        _of_system(r, reported)
        _of_rerun(r, found)
    held = [(len(r.facts), {id(f) for f in r.facts}) for r in reasons]  # drop those that are a part of another one
    reasons = [r for r in reasons if not any(n > len(r.facts) and own >= {id(f) for f in r.facts} for n, own in held)]
    reasons = _of_devices(_of_one_limit(_without_repeats(_of_one_remedy(_of_thread(_of_worker(reasons))))))
    _of_child(reasons, [f for f in found.named("exit") if f.rank is None and "label" in f.fields])
    limits = {f.name: f for f in reversed(found.named("process_limit", "locked_memory"))}
    for r in reasons:
        _of_port(r, found)
        if "undefined symbol: nccl" in r.facts[0].text:
            paths = {path for q, path in found.libraries.items() if q is None or q in r.ranks}
            r.after += f"; the log shows {shortened(min(paths), 160)} there" if paths else ""
        if r.facts[0].name == "thread_limit" and (limit := limits.get("process_limit")):
            r.after += f"; the limit there (RLIMIT_NPROC, `ulimit -u`) is {limit.number('limit') or 0:,}"
        if r.facts[0].name == "nccl_host" and (limit := limits.get("locked_memory")):
            r.after += f"; UCX reports the limit of locked memory there: {limit.fields['what']}"
        _of_module(r, found.named("port_module"))
    return reasons


def _of_memory(r: Reason, memory: list[Fact]) -> None:
    """Name the reason of a loader's worker that was killed, if the log has its host's lack of memory: these lines are a part of it."""
    first = r.facts[0]
    loader = _LOADER.search(first.text) if first.name == "exception" else None
    if first.name == "loader_killed" and first.fields.get("signal") == "Killed":
        pod = first.who.process
        pods = ("", pod)  # a line without one is on a process or a host
        here = [f for f in memory if not pod or (f.fields.get("pod") or f.who.process) in pods]
        same = [f for f in here if f.rank in (None, first.rank)]
    else:
        same = [f for f in memory if loader is not None and f.fields.get("pid") in loader[1].split(", ")]
    if same:
        r.meaning = replace(r.meaning, cause="killed")
        r.text = "lost a DataLoader worker"
        r.after = f", which the kernel killed: the host or its memory limit ran out of memory{r.after}"
        r.advice = MEANINGS["host_oom"].advice
        r.hosts |= {f.who.host for f in same if f.who.host}
        r.facts = [*r.facts, *same]


def _of_system(r: Reason, reported: Mapping[tuple[object, ...], Fact]) -> None:
    """Add the system's error that a known process printed right after the exception by which it ended."""
    own = [f for f in r.facts if f.name == "exception" and "[Errno " not in f.text and process(f)[0] != "file"]
    keys = [(f.path, process(f), line) for f in own for line in range(f.line + 1, f.line + 1 + NEXT_LINES)]
    if found := [reported[key] for key in keys if key in reported]:
        first = found[0]
        r.after += f"; it also reported {first.fields['type']}: {shortened(first.fields['what'], 120)}"
        r.advice = remedy(first.text, r.advice) if r.advice in GENERAL else r.advice
        r.facts += found


def _of_rerun(r: Reason, found: Collected) -> None:
    """Add what a second run of the iteration showed in which a rank found a result that is not finite."""
    step = r.facts[0].fields.get("step")
    same = [f for f in found.named("rerun") if f.fields["step"] == step]
    ranks = {f.number("r") for f in same}
    nan = r.facts[0].name in ("nan_loss", "nan_gradient") and len(r.facts) == 1
    rank = min((q for q in r.ranks or ranks if q is not None), default=-1)
    before = found.reran.get((rank, step or ""))
    if nan and not same and before is not None and len(r.ranks) == 1:
        host, device, line = before
        r.after += f"; run again on the same GPU (node {host}, device {device}, line {line:,}), it got the same result"
        r.advice = RERUN_ELSEWHERE
    if not nan or len(ranks) != 1 or not r.ranks <= ranks:
        return
    last = same[-1].fields
    what = next(key for key in RERUNS if key in last)
    text, r.advice = RERUNS[what]
    r.after += f"; {text.format_map(last)}"
    if what == "persistent" and before is not None:
        host, device, line = before
        r.after += f": node {host}, device {device} (line {line:,})"
        r.advice = r.advice.replace(OF_EARLIER_LOG, f"device {device} of node {host}")
    r.ranks, r.inferred, r.facts = {int(last["r"])}, True, [*r.facts, *same]


def _of_port(r: Reason, found: Collected) -> None:
    """Add the host that serves the job's store, if the failure to listen on its port names none."""
    if r.facts[0].name != "port_in_use" or any(f.who.host or f.who.label or f.rank is not None for f in r.facts):
        return
    addresses = {master["addr"] for master in found.masters.values() if "addr" in master}
    ports = {master["port"] for master in found.masters.values() if "port" in master}
    port = r.facts[0].fields.get("port")
    if len(addresses) == 1 and not addresses & {"localhost", "127.0.0.1", "::1"} and (not ports or ports == {port}):
        r.after += f"; the job's store is on {min(addresses)}, by the master address in the log"


def _of_module(r: Reason, reports: list[Fact]) -> None:
    """Add to a link that was lost what the kernel reported of its module: of the cable or the transceiver."""
    first = r.facts[0]
    own = [f for f in reports if first.name == "port_error" and f.fields["device"] in first.text and before(f, first)]
    if own:
        r.after += f"; before that, the kernel reported of its module: {own[-1].fields['what']} (line {own[-1].line:,})"


def _of_all(r: Reason, found: Collected) -> None:
    """Give a reason all ranks of the job, if those that its lines name and those without a name are as many."""
    nameless = [f for f in r.facts if f.rank is None and not f.who.name]
    world = found.world_size or 0
    # each process prints an exception once; NCCL's messages are printed again without a name
    once = r.facts[0].name == "exception" and r.meaning.cause == "crashed"
    ended = not r.ranks and r.facts[0].uncaught and all(f.uncaught or f.site is None for f in r.facts)
    whole = len(r.ranks) + len(nameless) == world <= MAX_RANKS
    if nameless and whole and ((r.ranks and once) or ended) and max(r.ranks, default=0) < world:
        r.ranks, r.inferred = set(range(world)), r.inferred or not r.ranks


def _of_one_remedy(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons; a failure of an unknown process and the only other one with its message or remedy are one."""
    for r in [r for r in reasons if not (r.ranks or r.unnamed) and r.advice not in GENERAL]:
        own = r.facts[0]  # exceptions are compared by their remedies; the kernel and NCCL call one port by two names
        of_name = [q for q in reasons if q is not r and q.advice == r.advice and q.facts[0].name == own.name]
        any_text = own.name in ("exception", "port_error")
        same = [q for q in of_name if any_text or own.fields.items() <= q.facts[0].fields.items()]
        if len(same) != 1 or r not in reasons:
            continue
        first, second = sorted((r, same[0]), key=lambda q: q.order)
        first.take(second)
        first.inferred = True
        if first.facts[0].name != "exception":  # a library logs it, and raises it with more detail
            first.text, first.facts = same[0].text, same[0].facts
        reasons = [q for q in reasons if q is not second]
    return reasons


def _of_one_limit(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons; calls of NCCL that failed on one host, with one remedy, are one."""
    first: dict[object, Reason] = {}
    for r in reasons:
        own = r.facts[0].name == "nccl_host" and len(r.hosts) == 1
        same = first.setdefault((r.advice, *r.hosts) if own else id(r), r)
        if same is not r:
            same.take(r)
    return [*first.values()]


def _without_repeats(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons without those whose processes report the same in another one, with more detail."""
    first = ((r, r.facts[0]) for r in reasons)  # by name and a field of it: there may be thousands
    having = grouped(((f.name, *item), r) for r, f in first for item in ((), *f.fields.items()))

    def repeats(r: Reason) -> bool:
        name, fields = r.facts[0].name, r.facts[0].fields.items()
        more = (q for q in having[(name, *next(iter(fields), ()))] if fields < q.facts[0].fields.items())
        return name != "exception" and any(r.ranks <= q.ranks and {*r.unnamed} <= {*q.unnamed} for q in more)

    return [r for r in reasons if not repeats(r)]


def _of_worker(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons; the one fault that names no process is that of the one loader's worker which ended by it."""
    lost = [r for r in reasons if r.facts[0].name == "loader_fault"]
    faults = [r for r in reasons if r.facts[0].name == "fatal" and not (r.ranks or r.unnamed)]
    if len(lost) != 1 or len(faults) != 1 or len(lost[0].facts) != len(faults[0].facts):
        return reasons
    own, fault = lost[0], faults[0]
    first = fault.facts[0]
    if own.facts[0].fields["what"] != first.fields["what"]:
        return reasons
    own.after = f"; the worker failed{at(first.site)}{own.after}" if first.site else own.after
    own.facts = [*own.facts, *fault.facts]
    return [r for r in reasons if r is not fault]


def _of_child(reasons: list[Reason], ends: list[Fact]) -> None:
    """Name the process of the one failure that names none, if its parent names one process that a signal ended after it."""
    nameless = [r for r in reasons if not (r.ranks or r.unnamed) and r.meaning.cause == "crashed"]
    names = {f.fields["label"] for f in ends}
    if len(nameless) == len(names) == 1 and before(nameless[0].facts[0], ends[0]):
        nameless[0].unnamed, nameless[0].inferred = [*names], True


def _of_thread(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons; what a thread without a name raised belongs to the one rank that reports its end."""
    ends = [r for r in reasons if _THREAD_ENDED.search(r.text) is not None]
    nameless = [r for r in reasons if r.facts[0].name == "exception" and not (r.ranks or r.unnamed)]
    first = [r for r in nameless if not any(f.uncaught for f in r.facts) and r not in ends]
    if len(ends) != 1 or len(first) != 1 or len(first[0].facts) != len(ends[0].ranks):
        return reasons
    own, end = first[0], ends[0]
    own.ranks, own.hosts, own.inferred = own.ranks | end.ranks, own.hosts | end.hosts, True
    own.sites = end.sites | own.sites
    own.after += f" in a thread; its main thread then {end.text}{at(next(iter(end.sites.values()), None))}"
    return [r for r in reasons if r is not end]


def _of_devices(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons without what processes report of a device whose failure the driver reports."""
    for first in [r for r in reasons if r.facts[0].message.of_driver]:
        a = first.facts[0]
        for r in [r for r in reasons if r is not first]:
            if not all(f.message.of_process and "pci" not in f.fields and _near(a, f) for f in r.facts):
                continue  # else it is how processes saw the failure of this device
            reasons = [q for q in reasons if q is not r]
            here = {f.who.host for f in r.facts} == {f.who.host for f in first.facts} != {""}
            here = here or all(_DEVICE.search(f.text) for f in r.facts)
            here = here or [f"local rank {q}" for q in r.ranks] == [name.partition(" of ")[0] for name in first.unnamed]
            if r.ranks == first.ranks != set() or (
                not first.ranks and (len(r.ranks) == 1 or not (r.ranks or r.unnamed)) and here
            ):
                first.inferred |= not first.ranks
                first.take(r)
                first.unnamed = []
                first.hosts |= {f.who.host for f in first.facts if f.who.host}
                first.after += f"; the process itself reports {_HAS.sub('', r.text)}"
            else:
                first.after += f"; {r.who} then {r.text}"
    return reasons


def _near(a: Fact, b: Fact) -> bool:
    if b.who.host and a.who.host and a.who.host != b.who.host:
        return False
    known = a.at is not None and b.at is not None and a.at[0] == b.at[0]
    if not known and before(b, a) and _DEVICE.search(b.text) is None:
        return False  # a log keeps the order of one writer only: a message that names the device may stand before the driver's
    return not earlier(b, a) and not (known and b.at and a.at and b.at[1] - a.at[1] > SAME_EVENT_S)
