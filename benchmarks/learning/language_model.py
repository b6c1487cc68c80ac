"""Language model: a small decoder-only Transformer on the bytes of Python's standard library (the paper: LM1B, Common Crawl)."""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from learning.task import Split, Task

__all__ = ["LANGUAGE_MODEL", "StagedBytes"]

CONTEXT = 64  # bytes
WIDTH, HEADS, LAYERS = 64, 4, 3
HELD_OUT_SHARE = 0.1  # of the files
HELD_OUT_EXAMPLES = 192


class StagedBytes(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of a text: `CONTEXT` bytes and, as targets, the same one byte on.

    Args:
        text: (N,), uint8.
        before_read: Called before each read, for a source that is slow.
    """

    def __init__(self, text: Tensor, before_read: Callable[[], None] | None = None) -> None:
        self.text, self.before_read = text, before_read

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.before_read is not None:
            self.before_read()
        stretch = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return stretch[:-1], stretch[1:]


class Block(nn.Module):
    """Attention to what came before, then two linear layers; normalised first, both added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_linear = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads_in, self.heads_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.heads_in(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        attended = nn.functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.heads_out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.linear(self.before_linear(x))


class ByteModel(nn.Module):
    """Bytes (B, T) to scores of the next byte (B, T, 256): 170,560 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last_norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.blocks(self.embedding(text) + self.place)
        return nn.functional.linear(self.last_norm(x), self.embedding.weight)


def text_split(seed: int) -> Split:
    """A tenth of the files held out, of which `HELD_OUT_EXAMPLES` stretches are evaluated."""
    files = library_files()
    chance = random.Random(seed)
    chance.shuffle(files)
    count = round(HELD_OUT_SHARE * len(files))
    held_out, train = StagedBytes(_text(files[:count])), StagedBytes(_text(files[count:]))
    chosen = chance.sample(range(len(held_out)), HELD_OUT_EXAMPLES)
    inputs, targets = (torch.stack(column) for column in zip(*(held_out[index] for index in chosen), strict=True))

    def bits_per_byte(model: nn.Module) -> float:
        device = next(model.parameters()).device
        chunks = zip(inputs.split(32), targets.split(32), strict=True)
        losses = [next_byte_loss(model, (text.to(device), target.to(device))).item() for text, target in chunks]
        return sum(losses) / len(losses) / math.log(2)

    return Split(train, bits_per_byte)


def next_byte_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy in nats per byte."""
    text, targets = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), targets.flatten())


def library_files() -> list[Path]:
    """The source files of the standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))


def _text(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


LANGUAGE_MODEL = Task(
    name="language_model",
    title="language model, 0.17 M parameters on Python's standard library",
    metric="bits per byte",
    is_higher_better=False,
    target=3.4,
    margin=0.02,
    points=("after_augmentation", "after_batching"),
    batch_size=8,
    spacing_examples=120,
    window_evaluations=3,
    budget_examples=6_400,
    cached_examples=6_400,
    rates=(5e-4, 1e-3, 2e-3),
    make_split=text_split,
    make_model=ByteModel,
    loss=next_byte_loss,
    quick_target=6.0,
)
