"""Profile: where does the time of a step go? The newest `distdiag profile` of this run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.liveness import Monitor
from distdiag.store.reader import Run
from distdiag.traces import saved
from distdiag.traces.model import Comparison, Profile, RankTimes, parts_of
from distdiag.traces.text import place
from distdiag.tui.data import excerpt
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import bars
from distdiag.tui.draw.charts import GAP, side_by_side
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, line, rule
from distdiag.tui.draw.palette import PARTS
from distdiag.tui.draw.table import Column, choose, header, row
from distdiag.tui.draw.text import clean, clip, clip_left, counted, delta, fit, milliseconds, percent, quote, size, wrap
from distdiag.tui.screens.findings import source_blocks
from distdiag.tui.screens.page import Page
from distdiag.tui.ui import Ui

SOURCES = 3  # lines of the script whose source is shown


@dataclass(frozen=True)
class ProfileData:
    """The run's newest profile, if one was recorded; `damaged` names a file that holds none."""

    profile: Profile | None = None
    damaged: str | None = None
    sources: tuple[excerpt.Excerpt, ...] = ()  # of the lines that the rank under the cursor spends its time in


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> ProfileData:
    """Read the newest profile again only if its file has changed."""
    file = saved.newest_file(run.path)
    if file is None:
        return ProfileData()
    try:
        found = file.stat()
        key = (str(file), found.st_mtime_ns, found.st_size)
    except OSError:
        return ProfileData(damaged=str(file))
    if cache.get("profile_key") != key:
        profile = saved.read(file)
        cache["profile"] = ProfileData(profile, None if profile else str(file))
        cache["profile_key"] = key
    return replace(cache["profile"], sources=excerpt.cached(run, request.places, cache))


def _columns(scale_ms: float, colour: bool) -> tuple[Column[RankTimes], ...]:
    def bar(r: RankTimes, width: int) -> list[Part]:
        return bars.stacked(list(parts_of(r).items()), scale_ms, width, colour=colour, words=width >= 30)

    def head(width: int) -> list[Part]:
        made = bars.legend(width, colour=colour, parts=PARTS)
        return made if made else [(fit("step", width), "head", "")]

    return (
        Column("", "rank", 5, "global rank", lambda r: str(r.rank)),
        Column("", "step ms", 8, "time of a recorded step, mean", lambda r: milliseconds(r.step_ms)),
        Column("", "compute", 8, "operators on the CPU, or kernels", lambda r: milliseconds(r.compute_ms), ">", 2),
        Column("", "comm", 8, "collectives and messages", lambda r: milliseconds(r.comm_ms), ">", 3),
        Column("", "exposed", 8, "communication that no computation hides", lambda r: milliseconds(r.exposed_ms), ">", 1),
        Column("", "waits", 8, "of it: waiting for the last rank", lambda r: milliseconds(r.wait_ms), ">", 2),
        Column("", "idle", 8, "neither", lambda r: milliseconds(r.idle_ms + r.data_ms), ">", 2),
        Column("", "memory", 9, "peak: device, else resident", lambda r: size(r.peak_bytes), ">", 5),
        Column("", "", 20, "", lambda r: "", "<", 4, 60, 0, bar, head),
    )  # fmt: skip


class ProfilePage(Page[ProfileData]):
    name = title = "profile"
    question = "where does the time of a step go?"
    empty = ProfileData
    read = staticmethod(read)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        found, items = self.data(snap).profile, self.items(snap, ui)
        lines = found.ranks[ui.index("profile", items)].lines if found is not None and items else []
        sites = tuple((x.file, x.line) for x in lines if x.file and x.line)
        return Request("profile", ui.paused_at_s, places=sites[:SOURCES])

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        found = self.data(snap).profile
        return [r.rank for r in found.ranks] if found is not None else []

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = self.data(snap)
        sheet = self.sheet(snap, ui, width, height)
        found = data.profile
        if found is None:
            sheet.add(BLANK, *_nothing(snap, ui, data))
            return sheet.done()
        sheet.add(*_what(found, width)[: max(2, height // 4)])
        room = min(len(found.ranks), max(2, height // 3))
        chosen = choose(_columns(max((r.step_ms for r in found.ranks), default=0.0), ui.drawn), width, 2)
        sheet.add(header(chosen, 2))
        by_rank = {r.rank: r for r in found.ranks}

        def rows(ranks: Sequence[int]) -> Iterator[Line]:
            return (row(chosen, by_rank[rank], ((" " * 2, "", ""),), hit=f"row:{rank}") for rank in ranks)

        _, index = sheet.list(ui, "profile", list(by_rank), room, rows, "   ranks")
        if found.ranks:
            rank = found.ranks[index or 0]
            sheet.add(*_below(found, rank, width, sheet.left))
            sheet.add(*_source(data, rank, width, sheet.left))
        return sheet.done()


def _nothing(snap: Snapshot, ui: Ui, data: ProfileData) -> list[Line]:
    if data.damaged is not None:
        return [line(("   Not a profile: ", "warning"), clean(data.damaged))]
    out = [line("   No profile was recorded in this run.")]
    if snap.monitor is not Monitor.LIVE:
        return [*out, line(("   The job has ended: a profile is recorded while it runs.", "muted"))]
    if job_state(snap).word == "DEADLOCK":
        return [*out, line(("   No step ends any more: a profile is recorded while the job makes steps.", "muted"))]
    if ui.interactive:
        how = "   records three steps with torch.profiler; the script is not changed"
        out.append(line(("   R", "key"), (how, "muted")))
    return [*out, line((f"   distdiag profile {quote(snap.run)}   does the same from a shell", "muted"))]


def _what(p: Profile, width: int) -> list[Line]:
    last = (p.first_step or 0) + p.steps - 1
    steps = f"steps {p.first_step}–{last}" if p.first_step is not None else counted(p.steps, "step")
    out = [line((f"   profile {p.number}: {steps}, all times in ms per step", "muted"))]
    out += [line((f"   {x}", "warning")) for x in wrap(clean(p.verdict), width - 4)] if p.verdict else []
    out += [line((f"   rank {m.rank}: no profile: {clean(m.reason)}", "warning")) for m in p.missing[:3]]
    return [*out, BLANK]


def _below(p: Profile, chosen: RankTimes, width: int, height: int) -> list[Line]:
    """Return collectives, and what the chosen rank computes; two columns if there is room."""
    out = [BLANK]
    tail = _trace(p, width)
    collectives = _collectives(p, width, max(2, height // 4))
    room = height - len(collectives) - len(tail) - 1
    compared = p.comparison
    if compared is not None and chosen.rank in (compared.culprit, compared.peer):
        out += _comparison(compared, width)[:room]
    else:
        out += _hot(chosen, width, room)
    return [*out, *collectives, *tail]


def _hot(r: RankTimes, width: int, room: int) -> list[Line]:
    half = (width - GAP) // 2 if width >= 100 else width - 4
    operators = _listed("operator (self time)", [(clean(o.name), o.self_ms, r.step_ms) for o in r.operators], half)
    places = _listed(
        "line of the script (sampled)", [(place(x.file, x.line, x.function), x.ms, r.step_ms) for x in r.lines], half
    )
    out = [rule(width, f"rank {r.rank} ")]
    if width < 100:
        return [*out, *places[: max(2, (room - 1) // 2)], *operators][:room]
    return [*out, *side_by_side([operators, places], width)[: max(0, room - 1)]]


def _source(data: ProfileData, r: RankTimes, width: int, room: int) -> list[Line]:
    """Return the source around the lines that a rank spends its time in."""
    ms = {(x.file, x.line): (place(x.file, x.line, x.function), x.ms) for x in r.lines}
    known = [(s, *ms[s.file, s.line]) for s in data.sources if s.lines and (s.file, s.line) in ms]
    blocks = [(line("   ", (at, "bold"), (f"   {milliseconds(t)} ms a step", "muted")), s) for s, at, t in known]
    return source_blocks(blocks, width, room)


def _listed(title: str, rows: Sequence[tuple[str, float, float]], width: int) -> list[Line]:
    """Return a list of names with ms and share of the step, each line exactly `width` cells."""
    name = width - 3 - 10 - 9
    out = [line((f"   {fit(title, name)}{'ms':>10}{'of step':>9}", "head"))]
    for text, ms, step in rows:
        share = percent(100 * ms / step) if step > 0 else "–"
        out.append(line(f"   {fit(clip(text, name), name)}{milliseconds(ms):>10}{share:>9}"))
    return out


def _comparison(c: Comparison, width: int) -> list[Line]:
    name = min(70, width - 3 - 36)
    out = [rule(width, f"rank {c.culprit} ({clean(c.reason)}) compared with rank {c.peer} ")]
    head = f"   {fit('ms per step', name)}{f'rank {c.culprit}':>12}{f'rank {c.peer}':>12}{'difference':>12}"
    out.append(line((head, "head")))
    for d in c.rows:
        text = f"   {fit(clip(f'{d.kind}: {clean(d.name)}', name), name)}{milliseconds(d.culprit_ms):>12}{milliseconds(d.peer_ms):>12}"
        out.append(line(text, f"{delta(d.culprit_ms - d.peer_ms):>12}"))
    return out


def _collectives(p: Profile, width: int, room: int) -> list[Line]:
    if not p.collectives:
        return []
    name = max(12, min(34, width - 3 - 39 - 3 - 16))
    head = f"   {fit('collective', name)}{'per step':>9}{'bytes':>11}{'waits':>9}{'transfer':>10}   last"
    out = [BLANK, line((head, "head"))]
    for c in p.collectives[: room - 1]:
        late = f"rank {c.late_rank} ({percent(100 * c.late_share)})"
        text = f"   {fit(clean(c.op), name)}{c.per_step:>9g}{size(c.bytes_per_step):>11}{milliseconds(c.skew_ms):>9}{milliseconds(c.transfer_ms):>10}"
        out.append(line(text, (f"   {late}", "" if c.skew_ms > c.transfer_ms else "muted")))
    return out


def _trace(p: Profile, width: int) -> list[Line]:
    if not p.trace:
        return []
    lead = "   open in ui.perfetto.dev: "
    return [BLANK, line((lead, "muted"), clip_left(quote(p.trace), width - len(lead)))]
