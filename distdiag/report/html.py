"""One self-contained HTML file: no script, no font, no picture from elsewhere; all text from the job is escaped."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from distdiag.diagnosis.model.findings import rank_list, ranks_seen
from distdiag.report import words
from distdiag.report.facts import RunFacts, lasted, notable_ranks
from distdiag.terms import units
from distdiag.terms.steps import RATE
from distdiag.traces.text import ms_text, path_text, place

MAX_RANKS = 64
MAX_BARS = 32
MAX_COLLECTIVES = 40


def render(facts: RunFacts) -> str:
    from distdiag.report import charts

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # what is not markup of ours has its control characters written out, and is escaped after that
        finalize=lambda v: v if isinstance(v, Markup) else units.MISSING if v is None else words.visible(v),
    )
    environment.globals.update(
        ms=words.milliseconds, from_us=words.from_us, number=words.number, percent=units.percent, size=units.size_text, rate=units.rate_text,
        duration=units.duration, gradient_times=words.gradient_times, of_rate=RATE, gradient_words=words.gradient_words, moment=words.moment,
         rank_list=rank_list, ranks_seen=ranks_seen, trace_ms=ms_text, place=place, path_text=path_text,
    )  # fmt: skip
    shown = notable_ranks(facts.ranks, MAX_RANKS)
    timed = tuple(r for r in shown if r.step_ms is not None)
    return environment.get_template("report.html.j2").render(
        f=facts,
        lasted=lasted(facts),
        worst=facts.open_findings[0] if facts.open_findings else None,
        ranks=shown,
        collectives=facts.collectives[:MAX_COLLECTIVES],
        step_chart=Markup(charts.svg(charts.draw_step_time, facts.series, facts.findings))
        if len(facts.series) > 1
        else None,
        profile_chart=Markup(charts.svg(charts.draw_profile, facts.profile.ranks[:MAX_BARS]))
        if facts.profile and facts.profile.ranks
        else None,
        phase_chart=Markup(charts.svg(charts.draw_phases, notable_ranks(timed, MAX_BARS))) if timed else None,
    )
