"""The verdict on a profile: the rank that the others wait for, and why, or what every rank waits for; and what to do."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from distdiag.terms.operations import family
from distdiag.terms.ranks import fold_ranks
from distdiag.terms.units import percent, size_text
from distdiag.terms.untrusted import visible
from distdiag.traces.analyse import LEAST_SAMPLES, Joined, Recorded, last_rank
from distdiag.traces.intervals import Coverage, Spans, length, union
from distdiag.traces.model import CollectiveTimes, RankTimes
from distdiag.traces.read import is_comm_call, is_message
from distdiag.traces.text import NAME, ms_text, place

Shared = tuple[float, str, str]  # share of a step that every rank loses, what it loses it to, and what to do
LATE_SHARE, LATE_WAIT = 0.6, 0.05  # of all skew, of a step: from here on one rank is named
LATE_STEPS, LEAST_STEPS = 0.8, 0.3  # share of the steps with a late rank in which it must be the latest; of all steps
CHANCE = 0.05  # a rank that is not the latest in all these steps is named if chance makes one so often the latest with less than this
MOST = 0.8  # of what takes a late rank longer: from here on a part is named as the reason
MORE_SHARE = 0.03  # of a step: a part of a late rank's time is named as the reason if it exceeds the others' by this
SHARED = 0.3  # of a step, on every rank: from here on waits for data and exposed communication are named
# collectives below, and as many per step, are worth joining: they cost their latency
SMALL_BYTES, SEVERAL = 1 << 16, 2.5
_TRACE_TOO = "trace ranks {absent}, too: the late rank may be one of them"
_DATA = (
    "look at how rank {late} loads its data: {workers}, cheaper transforms, faster storage; see why its samples take longer than "
    "those of the other ranks (`distdiag probe dataloader`)"
)
_OWN_LOADS = "its training process loads each batch itself (num_workers=0): give the DataLoader workers"
_WORKERS = "more workers (num_workers)"
_INPUT = "{workers}, a larger prefetch_factor, cheaper transforms, faster storage: `distdiag probe dataloader` finds the setting"
_SLOWER = (
    "compare the clocks, power and temperature of rank {late}'s device{where} with another rank's (`nvidia-smi -q -d "
    "CLOCK,POWER,TEMPERATURE,PERFORMANCE`)"
)
_SOME_KERNELS = (
    "compare these kernels of rank {late}{where} with another rank's in ui.perfetto.dev: sizes and layout of their inputs, the algorithm "
    "(cudnn.benchmark, autotuning); lower clocks slow only kernels that compute much"
)
_SIZES = ", then the sizes of their batches"
_LARGER = (
    "give rank {late} as much work as the others: the same batch size, and samples sorted into batches by their length"
)
_MORE_KERNELS = (
    "compare what rank {late} computes with the others: a larger batch, longer sequences, more layers or experts"
)
_MORE_WORK = "compare the batches of rank {late} with the others', and the CPU cores that it has{where}"
_IDLE = "see what rank {late}{where} does between its operators: Python, files, a lock (`with_stack=True` in the profiler, or py-spy)"
_HOST = (
    "find what slows the host of rank {late}{where}: too few or shared CPU cores (`taskset -cp PID`, OMP_NUM_THREADS), a throttled core, "
    "or cudaMalloc inside these operators (its trace shows it)"
)
_INSIDE = "see what rank {late}{where} does inside these operators (`with_stack=True` in the profiler, or py-spy)"
_UNKNOWN = "profile again with record_shapes=True and with_stack=True, and compare the trace of rank {late} with another one in ui.perfetto.dev"
_COMM = (
    "let computation hide it: average gradients during the backward (DDP, or async_op=True and a later wait()), accumulate several "
    "batches in no_sync(), or send less (bf16_compress_hook)"
)
_SHARDED = (
    "FSDP: prefetch the next layer (set_modules_to_forward_prefetch, or forward_prefetch=True), keep parameters after the forward where "
    "memory allows (reshard_after_forward=False), or shard inside of a node only; tensor parallel: keep its group inside of a node"
)
_EXPERTS = "let other work hide it (async_op=True, shared experts), keep the ranks that exchange most inside of a node, or send bf16"
_STAGES = "split a step into more micro-batches, or use an interleaved schedule: stages that wait for their neighbours are its bubble"
_NO_SYNC = (
    "a step has {n:g} forwards of DDP, and each backward averages all gradients: run all but the last of an update in `with model.no_sync():`; "
    "then send less (bf16_compress_hook)"
)
# by `probe` of the operation that takes most time
_COMM_OF = {"allgather": _SHARDED, "reducescatter": _SHARDED, "alltoall": _EXPERTS, "sendrecv": _STAGES}
_MEASURE = "; `distdiag probe` measures what the network can do"
_SMALL = (
    "put the tensors of a step into one and send that in one call: small calls cost their latency, not their bytes; "
    "`distdiag probe` measures it"
)
_SYNCS = "keep rank {late}{where} from waiting for its device so often: no `.item()`, `.cpu()` or printed tensor for each parameter or batch"
_ALL_SYNCS = (
    "keep the ranks from waiting for their device so often: no `.item()`, `.cpu()` or printed tensor in each step; add up losses on the "
    "device, and read them every some steps"
)
_LAUNCHES = (
    "the host launches work more slowly than the device does it: torch.compile or CUDA graphs, a larger batch, fused=True in the "
    "optimizer, or less Python in the step (`with_stack=True` shows it)"
)
_OPTIMIZER = "; an optimizer reads each parameter's `step`: keep those on the CPU (load the checkpoint with map_location='cpu'), or set fused=True"


def verdict_of(
    ranks: Sequence[RankTimes], by_kind: Sequence[CollectiveTimes], collectives: Joined, recorded: Mapping[int, Recorded],
    steps: int, world: int,
) -> tuple[str | None, str | None]:  # fmt: skip
    """Return the rank that the others wait for, and why, else what every rank waits for; and what to do about it."""
    partial, absent = world > len(ranks), sorted(set(range(world)) - set(recorded))
    last = _late_rank(collectives, recorded, steps)
    late, led = last or (-1, 0)
    most, step = _wait_for(late, collectives, recorded), max((r.step_ms for r in ranks), default=0.0)
    exposed_ms = {r.rank: r.exposed_ms for r in ranks}
    # a rank that waited as long for messages comes last because of these, as the first stage of a pipeline does
    gained = max(exposed_ms.values(), default=0.0) - exposed_ms.get(late, 0.0)
    if min(most, gained) >= LATE_WAIT * step > 0 and last is not None:
        often = "" if led == steps else f" in {led} of {steps} steps"
        among = f"of the {len(ranks)} ranks with a trace, of {world:,}, " if partial else ""
        waited = f"others wait up to {ms_text(most)} ms of a step of {ms_text(step)} ms for it"
        why, advice = _more(late, ranks, recorded)
        advice += f"; {_TRACE_TOO.format(absent=fold_ranks(absent))}" if partial else ""
        return f"{among}rank {late} comes last to the collectives{often}: {waited}{why}", advice
    shared = _input(ranks, recorded, partial), _exposed(ranks, by_kind, partial, _forwards(recorded))
    found = max((x for x in shared if x), default=None, key=lambda x: x[0]) or _idle_devices(ranks, recorded, steps)
    return (found[1], found[2].format(absent=fold_ranks(absent))) if found else (None, None)


def _input(ranks: Sequence[RankTimes], recorded: Mapping[int, Recorded], partial: bool) -> Shared | None:
    """Judge the share of a step that every rank waits for data, also without the step that waits longest."""
    least = min((r for r in ranks if r.step_ms > 0), key=lambda r: r.data_ms / r.step_ms, default=None)
    if least is None or (share := least.data_ms / least.step_ms) < SHARED:
        return None
    for r in recorded.values():
        data, (low, high) = Coverage(r.alone(r.trace.loads)), r.window
        ends = [r.trace.us(ns) for _, ns in r.boundaries]
        waits = sorted((data.within(a, b), b - a) for a, b in pairwise(ends) if low < (a + b) / 2 < high)
        waits = waits[:-1] or waits  # the first batch of an epoch waits for the workers' start
        if sum(us for us, _ in waits) < SHARED * sum(us for _, us in waits):
            return None
    of = " with a trace" if partial else ""
    own_loads = any(r.trace.own_loads for r in recorded.values())
    text = f"every rank{of} waits for data: at least {percent(share)} of a step, {ms_text(least.data_ms)} of {ms_text(least.step_ms)} ms"
    return share, text, _INPUT.format(workers=_OWN_LOADS if own_loads else _WORKERS)


def _idle_devices(ranks: Sequence[RankTimes], recorded: Mapping[int, Recorded], steps: int) -> Shared | None:
    """Judge the share of a step in which every rank's device does nothing. None for a trace of hosts or of one step."""
    least = min((r for r in ranks if r.step_ms > 0), key=lambda r: r.idle_ms / r.step_ms, default=None)
    on_device = all(r.kernels() for r in recorded.values())
    if least is None or steps < 2 or not on_device or (share := least.idle_ms / least.step_ms) < SHARED:
        return None
    syncs = min(r.syncs() for r in recorded.values())
    often = syncs >= SEVERAL
    text = f"every rank's device is idle for at least {percent(share)} of a step, {ms_text(least.idle_ms)} of {ms_text(least.step_ms)} ms"
    text += f"; its host waits for it {syncs:g} times per step" if often else ""
    return share, text, _ALL_SYNCS if often else _LAUNCHES


def _forwards(recorded: Mapping[int, Recorded]) -> float:
    """Return how many forwards of DDP a step has, on the rank with fewest."""
    counts = []
    for r in recorded.values():
        parts = (x.start for x in r.trace.parts if x.name == "DistributedDataParallel.forward")
        counts.append(sum(r.window[0] <= start < r.window[1] for start in parts) / r.steps)
    return min(counts, default=0.0)


def _exposed(
    ranks: Sequence[RankTimes], by_kind: Sequence[CollectiveTimes], partial: bool, forwards: float
) -> Shared | None:
    """Judge the share of a step that communication takes on every rank, and computation does not hide."""
    known = (r for r in ranks if r.step_ms > 0 and r.wait_ms is not None)
    exposed = [(r.exposed_ms - min(r.wait_ms or 0.0, r.exposed_ms), r.step_ms) for r in known]
    if not 2 <= len(exposed) == len(ranks) or (share := min(ms / step_ms for ms, step_ms in exposed)) < SHARED:
        return None
    least, step = min(exposed, key=lambda x: x[0] / x[1])
    others = ", or waiting for the ranks without a trace," if partial else ""
    text = (
        f"communication{others} that no computation hides takes at least {percent(share)} of a step on every rank: "
        f"{ms_text(least)} of {ms_text(step)} ms"
    )
    if partial:
        return share, text, _TRACE_TOO
    small = [c for c in by_kind if c.per_step >= SEVERAL and (c.bytes_per_step or math.inf) / c.per_step < SMALL_BYTES]
    if 2 * sum(c.transfer_ms for c in small) < sum(c.transfer_ms for c in by_kind):
        op = max(by_kind, key=lambda c: c.transfer_ms).op if by_kind else ""
        known = family(op.rstrip("_"))
        kind = "sendrecv" if is_message(op) else known.probe if known is not None else ""
        reduced = sum(c.per_step for c in by_kind if (made := family(c.op.rstrip("_"))) and made.probe == "allreduce")
        if kind == "allreduce" and 2 <= forwards <= reduced:
            return share, text, _NO_SYNC.format(n=forwards) + _MEASURE
        return share, text, _COMM_OF.get(kind, _COMM) + _MEASURE
    calls, n_bytes = sum(c.per_step for c in small), sum(c.bytes_per_step or 0.0 for c in small)
    text += f", most of it in {calls:g} collectives a step of {size_text(n_bytes / calls)} on average"
    return share, text, _SMALL


def _wait_for(late: int, collectives: Joined, recorded: Mapping[int, Recorded]) -> float:
    """Return how long a rank waits at most for the late one in collectives to which that comes last, in ms per step."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (_, _, op), of_rank in collectives.items():
        if not is_message(op) and last_rank(of_rank) == late:
            for q, c in of_rank.items():
                spans[q].append((c.start, min(c.end, of_rank[late].start)))
    waits = (length(union(x, *recorded[q].window)) / 1e3 / recorded[q].steps for q, x in spans.items())
    return max(waits, default=0.0)


def _late_rank(collectives: Joined, recorded: Mapping[int, Recorded], steps: int) -> tuple[int, int] | None:
    """Return the rank that causes most of the skew, and in how many steps; None if others are as often the latest.

    Only steps in which the last arrival costs a share of the step count.
    """
    clock = next(iter(recorded.values()), None)
    ends = [] if clock is None else [clock.trace.us(end) for _, end in clock.boundaries]
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    total: Counter[int] = Counter()
    for (_, _, op), of_rank in collectives.items():
        if is_message(op):  # a stage waits for the one before it by design
            continue
        late = last_rank(of_rank)
        skew = round(of_rank[late].start - min(c.start for c in of_rank.values()))  # µs
        total[late] += skew
        step = bisect_left(ends, of_rank[late].start)
        if 0 < step < len(ends) and skew >= LATE_WAIT * (ends[step] - ends[step - 1]):
            by_step[step][late] += skew
    if not total:
        return None
    late, most = total.most_common(1)[0]
    led = sum(late == of_step.most_common(1)[0][0] for of_step in by_step.values())
    often = led >= max(LATE_STEPS * len(by_step), LEAST_STEPS * steps)
    often = often and not _by_chance(led, len(by_step), len(recorded))
    return (late, led) if often and led >= min(2, steps) and most >= LATE_SHARE * total.total() else None


def _by_chance(led: int, steps: int, ranks: int) -> bool:
    """True if of equally late ranks one would often be the latest in `led` of `steps`; False if it was so in all of them."""
    ways = sum(math.comb(steps, n) * (ranks - 1) ** (steps - n) for n in range(led, steps + 1))
    return led < steps and ranks * ways >= CHANCE * ranks**steps


def _more(late: int, ranks: Sequence[RankTimes], recorded: Mapping[int, Recorded]) -> tuple[str, str]:
    """Return what takes the late rank longer than the others: its data loader, its computation, or time in neither; and what to do."""
    own, trace, steps = next(r for r in ranks if r.rank == late), recorded[late].trace, recorded[late].steps
    data_ms = {q: length(union(r.trace.loads, *r.window)) / 1e3 / steps for q, r in recorded.items() if r.trace.loads}
    slower, computing = _kernels(late, recorded)
    times = [
        ("its data loader takes", data_ms, "", _DATA),
        ("it computes for", {r.rank: r.compute_ms for r in ranks}, slower, computing),
        ("it neither computes nor communicates for", {r.rank: r.idle_ms + r.data_ms for r in ranks}, "", _IDLE),
    ]
    found = []
    for text, by_rank, end, advice in times:
        others = [ms for q, ms in by_rank.items() if q != late]
        if late in by_rank and others:
            theirs = statistics.median(others)
            took = f"{ms_text(by_rank[late])} ms per step (median of the others: {ms_text(theirs)} ms)"
            found.append((by_rank[late] - theirs, f"; {text} {took}{end}", advice))
    found = [x for x in found if x[0] >= MORE_SHARE * own.step_ms]
    most = max((more for more, *_ in found), default=0.0)
    # the loader is named first: a wait for it is also time in which nothing is computed
    text, advice = next(((text, advice) for more, text, advice in found if more >= MOST * most), ("", _UNKNOWN))
    spans = {
        q: r.alone([r.window]) if advice is _IDLE
        else union(r.trace.loads, *r.window) if advice is _DATA
        else [] if r.kernels() else r.compute()
        for q, r in recorded.items()
    }  # fmt: skip
    text += _function(late, 1e3 * MOST * most * steps, spans, recorded) if text else ""
    if advice is _IDLE:
        inside, advice = _idle(late, MOST * most, recorded)
        text += inside
    where, workers = f" ({trace.where})" if trace.where else "", _OWN_LOADS if trace.own_loads else _WORKERS
    return text, _line(late, most / 2, own, recorded) + advice.format(late=late, where=where, workers=workers)


def _line(late: int, least_ms: float, own: RankTimes, recorded: Mapping[int, Recorded]) -> str:
    """Return the start of the advice: the script's line that takes the late rank most, and so much, longer; empty if there is none."""
    times: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys(recorded, 0.0))
    for q, r in recorded.items():
        for file, line, function, n in r.lines:
            times[place(file, line, function)][q] += own.step_ms * n / max(1, r.samples)
    usual = {name: statistics.median(ms for q, ms in x.items() if q != late) for name, x in times.items()}
    name = max(usual, key=lambda name: times[name][late] - usual[name], default="")
    least_ms = max(least_ms, LEAST_SAMPLES * own.step_ms / max(1, recorded[late].samples))
    if not name or times[name][late] - usual[name] < least_ms:
        return ""
    return f"begin with {name}: {ms_text(times[name][late])} ms per step (median of the others: {ms_text(usual[name])} ms); "


def _function(late: int, least_us: float, spans: Mapping[int, Spans], recorded: Mapping[int, Recorded]) -> str:
    """Return the user's innermost function in which the late rank spends at least so much more of these spans; empty if none is known."""
    times: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys(recorded, 0.0))
    for q, r in recorded.items():
        inside = Coverage(spans[q])
        for name, of_name in r.trace.functions.items():
            times[name][q] = sum(inside.within(start, end) for start, end in of_name)
    more = {name: x[late] - statistics.median(us for q, us in x.items() if q != late) for name, x in times.items()}
    found = min((name for name, us in more.items() if us >= least_us), key=lambda name: times[name][late], default="")
    return f", {ms_text(times[found][late] / 1e3 / recorded[late].steps)} ms of it in {found}" if found else ""


def _idle(late: int, most: float, recorded: Mapping[int, Recorded]) -> tuple[str, str]:
    """Return in which part of the step the late rank is idle `most` ms longer, and how often it waits for its device; and what to do."""
    parts: dict[str, dict[int, Spans]] = defaultdict(lambda: {q: [] for q in recorded})
    syncs, steps = {q: r.syncs() for q, r in recorded.items()}, recorded[late].steps
    for q, r in recorded.items():
        spans: dict[str, Spans] = defaultdict(list)
        for x in r.trace.parts:
            spans[x.name].append((x.start, x.end))
        for name, of_name in spans.items():
            parts[name][q] = r.alone(of_name)
    longer = []
    for name, of_rank in parts.items():
        gaps, least_us = of_rank.pop(late), 1e3 * most * steps
        if length(gaps) - statistics.median(map(length, of_rank.values())) >= least_us:
            longer.append((length(gaps) / 1e3 / steps, name, gaps))
    ms, name, gaps = min(longer, default=(0.0, "", []))  # the innermost one
    text = f", {ms_text(ms)} ms of it in its {visible(name)[:NAME]}" if name else ""
    own, usual = syncs.pop(late), statistics.median(syncs.values())
    gaps = gaps or recorded[late].alone([recorded[late].window])
    if own < 2 * usual + 1 or max(end - start for start, end in gaps) > 1e3 * most / 2:  # one pause, no waits
        inside, advice = _launching(late, most, recorded)
        return text + inside, advice
    text += f"; it waits for its device {own:g} times per step (median of the others: {usual:g})"
    items = sum(o.calls for o in recorded[late].operators() if o.name == "aten::item")
    text += f", {min(own, items):g} times in aten::item" if items >= own / 2 else ""
    return text, _SYNCS + (_OPTIMIZER if name.startswith("Optimizer.step#") else "")


def _launching(late: int, most: float, recorded: Mapping[int, Recorded]) -> tuple[str, str]:
    """Return whether the late rank's device idles `most` ms longer inside operators, and by which ones; and what to do."""
    idle = {q: r.launching_ms() for q, r in recorded.items()}
    if (own := idle.pop(late)) - statistics.median(idle.values()) < most:
        return "", _IDLE
    calls = {
        q: {o.name: (o.self_ms, o.calls) for o in r.operators() if not is_comm_call(o.name)}
        for q, r in recorded.items()
    }
    longer = {}
    for name, (ms, n) in calls.pop(late).items():
        peers = [x.get(name, (0.0, 0.0)) for x in calls.values()]
        longer[name] = ms - (theirs := statistics.median(x for x, _ in peers)), ms, theirs, n, n == peers[0][1]
    name, (_, ms, theirs, n, _) = max(longer.items(), key=lambda x: x[1][0])
    text = (
        f", {ms_text(own)} ms of it inside operators: {visible(name)[:NAME]} takes {ms_text(ms)} ms in {n:g} calls (median of "
        f"the others: {ms_text(theirs)} ms)"
    )
    # an autograd function of the user's may do anything; torch's own operators only launch
    same = sum(more for name, (more, *_, equal) in longer.items() if equal and name.startswith("aten::"))
    return (f"{text}: its host is slow in launching", _HOST) if same >= most else (text, _INSIDE)


def _larger(late: int, longer: float, recorded: Mapping[int, Recorded]) -> str | None:
    """Return by example which inputs are larger, if that explains why kernels take `longer` times as long; empty if all are equal.

    None if it explains too little, or a trace has no shapes.
    """
    inputs = {q: r.inputs() for q, r in recorded.items()}
    own, peers = inputs.pop(late), list(inputs.items())
    if not own or not all(of_peer for _, of_peer in peers):
        return None
    ratios = []
    for _, of_peer in peers:
        more, less = (sum(n * math.prod(shape) for (_, shape), n in x.items()) for x in (own - of_peer, of_peer - own))
        ratios.append(more / less if less else 1.0 + more)
    if statistics.median(ratios) < 1 + (longer - 1) / 2:
        return "" if all(of_peer == own for _, of_peer in peers) else None
    peer, of_peer = peers[0]
    theirs = {(name, len(shape), n): shape for (name, shape), n in reversed((of_peer - own).items())}
    for (name, shape), n in (own - of_peer).items():
        other = theirs.get((name, len(shape), n), shape)
        if math.prod(other) < math.prod(shape):
            return f": {visible(name)[:NAME]} gets {list(shape)}, on rank {peer} {list(other)}"
    return None


def _kernels(late: int, recorded: Mapping[int, Recorded]) -> tuple[str, str]:
    """Return whether the late rank runs more kernels than the others, or as many that take longer, and what to do.

    Without a device the text is empty.
    """
    kernels = {q: r.kernels() for q, r in recorded.items()}
    (number, us), *others = (
        [sum(x) for x in zip(*kernels[q].values(), strict=True)] or [0.0, 0.0] for q in sorted(kernels, key=late.__ne__)
    )
    usual, usual_us = (statistics.median(x[i] for x in others) for i in (0, 1)) if others else (0.0, 0.0)
    if not usual or not usual_us:
        return "", _MORE_WORK
    more = number / usual
    longer = us / usual_us / more if more else 0.0
    if more >= 1 + MORE_SHARE:
        return f", in {more:.2f} times as many kernels", _MORE_KERNELS
    if more <= 1 - MORE_SHARE or longer < 1 + MORE_SHARE:
        return "", _MORE_KERNELS
    text = f", in as many kernels, on average {longer:.2f} times as long"
    inputs = _larger(late, longer, recorded)
    if inputs:
        return f"{text}, as its inputs are larger{inputs}", _LARGER
    text += ", on inputs of the same shapes" if inputs is not None else ""
    if some := _some_kernels(kernels.pop(late), list(kernels.values()), longer):
        return f"{text}{some}", _SOME_KERNELS
    if inputs is not None:
        return f"{text}: a slower device (clocks, heat)", _SLOWER
    return f"{text}: a slower device (clocks, heat), or larger inputs", _SLOWER + _SIZES


def _some_kernels(
    own: Mapping[str, tuple[float, float]], peers: Sequence[Mapping[str, tuple[float, float]]], longer: float
) -> str:
    """Name the kernel that takes most of the extra time; empty if most kernels, by their time on the others, are slower."""
    theirs = {name: statistics.median(x.get(name, (0.0, 0.0))[1] for x in peers) for x in peers for name in x}
    slower = sum(us for name, us in theirs.items() if own.get(name, (0.0, 0.0))[1] >= us * (1 + (longer - 1) / 2))
    if slower >= MOST * sum(theirs.values()):
        return ""
    name = max(own, key=lambda name: own[name][1] - theirs.get(name, 0.0))
    us, usual = own[name][1], theirs.get(name, 0.0)
    often = f"{us / usual:.2f} times as long" if usual else "which the others do not run"
    return f", but not all of them: most of it is in {visible(name)[:NAME]}, {often}"
