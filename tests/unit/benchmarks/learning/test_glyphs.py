"""The characters: pure functions of their index, kept in a file that is trusted by its digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learning import glyphs
from learning.glyphs import CHARACTERS, COUNT, GLYPHS, HELD_OUT, PIXELS, StagedGlyphs, make_glyph_cnn, render, rendered
from torch import nn

FEW = 60


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """A split of `FEW` characters, of which ten are held out."""
    made = rendered(FEW, tmp_path)
    monkeypatch.setattr(glyphs, "rendered", lambda: made)
    monkeypatch.setattr(glyphs, "COUNT", FEW)
    monkeypatch.setattr(glyphs, "HELD_OUT", 10)
    return made


class Says(nn.Module):
    """The same answer whatever comes; it keeps what it was asked."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.scores, self.asked = nn.Parameter(torch.eye(len(CHARACTERS))[label]), []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.asked.append(images)
        return self.scores.expand(len(images), -1)


def test_a_character_is_a_function_of_its_index_alone() -> None:
    first = [render(index) for index in (3, 4, 5)]
    again = [render(index) for index in (5, 4, 3)][::-1]
    for (image, label), (other, same) in zip(first, again, strict=True):
        assert np.array_equal(image, other)
        assert label == same
    assert len({image.tobytes() for image, _ in first}) == 3


def test_a_character_can_be_seen_and_fills_the_middle() -> None:
    images = np.stack([render(index)[0] for index in range(FEW)]).astype(float)
    assert images.shape == (FEW, PIXELS, PIXELS)
    middle, corner = images[:, 6:14, 6:14].mean(), images[:, :3, :3].mean()
    assert middle > 3 * corner
    assert images.max() == 255


def test_no_two_characters_have_one_label() -> None:
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 42
    labels = {render(index)[1] for index in range(400)}
    assert labels == set(range(42))


def test_sixty_thousand_are_left_to_train_on_in_one_pass() -> None:
    assert COUNT - HELD_OUT == 60_000 == GLYPHS.cached_examples
    assert 60_000 // GLYPHS.batch_size == 1875


def test_what_was_rendered_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = rendered(5, tmp_path)
    assert [label for _, label in map(render, range(5))] == labels.tolist()
    monkeypatch.setattr(glyphs, "render", None)  # whoever renders now fails
    kept_images, kept_labels = rendered(5, tmp_path)
    assert np.array_equal(images, kept_images)
    assert np.array_equal(labels, kept_labels)


@pytest.mark.parametrize("damage", ["cut short", "another pixel", "another file"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    images, labels = rendered(5, tmp_path)
    (path,) = tmp_path.iterdir()
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "another file":
        np.savez(path, something=images)
    else:
        with np.load(path) as kept:
            parts = dict(kept)
        parts["images"][2, 3, 4] ^= 1
        np.savez(path, **parts)
    for _ in range(2):  # the second time from the file
        again, labels_again = rendered(5, tmp_path)
        assert np.array_equal(images, again)
        assert np.array_equal(labels, labels_again)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_what_is_trained_on_is_not_evaluated_and_each_seed_holds_out_others(few) -> None:
    images, _ = few
    every = {image.tobytes() for image in images}
    held_out = []
    for seed in (1, 1, 2):
        split, asked = glyphs.glyphs_split(seed), Says(0)
        split.evaluate(asked)
        evaluated = (torch.cat(asked.asked)[:, 0] * 255).round().to(torch.uint8).numpy()
        held_out.append({image.tobytes() for image in evaluated})
        assert len(split.train) == FEW - 10
        assert held_out[-1] | {image.tobytes() for image in split.train.images} == every
        assert len(held_out[-1]) == 10
    assert held_out[0] == held_out[1] != held_out[2]


def test_accuracy_of_a_constant_answer_is_the_share_of_that_character(few) -> None:
    _, labels = few
    split = glyphs.glyphs_split(1)
    label = int(np.bincount(labels).argmax())
    there = int((labels == label).sum() - (split.train.labels == label).sum())
    assert split.evaluate(Says(label)) == pytest.approx(100 * there / 10)


def test_labels_belong_to_their_images(few) -> None:
    images, labels = few
    by_image = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    train = glyphs.glyphs_split(3).train
    for index in range(len(train)):
        image, label = train.load(index)
        assert by_image[np.array(image).tobytes()] == label


def test_a_character_is_augmented_anew_each_time_and_keeps_its_label() -> None:
    image, label = render(7)
    data = StagedGlyphs(image[None], np.array([label]))
    example = data.load(0)
    first, second = data.augment(example), data.augment(example)
    assert first[0].shape == (1, PIXELS, PIXELS)
    assert 0 <= first[0].min() <= first[0].max() <= 1
    assert not torch.equal(first[0], second[0])
    assert first[1] == second[1] == label


def test_the_model_is_as_large_as_its_docstring_says() -> None:
    count = sum(parameter.numel() for parameter in make_glyph_cnn().parameters())
    assert f"{count:,}" in make_glyph_cnn.__doc__
    assert make_glyph_cnn()(torch.zeros(2, 1, PIXELS, PIXELS)).shape == (2, len(CHARACTERS))
