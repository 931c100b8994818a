"""Findings on what torch itself reports about several ranks: calls or models that differ, parameters without a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from distdiag.diagnosis.model.findings import CollectiveRef, Finding, rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.sources.logs.build import fewer, finding, ranks_of, same_calls, some
from distdiag.sources.logs.facts import Collected, Fact
from distdiag.sources.logs.join import WAITED, first_site
from distdiag.sources.logs.meanings import OF_BATCH
from distdiag.sources.logs.waiting import op_name
from distdiag.terms.ranks import fold_ranks, grouped, sets_of
from distdiag.terms.units import counted
from distdiag.terms.untrusted import bounded, is_rank, numbers

MANY_PARAMETERS = 1_000_000  # no model has so many tensors: such a count is another collective's data
LONG_NAMES = 8000
_GRADIENTS = "in the backward pass DDP reduces gradients in buckets: {who} had gradients of other parameters (a batch without images, a branch, an expert without tokens): run the same modules on all ranks (a dummy input whose output counts 0), or pass find_unused_parameters=True"
_BEFORE = "the job ends before its first step"
_CULPRIT = bounded(r"Culprit rank (\d{1,6});")
_ANALYZED = {"SIZE_OR_SYNTAX": "shape", "COLLECTIVE_TYPE": "op", "COLLECTIVE_DTYPE": "dtype"}
_RUNS = bounded(r", NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})")  # in torch's exceptions
_HCCL_CAUSES = {"count": "shape", "dataType": "dtype"}
_BROKEN_PATH = "test the path between the GPUs: once with NCCL_P2P_DISABLE=1, `all_reduce_perf -c 1` of nccl-tests, `nvidia-smi topo -p2p r`; peer-to-peer that gives zeros is most often an IOMMU, or ACS of the PCIe switches: switch them off"
_FINGERPRINT = {
    "number": bounded(r"SequenceNumber=(\d{1,18})"),
    "op": bounded(r"OpType=(\w+)"),
    "shape": bounded(r"TensorShape=\[([\d, ]{0,99})\]"),
    "dtype": bounded(r"TensorDtypes=(\w+)"),
}


def findings(found: Collected) -> list[Finding]:
    """Return what torch reports, most specific first."""
    out: list[Finding] = []
    if calls := found.named("fingerprints"):
        out.append(_fingerprints(calls))
    if differ := found.named("hccl_differs"):
        out.append(_arguments(found, differ))
    out += _shapes_given(found.named("process_shape"))
    if models := found.named("ddp_shape") or _counted(found, real=True):
        out.append(_shapes(models) if models[0].name == "ddp_shape" else _counts(models))
    if versions := found.named("nccl_version"):
        out.append(_versions(found, versions))
    if found.named("ddp_unused", "ddp_unused_index"):
        out.append(_unused(found, found.named("ddp_unused"), found.named("ddp_unused_index")))
    return out


def _differ(
    kind: str,
    cause: str,
    facts: list[Fact],
    sides: Collection[Collection[int]],
    message: str,
    advice: str,
    proved: bool = True,
    **more: Any,
) -> Finding:
    """Return the finding on ranks that differ; the fewer ones of two sides are the culprits."""
    ranks = set().union(*sides)
    return finding(kind, cause, facts, message, advice, culprits=fewer(sides), victims=ranks, proved=proved, **more)


def _shapes_given(facts: list[Fact]) -> list[Finding]:
    """Return the finding on ranks that gave different shapes to an operation of Accelerate, which compared them."""
    sides = sets_of((f.fields["shape"], int(f.fields["a"])) for f in facts)
    if len(sides) < 2:
        return []
    texts = [f"{shape} on {rank_list(sorted(ranks))}" for shape, ranks in list(sides.items())[:4]]
    message = f"the ranks passed different shapes to one operation of Accelerate: {', '.join(texts)}"
    advice = "pad them to one shape first (accelerator.pad_across_processes), or use gather_for_metrics for the last, smaller batch"
    return [_differ("mismatch", "shape", facts, sides.values(), message, advice)]


def _arguments(found: Collected, facts: list[Fact]) -> Finding:
    """Return the finding on a collective to which ranks passed different arguments, as HCCL compared them over each connection."""
    of = facts[0].fields
    facts = [f for f in facts if (f.fields["tag"], f.fields["parameter"]) == (of["tag"], of["parameter"])]
    sides: dict[str, set[int]] = {f.fields[key]: set() for f in facts for key in ("has", "got")}
    for f in facts:
        if f.rank is not None and not f.of_node:
            sides[f.fields["has"]].add(f.rank)
    ranks = {value: rank_list(sorted(q)) if q else "a rank that the log does not name" for value, q in sides.items()}
    texts = [f"{value} on {who}" for value, who in list(ranks.items())[:4]]
    op = op_name(of["tag"])
    site = first_site(facts) or first_site([f for f in found.facts if f.rank in set().union(*sides.values())])
    what = _HCCL_CAUSES.get(of["parameter"], "op")
    message = f"the ranks passed different arguments to one {op}{at(site)}: {of['parameter']} is {', '.join(texts)}"
    advice = f"look at what they pass there: make its {'length' if what == 'shape' else of['parameter']} equal on all ranks{' (pad it, or agree on the length first)' if what == 'shape' else ''}; the ranktable and the network are not the cause"
    proved, call = all(sides.values()), CollectiveRef(op, "")
    both: Collection[Collection[int]] = sides.values() if proved else [set().union(*sides.values())]
    return _differ("mismatch", what, facts, both, message, advice, proved=proved, collective=call)


def derived(found: Collected) -> list[Finding]:
    """Return what shows only that other ranks were elsewhere: DDP read the data of another collective as their counts."""
    return [_counts(counts)] if (counts := _counted(found, real=False)) else []


def analyzed(found: Collected, waits: list[Finding]) -> list[Finding]:
    """Return the findings on timeouts, with the ranks whose call differs by torch's analyzer of flight records."""
    facts = found.named("analyzer")
    named = {r for f in facts for r in map(int, _CULPRIT.findall(f.text)) if is_rank(r)}
    if not named:
        return waits
    what = f"{rank_list(sorted(named))} by torch's analyzer of the flight records: {shortened(facts[0].fields['what'], 160)}"
    if waits and waits[0].kind == "mismatch":
        return [msgspec.structs.replace(waits[0], message=f"{waits[0].message}; {what}"), *waits[1:]]
    victims = {r for f in waits for r in (*f.culprits, *f.victims)} - named
    few = 2 * len(named) < max(found.world_size or 0, len(victims | named), 3)  # it compares all with the first one
    cause = _ANALYZED[facts[0].fields["error"]]
    compare = f"compare what these ranks call there: the same operation with the same size on every rank{OF_BATCH}"
    advice = compare if cause == "shape" else same_calls(named if few else ())
    message = f"the ranks made different calls in one collective, {what}"
    return [finding("mismatch", cause, facts, message, advice, culprits=named if few else (), victims=victims | named)]


def _versions(found: Collected, facts: list[Fact]) -> Finding:
    """Return the finding on ranks with different versions of NCCL; the fewer ones are the culprits."""
    by_version = sets_of((f.number(f"v{end}") or 0, int(f.fields[end])) for f in facts for end in "ab")
    of_label = {min(ranks): label for label, ranks in found.of_label.items() if len(ranks) == 1}
    texts = []
    for v, ranks in sorted(by_version.items(), key=lambda item: len(item[1])):
        on = f" on {of_label[min(ranks)]}" if len(ranks) == 1 and min(ranks) in of_label else ""
        version = f"{v // 10000}.{v // 100 % 100}.{v % 100}"
        texts.append(f"{rank_list(sorted(ranks))}{on} {verb(ranks, 'has', 'have')} NCCL {version}")
    advice = "install the same torch (and NCCL) on all nodes, or use one image; compare `python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'`"
    message, sides = f"{', '.join(texts)}: NCCL does not mix versions", by_version.values()
    return _differ("rank_lost", "crashed", facts, sides, message, advice, proved=bool(fewer(sides)), cost=_BEFORE)


def of_versions(found: Collected) -> list[Finding]:
    """Return the finding on processes that run different versions of NCCL, in a job whose communication never worked."""
    failed = [f for f in found.facts if f.role in WAITED]
    if found.steps or found.losses or not failed:
        return []
    runs = {who: set(versions) for who, versions in found.nccl.items()}
    for f in failed:
        for version in _RUNS.findall(f.text):
            runs.setdefault((f.rank, f.who.host or f.who.label, f.path.name), set()).add(version)
    # one process may have two copies of NCCL, and one file two runs
    by_version = grouped((min(versions), who) for who, versions in runs.items() if len(versions) == 1)
    if len(by_version) < 2:
        return []
    texts = []
    for version, writers in by_version.items():
        ranks = sorted({rank for rank, _, _ in writers if rank is not None})
        hosts = some([host for _, host, _ in writers if host])
        who = rank_list(ranks) + (f" on {hosts}" if hosts else "") if ranks else hosts
        who = who or f"a process of {some([file for _, _, file in writers])}"
        texts.append(f"{who} {'run' if len(ranks) > 1 else 'runs'} NCCL {version}")
    message = f"{', '.join(texts)}: NCCL does not mix versions"
    advice = "run one version of torch and NCCL on all nodes: one container image, or the same environment; see LD_LIBRARY_PATH and LD_PRELOAD there, which may lead to another libnccl.so"
    return [finding("rank_lost", "crashed", failed, message, advice, victims=ranks_of(failed), cost=_BEFORE)]


def _call(text: str) -> dict[str, str]:
    """Return operation, shape, type and number of a fingerprint."""
    found = {key: m[1] for key, regex in _FINGERPRINT.items() if (m := regex.search(text))}
    return {key: op_name(value) if key == "op" else value for key, value in found.items()}


def _call_text(call: dict[str, str]) -> str:
    shape = f" of shape [{call['shape']}]" if call.get("shape") else ""
    dtype = f" {call['dtype']}" if "dtype" in call else ""
    return call.get("op", "a call") + shape + dtype + (f" (#{call['number']})" if "number" in call else "")


def _fingerprints(facts: list[Fact]) -> Finding:
    ends = ((f.fields, end) for f in facts for end in "ab" if {end, f"f{end}"} <= f.fields.keys())
    sides = sets_of((_call_text(_call(fields[f"f{end}"])), int(fields[end])) for fields, end in ends)
    both = next((f for f in facts if "fb" in f.fields), facts[0])
    a, b = _call(both.fields.get("fa", "")), _call(both.fields.get("fb", ""))
    cause = next((k for k in ("op", "shape", "dtype") if k in a and k in b and a[k] != b[k]), "op")
    texts = [f"{rank_list(sorted(rs))} in {shown}" for shown, rs in sorted(sides.items(), key=lambda s: min(s[1]))[:4]]
    if len(sides) < 2:
        texts.append("the other side is not in the message")
    culprits = fewer(sides.values())
    site = next((f.site for f in facts if f.rank in culprits and f.site is not None), first_site(facts))
    more, skipped = int(a.get("number", 0)) - int(b.get("number", 0)), ""
    if more and "number" in a and "number" in b:
        ahead, behind = ("a", "b") if more > 0 else ("b", "a")
        ranks = f"rank {both.fields[ahead]} had made {counted(abs(more), 'call')} more than rank {both.fields[behind]}"
        skipped = f"; by these numbers, {ranks} before"
    message = f"ranks made different calls in one collective: {', '.join(texts)}{at(site)}{skipped}"
    call = CollectiveRef(a["op"], "", int(a["number"]) if "number" in a else None) if "op" in a else None
    buckets = cause == "shape" and a.get("op") == "all_reduce" and any(f.in_backward for f in facts)
    who = rank_list(sorted(culprits)) if culprits else "some ranks"
    advice = _GRADIENTS.format(who=who) if buckets else same_calls(culprits)
    return _differ("mismatch", cause, facts, sides.values(), message, advice, collective=call)


def _model(facts: list[Fact], message: str, advice: str, proved: bool, culprits: Iterable[int] = ()) -> Finding:
    ranks = [int(f.fields[k]) for f in facts for k in ("a", "b")]
    site = first_site(facts)
    message += f" (DDP is made{at(site)})" if site else ""
    who: dict[str, Any] = {"culprits": culprits, "victims": ranks}
    return finding("mismatch", "model", facts, message, advice, **who, proved=proved, cost=_BEFORE)


def _shapes(facts: list[Fact]) -> Finding:
    e = facts[0].fields
    differs = f"parameter {e['index']} has {e['what']} {e['sa']} on rank {e['a']}, others on rank {e['b']}"
    advice = "build the same model on every rank: the same arguments, vocabulary and number of classes"
    return _model(facts, f"the wrapped model differs: {differs}", advice, proved=True)


def _counted(found: Collected, real: bool) -> list[Fact]:
    """Return the lines on numbers of parameters, if two numbers that can be one differ (`real`), or none do.

    A count of 0, or of millions, is not the other rank's number.
    """
    facts = found.named("ddp_params")
    own, theirs = _numbers_of(facts)
    return facts if (len({*own.values(), *theirs.values()}) > 1) is real else []


def _numbers_of(facts: list[Fact]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the writers' own numbers of parameters, and the others' that can be one."""
    own = {int(f.fields["a"]): f.number("na") or 0 for f in facts}
    theirs = {int(f.fields["b"]): n for f in facts if 0 < (n := f.number("nb") or 0) < MANY_PARAMETERS}
    return own, theirs


def _counts(facts: list[Fact]) -> Finding:
    """Return the finding on models of which DDP compared the number of parameters."""
    own, theirs = _numbers_of(facts)
    known = theirs | own
    if len(set(known.values())) > 1:
        texts = [f"{n:,} on {rank_list([r for r, m in known.items() if m == n])}" for n in sorted(set(known.values()))]
        culprits = fewer([r for r, m in known.items() if m == n] for n in set(known.values()))
        message = f"the wrapped model differs: DDP found {', '.join(texts).replace(' on', ' parameters on', 1)}"
        advice = "build the same model on every rank: the same arguments, and the same parameters with requires_grad"
        return _model(facts, message, advice, proved=True, culprits=culprits)
    odd = sorted({int(f.fields["b"]): f.number("nb") or 0 for f in facts}.items())
    message = f"DDP could not compare the models: {rank_list(own)} {verb(own, 'has', 'have')} {next(iter(own.values())):,} parameters and read {', '.join(f'{n:,} on rank {r}' for r, n in odd[:3])}, which no model has"
    advice = "see what those ranks did at that moment: an exception, a collective that only some ranks call, two DDP modules in a different order; then NCCL_DEBUG=WARN"
    sites = {f.site for f in facts}
    if own.keys() >= dict(odd).keys() and len(sites) == 1 and None not in sites:
        message += ": yet those ranks report the same from the same line, so most likely what they exchanged did not arrive as it was sent"
        advice = f"{_BROKEN_PATH}; if that works, see whether these ranks wrap several modules, in one order"
    else:
        message += ": those ranks were in another collective, or had ended"
        advice += f"; if they were in this call, {_BROKEN_PATH}"
    return _model(facts, message, advice, proved=False)


def _unused(found: Collected, named: list[Fact], indexed: list[Fact]) -> Finding:
    by_rank = {int(f.fields["r"]): " ".join(f.fields["indices"].split()) for f in indexed}
    names = [n.strip() for f in named[:1] for n in f.fields["names"].split(",") if n.strip()]
    ranks = sorted({*by_rank, *(int(f.fields["r"]) for f in named)})
    differs = len(set(by_rank.values())) > 1
    indices = numbers(next(iter(by_rank.values()), ""))
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "") if names else f"number {fold_ranks(indices)[:80]}"
    if differs:
        what = f"different parameters got no gradient on each of {rank_list(ranks)}; on rank {ranks[0]}: {shown}"
    else:
        least = "at least " if named and len(named[0].fields["names"]) > LONG_NAMES else ""  # the line is cut
        total = counted(len(names) or len(indices), "parameter")
        what = f"{least}{total} got no gradient in the step before, on {rank_list(ranks)}: {shown}"
    site = first_site([f for f in found.named("exception") if "finished reduction" in f.text])
    how = "" if names else "; TORCH_DISTRIBUTED_DEBUG=DETAIL prints their names"
    return finding(
        "unused_parameters",
        "differs_between_ranks" if differs else "never_used",
        named or indexed,
        f"DDP stopped: {what}" + (f"; the next forward was called{at(site)}" if site else ""),
        f"use them in the loss, freeze them (requires_grad=False before DDP), or pass find_unused_parameters=True{how}",
        victims=ranks,
        sites={ranks[0]: site} if site else None,
        proved=True,
        cost="the job ended",
        names=tuple(names[:50]),
    )
