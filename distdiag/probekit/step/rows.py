"""From blocks to rows: medians and intervals, speed-up, efficiency, and the verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from distdiag.probekit.measure.noise import usable_cpus
from distdiag.probekit.step.blocks import Block
from distdiag.probekit.step.memory import StateBytes
from distdiag.probekit.step.possible import SINGLE, Case
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.result import Measure, Result, Verdict
from distdiag.terms.statistics import interval_of_median, interval_of_rounds

EPOCH_IMAGES = 50_000  # CIFAR-10's training set
_LEAST_ROUNDS = 3  # with fewer, the interval is that of single steps
_DRIFT = 1.5  # slowest round of the single process / its fastest: the machine changed more than strategies differ
_MOST_NAMES = 3  # of strategies in a sentence


@dataclass(slots=True)
class StepRow:
    """One strategy on one number of ranks; times are those of the slowest rank."""

    strategy: str
    label: str
    ranks: int  # that compute
    threads: int  # per rank
    step_ms: float
    ci95_ms: tuple[float, float]  # of the median; over rounds if there are three or more, else over steps
    steps: int
    samples_per_s: float
    speed_up: float | None = None  # single process / this
    efficiency: float | None = None  # speed-up for each device or core in use
    state_bytes: int = 0  # parameters, gradients and optimizer state on the rank that has most
    peak_bytes: int | None = None  # the device allocator's; CUDA only
    exposed_ms: float | None = None  # communication that computing does not hide
    parts_ms: dict[str, float] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)
    epoch_s: float = 0.0
    rounds: int = 1
    speed_up_ci95: tuple[float, float] | None = None  # of the ratios within one round
    competing: bool = False  # more ranks and threads than cores: the speed-up says nothing about more machines
    exposed_share: float | None = None
    idle_share: float | None = None  # with stages: of the step, in which a rank has nothing to compute
    expected_idle_share: float | None = None
    peak_host_bytes: int | None = None  # highest resident memory above the process before the model was built
    memory: dict[str, int] = field(default_factory=dict)
    expected_memory: dict[str, int] | None = None
    round_ms: list[float] = field(default_factory=list)
    # saved for backward, in the first step; None: the copies of DataParallel, which are not counted
    activations_bytes: int | None = None
    # the same by formula; None: the model cannot run on the meta device
    expected_activations_bytes: int | None = None


def rows_of(blocks: Sequence[Block], batch: int, device: str) -> list[StepRow]:
    """Return one row for each case, in the order of their first blocks, with speed-ups if `single` was measured."""
    by_case: dict[Case, list[Block]] = defaultdict(list)
    for block in blocks:
        by_case[block.case].append(block)
    rows = [_row(found, batch, device) for found in by_case.values()]
    single = next((r for r in rows if r.strategy == SINGLE), None)
    for row in rows if single is not None else []:
        assert single is not None
        ratios = [a / b for a, b in zip(single.round_ms, row.round_ms, strict=False)]
        row.speed_up = single.step_ms / row.step_ms
        row.efficiency = row.speed_up / (row.ranks * row.threads)
        if len(ratios) >= _LEAST_ROUNDS and row is not single:
            interval = interval_of_rounds(ratios)
            row.speed_up_ci95 = (interval.low, interval.high)
    return rows


def _row(blocks: list[Block], batch: int, device: str) -> StepRow:
    first = blocks[0]
    times = np.concatenate([b.times_ms for b in blocks])
    round_ms = [float(np.median(b.times_ms)) for b in blocks]
    if len(blocks) >= _LEAST_ROUNDS:
        step_ms, interval = float(np.exp(np.mean(np.log(round_ms)))), interval_of_rounds(round_ms)
    else:
        step_ms, interval = float(np.median(times)), interval_of_median(times)
    row = StepRow(
        first.case.strategy, first.label, first.ranks, first.threads, step_ms, (interval.low, interval.high), len(times),
        batch / step_ms * 1e3, state_bytes=first.state.total, parts_ms=first.parts_ms, times_ms=times.tolist(),
        epoch_s=step_ms / 1e3 * EPOCH_IMAGES / batch, rounds=len(blocks), round_ms=round_ms,
        expected_idle_share=first.expected_idle_share, memory=_parts(first.state),
        expected_memory=_parts(first.expected) if first.expected else None,
    )  # fmt: skip
    row.competing = device == "cpu" and first.ranks * first.threads > usable_cpus()
    row.peak_bytes = _median([b.peak_device_bytes for b in blocks])
    row.activations_bytes = _median([b.saved_bytes for b in blocks])
    row.peak_host_bytes = _median([b.peak_host_bytes for b in blocks])
    idle = [b.idle_share for b in blocks if b.idle_share is not None]
    row.idle_share = float(np.mean(idle)) if idle else None
    if row.parts_ms:
        row.exposed_ms = row.parts_ms["scatter"] + row.parts_ms["replicate"] + row.parts_ms["gather"]
    elif quiet := [b for b in blocks if b.quiet_ms]:
        row.exposed_ms = max(0.0, float(np.median([np.median(b.times_ms) - np.median(b.quiet_ms) for b in quiet])))
    elif blocked := [b.blocked_ms for b in blocks if b.blocked_ms]:
        row.exposed_ms = float(np.median([np.median(ms) for ms in blocked]))
    if row.exposed_ms is not None:
        row.exposed_ms = min(row.exposed_ms, step_ms)
        row.exposed_share = row.exposed_ms / step_ms
    return row


def _parts(state: StateBytes) -> dict[str, int]:
    return {f"{part}_bytes": size for part, size in asdict(state).items()}


def _median(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return int(np.median(known)) if known else None


def judge(result: Result) -> None:
    """Set verdict, reasons and measures; the verdict is pass, or inconclusive on a noisy host."""
    rows: list[StepRow] = result.rows
    for row in rows:
        key = row.strategy if row.ranks in (1, result.world_size) else f"{row.strategy}@{row.ranks}"
        values = row.round_ms
        if len(values) < _LEAST_ROUNDS:
            values = [float(np.median(p)) for p in np.array_split(row.times_ms, min(8, max(1, len(row.times_ms) // 2)))]
        result.measures.append(Measure(key, "ms", values))
    decide.host_noise(result)
    single = next((r for r in rows if r.strategy == SINGLE), None)
    if single is not None and len(single.round_ms) >= _LEAST_ROUNDS:
        slowest, fastest = max(single.round_ms), min(single.round_ms)
        if slowest > _DRIFT * fastest:
            result.judge(
                Verdict.INCONCLUSIVE,
                f"too noisy to compare: a step of the single process took {fastest:,.1f} ms in one round and "
                f"{slowest:,.1f} ms in another",
            )
    result.reasons += [fastest_text(rows), *_ddp_text(rows), *too_small(rows)]


def fastest_text(rows: Sequence[StepRow]) -> str:
    """Return which strategy is fastest, and which ones do not clearly differ from it."""
    fastest = min(rows, key=lambda r: r.step_ms)
    if len(rows) == 1:
        return f"only {_name(fastest)} was measured: {fastest.step_ms:.1f} ms a step"
    text = f"fastest: {_name(fastest)}, {fastest.step_ms:.1f} ms a step"
    near = [_name(r) for r in rows if r is not fastest and r.ci95_ms[0] <= fastest.ci95_ms[1]]
    if not near:
        return text
    return f"{text}; no clear difference to {', '.join(near) if len(near) <= _MOST_NAMES else f'{len(near)} others'}"


def _name(row: StepRow) -> str:
    return row.label if row.ranks == 1 else f"{row.label} on {row.ranks}"


def _ddp_text(rows: Sequence[StepRow]) -> list[str]:
    """Return what DDP gains over one process, and over one process with as many threads."""
    texts: list[str] = []
    for ddp in rows:
        if ddp.strategy != "ddp" or ddp.speed_up is None:
            continue
        interval = f" [{ddp.speed_up_ci95[0]:.2f}, {ddp.speed_up_ci95[1]:.2f}]" if ddp.speed_up_ci95 else ""
        text = f"DDP on {ddp.ranks} ranks is {ddp.speed_up:.2f}{interval} times as fast as one process"
        cores = ddp.ranks * ddp.threads
        threads = next((r for r in rows if r.strategy == "single-threads" and r.threads == cores), None)
        if threads is not None:
            text += f", and {threads.step_ms / ddp.step_ms:.2f} times as fast as one process with as many threads"
        if ddp.speed_up_ci95 and ddp.speed_up_ci95[0] <= 1 <= ddp.speed_up_ci95[1]:
            text += ": the interval contains 1, so this cannot tell which is faster"
        texts.append(text)
    return texts


def too_small(rows: Sequence[StepRow]) -> list[str]:
    """Return one sentence for each number of ranks that this machine has not enough cores for."""
    wanted = sorted({max(r.ranks, r.threads) for r in rows if r.competing})
    return [
        f"{n} ranks on {usable_cpus()} cores compete: their speed-up here says nothing about more machines"
        for n in wanted
    ]
