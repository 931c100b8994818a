"""Collectives and point-to-point as Python issues them: what, where, with whom, how long the host waited.

The methods of torch's C++ classes `ProcessGroup` and `Work` are wrapped, not the functions of `torch.distributed`: every
Python caller passes through them (FSDP2, object collectives, `from torch.distributed import all_reduce` done before us),
and no identity that torch compares (`P2POp(dist.isend, …)`) changes. What C++ issues by itself (DDP's reducer) is seen by
the process group's own counter and by the flight recorder.

Sequence numbers are the flight recorder's: collectives of one group, counted from 1. gloo's counter also counts
point-to-point; those are learned from the counter's step at each of them and taken off again.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.recorder import state
from distdiag.recorder.frames import user_frame
from distdiag.recorder.page import (
    ASYNC,
    CALLS,
    FAILED_CALL,
    GROUPS,
    NO_GROUP,
    OTHER_THREAD,
    P2P,
    PEERS,
    ROOTED,
    SITES,
    Blocked,
    CallRecord,
    GroupSlot,
    LifeWord,
    Phase,
    SiteSlot,
    fold_ranks,
    word,
)
from distdiag.recorder.state import guarded, now_ns

# method of ProcessGroup -> (torch.distributed's name, index of the argument with the tensors)
METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "barrier": ("barrier", -1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "monitored_barrier": ("monitored_barrier", -1),
}
_P2P = {"send", "recv", "recv_anysource"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_BLOCKING = {"monitored_barrier"}

_BLOCKED, _BLOCKED_AT = word("blocked"), word("blocked_at")
_BLOCKED_SITE, _BLOCKED_SINCE = word("blocked_site"), word("blocked_since_ns")
_DDP = int(Blocked.DDP)

_local = threading.local()


class _Group:
    """What is known of one process group in this process."""

    __slots__ = ("last_fr", "members", "offset", "pg", "slot", "slot_index", "to_global")

    def __init__(self, pg: Any, slot: GroupSlot, slot_index: int, members: list[int]) -> None:
        self.pg, self.slot, self.slot_index = pg, slot, slot_index
        self.members = members
        self.to_global = dict(enumerate(members))
        self.offset = 0  # of the backend's counter over the number of collectives


class Collectives:
    """Records collectives into the page of one recorder."""

    def __init__(self, recorder: state.Recorder) -> None:
        self.r = recorder
        self.h = recorder.h
        self.page = recorder.page
        self.groups: dict[int, _Group] = {}  # by id of the ProcessGroup object
        self.generation = 0
        self.in_flight: OrderedDict[int, CallRecord] = OrderedDict()
        self._site_slots: dict[tuple[int, int], SiteSlot] = {}
        self._ops: dict[str, int] = {}
        self._dtypes: dict[Any, int] = {}
        self._peers: dict[tuple[int, int, int, int], Any] = {}
        self.wait_ns = 0  # of the main thread, since the phases took it last
        self.last_ready_ns = 0
        self._in_monitored_barrier = False
        self.reduced_elements = 0  # over all ranks, between the last backward and the optimizer's step
        self._lock = threading.Lock()

    # -- groups ---------------------------------------------------------------------------------

    def group(self, pg: Any) -> _Group | None:
        """The slot of a process group, registered when first seen."""
        g = self.groups.get(id(pg))
        if g is None or g.pg is not pg:
            g = self._register(pg)
        return g

    def _register(self, pg: Any) -> _Group | None:
        with self._lock:
            n = self.h.n_groups
            if n >= GROUPS:
                self.h.dropped += 1
                return None
            world = dist._world
            ranks = world.pg_group_ranks.get(pg)
            members = sorted(ranks, key=lambda r: ranks[r]) if ranks else list(range(pg.size()))
            name = world.pg_names.get(pg) or pg.group_name
            slot = self.page.page.groups[n]
            slot.name = self.page.text(str(name))
            slot.description = self.page.text(str(getattr(pg, "group_desc", "") or ""))
            try:
                backend = str(dist.get_backend(pg))
            except (ValueError, RuntimeError, KeyError, AssertionError):
                backend = ""
            slot.backend = self.page.text(backend)
            slot.ranks = self.page.text(fold_ranks(list(members)))
            slot.generation = max(self.generation, 1)
            slot.completed = -1
            slot.flight_recorder_id = -1
            g = _Group(pg, slot, n, list(members))
            self._calibrate(g)
            self.groups[id(pg)] = g
            self.h.n_groups = n + 1
            return g

    def _calibrate(self, g: _Group) -> None:
        """Where the backend's counter and the flight recorder's differ already (we came late), take the difference."""
        count = g.pg._get_sequence_number_for_group()
        if count <= 0:
            return
        status = flight_recorder_status()
        known = [int(s["last_enqueued_collective"]) for s in status.values()]
        if known and count not in known:
            below = [k for k in known if 0 <= k < count]
            if len(known) == 1 and below:
                g.offset = count - below[0]

    @guarded
    def refresh_groups(self) -> None:
        """From the pulse: newest issued and completed collective of every group."""
        status = flight_recorder_status()
        for g in list(self.groups.values()):
            if g.slot.destroyed:
                continue
            try:
                issued = g.pg._get_sequence_number_for_group() - g.offset
            except RuntimeError:  # the group was shut down between two beats
                continue
            fr = self._recorder_entry(g, status, issued)
            if fr is not None:
                # the flight recorder counts collectives only; gloo's own counter is ahead inside a point-to-point call
                g.slot.enqueued = int(fr["last_enqueued_collective"])
                g.slot.completed = int(fr["last_completed_collective"])
            elif not self._in_monitored_barrier:
                g.slot.enqueued = issued
                g.slot.completed = -1

    def _recorder_entry(self, g: _Group, status: dict[str, Any], issued: int) -> dict[str, Any] | None:
        """The flight recorder's counters of a group: by order of creation, and only where its own count agrees."""
        if g.slot.flight_recorder_id >= 0:
            return status.get(str(g.slot.flight_recorder_id))
        by_count = [k for k, s in status.items() if int(s["last_enqueued_collective"]) == issued]
        order = str(g.slot_index)
        if issued > 0 and order in by_count:
            g.slot.flight_recorder_id = g.slot_index
        elif issued > 0 and len(by_count) == 1:
            g.slot.flight_recorder_id = int(by_count[0])
        return status.get(str(g.slot.flight_recorder_id))

    # -- one call -------------------------------------------------------------------------------

    @guarded
    def begin(self, pg: Any, method: str, args: tuple, kwargs: dict) -> tuple[CallRecord, _Group] | None:
        """Write what is about to be called, before it is called: an abort in the next microsecond leaves it behind."""
        g = self.group(pg)
        if g is None:
            return None
        op, tensor_at = METHODS[method]
        h = self.h
        frame = user_frame(sys._getframe(3))
        site = self.r.site(frame)
        number = h.n_calls + 1
        rec = self.page.call()
        rec.number = 0
        rec.op = self._op(op)
        rec.group = g.slot_index
        rec.tag = 0
        rec.peer = -1
        rec.nth = 0
        rec.flags = 0 if threading.get_ident() == self.r.main_thread else OTHER_THREAD
        opts = args[-1] if args else kwargs.get("opts")
        if getattr(opts, "asyncOp", False):
            rec.flags |= ASYNC
        rec.site = site
        rec.step = h.step
        rec.left_ns = 0
        rec.wait_ns = 0
        self._tensor(rec, args, kwargs, tensor_at, op)
        if method in _P2P:
            rec.seq = -1
            rec.flags |= P2P
            if method == "recv_anysource":
                rec.peer = -2
                rec.tag = args[1] if len(args) > 1 else kwargs.get("tag", 0)
            else:
                peer = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
                rec.peer = g.to_global.get(peer, peer)
                rec.tag = args[2] if len(args) > 2 else kwargs.get("tag", 0)
            rec.nth = self._peer(g.slot_index, method == "send", rec.peer, rec.tag)
        elif method in _BLOCKING:
            rec.seq = -1
            rec.nth = self._peer(g.slot_index, True, -3, 0)  # counted apart: it is built of send and recv
        else:
            rec.seq = pg._get_sequence_number_for_group() - g.offset + 1
            g.slot.enqueued = rec.seq
            if op in _ROOTED:
                root = getattr(opts, "rootRank", None)
                if root is not None:
                    rec.peer = g.to_global.get(root, root)
                    rec.flags |= ROOTED
            if op == "all_reduce" and len(g.members) == h.world_size:
                self.reduced_elements += max(rec.elements, 0)
        rec.entered_ns = now_ns()
        rec.number = number
        h.n_calls = number
        self._count_site(site, rec.op)
        if method in _BLOCKING:
            self._in_monitored_barrier = True
        if method in _BLOCKING and not rec.flags & OTHER_THREAD:
            self._block(Blocked.WAIT, number, site)
        return rec, g

    def _op(self, op: str) -> int:
        off = self._ops.get(op)
        if off is None:
            off = self._ops[op] = self.page.text(op)
        return off

    def _tensor(self, rec: CallRecord, args: tuple, kwargs: dict, at: int, op: str) -> None:
        rec.ndim = -1
        rec.elements = rec.bytes = -1
        rec.dtype = 0
        if at < 0:
            return
        value = args[at] if len(args) > at else None
        tensors: list[Any] = []
        while isinstance(value, (list, tuple)):
            tensors = list(value)
            value = value[0] if value else None
        if not isinstance(value, torch.Tensor):
            return
        if len(tensors) > 1 and all(isinstance(t, torch.Tensor) for t in tensors):
            rec.elements = sum(t.numel() for t in tensors)
        else:
            rec.elements = value.numel()
            shape = value.shape
            if len(shape) <= 6:
                rec.ndim = len(shape)
                for i, n in enumerate(shape):
                    rec.shape[i] = n
        rec.bytes = rec.elements * value.element_size()
        dt = value.dtype
        off = self._dtypes.get(dt)
        if off is None:
            off = self._dtypes[dt] = self.page.text(str(dt).removeprefix("torch."))
        rec.dtype = off

    def _peer(self, group: int, send: bool, peer: int, tag: int) -> int:
        key = (group, int(send), peer, tag)
        slot = self._peers.get(key)
        if slot is None:
            n = self.h.n_peers
            if n >= PEERS:
                self.h.dropped += 1
                return 0
            slot = self.page.page.peers[n]
            slot.group, slot.send, slot.peer, slot.tag, slot.count = group, int(send), peer, tag, 0
            self._peers[key] = slot
            self.h.n_peers = n + 1
        slot.count += 1
        return slot.count

    def _count_site(self, site: int, op: int) -> None:
        slot = self._site_slots.get((site, op))
        if slot is None:
            n = self.h.n_sites
            if n >= SITES:
                self.h.dropped += 1
                return
            slot = self.page.page.sites[n]
            slot.site, slot.op, slot.count = site, op, 0
            self._site_slots[(site, op)] = slot
            self.h.n_sites = n + 1
        slot.count += 1

    def mark_site(self, op: str, site: int) -> None:
        """Count a place that makes C++ issue collectives (DDP's forward and backward) like a call site."""
        self._count_site(site, self._op(op))

    def _block(self, kind: int, at: int, site: int) -> None:
        u32, u64 = self.page.u32, self.page.u64
        u64[_BLOCKED_AT] = at
        u32[_BLOCKED_SITE] = site
        u64[_BLOCKED_SINCE] = now_ns()
        u32[_BLOCKED] = kind

    def block_ddp(self, pg: Any, site: int) -> None:
        """The main thread enters C++ code of DDP that may wait for others."""
        g = self.group(pg)
        if g is not None:
            self._block(_DDP, g.slot_index, site)

    def unblock(self) -> int:
        """The main thread has come back; nanoseconds since it entered."""
        u32 = self.page.u32
        if not u32[_BLOCKED]:
            return 0
        u32[_BLOCKED] = 0
        return now_ns() - self.page.u64[_BLOCKED_SINCE]

    @guarded
    def issued(self, rec: CallRecord, g: _Group, work: Any, method: str) -> None:
        """The call came back; the work may still be in flight."""
        if method in _P2P:
            # gloo counts point-to-point in the same counter, NCCL does not: what the counter shows beyond the
            # collectives that were issued is the offset
            g.offset = g.pg._get_sequence_number_for_group() - g.slot.enqueued
        elif method in _BLOCKING:
            self._in_monitored_barrier = False
            g.offset = g.pg._get_sequence_number_for_group() - g.slot.enqueued
            rec.left_ns = now_ns()
            if not rec.flags & OTHER_THREAD:
                rec.wait_ns = self.unblock()
                self.wait_ns += rec.wait_ns
        if work is not None and hasattr(work, "wait"):
            self.in_flight[id(work)] = rec
            if len(self.in_flight) > 2048:
                self.in_flight.popitem(last=False)

    @guarded
    def failed(self, rec: CallRecord, error: BaseException) -> None:
        self._in_monitored_barrier = False
        rec.flags |= FAILED_CALL
        rec.left_ns = now_ns()
        if self.h.blocked == Blocked.WAIT:
            self.unblock()
        note_caught(self.r, error)

    @guarded
    def wait_begins(self, work: Any) -> tuple[CallRecord | None, bool]:
        rec = self.in_flight.pop(id(work), None)
        main = threading.get_ident() == self.r.main_thread
        overwritten = rec is None or rec.number + CALLS <= self.h.n_calls
        if rec is not None and main and not overwritten and self.h.blocked == Blocked.NO:
            self._block(Blocked.WAIT, rec.number, self.r.user_site(sys._getframe(3)))
            self.last_ready_ns = self.h.blocked_since_ns
            return rec, True
        return rec, False

    @guarded
    def wait_ends(self, rec: CallRecord | None, blocked: bool, error: BaseException | None) -> None:
        if blocked:
            waited = self.unblock()
            self.wait_ns += waited
            if rec is not None:
                rec.wait_ns = waited
        if rec is not None:
            rec.left_ns = now_ns()
            if error is not None:
                rec.flags |= FAILED_CALL
        if error is not None:
            note_caught(self.r, error)

    # -- things that are collective calls without being collectives --------------------------------

    @guarded
    def group_call(self, op: str, count: int, members: list[int], depth: int = 3) -> None:
        """`init_process_group` / `new_group`: every rank must come; recorded as a call of its own."""
        h = self.h
        site = self.r.user_site(sys._getframe(depth))
        rec = self.page.call()
        rec.number = 0
        rec.op = self._op(op)
        rec.group = NO_GROUP
        rec.seq = count
        rec.peer = -1
        rec.flags = 0
        rec.site = site
        rec.ndim = rec.elements = rec.bytes = -1
        rec.dtype = self.page.text(fold_ranks(members)) if members else 0
        rec.left_ns = rec.wait_ns = 0
        rec.step = h.step
        rec.entered_ns = now_ns()
        number = h.n_calls + 1
        rec.number = number
        h.n_calls = number
        self._block(Blocked.GROUP, number, site)

    @guarded
    def new_group(self, args: tuple, kwargs: dict) -> None:
        """The members of a new group wait for each other under its name, a count that all ranks keep alike."""
        self.h.new_groups += 1
        ranks = args[0] if args else kwargs.get("ranks")
        members = sorted(ranks) if ranks is not None else list(range(dist.get_world_size()))
        if self.h.rank in members and len(members) > 1 and not kwargs.get("use_local_synchronization", False):
            self.group_call("new_group", dist._world.group_count, members, depth=5)

    @guarded
    def group_call_ends(self) -> None:
        number = self.h.blocked_at
        if self.h.blocked == Blocked.GROUP:
            self.unblock()
            rec = self.page._calls[(number - 1) % len(self.page._calls)]
            if rec.number == number:
                rec.left_ns = now_ns()

    @guarded
    def group_destroyed(self, pg: Any) -> None:
        if pg is None or pg is dist.group.WORLD:
            for g in self.groups.values():
                g.slot.destroyed = 1
            self.groups.clear()
            self.in_flight.clear()
            self.h.life = LifeWord.LEFT_GROUP
        elif (g := self.groups.pop(id(pg), None)) is not None:
            g.slot.destroyed = 1


def flight_recorder_status() -> dict[str, Any]:
    """Newest enqueued / completed collective by the flight recorder's own group number; {} where there is none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            status = json.loads(dump(False, False)).get("pg_status", {})
        except (RuntimeError, ValueError):
            continue
        if status:
            return status
    return {}


@guarded
def note_caught(r: state.Recorder, error: BaseException) -> None:
    """Remember an exception that leaves torch: the script may catch it, and then nobody else would know."""
    r.h.caught = r.page.text(f"{type(error).__name__}: {str(error)[:400]}")
    r.h.caught_ns = now_ns()


def install(r: state.Recorder) -> Collectives:
    """Wrap torch's classes; called once per process."""
    col = Collectives(r)
    pg_class = c10d.ProcessGroup
    for method in METHODS:
        original = getattr(pg_class, method, None)
        if original is not None:
            setattr(pg_class, method, _wrap(col, method, original))
    work_class = c10d.Work
    original_wait = work_class.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = col.wait_begins(self)
        error = None
        try:
            return original_wait(self, *args, **kwargs)
        except BaseException as e:
            error = e
            raise
        finally:
            if began is not None and (began[0] is not None or error is not None):
                col.wait_ends(began[0], began[1], error)

    work_class.wait = wait  # type: ignore[method-assign]
    _wrap_groups(col)
    return col


def _wrap(col: Collectives, method: str, original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "inside", False):  # a binding that calls another binding
            return original(self, *args, **kwargs)
        began = col.begin(self, method, args, kwargs)
        _local.inside = True
        try:
            work = original(self, *args, **kwargs)
        except BaseException as e:
            if began is not None:
                col.failed(began[0], e)
            raise
        finally:
            _local.inside = False
        if began is not None:
            col.issued(*began, work, method)
        return work

    call.__name__ = method
    call.__doc__ = original.__doc__
    return call


def _wrap_groups(col: Collectives) -> None:
    """Entering and leaving process groups, at the functions that every caller reaches by module attribute."""
    import functools

    import torch.distributed as public

    def replace(name: str, make: Any) -> None:
        original = getattr(dist, name)
        wrapped = functools.wraps(original)(make(original))
        for module in (dist, public):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)

    def init(original: Any) -> Any:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            col.generation += 1
            col.h.initialised = col.generation
            col.group_call("init_process_group", col.generation, [])
            try:
                out = original(*args, **kwargs)
            except BaseException as e:
                note_caught(col.r, e)
                raise
            finally:
                col.group_call_ends()
            _initialised(col)
            return out

        return init_process_group

    def new(original: Any) -> Any:
        def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
            col.new_group(args, kwargs)
            try:
                out = original(*args, **kwargs)
            finally:
                col.group_call_ends()
            _registered(col, out)
            return out

        return _new_group_with_tag

    def destroy(original: Any) -> Any:
        def destroy_process_group(group: Any = None) -> Any:
            col.group_destroyed(group)
            return original(group)

        return destroy_process_group

    replace("init_process_group", init)
    replace("_new_group_with_tag", new)
    replace("destroy_process_group", destroy)


@guarded
def _initialised(col: Collectives) -> None:
    pg = dist.group.WORLD
    if pg is not None:
        col.group(pg)
        col.h.world_size = pg.size()
        col.h.life = LifeWord.RUNNING
        if col.h.phase == Phase.INIT:
            col.h.phase_since_ns = now_ns()


@guarded
def _registered(col: Collectives, pg: Any) -> None:
    if isinstance(pg, c10d.ProcessGroup):
        col.group(pg)
