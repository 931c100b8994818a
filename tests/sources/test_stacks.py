"""Text of py-spy and faulthandler given to `distdiag diagnose`, and what a stack alone shows."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from distdiag.cli.diagnose import command
from distdiag.diagnosis.model.findings import Certainty, Severity, State
from distdiag.diagnosis.model.snapshot import Site
from distdiag.sources.stacks.calls import position
from distdiag.sources.stacks.files import diagnose_stacks
from distdiag.sources.stacks.frames import Frame, Process, Stack
from distdiag.sources.stacks.read import NoStacks, from_json, from_text
from distdiag.sources.stacks.verdict import Seen, findings
from tests.jobs import distdiag

LIBRARY = "/opt/lib/python3.12/site-packages/torch"
SPY = """Process 25886: /x/python -u train.py
Python v3.12.7 (/opt/bin/python3.12)

Thread 25890 (idle): "Thread-1 (run)"
    wait (threading.py:355)
    run (logger.py:12)
Thread 25886 (idle): "MainThread"
    pthread_cond_wait (libc.so.6)
    DistributedDataParallel._sync_buffers (torch/nn/parallel/distributed.py:2425)
    DistributedDataParallel.forward (torch/nn/parallel/distributed.py:1886)
        Arguments:
            self: <Trainer at 0x7f>
    Trainer.evaluate (unet.py:88)
    <module> (unet.py:100)
"""
FAULT = f"""Thread 0x00007f2b91be59b0 (most recent call first):
  File "/opt/lib/python3.12/threading.py", line 355 in wait
  File "/opt/lib/python3.12/threading.py", line 1030 in _bootstrap

Current thread 0x00007f121f44524a (most recent call first):
  File "{LIBRARY}/distributed/distributed_c10d.py", line 5356 in barrier
  File "{LIBRARY}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/unet.py", line 101 in <module>
"""


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_py_spy_and_faulthandler_in_one_file_per_rank(tmp_path: Path) -> None:
    report = diagnose_stacks([str(write(tmp_path, rank0=SPY, rank1=FAULT, rank2=FAULT))])
    assert report is not None
    (finding,) = report.findings
    assert (finding.kind, finding.cause, finding.culprits, finding.victims) == ("mismatch", "op", (0,), (1, 2))
    assert finding.certainty == Certainty.SUSPECTED
    assert report.state == State.STALLED
    assert [(w.file, w.line, w.function) for w in finding.where] == [("unet.py", 88, "evaluate")]
    assert "broadcast at unet.py:88 in evaluate (by DDP, before the forward)" in finding.message
    assert "#" not in finding.message and "never" not in finding.message


def prefixed(prefix: str) -> str:
    """Return the stacks as a launcher prints them, those of rank 2 first."""
    ranks = ((2, FAULT), (0, SPY), (1, FAULT))
    return "".join(f"{prefix.format(rank)}{line}\n" for rank, text in ranks for line in text.splitlines())


@pytest.mark.parametrize(
    "prefix",
    ["", "[rank{}]: ", "[rank{}]:", "[default{}]:", "{}: ", "[1,{}]<stderr>:", "2026-01-02T03:04:05.6Z [rank{}]:"],
)
def test_all_ranks_in_one_file(tmp_path: Path, prefix: str) -> None:
    report = diagnose_stacks([str(write(tmp_path, all=prefixed(prefix) if prefix else SPY + FAULT + FAULT))])
    assert report is not None
    assert [f.culprits for f in report.findings] == [(0,) if prefix else ()]  # nothing names its rank
    assert ("rank 0 is in" if prefix else "process 25886 is in") in report.findings[0].message
    assert ("ranks 1, 2 are in" if prefix else "the 2nd stack of all.txt, the 3rd stack") in report.findings[0].message
    assert report.ranks_seen == 3


WAITS = """Process {}: python -m pretrain

Thread 70 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    step (pretrain/loop.py:143)
    <module> (pretrain/__main__.py:44)
"""
READS = """Process {}: python -m pretrain

Thread 70 (idle): "MainThread"
    read (ssl.py:1166)
    read (botocore/response.py:99)
    read_shard (pretrain/webdata.py:92)
    <module> (pretrain/__main__.py:44)
"""


@pytest.mark.parametrize(
    "title",
    ["== rank {0} (pid 7{0}) on node-2 ==", "--- rank {} ---", "# RANK={}", "rank{}:", "===== Rank {} =====", "[Rank {}]", "node a-1, rank {}/8:",
     "$ srun -w node-2 py-spy dump --pid 7{0}   # rank {0}", "Stack of rank {0}:\n$ py-spy dump --pid 7{0}"],
)  # fmt: skip
def test_a_title_above_a_stack_names_its_rank(tmp_path: Path, title: str) -> None:
    """The rank was numbered by the order of the stacks: `rank 0 has not entered all_reduce`."""
    stacks = ((READS if rank == 2 else WAITS).format(f"7{rank}") for rank in (2, 0, 1))
    text = "\n".join(f"{title.format(rank)}\n{stack}" for rank, stack in zip((2, 0, 1), stacks, strict=True))
    report = diagnose_stacks([str(write(tmp_path, all=text))])
    assert report is not None
    (f,) = report.findings
    assert (f.culprits, f.victims, f.severity) == ((2,), (0, 1), Severity.WARNING)  # one sample cannot tell how long
    assert (f.where[0].file, f.where[0].line) == ("pretrain/webdata.py", 92)


@pytest.mark.parametrize("line", ["rank 2 done", "[INFO] rank 2: step 4", "rank 2\nFatal Python error: Aborted\n"])
def test_a_line_of_a_log_is_no_title(line: str) -> None:
    assert [p.rank for p in from_text(f"{line}\n{FAULT}")] == [None]


def test_a_title_is_of_one_process() -> None:
    text = f"rank 2:\n{WAITS.format(70)}{WAITS.format(70)}{WAITS.format(71)}"
    assert {(p.pid, p.rank) for p in from_text(text)} == {(70, 2), (71, None)}


def test_local_ranks_of_two_nodes_are_not_the_same(tmp_path: Path) -> None:
    text = prefixed("[default{}]:")
    report = diagnose_stacks([str(write(tmp_path, node0=text, node1=text.replace("unet.py:88", "unet.py:90")))])
    assert report is not None and report.ranks_seen == 6


def test_stacks_after_a_long_log(tmp_path: Path) -> None:
    log = "".join(f"[default0]:step {n} loss 0.3\n" for n in range(20_000))
    report = diagnose_stacks([str(write(tmp_path, all=log + prefixed("[default{}]:")))])
    assert report is not None and [f.culprits for f in report.findings] == [(0,)]


GDB = """[New LWP 71]
Thread 2 (Thread 0x7f21d0bff640 (LWP 71) "cuda-EvtHandlr"):
#0  0x00007f27a3318d7f in __GI___poll (fds=0x7f21c8000c20, nfds=10) at ../sysdeps/unix/sysv/linux/poll.c:29

Thread 1 (Thread 0x7f27a31fb000 (LWP 70) "python"):
#0  0x00007f26fa44ce28 in cuStreamSynchronize () from /lib/x86_64-linux-gnu/libcuda.so.1
#1  0x000055d1a90e3d1b in _PyEval_EvalFrameDefault () at Python/ceval.c:4198
#2  0x00007f27a0b41d0e in c10d::Reducer::finalize_backward() () from /opt/lib/libtorch_python.so
(gdb) py-bt
Traceback (most recent call first):
"""
LOSS = '  File "/home/me/train.py", line 131, in train\n    total += loss.item()\n  File "/home/me/train.py", line 9, in <module>\n'
EVAL = f"""  File "{LIBRARY}/distributed/distributed_c10d.py", line 2498, in all_gather_object
    size = int(max(sizes).item())
  File "/home/me/evaluate.py", line 88, in collect
  File "/home/me/train.py", line 9, in <module>
"""


def test_python_stacks_of_gdb(tmp_path: Path) -> None:
    (process,) = from_text(GDB + LOSS)
    assert process.judged.native == ("cuStreamSynchronize",)  # not those around Python
    assert [f.site.key for f in process.judged.frames] == ["/home/me/train.py:131", "/home/me/train.py:9"]
    every = GDB.replace("(gdb) py-bt\n", "")  # of `thread apply all py-bt`, several processes in one file
    assert len(from_text((every + LOSS) * 3)) == 3
    folder = write(tmp_path, rank0=GDB + LOSS, rank1=GDB + EVAL, rank2=GDB + LOSS, rank3=GDB + LOSS)
    report = diagnose_stacks([str(folder)])
    assert report is not None
    (finding,) = report.findings
    assert (finding.culprits, finding.victims) == ((1,), (0, 2, 3))
    assert "ranks 0, 2, 3 wait in a device synchronization at train.py:131" in finding.message


def test_a_rank_that_waits_for_its_device_is_not_blamed_next_to_one_that_does_not() -> None:
    """Its device may wait for what the other one has not launched."""
    backward, device, loader = (
        (Frame(name, f"{LIBRARY}/{file}", 9), Frame("train", "/home/me/train.py", line))
        for name, file, line in (
            ("_engine_run_backward", "autograd/graph.py", 58),
            ("synchronize", "cuda/__init__.py", 64),
            ("_next_data", "utils/data/dataloader.py", 30),
        )
    )
    seen = {q: Seen(position=position(Stack(f))) for q, f in enumerate((backward, device, backward, loader))}
    (finding,) = findings(seen)
    assert (finding.culprits, finding.victims, finding.cause) == ((3,), (0, 1, 2), "data")
    del seen[3]
    (finding,) = findings(seen)
    assert finding.culprits == (1,)


def test_by_the_command_with_its_exit_code(tmp_path: Path) -> None:
    ended = distdiag("diagnose", write(tmp_path, rank0=SPY, rank1=FAULT), "--json")
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    assert found["findings"][0]["certainty"] == "suspected"
    assert found["findings"][0]["culprits"] == []  # of two ranks neither is known to be wrong


def test_the_pid_in_a_files_name_is_no_rank(tmp_path: Path) -> None:
    pid = re.search(r"Process (\d+)", SPY)[1]  # type: ignore[index]
    report = diagnose_stacks([str(write(tmp_path, **{f"rank_{pid}": SPY, "rank_1269": SPY.replace(pid, "1269")}))])
    assert report is not None and report.world_size == 2


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    report = diagnose_stacks([str(write(tmp_path, rank0=FAULT, rank3=FAULT))])
    assert report is not None
    assert report.unjudged == "there is no stack of 2 ranks below rank 3"


def test_one_rank_that_waits_is_no_healthy_job(tmp_path: Path) -> None:
    """It was reported as running, with nothing found."""
    report = diagnose_stacks([str(write(tmp_path, rank0=FAULT))])
    assert report is not None
    assert report.state == State.WAITING and not report.findings
    assert report.unjudged is not None and "rank 0 waits in barrier at unet.py:101" in report.unjudged
    alone = distdiag("diagnose", tmp_path)
    assert alone.returncode == 3 and "waits in barrier" in alone.stdout


def test_a_text_says_why_it_shows_no_condition(tmp_path: Path) -> None:
    report = diagnose_stacks([str(write(tmp_path, rank0=SPY, rank1=FAULT))])
    assert report is not None and any("no source file" in note and "attach" in note for note in report.notes)


def test_other_text_is_none(tmp_path: Path) -> None:
    assert diagnose_stacks([str(write(tmp_path, train="epoch 1 loss 0.3\n"))]) is None
    with pytest.raises(NoStacks):
        from_text("nothing")
    for data in (b"[]", b"[{}]", b"{", b'[{"pid": -1, "frames": []}]', b"\xff"):
        with pytest.raises(NoStacks):
            from_json(data)


RECORDED = """Process 22843: /x/python -u -m distdiag.run train.py
Thread 22843 (idle): "MainThread"
    _wrap_wait.<locals>.wait (distdiag/recorder/hooks/wrap_collectives.py:44)
    barrier (torch/distributed/distributed_c10d.py:5356)
    <module> (train.py:29)
    _run_script (distdiag/run.py:122)
    _run_module_as_main (<frozen runpy>:198)
Thread 22891 (idle)
    Pulse._run (distdiag/recorder/pulse.py:70)
"""


def test_frames_of_the_recorder_are_left_out() -> None:
    """A rank in a barrier that distdiag records was taken for one that is busy in `wrap_collectives.py`."""
    (process,) = from_text(RECORDED)
    (thread,) = process.threads
    assert [f.name for f in thread.frames] == ["barrier", "<module>", "_run_module_as_main"]
    assert Frame("f", "/home/me/distdiag/train.py", 3).users


def test_native_frames_of_json_are_no_lines_of_the_user() -> None:
    native = {"name": "sock_call_ex", "filename": "socketmodule.c", "line": 921, "module": "/x/libpython3.12.so"}
    python = {"name": "Logger.send", "filename": "/home/me/train.py", "line": 29, "module": None, "locals": None}
    data = json.dumps(
        [{"pid": 3, "thread_id": 1, "active": False, "thread_name": "MainThread", "frames": [native, python]}]
    )
    (process,) = from_json(data)
    assert process.judged.native == ("sock_call_ex",)
    assert [f.site.key for f in process.judged.frames] == ["/home/me/train.py:29"]


def test_frames_of_the_recorder_are_left_out_of_json() -> None:
    """So is a thread that has no others; only native frames are none, either."""
    wait = {
        "name": "wait",
        "filename": "/src/distdiag/recorder/hooks/wrap_collectives.py",
        "line": 44,
        "module": None,
        "locals": None,
    }
    pulse = wait | {"name": "_run", "filename": "/src/distdiag/recorder/pulse.py"}
    user = wait | {"name": "main", "filename": "/home/me/train.py"}
    native = wait | {"name": "futex_wait", "filename": "futex.c", "module": "/lib/libc.so.6"}
    threads = [[wait, user], [pulse], [native]]
    (process,) = from_json(json.dumps([{"pid": 3, "frames": frames} for frames in threads]))
    assert [[f.name for f in thread.frames] for thread in process.threads] == [["main"]]


def test_hostile_text_ends_in_an_answer(tmp_path: Path) -> None:
    rng = random.Random(4)
    lines = (SPY + FAULT).splitlines()
    for _ in range(60):
        text = "\n".join(rng.choice(lines)[rng.randrange(3) : rng.randrange(4, 90)] for _ in range(80))
        try:
            processes = from_text(text)
        except NoStacks:
            continue
        findings({i: Seen(position=position(p.judged)) for i, p in enumerate(processes)})
    long = "Thread 1 (idle)\n" + "    f (" + "x" * 100_000 + ":1)\n" * 3
    diagnose_stacks([str(write(tmp_path, long=long, esc=SPY.replace("unet.py", "un\x1bet.py")))])


def frame(function: str, file: str, line: int = 1, **values: str) -> Frame:
    return Frame(function, file, line, values, {name: i for i, name in enumerate(values)})


def at(*frames: Frame, idle: bool | None = True, native: tuple[str, ...] = ()) -> Stack:
    return Stack(frames, native, idle, "MainThread")


USER = frame("Trainer.fit", "/home/me/train.py", 40)
C10D = f"{LIBRARY}/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("stack", "op", "activity"),
    [
        (at(frame("all_reduce", C10D), frame("wrapper", f"{LIBRARY}/distributed/c10d_logger.py"), USER), "all_reduce", "waiting"),
        (at(frame("_all_gather_base", C10D), USER), "all_gather_into_tensor", "waiting"),
        (at(frame("_engine_run_backward", f"{LIBRARY}/autograd/graph.py"), USER), "all_reduce", "waiting"),
        (at(frame("_engine_run_backward", f"{LIBRARY}/autograd/graph.py"), USER, idle=False), None, "user_code"),
        (at(USER, native=("pthread_cond_wait", "c10d::Work::wait")), "", "waiting"),
        (at(USER, native=("poll", "c10d::TCPStore::get")), None, "socket"),
        (at(USER, native=("cudaStreamSynchronize",)), None, "device"),
        (at(frame("_engine_run_backward", f"{LIBRARY}/autograd/graph.py"), USER, idle=False,
            native=("cuStreamSynchronize", "c10d::Reducer::finalize_backward")), "all_reduce", "waiting"),
        (at(frame("_try_get_data", f"{LIBRARY}/utils/data/dataloader.py"), USER), None, "data"),
        (at(frame("wait", "/opt/lib/python3.12/threading.py"), USER), None, "lock"),
        (at(frame("select", "/opt/lib/python3.12/selectors.py"), frame("run", "/opt/lib/python3.12/subprocess.py"), USER),
         None, "process"),
        (at(USER, frame("_save", f"{LIBRARY}/serialization.py"), frame("save", "/home/me/train.py", 50)), None, "checkpoint"),
        (at(frame("synchronize", f"{LIBRARY}/cuda/__init__.py"), USER), None, "device"),
        (at(frame("Cmd.cmdloop", "cmd.py"), frame("Pdb._cmdloop", "pdb.py"), USER), None, "stdin"),
        (at(frame("wait", "threading.py"), frame("result", "concurrent/futures/_base.py"), USER), None, "worker"),
        (at(USER), None, "user_code"),
    ],
)  # fmt: skip
def test_what_a_stack_shows(stack: Stack, op: str | None, activity: str) -> None:
    found = position(stack)
    assert (found.call.op if found.call is not None else None, found.activity) == (op, activity)
    assert found.site is not None and found.site.key == "/home/me/train.py:40"


def test_a_thread_in_a_collective_counts_while_the_main_thread_waits() -> None:
    main = at(frame("join", "/opt/lib/python3.12/threading.py"), frame("<module>", "/home/me/train.py", 9))
    other = Stack((frame("all_reduce", C10D), USER), (), True, "Thread-1")
    assert Process(1, (main, other)).judged is other
    beat = Stack((USER,), (), True, "Thread-2")
    assert Process(1, (main, other, beat)).judged is other
    waits = at(frame("wait", "threading.py"), frame("get", "queue.py"), frame("fit", "/home/me/train.py", 9))
    assert Process(1, (waits, other)).judged is other
    assert Process(1, (waits, beat)).judged is waits, "which may be a heartbeat"


def test_a_thread_of_a_pool_that_works_is_judged_and_one_that_idles_is_not() -> None:
    pool = frame("_worker", "concurrent/futures/thread.py"), frame("_bootstrap", "threading.py")
    idle = Stack(pool, (), True, "ThreadPoolExecutor-0_0")
    queued = Stack(
        (frame("wait", "threading.py"), frame("get", "queue.py"), USER, *pool), (), True, "ThreadPoolExecutor-0_1"
    )
    works = Stack((frame("load", "/home/me/io.py", 7), *pool), (), True, "ThreadPoolExecutor-0_2")
    bar = Stack((frame("run", "tqdm/_monitor.py"), *pool), (), True, "Thread-1")
    main = at(frame("wait", "threading.py"), frame("result", "concurrent/futures/_base.py"), USER)
    assert Process(1, (bar, idle, queued, works, main)).judged is works
    assert Process(1, (bar, idle, queued, main)).judged is main
    assert Process(1, (idle, works, at(USER))).judged.name == "MainThread"


def test_the_main_thread_is_the_last_of_faulthandler_and_may_run_a_module_or_import_one(tmp_path: Path) -> None:
    """A thread of C++, as autograd's, has no `_bootstrap` either, and a pool begins while the main thread imports."""
    library = "/opt/lib/python3.12"
    text = f"""Thread 0x0a (most recent call first):
  File "{library}/concurrent/futures/thread.py", line 81 in _worker
  File "{library}/threading.py", line 1030 in _bootstrap

Thread 0x0b (most recent call first):
  File "{LIBRARY}/utils/checkpoint.py", line 9 in unpack_hook

Current thread 0x0c (most recent call first):
  File "{LIBRARY}/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/data.py", line 7 in <module>
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "/home/me/train.py", line 1 in <module>
"""
    by_module = (
        text
        + '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    )
    for one in (text, by_module):
        found = from_text(one * 3)
        assert [p.judged.frames[0].name for p in found] == ["barrier"] * 3


def test_groups_are_named_by_the_users_variable_and_messages_by_their_peer() -> None:
    group = "<torch._C._distributed_c10d.ProcessGroup at 0x7f>"
    wrapper = frame("wrapper", f"{LIBRARY}/distributed/c10d_logger.py", kwargs=f"{{'group': {group}}}")
    call = Frame("all_reduce", C10D, 1, {"group": group}, {"group": 77})
    user = Frame("fit", "/home/me/train.py", 40, {"tp": group}, {"tp": 77})
    found = position(at(call, wrapper, user)).call
    assert found is not None and found.group == "tp"
    message = position(at(frame("recv", C10D, src="3", tag="0"), USER)).call
    assert message is not None and (message.op, message.peer) == ("recv", 3)


def seen(line: int, op: str | None = None, **more: bool) -> Seen:
    user = frame("fit", "/home/me/train.py", line)
    return Seen(position=position(at(*([frame(op, C10D)] if op else []), user)), **more)


def test_ranks_that_move_are_healthy_and_one_that_is_awaited_is_named() -> None:
    moving = {r: seen(10, "all_reduce", moved=True) for r in range(3)}
    assert findings(moving) == []
    (slow,) = findings({0: seen(10, "all_reduce"), 1: seen(20, moved=True)})
    assert (slow.kind, slow.severity, slow.culprits) == ("stall", Severity.INFO, (1,))
    (stuck,) = findings({0: seen(10, "all_reduce"), 1: seen(20)})
    assert (stuck.kind, stuck.severity, stuck.culprits) == ("stall", Severity.WARNING, (1,))


def test_the_innermost_frame_of_a_rank_that_computes_in_a_library_is_shown() -> None:
    forward = frame("forward", "/opt/lib/python3.12/site-packages/transformers/mixtral.py", 879)
    works = Seen(position=position(at(forward, USER, idle=False)), once=True)
    (f,) = findings({0: works, 1: seen(41, "all_reduce"), 2: seen(41, "all_reduce")})
    assert f.culprits == (0,) and "(innermost frame at mixtral.py:879 in forward)" in f.message


def test_ranks_that_all_sleep_are_healthy_and_that_all_wait_for_a_lock_are_not() -> None:
    asleep = {r: Seen(position=position(at(USER), lambda path: "time.sleep(9)\n" * 50)) for r in range(2)}
    assert findings(asleep) == []
    lock = at(frame("acquire", "/opt/lib/python3.12/threading.py"), USER)
    (finding,) = findings({r: Seen(position=position(lock)) for r in range(2)})
    assert (finding.severity, finding.culprits, finding.victims) == (Severity.WARNING, (), (0, 1))


def test_ranks_that_all_wait_for_one_lock_file_are_stuck_even_in_a_single_sample() -> None:
    baton = at(frame("wait", "/opt/lib/python3.12/site-packages/torch/utils/file_baton.py"), USER)
    (found,) = findings({r: Seen(position=position(baton), once=True) for r in range(3)})
    assert found.severity == Severity.WARNING and "none of these ranks is seen to hold it" in found.message
    builds = {0: Seen(position=position(at(USER)), once=True)}
    others = {r: Seen(position=position(baton), once=True) for r in (1, 2)}
    assert all(f.severity == Severity.INFO for f in findings(builds | others))


def test_ranks_that_all_wait_for_their_devices_are_named_and_not_accused() -> None:
    spins = position(at(USER, idle=False, native=("cuStreamSynchronize",)))
    (found,) = findings({r: Seen(position=spins) for r in range(2)})
    assert (found.severity, found.culprits, found.victims) == (Severity.INFO, (), (0, 1))
    assert found.message == "every rank waits for its device, and none has moved: ranks 0, 1 at train.py:40 in fit"
    assert findings({0: Seen(position=spins), 1: Seen(position=spins, moved=True)}) == []


def test_one_operation_at_two_lines_names_the_minority_and_of_two_ranks_none() -> None:
    (odd,) = findings({0: seen(10, "all_reduce"), 1: seen(20, "all_reduce"), 2: seen(20, "all_reduce")})
    assert (odd.severity, odd.culprits, odd.victims) == (Severity.WARNING, (0,), (1, 2))
    (tie,) = findings({0: seen(10, "all_reduce"), 1: seen(20, "all_reduce")})
    assert (tie.culprits, tie.victims) == ((), (0, 1))


def test_one_look_does_not_show_that_no_rank_has_moved() -> None:
    for ranks in (
        {r: seen(10, "all_reduce", once=True) for r in range(3)},
        {
            r: Seen(position=position(at(frame("get", "/opt/lib/python3.12/queue.py"), USER)), once=True)
            for r in range(3)
        },
    ):
        (found,) = findings(ranks)
        assert (found.severity, found.culprits) == (Severity.INFO, ()) and "moved" not in found.message
    (odd,) = findings({r: seen(10 + (r == 0), "all_reduce", once=True) for r in range(3)})
    assert odd.culprits == (0,) and "moved" not in odd.message


def test_hosts_that_show_no_collective_may_wait_for_the_one_that_is_elsewhere() -> None:
    """On GPUs ranks hang at `loss.item()`, a C function without a frame."""
    loads = position(
        at(frame("_try_get_data", f"{LIBRARY}/utils/data/dataloader.py"), frame("fit", "/home/me/train.py", 20))
    )
    ranks = {r: seen(88, once=True, busy=True) for r in range(4)}
    (found,) = findings(ranks | {4: Seen(position=loads, once=True)})
    assert (found.severity, found.culprits) == (Severity.INFO, (4,))
    assert (
        "ranks 0–3 are all at train.py:88 in fit, and rank 4 waits for its data loader at train.py:20" in found.message
    )
    assert findings(ranks | {4: seen(90, once=True)}) == []  # computes


@pytest.mark.parametrize("ops", [("broadcast", "all_reduce"), ("broadcast", "all_reduce", "recv")])
def test_ranks_in_different_operations_may_all_wait_for_the_one_that_is_in_none(ops: tuple[str, ...]) -> None:
    """The stages of a pipeline wait in different groups, and stacks do not name them."""
    ranks = {q: seen(10 * (1 + q % len(ops)), ops[q % len(ops)]) for q in range(7)}
    (found,) = findings(ranks | {7: seen(90)})
    assert (found.kind, found.severity, found.culprits) == ("stall", Severity.WARNING, (7,))
    assert found.victims == tuple(range(7)) and "default_pg" not in found.message


def test_a_condition_on_the_rank_decides_between_two() -> None:
    text = "def fit(rank):\n    if rank == 0:\n        broadcast()\n    barrier()\n"
    two = {0: seen(3, "broadcast"), 1: seen(4, "barrier")}
    (finding,) = findings(two, lambda path: text)
    assert finding.culprits == (0,)
    assert finding.message.startswith("only rank 0 made broadcast (train.py:3): `if rank == 0` (line 2); ")


LEFT = """def fit(rank):
    for epoch in range(3):
        for x in loader:
            step(x)
        barrier()
        if plateau:
            all_gather()
    save()
"""


@pytest.mark.parametrize(
    ("lines", "ops", "culprits"),
    [
        ((4, 5), ("all_reduce", "barrier"), (1,)),  # past the loop that rank 0 is in
        ((5, 4), ("barrier", "all_reduce"), (0,)),
        ((4, 5), ("all_reduce", "all_reduce"), (1,)),  # one operation at two lines
        ((5, 8), ("barrier", "broadcast"), (1,)),
        ((5, 7), ("barrier", "all_gather"), ()),  # under a condition: rank 0 may have left it out, a round ago
    ],
)
def test_of_two_ranks_the_one_that_has_passed_the_others_line(
    lines: tuple[int, int], ops: tuple[str, str], culprits: tuple[int, ...]
) -> None:
    (finding,) = findings({r: seen(lines[r], ops[r]) for r in (0, 1)}, lambda path: LEFT)
    assert finding.culprits == culprits
    assert finding.certainty == Certainty.SUSPECTED
    (unread,) = findings({r: seen(lines[r], ops[r]) for r in (0, 1)}, lambda path: None)
    assert unread.culprits == ()


def test_a_rank_in_the_next_forward_has_left_out_the_backward() -> None:
    ddp = f"{LIBRARY}/nn/parallel/distributed.py"
    forward = position(at(frame("_sync_buffers", ddp), frame("fit", "/home/me/train.py", 10)))
    backward = position(
        at(frame("_engine_run_backward", f"{LIBRARY}/autograd/graph.py"), frame("fit", "/home/me/train.py", 12))
    )
    (finding,) = findings({0: Seen(position=backward), 1: Seen(position=forward)})
    assert finding.culprits == (1,)
    assert "rank 1 is in the next forward, without the backward at train.py:12" in finding.message


def ddp(phase: str, **values: str) -> Seen:
    """A rank in DDP's calls, in a function of the user with these local variables."""
    engine = frame("_engine_run_backward", f"{LIBRARY}/autograd/graph.py")
    inner = engine if phase == "backward" else frame("_sync_buffers", f"{LIBRARY}/nn/parallel/distributed.py")
    return Seen(position=position(at(inner, frame("run_stage", "/home/me/train.py", 41, **values))))


GROUP_VALUE = "<torch.distributed.distributed_c10d.ProcessGroup at 0x7f>"


@pytest.mark.parametrize("phase", ["backward", "forward"])
def test_a_group_that_ddp_may_have_been_given_accuses_nobody(phase: str) -> None:
    barrier = {2: seen(62, "barrier"), 3: seen(62, "barrier")}
    own = {r: ddp(phase, pg=GROUP_VALUE) for r in (0, 1)}
    assert findings({**own, **barrier, 1: seen(41, moved=True)})[0].severity == Severity.INFO
    for f in findings({**own, **barrier}):  # nobody moves: it is reported, without a culprit
        assert not f.culprits and f.certainty == Certainty.SUSPECTED
    assert findings({**{r: ddp(phase) for r in (0, 1)}, 2: barrier[2]})[0].culprits == (2,)


def test_a_rank_in_a_group_may_wait_for_its_member_that_goes_on() -> None:
    wrapper = frame("wrapper", f"{LIBRARY}/distributed/c10d_logger.py", kwargs=GROUP_VALUE)
    call, user = Frame("all_reduce", C10D, 1, {}, {"group": 7}), Frame("fit", "/home/me/train.py", 45, {}, {"pg": 7})
    inside = Seen(position=position(at(call, wrapper, user)))
    ranks = {0: inside, 1: seen(39, moved=True), 2: seen(62, "barrier"), 3: seen(62, "barrier")}
    assert all(f.severity == Severity.INFO for f in findings(ranks))
    assert any(f.severity != Severity.INFO for f in findings({**ranks, 1: inside}))


def test_no_finding_names_a_group_that_no_stack_names() -> None:
    for other in (seen(20), seen(20, "broadcast")):
        (found,) = findings({0: seen(10, "barrier"), 1: seen(10, "barrier"), 2: other})
        assert "barrier" in found.message and "default_pg" not in found.message + found.advice


def test_the_group_of_ddps_constructor_is_in_its_frame() -> None:
    verify = frame("_verify_param_shape_across_processes", f"{LIBRARY}/distributed/utils.py")
    user = frame("main", "/home/me/train.py", 9, pg=GROUP_VALUE)
    for value, group in (("None", "default_pg"), (GROUP_VALUE, "")):
        init = frame("__init__", f"{LIBRARY}/nn/parallel/distributed.py", process_group=value)
        call = position(at(verify, init, user)).call
        assert call is not None and call.group == group


def test_a_rank_that_may_yet_move_is_not_blamed() -> None:
    waiting = seen(10, "all_reduce")
    starved = Seen(position=waiting.position, open="waited for a CPU for 4.1 of 6.0 s")
    (late,) = findings({0: waiting, 1: Seen(position=seen(20).position, open=starved.open)})
    assert (late.severity, late.culprits) == (Severity.INFO, (1,))
    assert "moves" not in late.message
    assert all(f.severity == Severity.INFO for f in findings({0: starved, 1: seen(20, "barrier")}))
    data = at(frame("_try_get_data", f"{LIBRARY}/utils/data/dataloader.py"), USER)
    loading = {r: Seen(position=position(data), open="waits for its child processes, which work") for r in range(2)}
    assert findings(loading) == []


def test_who_is_in_the_next_collective_has_not_sent() -> None:
    recv = position(at(frame("recv", C10D, src="2", tag="0"), USER))
    ranks = {0: Seen(position=recv), 1: seen(57, "broadcast"), 2: seen(57, "broadcast")}
    (finding,) = findings(ranks)
    assert (finding.kind, finding.culprits) == ("deadlock", (2,))
    assert "rank 2 went on to the next collective at train.py:57" in finding.message


def creating(ranks: str, number: str) -> Seen:
    inner = frame("_new_group_with_tag", C10D, ranks=ranks, group_name=f'"{number}"')
    return Seen(position=position(at(frame("_store_based_barrier", C10D), inner, frame("new_group", C10D), USER)))


def test_ranks_that_create_different_groups() -> None:
    (finding,) = findings(
        {0: creating("[0, 1, 2]", "7"), 1: creating("[0, 1, 2]", "7"), 2: creating("[0, 2]", "7")}, None
    )
    assert (finding.culprits, finding.victims) == ((2,), (0, 1))
    assert "ranks 0, 1: [0, 1, 2] as number 7; rank 2: [0, 2] as number 7" in finding.message
    (later,) = findings({0: creating("[0, 1]", "7"), 1: creating("[0, 1]", "8")})
    assert (later.culprits, later.victims) == ((), (0, 1))
    (same,) = findings({0: creating("[0, 1]", "7"), 1: creating("[0, 1]", "7")})
    assert "what they pass to it differs" in same.message


def test_a_rank_that_trains_in_a_thread_is_judged_by_it() -> None:
    """Ray Train: the main thread runs tasks in a package, and the user's function is in another."""
    loop = Stack(
        (Frame("main_loop", "/env/lib/python3.11/site-packages/ray/_private/worker.py", 1069),), name="MainThread"
    )
    idle = Stack((Frame("wait", "/usr/lib/python3.11/threading.py", 320),), name="pulse")
    users = Stack(
        (Frame("train", "/home/me/train.py", 20), Frame("run", "/usr/lib/python3.11/threading.py", 900)), name="T"
    )
    log = Stack((Frame("flush", "/home/me/log.py", 3),), name="log")
    assert Process(1, (loop, idle, users)).judged is users
    assert Process(1, (loop, idle, users, log)).judged is loop, "nothing tells which"
    own = Stack((Frame("main", "/home/me/train.py", 5),), name="MainThread")
    assert Process(1, (own, users)).judged is own


def test_a_file_named_by_its_pid_names_no_rank_and_the_command_names_the_local_one(tmp_path: Path) -> None:
    texts = {
        str(900 + r): SPY.replace("25886", str(900 + r)).replace("train.py", f"train.py --local-rank={3 - r}")
        for r in range(4)
    }
    texts["903"] = (
        texts["903"].replace("DistributedDataParallel", "Other").replace("torch/nn/parallel/distributed.py", "unet.py")
    )
    report = diagnose_stacks([str(write(tmp_path, **texts))])
    assert report is not None
    assert (report.world_size, report.findings[0].culprits) == (4, (0,))
    plain = {name: text.replace("--local-rank", "--x") for name, text in texts.items()}
    report = diagnose_stacks([str(write(tmp_path, **plain))])
    assert report is not None and report.world_size == 4


def test_a_thread_waits_for_what_the_library_around_its_lock_needs(tmp_path: Path) -> None:
    loader = "torch/utils/data/dataloader.py"
    frames = (
        "wait (threading.py:331)",
        "get (queue.py:180)",
        f"_try_get_data ({loader}:9)",
        f"__next__ ({loader}:7)",
        "fit (a.py:5)",
    )
    text = "".join(
        f'Process {p}: x\nThread {p} (idle): "MainThread"\n' + "".join(f"    {f}\n" for f in frames) for p in (71, 72)
    )
    report = diagnose_stacks([str(write(tmp_path, all=text))])
    assert report is not None
    (finding,) = report.findings
    assert "waits for its data loader" in finding.message and "workers" in finding.advice


def test_a_wait_for_a_queue_names_the_thread_that_fills_it(tmp_path: Path) -> None:
    """Queue.get waits in a Condition; a thread that waits for a queue, too, is not the one."""
    main = 'Process {0}: x\nThread {0} (idle): "MainThread"\n'
    backward = "    _engine_run_backward (torch/autograd/graph.py:979)\n    step (train.py:36)\n"
    get = "    Condition.wait (threading.py:327)\n    Queue.get (queue.py:171)\n    __next__ (buffered.py:58)\n"
    put = get.replace("get", "put").replace("58", "42")
    read = "    exact (buffered.py:18)\n    run (buffered.py:41)\n    _bootstrap_inner (threading.py:1045)\n"
    threads = f'Thread 8 (idle): "filler"\n{read}Thread 9 (idle): "writer"\n{put}'
    text = main.format(70) + backward + main.format(71) + backward + main.format(72) + get
    for more, named in ((threads, True), (threads + threads, False)):  # of two, which one fills it is not known
        report = diagnose_stacks([str(write(tmp_path, all=text + more))])
        assert report is not None
        (f,) = report.findings
        assert f.names[0] == "process 72" and "it waits on a queue at buffered.py:58 in __next__" in f.message
        assert ("and its thread filler is at buffered.py:18 in exact" in f.message) is named
        assert ("timeout" if named else "fill or drain that queue") in f.advice and "lock" not in f.advice
    loader = (
        "    _try_get_data (torch/utils/data/dataloader.py:1133)\n    __next__ (torch/utils/data/dataloader.py:631)\n"
    )
    of_loader = threads.replace("    exact (buffered.py:18)\n", get.partition("    __next__")[0] + loader)
    report = diagnose_stacks([str(write(tmp_path, all=text + of_loader))])
    assert report is not None and "waits for its data loader" in report.findings[0].message
    assert "--subprocesses" in report.findings[0].advice and "into the queue" not in report.findings[0].advice


def test_the_call_that_leads_one_rank_into_its_operation_is_named() -> None:
    """The ranks call their operations in different functions, and part in `main`."""

    def inside(op: str, function: str, line: int) -> Seen:
        users = (frame(function, "/home/me/engine.py", 28), frame("main", "/home/me/train.py", line))
        return Seen(position=position(at(frame(op, C10D), *users)))

    (f,) = findings(
        {0: inside("barrier", "save_state", 57)} | {r: inside("all_reduce", "train_epoch", 55) for r in (1, 2, 3)}
    )
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "op", (0,))
    assert "; rank 0 came there by the call at train.py:57 in main, the others by that at train.py:55" in f.message
    # a later line: it may have left out the others' call
    assert f.advice.startswith("see whether rank 0 left out all_reduce at engine.py:28 in train_epoch")
    (f,) = findings(
        {0: inside("barrier", "save_state", 53)} | {r: inside("all_reduce", "train_epoch", 55) for r in (1, 2, 3)}
    )
    assert f.advice.startswith("see the call at train.py:53 in main that leads rank 0 to barrier")


def test_one_sample_of_a_rank_that_computes_is_no_stall(tmp_path: Path) -> None:
    """A healthy job had two warnings: a rank in the all_reduce of its metrics, the others still in backward and optimizer."""
    step = WAITS.replace("all_reduce (torch/distributed/distributed_c10d.py:2810)", "step (torch/optim/adamw.py:230)")
    folder = write(tmp_path, rank0=WAITS.format(70), rank1=step.format(71), rank2=step.format(72))
    report = diagnose_stacks([str(folder)])
    assert report is not None and report.state == State.WAITING
    (f,) = report.findings
    assert f.severity == Severity.INFO and f.advice.startswith("take the stacks again after some seconds")


def test_the_title_of_an_engines_process_has_its_rank(tmp_path: Path) -> None:
    """The advice was to take the stacks, which the log has; and processes were named by their pids."""
    stamp, title = "[2026-05-30 07:30:0{} TP{}] ", "Process {}: sglang::scheduler_TP{}\nPython v3.12.3\n"
    late = "self.watchdog_last_forward_ct != self.forward_ct, Watchdog timeout (self.watchdog_timeout=300), self.soft_timeout=False\n"
    text = "Decode batch, #running-req: 128\n" * 400 + "".join(stamp.format(r, r) + late for r in range(3))
    for r in range(3):
        stack = WAITS if r != 1 else WAITS.replace("all_reduce", "broadcast").replace("step (", "get (")
        text += stamp.format(r, r) + f"Pyspy dump for PID 7{r}:\n" + title.format(f"7{r}", r)
        text += stack.partition("\n")[2].replace("Thread 70", f"Thread 7{r}") + "\n"
    log = tmp_path / "server.log"
    log.write_text(text)
    shown = " ".join(CliRunner().invoke(command, [str(log)]).output.split())
    assert "SGLang's watchdog" in shown and "rank 1 is in broadcast at loop.py:143 in get" in shown
    assert "the next time" not in shown and "process 7" not in shown


def test_a_worker_that_waits_for_a_lock_may_have_been_forked_with_it() -> None:
    loader = frame("_try_get_data", f"{LIBRARY}/utils/data/dataloader.py")
    waits = Seen(position=position(at(loader, USER)), workers=(Site("/home/me/cache.py", 3, "get"),))
    job = {0: seen(10, "all_reduce"), 1: waits}
    (f,) = findings(job, lambda path: "\n\nwith self.lock:\n" if path.endswith("cache.py") else None)
    assert "and its worker waits for a lock at cache.py:3 in get" in f.message and "forkserver" in f.advice
    (f,) = findings(job)
    assert "and its worker is at cache.py:3 in get" in f.message and "distdiag dump" not in f.advice


def test_stacks_in_a_file_of_errors_of_a_torch_built_in_its_sources(tmp_path: Path) -> None:
    waits = FAULT.replace(LIBRARY, "/src/pytorch/torch")
    busy = 'Timeout (0:05:00)!\nThread 0x0a (most recent call first):\n  File "/home/me/io.py", line 31 in lock\n  File "/home/me/unet.py", line 9 in <module>\n'
    (tmp_path / "rank0.err").write_text(waits)
    (tmp_path / "rank1.err").write_text(busy)
    report = diagnose_stacks([str(tmp_path)])
    assert report is not None
    assert (report.findings[0].culprits, report.findings[0].victims) == ((1,), (0,))


def test_stacks_as_json_in_a_folder_are_no_dumps(tmp_path: Path) -> None:
    def thread(pid: int, *frames: tuple[str, str, int]) -> str:
        named = [{"name": n, "filename": f, "line": line} for n, f, line in frames]
        return json.dumps([{"pid": pid, "thread_id": 1, "thread_name": "MainThread", "active": False, "frames": named}])

    waits = ("barrier", f"{LIBRARY}/distributed/distributed_c10d.py", 9), ("merge", "/p/m.py", 14)
    for rank in range(3):
        upload = ("readline", "/usr/lib/python3.11/socket.py", 7), ("upload", "/p/s3.py", 22)
        (tmp_path / f"rank{rank}.json").write_text(thread(50 + rank, *(upload if rank == 2 else waits)))
    found = distdiag("diagnose", "--json", str(tmp_path))
    (finding,) = json.loads(found.stdout)["findings"]
    assert finding["culprits"] == [2] and "s3.py:22" in finding["message"]


def test_many_threads_may_read_first_stacks_at_once() -> None:
    code = (
        "import sys, threading\n"
        "from distdiag.sources.stacks.read import from_json\n"
        "sys.setswitchinterval(1e-6)\n"
        'frame = b\'{"name": "f", "filename": "/a.py", "line": 3, "locals": [{"name": "x"}]}\'\n'
        'data, gate = b\'[{"pid": 1, "frames": [\' + frame + b"]}]", threading.Barrier(16)\n'
        "threads = [threading.Thread(target=lambda: (gate.wait(), from_json(data))) for _ in range(16)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
    )
    for _ in range(3):  # the parser's types are read at their first use in a process: that crashed it in 9 of 10 times
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_stacks_that_are_given_with_a_log_are_a_note(tmp_path: Path) -> None:
    """The log shows who waited, the stacks what the others did; a stack inside a log is a part of it."""
    lock = 'Thread 1 (idle): "MainThread"\n    wait (torch/utils/file_baton.py:49)\n    load (torch/utils/cpp_extension.py:1380)\n    main (tune.py:44)\n'
    (tmp_path / "there.txt").write_text(
        "".join(f"Process {n}: python tune.py --local_rank={n - 9}\n{lock}\n" for n in (9, 10))
    )
    log = tmp_path / "job.log"
    log.write_text(
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"tune.py\", line 3, in main\n[rank0]: KeyError: 'x'\n"
    )
    both = distdiag("diagnose", str(tmp_path)).stdout
    assert "KeyError" in both and "the stacks given with the log show" in both and "lock file" in " ".join(both.split())
    assert "the stacks given" not in distdiag("diagnose", str(log)).stdout


LOGS = """Process {pid}: /x/python -u fit.py
Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    _sync_ddp (lightning/fabric/utilities/distributed.py:251)
    log (lightning/pytorch/core/module.py:523)
    on_validation_epoch_end (module.py:118)
    main (fit.py:64)
"""
SAVES = """Process {pid}: /x/python -u fit.py
Thread {pid} (idle): "MainThread"
    broadcast (torch/distributed/distributed_c10d.py:2704)
    file_exists (lightning/pytorch/callbacks/model_checkpoint.py:792)
    main (fit.py:64)
"""


def test_a_rank_that_logs_alone_what_all_ranks_have(tmp_path: Path) -> None:
    def advice(**texts: str) -> str:
        report = diagnose_stacks([str(write(tmp_path, **{k: t.format(pid=int(k[-1]) + 70) for k, t in texts.items()}))])
        assert report is not None
        return report.findings[0].advice

    alone = advice(rank0=LOGS, rank1=SAVES, rank2=SAVES)
    assert (
        alone.startswith("call self.log(sync_dist=True) on all ranks") and "sync_dist=False at module.py:118" in alone
    )
    assert "self.log" not in advice(rank0=LOGS, rank1=LOGS, rank2=LOGS)


AGENT = "torch/distributed/elastic/agent/server/api.py"
CRASH = f"""[rank 0] step 20 loss 0.4
Fatal Python error: Segmentation fault

{FAULT}
E0130 09:06:13.119000 88121 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) local_rank: 2 (pid: 88142) of binary: python
I0130 09:06:13.120000 88121 {AGENT}:889] [default] Worker group FAILED. 3/3 attempts left; will restart worker group
"""
STEPS = "".join(f"[rank 0] step {n} loss 0.4\n" for n in range(20, 60))
SUCCEEDED = f"I0130 09:38:41.003000 88121 {AGENT}:932] Local worker group finished (WorkerState.SUCCEEDED).\n"


@pytest.mark.parametrize("name", ["job8_.log", "slurm-99.out"])
def test_the_stack_of_a_crash_that_the_job_survived_shows_no_rank_that_waits(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(CRASH + STEPS + SUCCEEDED)
    output = CliRunner().invoke(command, [str(tmp_path / name)]).output
    assert output.startswith("ended: nothing found") and "ended well" in output
    (tmp_path / name).write_text(CRASH + STEPS + SPY)
    output = CliRunner().invoke(command, [str(tmp_path / name)]).output
    assert "process 25886 waits in broadcast at unet.py:88" in " ".join(output.split())


@pytest.mark.parametrize(
    ("names", "ranks"), [(("job-99.err",), [0]), (("w7.err", "w8.err"), [0, 1]), (("w0.err", "w1.err"), [0, 1])]
)
def test_a_number_in_a_file_s_name_is_its_rank_only_among_others(
    tmp_path: Path, names: tuple[str, ...], ranks: list[int]
) -> None:
    for name in names:
        (tmp_path / name).write_text(FAULT)
    report = diagnose_stacks([str(tmp_path)])
    assert report is not None and report.world_size == report.ranks_seen == len(ranks)


LOADER = """Process 50: /x/python -u train.py
Thread 50 (idle): "MainThread"
    Queue.get (multiprocessing/queues.py:113)
    _MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291)
    validate (train.py:81)
    <module> (train.py:111)
"""
WORKER = """Process 57: /x/python -u train.py{parent}
Thread 57 (idle): "MainThread"
    Tiles.decode (tiles.py:46)
    _MapDatasetFetcher.fetch (torch/utils/data/_utils/fetch.py:54)
    _worker_loop (torch/utils/data/_utils/worker.py:374)
    BaseProcess._bootstrap (multiprocessing/process.py:314)
    Popen._launch (multiprocessing/popen_fork.py:71)
    validate (train.py:81)
    <module> (train.py:111)
"""


@pytest.mark.parametrize(
    "texts",
    [
        {"rank0": LOADER + WORKER.format(parent="\nParent Process 50: /x/python -u train.py")},
        {"rank0": LOADER, "others": WORKER.format(parent="\nParent Process 50: /x/python -u train.py")},
        {"rank0": LOADER, "rank0_worker": WORKER.format(parent="")},
        {"rank0": LOADER + WORKER.format(parent="")},
    ],
    ids=["subprocesses", "by_parent", "by_file_name", "one_file"],
)
def test_the_line_of_a_loaders_worker_is_shown_with_the_rank_that_waits_for_it(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    report = diagnose_stacks([str(write(tmp_path, **texts, rank1=FAULT, rank2=FAULT))])
    assert report is not None and report.ranks_seen == 3
    (finding,) = report.findings
    assert (finding.kind, finding.cause, finding.culprits) == ("stall", "data", (0,))
    assert "its worker is at tiles.py:46 in decode" in finding.message
    assert finding.advice.startswith("check that line of the dataset") and "if it takes a lock" in finding.advice


def test_the_worker_of_another_process_is_of_no_rank(tmp_path: Path) -> None:
    text = LOADER + WORKER.format(parent="\nParent Process 99: /x/python -u other.py")
    report = diagnose_stacks([str(write(tmp_path, rank0=text, rank1=FAULT, rank2=FAULT))])
    assert report is not None and "worker" not in report.findings[0].message
