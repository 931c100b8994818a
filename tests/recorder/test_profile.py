"""A rank's part of a profile, in this process: its answer on success, and for each kind of failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distdiag.page import profile_files
from distdiag.page.profile_files import DONE, FAILED, Answer, Request
from distdiag.recorder import profile, state
from tests.jobs import wait_for

MINUTE_NS = 60 * 10**9


class Rank:
    """A rank that trains in this thread with the real profiler; only its session and its steps are simulated."""

    def __init__(self, folder: Path) -> None:
        self.header = SimpleNamespace(rank=2, step=0, dropped=0)
        self.watcher: Callable[[int], None] | None = None
        self.session = SimpleNamespace(
            recorder=SimpleNamespace(header=self.header, main_thread=threading.get_ident(), device=None),
            accounting=SimpleNamespace(watch_steps=self.watch),
            pages=folder / "pages",
            run_dir=folder / "run",
            profile=None,
        )
        self.session.pages.mkdir()
        self.session.run_dir.mkdir()

    def watch(self, watcher: Callable[[int], None] | None) -> None:
        self.watcher = watcher

    def ask(self, first_step: int, steps: int = 2, number: int = 1, in_ns: int = MINUTE_NS) -> Answer:
        request = Request(number, first_step, steps, max(1, time.monotonic_ns() + in_ns))
        profile_files.write(profile_files.request_path(self.session.pages, 2), request)
        profile.take(self.session)
        return self.answer()

    def answer(self) -> Answer:
        found = profile_files.read_answer(profile_files.answer_path(self.session.pages, 2))
        assert found is not None
        return found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.mm(torch.ones(32, 32), torch.ones(32, 32))
            time.sleep(0.08)
            self.header.step += 1
            if self.watcher is not None:
                self.watcher(self.header.step)

    def ended(self) -> Answer:
        return wait_for(lambda: ((a := self.answer()).state in (DONE, FAILED) and a) or None, 30, "the answer")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(state, "RAISE", True)
    return Rank(tmp_path)


def test_requested_steps_are_recorded_and_all_hooks_removed(rank: Rank) -> None:
    before = torch.autograd.profiler._prepare_profiler, torch.autograd.profiler._enable_profiler
    assert rank.ask(first_step=3).state == "waiting"
    rank.train(6)
    found = rank.ended()
    assert (found.state, found.detail) == (DONE, "")
    assert [step for step, _ in found.boundaries] == [2, 3, 4]
    assert found.samples > 0
    assert any(file == __file__ for file, *_ in found.lines)
    events = json.loads(profile_files.trace_path(rank.session.run_dir, 1, 2).read_bytes())["traceEvents"]
    assert sum(e["name"] == "aten::mm" for e in events) == 2
    assert rank.watcher is None
    assert before == (torch.autograd.profiler._prepare_profiler, torch.autograd.profiler._enable_profiler)
    assert not torch.autograd._profiler_enabled()


def test_a_rank_that_is_past_the_first_step_records_the_rest(rank: Rank) -> None:
    rank.train(4)
    rank.ask(first_step=3, steps=4)
    rank.train(4)
    assert [step for step, _ in rank.ended().boundaries] == [5, 6]


@pytest.mark.parametrize(
    ("first_step", "in_ns", "reason"),
    [(1, MINUTE_NS, "past step 2"), (50, -1, "did not reach step 50 in time")],
    ids=["past", "late"],
)
def test_a_request_for_past_steps_fails(rank: Rank, first_step: int, in_ns: int, reason: str) -> None:
    rank.train(3)
    rank.ask(first_step=first_step, in_ns=in_ns)
    rank.train(1)
    found = rank.answer()
    assert found.state == FAILED
    assert reason in found.detail
    assert rank.watcher is None


def test_one_profile_at_a_time_and_one_that_never_began_is_dropped(rank: Rank) -> None:
    rank.ask(first_step=50)
    assert rank.ask(first_step=60, number=2).detail == "another profile is being taken"
    rank.session.profile.request.deadline_ns = 1  # the deadline passes
    assert rank.ask(first_step=2, number=3).state == "waiting"
    rank.train(4)
    assert (rank.ended().state, rank.ended().number) == (DONE, 3)


def test_without_kineto_it_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    found = rank.ask(first_step=1)
    assert (found.state, "no Kineto" in found.detail) == (FAILED, True)
    assert rank.watcher is None


def test_a_full_disk_and_a_directory_that_cannot_be_written_cost_only_the_profile(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "SPARE_BYTES", 1 << 62)
    rank.ask(first_step=1)
    rank.train(4)
    assert "are free on the disk" in rank.ended().detail
    assert not list(rank.session.run_dir.glob("profile/1/*"))
    monkeypatch.undo()
    (rank.session.run_dir / "profile" / "2").write_text("in the way")
    rank.ask(first_step=7, number=2)
    rank.train(6)
    assert rank.ended().state == FAILED and "Error" in rank.ended().detail, rank.ended().detail


def test_the_jobs_own_profiler_has_priority(rank: Rank) -> None:
    with torch.autograd.profiler.profile(use_kineto=True):
        rank.ask(first_step=1)
        rank.train(1)
        assert "its own profiler right now" in rank.answer().detail
    rank.ask(first_step=2, steps=40, number=2)
    rank.train(2)
    with torch.autograd.profiler.profile(use_kineto=True) as own:
        rank.train(2)
    assert rank.ended().detail == "the job started its own profiler"
    assert sum(e.count for e in own.key_averages() if e.key == "aten::mm") == 2


def test_the_end_of_the_script_ends_the_recording(rank: Rank) -> None:
    rank.ask(first_step=1, steps=40)
    rank.train(2)
    rank.session.profile.end()
    assert "the script ended in step 3" in rank.answer().detail
    assert not torch.autograd._profiler_enabled()
