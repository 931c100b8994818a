"""The comparison on a terminal: a table, and bars."""

from __future__ import annotations

from distdiag.probekit.measure.probe import Column, Table, shown
from distdiag.probekit.step.rows import StepRow
from distdiag.probekit.verdict.result import Result
from distdiag.terms.units import size_text

_BAR = 40  # cells


def _size(value: float | None) -> str | None:
    return None if value is None else f"-{size_text(-value)}" if value < 0 else size_text(value)


def _waiting(row: StepRow) -> str | None:
    if row.exposed_share is not None:
        return f"{row.exposed_share:.0%}"
    return None if row.idle_share is None else f"{row.idle_share:.0%} idle"


_MEASURED = (
    Column("strategy", lambda row: row.label, left=True),
    Column("ranks", lambda row: str(row.ranks)),
    Column("threads", lambda row: str(row.threads)),
    Column("step ms", lambda row: f"{row.step_ms:,.1f}"),
    Column("95 % interval", lambda row: f"{row.ci95_ms[0]:,.1f} .. {row.ci95_ms[1]:,.1f}"),
    Column("epoch s", lambda row: f"{row.epoch_s:,.1f}"),
    Column("samples/s", lambda row: f"{row.samples_per_s:,.0f}"),
    Column("speed-up", lambda row: f"{row.speed_up:.2f}" + "*" * row.competing if row.speed_up else None),
    Column("95 % interval", lambda row: "{:.2f} .. {:.2f}".format(*row.speed_up_ci95) if row.speed_up_ci95 else None,
           optional=True),
    Column("efficiency", lambda row: f"{row.efficiency:.0%}" + "*" * row.competing if row.efficiency else None),
    Column("state/rank", lambda row: size_text(row.state_bytes)),
    Column("formula", lambda row: size_text(sum(row.expected_memory.values())) if row.expected_memory else None),
    Column("activations", lambda row: _size(row.activations_bytes)),
    Column("formula", lambda row: _size(row.expected_activations_bytes)),
    Column("peak/rank", lambda row: _size(row.peak_bytes or row.peak_host_bytes)),
    Column("exposed ms", lambda row: shown(row.exposed_ms, ".1f")),
    Column("of step", _waiting),
)  # fmt: skip
_ON_PAPER = (
    Column("strategy", lambda row: row.label, left=True),
    Column("ranks", lambda row: f"{row.ranks:,}"),
    Column("parameters", lambda row: size_text(row.parameters_bytes)),
    Column("gradients", lambda row: size_text(row.gradients_bytes)),
    Column("optimizer", lambda row: size_text(row.optimizer_bytes)),
    Column("buffers", lambda row: _size(row.buffers_bytes)),
    Column("left", lambda row: _size(row.left_bytes)),
    Column("activations", lambda row: _size(row.activations_bytes), optional=True),
    Column("fits", lambda row: row.fits),
    Column("exchange", lambda row: _size(row.exchange_bytes)),
    Column("exchange ms", lambda row: shown(row.exchange_ms, ",.1f"), optional=True),
)


def table(result: Result) -> Table:
    return Table.of(_ON_PAPER if "paper" in result.details else _MEASURED, result.rows)


def drawing(result: Result) -> list[str]:
    """Return bars of the step time; the light part of a bar is exposed communication or idle time."""
    if "paper" in result.details:
        return []
    rows: list[StepRow] = result.rows
    longest = max(r.step_ms for r in rows)
    full, light = "█", "░"
    names = [f"{r.label} x {r.ranks}" if result.details.get("rounds") and r.ranks > 1 else r.label for r in rows]
    width = max(map(len, names))
    lines = [f"{result.details['model']}, global batch {result.details['global_batch']}:"]
    for name, r in zip(names, rows, strict=True):
        share = r.exposed_share if r.exposed_share is not None else r.idle_share or 0.0
        cells = max(1, round(_BAR * r.step_ms / longest))
        waiting = min(cells, round(cells * share))
        lines.append(f"{name:<{width}}  {full * (cells - waiting)}{light * waiting} {r.step_ms:.1f} ms")
    if any(r.exposed_ms for r in rows):
        text = "exposed communication: the step against the same step without it"
        if any(r.strategy == "fsdp" and r.exposed_ms is not None for r in rows):
            text += "; of FSDP: time in all_gather and reduce_scatter, on the rank that waits least"
        lines.append(f"{'':<{width}}  {light} {text}")
    if any(r.strategy == "fsdp" and r.exposed_ms is None for r in rows):
        lines.append(
            "FSDP's exposed communication is not measured: on a device no call of the host waits for it, and older versions "
            "of torch have no hook for it"
        )
    if idle := [r for r in rows if r.idle_share is not None]:
        formula = ", ".join(f"{r.strategy} x {r.ranks} {r.expected_idle_share:.0%}" for r in idle)
        lines.append(f"{'':<{width}}  {light} of stages: idle. By formula, for equal stages: {formula}")
    if any(r.competing for r in rows):
        lines.append("* more ranks and threads than cores: they compete")
    if any(r.peak_host_bytes is not None for r in rows):
        lines.append(
            "state: parameters, gradients, SGD momentum; activations: saved for backward; formula: the same on paper; peak: "
            "resident memory above the process before the model was built"
        )
    return lines


def headline(result: Result) -> str:
    rows: list[StepRow] = result.rows
    return ", ".join(
        f"{r.strategy} {r.step_ms:.0f} ms" + (f" ({r.speed_up:.2f}x)" if r.speed_up and r.strategy != "single" else "")
        for r in rows
    )
