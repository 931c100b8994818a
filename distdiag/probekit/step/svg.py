"""The comparison as one SVG file: step times, the scaling curve with the ideal line, memory per rank."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from distdiag.errors import DistdiagError
from distdiag.probekit.step.rows import StepRow
from distdiag.probekit.verdict.result import Result
from distdiag.terms.units import size_text

# Okabe and Ito's colours, for all kinds of colour vision
COLOURS = {
    "single": "#9A9A9A", "single-threads": "#555555", "dataparallel": "#CC79A7", "ddp": "#0072B2", "fsdp": "#E69F00",
    "model": "#D55E00", "pipeline": "#009E73",
}  # fmt: skip
_WIDTH, _LEFT, _BAR, _ROW = 900, 250, 470, 20
_INK, _LINE = "#222222", "#D0D0D0"
_MOST_OF_AXIS = 2.0  # a wide interval is cut off instead of compressing the chart


def write(result: Result, path: str) -> None:
    try:
        Path(path).write_text(draw(result), "utf-8")
    except OSError as e:
        raise DistdiagError(f"cannot write {path}: {e.strerror}", "choose another file with --svg") from e


def draw(result: Result) -> str:
    """Return the file's text; what the user named (the model) is escaped."""
    rows: list[StepRow] = result.rows
    parts: list[str] = []
    model, batch = result.details["model"], result.details["global_batch"]
    y = _text(parts, 12, 22, f"{model}, global batch {batch}, {result.backend} on {result.device}", size=15)
    y = _times(parts, rows, y + 24)
    y = _scaling(parts, rows, y + 30)
    y = _memory(parts, rows, y + 30)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 12:.0f}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _text(parts: list[str], x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> float:
    parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>')
    return y


def _rect(parts: list[str], x: float, y: float, width: float, colour: str, opacity: float = 1.0) -> None:
    parts.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="14" fill="{colour}" fill-opacity="{opacity}"/>'
    )


def _line(parts: list[str], x1: float, y1: float, x2: float, y2: float, colour: str = _INK, dash: str = "") -> None:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>')


def _name(row: StepRow) -> str:
    return (f"{row.label} x {row.ranks}" if row.ranks > 1 else row.label) + (" *" if row.competing else "")


def _times(parts: list[str], rows: list[StepRow], y: float) -> float:
    """Draw bars of the step time with their intervals; the light part is exposed communication or idle time."""
    y = _text(
        parts, 12, y, "time of a step, ms, with 95 % interval; light: exposed communication, or idle stages", size=13
    )
    longest = min(max(r.ci95_ms[1] for r in rows), _MOST_OF_AXIS * max(r.step_ms for r in rows))
    for r in rows:
        y += _ROW
        _text(parts, _LEFT - 8, y + 11, _name(r), "end")
        width = _BAR * r.step_ms / longest
        waiting = width * (r.exposed_share if r.exposed_share is not None else r.idle_share or 0.0)
        colour = COLOURS[r.strategy]
        _rect(parts, _LEFT, y, width - waiting, colour)
        _rect(parts, _LEFT + width - waiting, y, waiting, colour, 0.35)
        low, high = (_LEFT + _BAR * min(1.0, v / longest) for v in r.ci95_ms)
        _line(parts, low, y + 7, high, y + 7)
        text = f"{r.step_ms:,.1f} ms, epoch {r.epoch_s:,.0f} s"
        _text(parts, max(high, _LEFT + width) + 8, y + 11, text)
    if any(r.competing for r in rows):
        y = _text(parts, _LEFT, y + 32, "* more ranks and threads than cores: they compete", size=11)
    return y + _ROW


def _scaling(parts: list[str], rows: list[StepRow], y: float) -> float:
    """Draw the speed-up over ranks (or threads, copies), with the ideal line."""
    points = [(max(r.ranks, r.threads if r.strategy == "single-threads" else 1), r) for r in rows if r.speed_up]
    if len(points) < 2:
        return y - 30
    y = _text(parts, 12, y, "speed-up against the single process, over ranks (dashed: ideal)", size=13) + 12
    top_x = max(n for n, _ in points)
    highest = max(r.speed_up_ci95[1] if r.speed_up_ci95 else r.speed_up or 0.0 for _, r in points)
    top_y = max(top_x, *(r.speed_up or 0.0 for _, r in points), min(highest, _MOST_OF_AXIS * top_x))
    height, width = 220.0, float(_BAR)

    def at(n: float, value: float) -> tuple[float, float]:
        return _LEFT + width * (n - 1) / max(1, top_x - 1), y + height - height * value / top_y

    _line(parts, *at(1, 1), *at(top_x, top_x), _INK, "6 4")
    for value in range(0, int(top_y) + 1, max(1, int(top_y) // 8)):
        _line(parts, *at(1, value), *at(top_x, value), _LINE)
        _text(parts, _LEFT - 8, at(1, value)[1] + 4, str(value), "end")
    for n in sorted({n for n, _ in points}):
        _text(parts, at(n, 0)[0], y + height + 16, str(n), "middle")
    legend = y + 10
    for strategy in dict.fromkeys(r.strategy for _, r in points if r.strategy != "single"):
        own = sorted(((n, r) for n, r in points if r.strategy == strategy), key=lambda p: p[0])
        colour = COLOURS[strategy]
        line = [at(1, 1), *(at(n, r.speed_up or 0.0) for n, r in own)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, r in own:
            x, centre = at(n, r.speed_up or 0.0)
            parts.append(f'<circle cx="{x:.1f}" cy="{centre:.1f}" r="3.5" fill="{colour}"/>')
            if r.speed_up_ci95:
                low, high = (min(v, top_y) for v in r.speed_up_ci95)
                _line(parts, x, at(n, low)[1], x, at(n, high)[1], colour)
        _rect(parts, _LEFT + width + 30, legend - 10, 14, colour)
        _text(parts, _LEFT + width + 50, legend + 1, strategy)
        legend += _ROW
    return y + height + 24


def _memory(parts: list[str], rows: list[StepRow], y: float) -> float:
    """Draw bars of parameters, gradients and optimizer state, a mark at the formula, and the peak as a number."""
    title = "memory of a rank: parameters, gradients, optimizer state (dark to light); mark: formula"
    y = _text(parts, 12, y, title, size=13)
    largest = max(1, *(r.state_bytes for r in rows))
    for r in rows:
        y += _ROW
        _text(parts, _LEFT - 8, y + 11, _name(r), "end")
        x = float(_LEFT)
        for share, opacity in zip(r.memory.values(), (1.0, 0.65, 0.35), strict=False):
            _rect(parts, x, y, _BAR * share / largest, COLOURS[r.strategy], opacity)
            x += _BAR * share / largest
        if r.expected_memory:
            mark = _LEFT + _BAR * sum(r.expected_memory.values()) / largest
            _line(parts, mark, y - 2, mark, y + 16)
        peak = r.peak_bytes if r.peak_bytes is not None else r.peak_host_bytes
        text = size_text(r.state_bytes) + (f", peak {size_text(peak)}" if peak is not None else "")
        _text(parts, x + 8, y + 11, text)
    return y + _ROW
