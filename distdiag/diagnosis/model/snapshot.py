"""Snapshot: everything known about a job at one moment; the only input of every rule.

The monitor makes snapshots of a live job; `sources.dumps` makes them of flight-recorder dumps from any cluster. Nothing in them forms
a cycle (`gc=False`): of thousands of ranks the garbage collector would take a fifth of the monitor's time.
A field that was not measured is None (or empty), and the rule that needs it abstains. Times are seconds since the
run began.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

# a moment, not a duration; `monitor.nodes` moves them to another origin
Seconds = Annotated[float, "since the run began"]
WARM_STEPS = 20  # the first steps of a rank: kernels are built, caches fill


class Life(StrEnum):
    """State of a rank's process, from the operating system and the last entries in the rank's page."""

    MISSING = "missing"  # never wrote a page, or left no dump
    STARTING = "starting"  # attached, training not begun
    RUNNING = "running"
    FINISHED = "finished"  # its script ended normally, or it left its process group for good
    CRASHED = "crashed"  # ended by a Python exception
    KILLED = "killed"  # ended by a signal
    STOPPED = "stopped"  # SIGSTOP: alive, cannot run until SIGCONT
    DETACHED = "detached"  # it continues, but stopped recording
    SILENT = "silent"  # no heartbeat, and its process cannot be examined


DEAD = frozenset({Life.FINISHED, Life.CRASHED, Life.KILLED})


class Site(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """File, line and function in the user's code."""

    file: str
    line: int
    function: str = ""
    caller: Site | None = None  # of a collective call, if it is in no loop of its function: a helper, with many callers

    @property
    def key(self) -> str:
        """`file:line`, and that of its callers, by which sites are compared and counted."""
        return " < ".join(f"{site.file}:{site.line}" for site in self.path)

    @property
    def path(self) -> tuple[Site, ...]:
        """The site and its known callers, innermost first."""
        return (self, *self.caller.path) if self.caller is not None else (self,)


def lines_of(key: str) -> list[tuple[str, int]]:
    """Return (file, line) of the site with this key, and of its callers."""
    pairs = (part.rpartition(":") for part in key.split(" < "))
    return [(file, int(line)) for file, _, line in pairs if file and line.isascii() and line.isdigit()]


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One collective or point-to-point operation as one rank issued it."""

    op: str  # torch.distributed's name: all_reduce, broadcast, barrier, send, recv, …
    group: str  # the process group's name, the same on all its members
    seq: int | None = None  # collective_seq_id within the group (from 1); None for point-to-point
    dtype: str | None = None
    shape: tuple[int, ...] | None = None  # of the (first) tensor; None where not known
    bytes: int | None = None
    received: int | None = None  # elements that an all_to_all receives from all ranks together
    root: int | None = None  # global rank of src/dst, for rooted collectives
    peer: int | None = None  # global rank, for send/recv; None = any source
    tag: int = 0  # on a device, below 0 if the group's communicator carries the message (`terms.backends`)
    other_thread: bool = False  # not the main thread issued it
    nth: int | None = None  # point-to-point: number of this send or recv for its peer, tag and group (from 1)
    site: Site | None = None  # where the user's code called it (forward/backward of DDP: that line)
    entered_s: Seconds | None = None
    completed_s: Seconds | None = None  # None: in flight
    asynchronous: bool = False  # async_op=True, or a functional collective: the host did not wait at the call
    waited_s: float = 0.0  # of an asynchronous call, or a message: how long the host has waited for it
    failed: bool = False  # it raised in the host
    started: bool | None = None  # the device has begun it; None where the recorder did not time it
    timed_out: bool = False  # given up by the backend's watchdog
    # On a device backend the host's call, or its wait(), returns before the operation is complete: when it returned.
    on_device: bool = False
    left_s: Seconds | None = None
    even: bool = False  # recorded on a code path that requires equal sizes on all ranks

    @property
    def p2p(self) -> bool:
        return self.op in ("send", "recv", "isend", "irecv")


class Loader(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One DataLoader (or batch iterator) of one rank, in its current epoch."""

    site: Site | None = None  # where it is iterated
    length: int | None = None  # len(loader); None for iterable data without a length
    batch_size: int | None = None
    dataset_length: int | None = None
    drop_last: bool | None = None
    distributed_sampler: bool = False
    sampler_fits: bool | None = None  # its rank and num_replicas are those of the process
    sampler_epoch: int | None = None  # DistributedSampler.epoch: did set_epoch move?
    sampler_seed: int | None = None
    shuffle: bool | None = None
    iterations_started: int = 0  # how often iter() was called
    batches: int = 0  # handed out in this epoch
    previous_batches: int = 0  # in the one before
    mean_elements: float | None = None  # of the first tensor of its batches, in all epochs
    exhausted: bool = False  # StopIteration seen in this epoch
    in_training: bool = False  # DDP forward with gradients followed its batches
    workers: int = 0
    persistent_workers: bool | None = None  # they are not started again in each epoch
    fetching: float | None = None  # recent share of its workers that fetch a batch; the others wait until one is taken
    promised: bool = False  # the job declared how many batches it takes: no need to read its source
    first_fingerprints: tuple[int, ...] = ()  # of the first batches of this epoch; equal on two ranks = same data
    fed: bool = False  # no loader: what a DDP module was given in steps without one
    previous_fingerprints: tuple[int, ...] = ()  # of the epoch before; equal to the above = same order every epoch
    sampled_epoch: int = 0  # the epoch of the next field; 0: none; bit 32: what the sampler has drawn, not values
    # of the samples in it, those with the lowest hashes: the hash (high 32 bits), which workers gave it (bit i of 16), and how often it
    # came (low 16 bits)
    epoch_samples: tuple[int, ...] = ()
    data_set_index: int = 0  # hash of which samples the data set has, in which order; bit 33: a Subset; 0: unknown


class Buckets(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How a DDP module sends its gradients."""

    bytes: int = 0  # of all gradients
    buckets: int = 0  # all-reduces per backward pass
    bucket_bytes: tuple[int, ...] = ()  # in the order of sending; the first 256
    last_bytes: int = 0  # of the last quarter of the gradients to be ready, in whole parameters; 0: not known
    largest: str = ""  # the name of the parameter with the largest gradient
    largest_bytes: int = 0
    embedding: bool = False  # it is an embedding's, with a dense gradient
    bucket_cap_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    comm_hook: str | None = None  # None: none is registered
    dtypes: str = ""
    broadcast_bytes: int = 0  # of the buffers that a forward broadcasts
    largest_buffer: str = ""  # the name of the largest of them


class DdpTime(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Communication of one measured step of one rank, ms, over all its DDP modules."""

    step: int
    step_ms: float
    comm_ms: float  # from the first bucket's start to the last bucket's end
    exposed_ms: float  # the part that does not overlap with the computation of gradients


def issue_stack(site: Site, host: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the user's frames at a call that has returned: `site`, and its callers if the host is still in that function."""
    *_, last = path = site.path
    for i, frame in enumerate(host):
        if (frame.file, frame.function) == (last.file, last.function):
            return (*path, *host[i + 1 :])
    return path


class Model(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One DDP-wrapped module of one rank."""

    name: str = ""
    group: str | None = None
    site: Site | None = None  # where it was wrapped
    parameters: int = 0  # that require a gradient
    elements: int = 0
    frozen: int = 0
    frozen_names: tuple[tuple[str, int], ...] = ()  # the first of them, with their elements
    shape_hash: int = 0
    parameter_order: int = 0  # `ModelSlot.parameter_order`; 0: not known
    buffer_order: int = 0
    find_unused: bool | None = None  # None: the constructor has not returned
    flag_of_library: bool = False  # a library that wraps the model set find_unused, not the script
    static_graph: bool = False
    broadcast_buffers: bool = True
    forwards: int = 0  # with gradients
    synced_backwards: int = 0
    vain_no_syncs: int = 0  # of these in `no_sync()`, which their forward was not in
    unused_checks: int = 0
    unused_hits: int = 0
    unused: tuple[tuple[str, int], ...] = ()  # (name, elements) without gradient at the last check that found any
    never_trained: tuple[tuple[str, int], ...] = ()  # (name, elements) without gradient at every check so far
    unused_step: int = 0
    frozen_later: bool = False  # all of `unused` were frozen after DDP was built
    # modules of `unused` that the first forward did not enter; None: not seen
    never_called: tuple[str, ...] | None = None
    without_graph: bool = False  # the first forward entered them with gradients off only
    unused_site: Site | None = None  # the forward that DDP refused because of them
    search_ms: float | None = None  # per step, spent looking for unused parameters
    buckets: Buckets | None = None  # None: no backward pass was measured yet
    evaluating: bool = False  # the module that it wraps is in eval mode
    batch: int | None = None  # first dimension of what entered it; sampled


class Sample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One sampled check; `kind` is the name of a `SampleKind` in lower case."""

    kind: str
    step: int
    value: float
    key: int = 0
    name: str = ""
    site: Site | None = None
    t_s: Seconds | None = None
    alone: bool = False  # the rank trained alone until then: no DDP, no exchange with other ranks


class Step(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One optimizer step of one rank, ms.

    `arrived_s` and `ready_s` (run time) are when it arrived at the first and at the last synchronisation of the step.
    `wait_ms` is its waiting for other ranks. Its parts `forward_wait_ms`, for DDP's buffers, and `optimizer_wait_ms`, in collectives of the
    optimizer, are not included in `forward_ms` and `optimizer_ms`; the rest is included in `backward_ms` or `other_ms`.
    """

    step: int
    end_s: Seconds
    step_ms: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    wait_ms: float
    other_ms: float
    ready_s: Seconds | None
    batch: int
    samples: int
    loss: float | None
    h2d_ms: float | None = None  # on CUDA
    forward_wait_ms: float = 0.0
    arrived_s: Seconds | None = None
    epoch: int | None = None
    optimizer_wait_ms: float = 0.0
    elements: int = 0  # of the first tensor of its batches; 0: not known


class RankState(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One rank at the moment of the snapshot."""

    rank: int
    node: int = 0
    local_rank: int = 0
    host: str = ""
    pid: int | None = None
    life: str = Life.RUNNING
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None  # "IndexError: list index out of range"
    ended_s: Seconds | None = None
    heartbeat_age_s: float | None = None  # of the pulse; None in dumps, which have no pulse
    heard_at: str = ""  # time of day at which its node was last heard of; only of life SILENT

    phase: str = "init"
    phase_since_s: Seconds | None = None
    step: int = 0
    epoch: int | None = None

    current_site: Site | None = None  # the user's innermost frame of the main thread; at death, of the exception
    activity: str = "user_code"  # what it does there: Where.state's words
    activity_since_s: Seconds | None = None  # since when it is at this site with nothing new issued
    stack: tuple[str, ...] = ()  # innermost first, where evidence was taken

    # Collectives. A missing group was not used by this rank.
    enqueued: dict[str, int] = {}  # newest collective sequence number issued, by group
    completed: dict[str, int] = {}  # newest number up to which all completed, by group
    blocked: Call | None = None  # the operation that the host thread waits in; None = it does not wait
    # On a device backend: the oldest incomplete operation of each group and pair of ranks, in the order of issue. The device is
    # in the first of them; `blocked` is set from it only while the host is known to wait for the device.
    queued: tuple[Call, ...] = ()
    host_wait: str | None = None  # what the main thread's native frames show: device, communicator, no; None: not known
    host_wait_in: str = ""  # the native function that shows it, or the one that the host is in
    wait_measured: bool = True  # False if waits for other ranks happen on a device and are not measured
    calls: tuple[Call, ...] = ()  # newest last; as far back as is known
    p2p_issued: dict[str, int] = {}  # "send:3:0:default_pg" (direction:peer:tag:group) -> how many so far
    sites: dict[str, int] = {}  # "file:line" of every collective call site so far -> number of calls
    # group -> site -> the collective sequence numbers of its last visits, oldest first; only the first of consecutive calls
    visits: dict[str, dict[str, tuple[int, ...]]] = {}
    host_blocked: bool | None = None  # the main thread sleeps and has used no CPU since the last snapshot (from /proc)

    # What the live recorder knows beyond the collectives; empty in dumps.
    # the user's frames, innermost first; on a device at the call that its device is in
    user_stack: tuple[Site, ...] = ()
    host_stack: tuple[Site, ...] = ()  # where the host is meanwhile, if it has returned from that call
    # the integers among the local variables of each user's frame; of stacks only
    names: tuple[dict[str, int], ...] = ()
    loaders: tuple[Loader, ...] = ()
    models: tuple[Model, ...] = ()
    samples: tuple[Sample, ...] = ()
    steps: tuple[Step, ...] = ()  # the last 64, oldest first
    ddp_times: tuple[DdpTime, ...] = ()  # of the last 32 steps that DDP measured, oldest first
    ended_waiting: bool = False  # killed inside a collective call, or inside DDP's backward or buffer broadcast
    # by a signal or `_exit` while no line of the script ran: a worker that waited for a task
    ended_at_rest: bool = False
    in_join: bool = False  # inside torch's Join context: uneven inputs are legal
    # newest (step, value) of each name of handle.log(), oldest first
    logged: dict[str, tuple[tuple[int, float], ...]] = {}
    caught: str | None = None  # the last exception out of torch that the script may have caught
    caught_s: Seconds | None = None
    handling: str | None = None  # the exception that it is handling while it waits: "KeyError: 'device'"
    handling_site: Site | None = None  # the user's line that raised it
    # (t_s, resident bytes, without file pages and shared memory), oldest first
    memory: tuple[tuple[Seconds, int], ...] = ()
    # (t_s, bytes of its worker processes, the oldest few of them, of pages shared since the fork each one's share)
    worker_memory: tuple[tuple[Seconds, int], ...] = ()
    # (t_s, bytes that torch has reserved on its device), oldest first
    device_memory: tuple[tuple[Seconds, int], ...] = ()
    rss_bytes: int | None = None
    warm_since_s: Seconds | None = None  # when its step `WARM_STEPS` ended: growth before is start-up
    device_bytes: int | None = None
    device_total_bytes: int | None = None
    cpu_pct: float | None = None
    gc_s: float = 0.0  # so far, in full garbage collections
    gc_count: int = 0
    gc_off: bool = False  # gc.disable() was called
    tools: tuple[str, ...] = ()  # that slow it down: torch.profiler, …
    thread: str = ""  # its busiest Python thread but the main one, in the newest second; empty: none computes much
    thread_share: float = 0.0  # of that second, on a CPU
    thread_site: Site | None = None  # the user's line that it is in
    store_key: str = ""  # that its main thread waits for in a store; of several the names, with commas
    store_set: str = ""  # that its main thread has set last
    store_set_site: Site | None = None
    queued_share: float | None = None  # recent share of the time that its main thread was runnable without a CPU
    workers_starved: float | None = None  # recent share of their runnable time that its loader's workers had no CPU
    workers_busy: float | None = None  # runnable time of all of them per second: 0.5 is half a core
    # (exit code, signal) of a process that it started and that failed, unless it has noticed that by waiting for it
    dead_child: tuple[int | None, int | None] | None = None
    # that its main thread and all its children may use, if fewer than its host or container has
    cpus: tuple[int, ...] = ()
    launcher_cpus: int = 0  # number of CPUs that its parent may use; 0: not known, or all that there are
    phase_sites: dict[str, tuple[tuple[Site, int], ...]] = {}  # sampled sites of each phase, most frequent first
    phase_stacks: dict[str, tuple[Site, ...]] = {}  # one full user stack at each phase's most frequent site
    workers: tuple[Site | None, ...] = ()  # sites of its DataLoader's workers in the user's code; None: idle
    # where they were when it waited for them for long, most frequent first
    worker_sites: tuple[tuple[Site, int], ...] = ()
    lock_holders: tuple[int, ...] = ()  # ranks whose file locks this rank waits for (from the kernel's lock table)
    longest_delay_s: float = 0.0  # longest wait in seconds that it has caused so far without hanging


class Group(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One process group."""

    name: str
    ranks: tuple[int, ...]  # global ranks of its members
    description: str = ""
    backend: str = ""
    number: int | None = None  # of a call of new_group: torch's count of groups, which names the group
    site: Site | None = None  # of that call
    unfollowed: bool = False  # a rank has aborted it or changed its members: whom a rank waits for in it is not known


class Arrival(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One collective that all members have left: which rank arrived last, and how late."""

    group: str
    seq: int
    op: str
    t_s: Seconds  # first arrival
    skew_ms: float
    late_rank: int
    waited_ms: float = 0.0  # longest wait of another rank's host in it: the cost of the late rank
    shared_ms: float = 0.0  # wait of every rank's host in it, even of the last to arrive: communication time
    alone_ms: float = 0.0  # from the last but one arrival to the last: all others wait for the late rank


class CompletedConflict(msgspec.Struct, frozen=True, omit_defaults=True):
    """One collective that all members completed although their calls were not compatible."""

    group: str
    seq: int
    cause: str  # op, root, dtype, shape
    calls: dict[int, Call]


class GpuState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU over the last samples; None if NVML does not report it."""

    node: int
    gpu: int
    rank: int | None = None
    utilization_pct: float | None = None
    most_used_pct: float | None = None  # the highest utilisation of the last minute; None before a minute is known
    throttle: str | None = None
    ecc_uncorrected: int | None = None
    ecc_before: int | None = None  # number of them when the run began
    xids: tuple[int, ...] = ()  # errors the driver has reported during the run, oldest first
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    throttled_share: float | None = None  # of the last minute's samples, for heat or hardware
    lost: bool = False  # the driver reports that it cannot reach the card
    others: int | None = None  # processes on it that are not ranks of this job
    nvlink_active: int | None = None
    nvlink_before: int | None = None  # links that were up when the run began
    nvlink_recoveries: int | None = None  # of the last minute: each time traffic waits until the link is retrained


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything known about a job at one moment."""

    t_s: Seconds
    world_size: int
    ranks: dict[int, RankState]
    groups: dict[str, Group]
    source: str = "live"  # live | dumps | stacks: where ranks are, without a count of their calls
    # a node has given no new state since the last snapshot of which all had: of this one only the steps are judged
    partial: bool = False
    expected: int | None = None  # ranks that this snapshot can hold (those of one node); None: all of world_size
    arrivals: tuple[Arrival, ...] = ()  # of the last collectives that Python issued, oldest first
    completed_conflicts: tuple[CompletedConflict, ...] = ()  # the first few
    gpus: tuple[GpuState, ...] = ()
    host_cpu_pct: float | None = None  # the highest of the last 20 seconds, all cores = 100
    host_memory_bytes: int | None = None  # total memory of the host
    host_available_bytes: int | None = None  # still available
    attempt: int = 0  # how often its launcher had started the ranks before
    restarts_left: int = 0  # how often its launcher starts the ranks again if they fail
    stopped_by: int | None = None  # the signal that its launcher got before the first rank ended
    hang_ended: bool = False  # the monitor has ended the ranks of a proved hang, as it was asked to
    usual_step_s: float | None = None  # median of all ranks' recent steps
    stable_since_s: Seconds | None = None  # since when no rank has made progress, by earlier snapshots

    def whole(self, group: str | None) -> bool:
        """True for the name of a group of all ranks of the job."""
        found = self.groups.get(group or "")
        return found is not None and len(found.ranks) == self.world_size
