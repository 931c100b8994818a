"""Finds out which GPU of the machine a CUDA device of this process is.

CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES hides and reorders them (by number, UUID or MIG UUID), and CUDA's
default order is not that of the PCI bus. The UUID is the same in both.
"""

from __future__ import annotations

from typing import Any


def nvml_index(properties: Any, nvml: Any) -> int:
    """Return NVML's index of a GPU (of the whole card for a MIG slice); -1 if NVML does not know it.

    Args:
        properties: `torch.cuda.get_device_properties(device)`.
        nvml: The module `pynvml`.
    """
    uuid = str(getattr(properties, "uuid", "") or "")
    uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if not uuid:
        return -1
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return -1
    try:
        try:
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError:
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
    except nvml.NVMLError:
        return -1
    finally:
        nvml.nvmlShutdown()
