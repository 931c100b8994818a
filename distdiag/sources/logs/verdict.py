"""Judges the logs of a job that distdiag has not recorded: `diagnose_logs(FILES)` returns findings.

What distdiag itself printed into the log is the verdict: it saw the job. Else, first comes what torch reports about several ranks;
then ranks that raised, were killed, or whose GPU failed; then who waited for whom; then starts that failed, what stopped the job from
outside, lost connections, and exit codes. A later kind is reported only if no earlier one explains it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from distdiag import guard
from distdiag.diagnosis.model.findings import NO_ERROR, STOPPED_BY, Finding, Report, Severity, State, rank_list
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, NO_PROGRESS_SINCE, at, shortened
from distdiag.errors import DistdiagError
from distdiag.sources.logs import events, exits, failures, hosts, past, reports, rows, slow, timeouts
from distdiag.sources.logs.build import ENDED, finding, some
from distdiag.sources.logs.collector import Collector
from distdiag.sources.logs.ends import WHOLE
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.files import find_logs, is_empty, left_out
from distdiag.sources.logs.gpu_memory import memory_of_others
from distdiag.sources.logs.join import WAITED, before, earlier, join, of_announced, same_port
from distdiag.sources.logs.lines import wrapped_at
from distdiag.sources.logs.meanings import AFTER_CAUGHT, STOPS, advice_on_stop
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.patterns import MEANINGS, MESSAGES
from distdiag.sources.logs.writers import Writer, time_of, writer
from distdiag.terms.signals import signal_name
from distdiag.terms.units import counted, rough_time
from distdiag.terms.untrusted import MAX_RANKS

MAX_FINDINGS = 6
SHOWN_RUNS = 5  # that distdiag recorded
SHOWN_SITES = 8  # of interrupted ranks
# words of the exception by which a rank ends after such a report
_REPORTED = (("unused_parameters", "finished reduction"), ("mismatch", "Cannot apply desired operation"))
HUNG_S, HUNG_STEPS = 600.0, 20.0  # without a line, at least and as a multiple of the longest step, a job hangs
LIMITS = guard.Limits(cpu_s=12.0, cpu_s_per_byte=2e-6, memory_per_byte=1)  # beyond those of `lines.Bounds`


def diagnose_logs(given: Sequence[str], paths: Sequence[Path] | None = None) -> Report | None:
    """Return what the logs show; None if none of the files is a log.

    They are read and judged in a child process with limits, as dumps are: a file that crashes it is listed,
    and the others count.

    Args:
        paths: The log files, if they are known already.

    Raises:
        DistdiagError: the logs together exceed the limits, or their analysis failed.
    """
    logs = list(paths) if paths is not None else find_logs(given)
    if not logs:
        return None

    def work(announce: guard.Announce, refused: Mapping[str, str], only: str | None) -> Report:
        return judge_logs(given, logs if only is None else [Path(only)], announce, refused)

    try:
        report = guard.judged(work, lambda: map(str, logs), LIMITS, Report)
    except guard.Died as e:
        raise DistdiagError(
            f"the logs cannot be judged together: {e.reason}", "give fewer of them, or those of one launch"
        ) from e
    return replace(report, notes=(*report.notes, *left_out(given, logs)))


def _collected(reader: Collector, announce: guard.Announce, refused: Mapping[str, str] | None) -> Collected:
    """Return what files contain, without the failures after which the job went on."""
    found = reader.read(announce, refused)
    earlier, found.past = found.past, []  # ends of containers that were started again
    found = join(found)
    found.facts, over = past.split(found)
    _drop_late_stop(found)
    found.facts += _never_started(found)
    roles = {f.role for f in found.facts}
    # without another cause, they are what the others met
    met = not roles.isdisjoint(WAITED) and roles.isdisjoint((Role.CAUSE, Role.EXIT))
    (found.facts if met else found.past).extend(earlier)
    found.past += (f for f in over if f.name != "store_waiting")  # torch's line of information, no failure
    past.name_shared_stores(found)
    found.facts = [f for f in found.facts if f.name != "oom_caught" or f.line > (found.ends[f.path].stepped_at or 0)]
    found.ranks |= {rank for _, rank in found.losses if rank is not None}
    found.ended = bool(found.late_stop) or _ended_well(found)
    failed = {f.path for f in found.facts}
    for path, end in found.ends.items():
        errors = [number for p, number, _ in found.unknown if p == path]
        # an error, and no progress after it: such a server shuts down, too
        served = "server" in end.well and not end.fatal and all(map(end.after, errors))
        before = end.over[0] if end.over and path not in failed else 0
        if line := before or end.whole or (end.well["server"] if served else 0):
            found.well[path] = line
        found.ended |= served and len(found.files) == 1
    return found


def _ended_well(found: Collected) -> bool:
    """True if each file with progress, and one at least, ends with words that the job, its launcher or that file's part ended well."""
    ended, ranks = set[Path](), max(len(found.ranks), found.world_size or 0)
    for path, end in found.ends.items():
        last = max((number for p, number, _ in found.unknown if p == path), default=0)
        lines = [line for scope, line in end.well.items() if scope in WHOLE]
        if end.quits and max(Counter(kind for kind, _ in end.quits).values()) >= ranks > 1:  # all of them have
            lines.append(max(end.quits.values()))
        ended |= {path} if any(line >= last and not end.moved_after(line) for line in lines) else set()
    return bool(ended) and ended >= {path for path, end in found.ends.items() if end.progress}


def _drop_late_stop(found: Collected) -> None:
    """Drop what stopped the job from outside after it had ended well: that is no failure."""
    if not exits.only_stopped(found):
        return
    stops = sorted((f for f in found.facts if f.role in (Role.STOP, Role.EXIT)), key=lambda f: f.role is not Role.STOP)
    done = [found.ends[f.path].finished for f in stops]
    of_ranks = [end.finished for end in found.ends.values() if end.progress]
    if found.steps and (all(done) or (of_ranks and all(of_ranks))):
        found.late_stop = stops[0]
        found.facts = [f for f in found.facts if f not in stops]


def _never_started(found: Collected) -> list[Fact]:
    """Return the fact that Slurm started fewer tasks than the job has ranks: those that came wait for the others."""
    came, failed = found.announced, any(f.role in (*WAITED, Role.CAUSE, Role.START, Role.EXIT) for f in found.facts)
    if found.steps or failed or found.late_stop is not None or not came or len(came) != found.tasks:
        return []
    fields = {"joined": str(len(came)), "expected": str(found.world_size or 0)}
    fact = dataclasses.replace(came[max(came)], name="clients", role=Role.START, fields=fields)
    of_announced(found, fact)
    return [fact] if fact.fields.get("launched") else []


def judge_logs(
    given: Sequence[str],
    logs: Sequence[Path],
    announce: guard.Announce = lambda _step, _bytes: None,
    refused: Mapping[str, str] | None = None,
) -> Report:
    """Return what log files show; in this process."""
    found = _collected(Collector(logs), announce, refused)
    if not found.late and (wrapped := {p: n for p in logs if (n := wrapped_at(p)) is not None}):
        joined = _collected(Collector(logs, wrapped), announce, refused)
        if len(joined.facts) + len(joined.past) > len(found.facts) + len(found.past):  # it was wrapped: more is known
            found = joined
    findings, text = judge(found)
    if found.steps and not found.recorded:  # the cost counts from the failure on
        findings = [replace(f, cost=NO_PROGRESS_SINCE) if f.cost == NO_PROGRESS_MADE else f for f in findings]
    findings = [_after_caught(hosts.with_reports(f, found), found) for f in findings]
    found.ranks |= {w.rank for f in findings for w in (*f.where, *f.waiting) if w.file}
    error = any(f.severity == Severity.ERROR for f in findings)
    recorded = bool(found.recorded) and all(r.ended for r in found.recorded.values())
    sizes = [found.world_size or 0, *(f.number("expected") or 0 for f in found.named("clients"))]
    world = max(n for n in sizes if n <= MAX_RANKS) or None  # as far as the log gives it
    all_ended = found.ended and not 0 < len(found.of_file) < (world or 0)  # of logs of single ranks, all
    lasted = "ended the job" if any(f.back is None for f in found.past) else "lasted"
    unjudged = f"{NO_ERROR}{lasted if found.past else 'distdiag knows'} in {counted(len(found.files), 'log')}"
    return Report(
        run=", ".join(map(str, given)),
        state=State.FAILED if error or text else State.ENDED if recorded or found.ended else State.RUNNING,
        world_size=world,
        ranks_seen=len(found.ranks),
        findings=tuple(findings),
        notes=(
            *([] if findings else _interrupted(found)),
            *([] if findings else advice_on_stop(text or "", "\n".join(f.text for f in found.facts))),
            *_notes(found, findings, bool(findings or text)),
        ),
        unjudged=None if findings or text or recorded or all_ended else unjudged,
        state_text=text,
    )


def stopped(logs: Report) -> bool:
    """True if logs show that calls of the job did not end: those of its dumps are no longer on their way."""
    waits = ("timeout", "stall", "deadlock", "mismatch")
    return any(f.severity == Severity.ERROR and f.kind in waits for f in logs.findings)


def failures_first(dumps: Report, logs: Report) -> Report:
    """Return one report: the logs' first failures, then the dumps' findings; all of the logs' errors if the dumps show none."""
    none = not any(f.severity == Severity.ERROR and f.kind != "recorder" for f in dumps.findings)
    lost = [f for f in logs.findings if f.kind == "rank_lost" and f.cause in ("killed", "crashed") and f.culprits]
    lost += [f for f in logs.findings if none and f.severity == Severity.ERROR]
    own = tuple(f for f in logs.findings if f in lost or f.cause == "configuration" or f.kind == "gpu")
    failed = {r for f in own for r in f.culprits}
    silent = [f for f in dumps.findings if f.kind == "rank_lost" and f.cause == "silent"]
    rest = tuple(f for f in dumps.findings if f not in silent or not failed.issuperset(f.culprits))
    ended = [f for f in own if f.kind == "rank_lost"] or (not dumps.findings and logs.state == State.ENDED)
    state = dumps.state if not own or dumps.state not in (State.RUNNING, State.WAITING) else State.DEGRADED
    state = logs.state if ended and state in (State.RUNNING, State.DEGRADED) else state
    unneeded = ("not read", *(["every recorded operation has completed"] if ended else []))
    left_none = [f"{rank_list(f.culprits)} left no dump" for f in silent if f not in rest]
    return replace(
        dumps,
        state=state,
        world_size=dumps.world_size or logs.world_size,
        findings=(*own, *rest),
        notes=(*left_none, *(n for n in (*dumps.notes, *(logs.notes if own else ())) if not n.startswith(unneeded))),
        state_text=logs.state_text if own else dumps.state_text,
    )


def judge(found: Collected) -> tuple[list[Finding], str | None]:
    """Return (findings, what stopped the job from outside)."""
    printed = {(f.kind, f.message): f for r in found.recorded.values() for f in r.findings()}
    if printed:
        return sorted(printed.values(), key=lambda f: f.severity != Severity.ERROR)[:MAX_FINDINGS], None
    waited: dict[int, Fact] = {}
    for f in found.facts:
        if (f.role in WAITED or f.name == "clients") and f.rank is not None:
            waited.setdefault(f.rank, f)
    reported = reports.findings(found)
    own, late = failures.of_messages(found)
    own = hosts.explained(events.merged(own, found), found)
    for words in (text for f in reported for kind, text in _REPORTED if f.kind == kind):
        own = [r for r in own if not all(words in f.text for f in r.facts)]
    explained = {q for r in own for q in r.ranks} | {q for f in reported for q in (*f.culprits, *f.victims)}
    others = bool(reported) or any(not failures.only_reports(r) for r in own)
    ends = exits.of_exits(found, own, explained, {*waited}, others)
    if exits.with_a_reason(ends):
        own = [r for r in own if not failures.only_reports(r)]
    ends = exits.joined(own, ends)
    own += exits.with_a_reason(ends)
    codes = hosts.explained([r for r in ends if r not in own], found)
    shown = [*reported, *(failures.of_reason(r, found, waited) for r in own[:MAX_FINDINGS])][:MAX_FINDINGS]
    follow = bool(own) and not reported and all(map(failures.follows, own))
    if shown and not follow:
        return shown, None
    waits = reports.of_versions(found) or _network_first(found) or rows.first_of(rows.LATE_ROWS, found)
    waits = waits or reports.analyzed(found, timeouts.findings(found))
    if found_here := _with_late(waits, late) or rows.first_of(rows.START_ROWS, found) or reports.derived(found):
        return found_here[:MAX_FINDINGS], None
    if not follow and (stop := _stopped(found)) is not None:
        ranks = sorted(waited)
        lost = f"; {rank_list(ranks)} {failures.in_what([waited[q] for q in ranks])}" if ranks else ""
        return _hung(found) or _nan(found), stop + lost
    lost = rows.first_of(rows.LOST_ROWS, found) or _nan(found, bool(codes))
    lost = lost or shown
    for r in codes:
        r.after += _printed(found, r)
    lost = lost or [failures.of_reason(r, found, waited) for r in codes[:MAX_FINDINGS]]
    lost = lost or _hung(found) or _last_error(found)
    signal = "" if lost else exits.sent(found)
    return (lost or slow.findings(found))[:MAX_FINDINGS], _stopped_by(signal) if signal else None


def _network_first(found: Collected) -> list[Finding]:
    """Return the finding on a network that failed for ranks before any other rank timed out, or where none did: those waited for them."""
    lost = {f.rank for f in found.named("ib", "efa")} - {f.rank for f in found.named("timeout")} - {None}
    timed = [f for f in found.facts if f.role in WAITED and f.who.at is not None]  # a repeated text may have no time
    all_waits = [f for f in found.facts if f.role is Role.WAIT]
    waits, then = [f for f in timed if f.role is Role.WAIT and f.rank not in lost], ""
    ranks = sorted({f.rank for f in waits if f.rank is not None})
    if waits and any(f.rank in lost and all(earlier(f, w) for w in waits) for f in timed):
        in_what = failures.in_what([f for f in waits if f.name == "timeout"] or waits)
        then = f"; {rank_list(ranks) if ranks else 'others'} then {in_what}"
    elif not all_waits or any(f.rank not in lost for f in all_waits):  # else the watchdogs report "an error or timeout"
        return []
    rdma = rows.first_of([row for row in rows.LOST_ROWS if row.names in ("ib", "efa")], found)
    return [replace(f, message=f.message + then, victims=tuple(sorted({*f.victims, *ranks}))) for f in rdma]


def _with_late(waits: list[Finding], late: list[Fact]) -> list[Finding]:
    """Return the findings on timeouts; the first one names the failures that came after them."""
    if not waits or not late:
        return waits
    f = late[0]
    who = f"rank {f.rank}" if f.rank is not None else f.who.name or "a process"
    what = failures.text_of(f, MEANINGS[f.name])
    message = f"{waits[0].message}; later {who} {what}{at(f.site)}, which is not shown to be the cause"
    return [replace(waits[0], message=message), *waits[1:]]


def _after_caught(finding: Finding, found: Collected) -> Finding:
    """Return a finding on ranks that parted from the others, with the exception after which the one culprit, and it alone, went on."""
    caught = [f for f in found.past if f.name == "exception" and f.doubtful and f.rank is not None]
    for f in found.named("oom_caught"):
        if f.rank is None and len(found.on_host) < 2:
            f.rank = f.number("gpu") or None  # with one GPU visible to each rank, all call it GPU 0
        caught.append(f)
    waits = [w for w in found.facts if w.role in WAITED and w.rank is not None]
    alone = len(finding.culprits) == 1 and {f.rank for f in caught} == {*finding.culprits}
    if found.recorded or finding.kind not in ("mismatch", "timeout", "stall") or not alone:
        return finding
    if any(before(w, caught[-1]) for w in waits):
        return finding
    f = caught[-1]  # the last one before its calls differ
    found.past = [p for p in found.past if p not in caught]
    message = f"rank {f.rank} {failures.text_of(f, MEANINGS[f.name])}{at(f.site)} ({f.of_line}) and went on, which is the likely first cause: {finding.message}"
    evidence = (f"{f.path}:{f.line}", *finding.evidence)
    advice = f"{AFTER_CAUGHT if f.name == 'exception' else MEANINGS[f.name].advice}; else {finding.advice}"
    return replace(finding, message=message, advice=advice, evidence=evidence)


def _hung(found: Collected) -> list[Finding]:
    """Return the finding on a job that had made no progress for long when the scheduler stopped it, or its log ends."""
    stops = {f.path: f for f in found.named("cancelled")}
    for path, pace in ((path, end.pace) for path, end in found.ends.items() if end.pace is not None):
        stop = stops.get(path)
        end = time_of(stop.fields["when"]) if stop is not None else None
        end_s = end[1] if end is not None and end[0] == "iso" else pace.end_s
        if (silent_s := end_s - pace.last_s) <= max(HUNG_S, HUNG_STEPS * pace.longest_s):
            continue
        did = "made no step" if pace.end_s > pace.last_s else "wrote nothing"
        until = " before Slurm stopped it" if stop is not None else ""
        message = f"the job {did} for {rough_time(silent_s)}{until}, after a line on its steps every {rough_time(pace.longest_s)} at most"
        if not pace.retries or len(found.files) > 1:
            if stop is None:
                continue
            message += ": it hung, and the log does not show where"
            advice = f"more time does not help: take the stacks of all ranks while it hangs (`py-spy dump --pid PID`), leave TORCH_NCCL_ASYNC_ERROR_HANDLING on, and keep {timeouts.DUMPS}"
            return [finding("stall", "unknown", [stop], message, advice)]
        number, text = pace.retries[-1]
        who = writer(text)
        # by its host, which srun's lines may show with its ranks
        nth = who.process.rpartition("[")[2].removesuffix("]")
        if who.rank is None and nth.isdecimal() and int(nth) in found.on_host.get(who.host, ()):
            who.rank = int(nth)
        name = who.name if who.rank is None else f"rank {who.rank}" + f" on {who.host}" * bool(who.host)
        message = f"{name} alone wrote after the last step, {len(pace.retries):,} times that it tries again (line {number:,}: `{shortened(text, 200)}`), and the others most likely wait for it: {message}"
        advice = "bound these retries (their number, or a time limit), so that this rank fails or takes another source; see whether what it asks for can be reached from its host"
        advice += "; more time does not help" * (stop is not None)
        fact = Fact("retries", Role.CAUSE, {}, who, path, number, 0, text, rank=who.rank)
        culprits = () if who.rank is None else (who.rank,)
        severity = Severity.ERROR if stop is not None or exits.sent(found) else Severity.WARNING
        return [finding("stall", "unknown", [fact], message, advice, culprits=culprits, severity=severity)]
    return []


def _printed(found: Collected, r: failures.Reason) -> str:
    """Return the last error that a process printed before its launcher reported an exit code, and no row knows."""
    end = r.facts[0]
    fatal: dict[tuple[Path, int | None], tuple[int, str]] = {}
    for path, own in found.ends.items():
        for key, line in own.fatal.items():
            fatal.setdefault((path, found.named_rank(path, *key)), line)
    for (path, rank), (number, text) in fatal.items():
        if (rank in r.ranks or rank is None) and (path != end.path or number < end.line):
            whose = f"rank {rank} printed" if rank is not None else "the log has"
            before = "before that, " if path == end.path else ""
            return f"; {before}{whose} `{shortened(text, 160)}`, which may be the reason"
    return ""


def _last_error(found: Collected) -> list[Finding]:
    """Return the finding on a log whose last lines are an error that no row knows."""
    if found.past or found.recorded:
        return []
    stop = found.late_stop
    for path, end in found.ends.items():
        number, text, who = end.error or (0, "", Writer())
        if not number or end.after(number) or not end.well.keys() <= {"server"}:
            continue
        if stop is not None and path == stop.path and number >= stop.line:
            continue
        fact = Fact("error", Role.CAUSE, {}, who, path, number, 0)
        rank = who.rank if who.rank is not None else found.of_file.get(path)
        whose = f"the log of rank {rank}" if rank is not None else f"the log ({who.name})" if who.name else "the log"
        return [finding("rank_lost", "crashed", [fact], f"{whose} ends with an error: {shortened(text, 200)}",
                        "distdiag does not know this message: read it, and the lines before it", victims=[rank] if rank is not None else (),
                        cost=ENDED)]  # fmt: skip
    return []


def _nan(found: Collected, failed: bool = False) -> list[Finding]:
    """Return the finding on a loss that became NaN; one NaN counts only if the job failed."""
    losses = found.losses
    nan = {key: loss for key, loss in losses.items() if loss.times > 1 - failed}
    if not nan:
        return []
    first = min(nan, key=lambda key: (-nan[key].times, nan[key].line))
    ranks = {found.of_file.get(key[0]) if key[1] is None else key[1]: nan.get(key) for key in losses}
    if len(nan) < len(losses):
        blamed = [r for r, loss in ranks.items() if loss is not None]
    else:
        most = [r for r, loss in ranks.items() if loss is not None and loss.times == nan[first].times]
        blamed = most if len(most) < len(ranks) and all(loss.finite for loss in nan.values()) else []
    culprits = [] if None in blamed else [r for r in blamed if r is not None]
    path, line = first[0], nan[first].line
    who = f" on {rank_list(sorted(culprits))}{' first' if len(nan) == len(losses) else ''}" if culprits else ""
    what = Fact("nan", Role.CAUSE, {}, Writer(), path, line, 0)
    step = f" (step {nan[first].step})" if nan[first].step else ""
    return [finding("nonfinite", "loss", [what], f"{nan[first].shown}{who}, from line {line:,} of {path.name}{step} on",
                    "look at the batch and the loss before it, lower the learning rate, clip gradients, and see the loss scale of fp16; a run that "
                    "distdiag records names the rank and the step where it began", culprits=culprits,
                    cost="" if failed else "what was trained since then is lost")]  # fmt: skip


def _interrupted(found: Collected) -> list[str]:
    """Return where the ranks were when Ctrl-C interrupted them, by the first traceback of each: nobody is blamed for that."""
    sites: dict[str, set[int | None]] = {}
    for f in found.named("interrupted"):
        if f.site is not None and (f.rank is None or f.rank not in set[int | None]().union(*sites.values())):
            sites.setdefault(at(f.site), set()).add(f.rank)
    known = {site: {q for q in ranks if q is not None} for site, ranks in sites.items()}
    each = [(rank_list(q) if (q := known[site]) else "a process") + site for site in [*sites][:SHOWN_SITES]]
    return [f"when Ctrl-C came: {'; '.join(each)}"] if each else []


def _stopped(found: Collected) -> str | None:
    """Return what ended the job from outside, if a line says so: the scheduler before the signal that it sent."""
    signals = found.named("terminated") or found.named("interrupted")
    stops = [f for f in found.facts if f.role is Role.STOP and f.name not in ("terminated", "interrupted")]
    for f in stops or signals:
        pod = f.fields.get("pod") or (f.who.process if f.name == "evicted" else "")
        rank = found.rank_of.get((pod, ""))
        node = f.fields.get("node", "")
        ranks = sorted(found.on_host.get(node, ()))
        of = f" of node {node}" + (f" ({rank_list(ranks)})" if ranks else "") if node else ""
        of = f" {found.node_of[pod]}" if pod in found.node_of else of
        return _stop(f, (f"pod {pod}" if pod else "the pod") + (f" (rank {rank})" if rank is not None else ""), of)
    return None


def _stop(f: Fact, pod: str = "the pod", of: str = "") -> str:
    """Return what a line says of a stop from outside.

    Args:
        pod: The pod that was stopped.
        of: The node of it, after `node`; or the node that was taken, as `of node n1 (rank 2)`.
    """
    fields = {key: value.lower() if key == "why" else value for key, value in f.fields.items()}
    fields |= {"pod": pod, "of": of}
    if f.name == "terminated":
        return _stopped_by(fields.get("name") or signal_name(f.number("signal") or 0))
    return f"{STOPPED_BY} {f.message.stop.format_map({'why': 'cancelled'} | fields)}"


def _stopped_by(signal: str) -> str:
    return f"{STOPPED_BY} {STOPS.get(signal, MESSAGES['terminated'].stop).format(name=signal)}"


def _of_the_past(past: list[Fact], facts: list[Fact], failed: bool) -> str:
    """Return a note on failures after which the job went on, and `failed` later or not."""
    went_on = "went on" if failed else "went on or ended well"
    e = min(past, key=lambda f: (f.role is not Role.CAUSE, f.foreign))
    if e.foreign:
        process = f"process {e.fields.get('pid', '')} ({e.fields['comm']})"
        return f"{e.of_line} is about {process}, none of this job's processes, and the job {went_on}"
    if e.back is not None:
        down = [f.line for f in (*past, *facts) if f.name == e.name and same_port(f, e) and f.line > e.back.line]
        again = f", and lost again on line {min(down):,}" if down else ""
        return f"{_in_short(e)}; it was active again on line {e.back.line:,}{again}"
    ends = [f for f in past if f.path == e.path and f.line > e.line]
    if any(f.message.of_ranks or (f.role is Role.EXIT and f.rank == e.rank is not None) for f in ends):
        return f"{_in_short(e)}, by which a run in this log ended; the job {went_on} in a later one"
    if e.of_host or e.name in ("port_error", "horovod_stall"):
        return f"{_in_short(e)}; the job {'began later' if e.early else went_on + ' after that'}"
    if e.role in (Role.EXIT, Role.STOP) or e.uncaught:
        return f"{_in_short(e)}; the job {went_on} without it, or was started again"
    return f"{_in_short(e)}, and the job {went_on}: it was probably caught, retried or quoted ({counted(len(past), 'such line')})"


def _in_short(f: Fact) -> str:
    """Return who failed, or what stopped the job, and on which line."""
    if f.role is Role.STOP:
        return f"{_stop(f)} ({f.of_line})"
    if f.name == "horovod_stall":  # its writer is one that waited
        return f"others waited in Horovod for rank {f.fields['ranks']} on {f.of_line}"
    rank = next((r for r in (f.rank, f.who.rank, f.number("r")) if r is not None), None)
    node = f"node {f.fields['node']}" if "node" in f.fields else ""
    known = MEANINGS.get(f.name)
    nobody = known.subject if known else "a process"
    who = f"rank {rank}" if rank is not None else node or f.who.name or nobody
    text = shortened(f.text.strip(), 120)
    if known is None and who == nobody:
        return f"{f.of_line} has `{text}`"
    what = failures.text_of(f, known) if known else f"printed `{text}`"
    says = who == "a process" and not f.message.of_node
    return f"{f.of_line} says that {who} {what}" if says else f"{who} {what} on {f.of_line}"


def _notes(found: Collected, findings: Sequence[Finding], judged: bool) -> list[str]:
    notes = [f"{path}: {reason}" for path, reason in found.bad[:5]]
    if not (judged or found.names_a_job()):
        notes.append("no line names a rank, a launcher or an error: this does not look like a log of a distributed job")
    of_file = found.of_file
    written = {of_file.get(p) for p in found.files if not is_empty(p)}
    if judged:  # then only those of the culprits matter
        written |= set(of_file.values()) - {r for f in findings for r in f.culprits}
    if empty := [str(p) for p in found.files if is_empty(p) and of_file.get(p) not in written]:
        notes.append(f"empty, so its process has written nothing: {some(empty)}")
    known = any(f.kind == "nonfinite" for f in findings)
    for (path, _), loss in [] if known else [x for x in found.losses.items() if x[1].times][:1]:
        notes.append(f"{path}: the last loss that it shows is NaN (since line {loss.line:,})")
    runs = {r.run or path: (path, r) for path, r in found.recorded.items()}
    for path, printed in list(runs.values())[:SHOWN_RUNS]:
        command = f": `distdiag diagnose {printed.run}` has the whole verdict" if printed.run else ""
        where = f"line {printed.line:,}" if len(found.files) == 1 else f"{path.name} line {printed.line:,}"
        notes.append(f"distdiag recorded {'this job' if len(runs) == 1 else 'a job'} ({where}){command}")
    if (jobs := sum(r.run is not None for _, r in runs.values())) > 1:
        notes.append(f"these logs are of {jobs:,} recorded runs: give those of one run for its verdict alone")
    notes += slow.notes(found) if all(f.severity != Severity.ERROR for f in findings) else []
    notes += [] if judged else hosts.notes(found)
    for warned in found.named("nccl_warning")[:1]:
        notes.append(f"NCCL reports on {warned.of_line}: {shortened(warned.fields['what'], 160)}")
    if (late := found.late_stop) is not None:
        notes.append(f"after the job had ended well: {_in_short(late)}; let the script exit when its work is done")
    if past := [f for f in found.past if not found.ends[f.path].tested and not (judged and f.foreign)]:
        notes.append(_of_the_past(past, found.facts, judged))
    for path, last in [] if judged else list(found.well.items())[:1]:
        after = [f"{number:,}" for p, number, _ in found.unknown if p == path and number > last]
        errors = f"; lines that look like errors come after it: {', '.join(after)}" if after else ""
        notes.append(f"line {last:,} of {path.name} says that the job ended well{errors}")
    if (unknown := [line for line in found.unknown if line[0] not in found.well]) and not judged:
        several = len(found.files) > 1
        lines = "; ".join(f"line {n:,}{f' of {p.name}' * several}: {shortened(text, 120)}" for p, n, text in unknown)
        other = "other " * bool(found.past)
        notes.append(f"no {other}message that distdiag knows; the last lines that look like errors: {lines}")
    if found.left_out:
        how = f": {'; '.join(map(_in_short, found.before[-2:]))}" if found.before else ""
        ended = "ended" if any(f.role is Role.STOP for f in found.before) else "failed"
        apart = "; nothing shows that it follows from them" if found.before and ended == "failed" else ""
        notes.append(
            f"judged: the last run in the log{' that failed by itself' * bool(found.followed)}; {counted(found.left_out, 'run')} before it (restarted, or appended) {ended}, too{how}{apart}"
        )
    if found.followed:
        how = "; ".join(f"{_in_short(f)}{memory_of_others(f, found).text}" for f in found.followed[:2])
        notes.append(
            f"judged: an attempt that failed by itself; {counted(len(found.followed), 'later one')} failed by what it had left, so end its processes before a restart: {how}"
        )
    if not found.recorded:
        ended = "if it ended, `sacct -j JOB -o state,exitcode`, `kubectl describe pod` or `dmesg -T` shows how"
        hangs = f"if the job hangs, `py-spy dump --pid PID` shows where each rank is; {ended}; "
        shows = "it shows what was printed, not what each rank did"
        seen = "" if judged or found.well or found.ended else hangs
        notes.append(f"read from a log: {shows}; {seen}`DISTDIAG=1` records the next run")
    return notes
