"""Kineto traces that somebody recorded: which files they are, of which ranks, and what they show together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from distdiag import guard
from distdiag.terms.untrusted import is_rank
from distdiag.traces.analyse import Recorded
from distdiag.traces.merge import MERGED
from distdiag.traces.model import Missing, Profile
from distdiag.traces.profile import profile_of
from distdiag.traces.read import BadTrace, Trace, read

MAX_FILES = 4_096
HEAD_BYTES = 64 << 10
LIMITS = guard.Limits(cpu_s=6.0, memory_bytes=768 << 20)
_NUMBER = re.compile(r"(?:rank|worker|r)[_-]?(\d{1,6})|(\d{1,6})(?=\D*$)", re.IGNORECASE)


def find(targets: Sequence[str]) -> list[Path]:
    """Return the Kineto traces among these files and in these directories, sorted."""
    found: list[Path] = []
    for target in map(Path, targets):
        inside = target.iterdir() if target.is_dir() else [target]
        found += sorted(p for p in inside if p == target or p.name.endswith((".json", ".json.gz")))
    return guard.matching(itertools.islice(found, MAX_FILES), is_trace)


def is_trace(path: Path) -> bool:
    """True if the file begins like a Kineto trace, and is not one that we merged."""
    head = guard.head(path, HEAD_BYTES)
    known = b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)
    return known and MERGED not in head[:64]


def diagnose(name: str, paths: Sequence[Path]) -> Profile:
    """Return what the traces of several ranks show together.

    They are read and judged in a child process with limits, as dumps are: a file that crashes it is listed, and the others count.

    Raises:
        BadTrace: none of them can be read, or together they exceed the limits.
    """

    def work(announce: guard.Announce, refused: Mapping[str, str], only: str | None) -> Profile | str:
        try:
            return _judged(name, paths if only is None else [Path(only)], announce, refused)
        except BadTrace as e:
            return str(e)

    try:
        answer = guard.judged(work, lambda: map(str, paths), LIMITS, Profile | str)
    except guard.Died as e:
        raise BadTrace(f"the traces cannot be judged together: {e.reason}") from e
    if isinstance(answer, str):
        raise BadTrace(answer)
    return answer


def _judged(name: str, paths: Sequence[Path], announce: guard.Announce, refused: Mapping[str, str]) -> Profile:
    """Return what the traces show, in this process; raise BadTrace if none of them can be read."""
    recorded: dict[int, Recorded] = {}
    notes: list[str] = []
    unmarked = False
    total = 0
    for path in paths:
        if str(path) in refused:
            notes.append(f"{path.name} {refused[str(path)]}")
            continue
        try:
            trace = read(path, announce)
            total += guard.stored_bytes(path)
        except (BadTrace, OSError) as e:
            notes.append(f"{path.name} {e}" if isinstance(e, BadTrace) else f"{path.name}: {e.strerror or e}")
            continue
        rank = _rank(trace, path, alone=len(paths) == 1)
        boundaries = _boundaries(trace)
        if rank is None or rank in recorded or not boundaries:
            why = "no event" if not boundaries else "no rank" if rank is None else f"rank {rank} again"
            notes.append(f"{path.name} is left out: {why}")
            continue
        unmarked = unmarked or not trace.marks
        window = trace.us(boundaries[0][1]), trace.us(boundaries[-1][1])
        recorded[rank] = Recorded(trace, boundaries, window=window, steps=len(boundaries) - 1)
        recorded[rank].condense()
    if not recorded:
        raise BadTrace(notes[0] if notes else "no trace")
    announce(guard.TOGETHER, total)
    found, *_ = profile_of(name, 0, recorded, _absent(recorded), None)
    world = max((r.trace.world_size or 0 for r in recorded.values()), default=0)
    if world > len(recorded):
        notes.append(f"traces of {len(recorded)} of {world:,} ranks: what the others did is not known")
    if unmarked:
        notes.append("no ProfilerStep in a trace (prof.step() in the script): the whole trace counts as one step")
    longer = {q: n for q, r in recorded.items() if (n := len(r.boundaries) - 1) > found.steps > 0}
    if longer:
        texts = ", ".join(f"rank {q} recorded {n} steps" for q, n in sorted(longer.items())[:8])
        notes.append(f"{texts}: only the {found.steps} that all ranks recorded are analysed")
    return msgspec.structs.replace(found, notes=[*found.notes, *notes])


def _rank(trace: Trace, path: Path, alone: bool) -> int | None:
    if trace.rank is not None:
        return trace.rank
    m = _NUMBER.search(path.name.removesuffix(".gz").removesuffix(".json"))
    number = int(m[1] or m[2]) if m else None
    return number if number is not None and is_rank(number) else 0 if alone else None


def _boundaries(trace: Trace) -> list[tuple[int, int]]:
    """Return the ends of the marked steps in the wall clock; without marks, the whole trace as one step."""

    def wall_ns(us: float) -> int:
        return trace.base_ns + round(us * 1e3)

    if trace.marks:
        first = trace.marks[0]
        return [(first[0] - 1, wall_ns(first[1])), *((n, wall_ns(end)) for n, _, end in trace.marks)]
    spans = [(o.start, o.end) for o in trace.ops] + trace.device + [(c.start, c.end) for c in trace.comms]
    if not spans:
        return []
    return [(0, wall_ns(min(a for a, _ in spans))), (1, wall_ns(max(b for _, b in spans)))]


def _absent(recorded: dict[int, Recorded]) -> list[Missing]:
    world = max([max(recorded) + 1, *(r.trace.world_size or 0 for r in recorded.values())])
    gaps = sorted(set(range(min(world, MAX_FILES))) - set(recorded))
    return [Missing(rank=q, reason="no usable trace") for q in gaps]
