"""Findings about distdiag itself: what it could not see or write. Each is reported once."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from itertools import chain

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text.phrases import at
from distdiag.monitor.missing_evidence import MissingEvidence
from distdiag.monitor.ranks.state import RankView
from distdiag.store.writer import Writer

CLOCK_JUMP_S = 2.0  # of the wall clock against the monotonic one
DRIVER_SILENT_S = 20.0  # NVML calls take milliseconds; initialising eight cards without persistence mode takes seconds
DISK = re.compile(r"full|no space|quota|disk i/o|read-?only|unable to open|permission", re.IGNORECASE)
MISSED_AFTER = 2_000  # steps
MISSED = (
    0.05  # share of a rank's steps from which on their loss is reported: a busy machine delays the monitor now and then
)
ADVICE = {
    "missed": "leave the monitor a core; the job is not slowed, and its findings use the steps that were read",
    "disk_full": "free the disk",
    "device_waits": "keep the flight recorder on (TORCH_FR_BUFFER_SIZE), and install distdiag with a C compiler",
    "unfollowed": "see where its ranks are with `distdiag dump`",
    "driver_silent": "see if `nvidia-smi` answers on this node; if not, drain it",
    "clock_skew": "compare times of this run by their differences, not by the clock",
}
_NOT_KNOWN = "who waits for whom in it is not known from then on, so waits in it are not judged"
UNFOLLOWED = {
    "reconfigure": ("gave other members to", _NOT_KNOWN),
    "shrink_group": ("took ranks out of", _NOT_KNOWN),
    "abort": ("aborted", "calls that are open in it end with that, so waits in it are not judged"),
    "new_window": (
        "made a one-sided window in",
        "puts, gets and signals show no peer, so waits for them are not judged",
    ),
}

SHOWN = 4  # texts of one finding


class OwnFaults:
    """Makes the findings of kind `recorder`, and remembers which were reported."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._device = MissingEvidence()
        self._device_waits: dict[int, list[str]] = {}  # by rank: what its findings have shown
        self.found: list[Finding] = []  # all so far, for the summary: on a full disk only that can show them

    def faults(
        self,
        t_s: float,
        views: Mapping[int, RankView],
        failures: Iterable[str],
        writer: Writer,
        started_unix_s: float,
        exchange: str | None = None,
        driver_silent_s: float | None = None,
        damaged: Mapping[str, tuple[int | None, str]] | None = None,
        contradicted: Iterable[Finding] = (),
        snapshot: Snapshot | None = None,
    ) -> list[Finding]:
        """Return the new findings of kind `recorder`.

        Args:
            t_s: Run time.
            views: All ranks.
            failures: Texts of exceptions in rules of the diagnosis.
            writer: Writer of run.db; counts failed writes.
            started_unix_s: Wall-clock time at which the run began.
            exchange: Why the exchange between nodes fails.
            driver_silent_s: Time since a request that NVIDIA's driver has not answered.
            damaged: Pages that cannot be read, by file: (rank, reason).
            contradicted: Proofs that the job has contradicted.
            snapshot: The snapshot that was judged.
        """
        damaged = damaged or {}
        out: list[Finding | None] = []
        for v in views.values():
            out += [self._new(key, t_s, cause, text, v.rank) for key, cause, text in self.of_rank(v)]
        for file, (rank, why) in damaged.items():
            whose = f"rank {rank}" if rank is not None else "one rank"
            text = f"the page of {whose} cannot be read ({why}): {whose} is not judged"
            out.append(self._new(f"damaged/{file}", t_s, "damaged_page", text, rank, Severity.WARNING))
        missing = [self._device.missing(views)]
        if snapshot is not None:
            missing += [self._device.unknown_hosts(snapshot), self._device.unknown_operations(snapshot)]
        for key, text, q in chain.from_iterable(missing):
            if key not in self._reported:  # one finding: its key has no group
                texts = self._device_waits.setdefault(q, [])
                texts.append(text)
                more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
                out.append(self._new(key, t_s, "device_waits", "; ".join(texts[:SHOWN]) + more, q))
        for n, f in enumerate(contradicted, 1):
            text = f"proofs that the job has contradicted: {n}; the newest, cleared at {f.cleared_s or t_s:.1f} s: {f.kind}: {f.message}"
            out.append(self._new(f"contradicted/{f.key}", t_s, "contradicted", text))
        jump_s = time.time() - started_unix_s - t_s
        if abs(jump_s) > CLOCK_JUMP_S:
            text = (
                f"this host's wall clock was set {'forward' if jump_s > 0 else 'back'} by {abs(jump_s):.0f} s during the "
                "run: dates may disagree with logs by that; durations do not"
            )
            out.append(self._new("clock", t_s, "clock_skew", text))
        if exchange:
            out.append(
                self._new(
                    "exchange", t_s, "nodes", f"{exchange}: ranks of other nodes are not judged together with these"
                )
            )
        if driver_silent_s is not None and driver_silent_s > DRIVER_SILENT_S:
            text = "NVIDIA's driver does not answer: GPU numbers are missing from now on"
            out.append(self._new("driver", t_s, "driver_silent", text, severity=Severity.WARNING))
        failed = "; ".join(failures)  # one finding for all
        if failed:
            out.append(self._new(failed, t_s, "failed", f"rules of the diagnosis failed: {failed}"))
        if writer.failed_writes and writer.last_error:
            text = f"the run could not be written: {writer.last_error}"
            full = DISK.search(writer.last_error) is not None
            out.append(self._new(text, t_s, "disk_full" if full else "failed", text, severity=Severity.WARNING))
        new = [f for f in out if f is not None]
        self.found += new
        return new

    @staticmethod
    def of_rank(v: RankView) -> list[tuple[str, str, str]]:
        """Return (key, cause, text) for each failure of one rank's recorder."""
        h, q, facts = v.header, v.rank, v.decoder.facts
        out = []
        if h.errors:
            out.append(
                (f"failed/{q}", "failed", f"the recorder of rank {q} failed {h.errors} times: {v.text(h.error)}")
            )
        if h.dropped:
            text = f"rank {q} dropped {h.dropped} records or more; its numbers are incomplete"
            out.append((f"dropped/{q}", "dropped", text))
        if h.n_steps > MISSED_AFTER and v.history.missed_steps > MISSED * h.n_steps:
            text = f"{v.history.missed_steps:,} of {h.n_steps:,} steps of rank {q} were overwritten before they were read: the monitor was too slow"
            out.append((f"missed/{q}", "missed", text))
        texts = [
            f"rank {q} {did} {group}{at(site)}: {lost}"
            for what, group, site in v.decoder.unfollowed
            if group != "?" and what in UNFOLLOWED
            for did, lost in (UNFOLLOWED[what],)
        ]
        if texts:  # one finding: its key has no group
            out.append((f"unfollowed/{q}/{len(texts)}", "unfollowed", "; ".join(texts)))
        missing = facts.get("unsupported")
        if missing:
            out.append(
                (
                    f"unsupported/{q}",
                    "unsupported_torch",
                    f"torch {facts.get('torch', '?')} lacks what distdiag uses: {missing}; what depends on it is not recorded",
                )
            )
        return out

    def _new(
        self, key: str, t_s: float, cause: str, text: str, rank: int | None = None, severity: Severity = Severity.INFO
    ) -> Finding | None:
        if key in self._reported:
            return None
        self._reported.add(key)
        return Finding(
            kind="recorder",
            cause=cause,
            severity=severity,
            certainty=Certainty.PROVED,
            culprits=() if rank is None else (rank,),
            first_seen_s=t_s,
            detected_s=t_s,
            message=text,
            cost="none" if cause == "clock_skew" else "none for the job; distdiag sees less",
            advice=ADVICE.get(cause, "report it with the run's directory"),
        )
