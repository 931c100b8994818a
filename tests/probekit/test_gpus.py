"""NVML's answers as facts and reasons; the driver is a stand-in that answers like an H100."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.measure import gpus


class NVMLError(Exception):
    pass


class Driver:
    """The calls that `gpus.facts` makes; tests override attributes. Missing ones raise, as on a card without them."""

    NVMLError = NVMLLibraryMismatchError = NVMLError

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "Name": "NVIDIA H100 80GB HBM3",
            "UUID": b"GPU-1",
            "UtilizationRates": SimpleNamespace(gpu=3, memory=1),
            "MemoryInfo": SimpleNamespace(used=2**30, total=80 * 2**30),
            "Temperature": 41,
            "PowerUsage": 71_000,
            "EnforcedPowerLimit": 700_000,
            "ClockInfo": 1980,
            "MaxClockInfo": 1980,
            "CurrentClocksThrottleReasons": 1,
            "TotalEccErrors": 0,
            "RetiredPages": [],
            "RemappedRows": (0, 0, 0, 0),
            "CurrPcieLinkGeneration": 5,
            "MaxPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkWidth": 16,
            "NvLinkState": 1,
            "NvLinkVersion": 4,
            "PersistenceMode": 1,
            "ComputeRunningProcesses": [],
        } | answers

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")

        def answer(*_: Any) -> Any:
            value = self.answers.get(key)
            if value is None:
                raise NVMLError("Not Supported")
            return value

        return answer


def test_a_healthy_gpu_has_no_reason():
    g = gpus.facts(Driver(), 0, {1})
    assert (g.name, g.uuid, g.temperature_c, g.power_w, g.power_limit_w) == (
        "NVIDIA H100 80GB HBM3",
        "GPU-1",
        41,
        71.0,
        700.0,
    )
    assert (g.pcie_generation, g.pcie_width, g.nvlinks_active, g.nvlinks_down) == (5, 16, 18, 0)
    assert g.throttle == [] and g.persistence is True
    assert gpus.complaints(g) == []


@pytest.mark.parametrize(
    ("answers", "fault", "says"),
    [
        ({"CurrentClocksThrottleReasons": 0x40}, True, "thermal (hardware)"),
        ({"CurrentClocksThrottleReasons": 0x04}, False, "power cap"),
        ({"TotalEccErrors": 2}, True, "2 uncorrected ECC"),
        ({"RemappedRows": (0, 1, 1, 0)}, True, "wait for remapping"),
        ({"RetiredPages": [1, 2]}, False, "4 retired memory pages"),
        ({"CurrPcieLinkWidth": 8}, True, "x8 where x16"),
        ({"PersistenceMode": 0}, False, "persistence mode is off"),
        (
            {"ComputeRunningProcesses": [SimpleNamespace(pid=1), SimpleNamespace(pid=77)]},
            False,
            "1 other process on it",
        ),
    ],
)
def test_each_gpu_fault_has_its_reason(answers: dict[str, Any], fault: bool, says: str):
    found = gpus.complaints(gpus.facts(Driver(**answers), 0, {1}))
    assert [f for f, _ in found] == [fault]
    assert says in found[0][1]


def test_values_that_a_card_does_not_report_are_none():
    bare = gpus.facts(
        Driver(TotalEccErrors=None, RetiredPages=None, RemappedRows=None, NvLinkState=None, PowerUsage=None), 0, set()
    )
    assert (
        bare.ecc_uncorrected,
        bare.retired_pages,
        bare.remapped_rows_pending,
        bare.nvlinks_active,
        bare.power_w,
    ) == (None,) * 5
    assert gpus.complaints(bare) == []


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A10", 125, 600),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA GeForce RTX 4090", 165, 1008),
    ],
)
def test_published_peaks_are_found_by_name(name: str, bf16: float, memory: float):
    peak = gpus.peak_of(name)
    assert peak is not None
    assert (peak.tflops["bfloat16"], peak.memory_gbps) == (bf16, memory)


def test_an_unknown_device_has_no_peak():
    assert gpus.peak_of("Some Future GPU") is None
    assert gpus.peak_of("NVIDIA A1000 Laptop GPU") is None


def test_the_topology_is_described():
    driver = Driver(TopologyCommonAncestor=50)
    assert gpus.topology(driver, 2) == [["X", "across CPUs"], ["across CPUs", "X"]]


def test_a_missing_driver_is_no_data(monkeypatch: pytest.MonkeyPatch):
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(DistdiagError) as e, gpus.nvml():
        pass
    assert e.value.code is ExitCode.NO_DATA and "no NVIDIA driver" in e.value.message
    assert gpus.link_ceilings(0) == {"pcie_gbps": None, "nvlink_gbps": None}
