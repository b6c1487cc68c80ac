"""The page says what the rows say, and nothing where there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu.page import RESULTS, is_evidence, page_of, take_over
from gpu.plan import ALONE, CACHE, CEILING, DECODES, FACTOR, PLAIN, SHARED, TENSORSOCKET
from gpu.rows import add_row, read_rows

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


def test_without_rows_it_says_that_nothing_was_measured(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "**None was measured.**" in page
    assert "##" not in page
    assert not is_evidence(tmp_path)


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


def test_the_ceiling_is_the_bound_where_it_is_lower_than_r(tmp_path: Path) -> None:
    found = goals(page_of(a_run(tmp_path, ceiling=4000.0, factor=3500.0)))
    assert found["speed-up with factor R, as a share of min(R, ceiling / plain)"] == ("0.875", "**no**")


def test_plain_counts_as_fast_as_its_loader_alone_since_short_epochs_cost_it_something(tmp_path: Path) -> None:
    a_run(tmp_path)
    add_row(tmp_path, "feed", network="resnet18", arm="loader alone", how="measured", R=5.0, images_per_second=1150.0)
    found = goals(page_of(tmp_path))
    assert found["speed-up with factor R, as a share of min(R, ceiling / plain)"] == ("0.8", "**no**")  # 4 of min(5, 5.2)
    assert found["prediction of *plain* is off by"] == ("0.0522", "yes")  # 1,090 for 1,150


def test_if_decoding_on_the_device_wins_the_answer_says_so(tmp_path: Path) -> None:
    assert "Decode on the device" not in page_of(a_run(tmp_path / "behind"))
    page = page_of(a_run(tmp_path / "ahead", decodes=5000.0))
    assert '`torchvision.io.decode_jpeg(device="cuda")` the training gets 5,000 images per second, plain 1,000' in page


def test_a_small_r_is_a_reason_not_to_echo(tmp_path: Path) -> None:
    assert "Do not echo here" in page_of(a_run(tmp_path, ratio=1.6))
    assert "Do not echo here" not in page_of(a_run(tmp_path / "large", ratio=2.1))


def test_failed_tests_and_parts_that_did_not_run_are_listed(tmp_path: Path) -> None:
    a_run(tmp_path)
    add_row(tmp_path, "tests", test="tests/gpu/a.py::test_a", outcome="passed", seconds=1.0)
    add_row(tmp_path, "tests", test="tests/gpu/a.py::test_b", outcome="failed", seconds=1.0, said="assert 1 == 2")
    add_row(tmp_path, "stages", stage="sharing", part=TENSORSOCKET, outcome="too long")
    page = page_of(tmp_path)
    assert "2 tests: 1 failed, 1 passed." in page
    assert "About this run" not in page
    assert "| tests/gpu/a.py::test_b | failed | assert 1 == 2 |" in page
    assert "| sharing | TensorSocket | too long |" in page
    assert "| accuracy | all of it | not asked for |" in page


def test_tests_that_fail_for_one_reason_are_one_row_wherever_in_the_code_it_was(tmp_path: Path) -> None:
    a_run(tmp_path)
    for name, outcome, said in (
        ("a", "failed", "x/loader.py:495: few workers"),
        ("b", "failed", "tests/t.py:9: few workers"),
        ("c", "failed", "tests/t.py:9: assert 1"),
        ("d", "error", "tests/t.py:9: few workers"),
        ("e", "failed", "x/loader.py:495: few workers"),
    ):
        add_row(tmp_path, "tests", test=name, outcome=outcome, seconds=1.0, said=said)
    section = page_of(tmp_path).split("## Is it right on a GPU?")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert rows == ["| a and 2 more | failed | few workers |", "| c | failed | assert 1 |", "| d | error | few workers |"]


def test_what_whoever_ran_it_wrote_stands_on_the_page(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "notes.md").write_text("It was warm.\n")
    assert "## About this run\n\nIt was warm.\n" in page_of(tmp_path)


def test_time_to_plains_last_accuracy(tmp_path: Path) -> None:
    a_run(tmp_path)
    for arm, accuracies in ((PLAIN, (0.1, 0.3, 0.5)), (FACTOR, (0.2, 0.6, 0.8))):
        for number, accuracy in enumerate(accuracies, 1):
            add_row(tmp_path, "accuracy", arm=arm, seed=1, clock_s=5.0 * number, steps=number, accuracy=accuracy)
    lines = [line.split(" | ") for line in page_of(tmp_path).splitlines() if line.startswith(("| plain | 1 ", "| factor R | 1 "))]
    assert [(line[6], line[7].rstrip(" |")) for line in lines] == [("0.5", "15"), ("0.8", "10")]


def test_rows_of_two_runs_on_one_kind_of_machine_are_joined(tmp_path: Path) -> None:
    first, second, results = a_run(tmp_path / "1"), tmp_path / "2", tmp_path / "results"
    add_row(first, "stages", stage="accuracy", part="plain, seed 1", outcome="not run")
    add_row(first, "stages", stage="accuracy", part="plain, seed 2", outcome="not run", said="the time was over")
    add_row(second, "stages", stage="accuracy", part="plain, seed 2", outcome="failed", said="a worker died")
    add_row(second, "machine", what="scale", value="full")
    add_row(second, "machine", what="card", value="a card")
    add_row(second, "feed", network="resnet18", arm="loader alone", how="measured", R=4.0)
    add_row(second, "accuracy", arm=PLAIN, seed=1, clock_s=5.0, steps=1, accuracy=0.5)
    add_row(second, "stages", stage="accuracy", part="plain, seed 1", outcome="ran")
    take_over([first, second], results)
    assert len(read_rows(results, "feed")) == len(read_rows(first, "feed"))
    assert len(read_rows(results, "accuracy")) == 1
    found = [(row["part"], row["outcome"], row["said"]) for row in read_rows(results, "stages")]
    assert found == [("plain, seed 1", "ran", ""), ("plain, seed 2", "failed", "a worker died")]


def test_rows_of_another_card_or_of_no_card_are_refused(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "1"), a_run(tmp_path / "2", card="another card")
    with pytest.raises(ValueError, match="a page must not mix machines, got rows of a card and another card"):
        take_over([first, second], tmp_path / "results")
    add_row(tmp_path / "3", "machine", what="card", value="none")
    with pytest.raises(ValueError, match="no rows that were measured on a GPU"):
        take_over([tmp_path / "3"], tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_cell_of_no_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="feed has no column speed"):
        add_row(tmp_path, "feed", speed=1.0)
