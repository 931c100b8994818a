"""The monitor's GPU samples, using a stand-in for NVIDIA's driver library with the real nvidia-ml-py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.standins import nvml

# Reads the commands below, one per line; answers each with one line of JSON.
WATCHER = """
import json, sys, time
import msgspec
from distdiag.monitor.host.gpus import Gpus, Users
gpus = Gpus(0)
for line in sys.stdin:
    do = json.loads(line)
    if "file" in do:
        open(do["path"], "w").write(do["file"])
    users = Users({int(k): v for k, v in do.get("by_index", {}).items()}, {int(k): v for k, v in do.get("by_pid", {}).items()})
    rows = []
    for i in range(do.get("samples", 1)):
        gpus.rows(float(i), users)
        end = time.monotonic() + do.get("wait_s", 20.0)
        while gpus.silent_s() is not None and time.monotonic() < end:
            rows = gpus._take() or rows
            time.sleep(0.002)
    print(json.dumps([gpus.absent, msgspec.to_builtins(rows), [msgspec.structs.asdict(state) for state in gpus.states()], gpus.silent_s()]), flush=True)
gpus.close()
"""


class Watch:
    """The monitor's sampler in its own process, with the stand-in as driver."""

    def __init__(self, folder: Path, old_driver: bool = False) -> None:
        self.file = folder / "answers"
        env = {"LD_LIBRARY_PATH": str(nvml.library(old_driver)), "FAKE_NVML": str(self.file)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHER],
            env=__import__("os").environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, answers: str, **request: Any) -> tuple[str | None, list[dict], list[dict], float | None]:
        assert self.process.stdin and self.process.stdout
        self.file.write_text(answers)
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return tuple(json.loads(self.process.stdout.readline()))  # type: ignore[return-value]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_cards_are_assigned_to_their_ranks(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        absent, rows, states, _ = watch(
            nvml.answers({}, {"nvmlDeviceGetTotalEccErrors": "3"}), by_index={"0": 4, "1": 5}
        )
        assert absent is None and [(r["gpu"], r["rank"], r["uuid"]) for r in rows] == [(0, 4, "GPU-0"), (1, 5, "GPU-1")]
        assert rows[0]["power_w"] == 350.0 and rows[0]["memory_total_bytes"] == 85899345920
        assert rows[0]["throttle"] == "" and rows[0]["nvlink_active"] == 18
        assert rows[0]["pcie_width"] is None  # the card reports none: not 0
        assert states[1]["ecc_uncorrected"] == states[1]["ecc_before"] == 3
        _, _, states, _ = watch(nvml.answers({}, {"nvmlDeviceGetTotalEccErrors": "4"}), by_index={"0": 4, "1": 5})
        assert (states[1]["ecc_before"], states[1]["ecc_uncorrected"]) == (3, 4)


def test_a_lost_card_costs_only_its_own_row(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch(nvml.answers({}, {}), by_index={"0": 0, "1": 1})
        _, rows, states, _ = watch("1.* E15\n" + nvml.answers({}, {}), by_index={"0": 0, "1": 1})
    assert [s["lost"] for s in states] == [False, True]
    assert rows[0]["utilization_pct"] == 97 and rows[1]["utilization_pct"] is None and rows[1]["rank"] == 1


def test_a_card_lost_before_the_run_leaves_the_others(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        answers = nvml.answers({}, {"nvmlDeviceGetHandleByIndex": "E15"})
        absent, rows, states, _ = watch(answers, by_index={"0": 0, "1": 1})
    assert absent is None and rows[0]["name"].startswith("NVIDIA H100") and [s["lost"] for s in states] == [False, True]


def test_mig_instances_are_rows_with_the_errors_of_their_card(tmp_path: Path) -> None:
    mig = {"nvmlDeviceGetMigMode": "1", "nvmlDeviceGetMaxMigDeviceCount": "7"}
    instances = "".join(
        f"0/{i}.nvmlDeviceGetUUID MIG-{i}\n0/{i}.nvmlDeviceGetMemoryInfo 10737418240 {i + 1}\n"
        f"0/{i}.nvmlDeviceGetComputeRunningProcesses {100 + i}\n"
        for i in (0, 2)
    )
    with Watch(tmp_path) as watch:
        _, rows, states, _ = watch(nvml.answers(mig, {}, extra=instances), by_pid={"100": 0, "102": 1}, samples=60)
    assert [r["uuid"] for r in rows] == ["MIG-0", "MIG-2", "GPU-1"] and [r["gpu"] for r in rows] == [0, 1, 2]
    assert [r["rank"] for r in rows] == [0, 1, None]
    assert [r["memory_used_bytes"] for r in rows[:2]] == [1, 3]
    assert (
        rows[0]["utilization_pct"] is None and states[0]["most_used_pct"] is None
    )  # NVML reports none: nothing is idle
    assert rows[0]["temperature_c"] == 41 and states[2]["most_used_pct"] == 97


def test_unified_memory_is_not_measured(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        _, rows, _, _ = watch(nvml.answers({"nvmlDeviceGetMemoryInfo": "", "nvmlDeviceGetName": "NVIDIA GB10"}))
    assert rows[0]["name"] == "NVIDIA GB10"
    assert rows[0]["memory_used_bytes"] is None and rows[0]["memory_total_bytes"] is None


def test_an_xid_reaches_the_state_once(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        assert watch(nvml.answers({}))[2][0]["xids"] == []
        assert watch(nvml.answers({}, extra="xid 0 79"), samples=3)[2][0]["xids"] == [79]


def test_nvlink_recoveries_and_lost_links_count_from_the_start(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        assert watch(nvml.answers({"field59": "7"}), samples=2)[2][0]["nvlink_recoveries"] == 0
        worse = watch(nvml.answers({"field59": "9", "nvmlDeviceGetNvLinkState": "18 17"}))[2][0]
        assert (worse["nvlink_recoveries"], worse["nvlink_before"], worse["nvlink_active"]) == (2, 18, 17)
    with Watch(tmp_path) as watch:  # NVLink 5 counts by link
        by_link = {"field59": "", "field215": "1", "nvmlDeviceGetNvLinkState": "2 2"}
        assert watch(nvml.answers(by_link), samples=2)[2][0]["nvlink_recoveries"] == 0
        assert watch(nvml.answers(by_link | {"field215": "3"}))[2][0]["nvlink_recoveries"] == 4


def test_calls_missing_in_an_old_driver_cost_only_their_columns(tmp_path: Path) -> None:
    with Watch(tmp_path, old_driver=True) as watch:
        absent, rows, states, _ = watch(nvml.answers({"nvmlDeviceGetCurrentClocksThrottleReasons": "0x40"}), samples=20)
    assert absent is None and rows[0]["throttle"] == "thermal (hardware)" and states[0]["throttled_share"] == 1.0
    assert rows[0]["processes"] is None and states[0]["xids"] == [] and rows[0]["utilization_pct"] == 97


def test_other_processes_on_a_card_are_counted_only_if_ours_are_listed(tmp_path: Path) -> None:
    running = {"nvmlDeviceGetComputeRunningProcesses": "7 8 9"}
    with Watch(tmp_path) as watch:
        _, rows, states, _ = watch(nvml.answers(running), by_pid={"8": 3})
        assert (rows[0]["processes"], rows[0]["rank"], states[0]["others"]) == (3, 3, 2)
        _, _, states, _ = watch(nvml.answers(running), by_pid={"4": 3})  # a container has its own process ids
        assert states[0]["others"] is None


def test_a_driver_that_hangs_does_not_hang_the_monitor(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch(nvml.answers({}))
        start = time.monotonic()
        hanging = nvml.answers({"nvmlDeviceGetTemperature": "S60000"})
        _, rows, _, silent_s = watch(hanging, wait_s=0.5)
        assert rows == [] and silent_s is not None and silent_s >= 0.4
        assert watch(hanging, wait_s=0.1)[3] > silent_s  # still the same request
        assert time.monotonic() - start < 30


def test_a_machine_without_a_driver_is_reported(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch.file.unlink(missing_ok=True)
        absent, rows, _, _ = watch("")
    assert absent is not None and "no NVIDIA driver" in absent and rows == []
