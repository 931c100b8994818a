"""Reads the times of DDP's communication from its reducer.

DDP times some iterations itself: the first ten, then every hundredth. `_get_ddp_logging_data` copies the newest result without
waiting: 17 µs, and 90 to 150 µs with cold caches. On the CPU, where DDP's timers only read a clock, it is set to measure more
often. On a device it reads events back with a synchronisation, so the rate is left as it is.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from torch.nn import Embedding, EmbeddingBag
from torch.nn.parallel import DistributedDataParallel as DDP

from distdiag.page.layout import HEAP_BYTES, ModelSlot
from distdiag.recorder.state import failed, now_ns
from distdiag.recorder.torch_names import private
from distdiag.recorder.unseen import named_modules, named_tensors, parameters
from distdiag.unpatched import wall_ns

if TYPE_CHECKING:
    from distdiag.page.writer import PageWriter

FIRST = 10  # iterations that DDP always measures
YOUNG, YOUNG_RATE = 128, 8  # up to this iteration every 8th is measured, so that short jobs have results
RATE, DEVICE_RATE = 32, 100  # the latter is torch's own
BUCKET_TEXTS = 4  # most texts that are written: the page never frees texts
SIZES_KEPT = 256
_MEASURES = private(DDP, "_get_ddp_logging_data", None) is not None
_HAS_RATE = private(DDP, "_set_ddp_runtime_logging_sample_rate", None) is not None


class DdpTimes:
    """Copies what one DDP module's reducer measures into the page."""

    def __init__(self, ddp: Any, index: int, slot: ModelSlot, synced_at: int) -> None:
        self._index, self._slot, self._synced_at = index, slot, synced_at
        self._iteration = 0  # the newest iteration that was read
        self._read_at = 0, 0  # step and synchronised backward passes at the last read
        self._texts = 0
        self._text = ""
        self._rate = DEVICE_RATE
        self.next_read = 1  # the step from which a new result is possible; never without the interface
        if not _MEASURES:
            self.next_read = _NEVER
        elif _HAS_RATE and _may_measure_more(ddp):
            self._rate = YOUNG_RATE
            ddp._set_ddp_runtime_logging_sample_rate(YOUNG_RATE)

    def read(self, ddp: Any, page: PageWriter, step: int) -> None:
        """Write the newest result if it was not read before. Called before the optimizer of `step`."""
        try:
            self._read(ddp, page, step)
        except Exception as e:  # a private interface of torch: without it nothing is measured
            self.next_read = _NEVER
            failed(e)

    def _read(self, ddp: Any, page: PageWriter, step: int) -> None:
        synced = page.words[self._synced_at]
        if synced <= self._iteration:  # no training, or none since the last read
            self.next_read = step + YOUNG_RATE
            return
        data = ddp._get_ddp_logging_data()
        per_step = self._per_step(step, synced)
        iteration, comm_ns = data.get("iteration", 0), data.get("backward_comm_time", 0)
        if iteration > self._iteration and comm_ns > 0:
            self._iteration = iteration
            self._write_buckets(ddp, page, data)
            # its search finds what this rank has not used; a gradient is there, too, where another rank has
            self._slot.unused_hits += bool(data.get("unused_parameter_size"))
            # DDP's times are those of the wall clock
            began_ns = data.get("backward_compute_time_start", 0) - wall_ns() + now_ns()
            page.add(
                "ddp_times", model=self._index, began_ns=max(0, began_ns), per_step=per_step, comm_ns=comm_ns,
                overlap_ns=data.get("backward_compute_comm_overlap_time", 0),
                backward_ns=data.get("backward_compute_time", 0),
            )  # fmt: skip
        if self._rate == YOUNG_RATE and iteration >= YOUNG:
            self._rate = RATE
            ddp._set_ddp_runtime_logging_sample_rate(RATE)
        # results of an iteration exist from the next forward on
        missing = self._next_measured(max(iteration, synced - 1)) + 1 - synced
        self.next_read = step + max(1, -(-missing // max(1, per_step)))

    def _next_measured(self, iteration: int) -> int:
        if iteration < FIRST:
            return iteration + 1
        return (iteration // self._rate + 1) * self._rate

    def _per_step(self, step: int, synced: int) -> int:
        """Return how many backward passes of a step average gradients; 0 if that is not known."""
        (before, synced_before), self._read_at = self._read_at, (step, synced)
        steps, backwards = step - before, synced - synced_before
        if backwards <= steps:  # some steps may have none
            return 1
        return backwards // steps if steps and backwards % steps == 0 else 0

    def _write_buckets(self, ddp: Any, page: PageWriter, data: dict[str, Any]) -> None:
        sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", ())]
        hook = getattr(hooks[0], "__name__", "?") if hooks else data.get("comm_hook") or None
        text = f"{sizes}|{hook}"
        full = page.header.heap_used > HEAP_BYTES // 2  # with many modules; the rest is for what is rare
        if text == self._text or self._texts >= BUCKET_TEXTS or full:
            return
        self._text, self._texts = text, self._texts + 1
        buckets = [int(size) for size in sizes.replace(",", " ").split()]
        trained = {n: p.numel() * p.element_size() for n, p in named_tensors(ddp.module) if p.requires_grad}
        largest = max(trained, key=lambda n: trained[n], default="")
        broadcast_bytes, largest_buffer = _broadcast(ddp)
        self._slot.buckets = page.text(
            json.dumps(
                {
                    "bytes": sum(buckets),
                    "buckets": len(buckets),
                    "bucket_bytes": buckets[:SIZES_KEPT],
                    "last_bytes": _last_quarter([*trained.values()]),
                    "largest": largest[:100],
                    "largest_bytes": trained.get(largest, 0),
                    "embedding": _of_embedding(ddp.module, largest),
                    "bucket_cap_bytes": data.get("bucket_cap_bytes"),
                    "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
                    "comm_hook": str(hook)[:100] if hook else None,
                    "dtypes": str(data.get("dtypes") or "")[:100],
                    "broadcast_bytes": broadcast_bytes,
                    "largest_buffer": largest_buffer[:100],
                }
            )
        )


_NEVER = 1 << 62


def _last_quarter(sizes: list[int]) -> int:
    """Return the bytes of the last quarter of the gradients to be ready, in whole parameters: those of the first parameters."""
    return next((n for n in itertools.accumulate(sizes) if 4 * n >= sum(sizes)), 0)


def _broadcast(ddp: Any) -> tuple[int, str]:
    """Return the bytes of the buffers that DDP broadcasts in a forward, and the name of the largest."""
    if not ddp.broadcast_buffers:
        return 0, ""
    sent = {id(b) for b in getattr(ddp, "modules_buffers", ())}  # DDP's own list, without what it was told to ignore
    sizes = {n: b.numel() * b.element_size() for n, b in named_tensors(ddp.module, "_buffers") if id(b) in sent}
    return sum(sizes.values()), max(sizes, key=lambda n: sizes[n], default="")


def _of_embedding(module: Any, name: str) -> bool:
    """True if a parameter is an embedding's, whose gradient is zero in all rows that a batch does not read, and dense."""
    owner = dict(named_modules(module)).get(name.rpartition(".")[0])
    return isinstance(owner, (Embedding, EmbeddingBag)) and not owner.sparse


def _may_measure_more(ddp: Any) -> bool:
    """True if measuring costs no more than reading a clock, and nothing is printed for it."""
    import torch.distributed as dist

    on_cpu = all(p.device.type == "cpu" for p in parameters(ddp.module))
    # with debugging on, DDP logs each measurement to stderr
    return on_cpu and dist.get_debug_level() == dist.DebugLevel.OFF
