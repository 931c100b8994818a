"""Parameters whose autograd node is no longer that on which DDP has put its hook."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.page.layout import SampleKind
from distdiag.recorder import unseen
from distdiag.recorder.hooks.lost_hooks import hooked, lost
from distdiag.recorder.hooks.unused_parameters import UnusedParameters
from distdiag.recorder.hooks.wrapped_model import Model


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    unseen.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(net: nn.Module) -> Any:
    ddp = DistributedDataParallel(net)
    built_with = frozenset(map(id, net.parameters()))
    return SimpleNamespace(ddp=ddp, hooked=hooked(ddp, [*net.named_parameters()]), built_with=built_with)


def trained(model: Any) -> None:
    model.ddp(torch.randn(2, 4)).sum().backward()


def converted(net: nn.Module) -> None:
    net.double().float()


def halved(net: nn.Sequential) -> None:
    net[1].half().float()


def swapped(net: nn.Module) -> None:
    for p in net.parameters():
        p.data = p.data.clone()


def frozen_for_a_while(net: nn.Module) -> None:
    net.requires_grad_(False)
    net.requires_grad_(True)


def loaded(net: nn.Module) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (converted, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        (halved, ["1.weight", "1.bias"]),
        (swapped, []),
        (frozen_for_a_while, []),
        (loaded, []),
        (nn.Module.eval, []),
    ],
)
def test_a_conversion_of_a_wrapped_module_loses_its_hooks(change: Callable[..., object], found: list[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrapped(net)
    trained(model)
    assert lost([model]) == ([], 4)
    change(net)
    net(torch.randn(2, 4)).sum().backward()
    assert lost([model]) == (found, 4)
    with torch.inference_mode():
        assert lost([model]) == ([], 0)


def test_a_module_that_is_wrapped_again_or_gets_no_gradient_has_lost_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    old = wrapped(net)
    converted(net)
    assert lost([old]) == ([], 0)
    again = wrapped(net)
    trained(again)
    assert lost([old, again]) == ([], 4)
    converted(net)
    trained(again)
    assert lost([old, again])[1] == len(lost([old, again])[0]) == 4


def test_no_more_than_some_parameters_are_checked() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    assert len(wrapped(net).hooked) == 24


@pytest.mark.parametrize("how", ["mixed_precision", "_use_python_reducer"])
def test_modules_that_ddp_averages_in_another_way_are_left_out(how: str) -> None:
    ddp = SimpleNamespace(**{how: True})
    assert hooked(ddp, [*nn.Linear(2, 2).named_parameters()]) == []


def test_what_is_kept_is_freed_with_the_module() -> None:
    net = nn.Linear(2, 2)
    group = dist.new_group([0])
    weight, its_group, ddp = ref(net.weight), ref(group), DistributedDataParallel(net, process_group=group)
    page: Any = SimpleNamespace(word_of=lambda *_: 0, text=str)
    model = Model(ddp, SimpleNamespace(), SimpleNamespace(page=page))  # type: ignore[arg-type]
    model.hooked = hooked(ddp, [*net.named_parameters()])
    assert len(model.hooked) == 2
    del ddp, net
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert model.hooked == [] and weight() is None
    assert its_group() is not None, "freed here, it would join gloo's thread, which may wait for the GIL"
    Model(DistributedDataParallel(nn.Linear(2, 2)), SimpleNamespace(), SimpleNamespace(page=page))  # type: ignore[arg-type]
    gc.collect()
    assert its_group() is None


@pytest.mark.parametrize(("listed", "found"), [("2 3", (2.0, 2, "1.weight")), ("1 3", None)])
def test_what_ddp_misses_after_a_conversion_is_told_from_what_has_no_gradient(
    listed: str, found: tuple[float, int, str] | None
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrapped(net)
    halved(net)
    written: list[tuple[Any, ...]] = []
    page = SimpleNamespace(text=lambda text: 1)
    samples: Any = SimpleNamespace(page=page, write=lambda kind, step, *more: written.append((kind, *more)))
    model.trained = lambda: [*net.named_parameters()]
    model.ref, model.unused_texts, model.slot = (lambda: None), set(), SimpleNamespace(unused_hits=0)
    header: Any = SimpleNamespace(step=7)
    error = RuntimeError(f"Parameter indices which did not receive grad for rank 0: {listed}")
    UnusedParameters(header, samples).forward_failed(model, error, 1)
    assert written == ([(SampleKind.HOOKS_LOST, *found)] if found else [])
