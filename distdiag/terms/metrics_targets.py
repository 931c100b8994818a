"""Where a monitor's metrics go: the value of DISTDIAG_METRICS and `--metrics`."""

from __future__ import annotations

from typing import NamedTuple

from distdiag.errors import DistdiagError, need

VARIABLE = "DISTDIAG_METRICS"
LOOPBACK = "127.0.0.1"


class Targets(NamedTuple):
    """Address of /metrics, if it is served, and whether OTLP/HTTP sends to what OTEL_EXPORTER_OTLP_* name."""

    address: tuple[str, int] | None = None
    otlp: bool = False


def parse_metrics(text: str | None) -> Targets:
    """Return the targets of `PORT`, `HOST:PORT`, `otlp`, or an address and `otlp` with a comma.

    An empty text and `0` have none. Port 0, as in `127.0.0.1:0`, is any free port.

    Raises:
        DistdiagError: it is none of them, or its package is not installed; the hint installs it.
    """
    targets = Targets()
    for word in filter(None, (part.strip() for part in (text or "").split(","))):
        if word == "0":
            continue  # as for DISTDIAG=0: off
        if word == "otlp":
            targets = targets._replace(otlp=True)
            continue
        host, _, port = word.rpartition(":")
        if targets.address or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
            raise DistdiagError(
                f"--metrics {text} is no address for /metrics", "give PORT, HOST:PORT or otlp: --metrics 9464"
            )
        targets = targets._replace(address=(host.strip("[]") or LOOPBACK, int(port)))
    if targets.address is not None:
        need(("prometheus_client",), "/metrics")
    if targets.otlp:
        need(("opentelemetry",), "OTLP")
    return targets
