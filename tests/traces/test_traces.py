"""Kineto traces of several ranks: times per rank, collectives joined across ranks, one merged trace; damaged input."""

from __future__ import annotations

import gc
import gzip
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distdiag.traces import merge, text
from distdiag.traces.analyse import Issued
from distdiag.traces.intervals import Coverage, length, union, without
from distdiag.traces.profile import Recorded, profile_of
from distdiag.traces.read import BadTrace, Trace, parse, read
from tests.jobs import unwrapped

BASE_NS = 1_790_000_000_000_000_000


def op(name: str, start: float, end: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def trace_file(*events: dict[str, Any], base_ns: int = BASE_NS) -> bytes:
    return json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}).encode()


def two_ranks(late_us: float = 300.0) -> dict[int, Recorded]:
    """Return two steps of 1,000 µs; rank 1 spends `late_us` more of each on its own line before the all_reduce."""
    out = {}
    for rank, base_ns in ((0, BASE_NS), (1, BASE_NS + 5_000_000)):  # its trace begins 5,000 µs later
        shift = -(base_ns - BASE_NS) / 1e3
        events, entries = [], []
        for step in range(2):
            t = step * 1000 + shift
            sleeps = late_us if rank == 1 else 0.0
            events += [
                op("aten::conv", t, t + 200),
                op("aten::mm", t + 50, t + 150),
                op("c10d::allreduce_", t + 200 + sleeps, t + 210 + sleeps),
                op("gloo:all_reduce", t + 205 + sleeps, t + 700, tid=2, cat="user_annotation"),
                op("aten::add_", t + 600, t + 900),
            ]
            created = BASE_NS + int((step * 1000 + 204 + sleeps) * 1000)
            entries.append(Issued("all_reduce", "0", 40 + step, created, 4096))
        trace = parse(trace_file(*events, base_ns=base_ns))
        ends = [(9 + i, BASE_NS + i * 1_000_000) for i in range(3)]
        lines = [("/w/train.py", 12, "main", 60)] + ([("/w/slow.py", 3, "sleeps", 40)] if rank else [])
        out[rank] = Recorded(trace, ends, entries, lines, samples=100, measured={"rss_peak_bytes": 1 << 20})
    return out


def test_interval_arithmetic() -> None:
    spans = union([(5, 9), (0, 2), (1, 3), (8, 20)], 1, 10)
    assert spans == [(1, 3), (5, 10)]
    assert without(spans, [(2, 6), (7, 8)]) == [(1, 2), (6, 7), (8, 10)]
    assert length(spans) == 7


def test_ranks_of_one_host_share_a_clock() -> None:
    """On one host, collectives with different ends were noticed late; the clocks are equal."""
    ranks = two_ranks()
    for c in ranks[1].trace.comms:
        c.end += 9_000.0
    for step in range(2):  # three collectives would be enough for different clocks
        ranks[0].trace.comms.append(replace(ranks[0].trace.comms[step], seq=None))
        ranks[1].trace.comms.append(replace(ranks[1].trace.comms[step], seq=None))
    assert profile_of("run", 1, ranks, [], None, same_clock=True)[0].notes == []


def test_each_ranks_time_and_its_wait_for_the_late_rank_are_computed() -> None:
    profile, collectives, _ = profile_of("run", 1, two_ranks(), [], None)
    assert (profile.first_step, profile.steps) == (10, 2)
    early, late = profile.ranks
    assert early.step_ms == pytest.approx(1.0)
    assert early.compute_ms == pytest.approx(0.5)  # conv and add_; mm is inside conv
    assert early.comm_ms == pytest.approx(0.495)
    assert early.overlap_ms == pytest.approx(0.1)
    assert early.exposed_ms == pytest.approx(0.395)
    assert early.wait_ms == pytest.approx(0.3)
    assert early.idle_ms == pytest.approx(1.0 - 0.5 - 0.395)
    assert (late.wait_ms, late.idle_ms) == (0.0, pytest.approx(0.405))
    assert {o.name: round(o.self_ms, 3) for o in early.operators}["aten::conv"] == 0.1
    assert sorted(key[:2] for key in collectives) == [("0", 40), ("0", 41)]
    (reduce,) = profile.collectives
    assert (reduce.late_rank, reduce.late_share, reduce.bytes_per_step) == (1, 1.0, 4096)
    assert (reduce.skew_ms, reduce.transfer_ms) == (pytest.approx(0.3), pytest.approx(0.195))


def test_the_critical_path_goes_through_the_last_rank_to_arrive() -> None:
    profile, *_ = profile_of("run", 1, two_ranks(), [], None)
    path = profile.critical_path
    assert path is not None and path.step_ms == pytest.approx(1.0)
    # each step: rank 1 until it comes at 505, the transfer until rank 0 has work again at 600; the last 400 are those of rank 0
    assert path.transfer_ms == pytest.approx(0.095)
    assert {r.rank: (r.compute_ms, r.idle_ms) for r in path.ranks} == {
        0: (pytest.approx(0.15), pytest.approx(0.05)), 1: (pytest.approx(0.35), pytest.approx(0.355))
    }  # fmt: skip
    shown = unwrapped("\n".join(text.lines(profile)))
    assert "critical path, 1.00 ms per step: rank 1 idle 0.35 (36 %), compute of rank 1 0.35 (35 %)" in shown


def test_the_advice_begins_with_the_line_that_takes_the_late_rank_longer() -> None:
    ranks = two_ranks()
    advice = profile_of("R", 0, ranks, (), None)[0].advice or ""
    assert advice.startswith("begin with slow.py:3 sleeps: 0.40 ms per step (median of the others: 0.00 ms); "), advice
    ranks = two_ranks()
    ranks[1].lines[1] = (*ranks[1].lines[1][:3], 2)
    assert "slow.py" not in (profile_of("R", 0, ranks, (), None)[0].advice or ""), "two samples are chance"


def test_communication_that_compute_hides_is_not_on_the_critical_path() -> None:
    ranks = {}
    for rank in (0, 1):
        named = {"Process Group Name": "0", "Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}
        kernels = [
            op("gemm", 0, 400, tid=7, cat="kernel"),
            op("ncclDevKernel_AllReduce", 100, 300, tid=20, cat="kernel", Seq=1, **named),
            op("ncclDevKernel_AllReduce", 300, 500, tid=20, cat="kernel", Seq=2, **named),  # queued
            op("ncclDevKernel_AllReduce", 520, 700, tid=20, cat="kernel", Seq=3, **named),
            op("gemm", 505, 530, tid=7, cat="kernel"),
            op("adam", 700, 1000, tid=7, cat="kernel"),
        ]
        ranks[rank] = Recorded(parse(trace_file(*kernels)), [(0, BASE_NS), (1, BASE_NS + 1_000_000)])
    path = profile_of("run", 1, ranks, [], None)[0].critical_path
    assert path is not None
    # backwards from 1000: adam, the third transfer until 520, compute since 505, the second and (queued) the first transfer until 100
    assert path.transfer_ms == pytest.approx(0.180 + 0.200 + 0.2)
    assert sum(r.compute_ms for r in path.ranks) == pytest.approx(0.300 + 0.015 + 0.1)


def test_the_communication_of_fsdp_is_shown_by_module() -> None:
    gather = {"Process Group Name": "0", "Collective name": "_allgather_base", "In msg nelems": 8, "dtype": "Float"}
    mark = "gpu_user_annotation"
    trace = parse(
        trace_file(
            op("FSDP::all_gather (layers.0)", 0, 205, tid=20, cat=mark),
            op("ncclDevKernel_AllGather", 5, 200, tid=20, cat="kernel", Seq=1, **gather),
            op("FSDP::pre_backward (layers.1)", 290, 520, tid=20, cat=mark),
            op("FSDP::all_gather (layers.1)", 300, 510, tid=20, cat=mark),
            op("ncclDevKernel_AllGather", 305, 500, tid=20, cat="kernel", Seq=2, **gather),
            op("FSDP::all_gather", 600, 705, tid=20, cat=mark),
            op("ncclDevKernel_AllGather", 605, 700, tid=20, cat="kernel", Seq=3, **gather),
            op("ncclDevKernel_AllReduce", 800, 900, tid=20, cat="kernel", Seq=4, **gather),
            op("gemm", 0, 180, tid=7, cat="kernel"),
        )
    )
    profile, *_ = profile_of("run", 1, {0: Recorded(trace, [(0, BASE_NS), (1, BASE_NS + 1_000_000)])}, [], None)
    found = [(m.module, m.per_step, round(m.comm_ms, 3), round(m.exposed_ms, 3)) for m in profile.modules]
    assert found == [("layers.1", 1, 0.195, 0.195), ("(root)", 1, 0.095, 0.095), ("layers.0", 1, 0.195, 0.02)]
    assert "layers.1" in "\n".join(text.lines(profile))


def test_collectives_on_gloos_threads_belong_to_the_module_that_issued_them() -> None:
    mark = "user_annotation"
    seventh: dict[str, Any] = {"Sequence number": 7}
    inner = [op(f"module: block.{i}", 10 * i, 10 * i + 5, cat=mark) for i in range(30)]  # many that are over already
    trace = parse(
        trace_file(
            op("module: block", 0, 900, cat=mark),
            *inner,
            op("module: block.down", 400, 450, cat=mark),
            op("aten::mm", 410, 420, **seventh),
            op("c10d::allreduce_", 440, 445),
            op("gloo:all_reduce", 500, 600, tid=9, cat=mark),  # its thread was late
            op("c10d::_allgather_base_", 700, 710),
            op("gloo:_all_gather_base", 702, 800, tid=8, cat=mark),
            op("autograd::engine::evaluate_function: MmBackward0", 1000, 1100, tid=3, **seventh),
            op("c10d::allreduce_", 1050, 1060, tid=3),
            op("gloo:all_reduce", 1200, 1300, tid=9, cat=mark),
            op("gloo:barrier", 1400, 1500, tid=9, cat=mark),
        )
    )
    assert [c.module for c in trace.comms] == ["block.down", "block", "block.down", None]


def test_the_comparison_shows_the_culprits_extra_work() -> None:
    profile, *_ = profile_of("run", 1, two_ranks(), [], (1, 0, "most self time"))
    assert profile.comparison is not None
    more = {d.name: d.culprit_ms - d.peer_ms for d in profile.comparison.rows}
    assert more["idle"] == pytest.approx(0.3)
    assert more["slow.py:3 sleeps"] == pytest.approx(0.4)
    assert more["waiting"] + more["communication"] == pytest.approx(-0.3)
    assert sum(d.culprit_ms - d.peer_ms for d in profile.comparison.rows if d.kind == "time") == pytest.approx(0.0)
    assert all(d.culprit_ms > d.peer_ms for d in profile.comparison.rows if d.kind != "time")
    shown = "\n".join(text.lines(profile))
    assert "rank 1 (most self time) compared with rank 0" in shown
    assert "slow.py:3 sleeps" in shown


def test_only_steps_that_all_ranks_recorded_are_analysed() -> None:
    ranks = two_ranks()
    ranks[1].boundaries = ranks[1].boundaries[1:]
    profile, *_ = profile_of("run", 1, ranks, [], None)
    assert (profile.first_step, profile.steps) == (11, 1)
    ranks[1].boundaries = [(500, BASE_NS), (501, BASE_NS + 1000)]
    profile, *_ = profile_of("run", 1, ranks, [], None)
    assert not profile.ranks
    assert [m.rank for m in profile.missing] == [0, 1]


def test_without_a_flight_recorder_collectives_are_joined_by_their_order_if_the_counts_agree() -> None:
    ranks = two_ranks()
    for r in ranks.values():
        r.entries = ()
    profile, collectives, _ = profile_of("run", 1, ranks, [], None)
    assert len(collectives) == 2
    assert profile.ranks[0].wait_ms == pytest.approx(0.3)
    ranks[1].trace.comms.pop()
    profile, collectives, _ = profile_of("run", 1, ranks, [], None)
    assert not collectives
    assert profile.ranks[0].wait_ms is None  # not known


def test_on_a_device_kernels_count_and_the_collectives_name_their_group() -> None:
    named = {"Process Group Name": "0", "Collective name": "allreduce", "Seq": 3, "In msg nelems": 8, "dtype": "Float"}
    trace = parse(
        trace_file(
            op("aten::mm", 0, 900),
            op("gemm", 100, 400, tid=7, cat="kernel"),
            op("ncclDevKernel_AllReduce_Sum_f32", 300, 600, tid=20, cat="kernel", **named),
            op("nccl:all_reduce", 0, 50, cat="user_annotation"),
        )
    )
    ends = [(0, BASE_NS), (1, BASE_NS + 1_000_000)]
    profile, *_ = profile_of("run", 1, {0: Recorded(trace, ends)}, [], None)
    (r,) = profile.ranks
    assert (r.compute_ms, r.comm_ms, r.overlap_ms, r.exposed_ms) == pytest.approx((0.3, 0.3, 0.1, 0.2))
    (comm,) = trace.comms
    assert (comm.op, comm.group, comm.seq, comm.bytes) == ("allreduce", "0", 3, 32)


def test_the_merged_trace_has_a_process_per_rank_and_arrows_from_the_late_one(tmp_path: Path) -> None:
    ranks, files = two_ranks(), {}
    for rank in ranks:
        files[rank] = tmp_path / f"rank_{rank}.json"
        files[rank].write_bytes(
            trace_file(
                op("aten::conv", 0.0, 10.0),
                {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
                {"ph": "s", "id": 1, "pid": 7, "tid": 1, "ts": 1, "name": "fwdbwd", "cat": "fwdbwd"},
            )
        )
    _, collectives, offsets = profile_of("run", 1, ranks, [], None)
    merge.write(tmp_path / "trace.json.gz", files, offsets, {0: "rank 0", 1: "rank 1 \x1b[31m"}, collectives)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {e["pid"] for e in events} == {100, 101}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1 \\x1b[31m"]
    conv = {e["pid"]: e["ts"] for e in events if e["name"] == "aten::conv"}
    assert conv[101] - conv[100] == 5000.0  # one clock
    assert {e["id"] for e in events if e.get("cat") == "fwdbwd"} == {"0.1", "1.1"}
    arrows = [e for e in events if e.get("cat") == "join"]
    assert [(e["ph"], e["pid"]) for e in arrows] == [("s", 101), ("f", 100)] * 2
    slices = [e for e in events if e.get("cat") == "collective"]
    assert {e["name"] for e in slices} == {"all_reduce #40", "all_reduce #41"}
    for start, end in zip(arrows[::2], arrows[1::2], strict=True):
        assert start["id"] == end["id"]
        assert start["ts"] <= end["ts"]


def pipeline(lost: int = 0) -> dict[int, Recorded]:
    """Return two steps of 1,000 µs of two stages, two messages a step: rank 0 works for 300 µs before each.

    Rank 0 is a message ahead when the recording begins. The first `lost` calls of rank 1 are not in its page any more.
    """
    note, ends = "user_annotation", [(9 + i, BASE_NS + i * 1_000_000) for i in range(3)]
    sent, received, sends, recvs = [], [], [], []
    for nth in range(4):
        t = nth * 500.0
        sent += [op("aten::mm", t, t + 300), op("gloo:send", t + 305, t + 330, cat=note)]
        received += [op("gloo:recv", t + 100, t + 320, cat=note), op("aten::mm", t + 320, t + 450)]
        sends.append(Issued("send", "0", 8 + nth, BASE_NS + int((t + 303) * 1e3), 4096, "0->1"))
        recvs.append(Issued("recv", "0", 8 + nth, BASE_NS + int((t + 98) * 1e3), 4096, "0->1"))
    return {
        0: Recorded(parse(trace_file(*sent)), ends, messages=sends),
        1: Recorded(parse(trace_file(*received)), [(n, ns + 10_000) for n, ns in ends], messages=recvs[lost:]),
    }


def test_messages_are_joined_and_on_the_critical_path(tmp_path: Path) -> None:
    ranks = pipeline()
    profile, messages, offsets = profile_of("run", 1, ranks, [], None, same_clock=True)
    assert sorted(messages) == [("0", 8 + nth, "send 0->1") for nth in range(4)]
    (row,) = profile.collectives
    assert (row.op, row.per_step, row.bytes_per_step, row.late_rank) == ("send 0->1", 2, 8192, 0)
    assert profile.ranks[1].wait_ms == pytest.approx(2 * 0.205)  # from its recv to the send
    path = profile.critical_path
    assert path is not None
    by_rank = {r.rank: r for r in path.ranks}
    assert by_rank[0].compute_ms == pytest.approx(4 * 0.3 / 2)  # each message waits for the first stage
    assert by_rank[1].compute_ms == pytest.approx(0.13 / 2)  # its last work only
    assert profile.verdict is None  # a stage waits for the one before it by design
    files = {}
    for rank in ranks:
        files[rank] = tmp_path / f"rank_{rank}.json"
        files[rank].write_bytes(trace_file(op("aten::mm", 0, 1)))
    merge.write(tmp_path / "trace.json.gz", files, offsets, {}, messages)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "message"} == {f"send 0->1 #{8 + nth}" for nth in range(4)}
    assert [(e["ph"], e["pid"]) for e in events if e.get("cat") == "join"] == [("s", 100), ("f", 101)] * 4


def test_a_message_whose_call_is_not_known_is_not_joined_with_another() -> None:
    _, messages, _ = profile_of("run", 1, pipeline(lost=2), [], None, same_clock=True)
    assert sorted(messages) == [("0", 10, "send 0->1"), ("0", 11, "send 0->1")]
    ranks = pipeline()
    for r in ranks.values():
        r.messages = ()
    profile, messages, _ = profile_of("run", 1, ranks, [], None, same_clock=True)
    assert (messages, profile.critical_path) == ({}, None)


def test_messages_of_a_device_are_joined_by_the_ranks_in_their_events() -> None:
    ranks = {}
    for rank, name in enumerate(("send", "recv")):
        ends = {"Collective name": name, "Src Rank": 0, "Dst Rank": 1, "Seq": 5 + rank, "Process Group Name": "pp"}
        trace = parse(
            trace_file(
                op("gemm", 0, 100, cat="kernel"),
                op("ncclDevKernel_SendRecv", 200 - 50 * rank, 300, tid=9, cat="kernel", **ends),
            )
        )
        ranks[rank] = Recorded(trace, [(0, BASE_NS), (1, BASE_NS + 1_000_000)])
    _, messages, _ = profile_of("run", 1, ranks, [], None)
    assert [(key, sorted(of_rank)) for key, of_rank in messages.items()] == [(("pp", -1, "send 0->1"), [0, 1])]


@pytest.mark.parametrize("known", [False, True])
def test_the_stage_that_gets_its_gradients_last_is_not_late(known: bool) -> None:
    """The first stage of a pipeline waits for the others as long as they for it, and then comes last to the all_reduce."""
    forward, backward = ({"Src Rank": a, "Dst Rank": 1 - a} if known else {} for a in (0, 1))
    stages = (
        [("gemm", 0, 250, {}), ("send", 250, 255, forward), ("recv", 255, 760, backward), ("gemm", 760, 1000, {}), ("allreduce", 1000, 1010, {"Seq": 3})],
        [("recv", 0, 255, forward), ("gemm", 255, 755, {}), ("send", 755, 760, backward), ("allreduce", 760, 1010, {"Seq": 3})],
    )  # fmt: skip
    ranks = {}
    for rank, kernels in enumerate(stages):
        events = [
            op(name, start, end, cat="kernel")
            if name == "gemm"
            else op(
                "ncclDevKernel", start, end, 9, "kernel", **{"Collective name": name, "Process Group Name": "0", **more}
            )
            for name, start, end, more in kernels
        ]
        ranks[rank] = Recorded(parse(trace_file(*events)), [(3, BASE_NS), (4, BASE_NS + 1_010_000)])
    profile, *_ = profile_of("run", 1, ranks, [], None, same_clock=True)
    assert next(c.late_rank for c in profile.collectives if c.op == "allreduce") == 0
    assert profile.verdict is None or "comes last" not in profile.verdict
    path = profile.critical_path
    assert path is not None
    assert sum(r.idle_ms for r in path.ranks) == pytest.approx(0.0)
    assert sum(r.unmatched_ms for r in path.ranks) == pytest.approx(0.0 if known else 0.51)
    assert ("unmatched communication of rank 0" in text.path_text(path)) is not known


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [{"ph": 5}]}',
        b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}',
        b'{"traceEvents": [{"args": []}]}',
        b'{"traceEvents": ' + b"[" * 50_000,
        trace_file(op("aten::mm", 0, 1))[:-9],
        b"\xff" * 40,
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rank_0.json"
    path.write_bytes(data)
    with pytest.raises(BadTrace):
        read(path)


def test_hostile_values_are_left_out() -> None:
    found: Trace = parse(
        trace_file(
            op("aten::mm", 0, 1),
            op("aten::mm", 1e300, 1e301),
            op("aten::mm", 5, 4),
            op("nccl:x", 1, 2, cat="user_annotation", Seq="many", **{"Process Group Name": {"a": 1}, "dtype": [1]}),
            op("ProfilerStep#" + "9" * 4000, 0, 1, cat="user_annotation"),
            base_ns=-5,
        )
    )
    assert (len(found.ops), found.base_ns, found.marks) == (1, 0, [])
    (comm,) = found.comms
    assert (comm.seq, comm.group, comm.bytes) == (None, None, None)


def overlapping(count: int, rank: int) -> Recorded:
    """Return a trace in which everything overlaps: modules, their forwards and backwards, collectives, messages, compute."""
    events = [op("gemm", i * 10.0, i * 10 + 5, tid=7, cat="kernel") for i in range(count)]
    end = count * 10.0 + 1
    for i in range(count):
        t = i * 10.0
        named = {"Process Group Name": "0", "Collective name": "allreduce", "Seq": i}
        events += [
            op(f"module: m{i}", t, end, cat="user_annotation"),
            op("aten::mm", t + 1, t + 2, **{"Sequence number": i}),
            op("autograd::engine::evaluate_function: Mm", t + 3, end, **{"Sequence number": i}),
            op("c10d::allreduce_", t + 4, t + 5),
            op("ncclDevKernel_AllReduce", t + 4 + rank, end, tid=20, cat="kernel", dtype="Float", **named),
        ]
    return Recorded(parse(trace_file(*events)), [(0, BASE_NS), (1, BASE_NS + int(end * 1000))])


def few_modules(count: int, rank: int) -> Recorded:
    """Return a trace of two modules, each with half of the collectives, which overlap with compute."""
    end = count * 10.0 + 1
    events = [op(f"module: m{half}", half * end / 2, (half + 1) * end / 2, cat="user_annotation") for half in range(2)]
    for i in range(count):
        t = i * 10.0
        named = {"Process Group Name": "0", "Collective name": "allreduce", "Seq": i}
        events += [
            op("gemm", t, t + 5, tid=7, cat="kernel"),
            op("c10d::allreduce_", t + 4, t + 4.5),
            op("ncclDevKernel_AllReduce", t + 4 + rank, t + 7, tid=20, cat="kernel", dtype="Float", **named),
        ]
    return Recorded(parse(trace_file(*events)), [(0, BASE_NS), (1, BASE_NS + int(end * 1000))])


@pytest.mark.parametrize("trace", [overlapping, few_modules])
def test_an_analysis_takes_n_log_n(trace: Callable[[int, int], Recorded]) -> None:
    """A linear search per module shows in many modules that overlap, one per interval in few modules of many intervals."""
    took: dict[int, list[float]] = {1000: [], 8000: []}
    for count in (1000, 8000, 1000, 8000, 1000):
        recorded = {rank: trace(count, rank) for rank in range(2)}
        gc.disable()  # a full collection goes through what all other tests have left, too
        try:
            began = time.process_time()
            profile, *_ = profile_of("run", 1, recorded, [], None)
            took[count].append(time.process_time() - began)
        finally:
            gc.enable()
        assert len(profile.modules) == (count if trace is overlapping else 2) and profile.critical_path is not None
    assert min(took[8000]) < 24 * max(took[1000])  # n² would be 64; a busy machine makes caches cold and clocks slow


def test_coverage_is_the_length_of_the_intersection() -> None:
    rng = random.Random(1)
    for _ in range(200):
        spans = union(((a := rng.randrange(40), a + rng.randrange(6)) for _ in range(rng.randrange(8))), 0, 50)
        low = rng.randrange(-5, 50)
        high = low + rng.randrange(20)
        assert Coverage(spans).within(low, high) == length(union(spans, low, high))
