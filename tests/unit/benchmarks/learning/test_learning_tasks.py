"""The data and models of the tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from learning.digits import DIGITS, digits_split, make_cnn
from learning.language_model import CONTEXT, ByteModel, StagedBytes, library_files, text_split
from learning.residual import RESIDUAL, ResidualNetwork
from torch import nn


def as_set(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images}


class Constant(nn.Module):
    """The same scores whatever comes."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(*x.shape[: 1 if x.ndim == 4 else 2], -1)


def test_a_seed_decides_the_split() -> None:
    first, again, other = (digits_split(seed).train for seed in (1, 1, 2))
    assert len(first) == 1197 == DIGITS.cached_examples
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_what_is_trained_on_is_not_evaluated() -> None:
    from sklearn.datasets import load_digits

    train = as_set(digits_split(1).train.images)
    every = as_set(np.round(load_digits().images * (255 / 16)).astype(np.uint8))
    assert len(every) == 1797  # no scan is there twice
    assert len(train) == 1197
    assert train < every


def test_accuracy_of_a_constant_answer_is_the_share_of_that_digit() -> None:
    split = digits_split(1)
    zeros = int((split.train.digits == 0).sum())
    # stratified: as many zeros are held out as are in the scans and not in training
    assert split.evaluate(Constant(torch.eye(10)[0])) == pytest.approx(100 * (178 - zeros) / 600)


def test_an_example_is_augmented_anew_each_time() -> None:
    train = digits_split(1).train
    example = train.load(3)
    first, second = train.augment(example)[0], train.augment(example)[0]
    assert first.shape == (1, 8, 8)
    assert first.dtype == torch.float32
    assert 0 <= first.min() <= first.max() <= 1
    assert not torch.equal(first, second)


def test_enlarged_digits_are_the_same_digits() -> None:
    small, large = digits_split(1).train, digits_split(1, 32).train
    assert np.array_equal(small.digits, large.digits)
    assert large.images.shape == (1197, 32, 32)


@pytest.mark.parametrize(("make", "count"), [(make_cnn, 13_706), (ByteModel, 170_560)])
def test_models_are_as_large_as_their_docstrings_say(make, count: int) -> None:
    model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{count:,}" in make.__doc__


def test_a_residual_network_has_the_layers_of_the_paper() -> None:
    for blocks, layers in ((3, 20), (5, 32)):
        network = ResidualNetwork(blocks, 16, 3)
        assert sum(isinstance(one, nn.Conv2d | nn.Linear) for one in network.modules()) == layers
    # He et al. 2016, table 6: 0.27 million for ResNet-20
    assert sum(p.numel() for p in ResidualNetwork(3, 16, 3).parameters()) == pytest.approx(0.27e6, rel=0.02)
    assert RESIDUAL.make_model()(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_a_stretch_of_text_and_the_same_one_byte_on() -> None:
    text = torch.arange(3 * CONTEXT, dtype=torch.uint8)
    data = StagedBytes(text)
    assert len(data) == 2  # the last byte has no successor
    inputs, targets = data[1]
    assert inputs.tolist() == list(range(CONTEXT, 2 * CONTEXT))
    assert targets.tolist() == list(range(CONTEXT + 1, 2 * CONTEXT + 1))


def test_text_is_split_by_file() -> None:
    split = text_split(1)
    total = sum(path.stat().st_size for path in library_files())
    assert 0.8 * total < len(split.train) * CONTEXT < total
    assert not any("test" in path.parts or "site-packages" in path.parts for path in library_files())


def test_bits_per_byte_of_knowing_nothing_is_eight() -> None:
    assert text_split(1).evaluate(Constant(torch.zeros(256))) == pytest.approx(math.log2(256))


def test_a_model_of_bytes_sees_only_what_came_before() -> None:
    model = ByteModel().eval()
    text = torch.randint(256, (1, CONTEXT))
    changed = text.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-5)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-5)
