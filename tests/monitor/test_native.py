"""What a process waits for, from the native frames that its signal handler writes."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdiag.monitor.evidence import ask, native, signals
from distdiag.monitor.evidence.host_waits import HostWaits
from distdiag.monitor.evidence.native import HostWait
from tests.jobs import wait_for

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

LIBRARY = """
    #include <sched.h>
    static int spin(volatile int *on) { while (*on) sched_yield(); return 0; }
    int cudaStreamSynchronize(volatile int *on) { return spin(on) + 1; }
    int compute(volatile int *on) { return spin(on) + 1; }
    int ncclCommInitRank(volatile int *on) { return cudaStreamSynchronize(on) + 1; }
"""
PROCESS = """
    import ctypes, mmap, os, sys
    from distdiag.recorder.fast import _native
    _native.install(46, os.open(sys.argv[2], os.O_RDWR | os.O_CREAT))
    page = mmap.mmap(os.open(sys.argv[4], os.O_RDWR), 0)
    print("ready", flush=True)
    getattr(ctypes.CDLL(sys.argv[1]), sys.argv[3])(ctypes.byref(ctypes.c_int(1)))
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "device.c").write_text(textwrap.dedent(LIBRARY))
    out = tmp_path / "libdevice.so"
    subprocess.check_call(["cc", "-shared", "-fPIC", "-O1", "-o", out, tmp_path / "device.c"])
    return out


def page_of(file: Path) -> Path:
    """Return the page next to a file of native frames; nothing is sent to a process that does not map it."""
    page = file.with_name("rank_00000.page")
    page.touch(mode=0o600)
    os.truncate(page, 4096)
    return page


@contextmanager
def start(library: Path, file: Path, function: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROCESS), library, file, function, page_of(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("cudaStreamSynchronize", HostWait.DEVICE),
        ("compute", HostWait.NO),
        ("ncclCommInitRank", HostWait.COMMUNICATOR),
    ],
)
def test_the_native_function_of_the_main_thread_is_named(
    library: Path, tmp_path: Path, function: str, expected: HostWait
) -> None:
    pytest.importorskip("distdiag.recorder.fast._native")
    file = tmp_path / "r0.native"
    with start(library, file, function) as process:
        symbols = native.Symbols(process.pid)

        def inside() -> list[str]:
            signals.send(process.pid, 46, page_of(file))
            sample = native.read(file)
            names = [frame.name for frame in symbols.frames(sample)] if sample is not None else []
            return names if function in names else []

        names = wait_for(inside, 20, f"a sample inside {function}")
        kind, name = native.host_wait(names)
        assert kind == expected
        assert kind == HostWait.NO or name == function
        assert process.poll() is None


def entry(op: str, state: str, seq: int, p2p: bool = False) -> dict[str, object]:
    return {
        "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{op}", "state": state, "is_p2p": p2p,
        "collective_seq_id": 0 if p2p else seq, "p2p_seq_id": seq if p2p else 0, "retired": False,
    }  # fmt: skip


def test_entries_of_a_coalesced_group_have_its_state() -> None:
    """NCCL leaves each of its operations scheduled for ever; one additional entry has the state of all."""
    record = ask.FlightRecord()
    entries = [
        entry("all_reduce", "scheduled", 1), entry("all_reduce", "scheduled", 1), entry("coalesced", "completed", 1),
        entry("send 0->1", "scheduled", 1, p2p=True), entry("recv 0<-1", "scheduled", 1, p2p=True),
        entry("coalesced", "completed", 1, p2p=True),
        entry("recv 0<-1", "scheduled", 2, p2p=True), entry("all_reduce", "scheduled", 2),
    ]  # fmt: skip
    ask.parse({"entries": entries}, record)
    assert (record.enqueued, record.completed) == ({"0": 2}, {"0": 1})
    assert record.open_messages == {("0", "recv", 1): 1}


def test_a_coalesced_operation_of_one_tensor_is_the_plain_one() -> None:
    record = ask.FlightRecord()
    one = entry("all_gather_into_tensor_coalesced", "scheduled", 1) | {
        "input_sizes": [[8, 4]],
        "input_dtypes": ["Float"],
    }
    two = entry("all_gather_into_tensor_coalesced", "scheduled", 2) | {"input_sizes": [[8], [4]]}
    ask.parse({"entries": [one, two]}, record)
    found = [(e.op, e.shape) for e in record.entries.values()]
    assert found == [("all_gather_into_tensor", (8, 4)), ("all_gather_into_tensor_coalesced", None)]


def waiting_rank(folder: Path, still_s: float) -> Any:
    """Return a rank of this process with an open collective on a device, without progress for `still_s`."""
    page_file = page_of(folder / "r0.native")
    with page_file.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)

    class Header:
        pid, trace_signal, blocked = os.getpid(), 47, 0

    class View:
        rank, ending, header, held = 0, None, Header, mapped
        decoder, reader = SimpleNamespace(start_ns=0), SimpleNamespace(path=page_file)
        device = SimpleNamespace(groups=(0,), has_open=lambda: True)

        def file(self, kind: str) -> Path:
            return folder / f"r0.{kind}"

        def still_s(self, now_s: float) -> float:
            return now_s - still_s

        def progress_mark(self) -> tuple[int, ...]:
            return ()

    return View()


def test_a_rank_with_its_own_handler_is_sent_no_signal(tmp_path: Path) -> None:
    """The job may use the same signal itself: our handler is installed only if its file exists."""

    received: list[int] = []
    before = signal.signal(46, lambda number, _: received.append(number))
    try:
        waits, view = HostWaits(), waiting_rank(tmp_path, still_s=0.0)
        for now_s in (1.0, 2.0, 3.0):
            waits.sample(now_s, {0: view}, ())
        assert received == [] and waits.of(0) is None
        (tmp_path / "r0.native").touch()
        waits.sample(4.0, {0: view}, ())
        assert received == [46]
    finally:
        signal.signal(46, before)


TORCH, OURS = "/v/site-packages/torch/lib/libtorch_cpu.so", "/v/site-packages/distdiag/recorder/fast/_native.so"
BINDINGS, PYTHON, LIBC = "/v/site-packages/torch/lib/libtorch_python.so", "/usr/bin/python3.11", "/lib/libc.so.6"


@pytest.mark.parametrize(
    ("libraries", "in_python", "expected"),
    [
        ([OURS, LIBC, "/x/libdev.so", TORCH, TORCH, BINDINGS, PYTHON], "", "f2"),  # inside an operation of torch
        ([OURS, LIBC, TORCH, TORCH, TORCH, BINDINGS, PYTHON], "", None),  # torch computes
        ([OURS, LIBC, TORCH, TORCH, TORCH, BINDINGS, PYTHON], "dev.spin", None),  # the same, for a backend in Python
        ([OURS, LIBC, "/lib/libffi.so.8", PYTHON], "dev.spin", "dev.spin"),  # a backend in Python sleeps
        ([OURS, "", TORCH, BINDINGS, PYTHON], "dev.spin", "dev.spin"),  # it polls its Work
        ([OURS, "/x/tokenizer.so", PYTHON, TORCH, TORCH], "", None),  # the user's own library
        ([OURS, "/x/libgomp.so.1", TORCH, TORCH, BINDINGS, PYTHON], "", None),  # a parallel region
        ([OURS, "/x/libnvrtc.so.12", TORCH, TORCH, BINDINGS, PYTHON], "", None),  # compiles a kernel
        ([OURS, "/v/site-packages/torchvision/_C.so", TORCH, TORCH, TORCH, PYTHON], "", None),  # a package's operation
    ],
)
def test_a_wait_in_an_unknown_backend_is_found(libraries: list[str], in_python: str, expected: str | None) -> None:
    frames = [native.Frame(library, f"f{i}") for i, library in enumerate(libraries)]
    assert native.unknown_backend(frames, in_python) == expected


def test_the_next_poll_is_brought_forward_for_native_frames(tmp_path: Path) -> None:
    """A rank is asked once it has been still long enough, and answers within milliseconds."""
    (tmp_path / "r0.native").touch()
    before = signal.signal(46, lambda number, _: None)
    try:
        waits, view = HostWaits(), waiting_rank(tmp_path, still_s=10.0)
        polls = []
        for now_s in (10.0, 10.25, 10.3, 10.35, 10.6):
            waits.sample(now_s, {0: view}, ())
            polls.append(None if waits.next_s is None else round(waits.next_s, 2))
        assert polls[:4] == [None, 10.3, 10.35, 10.4]
        view.device.groups = ()
        waits.sample(10.7, {0: view}, ())
        assert waits.next_s is None
    finally:
        signal.signal(46, before)
