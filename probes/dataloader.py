"""dataloader: how fast this machine can feed a training step, and with which settings.

Throughput over num_workers first; around the best of those, prefetch_factor, persistent_workers, and on a GPU pinned memory and
the kind of transfer, one at a time: they hardly interact, and the full product takes minutes. All ranks load at the same time, as
in training. With your own data: --dataset package.module:function.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from distdiag.errors import DistdiagError
from distdiag.probekit.command.main import run_script
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.noise import usable_cpus
from distdiag.probekit.measure.probe import Column, Probe, shown
from distdiag.probekit.measure.sampling import NoiseMeter
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.ranks.user_object import find_function
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.collective_result import new_result
from distdiag.probekit.verdict.result import Measure, Result

NOT_WORTH_IT = 1.05  # a step must get shorter by this factor to recommend another setting


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of DataLoader, and how a batch is moved to the device."""

    workers: int
    prefetch: int | None = None  # torch's own default is 2; None without workers
    persistent: bool = False
    pin_memory: bool = False
    transfer: str = "none"  # none (CPU) | blocking | non_blocking

    @property
    def text(self) -> str:
        """Return the setting as Python keyword arguments."""
        parts = [f"num_workers={self.workers}"]
        if self.prefetch is not None:
            parts.append(f"prefetch_factor={self.prefetch}")
        if self.persistent:
            parts.append("persistent_workers=True")
        if self.pin_memory:
            parts.append("pin_memory=True")
        return ", ".join(parts) + (" + non_blocking copies" if self.transfer == "non_blocking" else "")


@dataclass(slots=True)
class LoaderRow:
    """One setting; rates are those of the slowest rank."""

    setting: Setting
    samples_per_s: float
    mb_per_s: float  # 10^6 bytes
    # from iter() to the first batch: includes the workers' start, at every epoch unless persistent
    first_batch_ms: float
    next_epoch_ms: float | None  # the same for the second epoch
    wait_ms: float  # mean wait of the consumer per batch if it computes for step_ms between two batches
    wait_share: float  # wait as a share of the consumer's time
    batches: int
    rates: list[float] = field(default_factory=list)  # rates of blocks, for the interval and the baseline
    recommended: bool = False


class DataLoaderProbe(Probe):
    name = "dataloader"
    min_ranks = 1
    default_ranks = 1
    share_in_all = 3.0
    columns = (
        Column("workers", lambda row: str(row.setting.workers)),
        Column("prefetch", lambda row: shown(row.setting.prefetch, "d")),
        Column("persistent", lambda row: "yes" if row.setting.persistent else "no"),
        Column("pinned", lambda row: "yes" if row.setting.pin_memory else "no"),
        Column("transfer", lambda row: None if row.setting.transfer == "none" else row.setting.transfer),
        Column("samples/s", lambda row: f"{row.samples_per_s:,.0f}"),
        Column("MB/s", lambda row: f"{row.mb_per_s:,.1f}"),
        Column("first batch ms", lambda row: f"{row.first_batch_ms:,.1f}"),
        Column("next epoch ms", lambda row: shown(row.next_epoch_ms, ",.1f")),
        Column("wait ms", lambda row: f"{row.wait_ms:.2f}"),
        Column("wait", lambda row: f"{row.wait_share:.0%}"),
        Column("", lambda row: "recommended" if row.recommended else "", left=True),
    )

    def check(self, options: Options) -> None:
        if options.dataset:
            find_function("--dataset", options.dataset)
        if any(w > 64 for w in options.workers):
            raise DistdiagError(f"--workers {max(options.workers)} is more than any host needs", "try 0,2,4,8")

    def run(self, job: Job) -> Result | None:
        options = job.options
        dataset, what = make_dataset(options)
        cpus = max(1, usable_cpus() // job.ranks_per_host)
        workers = options.workers or sorted({0, 1, 2, min(4, cpus), min(8, cpus), cpus} & set(range(cpus + 1)))
        transfer = "blocking" if job.device.type == "cuda" else "none"
        noise = NoiseMeter(job, children=True)
        rows: list[LoaderRow] = []

        def settings() -> Iterator[Setting]:
            for count in workers:
                yield Setting(count, 2 if count else None, transfer=transfer)
            if any(r.setting.workers for r in rows):  # now that all numbers of workers are measured
                yield from around(best(rows, options.step_ms).setting, cuda=transfer != "none")

        planned = len(workers) + (7 if transfer != "none" else 3)
        for setting in settings():
            seconds = job.agree([job.left_s() * 0.85 / max(1, planned - len(rows))], "dataloader: next setting")[0]
            if rows and seconds < 0.08:
                break
            row = measure(job, dataset, setting, max(0.08, seconds), options)
            # Every rank must make the same choice: all use the slowest rank's figures.
            everyone = job.gather_all(row, f"dataloader: {setting.text}")
            rows.append(min(everyone, key=lambda r: r.samples_per_s))
        host_noise = noise.stop("dataloader")
        if job.rank != 0 or host_noise is None:
            return None
        result = new_result(job, self.name)
        result.dtype = None
        result.host_noise = host_noise
        result.rows = rows
        result.details |= {"dataset": what, "batch_size": options.batch_size, "step_ms": options.step_ms}
        result.measures = [Measure(r.setting.text, "s/sample", [1 / v for v in r.rates]) for r in rows if r.rates]
        judge(result, options)
        if transfer == "none":
            result.notes.append("pin_memory and non_blocking transfers are not possible here: they need a GPU")
        return result

    def drawing(self, result: Result) -> list[str]:
        d = result.details
        return [
            f"{d['dataset']}; batch {d['batch_size']}; the wait is that of a consumer whose step takes {d['step_ms']:g} ms"
        ]

    def headline(self, result: Result) -> str:
        row = next((r for r in result.rows if r.recommended), None) or best(result.rows, result.details["step_ms"])
        return f"{row.samples_per_s:,.0f} samples/s with {row.setting.text}"


def make_dataset(options: Options) -> tuple[Any, str]:
    """Return (dataset, description): the user's, or generated images in CIFAR-10's shape with its common augmentation."""
    if options.dataset:
        dataset = find_function("--dataset", options.dataset)()
        if not isinstance(dataset, IterableDataset) and not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise DistdiagError(
                f"--dataset {options.dataset} returned a {type(dataset).__name__}, not a Dataset",
                "return an object with __getitem__ and __len__, or an IterableDataset",
            )
        if not isinstance(dataset, IterableDataset) and len(dataset) < 1:
            raise DistdiagError(f"--dataset {options.dataset} is empty", "return one with samples in it")
        return dataset, options.dataset
    return (
        GeneratedImages(),
        "generated images in CIFAR-10's shape (uint8 3x32x32, random crop and mirror, one at a time)",
    )


class GeneratedImages(torch.utils.data.Dataset):
    """50,000 uint8 images, padded, cropped and mirrored one at a time, as in most projects."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (1000, 3, 40, 40), dtype=torch.uint8)

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left, mirrored = torch.randint(0, 9, (3,)).tolist()
        image = self.images[index % 1000, :, top : top + 32, left : left + 32]
        return (image.flip(2) if mirrored > 4 else image).contiguous(), index % 10


def around(setting: Setting, cuda: bool) -> list[Setting]:
    """Return variations of the best number of workers, changing one setting at a time."""
    if setting.workers == 0:
        return [replace(setting, pin_memory=True, transfer="non_blocking")] if cuda else []
    more = [
        replace(setting, persistent=True),
        replace(setting, persistent=True, prefetch=4),
        replace(setting, persistent=True, prefetch=8),
    ]
    if cuda:
        more += [
            replace(setting, persistent=True, transfer="non_blocking"),  # from pageable memory it still blocks
            replace(setting, persistent=True, pin_memory=True),
            replace(setting, persistent=True, pin_memory=True, transfer="non_blocking"),
        ]
    return more


def best(rows: list[LoaderRow], step_ms: float) -> LoaderRow:
    """Return the setting with the shortest step including its wait for data; of those within 5 %, the one with the fewest workers."""
    shortest = min(step_ms + r.wait_ms for r in rows)
    return min(
        (r for r in rows if step_ms + r.wait_ms <= shortest * NOT_WORTH_IT),
        key=lambda r: (r.setting.workers, r.next_epoch_ms or 0.0),
    )


def judge(result: Result, options: Options) -> None:
    """Recommend a setting; the verdict differs from pass only for noise: there is no right speed for a data loader."""
    rows: list[LoaderRow] = result.rows
    decide.host_noise(result)
    chosen = best(rows, options.step_ms)
    chosen.recommended = True
    default = next((r for r in rows if r.setting.workers == 0), None)
    gain = f", with num_workers=0 {default.wait_ms:.1f} ms" if default and default is not chosen else ""
    result.reasons.append(
        f"recommended: {chosen.setting.text}: a step of {options.step_ms:g} ms waits {chosen.wait_ms:.1f} ms for its "
        f"data{gain}; {chosen.samples_per_s:,.0f} samples/s per rank at most"
    )
    if chosen.wait_share > 0.05:
        better = "no setting that was tried does better" if len(rows) > 1 else "no other setting was tried"
        result.reasons.append(
            f"{better}: at batch {options.batch_size} this step waits {chosen.wait_share:.0%} of its time"
        )


def measure(job: Job, dataset: Any, setting: Setting, seconds: float, options: Options) -> LoaderRow:
    """Measure one setting: throughput in the first half of the time, the consumer's wait in the second."""
    job.barrier("dataloader: next setting")
    extra: dict[str, Any] = (
        {"prefetch_factor": setting.prefetch, "persistent_workers": setting.persistent} if setting.workers else {}
    )
    loader = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=not isinstance(dataset, IterableDataset),
        num_workers=setting.workers,
        pin_memory=setting.pin_memory,
        **extra,
    )
    begin = time.perf_counter()
    batches = iter(loader)
    samples, size_bytes = use(next(batches), setting, job)
    first_batch_ms = (time.perf_counter() - begin) * 1e3
    pieces: list[float] = []
    total = count = 0
    start = piece_start = time.perf_counter()
    piece_samples = 0
    for batch in batches:
        got, _ = use(batch, setting, job)
        total, count, piece_samples = total + got, count + 1, piece_samples + got
        now = time.perf_counter()
        if now - piece_start > seconds / 12:
            pieces.append(piece_samples / (now - piece_start))
            piece_start, piece_samples = now, 0
        if now - start > seconds * 0.5:
            break
    elapsed = time.perf_counter() - start
    rate = total / elapsed if total else samples / (first_batch_ms / 1e3)
    waits = list(consumer_waits(batches, setting, job, options.step_ms / 1e3, seconds * 0.35))
    next_epoch_ms = None
    if setting.workers:
        begin = time.perf_counter()
        batches = iter(loader)
        next(batches)
        next_epoch_ms = (time.perf_counter() - begin) * 1e3
    del batches, loader  # ends the workers before the next setting is measured
    # Batches prefetched outside the measurement must not count.
    waits = waits[setting.workers * (setting.prefetch or 0) :] or waits
    wait_s = float(np.mean(waits)) if waits else options.batch_size / rate
    return LoaderRow(
        setting, rate, rate * size_bytes / max(1, samples) / 1e6, first_batch_ms, next_epoch_ms, wait_s * 1e3,
        wait_s / (wait_s + options.step_ms / 1e3), count, pieces,
    )  # fmt: skip


def use(batch: Any, setting: Setting, job: Job) -> tuple[int, int]:
    """Return (samples, bytes) of a batch, after moving it to the device with this setting."""
    tensors = list(_tensors(batch))
    if setting.transfer != "none":
        for t in tensors:
            t.to(job.device, non_blocking=setting.transfer == "non_blocking")
        if setting.transfer == "blocking":
            torch.cuda.current_stream().synchronize()
    return (len(tensors[0]) if tensors else 1), sum(t.nbytes for t in tensors)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for v in batch.values():
            yield from _tensors(v)
    elif isinstance(batch, list | tuple):
        for v in batch:
            yield from _tensors(v)


def consumer_waits(
    batches: Iterator[Any], setting: Setting, job: Job, step_s: float, seconds: float
) -> Iterator[float]:
    """Return the seconds that a consumer waits for each batch if it is busy for `step_s` between two.

    It sleeps, since a training step on a GPU leaves the CPUs to the workers.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(step_s)
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        use(batch, setting, job)
        yield time.perf_counter() - begin


PROBE = DataLoaderProbe()

if __name__ == "__main__":
    run_script(PROBE)
