"""Records each collective and message that Python issues: operation, call site, group or peer, host wait.

The methods of torch's C++ classes `ProcessGroup` and `Work` are wrapped (`wrap_collectives.py`), not the functions of
`torch.distributed`: every Python caller goes through them (FSDP2, object collectives, an earlier `from torch.distributed import
all_reduce`), and functions that torch compares by identity (`P2POp(dist.isend, …)`) stay the same objects. Collectives that C++
issues by itself (DDP's reducer) are counted by the process group's own counter and by the flight recorder.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import (
    ASYNC,
    BARRIER_PEER,
    CALLS,
    EVEN,
    NO_GROUP,
    ON_DEVICE,
    OTHER_THREAD,
    P2P,
    ROOTED,
    Blocked,
    LifeWord,
    Phase,
    word,
)
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import ledger
from distdiag.recorder.frames import user_frame
from distdiag.recorder.hooks.call_entries import NO_TENSOR, CallEntries
from distdiag.recorder.hooks.flight_recorders import of_torch, of_world
from distdiag.recorder.hooks.group_counters import Batch, Group
from distdiag.recorder.state import guarded, now_ns
from distdiag.terms.backends import NO_PAIRS, PAIRS, blocks_host, ignores_tags, in_group_communicator
from distdiag.terms.ranks import fold_ranks
from distdiag.unpatched import get_ident

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
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
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
_REDUCES = {"all_reduce", "reduce_scatter_tensor"}  # FSDP: the gradients of a sharded module
_BLOCKING = {"monitored_barrier"}
_ALL_TO_ALL = {"alltoall", "alltoall_base", "all_to_all_single"}
_COUNTED_APART = _P2P | _BLOCKING  # gloo counts these in its counter of collectives; NCCL counts P2P separately

_BLOCKED, _BLOCKED_AT, _BLOCKED_SINCE, _STEP, _PHASE = map(
    word, ("blocked", "blocked_at", "blocked_since_ns", "step", "phase")
)
_BACKWARD, _OPTIMIZER = int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_NO, _WAIT, _GROUP = int(Blocked.NO), int(Blocked.WAIT), int(Blocked.GROUP)
_UNKNOWN_WORK = (0, False)


class Collectives(CallEntries):
    """Records collectives into the page of one recorder. The wrapped methods call it before and after torch's own."""

    def __init__(self, recorder: state.Recorder) -> None:
        super().__init__(recorder)
        self.wrap_subclass: Callable[[type], None] = lambda cls: None  # of a process group written in Python
        self.wrap_work: Callable[[type], None] = lambda cls: None  # of a Work written in Python
        self._works: set[type] = {dist.Work}
        # by id of its Work: number of the call, and its call site if torch waits inside the call
        self.in_flight: OrderedDict[int, tuple[int, int]] = OrderedDict()
        # by address of its result: [number of the call] of a functional collective, 0 once it is complete
        self.results: OrderedDict[int, list[int]] = OrderedDict()
        self.outside: set[tuple[str, int]] = set()  # (operation, site) of calls in groups without this rank
        self.shapes: set[tuple[int, ...]] = set()  # of the parameters that optimizers step
        self._coalesced: dict[int, list[int]] = {}  # first call of a coalesced group -> its other calls
        self.ledger = ledger(recorder.page, recorder.main_thread)

    # -- one call -------------------------------------------------------------------------------

    @guarded
    def begin(self, pg: Any, method: str, args: tuple, kwargs: dict) -> tuple[int, Group, bool, int] | None:
        """Record a call before torch makes it, so that it is in the page if torch aborts in the call.

        Returns:
            Number of the call, its group, True if the main thread makes it, and the call site if torch waits inside the call
            (0 if the caller waits later, at another line). None if the page has no room for the group.
        """
        g = self.group(pg)
        if g is None:
            return None
        op, tensor_at = METHODS[method]
        site = self.recorder.call_site(user_frame(sys._getframe(3)))
        main = get_ident() == self.recorder.main_thread
        opts = args[-1] if args else kwargs.get("opts")
        asynchronous = getattr(opts, "asyncOp", None)  # point-to-point calls have no such option
        flags = (0 if main else OTHER_THREAD) | (ASYNC if asynchronous else 0)
        tensor = NO_TENSOR if tensor_at < 0 or len(args) <= tensor_at else self._tensor(args[tensor_at])
        peer, tag, nth, seq = -1, 0, 0, -1
        if method in _P2P:
            flags |= P2P
            peer, tag = _peer_and_tag(method, g, args, kwargs)
            if g.on_device:
                tag = 0 if ignores_tags(g.backend, _device(args)) else tag
                tag = in_group_communicator(tag) if g.coalescing is not None or not _in_pairs(g) else tag
            if g.hook is not None:
                g.message_is_recorded()
            nth = self._peer(g.slot_index, method == "send", peer, tag)
        elif method in _BLOCKING:
            nth = self._peer(g.slot_index, True, BARRIER_PEER, 0)  # it is made of send and recv, and has no number
        else:
            seq = g.issued = g.slot.enqueued = self._next_seq(g)
            if op in _ROOTED:
                root = getattr(opts, "rootRank", None)
                if root is not None:
                    peer = g.to_global.get(root, root)
                    flags |= ROOTED
            elif op in _REDUCES and len(g.members) == self.header.world_size and self._of_gradients(tensor):
                self.ledger.reduced_elements += max(tensor[-2], 0)
        if g.on_device:
            flags |= ON_DEVICE
            if method == "allgather" and tensor_at < len(args) and _equal_sizes(next(iter(args))):
                flags |= EVEN
        op_text = self._op(op)
        batch = g.coalescing
        received = self._tensor(args[0])[-2] if method in _ALL_TO_ALL and args else -1
        number = self.page.write_call(
            op_text, g.slot_index, seq, nth, peer, tag, tensor[0], site, *tensor[1:], received,
            now_ns() if batch is None else batch.begun_ns, 0, 0, flags, self.page.words[_STEP],
        )  # fmt: skip
        self._count_site(site, op_text)
        if batch is not None:
            batch.calls.append(number)
        elif g.on_device and main and (peer if flags & P2P else None) not in g.connected:
            # The first operation creates the communicator inside the call, which blocks until all members have arrived.
            self.block(_WAIT, number, site)
        if method in _COUNTED_APART and batch is None and g.may_count_messages:
            g.message_begins()
        if method in _BLOCKING and main:
            self.block(_WAIT, number, site)
        return number, g, main, site if asynchronous is False and main else 0

    def _of_gradients(self, tensor: tuple[int, ...]) -> bool:
        """True if what is reduced may be gradients. Within backward, a tensor of two or more dimensions that has the shape of no
        parameter is an activation's: an autograd function of a split model reduces it.
        """
        shapes = self.shapes
        return (
            self.page.words[_PHASE] != _BACKWARD or tensor[1] < 2 or not shapes or tensor[2 : 2 + tensor[1]] in shapes
        )

    def _next_seq(self, g: Group) -> int:
        """Return the sequence number of the collective about to be issued.

        Collectives of a coalesced group share one in the old NCCL group. nccl2 coalesces only messages.
        """
        batch = g.coalescing if g.hook is None else None
        if batch is not None and batch.seq:
            return batch.seq
        seq = (g.slot.enqueued if g.counter is None else g.counter() - g.offset) + 1
        if batch is not None:
            batch.seq = seq
        return seq

    def _register(self, pg: Any) -> Group | None:
        g = super()._register(pg)
        for cls in type(pg).__mro__[:-1]:
            if cls is dist.ProcessGroup:
                break
            self.wrap_subclass(cls)
        return g

    @guarded
    def issued(self, number: int, g: Group, main: bool, site: int, work: Any, method: str) -> None:
        """Record that the call has returned; its Work may still be in flight."""
        if g.coalescing is not None:
            return  # all operations of the group are issued when the block ends
        if method in _COUNTED_APART and g.may_count_messages:
            g.message_ends()
        if method in _BLOCKING:
            waited = self.unblock() if main else 0
            self._waited(waited)
            self.page.call_left(number, now_ns(), waited, failed=False)
            return
        if g.on_device:
            self._connected(g, number, main)
        if work is not None and hasattr(work, "wait"):
            self._keep(work, number, site)
        else:
            # A synchronous operation that returns no Work: the stream waits for it, the host continues.
            g.on_device = True
            self.page.call_left(number, now_ns(), 0, failed=False)

    def _keep(self, work: Any, number: int, site: int) -> None:
        if type(work) not in self._works:
            self._works.add(type(work))
            self.wrap_work(type(work))
        self.in_flight[id(work)] = number, site
        if len(self.in_flight) > 2048:
            self.in_flight.popitem(last=False)

    def _connected(self, g: Group, number: int, main: bool = False) -> None:
        """Record that a call has returned: its communicator, of a group or pair of ranks, exists."""
        if main and self.page.words[_BLOCKED] == _WAIT and self.page.words[_BLOCKED_AT] == number:
            self.unblock()
        if len(g.connected) > len(g.members):
            return
        slot = self.page.page.calls[(number - 1) % CALLS]
        g.connected.add(slot.peer if slot.flags & P2P else None)

    # -- coalesced groups -------------------------------------------------------------------------

    @guarded
    def coalescing_begins(self, args: tuple[Any, ...], _out: Any, error: BaseException | None) -> None:
        """Record that `_start_coalescing` has returned: calls until `_end_coalescing` become one operation of the device."""
        g = self.group(args[0]) if error is None else None
        if g is not None:
            g.coalescing = Batch(now_ns())

    @guarded
    def coalescing_ends(self, pg: Any, *_args: Any, **_kwargs: Any) -> tuple[Group, list[int]] | None:
        """Return the group and the numbers of its calls, which `_end_coalescing` is about to issue."""
        g = self.group(pg)
        batch = g.coalescing if g is not None else None
        if g is None or batch is None:
            return None
        g.coalescing = None
        if batch.calls and g.on_device and None not in g.connected and get_ident() == self.recorder.main_thread:
            self.block(_WAIT, batch.calls[0], self.page.page.calls[(batch.calls[0] - 1) % CALLS].site)
        return g, batch.calls

    @guarded
    def coalesced(self, began: tuple[Group, list[int]] | None, work: Any, _error: BaseException | None) -> None:
        g, calls = began or (None, [])
        if g is None or not calls:
            return
        if get_ident() == self.recorder.main_thread and self.page.words[_BLOCKED] == _WAIT:
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
        if method in _COUNTED_APART and g.may_count_messages and g.coalescing is None:
            g.message_ends()
        self.page.call_left(number, now_ns(), 0, failed=True)
        if self.page.words[_BLOCKED] == _WAIT:
            self.unblock()
        note_caught(self.recorder, error)

    @guarded
    def wait_begins(self, work: Any) -> tuple[int, bool]:
        """Record that `Work.wait` is about to be called. Return (number of the call, 0 if unknown; True if it blocks the main thread)."""
        known = self.in_flight.pop(id(work), None)
        return _UNKNOWN_WORK if known is None else self._waits_for(*known)

    @guarded
    def issued_functional(self, token: list[int], g: Group, main: bool, result: int) -> None:
        """Record that a functional collective is issued.

        Its result is waited for by the address of the tensor; the results of a coalesced one share `[number of the call]`.
        """
        if g.on_device:
            self._connected(g, token[0], main)
        self.results[result] = token
        self.results.move_to_end(result)
        if len(self.results) > 2048:
            self.results.popitem(last=False)

    @guarded
    def functional_wait_begins(self, result: int) -> tuple[int, bool]:
        """Record that `wait_tensor` is about to be called with this result; see `wait_begins`."""
        token = self.results.pop(result, None)
        if token is None or not token[0]:
            return _UNKNOWN_WORK
        number, token[0] = token[0], 0
        return self._waits_for(number, 0)

    def _waits_for(self, number: int, site: int) -> tuple[int, bool]:
        page = self.page
        if page.words[_BLOCKED] != _NO or get_ident() != self.recorder.main_thread or not page.has_call(number):
            return number, False
        self.block(_WAIT, number, site or self.recorder.call_site(user_frame(sys._getframe(4))))
        self.ledger.last_ready_ns = began = page.words[_BLOCKED_SINCE]
        self.ledger.arrived_ns = self.ledger.arrived_ns or began
        return number, True

    @guarded
    def wait_ends(self, number: int, blocked: bool, error: BaseException | None) -> None:
        """Record that `Work.wait` has returned or raised. The first two arguments are what `wait_begins` returned."""
        waited = self.unblock() if blocked else 0
        self._waited(waited)
        if number:
            self.page.call_left(number, now_ns(), waited, failed=error is not None)
            for other in self._coalesced.pop(number, ()):
                self.page.call_left(other, now_ns(), 0, failed=error is not None)
        if error is not None:
            note_caught(self.recorder, error)

    def _waited(self, ns: int) -> None:
        self.ledger.wait_ns += ns
        if self.page.words[_PHASE] == _OPTIMIZER:
            self.ledger.optimizer_wait_ns += ns

    # -- creating and destroying groups -------------------------------------------------------------

    @guarded
    def group_call(self, op: str, count: int, members: list[int]) -> None:
        """Record `init_process_group` or `new_group`, in which all members wait for each other, as a call."""
        site = self.recorder.user_site(sys._getframe(1))
        who = self.page.text(fold_ranks(members)) if members else 0
        number = self.page.write_call(
            self._op(op), NO_GROUP, count, 0, -1, 0, who, site, *NO_TENSOR[1:], -1, now_ns(), 0, 0, 0,
            self.page.words[_STEP],
        )  # fmt: skip
        self.block(_GROUP, number, site)

    @guarded
    def new_group(self, *args: Any, **kwargs: Any) -> None:
        """Record `new_group`. Its members wait for each other under a number that is equal on all ranks.

        If the default group is bound to a device, the new communicator is split off its own, which needs every rank.
        """
        ranks = args[0] if args else kwargs.get("ranks")
        splits = _splits(kwargs.get("backend") or (args[2] if len(args) > 2 else None))
        members = list(range(dist.get_world_size())) if ranks is None or splits else sorted(ranks)
        if self.header.rank in members and len(members) > 1 and not kwargs.get("use_local_synchronization", False):
            self.group_call("new_group", of_world("group_count", 0), members)

    @guarded
    def group_call_ends(self) -> None:
        if self.page.words[_BLOCKED] == _GROUP:
            self.unblock()
            self.page.call_left(self.header.blocked_at, now_ns(), 0, failed=False)

    @guarded
    def group_destroyed(self, group: Any = None) -> None:
        """Record a call of `destroy_process_group`; None means all groups."""
        if group is None or group is dist.group.WORLD:
            for g in self.groups.values():
                g.slot.destroyed = 1
            for kept in (self.groups, self.unfollowed, self.in_flight, self.results):
                kept.clear()
            self.header.life = LifeWord.LEFT_GROUP
            self.header.stack_ns = 0  # what the stack shows was before
        else:
            self.unfollowed.pop(id(group), None)
            if (g := self.groups.pop(id(group), None)) is not None:
                g.slot.destroyed = 1


@guarded
def note_caught(recorder: state.Recorder, error: BaseException) -> None:
    """Write an exception that torch raises into the page, since the script may catch it and exit without printing it."""
    recorder.header.caught = recorder.page.text(f"{type(error).__name__}: {str(error)[:400]}")
    recorder.header.caught_ns = now_ns()


def _peer_and_tag(method: str, g: Group, args: tuple, kwargs: dict) -> tuple[int, int]:
    """Return the global rank of a message's other end (-2: any) and its tag."""
    if method == "recv_anysource":
        return -2, args[1] if len(args) > 1 else kwargs.get("tag", 0)
    peer = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
    return g.to_global.get(peer, peer), args[2] if len(args) > 2 else kwargs.get("tag", 0)


def _device(args: tuple) -> str:
    """Return the type of device of the tensors that a message carries; "" if there are none."""
    tensors = args[0] if args else None
    return tensors[0].device.type if isinstance(tensors, (list, tuple)) and tensors else ""


def _equal_sizes(lists: Any) -> bool:
    """True if the tensors of the first list have equal sizes: such an all_gather requires that size on every rank."""
    return bool(lists) and len({t.numel() for t in lists[0]}) == 1


def _connects_at_start(pg: Any) -> bool:
    """True if the group's communicator was made with the group: `init_process_group(device_id=…)`."""
    return of_torch(pg, "bound_device_id") is not None


def _in_pairs(g: Group) -> bool:
    """True if a message outside of a batch runs on a communicator of its two ranks, not on the group's."""
    if any(name in PAIRS for name in g.implementations):
        return True
    return not (_connects_at_start(g.pg) or any(name in NO_PAIRS for name in g.implementations))


def _splits(backend: Any) -> bool:
    """True if a new group's communicator is split off the default group's, on NCCL."""
    world = dist.group.WORLD
    return _connects_at_start(world) and not blocks_host(str(backend or dist.get_backend(world)))
