"""Ranks that failed by themselves, by their own messages and their launchers: one finding for each reason."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from distdiag.diagnosis.model.findings import Finding, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.sources.logs import meanings
from distdiag.sources.logs.build import Fields, finding, ranks_of, some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.join import OWN, before, earlier, first_waits, process
from distdiag.sources.logs.meanings import MEANINGS, Meaning
from distdiag.sources.logs.patterns import Role
from distdiag.sources.logs.timeouts import op_name
from distdiag.sources.logs.tracebacks import LOST
from distdiag.terms.ranks import unfold_ranks
from distdiag.terms.untrusted import MAX_INT, bounded, is_rank

# an exception that only reports another one
_REPORTS_ANOTHER = bounded(
    r"[Rr]oot cause|[Ss]ee (?:the )?(?:stack trace|logs? |error)|in a background process|previous error|sub-exception|Caught \w+ in DataLoader worker"
)
AFTER_FIRST_S = 5.0  # a launcher kills what has not ended by itself so long after the first failure, or later
_MEMORY = bounded(r"Process (\d{1,9}) has (\d{1,6}(?:\.\d{1,4})?) GiB memory in use")
_NUMBER = bounded(r"0x[0-9a-f]+|\d+")
_OF_THE_LINE = {"duplicate_gpu": ("a", "b"), "rank_twice": ("a",), "nccl_mismatch": ("near",)}  # ranks it is about
# signals of a rank that was ended, or aborted by its watchdog; and those of a fault
_SENT = ("SIGTERM", "SIGINT", "SIGABRT", "SIGHUP")
_BY_KERNEL = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
_OF_TEXT = {
    "Out Of Memory": -9,
    "Killed": -9,
    "Segmentation fault": -11,
    "segfault": -11,
    "Bus error": -7,
    "Aborted": -6,
}
EXIT_CODE = "ended with exit code"
BY_PROGRAM = "by the program (MPI_Abort)"


@dataclass(slots=True)
class Reason:
    """One reason for which ranks failed.

    Attributes:
        ranks: Ranks known to have failed for this reason.
        unnamed: Writers without a known rank, as text.
        times: When each rank ended, by the launcher.
        inferred: True if its rank is that of the only process that reports the failure on its host.
        after: What followed from it on other ranks.
    """

    meaning: Meaning
    text: str
    advice: str
    order: float
    ranks: set[int] = field(default_factory=set)
    unnamed: list[str] = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    times: dict[int, str] = field(default_factory=dict)
    inferred: bool = False
    after: str = ""


# -- messages of the ranks themselves --------------------------------------------------------------------------------


def of_messages(found: Collected) -> tuple[list[Reason], list[Fact]]:
    """Return the reasons of ranks whose first fact is a failure of their own, and the failures that came after a timeout."""
    waits = first_waits(found)
    timeouts = [f for f in waits.values() if f.role is Role.WAIT]
    of_device = {
        f.rank for f in found.facts if f.rank is not None and f.name in MEANINGS and MEANINGS[f.name].kind == "gpu"
    }
    ended = {
        process(f) for f in found.facts if f.uncaught and f.role is Role.CAUSE and not _REPORTS_ANOTHER.search(f.text)
    }
    reasons: dict[tuple[str, str], Reason] = {}
    late: list[Fact] = []
    for f in found.facts:
        meaning = MEANINGS.get(f.name)
        if f.role is not Role.CAUSE or meaning is None:
            continue
        if f.name == "exception" and not f.uncaught and process(f) in ended:
            continue
        if f.name not in OWN:
            own = waits.get(process(f))
            if own is not None and before(own, f) is not False:
                continue
            if f.rank in of_device and meaning.kind != "gpu":
                continue  # one event: the device failed, and its process with it
            if any(earlier(wait, f) for wait in timeouts):
                late.append(f)
                continue
        _add(reasons, f, meaning, len(found.files) > 1)
    return _without_reports(_by_time(list(reasons.values()))), late


def _by_time(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons in the order of their clocks, if all show the same clock; else of their lines."""
    at = [r.facts[0].at for r in reasons]
    if len({a[0] if a else "" for a in at}) == 1 and at[0] is not None:
        return sorted(reasons, key=lambda r: (r.facts[0].at or ("", 0.0))[1])
    return sorted(reasons, key=lambda r: r.order)


def only_reports(r: Reason) -> bool:
    """True for an exception of no known process that only reports the failure of another."""
    return not r.ranks and not r.unnamed and _REPORTS_ANOTHER.search(r.text) is not None


def _without_reports(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons without those that only report another one, or a connection that was lost after the first."""
    first = [r for r in reasons if not _REPORTS_ANOTHER.search(r.text)] or reasons
    known = {r.text for r in first if r.ranks or r.unnamed}
    own = [r for r in first if r.ranks or r.unnamed or r.text not in known]
    return [r for r in own if r is own[0] or not (r.facts[0].name == "exception" and LOST.search(r.text))]


def _add(reasons: dict[tuple[str, str], Reason], f: Fact, meaning: Meaning, several_files: bool) -> None:
    text = text_of(f, meaning)
    place = f"{f.site.file}:{f.site.line}" if f.site is not None and f.name == "exception" else ""
    key = (f.name, _NUMBER.sub("#", text) + place)
    if pci := f.fields.get("pci"):  # all that the driver reports of one device is one event
        key = ("gpu", f"{f.path} {pci.rpartition('.')[0] or pci}")
    r = reasons.setdefault(key, Reason(meaning, text, meaning.advice, f.order))
    r.facts.append(f)
    keys = _OF_THE_LINE.get(f.name)
    ranks = {f.number(k) for k in keys} if keys else {f.rank}
    known = {q for q in ranks if q is not None and is_rank(q)}
    r.ranks |= known
    where = f.fields.get("node"), f.fields.get("pod")
    name = f"node {where[0]}" if where[0] else f"the node of pod {where[1]}" if where[1] else f.who.name
    if meaning.kind == "gpu" and f.who.host:
        name = name or f"host {f.who.host}"
        r.hosts |= {f.who.host} if f.rank is not None else set()
    if several_files:
        name = f"{name or ('the host' if meaning.kind == 'gpu' else 'a process')} of {f.path.name}"
    if not known and name and name not in r.unnamed:
        r.unnamed.append(name)
    if f.site is not None and f.rank is not None:
        r.sites.setdefault(f.rank, f.site)
    if f.name == "exception":
        r.advice = meanings.advice_for(f.text, meanings.GENERAL[min(len(r.ranks), 2)])
    elif f.fields.get("xid") in meanings.PROGRAM_XIDS:
        r.advice = meanings.OF_PROGRAM
    elif f.fields.get("xid") in meanings.XIDS:
        r.advice = meanings.XIDS[f.fields["xid"]]
    elif f.name == "cuda_error":
        r.advice = meanings.advice_for(f.text, meaning.advice)


def text_of(f: Fact, meaning: Meaning) -> str:
    """Return what a failure is reported as, after its rank."""
    fields = Fields({k: shortened(v, 160 if f.name == "exception" else 120) for k, v in f.fields.items()})
    if f.name == "exception":
        fields["what"] = f": {fields['what']}" if fields["what"] else ""
    elif f.name == "cuda_oom":
        fields["others"] = _memory_of_others(f)
    elif f.name == "xid":
        fields["text"] = f": {shortened(fields['text'], 80).rstrip('.')}" if fields["text"] else ""
    elif f.name == "port_in_use":
        fields["port"] = f"port {fields['port']}" if fields["port"] else "the port"
    return meaning.text.format_map(fields)


def _memory_of_others(f: Fact) -> str:
    """Return what other processes hold of the GPU whose memory was not enough, by the message; empty if they are not known."""
    what = f.fields.get("what", "")
    held = {pid: gib for pid, gib in _MEMORY.findall(what) if pid != str(f.who.pid)}
    if not held or ("this process has" not in what and f.who.pid is None):
        return ""
    pid = max(held, key=lambda pid: float(held[pid]))
    return f": process {pid}, which is not this rank, holds {float(held[pid]):.3g} GiB of that GPU"


# -- how processes ended, by their launchers -------------------------------------------------------------------------


def signal_name(number: int) -> str:
    """Return `SIGTERM` of 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class _End:
    """How one process ended."""

    fact: Fact
    rank: int | None
    code: int
    launcher: str

    @property
    def by(self) -> str:
        """Return the name of the signal that ended it; empty if it exited."""
        number = -self.code if self.code < 0 else self.code - 128 if 128 < self.code < 160 else 0
        return signal_name(number) if number else ""

    @property
    def name(self) -> str:
        """Return the process, without a rank."""
        local, pid, host, label = (self.fact.fields.get(key, "") for key in ("local", "pid", "host", "label"))
        name = f"local rank {local}" if local else f"process {pid}" if pid else label or "a process"
        if self.launcher == "srun":  # its task is a node
            name = "the ranks"
        return name + (f" on {host}" if host else "")


def of_exits(found: Collected, explained: set[int], waited: set[int], others: bool) -> list[Reason]:
    """Return the reasons that launchers give for ranks that left no message of their own.

    Args:
        explained: Ranks whose failure is known.
        waited: Ranks that timed out or lost a connection: their own end follows from that.
        others: True if a process failed by itself, whether its rank is known or not.
    """
    reasons: dict[tuple[str, str], Reason] = {}
    memory = found.named("host_oom")
    # a process may also be lost because it timed out: then nothing shows that it failed first
    pids = {f.who.pid for f in found.facts if f.role is Role.VICTIM}
    if any(f.role is Role.WAIT for f in found.facts):
        pids.add(None)
    ends = _ends(found)
    killed = {id(end) for end in _killed_by_launcher(ends)}
    named = bool(explained) and any(end.rank is not None for end in ends)
    for nth, end in enumerate(ends):
        if id(end) in killed or (_followed(end, explained, waited, bool(memory)) and not _another(end, pids)):
            continue
        if end.rank is None and end.by == "SIGKILL" and ranks_of(memory):
            continue  # it is the process that the kernel names
        if end.rank is None and (named or (others and end.launcher in ("line", "parent"))):
            continue  # the end of a process that failed by itself
        meaning = _meaning(end, bool(memory), others)
        r = reasons.setdefault((meaning.cause, meaning.text), Reason(meaning, meaning.text, meaning.advice, nth))
        r.facts.append(end.fact)
        if end.rank is None:
            r.unnamed.append(end.name)
        else:
            r.ranks.add(end.rank)
            r.times.setdefault(end.rank, end.fact.fields.get("time", ""))
            r.hosts |= {end.fact.fields["host"]} if end.fact.fields.get("host") else set()
    if memory and not reasons and not explained:
        meaning = MEANINGS["host_oom"]
        pods = [f"pod {f.fields['pod']}" for f in memory if "pod" in f.fields]
        reasons["", ""] = Reason(meaning, meaning.text, meaning.advice, 0.0, {*ranks_of(memory)}, pods, facts=memory)
    return list(reasons.values())


def _ends(found: Collected) -> list[_End]:
    """Return how processes ended, those in launchers' tables first; what one line repeats is left out."""
    tables = found.named("ended")
    known = {f.fields["pid"] for f in tables if "pid" in f.fields}
    lines = [f for f in found.facts if f.role is Role.EXIT and f.name not in ("ended", "host_oom")]
    out: list[_End] = []
    for f in (*tables, *(f for f in lines if f.fields.get("pid") not in known)):
        launcher = {"exit_tasks": "srun", "lost_worker": "parent", "mpi_abort": "mpi"}.get(
            f.name, f.fields.get("launcher", "line")
        )
        ranks: list[int | None] = [f.rank]
        if f.name == "exit_tasks":  # a task is a node, if torchrun started the ranks
            ranks = [None] if found.torchrun else [*_tasks(f.fields["tasks"])]
        if (code := _code(f)) or f.name == "ended":
            out += [_End(f, rank, code, launcher) for rank in ranks]
    return out


def sent(found: Collected) -> str:
    """Return the signal by which processes were ended from outside; empty if none was."""
    return next((end.by for end in _ends(found) if end.by in ("SIGTERM", "SIGINT", "SIGHUP")), "")


def _code(f: Fact) -> int:
    """Return the exit code that a launcher reports; negative for a signal."""
    how, name = f.fields.get("how", ""), f.fields.get("signal", "")
    if how in _OF_TEXT:
        return _OF_TEXT[how]
    if name:
        return -(int(name[:4]) if name.isdecimal() else int(getattr(signal, name, 0)))
    last = how.rpartition(" ")[2]
    return int(last[:6]) if last.isdecimal() else (f.number("code") if "code" in f.fields else 1) or 0


def _tasks(text: str) -> tuple[int, ...]:
    """Return the tasks in `1-3`, `[0,2]`."""
    try:
        return unfold_ranks(text.replace("[", "").replace("]", ""))
    except ValueError:
        return ()


def _followed(end: _End, explained: set[int], waited: set[int], memory: bool) -> bool:
    """True if this process ended, or was ended, after another had failed."""
    if end.rank in explained or (end.by in _SENT and (waited or end.by != "SIGABRT")):
        return True
    if end.rank in waited or (end.launcher == "parent" and end.rank is None and waited):
        return True  # a process that has timed out was alive until then
    cleaned_up = end.by not in _BY_KERNEL or (end.by == "SIGKILL" and end.launcher == "srun" and not memory)
    return bool(explained) and not end.fact.fields.get("what") and cleaned_up


def _another(end: _End, waiting: set[int | None]) -> bool:
    """True if a process was lost whose pid is known not to be one of those that lost their connections."""
    pid = end.fact.number("pid")
    return end.launcher == "parent" and end.rank is None and pid is not None and not waiting & {None, pid}


def _killed_by_launcher(ends: list[_End]) -> list[_End]:
    """Return the processes that a launcher killed because another had failed before."""
    at = [end.fact.who.at[1] for end in ends if end.fact.who.at and end.by not in _SENT]
    first_s = min(at, default=0.0)
    first = min((end.fact.order for end in ends if end.launcher == "srun" and not end.by), default=MAX_INT)
    killed = [end for end in ends if end.by == "SIGKILL"]
    return [
        end
        for end in killed
        if (end.launcher == "srun" and end.fact.order > first)  # its lines are in the order of time
        or (end.fact.who.at is not None and end.fact.who.at[1] - first_s > AFTER_FIRST_S)
    ]


def _meaning(end: _End, memory: bool, others: bool) -> Meaning:
    """Return what one end is reported as."""
    by, what = end.by, end.fact.fields.get("what", "")
    if end.launcher == "parent":
        return Meaning("rank_lost", "crashed", "was lost: killed, or crashed in native code", meanings.KILLED)
    if end.launcher == "mpi":
        why = shortened(end.fact.fields.get("how", BY_PROGRAM), 160)
        return Meaning("rank_lost", "crashed", f"aborted MPI: {why}", meanings.SEE_LOG)
    if by == "SIGKILL" and memory:
        return Meaning("rank_lost", "killed", "was killed by SIGKILL: out of memory", MEANINGS["host_oom"].advice)
    if by and not (by == "SIGABRT" and others):  # it aborted after its message
        return Meaning("rank_lost", "killed", f"was killed by {by}", meanings.SIGNALS.get(by, meanings.SEE_LOG))
    if what:
        return Meaning(
            "rank_lost", "crashed", f"raised {shortened(what, 160)}", meanings.advice_for(what, meanings.GENERAL[1])
        )
    return Meaning("rank_lost", "crashed", f"{EXIT_CODE} {end.code}, without an exception in the log", meanings.SEE_LOG)


# -- findings --------------------------------------------------------------------------------------------------------


def with_a_reason(reasons: Iterable[Reason]) -> list[Reason]:
    """Return the ends that show what ended the process: a signal or an exception, not only an exit code."""
    return [r for r in reasons if not r.text.startswith(EXIT_CODE) and not r.text.endswith(BY_PROGRAM)]


def number(reasons: list[Reason], ended: list[Reason]) -> None:
    """Set the ranks of the one exception without ranks: those that ended with an exit code, if their number is equal."""
    nameless = [r for r in reasons if r.meaning.cause == "crashed" and not r.ranks and not _has_process(r)]
    ranks = {q for r in ended for q in r.ranks}
    if len(nameless) == 1 and len(nameless[0].facts) == len(ranks):
        nameless[0].ranks |= ranks


def _has_process(r: Reason) -> bool:
    """True if its lines name a process, not only a node."""
    return bool(r.unnamed) and any(f.who.name != f.who.label or not f.who.label for f in r.facts)


def _first(r: Reason) -> str:
    """Return which of several ranks ended first, by the launchers' clocks; empty if they do not show it."""
    known = {q: t for q, t in r.times.items() if t}
    if len(known) < len(r.ranks) or len(set(known.values())) < 2:
        return ""
    least = min(known.values())
    ranks = [q for q, t in known.items() if t == least]
    return f", {rank_list(ranks)} first ({least.replace('_', ' ')})" if len(ranks) < len(known) else ""


def of_reason(r: Reason, found: Collected, waited: dict[int, Fact]) -> Finding:
    """Return the finding on one reason.

    Args:
        waited: The first timeout, or lost connection, of each rank that has one.
    """
    ranks, others = tuple(sorted(r.ranks)), tuple(sorted(waited.keys() - r.ranks))
    everyone = len(ranks) > 1 and set(ranks) >= found.ranks and not others
    of_node = bool(r.facts) and all(f.of_node for f in r.facts)
    unordered = any(before(r.facts[0], waited[q]) is None for q in others if waited[q].role is Role.WAIT)
    in_collective = bool(r.facts) and all(f.in_collective for f in r.facts)
    message, advice = _who_failed(r, ranks, of_node) + r.after, r.advice
    if everyone and r.meaning.cause == "crashed":
        message += f": the same on all {len(ranks):,} ranks in the log"
    elif others:
        waits = [waited[q] for q in others]
        after = all(before(f, wait) for f in r.facts[:1] for wait in waits)
        message += f"; {rank_list(others)} {'then ' if after else ''}{_in_what(waits)}"
    if everyone and not advice:
        advice = meanings.SAME_EVERYWHERE
    if in_collective and advice in meanings.GENERAL:
        advice = meanings.IN_COLLECTIVE
    if of_node:
        advice += "; the log does not name the node: the rank is the same only on the first one"
    sites = r.sites or {}
    common = next((f.site for f in r.facts if f.site is not None), None)
    return finding(
        r.meaning.kind,
        r.meaning.cause,
        r.facts,
        message,
        advice,
        culprits=ranks,
        victims=others,
        sites={q: site for q in ranks if (site := sites.get(q, common)) is not None},
        proved=bool(ranks)
        and r.meaning.cause != "silent"
        and r.meaning.kind != "mismatch"
        and not (of_node or in_collective or unordered or r.inferred or any(f.inferred for f in r.facts)),
        cost="the job ended, or hangs without it",
    )


def _in_what(waits: list[Fact]) -> str:
    """Return what ranks waited in, if that is one call; else that they waited."""
    calls = {(op_name(f.fields["op"]), f.number("seq")) for f in waits if f.name == "timeout"}
    if all(f.name == "dump_signal" for f in waits):
        return f"{verb(waits, 'was', 'were')} asked to dump because of it"
    if len(calls) != 1 or any(f.name != "timeout" for f in waits):
        waited = "timed out waiting" if any(f.role is Role.WAIT for f in waits) else ""
        lost = (
            f"lost {verb(waits, 'its connection', 'their connections')}"
            if any(f.role is Role.VICTIM for f in waits)
            else ""
        )
        return " or ".join(filter(None, (waited, lost)))
    op, seq = calls.pop()
    return f"timed out in {op}" + (f" #{seq:,}" if seq is not None else "")


def _who_failed(r: Reason, ranks: tuple[int, ...], of_node: bool) -> str:
    """Return who failed, how, and where."""
    shown = some(r.unnamed)
    nobody = "the host" if r.meaning.kind == "gpu" else "a rank"
    who = rank_list(ranks) if ranks else shown or nobody
    if of_node:
        who = who.replace("rank", "local rank", 1)
    text = r.text
    if (len(ranks) > 1 or shown.startswith("the ranks")) and r.meaning.kind != "mismatch":
        text = text.replace("was killed", "were killed").replace("has a GPU", "have GPUs")
    if len(r.hosts) == 1 and not r.hosts <= {"localhost"}:
        who += f" on {min(r.hosts)}"
    site = next((f.site for f in r.facts if f.site is not None), None)
    times = f" ({len(r.facts):,} times)" if who is nobody and len(r.facts) > 1 and r.meaning.cause != "killed" else ""
    return f"{who} {text}{_first(r)}{at(site)}{times}"
