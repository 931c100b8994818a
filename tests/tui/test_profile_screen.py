"""The profile screen: any size, hostile names, damaged files, and the key that records a profile."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from distdiag.traces import saved
from distdiag.traces.model import (
    CollectiveTimes,
    Comparison,
    Difference,
    LineTime,
    Missing,
    Operator,
    Profile,
    RankTimes,
)
from distdiag.tui.ui import Ui
from tests.tui.conftest import MakeRun
from tests.tui.drive import showing
from tests.tui.synthetic import HOSTILE, Scenario, make
from tests.tui.test_screens import _check

pytestmark = pytest.mark.usefixtures("frozen")


def a_rank(rank: int, wait_ms: float) -> RankTimes:
    return RankTimes(
        rank=rank, step_ms=100.0, compute_ms=60.0 - wait_ms, comm_ms=30.0 + wait_ms, overlap_ms=10.0,
        exposed_ms=20.0 + wait_ms, wait_ms=wait_ms, idle_ms=20.0, rss_peak_bytes=1 << 30,
        operators=[Operator(name=f"aten::convolution_{rank}", self_ms=41.0, calls=3)] * 8,
        lines=[LineTime(file="/w/train.py", line=88, function="main", ms=33.0, samples=9)],
    )  # fmt: skip


def a_profile(ranks: int = 2, name: str = "all_reduce") -> Profile:
    return Profile(
        run="/runs/x", number=4, first_step=120, steps=3, ranks=[a_rank(r, 0.0 if r == 1 else 25.0) for r in range(ranks)],
        missing=[Missing(rank=9, reason=name)], verdict=f"rank 1 comes last to the collectives {name}",
        collectives=[CollectiveTimes(op=name, group=name, per_step=1, bytes_per_step=1 << 20, skew_ms=25.0, transfer_ms=9.0, late_rank=1, late_share=1.0)],
        comparison=None, trace=f"/runs/x/{name}/trace.json.gz", notes=[name],
    )  # fmt: skip


def save(run: Path, profile: Profile) -> Path:
    folder = run / saved.FOLDER / str(profile.number)
    folder.mkdir(parents=True)
    saved.write(folder, profile)
    return folder / saved.FILE


def test_the_newest_profile_is_shown_by_rank_operator_line_and_collective(tmp_path: Path) -> None:
    run = make(tmp_path / "r", Scenario(ranks=2))
    save(run, a_profile())
    old = msgspec.structs.replace(a_profile(), number=3, verdict="an older one")
    save(run, old)
    shown = "\n".join(_check(run, "profile", Ui(page="profile", interactive=False), 140, 40))
    assert "profile 4: steps 120–122" in shown and "older" not in shown
    assert "rank 1 comes last" in shown and "rank 9: no profile" in shown
    assert "aten::convolution_0" in shown and "41%" in shown and "train.py:88 main" in shown
    assert "all_reduce" in shown and "trace.json.gz" in shown


def test_the_culprit_is_compared_with_its_peer(tmp_path: Path) -> None:
    run = make(tmp_path / "r", Scenario(ranks=2))
    rows = [Difference(kind="line", name="train.py:12 load", culprit_ms=40.0, peer_ms=1.5)]
    save(
        run,
        msgspec.structs.replace(
            a_profile(), comparison=Comparison(culprit=0, peer=1, reason="finding: straggler", rows=rows)
        ),
    )
    shown = "\n".join(_check(run, "profile", Ui(page="profile", interactive=False), 140, 40))
    assert "rank 0 (finding: straggler) compared with rank 1" in shown
    assert "line: train.py:12 load" in shown and "+38.5" in shown


@pytest.mark.parametrize("size", [(60, 10), (80, 24), (99, 12), (140, 40), (250, 70)])
def test_hostile_names_and_many_ranks_fit_every_size(tmp_path: Path, size: tuple[int, int]) -> None:
    run = make(tmp_path / "r", Scenario(ranks=2))
    save(run, a_profile(70, HOSTILE * 20))
    for interactive in (False, True):
        _check(run, "profile", Ui(page="profile", interactive=interactive), *size)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b'{"schema": "distdiag.profile/1", "ranks": 3}', b"\x00" * 99]
)
def test_a_damaged_profile_is_reported_as_one(tmp_path: Path, content: bytes) -> None:
    run = make(tmp_path / "r", Scenario(ranks=2))
    file = save(run, a_profile())
    file.write_bytes(content)
    assert saved.newest(run) is None
    assert "Not a profile" in "\n".join(_check(run, "profile", Ui(page="profile"), 100, 24))


def test_a_key_records_a_profile_and_shows_it(runs: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    real = asyncio.create_subprocess_exec
    run = make(tmp_path / "r", Scenario(ranks=2))

    async def spawn(*argv: str, **options: int) -> asyncio.subprocess.Process:
        seen.append(argv)
        if len(seen) == 1:
            code = (
                "import sys; print('recording 3 steps', file=sys.stderr); sys.exit('distdiag: error: no rank answers')"
            )
        else:
            save(run, a_profile())
            code = ""
        return await real(sys.executable, "-c", code, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)

    async def work() -> None:
        async with showing(run) as d:
            await d.press("0")
            assert "No profile was recorded" in d.text()
            await d.press("R")
            await d.until(lambda: "no rank answers" in d.text())
            assert seen[0][1:] == ("-m", "distdiag", "profile", str(run))
            await d.press("1", "R")
            await d.until(lambda: "profile 4: steps 120–122" in d.text())
        many = runs(Scenario(ranks=67))
        async with showing(many) as d:
            await d.press("R")
            await d.until(lambda: len(seen) == 3)
            assert seen[2][1:] == ("-m", "distdiag", "profile", str(many), "--culprit")
        ended = runs(Scenario(state="ended", ranks=2), "ended")
        async with showing(ended) as d:
            await d.press("0")
            assert "The job has ended" in d.text()
            await d.press("R")
            assert len(seen) == 3

    asyncio.run(work())


def test_a_large_screen_shows_the_source_of_the_lines_that_take_time(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("".join(f"step_{i}()\n" for i in range(1, 200)))
    run = make(tmp_path / "r", Scenario(ranks=2))
    profile = a_profile()
    line = LineTime(file=str(source), line=88, function="main", ms=33.0, samples=9)
    save(run, msgspec.structs.replace(profile, ranks=[msgspec.structs.replace(r, lines=[line]) for r in profile.ranks]))

    async def work() -> None:
        async with showing(run, (160, 60)) as d:
            text = await d.press("0")
            assert "train.py:88 main   33.0 ms a step" in text and "› 88 │ step_88()" in text
            assert "rank 1 (100%)" in await d.resize(80, 24), "the last column is whole"

    asyncio.run(work())
