"""Ranks that failed, by how their launchers saw the processes end: for those that left no message of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence

from distdiag.diagnosis.consequences import OTHER_ENDED
from distdiag.diagnosis.known_errors import remedy
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.text.phrases import shortened
from distdiag.sources.logs import meanings, slow
from distdiag.sources.logs.blamed import without_each_other
from distdiag.sources.logs.build import ranks_of
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.failures import ERRORS, Reason
from distdiag.sources.logs.join import before
from distdiag.sources.logs.message import Meaning, Role
from distdiag.sources.logs.patterns import MEANINGS
from distdiag.sources.logs.rows import NO_ROUTE
from distdiag.terms.signals import signal_name
from distdiag.terms.untrusted import MAX_INT, numbers

AFTER_FIRST_S = 5.0  # a launcher kills what has not ended by itself so long after the first failure, or later
# signals of a rank that was ended, or aborted by its watchdog; and those of a fault
_SENT = ("SIGTERM", "SIGINT", "SIGABRT", "SIGHUP")
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
_BY_KERNEL = ("SIGKILL", *_FAULTS)
_OF_TEXT = {
    "Out Of Memory": -9, "Killed": -9, "Segmentation fault": -11, "segfault": -11, "Segfault": -11, "Bus error": -7, "Aborted": -6, "Terminated": -15, "Floating point exception": -8,
    "Illegal instruction": -4,
}  # fmt: skip
EXIT_CODE = "ended with exit code"
LOST = "was lost: killed, or crashed in native code"
BY_PROGRAM = "by the program (MPI_Abort)"
SENDER = "read the lines of the process that sent it: they have the reason, and the kernel had no part in it"
OWN_LOG = "read what that process printed last, in its own log (of Ray: session_latest/logs)"


def _launcher(end: Fact) -> str:
    return end.message.launcher or end.fields.get("launcher", "line")


def _by(end: Fact) -> str:
    """Return the name of the signal that ended a process; empty if it exited."""
    code = _code(end)
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return signal_name(number) if number else ""


def _name(end: Fact) -> str:
    """Return a process, without a rank."""
    local, pid, host, label = (end.fields.get(key, "") for key in ("local", "pid", "host", "label"))
    host = host or end.who.label or end.who.host
    name = f"local rank {local}" if local else f"process {pid}" if pid else label or "a process"
    if end.name == "exit_tasks":  # its task is a node
        name = "the ranks"
    return name + (f" on {host}" if host else "")


def of_exits(
    found: Collected, own: Sequence[Reason], explained: set[int], waited: set[int], others: bool
) -> list[Reason]:
    """Return the reasons that launchers give for ranks that left no message of their own.

    Args:
        own: What processes reported themselves; the lines on the host's memory may be a part of it.
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
    aborts = any(f.message.aborts and f.rank is None and not OTHER_ENDED.search(f.text) for f in found.facts)
    senders = {f.fields.get("pid"): f for f in found.named("signal_sent")}
    killed = {id(end) for end in _killed_by_launcher(ends, bool(memory)) + _killed_by_ray(ends, memory)}
    killed |= {id(end) for end in _killed_as_it_hung(found, ends, senders)}
    named = bool(explained) and any(end.rank is not None for end in ends)
    # ranks that waited until a timeout, or never got a connection: neither shows that a process ended before
    before_it = [f for f in found.facts if f.role is Role.WAIT or f.message.unstarted]
    before_it += [f for f in found.facts if f.role is Role.VICTIM and NO_ROUTE.search(f.fields.get("reason", ""))]
    for nth, end in enumerate(ends):
        if id(end) in killed or (aborts and _by(end) == "SIGABRT"):
            continue
        lost = _launcher(end) == "parent" and end.rank is None and end.number("pid") is not None
        another = lost and pids.isdisjoint((None, end.number("pid")))  # none of those that lost their connections
        if not another and _followed(end, explained, waited, bool(memory)):
            continue
        named_there = ranks_of(memory) or (_of_nobody(end) and any(map(_whose, memory)))
        if end.rank is None and _by(end) == "SIGKILL" and named_there:
            continue  # it is the process that the kernel, or the pod that Kubernetes names
        if _of_nobody(end) and not memory and any(before(f, end) for f in before_it):
            continue  # a shell's or launcher's line, after the ranks had failed
        if end.rank is None and (named or (others and _launcher(end) in ("line", "parent"))):
            continue  # the end of a process that failed by itself
        meaning = _meaning(end, bool(memory), others, senders.get(end.fields.get("pid"), senders.get(None)))
        r = reasons.setdefault((meaning.cause, meaning.text), Reason(meaning, meaning.text, meaning.advice, nth))
        r.facts.append(end)
        of_file = f" of {end.path.name}" if len(found.files) > 1 else ""
        if end.rank is None and r.ranks and end.fields.get("host") in r.hosts:
            continue  # one of these ranks
        if end.rank is None:
            r.unnamed.append(_name(end) + of_file * (" on " not in _name(end)))
        else:
            r.ranks.add(end.rank)
            r.times.setdefault(end.rank, end.fields.get("time", ""))
            r.hosts |= {end.fields["host"]} if end.fields.get("host") else set()
    for r in (r for r in reasons.values() if r.advice == MEANINGS["host_oom"].advice):
        rises, advice = slow.growth(found)
        r.after, r.advice = r.after + rises, r.advice + advice
    told = {id(f) for r in own for f in r.facts}
    if any(id(f) not in told for f in memory) and not with_a_reason(reasons.values()) and not explained:
        reasons["", ""] = _of_memory(found, memory)
    return list(reasons.values())


def _of_memory(found: Collected, memory: list[Fact]) -> Reason:
    """Return the reason of processes that were killed because their host, or their limit, ran out of memory."""
    exact = [f for f in memory if "pid" in f.fields] or memory  # the others report the same event
    meaning = meanings.FULL_HOST if all("all" in f.fields for f in exact) else MEANINGS["host_oom"]
    meaning = meanings.BY_RAY if all("ray" in f.fields for f in exact) else meaning
    named = [filter(None, (_whose(f) for f in facts if f.rank is None)) for facts in (exact, memory)]
    named = list(dict.fromkeys(named[0])) or ([] if ranks_of(memory) else list(dict.fromkeys(named[1])))
    hosts = {f.fields["host"] for f in exact if "host" in f.fields and ranks_of(memory)}
    after, grows = slow.growth(found)
    holds, advice = slow.most_memory(found)
    advice, after = (advice or meaning.advice) + grows, holds + after
    ranks = {*ranks_of(memory)}
    return Reason(meaning, meaning.text, advice, 0.0, ranks, named, facts=memory, hosts=hosts, after=after)


def _whose(f: Fact) -> str:
    """Return which process or pod ran out of the host's memory; empty if the line does not say it."""
    if pod := f.fields.get("pod"):
        return f"pod {pod}"
    if label := f.fields.get("label"):
        return label
    if host := f.fields.get("host"):
        actor = f" ({f.fields['actor']})" if "actor" in f.fields else ""
        return f"process {f.fields['pid']}{actor} on {host}" if "pid" in f.fields else f"a process on {host}"
    return f.who.process


def _ends(found: Collected) -> list[Fact]:
    """Return how processes ended, those in launchers' tables first; what one line repeats is left out."""
    tables = found.named("ended")
    known = {f.fields["pid"] for f in tables if "pid" in f.fields}
    lines = [f for f in found.facts if f.role is Role.EXIT and f.name not in ("ended", "host_oom") and _code(f)]
    return [*tables, *(f for f in lines if f.fields.get("pid") not in known)]


def sent(found: Collected) -> str:
    """Return the signal by which processes were ended from outside; empty if none was."""
    return next((_by(end) for end in _ends(found) if _by(end) in ("SIGTERM", "SIGINT", "SIGHUP")), "")


def only_stopped(found: Collected) -> bool:
    """True if all that is left is a stop from outside, and processes that ended by its signals."""
    ends = [f for f in found.facts if f.role not in (Role.FACT, Role.HINT)]
    others = (f for f in ends if f.role is not Role.STOP)
    stopped = any(f.role is Role.STOP for f in ends) or sent(found)
    return bool(stopped) and all(f.role is Role.EXIT and _by(f) in (*_SENT, "SIGKILL") for f in others)


def _code(f: Fact) -> int:
    """Return the exit code that a launcher reports; negative for a signal."""
    how, name = f.fields.get("how", ""), f.fields.get("signal", "")
    if how in _OF_TEXT:
        return _OF_TEXT[how]
    if name:
        return -(int(name[:4]) if name.isdecimal() else int(getattr(signal, name, 0)))
    last = how.rpartition(" ")[2]
    return int(last[:6]) if last.isdecimal() else (f.number("code") if "code" in f.fields else 1) or 0


def _followed(end: Fact, explained: set[int], waited: set[int], memory: bool) -> bool:
    """True if this process ended, or was ended, after another had failed."""
    if end.rank in explained or (_by(end) in _SENT and (waited or _by(end) != "SIGABRT")):
        return True
    if end.rank in waited or (_launcher(end) == "parent" and end.rank is None and waited):
        return True  # a process that has timed out was alive until then
    cleaned_up = _by(end) not in _BY_KERNEL or (_by(end) == "SIGKILL" and _launcher(end) == "srun" and not memory)
    return bool(explained) and not end.fields.get("what") and cleaned_up


def _of_nobody(end: Fact) -> bool:
    """True for the end of a process, perhaps a launcher, that no line names, and that the kernel does not report."""
    return end.name == "exit_unnamed" or (end.name == "exit_shell" and end.rank is None and _by(end) == "SIGKILL")


def _killed_by_launcher(ends: list[Fact], memory: bool) -> list[Fact]:
    """Return the processes that a launcher killed because another had failed before.

    A process with a fault in native code failed by itself; unless memory ran out, the others were killed after it. So were those
    that Hydra reports with one that ended in another way, or aborted MPI: it kills the rest of its job at once.
    """
    fault = not memory and any(_by(end) in _FAULTS for end in ends)
    at = sorted((end.who.at for end in ends if end.who.at and _by(end) not in _SENT), reverse=True)
    first_s = dict(at)  # by clock
    failed = (end for end in ends if _launcher(end) == "srun" and _by(end) not in ("SIGKILL", "SIGTERM"))
    first = min((end.order for end in failed), default=MAX_INT)
    own = (end for end in ends if _launcher(end) == "mpi" or _by(end) not in ("SIGKILL", "SIGTERM"))
    hydra = not memory and any(_launcher(end) in ("mpi", "mpirun") for end in own)
    killed = [end for end in ends if _by(end) == "SIGKILL"]
    return [
        end
        for end in killed
        if fault
        or (_launcher(end) == "mpirun" and hydra)
        or (_launcher(end) == "srun" and end.order > first)  # its lines are in the order of time
        or (end.who.at is not None and end.who.at[1] - first_s[end.who.at[0]] > AFTER_FIRST_S)
    ]


def _killed_by_ray(ends: list[Fact], memory: list[Fact]) -> list[Fact]:
    """Return the workers that Ray's memory monitor killed; where its line gives only the host, note which one it was.

    It names the one worker that was lost on that host.
    """
    out = []
    for f in (f for f in memory if "ray" in f.fields):
        lost = [end for end in ends if end.name == "lost_worker" and "pid" in end.fields]
        lost = [end for end in lost if end.fields.get("host") == f.fields.get("host")]
        if "pid" not in f.fields and len({end.fields["pid"] for end in lost}) == 1:
            f.fields["pid"], f.rank, f.inferred = lost[0].fields["pid"], lost[0].rank, True
        out += [end for end in lost if end.fields["pid"] == f.fields.get("pid")]
    return out


def _killed_as_it_hung(found: Collected, ends: list[Fact], senders: Mapping[str | None, Fact]) -> list[Fact]:
    """Return the processes that a person or a monitor killed, as the job hung before: none that the others missed had died by then."""
    stalls = [] if found.named("host_oom") else found.named("horovod_stall", "monitor_late")
    awaited = {q for f in stalls for q in numbers(f.fields["ranks"])}
    apart = bool(stalls) and bool(without_each_other(stalls))
    killed = [end for end in ends if stalls and _by(end) == "SIGKILL" and all(before(f, end) for f in stalls)]
    return [end for end in killed if apart or end.fields.get("pid") in senders or end.rank not in awaited]


def _meaning(end: Fact, memory: bool, others: bool, sender: Fact | None) -> Meaning:
    """Return what one end is reported as.

    Args:
        sender: The line by which another process sent the signal, and says why.
    """
    by, what = _by(end), end.fields.get("what", "")
    see_log = meanings.OWN_LOGS.get(_launcher(end), meanings.SEE_LOG)
    if _launcher(end) == "parent":
        return Meaning("rank_lost", "crashed", LOST, f"{OWN_LOG}; {meanings.KILLED}")
    if _launcher(end) == "mpi":
        why = shortened(end.fields.get("how", BY_PROGRAM), 160)
        return Meaning("rank_lost", "crashed", f"aborted MPI: {why}", remedy(why, see_log))
    if by and sender is not None and before(sender, end):
        text = f"was ended by {by}, which another process sent: `{shortened(sender.fields['what'], 160)}`"
        return Meaning("rank_lost", "killed", text, SENDER)
    if by == "SIGKILL" and memory:
        return Meaning("rank_lost", "killed", "was killed by SIGKILL: out of memory", MEANINGS["host_oom"].advice)
    if by and not (by == "SIGABRT" and others):  # it aborted after its message
        return Meaning("rank_lost", "killed", f"was killed by {by}", meanings.SIGNALS.get(by, see_log))
    if what:
        return Meaning("rank_lost", "crashed", f"raised {shortened(what, 160)}", remedy(what, meanings.GENERAL[1]))
    text = f"{EXIT_CODE} {_code(end)}, without an exception in the log"
    return Meaning("rank_lost", "crashed", text, see_log)


def with_a_reason(reasons: Iterable[Reason]) -> list[Reason]:
    """Return the ends that show what ended the process: a signal or an exception, not only an exit code."""
    return [r for r in reasons if not r.text.startswith(EXIT_CODE) and not r.text.endswith(BY_PROGRAM)]


def joined(reasons: list[Reason], ended: list[Reason]) -> list[Reason]:
    """If one failure names no rank and as many processes ended in its way, assign them to it. Return the rest.

    An exception ends a process with an exit code, a fault in native code by its signal; a parent that lost a worker after it does
    not see by which one.
    """
    own_error = [r for r in reasons if r.meaning.cause in ERRORS or any(f.message.of_process for f in r.facts)]
    nameless = [r for r in own_error if not r.ranks]
    # without those whose lines name a process, not only a node
    nameless = [r for r in nameless if not (r.unnamed and any(f.who.name not in ("", f.who.label) for f in r.facts))]
    if len(nameless) != 1:
        return ended
    own, first = nameless[0], nameless[0].facts[0]
    code = _OF_TEXT.get(first.fields.get("what", ""))
    signals = with_a_reason(ended)
    lost = [r for r in ended if r.text == LOST and first.name == "fatal" and before(first, r.facts[0])]
    fitting = [r for r in ended if r not in signals or (code and r.text.endswith(signal_name(-code)))] or lost
    ranks = {q for r in fitting for q in r.ranks}
    pids = {f.fields["pid"] for f in own.facts if "pid" in f.fields}
    here = {f.path for f in own.facts}
    of_file = {f.rank for r in fitting for f in r.facts if f.path in here and f.rank is not None}
    number = len(pids) or sum(not f.message.of_driver for f in own.facts)
    if number == len(of_file):  # each node's launcher writes the errors of its own ranks into its own log
        ranks = of_file
    if number != len(ranks):
        times = {q: t for r in fitting for q, t in r.times.items()}
        first_ones = [q for q, t in times.items() if t == min(times.values())]
        if len(own.facts) == 1 and len(first_ones) == 1 < len(times) and all(times.values()):
            # the launcher saw it end before all others
            own.ranks, own.inferred, own.guessed = {*first_ones}, True, True
        if len(ranks) > 1 and not own.ranks:
            failed = rank_list(sorted(ranks))
            own.after += f"; the launcher reports that {failed} failed, and the log does not show whose error it is"
        return ended
    if fitting == lost:
        own.inferred = own.guessed = True
        own.facts += [f for r in lost for f in r.facts]
    own.ranks |= ranks
    own.hosts |= {f.fields["host"] for r in fitting for f in r.facts if f.rank in ranks and "host" in f.fields}
    for r in fitting:
        r.ranks -= ranks
    return [r for r in ended if r not in fitting or r.ranks]
