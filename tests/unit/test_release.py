"""What a release says of itself: one version, one date, one address, in every file that has them."""

import datetime
import re
import sys
from pathlib import Path

import pytest
import yaml

import lightning_echo

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
SECTIONS = re.findall(r"^## (\S+) - (\S+)$", CHANGELOG, flags=re.MULTILINE)  # of releases, the newest first


def test_package_and_changelog_and_citation_have_the_same_version():
    assert {lightning_echo.__version__, SECTIONS[0][0], str(CITATION["version"])} == {PROJECT["version"]}


def test_changelog_and_citation_have_the_same_date_of_the_release():
    assert datetime.date.fromisoformat(SECTIONS[0][1]) == CITATION["date-released"]


def test_the_changelog_has_only_sections_of_releases_and_one_for_what_is_not_released():
    titles = re.findall(r"^## (.+)$", CHANGELOG, flags=re.MULTILINE)
    assert set(titles) <= {"Unreleased", *(f"{version} - {date}" for version, date in SECTIONS)}
    assert [date for _, date in SECTIONS] == sorted((date for _, date in SECTIONS), reverse=True)


@pytest.mark.parametrize("kind", ["Added", "Changed", "Fixed"])
def test_a_section_of_the_changelog_names_each_kind_of_change_once(kind):
    newest = CHANGELOG.split("\n## ")[1]
    assert re.findall(r"^### (.+)$", newest, flags=re.MULTILINE).count(kind) == 1


def test_the_citation_has_what_the_format_demands():
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)
    for reference in CITATION["references"]:
        assert {"type", "title", "authors", "year", "url"} <= set(reference)
        assert all({"given-names", "family-names"} == set(author) for author in reference["authors"])


@pytest.mark.parametrize("paper", ["1907.05550", "2007.06775", "2409.18749"])
def test_the_papers_are_cited(paper):
    assert [each for each in CITATION["references"] if paper in each["url"] and f"arXiv:{paper}" in str(each)]


def test_licence_and_authors_and_addresses_are_the_same_everywhere():
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert [each["name"] for each in PROJECT["authors"]] == [each["name"] for each in CITATION["authors"]]
    assert PROJECT["urls"]["Source"] == CITATION["repository-code"]
    assert PROJECT["urls"]["Documentation"] == CITATION["url"]
