"""Networks that torchvision does not have, written out short: U-Net, Plain20 and a language model of LSTM layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _twice(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Ronneberger et al. 2015 with batch norm and padding: each level's output is used again at the far end."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.bottom = _twice(widths[-2], widths[-1])
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(_twice(2 * w, w) for w in widths[-2::-1])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for block in self.down:
            x = block(x)
            across.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([across.pop(), lift(x)], dim=1))
        return self.head(x)


class Plain20(nn.Module):
    """Plain-20 of He et al. 2016 for images of 32 × 32: 19 convolutions and a linear layer, no shortcuts."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [width] * 7 + [2 * width] * 6 + [4 * width] * 6
        layers = []
        for before, after in zip([3, *widths[:-1]], widths, strict=True):
            stride = 2 if after > before > 3 else 1
            conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
            layers.append(nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU()))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(dim=(2, 3)))


class LstmModel(nn.Module):
    """Embedding, LSTM layers with dropout between them, and a head over the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        # A module for each layer: as one module of several, cuDNN runs them all as a single op.
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids))
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        return self.head(x)
