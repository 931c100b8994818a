"""The command line: every option has help and a default; a mistake is one line of error and one of hint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import click
import pytest

from distdiag.errors import DistdiagError
from distdiag.train.config import TrainConfig, build_command, parse_arguments


def test_no_option_at_all_gives_the_documented_defaults() -> None:
    assert parse_arguments([]) == TrainConfig(strategy="single")


def test_options_may_follow_two_dashes() -> None:
    """torchrun's own parser trips over a bare --monitor (it has a --monitor-interval), so options follow `--`."""
    assert parse_arguments(["--", "--monitor"]).monitor


def test_every_field_has_a_docstring_and_the_help_states_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    helps = {o.name: str(o.help) for o in build_command().params if isinstance(o, click.Option)}
    for f in fields(TrainConfig):
        assert "--" + f.name.replace("_", "-") in printed
        assert len(helps[f.name].partition("(default")[0]) > 15, f.name
        if f.name not in ("inject", "resume"):  # no injection and no resume by default
            assert "efault: " in helps[f.name], f.name


def test_options_are_parsed() -> None:
    config = parse_arguments(
        ["--max-steps", "7", "--monitor", "--no-channels-last", "--lr", "0.5", "--inject", "unused,uneven@rank0"]
    )
    assert (config.max_steps, config.monitor, config.channels_last, config.lr) == (7, True, False, 0.5)
    assert [f.kind for f in config.inject] == ["unused", "uneven"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--batch-size", "-3"], "--batch-size must be at least 1"),
        (["--max-steps", "many"], "--max-steps takes a whole number, not 'many'"),
        (["--lr", "nan"], "--lr must be at least 0.0"),
        (["--lr", "fast"], "--lr takes a number, not 'fast'"),
        (["--accumulate", "0"], "--accumulate must be at least 1"),
        (["--checkpoint-every", "-2"], "--checkpoint-every must be at least -1"),
        (["--model", "vgg"], "'vgg' is not one of 'simple', 'resnet18'"),
        (["--amp", "int8"], "'int8' is not one of 'auto'"),
        (["--epoch", "3"], "No such option '--epoch'"),
        (["--data"], "Option '--data' requires an argument"),
        (["--inject", "deadlock@rank7:step3"], "there is no rank 7, the job has 1"),
        (["--inject", "crash@rank0:step30", "--max-steps", "20"], "the job ends at step 20"),
        (["--inject", "meteor"], "there is no fault 'meteor'"),
    ],
)
def test_bad_options_are_one_line_and_a_hint(argv: list[str], words: str) -> None:
    with pytest.raises(DistdiagError) as raised:
        parse_arguments(argv)
    assert words in raised.value.message
    assert raised.value.code == 2
    assert raised.value.hint
    assert "\n" not in raised.value.message + raised.value.hint


def test_a_bad_option_ends_the_process_with_2_and_costs_no_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "distdiag.train", "--batch-size", "none"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {
        line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")
    }
    printed = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert ended.returncode == 2
    assert printed == [
        "distdiag: error: --batch-size takes a whole number, not 'none'",
        "hint: for example --batch-size 1",
    ]
    assert ended.stdout == ""
    assert "click" in imported
    assert not imported & {"torch", "numpy", "pandas", "textual"}
