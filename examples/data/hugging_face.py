"""Hugging Face `datasets`, map-style: what `set_transform` does is one function. `auto` takes after_augmentation.

Nothing says where in that function the augmentation begins, so that an echo repeats the random shift of its first use. The second
loader says it: `with_transform` only decodes, and `augment` stands by itself. There `auto` takes before_augmentation.
"""

import torch
from datasets import Dataset
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset


def decode(rows):  # datasets gives several rows at once: lists of columns
    return {"wave": [torch.tensor(wave) for wave in rows["wave"]], "label": rows["label"]}


def shift(wave):
    return wave.roll(int(torch.randint(64, ())))


def decode_and_shift(rows):
    return {"wave": [shift(wave) for wave in decode(rows)["wave"]], "label": rows["label"]}


def augment(row):
    return {"wave": shift(row["wave"]), "label": row["label"]}


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.network(batch["wave"]), batch["label"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    labels = [number % 2 for number in range(192)]
    data = Dataset.from_dict({"wave": [(torch.arange(64) * (1 + label) / 8).sin().tolist() for label in labels], "label": labels})
    cut = StagedDataset.of(data.with_transform(decode), augment=augment)
    data.set_transform(decode_and_shift)
    for each in (data, cut):
        loader = DataLoader(each, batch_size=16, shuffle=True, num_workers=2)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
        print(f"{loader}\n{loader.counts}")
