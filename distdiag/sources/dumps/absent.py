"""Findings on ranks whose dump is missing, of another run, or unreadable."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding, Severity, Where, rank_list
from distdiag.diagnosis.text.phrases import NO_PROGRESS
from distdiag.diagnosis.text.template import Template, filled
from distdiag.sources.dumps.findings import Findings


def without_dump(findings: Findings, decided: bool, running: bool) -> list[Finding]:
    """Return findings on every rank without a dump; such a rank is a culprit if another may be waiting for it.

    If another rank is the culprit and only messages wait for this one, it may itself have waited for that rank, as its
    neighbours in a pipeline do.

    Args:
        decided: Another finding explains why the job stopped.
        running: The job was running when the dumps were taken.
    """
    blame, loaded = findings.blame, findings.loaded
    silent = {r for r in loaded.missing if r in blame.silent}
    damaged: set[int] = set()
    if running or not (decided or blame.victims or loaded.other_runs):  # nothing has stopped, as far as dumps show
        blamed = []
    elif not decided:  # a dump that cannot be read is listed with its file, in `unreadable`
        damaged = {r for r in loaded.unreadable if r in blame.silent}
        blamed = sorted({*loaded.missing, *damaged})
    else:
        blamed = sorted(silent) if not _whole_nodes(loaded.missing, findings.snapshot.world_size) else []
    rest = tuple(r for r in loaded.missing if r not in blamed)
    out = [_silent(findings, blamed, decided, damaged)] if blamed else []
    apart = tuple(r for r in loaded.other_runs if r not in blamed)
    rest = tuple(r for r in rest if r not in apart)
    if apart:
        out.append(OTHER_RUN(ranks=apart, why=_other_runs(findings, apart)))
    if rest:
        why = "not given, dead, or stuck outside torch; no dump shows a rank that waits for {ranks:it|them}"
        if running:
            why = "not given, or dead"
        elif not silent.isdisjoint(rest):
            why = "whole nodes, whose files were not given, or which are dead"
        out.append(NOT_GIVEN(ranks=rest, why=filled(why, ranks=rest)))
    return out


def _other_runs(findings: Findings, ranks: Iterable[int]) -> str:
    return "; ".join(dict.fromkeys(findings.loaded.other_runs[r] for r in ranks))


def _silent(findings: Findings, blamed: list[int], decided: bool, damaged: Collection[int]) -> Finding:
    """Return the finding on ranks without a usable dump, for which others may wait."""
    blame, loaded, world = findings.blame, findings.loaded, findings.snapshot.world_size
    main = blame.silent_in or (None if decided else blame.main)
    among = sorted(main.ranks) if decided and main is not None else blame.victims
    waiting = [r for r in among if r not in blamed]
    here = [r for r in waiting if main is not None and r in main.ranks]
    inside = [r for r in here if main is not None and blame.oldest.get(r) is main.calls.get(r)] or here
    some = "" if len(inside) == len(waiting) else "{inside:#} of them " if len(inside) > 8 else "{inside} of them "
    waits = "; {waiting:#} {waiting:rank waits|ranks wait}, " + some + "in {what}" if waiting else ""
    first = sorted(main.missing.intersection(blamed)) if waiting and main is not None else []
    sooner = 0 < len(first) < len(blamed)
    apart = [r for r in blamed if r in loaded.other_runs]
    # most of the job, or whole nodes: their files were not collected, most likely
    part = bool(apart) or (not decided and (2 * len(blamed) > world or _whole_nodes(tuple(blamed), world)))
    unread = [] if part else [r for r in blamed if r in damaged]
    absent = [r for r in blamed if r not in apart and r not in unread]
    missing = [_other_runs(findings, apart)] if apart else []
    missing += [filled(ABSENT if part else LEFT_NONE, ranks=absent)] if absent else []
    missing += [filled("the dump of {ranks} cannot be read", ranks=unread)] if unread else []
    give = [f"give the dumps of {rank_list(absent)}{', too' * (not unread)}"] if absent else []
    give += [f"copy the dump of {rank_list(unread)} again"] if unread else []
    milder = (decided and main is not None and main.p2p) or (bool(apart) and not waiting)
    return (PART if part else SILENT)(
        severity=Severity.WARNING if milder else Severity.ERROR,
        culprits=() if part else blamed, ranks=blamed, victims=waiting, collective=findings.ref(main) if waiting else None,
        where=() if part else map(Where, blamed), waiting=findings.where(waiting),
        missing="; ".join(missing), give=" and ".join(give), other=" of this run" if apart else ", too", empty=EMPTIED if apart else "",
        first=filled(", those of {first} first" * sooner, first=first),
        waits=filled(waits + ", for {first}" * sooner, waiting=waiting, inside=inside, first=first, what=findings.text(main) if main is not None else ""),
        cost=NO_PROGRESS if waiting else "what these ranks did is not known",
    )  # fmt: skip


def unreadable(findings: Findings, given: Iterable[str | Path]) -> list[Finding]:
    """Return one finding on the files that should have been dumps."""
    bad, ranks = findings.loaded.bad, findings.loaded.unreadable
    if not bad:
        return []
    serious = bool(ranks) or not {str(p) for p in given}.isdisjoint(path for path, _ in bad)
    shown = "; ".join(f"{path}: {reason}" for path, reason in bad[:6])
    return [UNREADABLE(
        severity=Severity.ERROR if serious else Severity.WARNING, n=len(bad),
        whose=f" ({rank_list(ranks)})" if ranks else "",
        shown=shown + (f"; and {len(bad) - 6:,} more" if len(bad) > 6 else ""),
        cost=f"what {rank_list(ranks)} did is not known" if ranks else "", evidence=[path for path, _ in bad[:50]],
    )]  # fmt: skip


def _whole_nodes(missing: tuple[int, ...], world_size: int) -> bool:
    """True if the ranks without a dump are whole nodes of at least four ranks: their files were not collected, most likely."""
    sizes = [size for size in range(len(missing), 3, -1) if world_size % size == 0]
    return any(len({r // size for r in missing}) * size == len(missing) for size in sizes)


LEFT_NONE = "{ranks} left no dump: dead, stuck outside torch, or it was not collected"
ABSENT = "the dumps of {ranks} are not here"
EMPTIED = ", and empty the folder of dumps before each start"
SILENT = Template(kinds.RANK_LOST, "silent",
    "{missing}{waits}", "{cost}",
    "{give}; if there {ranks:is|are} none, see how the {ranks:process|processes} ended: exit code, `dmesg -T` for oom-kill or Xid, "
    "the launcher's log")  # fmt: skip
PART = Template(kinds.STALL, "unknown",
    "{missing}, so these do not show who is missing{waits}", "{cost}",
    "give the dumps of {ranks}{other}{first}{empty}; if there are none, see whether those hosts are up: exit code, `dmesg -T`, the launcher's log")  # fmt: skip
NOT_GIVEN = Template(kinds.RECORDER, "missing_dump",
    "{ranks} left no dump: {why}", "what {ranks} did is not known",
    "add the missing files, or see how those processes ended", severity=Severity.WARNING)  # fmt: skip
OTHER_RUN = Template(kinds.RECORDER, "missing_dump", "{why}", "they show nothing of this run",
    "leave out these files, and empty the folder of dumps before each start", severity=Severity.WARNING)  # fmt: skip
UNREADABLE = Template(kinds.RECORDER, "unreadable_dump",
    "{n:,} {n:file|files} cannot be read as a dump{whose}: {shown}", "{cost}",
    "copy the file again, or leave it out; nothing in it was executed", proved=True)  # fmt: skip
