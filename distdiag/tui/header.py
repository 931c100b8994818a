"""The first lines of every screen: name, state, clock; step, speed, memory."""

from __future__ import annotations

from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.state import JobState, job_state
from distdiag.tui.draw.lines import BLANK, Line, Part, fitted, joined, line, width_of
from distdiag.tui.draw.text import (
    cells,
    clean,
    clip,
    clip_left,
    clock,
    decimal,
    gib,
    integer,
    milliseconds,
    percent,
    quote,
    spark,
)
from distdiag.tui.ui import Ui


def state_line(snap: Snapshot, job: JobState, width: int) -> Line:
    """Return ` distdiag  NAME  ● RUNNING  8 ranks / 1 node  gloo  00:04:31   reports/x`.

    Where it is narrow the path, the backend and then the name give way; the state and its text never do.
    """
    name = clean(snap.meta.get("name") or "") or clean(snap.run.name)
    attempt = snap.number("attempt")
    if attempt:
        name += f" (attempt {int(attempt)})"
    time = clock(snap.t_s) if snap.frame is not None else ""
    backend = clean(snap.meta.get("backend") or "")
    path = quote(snap.run)

    def build(name_width: int, with_backend: bool, with_time: bool, text: str) -> list[Part | tuple[str, str] | str]:
        parts: list[Part | tuple[str, str] | str] = [(" distdiag", "title")]
        if name_width:
            parts += ["  ", (clip(name, name_width), "bold")]
        parts += ["  ", (f"{job.glyph} {job.word}", f"{job.style} bold")]
        if text:
            parts += ["  ", text]
        if with_backend and backend:
            parts += ["  ", (backend, "muted")]
        if with_time and time:
            parts += ["  ", time]
        return parts

    choices = [
        (36, True, True),
        (24, True, True),
        (16, True, True),
        (16, False, True),
        (10, False, True),
        (0, False, True),
        (0, False, False),
    ]
    for name_width, with_backend, with_time in choices:
        out = line(*build(name_width, with_backend, with_time, job.text))
        if width_of(out) <= width:
            room = width - width_of(out) - 3
            return (
                (*out, ("   ", "", ""), (clip_left(path, room), "muted", "")) if room >= min(24, cells(path)) else out
            )
    fixed = width_of(line(*build(0, False, False, "")))
    return line(*build(0, False, False, clip(job.text, width - fixed - 2)))


def overflow(job: JobState, snap: Snapshot, width: int) -> str:
    """Return the state's text if the first line had to cut it; else an empty text."""
    fixed = cells(f" distdiag  {job.glyph} {job.word}  ")
    return job.text if cells(job.text) > width - fixed else ""


def step_line(snap: Snapshot, job: JobState, width: int) -> Line:
    """Return ` step 1203/2000  231 ms ▂▃▃▇█▇  18,450 samples/s  loss 0.512  mem max 62.2 GiB`."""
    s = snap.summary
    if snap.frame is None:
        return BLANK
    total = snap.number("max_steps")
    step = f" step {integer(s.step)}" + (f"/{int(total)}" if total else "")
    left: list[str | tuple[str, str]] = [step]
    if s.step is not None and s.step_behind is not None and s.step - s.step_behind > 1:
        left.append((f" (last rank {s.step_behind})", "muted"))
    if s.step is None or not s.step:
        left.append(("   no step yet: the first one includes compilation and the backend's set-up", "muted"))
        return fitted(line(*left), width)
    took = f"{milliseconds(s.step_ms)} ms" if s.step_ms is not None and not job.stuck else "– ms"
    left += ["  ", took, " "]
    tail: list[str] = []
    if s.samples_per_s and not job.stuck:
        tail.append(f"{decimal(s.samples_per_s, 0)} samples/s")
    if s.loss is not None:
        tail.append(f"loss {s.loss:.4g}")
    if s.wait_mean is not None and s.step_ms and not job.stuck:
        tail.append(f"waiting {percent(100 * s.wait_mean / s.step_ms)}")
    if s.memory_max_bytes:
        tail.append(f"{'device' if s.on_device else 'memory'} max {gib(s.memory_max_bytes)} GiB")
    if s.epoch is not None:
        tail.append(f"epoch {s.epoch}")
    used = width_of(line(*left))
    while tail and used + 12 + sum(cells(t) + 2 for t in tail) > width:
        tail.pop()
    bars = spark(snap.history, max(8, min(60, width - used - sum(cells(t) + 2 for t in tail))))
    left.append((bars, "accent"))
    left += [f"  {t}" for t in tail]
    return fitted(line(*left), width)


def head(snap: Snapshot, ui: Ui, width: int) -> tuple[list[Line], JobState]:
    """Return the two lines at the top of every screen, and the state they show."""
    job = job_state(snap)
    return [state_line(snap, job, width), step_line(snap, job, width)], job


def title_line(snap: Snapshot, ui: Ui, width: int, title: str, question: str, right: str = "") -> Line:
    """Return ` distdiag > comm   is the network the cause, or a rank?      RUNNING 00:04:31`: the header of the inner screens."""
    job = job_state(snap)
    end = line(
        (f"{job.glyph} {job.word}", f"{job.style} bold"), f" {clock(snap.t_s)}" if snap.frame is not None else ""
    )
    left = line((" distdiag > ", "muted"), (title, "title"), f"   {question}")
    if right:
        long = (*left, (f"   {right}", "muted", ""))
        if width_of(long) + width_of(end) < width:
            left = long
    if width_of(left) + width_of(end) >= width:
        left = line(
            (" > ", "muted"), (title, "title"), f"  {clip(question, max(0, width - width_of(end) - cells(title) - 7))}"
        )
    return joined(left, end, width)
