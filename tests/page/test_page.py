"""The rank page: another process reads what a rank has written, whatever happens to the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distdiag.page.layout import CALLS, FAILED_CALL, HEAP_BYTES, MAGIC, page_path
from distdiag.page.reader import PageError, PageReader
from distdiag.page.writer import PageWriter
from distdiag.terms.ranks import fold_ranks, unfold_ranks


def fresh(tmp_path: Path, rank: int = 0) -> PageWriter:
    w = PageWriter(page_path(tmp_path, rank))
    w.header.rank = rank
    w.publish()
    return w


def test_a_page_is_invisible_until_it_is_published(tmp_path: Path) -> None:
    w = PageWriter(page_path(tmp_path, 3))
    assert not page_path(tmp_path, 3).exists()
    w.publish()
    assert PageReader(page_path(tmp_path, 3)).header().magic == MAGIC


def test_texts_are_stored_once_and_read_back(tmp_path: Path) -> None:
    w = fresh(tmp_path)
    first, second = w.text("train.py"), w.text("Δ self – ünïcödé")
    assert w.text("train.py") == first
    r = PageReader(w.path)
    assert (r.text(first), r.text(second), r.text(0)) == ("train.py", "Δ self – ünïcödé", "")
    assert r.site(0) == [] and r.site(w.site("/a/b c.py", 12, "f")) == [("/a/b c.py", 12, "f")]
    callers = [("/a/d.py", 7, "g"), ("/a/e.py", 1, "<module>")]
    assert r.site(w.site("/a/b c.py", 12, "f", *callers)) == [("/a/b c.py", 12, "f"), *callers]


def test_texts_of_several_threads_keep_apart(tmp_path: Path) -> None:
    w, every = fresh(tmp_path), sys.getswitchinterval()
    found: dict[str, int] = {}

    def add(thread: int) -> None:
        found.update({text: w.text(text) for text in (f"{thread} {i}" * (1 + i % 7) for i in range(600))})

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(every)
    r = PageReader(w.path)
    assert [text for text, at in found.items() if r.text(at) != text] == []


@pytest.mark.parametrize(
    "text",
    ["/a.py\0x\0f", "/a.py\x007", "/a.py\x007\0f\0", "\0".join(["/a.py", "7", "f"] * 9), "/a.py\0" + "9" * 10 + "\0f"],
)
def test_a_damaged_site_is_recognised(tmp_path: Path, text: str) -> None:
    w = fresh(tmp_path)
    with pytest.raises(PageError, match="no site"):
        PageReader(w.path).site(w.text(text))


def test_a_full_heap_drops_and_counts_instead_of_failing(tmp_path: Path) -> None:
    w = fresh(tmp_path)
    for i in range(HEAP_BYTES // 900):
        w.text(f"{i:05d}" + "x" * 1000)
    assert w.header.dropped > 0
    assert w.text("one more" + "y" * 1000) == 0
    assert w.header.heap_used <= HEAP_BYTES


def test_the_ring_of_calls_wraps(tmp_path: Path) -> None:
    w = fresh(tmp_path)
    for n in range(1, CALLS + 11):
        assert w.write_call(1, 2, n, *range(4, 22), 5, 21) == n
    assert not w.has_call(10) and w.has_call(11)
    for old in (10, CALLS + 10):
        w.call_left(old, 77, 7, failed=True)
    page = PageReader(w.path).read()
    assert page.header.n_calls == CALLS + 10
    assert sorted(c.seq for c in page.calls) == list(range(11, CALLS + 11))
    last = page.calls[9]  # an update of call 10 must not reach the record that replaced it
    assert (last.number, last.wait_ns, last.left_ns, last.flags, last.step) == (CALLS + 10, 7, 77, 5 | FAILED_CALL, 21)
    assert [c.left_ns for c in page.calls].count(77) == 1


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * (1 << 20)])
def test_a_file_that_is_not_a_page_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.page"
    path.write_bytes(content)
    with pytest.raises(PageError, match="rank_00000"):
        PageReader(path)


def test_a_page_of_another_version_is_refused(tmp_path: Path) -> None:
    w = fresh(tmp_path)
    w.header.version = 99
    with pytest.raises(PageError, match="version 99"):
        PageReader(w.path)


def test_the_page_survives_sigkill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from distdiag.page.layout import page_path\n"
        "from distdiag.page.writer import PageWriter\n"
        "w = PageWriter(page_path(Path(sys.argv[1]), 1))\n"
        "w.publish()\n"
        "w.header.step = 41\n"
        "w.header.exception = w.text('about to call all_reduce')\n"
        "w.header.step = 42\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    r = PageReader(page_path(tmp_path, 1))
    assert r.header().step == 42
    assert r.text(r.header().exception) == "about to call all_reduce"


def test_a_forked_child_writes_into_its_own_copy(tmp_path: Path) -> None:
    code = (
        "import os, sys, json\n"
        "from distdiag.recorder import session\n"
        "s = session.start(sys.argv[1], 'x', 0, 1, 0)\n"
        "h = s.recorder.header\n"
        "h.step = 5\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    h.step = 99\n"
        "    s.recorder.page.text('from the child')\n"
        "    os._exit(0 if h.step == 99 and session.current is None else 1)\n"
        "code = os.waitpid(pid, 0)[1]\n"
        "print(json.dumps([code, h.step]))\n"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISTDIAG_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "R")],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "[0, 5]", done.stderr


@pytest.mark.parametrize("ranks", [[], [0], [0, 1, 2, 3, 8], [5, 3, 4], list(range(1024)), [1, 3, 5]])
def test_ranks_fold_and_unfold(ranks: list[int]) -> None:
    assert list(unfold_ranks(fold_ranks(ranks))) == sorted(ranks)
    assert len(fold_ranks(list(range(4096)))) < 10
