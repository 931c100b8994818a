"""Choose the number format of `--amp` for a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from distdiag.errors import DistdiagError


def cpu_multiplies_bf16() -> bool:
    """True if this CPU multiplies bf16 in hardware: AVX512-BF16 or AMX. False on ARM, which was not measured.

    Otherwise bf16 is emulated: SimpleCNN on one core takes about twice as long as in float32 on AVX512 without
    AVX512-BF16, and ten times as long on AVX2. With the hardware it takes a half to a third of the time. See
    benchmarks/results/train_speed.md.
    """
    try:
        has = torch.cpu.get_capabilities()
    except (AttributeError, RuntimeError):  # torch < 2.12
        has = {"avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()}
    return any(bool(has.get(k)) for k in ("avx512_bf16", "amx_bf16"))


def resolve_amp(amp: str, device: torch.device) -> str:
    if amp == "auto":
        gains = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bf16()
        return "bf16" if gains else "off"
    if amp == "fp16" and device.type == "cpu":
        raise DistdiagError("--amp fp16 needs a GPU: fp16 kernels on a CPU are too slow to train with", "--amp auto")
    if amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise DistdiagError("--amp bf16: this GPU has no bf16", "--amp fp16")
    return amp


def why_amp(requested: str, resolved: str, device: torch.device) -> str:
    """Return the format and its reason, for the first line."""
    if requested != "auto":
        return resolved
    if device.type == "cuda":
        return f"{resolved} (auto)"
    return f"{resolved} (auto: this CPU {'multiplies bf16' if resolved == 'bf16' else 'has no bf16 units'})"


def autocast(amp: str, device: torch.device) -> AbstractContextManager[object]:
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if amp == "bf16" else torch.float16)
