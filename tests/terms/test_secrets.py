"""Secrets on a command line are masked when stored and when shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distdiag.store.reader import open_run
from distdiag.store.writer import Writer
from distdiag.terms.secrets import KEEP, mask, mask_text
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
        ("--tokenizer gpt2 --max-tokens 4096 --tokens 8 --num-key-value-heads 8", None),
        ("train.py --lr 0.1 keys/train.py key", None),
    ],
)
def test_values_of_secrets_are_masked(given: str, masked: str | None) -> None:
    assert " ".join(mask(given.split())) == (masked or given)
    assert mask_text(given) == (masked or given)


def test_secrets_in_invalid_shell_text_are_masked() -> None:
    assert mask_text("train.py --name it's --token abc") == "train.py --name it's --token ***"


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
