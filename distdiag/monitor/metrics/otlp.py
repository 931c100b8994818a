"""Send the metrics by OTLP/HTTP, to the address in the standard variables OTEL_EXPORTER_OTLP_*; the SDK has a thread for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

import distdiag
from distdiag.monitor.metrics.table import METRICS, Metric, Poll, Ranks

END_MS = 2000  # for the last values; the job has ended, its launcher may not wait


class OtlpSender:
    """Sends the newest poll every OTEL_METRIC_EXPORT_INTERVAL milliseconds (60,000)."""

    def __init__(self, latest: Callable[[], Poll | None]) -> None:
        self._latest = latest
        self._ranks: Ranks | None = None
        self.failures = _Failures()
        log = logging.getLogger("opentelemetry")
        log.addHandler(self.failures)
        log.propagate = False  # else its warnings are printed on the job's stderr
        named = os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {SERVICE_NAME: "distdiag"})
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("distdiag", distdiag.__version__)
        for m in METRICS:
            create = meter.create_observable_counter if m.counter else meter.create_observable_gauge
            create(m.name, [self._callback(m)], unit=m.unit, description=m.help)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            poll = self._latest()
            if poll is None:
                return []
            if self._ranks is None or self._ranks.poll is not poll:
                self._ranks = Ranks(poll)
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for labels, value in metric.values(self._ranks)
            ]

        return observe

    def close(self) -> None:
        self._provider.force_flush(END_MS)
        self._provider.shutdown(END_MS)


class _Failures(logging.Handler):
    """Keeps the first failure of the SDK for the monitor's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.first is None:
            self.first = record.getMessage().partition("\n")[0][:300]
