"""Collectives that timed out, by the watchdogs' lines of all ranks: which rank the others waited for, as far as they show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from distdiag.diagnosis.known_errors import remedy
from distdiag.diagnosis.model.findings import CollectiveRef, Finding, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.sources.logs import meanings
from distdiag.sources.logs.build import LONG, fewer, finding, last_words, ranks_of, same_calls
from distdiag.sources.logs.facts import Collected
from distdiag.sources.logs.join import absent_ranks, before, first_site, known_ranks
from distdiag.sources.logs.message import Role
from distdiag.sources.logs.waiting import Group, Waits, gathers, groups_of, label
from distdiag.terms import operations
from distdiag.terms.ranks import by_value
from distdiag.terms.units import counted, rough_time
from distdiag.terms.untrusted import bounded

SHORT_S = 10.0  # a timeout below that is no usual one
LATE_FACTOR, LATE_S = 2.0, 60.0  # a running watchdog checks ten times a second
SAME_SIZES = (
    *(operation.name for operation in operations.OPERATIONS if operation.same_size == "all"), *operations.EVEN_FORMS,
)  # fmt: skip
MESSAGES = {"send", "recv"}
# of lists of parts; a group has at least two
_GATHERS, _SCATTERS, MIN_PARTS = ("all_gather",), ("reduce_scatter",), 2
_SHARDED = bounded(r"(?i:fsdp|shard|zero[-_]?3|deepspeed)")
OF_PARAMETERS = "; all_gather_into_tensor most often gathers parameters that ZeRO-3 or FSDP shards: then a rank's batch took another path through the model, so run the same modules on all ranks"
DUMPS = "the flight recorder's dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
PATH = (
    "look at the path between the GPUs: NCCL_DEBUG=INFO, once with NCCL_P2P_DISABLE=1, the interface (NCCL_SOCKET_IFNAME), the "
    "firewall, `dmesg -T | grep -i xid`"
)

_ERROR = bounded(r"\bERROR\b")
# what the last line of a late rank shows of its work
_DID = (
    (_ERROR, meanings.SURVIVED),
    (
        bounded(r"(?i:\b(?:build\w{0,3}\b.{0,60}\bind(?:ex|ices)\b|(?:tokeniz|preprocess|download)ing\b))"),
        meanings.PREPARING,
    ),
    (bounded(r"(?i:\b(?:sav(?:e|ing)|checkpoint|upload)|safetensors\b|\.(?:pt|ckpt|distcp)\b)"), meanings.SAVING),
    (bounded(r"(?i:\bearly[ _-]?stop)"), meanings.STOPS_EARLY),
    (bounded(r"AUTOTUNE\b|torch[._/]_?(?:dynamo|inductor)\b|(?i:compil(?:ing|ation))\b"), meanings.COMPILING),
)


def findings(found: Collected) -> list[Finding]:
    """Return one finding on each group whose collective timed out; only the first if groups share the ranks."""
    by_group = groups_of(found.facts)
    if (chain := _chain(found, by_group)) is not None:
        return [chain]
    out = [f for g, waits in by_group.items() if (f := _of_group(found, g, waits)) is not None]
    if not out:
        return [_elsewhere(by_group)] if by_group else []
    out.sort(key=lambda f: (not f.culprits, -len(f.victims)))
    return out[:3]


def _chain(found: Collected, by_group: Mapping[Group, Waits]) -> Finding | None:
    """Return the finding on ranks that others wait for in their groups, and that wait in none; None if no group shows one."""
    waiting = {r: w for waits in by_group.values() for r, w in waits.items() if w.timed_out}
    missing = {group: _missing(group, waits) - waiting.keys() for group, waits in by_group.items()}
    late = sorted(set().union(*missing.values()))
    if not late or 2 * len(late) > len(waiting):
        return None
    texts = []
    for group, waits in by_group.items():
        if missing[group]:
            there = f"{_op(waits) or 'a collective'} ({label(group)})"
            ranks = sorted(r for r in waits if waits[r].timed_out)
            texts.append(f"{rank_list(ranks)} in {there}, without {rank_list(sorted(missing[group]))}")
    who, said = rank_list(late), _said(found, late)
    return _timed_out(("", ""), waiting, f"{who} reported no timeout, and may be what the others wait for: {'; '.join(texts[:3])}{said}",
                 f"{_of_work(said, late)}read the log of {who}, and see its GPU and host; take {verb(late, 'its', 'their')} stack the next time, to see whether {verb(late, 'it', 'they')} came to that call", late)  # fmt: skip


def _said(found: Collected, late: Collection[int]) -> str:
    """Return the last line of the one late rank; else, as most programs print on rank 0 only, the last one without a rank, if rank 0 is late."""
    nameless = found.ends[found.files[0]].nameless if len(found.files) == 1 else ""
    whose = "" if _ERROR.search(nameless) else ", most likely of rank 0,"
    likely = f"; the last line before that{whose} is `{shortened(nameless, LONG)}`"
    return last_words(found, late) or likely * (0 in late and bool(nameless))


def _of_work(said: str, late: Collection[int]) -> str:
    """Return what to do about the work that the last line of a late rank, of several rank 0, shows; empty if it shows none."""
    own = remedy(said, "its text has the reason")
    whose = "the rank that printed it" if "last line before that is" in said else f"rank {min(late)}"
    return next((advice.format(who=whose, own=own) for regex, advice in _DID if regex.search(said)), "")


def _missing(group: Group, waits: Waits) -> set[int]:
    """Return the members of a group that are not among those that wait, by the others' ranks in it: members are equally far apart."""
    inside = {
        f.who.group_rank: r for r, w in waits.items() if w.timed_out for f in w.facts if f.who.group == group and f.who.group_rank is not None
    }  # fmt: skip
    if len(inside) < 2 or group[1] in ("default_pg", "undefined"):
        return set()
    (first, rank), *others = sorted(inside.items())
    apart = {(r - rank) / (nth - first) for nth, r in others}
    step = int(min(apart))
    if apart != {step} or step < 1:
        return set()
    return {r for nth in range(max(inside)) if nth not in inside and (r := rank + (nth - first) * step) >= 0}


def _of_group(found: Collected, group: Group, waits: Waits) -> Finding | None:
    waiting = {r: w for r, w in waits.items() if w.timed_out}
    for w in waiting.values():
        if w.seq is None and w.completed is not None:
            w.seq = w.completed + 1
    if not waiting:
        return None
    seq, most = Counter(w.seq for w in waiting.values()).most_common(1)[0]
    if any(w.seq != seq for w in waiting.values()):
        return _apart(found, group, waiting, seq if most > len(waiting) / 2 else None)
    ops = by_value({r: w.op for r, w in waiting.items() if w.op})
    if ops.keys() <= MESSAGES and ops:
        return _messages(group, waiting, ops)
    sides, cause = ops, "op"
    if len(ops) == 1 and (min(ops) in SAME_SIZES or _in_equal_parts(min(ops), waiting)):
        sized = ((r, f"{w.op or min(ops)} of {w.size:,} elements") for r, w in waiting.items() if w.size is not None)
        sides, cause = by_value(dict(sized)), "shape"
    if len(sides) > 1:
        return _different(found, group, waiting, sides, cause)
    others = waits.keys() - waiting.keys()
    late = {r for r in others if seq is not None and (waits[r].issued or seq) < seq}
    there = {r: waits[r] for r in others if waits[r].is_in(seq)}  # only asked to dump
    asked = there if 2 * len(there) <= len(waiting) else {}
    return _late(found, group, waiting if asked else waiting | there, {r: waits[r].issued or 0 for r in late}, asked)


def _in_equal_parts(op: str, waiting: Waits) -> bool:
    """True if each rank's own sizes show that it expects equal parts of all: then their sizes must agree."""
    pairs = [(w.size, w.size_out) for w in waiting.values() if w.size and w.size_out]
    ratios = {(whole / part) for pair in pairs for part, whole in [pair if op in _GATHERS else pair[::-1]]}
    return op in (*_GATHERS, *_SCATTERS) and len(ratios) == 1 and min(ratios) >= MIN_PARTS and min(ratios).is_integer()


def _absent(found: Collected, group: Group, waiting: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that should be in the group and reported no timeout; empty if they are unknown, or too many."""
    number, description = group
    if description not in ("", "default_pg", "undefined"):
        return ()
    if number not in ("", "0") and not description and len(waiting) < 3:
        return ()
    return absent_ranks(found, waiting, of_all=description == "default_pg")


def _timed_out(
    group: Group, waiting: Waits, message: str, advice: str, culprits: Collection[int] = (), kind: str = "timeout"
) -> Finding:
    """Return a finding on ranks that waited; the first line of each is evidence."""
    op, saving = _op(waiting), gathers(waiting)
    if saving:
        ranks = [r for r, w in waiting.items() if w.saves == saving]
        message += f"; {rank_list(ranks)} {verb(ranks, 'is', 'are')} inside {saving}, which waits for all ranks"
        saves = f"call {saving} on all ranks, outside of any `if rank == 0`, and write the file on rank 0 only"
        advice = f"{meanings.LOG_ON_ALL if saving == meanings.LOG else saves}; else {advice}"
    return finding(
        kind.partition("/")[0],
        kind.partition("/")[2] or "late_rank",
        [w.facts[0] for w in waiting.values()],
        message + _overslept(waiting),
        advice,
        culprits=culprits,
        victims=waiting,
        sites={r: w.site for r, w in waiting.items() if w.site is not None},
        collective=CollectiveRef(op, label(group), _seq(waiting)) if op else None,
    )


def _op(waiting: Waits) -> str:
    return next((w.op for w in waiting.values() if w.op), "")


def _seq(waiting: Waits) -> int | None:
    return next((w.seq for w in waiting.values() if w.seq is not None), None)


def _number(waiting: Waits, group: Group) -> str:
    """Return ` #417 (default_pg)`, as far as it is known."""
    seq, inside = _seq(waiting), label(group)
    return (f" #{seq:,}" if seq is not None else "") + (f" ({inside})" if inside else "")


def _overslept(waiting: Waits) -> str:
    limited = [w for w in waiting.values() if w.limit_s]
    ran_s = [w.ran_s for w in limited if w.ran_s > max(LATE_FACTOR * w.limit_s, w.limit_s + LATE_S)]
    if not ran_s:
        return ""
    noticed = f". It was noticed only after {rough_time(max(ran_s))}"
    return f"{noticed}: these hosts were suspended, or the watchdogs were stuck"


def _late(found: Collected, group: Group, waiting: Waits, late: Mapping[int, int], asked: Collection[int]) -> Finding:
    """Return the finding on ranks that waited in one call.

    Args:
        late: What the late ranks have issued.
        asked: Ranks that had issued it, too, and have only dumped because others timed out.
    """
    ranks = tuple(sorted(waiting))
    limit_s = next((w.limit_s for w in waiting.values() if w.limit_s), 0.0)
    after = f" after {rough_time(limit_s)}" if limit_s else ""
    facts = [f for w in waiting.values() for f in w.facts]
    known = limit_s or any("imeout at" in f.text for f in facts)  # else: "an error or timeout"
    how = "timed out" if known else "failed or timed out"
    lost = {f.rank for f in found.facts if f.role is Role.VICTIM}
    broken = [r for r in ranks if limit_s and not waiting[r].limit_s and r in lost]  # it reports an error, no timeout
    waited = f"{rank_list([r for r in ranks if r not in broken])} waited in it"
    waited += f", {rank_list(broken)} failed in it" if broken else ""
    start = f"{_op(waiting) or 'collective'}{_number(waiting, group)} {how}{after}: {waited}"
    site = at(next((w.site for w in waiting.values() if w.site is not None), None))
    elsewhere, unknown = _in_gloo(found, waiting)
    absent = () if late or unknown else tuple(asked) or _absent(found, group, ranks)
    if late:
        who = rank_list(late)
        return _timed_out(group, waiting, f"{start}, and {who} had issued only #{min(late.values()):,}{_said(found, late)}",
                     f"see what {who} did before{site}: a longer branch, a checkpoint, a data loader, an exception that was caught", late)  # fmt: skip
    if elsewhere:
        return _timed_out(group, waiting, start + elsewhere, "compare what leads to the two calls: a condition on the rank, an exception that was "
                     "caught; the logs of all ranks show who is in which", absent)  # fmt: skip
    if within := next((f.within for f in facts if f.within), ""):
        first = (0,) if 0 not in ranks and "local" not in within else ()
        return _timed_out(group, waiting, f"{start}, inside {within}: they wait there until the rank that goes first has done its work",
                     meanings.GOES_FIRST.format(who="rank 0" if first else "the rank that goes first", where=within), first)  # fmt: skip
    if absent:
        who, they = rank_list(absent), verb(absent, "it", "they")
        if (came := _came_later(found, absent, waiting)) is not None:
            took = max((took for r, took in found.took.items() if r in absent), default=(0.0, ""))
            what = f" (it printed `{shortened(took[1], 80)}`)" if took[0] > LATE_S else ""
            return _timed_out(group, waiting, f"{start}; {who} came{at(came)} only after that{what}",
                         f"do what {who} did before that call asynchronously or on all ranks, or give the group a longer timeout (init_process_group, new_group)", absent)  # fmt: skip
        if bar := found.moving(facts):
            return _timed_out(group, waiting, f"{start}; {who} reported no timeout, and a progress bar moved on while they waited, most likely that of {who} ({bar})",
                         meanings.GOES_ON, absent)  # fmt: skip
        said = "; that number was issued there, too: later, or as another call" * bool(asked)
        said += _said(found, absent)
        return _timed_out(group, waiting, f"{start}; {who} reported no timeout, and may be what they waited for{said}",
                     f"{_of_work(said, absent)}read the log of {who}, and take {verb(absent, 'its', 'their')} stack the next time{'' if asked else f', to see whether {they} came to that call{site}'}", absent)  # fmt: skip
    all_known = known_ranks(found, ranks) <= set(ranks)
    if len(ranks) > 1 and (all_known or ranks == tuple(range(len(ranks)))):
        return _all_waited(group, waiting, start, limit_s, all_known)
    if (found_here := _first_closed(found, group, waiting, start)) is not None:
        return found_here
    alone = "what the other ranks did is not in the log"
    others = alone if len(ranks) < 2 else "the others' logs are needed to see who was missing"
    return _timed_out(group, waiting, f"{start}; {others}", f"give the logs of all ranks, or {DUMPS}")


def _first_closed(found: Collected, group: Group, waiting: Waits, start: str) -> Finding | None:
    """Return the finding that others lost their connections to one peer, which no log is of, or which closed them before the timeout."""
    facts = [f for f in found.named("closed") if "reason" not in f.fields and f.rank not in waiting]
    peers = {f.fields.get("peer", "") for f in facts}
    here = {f.who.host for f in found.facts} | found.on_host.keys() | {addr for _, addr in found.interfaces.values()}
    missing = sorted(known_ranks(found, waiting) - found.ranks)
    earlier = all(before(f, w) for f in facts for x in waiting.values() for w in x.facts)
    peer = min(peers) if len(peers) == 1 else ""
    if not peer or not (missing or earlier) or any(f"{peer}.".startswith(f"{h}.") for h in here):
        return None
    ranks, alone = ranks_of(facts), missing if earlier and len(missing) == 1 else []
    its = verb(ranks or facts, "its connection", "their connections")
    who = rank_list(ranks) if ranks else verb(facts, "a process", "processes")
    text = f"{start}; {who} lost {its} to {peer}{' before that' * earlier}"
    text += f", and no log here has a line of {rank_list(missing)}" * bool(missing)
    do = f"see how the process on {peer} ended: its log, exit code, `dmesg -T` for oom-kill or Xid; give its log, too"
    return _timed_out(group, waiting, text, do, alone, kind="rank_lost/silent" if earlier else "timeout")


def _all_waited(group: Group, waiting: Waits, start: str, limit_s: float, all_known: bool) -> Finding:
    """Return the finding on ranks that all waited in one call; of a group, these may be all or not."""
    seq = _seq(waiting)
    if 0 < limit_s < SHORT_S:
        return _timed_out(group, waiting, f"{start}: that limit is too short to show that anything is wrong",
                          "give the group a usual timeout (timeout= of init_process_group takes a timedelta; torch's own is 10 minutes with NCCL)", kind="stall/unknown")  # fmt: skip
    if (seq or 0) <= 1 and all(w.completed is not None and w.completed < 1 for w in waiting.values()):
        return _timed_out(group, waiting, f"{start}, and none has completed: the first collective of {label(group) or 'the job'} never worked",
                     PATH, kind="stall/unknown")  # fmt: skip
    sizes = {w.size for w in waiting.values()}
    same = len(waiting) > 1 and None not in sizes and len(sizes) == 1
    equal = f", all with {min(filter(None, sizes), default=0):,} elements" if same else ""
    first = "their calls are equal there, as far as the watchdogs show them: look at"
    first = first if same else "check that all ranks made the same call there, then"
    return _timed_out(group, waiting, f"{start}{equal}. No other rank {'' if all_known else 'of that group '}is known from the log",
                 f"{first} the network and the GPUs: NCCL_DEBUG=INFO, `dmesg -T | grep -i xid`; for the next time, the stacks of all ranks while they hang (`py-spy dump --pid PID`), and {DUMPS}",
                 kind="stall/unknown")  # fmt: skip


def _came_later(found: Collected, absent: Collection[int], waiting: Waits) -> Site | None:
    """Return where the ranks that were missing in a collective failed after it had timed out: they came there too late."""
    first = min((f.order for w in waiting.values() for f in w.facts), default=0)
    failed = (f for f in found.facts if f.role is Role.VICTIM and f.rank in absent and f.order > first)
    return first_site(failed)


def _in_gloo(found: Collected, waiting: Collection[int]) -> tuple[str, bool]:
    """Return which other processes timed out in gloo meanwhile, and whether the rank of one is unknown; ("", False) if none did."""
    facts = [f for f in found.named("gloo_timeout") if f.rank not in waiting]
    if not facts:
        return "", False
    ranks = ranks_of(facts)
    processes = verb(facts, "process", "processes")
    who = rank_list(ranks) if ranks else f"{len(facts):,} {processes} whose rank the log does not show"
    limit = next((n for f in facts if (n := f.number("limit")) is not None), None)
    long = f" for {rough_time(limit / 1e3)}" if limit is not None else ""
    text = f"; {who} waited{long} in gloo{at(first_site(facts))} meanwhile: the ranks ran different code"
    return text, any(f.rank is None for f in facts)


def _messages(group: Group, waiting: Waits, ops: Mapping[str, Collection[int]]) -> Finding:
    """Return the finding on messages that timed out: a send and its recv are two halves of one transfer."""
    texts = " and ".join(f"{rank_list(ops[op])} in {op}" for op in sorted(ops, reverse=True))
    tail = "the peer is not in the log" if len(ops) == 1 else (
        "if each is the other's peer, both halves of the transfer were there, and the path between them failed; else each waits for another rank"
    )  # fmt: skip
    return _timed_out(group, waiting, f"messages{_number(waiting, group)} timed out: {texts}; {tail}",
                 f"compare the peers and the order of the messages on both sides; then {PATH}", kind="stall/unknown")  # fmt: skip


def _different(
    found: Collected, group: Group, waiting: Waits, sides: Mapping[str, Collection[int]], cause: str
) -> Finding:
    """Return the finding on ranks whose operations with one number differ."""
    by_size = sorted(((text, sorted(ranks)) for text, ranks in sides.items()), key=lambda side: len(side[1]))
    culprits = fewer(sides.values())
    texts = " and ".join(f"{rank_list(ranks)} in {text}" for text, ranks in by_size[:4])
    do = _only_there(waiting, culprits) if cause == "op" and not gathers(waiting) else ""
    compare = "compare what these ranks call there: the same operation with the same size on every rank"
    return _timed_out(group, waiting, f"the ranks timed out in different calls of collective{_number(waiting, group)}: {texts}{last_words(found, culprits, waiting.keys() - culprits)}",
                 f"{do}{compare if cause == 'shape' else same_calls(culprits)}{_of_calls(waiting)}", culprits, f"mismatch/{cause}")  # fmt: skip


def _only_there(waiting: Waits, culprits: Collection[int]) -> str:
    """Return what to do first about a call that few ranks made, if they alone are at its line, or are rank 0 alone."""
    sites = {waiting[q].site for q in culprits}
    elsewhere = {w.site for q, w in waiting.items() if q not in culprits}
    if len(sites) == 1 and None not in sites and sites.isdisjoint(elsewhere):
        return f"make the call{at(*sites)} on all ranks or on none; else "
    only_there = "look for a collective in what only rank 0 does (`if rank == 0`, is_global_zero, rank_zero_only: a metric, a log, a checkpoint); else "
    return only_there if {*culprits} == {0} else ""


def _of_calls(waiting: Waits) -> str:
    """Return the most common reason for which the operations of ranks, or their sizes, differ."""
    ops = {w.op for w in waiting.values()}
    texts = "".join(f.text for w in waiting.values() for f in w.facts)
    sharded = ops <= {"all_gather_into_tensor", "reduce_scatter_tensor"} or _SHARDED.search(texts)
    if sharded and "all_gather_into_tensor" in ops:
        return OF_PARAMETERS
    return meanings.OF_BATCH if ops <= {*_GATHERS} else ""


def _apart(found: Collected, group: Group, waiting: Waits, most: int | None) -> Finding:
    """Return the finding on ranks of one group that timed out in operations with different numbers."""
    by_seq = by_value({r: w.seq or 0 for r, w in waiting.items()})
    ops = {seq: _op({r: waiting[r] for r in ranks}) or "collective" for seq, ranks in by_seq.items()}
    texts = [f"{rank_list(ranks)} in {ops[seq]} #{seq:,}" for seq, ranks in sorted(by_seq.items())]
    known = bool(label(group)) and not {w.op for w in waiting.values()} & MESSAGES
    few = [r for seq, ranks in by_seq.items() if seq != most for r in ranks] if known and most is not None else ()
    shown = ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
    inside = f" of {label(group)}" if label(group) else ""
    if known:
        tail = "their counts differ: one rank has made more or fewer calls than the others"
        advice = "look for a collective under a condition on the rank, or a loop that is shorter on one rank; the flight recorder's dumps show the first difference"
    elif label(group):
        tail = "messages are counted by each pair, so the log does not show who waited for whom"
        advice = f"give {DUMPS}"
    else:
        tail = "the log does not name their groups, so it does not show who waited for whom"
        advice = f"give {DUMPS}: they name the groups"
    message = f"ranks timed out in different collectives{inside}: {shown}; {tail}{last_words(found, few)}"
    return _timed_out(group, waiting, message, advice, few)


def _elsewhere(by_group: Mapping[Group, Waits]) -> Finding:
    """Return the finding on ranks that dumped because of a timeout that the log does not show."""
    waits = {r: w for waits in by_group.values() for r, w in waits.items()}
    named = [w.signalled for w in waits.values() if w.signalled is not None]
    first = sorted({*named, *(r for r, w in waits.items() if w.signalled is None)})
    shown = ", ".join(filter(None, (label(g) for g in by_group))) or "the groups in the log"
    counts = ((r, w.issued or 0, w.completed) for r, w in waits.items())
    open_ops = {r: issued - done for r, issued, done in counts if done is not None and issued > max(done, 0)}
    if open_ops and not set(first) & waits.keys():
        texts = [f"rank {r} has {counted(n, 'operation')} in flight" for r, n in sorted(open_ops.items())[:3]]
        message = (
            f"{rank_list(first)} reported a timeout, in a log that is not here; {rank_list(waits)} {verb(waits, 'was', 'were')} only "
            f"asked to dump ({shown}: {', '.join(texts)}, not timed out)"
        )
        advice = f"read the log of {rank_list(first)} from its first `Watchdog caught` on"
        return _timed_out(("", ""), waits, message, advice)
    seen = f"{rank_list(first)} ran into a timeout first" if first else "a rank ran into a timeout"
    message = (
        f"a collective timed out, and {seen}; in {shown} these ranks have nothing in flight: either they are what the others wait for "
        "there, or it is another group"
    )
    advice = "give the logs of all ranks from the first `Watchdog caught` on, or the flight recorder's dumps"
    return _timed_out(("", ""), waits, message, advice)
