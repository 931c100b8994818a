"""rank_lost: which of several ended ranks is the cause, and of what it died."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.job_state import job_state
from distdiag.diagnosis.model.findings import Finding, Severity
from distdiag.diagnosis.model.snapshot import (
    Life,
    RankState,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import deadlock, mismatch, rank_lost, stall, timeout
from distdiag.diagnosis.waits.graph import build
from tests.diagnosis.made import findings, job, only, rank, waits_for_rank_one
from tests.diagnosis.waits import call


def ended(s: Snapshot, **known: Any) -> list[Finding]:
    return findings(s, timeout, mismatch, deadlock, rank_lost, **known)


def how_it_ended(*ranks: RankState, **more: Any) -> str:
    s = job(*ranks, **more)
    return job_state(s, build(s), ended(s), final=True)[1]


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ({"life": Life.KILLED, "signal": 15}, "SIGTERM"),
        ({"life": Life.KILLED, "signal": 2}, "SIGINT"),
        ({"life": Life.CRASHED, "exception": "KeyboardInterrupt"}, "SIGINT"),
        ({"life": Life.CRASHED, "exception": "KeyboardInterrupt, then RuntimeError: unexpected pos"}, "SIGINT"),
    ],
)
def test_a_job_stopped_from_outside_is_not_reported_as_a_crash(end: dict[str, Any], name: str) -> None:
    text = how_it_ended(rank(0, ended_s=9.0, **end), rank(1, life=Life.KILLED, signal=15, ended_s=9.2))
    assert text == f"stopped by {name} (from the launcher or a person)"
    too_slow = rank(1, life=Life.KILLED, signal=9, ended_s=39.0)  # the launcher waits for half a minute
    assert how_it_ended(rank(0, ended_s=9.0, **end), too_slow) == text
    assert how_it_ended(rank(0, ended_s=9.0, **end), rank(1, life=Life.KILLED, signal=9)) == text
    until_then = how_it_ended(rank(0, ended_s=40.0, **end), too_slow)  # rank 0 was in a call with it
    assert until_then == (text if name == "SIGINT" else "rank 1: SIGKILL; 1 of 2 failed")
    assert how_it_ended(rank(0, ended_s=50.0, **end), too_slow) == "rank 1: SIGKILL; 1 of 2 failed"
    closed = {"life": Life.CRASHED, "exception": "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9"}
    assert how_it_ended(rank(0, ended_s=9.0, **end), rank(1, ended_s=10.2, **closed)) == text  # it was busy until then
    assert ended(job(rank(0, ended_s=9.0, ended_waiting=True, **end), rank(1, ended_s=10.2, **closed))) == []
    assert how_it_ended(rank(0, ended_s=9.0, **end), rank(1, ended_s=8.0, **closed)).startswith("rank 1: RuntimeError")
    crashed = rank(1, life=Life.CRASHED, exception="ValueError: x", ended_s=8.0)
    assert how_it_ended(rank(0, ended_s=9.0, **end), crashed) == "rank 1: ValueError: x; 1 of 2 failed"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("    raise ValueError(n)", "find why `n > 9` at data.py:1 held on rank 1; only rank 1 failed there"),
        ("    return table[n]", "fix `return table[n]` at data.py:2 in read; only rank 1 failed there"),
    ],
)
def test_what_to_mend_is_the_failing_line_or_the_test_before_its_raise(line: str, advice: str) -> None:
    crashed = rank(
        1, life=Life.CRASHED, exception="ValueError: 12", ended_s=9.0, current_site=Site("/data.py", 2, "read")
    )
    f = only(ended(job(rank(0), crashed), source={"/data.py": f"if n > 9:\n{line}\n"}.get))
    assert f.advice.startswith(advice)


def test_the_first_end_is_shown_if_the_launcher_ended_the_culprit() -> None:
    """gloo aborted a victim; the rank that is to blame got the launcher's SIGTERM."""
    site = Site("/job/train.py", 5, "run")
    sizes = (call(seq=3, site=site, shape=(n,)) for n in (9, 9, 4))
    ends = {"life": Life.KILLED, "ended_waiting": True, "current_site": site}
    ranks = (
        rank(q, calls=(c,), signal=6 if q == 1 else 15, ended_s=9.0 if q == 1 else 9.2, **ends)
        for q, c in enumerate(sizes)
    )
    s = job(*ranks)
    found = ended(s)
    assert [f.culprits for f in found] == [(2,)]
    assert job_state(s, build(s), found, final=True)[1] == "rank 1: SIGABRT; 1 of 3 failed"


def test_the_sigkill_of_a_launcher_that_got_a_signal_itself_is_no_failure() -> None:
    """No rank in C++ heeds its SIGINT, so that none has ended by it: the launcher kills one after the other."""
    killed = [rank(q, life=Life.KILLED, signal=9, ended_s=40.0 + 2 * q, ended_waiting=True) for q in range(3)]
    assert how_it_ended(*killed, stopped_by=2) == "stopped by SIGINT (from the launcher or a person)"
    assert ended(job(*killed, stopped_by=2)) == []
    assert how_it_ended(*killed) == "rank 0: SIGKILL; 3 of 3 failed"
    raised = rank(3, life=Life.CRASHED, exception="ValueError: no data", ended_s=39.0)
    assert how_it_ended(*killed, raised, stopped_by=2) == "rank 3: ValueError: no data; 1 of 4 failed"
    at_once = [rank(q, life=Life.KILLED, signal=9, ended_s=40.0 + 0.1 * q, ended_waiting=True) for q in range(3)]
    assert how_it_ended(*at_once) == "stopped by SIGKILL (from the launcher or a person)"
    ours = "stopped by SIGKILL (from distdiag, as DISTDIAG_END_HANGS_S asks)"
    assert how_it_ended(*at_once, hang_ended=True) == ours


def test_a_dead_loader_worker_is_not_the_fault_of_the_line_where_torch_raises() -> None:
    text = "RuntimeError: DataLoader worker (pid 4338) exited unexpectedly with exit code 3. Details are lost"
    f = only(ended(job(rank(0, life=Life.CRASHED, exception=text, ended_s=9.0), rank(1))))
    assert (f.kind, f.culprits) == ("rank_lost", (0,)) and "exit code 3" in f.message
    assert f.advice.startswith("a DataLoader worker died: read what it printed")


@pytest.mark.parametrize(
    ("died_by", "do"),
    [
        ("Segmentation fault", "a library of the dataset failed in native code"),
        ("Killed", "if it was killed for memory"),
    ],
)
def test_the_signal_that_ended_a_loader_worker_decides_what_to_do(died_by: str, do: str) -> None:
    text = f"RuntimeError: DataLoader worker (pid 4338) is killed by signal: {died_by}"
    f = only(ended(job(rank(0, life=Life.CRASHED, exception=text, ended_s=9.0), rank(1))))
    assert f.advice.startswith(do)


def test_what_a_worker_raised_is_looked_for_in_its_samples() -> None:
    text = "IndexError: list index out of range (in a DataLoader worker)"
    f = only(ended(job(rank(0, life=Life.CRASHED, exception=text, ended_s=9.0), rank(1))))
    assert f.advice.startswith("find the sample on which that line fails")


def test_the_text_of_an_exception_is_cut_between_words() -> None:
    text = how_it_ended(rank(0, life=Life.CRASHED, exception="ValueError: " + "label " * 60, ended_s=9.0))
    assert text.endswith("label label …; 1 of 1 failed") and len(text) < 160


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:59009"


def test_the_state_names_the_rank_that_failed_not_the_first_to_end() -> None:
    """The rank that lost its peer may end before the launcher notices the one that was killed."""
    victim = rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=8.0)
    text = how_it_ended(victim, rank(1, life=Life.KILLED, signal=9, ended_s=8.1))
    assert text == "rank 1: SIGKILL; 2 of 2 failed"


def test_the_state_quotes_no_rank_that_only_followed() -> None:
    """The culprit itself ended normally, so that only the others have an exception."""
    victims = [rank(q, life=Life.CRASHED, exception=CLOSED, ended_s=8.0 + q, calls=(call(seq=3),)) for q in (0, 1)]
    s = job(*victims, rank(2, life=Life.FINISHED, ended_s=7.0))
    found = ended(s)
    assert [f.culprits for f in found] == [(2,)]
    assert (
        job_state(s, build(s), found, final=True)[1] == found[0].message and "Connection closed" not in found[0].message
    )
    stopped = rank(2, life=Life.KILLED, signal=6, ended_s=9.0)  # later, but no echo
    assert how_it_ended(*victims, stopped).startswith("rank 2: SIGABRT; 3 of 3")


def test_ranks_that_could_not_connect_blame_nobody() -> None:
    text = "RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: "
    text += "SO_ERROR: Connection refused, remote=[127.0.0.1]:32641$0"
    crashed = rank(0, life=Life.CRASHED, exception=text, ended_s=9.0)
    s = job(crashed, rank(1, life=Life.KILLED, signal=15, ended_s=9.5))
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (), (0,))
    assert "timed out connecting: SO_ERROR: Connection refused, remote" in f.message and "SOCKET_IFNAME" in f.advice
    again = only(ended(job(*s.ranks.values(), attempt=1)))
    assert again.advice.startswith("the launcher's store may still have the addresses of an earlier init_process_group")
    late = only(ended(s, late=((1,), (0,))))
    assert (late.kind, late.culprits) == ("rank_lost", ()), "who came late listens nowhere yet, and refuses nothing"


def test_a_victim_that_its_launcher_ended_in_its_call_is_listed_as_one_that_waited() -> None:
    bad = rank(0, life=Life.CRASHED, exception="ValueError: bad", ended_s=9.0)
    here = Site("/job/train.py", 72, "reduce")
    late = rank(1, life=Life.KILLED, signal=15, ended_s=12.0, ended_waiting=True, current_site=here)
    f = only(ended(job(bad, late)))
    assert (f.culprits, [(w.rank, w.line) for w in f.waiting]) == ((0,), [(1, 72)])


def test_one_step_is_no_steps() -> None:
    assert (
        how_it_ended(*(rank(q, life=Life.FINISHED, step=1) for q in (0, 1))) == "all ranks ended normally after 1 step"
    )


def test_the_first_end_that_is_not_an_echo_is_the_cause() -> None:
    s = job(
        rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.0),
        rank(1, life=Life.CRASHED, exception="IndexError: list index out of range", ended_s=9.1),
        rank(2, life=Life.KILLED, signal=15, ended_s=9.5),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (1,), (0, 2))
    assert "IndexError" in f.message


def test_the_same_error_on_all_ranks_blames_all_of_them() -> None:
    s = job(
        *(rank(q, life=Life.CRASHED, exception="NameError: name 'x' is not defined", ended_s=9.0) for q in range(3))
    )
    assert only(ended(s)).culprits == (0, 1, 2)


def test_ranks_that_exit_together_are_one_end_although_a_signal_of_the_launcher_came_meanwhile() -> None:
    def found(code: int) -> Finding:
        first = rank(0, life=Life.CRASHED, exit_code=75, ended_s=9.0)
        return only(ended(job(first, rank(1, life=Life.CRASHED, exit_code=code, signal=15, ended_s=10.0))))

    assert (found(75).culprits, found(75).victims, found(75).cost) == ((0, 1), (), "the job ended")
    assert found(1).culprits == (0,)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_killed_rank_is_lost_with_its_signal(number: int, name: str) -> None:
    s = job(
        rank(0, life=Life.KILLED, signal=number, ended_s=9.0), rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.2)
    )
    f = only(ended(s))
    assert (f.cause, f.culprits) == ("killed", (0,)) and name in f.message


@pytest.mark.parametrize(
    ("number", "waiting", "end"),
    [(9, False, "SIGKILL, last seen at"), (9, True, "SIGKILL at"), (11, False, "SIGSEGV at")],
)
def test_where_a_rank_was_killed_is_known_in_a_call_and_of_a_native_crash(number: int, waiting: bool, end: str) -> None:
    dead = rank(
        0, life=Life.KILLED, signal=number, ended_s=9.0, ended_waiting=waiting, current_site=Site("/a.py", 3, "f")
    )
    f = only(ended(job(dead, rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.2))))
    assert f.message == f"rank 0 was killed by {end} a.py:3 in f"


@pytest.mark.parametrize(("last_beat_s", "culprits"), [(8.9, (1,)), (9.3, ())])
def test_a_kill_after_a_later_heartbeat_is_not_the_cause_of_a_closed_connection(
    last_beat_s: float, culprits: tuple[int, ...]
) -> None:
    s = job(
        rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.0),
        rank(1, life=Life.KILLED, signal=9, ended_s=9.4, heartbeat_age_s=10.0 - last_beat_s),
        t_s=10.0,
    )
    assert tuple(q for f in ended(s) for q in f.culprits) == culprits


@pytest.mark.parametrize("number", [2, 9, 15])
def test_a_job_ended_from_outside_has_no_finding(number: int) -> None:
    s = job(*(rank(q, life=Life.KILLED, signal=number, ended_s=9.0 + q / 10) for q in range(3)))
    assert ended(s) == []


def test_a_rank_that_finished_early_is_the_cause_of_the_others_errors() -> None:
    s = job(
        rank(0, life=Life.FINISHED, ended_s=8.0, step=48),
        rank(
            1,
            life=Life.CRASHED,
            exception=CLOSED,
            ended_s=9.0,
            enqueued={"default_pg": 60},
            completed={"default_pg": 59},
        ),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("deadlock", "rank_finished", (0,), (1,))


UNUSED = "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss"


def test_a_failed_job_always_has_a_finding() -> None:
    """DDP's refusal without names, in a library's words; and a job of which only the echoes were seen."""
    refused = job(*(rank(q, life=Life.CRASHED, exception=UNUSED, ended_s=9.0, models=()) for q in range(2)))
    f = only(ended(refused))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "crashed", (0, 1))
    assert "find_unused_parameters" in f.advice
    echoes = job(*(rank(q, life=Life.CRASHED, exception=CLOSED, ended_s=9.0) for q in range(2)))
    f = only(ended(echoes))
    assert (f.kind, f.culprits, f.victims) == ("rank_lost", (), (0, 1))
    assert f.certainty == "suspected"


def test_a_job_that_was_ended_from_outside_blames_nobody() -> None:
    assert ended(job(*(rank(q, life=Life.KILLED, signal=15, ended_s=9.0) for q in range(2)))) == []


def test_an_exit_is_reported_with_the_condition_that_guards_it() -> None:
    source = "def train():\n    if not isfinite(loss):\n        print(loss)\n        sys.exit(1)\n"
    place = Site("/job/engine.py", 4, "train")
    s = job(rank(0), rank(1, life=Life.CRASHED, exit_code=1, ended_s=9.0, current_site=place, user_stack=(place,)))
    f = only(ended(s, source=lambda _: source))
    assert (f.kind, f.culprits) == ("rank_lost", (1,))
    assert "exit code 1 at engine.py:4 in train, under `if not isfinite(loss)` at line 2" in f.message


def test_an_exit_code_without_an_exception_is_a_choice_of_the_program_at_another_line() -> None:
    """A thread ended the process: the main thread's line is not to be mended."""
    place = Site("/job/engine.py", 3, "train")
    text = "def train():\n    if first:\n        time.sleep(1)\n"
    growing = Finding(kind="memory", cause="growth", severity=Severity.WARNING, culprits=(1,), message="")
    end = rank(1, life=Life.CRASHED, exit_code=7, ended_s=9.0, current_site=place, user_stack=(place,))
    f = only(ended(job(rank(0), end), source=lambda _: text, reported=(growing,)))
    assert (
        "exit code 7 and no exception; its main thread was last seen at engine.py:3 in train; its memory had been"
        in f.message
    )
    assert "os._exit(7)" in f.advice and "fix" not in f.advice and "memory" in f.advice and "if first" not in f.message
    assert (
        how_it_ended(end, rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.2))
        == "rank 1: exit code 7; 2 of 2 failed"
    )


@pytest.mark.parametrize(("silent_s", "reported"), [(9.0, False), (31.0, True)])
def test_a_rank_without_heartbeat_that_others_wait_for_is_lost(silent_s: float, reported: bool) -> None:
    s = waits_for_rank_one(
        100.0 - silent_s, 100.0, life="silent", heartbeat_age_s=silent_s, host="node-b", heard_at="12:00:00"
    )
    found = findings(s, rank_lost, stall)
    assert [(f.kind, f.cause, f.culprits) for f in found] == [("rank_lost", "silent", (1,))] * reported


@pytest.mark.parametrize(("number", "sent"), [(10, True), (12, True), (9, False), (6, False), (11, False)])
def test_a_signal_for_the_users_own_use_was_sent_by_another_process(number: int, sent: bool) -> None:
    f = only(
        ended(
            job(
                rank(0, life=Life.KILLED, signal=number, ended_s=9.0),
                rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.2),
            )
        )
    )
    assert (f.cause == "killed" and "another process sent it" in f.advice) is sent


def test_a_script_that_waits_for_a_key_in_vain_is_the_first_failure() -> None:
    """Nobody was gone: ranks 1 and 2 raised first. A wait of torch's own, in a call, is a timeout of that call."""
    text = "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0//trainer/published/300"
    site, code = Site("/job/train.py", 6, "follow"), "def write():\n    store.set({}, path)\n"
    closed = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4059"
    of_torch = call(op="new_group", group="new_group 1", seq=1, failed=True)

    def found(setter: str = 'f"published/{step}"', known: Any = None, first_s: float = 39.0, **waiting: Any) -> Finding:
        gave_up = {"life": Life.CRASHED, "exception": text, "current_site": site, "user_stack": (site,), **waiting}
        s = job(
            rank(0, life=Life.CRASHED, exception=closed, ended_s=first_s),
            *(rank(q, ended_s=37.0, **gave_up) for q in (1, 2)),
        )
        return only(ended(s, source={site.file: code.format(setter)}.get, late=known))

    f = found()
    assert (f.kind, f.cause, f.culprits, f.certainty) == ("rank_lost", "crashed", (1, 2), "proved")
    assert f.message.endswith(" at train.py:6 in follow; nobody had set that key, as train.py:2 in write does")
    assert f.advice.startswith("find why train.py:2 in write did not run in time: a thread that an exception had ended")
    for other in ("name", '"saved/300"'):
        f = found(other)
        assert f.message.endswith("in follow; nobody had set that key") and "(search for its name)" in f.advice
    assert found(first_s=36.0).culprits == () != f.culprits
    assert found(calls=(of_torch,)).culprits == ()
    late = found(known=((0,), (1, 2)))
    assert (late.kind, late.culprits) == ("timeout", (0,)) and late.message.startswith(
        "a wait for a key of a store timed"
    )


def test_the_only_call_of_os_exit_with_the_code_of_a_rank_is_named() -> None:
    site = Site("/job/fit.py", 5, "main")

    def found(*calls: str) -> Finding:
        text = "".join(f"def f{n}():\n    {x}\n" for n, x in enumerate(calls)) + "dist.barrier()\n"
        at = Site(site.file, 2 * len(calls) + 1, "main")
        lost = rank(1, life=Life.CRASHED, exit_code=3, ended_s=9.0, current_site=at, user_stack=(at,))
        return only(ended(job(rank(0), lost), source={site.file: text}.get))

    f = found("os._exit(3)")
    assert f.message.endswith("last seen at fit.py:3 in main; fit.py:2 in f0 calls os._exit(3)")
    assert f.advice.startswith("find why os._exit(3) at fit.py:2 in f0 ran: it ends the process from any thread")
    for other in (("os._exit(3)", "os._exit(3)"), ("os._exit(code)",), ("os._exit(4)",), ("sys.exit(3)",)):
        f = found(*other)
        assert f.message.endswith(" in main") and "in another thread" in f.advice


@pytest.mark.parametrize(
    ("left", "more", "severity"),
    [
        (1, {}, "info"),
        (0, {}, "error"),  # of its last attempt, or without restarts
        (1, {"exception": "ValueError: x"}, "error"),
        (1, {"current_site": Site("/job/train.py", 1, "main")}, "error"),  # another thread ended it, say
    ],
)
def test_ranks_that_all_leave_by_one_line_are_started_again(left: int, more: dict[str, Any], severity: str) -> None:
    line = Site("/job/train.py", 2, "main")
    end = {"life": Life.CRASHED, "exit_code": 75, "ended_s": 9.0, "current_site": line}
    s = job(rank(0, **end), rank(1, **end | more), restarts_left=left)
    f = only(ended(s, source=lambda _: "if noticed():\n    sys.exit(75)\n"))
    assert (f.kind, f.cause, f.severity) == ("rank_lost", "crashed", severity)
    assert (job_state(s, build(s), [f], final=True)[0] == "ended") is (severity == "info")
    again = "attempt 0 ended; the launcher starts all ranks again (1 restart left)" if left else "the job ended"
    assert f.cost == ("this attempt ended" if severity == "info" else again)


SWEPT = {"life": Life.KILLED, "signal": 15, "ended_s": 9.2}


@pytest.mark.parametrize(
    ("text", "other", "severity"),
    [
        ("if first:\n    sys.exit(75)\n", SWEPT, "info"),
        ("if first:\n    sys.exit(75)\n", {"life": Life.CRASHED, "exception": CLOSED, "ended_s": 9.2}, "info"),
        (
            "if first:\n    sys.exit(75)\n",
            {"life": Life.CRASHED, "exception": "ValueError: x", "ended_s": 9.2},
            "error",
        ),
        ("try:\n    fit()\nexcept OSError:\n    sys.exit(75)\n", SWEPT, "error"),
    ],
)
def test_a_rank_that_leaves_alone_is_no_failure_if_all_are_started_again(
    text: str, other: dict[str, Any], severity: str
) -> None:
    line = Site("/job/train.py", text.count("\n"), "main")
    left = rank(1, life=Life.CRASHED, exit_code=75, ended_s=9.0, current_site=line, user_stack=(line,))
    s = job(rank(0, **other), left, restarts_left=1)
    f = only(ended(s, source=lambda _: text))
    state, how = job_state(s, build(s), [f], final=True)
    assert (f.culprits, f.severity, state) == ((1,), severity, "ended" if severity == "info" else "failed")
    if severity == "info":
        assert f.message.endswith("at line 1, and the launcher starts the ranks again: 1 restart left")
        assert how == "attempt 0 ended: rank 1 left, and the launcher starts all ranks again"


def test_an_attempt_that_fails_is_not_the_end_of_the_job() -> None:
    crashed = rank(1, life=Life.CRASHED, exception="ValueError: x", ended_s=9.0)
    s = job(rank(0, **SWEPT), crashed, restarts_left=2, attempt=1)
    assert only(ended(s)).cost == "attempt 1 ended; the launcher starts all ranks again (2 restarts left)"
    text = "attempt 1 failed, and the launcher starts all ranks again: rank 1: ValueError: x; 1 of 2 failed"
    assert how_it_ended(*s.ranks.values(), restarts_left=2, attempt=1) == text
