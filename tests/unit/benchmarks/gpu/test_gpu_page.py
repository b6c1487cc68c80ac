"""The page says what the rows say, and nothing where there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu.page import RESULTS, is_evidence, page_of, take_over
from gpu.plan import ALONE, CACHE, CEILING, DECODES, FACTOR, PLAIN, SHARED, TENSORSOCKET
from gpu.rows import add_row

ROOT = Path(__file__).parents[4]
README = (ROOT / "README.md").read_text()


def a_run(folder: Path, card: str = "a card", ratio: float = 5.0, **images: float) -> Path:
    """Rows of a run: plain 1,000 images a second, and what ``images`` says."""
    rates = {"ceiling": 6000.0, "factor": 4600.0, "decodes": 3000.0} | images
    add_row(folder, "machine", what="scale", value="full")
    add_row(folder, "machine", what="card", value=card)
    add_row(folder, "feed", network="resnet18", arm="loader alone", how="measured", R=ratio, said="files")
    arms = {CEILING: rates["ceiling"], PLAIN: 1000.0, FACTOR: rates["factor"], DECODES: rates["decodes"], CACHE: 1333.0}
    for arm, rate in arms.items():
        idles = {
            "idle_in_the_profiled_epoch_EchoCallback": 0.70,
            "no_kernel_in_the_profiled_epoch_torch_profiler": 0.72 if arm == PLAIN else 0.75,
        }
        add_row(folder, "feed", network="resnet18", arm=arm, how="measured", images_per_second=rate, **idles)
    add_row(folder, "feed", network="resnet18", arm=PLAIN, how="predicted", images_per_second=1090.0)
    add_row(folder, "feed", network="resnet18", arm=FACTOR, how="predicted", images_per_second=2000.0)
    for how, rate, lost in ((SHARED, 3000.0, 0), (TENSORSOCKET, 3100.0, 256), (ALONE, 1100.0, None)):
        add_row(folder, "sharing", how=how, images_per_second_in_all=rate, lost=lost)
    return folder


def goals(page: str) -> dict[str, tuple[str, str]]:
    lines = re.findall(r"^\| (.+?) \| .+? \| (.+?) \| (yes|\*\*no\*\*|-) \|$", page, flags=re.MULTILINE)
    return {what: (found, met) for what, found, met in lines}


def test_the_page_of_the_site_is_that_of_the_committed_rows() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text() == page_of(RESULTS)


def test_the_readme_says_that_there_is_no_figure_exactly_as_long_as_there_is_none() -> None:
    assert ("Not measured on a GPU" in README) is not is_evidence(RESULTS)


def test_goals_are_computed_from_the_rows(tmp_path: Path) -> None:
    found = goals(page_of(a_run(tmp_path)))
    assert found["speed-up with factor R, as a share of min(R, ceiling / plain)"] == ("0.92", "yes")  # 4.6 of min(5, 6)
    assert found["prediction of *plain* is off by"] == ("0.09", "yes")
    assert found["prediction of *factor R* is off by"] == ("0.565", "**no**")
    assert found["prediction of *cache of a quarter* is off by"] == ("not measured", "-")
    assert found["idle fraction and share without a kernel differ, *plain*, by"] == ("0.02", "yes")
    assert found["idle fraction and share without a kernel differ, *factor R*, by"] == ("0.05", "**no**")
    assert found["images per second that share, over *each by itself*"] == ("2.73", "**no**")
    assert found["images per second that share, over *TensorSocket*"] == ("0.968", "yes")
    assert found["images lost in a shared pass"] == ("0", "yes")


def test_rows_of_another_card_or_of_no_card_are_refused(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "1"), a_run(tmp_path / "2", card="another card")
    with pytest.raises(ValueError, match="a page must not mix machines, got rows of a card and another card"):
        take_over([first, second], tmp_path / "results")
    add_row(tmp_path / "3", "machine", what="card", value="none")
    with pytest.raises(ValueError, match="no rows that were measured on a GPU"):
        take_over([tmp_path / "3"], tmp_path / "results")
    assert not (tmp_path / "results").exists()
