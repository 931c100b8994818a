"""The networks: sizes as documented, the same result in both memory formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdiag.train.models import SimpleCNN, build_model, count_parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("simple", 2_474_058), ("resnet18", 11_173_962), ("resnet34", 21_282_122)],  # He et al. 2015, for 10 classes
)
def test_models_have_the_documented_parameters_and_output(name: str, parameters: int) -> None:
    model = build_model(name).eval()
    assert count_parameters(model) == parameters
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        outputs = model(images)
        assert outputs.shape == (2, 10)
        channels_last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert torch.allclose(outputs, channels_last, atol=1e-4)


def test_pooling_before_relu_changes_nothing() -> None:
    model = SimpleCNN().eval()
    x = torch.randn(4, 3, 32, 32)
    usual = list(model.features)
    for i in range(0, len(usual), 4):  # convolution, batch norm, pooling, ReLU
        usual[i + 2], usual[i + 3] = nn.ReLU(), nn.MaxPool2d(2)
    with torch.no_grad():
        assert torch.equal(nn.Sequential(*usual)(x), model.features(x))
