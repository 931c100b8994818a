"""Hooks on torch's methods that run in every step: the next batch, forward, DDP's broadcast of buffers, backward.

Each is a thin wrapper with one call before the original and one after. `accounts.fast_hook` makes these two calls: the fast path in
C, or the functions `slow_*` here. They write the page word by word, which is cheapest with cold caches.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import is_grad_enabled

from distdiag.page.layout import Blocked, Phase, word
from distdiag.recorder.fast.accounts import fast_hook
from distdiag.recorder.hooks import first_forward
from distdiag.recorder.hooks.collectives import note_caught
from distdiag.recorder.hooks.ddp_models import Model
from distdiag.recorder.hooks.device_clock import cuda_clock
from distdiag.recorder.hooks.step_accounting import Phases
from distdiag.recorder.hooks.wrapping import hide_frame, wraps
from distdiag.recorder.state import failed, guarded, now_ns

_PHASE, _SINCE = word("phase"), word("phase_since_ns")
_MICRO_STEPS = word("micro_steps")
_BLOCKED, _BLOCKED_AT, _BLOCKED_SITE = word("blocked"), word("blocked_at"), word("blocked_site")
_BLOCKED_SINCE, _DDP = word("blocked_since_ns"), int(Blocked.DDP)
_DATA, _FORWARD = int(Phase.DATA), int(Phase.FORWARD)
_BACKWARD, _VALIDATE = int(Phase.BACKWARD), int(Phase.VALIDATE)
_CUDA = torch.version.cuda is not None  # this build knows CUDA

Method = Callable[..., Any]


def loader_next(ph: Phases, original: Method) -> Method:
    """Return the hook of `_BaseDataLoaderIter.__next__`, or of `next` for any iterator whose batches are counted."""
    led, words, loaders = ph.ledger, ph.words, ph.loaders

    def slow_begins(_iterator: Any) -> int:
        if get_ident() != led.main_thread:
            return 0
        words[_PHASE] = _DATA
        words[_SINCE] = began = now_ns()
        return began

    def slow_ends(iterator: Any, batch: Any, began: int) -> None:
        try:
            # write times first: reading a batch of an unknown type may raise
            words[_PHASE] = led.idle
            words[_SINCE] = t = now_ns()
            led.data_ns += t - began
            n = loaders.gives(iterator, batch)
            led.samples += n
            if not led.batch:
                led.batch = n
        except Exception as e:
            failed(e)

    begins, ends = fast_hook(led, "data_begins", slow_begins), fast_hook(led, "data_ends", slow_ends)

    @wraps(original)
    def __next__(self: Any) -> Any:
        began = begins(self)
        try:
            batch = original(self)
        except BaseException as e:
            hide_frame(e)
            if began and isinstance(e, StopIteration):
                loaders.ends(self)
                led.data_ns += ph.leave() - began
            raise
        if began:
            ends(self, batch, began)
        return batch

    return __next__


def batches(ph: Phases, iterable: Iterable[Any], length: int | None) -> Iterator[Any]:
    """Yield the batches of an iterable other than a DataLoader, and count them."""
    iterator = iter(iterable)
    ph.loaders.starts_plain(iterator, iterable, length, sys._getframe(1))
    following = loader_next(ph, next)
    while True:
        here = get_ident() == ph.ledger.main_thread
        try:
            batch = following(iterator)
        except StopIteration:
            if not here:
                ph.loaders.ends(iterator)
            return
        except BaseException as e:
            hide_frame(e)
            raise
        if not here:  # prefetched by a thread: count its batches, not its waits
            _count(ph, iterator, batch)
        yield batch


@guarded
def _count(ph: Phases, iterator: Iterator[Any], batch: Any) -> None:
    ph.loaders.gives(iterator, batch)


def _forward_begins(ph: Phases) -> Callable[[Any, tuple[Any, ...]], int]:
    led, words, samples = ph.ledger, ph.words, ph.checks.samples
    models, later = led.models, led.later

    def slow_begins(module: Any, inputs: tuple[Any, ...]) -> int:
        """Return the time in ns, made odd if gradients are enabled and even if not; 0: not recorded."""
        try:
            if get_ident() != led.main_thread:
                return 0
            training, first, m = is_grad_enabled(), False, models.get(id(module))
            if m is not None:
                site = m.forward.find()
                # buffers are broadcast in C++ before the module runs, with or without gradients
                if site == m.forward_site and m.forward_count >= 0:
                    words[m.forward_count] += 1
                else:
                    m.forward_site, m.forward_count = site, ph.col.mark_site("forward", site)
                if training:
                    words[m.forwards_at] = n = words[m.forwards_at] + 1
                    first = n == 1
                    # no DataLoader: the batch size is the first dimension of the first tensor
                    if inputs and not led.batch:
                        led.batch = ph.loaders.fed(module, inputs, site)
                        led.samples += led.batch
                    if later:
                        samples.poll()
            if training and _CUDA:
                _on_device(ph, inputs if m is not None else ())
            words[_PHASE] = _FORWARD if training else _VALIDATE
            words[_SINCE] = began = now_ns()
            if first and m is not None:  # last: slow_ends ends it
                m.first_forward = first_forward.watch()
            return began | 1 if training else began & ~1
        except Exception as e:
            failed(e)
        return 0

    return fast_hook(led, "forward_begins", slow_begins)


def _forward_ends(ph: Phases) -> Callable[[Any, int], None]:
    led, words = ph.ledger, ph.words
    models, pending = led.models, led.pending

    def slow_ends(module: Any, began: int) -> None:
        try:
            words[_PHASE] = led.idle
            words[_BLOCKED] = 0
            words[_SINCE] = t = now_ns()
            if began & 1:
                led.forward_ns += t - began
                if ph.device is not None:
                    ph.device.end(Phase.FORWARD)
                m = models.get(id(module))
                if m is not None:
                    if m.first_forward is not None and words[m.forwards_at] == 1:
                        m.first_forward.end()
                    if m not in pending:
                        pending.append(m)
        except Exception as e:
            failed(e)

    return fast_hook(led, "forward_ends", slow_ends)


def ddp_forward(ph: Phases, original: Method) -> Method:
    """Return the hook of `DistributedDataParallel.forward`."""
    models = ph.ledger.models
    ph.ledger.cuda = _CUDA
    begins, ends = _forward_begins(ph), _forward_ends(ph)

    @wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        began = begins(self, inputs)
        try:
            return original(self, *inputs, **kwargs)
        except BaseException as e:
            hide_frame(e)
            if began:
                _forward_failed(ph, models.get(id(self)), e)
            raise
        finally:
            if began:
                ends(self, began)

    return forward


def _on_device(ph: Phases, inputs: tuple[Any, ...]) -> None:
    """Time a training forward on the device, if a DDP model's parameters are on one."""
    if ph.device is None and ph.r.device is not None and torch.cuda.is_initialized():
        ph.device = cuda_clock(ph.r.device)
        ph.ledger.on_device = True
    if ph.device is None:
        return
    if inputs and isinstance(inputs[0], torch.Tensor):
        ph.ledger.newest = weakref.ref(inputs[0])  # the loader's tensor is freed once it is copied to the device
    ph.device.begin(Phase.FORWARD)


@guarded
def _forward_failed(ph: Phases, m: Model | None, error: BaseException) -> None:
    note_caught(ph.r, error)
    if m is not None and "finished reduction in the prior iteration" in str(error):
        ph.checks.unused.forward_failed(m, error, m.forward_site)


def ddp_sync_buffers(ph: Phases, original: Method) -> Method:
    """Return the hook of `DistributedDataParallel._sync_buffers`, in which ranks wait for the rank that broadcasts its buffers."""
    led, words, models = ph.ledger, ph.words, ph.ledger.models

    def slow_begins(module: Any) -> int:
        try:
            m = models.get(id(module))
            if m is not None and m.group_at >= 0 and get_ident() == led.main_thread:
                words[_BLOCKED_AT] = m.group_at
                words[_BLOCKED_SITE] = m.forward_site
                words[_BLOCKED_SINCE] = began = now_ns()
                words[_BLOCKED] = _DDP
                led.arrived_ns = led.arrived_ns or began
                return began
        except Exception as e:
            failed(e)
        return 0

    def slow_ends(began: int) -> None:
        words[_BLOCKED] = 0
        waited = now_ns() - began
        led.wait_ns += waited
        if words[_PHASE] == _FORWARD:  # the forward of a validation is not in forward_ns
            led.forward_wait_ns += waited

    begins, ends = fast_hook(led, "sync_begins", slow_begins), fast_hook(led, "sync_ends", slow_ends)

    @wraps(original)
    def _sync_buffers(self: Any) -> Any:
        began = begins(self)
        try:
            return original(self)
        except BaseException as e:
            hide_frame(e)
            raise
        finally:
            if began:
                ends(began)

    return _sync_buffers


def _backward_begins(ph: Phases) -> Callable[[Any], int]:
    led, words, loaders, place = ph.ledger, ph.words, ph.loaders, ph.backward
    nonfinite, replicas = ph.checks.nonfinite, ph.checks.replicas
    pending = led.pending

    def slow_begins(tensors: Any) -> int:
        try:
            if get_ident() != led.main_thread:
                return 0
            site = place.find()
            micro_step = words[_MICRO_STEPS]
            words[_MICRO_STEPS] = micro_step + 1
            led.loss = nonfinite.loss(tensors, site, micro_step)
            if not led.trained:
                loaders.trains()
            if led.reduced_elements:  # elements reduced since the last step: parameters, averaged by hand
                replicas.averaged_elements = max(replicas.averaged_elements, led.reduced_elements)
                led.reduced_elements = 0
            led.ready_ns = 0
            if ph.device is not None:
                ph.device.begin(Phase.BACKWARD)
            for m in pending:
                ddp = m.ref()
                if ddp is not None and ddp.require_backward_grad_sync:
                    pending.remove(m)
                    if site == led.counted_site and led.count_at >= 0:
                        words[led.count_at] += 1
                    else:
                        led.counted_site, led.count_at = site, ph.col.mark_site("backward", site)
                    words[m.synced_at] += 1
                    led.averaged_by = m
                    if m.group_at >= 0:
                        words[_BLOCKED_AT] = m.group_at
                        words[_BLOCKED_SITE] = site
                        words[_BLOCKED_SINCE] = now_ns()
                        words[_BLOCKED] = _DDP
                    break
            words[_PHASE] = _BACKWARD
            words[_SINCE] = began = now_ns()
            return began
        except Exception as e:
            failed(e)
        return 0

    return fast_hook(led, "backward_begins", slow_begins, place)


def _backward_ends(ph: Phases) -> Callable[[int], None]:
    led, words = ph.ledger, ph.words

    def slow_ends(began: int) -> None:
        try:
            words[_PHASE] = led.idle
            words[_BLOCKED] = 0
            words[_SINCE] = t = now_ns()
            if ph.device is not None:
                ph.device.end(Phase.BACKWARD)
            led.backward_ns += t - began
            if led.ready_ns > began:
                led.wait_ns += t - led.ready_ns
        except Exception as e:
            failed(e)

    return fast_hook(led, "backward_ends", slow_ends)


def autograd_backward(ph: Phases, original: Method) -> Method:
    """Return the hook of `torch.autograd.backward`."""
    begins, ends = _backward_begins(ph), _backward_ends(ph)

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        began = begins(tensors)
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as e:
            hide_frame(e)
            if began:
                note_caught(ph.r, e)
            raise
        finally:
            if began:
                ends(began)

    return backward
