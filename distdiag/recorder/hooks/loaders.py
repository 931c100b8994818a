"""Records each DataLoader (or watched iterator): length, batches handed out, end of the epoch, fingerprints of batches.

A fingerprint is 64 bits of the first batches of an epoch: the upper half from the first integer tensor (labels survive
random augmentation), the lower half from the first floating tensor that is not nearly constant. 64 elements of each are read,
scattered over it (evenly spaced ones would fall on the same black corner of every image), and only in the first
six batches. `epoch_samples` hashes all samples of the first epochs, unless they are long.
"""

from __future__ import annotations

import ctypes
import dis
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import dataloader as loader_module

from distdiag.page.layout import LOADERS, LoaderSlot
from distdiag.recorder import state
from distdiag.recorder.fast.accounts import FINGERPRINTS, Ledger
from distdiag.recorder.hooks.data_set_index import data_set_content, data_set_index
from distdiag.recorder.hooks.epoch_samples import MOST, EpochSamples
from distdiag.recorder.state import guarded
from distdiag.recorder.torch_names import private
from distdiag.recorder.unseen import attributes, has_memory, unseen

# not a subclass's, which may read the sampler's iterator, as those do that save its state
_TORCHS = tuple(private(loader_module, f"_{how}DataLoaderIter") for how in ("SingleProcess", "MultiProcessing"))
EPOCHS = 2  # first epochs whose samples may be hashed
# batches that enter a module, of which a fingerprint is taken, too: as many as fit into the page
LATER = (8, 16, 32, 64, 96, 128)
# attributes of samplers that repeat samples
_REPEATS = ("num_repeats", "repetitions", "repeats", "num_selected_samples")
_COUNTED = (list, tuple, dict, range, str, bytes, torch.Tensor)  # types whose length is no code of the job
# what a `__len__` does that is not run: it returns an attribute of the data set, or (True) the length of one
_READS = {("LOAD_ATTR", "RETURN_VALUE"): False, ("LOAD_GLOBAL", "LOAD_ATTR", "CALL", "RETURN_VALUE"): True}
_UNIMPORTANT = ("RESUME", "PUSH_NULL", "PRECALL", "CACHE", "LOAD_FAST")
POLLS = 16  # newest polls of a loader's workers that are averaged
# spread by the golden ratio, so that no period of the data matches
_SCATTERED = [i * 2654435761 % 2**31 for i in range(1, 65)]
# Elements are read from memory: one torch operator takes longer than reading all of them.
_C_TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float, torch.float64: ctypes.c_double, torch.float16: ctypes.c_uint16,
    torch.bfloat16: ctypes.c_uint16, torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32,
    torch.int16: ctypes.c_int16, torch.int8: ctypes.c_int8, torch.uint8: ctypes.c_uint8, torch.bool: ctypes.c_uint8,
}  # fmt: skip


class Loaders:
    """The loader slots of the page, one per line of code that iterates a loader."""

    def __init__(self, recorder: state.Recorder, ledger: Ledger) -> None:
        self.ledger = ledger
        self.recorder, self.header, self.page = recorder, recorder.header, recorder.page
        self._slots: dict[int, LoaderSlot] = {}
        # by id of the iterator: its slot, the index of its batch count among the page's words, and what is hashed of its samples
        self._by_iterator: dict[int, tuple[LoaderSlot, int, EpochSamples | None]] = {}
        self._words = recorder.page.words
        self._iterators: dict[int, ref[Any]] = {}  # by site, of loaders with workers
        self._last: LoaderSlot | None = None  # the loader whose batch came last
        self._trained = 0  # id of the iterator whose batch a backward pass last followed
        self._loaders: dict[int, ref[Any]] = {}  # by site, the last one
        self._models: dict[int, int] = {}  # by site, the modules that DDP had wrapped when its last pass began
        # by site, those whose sampler has still to ask for a length; a loader may live no longer than `for x in DataLoader(…)` needs it
        self._unmeasured: dict[int, Any] = {}
        self._asked = 0, -1  # id of what torch's samplers last asked for its length, and that
        # by id of a loader: the length that it has told the job since its last epoch
        self._said: dict[int, tuple[ref[Any], int]] = {}

    def _slot(self, site: int) -> LoaderSlot | None:
        slot = self._slots.get(site)
        if slot is None:
            n = self.header.n_loaders
            if n >= LOADERS:
                self.header.dropped += 1
                return None
            slot = self.page.page.loaders[n]
            slot.site = site
            slot.length = slot.dataset_length = slot.batch_size = slot.sampler_epoch = slot.sampler_seed = -1
            slot.drop_last = slot.shuffle = slot.persistent_workers = -1
            self._slots[site] = slot
            self.header.n_loaders = n + 1
        return slot

    @guarded
    def starts(self, loader: Any, iterator: Any, frame: Any) -> None:
        site = self.recorder.user_site(frame)
        last = self._slots.get(site)
        left_in = last.sampler_epoch if last is not None and not last.exhausted else -1
        slot = self._begin(iterator, site)
        if slot is None:
            return
        batch_sampler, sampler = _samplers(loader)
        size = loader.batch_size or getattr(batch_sampler, "batch_size", None)
        slot.batch_size = size if isinstance(size, int) else -1
        drop = getattr(batch_sampler, "drop_last", loader.drop_last)
        slot.drop_last = int(bool(drop))
        # repeated augmentation (DeiT, timm, torchvision): ranks share samples by intent, which a sampler that knows the ranks hands out
        repeats = hasattr(sampler, "rank") and any(hasattr(sampler, name) for name in _REPEATS)
        fits = True if repeats else _fits(sampler)
        slot.distributed_sampler = 0 if fits is None else 1 if fits else 2
        epoch, seed = getattr(sampler, "epoch", None), getattr(sampler, "seed", None)
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and hasattr(dataset, "set_epoch"):
            epoch = getattr(dataset, "epoch", None)  # by which it shuffles itself; its workers may have another
        before = self._loaders.get(site)
        if before is None or before() is not loader:
            self._loaders[site] = ref(loader)
            self._unmeasured.pop(site, None)
            asked, length = self._asked
            if asked != id(dataset):
                # a loader with a batch sampler of the job has a sampler of torch, too, which nobody draws from
                drawn = batch_sampler is None or hasattr(batch_sampler, "sampler")
                asks = drawn and _asks(sampler, dataset)
                length = -1 if asks else stated(dataset)
                if asks:
                    self._unmeasured[site] = loader
            slot.dataset_length = length
        slot.sampler_epoch = epoch if isinstance(epoch, int) else -1
        models = self.header.n_models
        new = self._models.get(site) != models if models else before is None or before() is not loader
        self._models[site] = models
        if new or slot.sampler_epoch == left_in > 0:  # another training, or resumed within this epoch
            slot.n_previous = 0
        slot.sampler_seed = seed & (1 << 62) - 1 if isinstance(seed, int) else -1
        if isinstance(sampler, RandomSampler):
            slot.shuffle = 1
        else:
            shuffle = getattr(sampler, "shuffle", None)
            slot.shuffle = int(shuffle) if isinstance(shuffle, bool) else -1
        slot.workers = loader.num_workers
        slot.persistent_workers = int(bool(getattr(loader, "persistent_workers", False)))
        of, said = self._said.pop(id(loader), (ref(loader), -1))  # its next epoch may have another
        self._measure(loader, slot, said if of() is loader else -1)
        if loader.num_workers:
            self._iterators[slot.site] = ref(iterator)
        own = type(iterator) in _TORCHS and not isinstance(dataset, IterableDataset)
        if not repeats:
            # a DistributedSampler's parts are known by its numbers
            self._hash_samples(iterator, slot, dataset if own and slot.distributed_sampler != 1 else None)

    @guarded
    def asked(self, args: tuple[Any], length: int, error: BaseException | None) -> None:
        """Note a length that one of torch's samplers has asked for, as they do once an epoch.

        `__len__` of a data set is the job's code, and may be slow or print: what torch asks for is not asked for a second time.
        """
        if error is not None:
            return
        # with workers, a loader's first batches are asked for before it is known here
        self._asked = id(args[0]), length
        for site, of in self._loaders.items():
            loader = self._unmeasured.get(site, of())
            if loader is not None and loader.dataset is args[0]:
                slot, new = self._slots[site], self._unmeasured.pop(site, None) is not None
                if new or slot.dataset_length != length:  # not again in a loop that asks in every step
                    slot.dataset_length = length
                    self._measure(loader, slot)

    @guarded
    def said(self, args: tuple[Any], length: int, error: BaseException | None) -> None:
        """Note the length that a loader says when the job asks: it may be the job's code, and is never called by us.

        A loader with an own `__len__` says another one than torch's, which that may call.
        """
        loader = args[0]
        if error is not None or type(loader).__len__ is not DataLoader.__len__:
            return
        for site, of in self._loaders.items():
            slot = self._slots[site]
            if of() is loader and not slot.exhausted:
                if slot.length != length:  # loops ask in every step whether it is the last
                    self._measure(loader, slot, length)
                return
        if len(self._said) > LOADERS:
            self._said.clear()
        self._said[id(loader)] = ref(loader), length

    @staticmethod
    def _measure(loader: Any, slot: LoaderSlot, said: int | None = None) -> None:
        """Write what follows from the length of the data set: the batches of an epoch (or what the loader has said), and the index."""
        batch_sampler, sampler = _samplers(loader)
        known = _batches(loader, batch_sampler, sampler, slot.dataset_length)
        if known is not None:
            slot.length = known
        elif said is not None:
            slot.length = said
        if slot.distributed_sampler == 1 and isinstance(sampler, DistributedSampler):
            with unseen():
                slot.data_set_index = data_set_index(loader.dataset, slot.dataset_length)

    @guarded
    def starts_plain(self, key: object, iterable: Iterable[Any], length: int | None, frame: Any) -> None:
        slot = self._begin(key, self.recorder.user_site(frame))
        if slot is not None:
            slot.length = length if length is not None else _length(iterable)
            slot.promised = int(length is not None)
            self._hash_samples(key, slot)

    def _hash_samples(self, iterator: Any, slot: LoaderSlot, dataset: Any = None) -> None:
        """Hash the samples of this epoch, if it is one of the first and not known to be long, until one trains to its end.

        Of a data set whose content is known, by the indices that its sampler draws from now on: workers have got a few before.
        """
        if slot.iterations <= EPOCHS and not slot.sampled_epoch and slot.length * max(slot.batch_size, 1) <= MOST:

            def content() -> int:
                with unseen():
                    return data_set_content(dataset, slot.dataset_length)

            by_index = dataset is not None and (slot.dataset_length < 0 or content())
            # `content` keeps the data set, until indices are drawn: not that of a loader that is left early
            hashed = EpochSamples(slot.workers, content if by_index else None)
            if by_index:
                iterator._sampler_iter = map(hashed.drawn, iterator._sampler_iter)
            self._by_iterator[id(iterator)] = (*self._by_iterator[id(iterator)][:2], hashed)

    def _begin(self, iterator: Any, site: int) -> LoaderSlot | None:
        slot = self._slot(site)
        if slot is None:
            return None
        n, slot.n_previous, slot.n_first = slot.n_first, slot.n_first, 0
        slot.previous[:n] = slot.first[:n]
        slot.previous_batches, slot.batches = slot.batches, 0
        slot.exhausted = slot.data_set_index = 0
        slot.length = -1  # until all of this epoch is written
        slot.iterations += 1
        self.ledger.loader = 0  # ids of iterators are reused
        if self._trained == id(iterator):
            self._trained = 0
        if len(self._by_iterator) > 64:
            self._by_iterator.clear()
        self._by_iterator[id(iterator)] = slot, self.page.word_of(slot, "batches"), None
        return slot

    def gives(self, iterator: Any, batch: Any) -> int:
        """Record a batch that was handed out; return its samples: the first dimension of its first tensor, 0 without one.

        That tensor becomes the ledger's `newest`.
        """
        known = self._by_iterator.get(id(iterator))
        if known is not None:
            slot, batches_at, hashed = known
            words = self._words
            words[batches_at] = n = words[batches_at] + 1
            ledger = self.ledger
            if id(iterator) != ledger.loader:
                if not ledger.trained:  # batches of a validation are no samples of the training step
                    ledger.samples = ledger.batch = ledger.elements = 0
                self._last, ledger.trained = slot, id(iterator) == self._trained
                # out of the page: the fast path leaves every batch to this function
                ledger.loader, ledger.batches_at = id(iterator), batches_at if hashed is None else 1 << 62
            if n <= FINGERPRINTS:
                with unseen():
                    slot.first[n - 1] = fingerprint(batch)
                slot.n_first = n
            if hashed is not None:
                with unseen():
                    if not hashed.add(first_tensor(batch, _has_samples)):
                        self._by_iterator[id(iterator)] = slot, batches_at, None
                        ledger.batches_at = batches_at
        x = batch[0] if type(batch) in (list, tuple) and batch else None  # as most loaders return them
        if type(x) is not torch.Tensor or not (shape := x.shape):
            with unseen():
                x = first_tensor(batch, _has_samples)
                if x is None:
                    return 0
                shape = x.shape
        base = x._base if type(x) is torch.Tensor else None  # a view itself is mostly gone before the loss is known
        self.ledger.newest = (
            ref(x) if base is None else partial(_again, ref(base), x.size(), x.stride(), x.storage_offset())
        )
        self.ledger.elements += (elements := shape.numel())
        if known is not None:
            words[batches_at + 1] += 1
            words[batches_at + 2] += elements
        return int(shape[0])

    def fed(self, ddp: Any, inputs: tuple[Any, ...], site: int) -> int:
        """Record the input of a DDP module in a step without a batch from a loader; return its samples."""
        if id(ddp) not in self._by_iterator:
            with unseen():
                fed = first_tensor(inputs, _has_samples) is not None
            slot = self._begin(ddp, site) if fed else None
            if slot is not None:
                slot.fed = 1
        n = self.gives(ddp, inputs)
        slot = known[0] if (known := self._by_iterator.get(id(ddp))) is not None else None
        if slot is not None and slot.batches in LATER and slot.iterations == 1:
            with unseen():
                slot.previous[slot.n_previous] = fingerprint(inputs)
            slot.n_previous += 1
        return n

    @guarded
    def ends(self, iterator: Any) -> None:
        self.ledger.loader = 0
        known = self._by_iterator.pop(id(iterator), None)
        if known is not None:
            slot, _, hashed = known
            slot.exhausted = 1
            if hashed is not None and self._trained == id(iterator):
                hashed.write(slot)

    @guarded
    def poll_workers(self) -> None:
        """Record how many workers of the loader in use fetch a batch; the others wait until one is taken. Called by the pulse.

        A loader that is faster than the job has a full queue and idle workers. Of two equally slow loaders one has a full queue, too,
        as its rank waits for the other, but its workers are never idle.
        """
        slot = self._last
        found = self._iterators.get(slot.site) if slot is not None else None
        iterator = found() if found is not None else None
        if iterator is None or slot is None or not slot.workers:
            return
        try:
            ready = iterator._worker_result_queue.qsize()
            if iterator._data_queue is not iterator._worker_result_queue:  # a thread pins memory
                ready += len(iterator._data_queue.queue)  # without its lock, which a fork could copy while it is held
            fetching = iterator._tasks_outstanding - ready
        # another version of torch, macOS, or the loader is being closed
        except (AttributeError, NotImplementedError, OSError, ValueError):
            return
        share = 1000 * min(max(fetching, 0), slot.workers) // slot.workers
        n = slot.polls = slot.polls + 1
        slot.fetching_permille += (share - slot.fetching_permille) // min(n, POLLS)

    def trains(self) -> None:
        """Record that a backward pass followed the last batch: its loader is for training."""
        self._trained, self.ledger.trained = self.ledger.loader, True
        if self._last is not None:
            self._last.in_training = 1


def samples_of(inputs: tuple[Any, ...]) -> int:
    """Return the first dimension of the first tensor that enters a module; 0 without one."""
    with unseen():
        t = first_tensor(inputs, _has_samples)
        return 0 if t is None else int(t.shape[0])


def _has_samples(t: torch.Tensor) -> bool:
    return t.dim() > 0


def _fits(sampler: Any) -> bool | None:
    """Return whether the rank and the number of replicas of a sampler are those of the process; None if it knows none.

    Also None if it has the right ones, but under another name than torch's: then it may split the data in its own way.
    """
    rank, replicas = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    fitting = None if replicas is None else True
    if rank is not None and replicas is None:
        replicas = getattr(sampler, "world_size", None)  # so OpenMMLab's samplers call it
    if replicas is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return fitting
    process = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return fitting if (process[0] if rank is None else rank, replicas) == process else False


def _samplers(loader: Any) -> tuple[Any, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    if sampler is None:  # not `or`: a sampler's truth depends on its length, which runs the job's code
        sampler = getattr(loader, "sampler", None)
    return batch_sampler, sampler


def _asks(sampler: Any, data: Any) -> bool:
    """True for a sampler of torch that asks for the length of this data set."""
    if type(sampler) is DistributedSampler:
        return sampler.dataset is data
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is data


def _batches(loader: Any, batch_sampler: Any, sampler: Any, samples: int) -> int | None:
    """Return the batches of an epoch, -1: unknown; None if only the loader can tell. None is asked: `__len__` is the job's code, or calls it."""
    if isinstance(loader.dataset, IterableDataset):
        return -1
    if type(loader).__len__ is not DataLoader.__len__:
        return None
    if type(batch_sampler) not in (BatchSampler, type(None)):
        return None if (n := stated(batch_sampler)) < 0 else n
    drawn = _drawn(sampler, loader.dataset, samples)
    if drawn is None or drawn < 0:
        return drawn
    size = 1 if batch_sampler is None else batch_sampler.batch_size
    dropped = batch_sampler is not None and batch_sampler.drop_last
    return (drawn if dropped else drawn + size - 1) // size


def _drawn(sampler: Any, data: Any, samples: int) -> int | None:
    """Return how many samples a sampler of torch draws in an epoch, -1: not known yet; None if it is none, or only the job's code can tell."""
    of = type(sampler)
    if of in (DistributedSampler, WeightedRandomSampler):
        return sampler.num_samples
    if _asks(sampler, data):
        return (sampler._num_samples if of is RandomSampler else None) or samples
    return None if (n := stated(sampler)) < 0 else n


def stated(data: Any) -> int:
    """Return the length that a data set states; -1: only its `__len__` knows it, which is the job's code and may do anything.

    One that only returns an attribute, or the length of one, is read and not called.
    """
    held: Any = data.tensors[0] if type(data) is TensorDataset else data
    if type(held) in _COUNTED:
        return len(held)
    method = next((of.__dict__["__len__"] for of in type(data).__mro__ if "__len__" in of.__dict__), None)
    code = getattr(method, "__code__", None)
    if code is None or len(code.co_varnames) != 1:
        return -1
    does = [x for x in dis.get_instructions(code) if not x.opname.startswith(_UNIMPORTANT)]
    counts = _READS.get(tuple(x.opname for x in does))
    if counts is None or (counts and does[0].argval != "len"):
        return -1
    held = attributes(data).get(does[-2 - counts].argval)
    if not counts:
        return held if type(held) is int else -1
    return len(held) if type(held) in _COUNTED else -1


def _length(x: Any) -> int:
    try:
        return len(x)
    except Exception:  # of what the job hands to us; it never asks, or gets this exception itself
        return -1


def first_tensor(batch: Any, wanted: Any, depth: int = 0) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if wanted(batch) else None
    if depth > 3:
        return None
    values: Any = ()
    # built-in types only: methods of the job's classes are its own code, and `__getattr__` may do anything
    if isinstance(batch, dict):
        values = dict.values(batch)
    elif isinstance(batch, list):
        values = list.__iter__(batch)
    elif isinstance(batch, tuple):
        values = tuple.__iter__(batch)
    elif isinstance(data := attributes(batch).get("data"), dict):  # a UserDict, as tokenizers return
        values = dict.values(data)
    for v in values:
        t = first_tensor(v, wanted, depth + 1)
        if t is not None:
            return t
    return None


def _again(base: Callable[[], Any], *view: Any) -> torch.Tensor | None:
    """Return a view of a tensor once more, while that exists."""
    t = base()
    return None if t is None else t.detach().as_strided(*view)


def fingerprint(batch: Any) -> int:
    """Return the 64-bit fingerprint of a batch; a half without a usable tensor is 0."""
    labels = values = inspected = 0

    def inspect(t: torch.Tensor) -> bool:
        nonlocal labels, values, inspected
        inspected += 1
        if t.device.type == "cpu" and t.layout is torch.strided and t.numel() >= 4:
            if t.is_floating_point():
                values = values or _crc(t, 4)
            else:
                labels = labels or _crc(t, 8)
        return bool(labels and values) or inspected >= 32  # a batch may be a list of thousands

    first_tensor(batch, inspect)
    return labels << 32 | values


def _in_turn(values: list[Any]) -> bool:
    """True if the values repeat cyclically: 0, 1, … 9, 0, 1, …"""
    return any(values[period:] == values[:-period] for period in range(1, len(values) - 2))


def _crc(t: torch.Tensor, distinct: int) -> int:
    if t.dtype not in _C_TYPES or not has_memory(type(t)):
        return 0
    t = t.as_subclass(torch.Tensor)
    flat = t
    if not t.is_contiguous():  # rows enough for all that is read
        rows = -(-len(_SCATTERED) * t.shape[0] // max(1, t.numel()))
        flat = t.detach()[:rows].reshape(-1).contiguous()
    n, at = flat.numel(), flat.data_ptr()
    if not n or not at:
        return 0
    memory = (_C_TYPES[t.dtype] * n).from_address(at)
    part = memory[:] if n <= len(_SCATTERED) else [memory[i % n] for i in _SCATTERED]
    # a constant, or a few classes in turn, does not identify the data
    if len(set(part)) < distinct or (t.dim() == 1 and _in_turn(memory[: len(_SCATTERED)])):
        return 0
    return zlib.crc32(repr((n, part)).encode())
