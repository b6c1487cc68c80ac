"""Model and data of the programs that are started from a command line: nothing here knows of echoing."""

from lightning import LightningDataModule
from minimal import Classifier, SlowWaves, add_noise
from torch.utils.data import DataLoader


class WavesDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 32, num_workers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        options = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(SlowWaves(transform=add_noise), shuffle=True, **options)


class WaveClassifier(Classifier):
    """Says at the end what it was trained on."""

    def training_step(self, batch):
        self.loss = super().training_step(batch)
        return self.loss

    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        print(f"{loader}\n{getattr(loader, 'counts', 'not echoed')}, last loss {self.loss:.6f}")
