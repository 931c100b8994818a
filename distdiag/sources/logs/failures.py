"""Ranks that failed by themselves: the reasons in their own messages, and one finding for each reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distdiag.diagnosis.consequences import CONNECTION_LOST, REPORTS_ANOTHER
from distdiag.diagnosis.known_errors import DAMAGED, DAMAGED_SHARD, INSTALL, OF_SERVICE, OTHER_VERSION, remedy
from distdiag.diagnosis.model.findings import Finding, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.sources.logs import build, meanings
from distdiag.sources.logs.build import ENDED, Fields, finding, library, some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.gpu_memory import Held, memory_of_others
from distdiag.sources.logs.join import absent_ranks, before, earlier, first_waits, process
from distdiag.sources.logs.message import Meaning, Role
from distdiag.sources.logs.waiting import op_name
from distdiag.terms.units import rough_time
from distdiag.terms.untrusted import bounded, is_rank, numbers

AS_LONG = 60  # characters by which two exceptions are one that was passed on
MANY = 3  # names of processes that one sentence lists
APART_S = 30.0  # ranks that fail for one reason of the program come to it sooner one after another
FEW_OF = 4  # nearly all other ranks: so many for each that reported nothing
_PLURALS = (("was killed", "were killed"), ("has a GPU", "have GPUs"), ("has a device", "have a device"))
# what one process meets where another one renamed, made or deleted the same path first
_RACE = bounded(r"No such file or directory: .{1,300} -> |\bFile exists: |\bDirectory not empty: ")
# the middle of a long path: its begin shows whose directory it is, its last part says more
_DIRECTORIES = bounded(r"(?P<begin>/(?:[^\s/]{1,24}/){0,3})\S{24,400}/(?=[^\s/])")
_SAYS_NOTHING = bounded(
    r" Did you run some cuda functions before calling NumCudaDevices\(\) that might have already set an error\?"
)
_ADDRESS = bounded(r"0x[0-9a-f]+")
# a number, which may be of the writer only: a rank, pid or device; not the code of an error
_NUMBER = bounded(r"(?P<code>\b(?:[Ee]rror[ _]code|[Ee]rrno)\W{0,3}(?:is )?\d+)|0x[0-9a-f]+|\d+")
_TP_WORKER = bounded(r"Worker_TP(\d{1,4})(?:_EP\d{1,4})? pid=")  # of vLLM, which adds DP and PP if there are several
ERRORS = ("crashed", "configuration")  # causes of a process that reports its own error
_OF_PROGRAM = (*ERRORS, "gradient", "loss", "gradients_not_synced")  # causes that all ranks may have at once
_OF_STORE = ("DistNetworkError", "DistStoreError")  # raised before any collective


@dataclass(slots=True)
class Reason:
    """One reason for which ranks failed.

    Attributes:
        ranks: Ranks known to have failed for this reason.
        unnamed: Writers without a known rank, as text.
        times: When each rank ended, by the launcher.
        inferred: True if its rank is that of the only process that reports the failure on its host.
        after: What else is known: who holds the memory, what followed on other ranks.
        held: What holds the memory of each full GPU, by its short form.
        pids: The hosts on which its lines name a process, by pid and device; `""` for a line without a host.
        reported: What the kernel, the driver or a daemon of its host reported, from which it follows.
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
    guessed: bool = False  # its rank is only the one that ended first
    after: str = ""
    held: dict[str, str] = field(default_factory=dict)
    pids: dict[tuple[int, object], set[str]] = field(default_factory=dict)
    reported: list[Fact] = field(default_factory=list)

    @property
    def who(self) -> str:
        return rank_list(sorted(self.ranks)) if self.ranks else some(self.unnamed) or "a process"

    def take(self, other: Reason) -> None:
        """Add what another reason of the same event knows."""
        self.ranks, self.sites = self.ranks | other.ranks, other.sites | self.sites
        self.facts, self.hosts = self.facts + other.facts, self.hosts | other.hosts
        self.unnamed += [name for name in other.unnamed if name not in self.unnamed]


def of_messages(found: Collected) -> tuple[list[Reason], list[Fact]]:
    """Return (reasons of ranks whose first fact is a failure of their own, failures after a timeout)."""
    waits = first_waits(found)
    timed = [f for f in waits.values() if f.role is Role.WAIT and f.who.at is not None]
    timed.sort(key=lambda f: f.who.at or (), reverse=True)
    timeouts = {f.who.at[0]: f for f in timed if f.who.at}  # by clock
    meant = ((f.rank, f.message.meaning) for f in found.facts if f.rank is not None)
    of_device = {rank for rank, meaning in meant if meaning and meaning.kind == "gpu"}
    uncaught = [f for f in found.facts if f.uncaught]
    ended = {process(f) for f in uncaught if f.role is Role.CAUSE and not REPORTS_ANOTHER.search(f.text)}
    ended_by_others = {process(f) for f in uncaught if f.role is Role.VICTIM}
    reasons: dict[tuple[str, str], Reason] = {}
    late: list[Fact] = []
    for f in found.facts:
        meaning = f.message.meaning
        if f.role is not Role.CAUSE or meaning is None:
            continue
        if f.name == "exception" and not f.uncaught and process(f) in ended:
            continue
        if not f.message.own:
            own = waits.get(process(f))
            # the lines after an exception of a collective may say that it waited
            after = own is not None and ((f.in_collective and own.role is Role.WAIT) or before(own, f) is not False)
            # without names, two exceptions that ended their processes are of two
            another = f.uncaught and process(f)[0] == "file" and process(f) in ended_by_others
            if after and not (another and not CONNECTION_LOST.search(f.text) and not REPORTS_ANOTHER.search(f.text)):
                continue
            f.inferred = f.inferred or after
            if f.rank in of_device and meaning.kind != "gpu":
                continue  # one event: the device failed, and its process with it
            if any(earlier(wait, f) for wait in timeouts.values()):
                late.append(f)
                continue
        _add(reasons, f, meaning, found)
    return _without_reports(_by_time(_of_one_text(reasons))), late


def _of_one_text(reasons: dict[tuple[str, str], Reason]) -> list[Reason]:
    """Return the reasons; what was printed without its traceback belongs to the first one with its text."""
    out: list[Reason] = []
    first: dict[tuple[str, str], Reason] = {}
    for r in sorted(reasons.values(), key=lambda r: not any(f.site for f in r.facts)):
        same = first.setdefault((r.facts[0].name, _unnumbered(r.facts[0], r.text)), r)
        if same is r or r.facts[0].name != "exception" or any(f.site for f in r.facts) or not (r.ranks or r.unnamed):
            out.append(r)
            continue
        same.order = min(same.order, r.order)
        same.take(r)
        same.advice = _of_exception(same.facts[0], len(same.ranks))
    return out


def _by_time(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons in the order of their clocks, if all show the same clock; else of their lines."""
    at = [r.facts[0].at for r in reasons]
    if len({a[0] if a else "" for a in at}) == 1 and at[0] is not None:
        return sorted(reasons, key=lambda r: (r.facts[0].at or ("", 0.0))[1])
    return sorted(reasons, key=lambda r: r.order)


def only_reports(r: Reason) -> bool:
    """True for an exception of no known process that only reports the failure of another."""
    return not r.unnamed and follows(r)


def follows(r: Reason) -> bool:
    """True for an exception of no known rank that only reports the failure of another process."""
    return not r.ranks and REPORTS_ANOTHER.search(r.text) is not None


def _without_reports(reasons: list[Reason]) -> list[Reason]:
    """Return the reasons without those that only report another one, or a connection that was lost after the first."""
    first = [r for r in reasons if not REPORTS_ANOTHER.search(r.text)] or reasons
    known = {r.text for r in first if r.ranks or r.unnamed}
    own = [r for r in first if r.ranks or r.unnamed or r.text not in known]
    return [r for r in own if r is own[0] or not (r.facts[0].name == "exception" and CONNECTION_LOST.search(r.text))]


def _event(f: Fact, text: str) -> tuple[str, str]:
    """Return what the facts of one event have in common: their device, their host or job if they are `once` there, else their text."""
    if pci := f.fields.get("pci"):
        return "gpu", f"{f.path} {pci.rpartition('.')[0] or pci}"
    if f.message.once == "job" or (f.message.once == "host" and (f.who.host or f.message.whole_node)):
        return f.name, f.who.host if f.message.once == "host" else ""
    place = f"{f.site.file}:{f.site.line}" if f.site is not None and f.name == "exception" else ""
    return f.name, _unnumbered(f, text) + place


def _unnumbered(f: Fact, text: str) -> str:
    """Return the whole text of a failure, by which those of several ranks are the same one."""
    whole = text + f.fields.get("what", "") * (f.name == "exception")
    return _NUMBER.sub(lambda m: m["code"] or "#", whole)


def _add(reasons: dict[tuple[str, str], Reason], f: Fact, meaning: Meaning, found: Collected) -> None:
    text = text_of(f, meaning)
    others = f"; while handling that, it raised {shortened(f.fields['then'], 120)}" if "then" in f.fields else ""
    held = memory_of_others(f, found) if f.name == "cuda_oom" else Held()
    others = others or held.text
    r = reasons.setdefault(_event(f, text + others), Reason(meaning, text, meaning.advice, f.order, after=others))
    if f.name == "xid" and _xid(f) in meanings.XIDS and r.facts and _xid(r.facts[0]) not in ("", *meanings.XIDS):
        r.text, r.advice = text, meaning.advice  # the hardware names the event
        r.facts.insert(0, f)
    else:
        r.facts.append(f)
    ranks = {f.number(key) for key in f.message.about} or {f.rank}
    if f.message.whole_node:
        ranks = {*found.on_host.get(f.fields.get("host", f.fields.get("node", f.who.host)), ())}
    known = {q for q in ranks if q is not None and is_rank(q)}
    r.ranks |= known
    if f.who.host and ((meaning.kind == "gpu" and f.rank is not None) or f.name == "nccl_host"):
        r.hosts |= {f.who.host}
    name, again = _writer(f, meaning), _has_process(r, f)
    if (not known or f.message.whole_node) and name and not again and name not in r.unnamed:
        r.unnamed.append(name)
    if f.site is not None and f.rank is not None:
        r.sites.setdefault(f.rank, f.site)
    if f.name == "exception":
        r.advice = _of_exception(f, len(r.ranks))
    elif f.name == "xid":  # the one that the text names has the advice
        xid = _xid(r.facts[0])
        r.advice = meanings.OF_PROGRAM if xid in meanings.PROGRAM_XIDS else meanings.XIDS.get(xid, r.advice)
    elif f.name == "cuda_oom":
        r.advice = meanings.FULL_GPUS[any(x.engine for x in r.facts), held.whose]
        if held.short:
            r.held.setdefault(held.short, held.text)
            first, *more = r.held
            r.after = r.held[first] + (f"; likewise {some(more)}" if more else "")
    elif f.message.by_text and r.advice == meaning.advice:
        r.advice = remedy(f"{f.text} {text}", r.advice)  # one of its lines may say more than the others


def _writer(f: Fact, meaning: Meaning) -> str:
    """Return the process, host, node or file of a failure without a rank; empty if its line names none."""
    node, pod, host = f.fields.get("node"), f.fields.get("pod"), f"host {f.who.host}" if f.who.host else ""
    name = f"node {f.fields.get('host', node)}" if node else f"the node of pod {pod}" if pod else ""
    name = name or (host if f.name == "port_error" else "") or f.who.name or host
    return f"{name or meaning.subject} of {f.file}" if f.file and not f.who.host else name


def _xid(f: Fact) -> str:
    return f.fields.get("xid", "")


def _has_process(r: Reason, f: Fact) -> bool:
    """Note the process of a line; True if an earlier line names it by its pid, whatever else it calls it."""
    if f.who.pid is None:
        return False
    hosts = r.pids.setdefault((f.who.pid, f.who.device), set())
    again = bool(hosts) and (not f.who.host or not hosts.isdisjoint({f.who.host, ""}))
    hosts.add(f.who.host)
    return again


def _of_exception(f: Fact, ranks: int) -> str:
    """Return what to do about an exception, by its line and what the next line says of it."""
    more = f.fields.get("what", "")
    first = remedy(f.fields.get("cause", f.fields.get("then", "")), meanings.GENERAL[min(ranks, 2)])
    advice = remedy(f.text if more in f.text else f"{f.text} {more}", first)
    if f.unpickles and advice == INSTALL:
        advice = OTHER_VERSION
    elif f.resumes and advice == DAMAGED:
        advice = DAMAGED_SHARD
    elif f.package and f.package not in advice and _RACE.search(f.text) is not None:
        advice = f"{advice}; that call is in {f.package} itself, not in your code: see its issues, and upgrade it"
    return advice


def text_of(f: Fact, meaning: Meaning) -> str:
    """Return what a failure is reported as, after its rank."""
    limit = 160 if f.name == "exception" else 120
    fields = Fields()
    for key, value in f.fields.items():
        if len(value) > limit:
            value = _DIRECTORIES.sub(r"\g<begin>…/", _SAYS_NOTHING.sub("", value))
        fields[key] = shortened(value.replace("; ", ", "), limit)  # a semicolon would end the clause
    if f.name == "exception":
        fields["what"] = f": {fields['what']}" if fields["what"] else ""
        own = f"{fields['type']}: {f.fields['what']}"
        again = f.fields.get("cause", own)[:AS_LONG] == own[:AS_LONG]  # passed on, with another end
        fields["because"] = "" if again else f", because of {fields['cause']}"
    elif f.name == "xid":
        fields["text"] = f": {shortened(fields['text'], 80).rstrip('.')}" if fields["text"] else ""
    elif f.name.startswith("nan_"):
        fields["step"] = f" in iteration {fields['step']}" if fields["step"] else ""
    elif f.name == "port_in_use":
        fields["port"] = f"port {fields['port']}" if fields["port"] else "the port"
    return meaning.text.format_map(fields).rstrip()


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
    later = _first_long_before(r)
    several = len(r.ranks) + len(r.unnamed) > 1
    if not r.ranks and any(f.serves for f in r.facts):
        r.ranks, r.inferred = {0}, True
    awaited = {f.number("awaited") for f in waited.values() if "group" not in f.fields} - {None}
    absent, kind = {*absent_ranks(found, waited)}, r.meaning
    device = kind.kind == "gpu" and all(f.message.of_process and not f.message.of_node for f in r.facts)
    nameless = not (r.ranks or r.unnamed) and (device or (len(r.facts) == 1 and kind.cause in ERRORS))
    if nameless and len(absent) == 1 and (awaited == absent or (device and not awaited)):  # and it alone did not wait
        r.ranks, r.inferred, r.guessed = absent, True, True
    ranks, others = tuple(sorted(r.ranks)), tuple(sorted(waited.keys() - r.ranks))
    by_name = {int(m[1]) for name in r.unnamed if (m := _TP_WORKER.match(name))} if not found.ranks else set[int]()
    of_all = r.meaning.cause in _OF_PROGRAM and not (others or r.facts[0].message.about)
    everyone = found.all_of(r.ranks, r.advice in meanings.OF_ALL) if of_all else ""
    of_node = bool(r.facts) and all(f.of_node for f in r.facts)
    unordered = any(before(r.facts[0], waited[q]) is None for q in others if waited[q].role is Role.WAIT)
    in_collective = bool(r.facts) and all(f.in_collective for f in r.facts)
    elsewhere = found.ranks - {q for ranks_there in found.on_host.values() for q in ranks_there}
    several_hosts = len(found.on_host) > 1 or elsewhere
    if (several_hosts or r.meaning.kind == "gpu") and not r.facts[0].message.whole_node:
        r.hosts = r.hosts or found.host_of(r.ranks)
    message, advice = _who_failed(r, ranks, of_node, everyone) + r.after + _also_known(r, found), _advice(r, found)
    if r.facts and r.facts[0].name == "port_in_use" and several:
        advice = meanings.SHARED_PORT
    message += _whose_numbers(r) + later
    if others:
        message += _followed(r, found, waited, others)
    number, line = (found.ends[r.facts[0].path].over if r.facts else None) or (0, "")
    if advice in meanings.GENERAL and number:
        message += f"; line {number:,} before it says `{shortened(line, 100)}`"
        advice = meanings.AFTER_THE_WORK
    if in_collective and advice in meanings.GENERAL:
        advice = meanings.IN_COLLECTIVE
    nodes = {f.who.label for f in r.facts} if of_node else set()
    if nodes == {""}:
        advice += "; the log does not name the node: the rank is the same only on the first one"
    doubtful = bool(r.facts) and all(f.doubtful for f in r.facts)
    common = next((f.site for f in r.facts if f.site is not None and f.role is not Role.EXIT), None)
    by_settings = advice in OF_SERVICE or (everyone and r.facts[0].message.of_program)  # of the service's client
    return finding(
        r.meaning.kind,
        "configuration" if by_settings and not r.reported else r.meaning.cause,
        [*r.reported, *r.facts],
        message,
        advice,
        culprits=() if everyone or nodes - {""} or kind.kind == "replica_drift" else ranks or by_name,
        victims=ranks if everyone else others,
        sites={q: site for q in ranks or by_name if (site := r.sites.get(q, common)) is not None},
        proved=bool(ranks)
        and r.meaning.cause != "silent"
        and r.meaning.kind != "mismatch"
        and not (doubtful or of_node or in_collective or unordered or r.inferred or any(f.inferred for f in r.facts)),
        cost="may have ended the job, but there is progress that may be later" if doubtful else ENDED,
    )


def _first_long_before(r: Reason) -> str:
    """Keep of the ranks of an exception the one that raised it long before all others, by the clocks; return when the others did."""
    at = {f.rank: f for f in reversed(r.facts) if f.name == "exception" and f.rank is not None and f.at is not None}
    times = sorted((f.at[1], f.rank) for f in at.values() if f.at and f.rank is not None)
    one_clock = len({f.at[0] for f in at.values() if f.at}) == 1
    if len(times) < 2 or at.keys() != r.ranks or r.unnamed or not one_clock or times[1][0] - times[0][0] < APART_S:
        return ""
    first = at[times[0][1]]
    rest, r.ranks, r.inferred = r.ranks - {times[0][1]}, {times[0][1]}, True
    r.text, r.facts = text_of(first, r.meaning), [first, *(f for f in r.facts if f is not first)]
    r.advice = meanings.FIRST if r.advice == meanings.SAME_EVERYWHERE else r.advice
    return f"; {rank_list(sorted(rest))} raised it {rough_time(times[1][0] - times[0][0])} later"


def _whose_numbers(r: Reason) -> str:
    """Return whose message the text quotes, if those of other ranks have other numbers, besides addresses; and how often Ray has it."""
    first = r.facts[0]
    repeated = sum(f.who.repeated for f in r.facts)
    lines = verb(range(repeated), "line", "lines")
    count = f"; Ray counts {repeated:,} more such {lines}, most likely of other processes" if repeated else ""
    texts = {_ADDRESS.sub("", text_of(f, r.meaning)) for f in r.facts if f.name == "exception" and f.rank in r.ranks}
    quoted = first.name == "exception" and first.rank is not None and text_of(first, r.meaning) == r.text
    return f"; the numbers are those of rank {first.rank}{count}" if quoted and len(r.ranks) > 1 < len(texts) else count


def _followed(r: Reason, found: Collected, waited: Mapping[int, Fact], others: Sequence[int]) -> str:
    """Return what other ranks met after, or while, these failed."""
    waits = [waited[q] for q in others]
    after = all(before(f, wait) for f in r.facts[:1] for wait in waits)
    timed_out = {f.rank for f in found.facts if f.role is Role.WAIT and f.name != "stuck_watchdog"}
    only_stuck = {f.rank for f in found.named("stuck_watchdog")} - timed_out  # by their watchdogs
    stuck = [q for q in others if q in only_stuck] if not only_stuck.issuperset(others) else []
    rest = [q for q in others if q not in stuck]
    text = f"; {rank_list(rest)} {'then ' if after else ''}{in_what([waited[q] for q in rest])}"
    if stuck:
        text += f"; {rank_list(stuck)} reported no timeout: {verb(stuck, 'its watchdog', 'their watchdogs')} made no progress"
    absent = absent_ranks(found, others) if not r.ranks and all(f.role is Role.WAIT for f in waits) else ()
    return f"{text}; {rank_list(absent)} reported no timeout" if 0 < FEW_OF * len(absent) <= len(others) else text


def _advice(r: Reason, found: Collected) -> str:
    """Return what to do, with the port or interface that the line names; where nothing more is known than that it is all ranks of one host, and no others: compare the hosts."""
    named = (*found.on_host.items(), *found.of_label.items())
    hosts = [host for host, ranks in named if ranks == r.ranks]
    others = any(ranks and ranks.isdisjoint(r.ranks) for _, ranks in named)
    apart = r.advice == meanings.SAME_EVERYWHERE and hosts and others
    known = r.facts[0].message.meaning if r.facts else None
    if known is not None and r.advice == known.advice and "{" in known.advice:
        port = f" 'sport = :{r.facts[0].fields['port']}'" if r.facts[0].fields.get("port") else ""
        return known.advice.format_map(Fields(r.facts[0].fields | {"of_port": port}))
    return meanings.OF_ONE_HOST.format(host=hosts[0]) if apart else r.advice


def _also_known(r: Reason, found: Collected) -> str:
    """Return on which host some of its ranks ran, if the log shows no other host of them; of no rank, whom Horovod missed."""
    stalls = found.named("horovod_stall") if not r.ranks else []
    if missing := {q for f in stalls for q in numbers(f.fields["ranks"]) if is_rank(q)}:
        return f"; Horovod's other ranks waited for {rank_list(sorted(missing))}"
    here = {f.path for f in r.facts}
    if not r.ranks and (lost := [f for f in found.named("coordination") if f.path not in here]):
        nodes = some([f.fields["node"] for f in lost])
        return f"; {build.who(lost, 'a node')} {'report' if len({f.path for f in lost}) > 1 else 'reports'} that {nodes} sent no heartbeats any more"
    if len(r.unnamed) > MANY and (others := {host for _, host, _ in found.in_world} - {_one_host(r), ""}):
        return f"; the lines of the processes on {some(sorted(others))} do not have it" if _one_host(r) else ""
    known = {host: ranks & r.ranks for host, ranks in found.on_host.items() if ranks & r.ranks}
    if r.hosts or len(known) != 1 or len(found.on_host) < 2:
        return ""
    [(host, ranks)] = known.items()
    return f"; {rank_list(sorted(ranks))} ran on {host}" if ranks < r.ranks else ""


def _one_host(r: Reason) -> str:
    """Return the host of all processes that have a reason; empty if they have several, or one is unknown."""
    hosts = {f.who.host for f in r.facts}
    return min(hosts) if len(hosts) == 1 and not r.ranks else ""


def in_what(waits: list[Fact]) -> str:
    """Return what ranks waited in, if that is one call; else that they waited."""
    calls = {(op_name(f.fields["op"]), f.number("seq")) for f in waits if f.name == "timeout"}
    if all(f.name == "dump_signal" for f in waits):
        return f"{verb(waits, 'was', 'were')} asked to dump because of it"
    if len(calls) != 1 or any(f.name != "timeout" for f in waits):
        its = verb(waits, "its connection", "their connections")
        return " or ".join(dict.fromkeys(_how(f).format(its=its) for f in waits))
    op, seq = calls.pop()
    return f"timed out in {op}" + (f" #{seq:,}" if seq is not None else "")


def _how(f: Fact) -> str:
    """Return how a rank failed after others, as far as its line says it: what a library reports may be anything."""
    if f.role is Role.WAIT:
        return "timed out waiting"
    if f.name == "nccl_error" or library(f) == "HCCL":
        return f"failed with {library(f)} errors"
    if f.name == "clients":
        return "waited in vain for all ranks to join"
    if f.name != "dist_error" or CONNECTION_LOST.search(f.fields.get("what", "")) is not None:
        return "lost {its}"
    return f"failed {'while connecting' if f.fields.get('type') in _OF_STORE else 'in torch.distributed'}"


def _who_failed(r: Reason, ranks: tuple[int, ...], of_node: bool, everyone: str) -> str:
    """Return who failed, how, and where."""
    shown = some(r.unnamed)
    if len(r.unnamed) > MANY and (host := _one_host(r)):
        shown = f"{len(r.unnamed):,} processes on {host}"
    nobody = r.meaning.subject
    who = "probably " * r.guessed + rank_list(ranks) if ranks else shown or nobody
    if ranks and shown and (r.facts[0].message.whole_node or any(f.serves for f in r.facts)):
        who = f"{shown} ({who})"
    if of_node:
        who = who.replace("rank", "local rank", 1)
        who += f" on {label}" if (label := some([f.who.label for f in r.facts if f.who.label])) else ""
    text = r.text
    if everyone:
        who, text = everyone, text.replace("raised ", "raised the same error: ", 1)
    if (len(ranks) > 1 or shown.startswith("the ranks")) and r.meaning.kind != "mismatch":
        for one, many in _PLURALS:
            text = text.replace(one, many)
    if len(r.hosts) == 1 and not r.hosts <= {"localhost"}:
        who += f" on {min(r.hosts)}"
    # of what the text names; a launcher's own stack shows where it learned of an end
    of_driver = "pci" in r.facts[0].fields
    said = [(f.name, _xid(f), f.fields.get("what")) for f in r.facts]
    same = [f for f, its in zip(r.facts, said, strict=True) if not of_driver or its == said[0]]
    site = next((f.site for f in same if f.site is not None and f.role is not Role.EXIT), None)
    if r.reported and len(set(r.sites.values())) > 1:
        site = None  # errors of several places that have one cause
    times = f" ({len(same):,} times)" if who is nobody and len(same) > 1 and r.meaning.cause != "killed" else ""
    return f"{who} {text}{_first(r)}{at(site)}{times}"
