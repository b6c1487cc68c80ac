"""The paper's data sets as the scripts read them, in miniature."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from learning.__main__ import main
from learning.paper import cifar10_task
from torchvision import datasets


@pytest.fixture
def cifar_root(tmp_path, monkeypatch) -> Path:
    """CIFAR-10's files, with 100 images in all; their checksums are not those that torchvision knows."""
    folder = tmp_path / datasets.CIFAR10.base_folder
    folder.mkdir()
    images = np.random.default_rng(0).integers(256, size=(20, 3072), dtype=np.uint8)
    for name, _ in [*datasets.CIFAR10.train_list, *datasets.CIFAR10.test_list]:
        (folder / name).write_bytes(pickle.dumps({"data": images, "labels": [i % 10 for i in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    return tmp_path


def test_tuning_seeds_hold_out_a_part_of_the_training_set(cifar_root) -> None:
    task = cifar10_task(cifar_root)
    assert len(task.make_split(1).train) == 100  # five files of 20
    assert len(task.make_split(101).train) == 90


def test_accuracy_is_of_the_official_held_out_set(cifar_root) -> None:
    from torch import eye, nn

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(eye(10)[:1])

        def forward(self, images):
            return self.weight.expand(len(images), -1)

    split = cifar10_task(cifar_root).make_split(1)
    assert split.evaluate(Zero()) == pytest.approx(10.0)  # two of twenty
    image, label = split.train[0]
    assert image.shape == (3, 32, 32)
    assert label == 0


def test_data_without_a_folder_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["learning", "--data", "cifar10"])
    with pytest.raises(SystemExit, match="--data cifar10 needs --root: the folder that holds it"):
        main()
