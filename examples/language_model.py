"""A masked language model on a stream of text that each worker reads from its own files. `auto` takes after_augmentation.

A stream has no index, so its examples are reused as they come. Masking, in collate, stands behind the echo: each use has its own.
"""

import tempfile
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_echo import EchoLoader

BLOCK, VOCABULARY, MASK = 32, 128, 0  # of ASCII characters


class TextBlocks(IterableDataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.txt"))

    def __iter__(self):
        worker = get_worker_info()
        for file in self.files[worker.id :: worker.num_workers]:
            yield from torch.tensor(list(file.read_bytes())).split(BLOCK)


def mask(blocks):
    tokens = torch.stack(blocks)
    masked = torch.rand(tokens.shape) < 0.15
    return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, -100)  # -100: no part of the loss


class MaskedLanguageModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = torch.nn.Embedding(VOCABULARY, 32), torch.nn.Parameter(torch.randn(BLOCK, 32))
        self.layer, self.head = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.nn.Linear(32, VOCABULARY)

    def training_step(self, batch):
        tokens, targets = batch
        logits = self.head(self.layer(self.embedding(tokens) + self.position))
        self.loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self.loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    model = MaskedLanguageModel()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            text = 50 * "Each block of the stream is used several times. "
            Path(folder, f"{number}.txt").write_text(text[number : number + 64 * BLOCK])
        loader = DataLoader(TextBlocks(folder), batch_size=16, num_workers=2, collate_fn=mask)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False).fit(model, loader)
    print(f"{loader}\n{loader.counts}, loss {model.loss:.2f}")
