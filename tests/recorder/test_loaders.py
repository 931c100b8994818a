"""What the recorder reads from a dataset: its length; and what it derives from it."""

from __future__ import annotations

import gc
import queue
import time
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    distributed,
    random_split,
    sampler,
)

from distdiag.page.layout import page_path
from distdiag.page.writer import PageWriter
from distdiag.recorder.fast import accounts
from distdiag.recorder.hooks.data_set_index import data_set_content
from distdiag.recorder.hooks.epoch_samples import EpochSamples
from distdiag.recorder.hooks.loaders import LATER, Loaders, fingerprint, stated
from distdiag.recorder.hooks.wrapping import around
from distdiag.recorder.state import Recorder

SAMPLES = 17


class Counted(Dataset[int]):
    """Counts the calls of its `__len__`, which could read a file."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        self.calls += 1
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loaders(data: Counted) -> dict[str, DataLoader[int]]:
    return {
        "in order": DataLoader(data, 4),
        "in order, last one dropped": DataLoader(data, 4, drop_last=True),
        "shuffled": DataLoader(data, 4, shuffle=True),
        "with replacement": DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=30)),
        "distributed": DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)),
        "single samples": DataLoader(data, batch_size=None),
        "a batch sampler": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, True)),
        "a subset": DataLoader(data, 4, sampler=SubsetRandomSampler(range(9))),
    }


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaders:
    page = PageWriter(page_path(tmp_path / "pages", 0))
    made = Loaders(Recorder(page), accounts.ledger(page, None))
    for module in (sampler, distributed):
        monkeypatch.setattr(module, "len", around(len, ends=made.asked), raising=False)
    return made


@pytest.mark.parametrize("name", loaders(Counted()))
def test_a_datasets_length_is_not_asked_for_again(name: str, recorded: Loaders) -> None:
    data = Counted()
    loader = loaders(data)[name]
    data.calls = 0
    batches = len(list(loader))
    plain = data.calls
    for _ in range(3):
        data.calls = 0
        recorded.starts(loader, object(), None)
        assert data.calls == 0
        assert len(list(loader)) == batches and data.calls == plain
        slot = next(iter(recorded._slots.values()))
        # the sampler of a subset does not know the data set
        assert (slot.length, slot.dataset_length) == (batches, -1 if name == "a subset" else SAMPLES)


def test_later_inputs_of_a_module_have_fingerprints(recorded: Loaders) -> None:
    inputs, module = [(torch.randn(3, 5),) for _ in range(200)], object()
    for x in inputs:
        recorded.fed(module, x, 7)
    slot = recorded._slots[7]
    assert slot.n_previous == len(LATER) == len(slot.previous)
    assert [*slot.previous] == [fingerprint(inputs[n - 1]) for n in LATER]


class Shard(BatchSampler):
    """Every second batch of another sampler, whose length it asks for twice, as the samplers of accelerate do."""

    def __len__(self) -> int:
        return len(self.sampler) // 2 + len(self.sampler) % 2


class Sharded(DataLoader[int]):
    pass


def test_a_loader_is_never_asked_for_its_length_but_heard_when_the_job_asks(
    recorded: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`__len__` is the job's code: it may iterate, communicate or print."""
    monkeypatch.setattr(DataLoader, "__len__", around(DataLoader.__len__, ends=recorded.said))
    data = Counted()
    loader = Sharded(
        data, batch_sampler=Shard(BatchSampler(RandomSampler(data), 4, drop_last=False), 1, drop_last=False)
    )
    for asks in (False, True, False):
        length = len(loader) if asks else -1
        data.calls = 0
        iterator = object()
        recorded.starts(loader, iterator, None)
        slot = next(iter(recorded._slots.values()))
        assert slot.length == length and data.calls == 0
        assert len(loader) == slot.length == 3, "also if it asks later"
        recorded.ends(iterator)


@pytest.mark.parametrize("name", ["shuffled", "distributed"])
def test_a_loop_that_asks_in_every_step_is_measured_once(
    name: str, recorded: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `if i == len(loader) - 1` does."""
    monkeypatch.setattr(DataLoader, "__len__", around(DataLoader.__len__, ends=recorded.said))
    loader = loaders(Counted())[name]
    recorded.starts(loader, object(), None)
    next(iter(loader))
    monkeypatch.setattr(recorded, "_measure", lambda *_: pytest.fail("measured again"))
    slot = next(iter(recorded._slots.values()))
    assert [len(loader) for _ in range(3)] == [slot.length] * 3 and not recorded.header.errors


def test_what_a_loader_of_an_own_length_makes_of_torch_s_is_not_known(
    recorded: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dispatched(DataLoader[int]):
        def __len__(self) -> int:
            return super().__len__() // 2

    monkeypatch.setattr(DataLoader, "__len__", around(DataLoader.__len__, ends=recorded.said))
    loader = Dispatched(Counted(), 4)
    assert len(loader) == 2
    recorded.starts(loader, object(), None)
    assert next(iter(recorded._slots.values())).length == -1


def test_the_length_of_another_loader_at_the_same_line_is_its_own(recorded: Loaders) -> None:
    for data, length in ((Counted(), 5), (TensorDataset(torch.ones(9)), 3)):
        loader = DataLoader(data, 4)
        recorded.starts(loader, object(), None)
        slot = next(iter(recorded._slots.values()))
        assert (slot.length, slot.dataset_length) == (-1, -1)
        next(iter(loader))
        assert (slot.length, slot.dataset_length) == (length, len(data))


class Stated(Dataset[int]):
    def __init__(self, rows: Any) -> None:
        self.rows, self.n = rows, 7

    def __getitem__(self, index: int) -> int:
        return index


class OfRows(Stated):
    def __len__(self) -> int:
        return len(self.rows)


class OfNumber(Stated):
    def __len__(self) -> int:
        return self.n


class OfHalf(Stated):
    def __len__(self) -> int:
        return len(self.rows) // 2


class OfPrint(Stated):
    def __len__(self) -> int:
        print("counting")
        return self.n


class Untold(list[int]):
    def __len__(self) -> int:
        raise OSError("not called")


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (OfRows([1, 2, 3]), 3), (OfNumber(None), 7), (OfHalf([1, 2, 3]), -1), (OfPrint(None), -1), (OfRows(Untold()), -1),
        (Subset(OfPrint(None), [0, 1]), 2), (TensorDataset(torch.ones(5, 2)), 5), (range(4), 4), (Stated(None), -1),
    ],
)  # fmt: skip
def test_a_length_is_read_where_it_is_only_an_attribute_s(
    data: Any, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stated(data) == length and capsys.readouterr().out == ""


def test_the_length_behind_a_batch_sampler_of_the_job_is_known(recorded: Loaders) -> None:
    """torch makes a sampler for it that is never drawn from, and so asks for no length."""
    for data, length in ((Counted(), -1), (TensorDataset(torch.ones(SAMPLES)), SAMPLES)):
        recorded.starts(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), object(), None)
        slot = next(iter(recorded._slots.values()))
        assert (slot.length, slot.dataset_length) == (2, length)


def test_a_length_that_workers_begin_with_is_known(recorded: Loaders) -> None:
    loader = DataLoader(Counted(), 4, num_workers=1)
    iterator = iter(loader)
    recorded.starts(loader, iterator, None)
    slot = next(iter(recorded._slots.values()))
    assert (slot.length, slot.dataset_length) == (5, SAMPLES) and len(list(iterator)) == 5


class Listed(Dataset[Any]):
    """Lists its samples, after something else of the same length."""

    def __init__(self, index: Any, name: str = "files") -> None:
        self.cache = [None] * len(index)
        setattr(self, name, index)
        self.n = len(index)

    def __len__(self) -> int:
        return self.n


FILES = [f"/data/{k % 5}/{k}.png" for k in range(300)]


def part(files: list[str], seed: int) -> Dataset[Any]:
    return random_split(Listed(files), [240, 60], generator=torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    ("make", "equal"),
    [
        ((Listed(FILES), Listed([f"/local/rank{k % 2}/{x}" for k, x in enumerate(FILES)])), True),
        ((Listed([*zip(FILES, range(300), strict=True)]), Listed([*zip(FILES, range(1, 301), strict=True)])), True),
        ((Listed(FILES), Listed(FILES[::-1])), False),
        ((Listed(FILES[::2]), Listed(FILES[1::2])), False),
        ((part(FILES, 1), part(FILES, 1)), True),
        ((part(FILES, 1), part(FILES, 2)), False),
        ((part(FILES, 1), part(FILES[::-1], 1)), False),
        ((Listed(np.arange(300), "ids"), Listed(torch.arange(300), "ids")), True),
        ((Listed(np.arange(300), "ids"), Listed(torch.randperm(300), "order")), False),
        ((Listed([f"cache_rank_{q}/part_rank_{q}_{k}" for q in (0,) for k in range(9)]), Listed([f"part_rank_1_{k}" for k in range(9)])), True),
    ],
    ids=["other folders", "with labels", "another order", "each rank's part", "one split", "two splits", "split of another order", "types",
         "shuffled", "each rank's copies"],
)  # fmt: skip
def test_data_sets_with_other_samples_or_another_order_are_told_apart(
    make: tuple[Dataset[Any], ...], equal: bool, recorded: Loaders
) -> None:
    found = []
    for data in make:
        recorded.starts(DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)), object(), None)
        found.append(next(iter(recorded._slots.values())).data_set_index)
    assert all(found) and (found[0] == found[1]) is equal and recorded.header.errors == 0
    assert all(bool(x >> 33) is isinstance(data, Subset) for x, data in zip(found, make, strict=True))


@pytest.mark.parametrize(
    "data",
    [Listed(list(range(300)), "labels"), Listed(torch.randn(300)), Listed([[0.5]] * 300), Counted(), TensorDataset(torch.ones(300)),
     Subset(Listed(FILES), [])],
    ids=["labels", "values", "rows", "nothing", "tensors", "empty"],
)  # fmt: skip
def test_data_sets_without_an_index_have_none(data: Dataset[Any], recorded: Loaders) -> None:
    recorded.starts(DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)), object(), None)
    assert next(iter(recorded._slots.values())).data_set_index == 0 and recorded.header.errors == 0


@pytest.mark.parametrize(("world", "told"), [(1, 0), (2, 2)])
def test_a_sampler_that_was_built_before_the_process_group_is_known(
    world: int, told: int, recorded: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another library believes that it is rank 0 of 1; a correct one is left alone, as it may split data in its own way."""
    own = SubsetRandomSampler(range(9))
    own.rank, own.world_size = 0, 1  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    recorded.starts(DataLoader(Counted(), 4, sampler=own), object(), None)
    assert next(iter(recorded._slots.values())).distributed_sampler == told


def test_samples_that_ranks_share_by_intent_are_not_compared(recorded: Loaders) -> None:
    """Repeated augmentation: each rank augments the same samples in its own way."""
    own = SubsetRandomSampler(range(9))
    own.rank, own.repetitions = 0, 3  # type: ignore[attr-defined]
    iterator = object()
    recorded.starts(DataLoader(Counted(), 4, sampler=own), iterator, None)
    assert next(iter(recorded._slots.values())).distributed_sampler == 1
    assert recorded._by_iterator[id(iterator)][2] is None


def test_only_what_a_distributed_sampler_splits_has_an_index(recorded: Loaders) -> None:
    recorded.starts(DataLoader(Listed(FILES), 4), object(), None)
    assert next(iter(recorded._slots.values())).data_set_index == 0


class OwnSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        raise OSError("the index is not there yet")


def test_a_length_that_raises_is_unknown(recorded: Loaders) -> None:
    recorded.starts(DataLoader(Counted(), 2, sampler=OwnSampler()), object(), None)
    slot = next(iter(recorded._slots.values()))
    assert (slot.length, slot.dataset_length, recorded.header.errors) == (-1, -1, 0)


@pytest.mark.parametrize("kept", [True, False])
def test_it_is_recorded_whether_workers_stay_for_the_next_epoch(kept: bool, recorded: Loaders) -> None:
    recorded.starts(DataLoader(Counted(), 2, num_workers=1, persistent_workers=kept), Counted(), None)
    assert next(iter(recorded._slots.values())).persistent_workers == kept


class Stored(Dataset[int]):
    """Takes some milliseconds per sample, like storage."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(self.sample_s)
        return index


@pytest.mark.parametrize(("sample_s", "step_s", "slow"), [(0.05, 0.0, True), (0.0, 0.1, False)])
def test_workers_of_a_fast_loader_are_idle(sample_s: float, step_s: float, slow: bool, recorded: Loaders) -> None:
    loader = DataLoader(Stored(sample_s), 2, num_workers=2)
    iterator = iter(loader)
    recorded.starts(loader, iterator, None)
    slot = next(iter(recorded._slots.values()))
    for _, batch in zip(range(20), iterator, strict=False):
        recorded.gives(iterator, batch)
        time.sleep(step_s)
        recorded.poll_workers()
    assert slot.polls == 20 and recorded.header.errors == 0
    assert (slot.fetching_permille > 500) is slow, slot.fetching_permille
    del iterator
    recorded.poll_workers()  # the loader was deleted: nothing to poll
    assert slot.polls == 20 and recorded.header.errors == 0


def test_batches_pinned_by_a_thread_count_as_ready(recorded: Loaders) -> None:
    """Pinning needs a GPU, so the iterator is hand-made: two batches are requested, one is with the thread, one with the workers."""

    class Pinned:
        _worker_result_queue: queue.Queue[int] = queue.Queue()
        _data_queue: queue.Queue[int] = queue.Queue()
        _tasks_outstanding = 2

    iterator = Pinned()
    iterator._data_queue.put(1)
    recorded.starts(DataLoader(Stored(0.0), 2, num_workers=2), iterator, None)
    recorded.gives(iterator, torch.zeros(2))
    with iterator._data_queue.mutex:  # held as by the thread: the pulse does not wait for the lock
        recorded.poll_workers()
    slot = next(iter(recorded._slots.values()))
    assert (slot.polls, slot.fetching_permille, recorded.header.errors) == (1, 500, 0)


def test_a_view_of_short_rows_is_identified_by_more_than_its_first() -> None:
    """Language models get `tokens[:, :-1]`; a row of frequent words has few different ones."""
    rows = torch.tensor([[1, 2] * 8 + [0], *[[7 * i + j for j in range(17)] for i in range(7)]])
    first, second = fingerprint({"ids": rows[:, :-1]}), fingerprint({"ids": rows[:, :-1] + 1})
    assert 0 not in (first, second) and first != second
    assert fingerprint({"ids": rows[:1, :-1]}) == 0


def epoch(
    recorded: Loaders, rows: torch.Tensor, *, batch: int = 16, trains: bool = True, ends: bool = True, length: int = -1
) -> set[int]:
    """Return what is kept of an epoch of these rows."""
    iterator = iter(rows.split(batch))
    recorded.starts_plain(iterator, (), None if length < 0 else length, None)
    for x in iterator:
        recorded.gives(iterator, {"x": x})
        if trains:
            recorded.trains()
    if ends:
        recorded.ends(iterator)
    slot = next(iter(recorded._slots.values()))
    assert recorded.header.errors == 0
    return {*slot.epoch_samples} if slot.sampled_epoch else set()


@pytest.mark.parametrize("make", [torch.randn, lambda n, m: torch.randint(0, 9, (n, m))])
def test_the_same_samples_have_the_same_hashes_in_any_order_and_batches(make: Any, recorded: Loaders) -> None:
    torch.manual_seed(0)
    rows = make(600, 40)
    first = epoch(recorded, rows)
    assert len(first) == 32 and epoch(recorded, rows[:300]) == first, "only the first epoch is hashed"
    for part, common in ((rows[torch.randperm(600)], True), (rows[:300], False), (torch.cat([rows, rows]), False)):
        recorded._slots.clear()
        recorded.header.n_loaders = 0
        recorded.page.page.loaders[0].sampled_epoch = recorded.page.page.loaders[0].iterations = 0
        assert (epoch(recorded, part, batch=7) == first) is common


class Rows(Dataset[torch.Tensor]):
    """Rows in memory that are masked at random."""

    def __init__(self, seed: int = 0, **more: Any) -> None:
        self.rows = torch.randn(600, 12, generator=torch.Generator().manual_seed(seed))
        self.__dict__.update(more)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] * (torch.rand(12) > 0.2)


def read(recorded: Loaders, data: Any, sampler: Any, **more: Any) -> set[int]:
    """Return what is kept of the first epoch of a loader whose batches are trained on."""
    recorded._slots.clear()
    slot = recorded.page.page.loaders[0]
    recorded.header.n_loaders = slot.sampled_epoch = slot.iterations = 0
    loader = DataLoader(data, 8, sampler=sampler, **more)
    iterator = iter(loader)
    recorded.starts(loader, iterator, None)
    for batch in iterator:
        recorded.gives(iterator, batch)
        recorded.trains()
    recorded.ends(iterator)
    assert recorded.header.errors == 0
    by_index = slot.sampled_epoch >> 32 == 1
    return {x >> 32 for x in slot.epoch_samples} if by_index else set()


def test_the_data_of_a_loader_that_was_left_early_are_not_kept(recorded: Loaders) -> None:
    class Remote(Dataset[int]):
        def __init__(self) -> None:
            self.n = SAMPLES

        def __len__(self) -> int:
            return self.n

        def __getitem__(self, index: int) -> int:
            return index

    loader = DataLoader(Remote(), 4, sampler=SubsetRandomSampler(range(SAMPLES)))
    iterator = iter(loader)
    recorded.starts(loader, iterator, None)
    assert recorded.page.page.loaders[0].dataset_length == SAMPLES
    recorded.gives(iterator, next(iterator))
    data = ref(loader.dataset)
    del loader, iterator
    gc.collect()
    assert data() is None and recorded.header.errors == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_masked_at_random_are_compared_by_the_indices_that_the_sampler_draws(
    workers: int, recorded: Loaders
) -> None:
    whole, evens = range(600), range(0, 600, 2)
    first = read(recorded, Rows(), SubsetRandomSampler(evens), num_workers=workers)
    again = read(recorded, Rows(), [*reversed(evens)], num_workers=workers)
    assert len(first) == 32 and len(first & again) >= (32 if not workers else 20), (
        "workers get some before they are counted"
    )
    assert not first & read(recorded, Rows(), range(1, 600, 2)), "another part"
    assert not first & read(recorded, Rows(seed=1), evens), "other data"
    assert not first & read(recorded, Rows(rank=1), evens), "it may mean another sample by an index"
    assert len(first & read(recorded, Rows(), whole)) >= 8
    halves = [Subset(Rows(), list(whole[i::2])) for i in (0, 1)]
    assert not read(recorded, halves[0], range(300)) & read(recorded, halves[1], range(300))


@pytest.mark.parametrize(
    "data",
    [Counted(), Listed(torch.arange(600)), Listed(np.arange(600) % 10, "labels"), Listed(["a"] * 600), Rows(rows=torch.zeros(600, 4))],
    ids=["nothing", "an order", "labels", "one word", "a constant"],
)  # fmt: skip
def test_data_that_is_all_alike_or_not_in_memory_has_no_content_hash(data: Any) -> None:
    assert data_set_content(data, len(data)) == 0


def test_the_content_of_data_is_told_by_its_values_its_files_or_its_fingerprint() -> None:
    known = [
        Rows(), Rows(1), Listed(FILES), Listed([*zip(FILES, range(300), strict=True)]), TensorDataset(torch.randn(300), torch.ones(300)),
        Listed(np.random.default_rng(0).random((300, 4))), Rows(_fingerprint="5f"), [{"text": x} for x in FILES],
    ]  # fmt: skip
    found = [data_set_content(x, len(x)) for x in known]
    assert all(found) and len(set(found)) == len(found) - 1, "paths are the same with labels and without"


def test_a_samplers_exception_passes_through_no_frame_of_ours(recorded: Loaders) -> None:
    def fails() -> Any:
        yield [0]
        raise ValueError("no more")

    loader = DataLoader(Rows(), batch_sampler=fails())
    iterator = iter(loader)
    recorded.starts(loader, iterator, None)
    with pytest.raises(ValueError, match="no more") as raised:
        list(iterator)
    assert not [x for x in raised.traceback if "distdiag/recorder" in str(x.path) and "tests" not in str(x.path)]


@pytest.mark.parametrize(
    "how", [{"trains": False}, {"ends": False}, {"length": 1 << 20}, {"rows": 1 << 16}, {"rows": 20}]
)
def test_epochs_that_cannot_be_compared_or_are_long_are_not_hashed(how: dict[str, Any], recorded: Loaders) -> None:
    rows = torch.randn(how.pop("rows", 600), 4)
    assert epoch(recorded, rows, batch=512, **how) == set()
    assert epoch(recorded, rows, batch=512, **how) == set()


@pytest.mark.filterwarnings("ignore")  # torch warns of beta layouts
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 4),
        lambda: torch.empty(4, 0),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.ones(3, 3).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.empty(3, 3, device="meta"),
        lambda: torch.ones(6, 6)[:, ::2],
    ],
)
def test_batches_without_rows_in_memory_are_not_hashed(make: Any, recorded: Loaders) -> None:
    assert EpochSamples().add(make()) is False


@pytest.mark.parametrize(
    ("number", "ended", "kept"),
    [(2, False, 0), (2, True, 3), (0, False, 3)],
    ids=["resumed", "a constant epoch", "set_epoch is forgotten"],
)
def test_an_epoch_that_is_resumed_is_no_new_one_with_the_same_order(
    number: int, ended: bool, kept: int, recorded: Loaders
) -> None:
    sampler = DistributedSampler(Counted(), num_replicas=2, rank=0)
    loader = DataLoader(Counted(), 4, sampler=sampler)
    sampler.set_epoch(number)
    recorded.starts(loader, object(), None)
    slot = next(iter(recorded._slots.values()))
    slot.n_first, slot.exhausted = 3, int(ended)
    recorded.starts(loader, object(), None)
    assert slot.n_previous == kept


@pytest.mark.parametrize(
    ("models", "wrapped", "again", "kept"),
    [(1, 0, False, 3), (1, 1, False, 0), (1, 1, True, 0), (0, 0, True, 3), (0, 0, False, 0)],
    ids=["a new sampler in each epoch", "the next trial", "its loader is kept", "without DDP", "may be the next trial"],
)
def test_the_first_pass_of_another_training_follows_none(
    models: int, wrapped: int, again: bool, kept: int, recorded: Loaders
) -> None:
    def made() -> DataLoader[int]:
        return DataLoader(Counted(), 4, sampler=DistributedSampler(Counted(), num_replicas=2, rank=0))

    recorded.header.n_models, loader = models, made()
    recorded.starts(loader, object(), None)
    slot = next(iter(recorded._slots.values()))
    slot.n_first = 3
    recorded.header.n_models += wrapped
    recorded.starts(loader if again else made(), object(), None)
    assert slot.n_previous == kept and slot.length == 3
