"""Where an analysis is written: nothing that exists is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_echo.analysis.analyzer import check_new, free_path


def test_a_free_name_is_taken_as_it_is_and_later_ones_are_numbered(tmp_path: Path) -> None:
    taken = []
    for _ in range(3):
        path = free_path(tmp_path, "analysis.json")
        path.touch()
        taken.append(path.name)
    assert taken == ["analysis.json", "analysis_1.json", "analysis_2.json"]


def test_a_directory_that_is_not_there_has_all_names_free(tmp_path: Path) -> None:
    assert free_path(tmp_path / "new", "analysis.json") == tmp_path / "new" / "analysis.json"


def test_a_name_that_exists_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(
        ValueError, match=r"html must be a new file, got '.*page\.html', which exists: give another name, or remove"
    ):
        check_new(json=str(tmp_path / "other.json"), html=str(path), png=None)


def test_two_files_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="json and png must be different files, got 'same' for both"):
        check_new(json=str(tmp_path / "same"), html=None, png="same")
