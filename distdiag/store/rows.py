"""Rows of the tables of run.db: one frozen Struct each, with the columns as fields, in their order.

None means not measured and becomes NULL. Times are seconds since the run began.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Row(msgspec.Struct, frozen=True):
    """A row that is written and read as a whole."""

    TABLE: ClassVar[str]


class StepRow(Row, frozen=True, kw_only=True, gc=False):
    """One optimizer step of one rank, ms; `self_ms = step_ms - wait_ms`."""

    TABLE = "step"
    rank: int
    step: int
    epoch: int | None = None
    t_end_s: float | None = None
    step_ms: float | None = None
    data_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    wait_ms: float | None = None
    self_ms: float | None = None
    late_ms: float | None = None
    samples: int | None = None
    loss: float | None = None
    rss_bytes: int | None = None
    device_bytes: int | None = None
    # if DDP measured this step: from the start of the first bucket to the end of the last one
    comm_ms: float | None = None
    exposed_ms: float | None = None  # the part of it that is not hidden by computing gradients


class StepTimesRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """DDP's times of a step whose row is already written."""

    comm_ms: float
    exposed_ms: float
    rank: int
    step: int


class DdpRow(Row, frozen=True, kw_only=True):
    """Gradients and buckets of one DDP module of one rank, newest state."""

    TABLE = "ddp"
    rank: int
    model: int = 0  # index in the order of wrapping
    name: str | None = None  # class of the module
    pgroup: str | None = None
    backwards: int | None = None  # so far, with gradient averaging
    bytes: int | None = None  # of all gradients
    buckets: int | None = None  # all-reduces per backward pass
    bucket_bytes: str | None = None  # '1024,2048', in the order of sending; the first 256
    bucket_cap_bytes: int | None = None
    gradient_as_bucket_view: bool | None = None
    comm_hook: str | None = None  # NULL: none
    dtypes: str | None = None


class CollectiveRow(Row, frozen=True, kw_only=True, gc=False):
    """One collective that all members completed; `duration_us` on the rank that arrived last.

    `arrivals_us` are whole microseconds after the first arrival, '0,12,340', in the order of the group's ranks.
    """

    TABLE = "collective"
    pgroup: str
    seq: int
    op: str
    dtype: str | None = None
    bytes: int | None = None
    ranks: int | None = None
    t_s: float | None = None
    duration_us: float | None = None
    skew_us: float | None = None
    late_rank: int | None = None
    step: int | None = None
    arrivals_us: str | None = None


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process group; `ranks` are global ranks, folded as '0-3,8' in the table."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    backend: str = ""


class HostRow(Row, frozen=True, kw_only=True, gc=False):
    """One node at one moment (psutil)."""

    TABLE = "host"
    t_s: float
    node: int = 0
    host: str = ""
    cpu_pct: float | None = None
    load1: float | None = None
    cores: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    net_sent_bytes_per_s: float | None = None
    net_recv_bytes_per_s: float | None = None


class ProcessRow(Row, frozen=True, kw_only=True, gc=False):
    """One rank's process and its children at one moment (psutil); 100 % = one core."""

    TABLE = "process"
    t_s: float
    rank: int
    cpu_pct: float | None = None
    rss_bytes: int | None = None
    threads: int | None = None
    children: int | None = None
    children_cpu_pct: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


class GpuRow(Row, frozen=True, kw_only=True, gc=False):
    """One GPU at one moment (NVML); `throttle` holds NVML's reasons, comma-separated, '' = none."""

    TABLE = "gpu"
    t_s: float
    node: int
    gpu: int
    uuid: str | None = None
    name: str | None = None
    rank: int | None = None
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    throttle: str | None = None
    ecc_uncorrected: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlink_active: int | None = None
    processes: int | None = None


class ScalarRow(Row, frozen=True, kw_only=True, gc=False):
    """One value that the job logged."""

    TABLE = "scalar"
    rank: int
    step: int | None
    name: str
    value: float | None
    t_s: float | None = None


class LoaderRow(Row, frozen=True, kw_only=True):
    """One DataLoader of one rank, newest state; what the Data screen shows."""

    TABLE = "loader"
    rank: int
    loader: int = 0  # index of the loader on its rank
    file: str | None = None
    line: int | None = None
    length: int | None = None  # batches per epoch; None for iterable data without a length
    batch_size: int | None = None
    dataset_length: int | None = None
    drop_last: bool | None = None
    distributed_sampler: bool | None = None
    sampler_epoch: int | None = None
    shuffle: bool | None = None
    epoch: int | None = None  # iterations started
    batches: int | None = None  # handed out in this epoch
    exhausted: bool | None = None
    in_training: bool | None = None
    workers: int | None = None
    fingerprint: int | None = None  # of the first batches of this epoch; equal on two ranks = same data
    previous_fingerprint: int | None = None
    fed: bool | None = None  # no loader: what a module was given, where it was called


class Event(msgspec.Struct, frozen=True):
    """A message of the monitor or the job about itself."""

    t_s: float | None
    source: str
    level: str
    text: str


class ProbeResult(msgspec.Struct, frozen=True):
    """One probe measured during this run; `json` is its whole result."""

    t_s: float
    name: str
    verdict: str
    json: str
