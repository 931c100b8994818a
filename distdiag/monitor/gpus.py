"""GPUs once a second (NVML). No NVIDIA driver is a normal state; so is a reading that a card does not offer: None."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from distdiag.store.rows import GpuRow

_THROTTLE = {
    "SwThermalSlowdown": "thermal (software)",
    "HwThermalSlowdown": "thermal (hardware)",
    "HwSlowdown": "hardware slowdown",
    "SwPowerCap": "power cap",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "sync boost",
}


class Gpus:
    """Handles of this node's GPUs; `absent` says why there are none."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.absent: str | None = None
        self._handles: list[Any] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as e:
            self.absent = f"no NVIDIA driver ({e})"

    def __len__(self) -> int:
        return len(self._handles)

    def _ask(self, f: Callable[..., Any], *args: Any) -> Any:
        try:
            return f(*args)
        except self._nvml.NVMLError:
            return None

    def rows(self, t_s: float, ranks: dict[int, int]) -> list[GpuRow]:
        """One row per GPU.

        Args:
            t_s: Run time, seconds.
            ranks: GPU index -> rank that uses it.
        """
        return [self._row(t_s, i, h, ranks.get(i)) for i, h in enumerate(self._handles)]

    def _row(self, t_s: float, index: int, h: Any, rank: int | None) -> GpuRow:
        n, ask = self._nvml, self._ask
        use = ask(n.nvmlDeviceGetUtilizationRates, h)
        memory = ask(n.nvmlDeviceGetMemoryInfo, h)
        power, limit = ask(n.nvmlDeviceGetPowerUsage, h), ask(n.nvmlDeviceGetEnforcedPowerLimit, h)
        uuid, name = ask(n.nvmlDeviceGetUUID, h), ask(n.nvmlDeviceGetName, h)
        processes = ask(n.nvmlDeviceGetComputeRunningProcesses, h)
        return GpuRow(
            t_s=t_s,
            node=self.node,
            gpu=index,
            uuid=_text(uuid),
            name=_text(name),
            rank=rank,
            utilization_pct=getattr(use, "gpu", None),
            memory_utilization_pct=getattr(use, "memory", None),
            memory_used_bytes=getattr(memory, "used", None),
            memory_total_bytes=getattr(memory, "total", None),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            temperature_c=ask(n.nvmlDeviceGetTemperature, h, n.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=ask(n.nvmlDeviceGetClockInfo, h, n.NVML_CLOCK_SM),
            sm_clock_max_mhz=ask(n.nvmlDeviceGetMaxClockInfo, h, n.NVML_CLOCK_SM),
            throttle=self._throttle(h),
            ecc_uncorrected=ask(
                n.nvmlDeviceGetTotalEccErrors, h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            ),
            pcie_generation=ask(n.nvmlDeviceGetCurrPcieLinkGeneration, h),
            pcie_generation_max=ask(n.nvmlDeviceGetMaxPcieLinkGeneration, h),
            pcie_width=ask(n.nvmlDeviceGetCurrPcieLinkWidth, h),
            pcie_width_max=ask(n.nvmlDeviceGetMaxPcieLinkWidth, h),
            nvlink_active=self._nvlinks(h),
            processes=None if processes is None else len(processes),
        )

    def _throttle(self, h: Any) -> str | None:
        n = self._nvml
        read = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", n.nvmlDeviceGetCurrentClocksThrottleReasons)
        bits = self._ask(read, h)
        if bits is None:
            return None
        found = []
        for word, text in _THROTTLE.items():
            for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
                bit = getattr(n, prefix + word, None)
                if bit is not None:
                    if bits & bit:
                        found.append(text)
                    break
        return ", ".join(found)

    def _nvlinks(self, h: Any) -> int | None:
        n = self._nvml
        active = 0
        for link in range(getattr(n, "NVML_NVLINK_MAX_LINKS", 18)):
            state = self._ask(n.nvmlDeviceGetNvLinkState, h, link)
            if state is None:
                return active if link else None
            active += state == n.NVML_FEATURE_ENABLED
        return active


def _text(v: Any) -> str | None:
    return v.decode("utf-8", "replace") if isinstance(v, bytes) else v
