"""What stands in the place of torch's own methods in every step: the next batch, forward, the broadcast of buffers, backward.

Each does its work in its own body, before and after the original: between two of them a step's computation empties the
caches, and there every further function, attribute and tensor method costs more than what it does (an empty function 3 µs
instead of 50 ns).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import is_grad_enabled

from distdiag.recorder import first_forward
from distdiag.recorder.collectives import note_caught
from distdiag.recorder.device_clock import DeviceClock
from distdiag.recorder.layout import Blocked, Phase, word
from distdiag.recorder.models import Model
from distdiag.recorder.phases import Phases
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
    """`_BaseDataLoaderIter.__next__`, or `next` of any iterator whose batches are counted."""
    words, loaders = ph.words, ph.loaders

    def __next__(self: Any) -> Any:
        if get_ident() != ph.main_thread:
            return original(self)
        words[_PHASE] = _DATA
        words[_SINCE] = began = now_ns()
        try:
            batch = original(self)
        except StopIteration:
            loaders.ends(self)
            ph.data_ns += ph.leave() - began
            raise
        try:
            # first what the rest of the step stands on: a batch of an unheard-of kind may not be looked into
            words[_PHASE] = ph.idle
            words[_SINCE] = t = now_ns()
            ph.data_ns += t - began
            n = loaders.gives(self, batch, t)
            ph.samples += n
            if not ph.batch:
                ph.batch = n
        except Exception as e:
            failed(e)
        return batch

    return __next__


def batches(ph: Phases, iterable: Iterable[Any], length: int | None) -> Iterator[Any]:
    """Watch an iterable of batches that is no DataLoader; yields what it yields."""
    iterator = iter(iterable)
    ph.loaders.starts_plain(iterator, iterable, length, sys._getframe(1))
    following = loader_next(ph, next)
    while True:
        here = get_ident() == ph.main_thread
        try:
            batch = following(iterator)
        except StopIteration:
            if not here:
                ph.loaders.ends(iterator)
            return
        if not here:  # fetched ahead by a thread: its waits are nobody's, its batches count
            _count(ph, iterator, batch)
        yield batch


@guarded
def _count(ph: Phases, iterator: Iterator[Any], batch: Any) -> None:
    ph.loaders.gives(iterator, batch, now_ns())


def ddp_forward(ph: Phases, original: Method) -> Method:
    """`DistributedDataParallel.forward`."""
    words, models, pending, checks = ph.words, ph.models, ph.pending, ph.checks

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        began = 0
        training, first, m = False, False, None
        try:
            if get_ident() == ph.main_thread:
                training, m = is_grad_enabled(), models.get(id(self))
                if m is not None:
                    site = m.forward.look()
                    # buffers are broadcast in C++ before the module runs, whether gradients are wanted or not
                    if site == m.forward_site and m.forward_count >= 0:
                        words[m.forward_count] += 1
                    else:
                        m.forward_site, m.forward_count = site, ph.col.mark_site("forward", site)
                    if training:
                        words[m.forwards_at] = n = words[m.forwards_at] + 1
                        first = n == 1
                        # batches from no DataLoader: the first dimension of the first tensor
                        if inputs and not ph.batch:
                            ph.batch = ph.loaders.fed(self, inputs, site)
                            ph.samples += ph.batch
                        if checks.later:
                            checks.poll()
                if training and _CUDA:
                    _on_device(ph, inputs if m is not None else ())
                words[_PHASE] = _FORWARD if training else _VALIDATE
                words[_SINCE] = began = now_ns()
                if first and m is not None:  # last: what it begins is ended below
                    m.first_forward = first_forward.watch()
        except Exception as e:
            failed(e)
        try:
            return original(self, *inputs, **kwargs)
        except BaseException as e:
            if began:
                _forward_failed(ph, m, e)
            raise
        finally:
            if began:
                try:
                    words[_PHASE] = ph.idle
                    words[_BLOCKED] = 0
                    words[_SINCE] = t = now_ns()
                    if training:
                        ph.forward_ns += t - began
                        if ph.device is not None:
                            ph.device.end(Phase.FORWARD)
                        if m is not None:
                            if first and m.first_forward is not None:
                                m.first_forward.end()
                            if m not in pending:
                                pending.append(m)
                except Exception as e:
                    failed(e)

    return forward


def _on_device(ph: Phases, inputs: tuple[Any, ...]) -> None:
    """A training forward begins in a torch that knows CUDA: from the first one on it is timed on the device."""
    if ph.device is None and torch.cuda.is_initialized():
        ph.device = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    if ph.device is None:
        return
    if inputs and isinstance(inputs[0], torch.Tensor):
        ph.loaders.newest = weakref.ref(inputs[0])  # the loader's own is gone when it has been copied
    ph.device.begin(Phase.FORWARD)


@guarded
def _forward_failed(ph: Phases, m: Model | None, error: BaseException) -> None:
    note_caught(ph.r, error)
    if m is not None and "finished reduction in the prior iteration" in str(error):
        ph.checks.crashed_unused(m, error, m.forward_site)


def ddp_sync_buffers(ph: Phases, original: Method) -> Method:
    """`DistributedDataParallel._sync_buffers`, in which ranks wait for the one whose buffers they take."""
    words, models, col = ph.words, ph.models, ph.col

    def _sync_buffers(self: Any) -> Any:
        began = 0
        try:
            m = models.get(id(self))
            if m is not None and m.group_at >= 0 and get_ident() == ph.main_thread:
                words[_BLOCKED_AT] = m.group_at
                words[_BLOCKED_SITE] = m.forward_site
                words[_BLOCKED_SINCE] = began = now_ns()
                words[_BLOCKED] = _DDP
        except Exception as e:
            failed(e)
        try:
            return original(self)
        finally:
            if began:
                words[_BLOCKED] = 0
                col.wait_ns += now_ns() - began

    return _sync_buffers


def autograd_backward(ph: Phases, original: Method) -> Method:
    """`torch.autograd.backward`."""
    words, pending, checks, loaders, col = ph.words, ph.pending, ph.checks, ph.loaders, ph.col
    place = ph.backward
    counted_site, count = 0, -1  # of the last backward that averaged gradients, and where it is counted

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal counted_site, count
        began = 0
        try:
            if get_ident() == ph.main_thread:
                site = place.look()
                micro_step = words[_MICRO_STEPS]
                words[_MICRO_STEPS] = micro_step + 1
                ph.loss = checks.loss(tensors, site, micro_step)
                if loaders.last is not loaders.trained:
                    loaders.trains()
                if col.reduced_elements:  # since the last step: parameters, averaged by hand
                    checks.averaged_elements = max(checks.averaged_elements, col.reduced_elements)
                    col.reduced_elements = 0
                ph.ready_ns = 0
                if ph.device is not None:
                    ph.device.begin(Phase.BACKWARD)
                for m in pending:
                    ddp = m.ref()
                    if ddp is not None and ddp.require_backward_grad_sync:
                        pending.remove(m)
                        if site == counted_site and count >= 0:
                            words[count] += 1
                        else:
                            counted_site, count = site, col.mark_site("backward", site)
                        words[m.synced_at] += 1
                        checks.averaged_by = m
                        if m.group_at >= 0:
                            words[_BLOCKED_AT] = m.group_at
                            words[_BLOCKED_SITE] = site
                            words[_BLOCKED_SINCE] = now_ns()
                            words[_BLOCKED] = _DDP
                        break
                words[_PHASE] = _BACKWARD
                words[_SINCE] = began = now_ns()
        except Exception as e:
            failed(e)
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as e:
            if began:
                note_caught(ph.r, e)
            raise
        finally:
            if began:
                try:
                    words[_PHASE] = ph.idle
                    words[_BLOCKED] = 0
                    words[_SINCE] = t = now_ns()
                    if ph.device is not None:
                        ph.device.end(Phase.BACKWARD)
                    ph.backward_ns += t - began
                    if ph.ready_ns > began:
                        col.wait_ns += t - ph.ready_ns
                except Exception as e:
                    failed(e)

    return backward
