"""Collectives and point-to-point as Python issues them: what, where, with whom, how long the host waited.

The methods of torch's C++ classes `ProcessGroup` and `Work` are wrapped, not the functions of `torch.distributed`: every
Python caller passes through them (FSDP2, object collectives, `from torch.distributed import all_reduce` done before us),
and no identity that torch compares (`P2POp(dist.isend, …)`) changes. What C++ issues by itself (DDP's reducer) is seen by
the process group's own counter and by the flight recorder.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from threading import get_ident
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import (
    ASYNC,
    CALLS,
    NO_GROUP,
    ON_DEVICE,
    OTHER_THREAD,
    P2P,
    PEERS,
    ROOTED,
    SITES,
    Blocked,
    LifeWord,
    PeerSlot,
    word,
)
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import ledger
from distdiag.recorder.frames import user_frame
from distdiag.recorder.hooks.group_counters import Batch, Group, Groups
from distdiag.recorder.hooks.wrapping import as_c_method, hide_frame, wraps
from distdiag.recorder.state import guarded, now_ns
from distdiag.terms.ranks import fold_ranks

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
_COUNTED_APART = _P2P | _BLOCKING  # gloo's counter of collectives runs ahead in them; NCCL has one of its own for P2P
_BARRIER = -3  # stands for the peer in the count of monitored barriers, which must go on as long as the job

_BLOCKED, _BLOCKED_AT = word("blocked"), word("blocked_at")
_BLOCKED_SITE, _BLOCKED_SINCE, _STEP = word("blocked_site"), word("blocked_since_ns"), word("step")
_NO, _WAIT, _DDP, _GROUP = int(Blocked.NO), int(Blocked.WAIT), int(Blocked.DDP), int(Blocked.GROUP)
_NO_DIMENSIONS = (0,) * 6
# (dtype, dimensions, six sizes, elements, bytes) of a call without a tensor
_NO_TENSOR = (0, -1, *_NO_DIMENSIONS, -1, -1)
_NO_WAIT = (0, False)

_local = threading.local()


class Collectives(Groups):
    """Records collectives into the page of one recorder."""

    def __init__(self, recorder: state.Recorder) -> None:
        super().__init__(recorder)
        # by id of its work: number of the call, and its site where torch itself waits for it, at the same place
        self.in_flight: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._site_counts: dict[tuple[int, int], int] = {}  # (site, op): where its count lies among the page's words
        self._ops: dict[str, int] = {}
        self.outside: set[tuple[str, int]] = set()  # (operation, site) of calls in groups of others
        self._dtypes: dict[Any, int] = {}
        self._peers: OrderedDict[tuple[int, bool, int, int], PeerSlot] = OrderedDict()  # by their last use
        self._coalesced: dict[int, list[int]] = {}  # by the first call of a coalesced group: its other calls
        self.ledger = ledger(recorder.page, recorder.main_thread)

    # -- one call -------------------------------------------------------------------------------

    @guarded
    def begin(self, pg: Any, method: str, args: tuple, kwargs: dict) -> tuple[int, Group, bool, int] | None:
        """Write what is about to be called, before it is called: an abort in the next microsecond leaves it behind.

        Returns the number of the call, its group, whether the main thread makes it, and where torch itself will wait for
        it (0 where the caller does, in a line of its own).
        """
        g = self.group(pg)
        if g is None:
            return None
        op, tensor_at = METHODS[method]
        site = self.r.site(user_frame(sys._getframe(3)))
        main = get_ident() == self.r.main_thread
        opts = args[-1] if args else kwargs.get("opts")
        asynchronous = getattr(opts, "asyncOp", None)  # None: not said, as of point-to-point
        flags = (0 if main else OTHER_THREAD) | (ASYNC if asynchronous else 0)
        tensor = _NO_TENSOR if tensor_at < 0 or len(args) <= tensor_at else self._tensor(args[tensor_at])
        peer, tag, nth, seq = -1, 0, 0, -1
        if method in _P2P:
            flags |= P2P
            if method == "recv_anysource":
                peer = -2
                tag = args[1] if len(args) > 1 else kwargs.get("tag", 0)
            else:
                peer = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
                peer = g.to_global.get(peer, peer)
                tag = args[2] if len(args) > 2 else kwargs.get("tag", 0)
            nth = self._peer(g.slot_index, method == "send", peer, tag)
        elif method in _BLOCKING:
            nth = self._peer(g.slot_index, True, _BARRIER, 0)  # counted apart: it is built of send and recv
        else:
            seq = g.slot.enqueued = self._next_seq(g)
            if op in _ROOTED:
                root = getattr(opts, "rootRank", None)
                if root is not None:
                    peer = g.to_global.get(root, root)
                    flags |= ROOTED
            elif op == "all_reduce" and len(g.members) == self.h.world_size:
                self.ledger.reduced_elements += max(tensor[-2], 0)
        if g.on_device:
            flags |= ON_DEVICE
        op_text = self._op(op)
        batch = g.coalescing
        number = self.page.write_call(
            op_text, g.slot_index, seq, nth, peer, tag, tensor[0], site, *tensor[1:],
            now_ns() if batch is None else batch.begun_ns, 0, 0, flags, self.page.words[_STEP],
        )  # fmt: skip
        self._count_site(site, op_text)
        if batch is not None:
            batch.calls.append(number)
        elif g.on_device:
            # The first operation creates the communicator in the host: its call blocks until every member has come.
            if main and (peer if flags & P2P else None) not in g.connected:
                self.block(_WAIT, number, site)
        elif method in _COUNTED_APART:
            g.message_begins()
        if method in _BLOCKING and main:
            self.block(_WAIT, number, site)
        return number, g, main, site if asynchronous is False and main else 0

    def _next_seq(self, g: Group) -> int:
        """Sequence number of the collective that is about to be issued; one for all of a coalesced group."""
        batch = g.coalescing
        if batch is not None and batch.seq:
            return batch.seq
        seq = g.pg._get_sequence_number_for_group() - g.offset + 1
        if batch is not None:
            batch.seq = seq
        return seq

    def _register(self, pg: Any) -> Group | None:
        g = super()._register(pg)
        for cls in type(pg).__mro__[:-1]:
            if cls is c10d.ProcessGroup:
                break
            _wrap_subclass(self, cls)
        return g

    def _op(self, op: str) -> int:
        off = self._ops.get(op)
        if off is None:
            off = self._ops[op] = self.page.text(op)
        return off

    def _tensor(self, value: Any) -> tuple[int, ...]:
        """dtype, dimensions, six sizes, elements and bytes of a tensor or a (nested) list of them, as `_NO_TENSOR`."""
        tensors: Any = ()
        while isinstance(value, (list, tuple)):
            tensors = value
            value = value[0] if value else None
        if not isinstance(value, torch.Tensor):
            return _NO_TENSOR
        dimensions, sizes = -1, _NO_DIMENSIONS
        if len(tensors) > 1 and all(isinstance(t, torch.Tensor) for t in tensors):
            elements = sum(t.numel() for t in tensors)
        else:
            elements = value.numel()
            shape = value.shape
            if len(shape) <= 6:
                dimensions, sizes = len(shape), (*shape, *_NO_DIMENSIONS)[:6]
        dtype = value.dtype
        off = self._dtypes.get(dtype)
        if off is None:
            off = self._dtypes[dtype] = self.page.text(str(dtype).removeprefix("torch."))
        return (off, dimensions, *sizes, elements, elements * value.element_size())

    def _peer(self, group: int, send: bool, peer: int, tag: int) -> int:
        """Count a message of this kind; how many there have been.

        A job that numbers its messages by their tag has ever new kinds: the one that was not used for longest makes room.
        Its count would only tell a wait that ended long ago from one that did not.
        """
        key = (group, send, peer, tag)
        slot = self._peers.get(key)
        if slot is None:
            n = self.h.n_peers
            if n < PEERS:
                slot = self.page.page.peers[n]
            else:
                slot = self._peers.pop(next(k for k in self._peers if k[2] != _BARRIER))
            slot.count = 0  # first: a reader may look in between
            slot.group, slot.send, slot.peer, slot.tag = group, int(send), peer, tag
            self.h.n_peers = min(n + 1, PEERS)
        else:
            self._peers.move_to_end(key)
        self._peers[key] = slot
        slot.count += 1
        return slot.count

    def _count_site(self, site: int, op: int) -> int:
        at = self._site_counts.get((site, op))
        if at is None:
            n = self.h.n_sites
            if n >= SITES:
                self.h.dropped += 1
                return -1
            slot = self.page.page.sites[n]
            slot.site, slot.op, slot.count = site, op, 0
            at = self._site_counts[(site, op)] = self.page.word_of(slot, "count")
            self.h.n_sites = n + 1
        self.page.words[at] += 1
        return at

    def mark_site(self, op: str, site: int) -> int:
        """Count a place that makes C++ issue collectives (DDP's forward and backward) like a call site.

        Returns where its count lies among the page's words; -1 where it is not counted.
        """
        return self._count_site(site, self._op(op))

    def block(self, kind: int, at: int, site: int) -> None:
        words = self.page.words
        words[_BLOCKED_AT] = at
        words[_BLOCKED_SITE] = site
        words[_BLOCKED_SINCE] = now_ns()
        words[_BLOCKED] = kind

    def block_ddp(self, pg: Any, site: int) -> None:
        """The main thread enters C++ code of DDP that may wait for others."""
        g = self.group(pg)
        if g is not None:
            self.block(_DDP, g.slot_index, site)

    def unblock(self) -> int:
        """The main thread has come back; nanoseconds since it entered."""
        words = self.page.words
        if not words[_BLOCKED]:
            return 0
        words[_BLOCKED] = 0
        return now_ns() - words[_BLOCKED_SINCE]

    @guarded
    def issued(self, number: int, g: Group, main: bool, site: int, work: Any, method: str) -> None:
        """The call came back; the work may still be in flight."""
        if g.coalescing is not None:
            return  # its operations are issued together, when the block ends
        if method in _COUNTED_APART and not g.on_device:
            g.message_ends()
        if method in _BLOCKING:
            waited = self.unblock() if main else 0
            self.ledger.wait_ns += waited
            self.page.call_left(number, now_ns(), waited, failed=False)
            return
        if g.on_device:
            if main and self.page.words[_BLOCKED] == _WAIT and self.page.words[_BLOCKED_AT] == number:
                self.unblock()
            self._connected(g, number)
        if work is not None and hasattr(work, "wait"):
            self._keep(work, number, site)
        else:
            # A synchronous operation that returns no Work: the stream waits for it, and the host is done with it.
            g.on_device = True
            self.page.call_left(number, now_ns(), 0, failed=False)

    def _keep(self, work: Any, number: int, site: int) -> None:
        self.in_flight[id(work)] = number, site
        if len(self.in_flight) > 2048:
            self.in_flight.popitem(last=False)

    def _connected(self, g: Group, number: int) -> None:
        """A call came back: the communicator of its group, or of its pair of ranks, exists."""
        if len(g.connected) > len(g.members):
            return
        slot = self.page.page.calls[(number - 1) % CALLS]
        g.connected.add(slot.peer if slot.flags & P2P else None)

    # -- coalesced groups -------------------------------------------------------------------------

    @guarded
    def coalescing_begins(self, pg: Any) -> None:
        """`_start_coalescing` came back: what is issued until `_end_coalescing` is one operation of the device."""
        g = self.group(pg)
        if g is not None:
            g.coalescing = Batch(now_ns())

    @guarded
    def coalescing_ends(self, pg: Any) -> list[int]:
        """`_end_coalescing` is about to issue the group; the numbers of its calls."""
        g = self.group(pg)
        batch = g.coalescing if g is not None else None
        if g is None or batch is None:
            return []
        g.coalescing = None
        if batch.calls and g.on_device and None not in g.connected and get_ident() == self.r.main_thread:
            self.block(_WAIT, batch.calls[0], self.page.page.calls[(batch.calls[0] - 1) % CALLS].site)
        return batch.calls

    @guarded
    def coalesced(self, pg: Any, calls: list[int], work: Any) -> None:
        """The group is issued."""
        g = self.group(pg)
        if g is None or not calls:
            return
        if get_ident() == self.r.main_thread and self.page.words[_BLOCKED] == _WAIT:
            self.unblock()
        for number in calls:
            self._connected(g, number)
        if work is None or not hasattr(work, "wait"):
            for number in calls:
                self.page.call_left(number, now_ns(), 0, failed=False)
            return
        first, *rest = calls
        self._keep(work, first, 0)
        if rest:
            if len(self._coalesced) >= 256:
                self._coalesced.pop(next(iter(self._coalesced)))
            self._coalesced[first] = rest

    @guarded
    def failed(self, number: int, g: Group, method: str, error: BaseException) -> None:
        if method in _COUNTED_APART and not g.on_device and g.coalescing is None:
            g.message_ends()
        self.page.call_left(number, now_ns(), 0, failed=True)
        if self.page.words[_BLOCKED] == _WAIT:
            self.unblock()
        note_caught(self.r, error)

    @guarded
    def wait_begins(self, work: Any) -> tuple[int, bool]:
        """(number of the call, 0 where it is not known; whether the main thread is seen to wait in it)"""
        known = self.in_flight.pop(id(work), None)
        if known is None:
            return _NO_WAIT
        number, site = known
        page = self.page
        if page.words[_BLOCKED] != _NO or get_ident() != self.r.main_thread or not page.has_call(number):
            return number, False
        self.block(_WAIT, number, site or self.r.site(user_frame(sys._getframe(3))))
        self.ledger.last_ready_ns = began = page.words[_BLOCKED_SINCE]
        self.ledger.arrived_ns = self.ledger.arrived_ns or began
        return number, True

    @guarded
    def wait_ends(self, number: int, blocked: bool, error: BaseException | None) -> None:
        waited = self.unblock() if blocked else 0
        self.ledger.wait_ns += waited
        if number:
            self.page.call_left(number, now_ns(), waited, failed=error is not None)
            for other in self._coalesced.pop(number, ()):
                self.page.call_left(other, now_ns(), 0, failed=error is not None)
        if error is not None:
            note_caught(self.r, error)

    # -- things that are collective calls without being collectives --------------------------------

    @guarded
    def group_call(self, op: str, count: int, members: list[int], depth: int = 3) -> None:
        """`init_process_group` / `new_group`: every rank must come; recorded as a call of its own."""
        site = self.r.user_site(sys._getframe(depth))
        who = self.page.text(fold_ranks(members)) if members else 0
        number = self.page.write_call(
            self._op(op), NO_GROUP, count, 0, -1, 0, who, site, *_NO_TENSOR[1:], now_ns(), 0, 0, 0,
            self.page.words[_STEP],
        )  # fmt: skip
        self.block(_GROUP, number, site)

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
        if self.page.words[_BLOCKED] == _GROUP:
            self.unblock()
            self.page.call_left(self.h.blocked_at, now_ns(), 0, failed=False)

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
            setattr(pg_class, method, as_c_method(_wrap(col, method, original), original))
    _wrap_coalescing(col, pg_class)
    work_class = c10d.Work
    original_wait = work_class.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = col.wait_begins(self)
        try:
            done = original_wait(self, *args, **kwargs)
        except BaseException as e:  # not kept in a variable: its traceback holds this frame, and so the tensors
            hide_frame(e)
            if began is not None:
                col.wait_ends(*began, e)
            raise
        if began is not None and began[0]:
            col.wait_ends(*began, None)
        return done

    work_class.wait = as_c_method(wait, original_wait)  # type: ignore[method-assign]
    return col


def _wrap_subclass(col: Collectives, cls: Any) -> None:
    """Wrap the methods that a process group written in Python overrides."""
    for method in METHODS:
        original = cls.__dict__.get(method)
        if callable(original) and not hasattr(original, "__wrapped__"):
            setattr(cls, method, wraps(original)(_wrap(col, method, original)))


def _wrap_coalescing(col: Collectives, pg_class: Any) -> None:
    start, end = getattr(pg_class, "_start_coalescing", None), getattr(pg_class, "_end_coalescing", None)
    if start is None or end is None:
        return

    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            out = start(self, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise
        col.coalescing_begins(self)
        return out

    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = col.coalescing_ends(self)
        work = None
        try:
            work = end(self, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            raise
        finally:
            col.coalesced(self, calls or [], work)
        return work

    pg_class._start_coalescing = as_c_method(_start_coalescing, start)
    pg_class._end_coalescing = as_c_method(_end_coalescing, end)


def _wrap(col: Collectives, method: str, original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "inside", False):  # a binding that calls another binding
            return original(self, *args, **kwargs)
        began = col.begin(self, method, args, kwargs)
        _local.inside = True
        try:
            work = original(self, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            if began is not None:
                col.failed(*began[:2], method, e)
            raise
        finally:
            _local.inside = False
        if began is not None:
            col.issued(*began, work, method)
        return work

    return call
