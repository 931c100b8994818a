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


def parse_metrics(text: str) -> Targets:
    """Return the targets of `PORT`, `HOST:PORT`, `otlp`, or an address and `otlp` with a comma; none of an empty text or `0`.

    Port 0, as in `127.0.0.1:0`, is any free port.

    Raises:
        DistdiagError: it is none of them.
    """
    targets = Targets()
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word == "0":
            continue  # as for DISTDIAG=0: off
        if word == "otlp":
            targets = targets._replace(otlp=True)
            continue
        host, _, port = word.rpartition(":")
        if targets.address or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise DistdiagError(
                f"--metrics {text} is no address for /metrics", "give PORT, HOST:PORT or otlp: --metrics 9464"
            )
        targets = targets._replace(address=(host.strip("[]") or LOOPBACK, int(port)))
    return targets


def check_metrics(text: str | None) -> None:
    """Check a value of `--metrics`, and that its packages are installed.

    Raises:
        DistdiagError: as `parse_metrics` and `need_packages`.
    """
    need_packages(parse_metrics(text or ""))


def need_packages(targets: Targets) -> None:
    """Check that the packages for these targets are installed.

    Raises:
        DistdiagError: one is missing; the hint installs it.
    """
    if targets.address is not None:
        need(("prometheus_client",), "/metrics")
    if targets.otlp:
        need(("opentelemetry",), "OTLP")
