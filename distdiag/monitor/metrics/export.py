"""Hand each full poll to the exporters that DISTDIAG_METRICS asks for; a failure costs the metrics, nothing else."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.errors import DistdiagError
from distdiag.monitor.metrics.table import Poll
from distdiag.store.opening import RunUnreadable, size_of
from distdiag.store.probes import hosts_and_bandwidth
from distdiag.store.reader import open_run
from distdiag.terms.metrics_targets import Targets, parse_metrics

PROBES_S = 15.0  # between two reads of the probes that a person has recorded into the run


class Exporters:
    """The exporters of one monitor. None of its methods raises or waits for a reader."""

    def __init__(self, text: str, run_dir: Path, node: int) -> None:
        self.run_dir, self.node = run_dir, node
        self.where: str | None = None  # address of /metrics, if it is served
        self.failures: list[str] = []  # one line each, not yet reported
        self._latest: Poll | None = None  # replaced as a whole: exporters read it from their threads without a lock
        self._probes: tuple[float, dict[str, tuple[float | None, bool]]] = (-PROBES_S, {})
        self._server: Any = None
        self._otlp: Any = None
        self._polls = 0
        self._reported: Counter[tuple[str, str]] = Counter()
        self._counted: set[object] = set()
        with self._guarded("metrics are not exported"):
            self._start(parse_metrics(text))

    def _start(self, targets: Targets) -> None:
        if targets.address is not None:
            with self._guarded(f"/metrics is not served on {':'.join(map(str, targets.address))}"):
                from distdiag.monitor.metrics.prometheus import MetricsServer

                self._server = MetricsServer(targets.address, self.latest)
                self.where = self._server.where
        if targets.otlp:
            with self._guarded("OTLP is off"):
                from distdiag.monitor.metrics.otlp import OtlpSender

                self._otlp = OtlpSender(self.latest)

    @property
    def on(self) -> bool:
        return self._server is not None or self._otlp is not None

    def publish(
        self, s: Snapshot, own: Collection[int], started_unix_s: float, diagnosis: Diagnosis, faults: Iterable[Finding],
        changed: Iterable[Finding], database: Path, began: float,
    ) -> None:  # fmt: skip
        """Replace the poll that exporters serve."""
        if not self.on:
            return
        self._polls += 1
        for f in changed:
            if f.cleared_s is None and (f.key, f.severity) not in self._counted:
                self._counted.add((f.key, f.severity))
                self._reported[str(f.kind), str(f.severity)] += 1
        with self._guarded("metrics of a poll are missing"):
            self._latest = Poll(
                snapshot=s, own=frozenset(own), node=self.node, started_unix_s=started_unix_s, state=str(diagnosis.state),
                findings=(*diagnosis.open(), *faults), reported=dict(self._reported), polls=self._polls,
                poll_s=time.monotonic() - began, cpu_s=time.process_time(),
                probes=self._probes[1], memory_bytes=psutil.Process().memory_info().rss, database_bytes=size_of(database) or None,
            )  # fmt: skip
        if self._server is not None and self._server.failure is not None:
            self._fail(f"/metrics: {self._server.failure}")
        if self._otlp is not None and (first := self._otlp.failures.first) is not None:
            self._fail(f"OTLP: {first}")

    def latest(self) -> Poll | None:
        """Return the newest poll. The exporters' threads call this, and read the probes for the next one."""
        if time.monotonic() - self._probes[0] >= PROBES_S:
            self._probes = (time.monotonic(), _recorded_probes(self.run_dir))
        return self._latest

    def close(self) -> None:
        """Send the last values where something is sent."""
        with self._guarded("the last metrics are lost"):
            if self._otlp is not None:
                self._otlp.close()

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except DistdiagError as e:
            self._fail(f"{what}: {e.message}; {e.hint}")
        except Exception as e:  # of a library: the job and its verdict do not depend on it
            reason = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else f"{type(e).__name__}: {e}"
            self._fail(f"{what}: {reason}")

    def _fail(self, text: str) -> None:
        if text not in self._counted:  # each once
            self._counted.add(text)
            self.failures.append(text)


def _recorded_probes(run_dir: Path) -> dict[str, tuple[float | None, bool]]:
    try:
        with open_run(run_dir) as run:
            return {p.name: (hosts_and_bandwidth(p.json)[1], p.verdict == "pass") for p in run.probes()}
    except RunUnreadable:
        return {}
