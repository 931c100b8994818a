"""One rank of a probe command: process groups, device, control traffic, clocks.

Control traffic (how many iterations next, stamps to rank 0) goes over gloo on the CPU, also when NCCL is measured.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.command.options import Injection, Options
from distdiag.probekit.ranks import clock, interface
from distdiag.probekit.ranks.environment import RankPlace
from distdiag.probekit.ranks.interface import Interface
from distdiag.probekit.ranks.watchdog import Progress, Watchdog, timed_out
from distdiag.probekit.verdict.result import SCHEMA
from distdiag.streams import say_error, say_json
from distdiag.terms.units import counted

T = TypeVar("T")
_ROUNDS = 12  # of messages, to compare the clocks of two hosts


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a rank announces of itself."""

    host: str
    node: str  # containers and namespaces of one machine count as several
    interface: Interface
    clock: str
    network: str  # equal on ranks that share their interfaces, with the loopback


class Job:
    """One rank of a probe; use `joined(...)`, which always destroys the process group."""

    def __init__(self, place: RankPlace, options: Options, device: torch.device) -> None:
        self.place = place
        self.options = options
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.device = device
        self.backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
        self.dtype = getattr(torch, options.dtype)
        self.store: dist.Store | None = None  # the rendezvous, if there are two ranks or more
        self.progress = Progress(limit_s=options.timeout_s)
        self.control: Any = None  # gloo group for control traffic
        self.group: Any = None  # the group that is measured
        self.deadline_s = time.monotonic() + 3600  # end of measuring; rank 0's value counts
        self.hosts: list[str] = [socket.gethostname()] * place.world_size
        self.host_keys: list[str] = [""] * place.world_size  # identities of the hosts: names can repeat
        self.clock_offsets_ns: list[int] = [0] * place.world_size
        self.clock_error_ns = 0
        self.ceilings: dict[str, float | None] | None = None  # measured once per command
        self.watchdog: Watchdog | None = None
        self.injections = [i for i in options.inject if i.rank == self.rank]

    def empty(self, elements: int) -> torch.Tensor:
        """Return zeros of the probed type on the probed device: their sums stay exact and finite."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all enqueued work; does nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def injected(self, kind: str) -> Injection | None:
        return next((i for i in self.injections if i.kind == kind), None)

    @property
    def ranks_per_host(self) -> int:
        return max(self.host_keys.count(k) for k in set(self.host_keys))

    @contextlib.contextmanager
    def step(self, label: str, counter: list[int] | None = None) -> Iterator[None]:
        """Mark a part of the probe in which ranks wait for each other, for the watchdog."""
        if self.injected("drop"):  # stop taking part, like a rank that hangs elsewhere, until the others have timed out
            self.progress.note.label = "drop injected: this rank takes no part"
            time.sleep(self.options.timeout_s + 5)
            raise DistdiagError("drop injected", "this rank took no part", ExitCode.TIMEOUT, "dropped")
        with self.progress.step(label, counter):
            yield

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def barrier(self, label: str = "barrier between measurements") -> None:
        if self.world_size > 1:
            with self.step(label):
                dist.barrier(group=self.control)

    def agree(self, values: list[float], label: str = "agreeing on the next block") -> list[float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.step(label):
            dist.broadcast(tensor, 0, group=self.control)
        return tensor.tolist()

    def gather_array(self, array: np.ndarray, label: str = "collecting stamps") -> np.ndarray | None:
        """Return the equal-shaped arrays of all ranks, stacked, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return array[None]
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        with self.step(label):
            dist.gather(tensor, parts, dst=0, group=self.control)
        return torch.stack(parts).numpy() if parts is not None else None

    def gather_all(self, value: T, label: str = "collecting") -> list[T]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.step(label):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def while_others_wait(self, work: Callable[[], T], limit_s: float, label: str) -> T | None:
        """Run `work` on rank 0 while the others wait without using the CPU; return its value on rank 0, None elsewhere."""
        if self.world_size == 1:
            return work()
        key = f"alone/{label}"
        if self.rank == 0:
            try:
                return work()
            finally:
                self.open_store().set(key, "done")
        self.progress.limit_s += limit_s
        try:
            with self.step(label):
                self.open_store().wait([key], datetime.timedelta(seconds=limit_s + self.options.timeout_s))
        finally:
            self.progress.limit_s -= limit_s
        return None

    def open_store(self) -> dist.Store:
        """Return the rendezvous store, which exists if there are two ranks or more."""
        assert self.store is not None
        return self.store


@contextlib.contextmanager
def joined(place: RankPlace, options: Options, arrival_limit_s: float) -> Iterator[Job]:
    """Connect to the other ranks, yield the `Job`, and always destroy the process group.

    Raises:
        DistdiagError: TIMEOUT, with the missing ranks and the interface tried; or an error of the body.
    """
    job = Job(place, options, choose_device(place, options))
    if place.world_size == 1:
        yield job
        return
    mine = interface.tried_by("gloo")  # control traffic is gloo's, also where NCCL is measured
    where = mine.text if job.backend == "gloo" else f"{mine.text}; NCCL's would be {interface.tried_by('nccl').text}"
    try:
        job.store = _open_store(place, arrival_limit_s, mine)
        arrivals = _wait_for_all(job, arrival_limit_s, mine)
        _refuse_unreachable(arrivals)
        connect, leave = partial(_connect, place, options.timeout_s), partial(_leave_report, place, options)
        job.watchdog = Watchdog(job.progress, job.rank, job.world_size, where, connect, leave)
        job.watchdog.start()
        with job.progress.step("connecting to each other"):
            _init_groups(job, arrivals)
        job.clock_offsets_ns, job.clock_error_ns = align(job, [a.clock for a in arrivals])
        yield job
    except RuntimeError as e:  # gloo and NCCL errors are RuntimeErrors
        if not job.progress.note.inside:  # not from communication: a dataset, a model, our own defect
            raise
        raise _explain(e, job) from e
    finally:
        if job.watchdog is not None:
            job.watchdog.stop()
        if dist.is_initialized():
            # after an error the other side may be gone
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def choose_device(place: RankPlace, options: Options) -> torch.device:
    if options.device != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_world_size > count and not options.share_gpus:
        raise DistdiagError(
            f"{place.local_world_size} ranks on this host, but {counted(count, 'GPU')}",
            "use --nproc with at most that many, or --share-gpus where several ranks on one GPU are meant",
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _namespace() -> str:
    # torchrun keeps its store if it restarts the ranks: keys of an earlier attempt must not be found
    return f"distdiag-probe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connect(place: RankPlace, limit_s: float) -> dist.Store:
    timeout = datetime.timedelta(seconds=limit_s)
    store = dist.TCPStore(place.master_addr, place.master_port, None, False, timeout, wait_for_workers=False)
    return dist.PrefixStore(_namespace(), store)


def _open_store(place: RankPlace, limit_s: float, mine: Interface) -> dist.Store:
    hosts_it = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=limit_s)
    where = f"{place.master_addr}:{place.master_port}"
    try:
        store = dist.TCPStore(
            place.master_addr, place.master_port, place.world_size, hosts_it, timeout, wait_for_workers=False
        )
    except RuntimeError as e:
        if hosts_it:
            raise DistdiagError(
                f"rank 0 cannot listen on {where}: {_first_line(e)}",
                "set MASTER_PORT to a free port, and MASTER_ADDR to an address of rank 0's host",
            ) from None
        raise timed_out(
            f"rank 0 never arrived: nothing listens on {where} (tried for {limit_s:g} s by rank {place.rank})",
            f"start rank 0, or check MASTER_ADDR; this rank would use interface {mine.text}",
        ) from None
    return dist.PrefixStore(_namespace(), store)


def _wait_for_all(job: Job, limit_s: float, mine: Interface) -> list[Arrival]:
    """Announce this rank and wait for all others, before torch's rendezvous can hang without naming a rank."""
    store, host = job.open_store(), socket.gethostname()
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or host
    me = Arrival(host, node, mine, clock.kernel_identity("time"), clock.kernel_identity("net"))
    store.set(f"arrived/{job.rank}", msgspec.json.encode(me).decode())
    keys = [f"arrived/{rank}" for rank in range(job.world_size)]
    with contextlib.suppress(RuntimeError):  # out of time
        store.wait(keys, datetime.timedelta(seconds=limit_s))
    arrived = [rank for rank, key in enumerate(keys) if store.check([key])]
    seen = {rank: msgspec.json.decode(store.get(keys[rank]), type=Arrival) for rank in arrived}
    if len(seen) == job.world_size:
        return [*seen.values()]
    missing = [r for r in range(job.world_size) if r not in seen]
    where = f"{job.place.master_addr}:{job.place.master_port}"
    raise timed_out(
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {job.world_size} never arrived at "
        f"{where} within {limit_s:g} s; interface tried: {mine.text}",
        _advice(seen),
    )


def _advice(arrivals: Mapping[int, Arrival]) -> str:
    return interface.advice({r: a.interface for r, a in arrivals.items()}, {r: a.node for r, a in arrivals.items()})


def _tried(arrivals: Mapping[int, Arrival], ranks: list[int]) -> str:
    return "; ".join(f"rank {r}: {arrivals[r].interface.text}" for r in ranks[:4])


def _refuse_unreachable(arrivals: list[Arrival]) -> None:
    """Fail at once if an offered address cannot be reached, for which gloo would try half a minute."""
    several = len({a.network for a in arrivals}) > 1
    unreachable = (interface.NO_ADDRESS, *(["127."] if several else []))
    lost = [r for r, a in enumerate(arrivals) if a.interface.address.startswith(unreachable)]
    if lost:
        by_rank = dict(enumerate(arrivals))
        raise timed_out(
            f"all {len(arrivals)} ranks arrived, but cannot connect to each other; "
            f"interfaces tried: {_tried(by_rank, lost)}",
            _advice(by_rank),
        )


def _init_groups(job: Job, arrivals: list[Arrival]) -> None:
    limit = datetime.timedelta(seconds=job.options.timeout_s)
    try:
        # at this limit gloo raises, which frees the main thread; by then the watchdog knows the missing ranks
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("c10d", job.open_store()),
            rank=job.rank,
            world_size=job.world_size,
            timeout=limit,
        )
    except RuntimeError as e:
        by_rank = dict(enumerate(arrivals))
        raise timed_out(
            f"all {job.world_size} ranks arrived, but could not connect to each other: {_first_line(e)}",
            f"{_advice(by_rank)}; interfaces tried: {_tried(by_rank, [*by_rank])}",
        ) from None
    job.control = dist.group.WORLD
    job.group = dist.group.WORLD
    if job.backend == "nccl":
        # NCCL's watchdog would end the process without naming ranks; ours comes first
        longer = datetime.timedelta(seconds=job.options.timeout_s + 60)
        job.group = dist.new_group(backend="nccl", timeout=longer)
    job.hosts = [a.host for a in arrivals]
    job.host_keys = [a.clock + a.host for a in arrivals]


def align(job: Job, identities: list[str]) -> tuple[list[int], int]:
    """Return the offsets of all ranks' clocks against rank 0's in ns, and the largest error; valid on rank 0.

    Every rank calls it. It costs nothing if all identities are equal, else a few round trips per rank.
    """
    if len(set(identities)) == 1:
        return [0] * job.world_size, 0
    stamp = torch.zeros(1, dtype=torch.int64)
    offsets, error = [0] * job.world_size, 0
    for rank in range(1, job.world_size):
        if identities[rank] == identities[0]:
            continue
        exchanges: list[tuple[int, int, int]] = []
        with job.step(f"clock alignment with rank {rank}"):
            for _ in range(_ROUNDS):
                if job.rank == 0:
                    sent = clock.clock_ns()
                    dist.send(stamp, rank, group=job.control)
                    dist.recv(stamp, rank, group=job.control)
                    exchanges.append((sent, int(stamp[0]), clock.clock_ns()))
                elif job.rank == rank:
                    dist.recv(stamp, 0, group=job.control)
                    stamp[0] = clock.clock_ns()
                    dist.send(stamp, 0, group=job.control)
        if job.rank == 0:
            offsets[rank], of_this = clock.offset_from_exchanges(exchanges)
            error = max(error, of_this)
    return offsets, error


def _leave_report(place: RankPlace, options: Options, store: Any, error: DistdiagError) -> None:
    """Report an error before the process ends: into the store for our launcher, else on stderr."""
    if place.launcher == "distdiag":
        store.set("report", json.dumps([error.message, error.hint]))
        return
    if place.rank == 0 and options.output_format == "json":
        say_json(error.as_json(SCHEMA), flush=True)
    say_error(error.message, error.hint, flush=True)


def _explain(e: RuntimeError, job: Job) -> DistdiagError:
    """Return a backend's error as ours: a timeout with the missing ranks, or a lost rank."""
    text = _first_line(e)
    # gloo closes the connections of a timed-out operation, so the next rank sees a closed pair
    waited = time.monotonic() - job.progress.since_s
    slow = "timed out" in text.lower() or "timeout" in text.lower() or waited > job.progress.limit_s / 2
    if job.watchdog is not None and slow:
        return job.watchdog.report()
    hint, kind = "this backend does not support it on this device and type", "backend"
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        text = f"another rank is gone ({text})"
        hint, kind = "read the other ranks' output; a killed rank leaves none", "rank_lost"
    return DistdiagError(f"{job.progress.note.label}: {text}", hint, ExitCode.FAILED, kind)


def _first_line(e: Exception) -> str:
    line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    return line if len(line) <= 200 else line[:197] + "…"
