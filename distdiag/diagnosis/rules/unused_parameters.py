"""unused_parameters: parameters that got no gradient, by name; or a search for unused parameters
that finds none.

Without find_unused_parameters, DDP refuses the forward after a backward that left one out. With it,
they are just never trained. Frozen ones (requires_grad False) are reported once as info, to
distinguish them from unused ones.

Faulty jobs: pose_heads, lang_adapters, safe_flag, lit_gan. Healthy look-alikes: frozen_backbone,
layer_drop, frozen_head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit.parting import only_under
from distdiag.diagnosis.endings import UNUSED
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.gradient_cost import gradients
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.guards import Source
from distdiag.diagnosis.model.snapshot import Model, RankState, Snapshot
from distdiag.diagnosis.text.phrases import where, wheres
from distdiag.diagnosis.text.template import Template
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
    not_needed_share: float = 0.001
    """Share of the step that the search takes; below it, the flag is reported as info."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield findings about parameters without gradient."""
    snapshot = facts.snapshot
    models = [m for r in snapshot.ranks.values() for m in r.models]
    if not models:
        yield Abstained("no module is wrapped in DistributedDataParallel")
        return
    if not any(m.unused_checks for m in models):
        yield Abstained("no backward has been checked for missing gradients")
    case = _Case(snapshot, facts.source)
    if case.having and (found := _unused(case)) is not None:
        yield found
    yield from _frozen(snapshot)
    not_needed = _not_needed(snapshot)
    yield replace(not_needed, cause="flag_not_needed") if isinstance(not_needed, Abstained) else not_needed


# -- unused ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """Ranks whose DDP module had parameters without gradient, each with its newest such module."""

    snapshot: Snapshot
    source: Source
    having: dict[int, Model] = field(init=False)

    def __post_init__(self) -> None:
        having = {r.rank: m for r in self.snapshot.ranks.values() if (m := _model_of(r)) is not None}
        object.__setattr__(self, "having", having)

    @cached_property
    def first(self) -> Model:
        return next(iter(self.having.values()))

    @cached_property
    def refused(self) -> set[int]:
        """Ranks whose forward DDP has refused because of them."""
        ranks = self.snapshot.ranks
        return {
            q
            for q, m in self.having.items()
            if m.unused_site is not None or UNUSED.search(ranks[q].exception or ranks[q].caught or "")
        }

    @cached_property
    def expected(self) -> bool:
        """True if DDP expects unused parameters."""
        return bool(self.first.find_unused) or self.first.static_graph

    @cached_property
    def checks(self) -> int:
        return min(m.unused_checks for m in self.having.values())

    @cached_property
    def with_models(self) -> list[int]:
        return [r.rank for r in self.snapshot.ranks.values() if r.models]

    @cached_property
    def lacking(self) -> list[int]:
        """Ranks that were checked and had all gradients."""
        ranks = self.snapshot.ranks
        return [q for q in self.with_models if q not in self.having and ranks[q].models[-1].unused_checks > 0]

    @cached_property
    def differs(self) -> bool:
        """True if the ranks lack gradients of different parameters."""
        return len({tuple(n for n, _ in m.unused) for m in self.having.values()}) > 1 or bool(self.lacking)

    @cached_property
    def refuses(self) -> bool:
        """True if DDP will refuse the next forward."""
        models = self.having.values()
        return any(m.find_unused is False and not m.static_graph and m.synced_backwards > 0 for m in models)

    @cached_property
    def frozen_later(self) -> bool:
        """True if every one of them was frozen after DDP was built."""
        return all(m.frozen_later for m in self.having.values())

    @cached_property
    def stuck(self) -> bool:
        """True if a rank waits in backward."""
        return any(r.blocked is not None and r.phase == "backward" for r in self.snapshot.ranks.values())


# The first row that holds gives the severity.
_SEVERITY: tuple[tuple[str, Callable[[_Case], bool], Severity], ...] = (
    ("never trained, and the flag was not set by a library",
     lambda c: c.expected and not c.refused and c.checks >= limits.never_checks
     and not c.first.flag_of_library and not c.frozen_later,
     Severity.WARNING),
    ("DDP expects unused parameters", lambda c: c.expected, Severity.INFO),
    ("DDP has refused a forward", lambda c: bool(c.refused), Severity.ERROR),
    ("no backward is synchronised, or DDP does not check", lambda c: not c.refuses, Severity.INFO),
    ("the ranks were checked at different steps, and no rank hangs",
     lambda c: c.differs and not c.stuck, Severity.INFO),
    ("DDP will refuse the next forward", lambda c: True, Severity.ERROR),
)  # fmt: skip


def _unused(case: _Case) -> Finding | None:
    unused = dict(p for m in case.having.values() for p in m.unused)
    differs = case.differs
    if case.expected and not case.refused:  # the flag is for branches that are skipped now and then
        unused, differs = _never(case), False
        if not unused:
            return None
    severity = next(severity for _, holds, severity in _SEVERITY if holds(case))
    return _finding(case, unused, differs, severity)


def _model_of(r: RankState) -> Model | None:
    hit = [m for m in r.models if m.unused]
    return max(hit, key=lambda m: m.unused_step) if hit else None


def _never(case: _Case) -> dict[str, int]:
    """Return the names and sizes of parameters that never had a gradient on any rank, after some
    dozens of checks."""
    models = list(case.having.values())
    if len(models) < len(case.snapshot.ranks) or any(m.unused_checks < limits.checks for m in models):
        return {}
    common = set.intersection(*({n for n, _ in m.never_trained} for m in models))
    return {n: k for n, k in models[0].never_trained if n in common}


# -- frozen, and a search that finds nothing -------------------------------------------------------------------------


def _frozen(s: Snapshot) -> Iterator[Finding]:
    models = {r.rank: m for r in s.ranks.values() for m in r.models if m.frozen and m.forwards}
    if models:
        yield _frozen_finding(s, models)


def _not_needed(s: Snapshot) -> Finding | Abstained:
    models = [m for r in s.ranks.values() for m in r.models if m.find_unused]
    if not models:
        return Abstained("find_unused_parameters is not set", checked=True)
    checks = min(m.unused_checks for m in models)
    if s.usual_step_s is None or len(s.ranks) < s.world_size or any(m.search_ms is None for m in models):
        return Abstained("the cost of find_unused_parameters is not measured yet")
    if any(m.unused_hits for m in models):
        return Abstained("parameters without gradient were found, as find_unused_parameters expects", checked=True)
    if checks < limits.checks:
        return Abstained(f"{checks} of {limits.checks} checks of find_unused_parameters")
    return _not_needed_finding(s, models[0], checks, max(m.search_ms or 0.0 for m in models), s.usual_step_s * 1e3)


# -- wording ----------------------------------------------------------------------------------------------------------

UNUSED_TEXT = Template(kind, "never_used",
    "{n:,} parameter{n:|s} ({elements:,} element{elements:|s}) {lack}: {shown}{site}{why}{branch}", "{cost}",
    "{do}", proved=True)  # fmt: skip
FROZEN = Template(kind, "frozen",
    "{m.frozen} of {all} parameters are frozen (requires_grad False), so DDP does not wait for them: {shown}",
    "none, if that is intended", "set requires_grad before wrapping in DDP if you want to train them", proved=True,
    severity=Severity.INFO)  # fmt: skip
NOT_NEEDED = Template(kind, "flag_not_needed",
    "find_unused_parameters=True{site}, but every parameter got a gradient in all {checks} checks",
    "{spent} spent searching the graph{gain}", "{do}")  # fmt: skip
_DO = {
    "frozen later": "freeze them before the model is wrapped in DDP, or wrap it again afterwards: DDP still expects their gradients",
    "expected": "freeze or remove them if they stay unused on purpose",
    "unused": "use their output in the loss, freeze them (requires_grad_(False)) before DDP, or pass find_unused_parameters=True",
    "library": "switch it off in the library that wraps the model (for Hugging Face, ddp_find_unused_parameters=False)",
    "flag": "drop the flag if no branch of the model is ever skipped",
}


def _shown(names: tuple[str, ...], total: int, most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {total - most:,} more" if total > most else "")


def _finding(case: _Case, unused: dict[str, int], differs: bool, severity: Severity) -> Finding:
    having, ranks, names = case.having, case.snapshot.ranks, tuple(unused)
    culprits = sorted(having) if differs and case.lacking else []
    lack = f"got no gradient on {rank_list(having) if differs else 'all ranks'}"
    if case.expected:
        lack = f"never got a gradient on any rank ({case.checks} checks)"
    crash = "DDP refuses the next forward" if case.refused else "DDP will refuse the next forward"
    return UNUSED_TEXT(
        cause="differs_between_ranks" if differs else "never_used", severity=severity, culprits=culprits,
        victims=[q for q in sorted(case.with_models) if q not in culprits],
        where=(
            where(ranks[q], "crashed" if q in case.refused else None, having[q].unused_site) for q in sorted(having)
        ),
        names=names, step=max(m.unused_step for m in having.values()), n=len(names),
        elements=sum(unused.values()), lack=lack, shown=_shown(names, len(names)),
        site=next((m.unused_site for m in having.values() if m.unused_site), None), why=_why(case),
        branch=_branch(case, culprits), cost=crash if severity == Severity.ERROR else "they are never trained",
        do=_DO["frozen later" if case.frozen_later else "expected" if case.expected else "unused"],
    )  # fmt: skip


def _why(case: _Case) -> str:
    """Return that they are frozen, or whether their modules were entered at all, if that was
    seen."""
    if case.frozen_later:
        return "; they were frozen (requires_grad False) after DDP was built"
    m = case.first
    if m.never_called is None or m.unused_step > 1:
        return ""
    if not m.never_called:
        return "; forward called their modules, but their output does not reach the loss"
    names = tuple(n or "the model itself" for n in m.never_called)
    return f"; forward never called {_shown(names, len(names), 3)}"


def _branch(case: _Case, culprits: list[int]) -> str:
    """Return the conditions under which the modules are called that got no gradient on some ranks
    only; empty if not known."""
    if not culprits:
        return ""
    modules = {name.rpartition(".")[0].rpartition(".")[2] for q in culprits for name, _ in case.having[q].unused}
    places = [m.unused_site or case.snapshot.ranks[q].current_site for q, m in case.having.items() if q in culprits]
    files = {x.file for x in (*places, *(m.site for m in case.having.values())) if x is not None}
    found = {c for name in modules - {""} for file in files if (c := only_under(name, file, case.source)) is not None}
    texts = [f"`{c.text}` ({c.file.rsplit('/', 1)[-1]}:{c.line})" for c in sorted(found)[:2]]
    return f"; they are used only {' or '.join(texts)}" if texts else ""


def _frozen_finding(s: Snapshot, models: dict[int, Model]) -> Finding:
    m, ranks = next(iter(models.values())), sorted(models)
    names = tuple(n for n, _ in m.frozen_names)
    where = wheres(s, ranks, None, {q: x.site for q, x in models.items()})
    shown = _shown(names, m.frozen)
    return FROZEN(victims=ranks, where=where, names=names, m=m, all=m.frozen + m.parameters, shown=shown)


def _not_needed_finding(s: Snapshot, m: Model, checks: int, cost_ms: float, step_ms: float) -> Finding:
    small = cost_ms < limits.not_needed_share * step_ms
    spent = (
        f"{cost_ms:.2f} ms per step ({100 * cost_ms / step_ms:.2f} % of it)"
        if small
        else f"{cost_ms:.1f} ms per step ({percent(cost_ms / step_ms)} of it)"
    )
    return NOT_NEEDED(
        # a library's default is no fault of the script, however much it costs
        severity=Severity.INFO if small or m.flag_of_library else Severity.WARNING,
        victims=sorted(s.ranks),
        where=(where(r, None, x.site) for r in s.ranks.values() for x in r.models[:1]),
        site=m.site,
        checks=checks,
        spent=spent,
        gain=_gain_text(s, step_ms),
        do=_DO["library" if m.flag_of_library else "flag"],
    )


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
