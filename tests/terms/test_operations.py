"""One table of operations: names, and one bus bandwidth in the report, on the screen and against a probe."""

from __future__ import annotations

import json
import sqlite3
import textwrap
from pathlib import Path

import pytest

from distdiag.probekit.command.catalog import PROBES
from distdiag.probekit.command.running_job import job_collectives
from distdiag.report.facts import read_facts
from distdiag.store.frames import RankRow
from distdiag.store.reader import open_run
from distdiag.store.rows import CollectiveRow, GroupRow
from distdiag.store.writer import Writer
from distdiag.terms.operations import OPERATIONS, bus_bandwidth, family, message_bytes, op_name
from distdiag.tui.data import comm_data
from distdiag.tui.data.comm_data import probe_for
from distdiag.tui.data.snapshot import Request
from tests.jobs import closed, launch, rows

PART, RANKS, TIME_US = 1 << 20, 4, 1000.0


@pytest.mark.parametrize(
    ("op", "sizes", "factor"),
    [
        ("all_gather", RANKS, 3 / 4),
        ("all_gather_into_tensor", RANKS, 3 / 4),
        ("reduce_scatter_tensor", 1, 3 / 4),
        ("all_to_all_single", 1, 3 / 4),
        ("gather", RANKS, 3 / 4),
        ("all_reduce", 1, 3 / 2),
        ("broadcast", 1, 1.0),
    ],
)
def test_every_reader_has_one_bus_bandwidth(tmp_path: Path, op: str, sizes: int, factor: float) -> None:
    """GIVEN a probe and the job's own collectives of the same size and time, THEN all reach the same bandwidth."""
    operation = family(op)
    assert operation is not None
    reached = PART * sizes / TIME_US / 1e3 * factor
    probed = {"rows": [{"bytes": PART * sizes, "busbw_gbps": reached}]}
    with Writer(tmp_path / "run") as w:
        w.frame(9.0, "running", "", [RankRow(rank=rank, step=4) for rank in range(RANKS)])
        w.groups([GroupRow(name="default_pg", ranks=tuple(range(RANKS)), backend="gloo")])
        w.add(
            [
                CollectiveRow(pgroup="default_pg", seq=i, op=op, bytes=PART, ranks=RANKS, t_s=i / 10, duration_us=TIME_US,
                              skew_us=10.0, late_rank=1, step=i)
                for i in range(1, 5)
            ]
        )  # fmt: skip
    with sqlite3.connect(tmp_path / "run/run.db") as con:
        con.execute("INSERT INTO probe VALUES (?, ?, ?, ?)", (1.0, operation.probe, "pass", json.dumps(probed)))
        own = job_collectives(con, operation.probe)
    con.close()
    with open_run(tmp_path / "run") as run:
        frame = run.latest_frame()
        assert frame is not None
        comm = comm_data.read(run, Request(), frame, {})
        (shown,), (reported,) = comm.ops, read_facts(run).collectives
    assert own is not None and own["op"] == operation.name
    assert own["busbw_gbps"] == pytest.approx(reached)
    assert shown.busbw_gbps == pytest.approx(reached) and reported.busbw_gbps == pytest.approx(reached)
    assert probe_for(comm, shown) == pytest.approx(reached), "compared with the probe of this size"


def test_every_name_belongs_to_one_operation() -> None:
    names = [name for o in OPERATIONS for form in o.forms.split() for name in form.replace("=", ",").split(",")]
    assert len(names) == len(set(names))
    assert {o.probe for o in OPERATIONS if o.factor} - {"send", "recv"} <= set(PROBES)
    assert all(bus_bandwidth(name, 8, 1e-6, 2) > 0 for o in OPERATIONS if o.factor for name in (o.name, o.probe))
    assert op_name("nccl:_all_gather_base") == "all_gather_into_tensor" and op_name("gloo:new_op") == "new_op"
    assert op_name("nccl:gather_into_tensor") == op_name("gather_single") == "gather"  # of torch 2.15
    assert family("new_op") is None and message_bytes("all_gather", 8, None) is None


@pytest.mark.job
def test_the_recorder_keeps_the_bytes_that_the_table_assumes(tmp_path: Path) -> None:
    """GIVEN 4 KiB of every rank for every rank in each operation, THEN S is 8 KiB on two ranks; of whole buffers, 4 KiB."""
    script = tmp_path / "ops.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        part, whole, rank = torch.ones(1024), torch.ones(2048), dist.get_rank()
        dist.all_gather([torch.ones(1024), torch.ones(1024)], part)
        dist.all_gather_into_tensor(whole, part)
        dist.gather(part, [torch.ones(1024), torch.ones(1024)] if rank == 0 else None)
        dist.scatter(part, [torch.ones(1024), torch.ones(1024)] if rank == 0 else None)
        dist.all_to_all_single(torch.ones(2048), whole)
        dist.reduce_scatter(part, [torch.ones(1024), torch.ones(1024)])
        dist.broadcast(part, 0)
        dist.all_reduce(part)
        dist.destroy_process_group()
        """)
    )
    with launch(["-m", "distdiag.run", "--run-dir", "run", str(script)], nproc=2, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "run")
    found = {op: message_bytes(op, size, ranks) for op, size, ranks in rows(tmp_path / "run", "SELECT op, bytes, ranks FROM collective WHERE bytes > 0")}  # fmt: skip
    whole = ("all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all_single", "reduce_scatter")
    assert found == dict.fromkeys(whole, 8192) | {"broadcast": 4096, "all_reduce": 4096}
