"""One training whose reader has workers on other machines of a Ray cluster, here three that this program simulates.

pip install 'lightning-echo[ray]'

On a real cluster, only the callback is different from any other training::

    ray.init(address="auto")
    Trainer(callbacks=[EchoCallback(share={"name": "train", "cluster": "ray", "cluster_workers": 32})])
"""

import logging
import time
import warnings

import ray
import torch
from lightning import LightningModule, Trainer
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoCallback


class Slow(Dataset):
    """Each example takes 20 ms."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((8,), index / 1024), torch.tensor([index / 128])


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds_of_training(share):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[EchoCallback(share=share, summary=False)], **quiet)
    began = time.perf_counter()
    trainer.fit(Regression(), DataLoader(Slow(), batch_size=32, shuffle=True, num_workers=2))
    return time.perf_counter() - began


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*without tokens")  # nothing leaves this machine
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    share = {"name": "ray_workers", "cluster": "ray", "linger_seconds": 5}
    alone = seconds_of_training(share)
    together = seconds_of_training({**share, "name": "ray_workers_6", "cluster_workers": 6})
    print(f"2 workers: {alone:.0f} s; and 6 on three other nodes: {together:.0f} s, the start of the readers in both")
    ray.shutdown()
    cluster.shutdown()
