"""How processes ended, by their launchers: which failed first, and which only followed."""

from __future__ import annotations

import signal

from distdiag.diagnosis.text.phrases import shortened
from distdiag.sources.logs import advice
from distdiag.sources.logs.collect import Collected
from distdiag.sources.logs.failures import Reason
from distdiag.sources.logs.patterns import Role
from distdiag.sources.logs.tables import Exit
from distdiag.terms.untrusted import MAX_RANKS, is_rank

_HANDLED = ("SIGTERM", "SIGINT", "SIGABRT", "SIGHUP")  # signals of a rank that was ended, or aborted by its watchdog
_OF_TEXT = {"Out Of Memory": -9, "Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6}
EXIT_CODE = "ended with exit code"
_BY_KERNEL = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")


def of_exits(found: Collected, explained: set[int], waited: set[int]) -> list[Reason]:
    """Return the reasons that launchers give for ranks that left no message of their own.

    Args:
        explained: Ranks whose failure is known.
        waited: Ranks that timed out or lost a connection: their own end follows from that.
    """
    by_how: dict[tuple[str, str], Reason] = {}
    memory = [e for e in found.events if e.name == "host_oom"]
    exits = [*found.exits, *_single(found, {x.pid for x in found.exits})]
    named = any(x.rank is not None for x in exits)
    for i, x in enumerate(exits):
        if (
            x.rank in explained
            or (x.rank is None and explained and named)
            or _followed(x, explained, waited, bool(memory))
        ):
            continue
        meaning = _meaning(x, bool(memory))
        r = by_how.setdefault((meaning.cause, meaning.text), Reason(meaning, meaning.text, meaning.advice, i))
        r.paths.append(f"{x.path}:{x.line}")
        if x.rank is not None:
            r.ranks.add(x.rank)
            r.times.setdefault(x.rank, x.time)
            r.hosts |= {x.host} if x.host else set()
        else:
            where = f"local rank {x.local}" if x.local is not None else f"process {x.pid}" if x.pid else "a process"
            r.unnamed.append(where + (f" on {x.host}" if x.host else ""))
    if memory and not by_how and not explained:
        m = advice.MEANINGS["host_oom"]
        r = by_how["killed", m.text] = Reason(m, m.text, m.advice, 0.0)
        r.events += memory
        r.ranks |= {e.rank for e in memory if e.rank is not None}
    return list(by_how.values())


def _followed(x: Exit, explained: set[int], waited: set[int], memory: bool) -> bool:
    """True if this process ended, or was ended, after another had failed."""
    how = _signal(x)
    if how in _HANDLED and (waited or how != "SIGABRT"):
        return True
    if x.rank in waited and how not in _BY_KERNEL:
        return True
    cleaned_up = how not in _BY_KERNEL or (how == "SIGKILL" and x.launcher == "srun" and not memory)
    return bool(explained) and not x.what and cleaned_up


def _meaning(x: Exit, memory: bool) -> advice.Meaning:
    """Return what one end is reported as."""
    how = _signal(x)
    if x.launcher == "ray":
        return advice.Meaning(
            "rank_lost", "crashed", "was lost by Ray: killed, or crashed in native code", advice.KILLED
        )
    if how == "SIGKILL" and memory:
        return advice.Meaning(
            "rank_lost", "killed", "was killed by SIGKILL: out of memory", advice.MEANINGS["host_oom"].advice
        )
    if how:
        return advice.Meaning("rank_lost", "killed", f"was killed by {how}", advice.SIGNALS.get(how, advice.SEE_LOG))
    if x.what:
        return advice.Meaning("rank_lost", "crashed", f"raised {shortened(x.what, 160)}", advice.advice_for(x.what, 1))
    text = f"{EXIT_CODE} {x.code}, without an exception in the log"
    return advice.Meaning("rank_lost", "crashed", text, advice.SEE_LOG)


def with_a_reason(reasons: list[Reason]) -> list[Reason]:
    """Return the ends that show what ended the process: a signal or an exception, not only an exit code."""
    return [r for r in reasons if not r.text.startswith(EXIT_CODE)]


def _single(found: Collected, known_pids: set[int | None]) -> list[Exit]:
    """Return exits that launchers report on one line, if no table has them."""
    out: list[Exit] = []
    for e in found.events:
        if e.role is not Role.EXIT or e.name == "host_oom":
            continue
        pid = e.fields.get("pid", "")
        if pid.isdecimal() and int(pid[:18]) in known_pids:
            continue
        base = Exit("line", path=str(e.path), line=e.line, host=e.fields.get("host", ""))
        if e.name == "exit_tasks":
            how = e.fields["how"]
            code = _OF_TEXT.get(how)
            base.launcher = "srun"
            base.code = code if code is not None else int(how.rpartition(" ")[2][:6])
            tasks = [None] if found.torchrun else _tasks(e.fields["tasks"])  # a node, if torchrun started the ranks
            out += [Exit("srun", t, None, base.host, base.code, path=base.path, line=base.line) for t in tasks]
            continue
        if e.name == "exit_shell":
            base.code, base.pid = _OF_TEXT[e.fields["how"]], int(pid[:9])
            out.append(base)
            continue
        if e.name == "ray_worker":
            base.launcher, base.code, base.pid = "ray", 1, int(pid[:9]) if pid else None
            out.append(base)
            continue
        if "r" in e.fields:
            base.rank = int(e.fields["r"][:6])
        elif e.rank is not None:
            base.rank = e.rank
        base.local = int(e.fields["local"][:6]) if "local" in e.fields else None
        name = e.fields.get("signal")
        if name:
            number = int(name[:4]) if name.isdecimal() else getattr(signal, name, 0)
            base.code = -int(number)
        else:
            base.code = int(e.fields.get("code", "1")[:9])
        if base.code:
            out.append(base)
    return out


def _tasks(text: str) -> list[int]:
    """Return the tasks in `1-3`, `[0,2]`."""
    out: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.strip("[]").partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(first) < 7 and len(last) < 7:
            out += range(int(first), min(int(last or first), int(first) + 4096) + 1)
        if len(out) > MAX_RANKS:
            break
    return [t for t in out if is_rank(t)]


def _signal(x: Exit) -> str:
    """Return the name of the signal that ended a process; empty if it exited."""
    code = x.code or 0
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"
