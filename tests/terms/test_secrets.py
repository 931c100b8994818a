"""Secrets on a command line are masked when stored and when shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from distdiag.store.reader import open_run
from distdiag.store.writer import Writer
from distdiag.terms.secrets import KEEP, mask, mask_source, mask_text
from tests.jobs import clean_env


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        ("--hf-token abc", "--hf-token ***"),
        ("--hf_token=abc", "--hf_token=***"),
        ("--api-key=a=b", "--api-key=***"),
        ("--wandb.apikey abc --lr 1", "--wandb.apikey *** --lr 1"),
        ("--db-password -x", "--db-password ***"),
        ("-secret abc", "-secret ***"),
        ("--secret --lr 1", "--secret --lr 1"),
        ("WANDB_API_KEY=abc", "WANDB_API_KEY=***"),
        ("+model.client_secret=abc", "+model.client_secret=***"),
        ("--data https://me:abc@host/x", "--data https://me:***@host/x"),
        ("--token=", "--token="),
        (
            "--auth-tokens a --tokenizer_hf_token=b --max-token-secret=c",
            "--auth-tokens *** --tokenizer_hf_token=*** --max-token-secret=***",
        ),
        ("--set=logger.api_key=a --set=optim.lr=0.1", "--set=logger.api_key=*** --set=optim.lr=0.1"),
        ("https://abc@host/x https://host/?a=1&token=b&c=2", "https://***@host/x https://host/?a=1&token=***&c=2"),
        ("postgres://me:a@b@host/db redis://:abc@host", "postgres://me:***@host/db redis://:***@host"),
        ("--tokenizer gpt2 --max-tokens 4096 --tokens 8 --num-key-value-heads 8", None),
        ("train.py --lr 0.1 keys/train.py key", None),
    ],
)
def test_values_of_secrets_are_masked(given: str, masked: str | None) -> None:
    assert " ".join(mask(given.split())) == (masked or given)
    assert mask_text(given) == (masked or given)


def test_secrets_in_invalid_shell_text_are_masked() -> None:
    assert mask_text("train.py --name it's --token abc") == "train.py --name it's --token ***"


def test_a_command_line_of_four_times_the_length_takes_no_sixteen_times_as_long() -> None:
    def seconds(length: int) -> float:
        began_s = time.process_time()
        assert mask_text("train.py --token abc " + "x" * length).startswith("train.py --token *** x")
        return time.process_time() - began_s

    short, long = (min(seconds(length) for _ in range(3)) for length in (100_000, 400_000))
    assert long < 8 * short + 0.1  # with shlex it would be an hour for ten million


@pytest.mark.parametrize(("keep", "shown"), [(None, "***"), ("1", "abc")])
def test_a_recorded_run_shows_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str | None, shown: str
) -> None:
    """A database written by an older version has the unmasked command."""
    monkeypatch.delenv(KEEP, raising=False)
    if keep:
        monkeypatch.setenv(KEEP, keep)
    with Writer(tmp_path) as writer:
        writer.meta(command="python train.py --token abc")
    with open_run(tmp_path) as run:
        assert run.meta["command"] == f"python train.py --token {shown}"


@pytest.mark.parametrize(("keep", "stored"), [("0", "--api-key *** X_SECRET=***"), ("1", "--api-key abc X_SECRET=def")])
def test_the_recorder_stores_no_secrets(tmp_path: Path, keep: str, stored: str) -> None:
    import subprocess

    code = "from distdiag.recorder.session import _command; print(_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--api-key", "abc", "X_SECRET=def"],
        env=clean_env(tmp_path, {KEEP: keep}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.rstrip().endswith(stored), done


@pytest.mark.parametrize(
    ("source", "masked"),
    [
        ('API_KEY = "abc123"', 'API_KEY = "***"'),
        ("login(token='abc123', retries=3)", "login(token='***', retries=3)"),
        ('os.environ["WANDB_API_KEY"] = "abc123"', 'os.environ["WANDB_API_KEY"] = "***"'),
        ('config = {"password": "abc123"}', 'config = {"password": "***"}'),
        ("secret: str = 'abc123'", "secret: str = '***'"),
        ('init("https://me:abc123@host/db")', 'init("https://me:***@host/db")'),
        ('tokenizer = "gpt2"', 'tokenizer = "gpt2"'),
        ("if token == 'x':\n    dist.barrier()", "if token == 'x':\n    dist.barrier()"),
        ("for key, value in sorted(state.items()):", "for key, value in sorted(state.items()):"),
    ],
)
def test_literals_of_secrets_in_a_source_are_masked(source: str, masked: str) -> None:
    assert mask_source(source) == masked
