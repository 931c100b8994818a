"""NVML, NVIDIA's management library: loading it, asking one question, and its words in plain text.

Every question may fail on its own: consumer cards have no ECC counters, old drivers lack newer calls, a MIG instance
has no utilization, a lost card answers nothing. A question without an answer is None, never 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

# Why a card lowered its clocks. Idle, application clocks and display settings are not faults. Bits: nvml.h,
# nvmlClocksEventReason*, the same as the older nvmlClocksThrottleReason*.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
GPU_IS_LOST = 15  # NVML_ERROR_GPU_IS_LOST: the card has fallen off the bus or cannot be reached
_MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_RECOVERIES_TOTAL = 59  # NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: up to NVLink 4, all lanes
_RECOVERIES_OF_LINK = 215  # NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: NVLink 5, by link


class Unavailable(Exception):
    """NVML cannot be used here; the text says why."""


def load() -> Any:
    """Return pynvml, initialised.

    Raises:
        Unavailable: nvidia-ml-py is not installed, or there is no NVIDIA driver.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pynvml
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise Unavailable(f"no NVIDIA driver ({e})") from None
    return pynvml


def ask(n: Any, question: Callable[..., Any], *args: Any) -> Any:
    """Return the answer, or None if the card, its driver or the binding has none."""
    # NVMLLibraryMismatchError is no NVMLError; AttributeError and TypeError come from bindings of other versions
    try:
        return question(*args)
    except (n.NVMLError, getattr(n, "NVMLLibraryMismatchError", n.NVMLError), AttributeError, TypeError):
        return None


def text(value: Any) -> str | None:
    """Return a string of NVML; some packages of pynvml give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def facts(n: Any, card: Any, part: Any = None) -> dict[str, Any]:
    """Return what a card reports of itself, by the names of table `gpu`.

    Args:
        part: Handle of one of its MIG instances, whose name and memory are shown; None: the whole card.
    """

    def answer(question: str, *args: Any, of: Any = card) -> Any:
        function: Any = getattr(n, question, None)  # None in an older binding: calling it is a TypeError
        return ask(n, function, of, *args)

    part = card if part is None else part
    memory = answer("nvmlDeviceGetMemoryInfo", of=part)
    power, limit = answer("nvmlDeviceGetPowerUsage"), answer("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "uuid": text(answer("nvmlDeviceGetUUID", of=part)),
        "name": text(answer("nvmlDeviceGetName", of=part)),
        "memory_used_bytes": getattr(memory, "used", None),
        "memory_total_bytes": getattr(memory, "total", None),
        "power_w": None if power is None else power / 1000,
        "power_limit_w": None if limit is None else limit / 1000,
        "temperature_c": answer("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
        "sm_clock_mhz": answer("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
        "sm_clock_max_mhz": answer("nvmlDeviceGetMaxClockInfo", 1),
        "ecc_uncorrected": answer("nvmlDeviceGetTotalEccErrors", 1, 0),  # since the driver was loaded
        "pcie_generation": answer("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": answer("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": answer("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": answer("nvmlDeviceGetMaxPcieLinkWidth"),
    }


def throttle_reasons(n: Any, handle: Any) -> list[str] | None:
    """Return why the clocks are lowered; [] if they are not."""
    bits = ask(
        n, getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", n.nvmlDeviceGetCurrentClocksThrottleReasons), handle
    )
    if bits is None:  # drivers before 535 know the old name only
        bits = ask(n, n.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return None if bits is None else [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]


def links(n: Any, handle: Any) -> list[bool] | None:
    """Return whether each NVLink is up; None for a card without NVLink."""
    states = [s for i in range(_MOST_LINKS) if (s := ask(n, n.nvmlDeviceGetNvLinkState, handle, i)) is not None]
    return [bool(s) for s in states] or None


def link_recoveries(n: Any, handle: Any, link_count: int) -> int | None:
    """Return how often NVLinks were retrained since the driver was loaded; each time traffic waits for the link."""
    total = _field(n, handle, _RECOVERIES_TOTAL)
    if total is not None:
        return total
    by_link = [v for i in range(link_count) if (v := _field(n, handle, (_RECOVERIES_OF_LINK, i))) is not None]
    return sum(by_link) if by_link else None


def _field(n: Any, handle: Any, which: int | tuple[int, int]) -> int | None:
    values = ask(n, n.nvmlDeviceGetFieldValues, handle, [which])
    if values is None or values[0].nvmlReturn != 0:
        return None
    value = values[0].value
    return int({1: value.uiVal, 2: value.ulVal, 3: value.ullVal}.get(values[0].valueType, value.ullVal))


def process_ids(n: Any, handle: Any) -> list[int] | None:
    """Return the processes that compute on a card, by the host's process ids (a container has others)."""
    found = ask(n, n.nvmlDeviceGetComputeRunningProcesses, handle)
    return None if found is None else [p.pid for p in found]


def instances(n: Any, handle: Any) -> list[Any] | None:
    """Return the handles of a card's MIG instances; None if MIG is off or unknown."""
    mode = ask(n, n.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return None
    most = ask(n, n.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = [ask(n, n.nvmlDeviceGetMigDeviceHandleByIndex, handle, i) for i in range(most)]
    return [h for h in found if h is not None]
