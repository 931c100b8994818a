"""The meaning of `--amp` on each device."""

from __future__ import annotations

import pytest
import torch

from distdiag.errors import DistdiagError
from distdiag.train import precision
from distdiag.train.precision import autocast, cpu_multiplies_bf16, resolve_amp, why_amp

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "gains"),
    [
        ({"avx512_bf16": False, "amx_bf16": False, "avx512_vl": True}, False),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "arm64", "bf16": True}, False),  # never measured
    ],
)
def test_auto_on_a_cpu_depends_on_its_instructions(
    capabilities: dict[str, bool], gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_multiplies_bf16() is gains
    amp = resolve_amp("auto", CPU)
    assert amp == ("bf16" if gains else "off")
    assert why_amp("auto", amp, CPU).startswith(f"{amp} (auto: this CPU")


def test_an_older_torch_is_queried_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert cpu_multiplies_bf16()


@pytest.mark.parametrize(
    ("amp", "device", "bf16_gpu", "resolved"),
    [
        ("off", CPU, True, "off"),
        ("bf16", CPU, True, "bf16"),
        ("auto", CUDA, True, "bf16"),
        ("auto", CUDA, False, "off"),
        ("fp16", CUDA, False, "fp16"),
    ],
)
def test_the_precision_is_resolved(
    amp: str, device: torch.device, bf16_gpu: bool, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision.torch.cuda, "is_bf16_supported", lambda: bf16_gpu)
    assert resolve_amp(amp, device) == resolved


def test_a_precision_that_the_device_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision.torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(DistdiagError, match="fp16 needs a GPU"):
        resolve_amp("fp16", CPU)
    with pytest.raises(DistdiagError, match="this GPU has no bf16"):
        resolve_amp("bf16", CUDA)


def test_autocast_computes_in_the_format_it_names() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("bf16", CPU):
        assert layer(x).dtype == torch.bfloat16
    with autocast("off", CPU):
        assert layer(x).dtype == torch.float32
