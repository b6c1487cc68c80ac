"""Hugging Face `datasets`, streaming from JSON files: `load_dataset(..., streaming=True)`. `auto` takes after_augmentation.

A stream has no index: its examples are reused as they leave the last `map`. So what is random belongs behind the echo: tokens are
dropped in collate, again for each use. The first epoch lasts until the stream ends, with about three times the steps. The second
one has as many as without echoing, since this stream has a state: the rest of a pass follows in the next epoch.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader

TOKENS = 32


def tokenize(row):
    return {"tokens": [ord(letter) % TOKENS for letter in row["text"]], "label": row["label"]}


def drop_tokens(rows):
    tokens = torch.tensor([row["tokens"] for row in rows])
    return tokens * (torch.rand(tokens.shape) > 0.1), torch.tensor([row["label"] for row in rows])


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.EmbeddingBag(TOKENS, 16), torch.nn.Linear(16, 2)

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.head(self.embedding(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{number}.jsonl" for number in range(4)]  # a worker reads whole files
        for file in files:
            rows = [{"text": ("more" if number % 2 else "less") * 4, "label": number % 2} for number in range(32)]
            Path(file).write_text("\n".join(map(json.dumps, rows)))
        stream = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=folder).map(tokenize)
        loader = DataLoader(stream.select_columns(["tokens", "label"]), batch_size=16, num_workers=2, collate_fn=drop_tokens)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
    print(f"{loader}\n{loader.counts}")
