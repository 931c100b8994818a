"""`distdiag probe step --params` and `--paper`: from the options to a result with a recommendation."""

from __future__ import annotations

import dataclasses
import time

import torch

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure import gpus
from distdiag.probekit.step import possible
from distdiag.probekit.step.advice import Advice, recommend
from distdiag.probekit.step.blocks import make_model
from distdiag.probekit.step.memory import on_meta
from distdiag.probekit.step.paper import STRATEGIES, PaperRow, Sheet, read_link
from distdiag.probekit.step.rows import StepRow
from distdiag.probekit.step.sizes import Counted, Sizes, Stated
from distdiag.probekit.verdict.result import Result, Verdict
from distdiag.terms.units import size_text

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute(options: Options) -> Result:
    """Return memory by formula for every case, and the recommendation; nothing is run.

    Raises:
        DistdiagError: no memory is given and no GPU is here; a strategy that has no formula; a wrong --link.
    """
    began = time.monotonic()
    paper = options.paper
    assert paper is not None
    strategies = _strategies(options.strategies)
    link = read_link(paper.link) if paper.link else None
    memory, source = (paper.memory_bytes, "--memory") if paper.memory_bytes else _smallest_gpu()
    sheet = Sheet(_sizes(options), paper, memory, options.batch_size, link)
    result = Result("step", 0, "none", "none", paper.dtype)
    result.rows, reasons = sheet.rows(strategies, options.ranks)
    advice = recommend(sheet, options.ranks)
    result.judge(Verdict.PASS if advice.strategy else Verdict.FAIL, _headline(sheet, advice))
    result.reasons += [f"{i}. {decision}" for i, decision in enumerate(advice.decisions, 1)]
    result.details = {
        "paper": {
            "model": sheet.sizes.name, "parameters": sheet.sizes.parameters, "optimizer": paper.optimizer,
            "bytes_per_parameter": dataclasses.asdict(paper.per_parameter), "memory_bytes": memory, "memory_from": source,
            "global_batch": options.batch_size, "link_gbps": link.gbps if link else None,
            "link_from": link.source if link else None, "step_ms": paper.step_ms,
        },
        "recommendation": dataclasses.asdict(advice),
    }  # fmt: skip
    possible.report(result, reasons)
    result.notes += _notes(result.rows, sheet)
    result.elapsed_s = time.monotonic() - began
    return result


def add_activations(rows: list[StepRow], options: Options, batch: int) -> None:
    """Fill in the activations by formula of measured rows; they stay None if the model cannot run on the meta device."""
    sizes = Counted("", on_meta(make_model(options.model)), torch.float32)
    for row in rows:
        strategy = "ddp" if row.strategy == "dataparallel" and options.device == "cuda" else row.strategy
        row.expected_activations_bytes = sizes.activations(strategy, row.ranks, batch)


def _strategies(names: list[str]) -> list[str]:
    """Return the strategies with a formula of memory per device; a single process covers its threads."""
    wanted = [n for n in names if n in STRATEGIES or n == "dataparallel"] if names else list(STRATEGIES)
    if not wanted:
        raise DistdiagError(f"--strategies {','.join(names)}: needs as much memory as single", "--strategies single")
    return wanted


def _sizes(options: Options) -> Sizes:
    paper = options.paper
    assert paper is not None
    if paper.parameters is not None:
        return Stated(paper.parameters, paper.layers, paper.activations_bytes)
    network = make_model(options.model)
    return Counted(options.model or type(network).__name__, network, _DTYPES.get(paper.dtype, torch.float32))


def _smallest_gpu() -> tuple[int, str]:
    """Return the memory of this host's smallest GPU, as NVML reports it, and its description."""
    hint = "give the memory of one device, e.g. --memory 80GiB"
    try:
        with gpus.nvml() as nvml:
            found = [gpus.facts(nvml, i, set()) for i in range(nvml.nvmlDeviceGetCount())]
    except DistdiagError:
        raise DistdiagError("this host has no GPU to take the memory from", hint, ExitCode.USAGE) from None
    sizes = [(g.memory_total_bytes, g.name) for g in found if g.memory_total_bytes]
    if not sizes:
        raise DistdiagError("NVML does not report the memory of this host's GPUs", hint, ExitCode.USAGE)
    memory, name = min(sizes)
    return memory, f"NVML: {name}"


def _headline(sheet: Sheet, advice: Advice) -> str:
    per = sheet.paper.per_parameter
    sizes = f"{per.weights:g} + {per.gradients:g} + {per.optimizer:g} bytes for each parameter"
    model = f"{sheet.sizes.name} ({sheet.paper.dtype}, {sheet.paper.optimizer or 'given optimizer state'}: {sizes})"
    if advice.strategy is None or advice.ranks is None:
        least = f"; FSDP needs at least {advice.least_ranks:,} ranks" if advice.least_ranks else ""
        return f"nothing fits: {model} on devices of {size_text(sheet.memory_bytes)}{least}"
    case = possible.Case(advice.strategy, advice.ranks)
    row = sheet.row(advice.strategy, advice.ranks)
    tight = ", but it is tight" if advice.fits == "tight" else ""
    left = f"{size_text(row.left_bytes)} of {size_text(sheet.memory_bytes)} left for activations{tight}"
    return f"recommended: {case} for {model}; {left}"


def _notes(rows: list[PaperRow], sheet: Sheet) -> list[str]:
    found = {r.strategy for r in rows}
    notes = ["by formula, nothing was run: left is for activations, the device's context, kernels and fragmentation"]
    if "ddp" in found:
        notes.append("DDP's buffers are its buckets, a copy of the gradients; gradient_as_bucket_view=True saves them")
    if "fsdp" in found:
        text = "FSDP's buffers are two gathered blocks and the whole gradients of one"
        unknown = any(r.strategy == "fsdp" and r.buffers_bytes is None for r in rows)
        notes.append(f"{text}, which depend on --layers: not in these rows" if unknown else text)
    if isinstance(sheet.sizes, Counted) and sheet.sizes.problem:
        notes.append(f"activations are not known: {sheet.sizes.problem}")
    if found & set(possible.STAGED) and isinstance(sheet.sizes, Stated):
        notes.append("stages are taken as equally large")
    return notes
