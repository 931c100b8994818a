"""The comparison on a terminal: a table, and bars."""

from __future__ import annotations

from distdiag.probekit.measure.probe import Table
from distdiag.probekit.step.paper import PaperRow
from distdiag.probekit.step.rows import StepRow
from distdiag.probekit.verdict.result import Result
from distdiag.terms.units import size_text

_BAR = 40  # cells


def table(result: Result, ascii_only: bool = False) -> Table:
    """Return one line for each strategy and number of ranks; those that cannot run are last, with a dash."""
    none = "-" if ascii_only else "–"
    if "paper" in result.details:
        return _on_paper(result, none)
    rows: list[StepRow] = result.rows
    headers = ["strategy", "ranks", "threads", "step ms", "95 % interval", "epoch s", "samples/s", "speed-up"]
    headers += ["95 % interval", "efficiency", "state/rank", "formula", "activations", "formula", "peak/rank"]
    headers += ["exposed ms", "of step"]
    lines = Table(headers, left={0})
    for r in rows:
        mark = "*" if r.competing else ""
        waits = r.exposed_share if r.exposed_share is not None else r.idle_share
        peak = r.peak_bytes or r.peak_host_bytes
        lines.rows.append(
            [
                r.label,
                str(r.ranks),
                str(r.threads),
                f"{r.step_ms:,.1f}",
                f"{r.ci95_ms[0]:,.1f} .. {r.ci95_ms[1]:,.1f}",
                f"{r.epoch_s:,.1f}",
                f"{r.samples_per_s:,.0f}",
                f"{r.speed_up:.2f}{mark}" if r.speed_up else none,
                f"{r.speed_up_ci95[0]:.2f} .. {r.speed_up_ci95[1]:.2f}" if r.speed_up_ci95 else none,
                f"{r.efficiency:.0%}{mark}" if r.efficiency else none,
                size_text(r.state_bytes),
                size_text(sum(r.expected_memory.values())) if r.expected_memory else none,
                size_text(r.activations_bytes) if r.activations_bytes is not None else none,
                size_text(r.expected_activations_bytes) if r.expected_activations_bytes is not None else none,
                size_text(peak) if peak is not None else none,
                f"{r.exposed_ms:.1f}" if r.exposed_ms is not None else none,
                f"{waits:.0%}" + (" idle" if r.exposed_share is None else "") if waits is not None else none,
            ]
        )
    if any(r.speed_up_ci95 for r in rows):
        return lines
    return _without(lines, 8)


def _on_paper(result: Result, none: str) -> Table:
    """Return memory by formula, one line for each case; columns that nothing is known for are left out."""
    rows: list[PaperRow] = result.rows
    headers = ["strategy", "ranks", "parameters", "gradients", "optimizer", "buffers", "left", "activations", "fits"]
    lines = Table([*headers, "exchange", "exchange ms"], left={0})
    for r in rows:
        known = r.buffers_bytes is not None
        sizes = [r.parameters_bytes, r.gradients_bytes, r.optimizer_bytes]
        lines.rows.append(
            [
                r.label,
                f"{r.ranks:,}",
                *(size_text(size) for size in sizes),
                size_text(r.buffers_bytes) if known else none,
                size_text(r.left_bytes) if r.left_bytes >= 0 else f"-{size_text(-r.left_bytes)}",
                size_text(r.activations_bytes) if r.activations_bytes is not None else none,
                r.fits,
                size_text(r.exchange_bytes) if r.exchange_bytes is not None else none,
                f"{r.exchange_ms:,.1f}" if r.exchange_ms is not None else none,
            ]
        )
    if all(r.exchange_ms is None for r in rows):
        lines = _without(lines, 10)
    return _without(lines, 7) if all(r.activations_bytes is None for r in rows) else lines


def _without(lines: Table, column: int) -> Table:
    kept = [[cell for i, cell in enumerate(row) if i != column] for row in [lines.headers, *lines.rows]]
    return Table(kept[0], kept[1:], lines.left)


def drawing(result: Result, ascii_only: bool = False) -> list[str]:
    """Return bars of the step time; the light part of a bar is exposed communication or idle time."""
    if "paper" in result.details:
        return []
    rows: list[StepRow] = result.rows
    longest = max(r.step_ms for r in rows)
    full, light = ("#", "=") if ascii_only else ("█", "░")
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


def not_possible(result: Result) -> list[str]:
    """Return one line for each number of ranks that some strategies cannot use, with the reasons."""
    by_ranks: dict[int, dict[str, list[str]]] = {}
    for entry in result.details["not_possible"]:
        by_ranks.setdefault(entry["ranks"], {}).setdefault(entry["reason"], []).append(entry["strategy"])
    return [
        f"on {ranks}: " + "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        for ranks, reasons in by_ranks.items()
    ]


def headline(result: Result) -> str:
    """Return one line for `all`."""
    rows: list[StepRow] = result.rows
    return ", ".join(
        f"{r.strategy} {r.step_ms:.0f} ms" + (f" ({r.speed_up:.2f}x)" if r.speed_up and r.strategy != "single" else "")
        for r in rows
    )
