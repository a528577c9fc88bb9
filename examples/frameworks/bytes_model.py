"""A small model that predicts the next byte of a text, for the examples that need no Hub model."""

from pathlib import Path

import torch
from torch import nn

LENGTH, WIDTH = 32, 64


class NextByte(nn.Module):
    """Transformer from (batch, LENGTH) bytes to (batch, LENGTH, 256) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        logits: torch.Tensor = self.head(self.layers(self.embed(inputs) + self.places(places), mask, is_causal=True))
        return logits


def loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats of each next byte."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def windows(path: Path = Path("definitions.csv")) -> torch.Tensor:
    """Return a text as rows of LENGTH + 1 bytes, without the incomplete last row."""
    text = torch.tensor(list(path.read_bytes()))
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return rows
