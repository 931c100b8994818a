"""Hooks on torch's methods that run in every step: the next batch, forward, DDP's broadcast of buffers, backward.

Each is a thin wrapper with one call before the original and one after. `accounts.fast_hook` makes these two calls: the fast path in
C, or the functions `slow_*` here. They write the page word by word, which is cheapest with cold caches.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import is_grad_enabled

from distdiag.page.layout import Blocked, Phase, word
from distdiag.recorder.fast.accounts import fast_hook
from distdiag.recorder.hooks.collectives import note_caught
from distdiag.recorder.hooks.device_clock import cuda_clock
from distdiag.recorder.hooks.loaders import samples_of
from distdiag.recorder.hooks.step_accounting import StepAccounting
from distdiag.recorder.hooks.wrapped_model import Model, watch_forward
from distdiag.recorder.hooks.wrapping import settle, settle_late, wraps
from distdiag.recorder.state import guarded, now_ns
from distdiag.recorder.unseen import unseen
from distdiag.unpatched import get_ident

_PHASE, _SINCE, _STEP = word("phase"), word("phase_since_ns"), word("step")
_MICRO_STEPS = word("micro_steps")
_BLOCKED, _BLOCKED_AT, _BLOCKED_SITE = word("blocked"), word("blocked_at"), word("blocked_site")
_BLOCKED_SINCE, _DDP = word("blocked_since_ns"), int(Blocked.DDP)
_DATA, _FORWARD = int(Phase.DATA), int(Phase.FORWARD)
_BACKWARD, _VALIDATE = int(Phase.BACKWARD), int(Phase.VALIDATE)
_CUDA = torch.version.cuda is not None  # this build knows CUDA

Method = Callable[..., Any]


def loader_next(accounting: StepAccounting, original: Method) -> Method:
    """Return the hook of `_BaseDataLoaderIter.__next__`, or of `next` for any iterator whose batches are counted."""
    ledger, words, loaders = accounting.ledger, accounting.words, accounting.loaders

    def slow_begins(_iterator: Any) -> int:
        if get_ident() != ledger.main_thread:
            return 0
        words[_PHASE] = _DATA
        words[_SINCE] = began = now_ns()
        return began

    def slow_ends(iterator: Any, batch: Any, began: int) -> None:
        # write times first: reading a batch of an unknown type may raise
        words[_PHASE] = ledger.idle
        words[_SINCE] = t = now_ns()
        ledger.data_ns += t - began
        n = loaders.gives(iterator, batch)
        ledger.samples += n
        if not ledger.batch:
            ledger.batch = n

    def exhausted(iterator: Any, began: int, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            loaders.ends(iterator)
            ledger.data_ns += accounting.leave() - began

    begins, ends = fast_hook(ledger, "data_begins", slow_begins), fast_hook(ledger, "data_ends", slow_ends)

    @wraps(original)
    def __next__(self: Any) -> Any:
        began = 0
        try:
            began = begins(self)
            batch = original(self)
            if began:
                ends(self, batch, began)
            return batch
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, exhausted if began else None, (self, began, e))
            except BaseException as late:
                settle_late(late, e, exhausted if began else None, (self, began, e))
            raise

    return __next__


def batches(accounting: StepAccounting, iterable: Iterable[Any], length: int | None) -> Iterator[Any]:
    """Yield the batches of an iterable other than a DataLoader, and count them."""
    iterator = iter(iterable)
    accounting.loaders.starts_plain(iterator, iterable, length, sys._getframe(1))
    following = loader_next(accounting, next)
    while True:
        here = get_ident() == accounting.ledger.main_thread
        try:
            batch = following(iterator)
        except StopIteration:
            if not here:
                accounting.loaders.ends(iterator)
            return
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            raise
        if not here:  # prefetched by a thread: count its batches, not its waits
            guarded(accounting.loaders.gives)(iterator, batch)
        yield batch


def _forward_begins(accounting: StepAccounting) -> Callable[[Any, tuple[Any, ...]], int]:
    ledger, words, samples = accounting.ledger, accounting.words, accounting.checks.samples
    models, later = ledger.models, ledger.later

    def slow_begins(module: Any, inputs: tuple[Any, ...]) -> int:
        """Return the time in ns, made odd if gradients are enabled and even if not; 0: not recorded."""
        if get_ident() != ledger.main_thread:
            return 0
        training, first, m = is_grad_enabled(), False, models.get(id(module))
        if m is not None:
            site = m.forward.find()
            # buffers are broadcast in C++ before the module runs, with or without gradients
            if site == m.forward_site and m.forward_count >= 0:
                words[m.forward_count] += 1
            else:
                m.forward_site, m.forward_count = site, accounting.collectives.mark_site("forward", site)
            if training:
                n = words[m.forwards_at]
                words[m.forwards_at] = n + 1
                first = n == 0
                if not n & (n - 1):  # what enters the module is the rank's batch, whatever its loader gave
                    m.slot.batch = samples_of(inputs)
                if inputs and type(inputs[0]) is torch.Tensor and not ledger.forward_ns:
                    ledger.entered = weakref.ref(inputs[0])
                # no DataLoader: the batch size is the first dimension of the first tensor
                if inputs and not ledger.batch:
                    ledger.batch = accounting.loaders.fed(module, inputs, site)
                    ledger.samples += ledger.batch
                if later:
                    with unseen():
                        samples.poll()
        if training and _CUDA:
            _on_device(accounting, inputs if m is not None else ())
        words[_PHASE] = _FORWARD if training else _VALIDATE
        words[_SINCE] = began = now_ns()
        if first and m is not None:  # last: slow_ends ends it
            m.first_forward = watch_forward()
        return began | 1 if training else began & ~1

    return fast_hook(ledger, "forward_begins", slow_begins)


def _forward_ends(accounting: StepAccounting) -> Callable[[Any, int], None]:
    ledger, words = accounting.ledger, accounting.words
    models, pending = ledger.models, ledger.pending

    def slow_ends(module: Any, began: int) -> None:
        words[_PHASE] = ledger.idle
        words[_BLOCKED] = 0
        words[_SINCE] = t = now_ns()
        if began & 1:
            ledger.forward_ns += t - began
            if accounting.device is not None:
                accounting.device.end(Phase.FORWARD)
            m = models.get(id(module))
            if m is not None:
                if m.first_forward is not None and words[m.forwards_at] == 1:
                    m.first_forward.end()
                # DDP decides here, not in backward, whether it averages
                if module.require_backward_grad_sync and m not in pending:
                    pending.append(m)

    return fast_hook(ledger, "forward_ends", slow_ends)


def ddp_forward(accounting: StepAccounting, original: Method) -> Method:
    models = accounting.ledger.models
    accounting.ledger.cuda = _CUDA
    begins, ends = _forward_begins(accounting), _forward_ends(accounting)

    def failed(module: Any, began: int, error: BaseException) -> None:
        _forward_failed(accounting, models.get(id(module)), error)
        ends(module, began)

    # torch.compile decides by the file of a module's `forward` how to call it
    @wraps(original, file=original.__code__.co_filename)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        began = 0
        try:
            began = begins(self, inputs or tuple(kwargs.values()))
            out = original(self, *inputs, **kwargs)
            if began:
                ends(self, began)
            return out
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, failed if began else None, (self, began, e))
            except BaseException as late:
                settle_late(late, e, failed if began else None, (self, began, e))
            raise

    return forward


def _on_device(accounting: StepAccounting, inputs: tuple[Any, ...]) -> None:
    """Time a training forward on the device, if a DDP model's parameters are on one."""
    if accounting.device is None and accounting.recorder.device is not None and torch.cuda.is_initialized():
        accounting.device = cuda_clock(accounting.recorder.device)
        accounting.ledger.on_device = True
    if accounting.device is None:
        return
    if inputs and isinstance(inputs[0], torch.Tensor):
        # the loader's tensor is freed once it is copied to the device
        accounting.ledger.newest = weakref.ref(inputs[0])
    accounting.device.begin(Phase.FORWARD)


@guarded
def _forward_failed(accounting: StepAccounting, m: Model | None, error: BaseException) -> None:
    note_caught(accounting.recorder, error)
    if m is not None and "finished reduction in the prior iteration" in str(error):
        accounting.checks.unused.forward_failed(m, error, m.forward_site)


def forward_waits(accounting: StepAccounting) -> tuple[Callable[[Any], int], Callable[[int | None, Any, Any], None]]:
    """Return what to call before and after a broadcast of DDP in its forward, for `around`: the first gets the DDP module.

    In `DistributedDataParallel._sync_buffers` ranks wait for the rank that broadcasts its buffers.
    """
    ledger, words, models = accounting.ledger, accounting.words, accounting.ledger.models

    def slow_begins(module: Any) -> int:
        m = models.get(id(module))
        if m is not None and m.group_at >= 0 and get_ident() == ledger.main_thread:
            words[_BLOCKED_AT] = m.group_at
            words[_BLOCKED_SITE] = m.forward_site
            words[_BLOCKED_SINCE] = began = now_ns()
            words[_BLOCKED] = _DDP
            ledger.arrived_ns = ledger.arrived_ns or began
            return began
        return 0

    def slow_ends(began: int | None, _out: Any, _error: BaseException | None) -> None:
        if not began:
            return
        words[_BLOCKED] = 0
        waited = now_ns() - began
        ledger.wait_ns += waited
        if words[_PHASE] == _FORWARD:  # the forward of a validation is not in forward_ns
            ledger.forward_wait_ns += waited

    return fast_hook(ledger, "sync_begins", slow_begins), fast_hook(ledger, "sync_ends", slow_ends)


def _backward_begins(accounting: StepAccounting) -> Callable[[Any], int]:
    ledger, words, loaders, last_site = accounting.ledger, accounting.words, accounting.loaders, accounting.backward
    nonfinite, replicas = accounting.checks.nonfinite, accounting.checks.replicas
    pending = ledger.pending

    def slow_begins(tensors: Any) -> int:
        if get_ident() != ledger.main_thread:
            return 0
        site = last_site.find()
        micro_step = words[_MICRO_STEPS]
        words[_MICRO_STEPS] = micro_step + 1
        ledger.loss = nonfinite.loss(tensors, site, micro_step)
        if not ledger.trained:
            loaders.trains()
        if ledger.reduced_elements:  # elements reduced since the last step: parameters, averaged by hand
            replicas.averaged(ledger.reduced_elements, words[_STEP])
            ledger.reduced_elements = 0
        ledger.ready_ns = 0
        if accounting.device is not None:
            accounting.device.begin(Phase.BACKWARD)
        for m in pending:
            ddp = m.ref()
            if ddp is not None:
                pending.remove(m)
                if site == ledger.counted_site and ledger.count_at >= 0:
                    words[ledger.count_at] += 1
                else:
                    ledger.counted_site, ledger.count_at = site, accounting.collectives.mark_site("backward", site)
                words[m.synced_at] += 1
                m.slot.vain_no_syncs += not ddp.require_backward_grad_sync
                ledger.averaged_by = m
                if m.group_at >= 0:
                    words[_BLOCKED_AT] = m.group_at
                    words[_BLOCKED_SITE] = site
                    words[_BLOCKED_SINCE] = now_ns()
                    words[_BLOCKED] = _DDP
                break
        words[_PHASE] = _BACKWARD
        words[_SINCE] = began = now_ns()
        return began

    return fast_hook(ledger, "backward_begins", slow_begins, last_site)


def _backward_ends(accounting: StepAccounting) -> Callable[[int], None]:
    ledger, words = accounting.ledger, accounting.words

    def slow_ends(began: int) -> None:
        words[_PHASE] = ledger.idle
        words[_BLOCKED] = 0
        words[_SINCE] = t = now_ns()
        if accounting.device is not None:
            accounting.device.end(Phase.BACKWARD)
        ledger.backward_ns += t - began
        if ledger.ready_ns > began:
            ledger.wait_ns += t - ledger.ready_ns

    return fast_hook(ledger, "backward_ends", slow_ends)


def autograd_backward(accounting: StepAccounting, original: Method) -> Method:
    begins, ends = _backward_begins(accounting), _backward_ends(accounting)

    def failed(began: int, error: BaseException) -> None:
        note_caught(accounting.recorder, error)
        ends(began)

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        began = 0
        try:
            began = begins(tensors)
            out = original(tensors, *args, **kwargs)
            if began:
                ends(began)
            return out
        except BaseException as e:
            e.__traceback__ = e.__traceback__.tb_next  # type: ignore[union-attr]
            try:
                settle(e, failed if began else None, (began, e))
            except BaseException as late:
                settle_late(late, e, failed if began else None, (began, e))
            raise

    return backward
