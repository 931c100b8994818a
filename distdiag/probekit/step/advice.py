"""Recommend a strategy by a short decision tree: every question with its answer and figures."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from distdiag.probekit.step.paper import PaperRow, Sheet
from distdiag.probekit.step.possible import SINGLE
from distdiag.terms.units import counted, percent, size_text, time_text

_MOST_RANKS = 2**20  # to search for the least number of ranks
# what can hide an exchange, its share of the computing (backward takes about twice as long as forward), and what helps else
_HIDES = {
    "ddp": (2 / 3, "backward", "accumulate {} micro-batches with no_sync() to"),
    "fsdp": (1.0, "computing", "{} times the computing per exchange (a larger batch on each rank)"),
}
_WELL = ("yes", "accumulate")
_ACCEPTED_SHARE = 0.2  # of a step for an exchange that nothing hides


@dataclass(frozen=True, slots=True)
class Decision:
    question: str
    answer: str
    because: str

    def __str__(self) -> str:
        return f"{self.question} {self.answer}: {self.because}"


@dataclass(slots=True)
class Advice:
    """The recommended case (no strategy: nothing asked for fits) and the decisions.

    `least_ranks`: fewest ranks on which FSDP's state fits; None: on no number, or not asked.
    """

    strategy: str | None = None
    ranks: int | None = None
    fits: str = "no"
    least_ranks: int | None = None
    decisions: list[Decision] = field(default_factory=list)

    def take(self, row: PaperRow) -> None:
        self.strategy, self.ranks, self.fits = row.strategy, row.ranks, row.fits


def recommend(sheet: Sheet, ranks: list[int]) -> Advice:
    advice = Advice()
    single = sheet.row(SINGLE, 1)
    advice.decisions.append(
        Decision("Does the whole training state fit on one device?", _answer(single), _need(sheet, single))
    )
    several = [n for n in ranks if n > 1]
    if single.fits != "no":
        _copies(sheet, advice, single, several)
    if several and not (advice.strategy == "ddp" and advice.fits in _WELL):
        _divided(sheet, advice, several)
    if several and advice.strategy is None:
        _staged(sheet, advice, several)
    if advice.strategy is not None and advice.ranks is not None:
        row = sheet.row(advice.strategy, advice.ranks)
        if row.ranks > 1:
            advice.decisions.append(_link(sheet, row))
        advice.decisions.append(_batch(sheet, row))
    return advice


def _need(sheet: Sheet, row: PaperRow) -> str:
    """Return what the row needs on the device, as text."""
    parts = f"{size_text(row.state_bytes)} of parameters, gradients and optimizer state"
    if row.buffers_bytes:
        parts += f", {size_text(row.buffers_bytes)} of {'buckets' if row.strategy == 'ddp' else 'gathered blocks'}"
    if row.activations_bytes is not None:
        parts += f", {size_text(row.activations_bytes)} of activations"
        parts += f" ({counted(row.samples, 'sample')})" if row.strategy != "pipeline" else ""
    text = f"{parts}; the device has {size_text(sheet.memory_bytes)}"
    return (
        text
        if row.fits != "tight"
        else f"{text}, so less than {size_text(sheet.reserve_bytes(row.activations_bytes))} stay free"
    )


def _answer(row: PaperRow) -> str:
    return "yes, with accumulation" if row.fits == "accumulate" else row.fits


def _best(rows: list[PaperRow]) -> PaperRow | None:
    """Return the first row that fits well, else the first that is tight."""
    well = next((r for r in rows if r.fits in _WELL), None)
    return well or next((r for r in rows if r.fits == "tight"), None)


def _copies(sheet: Sheet, advice: Advice, single: PaperRow, several: list[int]) -> None:
    """Take one process, or DDP on all ranks if a whole copy fits on each."""
    advice.take(single)
    if not several:
        return
    row = sheet.row("ddp", max(several))
    because = _need(sheet, row)
    if row.fits not in _WELL:
        because += "; gradient_as_bucket_view=True saves the buckets"
    advice.decisions.append(Decision(f"Does DDP's copy fit on each of {row.ranks} ranks?", _answer(row), because))
    if row.fits != "no":
        advice.take(row)


def _divided(sheet: Sheet, advice: Advice, several: list[int]) -> None:
    """Take FSDP on the fewest ranks on which it fits well, if it fits better than the case taken before."""
    rows = [sheet.row("fsdp", n) for n in several]
    found = _best(rows)
    advice.least_ranks = _least(sheet, (*_WELL, "tight"))
    comfortable = _least(sheet, _WELL)
    shown = found or rows[-1]
    if advice.least_ranks is None:
        because = f"{_need(sheet, shown)}; more ranks do not help"
    else:
        because = f"at least {counted(advice.least_ranks, 'rank')}"
        if comfortable is not None and comfortable != advice.least_ranks:
            room = "memory" if shown.activations_bytes is not None else "memory for activations"
            share = sheet.reserve_bytes(shown.activations_bytes) / sheet.memory_bytes
            because += f", {counted(comfortable, 'rank')} to leave {percent(share)} of the {room}"
        because += f"; on {counted(shown.ranks, 'rank')} {_need(sheet, shown)}"
    question = f"Does the state fit if FSDP divides it over {_list(several)} ranks?"
    answer = _answer(found) if found is not None else "no"
    advice.decisions.append(Decision(question, answer, because))
    if found is not None and (advice.strategy in (None, SINGLE) or found.fits in _WELL):
        advice.take(found)


def _least(sheet: Sheet, answers: tuple[str, ...]) -> int | None:
    """Return the fewest ranks for which `fits` is one of `answers`; None if there are none. More ranks need no more memory."""
    ranks = range(2, _MOST_RANKS + 1)
    at = bisect.bisect_left(ranks, True, key=lambda n: sheet.row("fsdp", n).fits in answers)
    return ranks[at] if at < len(ranks) else None


def _staged(sheet: Sheet, advice: Advice, several: list[int]) -> None:
    """Take a pipeline if a stage fits where FSDP does not: it gathers nothing."""
    possible = [n for n in several if sheet.sizes.why_not("pipeline", n) is None]
    rows = [sheet.row("pipeline", n) for n in possible]
    found = _best(rows)
    question = "Does a stage of a pipeline fit on a device?"
    if found is not None:
        because = f"on {counted(found.ranks, 'rank')} {_need(sheet, found)}; with more ranks, FSDP can divide each stage further"
        advice.decisions.append(Decision(question, _answer(found), because))
        advice.take(found)
        return
    because = (
        f"on {counted(rows[-1].ranks, 'rank')} {_need(sheet, rows[-1])}" if rows else "the model has too few layers"
    )
    if advice.least_ranks is not None:
        because += f"; FSDP, or FSDP in each stage, needs at least {counted(advice.least_ranks, 'rank')}"
    because += "; otherwise larger devices, state on the host (CPUOffloadPolicy), or a smaller optimizer state"
    advice.decisions.append(Decision(question, "no", because))


def _link(sheet: Sheet, row: PaperRow) -> Decision:
    """Return how long the exchange of parameters and gradients takes, compared with computing."""
    question = "Does the link carry it?"
    if row.exchange_bytes is None:
        return Decision(
            question, "not computed", "stages exchange activations, not gradients; measure it on real ranks"
        )
    volume = f"{size_text(row.exchange_bytes)} per rank and step"
    if sheet.link is None or row.exchange_ms is None:
        return Decision(question, "not known", f"{volume}; give --link GB/s, or a saved `probe allreduce`")
    source = "" if sheet.link.source == "--link" else f" ({sheet.link.source})"
    text = f"{volume}, {time_text(row.exchange_ms * 1e3)} at {sheet.link.gbps:.3g} GB/s{source}"
    step_ms = sheet.paper.step_ms
    if step_ms is None:
        return Decision(question, "not known", f"{text}; give the computing of a step with --step-ms")
    text += f", computing takes {time_text(step_ms * 1e3)}"
    share = row.exchange_ms / (row.exchange_ms + step_ms)
    if share <= _ACCEPTED_SHARE:
        return Decision(question, "yes", f"{text}: {percent(share)} of a step even if nothing hides it")
    return _slow(row, text, step_ms)


def _slow(row: PaperRow, text: str, step_ms: float) -> Decision:
    assert row.exchange_ms is not None
    longer = math.ceil(row.exchange_ms / step_ms * (1 / _ACCEPTED_SHARE - 1))
    share, what, remedy = _HIDES[row.strategy]
    hidden = row.exchange_ms <= step_ms * share
    because = f"{text}: {what} {'can hide it at best' if hidden else 'cannot hide it'}; "
    because += f"{remedy.format(longer)} bring it to {percent(_ACCEPTED_SHARE)} of a step"
    if row.strategy == "fsdp" and not hidden:
        because += (
            "; or shard within a node and replicate between nodes (HSDP), or stages, which exchange activations only"
        )
    return Decision("Does the link carry it?", "only if hidden" if hidden else "no", because)


def _batch(sheet: Sheet, row: PaperRow) -> Decision:
    """Return how much of the batch fits at once, and the accumulation for the rest."""
    if row.activations_bytes is None:
        because = f"{size_text(row.left_bytes)} are left for activations"
        if row.buffers_bytes is None:
            because += " and FSDP's gathered blocks (--layers)"
        return Decision("Which batch?", "not known", f"{because}; give --activations, or --paper --model")
    question = f"Does the rank's part of a batch of {sheet.batch} fit at once?"
    samples = row.samples
    room = row.left_bytes - sheet.reserve_bytes(row.activations_bytes)
    most = math.floor(samples * room / row.activations_bytes) if row.activations_bytes else samples
    what = f"micro-batches of {samples}" if row.strategy == "pipeline" else counted(samples, "sample")
    text = f"{what} need {size_text(row.activations_bytes)} of {size_text(max(0.0, room))}"
    if most >= samples:
        return Decision(question, "yes", f"{text}; up to about {most:,} fit")
    if most < 1:
        return Decision(question, "no", f"{text}; recompute activations in backward (torch.utils.checkpoint)")
    count = -(-samples // most) * (-(-sheet.batch // samples) if row.strategy == "pipeline" else 1)
    verb = "take" if row.strategy == "pipeline" else "accumulate"
    return Decision(question, "no", f"{text}; {verb} {count} micro-batches of {most}")


def _list(ranks: list[int]) -> str:
    words = [f"{n:,}" for n in ranks]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
