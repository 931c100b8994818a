"""Data for the reference job that these tests start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.images import binary_folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small data set: 125 steps of two ranks with 8 samples.

    Without a folder each job would first look for a network, then download CIFAR-10 or spend 5 s on generating 12,000 images.
    """
    return binary_folder(tmp_path_factory.mktemp("images"), train=2000, test=50)
