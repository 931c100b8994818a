"""Networks for 32x32 images: SimpleCNN, and ResNet-18/34 as they are used on CIFAR (He et al. 2015; 3x3 stem, no pooling)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distdiag.train.strategies.split import Piece

CLASSES = 10


class SpatialMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(2, 3))


class SimpleCNN(nn.Module):
    """Three convolutions (64, 128, 256) with batch norm and pooling, a layer of 512, dropout; 2,474,058 parameters.

    Pooling comes before ReLU: both are monotone, so the result is the same, at a quarter of the ReLU's cost.
    """

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 64), (64, 128), (128, 256)):
            # batch norm has its own bias
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.MaxPool2d(2),
                nn.ReLU(inplace=True),
            ]
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(256 * 4 * 4, 512)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(512, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.features(images).flatten(1)
        return self.classifier(self.dropout(F.relu(self.hidden(x))))

    def pieces(self) -> list[Piece]:
        own = [Piece(f"features.{i}" if list(m.parameters()) else "", m) for i, m in enumerate(self.features)]
        head = [Piece("", nn.Flatten()), Piece("hidden", self.hidden), Piece("", nn.ReLU()), Piece("", self.dropout)]
        return [*own, *head, Piece("classifier", self.classifier)]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of residual blocks (64, 128, 256, 512 channels), mean over the image, one linear layer."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        channels = 64
        for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(channels, width, stride))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(512, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.stages(self.stem(images)).mean(dim=(2, 3)))

    def pieces(self) -> list[Piece]:
        blocks = [Piece(f"stages.{i}", block) for i, block in enumerate(self.stages)]
        return [Piece("stem", self.stem), *blocks, Piece("", SpatialMean()), Piece("classifier", self.classifier)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "simple": SimpleCNN,
    "resnet18": lambda: ResNet((2, 2, 2, 2)),
    "resnet34": lambda: ResNet((3, 4, 6, 3)),
}


def build_model(name: str) -> nn.Module:
    return MODELS[name]()


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
