"""Fixtures of the tests of this folder."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path):
    """Two folders of photographs, as good as: noise made smooth, so that compression has something to save."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            noise = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            noise.resize((160, 120), Image.Resampling.BICUBIC).save(tmp_path / "images" / name / f"{number}.jpg")
    return tmp_path / "images"
