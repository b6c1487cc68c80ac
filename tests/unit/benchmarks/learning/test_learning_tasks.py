"""The data of the tasks: nothing that is trained on is evaluated, labels are true, and metrics are those of known answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning import detection, glyphs
from learning.digits import digits_split
from learning.glyphs import CHARACTERS, rendered
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Constant(nn.Module):
    """The same scores whatever comes; it keeps what it was asked."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores, self.asked = nn.Parameter(scores), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(x)
        return self.scores.expand(*x.shape[: 1 if x.ndim == 4 else 2], -1)


def as_set(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images}


def test_digits_that_are_trained_on_are_not_evaluated() -> None:
    from sklearn.datasets import load_digits

    train = as_set(digits_split(1).train.images)
    every = as_set(np.round(load_digits().images * (255 / 16)).astype(np.uint8))
    assert (len(every), len(train)) == (1797, 1197)  # no scan is there twice
    assert train < every


def test_characters_that_are_trained_on_are_not_evaluated_and_each_seed_holds_out_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = rendered(60, tmp_path)
    monkeypatch.setattr(glyphs, "rendered", lambda: (images, labels))
    monkeypatch.setattr(glyphs, "COUNT", 60)
    monkeypatch.setattr(glyphs, "HELD_OUT", 10)
    by_image = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    held_out = []
    for seed in (1, 1, 2):
        split, asked = glyphs.glyphs_split(seed), Constant(torch.eye(len(CHARACTERS))[0])
        split.evaluate(asked)
        evaluated = (torch.cat(asked.asked)[:, 0] * 255).round().to(torch.uint8).numpy()
        held_out.append(as_set(evaluated))
        assert (len(split.train), len(held_out[-1])) == (50, 10)
        assert held_out[-1] | as_set(split.train.images) == set(by_image)
        for image, label in (split.train.load(index) for index in range(50)):
            assert by_image[np.array(image).tobytes()] == label
    assert held_out[0] == held_out[1] != held_out[2]


class Answers(nn.Module):
    """Finds nothing, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.asked = nn.Parameter(torch.zeros(1)), []

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        self.asked.extend(images)
        nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
        return [nothing] * len(images)


def test_canvases_of_training_and_held_out_share_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocotools")
    scans = np.stack([np.full((8, 8), (k + 1) * 16 / 255) for k in range(200)])  # told apart by their brightness
    monkeypatch.setattr(detection, "load_digits", lambda: SimpleNamespace(images=scans, target=np.arange(200) % 10))
    monkeypatch.setattr(detection, "HELD_OUT_SCANS", 80)
    split, asked = detection.detection_split(5), Answers()
    assert split.evaluate(asked) == 0
    trained = {value for index in range(300) for value in np.array(split.train.load(index)[0]).flat} - {0}
    held_out = {round(255 * value.item()) for image in asked.asked for value in image.unique()} - {0}
    assert len(asked.asked) == detection.HELD_OUT_CANVASES
    assert len(trained) == 120
    assert 60 < len(held_out) <= 80
    assert not trained & held_out
