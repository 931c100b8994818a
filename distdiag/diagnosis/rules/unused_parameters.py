"""unused_parameters: parameters that got no gradient, by name; or a search for unused parameters
that finds none.

Without find_unused_parameters, DDP refuses the forward after a backward that left one out. With it,
they are just never trained. Frozen ones (requires_grad False) are reported once as info, to
distinguish them from unused ones. Without DDP, the parameters of a torch optimizer that have no
gradient at any sampled step are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit.paths import Way, only_under
from distdiag.diagnosis.endings import UNUSED
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.gradient_cost import gradients
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import Model, RankState, Sample, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.replicas import limits as exchanged
from distdiag.diagnosis.replicas import step_site
from distdiag.diagnosis.text.conditions import conditions_text
from distdiag.diagnosis.text.drift import WAYS
from distdiag.diagnosis.text.phrases import where, wheres
from distdiag.diagnosis.text.template import Template, filled
from distdiag.terms.operations import family
from distdiag.terms.units import percent

kind = kinds.UNUSED_PARAMETERS


@dataclass(frozen=True)
class Limits:
    checks: int = 40
    """Checks before parameters without gradient are reported as info, if DDP expects unused
    parameters, and before find_unused_parameters is reported as not needed, if every parameter got
    a gradient in all of them."""
    never_checks: int = 100
    """The same before it is a warning: by then a rare branch has been taken."""
    measured: int = 10
    """Steps that DDP measured on each rank, before find_unused_parameters is reported as not needed: only there it is known
    which parameters the rank itself has used."""
    unchanged: int = 4
    """Newest checksums of the parameters that must be equal, or newest sampled steps without any gradient."""
    unchanged_steps: int = 64
    """Steps that they must span: a library may step its optimizer with nothing to do for some."""
    first_step: int = 2
    """First sampled step: a learning rate that is 0 since then may be a warm-up by epochs."""
    not_needed_share: float = 0.005
    """Share of the step that the search takes; below it, the flag is reported as info. A branch that
    is skipped once in some hundred steps needs the flag, and no check may have met it."""


limits = Limits()
# at the same steps, where there is something to sample
_SAMPLED = ("no_gradients", "not_stepped", "parameters", "reduced")

UNUSED_TEXT = Template(kind, "never_used",
    "{n:,} parameter{n:|s} ({elements:,} element{elements:|s}) {lack}: {shown}{site}{why}{branch}", "{cost}",
    "{do}", proved=True)  # fmt: skip
FROZEN = Template(kind, "frozen",
    "{m.frozen} of {all} parameters were frozen (requires_grad False) when DDP was built, so it does not wait for them: {shown}",
    "none, if that is intended", "set requires_grad before wrapping in DDP if you want to train them", proved=True,
    severity=Severity.INFO)  # fmt: skip
UNCHANGED = Template(kind, "not_updated", "no optimizer step changes the model of {victims} since step {step} or earlier: {why}",
    "these steps train nothing", "{do}", severity=Severity.WARNING, proved=True)  # fmt: skip
NEVER = Template(kind, "never_used",
    "{gathered}{n:,} of {all:,} parameters that the optimizer of {victims} steps ({share} of their elements{first}) {n:has|have} had no gradient at any of "
    "{times} sampled steps up to step {step}", "they are not trained", "{do}")  # fmt: skip
_WITHOUT_DDP = (
    "without DistributedDataParallel only parameters of torch's optimizers that never have a gradient are looked for"
)
UNREACHED = "; forward called their modules, but their output does not reach the loss"
GATHERED = "the all_gather{site}, in every step, passes no gradient on, unless an autograd function or `torch.distributed.nn` calls it"
NOT_STEPPED = Template(kind, "not_updated",
    "{n:,} parameter{n:|s} ({name}) of the module in DDP {n:gets|get} gradients, and no optimizer steps {n:it|them} (up to step {step}){stale}",
    "{n:it is|they are} not trained, and their gradients are computed and averaged for nothing",
    "build the optimizer after the last layer is added or replaced, or give it these parameters, too; if they are to stay as they are, "
    "`requires_grad_(False)` before DDP saves the time", severity=Severity.INFO)  # fmt: skip
REPLACED = Template(kind, "not_updated",
    "the optimizer steps {stale:,} parameter{stale:|s} that the model does not have (any more), and {n:,} parameter{n:|s} of the model ({name}) {n:gets|get} "
    "gradients and {n:is|are} in no optimizer (up to step {step})",
    "{n:it is|they are} not trained",
    "build the optimizer after the last layer is added or replaced: `fully_shard`, other wrappers and some conversions put new parameters into the "
    "model, each only into what it wraps", severity=Severity.WARNING, proved=True)  # fmt: skip
LOOSE = Template(kind, "not_updated",
    "{n:,} parameter{n:|s} ({name}) {n:gets|get} gradients, and no optimizer steps {n:it|them} (up to step {step}): the forward of the module "
    "in DDP calls {n:its|their} modules, but does not have them among its own",
    "{n:it is|they are} not trained, averaged or saved",
    "keep these modules in an `nn.ModuleList` or `nn.ModuleDict`, not in a list or dict, before DDP wraps the model and the optimizer is built; if "
    "they are to stay as they are, `requires_grad_(False)` saves the time", severity=Severity.WARNING)  # fmt: skip
NOT_NEEDED = Template(kind, "flag_not_needed",
    "find_unused_parameters=True{site}, but every parameter got a gradient in all {checks} checks (and was used by each rank "
    "in the {measured} newest steps that DDP measured there)",
    "{spent} spent searching the graph{gain}", "{do}")  # fmt: skip
_DO = {
    "frozen later": "freeze them before the model is wrapped in DDP, or wrap it again afterwards: DDP still expects their gradients",
    "expected": "freeze or remove them if they stay unused on purpose",
    "unused": "call {what} and use the output in the loss, or delete them; freeze them (requires_grad_(False)) before DDP if they are to stay; "
    "find_unused_parameters=True if steps use different parts of the model",
    "without graph": "call them with gradients on: outside `torch.no_grad()`, and activation checkpointing with use_reentrant=False, or "
    "with an input that requires gradients (`enable_input_require_grads()`); to leave them untrained, freeze them before DDP",
    "static": "leave out static_graph=True: it promises that every step uses the same parameters; pass "
    "find_unused_parameters=True if steps differ, or let all steps and all ranks take the same path",
    "library": "switch it off in the library that wraps the model (for Hugging Face, ddp_find_unused_parameters=False)",
    "no gradients": "call `zero_grad()` after the optimizer's step or before the forward, not between backward and step; and build the optimizer "
    "from the parameters of the model that is wrapped, after it was last copied, moved or replaced",
    "cut": "`dist.all_gather`, `.detach()`, `.data`, `.item()` and `no_grad` cut the graph: gather with "
    "`torch.distributed.nn.functional.all_gather`, or put the rank's own slice back into what was gathered; let the loss depend on every layer; "
    "freeze what is not to be trained (`requires_grad_(False)`)",
    "unchanged": "see whether gradients are zero when the optimizer steps (`zero_grad()` before it, a clipped or scaled loss), and whether the "
    "learning rate is too small for the dtype of the parameters",
    "no rate": "step the scheduler once per optimizer step, and make it for as many: if it is stepped for each micro-batch of an accumulation, "
    "its schedule ends too early; if the schedule is to be over, end the training",
    "flag": "drop the flag if no branch of the model is ever skipped",
}


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    snapshot = facts.snapshot
    models = [m for r in snapshot.ranks.values() for m in r.models]
    if (found := _unchanged(snapshot) or _not_stepped(snapshot) or _never(snapshot)) is not None:
        yield found
    if not models:
        if found is None:
            yield Abstained(_WITHOUT_DDP)
        return
    if not any(m.unused_checks for m in models):
        yield Abstained("no backward has been checked for missing gradients")
    case = _Case(snapshot, facts.source)
    if case.having and (found := _unused(case)) is not None:
        yield found
    frozen = {r.rank: m for r in snapshot.ranks.values() for m in r.models if m.frozen and m.forwards}
    if frozen and not any(x.kind == "unfrozen" for r in snapshot.ranks.values() for x in r.samples):
        m, sites = next(iter(frozen.values())), {q: x.site for q, x in frozen.items()}
        names = tuple(n for n, _ in m.frozen_names)
        yield FROZEN(
            victims=sorted(frozen), where=wheres(snapshot, sorted(frozen), None, sites), names=names,
            m=m, all=m.frozen + m.parameters, shown=_shown(names, m.frozen),
        )  # fmt: skip
    yield _not_needed(snapshot)


def _unchanged(s: Snapshot) -> Finding | None:
    """Return the finding of ranks whose optimizer steps and changes nothing."""
    of: dict[int, tuple[str, int, str]] = {}
    for q, r in s.ranks.items():
        every = _lasting(r, "no_gradients", lambda x, newest: x.value == _all(x))
        same = _lasting(r, "parameters", lambda x, newest: x.value == newest.value)
        at = {x.step for x in same}
        rates = [x.value for x in r.samples if x.kind == "learning_rate" and x.step in at]
        if every:
            why = f"none of its {every[-1].value:,.0f} parameters has a gradient when it steps"
            of[q] = "no gradients", every[0].step, why
        # without DDP, those that are compared may be frozen ones
        elif r.models and rates and (min(rates) > 0 or (max(rates) == 0 and same[0].step > limits.first_step)):
            why = f"its parameters are the same after each of {len(same)} steps that were compared, at a learning rate of {rates[-1]:.3g}"
            of[q] = "unchanged" if rates[-1] else "no rate", same[0].step, why
    if not of:
        return None
    why, step, text = of[min(of)]
    return UNCHANGED(victims=sorted(of), where=_steps_at(s, of), step=step, why=text, do=_DO[why])


def _steps_at(s: Snapshot, ranks: Iterable[int]) -> tuple[Where, ...]:
    """Return the lines at which the optimizers of these ranks step, as far as they are known."""
    sites = {q: site for q in sorted(ranks) if (site := step_site(s.ranks[q])) is not None}
    return wheres(s, sites, None, sites)


def _never(s: Snapshot) -> Finding | None:
    """Return the finding of ranks whose optimizer has some parameters without a gradient at every sampled step, with others that have one."""
    of: dict[int, list[Sample]] = {}
    for q, r in s.ranks.items():
        bare = _lasting(r, "no_gradients", lambda x, newest: _all(x) == _all(newest))
        if bare and 0 < bare[-1].value < _all(bare[-1]):
            of[q] = bare
    if not of:
        return None
    samples, gathered = of[min(of)], _gathered(s.ranks[min(of)])
    newest, share = samples[-1], (samples[-1].key >> 32) / 1e6
    sites = {q: gathered or next(iter(s.ranks[q].phase_stacks.get("backward", ())), None) for q in sorted(of)}
    return NEVER(
        victims=sorted(of), where=wheres(s, sites, None, sites), step=newest.step, n=int(newest.value), all=_all(newest),
        share="over 99 %" if share > 0.99 else "under 1 %" if share < 0.01 else percent(share), times=len(samples), do=_DO["cut"],
        first=f"; the first: {newest.name}" if newest.name else "",
        gathered=f"{_of_gather(gathered)}: " if gathered is not None else "",
        severity=Severity.WARNING if share > 0.5 else Severity.INFO,
    )  # fmt: skip


def _lasting(r: RankState, name: str, holds: Callable[[Sample, Sample], bool] = lambda x, newest: True) -> list[Sample]:
    """Return a rank's newest samples of a kind of which something holds, given the newest; nothing if they are too few, or it has
    been sampled since."""
    last = max((x.step for x in r.samples if x.kind in _SAMPLED), default=0)
    newest_first = [x for x in reversed(r.samples) if x.kind == name]
    found = list(itertools.takewhile(lambda x: holds(x, newest_first[0]), newest_first))[::-1]
    enough = len(found) >= limits.unchanged and found[-1].step == last >= found[0].step + limits.unchanged_steps
    return found if enough else []


def _all(x: Sample) -> int:
    """Return how many trained parameters the optimizer has of a sample of those without a gradient."""
    return x.key & 0xFFFFFFFF or int(x.value)


def _gathered(r: RankState) -> Site | None:
    """Return the line of an all_gather of more than metrics that a rank has called in each of its newest steps.

    None if its calls may be the backward pass of one: that of `torch.distributed.nn`, or of FSDP.
    """
    ops = [(c, found.name) for c in r.calls if (found := family(c.op)) is not None]
    large = (c for c, op in ops if op == "all_gather" and (c.bytes or 0) > exchanged.metrics_bytes)
    calls = [c for c in large if c.entered_s is not None]
    if not calls or any(op in ("reduce_scatter", "all_to_all", "reduce") for _, op in ops):
        return None
    ends = [x.end_s for x in r.steps if x.end_s >= (r.calls[0].entered_s or 0.0)]
    steps = list(itertools.pairwise(ends))
    last = [c for c in calls if c.site == calls[-1].site]
    every = all(any(a < (c.entered_s or 0.0) <= b for c in last) for a, b in steps)
    return last[-1].site if len(steps) >= limits.unchanged and every else None


def _not_stepped(s: Snapshot) -> Finding | None:
    """Return the finding of parameters that get gradients and are in no optimizer of any rank: a sharded one (ZeRO) steps each on one."""
    of: dict[int, Sample] = {}
    for q, r in s.ranks.items():
        if left := _lasting(r, "not_stepped"):
            of[q] = left[-1]
    if len(of) < len(s.ranks) or len({(x.value, x.name) for x in of.values()}) > 1:
        return None
    newest = of[min(of)]
    names, n = tuple(newest.name.split(", ")), int(newest.value)
    common: dict[str, Any] = {
        "victims": sorted(of), "where": _steps_at(s, of), "step": newest.step, "n": n, "name": _shown(names, n),
        "names": names,
    }  # fmt: skip
    if newest.key >> 32:
        return LOOSE(**common)
    if not any(r.models for r in s.ranks.values()):
        return REPLACED(**common, stale=newest.key)
    return NOT_STEPPED(
        **common, stale=f"; the optimizer has {newest.key:,} that the module does not have" if newest.key else "",
        severity=Severity.WARNING if newest.key else Severity.INFO,
    )  # fmt: skip


def _shown(names: tuple[str, ...], total: int, most: int = 4) -> str:
    rest = total - len(names[:most])
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


# -- unused ----------------------------------------------------------------------------------------------------------


@dataclass
class _Case:
    """Ranks whose DDP module had parameters without gradient, each with its newest such module."""

    snapshot: Snapshot
    source: Source

    @cached_property
    def having(self) -> dict[int, Model]:
        hit = {r.rank: [m for m in r.models if m.unused] for r in self.snapshot.ranks.values()}
        return {q: max(models, key=lambda m: m.unused_step) for q, models in hit.items() if models}

    @property
    def first(self) -> Model:
        return next(iter(self.having.values()))

    @cached_property
    def refused(self) -> set[int]:
        """Ranks whose forward DDP has refused because of them."""
        texts = {q: state.exception or state.caught or "" for q, state in self.snapshot.ranks.items()}
        return {q for q, m in self.having.items() if m.unused_site is not None or UNUSED.search(texts[q])}

    @property
    def expected(self) -> bool:
        """True if DDP expects unused parameters: of a static graph, the same in every step."""
        return bool(self.first.find_unused) or (self.first.static_graph and not self.refused)

    @cached_property
    def lacking(self) -> list[int]:
        """Ranks that were checked and had all gradients."""
        ranks = self.snapshot.ranks.values()
        return [r.rank for r in ranks if r.models and r.rank not in self.having and r.models[-1].unused_checks > 0]

    @property
    def differs(self) -> bool:
        """True if the ranks lack gradients of different parameters."""
        return len({tuple(n for n, _ in m.unused) for m in self.having.values()}) > 1 or bool(self.lacking)

    @property
    def frozen_later(self) -> bool:
        """True if every one of them was frozen after DDP was built."""
        return all(m.frozen_later for m in self.having.values())

    @cached_property
    def hooks_lost(self) -> bool:
        """True if DDP has refused the forward because of parameters on which its hooks are no longer."""
        ranks = [self.snapshot.ranks[q] for q in self.refused]
        return bool(ranks) and all(any(x.kind == "hooks_lost" and x.step == r.step for x in r.samples) for r in ranks)

    @property
    def severity(self) -> Severity:
        models, ranks = self.having.values(), self.snapshot.ranks.values()
        if self.expected:
            never = not self.refused and min(m.unused_checks for m in models) >= limits.never_checks
            accepted = self.first.flag_of_library or self.frozen_later
            return Severity.WARNING if never and not accepted else Severity.INFO
        refuses = any(m.find_unused is False and not m.static_graph and m.synced_backwards > 0 for m in models)
        stuck = any(r.blocked is not None and r.phase == "backward" for r in ranks)
        # if ranks differ and none hangs, they may have been checked at different steps
        certain = refuses and (stuck or not self.differs)
        return Severity.ERROR if self.refused or certain else Severity.INFO


def _unused(case: _Case) -> Finding | None:
    having, states, severity = case.having, case.snapshot.ranks, case.severity
    unused, differs = dict(p for m in having.values() for p in m.unused), case.differs
    checks = min(m.unused_checks for m in having.values())
    lack = f"got no gradient on {rank_list(having) if differs else 'any rank'}"
    if case.expected:
        lack = f"never got a gradient on any rank ({checks} checks)"
    if case.expected and not case.refused:  # the flag is for branches that are skipped now and then
        if len(having) < len(states) or checks < limits.checks:
            return None
        common = set.intersection(*({n for n, _ in m.never_trained} for m in having.values()))
        unused, differs = {n: k for n, k in case.first.never_trained if n in common}, False
        if not unused:
            return None
    if case.hooks_lost:
        lack = "lost DDP's hooks, so DDP does not see their gradients"
    shown = _shown(tuple(unused), len(unused))
    if differs and not case.lacking:  # each rank lacks others
        lack = "got no gradient, not the same on each rank"
        names = {q: tuple(n for n, _ in m.unused) for q, m in [*having.items()][:4]}
        shown = "; ".join(f"rank {q} {_shown(mine, len(mine), 2)}" for q, mine in names.items())
    culprits = sorted(having) if differs and case.lacking else []
    reached = case.expected and not case.refused and not case.hooks_lost and _entered(case.first, unused)
    gathered = _gathered(states[min(having)]) if reached else None
    unreached = UNREACHED + (f"; {_of_gather(gathered)}" if gathered is not None else "")
    crash = f"DDP {'refuses' if case.refused else 'will refuse'} the next forward"
    called = case.first.never_called if case.first.unused_step <= 1 and not differs else None
    # several layers of one module are called by calling that
    parts = zip(*(name.split(".") for name in called or ()), strict=False)
    module = ".".join(of[0] for of in itertools.takewhile(lambda of: len({*of}) == 1, parts))
    named = (f"`{module}`",) if module else tuple(f"`{name}`" for name in called or () if name)
    what = f"{_shown(named, len(named), 3)} in forward" if named else "them"
    do = _DO["frozen later" if case.frozen_later else "without graph" if case.first.without_graph
             else "cut" if reached else "expected" if case.expected else "static" if case.first.static_graph else "unused"]  # fmt: skip
    return UNUSED_TEXT(
        cause="differs_between_ranks" if differs else "never_used", severity=severity, culprits=culprits,
        victims=sorted(q for q, r in states.items() if r.models and q not in culprits),
        where=(where(states[q], "crashed" if q in case.refused else None, having[q].unused_site) for q in sorted(having)),
        names=unused, step=max(m.unused_step for m in having.values()), n=len(unused),
        elements=sum(unused.values()), lack=lack, shown=shown,
        site=next((m.unused_site for m in having.values() if m.unused_site), None), why=unreached if reached else _why(case),
        branch=_branch(case, culprits), cost=crash if severity == Severity.ERROR else "they are never trained",
        do=WAYS["hooks_lost"].do if case.hooks_lost else do.replace("{what}", what),
    )  # fmt: skip


def _entered(m: Model, names: Collection[str]) -> bool:
    """True if the first forward entered, with gradients on, the modules of most of these parameters."""
    if m.never_called is None or m.without_graph or m.frozen_later:
        return False
    entered = [name for name in names if name.rpartition(".")[0] not in m.never_called]
    return 2 * len(entered) > len(names)


def _of_gather(site: Site) -> str:
    return filled(GATHERED, site=Site(site.file, site.line, site.function))


def _why(case: _Case) -> str:
    """Return that they are converted or frozen, or whether their modules were entered at all, if that was seen."""
    if case.hooks_lost:
        return "; they got another dtype or device after DDP was built, which replaces the autograd nodes that have these hooks"
    if case.frozen_later:
        return "; they were frozen (requires_grad False) after DDP was built"
    if case.first.static_graph and case.refused:
        return f"; static_graph=True allows no other graph than that of the first step, and step {case.first.unused_step:,} had one"
    m = case.first
    if m.never_called is None or m.unused_step > 1:
        return ""
    if m.without_graph:
        return "; forward called their modules with gradients off, so their output has no graph"
    if not m.never_called:
        return UNREACHED
    names = tuple(n or "the model itself" for n in m.never_called)
    return f"; forward never called {_shown(names, len(names), 3)}"


def _branch(case: _Case, culprits: list[int]) -> str:
    """Return the conditions under which modules are called that got no gradient on some ranks only."""
    if not culprits:
        return ""
    modules = {name.rpartition(".")[0].rpartition(".")[2] for q in culprits for name, _ in case.having[q].unused}
    places = [m.unused_site or case.snapshot.ranks[q].current_site for q, m in case.having.items() if q in culprits]
    files = {x.file for x in (*places, *(m.site for m in case.having.values())) if x is not None}
    found = {c for name in modules - {""} for file in files if (c := only_under(name, file, case.source)) is not None}
    around = [c for c in sorted(found) if c.way is not Way.SKIPPED]
    shown = conditions_text((around or sorted(found))[:2])
    if not shown:
        return ""
    return f"; they are used only {shown}" if around else f"; {shown} returns before they are used"


# -- a search that finds nothing -------------------------------------------------------------------------------------


def _not_needed(s: Snapshot) -> Finding | Abstained:
    models = [m for r in s.ranks.values() for m in r.models if m.find_unused]
    abstained = partial(Abstained, cause="flag_not_needed")
    if not models:
        return abstained("find_unused_parameters is not set", checked=True)
    checks = min(m.unused_checks for m in models)
    if s.usual_step_s is None or len(s.ranks) < s.world_size or any(m.search_ms is None for m in models):
        return abstained("the cost of find_unused_parameters is not measured yet")
    if any(m.unused_hits for m in models):
        return abstained("parameters without gradient were found, as find_unused_parameters expects", checked=True)
    measured = min(len(r.ddp_times) for r in s.ranks.values())
    if checks < limits.checks or measured < limits.measured:
        return abstained(
            f"{checks} of {limits.checks} checks of find_unused_parameters, and {measured} of {limits.measured} steps measured by DDP"
        )
    m, step_ms, cost_ms = models[0], s.usual_step_s * 1e3, max(m.search_ms or 0.0 for m in models)
    small = cost_ms < limits.not_needed_share * step_ms
    spent = f"{cost_ms:.1f} ms per step ({percent(cost_ms / step_ms)} of it)"
    if small:
        spent = f"{cost_ms:.2f} ms per step ({100 * cost_ms / step_ms:.2f} % of it)"
    return NOT_NEEDED(
        # a library's default is no fault of the script, however much it costs
        severity=Severity.INFO if small or m.flag_of_library else Severity.WARNING, victims=sorted(s.ranks),
        where=(where(r, None, x.site) for r in s.ranks.values() for x in r.models[:1]), site=m.site,
        checks=checks, measured=measured, spent=spent, gain=_gain_text(s, step_ms),
        do=_DO["library" if m.flag_of_library else "flag"],
    )  # fmt: skip


def _gain_text(s: Snapshot, step_ms: float) -> str:
    """Return what a step would gain without the flag: at least the search of the fastest rank,
    which is measured.

    With the flag, DDP also sums the used parameters over the ranks and never sorts its buckets by
    the order of the gradients. Both lengthen the exposed communication, and cannot cost more than
    all of it.
    """
    searched = [[m.search_ms or 0.0 for m in r.models if m.find_unused] for r in s.ranks.values()]
    of_rank = [max(ms) / step_ms for ms in searched if ms]
    least, ddp = f"{100 * min(of_rank):.1f}", gradients(s)
    limit = f"at least {least}" if ddp is None else f"{least} to {100 * min(1.0, max(of_rank) + ddp.share):.1f}"
    return f"; without the flag, a step would take {limit} % less (DDP also exchanges which parameters are used)"
