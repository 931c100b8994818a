"""Judges files with the stacks of ranks, in a child process with limits; nothing that they name is opened."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from distdiag import guard
from distdiag.diagnosis.model.findings import Report, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import no_source
from distdiag.diagnosis.text.phrases import ordinal
from distdiag.errors import DistdiagError
from distdiag.sources.dumps.files import find, likely
from distdiag.sources.logs.files import ranks_of
from distdiag.sources.stacks.calls import feeder, position
from distdiag.sources.stacks.frames import Process
from distdiag.sources.stacks.read import NoStacks, from_json, from_text
from distdiag.sources.stacks.verdict import SHOWN, Seen, report
from distdiag.terms.ranks import unfold_ranks

LIMITS = guard.Limits()
MAX_FILES, MAX_BYTES = 16_384, 64 << 20
_TEXTS = (".txt", ".log", ".err", ".out")
_STACK = re.compile(rb'\(most recent call first\):|\bThread \S+ \((?:idle|active)|"thread_id"')
_NO_SOURCE = "no source file that a stack names is opened, so no condition is shown: `distdiag attach` on the job's host reads them"
_MORE = (
    "the files do not name the rank of every stack: such processes are named by their pid, or the number of their stack"
)
# as `rank_list` writes them, not of a peer
_RANKS = re.compile(r"(?<!from )(?<!to )\branks? (\d+(?:,\d{3})*(?:(?:–|, )\d+(?:,\d{3})*)*)")


def diagnose_stacks(targets: Sequence[str], within: int = MAX_BYTES, dead: bool = True) -> Report | None:
    """Return the verdict on the stacks in these files; None if no file has any.

    Args:
        within: A file counts if its first stack begins within so many bytes.
        dead: The last stacks of a process that a fatal error ended count: not in the log of a job that survived it.

    Raises:
        DistdiagError: the files together exceed the limits.
    """
    candidates = (p for p, named in find(map(Path, targets)) if named or p.suffix in _TEXTS or likely(p))
    some = itertools.islice(candidates, MAX_FILES)
    files = guard.matching(some, lambda path: _STACK.search(guard.head(path, within)) is not None)
    if not files:
        return None

    def work(announce: guard.Announce, refused: Mapping[str, str], only: str | None) -> Report | None:
        chosen = [p for p in files if str(p) not in refused and only in (None, str(p))]
        return _judge(", ".join(targets), chosen, announce, refused, dead)

    try:
        return guard.judged(work, lambda: map(str, files), LIMITS, Report | None)
    except guard.Died as e:
        raise DistdiagError(f"the stacks cannot be judged together: {e.reason}", "give fewer files") from e


def _judge(
    run: str, files: Iterable[Path], announce: guard.Announce, refused: Mapping[str, str], dead: bool
) -> Report | None:
    found: list[tuple[Path, list[Process]]] = []
    bad = dict(refused)
    for path in files:
        try:
            with guard.opened(path) as file:
                announce(str(path), path.stat().st_size)
                data = file.read(MAX_BYTES)
            text = data.decode("utf-8", "replace")
            processes = from_json(data) if text.lstrip()[:1] == "[" and '"thread_id"' in text else from_text(text, dead)
            found.append((path, processes))
        except (NoStacks, *guard.DAMAGED, OSError) as e:
            bad[str(path)] = str(e)[:200]
    announce(guard.TOGETHER, 0)
    of_ranks = ((path, [p for p in own if not p.data_worker]) for path, own in found)
    by_rank, unknown = _by_rank([x for x in of_ranks if x[1]])
    if not by_rank:
        return None
    notes = [_MORE] * bool(unknown) + [f"{path}: not read ({why})" for path, why in list(bad.items())[:4]]
    workers = _workers(found, by_rank)
    seen = {rank: _seen(samples, workers.get(rank, {})) for rank, samples in by_rank.items()}
    absent = sorted(set(range(max(seen) + 1)) - set(seen))
    unjudged = f"there is no stack of {len(absent)} ranks below rank {max(seen)}" if absent else None
    verdict = _named(report(seen, no_source, run=run, world=max(seen) + 1, notes=notes, unjudged=unjudged), unknown)
    return replace(verdict, notes=(*verdict.notes, _NO_SOURCE)) if verdict.findings else verdict


def _workers(
    found: list[tuple[Path, list[Process]]], by_rank: Mapping[int, list[Process]]
) -> dict[int, dict[object, Site | None]]:
    """Return where the workers of each rank's data loader are: of their parent, else of the one rank in their file, or of its name."""
    ranks = {p.pid: rank for rank, samples in by_rank.items() for p in samples if p.pid}
    names = ranks_of(path for path, _ in found)
    out: dict[int, dict[object, Site | None]] = {}
    for path, own in found:
        here = {ranks[p.pid] for p in own if p.pid in ranks}
        for nth, p in enumerate(own):
            of_file = p.rank if p.rank is not None else min(here) if len(here) == 1 else names.get(path)
            rank = ranks.get(p.parent) if p.parent else of_file
            if p.data_worker and rank is not None:
                out.setdefault(rank, {})[p.pid or (path, nth)] = position(p.judged).site
    return out


def _seen(samples: list[Process], workers: Mapping[object, Site | None]) -> Seen:
    stack = samples[-1].judged
    where = position(stack)
    lines = {tuple((f.file, f.function, f.line) for f in p.judged.frames) for p in samples}
    return Seen(
        position=where, feeder=feeder(samples[-1], where), pid=samples[-1].pid or None, moved=len(lines) > 1, once=len(samples) == 1,
        busy=stack.idle is False, workers=tuple(workers.values()) if where.activity == "data" else (),
    )  # fmt: skip


def _by_rank(found: list[tuple[Path, list[Process]]]) -> tuple[dict[int, list[Process]], dict[int, str]]:
    """Return the dumps of each rank, by the prefix of its lines or by the file; else numbered, with what to call such a process."""
    out: dict[int, list[Process]] = {}
    names = ranks_of(path for path, own in found if len({p.pid for p in own}) == 1 and own[0].rank is None)
    names = names if len(set(names.values())) == len(names) else {}  # of several nodes
    if all(0 < own[0].pid == names[path] for path, own in found if path in names):
        names = {}  # they are named by their pids
    locals_ = {p.pid or (path, p.local): p.local for path, own in found for p in own}
    of_command = None not in locals_.values() and len(set(locals_.values())) == len(locals_)  # of one node
    loose: dict[tuple[str, int, int | None], list[Process]] = {}
    for path, own in found:
        for nth, p in enumerate(own):
            rank = p.rank if p.rank is not None else p.local if of_command else names.get(path)
            if rank is not None:
                out.setdefault(rank, []).append(p)
            else:
                loose.setdefault((str(path), p.pid or (-nth if p.local is None else 0), p.local), []).append(p)
    numbers = dict(zip((n for n in itertools.count() if n not in out), loose, strict=False))
    keys = ((n, Path(path).name, pid) for n, (path, pid, _) in numbers.items())
    names = {n: f"process {pid}" if pid > 0 else f"the {ordinal(1 - pid)} stack of {file}" for n, file, pid in keys}
    return out | {n: loose[key] for n, key in numbers.items()}, names


def _named(verdict: Report, names: Mapping[int, str]) -> Report:
    """Return the verdict with these names in place of numbers, which are no ranks."""

    def text(m: re.Match[str]) -> str:
        listed = m[1].replace(", ", ";").replace(",", "").replace(";", ",").replace("–", "-")
        ranks = unfold_ranks(listed)
        known = [rank_list(known)] if (known := [r for r in ranks if r not in names]) else []
        found = [names[r] for r in ranks if r in names]
        shown = ", ".join(found[:SHOWN]) + (f" … ({len(found)} in all)" if found[SHOWN:] else "")
        return " and ".join(filter(None, (*known, shown)))

    if not names:
        return verdict
    findings = (
        replace(
            f, message=_RANKS.sub(text, f.message), advice=_RANKS.sub(text, f.advice),
            names=tuple(names[r] for r in (*f.culprits, *f.victims) if r in names) or f.names,
            culprits=tuple(r for r in f.culprits if r not in names), victims=tuple(r for r in f.victims if r not in names),
            where=tuple(w for w in f.where if w.rank not in names), waiting=tuple(w for w in f.waiting if w.rank not in names),
        )
        for f in verdict.findings
    )  # fmt: skip
    return replace(verdict, findings=tuple(findings), unjudged=_RANKS.sub(text, verdict.unjudged or "") or None)
