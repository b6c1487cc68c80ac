"""Audio: waveforms of different lengths, bucketed by a `batch_sampler`, padded by collate. `auto` takes after_batching.

What makes up a batch is the sampler's decision, so whole batches are reused; the gain is drawn in the model, anew for each use.
"""

import tempfile
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from scipy.io import wavfile
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from lightning_echo import EchoLoader


class Tones(Dataset):  # the label begins the name; sorted, so that neighbours are of similar length
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.wav"), key=lambda file: file.stat().st_size)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        _rate, samples = wavfile.read(self.files[index])
        return torch.tensor(samples), int(self.files[index].name[0])


def pad(examples):
    waves, labels = zip(*examples, strict=True)
    return pad_sequence(waves, batch_first=True), torch.tensor([len(wave) for wave in waves]), torch.tensor(labels)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.filters, self.head = torch.nn.Conv1d(1, 16, kernel_size=40, stride=20, bias=False), torch.nn.Linear(16, 2)

    def training_step(self, batch):
        waves, lengths, labels = batch
        waves = waves * (0.5 + torch.rand(len(waves), 1, device=self.device))  # a random gain
        energy = self.filters(waves[:, None]).square().sum(2) / lengths[:, None]
        return torch.nn.functional.cross_entropy(self.head(energy.log()), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(192):
            time = torch.arange(2000 + 6000 * torch.rand(())) / 8000
            wavfile.write(f"{folder}/{number % 2}-{number}.wav", 8000, (2000 * (1 + number % 2) * time).sin().numpy())
        buckets = torch.arange(192).reshape(-1, 16).tolist()
        loader = DataLoader(Tones(folder), batch_sampler=SubsetRandomSampler(buckets), num_workers=2, collate_fn=pad)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
    print(f"{loader}\n{loader.counts}")
