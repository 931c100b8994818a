"""Whose code a file is: one rule for the recorder, dumps, stacks and the screens."""

from __future__ import annotations

import pytest

from distdiag.terms.frames import LIBRARY, PACKAGE, USER, in_torch, owner

SITE = "/opt/conda/lib/python3.11/site-packages/"


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/home/me/train.py", USER),
        ("/home/me/torch/data.py", USER),
        ("/home/me/bin/train.py", USER),
        ("queues.py", USER),
        (f"{SITE}lightning/loop.py", PACKAGE),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", PACKAGE),
        (f"{SITE}torch/serialization.py", LIBRARY),
        (f"{SITE}distdiag/recorder/hooks/step.py", LIBRARY),
        ("/src/distdiag/everywhere.py", LIBRARY),
        ("/src/pytorch/torch/nn/modules/module.py", LIBRARY),
        ("torch/csrc/autograd/engine.cpp", LIBRARY),
        ("/usr/lib64/python3.12/threading.py", LIBRARY),
        ("threading.py", LIBRARY),
        ("<frozen runpy>", LIBRARY),
        ("<string>", LIBRARY),
    ],
)
def test_a_file_has_one_owner(file: str, whose: int) -> None:
    assert owner(file) == whose


def test_the_path_below_torch_is_known_wherever_torch_was_built() -> None:
    assert in_torch(f"{SITE}torch/utils/data/dataloader.py") == "utils/data/dataloader.py"
    assert in_torch("/src/pytorch/torch/distributed/c10d_logger.py") == "distributed/c10d_logger.py"
    assert in_torch("/home/me/train.py") == ""
