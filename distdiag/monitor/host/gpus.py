"""GPUs once a second (NVML). No NVIDIA driver is a normal state; so is a reading that a card does not offer: None."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distdiag.diagnosis.model.snapshot import GpuState
from distdiag.store.rows import GpuRow

KEPT = 60  # samples, one a second
_ENOUGH = 20  # samples before a share is said

_THROTTLE = {
    "SwThermalSlowdown": "thermal (software)",
    "HwThermalSlowdown": "thermal (hardware)",
    "HwSlowdown": "hardware slowdown",
    "SwPowerCap": "power cap",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "sync boost",
}


@dataclass
class _Past:
    """What the last minute and the run so far say of one GPU."""

    hot: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT))  # throttled for heat or hardware
    use_pct: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    ecc_first: int | None = None
    xids: list[int] = field(default_factory=list)
    events: Any = None  # NVML's event set, None where it does not offer one


class Gpus:
    """Handles of this node's GPUs; `absent` says why there are none."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.absent: str | None = None
        self._handles: list[Any] = []
        self._past: list[_Past] = []
        self._rows: list[GpuRow] = []
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
            return
        self._past = [_Past(events=self._listen(h)) for h in self._handles]

    def _listen(self, handle: Any) -> Any:
        """An event set for the driver's Xid errors; None where the card or its driver has none."""
        n = self._nvml
        with contextlib.suppress(n.NVMLError, AttributeError):
            events = n.nvmlEventSetCreate()
            n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def _hear(self, past: _Past) -> None:
        """Take what has been reported since the last look; never waits."""
        n = self._nvml
        while past.events is not None and len(past.xids) < 16:
            try:
                past.xids.append(int(n.nvmlEventSetWait_v2(past.events, 0).eventData))
            except n.NVMLError as e:
                if getattr(e, "value", None) != n.NVML_ERROR_TIMEOUT:
                    past.events = None  # the card is gone, and says so elsewhere
                return

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
        self._rows = [self._row(t_s, i, h, ranks.get(i)) for i, h in enumerate(self._handles)]
        for g, past in zip(self._rows, self._past, strict=True):
            self._hear(past)
            if g.throttle is not None:
                past.hot.append(any(w in g.throttle for w in ("thermal", "hardware", "brake")))
            if g.utilization_pct is not None:
                past.use_pct.append(g.utilization_pct)
            if past.ecc_first is None:
                past.ecc_first = g.ecc_uncorrected
        return self._rows

    def states(self) -> tuple[GpuState, ...]:
        """What the newest rows and the last minute say, for the diagnosis."""
        return tuple(
            GpuState(
                node=g.node,
                gpu=g.gpu,
                rank=g.rank,
                utilization_pct=g.utilization_pct,
                most_used_pct=max(past.use_pct) if len(past.use_pct) == KEPT else None,
                throttle=g.throttle,
                throttled_share=sum(past.hot) / len(past.hot) if len(past.hot) >= _ENOUGH else None,
                ecc_uncorrected=g.ecc_uncorrected,
                ecc_before=past.ecc_first,
                xids=tuple(past.xids),
                pcie_generation=g.pcie_generation,
                pcie_generation_max=g.pcie_generation_max,
                pcie_width=g.pcie_width,
                pcie_width_max=g.pcie_width_max,
            )
            for g, past in zip(self._rows, self._past, strict=True)
        )

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
