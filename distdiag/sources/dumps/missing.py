"""Findings on what is missing: ranks that left no dump, files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import Call, Snapshot
from distdiag.diagnosis.text.incident import collective_ref, collective_text, verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS, where_at
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.wait import Wait
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.load_report import LoadReport

_SILENT = Template(
    kinds.RANK_LOST,
    "silent",
    "{culprits} left no {readable}dump: dead, or stuck outside torch{waits}",
    "{cost}",
    "see how the {culprits:process|processes} of {culprits} ended: exit code, `dmesg -T` for oom-kill or Xid, the "
    "launcher's log",
)
_NOT_GIVEN = Template(
    kinds.RECORDER,
    "missing_dump",
    "{ranks} left no dump: {why}",
    "what {ranks} did is not known",
    "add the missing files, or see how those processes ended",
    severity=Severity.WARNING,
)
_UNREADABLE = Template(
    kinds.RECORDER,
    "unreadable_dump",
    "{n:,} {n:file|files} cannot be read as a dump{whose}: {shown}{more}",
    "{cost}",
    "copy the file again, or leave it out; nothing in it was executed",
    proved=True,
)


def where_of(snapshot: Snapshot, ranks: Iterable[int], blame: Blame) -> tuple[Where, ...]:
    """Return where each rank issued its oldest operation in flight, else its newest operation."""
    out = []
    for r in ranks:
        call = blame.oldest.get(r)
        st = snapshot.ranks.get(r)
        site = (call.site if call is not None else None) or (st.current_site if st is not None else None)
        out.append(where_at(r, site, "waiting" if call is not None else None))
    return tuple(out)


def any_call(w: Wait) -> Call | None:
    """Return the call of one of the ranks in a wait."""
    return next((w.calls[r] for r in w.ranks if r in w.calls), None)


def evidence_of(loaded: LoadReport, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the files of the first of these ranks."""
    return tuple(path for rank in ranks[:8] for path in loaded.files.get(rank, ()))


def without_dump(snapshot: Snapshot, loaded: LoadReport, blame: Blame, found: list[Finding]) -> list[Finding]:
    """Return findings on every rank without a dump; such a rank is a culprit if another may be waiting for it.

    If another rank is the culprit and only messages wait for this one, it may itself have waited for that rank, as its
    neighbours in a pipeline do.
    """
    decided = any(f.severity == Severity.ERROR for f in found)
    # a dump that cannot be read is listed with its file, in `unreadable`
    damaged = tuple(r for r in loaded.unreadable if r in blame.silent) if not decided else ()
    blamed = tuple(r for r in loaded.missing if r in blame.silent) if decided else loaded.missing
    if decided and _whole_nodes(loaded.missing, snapshot.world_size or 0):
        blamed = ()
    blamed = tuple(sorted({*blamed, *damaged}))
    rest = tuple(r for r in loaded.missing if r not in blamed)
    out = []
    if blamed:
        main = blame.silent_in if decided else blame.main
        among = sorted(main.ranks) if decided and main is not None else blame.victims
        waiting = tuple(r for r in among if r not in blamed)
        call = any_call(main) if main is not None else None
        waits, collective = "", None
        if waiting and main is not None:
            collective = collective_ref(snapshot, main, call)
            what = collective_text(snapshot, main, call)
            waits = f"; {len(waiting):,} {verb(waiting, 'rank waits', 'ranks wait')}, in {what}"
        out.append(
            _SILENT(
                severity=Severity.WARNING if decided and main is not None and main.p2p else Severity.ERROR,
                culprits=blamed,
                victims=waiting,
                collective=collective,
                where=map(Where, blamed),
                waiting=where_of(snapshot, waiting, blame),
                readable="readable " if damaged else "",
                waits=waits,
                cost=NO_PROGRESS if waiting else "what these ranks did is not known",
            )
        )
    if rest:
        out.append(_NOT_GIVEN(ranks=rest, why=_why(rest, blame)))
    return out


def _why(ranks: tuple[int, ...], blame: Blame) -> str:
    """Return what may be the reason why ranks that are not blamed left no dump."""
    if set(ranks) & set(blame.silent):
        return "whole nodes, whose files were not given, or which are dead"
    return f"dead, or stuck outside torch; no dump shows a rank that waits for {verb(ranks, 'it', 'them')}"


def _whole_nodes(missing: tuple[int, ...], world_size: int) -> bool:
    """True if the ranks without a dump are whole nodes of at least four ranks: their files were not collected, most likely."""
    for size in range(len(missing), 3, -1):
        if world_size % size == 0 and len(missing) % size == 0:
            nodes = {r // size for r in missing}
            if len(nodes) * size == len(missing):
                return True
    return False


def unreadable(loaded: LoadReport, given: list[str | Path]) -> list[Finding]:
    """Return one finding on the files that should have been dumps."""
    if not loaded.bad:
        return []
    named = {str(p) for p in given}
    serious = bool(loaded.unreadable) or any(path in named for path, _ in loaded.bad)
    ranks = rank_list(loaded.unreadable)
    return [
        _UNREADABLE(
            severity=Severity.ERROR if serious else Severity.WARNING,
            n=len(loaded.bad),
            whose=f" ({ranks})" if loaded.unreadable else "",
            shown="; ".join(f"{path}: {reason}" for path, reason in loaded.bad[:6]),
            more=f"; and {len(loaded.bad) - 6:,} more" if len(loaded.bad) > 6 else "",
            cost=f"what {ranks} did is not known" if loaded.unreadable else "",
            evidence=[path for path, _ in loaded.bad[:50]],
        )
    ]
