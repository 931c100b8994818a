"""Records the wait in which DDP rebuilds its buckets: a broadcast in C++, once per module, in the forward after the first
averaged backward. A rank that left after its first step is waited for there.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from distdiag.recorder.hooks.step import forward_waits
from distdiag.recorder.hooks.step_accounting import StepAccounting
from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import guarded

FORWARDS = 64  # of a module that never rebuilds its buckets, after which it is no longer watched


class BucketRebuilds:
    """Wraps the C++ method that rebuilds buckets, only while a module may still do so: it is called in every forward."""

    def __init__(self, accounting: StepAccounting) -> None:
        self._models = accounting.ledger.models
        self._words = accounting.words
        self._waits = forward_waits(accounting)
        self._of: Any = getattr(torch.distributed, "Reducer", None)
        self._original: Any = None
        self._open: set[int] = set()  # ids of modules that may still rebuild

    @guarded
    def watch(self, ddp: Any) -> None:
        if not hasattr(self._of, "_rebuild_buckets") or (ddp.find_unused_parameters and not ddp.static_graph):
            return
        self._open.add(id(ddp))
        if self._original is None:
            self._original = self._of._rebuild_buckets
            self._of._rebuild_buckets = around(self._original, self._begins, self._ends, c_method=True)

    @guarded
    def _begins(self, reducer: Any) -> tuple[Any, int]:
        found = ((m, m.ref()) for m in self._models.values())
        m, ddp = next(((m, d) for m, d in found if d is not None and d.reducer is reducer), (None, None))
        return m, self._waits[0](ddp) if ddp is not None else 0

    @guarded
    def _ends(self, began: tuple[Any, int] | None, rebuilt: bool | None, _error: BaseException | None) -> None:
        m, at_ns = began or (None, 0)
        self._waits[1](at_ns, None, None)
        if m is not None and (rebuilt or self._words[m.forwards_at] > FORWARDS):
            self._open.discard(id(m.ref()))
        self._open &= self._models.keys()
        if not self._open and self._original is not None:
            self._of._rebuild_buckets, self._original = self._original, None
