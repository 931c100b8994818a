"""Writes the parts of a call into the rank page: operation, tensor, message count, call site and the `blocked` word."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from distdiag.page.layout import BARRIER_PEER, PEERS, SITES, Blocked, PeerSlot, word
from distdiag.recorder import state
from distdiag.recorder.hooks.group_counters import Groups
from distdiag.recorder.state import now_ns
from distdiag.recorder.unseen import unseen

_BLOCKED, _BLOCKED_AT = word("blocked"), word("blocked_at")
_BLOCKED_SITE, _BLOCKED_SINCE = word("blocked_site"), word("blocked_since_ns")
_DDP = int(Blocked.DDP)
_NO_DIMENSIONS = (0,) * 6
# (dtype, dimensions, six sizes, elements, bytes) of a call without a tensor
NO_TENSOR = (0, -1, *_NO_DIMENSIONS, -1, -1)


class CallEntries(Groups):
    """Writes the parts of a call into the page: texts, counts of messages and sites, and what the main thread waits in."""

    def __init__(self, recorder: state.Recorder) -> None:
        super().__init__(recorder)
        self._site_counts: dict[tuple[int, int], int] = {}  # (site, op): index of its count among the page's words
        self._ops: dict[str, int] = {}
        self._dtypes: dict[Any, int] = {}
        self._peers: OrderedDict[tuple[int, bool, int, int], PeerSlot] = OrderedDict()  # least recently used first

    def _op(self, op: str) -> int:
        off = self._ops.get(op)
        if off is None:
            off = self._ops[op] = self.page.text(op)
        return off

    def _tensor(self, value: Any) -> tuple[int, ...]:
        """Return dtype, dimensions, six sizes, elements and bytes of a tensor or (nested) list of tensors, as `NO_TENSOR`."""
        tensors: Any = ()
        while isinstance(value, (list, tuple)):
            tensors = value
            value = value[0] if value else None
        if not isinstance(value, torch.Tensor):
            return NO_TENSOR
        if all(type(t) is torch.Tensor for t in tensors or (value,)):
            return self._facts(tensors, value)
        with unseen():
            return self._facts(tensors, value)

    def _facts(self, tensors: Any, value: torch.Tensor) -> tuple[int, ...]:
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
        """Count a message by (group, direction, peer, tag); return its number, from 1.

        If a job uses a new tag for each message, the least recently used entry is replaced. Its count only mattered while
        a rank waited for such a message.
        """
        key = (group, send, peer, tag)
        slot = self._peers.get(key)
        if slot is None:
            n = self.header.n_peers
            if n < PEERS:
                slot = self.page.page.peers[n]
            else:
                slot = self._peers.pop(next(k for k in self._peers if k[2] != BARRIER_PEER))
            slot.count = 0  # before the rest: the monitor may read in between
            slot.group, slot.send, slot.peer, slot.tag = group, int(send), peer, tag
            self.header.n_peers = min(n + 1, PEERS)
        else:
            self._peers.move_to_end(key)
        self._peers[key] = slot
        slot.count += 1
        return slot.count

    def _count_site(self, site: int, op: int) -> int:
        """Count a call of `op` at `site`; return the index of the count among the page's words, -1 if there is no room."""
        at = self._site_counts.get((site, op))
        if at is None:
            n = self.header.n_sites
            if n >= SITES:
                self.header.dropped += 1
                return -1
            slot = self.page.page.sites[n]
            slot.site, slot.op, slot.count = site, op, 0
            at = self._site_counts[(site, op)] = self.page.word_of(slot, "count")
            self.header.n_sites = n + 1
        self.page.words[at] += 1
        return at

    def mark_site(self, op: str, site: int) -> int:
        """Count a line that makes C++ issue collectives (DDP's forward and backward) as a call site; see `_count_site`."""
        return self._count_site(site, self._op(op))

    def block(self, kind: int, at: int, site: int) -> None:
        """Record that the main thread is about to wait: in call or group `at`, by `kind` (`Blocked`)."""
        words = self.page.words
        words[_BLOCKED_AT] = at
        words[_BLOCKED_SITE] = site
        words[_BLOCKED_SINCE] = now_ns()
        words[_BLOCKED] = kind

    def block_ddp(self, pg: Any, site: int) -> None:
        """Record that the main thread enters DDP's C++ code, which may wait for other ranks."""
        g = self.group(pg)
        if g is not None:
            self.block(_DDP, g.slot_index, site)

    def unblock(self) -> int:
        """Record that the main thread no longer waits; return how long it waited, in ns."""
        words = self.page.words
        if not words[_BLOCKED]:
            return 0
        words[_BLOCKED] = 0
        return now_ns() - words[_BLOCKED_SINCE]
