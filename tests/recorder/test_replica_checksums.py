"""Checksums of replicas are compared only for the same parameters of a model."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.page.layout import Phase, SampleKind, word
from distdiag.recorder import unseen
from distdiag.recorder.hooks.collectives import Collectives
from distdiag.recorder.hooks.ddp_models import _order
from distdiag.recorder.hooks.replica_checksums import ReplicaChecksums, _Compared, _counted, _one_of, _untrained
from distdiag.recorder.hooks.step_accounting import StepAccounting


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    unseen.install()  # else no tensor has memory that may be read
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()  # another test has compiled something: then no forward is watched


class Written:
    """The samples that one rank writes."""

    def __init__(self) -> None:
        self.of: dict[SampleKind, tuple[float, int]] = {}
        self.at: dict[tuple[SampleKind, int], float] = {}
        self.names: dict[SampleKind, str] = {}
        self.layers: list[tuple[str, int, int]] = []
        self.sites: dict[SampleKind, int] = {}

    def user_site(self, frame: FrameType) -> int:
        return 7 if frame.f_code.co_name == "after_optimizer" else 0

    def write(self, kind: SampleKind, step: int, value: float, key: int = 0, name: str = "", site: int = 0) -> None:
        self.of[kind], self.sites[kind] = (value, key), site
        self.at[kind, step], self.names[kind] = value, name
        self.layers += [(name, step, key)] * (kind is SampleKind.LAYERS)


def test_layers_in_eval_mode_are_counted_after_a_step() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU())
    ddp = SimpleNamespace(module=net)
    model = SimpleNamespace(
        trained=lambda: list(net.named_parameters()), built_with=frozenset(map(id, net.parameters())), mode_layers=None,
        hooked=[], slot=SimpleNamespace(synced_backwards=3), buffer_places=[], frozen_places=[], ref=lambda: ddp,
    )  # fmt: skip
    written: Any = Written()
    ledger: Any = SimpleNamespace(models={0: model}, averaged_by=None)
    checksums, optimizer = ReplicaChecksums(ledger, written), torch.optim.SGD(net.parameters(), lr=0.1)
    for mode, n in ((True, 0), (False, 2)):
        net.train(mode)
        checksums.after_optimizer(optimizer, 4)
        assert written.of[SampleKind.EVAL_MODE] == (n, 2)


def test_buffers_that_ddp_leaves_alone_and_running_statistics_are_no_state() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("codes", "running_scale", "own"):
                self.register_buffer(name, torch.ones(2))
            self.register_buffer("drawn", torch.ones(2), persistent=False)

    class FakeQuant(Codes):
        """What an observer finds in each rank's own batches."""

    ddp = SimpleNamespace(module=nn.Sequential(Codes(), nn.BatchNorm1d(2), FakeQuant()), parameters_to_ignore=["0.own"])
    model: Any = SimpleNamespace(ref=lambda: ddp, buffer_places=None)
    checksums = ReplicaChecksums(*[SimpleNamespace(models={0: model})] * 2)  # type: ignore[arg-type]
    found = checksums._buffers(model)
    assert len(found) == 9 and [name for _, name in found if name] == ["0.codes"]
    ddp.buffer_hook = "the job averages them"
    assert checksums._buffers(model) == []


def test_a_checksum_of_several_buffers_names_none_of_them() -> None:
    assert _one_of(["vq.codes"]) == "vq.codes"
    assert _one_of(["0.scale", "0.usage", "1.scale", "1.usage"]) == "one or more of 4: scale, usage"
    assert _one_of([f"0.{x}" for x in "abcdef"]) == "one or more of 6: a, b, c, d, …"


def test_parameters_of_a_model_that_no_gradient_trains_are_sampled_the_rarest_first() -> None:
    """A codebook that the script moves, or replaces, is one of few; the layers of a frozen backbone are many."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    backbone = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))).requires_grad_(False)
    net = nn.Sequential(backbone, Codes(), Codes(), nn.Linear(2, 2))
    kept = [*net.parameters()]  # as DDP does: their ids are not used again
    ddp = SimpleNamespace(module=net, parameters_to_ignore=["2.scale"])
    model: Any = SimpleNamespace(ref=lambda: ddp, frozen_places=None, built_with=frozenset(map(id, kept)))
    net[1].codes.requires_grad_(False)
    net[1].scale = nn.Parameter(torch.ones(2))
    found = _untrained(model)
    assert [name for _, name in found[:3]] == ["1.codes", "1.scale", "0.0.weight"] and len(found) == 24
    net[1].codes = nn.Parameter(torch.zeros(2))
    net[1].scale.grad = torch.ones(2)
    found = _untrained(model)
    assert found[0][0] is net[1].codes and "1.scale" not in [name for _, name in found], "it is trained now"


def sampled(
    *optimizers: tuple[Any, ...],
    synced: int = 3,
    ignored: int = 0,
    without: nn.Module | None = None,
    changes: bool = False,
) -> dict[SampleKind, tuple[float, int]]:
    """Return the samples of a rank with four layers in DDP, after each of these optimizers has stepped.

    Args:
        optimizers: Of each: numbers of the layers in DDP that it has, and modules that are not in DDP.
        ignored: This many of the first parameters are ignored by DDP.
        without: A module whose parameters get no gradients.
        changes: Something else changes the last layer between two samples.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = SimpleNamespace(
        trained=lambda: list(net.named_parameters())[ignored:], built_with=frozenset(map(id, net.parameters())),
        hooked=[], slot=SimpleNamespace(synced_backwards=synced), buffer_places=[], ref=lambda: None,
    )  # fmt: skip
    written: Any = Written()
    ledger: Any = SimpleNamespace(models={0: model}, averaged_by=None)
    checksums = ReplicaChecksums(ledger, written)
    for parts in optimizers:
        modules = [net[x] if isinstance(x, int) else x for x in parts]
        params = [p for m in modules for p in m.parameters()]
        for p in params:
            p.grad = torch.zeros_like(p)
        for p in without.parameters() if without is not None else ():
            p.grad = None
        optimizer = torch.optim.SGD(params, lr=0.1)
        for step in (4, 8):
            checksums.after_optimizer(optimizer, step)
            with torch.no_grad():
                net[3].get_parameter("weight").add_(float(changes))
    return written.of


def parameters_of_rank(*layers: int) -> tuple[float, int]:
    return sampled(layers)[SampleKind.PARAMETERS]


def test_the_shards_of_zero_are_not_compared_although_their_shapes_are_equal() -> None:
    first, second = parameters_of_rank(0, 1), parameters_of_rank(2, 3)
    assert first[1] != second[1]


def test_equal_replicas_have_equal_keys() -> None:
    assert parameters_of_rank(0, 1, 2, 3) == parameters_of_rank(0, 1, 2, 3)


def test_parameters_that_no_ddp_module_was_built_with_are_sampled_apart() -> None:
    """The loss has weights: the model's optimizer steps them, or a second one, before or after it."""
    whole, head = sampled((0, 1, 2, 3)), nn.Linear(8, 20)
    assert whole[SampleKind.PARAMETERS][0] != 0
    assert SampleKind.OUTSIDE_DDP not in whole
    for of in (sampled((0, 1, 2, 3, head)), sampled((head,), (0, 1, 2, 3)), sampled((0, 1, 2, 3), (head,))):
        assert of[SampleKind.PARAMETERS] == whole[SampleKind.PARAMETERS]
        assert of[SampleKind.OUTSIDE_DDP][1] != whole[SampleKind.PARAMETERS][1]


@pytest.mark.parametrize(
    ("rates", "others", "written"),
    [((0.0, 0.2), 0, 0.2), ((0.0, 0.0), 0, 0.0), ((0.0, 0.0), 1, None), ((0.1,), 1, 0.1)],
)
def test_a_learning_rate_of_zero_is_that_of_all_that_is_stepped(
    rates: tuple[float, ...], others: int, written: float | None
) -> None:
    """A discriminator waits, or a backbone is frozen by its rate: the job trains nevertheless."""
    layers = [nn.Linear(2, 2) for _ in rates]
    groups = [{"params": [*layer.parameters()], "lr": r} for layer, r in zip(layers, rates, strict=True)]
    out: Any = Written()
    ledger: Any = SimpleNamespace(models={}, averaged_by=None)
    checksums, other = ReplicaChecksums(ledger, out), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    if others:
        checksums.others[id(other)] = other
    checksums.after_optimizer(torch.optim.SGD(groups), 4)
    assert out.of.get(SampleKind.LEARNING_RATE, (None, 0))[0] == written
    if written is not None:
        before = out.of[SampleKind.LEARNING_RATE][1]
        layers[0].load_state_dict(layers[0].state_dict())
        checksums.after_optimizer(torch.optim.SGD(groups), 4)
        assert out.of[SampleKind.LEARNING_RATE][1] == before + 2, "weight and bias were written"


def test_the_learning_rate_of_sharded_parameters_is_sampled_although_they_are_not_compared() -> None:
    flat = nn.Parameter(torch.ones(8))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    groups = [{"params": [flat], "lr": 0.1}, {"params": [nn.Parameter(torch.ones(3))], "lr": 0.2}]
    keys = []
    for part in (groups, groups[:1]):
        out: Any = Written()
        checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), out)  # type: ignore[arg-type]
        checksums._parameters = lambda _optimizer: _Compared([], 0, 0, "", [])  # type: ignore[method-assign]
        checksums.after_optimizer(torch.optim.SGD(part), 4)
        assert out.of[SampleKind.LEARNING_RATE][0] == 0.1 and SampleKind.PARAMETERS not in out.of
        keys.append(out.of[SampleKind.LEARNING_RATE][1])
    assert all(key >> 32 & 1 for key in keys) and keys[0] != keys[1], "the groups differ"


def test_parameters_that_fsdp_ignores_are_sampled_from_before_the_first_step_on() -> None:
    flat, scale, head = (nn.Parameter(torch.ones(n)) for n in (8, 1, 3))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    scale.grad = torch.ones(1)
    out: Any = Written()
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), out)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([flat, scale, head], lr=0.1)
    checksums.before_first_step(optimizer)
    checksums.after_optimizer(optimizer, 2)
    assert [step for kind, step in out.at if kind is SampleKind.OUTSIDE_FSDP] == [0, 2]
    assert out.names[SampleKind.OUTSIDE_FSDP] == "1 parameter (one element)", "the head has no gradient"
    net = nn.Module()
    net.register_parameter("scale", scale)
    checksums._outer = [weakref.ref(net)]
    checksums.after_optimizer(optimizer, 4)
    assert out.names[SampleKind.OUTSIDE_FSDP] == "1 parameter (scale)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_layer_that_move_against_each_other_change_its_checksum(dtype: torch.dtype) -> None:
    """As under cross entropy: the gradients of all classes sum to zero."""
    layer = nn.Linear(8, 4, bias=False).to(dtype)
    seen = []
    for _ in range(2):
        seen.append(sampled((layer,), synced=0)[SampleKind.PARAMETERS][0])
        with torch.no_grad():
            layer.weight[0] += 0.5
            layer.weight[3] -= 0.5
    assert abs(seen[0] - seen[1]) > 0.1


def test_parameters_with_gradients_that_no_optimizer_has_are_counted() -> None:
    assert SampleKind.NOT_STEPPED not in sampled((0, 1, 2, 3))
    assert sampled((0, 1, 2, 3), (0, 1, 2))[SampleKind.NOT_STEPPED] == (2, 0), "weight and bias of the last layer"
    assert SampleKind.NOT_STEPPED not in sampled((0, 1, 2), changes=True), (
        "the optimizer of another rank steps it (ZeRO)"
    )


def test_copies_that_an_optimizer_steps_instead_of_ddps_parameters_are_not_held_for_others() -> None:
    """In another precision: they have gradients; the layer that was replaced has none."""
    copies, replaced = nn.Linear(8, 8), nn.Linear(8, 8)
    assert SampleKind.NOT_STEPPED not in sampled((0, 1, 2, 3), (copies,))
    assert sampled((0, 1, 2, 3), (0, 1, 2, replaced), without=replaced)[SampleKind.NOT_STEPPED] == (2, 2)


def test_what_ddp_ignores_or_has_not_averaged_yet_is_not_outside() -> None:
    assert SampleKind.OUTSIDE_DDP not in sampled((0, 1, 2, 3), ignored=2)
    assert SampleKind.OUTSIDE_DDP not in sampled((0, 1, nn.Linear(8, 8)), synced=0)


def in_a_job(net: nn.Module, lead: Any, *others: Any, call: Any = lambda: None, then: Any = lambda: None) -> Written:
    """Return what is sampled of a rank with `net` in DDP, up to step 4; in the second step it calls `call`, in the next ones `then`."""
    ddp = SimpleNamespace(module=net)
    model = SimpleNamespace(
        trained=lambda: list(net.named_parameters()), built_with=frozenset(map(id, net.parameters())),
        hooked=[], slot=SimpleNamespace(synced_backwards=3), buffer_places=[], frozen_places=[], mode_layers=[], ref=lambda: ddp,
    )  # fmt: skip
    written: Any = Written()
    ledger: Any = SimpleNamespace(models={0: model}, averaged_by=None)
    checksums = ReplicaChecksums(ledger, written)
    checksums.others.update({id(o): o for o in others})
    for step in range(5):
        if step:
            checksums.after_optimizer(lead, step)
        else:
            checksums.before_first_step(lead)
        if step:
            (call if step == 1 else then)()
    return written


def test_the_parameters_are_sampled_before_the_first_step() -> None:
    net = nn.Linear(8, 8)
    written = in_a_job(net, torch.optim.SGD(net.parameters(), lr=0.1))
    at = written.at
    assert at[SampleKind.PARAMETERS, 0] == at[SampleKind.PARAMETERS, 2] != 0
    assert written.sites[SampleKind.LEARNING_RATE] == 7, "where the optimizer steps"


def test_a_parameter_outside_ddp_with_an_optimizer_of_its_own_is_sampled() -> None:
    """A temperature, as in soft actor-critic: it steps after the model's optimizer, and may have no gradient between."""
    net, alpha = nn.Linear(8, 8), torch.ones(1, requires_grad=True)
    other = torch.optim.Adam([alpha], lr=0.1)
    lead = torch.optim.SGD(net.parameters(), lr=0.1)
    assert SampleKind.OUTSIDE_DDP not in in_a_job(net, lead, other).of, "it has not been trained yet"
    alpha.grad = torch.ones(1)
    other.step()
    alpha.grad = None
    assert in_a_job(net, lead, other).names[SampleKind.OUTSIDE_DDP] == "1 parameter (one element)"


class Teacher(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8).requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_a_module_outside_ddp_that_a_step_calls_and_no_gradient_trains_is_sampled() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)), torch.ones(1, 8)
    lead = torch.optim.SGD(net[0].parameters(), lr=0.1)
    teacher, trained, loss = Teacher(False), Teacher(True), nn.MSELoss()
    job = in_a_job(net, lead, call=lambda: loss(teacher(net(x)), trained(x)))
    assert job.names[SampleKind.UNTRAINED] == "Teacher" and job.at[SampleKind.UNTRAINED, 2] != 0
    assert SampleKind.UNTRAINED not in in_a_job(net, lead, call=lambda: trained(net(x))).of


@pytest.mark.parametrize(
    ("persistent", "name", "changes", "sampled_at"),
    [
        (True, "codebook", False, [2, 4]),
        (True, "codebook", True, [2]),
        (False, "codebook", False, []),
        (True, "running_mean", False, []),
    ],
)
def test_constant_buffers_of_a_module_without_parameters_are_sampled(
    persistent: bool, name: str, changes: bool, sampled_at: list[int]
) -> None:
    """A frozen quantizer must be the same on all ranks; sums and statistics, which change, may be each rank's own."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(name, torch.ones(2, 3), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    net, quantizer = nn.Sequential(nn.Linear(8, 8), Quantizer()), Quantizer()
    lead = torch.optim.SGD(net.parameters(), lr=0.1)
    then = [lambda: None, lambda: quantizer._buffers[name].add_(1.0)][changes]  # type: ignore[union-attr]
    written = in_a_job(net, lead, call=lambda: quantizer(net[0](torch.ones(1, 8))), then=then)
    assert [step for kind, step in written.at if kind is SampleKind.UNTRAINED] == sampled_at
    assert SampleKind.UNTRAINED not in in_a_job(net, lead, call=lambda: net[1](torch.ones(1, 8))).of, "it is in DDP"


@pytest.mark.parametrize(
    ("within", "stepped", "found"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_modules_that_ddps_forward_calls_and_its_module_does_not_have_are_reported(
    within: bool, stepped: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters in a plain list are no submodules: nothing registers their parameters."""
    net, adapters = nn.Linear(8, 8), [Teacher(True), Teacher(True)]
    lead = torch.optim.SGD(net.parameters(), lr=0.1)
    others = [torch.optim.SGD([p for a in adapters for p in a.parameters()], lr=0.1)] * stepped

    def step() -> None:
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", net if within else None)
        x = net(torch.ones(1, 8))
        sum(a(x).sum() for a in adapters).backward()
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)

    written = in_a_job(net, lead, *others, call=step)
    assert (SampleKind.NOT_STEPPED in written.of) is found
    if found:
        assert written.names[SampleKind.NOT_STEPPED] == "Teacher.net.weight, Teacher.net.bias"
        assert written.of[SampleKind.NOT_STEPPED] == (4, 1 << 32)
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("reduced", [100, 0], ids=["over all ranks", "in subgroups"])
def test_without_ddp_the_parameters_are_sampled_by_the_class_of_the_module_that_owns_them(reduced: int) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    written: Any = Written()
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), written)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checksums.before_first_step(optimizer)
    for step in range(1, 33):
        checksums.reduced = reduced
        checksums.after_optimizer(optimizer, step)
        if step == 1:
            net(torch.ones(2, 8))
            with torch.no_grad():
                net[1].get_parameter("bias").add_(1.0)
    kinds = {k: of for k, of in written.at.items() if k[0] is SampleKind.LAYERS}
    assert sorted(step for _, step in kinds) == [0, 32]
    linear, norm = 4 | 108 << 34, 2 | 1 << 32 | 16 << 34
    assert written.layers == [
        ("Linear", 0, linear),
        ("Linear", 32, linear),
        ("LayerNorm", 0, norm),
        ("LayerNorm", 32, norm),
    ]
    # all weights of the norm are 1, and all biases 0
    assert kinds[SampleKind.LAYERS, 0] != kinds[SampleKind.LAYERS, 32]


class Ranker(nn.Module):
    """A sparse table with an optimizer of its own, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids))


def test_the_layers_of_an_optimizer_that_steps_second_are_sampled_and_sparse_gradients_marked() -> None:
    net = Ranker()
    written: Any = Written()
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), written)  # type: ignore[arg-type]
    lead, other = torch.optim.SparseAdam(net.table.parameters()), torch.optim.SGD(net.top.parameters(), lr=0.1)
    checksums.before_first_step(lead)
    for step in range(1, 33):
        torch.Tensor.sum(net(torch.arange(3))).backward()
        checksums.reduced = 5
        checksums.after_optimizer(lead, step)
        checksums.begins(other)
    keys = {name: key for name, step, key in written.layers if step == 32}
    assert keys == {"Embedding": 1 | 1 << 33 | 24 << 34, "Linear": 2 | 5 << 34}
    assert written.of[SampleKind.REDUCED][1] == 5


def test_a_model_that_the_job_drops_is_not_kept() -> None:
    net = Ranker()
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), Written())  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checksums.before_first_step(optimizer)
    for step in range(1, 4):
        torch.Tensor.sum(net(torch.arange(3))).backward()
        checksums.after_optimizer(optimizer, step)
    assert {*checksums._layers} == {"Embedding", "Linear"}
    held = weakref.ref(net.top.weight)
    del net, optimizer
    gc.collect()
    assert held() is None
    checksums._sample_layers(32)


def test_a_parameter_that_the_job_replaces_is_not_kept_and_the_new_one_sampled() -> None:
    """As Gaussian splatting does, which splits and removes points."""
    written, sampled = Written(), SampleKind.PARAMETERS
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), written)  # type: ignore[arg-type]
    points = [nn.Parameter(torch.full((4, 3), float(k))) for k in range(2)]
    optimizer = torch.optim.SGD([points[0]], lr=0.1)
    checksums.before_first_step(optimizer)
    checksums.after_optimizer(optimizer, 2)
    held = weakref.ref(points.pop(0))
    optimizer.param_groups[0]["params"][0] = points[0]
    gc.collect()
    assert held() is None
    checksums.after_optimizer(optimizer, 4)
    assert written.at[sampled, 2] == 0 < written.at[sampled, 4]


@pytest.mark.parametrize(
    ("replaced", "counted"),
    [("embed", (1, 1)), ("head", (2, 2)), ("", None)],
    ids=["same shape", "other width", "none"],
)
def test_parameters_that_were_replaced_after_the_optimizer_was_built_are_counted_without_ddp(
    replaced: str, counted: tuple[int, int] | None
) -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(6, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 6)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if replaced:
        net[replaced] = nn.Embedding(6, 4) if replaced == "embed" else nn.Linear(4, 9)
    whole = nn.Sequential(net["embed"], net["body"], net["head"])
    written: Any = Written()
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), written)  # type: ignore[arg-type]
    for step in range(1, 9):
        torch.Tensor.sum(whole(torch.arange(3))).backward()
        checksums.after_optimizer(optimizer, step)
    assert written.of.get(SampleKind.NOT_STEPPED) == counted
    assert not replaced or written.names[SampleKind.NOT_STEPPED].startswith(
        "0." if replaced == "embed" else "2.weight, 2."
    )


def test_parameters_that_no_optimizer_has_are_named_the_largest_first() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 9))
    model = SimpleNamespace(
        trained=lambda: [*net.named_parameters()][1:], built_with=frozenset(map(id, net.parameters()))
    )
    written: Any = Written()
    optimizer = torch.optim.SGD([net[0].weight], lr=0.1)
    checksums = ReplicaChecksums(SimpleNamespace(models={0: model}), written)  # type: ignore[arg-type]
    torch.Tensor.sum(net(torch.randn(4, 2))).backward()
    for step in (32, 64):
        checksums._not_stepped(optimizer, step)
    assert written.names[SampleKind.NOT_STEPPED] == "2.weight, 2.bias, 0.bias, 1.weight"


def test_the_order_of_tensors_is_apart_from_their_names() -> None:
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(2))
    one, other, longer = _order([a, b], ()), _order([b, a], ()), _order([a, ("b", torch.zeros(3))], ())
    assert one != other and one >> 32 == other >> 32 != longer >> 32
    assert _order([a, b], ("a",)) == _order([b], ()) and _order([], ()) == 0


@pytest.mark.parametrize(
    ("phase", "shape", "counted"),
    [
        (Phase.BACKWARD, (8, 32, 64), False),
        (Phase.BACKWARD, (16, 4), True),
        (Phase.BACKWARD, (99,), True),
        (Phase.OTHER, (8, 32, 64), True),
    ],
    ids=["an activation", "a gradient", "a bucket", "after backward"],
)
def test_an_activation_that_is_reduced_in_backward_is_no_gradient(
    phase: Phase, shape: tuple[int, ...], counted: bool
) -> None:
    collectives: Any = SimpleNamespace(shapes={(16, 4), (4,)}, page=SimpleNamespace(words={word("phase"): int(phase)}))
    tensor = (0, len(shape), *(*shape, 0, 0, 0, 0, 0)[:6], 1, 4)
    assert Collectives._of_gradients(collectives, tensor) is counted


def test_the_gradients_of_the_step_are_sampled() -> None:
    net = nn.Linear(8, 8)
    for p in net.parameters():
        p.grad = torch.full_like(p, -1.0)
    assert in_a_job(net, torch.optim.SGD(net.parameters(), lr=0.1)).at[SampleKind.GRADIENTS, 4] > 0


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("a copy", [1, 2, 4, 8]),
        ("written back", []),
        ("a few elements", []),
        ("gradients of each pass", []),
        ("later", [1, 2, 3]),
    ],
)
def test_averages_that_do_not_reach_the_parameters_are_seen(how: str, found: list[int]) -> None:
    """Periodic averaging: the parameters are the same after it as after the step."""
    net = nn.Linear(8, 8)
    lead, written = torch.optim.SGD(net.parameters(), lr=0.1), Written()
    ledger: Any = SimpleNamespace(
        models={}, averaged_by=None, lead=lambda: lead, backward_ns=9 * (how == "gradients of each pass")
    )
    checksums = ReplicaChecksums(ledger, written)  # type: ignore[arg-type]
    for step in range(1, 12):
        with torch.no_grad():
            net.weight.add_(0.1)
        checksums.after_optimizer(lead, step)
        if how == "written back" or (how == "later" and step == 4):
            with torch.no_grad():
                net.weight.mul_(0.5)
        checksums.averaged(2 if how == "a few elements" else 72, step)
    assert checksums.averaged_elements == (2 if how == "a few elements" else 72)
    # the parameters after the step are known from the second on
    assert [step - 1 for kind, step in written.at if kind is SampleKind.NOT_WRITTEN_BACK] == found
    assert how != "later" or written.of[SampleKind.NOT_WRITTEN_BACK][1] == 1 << 32, "since then they reach them"


@pytest.mark.parametrize("nested", [True, False])
def test_an_optimizer_whose_step_contains_the_leading_one_leads(nested: bool) -> None:
    """ZeroRedundancyOptimizer: replicas are equal after its broadcast only, and it has the parameters of all ranks."""
    ends, closed = StepAccounting._optimizer_ends, []
    inner, outer = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    accounting: Any = SimpleNamespace(
        ledger=SimpleNamespace(main_thread=get_ident(), lead=None, lead_misses=0, idle=0, optimizer_ns=0, optimizer_start_ns=0),
        words=dict.fromkeys(range(4096), 0), device=None, recorder=SimpleNamespace(device=0), _ended=lambda: None,
        checks=SimpleNamespace(replicas=SimpleNamespace(others={}, after_optimizer=lambda o, _step: closed.append(o))),
        close_step=lambda t: None,
    )  # fmt: skip
    accounting._leads = lambda o: StepAccounting._leads(accounting, o)
    for _ in range(3):
        accounting.ledger.optimizer_start_ns = 1
        ends(accounting, inner)
        if not nested:
            accounting.ledger.optimizer_start_ns = 1
        ends(accounting, outer)
    assert closed == ([inner, outer, outer] if nested else [inner] * 3)


def without_gradient(*steps: tuple[int, ...], frozen: int = 9) -> list[tuple[float, int, int]]:
    """Return (number, of how many, share in millionths) of an optimizer whose layers with these numbers have a gradient at each step.

    The layers have 4, 8, 16 and 32 elements.
    """
    layers = [nn.Parameter(torch.zeros(4 << k), requires_grad=k != frozen) for k in range(4)]
    checksums = ReplicaChecksums(SimpleNamespace(models={}, averaged_by=None), written := Written())  # type: ignore[arg-type]
    optimizer, found = torch.optim.SGD(layers, lr=0.1), []
    for k, having in enumerate(steps, 1):
        for i, p in enumerate(layers):
            p.grad = torch.zeros_like(p) if i in having else None
        written.of.clear()
        checksums.after_optimizer(optimizer, 1 << k)
        if SampleKind.NO_GRADIENTS in written.of:
            value, key = written.of[SampleKind.NO_GRADIENTS]
            found.append((value, key & 0xFFFFFFFF, key >> 32))
    return found


def test_parameters_without_a_gradient_at_every_step_are_counted_without_ddp() -> None:
    assert without_gradient((0, 1), (0, 1)) == [(2, 4, 800_000)] * 2
    assert without_gradient((0, 1, 2, 3), (0,)) == [], "all had one"
    assert without_gradient((0, 1), (0, 2), (0, 3), (0,)) == [(2, 4, 800_000), (1, 4, 533_333), (0, 4, 0)], (
        "they take turns"
    )
    assert without_gradient((), (0,), ()) == [(4, 4, 1_000_000), (3, 4, 933_333), (4, 4, 1_000_000)]
    assert without_gradient((0, 1, 2), frozen=3) == []
    assert without_gradient((0, 1), frozen=3) == [(1, 3, 571_429)]


MESH = """
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from distdiag.recorder.hooks.replica_checksums import _beside_fsdp, _replicated, _sharded

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8))

def of(m):
    params, ranks = _replicated(torch.optim.SGD(m.parameters(), 0.1))
    return sorted(tuple(p.shape) for p in params), ranks

PLAN = {"1": ColwiseParallel(), "2": RowwiseParallel()}
print(of(parallelize_module(model(), init_device_mesh("cpu", (4,)), PLAN)))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
print(of(parallelize_module(model(), mesh["tp"], PLAN)))
whole = fully_shard(model(), mesh=init_device_mesh("cpu", (4,)))
print(of(whole))
print(of(fully_shard(parallelize_module(model(), mesh["tp"], PLAN)[1], mesh=mesh["dp"])))
print(of(nn.Linear(4, 4)))
partly = nn.Sequential(nn.Linear(4, 6), parallelize_module(model(), mesh["tp"], PLAN))
print(of(fully_shard(partly, mesh=mesh["dp"])))
print([{_sharded(p) for p in m.parameters()} for m in (whole, nn.Linear(4, 4))])

def beside(mesh, plan=None):
    m = model()
    m.scale = nn.Parameter(torch.ones(()))
    whole = parallelize_module(m, mesh, plan) if plan else fully_shard(m, mesh=mesh, ignored_params={m.scale})
    return [p is m.scale for p in _beside_fsdp(torch.optim.SGD(whole.parameters(), 0.1))]

print(beside(init_device_mesh("cpu", (4,))), beside(mesh), beside(mesh["dp"]), beside(mesh["tp"], PLAN))
"""


def test_the_parameters_beside_sharded_ones_are_those_that_a_dimension_of_the_mesh_has_whole() -> None:
    """Tensor parallelism leaves the stem and a bias whole on each rank of its mesh; FSDP shards everything."""
    done = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, pairs, fsdp, both, none, partly, sharded, beside = done.stdout.splitlines()
    assert beside == "[True] [] [] []", "not where each pair shards for itself, or a module is split"
    assert sharded == "[{True}, {False}]"
    assert whole == "([(8,), (8,), (8, 4)], '0-3')"
    assert pairs == "([(8,), (8,), (8, 4)], '0-1')"
    assert fsdp == "([], '')" and none == "([], '')"
    assert both == "([], '')", "all of this module is sharded"
    assert partly == "([(6,), (6, 4), (8,), (8,), (8, 4)], '0-1')", "FSDP shards it along the other dimension"


def test_the_steps_that_an_optimizer_has_counted_are_read_where_it_counts() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    adam, plain = torch.optim.AdamW([p]), torch.optim.SGD([p], momentum=0.9)
    assert _counted(adam, [p]) is None
    for optimizer in (adam, plain):
        optimizer.step()
    adam.step()
    assert (_counted(adam, [p]), _counted(plain, [p])) == (2.0, None)
    adam.state[p]["step"] = torch.zeros(1, device="meta")
    assert _counted(adam, [p]) is None
