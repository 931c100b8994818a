"""`distdiag diagnose` on Kineto traces of all ranks, from any cluster."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from distdiag.cli import main
from distdiag.traces import text
from distdiag.traces.files import diagnose, find
from distdiag.traces.verdict import _by_chance
from tests.jobs import REPOSITORY
from tests.traces.test_traces import BASE_NS, op


def write_rank(folder: Path, rank: int, late_us: float = 0.0, clock_us: float = 0.0, name: str | None = None) -> Path:
    """Write four steps of 1,000 µs on a device; the rank begins its all-reduce `late_us` later, its clock is `clock_us` ahead."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        t = step * 1000.0 + clock_us
        named = {"Process Group Name": "0", "Collective name": "allreduce", "Seq": step, "In msg nelems": 1024}
        events += [
            op(f"ProfilerStep#{step + 5}", t, t + 1000, cat="user_annotation"),
            op("aten::mm", t, t + 100),
            op("gemm", t + 50, t + 350 + late_us, tid=7, cat="kernel"),
            op("ncclDevKernel_AllReduce", t + 350 + late_us, t + 900, tid=20, cat="kernel", dtype="Float", **named),
        ]
    path = folder / (name or f"host{rank}_pid.pt.trace.json.gz")
    content = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 3},
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
    }
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_the_late_rank_of_a_cluster_is_named_although_its_clocks_differ(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, clock_us=2_000_000.0)
    write_rank(tmp_path, 2, late_us=300.0, clock_us=-7_000.0)
    found = diagnose("traces", find([str(tmp_path)]))
    assert (found.first_step, found.steps, [r.rank for r in found.ranks]) == (5, 4, [0, 1, 2])
    assert found.verdict is not None
    assert found.verdict.startswith("rank 2 comes last")
    first, _, late = found.ranks
    assert (first.compute_ms, first.comm_ms, first.exposed_ms) == pytest.approx((0.3, 0.55, 0.55))
    assert (first.wait_ms, late.wait_ms) == pytest.approx((0.3, 0.0))
    assert late.compute_ms == pytest.approx(0.6)
    (reduce,) = found.collectives
    assert (reduce.skew_ms, reduce.transfer_ms) == pytest.approx((0.3, 0.25))
    assert (reduce.late_rank, reduce.per_step, reduce.bytes_per_step) == (2, 1.0, 4096.0)
    assert "clocks of ranks 1-2 were aligned" in found.notes[0]


def change(path: Path, **whole: Any) -> list[dict[str, Any]]:
    """Set keys of a trace file, and return its events."""
    found = json.loads(gzip.decompress(path.read_bytes())) | whole
    path.write_bytes(gzip.compress(json.dumps(found).encode()))
    return found["traceEvents"]


@pytest.mark.parametrize("clock_us", [-1_800.0, 300.0, 2_500.0])
def test_clocks_of_hosts_are_aligned_however_little_they_differ(tmp_path: Path, clock_us: float) -> None:
    for rank in range(4):
        change(write_rank(tmp_path, rank, rank * 2.0, clock_us if rank > 1 else 0.0), host_name=f"n{rank // 2}")
    found = diagnose("traces", find([str(tmp_path)]))
    assert [r.wait_ms for r in found.ranks] == pytest.approx([0.006, 0.004, 0.002, 0.0])
    assert found.verdict is not None and found.verdict.startswith("communication")
    assert "clocks of ranks 2-3 were aligned: all ranks leave a collective together" in found.notes
    assert "rank 3 (" not in "\n".join(text.lines(found))  # 6 of 550 µs are no lateness


@pytest.mark.parametrize(("late_end", "aligned"), [(900.0, False), (9_000.0, True)])
def test_ranks_of_one_host_have_one_clock_unless_two_hosts_have_its_name(
    tmp_path: Path, late_end: float, aligned: bool
) -> None:
    for rank in range(2):
        change(write_rank(tmp_path, rank, clock_us=rank * late_end), host_name="node")
    notes = diagnose("traces", find([str(tmp_path)])).notes
    assert any("were aligned" in x for x in notes) is aligned


def test_waits_for_a_host_whose_clock_is_not_known_are_not_shown(tmp_path: Path) -> None:
    """The collectives of its rank end now before, now after those of the others."""
    for rank in range(3):
        path = write_rank(tmp_path, rank, clock_us=rank * 500.0)
        events = change(path, host_name=f"host-{rank}")
        for nth, e in enumerate(x for x in events if rank == 2 and x["name"].startswith("nccl")):
            e["dur"] += (-200.0, 250.0)[nth % 2]
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert [r.wait_ms for r in found.ranks] == [None, None, None]
    assert found.verdict is None and not found.collectives
    assert "how long ranks 0-2 wait is not known: their clocks cannot be compared" in found.notes


def test_messages_between_hosts_without_a_collective_are_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        path = write_rank(tmp_path, rank, clock_us=rank * 40_000.0)
        events = change(path, host_name=f"host-{rank}")
        for e in (x for x in events if x["name"].startswith("nccl")):
            e["args"] |= {"Collective name": ("send", "recv")[rank], "Src Rank": 0, "Dst Rank": 1}
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert (found.verdict, found.collectives, found.critical_path) == (None, [], None)


def test_time_stamps_since_1970_are_read_and_ranks_without_a_trace_counted(tmp_path: Path) -> None:
    """Older versions of Kineto write no baseTimeNanoseconds, and users send traces of 2 of 128 ranks."""
    for rank in range(2):
        path = write_rank(tmp_path, rank, late_us=300.0 * rank)
        whole = json.loads(gzip.decompress(path.read_bytes()))
        del whole["baseTimeNanoseconds"]
        whole["distributedInfo"]["world_size"] = 128
        for e in whole["traceEvents"]:
            e["ts"] = 1_682_725_898_236_567 + round(e["ts"])
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    found = diagnose("traces", find([str(tmp_path)]))
    assert [round(r.compute_ms, 3) for r in found.ranks] == [0.3, 0.6]
    assert found.verdict is not None and found.verdict.startswith(
        "of the 2 ranks with a trace, of 128, rank 1 comes last"
    )
    assert "traces of 2 of 128 ranks" in "\n".join(found.notes)


def test_ranks_that_arrive_together_wait_for_communication(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank(tmp_path, rank, late_us=rank * 5.0)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict == (
        "communication that no computation hides takes at least 54 % of a step on every rank: 0.54 of 1.00 ms"
    )
    assert not found.missing


def test_most_of_a_step_hidden_is_no_verdict(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank(tmp_path, rank, late_us=350.0)
    assert diagnose("traces", find([str(tmp_path)])).verdict is None


def test_a_rank_that_is_last_in_some_steps_only_is_not_named(tmp_path: Path) -> None:
    """Of two ranks on a busy host one is the last in three of four steps by chance."""
    for rank in range(2):
        path = write_rank(tmp_path, rank, late_us=350.0)
        whole = json.loads(gzip.decompress(path.read_bytes()))
        late_steps = (0, 1, 3) if rank == 0 else (2,)
        for e in whole["traceEvents"]:
            if e["name"].startswith("nccl") and e["ts"] // 1000 in late_steps:
                e["ts"], e["dur"] = e["ts"] + 100.0, e["dur"] - 100.0
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    assert diagnose("traces", find([str(tmp_path)])).verdict is None


def test_a_rank_that_is_late_from_some_step_on_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        path = write_rank(tmp_path, rank, late_us=350.0)
        whole = json.loads(gzip.decompress(path.read_bytes()))
        for e in whole["traceEvents"]:
            if rank == 1 and e["name"].startswith("nccl") and e["ts"] >= 2000:
                e["ts"], e["dur"] = e["ts"] + 180.0, e["dur"] - 180.0
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    verdict = diagnose("traces", find([str(tmp_path)])).verdict
    assert verdict is not None and "rank 1 comes last to the collectives in 2 of 4 steps: others wait up to" in verdict


@pytest.mark.parametrize("loads", [False, True])
def test_a_late_rank_is_named_with_what_takes_it_longer(tmp_path: Path, loads: bool) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank, late_us=300.0 * (rank == 1))
        whole = json.loads(gzip.decompress(path.read_bytes()))
        slow = 300.0 if rank == 1 else 1.0
        for e in list(whole["traceEvents"]):
            if e["name"] == "gemm" and loads:
                e["ts"], e["dur"] = e["ts"] + slow, 300.0
            if e["name"].startswith("ProfilerStep") and loads:
                name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
                whole["traceEvents"].append(op(name, e["ts"], e["ts"] + slow, cat="user_annotation"))
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    found = diagnose("traces", find([str(tmp_path)]))
    why = "its data loader takes 0.30 ms per step" if loads else "it computes for 0.60 ms per step"
    assert found.verdict is not None and found.verdict.startswith("rank 1 comes last") and why in found.verdict
    assert found.advice is not None and ("num_workers=0" in found.advice) is loads


@pytest.mark.parametrize(
    ("more", "why"), [(False, "on average 2.00 times as long"), (True, "in 2.00 times as many kernels")]
)
def test_a_late_rank_runs_more_kernels_or_longer_ones(tmp_path: Path, more: bool, why: str) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank, late_us=300.0 * (rank == 1))
        whole = json.loads(gzip.decompress(path.read_bytes()))
        whole |= {"host_name": f"node-{rank}", "deviceProperties": [{"id": 5, "name": "Made-Up 9"}]}
        for e in whole["traceEvents"]:
            e["args"]["device"] = 5
        for e in [e for e in whole["traceEvents"] if e["name"] == "gemm" and more and rank == 1]:
            e["dur"] /= 2
            whole["traceEvents"].append(e | {"ts": e["ts"] + e["dur"]})
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and why in found.verdict
    assert found.advice is not None and ("a larger batch" if more else "node-1, GPU 5 (Made-Up 9)") in found.advice


@pytest.mark.parametrize(
    ("name", "host", "advice"),
    [
        ("aten::addmm", True, "find what slows the host of rank 1"),
        ("MyFunctionBackward", False, "see what rank 1 does inside these operators"),
        ("", False, "see what rank 1 does between its operators"),
    ],
)
def test_a_device_that_idles_inside_an_operator_waits_for_its_host(
    tmp_path: Path, name: str, host: bool, advice: str
) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in list(events):
            late = 300.0 if rank == 1 else 2.0
            if e["name"].startswith("nccl"):
                e["ts"], e["dur"] = e["ts"] + late, e["dur"] - late
                events.append(op(name, e["ts"] - late - 5, e["ts"])) if name else None
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and found.advice is not None and found.advice.startswith(advice)
    assert ("its host is slow in launching" in found.verdict) is host
    assert (f"inside operators: {name} takes 0.30 ms" in found.verdict) is bool(name)


@pytest.mark.parametrize("few", [False, True])
def test_a_device_is_slow_only_if_most_of_its_kernels_are(tmp_path: Path, few: bool) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank, late_us=300.0 * (rank == 1))
        events = change(path)
        for e in [e for e in events if e["name"] == "gemm"]:  # half of the time is in another kernel
            other = 150.0 if few else e["dur"] / 2
            e["dur"] -= other
            events.append(op("adam", e["ts"] + e["dur"], e["ts"] + e["dur"] + other, tid=7, cat="kernel"))
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and "on average 2.00 times as long" in found.verdict
    assert ("a slower device" in found.verdict) is not few
    assert ("most of it is in gemm, 3.00 times as long" in found.verdict) is few


def load_data(path: Path, waits: list[float], kind: str = "_MultiProcessing") -> None:
    """Let each step begin with a wait for data, in which nothing else runs; the collective ends as before."""
    events = change(path)
    steps = [e["ts"] for e in events if e["name"].startswith("ProfilerStep")]
    for e in [e for e in events if e["name"] in ("gemm", "aten::mm")]:
        e["ts"] += waits[round(e["ts"] // 1000)]
        e["dur"] = 50.0
    for e in [e for e in events if e["name"].startswith("nccl")]:
        wait = waits[round(e["ts"] // 1000)]
        e["ts"], e["dur"] = e["ts"] // 1000 * 1000 + 950.0, 40.0
        start = e["ts"] - 950
        assert start in steps and wait < 900
        events.append(
            op(f"enumerate(DataLoader)#{kind}DataLoaderIter.__next__", start, start + wait, cat="user_annotation")
        )
    change(path, traceEvents=events)


@pytest.mark.parametrize(
    ("waits", "verdict"),
    [
        ([500.0, 600.0, 700.0, 800.0], "every rank waits for data: at least 65 % of a step, 0.65 of 1.00 ms"),
        ([100.0, 800.0, 100.0, 800.0], "every rank waits for data: at least 45 % of a step, 0.45 of 1.00 ms"),
        ([200.0] * 4, None),
        ([850.0, 200.0, 200.0, 200.0], None),  # the first batch of an epoch
    ],
)
def test_waits_for_data_of_all_ranks_are_named(tmp_path: Path, waits: list[float], verdict: str | None) -> None:
    for rank in range(3):
        load_data(write_rank(tmp_path, rank), waits)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict == verdict or (verdict is None and "waits for data" not in found.verdict)
    if verdict is not None:
        assert found.advice is not None and found.advice.startswith("more workers (num_workers)")
        assert "data loading of rank" in "\n".join(text.lines(found))


def test_a_rank_that_waits_little_for_data_leaves_no_verdict_on_all(tmp_path: Path) -> None:
    for rank in range(3):
        load_data(write_rank(tmp_path, rank), [700.0 * (rank > 0)] * 4, "_SingleProcess")
    verdict = diagnose("traces", find([str(tmp_path)])).verdict
    assert verdict is None or "every rank" not in verdict


@pytest.mark.parametrize(("elements", "small"), [(1024, True), (1 << 20, False)])
def test_many_small_collectives_cost_their_latency(tmp_path: Path, elements: int, small: bool) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in [e for e in events if e["name"].startswith("nccl")]:
            events.remove(e)
            for nth in range(5):
                seq = {"Seq": e["args"]["Seq"] * 5 + nth, "In msg nelems": elements}
                events.append(e | {"ts": e["ts"] + 100 * nth, "dur": 99.0, "args": e["args"] | seq})
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and found.advice is not None
    assert ("most of it in 5 collectives a step of 4.0 KiB on average" in found.verdict) is small
    assert found.advice.startswith("put the tensors of a step into one" if small else "let computation hide it")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("allreduce", "let computation hide it"),
        ("_allgather_base", "FSDP: prefetch"),
        ("reduce_scatter_tensor_coalesced", "FSDP: prefetch"),
        ("all_to_allv", "let other work hide it"),
    ],
)
def test_the_operation_decides_how_communication_is_hidden(tmp_path: Path, name: str, advice: str) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in (e for e in events if e["name"].startswith("nccl")):
            e["args"] |= {"Collective name": name, "In msg nelems": 1 << 20}
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.advice is not None and found.advice.startswith(advice) and "`distdiag probe`" in found.advice


@pytest.mark.parametrize(
    ("syncs", "advice"), [(9, "keep the ranks from waiting"), (1, "the host launches work more slowly")]
)
def test_devices_that_idle_on_all_ranks_are_named(tmp_path: Path, syncs: int, advice: str) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in [e for e in events if e["name"].startswith("nccl")]:
            e["dur"] = 100.0
            for nth in range(syncs):
                events.append(
                    op("cudaStreamSynchronize", e["ts"] + 20 * nth, e["ts"] + 20 * nth + 1, cat="cuda_runtime")
                )
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and found.advice is not None
    assert found.verdict.startswith("every rank's device is idle for at least 60 % of a step, 0.60 of 1.00 ms")
    assert ("waits for it 9 times per step" in found.verdict) is (syncs == 9)
    assert found.advice.startswith(advice)


@pytest.mark.parametrize("pause", [False, True])
def test_a_late_ranks_part_of_the_step_and_its_waits_for_the_device_are_named(tmp_path: Path, pause: bool) -> None:
    """The device runs a kernel after each wait; or it has nothing to do for one long pause, and the waits are short."""
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in [e for e in events if e["name"].startswith(("nccl", "ProfilerStep"))]:
            begin = e["ts"] // 1000 * 1000
            if e["name"].startswith("nccl"):
                late = 300.0 if rank == 1 else 2.0
                e["ts"], e["dur"] = e["ts"] + late, e["dur"] - late
                for name in ("train", "Optimizer.step#Lion.step"):  # in a part of the user's own
                    events.append(op(name, begin + 345, begin + 350 + late, cat="user_annotation"))
                for nth in range(9 if rank == 1 else 1):
                    at = begin + 346 + 30 * nth
                    events.append(op("aten::item", at, at + 1))
                    events.append(op("cudaStreamSynchronize", at, at + 1, cat="cuda_runtime"))
                    events.append(op("tiny", at + 20, at + 20.01, tid=7, cat="kernel")) if not pause else None
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and found.advice is not None
    assert "ms of it in its Optimizer.step#Lion.step" in found.verdict
    waits = "; it waits for its device 9 times per step (median of the others: 1), 9 times in aten::item"
    assert (waits in found.verdict) is not pause
    assert ("map_location='cpu'" in found.advice) is not pause


@pytest.mark.parametrize(
    ("length", "why", "advice"),
    [
        (512, "as its inputs are larger: aten::embedding gets [4, 512], on rank 0 [4, 256]", "give rank 1 as much"),
        (256, "on inputs of the same shapes: a slower device (clocks, heat)", "compare the clocks"),
        (260, "a slower device (clocks, heat), or larger inputs", "compare the clocks"),
    ],
)
def test_shapes_decide_between_larger_inputs_and_a_slower_device(
    tmp_path: Path, length: int, why: str, advice: str
) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank, late_us=300.0 * (rank == 1))
        n = length if rank == 1 else 256
        events = change(path)
        for e in [e for e in events if e["name"] == "aten::mm"]:
            shapes = {"Input Dims": [[4 * n, 64], [64, 64], [], [[64, 64], [64]]]}
            e["args"] |= shapes
            e["ts"] += 5.0
            events.append(op("aten::embedding", e["ts"] - 4, e["ts"], **{"Input Dims": [[900, 64], [4, n], []]}))
            events.append(op("aten::odd", e["ts"], e["ts"] + 1, **{"Input Dims": [5, [-1], [1e9], "x", [[[[7]]]]]}))
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and why in found.verdict
    assert found.advice is not None and found.advice.startswith(advice)


def test_waits_for_ranks_without_a_trace_are_not_called_transfers(tmp_path: Path) -> None:
    for rank in range(2):
        path = write_rank(tmp_path, rank)
        whole = json.loads(gzip.decompress(path.read_bytes()))
        whole["distributedInfo"]["world_size"] = 7
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    found = diagnose("traces", find([str(tmp_path)]))
    assert (
        found.partial and found.verdict is not None and ", or waiting for the ranks without a trace," in found.verdict
    )
    assert (
        found.advice == "trace ranks 2-6, too: the late rank may be one of them" and "no transfer" not in found.verdict
    )
    shown = "\n".join(text.lines(found))
    assert "transfers, or waits for ranks without a trace" in shown and "transfer or wait ms" in shown
    assert "ranks 2-6: no profile" in shown


def test_what_the_training_process_loads_itself_is_no_computation(tmp_path: Path) -> None:
    """Only the host was traced; the operators of the loader run in the training thread, and two collectives wait at the same time."""
    for rank in range(2):
        load = 600.0 if rank else 10.0
        events = []
        for step in range(4):
            t = step * 1000.0
            events += [
                op(f"ProfilerStep#{step + 2}", t, t + 1000, cat="user_annotation"),
                op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t, t + load, cat="user_annotation"),
                op("aten::stft", t + 5, t + load - 5),
                op("aten::mm", t + load, t + load + 200),
                *(
                    op("gloo:all_reduce", t + load + 200 + n, t + 950 + n, tid=3 + n, cat="user_annotation")
                    for n in (0, 1)
                ),
            ]
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": 2},
            "baseTimeNanoseconds": BASE_NS,
        }
        (tmp_path / f"r{rank}.json").write_text(json.dumps(content | {"traceEvents": events}))
    found = diagnose("traces", find([str(tmp_path)]))
    first, late = found.ranks
    assert (first.compute_ms, late.compute_ms, late.data_ms) == pytest.approx((0.2, 0.2, 0.6))
    assert sum(r.compute_ms + r.exposed_ms + r.data_ms + r.idle_ms for r in found.ranks) == pytest.approx(2.0)
    assert "data loading of rank 1 0.60 (6" in "\n".join(text.lines(found))
    (reduce,) = found.collectives
    assert reduce.skew_ms == pytest.approx(0.591, abs=0.002)


def test_steps_that_only_some_ranks_recorded_are_a_note(tmp_path: Path) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        if rank == 1:
            whole = json.loads(gzip.decompress(path.read_bytes()))
            whole["traceEvents"] = [e for e in whole["traceEvents"] if e["ts"] < 3000]
            path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    notes = diagnose("traces", find([str(tmp_path)])).notes
    assert "rank 0 recorded 4 steps, rank 2 recorded 4 steps: only the 3 that all ranks recorded are analysed" in notes


def test_the_command_prints_tables_or_one_valid_object(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 2, late_us=300.0)
    (tmp_path / "rank_1.json").write_text('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{"ph": 7}]}')
    (tmp_path / "other.json").write_text('{"epochs": 3}')
    assert main(["diagnose", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("of the 2 ranks with a trace, of 3, rank 2 comes last")
    assert "rank 1: no profile: no usable trace" in shown
    assert "note: rank_1.json is no Kineto trace" in shown
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    jsonschema.validate(printed, json.loads((REPOSITORY / "docs" / "schemas" / "profile-1.json").read_text()))
    assert printed["schema"] == "distdiag.profile/1"


def test_a_failure_in_a_log_given_with_traces_comes_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_rank(tmp_path, 0)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK")
    (tmp_path / "train.log").write_text("epoch 1\nepoch 2\n")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "compute" in capfd.readouterr().out
    (tmp_path / "train.log").write_text(
        "[rank2]: Traceback (most recent call last):\n"
        '[rank2]:   File "/w/train.py", line 7, in <module>\n'
        "[rank2]:     main()\n"
        "[rank2]: ValueError: bad label\n"
    )
    assert main(["diagnose", str(tmp_path)]) == 1
    shown = capfd.readouterr().out
    assert "look at rank 2 first" in shown and "ValueError: bad label" in shown
    assert "note: 1 trace not analysed" in shown


@pytest.mark.parametrize(
    "text", ['{"traceEvents": []}', '{"traceEvents": {}}', '{"traceEvents": [' + '{"ph":"X"},' * 9]
)
def test_traces_without_content_are_an_error_of_two_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "rank_0.json").write_text(text)
    assert main(["diagnose", str(tmp_path)]) == 2
    error = capfd.readouterr().err.splitlines()
    assert error[0].startswith("distdiag: error: rank_0.json")
    assert error[1].startswith("hint: ")


def test_a_file_that_unpacks_to_too_much_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distdiag.traces.read.MAX_FILE_BYTES", 100_000)
    write_rank(tmp_path, 0)
    big = b'{"traceEvents": [' + b" " * 200_000 + b"]}"
    (tmp_path / "rank_1.json.gz").write_bytes(gzip.compress(big))
    found = diagnose("traces", find([str(tmp_path)]))
    assert [r.rank for r in found.ranks] == [0]
    assert any("rank_1.json.gz is larger than" in n for n in found.notes)


def test_a_trace_of_torch_profiler_is_read(tmp_path: Path) -> None:
    import torch

    def export(prof: torch.profiler.profile) -> None:
        prof.export_chrome_trace(str(tmp_path / "rank0.json"))

    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=export) as prof:
        for _ in range(4):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64)).relu()
            prof.step()
    found = diagnose("traces", find([str(tmp_path)]))
    (r,) = found.ranks
    assert found.steps == 3
    assert 0 < r.compute_ms <= r.step_ms
    assert {"aten::mm", "aten::relu"} <= {o.name for o in r.operators}
    assert (r.wait_ms, found.verdict) == (None, None)


@pytest.mark.parametrize(
    ("led", "steps", "ranks", "chance"), [(5, 6, 2, True), (9, 10, 2, False), (5, 6, 8, False), (2, 2, 2, False)]
)
def test_of_two_ranks_one_comes_last_in_most_of_few_steps_by_chance(
    led: int, steps: int, ranks: int, chance: bool
) -> None:
    assert _by_chance(led, steps, ranks) is chance


def test_the_function_in_which_a_late_rank_loads_its_data_is_named(tmp_path: Path) -> None:
    """By with_stack=True: the innermost one of the user's that takes longer there, not what calls it, nor a package's."""
    for rank in range(3):
        path = write_rank(tmp_path, rank, late_us=300.0 * (rank == 1))
        events, slow = change(path), 300.0 if rank == 1 else 20.0
        for e in [e for e in events if e["name"] == "gemm" or e["name"].startswith("ProfilerStep")]:
            if e["name"] == "gemm":
                e["ts"], e["dur"] = e["ts"] + slow, 300.0
                continue
            events.append(
                op("enumerate(DataLoader)#_SingleProcessDataLoaderIter", e["ts"], e["ts"] + slow, cat="user_annotation")
            )
            for name, less in (
                ("asr.py(98): main", -650.0),
                ("asr.py(57): get", 1.0),
                ("asr.py(27): read", 9.0),
                ("numpy/io.py(3): load", 10.0),
            ):
                events.append(op(name, e["ts"], e["ts"] + slow - less, cat="python_function"))
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.verdict is not None and found.verdict.endswith("0.29 ms of it in asr.py:27 read")


@pytest.mark.parametrize("forwards", [1, 2])
def test_backwards_that_each_reduce_are_advised_no_sync_first(tmp_path: Path, forwards: int) -> None:
    for rank in range(3):
        path = write_rank(tmp_path, rank)
        events = change(path)
        for e in [e for e in events if e["name"].startswith(("nccl", "ProfilerStep"))]:
            if e["name"].startswith("nccl"):
                half = e["dur"] / 2
                events.append(
                    e | {"ts": e["ts"] + half, "dur": half, "args": e["args"] | {"Seq": e["args"]["Seq"] + 100}}
                )
                e["dur"] = half
            else:
                events += [
                    op("DistributedDataParallel.forward", e["ts"] + n, e["ts"] + n + 1, cat="user_annotation")
                    for n in range(forwards)
                ]
        change(path, traceEvents=events)
    found = diagnose("traces", find([str(tmp_path)]))
    assert found.advice is not None and found.advice.startswith("a step has 2 forwards of DDP") is (forwards == 2)
